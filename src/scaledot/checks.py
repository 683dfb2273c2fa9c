"""Every argument check and every error text of an attention problem.

`problem` turns what a caller passed into one canonical form, four-dimensional views and plain
numbers, so that the definition and every kernel read the same thing. Nothing is guessed: whatever
has two readings raises and names both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from scaledot import ScaledotError as ScaledotError


@dataclass(frozen=True)
class Problem:
    """A checked attention problem: the inputs as four-dimensional views, nothing copied.

    `query` is (batch, heads, queries, dim); `key` (batch, kv_heads, keys, dim); `value`
    (batch, kv_heads, keys, value_dim) or None. Head h reads kv head h // (heads // kv_heads).
    """

    query: Float[Tensor, "batch heads queries dim"]
    key: Float[Tensor, "batch kv_heads keys dim"]
    value: Float[Tensor, "batch kv_heads keys value_dim"] | None
    scale: float
    softcap: float | None
    sinks: Float[Tensor, " heads"] | None
    batch_shape: tuple[int, ...]
    has_heads: bool

    @property
    def group(self) -> int:
        """Query heads that share one key and value head."""
        return self.query.shape[1] // max(self.key.shape[1], 1)

    @property
    def plain(self) -> bool:
        """Whether the caller's own leading axes are (batch, heads), so `restore` does nothing."""
        return self.has_heads and len(self.batch_shape) == 1

    def restore(self, x: Tensor) -> Tensor:
        """Give (batch, heads, …) back in the caller's own leading axes."""
        if not self.has_heads:
            return x[0, 0]
        return x.reshape(*self.batch_shape, *x.shape[1:])


def problem(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Problem:
    """Check an attention problem's arguments and view them in canonical form.

    Raises: TypeError for integer or complex tensors and mixed dtypes, ValueError for shapes that
    do not fit, each naming the argument, what came and what to pass.
    """
    if sinks is None and same_axes(query, key, value):
        assert isinstance(query, Tensor)
        dim = query.shape[3]
        return Problem(
            query, key, value, _scale(scale, dim), soft_cap(softcap), None, query.shape[:1], True
        )
    named = {"query": query, "key": key} | ({"value": value} if value is not None else {})
    for name, x in named.items():
        tensor(name, x)
        if not x.is_floating_point():
            raise TypeError(f"{name} is {_dtype(x)}: attention needs float tensors")
        if x.dim() < 2:
            raise ValueError(
                f"{name} has shape {_shape(x)}: expected (…, heads, length, dim), "
                "at least 2 dimensions"
            )
        if x.dtype != query.dtype:
            raise TypeError(
                f"query is {_dtype(query)}, {name} is {_dtype(x)}: "
                "they must have one dtype outside autocast"
            )
        if x.device != query.device:
            raise ValueError(
                f"query is on {query.device}, {name} on {x.device}: move them to one device"
            )
        if x.dim() != query.dim() and 2 in (x.dim(), query.dim()):
            raise ValueError(
                f"query has {query.dim()} dimensions, {name} has {x.dim()}: they must be equal, "
                "or each at least 3"
            )
    dim = query.shape[-1]
    if key.shape[-1] != dim:
        raise ValueError(f"q has d_k {dim}, k has {key.shape[-1]}: they must be equal")
    if dim == 0:
        raise ValueError("d_k is 0: q and k need at least one component")
    if value is not None and value.shape[-2] != key.shape[-2]:
        raise ValueError(f"k has {key.shape[-2]} keys, v has {value.shape[-2]}: they must be equal")

    has_heads = query.dim() > 2
    if not has_heads:
        query, key = query[None, None], key[None, None]
        value = value[None, None] if value is not None else None
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if value is not None and value.shape[-3] != kv_heads:
        if 1 not in (value.shape[-3], kv_heads):
            raise ValueError(f"k has {kv_heads} heads, v has {value.shape[-3]}: they must be equal")
        kv_heads = max(kv_heads, value.shape[-3])
    if heads == 1 and kv_heads > 1:
        heads = kv_heads
    if kv_heads != heads and kv_heads != 1:
        if kv_heads == 0 or heads % kv_heads:
            raise ValueError(
                f"q has {heads} heads, k has {kv_heads}: the first must be a multiple of the second"
            )
        if not enable_gqa:
            raise ValueError(
                f"q has {heads} heads, k has {kv_heads}: pass enable_gqa=True "
                f"to let {heads // kv_heads} query heads share a kv head"
            )
    tensors = [query, key] + ([value] if value is not None else [])
    try:
        batch_shape = torch.broadcast_shapes(*(x.shape[:-3] for x in tensors))
    except RuntimeError:
        shapes = ", ".join(f"{n} {_shape(x)}" for n, x in zip("qkv", tensors, strict=False))
        raise ValueError(f"batch axes do not fit: {shapes}; each must be equal or 1") from None
    query = _canonical(query, batch_shape, heads)
    key = _canonical(key, batch_shape, kv_heads)
    value = _canonical(value, batch_shape, kv_heads) if value is not None else None
    return Problem(
        query, key, value, _scale(scale, dim), soft_cap(softcap), _sinks(sinks, heads, query),
        tuple(batch_shape), has_heads,
    )  # fmt: skip


def same_axes(query: Tensor, key: Tensor, value: Tensor | None) -> bool:
    """Whether these are float tensors of one dtype and device, of four axes that need no broadcast:
    the common case, which need not take the time of every check."""
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        return False
    q, k = query.shape, key.shape
    fit = len(q) == 4 and q[3] != 0
    if q != k:
        fit = fit and len(k) == 4 and q[:2] == k[:2] and q[3] == k[3]
    v = value.shape
    return (
        fit
        and (k == v or (len(v) == 4 and k[:3] == v[:3]))
        and query.dtype == key.dtype == value.dtype
        and query.is_floating_point()
        and query.device == key.device == value.device
    )


def whole(name: str, value: object, least: int = 1) -> int:
    """A whole number of at least `least`.

    Raises: TypeError for anything else, ValueError for a smaller one.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is {value!r}: pass a whole number")
    number = value.__index__()
    if number < least:
        raise ValueError(f"{name} is {number}: pass at least {least}")
    return number


def tensor(name: str, x: object) -> None:
    """Raise TypeError if x is no tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch tensor, got {type(x).__name__}")


def _canonical(x: Tensor, batch_shape: torch.Size, heads: int) -> Tensor:
    x = x.expand(*batch_shape, heads, *x.shape[-2:])
    if len(batch_shape) == 1:
        return x
    # Several batch axes whose strides do not merge are the one case that copies.
    return x.reshape(math.prod(batch_shape), heads, *x.shape[-2:])


def _scale(scale: float | None, dim: int) -> float:
    if scale is None:
        return 1 / math.sqrt(dim)
    value = _number("scale", scale)
    if not math.isfinite(value):
        raise ValueError(f"scale is {value}: pass a finite number, or None for 1/√d_k")
    return value


def _number(name: str, value: object) -> float:
    if torch.is_grad_enabled() and isinstance(value, Tensor) and value.requires_grad:
        raise TypeError(f"{name} requires grad, and its gradient would be lost: pass a number")
    try:
        if isinstance(value, (str, bytes, bool)):
            raise TypeError
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}") from None


