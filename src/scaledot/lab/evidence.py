"""What the articles' claims are tested with: small computations in float64, by the definition of
attention, in closed form, or exactly over a distribution of few values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import torch

from scaledot.dispatch import attention
from scaledot.lab import replicas
from scaledot.lab.published import MODELS
from scaledot.lab.results import chance
from scaledot.reference import gaussian_entropy
from scaledot.scales import factor
from scaledot.stages import Trace, trace


def row(*scores: float, scale: float = 1.0) -> Trace:
    """One query whose scores are given."""
    keys = torch.tensor(scores, dtype=torch.float64)[:, None]
    return trace(torch.ones(1, 1, dtype=torch.float64), keys, keys, scale=scale)


def weights(*scores: float, scale: float = 1.0) -> list[float]:
    return row(*scores, scale=scale).weights[0].tolist()


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def jacobian(*scores: float) -> float:
    return row(*scores).rows.jacobian_trace.item()


def root(d_k: int) -> float:
    """What scores are divided by."""
    return 1 / factor("1/sqrt_d_k", d_k)


def mean_of_dot(d_k: int, measure: Callable[[float], float]) -> float:
    """Mean of a measure of q·k for components ±1: mean 0, variance 1, and the sum is binomial."""
    ways = (math.comb(d_k, up) / 2**d_k * measure(2 * up - d_k) for up in range(d_k + 1))
    return math.fsum(ways)


def variance(d_k: int, scale: float = 1.0) -> float:
    return mean_of_dot(d_k, lambda x: (scale * x) ** 2)


def product_variance(low: float, high: float) -> float:
    """Variance of the product of two independent variables, each either value by a coin."""
    products = [a * b for a in (low, high) for b in (low, high)]
    mean = sum(products) / 4
    return sum((p - mean) ** 2 for p in products) / 4


def exercise_2(d_k: int, *, grown: bool = False, scaled: bool = True) -> float:
    """Largest weight of exercise 2's row; grown: with scores as large as d_k makes them."""
    growth = root(d_k) / root(64) if grown else 1.0
    scores = [growth * s for s in (12.0, 9.0, 6.0, 3.0)]
    return max(weights(*scores, scale=1 / root(d_k) if scaled else 1.0))


r_article = cache(replicas.r_run)


@cache
def exercise_3() -> dict[int, float]:
    return {d: dots.double().var().item() for d, dots in replicas.exercise_dots().items()}


def chance_of(variances: Sequence[float], sizes: Sequence[int], trials: int) -> float:
    """How often sampling alone leaves variances so far from d_k."""
    z = [
        abs(v - d) / replicas.variance_error(d, trials)
        for v, d in zip(variances, sizes, strict=True)
    ]
    return chance(max(z), len(z))


def r_chance(scaled: bool) -> float:
    run = r_article()
    found = [v * d for v, d in zip(run.scaled_variance, replicas.R_SIZES, strict=True)]
    return chance_of(found if scaled else run.variance, replicas.R_SIZES, replicas.R_TRIALS)


def r_row(stage: str, *, scaled: bool = False) -> list[float]:
    run = r_article().scaled if scaled else r_article().raw
    if stage == "slopes":
        return replicas.slopes(run.weights[0]).tolist()
    return (run.weights if stage == "weights" else run.scaled)[0].tolist()


def r_range(scaled: bool) -> list[float]:
    scores = r_row("scores", scaled=scaled)
    return [min(scores), max(scores)]


def r_spread(scaled: bool) -> float:
    low, high = r_range(scaled)
    return high - low


def similarity() -> list[float]:
    q = torch.tensor([[1.0, 0.2, 0.0], [0.0, 1.0, 0.3]], dtype=torch.float64)
    k = torch.tensor([[0.9, 0.1, 0.0], [0.1, 0.9, 0.2], [-1.0, -1.0, 0.0]], dtype=torch.float64)
    return trace(q, k).scores.flatten().tolist()


def products(query: Sequence[float], *keys: Sequence[float]) -> list[float]:
    return trace(torch.tensor([query]).double(), torch.tensor(keys).double()).scores[0].tolist()


