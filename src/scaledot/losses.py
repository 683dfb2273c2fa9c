"""Terms for a training loss that keep attention from saturating, over the rows' own statistics.

`rows` is what `attention(..., return_stats=True)` gives; its `entropy` and `lse` are
differentiable. Rows that see nothing, or a score that is not finite, enter neither term and get no
gradient from it.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from scaledot.rows import RowStats


def entropy_loss(
    rows: RowStats, target: float, real: Bool[Tensor, "*#rows"] | None = None
) -> Float[Tensor, ""]:
    """Mean square of what rows' entropy lacks to `target` nats: 0 where every row has as much.

    real: False for rows that are padding, broadcast to (…, heads, queries). 0 for no rows.
    Source: entropy collapse, Zhai et al. 2023, arXiv 2303.06296; a floor, not a pull to uniform.

    >>> from scaledot.dispatch import attention
    >>> q, k, v = (3 * torch.randn(3, 1, 2, 8, 16)).requires_grad_()
    >>> _, rows = attention(q, k, v, return_stats=True)
    >>> entropy_loss(rows, 0.5).backward()
    """
    return _mean((target - rows.entropy).clamp(min=0).square(), rows, real)


def z_loss(rows: RowStats, real: Bool[Tensor, "*#rows"] | None = None) -> Float[Tensor, ""]:
    """Mean square of rows' log-sum-exp in nats², which large scores of either sign make large.

    real as in `entropy_loss`. Source: PaLM (Chowdhery et al. 2022, arXiv 2204.02311), section 5,
    uses 1e-4·ln²Z of the output's softmax; here Z is that of each attention row. A row of n equal
    scores of 0 has (ln n)².

    >>> from scaledot.dispatch import attention
    >>> q, k, v = torch.zeros(3, 1, 1, 8, 16)
    >>> _, rows = attention(q, k, v, return_stats=True)
    >>> f"{z_loss(rows):.4f}"
    '4.3241'
    """
    return _mean(rows.lse.square(), rows, real)


def _mean(x: Tensor, rows: RowStats, real: Tensor | None) -> Tensor:
    """The mean over rows that count; what does not is kept out of the graph, NaN and all."""
    counted = ~(rows.empty | rows.nonfinite)
    counted = counted if real is None else counted & real
    return torch.where(counted, x, 0.0).sum() / counted.sum().clamp(min=1)
