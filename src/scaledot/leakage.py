"""Does a model look where it may not? Change a token, and see which outputs move.

These need no knowledge of the model's attention: `future_leak` changes a later token, and what
stands before it must not move; `document_leak` changes one packed document, and the others must
not. Tolerance: docs/maths.md#masks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from scaledot.checks import ScaledotError

ROUNDING = 8
"""An output that moves by no more than this many eps of its dtype, of the largest output, may have
been rounded otherwise."""

_MARGIN = 4
"""How many times the movement seen where rounding alone differs is put down to rounding."""


@dataclass(frozen=True)
class Leak:
    """Whether outputs moved that may not.

    kind: "future" or "documents". found: they did, by more than rounding does; False where the
    model is not deterministic, for nothing can be said then.
    movement: the largest, as a share of the largest output, ≥ 0. tolerance: what rounding explains.
    repeat: the movement between two runs of one input. deterministic: that was rounding.
    changed: the position (or document) whose change moved most. first: the first output position
    (or document) that moved by more than the tolerance; None for none. distance: how many tokens
    (or documents) lie between it and the change. tested: every position (or document) changed.
    output: the name of the output that was compared.
    """

    kind: Literal["future", "documents"]
    found: bool
    movement: float
    tolerance: float
    repeat: float
    deterministic: bool
    changed: int
    first: int | None
    tested: tuple[int, ...]
    output: str

    @property
    def distance(self) -> int | None:
        return None if self.first is None else abs(self.changed - self.first)


def future_leak(
    model: nn.Module,
    inputs: Mapping[str, Any] | Tensor,
    *,
    positions: Sequence[int] | None = None,
) -> Leak:
    """Change a token; the outputs before it must not move.

    inputs: what the model is called with, by name, or its token ids alone, (batch, length). The
    tokens of a decoder are changed where it has one. positions: where, from 1; the last, and at
    three, two and one quarters of the length unless given. Padding is neither changed nor compared.

    The model runs in eval mode, without gradients or a cache, and is put back: three runs, one of
    them on twice the batch, and one a position. A changed token becomes another of the text's, or
    of the vocabulary, no special one.

    A model that gives two outputs for one input (dropout left on, sampling) is reported so and not
    accused. tolerance is `ROUNDING` eps of the output's dtype, or 4 times the movement seen when
    only rounding differs (the same input twice, and beside a copy of itself where the inputs can be
    doubled), if that is larger.
    A bidirectional model leaks by design: found is a fact, no verdict.

    Raises: ScaledotError where there are no token ids, no second token, or no output by position;
    ValueError for positions outside the text.
    Source: docs/maths.md#masks.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    >>> leak = future_leak(model, torch.tensor([[1, 5, 3, 8]]))
    >>> leak.found, leak.movement, leak.tested
    (False, 0.0, (1, 2, 3))
    """
    given, name = _tokens(model, inputs)
    ids = given[name]
    length = ids.shape[1]
    real = _real(given, name, ids)
    if positions is None:
        positions = sorted({length - 1, 3 * length // 4, length // 2, length // 4} - {0})
    if any(not 0 < p < length for p in positions):
        raise ValueError(f"positions are {list(positions)}: pass some from 1 to {length - 1}")
    positions = [p for p in positions if bool((real[:, p] & real[:, :p].any(-1)).any())]
    if not positions:
        raise ScaledotError("a leak from later tokens needs a text of two tokens or more")
    other = _others(model, ids)
    with resting(model):
        plain, output = _run(model, given, name, ids)
        _by_position(plain, output, ids)
        size = _size(plain, real)
        repeat, noise = _noise(model, given, name, ids, plain, real, size)
        moved = {}
        for p in positions:
            changed = ids.clone()
            here = real[:, p]
            changed[here, p] = other[here, p]
            again, _ = _run(model, given, name, changed)
            moved[p] = _movement(plain, again, real & here[:, None], size)[:p]
    return _leak("future", moved, repeat, noise, plain.dtype, output)


def document_leak(
    model: nn.Module,
    documents: Sequence[Sequence[int]],
    inputs: Callable[[list[list[int]]], Mapping[str, Any]] | None = None,
) -> Leak:
    """Pack documents into one row, change one; the outputs of the others must not move.

    documents: token ids, two or more lists. inputs: from documents to what the model is called
    with; unless given, one row of input_ids with position_ids that begin again at each document,
    and no attention_mask, which is how transformers' models know a packed row.
    Each document is changed in turn, every token of it; the others' lengths and places stay.

    Runs, tolerance and errors as `future_leak`. In the result, positions are document numbers.
    Source: docs/maths.md#masks.

    >>> class Text(nn.Embedding):
    ...     def forward(self, input_ids, position_ids):
    ...         return super().forward(input_ids)
    >>> document_leak(Text(9, 4), [[5, 1, 4], [8, 7, 6, 3]]).found
    False
    """
    if len(documents) < 2 or not all(len(d) for d in documents):
        raise ScaledotError("a leak between documents needs two of them or more, none empty")
    build = _packed if inputs is None else inputs
    texts = [list(d) for d in documents]
    if not all(isinstance(token, int) for text in texts for token in text):
        raise TypeError("documents are lists of token ids, whole numbers: tokenize the texts first")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def given_for(texts: list[list[int]]) -> dict[str, Any]:
        return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in build(texts).items()}

    given, name = _tokens(model, given_for(texts))
    ids = given[name]
    numbers = torch.repeat_interleave(torch.tensor([len(d) for d in texts])).to(ids.device)
    if ids.numel() != len(numbers):
        raise ScaledotError(
            f"{name} has {ids.numel()} tokens, the documents {len(numbers)}: pack them in order, "
            "without padding"
        )
    real = torch.ones_like(ids, dtype=torch.bool)
    other = _others(model, ids)
    with resting(model):
        plain, output = _run(model, given, name, ids)
        _by_position(plain, output, ids)
        size = _size(plain, real)
        repeat, noise = _noise(model, given, name, ids, plain, real, size)
        moved = {}
        for d in range(len(texts)):
            changed = [list(x) for x in texts]
            changed[d] = other.flatten()[numbers == d].tolist()
            built, _ = _tokens(model, given_for(changed))
            again, _ = _run(model, built, name, built[name])
            by_token = _movement(plain, again, real, size, across_rows=False).flatten()
            by_document = torch.stack([by_token[numbers == i].amax() for i in range(len(texts))])
            by_document[d] = 0.0
            moved[d] = by_document
    return _leak("documents", moved, repeat, noise, plain.dtype, output)


def _packed(documents: list[list[int]]) -> dict[str, Tensor]:
    ids = torch.tensor([[token for text in documents for token in text]])
    positions = torch.cat([torch.arange(len(text)) for text in documents])[None]
    return {"input_ids": ids, "position_ids": positions}


def _leak(
    kind: Literal["future", "documents"], moved: Mapping[int, Tensor], repeat: float, noise: float,
    dtype: torch.dtype, output: str,
) -> Leak:  # fmt: skip
    rounding = ROUNDING * torch.finfo(dtype).eps
    deterministic = repeat <= rounding
    tolerance = max(rounding, _MARGIN * max(repeat, noise))
    largest = {p: float(x.max()) for p, x in moved.items()}
    changed = max(largest, key=lambda p: largest[p])
    beyond = (moved[changed] > tolerance).nonzero()
    found = deterministic and len(beyond) > 0
    return Leak(
        kind=kind,
        found=found,
        movement=largest[changed],
        tolerance=tolerance,
        repeat=repeat,
        deterministic=deterministic,
        changed=changed,
        first=int(beyond[0]) if found else None,
        tested=tuple(moved),
        output=output,
    )


# What a model is given


def _tokens(model: nn.Module, inputs: Mapping[str, Any] | Tensor) -> tuple[dict[str, Any], str]:
    """(a model's keyword arguments, which of them holds the tokens to change); "" the only one."""
    if isinstance(inputs, Tensor):
        if inputs.dim() != 2:
            raise ValueError(
                f"inputs has shape {tuple(inputs.shape)}: expected token ids (batch, length)"
            )
        return {"": inputs}, ""
    if not isinstance(inputs, Mapping):
        raise TypeError(
            f"inputs is a {type(inputs).__name__}: pass the model's inputs by name, or token ids"
        )
    given = dict(inputs)
    for name in ("decoder_input_ids", "input_ids"):
        if isinstance(x := given.get(name), Tensor) and x.dim() == 2:
            break
    else:
        raise ScaledotError(
            f"no token ids in {', '.join(given) or 'nothing'}: pass input_ids, (batch, length), "
            "or the ids alone"
        )
    known = inspect.signature(model.forward).parameters
    if "use_cache" in known:
        given["use_cache"] = False
    return given, name


def _real(given: Mapping[str, Any], name: str, ids: Tensor) -> Bool[Tensor, "batch length"]:
    mask = given.get(name.replace("input_ids", "attention_mask")) if name else None
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        return mask.bool()
    return torch.ones_like(ids, dtype=torch.bool)


def _others(model: nn.Module, ids: Tensor) -> Tensor:
    """Another valid token for each: the text's next in order of id, no special one."""
    config = getattr(model, "config", None)
    special = {
        x
        for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
        for x in _numbers(getattr(config, name, None))
    }
    known = sorted(set(ids.flatten().tolist()) - special)
    if len(known) < 2:
        size = _vocabulary(model, ids)
        known = sorted({*known, *[x for x in range(size) if x not in special][:4]})
    if len(known) < 2:
        raise ScaledotError("no second token is known to change one into")
    table = {x: known[(i + 1) % len(known)] for i, x in enumerate(known)}
    changed = [table.get(x, known[0]) for x in ids.flatten().tolist()]
    return torch.tensor(changed, dtype=ids.dtype, device=ids.device).view_as(ids)


def _numbers(x: Any) -> list[int]:
    return [x] if isinstance(x, int) else list(x) if isinstance(x, list | tuple) else []


def _vocabulary(model: nn.Module, ids: Tensor) -> int:
    sizes = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    return max(sizes, default=int(ids.max()) + 1)


@contextmanager
def resting(model: nn.Module) -> Iterator[None]:
    """The model in eval mode and without gradients; every module's own mode again afterwards."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in before.items():
            module.training = training


# What it gives


def _run(model: nn.Module, given: Mapping[str, Any], name: str, ids: Tensor) -> tuple[Tensor, str]:
    result = model(ids) if not name else model(**{**given, name: ids})
    if isinstance(result, Tensor):
        return result, "output"
    for field in ("logits", "last_hidden_state"):
        x = result.get(field) if isinstance(result, Mapping) else getattr(result, field, None)
        if isinstance(x, Tensor) and x.dim() >= 3:
            return x, field
    parts = result.values() if isinstance(result, Mapping) else result
    if isinstance(parts, Sequence) or isinstance(result, Mapping):
        for x in parts:
            if isinstance(x, Tensor) and x.is_floating_point() and x.dim() >= 3:
                return x, "first output"
    raise ScaledotError(
        f"{type(model).__name__} gives no output by position, (batch, length, …), to compare"
    )


def _by_position(out: Tensor, name: str, ids: Tensor) -> None:
    if out.shape[:2] != ids.shape:
        raise ScaledotError(
            f"{name} has shape {tuple(out.shape)}: expected ({', '.join(map(str, ids.shape))}, …), "
            "an output for each token"
        )


def _size(out: Tensor, real: Tensor) -> float:
    largest = float(out[real].abs().max())
    if not largest < float("inf"):
        raise ScaledotError("the model's outputs are not finite: nothing can be compared")
    return largest or 1.0


def _movement(
    a: Tensor, b: Tensor, real: Tensor, size: float, *, across_rows: bool = True
) -> Float[Tensor, "*positions"]:
    """The largest movement of each position's output, as a share of size; 0 for padding."""
    gap = (a.double() - b.double()).abs().flatten(2).amax(-1) / size
    # An output that has become NaN has moved.
    gap = gap.nan_to_num(float("inf")).masked_fill(~real, 0.0)
    return gap.amax(0) if across_rows else gap


def _noise(
    model: nn.Module, given: Mapping[str, Any], name: str, ids: Tensor, plain: Tensor, real: Tensor,
    size: float,
) -> tuple[float, float]:  # fmt: skip
    """(movement between two runs of one input, and where a copy of the batch stands beside it)."""
    again, _ = _run(model, given, name, ids)
    repeat = float(_movement(plain, again, real, size).max())

    def twice(x: Any) -> Any:
        fits = isinstance(x, Tensor) and x.dim() > 0 and len(x) == len(ids)
        return torch.cat([x, x]) if fits else x

    doubled = {k: twice(v) for k, v in given.items()}
    try:
        beside, _ = _run(model, doubled, name, twice(ids))
    except (RuntimeError, ValueError, IndexError, TypeError):
        return repeat, repeat  # what it is given fits one batch only
    if beside.shape[0] != 2 * len(ids):
        return repeat, repeat
    return repeat, float(_movement(plain, beside[: len(ids)], real, size).max())
