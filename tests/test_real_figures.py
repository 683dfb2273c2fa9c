"""What-if, attention received, precision, excess and value spread on real q, k and v."""

import math

import pytest
import torch

from scaledot import observe
from scaledot.checks import Problem
from scaledot.dispatch import attention
from scaledot.heads import HeadStats
from scaledot.precision import storage
from scaledot.received import attention_received
from scaledot.reference import ERROR, exact_entropy, excess
from scaledot.spread import centre, squares, value_spread
from scaledot.whatif import sweep, table
from test_real_models import minilm, smollm2  # noqa: F401  # fixtures

TEXT = (
    "Attention weights are a softmax of scaled dot products: each query is compared with every key "
    "it may see, the scores are divided by the square root of the key size, and what is left is a "
    "mean of the values. If the scores are wide, the mean is of one value only. When Mary and John "
    "went to the store, John gave a drink to Mary. "
)


def calls(loaded, text):
    """Every attention of a model on a text: (problem, what is visible, rows)."""
    model, tokenizer = loaded
    inputs = tokenizer(text, return_tensors="pt")
    with observe(model, keep="qk") as seen, torch.no_grad():
        model(**inputs)
    return [seen._find(path, -1) for path in seen.heads]


@pytest.fixture(scope="module", params=["minilm", "smollm2"])
def attentions(request):
    return calls(request.getfixturevalue(request.param), TEXT * 2)


def exact(p: Problem, causal: bool, factor: float = 1.0):
    """(logits, weights) of every pair, n×n in float64."""
    key = p.key.double().repeat_interleave(p.group, 1)
    logits = p.query.double() @ key.mT * p.scale * factor
    if causal:
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        logits = logits.masked_fill(hidden, -math.inf)
    return logits, logits.softmax(-1)


def is_causal(attended):
    return bool(attended.rows.visible[0, 0, 0] == 1)


def test_what_if_is_the_softmax_at_that_scale(attentions):
    for a in attentions[::3]:
        found = sweep(a.problem, a.seen, a.rows)
        for e in range(-3, 4):
            _, p = exact(a.problem, is_causal(a), 2.0**e)
            entropy = torch.special.entr(p).sum(-1)
            torch.testing.assert_close(
                found[f"whatif.entropy.{e}"].double(), entropy, rtol=1e-4, atol=2e-4
            )
            top = p.amax(-1)
            soft = (top < 0.999) & (a.rows.visible > 1)
            margin = torch.logit(top)[soft]
            torch.testing.assert_close(
                found[f"whatif.top_margin.{e}"][soft].double(), margin, rtol=1e-3, atol=1e-3
            )


def test_every_real_head_has_a_curve(attentions):
    p = attentions[1].problem
    stats = HeadStats.of(
        attentions[1].rows, scale=p.scale, d_k=p.query.shape[-1], kv_heads=p.key.shape[1],
        extra=sweep(p, attentions[1].seen, attentions[1].rows),
    )  # fmt: skip
    several = attentions[1].rows.visible > 1
    for head in range(stats.heads):
        curve = table(stats, head)
        assert list(curve.entropy) == sorted(curve.entropy, reverse=True)
        assert list(curve.margin) == sorted(curve.margin)
        assert curve.marks["1/√d_k"] == pytest.approx(1.0)
        if not 0 < curve.largest < math.inf:
            continue
        # The median weight is .9 there, to .15 octaves.
        tops = []
        for octaves in (-0.15, 0.15):
            factor = curve.largest * 2**octaves
            _, weights = exact(p, is_causal(attentions[1]), factor)
            tops.append(float(weights[:, head].amax(-1)[several[:, head]].median()))
        assert tops[0] < 0.9 < tops[1]


def test_received_is_the_column_sum(attentions):
    for a in attentions[::3]:
        p = a.problem
        causal = is_causal(a)
        _, weights = exact(p, causal)
        found = attention_received(
            p.query, p.key, is_causal=causal, scale=p.scale, enable_gqa=True, lse=a.rows.lse
        )
        torch.testing.assert_close(found.double(), weights.sum(2), rtol=1e-4, atol=1e-4)


def test_cost_of_bfloat16_scores_is_that_of_rounding_them(attentions):
    """Over a head's rows within a factor of 2, over all heads of a layer within 1.25."""
    for a in attentions[::3]:
        logits, weights = exact(a.problem, is_causal(a))
        rounded = logits.to(torch.bfloat16).double().softmax(-1)
        real = (weights - rounded).abs().sum(-1) / 2
        found = storage(a.problem, a.seen, a.rows)["bf16_cost"].double()
        ratio = found.mean((0, 2)) / real.mean((0, 2))
        assert float(ratio.min()) > 0.5
        assert float(ratio.max()) < 2
        assert 1 / 1.25 < float(found.mean() / real.mean()) < 1.25


def test_excess_is_entropy_less_the_reference(attentions):
    for a in attentions[::5]:
        logits, weights = exact(a.problem, is_causal(a))
        found = excess(a.problem, a.rows)
        last = logits.shape[-2] - 1
        there = logits[..., last, :]
        for h in range(0, there.shape[1], 3):
            sigma = float(there[0, h].std())
            want = exact_entropy(torch.tensor([float(there.shape[-1])]).numpy(), sigma)[0]
            entropy = float(torch.special.entr(weights[0, h, last]).sum())
            at = float(found["excess_entropy"][0, h, last])
            assert at == pytest.approx(entropy - want, abs=ERROR + 2e-3)


def test_value_spread_is_its_definition(attentions):
    for a in attentions[::3]:
        p, causal = a.problem, is_causal(a)
        _, weights = exact(p, causal)
        values = p.value.double().repeat_interleave(p.group, 1)
        output = weights @ values
        square = values.square().sum(-1)
        apart = square[:, :, None] - 2 * output @ values.mT + output.square().sum(-1)[..., None]
        want = (weights * apart).sum(-1)
        middle = centre(p, a.seen)
        both = torch.cat([p.value, squares(p, middle)[..., None]], -1)
        out, rows = attention(
            p.query, p.key, both, is_causal=causal, scale=p.scale, enable_gqa=True,
            return_stats=True,
        )  # fmt: skip
        found = value_spread(p, a.seen, rows, out[..., :-1], out[..., -1], middle)
        largest = float(want.max())
        torch.testing.assert_close(
            found["value_spread"].double(), want, rtol=1e-4, atol=1e-5 * largest
        )
        relative = found["relative_value_spread"]
        assert torch.equal(relative.isnan(), rows.visible < 2)
