"""What attention costs: against torch's own counter on real modules, and the known figures."""

import math
import re

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from scaledot import lab
from scaledot.lab import costs
from scaledot.lab.published import MODELS, named


def counted(run):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run()
    return counter.get_total_flops()


def matmuls(row):
    return sum(row[k] for k in ("qkv", "scores", "values", "out"))


def one(**settings):
    return lab.cost(**settings).rows[0]


# Counts


@pytest.mark.parametrize(("heads", "n"), [(1, 7), (4, 13)])
def test_flops_are_those_of_a_real_module(heads, n):
    d = 20
    module = nn.MultiheadAttention(d, heads, bias=False, batch_first=True)
    x = torch.randn(1, n, d)
    came = counted(lambda: module(x, x, x, need_weights=True))
    assert came == matmuls(one(d_model=d, heads=heads, tokens=n, causal=False))


def test_flops_with_fewer_kv_heads_and_other_widths():
    d, h, kv, d_k, d_v, n = 11, 6, 2, 5, 3, 13
    x = torch.randn(n, d)

    def attend():
        q = (x @ torch.randn(d, h * d_k)).view(n, h, d_k).transpose(0, 1)
        k = (x @ torch.randn(d, kv * d_k)).view(n, kv, d_k).transpose(0, 1)
        v = (x @ torch.randn(d, kv * d_v)).view(n, kv, d_v).transpose(0, 1)
        k, v = (t.repeat_interleave(h // kv, 0) for t in (k, v))
        out = (q @ k.mT).softmax(-1) @ v
        return out.transpose(0, 1).reshape(n, h * d_v) @ torch.randn(h * d_v, d)

    row = one(
        d_model=d, heads=h, kv_heads=kv, d_k=d_k, value_dim=d_v, tokens=n, causal=False
    )  # fmt: skip
    assert counted(attend) == matmuls(row)


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_flops_of_transformers_own_attention(kind):
    transformers = pytest.importorskip("transformers")
    common = {
        "hidden_size": 44, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 17,
        "num_key_value_heads": 2,
    }  # fmt: skip
    if kind == "llama":
        config = transformers.LlamaConfig(**common, head_dim=6)
    else:
        config = transformers.DeepseekV3Config(
            **{**common, "num_key_value_heads": 4}, q_lora_rank=7, kv_lora_rank=5,
            qk_nope_head_dim=8, qk_rope_head_dim=6, v_head_dim=10, first_k_dense_replace=1,
        )  # fmt: skip
    config._attn_implementation = "eager"
    model = transformers.AutoModel.from_config(config).eval()
    attention = model.layers[0].self_attn
    n = 13
    x = torch.randn(1, n, 44)
    rope = model.rotary_emb(x, torch.arange(n)[None])
    came = counted(lambda: attention(x, position_embeddings=rope, attention_mask=None))
    assert came == matmuls(one(model=config, tokens=n, causal=False))


def test_exponentials_and_pairs_by_counting():
    for n in (1, 2, 7, 50):
        seen = int(torch.ones(3, n, n).tril().sum())
        row = one(d_model=12, heads=3, tokens=n)
        assert row["exp"] == row["scale"] == seen
        assert row["softmax"] == 5 * seen
        assert row["scores"] == 2 * seen * 4
        assert one(d_model=12, heads=3, tokens=n, causal=False)["exp"] == 3 * n * n


def test_llama_3_8b_as_published():
    r = lab.cost("llama-3 8b", tokens=(8192, 131072))
    short, long = r.rows
    assert (short["qkv"] + short["out"]) / 1e9 == pytest.approx(687, abs=0.5)
    assert (short["scores"] + short["values"]) / 1e9 == pytest.approx(550, abs=0.5)
    assert (long["qkv"] + long["out"]) / 1e12 == pytest.approx(11.0, abs=0.05)
    assert (long["scores"] + long["values"]) / 1e12 == pytest.approx(140.7, abs=0.05)
    full = lab.cost("llama-3 8b", tokens=8192, causal=False).rows[0]
    assert full["exp"] / 1e9 == pytest.approx(2.1, abs=0.05)
    kept = r.tables[2].rows
    assert [(row["scores"], row["lse"]) for row in kept] == [
        (4 * 2**30, 2**20), (1024 * 2**30, 16 * 2**20),
    ]  # fmt: skip
    assert any("1,024 GiB, their log-sum-exp 16 MiB" in line for line in r.says)


def test_bytes_are_those_of_the_tensors():
    d, h, d_k, n = 12, 3, 4, 7
    r = lab.cost(d_model=d, heads=h, tokens=n, itemsize=4)
    x, w = torch.randn(n, d), torch.randn(d, d)
    q = k = v = torch.randn(h, n, d_k)
    s = q @ k.mT
    out = s @ v
    size = {name: t.nbytes for name, t in {"x": x, "w": w, "q": q, "s": s, "o": out}.items()}
    assert r.tables[1].rows[0] == {
        "tokens": n,
        "qkv": size["x"] + 3 * size["w"] + 3 * size["q"],
        "scores": 2 * size["q"] + size["s"],
        "scale": 2 * size["s"],
        "softmax": 2 * size["s"],
        "values": size["s"] + size["q"] + size["o"],
        "out": size["o"] + size["w"] + size["x"],
    }
    kept = r.tables[2].rows[0]
    assert kept["operands"] == 3 * size["q"] + size["o"]
    assert kept["naive"] == 2 * size["s"]
    assert kept["lse"] == s.logsumexp(-1).nbytes
    half = lab.cost(d_model=d, heads=h, tokens=n, itemsize=2)
    assert half.tables[2].rows[0]["naive"] == size["s"]


# Crossings


def crossing(m, causal, more=0):
    """The first n at which QKᵀ and ·V reach everything linear in n, by trying every one."""
    for n in range(1, 200_000):
        row = costs._flops(m, n, causal)
        if row["scores"] + row["values"] >= row["qkv"] + row["out"] + more * n:
            return n
    raise AssertionError


@pytest.mark.parametrize("name", ["GPT-2 small", "Qwen2.5 0.5B", "Gemma-3 1B", "DeepSeek-V3"])
@pytest.mark.parametrize("causal", [True, False])
def test_crossings_by_brute_force(name, causal):
    m = named(name)
    for more, line in zip((0, 16 * m.d_model**2), costs._crossings(m, causal), strict=False):
        at = float(line.split("at n = ")[1].split(", ")[0].replace(",", ""))
        assert 0 <= crossing(m, causal, more) - at <= 1


@pytest.mark.parametrize("d", [64, 768])
def test_crossings_of_the_plain_layout(d):
    for causal, twice in ((False, 1), (True, 2)):
        says = lab.cost(d_model=d, heads=4, causal=causal).says
        less = causal * 1
        assert f"at n = {2 * twice * d - less:,}," in says[0]
        assert f"at n = {6 * twice * d - less:,}," in says[1]


# Sizes given


def test_sizes_given_replace_the_models():
    plain, other = lab.cost("gpt2", tokens=10), lab.cost("gpt2", d_k=128, tokens=10)
    assert other.rows[0]["scores"] == 2 * plain.rows[0]["scores"]
    assert other.rows[0]["values"] == 2 * plain.rows[0]["values"]
    assert "GPT-2 small with d_k 128" in other.about
    assert lab.cost("gpt2", heads=24, tokens=10).rows[0]["exp"] == 2 * plain.rows[0]["exp"]
    assert lab.cost(tokens=10).rows == plain.rows


@pytest.mark.parametrize("m", MODELS, ids=lambda m: m.name)
def test_every_model_of_the_table_has_a_cost(m):
    r = lab.cost(m.name, tokens=(1, 100))
    assert r.experiment == "cost"
    assert all(math.isfinite(x) and x > 0 for row in r.rows for x in row.values())


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"d_k": 0}, "d_k is 0: pass at least 1"),
        ({"tokens": -5}, "tokens is -5: pass at least 1"),
        ({"tokens": ()}, "tokens is empty: pass at least one size"),
        ({"d_model": 512, "heads": 7}, "heads 7 does not divide d_model 512: pass d_k as well"),
        (
            {"d_model": 512, "heads": 8, "kv_heads": 3},
            "heads 8 is no multiple of kv_heads 3: each kv head serves as many",
        ),
        (
            {"model": "deepseek-v3", "d_k": 64},
            "DeepSeek-V3 has latent attention: of its sizes only layers can be given",
        ),
        (
            {"model": "gpt5"},
            "no model 'gpt5' in the table: did you mean GPT-3 175B or GPT-J 6B or GPT-2 xl?",
        ),
        ({"itemsize": 0}, "itemsize is 0: pass at least 1"),
    ],
)
def test_bad_sizes_are_one_clear_line(settings, line):
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        lab.cost(**settings)


