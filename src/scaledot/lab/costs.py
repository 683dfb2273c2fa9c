"""What attention costs: FLOPs, bytes and time of each stage.

    stage       FLOPs of one layer, one sequence           naive numbers read and written
    Q, K, V     2 n d (h d_k + h_kv d_k + h_kv d_v)        X, the weights, Q, K, V
    QKᵀ         2 P h d_k                                  Q, K; S
    scale       P h                                        S; S
    softmax     5 P h, of them P h exponentials            S; P
    · V         2 P h d_v                                  P, V; O
    W_O         2 n h d_v d                                O, the weights; the output

d is d_model, n the tokens, P the pairs that are visible: n², or n(n + 1)/2 where causal. A
multiply-add counts 2. A softmax takes the maximum, a difference, exp, a sum and a quotient for each
pair. Naively S and its softmax are h n² numbers each, in one pass only a log-sum-exp for each row
is kept besides the output. Sources: docs/maths.md#cost; Milakov & Gimelshein 2018,
arXiv:1805.02867; Rabe & Staats 2021, arXiv:2112.05682. Batches, the cache of a decoder and the
vocabulary are not counted, nor that layers with a window see less.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any

import torch

from scaledot import dispatch
from scaledot.checks import whole
from scaledot.lab import arguments, timings
from scaledot.lab.published import Model, configured, custom, named
from scaledot.lab.results import Column, Line, Panel, Result, Table

_DEFAULT = "GPT-2 small"
TOKENS = (128, 512, 2048, 8192, 32768, 131072)
LSE_BYTES = 4
"""Of a log-sum-exp, which is kept in float32."""
_SOFTMAX_STEPS = 5
"""Maximum, difference, exp, sum, quotient."""


def cost(
    model: Any = None,
    *,
    layers: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    d_model: int | None = None,
    d_k: int | None = None,
    value_dim: int | None = None,
    tokens: Iterable[int] | int = TOKENS,
    causal: bool = True,
    itemsize: int = 2,
    measure: bool = False,
    repeats: int = 3,
    budget: int = 2**30,
    work: int = 20_000_000_000,
    on_progress: Callable[[int, int], None] | None = None,
) -> Result:
    """FLOPs and bytes of each stage of one layer's attention, forward, for one sequence; and its
    time on this CPU if asked.

    model: a name of `models()`, a folder with a Hugging Face config.json, or such a configuration;
    without one and without d_model, GPT-2 small. Sizes given besides replace the model's; kv_heads
    is heads, d_k is d_model/heads and value_dim is d_k where nothing gives them.
    tokens: lengths n, one row each. causal: only pairs j ≤ i count; the naive stages compute and
    keep n² all the same. itemsize: bytes of a number, 2 for bfloat16.
    measure: seconds of the naive stages and of `scaledot.attention`, in float32 on torch's threads;
    the least of `repeats` runs, which take turns. What would allocate more than `budget` bytes or
    take more than `work` FLOPs is left out and said so.

    Raises: TypeError, ValueError for sizes that are none or do not fit each other and an unknown
    model; ScaledotError for a folder without a configuration that can be read.
    Source: docs/maths.md#cost.

    >>> cost("Llama-3 8B", tokens=8192).column("attention_share")
    [0.8000...]
    """
    named_sizes = {
        "layers": layers, "heads": heads, "kv_heads": kv_heads, "d_model": d_model, "d_k": d_k,
        "value_dim": value_dim,
    }  # fmt: skip
    given = {k: whole(k, v) for k, v in named_sizes.items() if v is not None}
    lengths = arguments.sizes("tokens", tokens)
    itemsize = whole("itemsize", itemsize)
    repeats = whole("repeats", repeats)
    budget = whole("budget", budget)
    work = whole("work", work)
    m = _sizes(model, given)
    flops = tuple(_flops(m, n, causal) for n in lengths)
    moved = tuple(_moved(m, n, itemsize) for n in lengths)
    held = tuple(_held(m, n, itemsize) for n in lengths)
    tables = [
        Table(_stage_columns("number"), flops, "FLOPs of one layer, forward"),
        Table(_stage_columns("size"), moved, "Bytes that naive stages read and write"),
        Table(_HELD, held, "Bytes kept, naively and in one pass"),
    ]
    says = [*_crossings(m, causal), *_wall(held[-1])]
    panels = [_flops_panel(flops), _memory_panel(held)]
    if measure:
        timed = _measure(m, lengths, causal, repeats, budget, work, on_progress)
        tables.append(
            Table(_TIMED, timed, f"Milliseconds on this machine, float32, {timings.threads()}")
        )
        says += _about_times(timed, budget, work)
        if any(row["one_pass_ms"] for row in timed):
            panels.append(_time_panel(timed))
    asked: dict[str, Any] = {
        "model": _DEFAULT if model is None and d_model is None else None,
        **given,
    }
    if isinstance(model, (str, PathLike)):
        asked["model"] = str(model)
    elif model is not None:
        asked |= {name: getattr(m, name) for name in named_sizes}
    settings = {**asked, "tokens": list(lengths), "causal": causal}
    settings |= {"itemsize": itemsize, "measure": measure}
    if measure:
        settings |= {"repeats": repeats, "budget": budget, "work": work}
    kv = f" ({m.kv_heads} of keys and values)" if m.kv_heads != m.heads else ""
    one = f"one of {m.layers:,} layers" if m.layers > 1 else "one layer"
    about = (
        f"{one}, {m.name}: {m.heads:,} heads{kv}, d_model {m.d_model:,}, d_k {m.d_k:,}, "
        f"{'causal' if causal else 'all pairs'}, {itemsize} bytes a number"
    )
    return Result(
        "cost", about, settings, tuple(tables), tuple(says), tuple(panels), "docs/maths.md#cost"
    )


def _sizes(model: Any, given: dict[str, int]) -> Model:
    """The model that is asked about, with the sizes given in place of its own."""
    if model is None and "d_model" not in given:
        model = _DEFAULT
    if model is None:
        m = custom(given)
    elif isinstance(model, (str, PathLike)):
        m = named(model)
    else:
        m = configured(model)
    if model is not None and given:
        if m.latent and given.keys() - {"layers"}:
            raise ValueError(
                f"{m.name} has latent attention: of its sizes only layers can be given"
            )
        full = dict(given)
        if m.kv_heads == m.heads and "heads" in given:
            full.setdefault("kv_heads", given["heads"])
        if m.value_dim == m.d_k and "d_k" in given:
            full.setdefault("value_dim", given["d_k"])
        altered = ", ".join(f"{name} {value:,}" for name, value in given.items())
        m = replace(m, **full, name=f"{m.name} with {altered}")  # type: ignore[arg-type]
    if m.heads % m.kv_heads:
        raise ValueError(
            f"heads {m.heads} is no multiple of kv_heads {m.kv_heads}: each kv head serves as many"
        )
    return m


def _pairs(n: int, causal: bool) -> int:
    return n * (n + 1) // 2 if causal else n * n


def _flops(m: Model, n: int, causal: bool) -> dict[str, float]:
    pairs = _pairs(n, causal) * m.heads
    into = sum(2 * n * a * b for a, b in [*m.queries, *m.keys_values])
    out = 2 * n * math.prod(m.output)
    scores, values = 2 * pairs * m.d_k, 2 * pairs * m.value_dim
    return {
        "tokens": n,
        "qkv": into,
        "scores": scores,
        "scale": pairs,
        "softmax": _SOFTMAX_STEPS * pairs,
        "exp": pairs,
        "values": values,
        "out": out,
        "attention_share": (scores + values) / (into + out),
    }


def _moved(m: Model, n: int, itemsize: int) -> dict[str, float]:
    """Each stage reads what it needs and writes what it makes once."""
    square = m.heads * n * n
    q, k, v, o = (n * x for x in _widths(m))
    x = n * m.d_model
    hidden = sum(2 * n * b for chain in (m.queries, m.keys_values) for _, b in chain[:-1])
    weights = sum(a * b for a, b in [*m.queries, *m.keys_values])
    stages = {
        "qkv": x + weights + hidden + q + k + v,
        "scores": q + k + square,
        "scale": 2 * square,
        "softmax": 2 * square,
        "values": square + v + o,
        "out": o + math.prod(m.output) + x,
    }
    return {"tokens": n, **{name: itemsize * count for name, count in stages.items()}}


def _widths(m: Model) -> tuple[int, int, int, int]:
    """Numbers a token has as q, k, v and output of all heads."""
    return m.width, m.kv_heads * m.d_k, m.kv_heads * m.value_dim, m.heads * m.value_dim


def _held(m: Model, n: int, itemsize: int) -> dict[str, float]:
    scores, lse = m.heads * n * n * itemsize, m.heads * n * LSE_BYTES
    return {
        "tokens": n,
        "operands": sum(_widths(m)) * n * itemsize,
        "scores": scores,
        "naive": 2 * scores,
        "lse": lse,
        "ratio": scores / lse,
    }


def _stage_columns(form: Any) -> tuple[Column, ...]:
    head = (
        Column("tokens", "tokens n", "whole"),
        Column("qkv", "Q, K, V", form),
        Column("scores", "QKᵀ", form),
        Column("scale", "scale", form),
        Column("softmax", "softmax", form),
    )
    tail = (Column("values", "· V", form), Column("out", "W_O", form))
    if form == "size":
        return (*head, *tail)
    share = Column("attention_share", "QKᵀ, ·V ÷ projections", "number")
    return (*head, Column("exp", "exp", form), *tail, share)


_HELD = (
    Column("tokens", "tokens n", "whole"),
    Column("operands", "Q, K, V, O", "size"),
    Column("scores", "scores S", "size"),
    Column("naive", "S and weights", "size"),
    Column("lse", "one pass: log-sum-exp", "size"),
    Column("ratio", "S ÷ log-sum-exp", "number"),
)


def _crossings(m: Model, causal: bool) -> list[str]:
    """The n at which QKᵀ and ·V cost what everything linear in n does."""
    linear = [*m.queries, *m.keys_values, m.output]
    projections = sum(a * b for a, b in linear)
    pair = m.heads * (m.d_k + m.value_dim)
    says = []
    for what, each in (
        ("the projections", projections),
        ("a whole block with an MLP of 4·d_model", projections + 8 * m.d_model**2),
    ):
        full = each / pair
        at = 2 * full - 1 if causal else full
        says.append(
            f"QKᵀ and ·V cost as much as {what} at n = {at:,.0f}, {at / m.d_model:.3g}·d_model"
            f"{f' (over all pairs: {full:,.0f})' if causal else ''}; at fewer tokens, less."
        )
    ratio = 2 * (m.d_k + m.value_dim)
    says.append(
        f"One exponential goes with {ratio:,} matmul FLOPs, 2·(d_k + d_v): with half of d_k and "
        "d_v in twice the heads there are twice the exponentials."
    )
    return says


def _wall(held: dict[str, float]) -> list[str]:
    n = held["tokens"]
    return [
        f"At n = {n:,} the scores of one layer are {binary(held['scores'])}, their log-sum-exp "
        f"{binary(held['lse'])}: the n² memory is the naive computation's, not attention's."
    ]


def binary(size: float) -> str:
    """Bytes in powers of 1,024: ``16 MiB``.

    >>> binary(2**40), binary(1536)
    ('1,024 GiB', '1.5 KiB')
    """
    unit = min(int(math.log2(max(size, 1)) // 10), 3)
    amount = size / 1024**unit
    text = f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}"
    return f"{text} {('B', 'KiB', 'MiB', 'GiB')[unit]}"


def _flops_panel(rows: tuple[dict[str, float], ...]) -> Panel:
    n = [row["tokens"] for row in rows]
    lines = (
        Line("projections", n, [row["qkv"] + row["out"] for row in rows]),
        Line("QKᵀ and ·V", n, [row["scores"] + row["values"] for row in rows]),
        Line("softmax", n, [row["softmax"] for row in rows]),
        Line("scale", n, [row["scale"] for row in rows]),
    )
    return Panel("FLOPs of one layer", "tokens n", "FLOPs", lines, log_x=True, log_y=True)


def _memory_panel(rows: tuple[dict[str, float], ...]) -> Panel:
    n = [row["tokens"] for row in rows]
    lines = (
        Line("S and weights, naive", n, [row["naive"] for row in rows]),
        Line("log-sum-exp, one pass", n, [row["lse"] for row in rows]),
        Line("Q, K, V, output", n, [row["operands"] for row in rows], "theory"),
    )
    return Panel("Bytes kept for one layer", "tokens n", "bytes", lines, log_x=True, log_y=True)


# What it takes here

_INNER = ("scores", "scale", "softmax", "values")
_STAGES = ("qkv", *_INNER, "out")
_TIMED = (
    Column("tokens", "tokens n", "whole"),
    *(
        Column(f"{name}_ms", heading, "number")
        for name, heading in zip(
            _STAGES, ("Q, K, V", "QKᵀ", "scale", "softmax", "· V", "W_O"), strict=True
        )
    ),
    Column("naive_ms", "QKᵀ to ·V", "number"),
    Column("one_pass_ms", "one pass", "number"),
    Column("ratio", "ratio", "number"),
)


def _measure(
    m: Model, lengths: tuple[int, ...], causal: bool, repeats: int, budget: int, work: int,
    on_progress: Callable[[int, int], None] | None,
) -> tuple[dict[str, float | None], ...]:  # fmt: skip
    runs = {
        (n, part): partial(_once, m, n, part, causal)
        for n in lengths
        for part in ("projections", "naive", "one_pass")
        if _bytes(m, n, part) <= budget and _effort(m, n, part, causal) <= work
    }
    best = timings.least(runs, repeats, on_progress)
    rows: list[dict[str, float | None]] = []
    for n in lengths:
        parts = (best.get((n, part), {}) for part in ("projections", "naive", "one_pass"))
        took = {name: 1e3 * seconds for part in parts for name, seconds in part.items()}
        inner = [took[name] for name in _INNER if name in took]
        naive, one = sum(inner) or None, took.get("one_pass")
        rows.append({
            "tokens": n, **{f"{name}_ms": took.get(name) for name in _STAGES},
            "naive_ms": naive, "one_pass_ms": one, "ratio": naive / one if naive and one else None,
        })  # fmt: skip
    return tuple(rows)


def _bytes(m: Model, n: int, part: str) -> int:
    """What a run of it allocates, in float32."""
    if part == "projections":
        chains = [*m.queries, *m.keys_values, m.output]
        return 4 * max(a * b + n * (a + b) for a, b in chains)
    # k and v once as they are and, naively, once for each query head.
    operands = n * (2 * m.heads + m.kv_heads) * (m.d_k + m.value_dim)
    return 4 * (operands + (2 * m.heads * n * n + n * n if part == "naive" else m.heads * n))


def _effort(m: Model, n: int, part: str, causal: bool) -> float:
    flops = _flops(m, n, causal and part == "one_pass")
    if part == "projections":
        return flops["qkv"] + flops["out"]
    return sum(flops[name] for name in _INNER)


def _once(m: Model, n: int, part: str, causal: bool) -> dict[str, float]:
    """Seconds of one run, on random operands: time does not depend on what they hold."""
    if part == "projections":
        chains = {"qkv": [*m.queries, *m.keys_values], "out": [m.output]}
        return {name: sum(_multiply(n, a, b) for a, b in chain) for name, chain in chains.items()}
    query = torch.randn(1, m.heads, n, m.d_k)
    key, value = torch.randn(1, m.kv_heads, n, m.d_k), torch.randn(1, m.kv_heads, n, m.value_dim)
    if part == "naive":
        group = m.heads // m.kv_heads
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        return timings.naive(query, key, value, m.scale, causal)[1]
    start = time.perf_counter()
    dispatch.attention(query, key, value, is_causal=causal, enable_gqa=m.heads != m.kv_heads)
    return {"one_pass": time.perf_counter() - start}


def _multiply(n: int, a: int, b: int) -> float:
    x, w = torch.randn(n, a), torch.empty(a, b).fill_(a**-0.5)
    start = time.perf_counter()
    x @ w
    return time.perf_counter() - start


def _about_times(rows: tuple[dict[str, float | None], ...], budget: int, work: int) -> list[str]:
    says = []
    both = [row for row in rows if row["ratio"]]
    if both:
        last = both[-1]
        says.append(
            f"At n = {last['tokens']:,} the naive stages took {last['naive_ms']:,.3g} ms, one pass "
            f"{last['one_pass_ms']:,.3g} ms: {last['ratio']:.2g} times as long."
        )
    left: dict[str, list[str]] = {}
    for key, what in (
        ("qkv_ms", "projections"), ("naive_ms", "naive stages"), ("one_pass_ms", "one pass"),
    ):  # fmt: skip
        if without := [f"{row['tokens']:,}" for row in rows if row[key] is None]:
            left.setdefault(", ".join(without), []).append(what)
    says += [
        f"Not timed, being over {binary(budget)} or {work:,.0f} FLOPs: {', '.join(what)} at "
        f"n = {which}."
        for which, what in left.items()
    ]
    return says


def _time_panel(rows: tuple[dict[str, float | None], ...]) -> Panel:
    lines = []
    for key, label in (("naive_ms", "naive, QKᵀ to ·V"), ("one_pass_ms", "one pass")):
        points = [(row["tokens"] or 0.0, row[key]) for row in rows]
        kept = [(n, ms) for n, ms in points if ms is not None]
        if kept:
            lines.append(Line(label, [n for n, _ in kept], [ms for _, ms in kept]))
    return Panel("Time of one layer here", "tokens n", "ms", tuple(lines), log_x=True, log_y=True)
