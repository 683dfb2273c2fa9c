"""The same d_model split into h heads: what stays, what grows, and what one head cannot do.

Projections, QKᵀ and ·V take the same multiply-adds for every h, as h · d_k = d_model. Softmax works
on h n² numbers, and as many are kept where scores are kept at all.

The planted task. Every token has a content, m random numbers of variance 1. Each must fetch two:
of its previous token, and of its antecedent, an earlier token that it names. Queries and keys are
built, not trained: a code for each place and one for each name, no two alike, so that a softmax
puts its weight where it should to 10⁻¹⁵. Values are contents; W_O is linear and fixed.
  - Two heads have two distributions: each fetches one content, exactly.
  - One head has one: λ on the previous token and 1 − λ on the antecedent. Its output λu + (1−λ)w
    is one combination of two independent contents, however wide the values are. The best linear
    readouts leave (1−λ)²/(λ²+(1−λ)²) of u and λ²/(λ²+(1−λ)²) of w: together 1 at every λ
    (docs/maths.md#one-softmax-two-contents).
  - What is fixed: one layer, one softmax, values that do not depend on who reads them, a linear
    W_O. Where the two contents come from tokens of two kinds, each kind can write into columns of
    its own, and one head loses nothing: d_v = d_model has room for both. A nonlinear reader of
    discrete contents, or a second layer, could part the mixture too.
"Averaging inhibits this": Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from scaledot import dispatch
from scaledot.checks import whole
from scaledot.lab import arguments, timings
from scaledot.lab.results import Column, Estimate, Line, Panel, Result, Table, Value
from scaledot.numerals import small

ITEM = 4
"""Bytes of a number: all is measured in float32."""
_GAP = 40.0
"""Logits between the tokens fetched and the others: e⁻⁴⁰ = 4·10⁻¹⁸ each."""
_MEMORY = 1 << 33
"""Bytes that the naive stages may hold."""
_SHARES = (0.5, 0.75, 0.9)
_SEQUENCES, _LONGEST = 64, 64
_ODD = slice(3, None, 2)
_LARGEST_SEED = 2**64 - 1


def multihead(
    d_model: int = 512,
    heads: Iterable[int] | int = (1, 8),
    keys: int = 512,
    seed: int = 20260714,
    *,
    measure: bool = True,
    repeats: int = 5,
    on_progress: Callable[[int, int], None] | None = None,
) -> Result:
    """Work, memory and shapes of one layer over `keys` tokens for each number of heads, and the
    error of the planted task with one head and with several.

    heads: each divides d_model and leaves d_k = d_model/h of 4 or more; the first is what the
    others are compared with. FLOPs count a multiply-add as 2; bytes are of float32; milliseconds
    (None with measure=False) are the least of `repeats` runs that take turns. An error is the mean
    square of what is missing over the content's variance: 0 recovered, 1 nothing known of it.

    Raises: TypeError, ValueError for sizes that do not fit.
    Source: docs/maths.md#one-softmax-two-contents; Vaswani et al. 2017, section 3.2.2.

    >>> multihead(64, (1, 4), keys=32, measure=False).column("exp")
    [1024, 4096]
    """
    d_model = whole("d_model", d_model)
    several = arguments.sizes("heads", heads)
    keys = whole("keys", keys)
    repeats = whole("repeats", repeats)
    seed = arguments.seed(seed)
    if seed > _LARGEST_SEED:
        raise ValueError(f"seed is {seed}: torch takes at most {_LARGEST_SEED}")
    for h in several:
        if d_model % h:
            raise ValueError(f"heads {h} does not divide d_model {d_model}: pass a divisor of it")
        if d_model // h < 4:
            raise ValueError(
                f"heads {h} leaves d_k = {d_model // h} of d_model {d_model}: the planted task "
                "needs at least 4"
            )
    if d_model < 8:
        raise ValueError(f"d_model is {d_model}: the planted task needs at least 8")
    held = ITEM * (2 * max(several) * keys**2 + 6 * keys * d_model + 4 * d_model**2)
    if held > _MEMORY:
        raise ValueError(
            f"{keys:,} keys, {max(several)} heads and d_model {d_model:,} take {held / 2**30:,.0f} "
            f"GiB: pass sizes for at most {_MEMORY >> 30}"
        )
    layer = Layer.random(d_model, keys, seed)
    took: dict[int, dict[str, float]] = {h: {} for h in several}
    if measure:
        runs = {h: partial(_seconds, layer, h) for h in several}
        took = timings.least(runs, repeats, on_progress)
    rows = tuple(_work(d_model, h, keys, took[h]) for h in several)
    planted = _planted(d_model, several, seed)
    tables = (
        Table(_WORK, rows, "FLOPs, exponentials and memory"),
        _shapes(layer, several),
        Table(
            _PLANTED, planted, "A planted task, to fetch two contents: share of each that is missed"
        ),
        *([Table(_TIMES, rows, "Milliseconds on this machine")] if measure else []),
    )
    panels = [_work_panel(rows), _error_panel(planted)]
    if measure:
        panels.insert(1, _time_panel(rows))
    tested = f", {timings.threads()}, float32" if measure else ""
    return Result(
        "multihead",
        f"d_model {d_model:,}, {keys:,} tokens{tested}, seed {seed}",
        {
            "d_model": d_model, "heads": list(several), "keys": keys, "seed": seed,
            "measure": measure, "repeats": repeats,
        },
        tables,
        (*_says(planted), *_compared(rows)),
        tuple(panels),
        "docs/maths.md#one-softmax-two-contents; Vaswani et al. 2017, section 3.2.2",
    )  # fmt: skip


# Work


@dataclass(frozen=True, eq=False)
class Layer:
    """One sequence and the weights of one attention layer, whatever its number of heads."""

    x: Tensor
    projections: tuple[Tensor, Tensor, Tensor]
    output: Tensor

    @staticmethod
    def random(d_model: int, keys: int, seed: int) -> Layer:
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(keys, d_model, generator=g)
        q, k, v, o = torch.randn(4, d_model, d_model, generator=g) * d_model**-0.5
        return Layer(x, (q, k, v), o)

    def project(self) -> list[Tensor]:
        return [self.x @ w for w in self.projections]


def split(x: Tensor, heads: int) -> Tensor:
    """(tokens, d_model) → (heads, tokens, d_model/heads): head h has the h-th run of columns."""
    return x.unflatten(-1, (heads, -1)).transpose(0, 1)


def join(x: Tensor) -> Tensor:
    """(heads, tokens, width) → (tokens, heads·width): the heads side by side."""
    return x.transpose(0, 1).flatten(1)


def _seconds(layer: Layer, heads: int) -> dict[str, float]:
    start = time.perf_counter()
    projected = layer.project()
    took = {"into": time.perf_counter() - start}
    q, k, v = (split(x, heads).contiguous() for x in projected)
    stages, inner = timings.naive(q, k, v, q.shape[-1] ** -0.5)
    took |= {"matmuls": inner["scores"] + inner["values"], "softmax": inner["softmax"]}
    joined = join(stages["output"])
    start = time.perf_counter()
    joined @ layer.output
    took["out"] = time.perf_counter() - start
    start = time.perf_counter()
    dispatch.attention(q[None], k[None], v[None])
    took["one_pass"] = time.perf_counter() - start
    return took


def _work(d_model: int, heads: int, n: int, took: dict[str, float]) -> dict[str, float | None]:
    ms = {name: 1e3 * seconds for name, seconds in took.items()}
    return {
        "heads": heads,
        "d_k": d_model // heads,
        "projections": 4 * 2 * n * d_model**2,
        "matmuls": 2 * 2 * n * n * (d_model // heads) * heads,
        "exp": heads * n * n,
        "scores": ITEM * heads * n * n,
        "lse": ITEM * heads * n,
        "projections_ms": ms["into"] + ms["out"] if ms else None,
        "matmuls_ms": ms.get("matmuls"),
        "softmax_ms": ms.get("softmax"),
        "one_pass_ms": ms.get("one_pass"),
    }


_WORK = (
    Column("heads", "heads", "whole"),
    Column("d_k", "d_k", "whole"),
    Column("projections", "projections", "number"),
    Column("matmuls", "QKᵀ, ·V", "number"),
    Column("exp", "exponentials", "number"),
    Column("scores", "scores", "size"),
    Column("lse", "one pass keeps", "size"),
)
_TIMES = (
    Column("heads", "heads", "whole"),
    Column("projections_ms", "projections", "number"),
    Column("matmuls_ms", "QKᵀ, ·V", "number"),
    Column("softmax_ms", "softmax", "number"),
    Column("one_pass_ms", "one pass", "number"),
)


def _shapes(layer: Layer, several: tuple[int, ...]) -> Table:
    """Shapes as the stages gave them."""
    steps: dict[str, dict[str, str]] = {}
    for h in several:
        projected = layer.project()
        q, k, v = (split(x, h) for x in projected)
        stages, _ = timings.naive(q, k, v, q.shape[-1] ** -0.5)
        joined = join(stages["output"])
        for step, x in (
            ("X", layer.x),
            ("Q, K, V, each", projected[0]),
            ("split, each", q),
            ("scores and weights", stages["scores"]),
            ("output of the heads", stages["output"]),
            ("side by side", joined),
            ("times W_O", joined @ layer.output),
        ):
            steps.setdefault(step, {})[f"heads_{h}"] = " × ".join(f"{size:,}" for size in x.shape)
    columns = [Column("step", "step", "text")]
    columns += [Column(f"heads_{h}", f"{h} head{'s' * (h > 1)}", "text") for h in several]
    rows = tuple({"step": s, **by} for s, by in steps.items())
    return Table(tuple(columns), rows, "Shapes at each step")


def _compared(rows: tuple[dict[str, float | None], ...]) -> list[str]:
    """First against last, in counts and in time."""
    a, b = rows[0], rows[-1]
    if a is b:
        return []
    grown = {k: (b[k] or 0.0) / (a[k] or 1.0) for k in ("matmuls", "projections", "exp", "scores")}
    says = [
        f"From {a['heads']:,} to {b['heads']:,} heads: FLOPs of projections × "
        f"{grown['projections']:.3g}, of QKᵀ and ·V × {grown['matmuls']:.3g}, exponentials × "
        f'{grown["exp"]:.3g}, memory of scores × {grown["scores"]:.3g}. "The same cost" '
        "holds for the matmuls alone."
    ]
    if a["softmax_ms"] and b["softmax_ms"] and a["matmuls_ms"] and b["matmuls_ms"]:
        says.append(
            f"Measured: QKᵀ and ·V × {b['matmuls_ms'] / a['matmuls_ms']:.2g}, softmax × "
            f"{b['softmax_ms'] / a['softmax_ms']:.2g}, one pass × "
            f"{(b['one_pass_ms'] or 0.0) / (a['one_pass_ms'] or 1.0):.2g}."
        )
    return says


# The planted task


@dataclass(frozen=True, eq=False)
class Planted:
    """Sequences in which the tokens from 2 on have a previous token and an antecedent before it.

    content: (sequences, tokens, m). antecedent: (sequences, tokens), from 0 to i − 2; with `kinds`
    it has the parity of i, so that it is never of the previous token's kind.
    """

    content: Tensor
    antecedent: Tensor

    @staticmethod
    def random(n: int, m: int, seed: int, kinds: bool = False) -> Planted:
        g = torch.Generator().manual_seed(seed)
        content = torch.randn(_SEQUENCES, n, m, generator=g, dtype=torch.float64)
        i = torch.arange(n)
        # Every other place before i with kinds, every place up to i − 2 without.
        choices = (i // 2 if kinds else i - 1).clamp(min=1)
        drawn = (torch.rand(_SEQUENCES, n, generator=g, dtype=torch.float64) * choices).long()
        return Planted(content, i % 2 + 2 * drawn if kinds else drawn)

    def codes(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of the place before, of the antecedent, and of a token's own place and name alike:
        one-hot, (sequences, tokens, tokens)."""
        own = torch.eye(self.content.shape[1], dtype=torch.float64)
        previous = own[(torch.arange(len(own)) - 1).clamp(min=0)]
        return previous.expand(_SEQUENCES, -1, -1), own[self.antecedent], own

    def errors(
        self, previous: Tensor, antecedent: Tensor, readers: slice = slice(2, None)
    ) -> tuple[Estimate, Estimate]:
        """Of the contents recovered, (sequences, tokens, m) each; means over sequences."""
        place = torch.arange(self.content.shape[1])
        rows = torch.arange(_SEQUENCES)[:, None]
        wanted = self.content[rows, (place - 1).clamp(min=0)], self.content[rows, self.antecedent]
        found = []
        for came, meant in zip((previous, antecedent), wanted, strict=True):
            each = (came - meant)[:, readers].square().mean((1, 2))
            error = float(each.std() / math.sqrt(_SEQUENCES))
            found.append(Estimate(float(each.mean()), error))
        return found[0], found[1]


