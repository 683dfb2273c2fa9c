"""nn.MultiheadAttention with every head's statistics on request.

    project   Q = x·W_Qᵀ + b_Q, K and V alike     (batch, length, heads·d_k)
    split     head h takes d_k features            (batch, heads, length, d_k)
    attend    softmax(Q_h K_hᵀ·scale + mask)·V_h   each head by itself: `attend`
    concat    the heads side by side               (batch, length, d_model)
    mix       concat·W_Oᵀ + b_O                    (batch, length, d_model)

A boolean mask's True means "may NOT attend" here, as in nn.MultiheadAttention, and so the opposite
of what it means to `scaledot.attention`: `torch_mask` is where it turns.
Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2. What differs from torch's module is in
the docstring of `MultiheadAttention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import _is_torch_function_mode_enabled

from scaledot import checks, scales, stages
from scaledot.dispatch import attention, autocast_inputs, handed_over
from scaledot.masks import Mask
from scaledot.rows import RowStats
from scaledot.stages import Trace

_NORM_EPS = 1e-6
"""Added to the mean square of a query or key before its root: Qwen3's."""


class MultiheadAttention(nn.Module):
    """`nn.MultiheadAttention`: its constructor, call, state_dict, initialisation and results.

    What differs from it:

    - need_weights is False unless asked for, and weights come per head unless
      average_attn_weights=True. Without weights memory is O(n).
    - A query that sees nothing gives 0, not NaN (plus the output bias), and passes no gradient.
      What a mask hides never matters, even NaN.
    - is_causal needs no attn_mask. One that comes with it is not read, unless keys are appended;
      torch reads it where need_weights or a key_padding_mask is given. Keys that add_bias_kv and
      add_zero_attn append are seen by every causal query; in torch only where the mask is read.
    - need_weights refuses a float mask of 0 and 1 alone and a causal mask inverted, and does not
      run on meta tensors.
    - dropout is below 1, and other weights are dropped at the same seed unless need_weights.
    - Double backward raises, save that of the weights. There is no torch.jit.script, no
      merge_masks, and isinstance(…, nn.MultiheadAttention) is False.

    num_kv_heads: grouped heads: query head h reads kv head h // (num_heads // num_kv_heads).
    in_proj_weight and in_proj_bias then hold num_heads·d_k rows for Q, num_kv_heads·d_k for K and
    as many for V, in this order; k_proj_weight, v_proj_weight, bias_k and bias_v shrink alike.
    qk_norm: each head's queries and keys (bias_k included) divided by their root mean square, times
    a learned gain of d_k features that all heads share and that begins at 1, as in Qwen3
    (arXiv:2505.09388): |⟨q,k⟩| ≤ d_k at first, whatever the projections.
    softcap: c turns scores s into c·tanh(s/c), before the mask.
    scale: multiplies QKᵀ: a number or a name of `scales.RULES`, 1/√d_k unless given. Rules with
    log n count the keys of each call, masked ones included.

    Statistics: call with return_stats=True, or run it in a model under `scaledot.observe`. torch's
    fused encoder layer asks `_qkv_same_embed_dim` and passes this module by where it is True; here
    it never is.

    Raises: ValueError or TypeError that names the argument, what came and what to pass.
    Source: Vaswani et al. 2017, section 3.2.2.

    >>> mha = MultiheadAttention(64, 4, batch_first=True)
    >>> x = torch.randn(2, 5, 64)
    >>> out, _, rows = mha(x, x, x, return_stats=True)
    >>> out.shape, rows.entropy.shape
    (torch.Size([2, 5, 64]), torch.Size([2, 4, 5]))
    """

    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        qk_norm: bool = False,
        softcap: float | None = None,
        scale: str | float | None = None,
    ) -> None:
        super().__init__()
        embed_dim = checks.whole("embed_dim", embed_dim)
        num_heads = checks.whole("num_heads", num_heads)
        kv_heads = num_heads if num_kv_heads is None else checks.whole("num_kv_heads", num_kv_heads)
        if embed_dim % num_heads:
            raise ValueError(
                f"embed_dim is {embed_dim} with {num_heads} heads: pass a multiple of num_heads"
            )
        if num_heads % kv_heads:
            raise ValueError(
                f"num_kv_heads is {kv_heads} with {num_heads} heads: pass a divisor of num_heads"
            )
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, kv_heads
        self.head_dim = embed_dim // num_heads
        self.kdim = embed_dim if kdim is None else checks.whole("kdim", kdim)
        self.vdim = embed_dim if vdim is None else checks.whole("vdim", vdim)
        self.dropout = checks.dropout(dropout)
        self.batch_first, self.add_zero_attn = batch_first, add_zero_attn
        self.softcap, self.scale = checks.soft_cap(softcap), scale
        self._factor(1)  # a rule that there is not fails here

        def new(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        # Made and drawn in torch's order: the same seed gives the same parameters.
        kv_dim = kv_heads * self.head_dim
        packed = self.kdim == self.vdim == embed_dim
        self.in_proj_weight = new(embed_dim + 2 * kv_dim, embed_dim) if packed else None
        self.q_proj_weight = None if packed else new(embed_dim, embed_dim)
        self.k_proj_weight = None if packed else new(kv_dim, self.kdim)
        self.v_proj_weight = None if packed else new(kv_dim, self.vdim)
        self.in_proj_bias = new(embed_dim + 2 * kv_dim) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, device, dtype)
        self.bias_k = new(1, 1, kv_dim) if add_bias_kv else None
        self.bias_v = new(1, 1, kv_dim) if add_bias_kv else None
        self.q_norm = self.k_norm = None
        if qk_norm:
            self.q_norm = nn.RMSNorm(self.head_dim, _NORM_EPS, device=device, dtype=dtype)
            self.k_norm = nn.RMSNorm(self.head_dim, _NORM_EPS, device=device, dtype=dtype)
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        for weight in (
            self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight,
        ):  # fmt: skip
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        for bias in (self.bias_k, self.bias_v):
            if bias is not None:
                nn.init.xavier_normal_(bias)

    @classmethod
    def of(cls, module: nn.MultiheadAttention) -> MultiheadAttention:
        """A module that takes the place of torch's, with its very parameters: none is copied.

        >>> layer = nn.TransformerEncoderLayer(64, nhead=4)
        >>> layer.self_attn = MultiheadAttention.of(layer.self_attn)
        """
        if not isinstance(module, nn.MultiheadAttention):
            raise TypeError(f"of() takes an nn.MultiheadAttention, got {type(module).__name__}")
        result = cls(
            module.embed_dim, module.num_heads, module.dropout, module.in_proj_bias is not None,
            module.bias_k is not None, module.add_zero_attn, module.kdim, module.vdim,
            module.batch_first, "meta",
        )  # fmt: skip
        for name, parameter in module.named_parameters(recurse=False):
            setattr(result, name, parameter)
        result.out_proj = module.out_proj
        return result.train(module.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = False,
        is_causal: bool = False,
        *,
        return_stats: bool = False,
    ) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, RowStats]:
        """(output, weights or None), and the statistics of every row where asked for.

        query (queries, batch, embed_dim), key (keys, batch, kdim), value (keys, batch, vdim), or
        with batch_first (batch, length, …); without a batch (length, …). The output is as query.
        A strided nested tensor may be all three, without masks and with batch_first: that is what
        nn.TransformerEncoder makes of padded texts.

        key_padding_mask: (batch, keys), bool, True for padding, or float, added to the scores.
        attn_mask: (queries, keys) or (batch·num_heads, queries, keys); bool, True means "may NOT
        attend", the opposite of `scaledot.attention`, or float, added to the scores.
        is_causal: query i sees keys 0 … i, in O(n) memory. With an attn_mask it is torch's hint
        that this is that mask, which then is not read; it may be left out.
        need_weights: exact weights, 0 … 1, (batch, num_heads, queries, keys), or
        (batch, queries, keys) their average over heads. They take O(n²) memory, every stage of
        `scaledot.trace`. The output is the same as without; only in training with dropout, where
        torch returns the weights that are left, is it computed from those.
        return_stats: `RowStats`, each (batch, num_heads, queries), of weights before dropout; the
        keys that add_bias_kv and add_zero_attn append count. They change no bit of the output.

        Gradients are those of `attention`: to float masks too; double backward raises.
        Raises: ValueError or TypeError that names the argument, what came and what to pass; with
        need_weights also for a mask whose values say that it was meant otherwise.
        """
        checks.tensor("query", query)
        if query.is_nested:
            alone = query is key is value and key_padding_mask is None and attn_mask is None
            if not alone or not self.batch_first or query.layout != torch.strided:
                raise ValueError(
                    "query is a nested tensor: pass the same one, of strided layout, as key and "
                    "value, without masks, to a module with batch_first=True"
                )
            return self._nested(query, need_weights, average_attn_weights, is_causal, return_stats)
        _, q, k, v = self._heads(query, key, value)
        mask, terms = self._terms(q, k, v, key_padding_mask, attn_mask, is_causal)
        from_weights = need_weights and terms["dropout_p"] > 0
        out, rows = attend(
            q, k, v, mask, terms | {"dropout_p": 0.0} if from_weights else terms,
            query is key, self._appended, return_stats, from_weights,
        )  # fmt: skip
        weights = None
        if need_weights:
            t = stages.trace(q, k, v, mask, enable_gqa=True, **terms)
            weights = t.weights if t.dropped is None else t.dropped
            weights = weights.mean(1) if average_attn_weights else weights
            out = t.output if from_weights else out
        out = self.out_proj(self._concat(out, query.dim()))
        if query.dim() == 2:
            weights = None if weights is None else weights[0]
            rows = None if rows is None else rows.map(lambda x: x[0])
        return (out, weights) if rows is None else (out, weights, rows)

    def trace(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> MultiheadTrace:
        """Every step of a call with the same arguments, O(n²): print it to see their shapes.

        In training with dropout what it drops is drawn anew. Raises: as a call with need_weights.

        >>> mha = MultiheadAttention(64, 4, batch_first=True)
        >>> x = torch.randn(1, 5, 64)
        >>> mha.trace(x, x, x).heads.weights.shape
        torch.Size([1, 4, 5, 5])
        """
        projected, q, k, v = self._heads(query, key, value)
        mask, terms = self._terms(q, k, v, key_padding_mask, attn_mask, is_causal)
        t = stages.trace(q, k, v, mask, enable_gqa=True, **terms)
        concat = self._concat(t.output, query.dim())
        return MultiheadTrace(
            (query, key, value), projected, t, v, concat, self.out_proj(concat), self.scale
        )

    @property
    def _appended(self) -> int:
        """Keys at the end that belong to no token."""
        return (self.bias_k is not None) + self.add_zero_attn

    def _factor(self, keys: int) -> float | None:
        if self.scale is None:
            return None
        return scales.factor(self.scale, self.head_dim, d_model=self.embed_dim, keys=keys)

    def _heads(
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor, Tensor]:
        """(Q, K, V as projected), then each split into heads: (batch, heads, length, d_k)."""
        order = "(batch, length, {})" if self.batch_first else "(length, batch, {})"
        given = (
            ("query", query, self.embed_dim),
            ("key", key, self.kdim),
            ("value", value, self.vdim),
        )
        for name, x, width in given:
            checks.tensor(name, x)
            if x.dim() not in (2, 3) or x.dim() != query.dim() or x.shape[-1] != width:
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}: expected {order.format(width)}, "
                    f"or (length, {width}) for query, key and value alike"
                )
        kv_dim = self.num_kv_heads * self.head_dim
        sizes = [self.embed_dim, kv_dim, kv_dim]
        bias = self.in_proj_bias
        if self.in_proj_weight is not None and query is key and key is value:
            projected = F.linear(query, self.in_proj_weight, bias).split(sizes, -1)
        else:
            weights: Any = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            if self.in_proj_weight is not None:
                weights = self.in_proj_weight.split(sizes)
            biases = (None,) * 3 if bias is None else bias.split(sizes)
            projected = tuple(map(F.linear, (query, key, value), weights, biases))
        q, k, v = (self._split(x) for x in projected)
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (
                torch.cat([x, self._split(b[0]).to(x.dtype).expand(len(x), -1, -1, -1)], 2)
                for x, b in ((k, self.bias_k), (v, self.bias_v))
            )
        if self.q_norm is not None and self.k_norm is not None:
            # In the gain's precision, under autocast too.
            q, k = (
                norm(x.to(norm.weight.dtype)) for norm, x in ((self.q_norm, q), (self.k_norm, k))
            )
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        return projected, *autocast_inputs(q, k, v)

    def _split(self, x: Tensor) -> Tensor:
        """(batch, heads, length, d_k) of projected features in any of the three layouts."""
        x = x.unflatten(-1, (x.shape[-1] // self.head_dim, self.head_dim))
        if x.dim() == 3:
            return x.transpose(0, 1)[None]
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)

    def _concat(self, x: Tensor | None, axes: int) -> Tensor:
        """The inverse: heads side by side, in the layout of a query with so many axes."""
        assert x is not None  # an attention without values has no output
        if axes == 2:
            return x[0].transpose(0, 1).flatten(-2)
        return (x.transpose(1, 2) if self.batch_first else x.permute(2, 0, 1, 3)).flatten(-2)

    def _terms(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None,
        attn_mask: Tensor | None, is_causal: bool,
    ) -> tuple[Mask | None, dict[str, Any]]:  # fmt: skip
        """(mask, the other arguments) of the heads' attention."""
        (batch, heads, queries, _), keys = q.shape, k.shape[2] - self._appended
        if not len(k) == len(v) == batch or k.shape[2] != v.shape[2]:
            raise ValueError(
                f"query, key and value have batches of {batch}, {len(k)} and {len(v)}, key and "
                f"value {keys} and {v.shape[2] - self._appended} tokens: pass one batch, and a "
                "value for each key"
            )
        if key_padding_mask is not None and key_padding_mask.dim() == 1:
            key_padding_mask = key_padding_mask[None]
        _check("key_padding_mask", key_padding_mask, (batch, keys))
        _check("attn_mask", attn_mask, (queries, keys), (batch * heads, queries, keys))
        # Causality would hide the appended keys.
        causal = is_causal and not self._appended
        if is_causal and attn_mask is None and not causal:
            attn_mask = torch.ones(queries, keys, dtype=torch.bool, device=k.device).triu(1)
        mask = torch_mask(
            None if causal else attn_mask, key_padding_mask, batch, heads, self._appended
        )
        return mask, {
            "dropout_p": self.dropout if self.training else 0.0,
            "is_causal": "top_left" if causal else False,
            "scale": self._factor(k.shape[2]),
            "softcap": self.softcap,
        }

    def _nested(self, x: Tensor, *arguments: bool) -> tuple[Any, ...]:
        """Self-attention of texts in a nested tensor, by way of a padded batch of them."""
        need_weights, average, is_causal, return_stats = arguments
        lengths = [len(text) for text in x.unbind()]
        padded = torch.nested.to_padded_tensor(x, 0.0)
        position = torch.arange(padded.shape[1], device=x.device)
        padding = position >= torch.tensor(lengths, device=x.device)[:, None]
        out, *rest = self.forward(
            padded, padded, padded, padding, need_weights, None, average, is_causal,
            return_stats=return_stats,
        )  # fmt: skip
        texts = [text[:n] for text, n in zip(out, lengths, strict=True)]
        return torch.nested.as_nested_tensor(texts), *rest


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, terms: dict[str, Any],
    self_attention: bool, appended: int, return_stats: bool, discarded: bool,
) -> tuple[Tensor | None, RowStats | None]:  # fmt: skip
    """(output, statistics where asked for) of split heads, (batch, heads, length, d_k).

    terms are arguments of `attention`. self_attention, appended (keys at the end that belong to no
    token) and discarded (whether the output is not used) are for a mode that takes it over.
    """
    if _is_torch_function_mode_enabled():
        return handed_over(
            attend, query, key, value, mask, terms, self_attention, appended, return_stats,
            discarded,
        )  # fmt: skip
    if return_stats:
        return attention(query, key, value, mask, enable_gqa=True, return_stats=True, **terms)
    return attention(query, key, value, mask, enable_gqa=True, **terms), None