def test_the_settings_repeat_it():
    transformers = pytest.importorskip("transformers")
    for arguments in (
        {"d_model": 24, "heads": 3},
        {"heads": 6},
        {"model": "bert base", "d_k": 32},
        {"model": transformers.LlamaConfig()},
    ):
        r = lab.cost(**arguments, tokens=(5, 9), causal=False, itemsize=4)
        again = lab.cost(**r.settings)
        assert [t.rows for t in again.tables] == [t.rows for t in r.tables]
        assert again.settings == r.settings


# Times


def test_measured_times_are_there_and_fit_the_budget():
    steps = []
    r = lab.cost(
        d_model=32, heads=4, kv_heads=2, tokens=(16, 64, 100_000), measure=True, repeats=2,
        budget=2**24, on_progress=lambda done, of: steps.append((done, of)),
    )  # fmt: skip
    timed = r.tables[3].rows
    for row in timed[:2]:
        assert all(isinstance(x, (int, float)) and x > 0 for x in row.values())
        inner = [row[f"{k}_ms"] for k in ("scores", "scale", "softmax", "values")]
        assert row["naive_ms"] == pytest.approx(sum(inner))
        assert row["ratio"] == pytest.approx(row["naive_ms"] / row["one_pass_ms"])
    assert timed[2]["naive_ms"] is timed[2]["one_pass_ms"] is timed[2]["ratio"] is None
    assert any(line.startswith("Not timed, being over 16 MiB") for line in r.says)
    assert steps[-1] == (len(steps), len(steps))
    assert [len(r.panels), len(lab.cost(tokens=8).panels)] == [3, 2]


