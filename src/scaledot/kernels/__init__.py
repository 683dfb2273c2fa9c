"""What a kernel is: `forward` and `backward` of one attention, each in a module of its own.

A kernel imports rows and masks, never another kernel; dispatch.py picks one and ties it to
autograd, operators.py to torch.compile.

    forward(query, key, value, seen, terms, *, statistics=True) → (output, rows, top, log_mass)

query (batch, heads, queries, dim), key (batch, kv_heads, keys, dim), value (batch, kv_heads, keys,
value_dim) or None for statistics alone: any strides, grouped heads un-repeated. seen: what each
query may see (masks.py). output: (batch, heads, queries, value_dim) in the accumulator's dtype,
None without a value, the same to the bit with and without `statistics`. rows: `RowStats`; without
`statistics` only visible, lse and nonfinite need be right. top, log_mass: (batch, heads, queries),
for `backward`: the weight of a key is exp(logit − top − log_mass).

    output(query, key, value, seen, terms) → output alone, where nobody asks for more

    sweep(query, key, seen, terms, factors) → rows at scale·factor, for each factor

    backward(query, key, value, seen, terms, top, log_mass, entropy, counted, out,
             d_out, d_lse, d_entropy, bias_gradient) → Gradients

entropy, out: from `forward`. counted: False for empty rows, whose lse and entropy pass nothing.
d_out, d_lse, d_entropy: None for zero. bias_gradient: whether the additive mask wants one.

native also says, in one line, why it cannot compute something: `reason`, and `available`.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Terms:
    """What turns ⟨q,k⟩ into weights, beside the mask."""

    scale: float
    softcap: float | None
    sinks: Float[Tensor, " heads"] | None
    dropout_p: float
    seed: int


@dataclass(frozen=True)
class Gradients:
    """Gradients of the inputs, in the accumulator's dtype; bias and sinks only where asked."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    sinks: Tensor | None
