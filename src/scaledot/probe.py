"""The function under test: how it is called, what is known of it, and how answers are written.

A `Subject` wraps anybody's attention: it knows which of sdpa's parameters the function takes and by
what names, turns layouts, and reads weights off outputs by giving one-hot values.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Status = Literal["wrong", "differs", "ok", "unsupported", "unjudged"]

LAYOUTS = ("bhsd", "bshd")
"""(batch, heads, length, dim) as torch, or (batch, length, heads, dim) as FlashAttention."""

DTYPES: dict[str, torch.dtype] = {
    x: getattr(torch, x) for x in ("float32", "bfloat16", "float16", "float64")
}
SEED = 20260714


@dataclass(frozen=True)
class Reading:
    """Numbers, and how they come about: `.8808 .1192` and `softmax(4/√4, 0)`."""

    value: str
    how: str = ""


@dataclass(frozen=True)
class Property:
    """One property of an attention function and what was found.

    status: "ok", "wrong", "differs" (by convention), "unsupported", or "unjudged" where an earlier
    mistake leaves nothing to judge. result says it in one line. Of what is not ok: the input, what
    was expected, what came and the usual cause. error and bound where there is a number to hold
    against a bound.
    """

    name: str
    status: Status
    result: str
    input: str | None = None
    expected: Reading | None = None
    came: Reading | None = None
    cause: str | None = None
    error: float | None = None
    bound: float | None = None


# What an answer is


class Skip(Exception):
    """Nothing to judge: (status, why)."""

    def __init__(self, status: Status, why: str) -> None:
        super().__init__(why)
        self.status: Status = status


class Raised(Exception):
    """The function raised; the message is the exception's one line."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        text = " ".join(str(error).split("\n\n")[0].split())
        text = text[:240] + ("…" if len(text) > 240 else "")
        super().__init__(f"{type(error).__name__}: {text}" if text else type(error).__name__)


MISTAKES = (NameError, AttributeError, LookupError, ArithmeticError, SystemExit, SyntaxError)
"""Exceptions that nobody raises to refuse an input."""


def ok(result: str, **more: Any) -> Property:
    return Property("", "ok", result, **more)


def wrong(result: str, **more: Any) -> Property:
    return Property("", "wrong", result, **more)


def differs(result: str, **more: Any) -> Property:
    return Property("", "differs", result, **more)


class Shape(NamedTuple):
    """What a factor may be taken from."""

    heads: int
    d_k: int
    queries: int
    keys: int


@dataclass(frozen=True)
class Rule:
    """A factor applied to q·k, and what to say of it."""

    factor: Callable[[Shape], float]
    result: str
    shown: str  # what q·k = 4 becomes in the smallest input
    cause: str = ""


RIGHT = Rule(lambda n: n.d_k**-0.5, "divides by √d_k", "4/√4")
# The function


_NAMES = {
    "attn_mask": ("attn_mask", "mask", "attention_mask"),
    "dropout_p": ("dropout_p", "dropout"),
    "is_causal": ("is_causal", "causal"),
    "scale": ("scale", "softmax_scale", "sm_scale", "scaling"),
    "enable_gqa": ("enable_gqa",),
    "softcap": ("softcap", "soft_cap", "logit_cap", "logits_soft_cap"),
}
_DEFAULTS = {
    "attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False,
    "softcap": None,
}  # fmt: skip


