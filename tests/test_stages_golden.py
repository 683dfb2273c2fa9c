"""The definition in two languages: stages_*.json are read here and by node (tests/web).

A file holds a head's float32 inputs, and what `trace` makes of them in float64 and in float32:
every stage, every row statistic, the head's summary and its curves over scales. Arrays are base64,
little-endian, for NaN and −∞ are numbers there. ``python tests/test_stages_golden.py`` writes the
files anew: read the difference first.
"""

import base64
import json
import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from browsing import missing
from scaledot.heads import SATURATED, HeadStats
from scaledot.masks import Mask
from scaledot.scales import RULES, factor, rule
from scaledot.stages import Trace, trace

TESTS = Path(__file__).parent
GOLDEN = TESTS / "golden"
STAGES = ("scores", "scaled", "capped", "masked", "weights", "output", "visible")
ROWS = {
    "visible": "visible", "score_mean": "scoreMean", "score_var": "scoreVar",
    "max_score": "maxScore", "lse": "lse", "entropy": "entropy", "top_key": "topKey",
    "top_margin": "topMargin", "collision": "collision", "jacobian_trace": "gradient",
    "mean_key": "meanKey", "nonfinite": "nonfinite", "sink_mass": "sinkMass",
}  # fmt: skip
"""Fields of RowStats, and what the page calls them."""
FACTORS = (0.125, 1.0, 3.0)
"""Multiples of the scale at which the curves are held."""
INF, NAN = math.inf, math.nan
FLOOR = torch.finfo(torch.float32).min


# Cases: name → (about, layer, inputs). Primes for sizes, so that a swapped axis cannot pass.


def _inputs(seed, n=7, d=5, d_v=3, heads=1, kv_heads=1, spread=1.0, **more):
    drawn = torch.Generator().manual_seed(seed)
    query = torch.randn(heads, n, d, generator=drawn) * spread
    key = torch.randn(kv_heads, n, d, generator=drawn) * spread
    value = torch.randn(kv_heads, n, d_v, generator=drawn)
    return {"query": query, "key": key, "value": value, **more}


def _layer(kind="none", window=None, scale=5**-0.5, softcap=None):
    return {"scale": scale, "softcap": softcap, "mask": {"kind": kind, "window": window}}


def _changed(inputs, *places):
    """The same with other numbers at places (name, index, number)."""
    for name, index, number in places:
        inputs[name][index] = number
    return inputs


def _hidden(seed, n=7, empty=()):
    hidden = torch.rand(n, n, generator=torch.Generator().manual_seed(seed)) < 0.4
    hidden[:, 2] = False  # a row that is not to be empty sees this key
    for i in empty:
        hidden[i] = True
    return hidden


def _bias(seed, n=7):
    bias = torch.randn(n, n, generator=torch.Generator().manual_seed(seed))
    bias[0, 3] = bias[4, 1] = -INF
    return bias


def _floored(n=7):
    """As Hugging Face writes a causal mask, with a padded row 2 that sees nothing, key 6 padded."""
    bias = torch.full((n, n), FLOOR).triu(1)
    bias[2] = bias[:, 6] = FLOOR
    bias[2, 4] = bias[5, 0] = -INF
    return bias


