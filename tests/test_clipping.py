"""QK-Clip: after it the very same batch gives no score above the threshold, for each layout."""

import math

import pytest
import torch
from torch import nn

import scaledot
from scaledot.clipping import qk_clip

ROUNDING = 1e-12
"""Of float64: a score is a sum of some hundred products, each within a few 2⁻⁵³ of itself."""
IDS = torch.arange(2, 26).view(2, 12)


def llama(**more):
    from transformers import LlamaConfig, LlamaModel

    return LlamaModel(LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, **{"num_key_value_heads": 4} | more,
    ))  # fmt: skip


def qwen2():
    from transformers import Qwen2Config, Qwen2Model

    return Qwen2Model(Qwen2Config(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    ))  # fmt: skip


def gpt2():
    from transformers import GPT2Config, GPT2Model

    return GPT2Model(GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=4))


def mistral():
    from transformers import MistralConfig, MistralModel

    return MistralModel(MistralConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=6, sliding_window=5,
    ))  # fmt: skip


def vit():
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig(
        image_size=12, patch_size=4, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4,
    ), add_pooling_layer=False)  # fmt: skip


def t5():
    from transformers import T5Config, T5Model

    return T5Model(T5Config(
        vocab_size=32, d_model=32, d_kv=6, d_ff=32, num_layers=2, num_heads=4, pad_token_id=0,
        decoder_start_token_id=0,
    ))  # fmt: skip


def falcon(**layout):
    """multi_query: all heads share a key; new_decoder_architecture: groups do; else none."""
    from transformers import FalconConfig, FalconModel

    return FalconModel(FalconConfig(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        parallel_attn=True, bias=True, bos_token_id=1, eos_token_id=1, **layout,
    ))  # fmt: skip


def neox():
    from transformers import GPTNeoXConfig, GPTNeoXModel

    return GPTNeoXModel(GPTNeoXConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4,
    ))  # fmt: skip


def phi3():
    from transformers import Phi3Config, Phi3Model

    return Phi3Model(Phi3Config(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, pad_token_id=0,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=1, eos_token_id=1,
    ))  # fmt: skip


def bert():
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4,
    ))  # fmt: skip


def albert():
    """Its layers share one attention, which is called twice."""
    from transformers import AlbertConfig, AlbertModel

    return AlbertModel(AlbertConfig(
        vocab_size=32, embedding_size=16, hidden_size=32, intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=4,
    ))  # fmt: skip


def opt():
    from transformers import OPTConfig, OPTModel

    return OPTModel(OPTConfig(
        vocab_size=32, hidden_size=32, word_embed_proj_dim=32, ffn_dim=32, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=32,
    ))  # fmt: skip


def deepseek(q_lora_rank=16):
    from transformers import DeepseekV3Config, DeepseekV3Model

    return DeepseekV3Model(DeepseekV3Config(
        vocab_size=32, hidden_size=32, intermediate_size=32, moe_intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=2,
        kv_lora_rank=12, q_lora_rank=q_lora_rank, qk_rope_head_dim=4, qk_nope_head_dim=8,
        v_head_dim=6,
    ))  # fmt: skip


def bigcode(multi_query):
    from transformers import GPTBigCodeConfig, GPTBigCodeModel

    return GPTBigCodeModel(GPTBigCodeConfig(
        vocab_size=32, n_positions=16, n_embd=32, n_layer=1, n_head=4, multi_query=multi_query,
    ))  # fmt: skip


class Own(nn.Module):
    """One attention module on embedded tokens."""

    def __init__(self, attention):
        super().__init__()
        self.embed = nn.Embedding(32, 32)
        self.attention = attention

    def forward(self, input_ids):
        x = self.embed(input_ids)
        return self.attention(x, x, x)[0]


def torch_mha():
    return Own(nn.MultiheadAttention(32, 4, batch_first=True))


def torch_mha_apart():
    class Apart(Own):
        def forward(self, input_ids):
            x = self.embed(input_ids)
            return self.attention(x, x[..., :20], x)[0]

    return Apart(nn.MultiheadAttention(32, 4, batch_first=True, kdim=20))