class Subject:
    """The function under test: how to call it, and what is known of it so far."""

    def __init__(
        self,
        fn: Callable[..., Any],
        layout: str,
        device: str | torch.device,
        dtype: str | torch.dtype,
    ) -> None:
        if not callable(fn):
            raise TypeError(f"fn is {type(fn).__name__}: pass a function")
        if layout not in LAYOUTS:
            raise ValueError(f"layout is {layout!r}: pass one of {', '.join(LAYOUTS)}")
        name = str(dtype).removeprefix("torch.")
        if name not in DTYPES:
            raise ValueError(f"unknown dtype {name!r}: pass one of {', '.join(DTYPES)}")
        self.fn, self.layout, self.dtype = fn, layout, DTYPES[name]
        try:
            self.device = torch.empty(0, device=device).device
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"device {str(device)!r} cannot be used: {reason}") from None
        self.names, self.required = _parameters(fn)
        # What is learned on the way.
        self.wrong: set[str] = set()
        self.input: str | None = None
        self.form = "own"  # of the output: "own", "transposed", "merged"
        self.square = False  # takes only as many queries as keys
        self.full_masks = False  # takes only masks of (batch, heads, queries, keys)
        self.rule: Rule | None = RIGHT
        self.hides: Literal["true shows", "true hides", "minus infinity"] | None = None
        self.floats = True  # takes float masks
        self.even = True  # equal scores get equal weights
        self.linear = True  # logits are in proportion to q·k
        self.takes_causal = False
        self.shift = 0  # causal: keys beyond the query's own that it sees
        exact = self.dtype in (torch.float32, torch.float64)
        self.tolerance = 2e-3 if exact else 2e-2

    def needs(self, *parameters: str) -> None:
        """Go on only if the function takes these parameters."""
        for name in parameters:
            if name not in self.names:
                raise Skip("unsupported", f"no parameter {name}")

    def needs_even(self) -> None:
        """Go on only if equal scores get equal weights."""
        if not self.even:
            raise Skip("unjudged", "see scale")

    def needs_linear(self) -> None:
        """Go on only if a factor says how logits come from q·k."""
        if not self.linear:
            raise Skip("unjudged", "see scale")

    def needs_right(self, *properties: str) -> None:
        """Go on only if these properties are not wrong."""
        for name in properties:
            if name in self.wrong:
                raise Skip("unjudged", f"see {name}")

    def random(self, *shape: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(SEED + seed)
        x = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return x.to(self.device, self.dtype)

    def inputs(
        self, heads: int, queries: int, keys: int, dim: int, batch: int = 1, seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Random query, key, value."""
        lengths = enumerate((queries, keys, keys), 3 * seed)
        q, k, v = (self.random(batch, heads, n, dim, seed=s) for s, n in lengths)
        return q, k, v

    def call(
        self, query: Tensor, key: Tensor, value: Tensor, *, copy: bool = True, **arguments: Any
    ) -> Tensor:
        """The output as (batch, heads, queries, value_dim). Raises Raised."""
        batch, heads, queries, _ = query.shape
        keys = key.shape[2]
        mask = arguments.get("attn_mask")
        if self.square and queries < keys:
            query = torch.cat([query, query[:, :, -1:].expand(-1, -1, keys - queries, -1)], 2)
            if mask is not None and mask.shape[-2] == queries:
                last = mask[..., -1:, :].expand(*mask.shape[:-2], keys - queries, keys)
                mask = torch.cat([mask, last], -2)
        if mask is not None:
            if self.full_masks:
                mask = mask.expand(batch, heads, query.shape[2], keys)
            arguments["attn_mask"] = mask.clone() if copy else mask
        out = self._run(query, key, value, copy, arguments)
        if self.form == "merged" and out.dim() == 3:
            out = out.unflatten(-1, (heads, -1))
        if self.form != "own":
            out = out.transpose(1, 2)
        expected = (batch, heads, query.shape[2], value.shape[-1])
        if out.shape != expected:
            error = ValueError(f"output has shape {tuple(out.shape)}, expected {expected}")
            raise Raised(error)
        return out[:, :, :queries]

    def _run(
        self, query: Tensor, key: Tensor, value: Tensor, copy: bool, arguments: dict[str, Any]
    ) -> Tensor:
        """The function's own answer, in the axes of torch."""
        swap = self.layout == "bshd"
        inputs = (query, key, value)
        if copy:  # a function may write into what it is given
            inputs = tuple(x.clone() for x in inputs)  # type: ignore[assignment]
        named = {**self.required, **{self.names.get(k, k): v for k, v in arguments.items()}}
        try:
            out = self.fn(*(x.transpose(1, 2) if swap else x for x in inputs), **named)
        except (Exception, SystemExit) as error:
            raise Raised(error) from error
        if isinstance(out, (tuple, list)) and out:
            out = out[0]
        if not isinstance(out, Tensor):
            raise Raised(TypeError(f"returned {type(out).__name__}, not a tensor"))
        return out.transpose(1, 2) if swap and out.dim() == 4 else out

    def weights(
        self,
        scores: Sequence[float],
        *,
        queries: int = 1,
        heads: int = 2,
        dim: int = 4,
        more: str = "",
        **arguments: Any,
    ) -> Tensor:
        """The weights (heads, queries, keys) of queries that all have these q·k: the values are
        one-hot, so the output is the weights."""
        keys = len(scores)
        self.describe(heads, dim, queries, keys, scores_text(scores), more, **arguments)
        query = torch.ones(1, heads, queries, dim, device=self.device, dtype=self.dtype)
        key = torch.tensor(scores, dtype=torch.float64)[:, None] / dim
        key = key.expand(1, heads, keys, dim).to(self.device, self.dtype)
        value = torch.eye(keys, dim, device=self.device, dtype=self.dtype)
        out = self.call(query, key, value.expand(1, heads, keys, dim), **arguments)
        return out[0, :, :, :keys].double().cpu()

    def describe(
        self, heads: int, dim: int, queries: int, keys: int, *more: str, **arguments: Any
    ) -> None:
        """Note the input about to be tried, as it is shown where something is found."""
        parts = [f"{heads} heads", f"d_k {dim}", counted(queries, "query", "queries")]
        parts += [counted(keys, "key", "keys"), *(x for x in more if x)]
        for name, x in arguments.items():
            if not isinstance(x, Tensor):
                parts.append(f"{name}={x}")
            elif name == "attn_mask" and x.shape[:-1].numel() == 1:
                parts.append(f"mask {row_text(x)}")
        self.input = ", ".join(parts)

    def tensor(self, *rows: Sequence[float] | Sequence[bool]) -> Tensor:
        """A mask of queries × keys: bool, or float in the dtype of the inputs."""
        mask = torch.tensor(rows, device=self.device)
        return mask if mask.dtype == torch.bool else mask.to(self.dtype)

    def hiding(self, allowed: Tensor) -> Tensor:
        """A mask that shows what is allowed, in the form this function is known to read."""
        self.needs("attn_mask")
        if self.hides == "true shows":
            return allowed
        if self.hides == "true hides":
            return ~allowed
        if self.hides == "minus infinity":
            zero = torch.zeros(allowed.shape, device=self.device, dtype=self.dtype)
            return zero.masked_fill(~allowed, -math.inf)
        for name in ("mask polarity", "additive mask"):
            self.needs_right(name)
        raise Skip("unsupported", "no mask is taken: see mask polarity")

    def close(self, a: Tensor, b: Tensor) -> bool:
        """Equal within what the dtype can tell; NaN equals nothing."""
        a, b = a.double().cpu(), b.double().cpu()
        return bool(((a - b).abs() <= self.tolerance * (1 + b.abs())).all())

    def same(self, a: float, b: float) -> bool:
        """Whether two factors are one: within 2 %, which tells the nearest rules apart."""
        exact = self.dtype in (torch.float32, torch.float64)
        return math.isclose(a, b, rel_tol=0.02, abs_tol=1e-3 if exact else 5e-3)

    def near(self, found: Tensor, *expected: float) -> bool:
        return self.close(found, torch.tensor(expected, dtype=torch.float64))


def _parameters(fn: Callable[..., Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """({parameter of sdpa: the function's own name for it}, {what must be passed: its default})."""
    five = [x for x in _NAMES if x != "softcap"]
    try:
        signature = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # written in C: torch's own
        return {x: x for x in five}, {}
    kinds = inspect.Parameter
    positional = [
        p for p in signature.values()
        if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip
    if len(positional) < 3 and not any(p.kind is kinds.VAR_POSITIONAL for p in signature.values()):
        raise TypeError(
            f"{name_of(fn)} takes {counted(len(positional), 'positional argument')}: "
            "expected query, key and value"
        )
    first = {p.name for p in positional[:3]}
    names, required = {}, {}
    for name, spellings in _NAMES.items():
        for spelling in spellings:
            p = signature.get(spelling)
            if p is None or spelling in first or p.kind is kinds.POSITIONAL_ONLY:
                continue
            names[name] = spelling
            if p.default is p.empty:
                required[spelling] = _DEFAULTS[name]
            break
    for p in signature.values():
        if p.name in first or p.name in names.values() or p.default is not p.empty:
            continue
        if p.kind is kinds.VAR_KEYWORD:
            names = {x: x for x in five} | names
        elif p.kind is not kinds.VAR_POSITIONAL:
            raise TypeError(
                f"{name_of(fn)} needs {p.name!r}, which check cannot give: wrap it in a function "
                "of query, key and value"
            )
    return names, required


def name_of(fn: Callable[..., Any]) -> str:
    own = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    module = getattr(fn, "__module__", None) or type(fn).__module__
    return f"{module}:{own}"


# How numbers are written


def counted(n: int, one: str, many: str | None = None) -> str:
    return f"{n} {one}" if n == 1 else f"{n} {many or one + 's'}"


def number(x: float) -> str:
    """`4`, `−1,004`, `0.25`, `∞`"""
    if math.isnan(x):
        return "NaN"
    text = "∞" if math.isinf(x) else f"{abs(x):,.0f}" if x == round(x) else f"{abs(x):.4g}"
    return f"−{text}" if x < 0 else text


def weight(x: float) -> str:
    """Four digits, never rounded to 0 or 1: `.8808`, `<.0001`, `1`"""
    if math.isnan(x) or math.isinf(x) or not 0 < x < 1:
        return number(x) if not abs(x) < 10 or x == round(x) else f"{x:.4f}".replace("-", "−")
    if x < 5e-5:
        return "<.0001"
    return ">.9999" if x >= 0.99995 else f"{x:.4f}".removeprefix("0")


def row_text(x: Tensor) -> str:
    """One row: weights, a boolean or an additive mask."""
    values = x.flatten().tolist()
    if x.dtype == torch.bool:
        return " ".join(map(str, values))
    return " ".join(number(v) for v in values)


def digits(x: Tensor) -> str:
    return " ".join(weight(v) for v in x.flatten().tolist())


def scores_text(scores: Sequence[float]) -> str:
    """`q·k = 4 and 0`"""
    if len(set(scores)) == 1:
        return f"q·k = {number(scores[0])}"
    *most, last = map(number, scores)
    return f"q·k = {', '.join(most)} and {last}"


def softmax(*logits: float) -> Tensor:
    return torch.tensor(logits, dtype=torch.float64).softmax(0)


def sees(keys: Sequence[int]) -> str:
    """`no key`, `key 0`, `keys 0 and 2`"""
    if not keys:
        return "no key"
    if len(keys) == 1:
        return f"key {keys[0]}"
    return f"keys {', '.join(map(str, keys[:-1]))} and {keys[-1]}"


def error_text(x: float) -> str:
    """`3.1e-7`"""
    if not math.isfinite(x):
        return number(x)
    mantissa, _, exponent = f"{x:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def bounded(error: float, bound: float) -> str:
    return f"max error {error_text(error)}, bound {error_text(bound)}"
