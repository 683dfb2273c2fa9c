"""Exact moments of all n·m scores in linear time, and where their variance comes from.

Var_j⟨q,k_j⟩ over some keys is qᵀCq with C their covariance, so a row costs d² whatever it sees.
One covariance serves full attention. For the rest every row's keys are cut into prefixes
(intervals.py). A prefix is whole chunks, whose scatter is a running sum of chunk Grams, and a piece
of one chunk, whose scores are computed. Each Gram is about its own chunk's mean and joins by the
formula of Chan, Golub & LeVeque (1979): sums of squares are only ever added, so neither a large
common part of the keys nor a window costs a digit. All is float64 whatever the inputs, in torch
here and in C++ (kernels/native.cpp). Everything is before soft-cap and bias.
docs/maths.md#score-moments, #the-budget-of-a-row
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from scaledot import checks, intervals
from scaledot.heads import HeadStats, Pairs
from scaledot.intervals import Layout, Part
from scaledot.masks import Mask, Visibility, resolve
from scaledot.rows import RowStats

ERROR = 1e-9
"""Error of every moment against the n² computation in float64, for inputs of any dtype: relative to
the moment, or if that is larger to scale·max‖q‖·max‖k‖/1000 (means), to a hundredth of the variance
of all scores (variances). tests/test_moments.py"""

_CHUNK = 4096
"""Rows of q or k turned to float64 at a time."""
_WORK = 1 << 17
"""Numbers in a work tensor: what a core's cache holds."""


@dataclass(frozen=True, eq=False)
class Width:
    """How wide a head's scores are and why; each tensor (…, heads), float64.

    The variance of scaled scores, in three parts:
      total        interaction + row_shift + key_bias
      row_shift    of the rows' means: the same for every key of a row, so softmax cannot see it
      key_bias     what the mean query alone would give: the same keys favoured in every row
      interaction  the rest: what depends on query and key together

    The width that softmax sees, √(interaction + key_bias), is a product of three factors that are
    1 for independent components of mean 0 and variance 1 and scale 1/√d_k:
      scale      |scale|·√d_k
      norms      query_norm·key_spread/d_k
      alignment  all else: above 1 where queries point along the directions in which keys differ
    query_norm is the root mean square of ‖q‖ (√d_k under those assumptions), key_spread that of
    ‖k − k̄‖. effective_d_k = d_k·alignment²: as many independent components would give this width.

    What a mean is over is for who makes it to say: `Budget`, over visible pairs; `width_factors`,
    over rows. `str` gives one line a head. Source: docs/maths.md#score-moments.
    """

    d_k: int
    total: Float[Tensor, "*heads"]
    interaction: Float[Tensor, "*heads"]
    row_shift: Float[Tensor, "*heads"]
    key_bias: Float[Tensor, "*heads"]
    scale: Float[Tensor, "*heads"]
    norms: Float[Tensor, "*heads"]
    alignment: Float[Tensor, "*heads"]
    query_norm: Float[Tensor, "*heads"]
    key_spread: Float[Tensor, "*heads"]

    @property
    def within(self) -> Float[Tensor, "*heads"]:
        """The variance that softmax sees: interaction + key_bias."""
        return self.interaction + self.key_bias

    @property
    def ratio(self) -> Float[Tensor, "*heads"]:
        """The scale applied over `unit_scale`, the product of the factors: 1 is unit width."""
        return self.scale * self.norms * self.alignment

    @property
    def unit_scale(self) -> Float[Tensor, "*heads"]:
        """The scale that would give a variance within rows of 1; ∞ if no row's scores differ."""
        return 1 / (self.norms * self.alignment * math.sqrt(self.d_k))

    @property
    def effective_d_k(self) -> Float[Tensor, "*heads"]:
        """How many independent unit components would give this width: d_k·alignment²."""
        return self.d_k * self.alignment.square()

    def sentences(self) -> list[str]:
        """How wide each head's scores are against unit variance within rows, and why."""
        factors = (self.scale, self.norms, self.alignment)
        each = zip(*(x.flatten().tolist() for x in factors), strict=True)
        return [_sentence(*three) for three in each]

    def __str__(self) -> str:
        """`sentences`, with the head before each where there are several."""
        lines = self.sentences()
        if len(lines) == 1:
            return lines[0]
        places = torch.cartesian_prod(*(torch.arange(n) for n in self.norms.shape))
        labels = [
            "head " + ".".join(map(str, torch.atleast_1d(place).tolist())) for place in places
        ]
        return "\n".join(f"{label}: {line}" for label, line in zip(labels, lines, strict=True))


def _sentence(scale: float, norms: float, alignment: float) -> str:
    factors = [("norms", norms), ("alignment", alignment)]
    if not math.isclose(scale, 1, rel_tol=1e-6):
        factors.insert(0, ("scale", scale))
    width = math.prod(x for _, x in factors)
    if not math.isfinite(width):
        return "scores have no width: no row sees two finite scores"
    why = ", ".join(f"{name} ×{_digits(x)}" for name, x in factors)
    if width == 0:
        return f"scores are constant in every row: {why}"
    times = _digits(max(width, 1 / width))
    if times == "1":
        return f"scores have unit width: {why}"
    return f"scores are {times} times too {'wide' if width > 1 else 'narrow'}: {why}"


def _digits(x: float) -> str:
    """Two significant digits, without an exponent from .001 to a million."""
    if x >= 99.5:
        return f"{x:,.0f}" if x < 1e6 else f"{x:.1e}"
    return f"{x:.2g}"


@dataclass(frozen=True, eq=False)
class Budget(Width):
    """The `Width` of all visible scores of a head, every mean over visible pairs.

    total is the variance itself. In full attention its parts are scale²·(tr CqCk, k̄ᵀCqk̄, q̄ᵀCkq̄),
    none negative. Under a mask each row has its own keys; key_bias is then the mean over pairs of
    q̄'s variance along each row, and interaction, what is left, can be negative.

    key_norm is the root mean square of ‖k‖ (√d_k for unit components), query_mean and key_mean the
    norms of the mean vectors (0). gain is d_k·tr(CqCk)/(tr Cq·tr Ck), 0 … d_k, 1 if either is
    isotropic (NaN under a mask).

    Merge rule: none, except through `merge` for the variances. Source: docs/maths.md#score-moments.
    """

    key_norm: Float[Tensor, "*heads"]
    query_mean: Float[Tensor, "*heads"]
    key_mean: Float[Tensor, "*heads"]
    gain: Float[Tensor, "*heads"]


