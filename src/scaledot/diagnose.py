"""Head statistics → findings: what, where, how much, what it means, what to look at next.

A finding describes; it accuses only where a computation is not the one configured
(scale_faults.py, mask_faults.py).
Saturated heads, sinks and wide scores are how trained models work, so they are `look` or `note`.
Thresholds and their sources: docs/maths.md#findings.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from scaledot import whatif
from scaledot.findings import (
    SHOWN,
    Finding,
    Head,
    Layer,
    Result,
    hold,
    ids,
    in_layers,
    more,
    names,
    out_of,
    whereabouts,
)  # fmt: skip
from scaledot.leakage import Leak
from scaledot.mask_check import MaskFacts
from scaledot.mask_faults import mask_faults
from scaledot.numerals import counted, fraction, number, share, small, weight, whole
from scaledot.precision import FLOAT16_MAX
from scaledot.profiles import LABELS
from scaledot.reference import FLAT, UNIT
from scaledot.scale_faults import scale_faults

UNIFORM = FLAT**2
"""Within-row variance below this costs under .005 nat of entropy."""
SATURATED_ROWS = 0.25
"""A head with at least this share of saturated rows is named."""
SINK = 0.3
"""A head whose first key holds more than this on average is a sink head (Gu et al. 2024)."""
BEYOND_WIDTH = 1.0
"""Entropy this many nats away from that of Gaussian scores as wide is called structure."""
MATCHES = 0.4
"""A head with more prefix matching than this on random tokens is named."""
STORED = 0.02
"""A row's weight moved by storing scores in bfloat16, from which it is named."""
ALIKE = 0.01
"""Values attended that spread less than this share of what the row sees are called alike."""


def findings(
    heads: Sequence[Head],
    layers: Sequence[Layer],
    d_model: int | None,
    masks: Mapping[str, MaskFacts] | None = None,
    leaks: Sequence[Leak] = (),
) -> tuple[list[Finding], list[tuple[str, str]]]:
    """(findings, most serious first; what was checked and found nothing, with its numbers).

    masks: by path, as `Observation.masks`. leaks: what leakage.py found of the whole model.
    """
    found: list[Finding] = []
    clear: list[tuple[str, str]] = []
    checks = (
        _nonfinite, _empty, _variance, _structure, _saturation, _other_scales, _sinks, _roles,
        _prefixes,
        _uniform, _alike, _range, _storage,
    )  # fmt: skip
    computed = scale_faults(heads, layers, d_model) + mask_faults(layers, masks or {}, leaks)
    for result in (*computed, *(check(heads) for check in checks)):
        if isinstance(result, Finding):
            found.append(result)
        elif result is not None:
            clear.append(result)
    order = ("wrong", "look", "note")
    return sorted(found, key=lambda f: order.index(f.kind)), clear


def _nonfinite(heads: Sequence[Head]) -> Result:
    bad = [h for h in heads if h.rows["nonfinite"]]
    if not bad:
        return "non-finite rows", "none"
    count, total = (sum(h.rows[n] for h in bad) for n in ("nonfinite", "rows"))
    return Finding(
        "nonfinite",
        "wrong",
        f"{hold(len(bad), len(heads))} NaN or infinite scores",
        whereabouts(bad),
        f"{count:,} of {total:,} rows; first in {bad[0].name}. They enter no average.",
        "A query or a visible key is not a number, or their product overflows.",
        f"{{audit}} --head {bad[0].name}",
        "docs/maths.md#edges",
        ids(bad),
    )


def _empty(heads: Sequence[Head]) -> Result:
    bad = [h for h in heads if h.rows["empty"]]
    if not bad:
        return "empty rows", "none"
    count, total = (sum(h.rows[n] for h in bad) for n in ("empty", "rows"))
    return Finding(
        "empty",
        "look",
        f"{hold(len(bad), len(heads))} queries that see no key",
        whereabouts(bad),
        f"{count:,} of {total:,} rows are fully masked. They enter no average.",
        "Their output is 0, or the mean of all values where the mask is a large negative number.",
        f"{{audit}} --head {bad[0].name}",
        "docs/maths.md#edges",
        ids(bad),
    )