def diagonal_share(*scores: float) -> float:
    """Norm of the diagonal of softmax's Jacobian over that of all of it."""
    p = row(*scores).weights[0]
    jacobian = p.diag() - p.outer(p)
    return (jacobian.diagonal().norm() / jacobian.norm()).item()


def value_gradient() -> float:
    """What reaches the winner's value of a gradient of 1 at the output."""
    value = torch.zeros(3, 1, dtype=torch.float64, requires_grad=True)
    keys = torch.tensor(r_row("scores"), dtype=torch.float64)[:, None]
    out = trace(torch.ones(1, 1, dtype=torch.float64), keys, value, scale=1.0).output
    assert out is not None
    return torch.autograd.grad(out.sum(), value)[0].max().item()


def within_rows() -> float:
    """Mean within-row variance where queries differ, all keys are one, and all pairs' is 1."""
    q, k = torch.tensor([[1.0], [-1.0]]), torch.ones(4, 1)
    return trace(q, k, scale=1.0).rows.score_var.mean().item()


def split(heads: int, measure: Callable[[Trace, int], float]) -> float:
    """A measure of d_model 512 in so many heads over the same with one."""

    def of(h: int) -> float:
        x = torch.zeros(1, h, 16, 512 // h)
        return measure(trace(x, x), 512 // h)

    return of(heads) / of(1)


def doubled() -> float:
    """Variance of the scaled scores after q and k are doubled, over that before."""
    x = torch.tensor([[1.0, -1.0], [1.0, 1.0], [-1.0, 2.0]]).double()
    return (trace(2 * x, 2 * x).scaled.var() / trace(x, x).scaled.var()).item()


def own_key(d_k: int, rule: str) -> float:
    """The scaled score of a key equal to its query, both of ±1."""
    x = torch.ones(1, d_k).double()
    return trace(x, x, scale=factor(rule, d_k)).scaled.item()


def initial_spread(d_model: int = 768) -> float:
    """Standard deviation of the scaled scores that nn.Linear's initialisation gives inputs of
    unit size: d_model times a weight's variance, whatever d_k."""
    gain = torch.nn.init.calculate_gain("leaky_relu", math.sqrt(5))
    return d_model * gain**2 / d_model


def gradient(rule: str, d_k: int = 64) -> float:
    """Root mean square of dL/dscore, up to a factor that all rules share: √(n Σp²), which is
    e^(σ²/2) for many Gaussian scores of standard deviation σ."""
    return math.exp(variance(d_k, factor(rule, d_k)) / 2)


def uniformity(rule: str, keys: int = 1024, d_k: int = 64) -> float:
    """Entropy over its largest, of a row of Gaussian scores."""
    width = math.sqrt(variance(d_k, factor(rule, d_k)))
    return gaussian_entropy(keys, width).item() / math.log(keys)


def share_of_sizes(low: int, high: int) -> float:
    """Of the published models, those whose d_k is from low to high."""
    return sum(low <= m.d_k <= high for m in MODELS) / len(MODELS)


def row_sums() -> list[float]:
    """Of a row that sees nothing, and of one with a sink."""
    x = torch.zeros(1, 3, 2).double()
    blind = trace(x, x, attn_mask=torch.zeros(3, 3, dtype=torch.bool)).weights
    sunk = trace(x, x, sinks=torch.zeros(1).double()).weights
    return [blind[0, 0].sum().item(), sunk[0, 0].sum().item()]


def shapes() -> list[float]:
    x, v = torch.zeros(5, 3), torch.zeros(5, 2)
    t = trace(x, x, v)
    assert t.output is not None
    return [*t.scores.shape, *t.output.shape]


def memory(tokens: int) -> float:
    """Numbers that a head keeps for its softmax when its kernel keeps no matrix."""
    x = torch.zeros(1, 1, tokens, 8)
    return attention(x, x, x, return_stats=True)[1].lse.numel()


def attention_over_projections(tokens: int, d_model: int) -> float:
    """Multiply-adds of QKᵀ and ·V over those of W_Q, W_K, W_V and W_O, all heads together."""
    return 2 * tokens**2 * d_model / (4 * tokens * d_model**2)