def _planted(d_model: int, several: tuple[int, ...], seed: int) -> tuple[dict[str, Value], ...]:
    """One head at each share of the previous token and with two kinds of token, then each
    number of heads over one: tokens and contents fit the narrowest head."""
    narrow = d_model // max(2, *several)
    n = min(narrow, _LONGEST)
    task = Planted.random(n, n, seed)
    rows: list[dict[str, Value]] = []
    for share in _SHARES:
        mixed = _one_head(task, d_model, share)[..., :n]
        readout = share**2 + (1 - share) ** 2
        u, w = task.errors(mixed * (share / readout), mixed * ((1 - share) / readout))
        rows.append(_case("1 head", share, u, w, _left(share)))
    kinds = Planted.random(n, n, seed, kinds=True)
    u, w = kinds.errors(*_by_kind(kinds, d_model), _ODD)
    rows.append(_case("1 head, two kinds", 0.5, u, w, (0.0, 0.0)))
    for h in several:
        if h > 1:
            u, w = task.errors(*_two_heads(task, d_model // h, h))
            rows.append(_case(f"{h} heads", None, u, w, (0.0, 0.0)))
    return tuple(rows)


def _left(share: float) -> tuple[float, float]:
    """What the best linear readouts of λu + (1−λ)w miss of u and of w: they add up to 1."""
    both = share**2 + (1 - share) ** 2
    return (1 - share) ** 2 / both, share**2 / both


def _case(
    name: str, share: float | None, u: Estimate, w: Estimate, theory: tuple[float, float]
) -> dict[str, Value]:
    # Where theory says 0 what is left is rounding, and has no sampling error.
    found = [
        Estimate(e.value, e.error if t else None, t) for e, t in zip((u, w), theory, strict=True)
    ]
    return {
        "case": name,
        "share": share,
        "previous": found[0],
        "antecedent": found[1],
    }


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """(sequences, heads, tokens, width) by causal attention, codes _GAP logits apart."""
    return dispatch.attention(query, key, value, is_causal=True, scale=_GAP)


def _wide(x: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, width - x.shape[-1]))


def _one_head(task: Planted, width: int, share: float, value: Tensor | None = None) -> Tensor:
    """Both codes side by side: their two tokens lead, the previous by ln(λ/(1−λ)) more."""
    previous, antecedent, own = task.codes()
    more = math.log(share / (1 - share)) / _GAP
    query = _wide(torch.cat([previous * (1 + more), antecedent], -1), width)
    key = _wide(torch.cat([own, own], -1), width).expand_as(query)
    value = _wide(task.content if value is None else value, width)
    return _attend(query[:, None], key[:, None], value[:, None])[:, 0]


def _by_kind(task: Planted, width: int) -> tuple[Tensor, Tensor]:
    """Even tokens write into the first m columns, odd ones into the next; both weights are halves.
    To an odd reader the previous token is even and the antecedent odd."""
    m = task.content.shape[-1]
    odd = (torch.arange(task.content.shape[1]) % 2)[:, None].to(torch.float64)
    value = torch.cat([task.content * (1 - odd), task.content * odd], -1)
    doubled = 2 * _one_head(task, width, 0.5, value)
    return doubled[..., :m], doubled[..., m : 2 * m]


def _two_heads(task: Planted, width: int, heads: int) -> tuple[Tensor, Tensor]:
    """The first head looks for the place before, the second for the name; the others are empty."""
    previous, antecedent, own = task.codes()
    idle = torch.zeros(_SEQUENCES, heads - 2, len(own), width, dtype=torch.float64)
    query = torch.cat([_wide(torch.stack([previous, antecedent], 1), width), idle], 1)
    key, value = (
        torch.cat(
            [_wide(x.expand(_SEQUENCES, -1, -1), width)[:, None].expand(-1, 2, -1, -1), idle], 1
        )
        for x in (own, task.content)
    )
    output = _attend(query, key, value)[..., : task.content.shape[-1]]
    return output[:, 0], output[:, 1]


_PLANTED = (
    Column("case", "heads", "text"),
    Column("share", "λ", "weight"),
    Column("previous", "previous token", "small"),
    Column("previous.z", "z"),
    Column("antecedent", "antecedent", "small"),
    Column("antecedent.z", "z"),
)


def _says(planted: tuple[dict[str, Value], ...]) -> list[str]:
    def error(row: dict[str, Value], key: str) -> float:
        found = row[key]
        assert isinstance(found, Estimate)
        return found.value

    one = planted[0]
    sums = [error(row, "previous") + error(row, "antecedent") for row in planted[: len(_SHARES)]]
    says = [
        "Each token must fetch what the token before it holds and what an earlier one that it "
        "names, its antecedent, holds. One head that attends to both averages them: at weights of "
        f".50 it misses {error(one, 'previous'):.2f} of the one content's variance and "
        f"{error(one, 'antecedent'):.2f} of the other's. Other weights λ of the previous token "
        "move the error from one to the other: the sums are "
        f"{min(sums):.3f} to {max(sums):.3f}, in theory 1."
    ]
    split_up = [row for row in planted if row["share"] is None]
    if split_up:
        worst = max(error(row, key) for row in split_up for key in ("previous", "antecedent"))
        says.append(
            f"Separate heads recover both: the largest error is {small(worst)}. Averaging inhibits "
            "this, as Vaswani et al. say in section 3.2.2."
        )
    says.append(
        "One head does not lack width: where the two contents come from tokens of two kinds, each "
        "with columns of its own, it recovers both, with errors of "
        f"{small(error(planted[len(_SHARES)], 'previous'))} and "
        f"{small(error(planted[len(_SHARES)], 'antecedent'))}. It lacks a second distribution."
    )
    return says


# Figures


def _work_panel(rows: tuple[dict[str, float | None], ...]) -> Panel:
    names = {"projections": "projections", "matmuls": "QKᵀ, ·V", "exp": "exp", "scores": "scores"}
    return _bars(rows, names, f"Work against {_heads(rows[0])}", "times", relative=True)


def _time_panel(rows: tuple[dict[str, float | None], ...]) -> Panel:
    names = {
        "projections_ms": "projections", "matmuls_ms": "QKᵀ, ·V", "softmax_ms": "softmax",
        "one_pass_ms": "one pass",
    }  # fmt: skip
    return _bars(rows, names, "Time here", "ms", relative=False)


def _bars(
    rows: tuple[dict[str, float | None], ...], names: dict[str, str], title: str, y: str,
    relative: bool,
) -> Panel:  # fmt: skip
    lines = tuple(
        Line(
            _heads(row),
            list(names.values()),
            [(row[k] or 0.0) / ((rows[0][k] or 1.0) if relative else 1.0) for k in names],
            "bars",
        )
        for row in rows
    )
    return Panel(title, "", y, lines)


def _heads(row: dict[str, float | None]) -> str:
    return "1 head" if row["heads"] == 1 else f"{row['heads']:,} heads"


def _error_panel(planted: tuple[dict[str, Value], ...]) -> Panel:
    """Errors against the share of the previous token, beside the theory of one head."""
    lines = []
    grid = [i / 100 for i in range(50, 100)]
    for key, label in (("previous", "previous token"), ("antecedent", "antecedent")):
        found = [e for row in planted[: len(_SHARES)] if isinstance(e := row[key], Estimate)]
        error = [e.error or 0.0 for e in found]
        lines.append(Line(f"{label}, 1 head", _SHARES, [e.value for e in found], "points", error))
    for of in (0, 1):
        curve = [_left(share)[of] for share in grid]
        lines.append(Line("" if of else "theory", grid, curve, "theory"))
    several = [row for row in planted if row["share"] is None]
    worst = [e.value for row in several for e in row.values() if isinstance(e, Estimate)]
    if worst:
        lines.append(Line("both, separate heads", [grid[0], grid[-1]], [max(worst)] * 2))
    return Panel(
        "Error of the contents fetched", "λ, weight of the previous token",
        "share of their variance", tuple(lines),
    )  # fmt: skip
