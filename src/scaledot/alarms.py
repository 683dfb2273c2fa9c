"""Rules on the statistics of a training run: which head crossed which line, and why it could.

A rule reads one number a head and step. The numbers come as `HeadStats` by module path, those of a
step merged; `Watch.check` compares them with the rules and remembers what it needs of the steps
before. Source of the numbers: docs/maths.md#heads; of the reasons: docs/maths.md#alarms.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any

from torch import Tensor

from scaledot import ScaledotError, checks
from scaledot.heads import HeadStats
from scaledot.tracking import NAMES, values

ACTIONS = ("log", "stop", "save")
MEASURES = (*NAMES, "nonfinite")
"""What rules are about."""
FACTORS = {"scale": "scale", "query": "‖q‖", "key": "‖k‖", "alignment": "alignment"}
"""What scores are made of besides the scale, by the names and in the words of a cause."""


def numbers(stats: HeadStats) -> dict[str, Tensor]:
    """What rules compare, (heads,): `tracking.values`, and as "nonfinite" the rows that see a score
    that is not finite."""
    return values(stats) | {"nonfinite": stats.counts["nonfinite"].double()}


@dataclass(frozen=True)
class Alarm:
    """A line that no head's number may cross: above it, below it, or twice what the same head had
    at most `doubles_within` steps before.

    measure: one of `MEASURES`. then: what a crossing does besides being logged: "stop" the run,
    "save" a snapshot, or a function that is given the `Event`.

    Raises: ValueError or TypeError for a measure, a line or an action that there is not.

    >>> Alarm("max_score", above=100).rule
    'max_score above 100'
    """

    measure: str
    _: KW_ONLY
    above: float | None = None
    below: float | None = None
    doubles_within: int | None = None
    then: str | Callable[[Event], object] = "log"

    def __post_init__(self) -> None:
        if self.measure not in MEASURES:
            raise ValueError(f"measure is {self.measure!r}: pass one of {', '.join(MEASURES)}")
        lines = {name: getattr(self, name) for name in ("above", "below", "doubles_within")}
        given = {name: x for name, x in lines.items() if x is not None}
        if len(given) != 1:
            what = " and ".join(given) or "no line"
            raise ValueError(f"{what} given: pass one of above, below and doubles_within")
        ((name, line),) = given.items()
        if name == "doubles_within":
            checks.whole(name, line)
        elif isinstance(line, bool) or not isinstance(line, int | float) or math.isnan(line):
            raise ValueError(f"{name} is {line!r}: pass a number")
        if not (self.then in ACTIONS or callable(self.then)):
            raise ValueError(f"then is {self.then!r}: pass {', '.join(ACTIONS)} or a function")

    @property
    def rule(self) -> str:
        """The rule in words, as events and logs name it."""
        if self.doubles_within is not None:
            return f"{self.measure} doubles within {self.doubles_within} steps"
        side = "below" if self.above is None else "above"
        return f"{self.measure} {side} {self._line:g}"

    @property
    def action(self) -> str:
        """ "log", "stop", "save", or "call" for a function."""
        return self.then if isinstance(self.then, str) else "call"

    @property
    def _line(self) -> float:
        line = self.below if self.above is None else self.above
        assert line is not None  # or it doubles
        return line

    def excess(self, value: float, before: float | None) -> float | None:
        """By how much a number is over the line, larger being worse; None where it is not, and for
        NaN, which a head without rows has."""
        if self.doubles_within is not None:
            if before is None or not before > 0 or not value >= 2 * before:
                return None
            return value / before
        over = value - self._line if self.below is None else self._line - value
        return over if over > 0 else None


@dataclass(frozen=True)
class Event:
    """A rule that was broken: the head that broke it most, what its number was, and why.

    threshold: the line, for a rule that doubles twice the number of before. also: how many other
    heads broke the rule in this step. why: what made the head's scores, from its own numbers;
    cause: these numbers, as `causes` gives them, empty where only the sentence is known.
    """

    step: int
    rule: str
    measure: str
    value: float
    threshold: float
    layer: int
    head: int
    path: str
    why: str
    action: str
    also: int
    cause: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        more = f", and {self.also} more heads" if self.also else ""
        return (
            f"step {self.step}: {self.rule}: {self.value:.4g} in layer {self.layer} head "
            f"{self.head} ({self.path}){more}. {self.why}"
        )

    def document(self) -> dict[str, Any]:
        """As JSON values, without the step."""
        told = asdict(self)
        del told["step"]
        return told


class Watch:
    """Rules over the steps of one run."""

    def __init__(self, rules: Sequence[Alarm]) -> None:
        self.rules = tuple(rules)
        for rule in self.rules:
            if not isinstance(rule, Alarm):
                raise TypeError(f"alarms hold {rule!r}: pass scaledot.Alarm(…)")
        self._longest = max((r.doubles_within or 0 for r in self.rules), default=0)
        self._before: deque[_Seen] = deque()
        self._first: _Seen | None = None
        self._last: Mapping[str, HeadStats] | None = None

    def check(self, step: int, stats: Mapping[str, HeadStats]) -> list[Event]:
        """The rules that a step broke, at most one event a rule: the worst head of all layers."""
        for path, one in stats.items():
            for rule in self.rules:
                known = rule.measure == "nonfinite" or NAMES[rule.measure][0] in one.measures
                if not known and bool(one.counts["rows"].any()):
                    raise ScaledotError(
                        f"{path} has no {NAMES[rule.measure][0]} that {rule.rule!r} could compare"
                    )
        now = _Seen(
            step,
            {path: {name: x.tolist() for name, x in numbers(one).items()}
             for path, one in stats.items()},
            {path: factors(one) for path, one in stats.items()},
        )  # fmt: skip
        while self._before and self._before[0].step < step - self._longest:
            self._before.popleft()
        events = []
        for rule in self.rules:
            broken = []
            for layer, (path, of) in enumerate(now.numbers.items()):
                for head, value in enumerate(of[rule.measure]):
                    before = self._lowest(rule, step, path, head)
                    lowest = None if before is None else before.numbers[path][rule.measure][head]
                    if (excess := rule.excess(value, lowest)) is not None:
                        line = rule._line if lowest is None else 2 * lowest
                        broken.append((excess, layer, head, path, value, line, before))
            if broken:
                _, layer, head, path, value, line, before = max(broken, key=lambda x: x[0])
                cause = self._cause(rule, path, head, stats[path], now, before or self._first)
                events.append(
                    Event(step, rule.rule, rule.measure, value, line, layer, head, path,
                          why(cause), rule.action, len(broken) - 1, cause)
                )  # fmt: skip
        if self._longest:
            self._before.append(now)
        self._first = self._first or now
        self._last = stats
        return events

    def _lowest(self, rule: Alarm, step: int, path: str, head: int) -> _Seen | None:
        """Where a head had its least number within the steps that a doubling looks back on, the
        last of equals."""
        if rule.doubles_within is None:
            return None

        def number(seen: _Seen) -> float:
            return seen.numbers[path][rule.measure][head]

        earlier = [
            seen
            for seen in reversed(self._before)
            if seen.step >= step - rule.doubles_within
            and path in seen.numbers
            and not math.isnan(number(seen))
        ]
        return min(earlier, key=number, default=None)

    def _cause(
        self, rule: Alarm, path: str, head: int, stats: HeadStats, now: _Seen, before: _Seen | None
    ) -> dict[str, Any]:
        if rule.measure == "nonfinite":
            last = None if self._last is None else self._last.get(path)
            largest = math.nan if last is None else float(values(last)["max_score"][head])
            rows = {"rows": int(stats.counts["rows"][head])}
            return rows | ({"before": largest} if math.isfinite(largest) else {})
        if before is None or path not in before.factors:
            return causes(now.factors[path], head)
        return causes(now.factors[path], head, before.factors[path], before.step)


@dataclass(frozen=True)
class _Seen:
    """What is remembered of a step, by path: the numbers of each head, and their `factors`."""

    step: int
    numbers: Mapping[str, Mapping[str, Sequence[float]]]
    factors: Mapping[str, Mapping[str, Sequence[float]]]


def causes(
    now: Mapping[str, Sequence[float]], head: int,
    before: Mapping[str, Sequence[float]] | None = None, step: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """What makes a head's scores as wide as they are, from its `factors`, and what grew since those
    `before`, of `step`.

    scale: |α|·√d_k, where that is not 1. now: the other factors, where measured. grown: how many
    times what they were in step `since`, the scale too where it moved. A factor that is not finite
    is left out.
    Source: docs/maths.md#alarms.
    """
    mine = {name: x[head] for name, x in now.items() if math.isfinite(x[head])}
    found: dict[str, Any] = {}
    if abs(mine.get("scale", 1.0) - 1) > 0.01:
        found["scale"] = mine["scale"]
    if before is not None:
        earlier = {name: x[head] for name, x in before.items()}
        times = {name: x / earlier[name] for name, x in mine.items() if earlier.get(name, 0) > 0}
        grown = {name: x for name, x in times.items() if math.isfinite(x)}
        if grown.get("scale") == 1:  # as in most models always
            del grown["scale"]
        if grown:
            found |= {"since": step, "grown": grown}
    mine.pop("scale", None)
    return found | ({"now": mine} if mine else {})


def why(cause: Mapping[str, Any]) -> str:
    """The numbers of a cause as a sentence.

    >>> why({"rows": 74, "before": 3.25})
    'of 74 rows; the largest score of the step before was 3.25'
    """
    if "rows" in cause:
        of = f"of {cause['rows']:,} rows; "
        if "before" not in cause:
            return f"{of}it had no finite score before"
        return f"{of}the largest score of the step before was {cause['before']:.4g}"
    parts = []
    if "scale" in cause:
        parts.append(f"the scale is {cause['scale']:.3g} times 1/√d_k")
    if "grown" in cause:
        grown = [f"{FACTORS[name]} {x:.3g} times" for name, x in cause["grown"].items()]
        parts.append(f"since step {cause['since']}: {', '.join(grown)}")
    if "now" in cause:
        now = [f"{FACTORS[name]} {x:.3g}" for name, x in cause["now"].items()]
        parts.append(f"now {', '.join(now)}")
    return "; ".join(parts) or "its norms were not measured"


def factors(stats: HeadStats) -> dict[str, list[float]]:
    """What the width of each head's scores is a product of, (heads,): the scale in units of 1/√d_k
    and, where measured, ‖q‖, ‖k‖ (root mean squares) and their alignment.

    A row's scores are α‖q‖‖k‖·cos: their standard deviation is the product of |α|·√d_k, of
    ‖q‖·‖k‖ ÷ d_k, and of how far queries and keys point the same way, 1 for independent directions.
    Source: docs/maths.md#alarms.
    """
    scale = max(map(abs, stats.scale)) * math.sqrt(stats.d_k)
    found = {"scale": [scale] * stats.heads}
    if not {"query_norm", "key_norm"} <= stats.measures.keys():
        return found
    query, key = (
        (m.average.square() + m.var).sqrt()
        for m in (stats.measures["query_norm"], stats.measures["key_norm"])
    )
    key = key.repeat_interleave(stats.heads // stats.kv_heads)
    width = stats.measures["score_var"].average.clamp(min=0).sqrt()
    alignment = width * stats.d_k / (scale * query * key)
    named = {"query": query, "key": key, "alignment": alignment}
    return found | {name: x.tolist() for name, x in named.items()}