def _variance(heads: Sequence[Head]) -> Result:
    there = [h for h in heads if not math.isnan(h.within)]
    if not there:
        return None
    wide = [h for h in there if h.within > UNIT[1]]
    narrow = [h for h in there if h.within < UNIT[0]]
    low, high = min(there, key=lambda h: h.within), max(there, key=lambda h: h.within)
    if not wide and not narrow:
        return (
            "score variance",
            f"within rows {small(low.within)} to {small(high.within)}, theory 1",
        )
    wider = len(wide) >= len(narrow)
    some = wide if wider else narrow
    word, bound = ("wider", "above 2") if wider else ("narrower", "below ½")
    where = f"within-row variance {bound}"
    if len(some) == len(there):
        where += f", {in_layers(h.layer for h in some)}"
    else:
        unit = len(there) - len(wide) - len(narrow)
        other = narrow if wider else wide
        where += f"; ½ to 2 in {counted(unit, 'head')}" if unit else ""
        if other:
            side, end = ("below", "½") if wider else ("above", "2")
            where += f", {side} in {names(other)}" if unit else f"; {side} {end} in {names(other)}"
    least, most = min(h.after for h in there), max(h.after for h in there)
    middle, overall = (statistics.median(getattr(h, n) for h in there) for n in ("within", "after"))
    extreme = high if wider else low
    return Finding(
        "variance",
        "look",
        f"Scores are {word} than theory in {out_of(len(some), len(heads), 'head')}",
        where,
        f"Within rows, all that softmax sees: {small(low.within)} ({low.name}) to "
        f"{small(high.within)} ({high.name}), median {small(middle)}; theory 1. Over all pairs, "
        f"as above: {small(least)} to {small(most)}, median {small(overall)}.",
        "The theory assumes independent components of unit variance; weights and inputs need not "
        "have that. "
        + ("Wider scores make sharper rows." if wider else "Narrower scores make flatter rows."),
        f"{{trace}} --layer {extreme.layer} --head {extreme.head}",
        "docs/maths.md#variance",
        ids(some),
    )


def _saturation(heads: Sequence[Head]) -> Result:
    there = [h for h in heads if not math.isnan(h.saturated)]
    if not there:
        return None
    bad = sorted((h for h in there if h.saturated >= SATURATED_ROWS), key=lambda h: -h.saturated)
    top = max(there, key=lambda h: h.saturated)
    if not bad:
        if not top.saturated:
            return "saturated rows", "none: no key leads by 6.24 nats"
        return "saturated rows", f"at most {share(top.saturated)} ({top.name})"
    some = [h for h in there if 0 < h.saturated < SATURATED_ROWS]
    if len(bad) == 1:
        rows = "every row" if top.saturated == 1 else f"{share(top.saturated)} of its rows"
        title = f"Head {top.name} saturates {rows}"
    else:
        least = share(SATURATED_ROWS)
        title = f"{out_of(len(bad), len(heads), 'head')} saturate {least} of their rows or more"
    where = top.name
    if len(bad) > 1:
        where = ", ".join(f"{h.name} {share(h.saturated)}" for h in bad[:SHOWN]) + more(bad)
    if some:
        where += f"; under {share(SATURATED_ROWS)} in {counted(len(some), 'other head')}"
    onto_first = [h for h in bad if (a := h.attends) and a[0] == "first" and a[1] > SINK]
    means = (
        "Such rows pass almost no gradient to q and k; v still learns. Heads that copy one "
        "position look like this: a description, not a fault."
    )
    if len(onto_first) == len(bad) > 1:
        means = (
            "bfloat16 stores such rows as exactly one-hot. "
            f"{'Both' if len(bad) == 2 else f'All {len(bad)}'} heads look at the first token."
        )
    return Finding(
        "saturation",
        "note",
        title,
        where,
        f"The top key leads by {number(top.margin_median)} nats at the median ({top.name}), "
        f"{number(top.margin_max)} at most; bfloat16 rounds to one-hot from 6.24 on.",
        means,
        f"{{trace}} --layer {top.layer} --head {top.head}",
        "docs/maths.md#saturation",
        ids(bad),
    )