def own_mha():
    return Own(scaledot.MultiheadAttention(32, 4, batch_first=True, num_kv_heads=2))


LAYOUTS = {
    "llama": llama,
    "llama-grouped": lambda: llama(num_key_value_heads=2),
    "qwen2": qwen2,
    "gpt2": gpt2,
    "bigcode": lambda: bigcode(True),
    "neox": neox,
    "falcon": lambda: falcon(multi_query=True),
    "falcon-grouped": lambda: falcon(new_decoder_architecture=True, num_kv_heads=2),
    "falcon-apart": lambda: falcon(multi_query=False),
    "mistral": mistral,
    "vit": vit,
    "t5": t5,
    "phi3": phi3,
    "bert": bert,
    "albert": albert,
    "opt": opt,
    "deepseek": deepseek,
    "deepseek-no-lora": lambda: deepseek(None),
    "torch-mha": torch_mha,
    "torch-mha-apart": torch_mha_apart,
    "own-mha": own_mha,
}
KEYS = {"falcon": 1, "falcon-grouped": 2}
"""How many keys have weights, of layouts that hand each head a copy of one."""


def observed(model):
    inputs = {"input_ids": IDS}
    if getattr(model, "main_input_name", None) == "pixel_values":
        generator = torch.Generator().manual_seed(0)
        inputs = {"pixel_values": torch.randn(2, 3, 12, 12, generator=generator).to(model.dtype)}
    elif model.__class__.__name__ == "T5Model":
        inputs["decoder_input_ids"] = IDS[:, :7]
    with torch.no_grad(), scaledot.observe(model) as seen:
        model(**inputs)
    return seen.heads


def drawn(layout):
    """A model of float64 whose scores differ by head, biases too."""
    model = LAYOUTS[layout]().eval().double()
    for name, x in model.named_parameters():
        if name.endswith("bias"):  # zero at first, where scaling it could not be seen
            nn.init.normal_(x, std=0.3)
        elif x.dim() == 2:
            nn.init.normal_(x, std=0.5)
    return model


