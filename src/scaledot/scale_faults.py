"""Scales, soft-caps and sinks that are not the ones configured.

What is certain is `wrong`; what only looks so is `look`. Rules and sources: docs/maths.md#scales.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from scaledot.findings import Finding, Head, Layer, Result, ids, in_layers, out_of
from scaledot.numerals import counted, number
from scaledot.scales import Rule, ScaleVerdict, rule, softcap_is, verdict


def scale_faults(
    heads: Sequence[Head], layers: Sequence[Layer], d_model: int | None
) -> list[Result]:
    """What each check of the factors gives."""
    return [_scale(heads, layers, d_model), _softcap(heads, layers), _sinks(heads, layers)]


def _scale(heads: Sequence[Head], layers: Sequence[Layer], d_model: int | None) -> Result:
    """The factor applied against the configuration's; variance has no say in it."""
    judged = [(x, _judged(x, layers, d_model)) for x in layers if math.isfinite(x.scale)]
    for kind in ("wrong", "look", "note"):
        some = [(x, v) for x, v in judged if v.kind == kind]
        if some:
            return _scale_finding(kind, some, judged, heads)
    if not judged:
        return None
    known = [x for x, v in judged if v.meant is not None]
    if not known:
        return "scale", f"1/√d_k in {out_of(len(judged), len(layers), 'layer')}; no configuration"
    before = {
        x.configured.source for x in known if x.configured and "beforehand" in x.configured.source
    }
    said = "".join(f"; {source}" for source in sorted(before))
    return "scale", f"as configured in {out_of(len(known), len(layers), 'layer')}{said}"


def _judged(layer: Layer, layers: Sequence[Layer], d_model: int | None) -> ScaleVerdict:
    peers = [
        x.scale
        for x in layers
        if (x.kind, x.causal, x.d_k, x.heads, x.window)
        == (layer.kind, layer.causal, layer.d_k, layer.heads, layer.window)
    ]
    return verdict(
        layer.scale, layer.d_k, layer.configured, heads=layer.heads, kv_heads=layer.kv_heads,
        d_model=d_model, peers=peers, own=layer.own,
    )  # fmt: skip


def _scale_finding(
    kind: Literal["wrong", "look", "note"],
    some: Sequence[tuple[Layer, ScaleVerdict]],
    judged: Sequence[tuple[Layer, ScaleVerdict]],
    heads: Sequence[Head],
) -> Finding:
    where = in_layers(x.index for x, _ in some)
    (layer, first), alike = some[0], {(v.applied, v.meant) for _, v in some}
    title = f"A scale other than 1/√d_k is applied in {where}"
    if layer.configured is not None:
        title = f"A scale other than the configuration's is applied in {where}"
    elif kind == "look" and first.mistake is None:
        title = f"A scale unlike the other layers' is applied in {where}"
    seen = _compared(layer, first, len(judged) - len(some))
    if len(alike) > 1:
        last, other = some[-1]
        then = _compared(last, other, 0)
        if layer.configured is not None:
            # The source is said once.
            then = then.replace(f" ({layer.configured.source})", "")
        seen = f"Layer {layer.index}: {seen} Layer {last.index}: {then}"
    means = []
    mistakes: list[str] = []
    for mistake in (v.mistake for _, v in some if v.mistake):
        # One that only adds to another says it twice.
        if not any(mistake.startswith(known) for known in mistakes):
            mistakes.append(mistake)
    for mistake in mistakes[:2]:
        example = next(v for _, v in some if v.mistake == mistake)
        means.append(f"{_factor(example.applied)} is {mistake}.")
    means += _how_much_wider(some)
    if first.origin:
        means.append(f"{first.origin[0].upper()}{first.origin[1:]}.")
    if kind == "note":
        means.append("q or k may carry a factor of their own, which the call does not show.")
    indices = {x.index for x, _ in some}
    return Finding(
        "scale",
        kind,
        title,
        where,
        seen,
        " ".join(means),
        f"{{audit}} --layers {layer.index}",
        "docs/maths.md#scales",
        tuple((h.layer, h.head) for h in heads if h.layer in indices),
    )