def cases():
    """Every case by name."""
    tied = _inputs(16)
    tied["key"][0, 4] = tied["key"][0, 1]
    return {
        "none": ("no mask", _layer(), _inputs(1)),
        "causal": ("causal mask", _layer("causal"), _inputs(2)),
        "window": ("window of 3 keys", _layer("window", 3), _inputs(3)),
        "window_wide": ("a window wider than the text", _layer("window", 11), _inputs(4)),
        "dense": ("boolean mask", _layer("dense"), _inputs(5, hidden=_hidden(5))),
        "empty_row": (
            "rows 0 and 4 see nothing", _layer("dense"),
            _inputs(6, hidden=_hidden(6, empty=(0, 4))),
        ),
        "empty_sink": (
            "row 3 sees nothing but a sink", _layer("dense", softcap=4.0),
            _inputs(7, hidden=_hidden(7, empty=(3,)), sink=torch.tensor([0.5])),
        ),
        "bias": ("additive bias, −∞ in two places", _layer("causal"), _inputs(8, bias=_bias(8))),
        "bias_row": (
            "one bias for each key", _layer(), _inputs(9, bias=_bias(9)[1:2]),
        ),
        "floor": (
            "a finfo.min bias: row 2 sees nothing, and softmax spreads over what it hides",
            _layer(), _changed(_inputs(10, bias=_floored()), ("key", (0, 6, 0), NAN)),
        ),
        "softcap": ("soft-cap of 2", _layer("causal", softcap=2.0), _inputs(11, spread=2.0)),
        "softcap_bias": (
            "soft-cap and bias in a window", _layer("window", 5, softcap=3.0),
            _inputs(12, bias=_bias(12), spread=1.5),
        ),
        "unscaled": ("no scale", _layer("causal", scale=1.0), _inputs(13)),
        "by_d_k": ("1/d_k", _layer("causal", scale=1 / 5), _inputs(14)),
        "negative": ("a negative scale", _layer("causal", scale=-0.75), _inputs(15)),
        "tied": ("two equal keys: the first is the top one", _layer(scale=2.0), tied),
        "sink": (
            "a sink among the scores", _layer("causal"), _inputs(17, sink=torch.tensor([0.25])),
        ),
        "sink_heavy": (
            "a sink above every score", _layer("causal"), _inputs(18, sink=torch.tensor([9.0])),
        ),
        "grouped": (
            "four heads that share two keys and values, each with its sink", _layer("causal"),
            _inputs(19, heads=4, kv_heads=2, sink=torch.tensor([-1.0, 0.0, 2.0, 800.0])),
        ),
        "nan_query": (
            "query 4 is NaN", _layer("causal"), _changed(_inputs(20), ("query", (0, 4, 1), NAN)),
        ),
        "nan_key": (
            "key 5 is NaN: only the rows that see it are", _layer("causal"),
            _changed(_inputs(21), ("key", (0, 5, 2), NAN)),
        ),
        "nan_softcap": (
            "an infinite score that tanh would tame", _layer("causal", softcap=2.0),
            _changed(_inputs(22), ("key", (0, 3, 0), INF)),
        ),
        "nan_value": (
            "value 3 is NaN in one dimension, value 5 infinite in another", _layer("causal"),
            _changed(_inputs(23), ("value", (0, 3, 1), NAN), ("value", (0, 5, 2), INF)),
        ),
        "nan_bias": (
            "biases of ∞ and NaN, one of them hidden", _layer("causal"),
            _changed(
                _inputs(28, bias=_bias(28)),
                ("bias", (2, 1), INF), ("bias", (5, 3), NAN), ("bias", (1, 4), NAN),
            ),
        ),
        "one": ("one token", _layer("causal"), _inputs(24, n=1)),
        "flat": ("all scores equal", _layer(), _changed(_inputs(25), ("query", (0,), 0.0))),
        "big": ("scores of a thousand", _layer("causal", scale=1.0), _inputs(26, spread=22.0)),
        "wide": (
            "64 dimensions, 23 tokens", _layer("causal", scale=0.125),
            _inputs(27, n=23, d=64, d_v=11),
        ),
    }  # fmt: skip


# What the library makes of a case