def _sinks(sinks: Tensor | None, heads: int, query: Tensor) -> Tensor | None:
    if sinks is None:
        return None
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
        raise TypeError("sinks must be a float tensor with one logit a head")
    if sinks.shape != (heads,):
        raise ValueError(f"sinks has shape {_shape(sinks)}: expected ({heads},), one logit a head")
    if sinks.device != query.device:
        raise ValueError(f"query is on {query.device}, sinks on {sinks.device}: move them together")
    return sinks


def soft_cap(softcap: float | None) -> float | None:
    """Check a soft-cap. Raises TypeError for what is no number, ValueError unless it is above 0."""
    if softcap is None:
        return None
    value = _number("softcap", softcap)
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"softcap is {value:g}: pass a finite number above 0, or None for no cap")
    return value


def dropout(p: float) -> float:
    """Check a dropout probability. Raises ValueError outside [0, 1)."""
    value = _number("dropout_p", p)
    if not 0 <= value < 1:
        raise ValueError(f"dropout_p is {value:g}: pass a probability in [0, 1)")
    return value


def factors(factors: object) -> tuple[float, ...]:
    """Check scale factors: one finite number or more."""
    given = factors if isinstance(factors, Sequence) and not isinstance(factors, str) else None
    if given is None:
        raise TypeError(f"factors must be a list of numbers, got {type(factors).__name__}")
    values = tuple(_number("a factor", x) for x in given)
    if not values or not all(map(math.isfinite, values)):
        raise ValueError(f"factors is {factors}: pass one finite number or more, as (0.5, 1, 2)")
    return values


