"""torch's attention functions, `attention` and that of `MultiheadAttention`, taken over while a
module that is observed is running."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from scaledot import multihead
from scaledot.calls import weights
from scaledot.checks import ScaledotError
from scaledot.dispatch import attention
from scaledot.masks import Mask
from scaledot.multihead import torch_mask
from scaledot.observation import attend, gradients_wanted, held
from scaledot.rows import RowStats


class TorchRoute(TorchFunctionMode):
    """Takes over these attention functions when a module that is observed calls them."""

    is_route = True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        replacement = _REPLACEMENTS.get(func)
        if replacement is not None and not any(map(_opaque, (*args, *kwargs.values()))):
            return replacement(*args, **kwargs)
        if torch.compiler.is_compiling() and getattr(func, "__name__", "") == "unflatten":
            # The one method of Tensor that calls super(), which dynamo cannot follow from here.
            func = torch.unflatten
        return func(*args, **kwargs)


def _opaque(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_nested or x.device.type == "meta")


def _scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` with statistics. Three axes are (batch, length, dim)."""
    if query.dim() == key.dim() == value.dim() == 3:
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask[:, None]
        query, key, value = query[:, None], key[:, None], value[:, None]
        out = _scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale
        )
        return out[:, 0]
    if attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask[None]
    out, _ = attend(
        None, query, key, value, attn_mask, scale=scale, dropout_p=dropout_p,
        enable_gqa=enable_gqa, is_causal="top_left" if is_causal else False,
    )  # fmt: skip
    return out


def _multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`F.multi_head_attention_forward` with statistics, in that function's own steps."""
    self_attention = query is key
    batched = query.dim() == 3
    if not batched:
        query, key, value = query[:, None], key[:, None], value[:, None]
        key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
    queries, batch, width = query.shape
    if width != embed_dim_to_check or width % num_heads:
        raise ValueError(
            f"query has embedding dimension {width}: expected {embed_dim_to_check}, "
            f"a multiple of {num_heads} heads"
        )
    if is_causal and attn_mask is None:
        raise RuntimeError("is_causal needs attn_mask: it is a hint about that mask")

    q, k, v = _project(
        query, key, value, in_proj_weight, in_proj_bias,
        (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else None,
    )  # fmt: skip
    real = key.shape[0]
    if bias_k is not None and bias_v is not None:
        k = torch.cat([k, bias_k.expand(1, batch, -1)])
        v = torch.cat([v, bias_v.expand(1, batch, -1)])

    q = _by_head(q, num_heads)
    k = _by_head(k, num_heads) if static_k is None else static_k.unflatten(0, (batch, num_heads))
    v = _by_head(v, num_heads) if static_v is None else static_v.unflatten(0, (batch, num_heads))
    if add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    appended = k.shape[2] - (real if static_k is None else static_k.shape[1])

    hint = is_causal and key_padding_mask is None and not need_weights
    mask = torch_mask(None if hint else attn_mask, key_padding_mask, batch, num_heads, appended)
    dropout_p = dropout_p if training else 0.0
    out, attended = attend(
        None, q, k, v, mask, is_causal="top_left" if hint else False,
        dropout_p=0.0 if need_weights else dropout_p, self_attention=self_attention,
        appended=appended, want_weights=need_weights,
    )  # fmt: skip
    shares = None
    if need_weights:
        assert attended is not None
        everything = slice(0, None)
        shares = weights(attended, *(everything,) * 4).to(q.dtype)
        if dropout_p:
            if gradients_wanted():
                raise _from_weights("nn.MultiheadAttention")
            # torch drops from the weights that it returns.
            shares = F.dropout(shares, dropout_p)
            out = shares @ v
    out = out.permute(2, 0, 1, 3).reshape(queries * batch, -1)
    out = F.linear(out, out_proj_weight, out_proj_bias).view(queries, batch, -1)
    if shares is not None and average_attn_weights:
        shares = shares.mean(1)
    if not batched:
        return out[:, 0], None if shares is None else shares[0]
    return out, shares


def _by_head(x: Tensor, heads: int) -> Tensor:
    """(length, batch, heads·dim) as (batch, heads, length, dim)."""
    return x.unflatten(2, (heads, -1)).permute(1, 2, 0, 3)


def _project(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: Tensor | None,
    bias: Tensor | None,
    separate: tuple[Tensor | None, Tensor | None, Tensor | None] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K, V by torch's own projection, so that they are the same to the bit."""
    functional: Any = F
    if separate is None:
        return tuple(functional._in_projection_packed(query, key, value, packed, bias))
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return functional._in_projection(query, key, value, *separate, *biases)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Mask | Tensor | None, dropout_p: float,
    is_causal: bool | str, scale: float | None, enable_gqa: bool, *,
    window: int | tuple[int, int] | None, return_stats: bool, **terms: Any,
) -> Tensor | tuple[Tensor, RowStats]:  # fmt: skip
    """`scaledot.attention`, which hands over all its arguments, seen by observations."""
    if window is not None:
        attn_mask = Mask(window=window) & (Mask() if attn_mask is None else attn_mask)
    out, attended = attend(
        None, query, key, value, attn_mask, is_causal=is_causal, scale=scale,
        enable_gqa=enable_gqa, dropout_p=dropout_p, want_weights=return_stats, **terms,
    )  # fmt: skip
    if not return_stats:
        return out
    assert attended is not None  # asked for
    return out, attended.rows


def _multihead(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, terms: dict[str, Any],
    self_attention: bool, appended: int, return_stats: bool, discarded: bool,
) -> tuple[Tensor, RowStats | None]:  # fmt: skip
    """`multihead.attend`, seen by observations."""
    if discarded and gradients_wanted():
        raise _from_weights("MultiheadAttention")
    out, attended = attend(
        None, query, key, value, mask, **terms, self_attention=self_attention, appended=appended,
        want_weights=return_stats,
    )  # fmt: skip
    return out, attended.rows if return_stats and attended is not None else None


def _from_weights(name: str) -> ScaledotError:
    return ScaledotError(
        f"{name} with need_weights=True and dropout computes its output from the weights that it "
        "returns, where no gradients are seen: pass need_weights=False"
    )


_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _scaled_dot_product_attention,
    F.multi_head_attention_forward: _multi_head_attention_forward,
    attention: _attention,
    multihead.attend: _multihead,
}


@contextmanager
def slow_path() -> Iterator[None]:
    """torch's fused encoder layer calls no attention function: leave it out."""
    fast = torch.backends.mha

    def begin() -> Callable[[], object]:
        before = fast.get_fastpath_enabled()
        fast.set_fastpath_enabled(False)
        return partial(fast.set_fastpath_enabled, before)

    with held("fast path", begin):
        yield