@dataclass(frozen=True, eq=False)
class ScoreMoments:
    """Moments of all visible scaled scores scale·⟨q,k⟩, before soft-cap and bias; float64.

    Each (…, heads), over all visible pairs, population:
      count        visible pairs
      mean, var    of all scores
      var_within   the part of var within rows, Σ nᵢ·varᵢ / Σ nᵢ: what softmax sees
      row_var_mean the mean of row_var over rows that see two keys or more, each row the same
                   weight: the mean of HeadStats' score_var
      skewness     third standardised moment, where asked for
      singular_values  (…, heads, min(queries, keys, d_k)) of the score matrix, falling, where asked
    Each (…, heads, queries):
      visible      keys that the row sees
      row_mean, row_var   of its scores
    kernel names the implementation that ran.
    scale was applied; unit_scale would give var_within 1 (∞ if the scores of no row differ).

    An empty row has NaN and enters nothing; no pairs at all give NaN. A row that sees a NaN or ∞
    is NaN and so is its head. Merge rule: `merge` (scalars; summed Grams would pair one text's
    queries with the other's keys). Source: docs/maths.md#score-moments.
    """

    d_k: int
    scale: float
    count: Int[Tensor, "*heads"]
    mean: Float[Tensor, "*heads"]
    var: Float[Tensor, "*heads"]
    var_within: Float[Tensor, "*heads"]
    row_var_mean: Float[Tensor, "*heads"]
    unit_scale: Float[Tensor, "*heads"]
    visible: Int[Tensor, "*heads queries"]
    row_mean: Float[Tensor, "*heads queries"]
    row_var: Float[Tensor, "*heads queries"]
    budget: Budget
    kernel: str
    skewness: Float[Tensor, "*heads"] | None = None
    singular_values: Float[Tensor, "*heads rank"] | None = None

    @property
    def ratio(self) -> Float[Tensor, "*heads"]:
        """The scale applied over `unit_scale`, which is √var_within: 1 is unit width."""
        return self.var_within.sqrt()

    @property
    def spectral_norm(self) -> Float[Tensor, "*heads"] | None:
        """Largest singular value of the score matrix, None unless asked for."""
        s = self.singular_values
        return None if s is None else (s[..., 0] if s.shape[-1] else s.new_zeros(s.shape[:-1]))

    @property
    def stable_rank(self) -> Float[Tensor, "*heads"] | None:
        """Σσ²/σ₁², 1 … d_k, of the score matrix; NaN for a matrix of zeros, None unless asked."""
        s = self.singular_values
        if s is None or self.spectral_norm is None:
            return None
        shares = s / self.spectral_norm[..., None]
        return torch.where(self.spectral_norm > 0, shares.square().sum(-1), math.nan)

    def __repr__(self) -> str:
        heads = tuple(self.mean.shape)
        return (
            f"<ScoreMoments of {heads} heads, {self.visible.shape[-1]} rows, "
            "before soft-cap and bias>"
        )


def merge(moments: Sequence[ScoreMoments]) -> Pairs:
    """Mean and variance of the scores of several texts together, for each head.

    Leading axes before heads merge too: a batch is so many texts. Heads that count as NaN spoil
    their sum, as a NaN score does; texts without pairs change nothing.
    Raises: ValueError for none, or for different numbers of heads.

    >>> a, b = (score_moments(*torch.randn(2, 3, n, 8)) for n in (5, 7))
    >>> merge([a, b]).count
    tensor([74, 74, 74])
    """
    if not moments:
        raise ValueError("merge needs at least one ScoreMoments")

    def column(of: Callable[[ScoreMoments], Tensor]) -> Tensor:
        found = [x.reshape(-1, x.shape[-1] if x.dim() else 1).T for x in map(of, moments)]
        if len({len(x) for x in found}) > 1:
            raise ValueError(f"cannot merge: heads are {', '.join(str(len(x)) for x in found)}")
        return torch.cat(found, 1)

    count = column(lambda m: m.count)
    texts = Pairs.of(count, column(lambda m: m.mean), column(lambda m: m.var))

    def total(x: Tensor) -> Tensor:
        return (count * x.masked_fill(count == 0, 0.0)).sum(1)

    within, between = (
        total(column(of)) for of in (lambda m: m.var_within, lambda m: m.budget.row_shift)
    )
    return Pairs(texts.count, texts.mean, within, between + texts.between)


def row_budget(
    problem: checks.Problem,
    seen: Visibility,
    rows: RowStats,
    *,
    real: Bool[Tensor, "batch queries"] | None = None,
) -> dict[str, Float[Tensor, "batch heads queries"]]:
    """{"key_bias", "key_spread"} of each row, from which `width_factors` tells why it is wide.

    key_bias    scale²·the variance, over the row's visible keys, of q̄·k, score² ≥ 0; q̄ is the mean
                of the text's rows, for each head: of those `real` (None: all), not empty, finite;
                texts packed into one row of the batch have one mean
    key_spread  mean over them of ‖k − k̄‖², k̄ the mean of the row's own keys, ≥ 0
    Both float64, (batch, heads, queries); before soft-cap and bias, and sinks do not enter. 0 in a
    row that sees one key, NaN in one that is empty or not finite; key_bias is NaN where no row is
    left for q̄. Padding rows get a number too, and `HeadStats` leaves them out.

    Cost: O(n·d) time and memory, a kv head's keys serving its group. A tensor mask that tells more
    than causality and which keys are real costs n²·d, a block at a time. Error: 1e-9 relative for
    inputs of any dtype. Merge rule: by `HeadStats`. Source: docs/maths.md#the-budget-of-a-row.

    >>> from scaledot.dispatch import row_stats
    >>> q, k = torch.eye(4)[None, None], 2 * torch.eye(4)[None, None]
    >>> p = checks.problem(q, k, None)
    >>> row_budget(p, resolve(p, is_causal=True), row_stats(q, k, is_causal=True))["key_spread"]
    tensor([[[0.0000, 2.0000, 2.6667, 3.0000]]], dtype=torch.float64)
    """
    with torch.no_grad(), torch.autocast(problem.query.device.type, enabled=False):
        return _row_budget(problem, seen, rows, real)


def _row_budget(
    p: checks.Problem, seen: Visibility, rows: RowStats, real: Tensor | None
) -> dict[str, Tensor]:
    measured = (rows.visible > 0) & ~rows.nonfinite
    q = p.query.detach().unflatten(1, (p.key.shape[1], p.group))
    toward = _mean_query(q, measured if real is None else measured & real[:, None])
    return _toward(p, seen, toward, rows.visible, rows.nonfinite)