def test_nothing_that_fits_is_said_and_not_drawn():
    r = lab.cost(d_model=32, heads=4, tokens=64, measure=True, budget=1)
    assert r.says[-1] == (
        "Not timed, being over 1 B or 20,000,000,000 FLOPs: projections, naive stages, one pass "
        "at n = 64."
    )
    assert len(r.panels) == 2


class Allocations(TorchDispatchMode):
    """Bytes of every storage that an operation makes."""

    def __init__(self):
        super().__init__()
        self.sizes = {}
        self.kept = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        came = func(*args, **(kwargs or {}))
        if isinstance(came, torch.Tensor):
            self.kept.append(came)
            self.sizes[came.untyped_storage().data_ptr()] = came.untyped_storage().nbytes()
        return came


def test_naive_stages_allocate_what_was_counted_and_one_pass_much_less():
    m, n = named("gpt2"), 256
    bound = {part: costs._bytes(m, n, part) for part in ("naive", "one_pass")}
    with Allocations() as seen:
        costs._once(m, n, "naive", True)
    assert 0.9 * bound["naive"] < sum(seen.sizes.values()) <= bound["naive"]
    with Allocations() as seen:
        costs._once(m, n, "one_pass", True)
    assert sum(seen.sizes.values()) < 0.5 * bound["naive"]