def _sinks(heads: Sequence[Head]) -> Result:
    there = [h for h in heads if not math.isnan(h.first)]
    if not there:
        return None
    chance = statistics.fmean(h.chance["first"] for h in there)
    # By the role, so that short texts and windows, where equal weights give as much, say nothing.
    bad = [h for h in there if any(r.name == "first" for r in h.profile.roles.called)]
    top = max(there, key=lambda h: h.first)
    if not bad:
        return "first-token sink", f"none: {weight(top.first)} at most, chance {weight(chance)}"
    strong = [h for h in bad if h.first > 0.8]
    where = in_layers(h.layer for h in bad)
    if strong and len(strong) < len(bad):
        places = in_layers(h.layer for h in strong)
        where += f"; more than .8 in {counted(len(strong), 'head')}, {places}"
    return Finding(
        "sink",
        "note",
        "The first token holds more than .3 of the weight in "
        f"{out_of(len(bad), len(heads), 'head')}",
        where,
        f"Mean over queries after the first; all keys alike would give {weight(chance)}. "
        f"Most: {weight(top.first)} ({top.name}).",
        "Known as an attention sink, common in trained decoders: described, not judged.",
        "{audit} --show first",
        "Gu et al. 2024 (threshold .3), arXiv:2410.10781",
        ids(bad),
    )


def _uniform(heads: Sequence[Head]) -> Result:
    there = [h for h in heads if not math.isnan(h.within)]
    bad = [h for h in there if h.within < UNIFORM]
    if not bad:
        return "near-uniform head", "none"
    low = min(bad, key=lambda h: h.within)
    return Finding(
        "uniform",
        "note",
        f"{hold(len(bad), len(heads))} nearly equal weights",
        whereabouts(bad),
        f"Within-row variance {number(low.within)} in {low.name}; below .01 a row differs from "
        "equal weights by less than .005 nat.",
        "The head averages the values it sees.",
        f"{{audit}} --head {low.name}",
        "docs/maths.md#findings",
        ids(bad),
    )


def _range(heads: Sequence[Head]) -> Result:
    there = [h for h in heads if not math.isnan(h.bound)]
    if not there:
        return None
    top = max(there, key=lambda h: h.bound)
    bad = [h for h in there if h.bound > FLOAT16_MAX]
    if not bad:
        return "fp16 range", f"raw scores at most {whole(top.bound)} (bound ‖q‖·‖k‖) of 65,504"
    return Finding(
        "range",
        "look",
        f"Raw scores may exceed float16's 65,504 in {out_of(len(bad), len(heads), 'head')}",
        whereabouts(bad),
        f"‖q‖·‖k‖ reaches {whole(top.bound)} ({top.name}); the largest scaled score is "
        f"{number(top.largest)}.",
        "An upper bound, for scores of either sign, masked ones too. A kernel that forms q·k in "
        "float16 before scaling could overflow; one that accumulates in float32 does not.",
        f"{{audit}} --head {top.name}",
        "docs/maths.md#precision",
        ids(bad),
    )