def _check(name: str, mask: Tensor | None, *shapes: tuple[int, ...]) -> None:
    """Check a mask's dtype and shape."""
    if mask is None:
        return
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"{name} is {str(mask.dtype).removeprefix('torch.')}: pass bool (True means "
            '"may NOT attend" here) or float (added to the scores)'
        )
    if tuple(mask.shape) not in shapes:
        expected = " or ".join(map(str, shapes))
        raise ValueError(f"{name} has shape {tuple(mask.shape)}: expected {expected}")


def torch_mask(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    batch: int,
    heads: int,
    appended: int,
) -> Mask | None:
    """nn.MultiheadAttention's masks (True hides, floats add) as a `Mask` (True shows).

    attn_mask (queries, keys) or (batch·heads, queries, keys), key_padding_mask (batch, keys);
    appended keys at the end are visible to all.
    """
    dense = keys = None
    if attn_mask is not None:
        shown = _shown(attn_mask, appended)
        dense = shown[None, None] if shown.dim() == 2 else shown.unflatten(0, (batch, heads))
    if key_padding_mask is not None:
        shown = _shown(key_padding_mask, appended)
        keys = shown if shown.dtype == torch.bool else shown > float("-inf")
        # A float mask that only hides needs no tensor of queries × keys; a graph and a tensor
        # without numbers cannot look.
        if shown.dtype != torch.bool and (
            torch.compiler.is_compiling()
            or shown.is_meta
            or shown.requires_grad
            or bool((shown.isfinite() & (shown != 0)).any())
        ):
            added = Mask(dense=shown[:, None, None])
            dense = added.dense if dense is None else (Mask(dense=dense) & added).dense
    return None if dense is None and keys is None else Mask(dense=dense, keys=keys)