def window(window: int | tuple[int, int] | None) -> tuple[int | None, int | None]:
    """Keys to the left and right of a query's own that a window shows; None is unbounded.

    An integer W is causal: W keys, the query's own included (Hugging Face's meaning). A pair
    (left, right) counts besides the query's own key, −1 unbounded (FlashAttention's meaning).
    """
    if window is None:
        return None, None
    if isinstance(window, bool):
        raise TypeError("window must be an integer or a pair (left, right), got bool")
    if isinstance(window, int):
        if window < 1:
            raise ValueError(
                f"window is {window}: pass at least 1, the query's own key; "
                "a pair (left, right) counts the keys besides it"
            )
        return window - 1, 0
    try:
        left, right = window
        integers = all(isinstance(w, int) and not isinstance(w, bool) for w in (left, right))
    except (TypeError, ValueError):
        integers = False
    if not integers:
        raise TypeError(f"window must be an integer or a pair (left, right), got {window!r}")
    if left < -1 or right < -1:
        raise ValueError(f"window is {window}: each side must be at least 0, or −1 for unbounded")
    return (None if left == -1 else left), (None if right == -1 else right)


def causal(is_causal: bool | str | None, queries: int, keys: int) -> str | None:
    """The causal alignment asked for: "top_left", "bottom_right" or None for no causality."""
    if is_causal is None or is_causal is False:
        return None
    if is_causal in ("top_left", "bottom_right"):
        return str(is_causal)
    if is_causal is True:
        if queries == keys:
            return "top_left"
        raise ValueError(
            f"is_causal=True with {queries} queries and {keys} keys has two meanings: pass "
            'is_causal="top_left" (query i sees keys 0…i, as PyTorch) or "bottom_right" '
            "(the last query sees every key, as FlashAttention and every KV cache)"
        )
    raise ValueError(f'is_causal is {is_causal!r}: pass True, False, "top_left" or "bottom_right"')


def alignment(queries: int, keys: int, what: str) -> None:
    """Raise if lengths differ, so that `what` would need an alignment."""
    if queries != keys:
        raise ValueError(
            f"{what} with {queries} queries and {keys} keys has two meanings: add "
            'is_causal="top_left" or "bottom_right"'
        )


def mask_dtype(mask: Tensor, name: str) -> None:
    """Check that a tensor mask is one, boolean or additive. Raises TypeError."""
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"{name} must be a bool or float tensor or scaledot.Mask, got {type(mask).__name__}"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f'{name} is {_dtype(mask)}: pass bool (True means "may attend") '
            "or float (added to the scores)"
        )


def mask_axes(mask: Tensor, query_dim: int, batch: int, heads: int) -> None:
    """Check that a tensor mask's axes have one reading. Raises ValueError where they have two."""
    if mask.dim() == 3 and query_dim == 4 and batch == heads > 1 and mask.shape[0] == batch:
        raise ValueError(
            f"attn_mask {_shape(mask)} with {batch} batches and {heads} heads has two meanings: "
            "pass mask[None] for one mask a head or mask[:, None] for one a batch"
        )


def mask_values(allowed: Tensor | None, bias: Tensor | None) -> None:
    """Check that a mask's values say what they seem to mean. Raises ValueError.

    It reads every value, so only what shows all n×n calls it.
    """
    if bias is not None and bias.any() and ((bias == 0) | (bias == 1)).all():
        raise ValueError(
            "mask is float and holds only 0 and 1, like a boolean mask: pass mask.bool()"
        )
    if allowed is None or not allowed.shape[-2] == allowed.shape[-1] > 1:
        return
    # Each query but the last sees something, none sees itself or an earlier key.
    if allowed[..., :-1, :].any(-1).all() and not allowed.tril().any():
        raise ValueError(
            "mask shows every query later keys only, like a causal mask inverted: "
            'True means "may attend", pass ~mask'
        )


def mask_shape(mask: Tensor, expected: tuple[int, ...]) -> ValueError:
    """The error for a tensor mask that does not broadcast."""
    names = ("batch", "heads", "queries", "keys")[-len(expected) :]
    if len(expected) > 4:
        names = ("…", *names)
    return ValueError(
        f"attn_mask has shape {_shape(mask)}: expected {expected} or axes of 1 ({', '.join(names)})"
    )


def no_structure(kind: str) -> ValueError:
    """The error for a tensor mask where only a symbolic one makes the work linear."""
    return ValueError(
        f"attn_mask is a dense {kind} mask, which has no structure to make score moments linear: "
        "pass scaledot.Mask(causal, window, lengths, keys, segments), or take score_mean and "
        "score_var from attention(…, return_stats=True)"
    )


def not_linear(name: str) -> ValueError:
    """The error for a moment that is linear only where all queries see the same keys."""
    return ValueError(
        f"{name}=True needs every query to see the same keys: it is not linear in the length "
        "under causality, a window or segments"
    )


def _shape(x: Tensor) -> str:
    return str(tuple(x.shape))


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