def _roles(heads: Sequence[Head]) -> Result:
    """What heads look at, but for the first token, which has its own finding."""
    some: dict[str, list[tuple[float, Head]]] = {}
    for h in heads:
        for role in h.profile.roles.called:
            if role.name != "first":
                some.setdefault(role.name, []).append((role.mass, h))
    named = list({(h.layer, h.head): h for each in some.values() for _, h in each}.values())
    if not named:
        return "roles", "none: no head looks at one kind of token far above chance"
    where, seen = [], []
    for name in (name for name in LABELS if name in some):
        each = some[name]
        each.sort(key=lambda pair: -pair[0])
        strongest = ", ".join(h.name for _, h in each[:3])
        more = f" and {len(each) - 3} more" if len(each) > 3 else ""
        where.append(f"{LABELS[name]}: {strongest}{more}")
        mass, top = each[0]
        chance = next(r.chance for r in top.profile.roles.called if r.name == name)
        seen.append(f"{LABELS[name]} {weight(mass)}, chance {weight(chance)} ({top.name})")
    means = "Mean weights far above what equal weights give; what a head looks at is not yet what "
    means += "it is for."
    first = max(((mass, h) for each in some.values() for mass, h in each), key=lambda pair: pair[0])
    return Finding(
        "roles",
        "note",
        f"{out_of(len(named), len(heads), 'head')} {'looks' if len(named) == 1 else 'look'} "
        "mostly at one kind of token",
        "; ".join(where),
        f"Strongest: {'; '.join(seen)}.",
        means,
        f"{{audit}} --head {first[1].name}",
        "docs/maths.md#roles",
        ids(named),
    )


def _prefixes(heads: Sequence[Head]) -> Result:
    """Heads that find what followed the same token before, where nothing else tells what comes."""
    tried = [(h.prefix_matching[0], h) for h in heads if h.prefix_matching is not None]
    tried = sorted(((x, h) for x, h in tried if not math.isnan(x)), key=lambda pair: -pair[0])
    if not tried:
        return None
    score, top = tried[0]
    assert top.prefix_matching is not None
    chance = weight(top.prefix_matching[1])
    bad = [h for x, h in tried if x > MATCHES]
    if not bad:
        return "prefix matching", f"none: {weight(score)} at most ({top.name}), chance {chance}"
    each = ", ".join(f"{h.name} {weight(x)}" for x, h in tried[: min(len(bad), SHOWN)])
    return Finding(
        "induction",
        "note",
        f"{out_of(len(bad), len(heads), 'head')} {'finds' if len(bad) == 1 else 'find'} what "
        "followed the same token before",
        each + more(bad),
        f"Weight on it, on random tokens said four times; chance {chance}.",
        "Known as induction heads: nothing but the repetition tells them what comes next.",
        f"{{audit}} --head {top.name}",
        "Olsson et al. 2022, arXiv:2209.11895",
        ids(bad),
    )


def _structure(heads: Sequence[Head]) -> Result:
    """Entropy against what width explains at the same number of keys."""
    there = [(w.excess, h) for h in heads if (w := h.profile.width) and not math.isnan(w.excess)]
    if not there:
        return None
    low, high = (pick(there, key=lambda pair: pair[0]) for pick in (min, max))
    bad = [h for excess, h in there if abs(excess) > BEYOND_WIDTH]
    if not bad:
        span = max(abs(low[0]), abs(high[0]))
        return "entropy for its width", f"within {number(span)} nats of Gaussian scores as wide"
    condensed = [h for h in bad if h.profile.width and h.profile.width.verdict == "condensed"]
    seen = f"{_signed(low[0])} nats ({low[1].name}) to {_signed(high[0])} ({high[1].name})"
    middle = statistics.median(excess for excess, _ in there)
    seen += f", median {_signed(middle)}"
    wide = f" {counted(len(condensed), 'head')} of these would condense on few keys by width "
    return Finding(
        "structure",
        "note",
        f"{out_of(len(bad), len(heads), 'head')} {'is' if len(bad) == 1 else 'are'} sharper or "
        "flatter than width explains",
        whereabouts(bad),
        f"Entropy less that of independent Gaussian scores as wide, over as many keys: {seen}."
        + (wide + "alone." if condensed else ""),
        "Below 0 a few keys stand out, above 0 scores are bounded or come in groups: structure "
        "that the variance does not show, and no matter of scale.",
        f"{{audit}} --head {max(bad, key=lambda h: abs(_excess(h))).name}",
        "docs/maths.md#reference",
        ids(bad),
    )


def _excess(h: Head) -> float:
    return h.profile.width.excess if h.profile.width else math.nan


