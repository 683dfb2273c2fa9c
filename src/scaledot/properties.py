"""What is asked of an attention function, one property a function: a `Subject` in, a verdict out.

Each is asked with the smallest input in which it alone matters: values that are one-hot turn the
output into the weights themselves, and equal scores make them uniform whatever the scale. So one
mistake is found once, with its usual cause, and does not spoil what is asked after it; where the
whole output must be compared, it is compared with `trace` under the mistakes found so far.

Source: the definition is that of `stages`, the conventions those of
`F.scaled_dot_product_attention` (torch 2.10 on) and FlashAttention; docs/check.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scaledot.dispatch import error_bound
from scaledot.probe import (
    RIGHT,
    SEED,
    Property,
    Raised,
    Reading,
    Rule,
    Shape,
    Skip,
    Subject,
    bounded,
    differs,
    digits,
    number,
    ok,
    sees,
    softmax,
    weight,
    wrong,
)
from scaledot.stages import trace

Judge = Callable[["Subject"], Property]

# Is it a function of attention at all


def _axes(f: Subject) -> Property:
    """Uniform scores: the output is the mean of the values over the axis that is attended to."""
    heads, length, dim = 2, 3, 4
    f.describe(heads, dim, length, length, "q·k = 0")
    zero = torch.zeros(1, heads, length, dim, device=f.device, dtype=f.dtype)
    value = f.random(1, heads, length, dim)
    out = f._run(zero, zero, value, True, {})
    shape = (1, heads, length, dim)
    forms = {
        shape: "own", (1, length, heads, dim): "transposed", (1, length, heads * dim): "merged"
    }  # fmt: skip
    if tuple(out.shape) not in forms:
        return wrong(
            f"returns shape {tuple(out.shape)}",
            expected=Reading(str(shape)), came=Reading(str(tuple(out.shape))),
            cause="axes in another order: --layout bshd for (batch, length, heads, dim)",
        )  # fmt: skip
    f.form = forms[tuple(out.shape)]
    try:
        f.call(zero[:, :, :1], zero, value)
    except Raised:
        f.square = True
    if f.form == "own" and length != heads:
        over_heads = value.mean(1, keepdim=True).expand(shape)
        if f.close(out, over_heads) and not f.close(over_heads, value.mean(2, keepdim=True)):
            return wrong(
                "attends over axis 1, the heads",
                expected=Reading("the mean over 3 keys"), came=Reading("the mean over 2 heads"),
                cause="it reads (batch, length, heads, dim): check it with --layout bshd",
            )  # fmt: skip
    own = "(batch, heads, length, dim)" if f.layout == "bhsd" else "(batch, length, heads, dim)"
    if f.form == "own":
        return ok(f"{own} in and out")
    swapped = "(batch, length, heads, dim)" if f.layout == "bhsd" else "(batch, heads, length, dim)"
    other = {"transposed": swapped, "merged": "(batch, length, heads·dim)"}[f.form]
    return differs(f"returns {other}; torch: {own}")


def _deterministic(f: Subject) -> Property:
    f.describe(2, 4, 3, 3, "the same input twice")
    inputs = f.inputs(2, 3, 3, 4)
    first, again = f.call(*inputs), f.call(*inputs)
    if torch.equal(first.isnan(), again.isnan()) and f.close(
        first.nan_to_num(), again.nan_to_num()
    ):
        return ok("the same input gives the same output")
    away = float((first - again).abs().nan_to_num(nan=math.inf).max())
    return wrong(
        f"the same input gives outputs {number(away)} apart",
        expected=Reading("the same output"),
        came=Reading(f"{number(away)} apart"),
        cause="dropout stays on when dropout_p is 0, or memory is read before it is written",
    )


def _every_key(f: Subject) -> Property:
    """Without mask and is_causal nothing is hidden."""
    length = 3
    weights = f.weights([0.0] * length, queries=length)[0]
    seen, total = weights > 0, weights.sum(-1)
    if bool(seen.all()) or not f.close(total, torch.ones(length)):
        return ok("nothing is hidden unless asked for")
    row = int((~seen).any(-1).nonzero()[0])
    causal = torch.equal(seen, torch.ones_like(seen).tril())
    return wrong(
        "later keys are hidden without is_causal" if causal else "keys are hidden without a mask",
        expected=Reading(f"query {row} sees keys 0, 1 and 2"),
        came=Reading(f"query {row} sees {sees(seen[row].nonzero()[:, 0].tolist())}"),
        cause="always causal: torch's is_causal is False by default; check a version without"
        if causal else "a mask of its own, such as a window: check a version without",
    )  # fmt: skip


def _rows(f: Subject) -> Property:
    """Values that are all 1 come out as 1."""
    heads, queries, keys, dim = 2, 3, 4, 4
    ones = torch.ones(1, heads, keys, dim, device=f.device, dtype=f.dtype)
    zero = torch.zeros_like(ones)
    f.describe(heads, dim, queries, keys, "q·k = 0", "v = 1")
    came = float(f.call(zero[:, :, :queries], zero, ones)[0, 0, 0, 0])
    expected = Reading("1", "4 weights of 1/4")
    causes = {
        keys / queries: ("4 keys / 3 queries", "softmax runs over queries: use dim=-1, the keys"),
        keys / heads: ("4 keys / 2 heads", "softmax runs over heads: use dim=-1, the keys"),
        float(keys): ("4 weights of 1", "exp without the division by the row's sum"),
        0.0: ("4 weights of 0", "the scores themselves are used: softmax is missing"),
    }
    if abs(came - keys / heads) < 1e-2 and _alone(f, ones, zero, came):
        causes = {keys / 2: ("4 weights of 1/2", "sigmoid in place of softmax")}
    for value, (how, cause) in causes.items():
        if abs(came - value) < 1e-2:
            return wrong(
                f"rows sum to {weight(came)}, not 1",
                expected=expected, came=Reading(weight(came), how), cause=cause,
            )  # fmt: skip
    sums = [torch.tensor(came)]
    for size in (1.0, 4.0):
        f.describe(heads, dim, queries, keys, f"random q and k × {number(size)}", "v = 1")
        q, k, _ = f.inputs(heads, queries, keys, dim)
        sums.append(f.call(q * size, k, ones)[0])
        if not f.close(sums[-1], torch.ones(())):
            break
    off = max(sums[-1].flatten().tolist(), key=lambda x: abs(x - 1) if x == x else math.inf)
    if abs(off - 1) <= f.tolerance * 2:
        return ok("values of 1 come out as 1")
    return wrong(
        f"rows sum to {weight(off)}, not 1",
        expected=Reading("1"), came=Reading(weight(off)),
        cause="softmax over another axis than the keys (dim=-1), or a sum of more than its terms",
    )  # fmt: skip


def _alone(f: Subject, ones: Tensor, zero: Tensor, came: float) -> bool:
    """Whether rows sum to the same where there is one head."""
    return abs(float(f.call(zero[:, :1], zero[:, :1], ones[:, :1])[0, 0, 0, 0]) - came) < 1e-2


# The scale


_LENGTH = "size(-2), the length, in place of size(-1)"
_RULES = (
    Rule(
        lambda n: (n.heads * n.d_k) ** -0.5,
        "divides by √(heads·d_k), not √d_k", "4/√8", "d_model in place of d_k",
    ),
    Rule(
        lambda n: 1.0,  # noqa: ARG005
        "no scale: q·k enters softmax as it is", "4",
        "the division by √d_k is missing, or left to the caller",
    ),
    Rule(
        lambda n: 1 / n.d_k,
        "divides by d_k, not √d_k", "4/4",
        "scaled twice, or the root forgotten (muP means 1/d_k)",
    ),
    Rule(lambda n: n.d_k**0.5, "multiplies by √d_k", "4·√4", "× in place of ÷"),
    Rule(
        lambda n: n.d_k**-0.25,
        "divides by the fourth root of d_k", "4/√2",
        "d_k^(-1/4), meant for both q and k, applied to one",
    ),
    Rule(
        lambda n: (n.heads / n.d_k) ** 0.5,
        "divides by √(d_k/heads)", "4/√2", "d_k divided by the heads once more",
    ),
    Rule(
        lambda n: 1 / (n.heads * n.d_k),
        "divides by heads·d_k", "4/8", "d_model in place of √d_k",
    ),
    Rule(
        lambda n: n.heads**-0.5,
        "divides by √heads", "4/√2", "size(1), the heads, in place of size(-1)",
    ),
    Rule(lambda n: n.keys**-0.5, "divides by √keys", "4/√2", _LENGTH),
    Rule(lambda n: n.queries**-0.5, "divides by √queries", "4/√1", _LENGTH),
    Rule(
        lambda n: math.log(n.keys) / n.d_k**0.5,
        "multiplies by ln(keys)/√d_k", "4·ln 2/√4", "log-length scaling is on by default",
    ),
)  # fmt: skip
_SHAPES = (Shape(2, 4, 1, 2), Shape(3, 16, 2, 4), Shape(5, 8, 3, 3))
"""Shapes in which no two rules give the same factors."""


def _factor(f: Subject, shape: Shape, score: float) -> tuple[Tensor, float]:
    """(the first row's weights, the factor that they show)."""
    scores = [score] + [0.0] * (shape.keys - 1)
    row = f.weights(scores, queries=shape.queries, heads=shape.heads, dim=shape.d_k)[0, 0]
    return row, float((row[0] / row[1]).log()) / score


def _scale(f: Subject) -> Property:
    f.needs_right("rows sum to 1")
    measured = [
        # A square function gets as many queries as keys.
        (_factor(f, n, 4.0)[1], n._replace(queries=n.keys) if f.square else n)
        for n in _SHAPES
    ]
    half = _factor(f, _SHAPES[0], 1.0)[1]
    row, factor = _factor(f, _SHAPES[0], 4.0)
    expected = Reading(digits(softmax(2, 0)), "softmax(4/√4, 0)")
    equal = f.weights([0.0, 0.0])[0, 0]
    if not f.near(equal, 0.5, 0.5):
        f.rule, f.linear, f.even = None, False, False
        return wrong(
            "equal scores get unequal weights",
            expected=Reading(".5000 .5000", "softmax(0, 0)"), came=Reading(digits(equal)),
            cause="a bias of positions is built in (ALiBi, relative): check a version without",
        )  # fmt: skip
    f.describe(2, 4, 1, 2, "q·k = 4 and 0")
    if abs(factor) < 1e-3:
        f.rule, f.linear = None, False
        return wrong(
            "weights do not depend on q·k", expected=expected, came=Reading(digits(row)),
            cause="query and key exchanged, or scores that never reach softmax",
        )  # fmt: skip
    if not math.isfinite(factor) or not f.same(half, factor):
        f.rule, f.linear = None, False
        return wrong(
            f"weights do not follow q·k: factor {number(factor)} at q·k = 4, "
            f"{number(half)} at q·k = 1",
            expected=expected, came=Reading(digits(row)),
            cause="q and k normalised first, a soft-cap that is always on, or no exp",
        )  # fmt: skip
    for rule in (RIGHT, *_RULES):
        if all(f.same(found, rule.factor(n)) for found, n in measured):
            f.rule = rule
            break
    else:
        constant = all(f.same(found, factor) for found, _ in measured)
        rule, f.rule = _unknown_rule(factor, constant)
    if rule is RIGHT:
        return ok(rule.result)
    return wrong(
        rule.result, expected=expected,
        came=Reading(digits(row), f"softmax({rule.shown}, 0)"), cause=rule.cause or None,
    )  # fmt: skip


def _unknown_rule(factor: float, constant: bool) -> tuple[Rule, Rule | None]:
    """(what to say of a factor that no rule gives, the rule to go on with if it is known exactly).
    A number written into the code is most often 1/√n."""
    n = round(1 / factor**2) if 0 < factor < 1 else 0
    root = n > 1 and abs(1 / factor**2 - n) < 0.05
    shown = f"1/√{n}" if root else number(factor)
    rule = Rule(
        lambda _: n**-0.5,
        f"multiplies by {shown}{', whatever d_k is' if constant else ', not by 1/√d_k'}",
        f"4/√{n}" if root else f"4·{shown}",
        "a number written into the code" if constant else "",
    )
    return rule, rule if root and constant else None


def _default_factor(f: Subject) -> float:
    """The factor that this function applies in the smallest input."""
    return _factor(f, _SHAPES[0], 4.0)[1]


def _custom_scale(f: Subject) -> Property:
    f.needs("scale")
    f.needs_right("rows sum to 1")
    f.needs_linear()
    own, given = _default_factor(f), 0.25
    row = f.weights([4.0, 0.0], scale=given)[0, 0]
    came = float((row[0] / row[1]).log()) / 4
    if f.same(came, given):
        return ok("scale multiplies q·k, in place of 1/√d_k")
    known = {
        own: ("scale is ignored", "4·" + number(own), "the parameter is never read"),
        1 / given: ("divides by scale", "4/0.25", "scale taken for a divisor: it multiplies"),
        own * given: (
            "scale applies on top of the default", f"4·{number(own)}·0.25",
            "the division by √d_k stays when scale is given",
        ),
        own / given: (
            "divides by scale, on top of the default", f"4·{number(own)}/0.25",
            "scale taken for a divisor: it multiplies",
        ),
    }  # fmt: skip
    result, how, cause = next(
        (said for value, said in known.items() if f.same(came, value)),
        (f"scale=0.25 gives a factor of {number(came)}", "", ""),
    )
    return wrong(
        result, expected=Reading(digits(softmax(1, 0)), "softmax(4·0.25, 0)"),
        came=Reading(digits(row), f"softmax({how}, 0)" if how else ""), cause=cause or None,
    )  # fmt: skip


def _large_scores(f: Subject) -> Property:
    f.needs_right("rows sum to 1")
    f.needs_linear()
    small = f.weights([4.0, 0.0])[0, 0]
    shift = 4000.0 if f.dtype == torch.float64 else 1000.0  # exp of half of it overflows
    for scores in ([shift + 4, shift], [-shift, -shift - 4]):
        row = f.weights(scores)[0, 0]
        if f.close(row, small):
            continue
        overflow = not bool(row.isfinite().all())
        if not overflow and f.dtype in (torch.bfloat16, torch.float16):
            continue  # scores of this size round to the nearest 2 or 4
        return wrong(
            "NaN or infinity for large scores" if overflow else "a shift of all scores changes it",
            expected=Reading(digits(small), "as for q·k = 4 and 0"), came=Reading(digits(row)),
            cause="exp without subtracting the row's maximum" if overflow
            else "softmax sees only differences: scores are clipped or transformed before it",
        )  # fmt: skip
    return ok(f"adding {number(shift)} to every score changes nothing")


# Masks


def _learn_mask_form(f: Subject) -> None:
    """Whether masks of (queries, keys) are taken, or only of (batch, heads, queries, keys)."""
    q, k, v = f.inputs(2, 3, 4, 4)
    for full in (False, True):
        f.full_masks = full
        for mask in (torch.ones(3, 4, dtype=torch.bool), torch.zeros(3, 4, dtype=f.dtype)):
            try:
                f.call(q, k, v, attn_mask=mask.to(f.device))
            except Raised:
                continue
            return
    f.full_masks = False


def _polarity(f: Subject) -> Property:
    f.needs("attn_mask")
    f.needs_right("rows sum to 1")
    _learn_mask_form(f)
    logit = 4 * _default_factor(f)
    row = f.weights([4.0, 4.0], attn_mask=f.tensor([True, False]))[0, 0]
    shown = row > f.tolerance * 0.1
    if shown[0] and not shown[1]:
        f.hides = "true shows"
        return ok('True means "may attend"')
    known = (
        (softmax(1, 0), "a boolean mask is added as 1 and 0", "softmax(2 + 1, 2 + 0)",
         "scores + mask with a boolean mask: use masked_fill(~mask, −∞)"),
        (softmax(logit / 4, 0), "a boolean mask is added as 1 and 0", "softmax((4 + 1)/√4, 4/√4)",
         "scores + mask with a boolean mask: use masked_fill(~mask, −∞)"),
        (softmax(logit, 0), "a boolean mask multiplies the scores", "softmax(4·1·scale, 4·0)",
         "a score of 0 is not hidden: fill with −∞ before softmax"),
        (softmax(0, 0), "a boolean mask is ignored", "softmax(2, 2)", "the mask is never applied"),
    )  # fmt: skip
    expected = Reading("1 0", "key 0 may attend, key 1 is hidden")
    if shown[1] and not shown[0]:
        f.hides = "true hides"
        return wrong(
            "inverted: True hides", expected=expected, came=Reading(digits(row)),
            cause="the polarity of nn.MultiheadAttention; masked_fill(mask, −∞) without ~",
        )  # fmt: skip
    for weights, result, how, cause in known:
        if f.close(row, weights):
            return wrong(result, expected=expected, came=Reading(digits(row), how), cause=cause)
    cause = "a finite number in place of −∞, or the mask is not applied to the scores"
    return wrong(
        "a hidden key keeps weight" if row.isfinite().all() else "NaN with a boolean mask",
        expected=expected, came=Reading(digits(row)), cause=cause,
    )  # fmt: skip


def _additive(f: Subject) -> Property:
    f.needs("attn_mask")
    f.needs_right("rows sum to 1")
    f.needs_even()
    factor = _default_factor(f)
    f.floats = False
    hidden = f.weights([4.0, 4.0], attn_mask=f.tensor([0.0, -math.inf]))[0, 0]
    f.floats = True
    came = f.weights([4.0, 4.0], attn_mask=f.tensor([0.0, 2.0]))[0, 0]
    hides = bool(hidden[0] > 0 and hidden[1] == 0)
    if hides and f.hides is None:
        f.hides = "minus infinity"
    right = softmax(0, 2)
    expected = Reading(digits(right), "softmax(0, 2)")
    if f.close(came, right):
        if hides:
            return ok("a float mask is added to the scaled scores")
        f.weights([4.0, 4.0], attn_mask=f.tensor([0.0, -math.inf]))
        return wrong(
            "−∞ does not hide", expected=Reading("1 0"), came=Reading(digits(hidden)),
            cause="the mask passes a function that turns −∞ into a number or NaN",
        )  # fmt: skip
    for row, means in (((0.0, 1.0), "0 hides"), ((1.0, 0.0), "0 shows, other numbers hide")):
        if came.min() < 1e-4 and f.near(came / came.sum(), *row):
            return differs(
                f"a float mask is read as a boolean, {means}; torch: it is added",
                expected=expected, came=Reading(digits(came)),
                cause="masked_fill(mask == 0, −∞), as in The Annotated Transformer",
            )  # fmt: skip
    score = 4 * factor
    known = (
        (softmax(0, 2 * factor), "the mask is added before the scale",
         f"softmax(0, 2·{number(factor)})", "(q·k + mask)·scale: add the mask after the scale"),
        (softmax(0, 2 * score), "the mask multiplies the scores", "softmax(0, 2·2)",
         "scores * mask: add it"),
        (softmax(0, -2), "the mask is subtracted", "softmax(0, −2)", "the sign of the mask"),
        (softmax(0, 0), "only −∞ counts: other numbers are dropped" if hides
         else "a float mask is ignored", "softmax(0, 0)",
         "the mask is turned into a boolean" if hides else "the mask is never applied"),
    )  # fmt: skip
    for weights, result, how, cause in known:
        if f.close(came, weights):
            return wrong(result, expected=expected, came=Reading(digits(came), how), cause=cause)
    return wrong(
        "a float mask is not added", expected=expected, came=Reading(digits(came)),
        cause="the mask is applied after softmax, or to something else than the scaled scores",
    )  # fmt: skip


def _zero_one(f: Subject) -> Property:
    f.needs("attn_mask")
    f.needs_right("rows sum to 1", "additive mask")
    f.needs_even()
    if not f.floats:
        raise Skip("unsupported", "no float mask is taken: see additive mask")
    try:
        row = f.weights([4.0, 4.0], attn_mask=f.tensor([0.0, 1.0]))[0, 0]
    except Raised as raised:
        if isinstance(raised.error, (ValueError, TypeError)):
            return ok(f"refused: {raised}")
        raise
    if f.close(row, softmax(0, 1)):
        return ok("added, as torch does: it hides nothing, so pass mask.bool()")
    for shown, means in (((0.0, 1.0), "1 shows, 0 hides"), ((1.0, 0.0), "1 hides, 0 shows")):
        if row.min() < 1e-4 and f.near(row / row.sum(), *shown):
            return differs(
                f"{means}; torch adds it, and hides nothing",
                expected=Reading(digits(softmax(0, 1)), "softmax(0, 1)"),
                came=Reading(digits(row)),
            )
    return wrong(
        "neither added nor read as a boolean",
        expected=Reading(digits(softmax(0, 1)), "softmax(0, 1)"), came=Reading(digits(row)),
    )  # fmt: skip


def _masked_rows(f: Subject) -> Property:
    """Under any mask the visible weights of a row still sum to 1."""
    f.needs_right("rows sum to 1")
    tries: list[dict[str, Any]] = []
    if f.hides is not None:
        tries.append({"attn_mask": f.hiding(f.tensor([True, True, False]))})
        if f.hides != "minus infinity" and f.floats and "additive mask" not in f.wrong:
            tries.append({"attn_mask": f.tensor([0.0, 0.0, -math.inf])})
    if "is_causal" in f.names:
        tries.append({"is_causal": True})
    asked = 0
    refused: Raised | None = None
    for arguments in tries:
        try:
            row = f.weights([4.0] * 3, queries=3 if "is_causal" in arguments else 1, **arguments)
        except Raised as raised:
            refused = raised
            continue
        asked += 1
        # Of a causal mask the middle row; an off-by-one mistake there shows up elsewhere.
        row = row[0, len(row[0]) // 2]
        seen = int((row > 0).sum())
        total = float(row.sum())
        if not seen or abs(total - 1) <= f.tolerance * 2:
            continue
        after = abs(total - seen / 3) < 0.02
        return wrong(
            f"masked rows sum to {weight(total)}, not 1",
            expected=Reading(digits(row / total), "adds to 1"),
            came=Reading(digits(row), f"adds to {weight(total)}"),
            cause="the mask multiplies the weights after softmax, which leaves them too small"
            if after else "softmax divides by a sum that counts hidden keys",
        )  # fmt: skip
    if asked:
        return ok("hidden keys leave the sum at 1")
    if refused:
        raise refused
    f.needs("attn_mask")
    return Property("", "unsupported", "no mask is taken: see mask polarity")


def _pattern(weights: Tensor) -> Tensor:
    """Which keys have weight: an empty row sees none, be it 0 or NaN."""
    return weights > 0


def _mask_shapes(f: Subject) -> Property:
    f.needs("attn_mask")
    f.needs_right("rows sum to 1")
    batch, heads, queries, keys, dim = 2, 3, 4, 5, 8
    generator = torch.Generator().manual_seed(SEED)
    taken, refused = [], []
    zero = torch.zeros(batch, heads, keys, dim, device=f.device, dtype=f.dtype)
    value = torch.eye(keys, dim, device=f.device, dtype=f.dtype).expand(batch, heads, keys, dim)
    shapes = {
        "(queries, keys)": (queries, keys),
        "(batch, 1, 1, keys)": (batch, 1, 1, keys),
        "(1, heads, queries, keys)": (1, heads, queries, keys),
        "(batch, heads, queries, keys)": (batch, heads, queries, keys),
    }
    full, f.full_masks = f.full_masks, False
    try:
        for name, shape in shapes.items():
            allowed = torch.rand(shape, generator=generator) < 0.5
            allowed[..., 1] = True
            f.input = f"{batch} batches, {heads} heads, {queries} queries, {keys} keys, mask {name}"
            mask = f.hiding(allowed.to(f.device))
            try:
                out = f.call(zero[:, :, :queries], zero, value, attn_mask=mask)
            except Raised:
                refused.append(name)
                continue
            taken.append(name)
            seen = _pattern(out[..., :keys].cpu())
            want = allowed.expand(batch, heads, queries, keys)
            if torch.equal(seen, want):
                continue
            b, h, q = (seen != want).any(-1).nonzero()[0].tolist()
            row = f"batch {b}, head {h}, query {q} sees "
            return wrong(
                f"a mask {name} is read along other axes",
                expected=Reading(row + sees(want[b, h, q].nonzero()[:, 0].tolist())),
                came=Reading(row + sees(seen[b, h, q].nonzero()[:, 0].tolist())),
                cause="unsqueeze, repeat or view on the wrong axis of the mask",
            )  # fmt: skip
    finally:
        f.full_masks = full
    if not taken:
        raise Skip("unsupported", "no shape with more than one batch is taken")
    if refused:
        return differs(f"takes {', '.join(taken)} only; torch: any that broadcasts")
    return ok("any that broadcasts to (batch, heads, queries, keys)")


# Causality


def _causal(f: Subject) -> Property:
    f.needs("is_causal")
    f.needs_right("rows sum to 1")
    length = 3
    weights = f.weights([4.0] * length, queries=length, is_causal=True)[0]
    f.takes_causal = True
    seen = _pattern(weights)
    ones = torch.ones(length, length, dtype=torch.bool)
    if not torch.equal(seen, ones.tril()):
        f.shift = next((d for d in (1, -1) if torch.equal(seen, ones.tril(d))), 0)
        row = int((seen != ones.tril()).any(-1).nonzero()[0])
        known = (
            (ones.tril(1), "a query sees one key past its own",
             "off by one: triu(diagonal=1) is what to hide, tril(diagonal=0) what to show"),
            (ones.tril(-1), "a query does not see its own key",
             "off by one: triu(diagonal=0) hides the diagonal too"),
            (ones, "is_causal changes nothing",
             "is_causal is never read, or the mask multiplies the scores, where 0 hides nothing"),
            (ones.triu(), "inverted: a query sees only its own and later keys",
             "triu in place of tril, or a boolean mask inverted"),
            (ones.triu(1), "inverted: a query sees only later keys", "a boolean mask inverted"),
        )  # fmt: skip
        result, cause = next(
            ((result, cause) for pattern, result, cause in known if torch.equal(seen, pattern)),
            ("not the keys up to the query's own", ""),
        )
        return wrong(
            result, expected=Reading(f"query {row} sees {sees(list(range(row + 1)))}"),
            came=Reading(f"query {row} sees {sees(seen[row].nonzero()[:, 0].tolist())}"),
            cause=cause or None,
        )  # fmt: skip
    length, dim = 5, 4
    f.describe(2, dim, length, length, "the last key and value changed", is_causal=True)
    q, k, v = f.inputs(2, length, length, dim)
    before = f.call(q, k, v, is_causal=True)[:, :, :-1]
    changed = v.clone()
    changed[:, :, -1] += 3
    k2 = k.clone()
    if "masked rows" not in f.wrong:  # there a hidden key stays in the denominator
        k2[:, :, -1] += 3
    after = f.call(q, k2, changed, is_causal=True)[:, :, :-1]
    if f.close(after, before):
        return ok("a change of the last key and value moves no earlier row")
    return wrong(
        "a later key moves earlier rows",
        expected=Reading("rows 0 to 3 as before"),
        came=Reading(f"rows 0 to 3 move by {number(float((after - before).abs().max()))}"),
        cause="hidden keys enter the softmax's sum, or a maximum over all keys",
    )


def _alignment(f: Subject) -> Property:
    f.needs("is_causal")
    f.needs_right("rows sum to 1")
    if "future leak" in f.wrong and not f.shift:
        raise Skip("unjudged", "see future leak")
    if f.square:
        raise Skip("unsupported", "as many queries as keys are needed")
    queries, keys = 2, 4
    seen = _pattern(f.weights([4.0] * keys, queries=queries, is_causal=True)[0])
    ones = torch.ones(queries, keys, dtype=torch.bool)
    first, last = ones.tril(f.shift), ones.tril(f.shift + keys - queries)
    came = Reading(f"query 0 sees {sees(seen[0].nonzero()[:, 0].tolist())}")
    if torch.equal(seen, first):
        return differs("top-left, as torch; FlashAttention: bottom-right", came=came)
    if torch.equal(seen, last):
        return differs(
            "bottom-right, as FlashAttention and every KV cache; torch: top-left", came=came
        )
    return wrong(
        "unequal lengths: neither top-left nor bottom-right",
        expected=Reading("query 0 sees key 0, or keys 0, 1 and 2"), came=came,
        cause="the causal mask is made for one length only",
    )  # fmt: skip


def _mask_and_causal(f: Subject) -> Property:
    f.needs("attn_mask", "is_causal")
    f.needs_right("rows sum to 1")
    if "future leak" in f.wrong and not f.shift:
        raise Skip("unjudged", "see future leak")
    length = 3
    allowed = torch.tensor([True, False, True]).expand(length, length)
    mask = f.hiding(allowed.to(f.device))
    more = "mask hides key 1"
    seen = _pattern(
        f.weights([4.0] * 3, queries=length, more=more, attn_mask=mask, is_causal=True)[0]
    )
    causal = torch.ones(length, length, dtype=torch.bool).tril(f.shift)
    if torch.equal(seen, allowed & causal):
        return ok("both apply")
    row = int((seen != (allowed & causal)).any(-1).nonzero()[0])
    both = (allowed & causal)[row].nonzero()[:, 0].tolist()
    result, cause = "neither applies as it does alone", ""
    if torch.equal(seen, causal):
        result, cause = "attn_mask is ignored", "the causal mask replaces it: combine the two"
    elif torch.equal(seen, allowed):
        result, cause = "is_causal is ignored", "the mask replaces the causal one: combine the two"
    return wrong(
        f"together, {result}", expected=Reading(f"query {row} sees {sees(both)}"),
        came=Reading(f"query {row} sees {sees(seen[row].nonzero()[:, 0].tolist())}"),
        cause=cause or None,
    )  # fmt: skip


# Heads and batches


def _grouped(f: Subject) -> Property:
    f.needs_right("rows sum to 1")
    heads, kv_heads, keys, dim = 4, 2, 2, 4
    f.input = f"{heads} heads on {kv_heads} kv heads, d_k {dim}, 1 query, {keys} keys"
    query = torch.ones(1, heads, 1, dim, device=f.device, dtype=f.dtype)
    value = torch.zeros(1, kv_heads, keys, dim, device=f.device, dtype=f.dtype)
    for g in range(kv_heads):
        value[:, g, :, g] = 1
    arguments = {"enable_gqa": True} if "enable_gqa" in f.names else {}
    try:
        out = f.call(query, torch.zeros_like(value), value, **arguments)
    except Raised:
        f.needs("enable_gqa")  # else it was not asked to take fewer kv heads
        raise
    by_value = [_which(row, f.tolerance) for row in out[0, :, 0, :kv_heads].double().cpu()]
    # The keys: kv head g scores its own key g.
    key = torch.zeros_like(value)
    for g in range(kv_heads):
        key[:, g, g] = 4
    eye = torch.eye(keys, dim, device=f.device, dtype=f.dtype).expand_as(value)
    out = f.call(query, key, eye, **arguments)
    by_key = [int(row.argmax()) for row in out[0, :, 0, :keys].double().cpu()]
    expected = Reading("0 0 1 1", "head h reads kv head h // 2")
    order = [h // 2 for h in range(heads)]
    if by_value == order and by_key == order:
        return ok("head h reads kv head h // (heads // kv_heads)")
    tiled = [h % 2 for h in range(heads)]
    for found, other, what in ((by_value, by_key, "values"), (by_key, by_value, "keys")):
        if found == order:
            continue
        which = "" if found == other else f"of the {what}: "
        came = " ".join("?" if g is None else str(g) for g in found)
        if found == tiled:
            return wrong(
                f"{which}tiled: 0 1 0 1, not 0 0 1 1", expected=expected,
                came=Reading(came, "head h reads kv head h % 2"),
                cause="repeat (tile) in place of repeat_interleave",
            )  # fmt: skip
        return wrong(
            f"{which}heads read kv heads {came}", expected=expected, came=Reading(came),
            cause="kv heads are broadcast or mixed, not repeated",
        )  # fmt: skip
    raise AssertionError("one of the two is out of order")


def _which(row: Tensor, tolerance: float) -> int | None:
    """The one place that holds 1."""
    index = int(row.argmax())
    sharp = torch.zeros_like(row)
    sharp[index] = 1
    return index if bool(((row - sharp).abs() <= 5 * tolerance).all()) else None


def _apart(axis: int) -> Judge:
    """Heads, or batches, do not see each other."""
    one, many = ("batch", "batches") if axis == 0 else ("head", "heads")
    causes = (
        "view or reshape mixes the batch with another axis",
        "heads and lengths mixed by view without transpose, or softmax over heads",
    )

    def judge(f: Subject) -> Property:
        f.needs_right("rows sum to 1")
        batch, heads = (2, 2) if axis == 0 else (1, 2)
        f.describe(heads, 4, 3, 3, f"{one} 1 changed")
        if axis == 0:
            f.input = f"2 batches, {f.input}"
        inputs = f.inputs(heads, 3, 3, 4, batch)
        others = f.inputs(heads, 3, 3, 4, batch, seed=1)
        before = f.call(*inputs).select(axis, 0)
        changed = [
            torch.cat([x.narrow(axis, 0, 1), y.narrow(axis, 1, 1)], axis)
            for x, y in zip(inputs, others, strict=True)
        ]
        after = f.call(*changed).select(axis, 0)
        if f.close(after, before):
            return ok(f"{many} do not see each other")
        away = float((after - before).abs().nan_to_num(nan=math.inf).max())
        return wrong(
            f"{one} 0 sees {one} 1", expected=Reading(f"{one} 0 as before"),
            came=Reading(f"{one} 0 moves by {number(away)}"), cause=causes[axis],
        )  # fmt: skip

    return judge


# Edges


def _empty_rows(f: Subject) -> Property:
    f.needs_right("rows sum to 1")
    f.needs_even()
    allowed = torch.tensor([[False, False], [True, True]], device=f.device)
    mask = f.hiding(allowed)
    more = "mask hides every key of query 0"
    row = f.weights([4.0, 4.0], queries=2, more=more, attn_mask=mask)[0, 0]
    if bool((row == 0).all()):
        return ok("0, as torch and FlashAttention")
    came = Reading(digits(row))
    if bool(row.isnan().all()):
        spoilt = _spoils_gradients(f, mask)
        also = ", and in the gradients of every other row" if spoilt else ""
        return differs(
            f"NaN{also}; torch: 0", expected=Reading("0 0"), came=came,
            cause="softmax over −∞ alone is 0/0",
        )  # fmt: skip
    if f.near(row, 0.5, 0.5):
        return differs(
            "the mean of every value, hidden ones too; torch: 0", expected=Reading("0 0"),
            came=came, cause="a large negative number in place of −∞",
        )  # fmt: skip
    return wrong(
        "neither 0, NaN nor uniform", expected=Reading("0 0"), came=came,
        cause="memory is read before it is written, or the mask is half applied",
    )  # fmt: skip


def _spoils_gradients(f: Subject, mask: Tensor) -> bool:
    """Whether one empty row makes the gradients of the other rows NaN."""
    with torch.enable_grad():
        q, k, v = (x.requires_grad_() for x in f.inputs(2, 2, 2, 4))
        try:
            out = f.call(q, k, v, attn_mask=mask)
        except Raised:
            return False
        if not out.requires_grad:
            return False
        grads = torch.autograd.grad(out[:, :, 1].sum(), [q, k, v], allow_unused=True)
    return any(g is not None and bool(g.isnan().any()) for g in grads)


def _hidden_nan(f: Subject) -> Property:
    f.needs_right("rows sum to 1")
    mask = f.hiding(torch.tensor([[True, False]], device=f.device))
    q, k, v = f.inputs(2, 1, 2, 4)
    leaks = []
    for name, at in (("value", 2), ("key", 1)):
        inputs = [q, k, v]
        inputs[at] = inputs[at].clone()
        inputs[at][:, :, 1] = math.nan
        f.describe(2, 4, 1, 2, f"the hidden {name} is NaN")
        if bool(f.call(*inputs, attn_mask=mask).isnan().any()):
            leaks.append(name)
    if not leaks:
        return ok("does not matter")
    f.describe(2, 4, 1, 2, f"the hidden {leaks[0]} is NaN")
    return differs(
        f"NaN comes through from a hidden {' and '.join(leaks)}, as in torch; scaledot: no matter",
        expected=Reading("the output without that key"), came=Reading("NaN"),
        cause="a weight of 0 times NaN is NaN: leave padding finite",
    )  # fmt: skip


def _visible_nan(f: Subject) -> Property:
    f.describe(2, 4, 1, 2, "key 1 is NaN")
    q, k, v = f.inputs(2, 1, 2, 4)
    k[:, :, 1] = math.nan
    if bool(f.call(q, k, v).isnan().all()):
        return ok("comes through as NaN")
    return differs(
        "a NaN that is seen disappears; torch: NaN", expected=Reading("NaN"),
        came=Reading("a number"), cause="nan_to_num on the weights, meant for empty rows",
    )  # fmt: skip


def _softcap(f: Subject) -> Property:
    f.needs("softcap")
    f.needs_right("rows sum to 1")
    f.needs_linear()
    cap, factor = 1.5, _default_factor(f)
    logit = 4 * factor
    row = f.weights([4.0, 0.0], softcap=cap)[0, 0]
    right = cap * math.tanh(logit / cap)
    shown = number(logit)
    expected = Reading(digits(softmax(right, 0)), f"softmax(1.5·tanh({shown}/1.5), 0)")
    if not f.close(row, softmax(right, 0)):
        known = (
            (cap * math.tanh(4 / cap) * factor, "caps before the scale",
             f"softmax(1.5·tanh(4/1.5)·{number(factor)}, 0)", "the cap belongs after the scale"),
            (logit, "softcap is ignored", f"softmax({shown}, 0)", "the parameter is never read"),
            (math.tanh(logit / cap), "tanh is not multiplied by the cap",
             f"softmax(tanh({shown}/1.5), 0)", "c·tanh(s/c): the outer c is missing"),
            (min(logit, cap), "clips in place of tanh", f"softmax({number(min(logit, cap))}, 0)",
             "clamp in place of c·tanh(s/c)"),
            (cap * math.tanh(logit), "tanh(s), not tanh(s/c)", f"softmax(1.5·tanh({shown}), 0)",
             "c·tanh(s/c): the inner c is missing"),
        )  # fmt: skip
        result, how, cause = next(
            (said for value, *said in known if f.close(row, softmax(value, 0))),
            ("not c·tanh(s/c)", "", ""),
        )
        return wrong(result, expected=expected, came=Reading(digits(row), how), cause=cause or None)
    hidden: Tensor | None = None
    if f.hides is not None:
        mask = f.hiding(torch.tensor([[True, False]], device=f.device))
        more = "mask hides key 1"
        hidden = f.weights([4.0, 4.0], more=more, attn_mask=mask, softcap=cap)[0, 0]
    elif f.takes_causal and "future leak" not in f.wrong:
        hidden = f.weights([4.0, 4.0], queries=2, is_causal=True, softcap=cap)[0, 0]
    if hidden is not None and hidden[1] != 0:
        return wrong(
            "the cap comes after the mask: hidden keys get weight",
            expected=Reading("1 0"),
            came=Reading(digits(hidden), f"softmax({number(right)}, −1.5)"),
            cause="tanh turns −∞ into −c: cap first, then mask",
        )
    return ok("after the scale" + (", before the mask" if hidden is not None else ""))


def _dropout(f: Subject) -> Property:
    f.needs("dropout_p")
    f.needs_right("rows sum to 1")
    f.needs_even()
    batch, heads, length, dim, p = 16, 2, 4, 4, 0.25
    f.describe(heads, dim, length, length, "q·k = 0", dropout_p=p)
    zero = torch.zeros(batch, heads, length, dim, device=f.device, dtype=f.dtype)
    # Keys 0 and 1 stand in columns 0 and 1, and again in 2 and 3.
    value = torch.eye(length, dim // 2, device=f.device, dtype=f.dtype).repeat(1, 2)
    out = f.call(zero, zero, value.expand_as(zero), dropout_p=p).double().cpu()
    weight, kept = 1 / length, 1 / length / (1 - p)
    expected = Reading("0 or .3333", ".25/(1 − .25)")
    columns = out[..., :2], out[..., 2:]
    if f.close(out, torch.full((), weight)):
        return differs(
            "dropout_p is ignored; torch: applied whenever it is above 0", expected=expected,
            came=Reading(".2500"), cause="dropout that only a module in training applies",
        )  # fmt: skip
    if not f.close(*columns):
        return wrong(
            "drops the output, not the weights",
            expected=expected, came=Reading(digits(out[0, 0, 0])),
            cause="dropout after the product with the values",
        )  # fmt: skip
    found = columns[0]
    dropped = found.abs() < f.tolerance
    rest = found[~dropped]
    share = float(dropped.double().mean())
    if not f.close(rest, torch.full((), kept)):
        plain = f.close(rest, torch.full((), weight))
        return wrong(
            "kept weights are not divided by 1 − p" if plain else "not weights of 0 or w/(1 − p)",
            expected=expected, came=Reading(digits(found[0, 0, 0])),
            cause="weights · mask without 1/(1 − p)" if plain
            else "dropout on the scores, before softmax",
        )  # fmt: skip
    if abs(share - p) > 0.15:
        return wrong(
            f"drops {share:.0%} of the weights, not 25 %".replace("%,", " %,"),
            expected=Reading("25 %"), came=Reading(f"{100 * share:.0f} %"),
            cause="dropout_p taken for the share to keep",
        )  # fmt: skip
    return ok("weights are 0 or w/(1 − p)")


def _inputs_kept(f: Subject) -> Property:
    f.describe(2, 4, 3, 3)
    inputs = dict(zip(("query", "key", "value"), f.inputs(2, 3, 3, 4), strict=True))
    arguments: dict[str, Any] = {}
    if f.hides is not None:
        allowed = torch.ones(3, 3, dtype=torch.bool, device=f.device).tril()
        arguments["attn_mask"] = inputs["attn_mask"] = f.hiding(allowed)
    before = {name: x.clone() for name, x in inputs.items()}
    f.call(*(inputs[x] for x in ("query", "key", "value")), copy=False, **arguments)
    changed = [name for name, x in inputs.items() if not torch.equal(x, before[name])]
    if not changed:
        return ok("left as they were")
    return wrong(
        f"writes into {' and '.join(changed)}",
        expected=Reading(f"{changed[0]} as before the call"), came=Reading("other numbers"),
        cause="an in-place operation (q *= scale, masked_fill_) on the caller's tensor",
    )  # fmt: skip


def _value_dim(f: Subject) -> Property:
    f.describe(2, 4, 3, 3, "d_v 6")
    q, k, v = f.inputs(2, 3, 3, 4)
    wide = torch.cat([v, f.random(1, 2, 3, 2, seed=9)], -1)
    out, narrow = f.call(q, k, wide), f.call(q, k, v)
    if f.close(out[..., :4], narrow):
        return ok("may differ from d_k")
    return wrong(
        "another output where d_v is not d_k",
        expected=Reading(digits(narrow[0, 0, 0]), "columns 0 to 3 do not need the rest"),
        came=Reading(digits(out[0, 0, 0, :4])),
        cause="d_v taken for d_k, in the scale or in a reshape",
    )  # fmt: skip


def _strides(f: Subject) -> Property:
    heads, length, dim = 2, 3, 4
    plain = f.inputs(heads, length, length, dim)
    expected = f.call(*plain)
    views = {
        "transposed views of (batch, length, heads, dim)": [
            x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain
        ],
        "slices of one (…, 3·dim) tensor": list(torch.cat(plain, -1).split(dim, -1)),
        "transposed views of (…, dim, length)": [x.mT.contiguous().mT for x in plain],
    }
    for name, inputs in views.items():
        f.describe(heads, dim, length, length, f"q, k, v {name}")
        came = f.call(*inputs, copy=False)
        if not f.close(came, expected):
            return wrong(
                "another output for a view of the same numbers",
                expected=Reading(digits(expected[0, 0, 0])),
                came=Reading(digits(came[0, 0, 0])),
                cause="memory read as if contiguous: honour the strides, or call contiguous()",
            )  # fmt: skip
    return ok("views are read by their strides")


# Numbers


def _long(f: Subject, keys: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Inputs whose values rise along the keys, so that late keys lost from a sum show."""
    q, k, v = f.inputs(2, min(keys, 8), keys, 16)
    q = _unit(f, q, keys)
    rise = torch.linspace(0, 2, keys, device=f.device, dtype=f.dtype)[:, None]
    return tuple(x.to(dtype) for x in (q, k, v + rise))


def _reference(f: Subject, *inputs: Tensor, **arguments: Any) -> Tensor:
    """What the function gives if nothing is wrong but what is known."""
    if f.rule is None:
        raise Skip("unjudged", "see scale")
    q, k, v = inputs
    queries = k.shape[2] if f.square else q.shape[2]
    scale = f.rule.factor(Shape(q.shape[1], q.shape[3], queries, k.shape[2]))
    output = trace(q, k, v, scale=scale, **arguments).output
    assert output is not None  # there was a value
    return output


def _unit(f: Subject, q: Tensor, keys: int) -> Tensor:
    """q such that the scaled scores have unit variance under the scale that is known: with wider
    ones rounding alone would differ more than a bound from `trace` allows for."""
    if f.rule is None:
        raise Skip("unjudged", "see scale")
    shape = Shape(q.shape[1], q.shape[3], keys if f.square else q.shape[2], keys)
    factor = f.rule.factor(shape)
    return q * (RIGHT.factor(shape) / factor) if factor else q


_BEFORE_NUMBERS = ("rows sum to 1", "heads apart", "batches apart")


def _accuracy(dtype: torch.dtype | None) -> Judge:
    """The output against `trace` in float64; None is the dtype of the check itself, asked under
    masks too."""

    def judge(f: Subject) -> Property:
        own = f.dtype if dtype is None else dtype
        f.needs_right(*_BEFORE_NUMBERS)
        if dtype is not None:
            f.needs_right("accuracy")
            if dtype == f.dtype:
                raise Skip("unjudged", "see accuracy")
        tries: list[tuple[int, dict[str, Any], dict[str, Any]]]
        # A function of equal lengths may well be a loop over both.
        tries = [(keys, {}, {}) for keys in (1, 4, 32, 64 if f.square else 512)]
        if dtype is None:
            tries += _masked_tries(f)
        worst: tuple[float, float] | None = None
        for keys, arguments, meaning in tries:
            q, k, v = _long(f, keys, own)
            if arguments:  # as many queries as keys
                q = _unit(f, f.random(1, 2, keys, 16, seed=5), keys)
            more = ", ".join({"attn_mask": "a mask"}.get(a, f"{a}=True") for a in meaning)
            rising = f"random {_dtype(own)}, v rising from 0 to 2"
            f.describe(2, 16, q.shape[2], keys, rising, more)
            out = f.call(q, k, v, **arguments)
            want = _reference(f, q.double(), k.double(), v.double(), **meaning)
            plain = _reference(f, q, k, v, **meaning)
            error = float((out.double() - want).abs().nan_to_num(nan=math.inf).max())
            bound = 1e-12 * float(want.abs().max())
            if own != torch.float64:
                bound = error_bound(want, plain)
            if error > bound:
                return _inaccurate(own, out, want, error, bound)
            if worst is None or error / bound > worst[0] / worst[1]:
                worst = error, bound
        assert worst is not None  # there were inputs
        if out.dtype != own:
            return differs(f"returns {_dtype(out.dtype)} for {_dtype(own)}; torch: {_dtype(own)}")
        return ok(bounded(*worst), error=worst[0], bound=worst[1])

    return judge


def _masked_tries(f: Subject) -> list[tuple[int, dict[str, Any], dict[str, Any]]]:
    """(keys, what the function is given, what `trace` is given) for each mask that works."""
    tries: list[tuple[int, dict[str, Any], dict[str, Any]]] = []
    keys = 12
    if "masked rows" in f.wrong:
        return tries
    if f.takes_causal and "future leak" not in f.wrong:
        tries.append((keys, {"is_causal": True}, {"is_causal": True}))
    if f.hides is not None:
        generator = torch.Generator().manual_seed(SEED)
        allowed = torch.rand(keys, keys, generator=generator) < 0.5
        allowed[:, 1] = True
        allowed = allowed.to(f.device)
        tries.append((keys, {"attn_mask": f.hiding(allowed)}, {"attn_mask": allowed}))
    return tries


def _dtype(x: torch.dtype) -> str:
    return str(x).removeprefix("torch.")


def _inaccurate(
    dtype: torch.dtype, out: Tensor, want: Tensor, error: float, bound: float
) -> Property:
    at = (out.double() - want).abs().nan_to_num(nan=math.inf).flatten().argmax()
    share = error / float(want.abs().max())
    places = 9 if share < 1e-4 else 6
    values = [f"{float(x.flatten()[at]):.{places}g}".replace("-", "−") for x in (want, out)]
    if dtype in (torch.bfloat16, torch.float16):
        cause = f"sums or weights kept in {_dtype(dtype)}: accumulate in float32"
        if not math.isfinite(error):
            cause = f"a sum overflows {_dtype(dtype)}: accumulate in float32"
    elif share > 0.05 or not math.isfinite(share):
        cause = "not softmax(q·k·scale)·v for this input: compare the stages with scaledot.trace"
    elif share > 5e-4:
        cause = "computed in bfloat16, float16 or TF32 on the way"
    else:
        cause = "exp or a sum in less than the precision of the inputs"
    return wrong(
        bounded(error, bound), expected=Reading(values[0]), came=Reading(values[1]), cause=cause,
        error=error, bound=bound,
    )  # fmt: skip


def _float16_range(f: Subject) -> Property:
    """Raw scores past 65,504 whose scaled scores fit."""
    f.needs_right(*_BEFORE_NUMBERS, "large scores", "float16")
    f.describe(2, 4, 1, 2, "q·k = 80,000 and 79,950", "float16")
    query = torch.full((1, 2, 1, 4), 200.0, device=f.device, dtype=torch.float16)
    key = torch.tensor([100.0, 99.9375], device=f.device, dtype=torch.float16)
    key = key[:, None].expand(1, 2, 2, 4)
    value = torch.eye(2, 4, device=f.device, dtype=torch.float16).expand(1, 2, 2, 4)
    row = f.call(query, key, value)[0, 0, 0, :2].double().cpu()
    if f.near(row, 1, 0):
        return ok("raw scores may pass 65,504, the largest float16")
    return differs(
        "raw scores past 65,504 overflow; torch: accumulates in float32",
        expected=Reading("1 0"), came=Reading(digits(row)),
        cause="QK is stored in float16 before the scale: scale q first",
    )  # fmt: skip


def _gradients(f: Subject) -> Property:
    f.needs_right(*_BEFORE_NUMBERS, "accuracy")
    worst: tuple[float, float] | None = None
    causal = f.takes_causal and not {"future leak", "masked rows"} & f.wrong
    tries: list[dict[str, Any]] = [{}, {"is_causal": True}] if causal else [{}]
    for arguments in tries:

        def function(*x: Tensor) -> Tensor:
            return f.call(*x, **arguments)  # noqa: B023

        def definition(*x: Tensor) -> Tensor:
            return _reference(f, *x, **arguments)  # noqa: B023

        f.describe(2, 16, 5, 5, "random q, k, v", **arguments)
        came, want = _grad(f, function), _grad(f, definition, torch.float64)
        bounds = [1e-12 * float(x.abs().max()) for x in want if x is not None]
        if f.dtype != torch.float64:
            bounds = _gradient_bounds(f, definition)
        for name, x, y, bound in zip(("query", "key", "value"), came, want, bounds, strict=True):
            assert y is not None
            if x is None:
                return wrong(
                    f"no gradient reaches {name}", expected=Reading(_sample(y)),
                    came=Reading("none"), cause="detach, no_grad or .data on the way",
                )  # fmt: skip
            error = float((x.double() - y).abs().nan_to_num(nan=math.inf).max())
            if error > bound:
                return _wrong_gradient(name, x, y, error, bound)
            if worst is None or error / bound > worst[0] / worst[1]:
                worst = error, bound
    assert worst is not None  # there were inputs
    return ok(bounded(*worst), error=worst[0], bound=worst[1])


def _gradient_bounds(f: Subject, definition: Callable[..., Tensor]) -> list[float]:
    """For query, key and value the loosest `error_bound` of a few draws: the few numbers of one
    draw may be rounded luckily in `trace`, and then condemn a function that is as good."""
    bounds = [0.0, 0.0, 0.0]
    for draw in range(6):
        grads = _grad(f, definition, torch.float64, draw), _grad(f, definition, f.dtype, draw)
        for i, (want, plain) in enumerate(zip(*grads, strict=True)):
            assert want is not None
            assert plain is not None
            bounds[i] = max(bounds[i], error_bound(want, plain))
    return bounds


def _grad(
    f: Subject, fn: Callable[..., Tensor], dtype: torch.dtype | None = None, draw: int = 0
) -> tuple[Tensor | None, ...]:
    """The gradients of a weighted sum of the output, for random inputs rounded to the dtype of the
    check and taken as `dtype`."""
    q, k, v = f.inputs(2, 5, 5, 16, seed=draw)
    weight = f.random(1, 2, 5, 16, seed=100 + draw)
    with torch.enable_grad():
        inputs = [_unit(f, q, 5), k, v]
        leaves = [x.to(dtype or f.dtype, copy=True).requires_grad_() for x in inputs]
        out = fn(*leaves)
        if not out.requires_grad:
            raise Skip("unsupported", "the output carries no gradient")
        try:
            return torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)
        except Exception as error:  # the function's own backward
            raise Raised(error) from error


def _sample(x: Tensor) -> str:
    return " ".join(f"{v:.4g}".replace("-", "−") for v in x.flatten()[:4].tolist()) + " …"


def _wrong_gradient(name: str, came: Tensor, want: Tensor, error: float, bound: float) -> Property:
    came = came.double()
    ratio = float((came * want).sum() / (want * want).sum())
    same = bool(((came - ratio * want).abs() <= 1e-3 * want.abs().max()).all())
    result = f"of {name}: {bounded(error, bound)}"
    cause = "the backward of another function than the forward"
    if same and not math.isclose(ratio, 1, rel_tol=1e-2):
        result = f"of {name}: {number(ratio)} times what it is"
        cause = "the scale is missing, or applied twice, in backward"
    return wrong(
        result, expected=Reading(_sample(want)), came=Reading(_sample(came)), cause=cause,
        error=error, bound=bound,
    )  # fmt: skip


PROPERTIES: tuple[tuple[str, Judge], ...] = (
    ("axes", _axes),
    ("dropout off", _deterministic),
    ("every key", _every_key),
    ("rows sum to 1", _rows),
    ("heads apart", _apart(1)),
    ("batches apart", _apart(0)),
    ("scale", _scale),
    ("custom scale", _custom_scale),
    ("large scores", _large_scores),
    ("mask polarity", _polarity),
    ("additive mask", _additive),
    ("0/1 float mask", _zero_one),
    ("masked rows", _masked_rows),
    ("mask shapes", _mask_shapes),
    ("future leak", _causal),
    ("causal alignment", _alignment),
    ("mask and causal", _mask_and_causal),
    ("grouped heads", _grouped),
    ("empty rows", _empty_rows),
    ("hidden NaN", _hidden_nan),
    ("visible NaN", _visible_nan),
    ("soft-cap", _softcap),
    ("dropout", _dropout),
    ("inputs", _inputs_kept),
    ("value dimension", _value_dim),
    ("strides", _strides),
    ("accuracy", _accuracy(None)),
    ("bfloat16", _accuracy(torch.bfloat16)),
    ("float16", _accuracy(torch.float16)),
    ("float16 range", _float16_range),
    ("gradients", _gradients),
)
"""Every property in the order in which it is asked: what is wrong is known to what follows."""