def key_bias(
    problem: checks.Problem,
    seen: Visibility,
    toward: Float[Tensor, "batch heads d_k"],
    visible: Int[Tensor, "batch heads queries"],
    nonfinite: Bool[Tensor, "batch heads queries"],
) -> Float[Tensor, "batch heads queries"]:
    """`row_budget`'s key_bias where the mean query of each head is known and of the queries no more
    than what they see."""
    with torch.no_grad(), torch.autocast(problem.query.device.type, enabled=False):
        mean = toward.unflatten(1, (problem.key.shape[1], problem.group))
        return _toward(problem, seen, mean, visible, nonfinite)["key_bias"]


def _toward(
    p: checks.Problem, seen: Visibility, toward: Tensor, visible: Tensor, nonfinite: Tensor
) -> dict[str, Tensor]:
    batch, queries, d = p.query.shape[0], seen.shape[2], p.query.shape[3]
    kv_heads, keys = p.key.shape[1:3]
    finite = _finite_keys(p.key)
    fit = intervals.recognised(seen)
    weight = _keep_weight(seen if fit is None else fit, finite)
    key = p.key if weight is None else p.key.masked_fill(~weight[..., None], 0.0)
    number = torch.tensor(keys, device=key.device) if weight is None else weight.sum(-1)
    bias = p.query.new_empty(batch, kv_heads, p.group, queries, dtype=torch.float64)
    spread = bias.new_empty(batch, kv_heads, p.group, queries)
    if fit is None:
        x = _centred(key, number)
        along = (x @ toward.mT).mT  # b kv g j
        spread[:] = intervals.dense_spread(x[:, :, None], seen, weight)
        bias[:] = intervals.dense_spread(along[..., None], seen, weight)
    for texts, layout in intervals.layouts(fit) if fit is not None else ():
        # A few heads at a time: what they need stays in the cache, and is small beside the keys.
        step = max(1, _WORK // max(1, keys * d * (texts.stop - texts.start)))
        for heads in (slice(h, h + step) for h in range(0, kv_heads, step)):
            some = None if weight is None else _some(weight, texts, heads)
            x = _centred(
                key[texts, heads], number if weight is None else _some(number, texts, heads)
            )
            along = (x @ toward[texts, heads].mT).mT  # b kv g j
            spread[texts, heads] = intervals.spread(x, layout, some)[:, :, None]
            if some is not None:
                some = some.expand(-1, along.shape[1], -1).repeat_interleave(p.group, 1)
            found = intervals.spread(along.flatten(1, 2)[..., None], layout, some)
            bias[texts, heads] = found.view(*along.shape[:3], queries)
    result = {"key_bias": p.scale**2 * bias.flatten(1, 2), "key_spread": spread.flatten(1, 2)}
    one, unknown = visible == 1, (visible == 0) | nonfinite
    return {
        name: x.masked_fill(one, 0.0).masked_fill(unknown, math.nan) for name, x in result.items()
    }


@torch.no_grad()
def row_spread(
    vectors: Float[Tensor, "batch kv_heads keys dim"], seen: Visibility
) -> Float[Tensor, "batch heads queries"]:
    """Mean square distance of the vectors that each row sees from their own mean, float64, ≥ 0.

    A vector for each key; those that are not finite count as not there. 0 for a row that sees none
    or one. Cost, error: as `row_budget`, whose key_spread this is for keys.
    """
    batch, kv_heads, keys, d = vectors.shape
    fit = intervals.recognised(seen)
    weight = _keep_weight(seen if fit is None else fit, _finite_keys(vectors))
    x = vectors if weight is None else vectors.masked_fill(~weight[..., None], 0.0)
    number = torch.tensor(keys, device=x.device) if weight is None else weight.sum(-1)
    group = seen.shape[1] // max(kv_heads, 1)
    out = x.new_empty(batch, kv_heads, group, seen.shape[2], dtype=torch.float64)
    if fit is None:
        out[:] = intervals.dense_spread(_centred(x, number)[:, :, None], seen, weight)
    for texts, layout in intervals.layouts(fit) if fit is not None else ():
        step = max(1, _WORK // max(1, keys * d * (texts.stop - texts.start)))
        for heads in (slice(h, h + step) for h in range(0, kv_heads, step)):
            some = None if weight is None else _some(weight, texts, heads)
            count = number if weight is None else _some(number, texts, heads)
            part = intervals.spread(_centred(x[texts, heads], count), layout, some)
            out[texts, heads] = part[:, :, None]
    return out.flatten(1, 2)


def _centred(
    key: Float[Tensor, "batch kv_heads keys dim"], number: Int[Tensor, "*keys"]
) -> Float[Tensor, "batch kv_heads keys dim"]:
    """The keys about the mean of so many of them, in float64, those left out being 0."""
    mean = key.sum(2, dtype=torch.float64) / number.clamp(min=1)[..., None]
    return key - mean[:, :, None]


def _some(x: Tensor, texts: slice, heads: slice) -> Tensor:
    """x (#batch, #kv_heads, …) of some texts and heads."""
    return x[texts if len(x) > 1 else slice(None), heads if x.shape[1] > 1 else slice(None)]


def _mean_query(
    q: Float[Tensor, "batch kv_heads group queries dim"], of: Bool[Tensor, "batch heads queries"]
) -> Float[Tensor, "batch kv_heads group dim"]:
    """The mean of some rows, NaN for none."""
    of = of.view(q.shape[:4])
    if of.all():
        return q.mean(-2, dtype=torch.float64)
    total = q.masked_fill(~of[..., None], 0.0).sum(-2, dtype=torch.float64)
    return total / of.sum(-1, keepdim=True)


def width_factors(stats: HeadStats) -> Width:
    """Why the scores of a module's heads are as wide as they are, from its merged measures.

    Every mean is over rows (a `Budget`'s are over pairs, so a long row weighs more there): the
    variance that softmax sees is the mean of score_var; key_bias and the mean square key_spread are
    those of `row_budget`, query_norm the root mean square of ‖q‖; only row_shift, which no row has
    alone, is over pairs. key_spread is about each row's own mean. Each tensor (heads,); NaN for a
    head without rows of two keys. Where calls were scaled differently, `scale` is the root of the
    ratio of scaled to raw variance within rows.

    Merge rule: none; merge the `HeadStats`. Raises: ValueError where a measure is missing.
    Source: docs/maths.md#the-budget-of-a-row.

    >>> from scaledot.dispatch import row_stats
    >>> q, k = 3 * torch.randn(2, 1, 1, 999, 64)
    >>> rows, p = row_stats(q, k), checks.problem(q, k, None)
    >>> extra = row_budget(p, resolve(p), rows) | {"query_norm": q.norm(dim=-1)}
    >>> stats = HeadStats.of(rows, scale=p.scale, d_k=64, kv_heads=1, extra=extra)
    >>> print(width_factors(stats))
    scores are 9 times too wide: norms ×9, alignment ×1
    """
    wanted = ("score_var", "key_bias", "key_spread", "query_norm")
    missing = [name for name in wanted if name not in stats.measures]
    if missing:
        raise ValueError(f"HeadStats has no {' and no '.join(missing)}: width_factors needs them")
    within, key_bias, spread, _ = (stats.measures[name].average for name in wanted)
    query = stats.measures["query_norm"]
    query_norm = (query.average.square() + query.var).sqrt()
    smallest, largest = map(abs, stats.scale)
    if smallest == largest:
        scale = torch.full_like(within, largest)
    else:
        scale = (stats.scaled.within / stats.raw.within).sqrt()
    row_shift, root = stats.scaled.row_shift, math.sqrt(stats.d_k)
    norms = query_norm * spread.sqrt() / stats.d_k
    alignment = torch.where(within == 0, 0.0, within.sqrt() / (scale * root * norms))
    return Width(
        d_k=stats.d_k,
        total=within + row_shift,
        interaction=within - key_bias,
        row_shift=row_shift,
        key_bias=key_bias,
        scale=scale * root,
        norms=norms,
        alignment=alignment,
        query_norm=query_norm,
        key_spread=spread.sqrt(),
    )


def score_moments(
    query: Tensor,
    key: Tensor,
    attn_mask: Mask | Tensor | None = None,
    is_causal: bool | str = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: int | tuple[int, int] | None = None,
    skewness: bool = False,
    singular_values: bool = False,
    kernel: str = "auto",
) -> ScoreMoments:
    """Exact mean and variance of all visible scores scale·⟨q,k⟩, in time linear in their length.

    query (…, heads, queries, d_k), key (…, kv_heads, keys, d_k); the parameters are those of
    `scaledot.attention`. Moments are of the scaled stage, before soft-cap and bias, of every query
    given: leave out those of padding. A boolean mask's True means "may attend".

    attn_mask: causality, window, lengths, keys and segments of a `scaledot.Mask`, in any
        combination, or a boolean tensor that is the same for all heads and queries. Any other
        tensor has no structure, so n² is the price: use `attention(…, return_stats=True)`.
    skewness, singular_values: where every query of a text sees the same keys only.
    kernel: "native" (C++, on a CPU, where it was compiled) or "tiled" (torch, anywhere) runs that
        one or raises with the reason; "auto" takes native where it can. Both compute in float64
        and keep `ERROR`. What ran is in `kernel` of the result.

    Cost: 4·n·d² + 2·n·B·d floating-point operations a head in float64, B = d_k kept within 32 and
    256 (a bounded window: twice that), native about half; memory O(d² + B·d) a head and some 30
    numbers a row.
    Skewness: 4·n·d³/3 more, or the n² scores a block at a time where that is less. Singular values:
    4·n·d² more.
    Error: `ERROR`.
    Raises: ValueError for a mask without structure, and for a kernel that cannot run; ValueError,
    TypeError as `attention`.
    Source: docs/maths.md#score-moments.

    >>> q, k = torch.eye(4), 3 * torch.eye(4)
    >>> m = score_moments(q, k, scale=1.0)
    >>> m.mean, m.var
    (tensor(0.7500, dtype=torch.float64), tensor(1.6875, dtype=torch.float64))
    >>> print(m.budget)
    scores are 1.3 times too wide: scale ×2, norms ×0.65, alignment ×1
    """
    p = checks.problem(query, key, None, scale=scale, enable_gqa=enable_gqa)
    found = resolve(p, attn_mask, is_causal, window)
    seen = intervals.structured(found) if found.bias is None else None
    if seen is None:
        raise checks.no_structure("boolean" if found.bias is None else "additive")
    shared = seen.left is None and seen.right is None and seen.segments is None
    for wanted, name in ((skewness, "skewness"), (singular_values, "singular_values")):
        if wanted and not shared:
            raise checks.not_linear(name)
    with torch.no_grad(), torch.autocast(p.query.device.type, enabled=False):
        return _score_moments(p, seen, shared, skewness, singular_values, _pick(kernel, p))


def _pick(kernel: str, p: checks.Problem) -> str:
    if kernel not in ("auto", "native", "tiled"):
        raise ValueError(f'kernel is {kernel!r}: pass "auto", "native" or "tiled"')
    if kernel == "tiled":
        return kernel
    from scaledot.kernels import native

    reason = native.moments_reason(p.query.device.type)
    if reason is None:
        return "native"
    if kernel == "native":
        raise ValueError(reason)
    return "tiled"


def _score_moments(
    p: checks.Problem, seen: Visibility, shared: bool, skewness: bool, singular_values: bool,
    kernel: str,
) -> ScoreMoments:  # fmt: skip
    batch, heads, queries, d = p.query.shape
    q = p.query.unflatten(1, (p.key.shape[1], p.group))
    k = p.key[:, :, None]
    finite = _finite_keys(p.key)
    layouts = intervals.layouts(seen)
    visible = torch.cat([x.visible for _, x in layouts]).expand(batch, queries)
    of_queries = _spread(q, visible[:, None], None, scatter=shared, kernel=kernel)
    columns = torch.cat([x.columns for _, x in layouts])
    of_keys = _spread(k, columns[:, None], finite, scatter=shared, kernel=kernel)
    mean, var, bias = _rows(
        q,
        p.key,
        layouts,
        finite,
        of_queries,
        of_keys,
        visible[:, None, None],
        kernel,
    )

    seen_by = visible[:, None, None].expand(mean.shape)
    pairs, of_bias = (
        Pairs.of(seen_by.flatten(0, 2), mean.flatten(0, 2), x.flatten(0, 2)) for x in (var, bias)
    )
    two = seen_by > 1
    row_var_mean = var.masked_fill(~two, 0.0).sum(-1) / two.sum(-1)

    def of_head(x: Tensor) -> Tensor:
        """(batch, kv_heads, group, …) or (batch · heads) in the caller's axes."""
        return p.restore(x.reshape(batch, heads, *x.shape[3:]))

    def of_pairs(x: Tensor) -> Tensor:
        return x.reshape(mean.shape[:3])

    within, between = of_pairs(pairs.var_within), of_pairs(pairs.row_shift)
    unknown = within.isnan()
    key_bias = of_pairs(of_bias.var_within)
    gain = torch.full_like(within, math.nan)
    interaction = within - key_bias
    if of_queries.scatter is not None and of_keys.scatter is not None:
        # Neither is a difference, so that total = the sum of three is no tautology.
        together = (of_queries.scatter * of_keys.scatter).sum((-2, -1))
        interaction = together.masked_fill(unknown, math.nan)
        gain = d * interaction / (of_queries.spread * of_keys.spread)
    query_square = of_queries.spread + of_queries.mean.square().sum(-1)
    key_mean = of_keys.mean.square().sum(-1).expand_as(within)
    key_spread = of_keys.spread.expand_as(within)
    norms = (query_square * key_spread).sqrt() / d
    alignment = torch.where(within == 0, 0.0, (within / d).sqrt() / norms)
    square = p.scale**2

    def undefined(x: Tensor) -> Tensor:
        return of_head(x.masked_fill(unknown, math.nan))

    budget = Budget(
        d_k=d,
        total=of_head(square * of_pairs(pairs.var)),
        interaction=of_head(square * interaction),
        row_shift=of_head(square * between),
        key_bias=of_head(square * key_bias),
        scale=of_head(torch.full_like(within, abs(p.scale) * math.sqrt(d))),
        norms=undefined(norms),
        alignment=undefined(alignment),
        query_norm=undefined(query_square.sqrt()),
        key_norm=undefined((key_spread + key_mean).sqrt()),
        key_spread=undefined(key_spread.sqrt()),
        query_mean=undefined(of_queries.mean.norm(dim=-1)),
        key_mean=undefined(key_mean.sqrt()),
        gain=undefined(gain),
    )
    third = values = None
    if skewness:
        third = of_head(
            _skewness(q, p.key, of_queries.mean, of_keys.mean, _keep_weight(seen, finite))
            / of_pairs(pairs.var) ** 1.5 * math.copysign(1, p.scale)
        )  # fmt: skip
    if singular_values:
        values = abs(p.scale) * _singular_values(q, p.key, _keep_weight(seen, finite))
        spoilt = unknown & (of_pairs(pairs.count) > 0)
        values = of_head(values.masked_fill(spoilt[..., None], math.nan))
    return ScoreMoments(
        d_k=d,
        scale=p.scale,
        count=of_head(of_pairs(pairs.count)),
        mean=undefined(p.scale * of_pairs(pairs.mean)),
        var=budget.total,
        var_within=of_head(square * within),
        row_var_mean=of_head(square * row_var_mean),
        unit_scale=of_head(within.rsqrt()),
        visible=of_head(seen_by),
        row_mean=of_head(p.scale * mean),
        row_var=of_head(square * var),
        budget=budget,
        kernel=kernel,
        skewness=third,
        singular_values=values,
    )


def _rows(
    q: Float[Tensor, "batch kv_heads group queries dim"],
    k: Float[Tensor, "batch kv_heads keys dim"],
    layouts: list[tuple[slice, Layout]],
    finite: Bool[Tensor, "batch kv_heads keys"] | None,
    of_queries: _Spread,
    of_keys: _Spread,
    visible: Int[Tensor, "batch 1 1 queries"],
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's mean and variance, and the variance along it of the mean query's raw scores.

    NaN for rows that see nothing, or something that is not a number.
    """
    mean, var, bias = (q.new_full(q.shape[:4], math.nan, dtype=torch.float64) for _ in range(3))
    if of_keys.scatter is not None:
        _of_one_covariance(q, of_keys, mean, var)
        toward = of_queries.mean[..., None, :]
        bias[:] = ((toward @ of_keys.scatter) * toward).sum(-1)
    else:
        for at, layout in layouts:
            some = None if finite is None else finite[at]
            of = of_queries.mean[at]
            _of_prefixes(q[at], k[at], layout, some, of, mean[at], var[at], bias[at], kernel)
    bad = torch.cat([x.spoilt(None if finite is None else finite[at]) for at, x in layouts])
    bad = bad[:, :, None] | ~(mean.isfinite() & var.isfinite()) | (visible == 0)
    # One key has no variance, not even of rounding errors.
    var, bias = (x.masked_fill(visible == 1, 0.0) for x in (var, bias))
    mean, var, bias = (x.masked_fill(bad, math.nan) for x in (mean, var, bias))
    return mean, var, bias


def _finite_keys(key: Tensor) -> Bool[Tensor, "batch kv_heads keys"] | None:
    """Which keys hold numbers only; None if all do."""
    if key.sum().isfinite():
        return None
    finite = torch.cat([x.isfinite().all(-1) for x in key.split(_CHUNK, 2)], 2)
    return None if finite.all() else finite


def _keep_weight(seen: Visibility, finite: Tensor | None) -> Bool[Tensor, "#b #kv keys"] | None:
    """Keys that are real and hold numbers; None if all are."""
    if seen.keep is None or finite is None:
        return finite if seen.keep is None else seen.keep[:, None]
    return finite & seen.keep[:, None]


@dataclass(frozen=True, eq=False)
class _Spread:
    """Weighted mean of vectors, mean square of their distance from it, and their covariance."""

    mean: Float[Tensor, "batch kv_heads group dim"]
    spread: Float[Tensor, "batch kv_heads group"]
    scatter: Float[Tensor, "batch kv_heads group dim dim"] | None


def _spread(
    x: Float[Tensor, "batch kv_heads group length dim"],
    weight: Int[Tensor, "#batch 1 length"],
    finite: Bool[Tensor, "batch kv_heads length"] | None,
    *,
    scatter: bool,
    kernel: str,
) -> _Spread:
    """The spread of vectors, those of weight 0 or not finite left out. NaN if that leaves none.

    With scatter all weights but 0 are the same.
    """
    *lead, length, d = x.shape
    if scatter and kernel == "native":
        return _native_spread(x, weight, finite)
    mean = torch.zeros(*lead, d, dtype=torch.float64, device=x.device)
    square = torch.zeros(lead, dtype=torch.float64, device=x.device)
    full = mean.new_zeros(*lead, d, d) if scatter else None
    total = mean.new_zeros(1, 1, 1)
    for at in _blocks(length, math.prod(lead) * d):
        w = weight[:, :, None, at]
        if finite is not None:
            w = w * finite[:, :, None, at]
        out, w = w == 0, w.to(torch.float64)
        y = x[..., at, :].to(torch.float64)
        some = bool(out.any())
        if some:
            y = y.masked_fill(out[..., None], 0.0)
        count = w.sum(-1)
        centre = (w[..., None, :] @ y).squeeze(-2) / count.clamp(min=1)[..., None]
        y = y.sub_(centre[..., None, :]) if y.dtype != x.dtype else y - centre[..., None, :]
        gap, both = centre - mean, total + count
        share = count / both.clamp(min=1)
        mean = mean + gap * share[..., None]
        length_square = torch.linalg.vector_norm(y, dim=-1).square()
        square = square + (w * length_square).sum(-1)
        square = square + gap.square().sum(-1) * (total * share)
        if full is not None:
            full = full + (y * w[..., None]).mT @ y
            full = full + (gap * (total * share)[..., None])[..., None] * gap[..., None, :]
        total = both
    mean = torch.where(total[..., None] > 0, mean, math.nan)
    return _Spread(mean, square / total, None if full is None else full / total[..., None, None])


def _native_spread(x: Tensor, weight: Tensor, finite: Tensor | None) -> _Spread:
    from scaledot.kernels import native

    there = None
    if finite is not None or not weight.all():
        there = weight > 0 if finite is None else (weight > 0) & finite
        there = there[:, :, None].expand(x.shape[:4]).flatten(1, 2)
    n, mean, total = (
        y.unflatten(1, x.shape[1:3]) for y in native.scatter(x.flatten(1, 2), there)
    )  # fmt: skip
    mean = torch.where(n[..., None] > 0, mean, math.nan)
    total = total / n[..., None, None]
    return _Spread(mean, total.diagonal(dim1=-2, dim2=-1).sum(-1), total)


def _blocks(length: int, width: int) -> Iterator[slice]:
    """Slices of rows, `width` numbers each, that fit in the cache."""
    step = max(1, min(_CHUNK, _WORK // max(width, 1)))
    return (slice(i, min(i + step, length)) for i in range(0, length, step))


def _of_one_covariance(q: Tensor, keys: _Spread, mean: Tensor, var: Tensor) -> None:
    """Fill in each row's mean and variance where all see the same keys: ⟨q,k̄⟩ and qᵀCq."""
    *lead, queries, d = q.shape
    for at in _blocks(queries, math.prod(lead) * d):
        y = q[..., at, :].to(torch.float64)
        rows = y.flatten(2, 3)  # a group shares its covariance
        wide = rows @ torch.cat([keys.scatter[:, :, 0], keys.mean.mT], -1)  # type: ignore[index]
        mean[..., at] = wide[..., -1].view(y.shape[:-1])
        var[..., at] = (wide[..., :-1] * rows).sum(-1).view(y.shape[:-1])


def _of_prefixes(
    q: Float[Tensor, "batch kv_heads group queries dim"],
    k: Float[Tensor, "batch kv_heads keys dim"],
    layout: Layout,
    finite: Bool[Tensor, "batch kv_heads keys"] | None,
    toward: Float[Tensor, "batch kv_heads group dim"],
    mean: Tensor,
    var: Tensor,
    bias: Tensor,
    kernel: str,
) -> None:
    """Fill in each row's mean and variance, and the variance along it of the query `toward`."""
    if 0 in q.shape or 0 in k.shape:
        return
    weight = finite
    if layout.keep is not None:
        keep = layout.keep[:, None].expand(*k.shape[:2], -1)
        weight = keep if finite is None else keep & finite
    batch, *_, d = q.shape
    prefix = _prefix if kernel == "tiled" else _native_prefix
    step = max(1, 8 * _WORK // (math.prod(q.shape[1:3]) * _chunk(d) * max(_chunk(d), d)))
    step = step if kernel == "tiled" else batch
    for at in (slice(b, b + step) for b in range(0, batch, step)):
        some = None if weight is None else weight[at]
        rows, *others = (
            prefix(q[at], k[at], layout.order, part, some, toward[at]) for part in layout.parts
        )
        for other in others:
            rows = rows.merge(other)
        mean[at], var[at] = rows.mean, rows.m2 / rows.count
        bias[at] = rows.bias_m2 / rows.count


def _chunk(d: int) -> int:
    """Keys in a chunk: about d, so that its scores cost what its Gram does."""
    return min(max(32, d), 256)


@dataclass(frozen=True, eq=False)
class _Prefixes:
    """Moments of each row over some keys; those of the query `toward` along the same keys."""

    count: Float[Tensor, "#batch #kv_heads 1 queries"]
    mean: Float[Tensor, "batch kv_heads group queries"]
    m2: Float[Tensor, "batch kv_heads group queries"]
    bias_mean: Float[Tensor, "batch kv_heads group queries"]
    bias_m2: Float[Tensor, "batch kv_heads group queries"]

    def merge(self, other: _Prefixes) -> _Prefixes:
        """Over both sets of keys (Chan, Golub & LeVeque)."""
        count = self.count + other.count
        share = other.count / count.clamp(min=1)
        gap, bias_gap = other.mean - self.mean, other.bias_mean - self.bias_mean
        # What a part without keys calls its mean is no number of the row's.
        gap = torch.where(self.count == 0, 0.0, gap)
        return _Prefixes(
            count,
            torch.where(self.count == 0, other.mean, self.mean) + gap * share,
            self.m2 + other.m2 + gap.square() * (self.count * share),
            self.bias_mean + bias_gap * share,
            self.bias_m2 + other.bias_m2 + bias_gap.square() * (self.count * share),
        )


def _native_prefix(
    q: Float[Tensor, "batch kv_heads group queries dim"],
    k: Float[Tensor, "batch kv_heads keys dim"],
    order: Int[Tensor, " keys"] | None,
    part: Part,
    weight: Bool[Tensor, "batch kv_heads keys"] | None,
    toward: Float[Tensor, "batch kv_heads group dim"],
) -> _Prefixes:
    """As `_prefix`, by native.cpp."""
    from scaledot.kernels import native

    source = part.source(order, k.shape[2])
    if weight is not None:
        weight = weight if source is None else weight[..., source]
    found = native.moments(
        q.flatten(1, 2), k, source, part.runs, part.start, part.stop, weight, toward.flatten(1, 2)
    )
    if weight is None:
        count = (part.stop - part.start).clamp(min=0)[None, None]
    else:
        before = intervals.before(weight)
        count = (before[..., part.stop] - before[..., part.start]).clamp(min=0)
    return _Prefixes(count[:, :, None].to(torch.float64), *(x.view(q.shape[:4]) for x in found))


def _prefix(
    q: Float[Tensor, "batch kv_heads group queries dim"],
    k: Float[Tensor, "batch kv_heads keys dim"],
    order: Int[Tensor, " keys"] | None,
    part: Part,
    weight: Bool[Tensor, "batch kv_heads keys"] | None,
    toward: Float[Tensor, "batch kv_heads group dim"],
) -> _Prefixes:
    """Moments of each row over the keys of one part.

    Axes below: c chunks, t tiles (rows that stop in one chunk), p batches × kv heads, g the group,
    i rows of a tile, j keys of a chunk, d, e dim.
    """
    device = q.device
    *lead, group, queries, d = q.shape
    keys, pairs = k.shape[2], math.prod(lead)
    size = _chunk(d)
    chunks = -(-keys // size)
    source = part.source(order, keys)
    if weight is not None:
        weight = weight.reshape(pairs, keys)
        weight = weight if source is None else weight[:, source]
        before = intervals.before(weight).to(torch.float64)
    else:
        before = torch.arange(keys + 1, dtype=torch.float64, device=device)[None]

    # Where chunks start and end, and where the run starts that goes on after each.
    edge = (torch.arange(chunks + 1, device=device) * size).clamp(max=keys)
    going = edge[:-1] * 0 if part.runs is None else part.runs[edge[1:] - 1]
    fresh = (going >= edge[:-1]).tolist()
    count_in = (before[:, edge[1:]] - before[:, torch.maximum(going, edge[:-1])]).T
    count_before = (before[:, edge[:-1]] - before[:, torch.minimum(going, edge[:-1])]).T

    # Tiles: at most `size` rows whose last key is in one chunk.
    chunk_of = ((part.stop - 1) // size).clamp(min=0)
    rows_in_order = None
    if (chunk_of[1:] < chunk_of[:-1]).any():
        chunk_of, rows_in_order = chunk_of.sort(stable=True)
    rows_of = chunk_of.bincount(minlength=chunks)
    tiles_of = -(-rows_of // size)
    tile_edge = F.pad(tiles_of.cumsum(0), (1, 0)).tolist()
    chunk = torch.repeat_interleave(torch.arange(chunks, device=device), tiles_of)
    nth = torch.arange(len(chunk), device=device) - (tiles_of.cumsum(0) - tiles_of)[chunk]
    first_row = (rows_of.cumsum(0) - rows_of)[chunk] + nth * size
    rows_left = rows_of.cumsum(0)[chunk] - first_row

    out = [torch.empty(*q.shape[:4], dtype=torch.float64, device=device) for _ in range(4)]
    toward = toward.reshape(pairs, group, d)
    place = torch.arange(size, device=device)
    at_once = max(1, min(chunks, _WORK // (pairs * group * size * max(size, d))))
    # What goes on before each chunk of a block, and after the last.
    gram = torch.zeros(at_once + 1, pairs, d, d, dtype=torch.float64, device=device)
    running = gram.new_zeros(pairs, d)
    room = gram.new_empty(pairs, at_once, size + 1, d)
    for c0 in range(0, chunks, at_once):
        c1 = min(c0 + at_once, chunks)
        block = slice(c0 * size, min(c1 * size, keys))
        found = k[:, :, block] if source is None else k.index_select(2, source[block])
        missing = (c1 - c0) * size - found.shape[2]
        # One place more than keys: the step from the earlier mean is one more vector of the Gram.
        terms = room[:, : c1 - c0]
        if missing:
            terms.zero_()
        whole, rest = divmod(found.shape[2], size)
        each = terms.unflatten(0, tuple(lead))
        each[..., :whole, :size, :] = found[:, :, : whole * size].unflatten(2, (whole, size))
        if rest:
            each[..., whole, :rest, :] = found[:, :, whole * size :]
        terms = terms.transpose(0, 1)
        x = terms[:, :, :size]  # c p j d
        real = None
        if weight is not None or missing:
            real = x.new_ones(1, block.stop - block.start) if weight is None else weight[:, block]
            real = F.pad(real.to(torch.float64), (0, missing))
            real = real.view(-1, c1 - c0, size).transpose(0, 1)[..., None]  # c p j 1
            if weight is not None:
                x.nan_to_num_(0.0, 0.0, 0.0).mul_(real)
        goes_on = None
        if part.runs is not None:
            index = (torch.arange(c0, c1, device=device) * size)[:, None] + place
            goes_on = (index >= going[c0:c1, None])[:, None, :, None].to(torch.float64)
        # Each chunk about the mean of what goes on after it.
        n, n_before = count_in[c0:c1, :, None], count_before[c0:c1, :, None]
        centre = (x if goes_on is None else x * goes_on).sum(2) / n.clamp(min=1)
        x.sub_(centre[:, :, None])
        if real is not None:
            x.mul_(real)
        prior = _running_means(centre, n, n_before, running, fresh[c0:c1])
        prior, running = prior[:-1], prior[-1]
        terms[:, :, size] = (centre - prior) * (n * n_before / (n + n_before).clamp(min=1)).sqrt()
        if goes_on is not None:
            terms = torch.cat([x * goes_on, terms[:, :, size:]], 2)
        gram[0] = gram[c0 and at_once]
        torch.matmul(terms.mT, terms, out=gram[1 : c1 - c0 + 1])
        for c, (earlier, own) in enumerate(pairwise(gram[: c1 - c0 + 1].unbind())):
            if not fresh[c0 + c]:
                own += earlier
        along = x @ toward.mT  # c p j g
        along = torch.cat([along, along.square()], -1)
        centre_along, prior_along = (y @ toward.mT for y in (centre[:, :, None], prior[:, :, None]))
        state = gram[: c1 - c0]
        m2_along = ((toward @ state) * toward).sum(-1)[:, :, None]  # c p 1 g

        for t0 in range(tile_edge[c0], tile_edge[c1], at_once):
            t1 = min(t0 + at_once, tile_edge[c1])
            of = chunk[t0:t1] - c0
            here = slice(None) if t1 - t0 == c1 - c0 and len(of.unique()) == len(of) else of
            index = first_row[t0:t1, None] + place
            there = place < rows_left[t0:t1, None]
            rows = index.clamp(max=queries - 1)
            straight = rows_in_order is None and bool(there.all())
            if straight:
                span = slice(int(index[0, 0]), int(index[-1, -1]) + 1)
                y = q[:, :, :, span]
            else:
                rows = rows if rows_in_order is None else rows_in_order[rows]
                y = q.index_select(3, rows.flatten())
            y = y.to(torch.float64).reshape(pairs, group, t1 - t0, size, d).permute(2, 0, 1, 3, 4)
            y = y.reshape(t1 - t0, pairs, group * size, d)

            base = edge[chunk[t0:t1], None]
            start = part.start[rows]
            stop = torch.where(there, part.stop[rows], start)
            j = (base + place)[:, None]
            inside = (j >= start[..., None]) & (j < stop[..., None])
            inside = inside[:, None].to(torch.float64)  # t 1 i j
            if real is not None:
                inside = inside * real[here].mT
            n = (before[:, stop] - before[:, torch.maximum(start, base)]).clamp(min=0)
            n_before = before[:, base] - before[:, torch.minimum(start, base)]
            n, n_before = (z.transpose(0, 1)[:, :, None] for z in (n, n_before))  # t p g i
            share = n_before / (n + n_before).clamp(min=1)

            scores = (y @ x[here].mT).view(t1 - t0, pairs, group, size, size)
            mask = inside[:, :, None]
            scores.mul_(mask)
            mean = scores.sum(-1) / n.clamp(min=1)
            scores.sub_(mean[..., None]).mul_(mask)
            m2 = torch.linalg.vector_norm(scores, dim=-1).square()
            ends = y @ torch.stack([centre[here], prior[here]], -1)
            mean = mean + ends[..., 0].view(mean.shape)
            gap = mean - ends[..., 1].view(mean.shape)
            m2_before = (y @ state[here]).mul_(y).sum(-1).view(mean.shape)
            m2 = m2 + torch.where(n_before > 0, m2_before, 0.0) + gap.square() * (n * share)
            mean = mean - gap * share

            sums = _weighted(inside, along[here]).transpose(2, 3)  # t p 2g i
            bias_mean = sums[:, :, :group] / n.clamp(min=1)
            bias_m2 = (sums[:, :, group:] - n * bias_mean.square()).clamp(min=0)
            bias_mean = bias_mean + centre_along[here].mT
            gap = bias_mean - prior_along[here].mT
            bias_m2 = bias_m2 + torch.where(n_before > 0, m2_along[here].mT, 0.0)
            bias_m2 = bias_m2 + gap.square() * (n * share)
            bias_mean = bias_mean - gap * share

            flat = there.flatten()
            for target, z in zip(out, (mean, m2, bias_mean, bias_m2), strict=True):
                z = z.permute(1, 2, 0, 3).reshape(*lead, group, -1)
                if straight:
                    target[..., span] = z
                else:
                    target[..., rows.flatten()[flat]] = z[..., flat]

    count = (before[:, part.stop] - before[:, part.start]).clamp(min=0)
    count = count.view(*(lead if len(count) > 1 else (1, 1)), 1, queries)
    return _Prefixes(count, *out)


def _running_means(
    centre: Tensor, n: Tensor, n_before: Tensor, running: Tensor, fresh: list[bool]
) -> Tensor:
    """The mean of the keys that go on before each chunk, and after the last: (chunks + 1, p, d)."""
    means = [running]
    share = n / (n + n_before).clamp(min=1)
    for own, weight, new in zip(centre.unbind(), share.unbind(), fresh, strict=True):
        running = own if new else torch.lerp(running, own, weight)
        means.append(running)
    return torch.stack(means)


def _weighted(weight: Tensor, x: Tensor) -> Tensor:
    """weight (t, p or 1, i, j) · x (t, p, j, g), without repeating the weights."""
    if weight.shape[1] == x.shape[1]:
        return weight @ x
    t, p, j, g = x.shape
    together = weight[:, 0] @ x.transpose(1, 2).reshape(t, j, p * g)
    return together.view(t, -1, p, g).transpose(1, 2)


def _skewness(
    q: Tensor, key: Tensor, query_mean: Tensor, key_mean: Tensor, keep: Tensor | None
) -> Tensor:
    """Third central moment of all pairs of raw scores, (batch, kv_heads, group).

    With centred q and k, s − mean = ⟨(q, ⟨q,k̄⟩, 1), (k, 1, ⟨q̄,k⟩)⟩; the sum of its cube over all
    pairs is the inner product of the two sides' third moment tensors.
    """
    *lead, queries, d = q.shape
    keys, wide = key.shape[2], d + 2
    real = torch.ones(1, 1, keys, dtype=torch.bool, device=q.device) if keep is None else keep
    pairs = queries * real.sum(-1, dtype=torch.float64)[..., None]

    def query_side(at: slice) -> Tensor:
        x = q[..., at, :].to(torch.float64) - query_mean[..., None, :]
        shift = x @ key_mean[..., None].expand(*lead, d, 1)
        return torch.cat([x, shift, torch.ones_like(shift)], -1)

    def key_side(at: slice) -> Tensor:
        there = real[:, :, at, None]
        x = torch.where(there, key[:, :, at].to(torch.float64), 0.0) - key_mean
        x = x[:, :, None].expand(*lead, -1, d)
        shift = x @ query_mean[..., None]
        return torch.cat([x, torch.ones_like(shift), shift], -1) * there[:, :, None]

    result = torch.zeros(lead, dtype=torch.float64, device=q.device)
    width = math.prod(lead) * wide
    if queries * keys <= (queries + keys) * wide**2 / 3:
        for a in _blocks(queries, width):
            x = query_side(a)
            for b in _blocks(keys, width):
                for c in _blocks(b.stop - b.start, math.prod(lead) * (a.stop - a.start)):
                    s = x @ key_side(slice(b.start + c.start, b.start + c.stop)).mT
                    result += (s * s * s).sum((-2, -1))
        return result / pairs
    third_q, third_k = (
        _third_moments(side, _blocks(length, width), wide)
        for side, length in ((query_side, queries), (key_side, keys))
    )
    for x, y in zip(third_q, third_k, strict=True):
        # x[b, c] is of a, a+b, a+c: three orders of such a triple, fewer where a comes again.
        result += 3 * (x * y).sum((-2, -1)) - 3 * (x[..., 0, :] * y[..., 0, :]).sum(-1)
        result += x[..., 0, 0] * y[..., 0, 0]
    return result / pairs


def _third_moments(
    side: Callable[[slice], Tensor], blocks: Iterator[slice], wide: int
) -> list[Tensor]:
    """For each component a the matrix Σ x_a·x_b·x_c over b, c ≥ a."""
    total: list[Tensor] = []
    for at in blocks:
        x = side(at)
        found = [(x[..., a:] * x[..., a : a + 1]).mT @ x[..., a:] for a in range(wide)]
        total = [t + f for t, f in zip(total, found, strict=True)] if total else found
    return total


def _singular_values(q: Tensor, key: Tensor, keep: Tensor | None) -> Tensor:
    """Singular values of Q Kᵀ, which are those of R_q R_kᵀ (Q = U R_q, K = W R_k).

    The triangles square to the Gram matrices, and keep the digits that these would lose.
    """
    *lead, queries, d = q.shape
    keys = key.shape[2]
    rank = min(queries, keys, d)

    def triangle(x: Tensor, keep: Tensor | None) -> Tensor:
        r = torch.zeros(*x.shape[:-2], 0, d, dtype=torch.float64, device=x.device)
        for at in _blocks(x.shape[-2], math.prod(x.shape[:-2]) * d):
            y = x[..., at, :].to(torch.float64)
            y = y if keep is None else torch.where(keep[..., at, None], y, 0.0)
            r = torch.linalg.qr(torch.cat([r, y], -2), mode="r").R
        return r

    finite = q.isfinite().all(-1)
    of_queries = triangle(q, None if finite.all() else finite)
    of_keys = triangle(key, keep)[:, :, None]
    if not rank or 0 in lead:
        return torch.zeros(*lead, rank, dtype=torch.float64, device=q.device)
    return torch.linalg.svdvals(of_queries @ of_keys.mT)[..., :rank]