def first(stats):
    """The first attention of a model: nothing before it depends on a clip."""
    return next(iter(stats.items()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_largest_score_becomes_the_threshold(layout):
    torch.manual_seed(0)
    model = drawn(layout)
    before = observed(model)
    path, stats = first(before)
    keys = KEYS.get(layout, stats.kv_heads)
    largest = stats.measures["max_score"].maximum
    grouped = largest.view(keys, -1).amax(1)
    threshold = float(grouped.sort().values[: 1 + keys // 2].mean())
    threshold *= 0.9 if keys == 1 else 1.0
    untouched = {name: x.clone() for name, x in model.state_dict().items()}
    clipped = qk_clip(model, before, threshold)
    told = {h: x for p, h, x in clipped.heads if p == path.partition("[")[0]}
    assert told
    assert len(told) < stats.heads or keys < 3 or "[" in path
    after = first(observed(model))[1].measures["max_score"].maximum
    if "[" not in path:
        wanted = grouped.clamp(max=threshold) / grouped
        wanted = wanted.repeat_interleave(stats.heads // keys)
        torch.testing.assert_close(after, largest * wanted, rtol=ROUNDING, atol=0)
        assert told == pytest.approx({h: x for h, x in enumerate(wanted.tolist()) if x < 1})
    assert bool((after <= threshold * (1 + ROUNDING)).all())
    again = observed(model)
    if "[" not in path:  # the second layer reads another input now
        assert len(qk_clip(model, {path: again[path]}, threshold * (1 + ROUNDING))) == 0
    changed = {name for name, x in model.state_dict().items() if not x.equal(untouched[name])}
    assert changed
    others = ("embed", "mlp", "dense", ".v_proj", "o_proj", "out_proj", "value", "norm")
    assert not [x for x in changed if any(part in x for part in others) and "query_key" not in x]


@pytest.mark.parametrize(
    "layout", ["falcon", "falcon-grouped", "falcon-apart", "mistral", "vit", "t5"]
)
def test_each_attention_alone_reaches_the_threshold_and_nothing_else_changes(layout):
    """Self-attention and cross-attention of every layer: clipped alone, its input stays."""
    torch.manual_seed(7)
    model = drawn(layout)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    looked = observed(model)
    assert len(looked) == (6 if layout == "t5" else 2)
    for path, stats in looked.items():
        keys = KEYS.get(layout, stats.kv_heads)
        largest = stats.measures["max_score"].maximum
        grouped = largest.view(keys, -1).amax(1)
        threshold = float(grouped.max()) / 3
        assert threshold > 0
        qk_clip(model, {path: stats}, threshold)
        after = observed(model)[path].measures["max_score"].maximum
        wanted = (threshold / grouped).clamp(max=1).repeat_interleave(stats.heads // keys)
        wanted = torch.where(grouped.repeat_interleave(stats.heads // keys) > 0, wanted, 1.0)
        torch.testing.assert_close(after, largest * wanted, rtol=ROUNDING, atol=0)
        assert float(after.max()) == pytest.approx(threshold, rel=ROUNDING)
        for name, x in model.state_dict().items():
            if x.equal(before[name]):
                continue
            assert name.startswith(f"{path}.")
            if layout.startswith("falcon"):
                clipped = {i for i, factor in enumerate(wanted.tolist()) if factor < 1}
                assert of_falcon(model.get_submodule(path), x != before[name]) == clipped
            else:
                part = name.removeprefix(f"{path}.").partition(".")[0]
                assert part in ("q", "k", "q_proj", "k_proj", "query", "key")
        model.load_state_dict(before)


def of_falcon(module, changed):
    """The heads whose queries changed, by the module's own way to split what its matrix gives;
    their keys must have, and no value."""
    rows = changed.view(changed.shape[0], -1).any(1)
    query, key, value = (x[0, 0].any(-1) for x in module._split_heads(rows[None, None]))
    assert not value.any()
    assert query.equal(key.expand_as(query))
    return set(query.nonzero().ravel().tolist())


def test_heads_below_the_threshold_keep_every_bit():
    torch.manual_seed(1)
    model = gpt2()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    stats = observed(model)
    assert len(qk_clip(model, stats, 1e6)) == 0
    assert all(x.equal(before[name]) for name, x in model.state_dict().items())
    largest = stats["h.1.attn"].measures["max_score"].maximum
    threshold = float(largest.max()) * 0.999
    (one,) = qk_clip(model, {"h.1.attn": stats["h.1.attn"]}, threshold).heads
    head = int(largest.argmax())
    assert one[:2] == ("h.1.attn", head)
    weight, old = model.h[1].attn.c_attn.weight, before["h.1.attn.c_attn.weight"]
    same = (weight == old).all(0).view(3, 4, 8)
    assert not same[:2, head].any()
    assert same[2].all() and same[:, [h for h in range(4) if h != head]].all()  # noqa: PT018


def test_a_wrapped_model_is_the_same_model():
    torch.manual_seed(2)
    model = llama()
    stats = observed(model)
    assert len(qk_clip(nn.DataParallel(model), stats, 1e-3)) == 8
    assert float(first(observed(model))[1].measures["max_score"].maximum.max()) < 1.1e-3
    inside = nn.ModuleDict({"module": torch_mha()})  # a name that wrappers use, too
    stats = {f"module.{path}": x for path, x in observed(inside["module"]).items()}
    assert len(qk_clip(inside, stats, 1e-3)) == 4


@pytest.mark.parametrize("normalised", ["qwen3", "own"])
def test_what_normalises_q_and_k_is_refused(normalised):
    if normalised == "own":
        model = Own(scaledot.MultiheadAttention(32, 4, batch_first=True, qk_norm=True))
    else:
        from transformers import Qwen3Config, Qwen3Model

        model = Qwen3Model(Qwen3Config(
            vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        ))  # fmt: skip
    with pytest.raises(scaledot.ScaledotError, match=r"normalises q and k \(q_norm\)"):
        qk_clip(model, observed(model))


def test_what_it_does_not_know_is_refused_before_anything_is_changed():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.wq, self.wk = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x, *_):
            q, k = (f(x).view(2, 12, 4, 8).transpose(1, 2) for f in (self.wq, self.wk))
            return nn.functional.scaled_dot_product_attention(q, k, q), None

    torch.manual_seed(3)
    model = nn.ModuleDict({"known": torch_mha(), "odd": Own(Odd())})
    stats = {f"known.{p}": x for p, x in observed(model["known"]).items()}
    stats |= {f"odd.{p}": x for p, x in observed(model["odd"]).items()}
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(scaledot.ScaledotError, match=r"odd.attention \(Odd\) keeps W_Q and W_K"):
        qk_clip(model, stats, 1e-6)
    assert all(x.equal(before[name]) for name, x in model.state_dict().items())
    with pytest.raises(scaledot.ScaledotError, match="no module 'other'"):
        qk_clip(model, {"other": stats["known.attention"]})


def codegen():
    from transformers import CodeGenConfig, CodeGenModel

    return CodeGenModel(CodeGenConfig(
        vocab_size=32, n_positions=16, n_embd=32, n_layer=1, n_head=4, n_inner=32, rotary_dim=4,
    ))  # fmt: skip


def olmo():
    from transformers import OlmoConfig, OlmoModel

    return OlmoModel(OlmoConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=4, clip_qkv=1.0,
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("make", "said"),
    [(codegen, "keeps W_Q and W_K where they are not known"),
     (lambda: bigcode(False), "keeps W_Q and W_K where they are not known"),
     (olmo, "clamps q and k")],
    ids=["codegen", "bigcode", "olmo"],
)  # fmt: skip
def test_another_order_of_rows_and_a_clamp_are_refused(make, said):
    torch.manual_seed(4)
    model = make()
    with pytest.raises(scaledot.ScaledotError, match=said):
        qk_clip(model, observed(model), 1e-6)


def test_weights_that_modules_share_are_clipped_once_for_the_worst():
    torch.manual_seed(5)
    model = llama()
    for name in ("q_proj", "k_proj"):
        weight = getattr(model.layers[0].self_attn, name).weight
        nn.init.normal_(weight, std=0.5)
        setattr(getattr(model.layers[1].self_attn, name), "weight", weight)  # noqa: B010
    stats = observed(model)
    before = model.layers[0].self_attn.q_proj.weight.clone()
    largest = torch.stack([x.measures["max_score"].maximum for x in stats.values()])
    threshold = float(largest.min()) / 2
    clipped = qk_clip(model, stats, threshold)
    assert len(clipped) == 8
    wanted = threshold / largest.amax(0)
    got = (model.layers[0].self_attn.q_proj.weight / before).view(4, -1).double()
    # Two roundings of a weight to float32, and one of the factor.
    torch.testing.assert_close(
        got, wanted.sqrt()[:, None].expand_as(got), rtol=3 * 2.0**-24, atol=0
    )


def test_statistics_that_say_nothing_or_infinity_are_refused():
    from dataclasses import replace

    torch.manual_seed(6)
    model = torch_mha()
    ((path, stats),) = observed(model).items()
    with pytest.raises(scaledot.ScaledotError, match="hold no max_score"):
        qk_clip(model, {path: replace(stats, measures={})})
    score = stats.measures["max_score"]
    infinite = replace(score, maximum=torch.tensor([1.0, math.inf, 1.0, 1.0]).double())
    with pytest.raises(scaledot.ScaledotError, match="a score that is not finite"):
        qk_clip(model, {path: replace(stats, measures={"max_score": infinite})})


@pytest.mark.parametrize("threshold", [0, -1, math.nan, True])
def test_a_threshold_is_above_0(threshold):
    with pytest.raises(ValueError, match="pass a number above 0"):
        qk_clip(nn.Linear(2, 2), {}, threshold)