def _signed(x: float) -> str:
    return f"+{number(x)}" if x > 0 else number(x)


def _other_scales(heads: Sequence[Head]) -> Result:
    """How much wider scores may get before half the rows are sharp."""
    there = [(w.largest, h) for h in heads if (w := h.profile.whatif) and not math.isnan(w.largest)]
    if not there:
        return None
    bad = [h for factor, h in there if factor < 1]
    middle = statistics.median(x for x, _ in there)
    if not bad:
        least, first = min(there, key=lambda pair: pair[0])
        assert first.profile.whatif is not None
        largest = first.profile.whatif.factors[-1]
        return (
            "room for scale",
            f"×{number(min(least, largest))} ({first.name}) or more before half the rows give one "
            "key .9",
        )
    room = f"would with ×{number(middle)}" if 0 < middle < math.inf else "does nowhere in the sweep"
    least, first = min(there, key=lambda pair: pair[0])
    at = f"÷{number(1 / least)}" if least else "smaller than any swept"
    return Finding(
        "sharp",
        "note",
        f"Half the rows give one key .9 or more in {out_of(len(bad), len(heads), 'head')}",
        whereabouts(bad),
        f"{first.name} already does with its scale {at}; the median head {room}.",
        whatif.CAVEAT,
        f"{{audit}} --head {first.name}",
        "docs/maths.md#what-if",
        ids(bad),
    )


def _storage(heads: Sequence[Head]) -> Result:
    """What scores kept in bfloat16 would cost."""
    there = [(p, h) for h in heads if (p := h.profile.precision) and not math.isnan(p.bf16_cost)]
    if not there:
        return None
    top, most = max(there, key=lambda pair: pair[0].bf16_cost)
    bad = [h for p, h in there if p.bf16_cost > STORED]
    if not bad:
        return "bfloat16 scores", f"would move {share(top.bf16_cost)} of a row's weight at most"
    gain = ""
    if top.bf16_cost_centred < top.bf16_cost:
        gain = f" {share(top.bf16_cost_centred)} if the keys' mean were taken from K first, which "
        gain += "changes no weight."
    return Finding(
        "storage",
        "note",
        f"Scores stored in bfloat16 would move over 2 % of the weight in "
        f"{out_of(len(bad), len(heads), 'head')}",
        whereabouts(bad),
        f"{share(top.bf16_cost)} of a row's weight on average in {most.name}.{gain}",
        "About kernels that store scores, as eager attention in bfloat16 does; fused ones keep "
        "them in float32.",
        f"{{audit}} --head {most.name}",
        "docs/maths.md#precision",
        ids(bad),
    )


def _alike(heads: Sequence[Head]) -> Result:
    """Heads whose attended values coincide though their weights do not."""
    there = [h for h in heads if not math.isnan(h.profile.gradients.relative_value_spread)]
    if not there:
        return None
    soft = [h for h in there if h.gradient > 0.1]
    bad = [h for h in soft if h.profile.gradients.relative_value_spread < ALIKE]
    if not soft:
        return None
    if not bad:
        low = min(soft, key=lambda h: h.profile.gradients.relative_value_spread)
        spread = fraction(low.profile.gradients.relative_value_spread)
        return "values attended", f"differ where weights are soft: spread {spread} ({low.name})"
    low = min(bad, key=lambda h: h.profile.gradients.relative_value_spread)
    return Finding(
        "values",
        "note",
        f"{out_of(len(bad), len(heads), 'head')} {'weighs' if len(bad) == 1 else 'weigh'} values "
        "that hardly differ",
        whereabouts(bad),
        f"Those attended spread {fraction(low.profile.gradients.relative_value_spread)} of what "
        f"the row sees in {low.name}, though Σp(1−p) is {fraction(low.gradient)}.",
        "However soft the weights, a change in them changes the output little, so little gradient "
        "reaches q and k.",
        f"{{audit}} --head {low.name}",
        "docs/maths.md#value-spread",
        ids(bad),
    )