def _shown(mask: Tensor, appended: int) -> Tensor:
    """The mask with a boolean turned to True for shown, and so for keys appended at the end."""
    boolean = mask.dtype == torch.bool
    return F.pad(~mask if boolean else mask, (0, appended), value=boolean)


@dataclass(frozen=True, eq=False)
class MultiheadTrace:
    """Every step of one call of `MultiheadAttention`, as `MultiheadAttention.trace` makes it.

    inputs (query, key, value) and projected (Q, K, V) are in the call's layout, as are concat and
    output. heads holds every stage of every head, (batch, heads, …), its query and key as they are
    multiplied: split, normed and with the keys appended that belong to no token; value likewise.
    scale: the rule that was asked for, None for 1/√d_k; `heads.scale` is the factor applied.
    """

    inputs: tuple[Float[Tensor, "..."], Float[Tensor, "..."], Float[Tensor, "..."]]
    projected: tuple[Float[Tensor, "..."], Float[Tensor, "..."], Float[Tensor, "..."]]
    heads: Trace
    value: Float[Tensor, "batch kv_heads keys value_dim"]
    concat: Float[Tensor, "..."]
    output: Float[Tensor, "..."]
    scale: str | float | None

    def __repr__(self) -> str:
        """Each step with its shape, in order."""
        t, (query, key, value), (q, k, v) = self.heads, self.inputs, self.projected
        heads, kv_heads = t.query.shape[1], t.key.shape[1]
        rule = "1/sqrt_d_k" if self.scale is None else self.scale
        named = f", {scales.RULES[rule]}" if isinstance(rule, str) else ""
        steps: list[tuple[str, str, Tensor | None]] = [
            ("query", "input", query), ("key", "input", key), ("value", "input", value),
            ("Q", "query·W_Qᵀ", q), ("K", "key·W_Kᵀ", k), ("V", "value·W_Vᵀ", v),
            ("Q by head", f"Q split into {heads}", t.query),
            ("K by head", f"K split into {kv_heads}", t.key),
            ("V by head", f"V split into {kv_heads}", self.value),
            ("scores", "Q·Kᵀ of each head", t.scores),
            ("scaled", f"× {t.scale:.6g}{named}", t.scaled),
            ("capped", f"soft-cap {t.softcap}", t.capped),
            ("masked", "mask applied", t.masked),
            ("weights", "softmax over keys", t.weights),
            ("dropped", "dropout", t.dropped),
            ("heads", "weights·V", t.output),
            ("concat", f"{heads} heads side by side", self.concat),
            ("output", "concat·W_Oᵀ", self.output),
        ]  # fmt: skip
        shown = [(name, how, str(tuple(x.shape))) for name, how, x in steps if x is not None]
        first, second = (max(len(row[i]) for row in shown) for i in (0, 1))
        return "\n".join(f"{a:<{first}}  {b:<{second}}  {c}" for a, b, c in shown)
