"""observe()'s way into transformers: an attention function and a mask function of our own.

transformers looks both up by name at every forward, so setting the name in a model's configurations
is all it takes; `routed` does that and puts the old names back. There are two names, because None
for a mask means two things: under "eager" every query sees every key, under "sdpa" the module's
`is_causal` decides.

The mask function keeps causal, window, packed and padded masks symbolic, O(n): a `SymbolicMask` is
a tensor of the right shape that holds no numbers. Our attention function reads its symbols; any
other operation on it finds the dense mask that eager attention would have been given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers import masking_utils as hf
from transformers.configuration_utils import PreTrainedConfig

from scaledot.calls import weights
from scaledot.checks import ScaledotError
from scaledot.masks import Mask
from scaledot.observation import attend, held, weights_wanted

EAGER, SDPA = "scaledot_eager", "scaledot"
"""The names that stand in for a configuration's own "eager" and for anything else."""


# The attention function


def _attention_forward(
    eager: bool,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls: (output (batch, queries, heads, value_dim), weights or None)."""
    if kwargs.get("block_indices") is not None:
        raise ScaledotError(
            f"{type(module).__name__} selects blocks of keys inside its kernel: not observed yet"
        )
    mask, keys = _mask(module, query, key, attention_mask, None if eager else is_causal, eager)
    earlier = attention_mask.earlier if isinstance(attention_mask, SymbolicMask) else 0
    symbolic = isinstance(attention_mask, SymbolicMask) and mask.dense is None
    if position_bias is not None:
        mask = mask & Mask(dense=position_bias[..., :keys])
    if kwargs.get("indices") is not None:
        chosen = _selected(kwargs["indices"], key.shape[2])
        mask = mask & Mask(dense=chosen[..., :keys])
    sinks = None if s_aux is None else s_aux.reshape(-1)
    # Eager's softmax over finfo.min alone weighs every value equally; a sink takes it all instead.
    uniform = eager and symbolic and sinks is None and mask.keys is not None
    compiling = torch.compiler.is_compiling()
    want = (not compiling and weights_wanted()) or kwargs.get("output_attentions") is True
    out, attended = attend(
        module, query, key[:, :, :keys], value[:, :, :keys], mask,
        scale=scaling, softcap=softcap or None, sinks=sinks, dropout_p=dropout,
        window=sliding_window, want_weights=want, earlier=earlier,
        empty_value=value if uniform else None,
    )  # fmt: skip
    shares = None
    if want and attended is not None:
        everything = slice(0, None)
        shares = weights(attended, everything, everything, everything, everything)
        shares = F.pad(shares, (0, key.shape[2] - keys)).to(query.dtype)
    return out.transpose(1, 2).contiguous(), shares


def _mask(
    module: nn.Module, query: Tensor, key: Tensor, given: Tensor | None, is_causal: bool | None,
    eager: bool,
) -> tuple[Mask, int]:  # fmt: skip
    """(the mask as symbols, how many of the keys it can ever show)."""
    queries, keys = query.shape[2], key.shape[2]
    if isinstance(given, SymbolicMask):
        if tuple(given.shape[2:]) == (queries, keys):
            return given.mask, given.keys
        given = given.dense()
    if given is not None:
        return Mask(dense=given[..., :keys]), keys
    if not eager:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if causal and queries > 1:
            # As transformers' sdpa: a static cache's empty tail is cut off.
            return Mask(causal="top_left"), min(keys, queries) if keys > queries else keys
    return Mask(), keys


def _selected(indices: Tensor, keys: int) -> Tensor:
    """True at the keys that a sparse attention's indexer chose, (batch, 1, queries, keys)."""
    chosen = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=indices.device)
    return chosen.scatter(-1, indices.long(), True)[:, None]


# The mask function