def traced(layer, inputs, dtype, scale=None):
    """`trace` of every head, (1, heads, queries, …)."""
    kind, window = layer["mask"]["kind"], layer["mask"]["window"]
    mask = Mask(causal="top_left") if kind == "causal" else Mask(window=window)
    if inputs.get("hidden") is not None:
        mask = mask & Mask(dense=~inputs["hidden"])
    if inputs.get("bias") is not None:
        mask = mask & Mask(dense=inputs["bias"].to(dtype))
    query, key, value = (inputs[name][None].to(dtype) for name in ("query", "key", "value"))
    sinks = inputs.get("sink")
    return trace(
        query, key, value, mask, scale=layer["scale"] if scale is None else scale,
        softcap=layer["softcap"], sinks=None if sinks is None else sinks.to(dtype),
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip


def _summaries(t: Trace):
    """The numbers of each head, as HeadStats has them."""
    rows = t.rows
    largest = t.weights.amax(-1)
    largest = torch.where(rows.entropy.isnan(), NAN, largest)
    stats = HeadStats.of(
        rows, scale=t.scale, d_k=t.query.shape[-1], kv_heads=t.key.shape[1],
        extra={"largest": largest},
    )  # fmt: skip
    mean = {name: measure.average for name, measure in stats.measures.items()}
    columns = {
        "rawMean": stats.raw.mean,
        "rawVar": stats.raw.var,
        "scaledMean": stats.scaled.mean,
        "scaledVar": stats.scaled.var,
        "varWithin": mean["score_var"],
        "entropy": mean["entropy"],
        "effectiveKeys": mean["entropy"].exp(),
        "normalisedEntropy": mean["normalised_entropy"],
        "largestWeight": mean["largest"],
        "gradient": mean["jacobian_trace"],
        "saturated": stats.share_at_least("top_margin", SATURATED["bfloat16"]),
        "maxScore": stats.measures["max_score"].maximum,
    } | {name: stats.counts[name] for name in ("rows", "empty", "nonfinite", "single")}
    columns["pairs"] = rows.visible.sum((0, 2))
    return [
        {name: float(x[h]) for name, x in columns.items()} for h in range(rows.visible.shape[1])
    ]


def expected(layer, inputs, dtype):
    """For each head what the file holds: stages, rows, summary, curves."""
    t = traced(layer, inputs, dtype)
    rows = t.rows
    raw_var = torch.stack([
        torch.stack([
            score[seen].var(correction=0) if seen.any() else score.new_tensor(NAN)
            for score, seen in zip(scores, visible, strict=True)
        ])
        for scores, visible in zip(t.scores[0], t.visible[0], strict=True)
    ])  # fmt: skip
    curves = []
    for times in FACTORS:
        curves.append(_summaries(traced(layer, inputs, dtype, layer["scale"] * times)))
    result = []
    for h, summary in enumerate(_summaries(t)):
        stages = {name: getattr(t, name) for name in STAGES}
        numbers = {theirs: getattr(rows, ours) for ours, theirs in ROWS.items()}
        entropy, seen = rows.entropy[0, h], rows.visible[0, h]
        outcomes = seen.clamp(min=1).to(entropy.dtype) + (rows.sink_mass is not None)
        derived = {
            "rawVar": torch.where(rows.nonfinite[0, h], NAN, raw_var[h]),
            "normalisedEntropy": torch.where(seen > 1, entropy / outcomes.log(), NAN),
            "effectiveKeys": entropy.exp(),
            "largestWeight": torch.where(entropy.isnan(), NAN, t.weights[0, h].amax(-1)),
        }
        result.append(
            {
                "stages": {name: x if x is None else x[0, h] for name, x in stages.items()},
                "rows": {name: x if x is None else x[0, h] for name, x in numbers.items()}
                | derived,
                "summary": summary,
                "curves": {
                    name: torch.tensor([at[h][name] for at in curves], dtype=torch.float64)
                    for name in ("entropy", "largestWeight", "gradient")
                },
            }
        )
    return result


# Files


def _packed(x, dtype):
    """{"shape", "float32" or "float64"}: base64 of the numbers."""
    name = {torch.float32: "float32", torch.float64: "float64"}[dtype]
    x = x.to(dtype).contiguous()
    data = base64.b64encode(x.numpy().astype(f"<f{x.element_size()}").tobytes()).decode()
    return {"shape": list(x.shape), name: data}


def _unpacked(array):
    name = "float32" if "float32" in array else "float64"
    data = np.frombuffer(base64.b64decode(array[name]), f"<f{4 if name == 'float32' else 8}")
    return torch.from_numpy(data.copy()).reshape(array["shape"])


def _document(about, layer, inputs):
    """A case as its file holds it. float32's finfo.min hides in float32 only: then no float64."""
    floored = inputs.get("bias") is not None and bool((inputs["bias"] == FLOOR).any())
    dtypes = (torch.float32,) if floored else (torch.float32, torch.float64)
    made = {dtype: expected(layer, inputs, dtype) for dtype in dtypes}
    heads = []
    count, kv_heads = len(inputs["query"]), len(inputs["key"])
    for h in range(count):
        group = h // (count // kv_heads)
        arrays = {
            "query": inputs["query"][h], "key": inputs["key"][group],
            "value": inputs["value"][group], "hidden": inputs.get("hidden"),
            "bias": inputs.get("bias"),
        }  # fmt: skip
        head = {
            name: x if x is None else _packed(x, torch.float32) for name, x in arrays.items()
        } | {"sink": None if inputs.get("sink") is None else float(inputs["sink"][h])}
        answers = {}
        for dtype, results in made.items():
            found = results[h]
            answers[str(dtype).removeprefix("torch.")] = {
                part: {
                    name: None if x is None else _packed(torch.as_tensor(x), dtype)
                    for name, x in found[part].items()
                }
                for part in ("stages", "rows", "curves")
            } | {"summary": {k: None if math.isnan(x) else x for k, x in found["summary"].items()}}
        heads.append({"kv_head": group, "arrays": head, **answers})
    return {
        "format": "scaledot/stages", "version": 1, "about": about, "layer": layer,
        "factors": list(FACTORS), "heads": heads,
    }  # fmt: skip


def _scales():
    """What scale rules give and what factors are called."""
    sizes = [
        {"dK": d, "dModel": m, "keys": n}
        for d, m, n in ((64, 576, 13), (5, 15, 512), (80, 2560, 1))
    ]
    factors = [
        {**size, "rule": name, "scale": factor(name, size["dK"], d_model=size["dModel"],
                                               keys=size["keys"])}
        for size in sizes for name in RULES
    ]  # fmt: skip
    asked = [
        (0.125, 64, 576, None), (1.0, 64, None, None), (1 / 64, 64, None, None),
        (576**-0.5, 64, 576, None), (576**-0.5, 64, None, None), (0.125 / 4, 64, None, 3),
        (0.1, 64, None, None), (0.3, 64, None, None), (0.0, 64, None, None),
        (-0.125, 64, None, None), (1.00005, 64, None, None), (1.0002, 64, None, None),
        (256**-0.5, 128, None, None), (2.0, 4, None, None),
    ]  # fmt: skip
    names = []
    for scale, d_k, d_model, layer in asked:
        found = rule(scale, d_k, d_model, layer)
        name = None if found is None else {"name": found.name, "value": found.value}
        names.append({"scale": scale, "dK": d_k, "dModel": d_model, "layer": layer, "is": name})
    return {
        "format": "scaledot/scales", "version": 1, "rules": RULES, "factors": factors,
        "names": names,
    }  # fmt: skip


def _draws():
    """The first words of the page's random numbers: sfc32 after splitmix32's mixing of the seed."""
    mask = 2**32 - 1

    def words(seed, stream, count):
        mixed, state = 0, []
        for word in (seed & mask, seed >> 32, stream):
            mixed = ((mixed ^ word) + 0x9E3779B9) & mask
            z = ((mixed ^ (mixed >> 16)) * 0x21F0AAAD) & mask
            z = ((z ^ (z >> 15)) * 0x735A2D97) & mask
            mixed = z ^ (z >> 15)
            state.append(mixed)
        (a, b, c), counter, found = state, 1, []
        for _ in range(12 + count):
            t = (a + b + counter) & mask
            counter = (counter + 1) & mask
            a, b, c = b ^ (b >> 9), (9 * c) & mask, ((c << 21) | (c >> 11)) & mask
            c = (c + t) & mask
            found.append(t)
        return found[12:]

    asked = [(20260714, 0), (20260714, 128), (20260715, 0), (2**53 - 1, 7)]
    draws = [{"seed": seed, "stream": at, "words": words(seed, at, 20)} for seed, at in asked]
    return {"format": "scaledot/draws", "version": 1, "draws": draws}


def _others():
    return {"scales": _scales(), "draws": _draws()}


def _write():
    for path in GOLDEN.glob("stages_*.json"):
        path.unlink()
    documents = {name: _document(*case) for name, case in cases().items()}
    for name, document in {**documents, **_others()}.items():
        text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
        (GOLDEN / f"stages_{name}.json").write_text(text + "\n", encoding="utf-8")


# Tests


def read(name):
    return json.loads((GOLDEN / f"stages_{name}.json").read_text(encoding="utf-8"))


def _read_inputs(document):
    heads = document["heads"]
    arrays = [head["arrays"] for head in heads]
    group = [head["kv_head"] for head in heads]
    first = [group.index(g) for g in sorted(set(group))]
    inputs = {"query": torch.stack([_unpacked(x["query"]) for x in arrays])}
    for name in ("key", "value"):
        inputs[name] = torch.stack([_unpacked(arrays[i][name]) for i in first])
    if arrays[0]["hidden"] is not None:
        inputs["hidden"] = _unpacked(arrays[0]["hidden"]) > 0
    if arrays[0]["bias"] is not None:
        inputs["bias"] = _unpacked(arrays[0]["bias"])
    if arrays[0]["sink"] is not None:
        inputs["sink"] = torch.tensor([x["sink"] for x in arrays])
    return inputs


FILES = sorted(path.stem.removeprefix("stages_") for path in GOLDEN.glob("stages_*.json"))


def test_every_case_has_its_file_and_every_file_its_case():
    assert sorted([*cases(), *_others()]) == FILES


@pytest.mark.parametrize("name", [name for name in FILES if name not in _others()])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_trace_gives_what_the_file_holds(name, dtype):
    """From the file's own inputs: whatever the random numbers of this torch are."""
    document = read(name)
    kind = str(dtype).removeprefix("torch.")
    if kind not in document["heads"][0]:
        assert name == "floor"
        return
    found = expected(document["layer"], _read_inputs(document), dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    for head, made in zip(document["heads"], found, strict=True):
        for part in ("stages", "rows", "curves"):
            for field, x in made[part].items():
                held = head[kind][part][field]
                if x is None:
                    assert held is None
                    continue
                largest = max(1.0, float(made["stages"]["scaled"].nan_to_num(0, 0, 0).abs().max()))
                torch.testing.assert_close(
                    x.to(dtype), _unpacked(held), rtol=tolerance, atol=tolerance * largest,
                    equal_nan=True, msg=lambda text, field=field: f"{field}: {text}",
                )  # fmt: skip
        limit = 10 * tolerance
        held = {k: NAN if x is None else x for k, x in head[kind]["summary"].items()}
        assert made["summary"] == pytest.approx(held, rel=limit, abs=limit, nan_ok=True)


def test_random_words_are_what_the_file_holds():
    assert read("draws") == _draws()


def test_scale_rules_give_what_the_file_holds():
    held, found = read("scales"), _scales()
    for one, other in zip(found["factors"], held["factors"], strict=True):
        assert one.pop("scale") == pytest.approx(other.pop("scale"), rel=1e-15)
        assert one == other
    assert (found["names"], found["rules"]) == (held["names"], held["rules"])


def test_the_page_computes_the_same():
    """Node runs tests/web on the same files."""
    node = shutil.which("node")
    if node is None:
        missing("node is missing: apt-get install nodejs")
    files = sorted(map(str, (TESTS / "web").glob("*.test.js")))
    assert files
    run = subprocess.run(
        [node, "--test", *files], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


if __name__ == "__main__":
    _write()