def _how_much_wider(some: Sequence[tuple[Layer, ScaleVerdict]]) -> list[str]:
    """What the factors do to the scores, against those expected."""
    expected = [(v.applied, x.d_k**-0.5 if v.meant is None else v.meant) for x, v in some]
    ratios = [applied / meant for applied, meant in expected if applied * meant > 0]
    sentences = []
    for direction, sizes in (
        ("wider", [r for r in ratios if r > 1]),
        ("narrower", [1 / r for r in ratios if r <= 1]),
    ):
        if sizes:
            least, most = number(min(sizes)), number(max(sizes))
            size = least if least == most else f"{least} to {most}"
            sentences.append(f"Scores are {size} times {direction}.")
    return sentences


def _compared(layer: Layer, found: ScaleVerdict, others: int) -> str:
    """One layer's factor and what it is compared with."""
    given = layer.configured
    width, place = (given.d_model, given.layer) if given is not None else (None, None)
    applied = _named(found.applied, rule(found.applied, layer.d_k, width, place))
    if given is not None:
        meant = _named(given.scale, rule(given.scale, layer.d_k, None, place))
        return f"× {applied}; config gives {meant} ({given.source})."
    plain = _named(layer.d_k**-0.5, rule(layer.d_k**-0.5, layer.d_k))
    if found.meant is None or math.isclose(found.meant, layer.d_k**-0.5):
        return f"× {applied}; 1/√d_k is {plain}. No configuration says more."
    common = _named(found.meant, rule(found.meant, layer.d_k))
    return f"× {applied}; most of {counted(others + 1, 'layer')}: {common}."


def _softcap(heads: Sequence[Head], layers: Sequence[Layer]) -> Result:
    """The soft-cap of the call against the configuration's."""
    bad = [x for x in layers if softcap_is(x.softcap, x.configured) == "wrong"]
    if not bad:
        caps = [x for x in layers if x.configured and x.configured.softcap]
        if not caps:
            return None
        values = ", ".join(f"{c:g}" for c in sorted({x.softcap for x in caps if x.softcap}))
        return "soft-cap", f"{values}, as configured in {out_of(len(caps), len(layers), 'layer')}"
    first, indices = bad[0], {x.index for x in bad}
    assert first.configured is not None
    given, where = first.configured.softcap, in_layers(indices)
    if first.softcap is None:
        title = f"The configuration's soft-cap is missing in {where}"
    else:
        title = f"A soft-cap other than the configuration's is applied in {where}"
    says = "none" if given is None else f"{given:g} (attn_logit_softcapping)"
    inside = [h for h in heads if h.layer in indices]
    largest = max((h.largest for h in inside if not math.isnan(h.largest)), default=math.nan)
    holds = "without a bound" if first.softcap is None else f"within ±{first.softcap:g}"
    return Finding(
        "softcap",
        "wrong",
        title,
        where,
        f"{'No cap' if first.softcap is None else f'Cap {first.softcap:g}'}; config gives {says}. "
        f"The largest scaled score is {number(largest)}.",
        f"Scores enter softmax {holds}, "
        + ("where no cap is configured." if given is None else f"in place of ±{given:g}."),
        f"{{audit}} --layers {first.index}",
        "docs/maths.md#scales",
        ids(inside),
    )


def _sinks(heads: Sequence[Head], layers: Sequence[Layer]) -> Result:
    """Learned sinks that the module keeps and the call does not get."""
    keeping = [x for x in layers if x.own_sinks]
    bad = [x for x in keeping if not x.sinks]
    if not bad:
        said = f"applied in {out_of(len(keeping), len(layers), 'layer')}, as the modules keep them"
        return ("sinks", said) if keeping else None
    indices = {x.index for x in bad}
    return Finding(
        "sinks",
        "wrong",
        f"The modules' sinks are missing in {in_layers(indices)}",
        in_layers(indices),
        f"{out_of(len(bad), len(keeping), 'module')} with sinks, whose calls have none.",
        "A sink is one more logit of each head, in the denominator only: without it rows add to 1.",
        f"{{audit}} --layers {bad[0].index}",
        "docs/maths.md#scales",
        ids([h for h in heads if h.layer in indices]),
    )


def _named(x: float, known: Rule | None) -> str:
    """0.125 = 1/√64"""
    shown = _factor(x)
    return shown if known is None or known.value == shown else f"{shown} = {known.value}"


def _factor(x: float) -> str:
    """A factor with three digits, however small: 0.125, 0.00391."""
    return f"{x:.3g}".replace("-", "−")