class SymbolicMask(Tensor):
    """A mask of transformers' shape, (batch, 1, queries, keys), in O(n) memory.

    mask holds the symbols, for the first `keys` keys; nobody sees the others. `earlier` tokens came
    before the first key and have left the cache. Its own numbers are
    one NaN, so that code which goes around `__torch_function__` fails loudly.
    """

    mask: Mask
    keys: int
    earlier: int
    _build: Callable[[], Tensor]
    _dense: Tensor | None

    @staticmethod
    def of(
        shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device | str,
        form: _Form, build: Callable[[], Tensor],
    ) -> SymbolicMask:  # fmt: skip
        hollow = torch.full((), float("nan"), dtype=dtype, device=device).expand(shape)
        self = hollow.as_subclass(SymbolicMask)
        self.mask, self.keys, self.earlier = form.mask, form.keys, form.earlier
        self._build, self._dense = build, None
        return self

    def dense(self) -> Tensor:
        """The additive mask itself, 0 or finfo.min: n×n."""
        if self._dense is None:
            self._dense = self._build()
        return self._dense

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _UNCHANGED and _moves_nothing(func, *args, **kwargs):
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*_filled(args), **_filled(kwargs))


_ABOUT = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_sparse",
                 "is_nested", "is_leaf", "grad_fn", "is_cuda", "is_meta", "is_quantized")
} | {Tensor.size, Tensor.dim, Tensor.is_floating_point, Tensor.is_complex, Tensor.get_device,
     Tensor.element_size, Tensor.numel, Tensor.__len__}  # fmt: skip
"""Questions about a mask that its numbers do not matter to."""

_UNCHANGED = {Tensor.to, Tensor.detach, Tensor.contiguous}
"""Operations that may return the mask itself."""


def _moves_nothing(func: Any, mask: Tensor, *args: Any, **kwargs: Any) -> bool:
    if func is not Tensor.to:
        return True
    given = [*args, *(v for k, v in kwargs.items() if k in ("device", "dtype", "other"))]
    for x in given:
        if isinstance(x, Tensor):
            same = x.dtype == mask.dtype and x.device == mask.device
        elif isinstance(x, torch.dtype):
            same = x == mask.dtype
        elif isinstance(x, torch.device | str):
            same = torch.device(x) == mask.device
        else:
            same = isinstance(x, bool)
        if not same:
            return False
    return not kwargs.get("copy", False)


def _filled(x: Any) -> Any:
    """x with every symbolic mask in it made dense."""
    if isinstance(x, SymbolicMask):
        return x.dense()
    if isinstance(x, list | tuple):
        return type(x)(map(_filled, x))
    if isinstance(x, dict):
        return {k: _filled(v) for k, v in x.items()}
    return x


def _mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = hf.causal_mask_function,
    attention_mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """What transformers calls for a mask: symbols where we know its form, else the eager mask."""
    if torch.compiler.is_compiling():
        # Symbols decide by the padding's values, which a graph does not know: it gets the tensor.
        return hf.eager_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            dtype, allow_is_bidirectional_skip=False, device=device, **kwargs,
        )  # fmt: skip
    geometry = _Geometry(q_length, kv_length, int(q_offset), int(kv_offset))
    build = partial(
        hf.eager_mask, batch_size, q_length, kv_length, q_offset, kv_offset, mask_function,
        attention_mask, dtype, allow_is_bidirectional_skip=False, device=device, **kwargs,
    )  # fmt: skip
    form = _form(mask_function, attention_mask, geometry)
    if form is None:
        return build()
    shows_all = form.keys == kv_length and repr(form.mask) == repr(Mask())
    if shows_all and allow_is_bidirectional_skip:
        return None
    return SymbolicMask.of((batch_size, 1, q_length, kv_length), dtype, device, form, build)


@dataclass(frozen=True)
class _Geometry:
    """Positions of a call: query i is token i + q_offset, key j is token j + kv_offset."""

    queries: int
    keys: int
    q_offset: int
    kv_offset: int

    @property
    def aligned(self) -> bool:
        """Query i and key i are one token."""
        return self.queries == self.keys and self.q_offset == self.kv_offset


@dataclass(frozen=True, eq=False)
class _Form:
    """A mask as symbols, over the first `keys` keys, after `earlier` that are gone."""

    mask: Mask
    keys: int
    earlier: int


def _form(function: Callable[..., Any], padding: Tensor | None, at: _Geometry) -> _Form | None:
    """A transformers mask function as symbols, None where it is none that we know."""
    mask = Mask()
    parts = _conjunction(function)
    packed = any(_made_by(part, "packed_sequence_mask_function") for part in parts)
    for part in parts:
        if _made_by(part, "remap_positions_for_packed_sequence"):
            # Inside one document, positions differ as indices do.
            inner = _conjunction(_closure(part)["mask_function"])
            if not packed or any(_made_by(x, "chunked_overlay") for x in inner):
                return None
            terms = [_term(x, at) for x in inner]
        else:
            terms = [_term(part, at)]
        for term in terms:
            if term is None:
                return None
            mask = mask & term
    keys = at.keys
    if mask.causal is not None:
        # The last query stands at key q_offset + queries − 1 − kv_offset; later keys are a static
        # cache's empty tail.
        keys = at.queries + at.q_offset - at.kv_offset
        if not 0 < keys <= at.keys:
            return None
    elif mask.window is not None and not at.aligned:
        return None
    if isinstance(mask.segments, tuple):
        mask = replace(mask, segments=(mask.segments[0], mask.segments[1][:, :keys]))
    if padding is not None:
        real = hf.prepare_padding_mask(padding.bool(), at.keys, at.kv_offset)
        assert real is not None
        real = real[:, at.kv_offset : at.kv_offset + keys]
        if not bool(real.all()):
            mask = mask & Mask(keys=real)
    return _Form(mask, keys, at.kv_offset)


def _conjunction(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The functions that `function` is the logical and of."""
    if not _made_by(function, "and_masks"):
        return [function]
    return [x for part in _closure(function)["mask_functions"] for x in _conjunction(part)]


def _made_by(function: Callable[..., Any], maker: str) -> bool:
    return (
        getattr(function, "__module__", "") == hf.__name__
        and getattr(function, "__qualname__", "").split(".")[0] == maker
        and "<locals>" in function.__qualname__
    )


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    names = function.__code__.co_freevars
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _term(function: Callable[..., Any], at: _Geometry) -> Mask | None:
    """One of transformers' own mask functions as symbols."""
    if function is hf.causal_mask_function:
        return Mask(causal="bottom_right")
    if function is hf.bidirectional_mask_function:
        return Mask()
    if _made_by(function, "sliding_window_overlay"):
        return Mask(window=(_closure(function)["sliding_window"] - 1, -1))
    if _made_by(function, "sliding_window_bidirectional_overlay"):
        width = _closure(function)["sliding_window"]
        return Mask(window=(width, width))
    if _made_by(function, "packed_sequence_mask_function") and at.aligned and at.q_offset == 0:
        return Mask(segments=_closure(function)["packed_sequence_mask"])
    if _made_by(function, "chunked_overlay"):
        found = _closure(function)
        size, left = found["chunk_size"], found["left_padding"][:, None]
        q = torch.arange(at.queries, device=left.device) + at.q_offset
        k = torch.arange(at.keys, device=left.device) + at.kv_offset
        return Mask(segments=((q - left) // size, (k - left) // size))
    return None


# Setting and restoring the names


AttentionInterface.register(SDPA, partial(_attention_forward, False))
AttentionInterface.register(EAGER, partial(_attention_forward, True))
AttentionMaskInterface.register(SDPA, _mask_function)
AttentionMaskInterface.register(EAGER, _mask_function)


@contextmanager
def routed(model: nn.Module) -> Iterator[None]:
    """Send every attention of the model's Hugging Face parts through us; afterwards as before."""
    with ExitStack() as context:
        for config in _configs(model):
            context.enter_context(held(id(config), partial(_route, config)))
        yield


def _route(config: PreTrainedConfig) -> Callable[[], object]:
    name = config._attn_implementation
    if name not in (SDPA, EAGER):
        config._attn_implementation_internal = EAGER if name in ("eager", None) else SDPA
    return partial(setattr, config, "_attn_implementation_internal", name)


def _configs(model: nn.Module) -> list[PreTrainedConfig]:
    """Every configuration whose attention goes through AttentionInterface, each once."""
    found: dict[int, PreTrainedConfig] = {}
    fixed: set[int] = set()

    def add(config: Any) -> None:
        if isinstance(config, PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            for name in config.sub_configs:
                add(getattr(config, name, None))

    for module in model.modules():
        if isinstance(module, PreTrainedModel) and not module._can_set_attn_implementation():
            fixed |= {id(getattr(m, "config", None)) for m in module.modules()}
        add(getattr(module, "config", None))
    return [config for key, config in found.items() if key not in fixed]
