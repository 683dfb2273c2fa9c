"""future_leak and document_leak: planted leaks are found, healthy models are not accused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import scaledot
from scaledot.checks import ScaledotError

torch.set_num_threads(1)

WORDS = 40


class Decoder(nn.Module):
    """Two layers of attention over an embedding; `mask` says who sees whom."""

    def __init__(self, mask: Any = None, noise: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        self.layers = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))
        self.drop = nn.Dropout(0.5)
        self.mask, self.noise = mask, noise
        self.runs = 0

    def forward(self, input_ids: Tensor) -> Tensor:
        self.runs += 1
        assert not self.training
        assert not torch.is_grad_enabled()
        x = self.table(input_ids)
        for layer in self.layers:
            q, k, v = layer(x).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, -1)
            n = q.shape[2]
            shows = torch.ones(n, n, dtype=torch.bool).tril()
            if self.mask is not None:
                shows = self.mask(shows)
            x = x + F.scaled_dot_product_attention(q, k, v, shows).transpose(1, 2).flatten(2)
        return self.out(self.drop(x)) + self.noise * torch.rand(())


def ids(length: int = 12, batch: int = 2) -> Tensor:
    torch.manual_seed(2)
    return torch.randint(0, WORDS, (batch, length))


def test_a_causal_model_does_not_leak_and_is_put_back() -> None:
    model = Decoder()
    model.train()
    model.layers.eval()
    leak = scaledot.future_leak(model, ids())
    assert not leak.found
    assert leak.deterministic
    assert leak.movement == 0.0
    assert leak.first is leak.distance is None
    assert leak.tested == (3, 6, 9, 11)
    assert model.training
    assert model.drop.training
    assert not model.layers.training
    assert model.runs == 3 + 4


LEAKS = {
    "all": (lambda x: torch.ones_like(x), 0, 11),
    "one later": (lambda x: x | torch.ones_like(x).triu().tril(1), None, None),
    "five later": (lambda x: x | (torch.ones_like(x).triu(5).tril(5)), None, None),
    "inverted": (lambda x: ~x | torch.eye(len(x), dtype=torch.bool), 0, 11),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LEAKS)
def test_planted_leaks_are_found_in_any_dtype(name: str, dtype: torch.dtype) -> None:
    mask, first, _ = LEAKS[name]
    model = Decoder(mask).to(dtype)
    for p in model.layers.parameters():
        p.data *= 3
    leak = scaledot.future_leak(model, ids())
    assert leak.found
    assert leak.movement > leak.tolerance
    assert leak.first is not None
    assert leak.first < leak.changed
    if first is not None and dtype == torch.float64:
        assert leak.first == first


def test_a_leak_at_a_distance_is_located() -> None:
    """One layer that sees five tokens ahead: a change at 9 moves 4 and nothing else before it."""
    model = Decoder(LEAKS["five later"][0])
    del model.layers[1]
    leak = scaledot.future_leak(model, ids(), positions=[9])
    assert leak.found
    assert (leak.changed, leak.first, leak.distance) == (9, 4, 5)


def test_only_some_positions_leak() -> None:
    """A leak into one early token is not seen by changing the last one only."""

    def mask(shows: Tensor) -> Tensor:
        shows = shows.clone()
        shows[1, 3] = True
        return shows

    assert not scaledot.future_leak(Decoder(mask), ids(), positions=[11]).found
    leak = scaledot.future_leak(Decoder(mask), ids())
    assert (leak.found, leak.changed, leak.first) == (True, 3, 1)


def test_a_model_of_chance_is_reported_and_not_accused() -> None:
    leak = scaledot.future_leak(Decoder(LEAKS["all"][0], noise=1.0), ids())
    assert not leak.deterministic
    assert not leak.found
    assert leak.repeat > 0


def test_rounding_is_not_a_leak() -> None:
    """A model that adds what others say to the last bit, as a mixture of experts regroups rows."""

    class Regrouped(Decoder):
        def forward(self, input_ids: Tensor) -> Tensor:
            out = super().forward(input_ids)
            total = input_ids.sum().to(out.dtype) / 7
            return (out + total) - total

    leak = scaledot.future_leak(Regrouped(), ids())
    assert not leak.found
    assert 0 < leak.movement <= leak.tolerance < 1e-3


def test_padding_is_neither_changed_nor_compared() -> None:
    class Padded(Decoder):
        """What a padded query gives depends on everything."""

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            out = super().forward(input_ids)
            return torch.where(attention_mask[..., None] > 0, out, input_ids.sum().float())

    real = torch.ones(2, 12, dtype=torch.long)
    real[0, -4:] = 0
    leak = scaledot.future_leak(Padded(), {"input_ids": ids(), "attention_mask": real})
    assert not leak.found
    assert leak.movement == 0
    real[1, :] = 0
    leak = scaledot.future_leak(Padded(), {"input_ids": ids(), "attention_mask": real})
    assert leak.tested == (3, 6)


def test_what_cannot_be_tested_is_said() -> None:
    with pytest.raises(ScaledotError, match="two tokens or more"):
        scaledot.future_leak(Decoder(), ids(1))
    with pytest.raises(ScaledotError, match="no token ids in pixels"):
        scaledot.future_leak(Decoder(), {"pixels": torch.randn(1, 3)})
    with pytest.raises(ValueError, match="pass some from 1 to 11"):
        scaledot.future_leak(Decoder(), ids(), positions=[12])
    pooled = nn.Sequential(nn.Embedding(WORDS, 4), nn.Flatten(0, 1))
    with pytest.raises(ScaledotError, match="an output for each token"):
        scaledot.future_leak(pooled, ids())
    with pytest.raises(ScaledotError, match="two of them or more"):
        scaledot.document_leak(Decoder(), [[1, 2]])
    with pytest.raises(ScaledotError, match="no second token"):
        scaledot.future_leak(nn.Embedding(1, 4), torch.zeros(1, 3, dtype=torch.long))


# transformers

transformers = pytest.importorskip("transformers", minversion="5")
from test_families import FAMILIES, build, inputs  # noqa: E402

DECODERS = [n for n, f in FAMILIES.items() if f.inputs in ("seq2seq", "sound") or f.causal]


@pytest.mark.parametrize("name", DECODERS)
def test_healthy_decoders_do_not_leak(name: str) -> None:
    family = FAMILIES[name]
    model, config = build(family)
    given = inputs(family, config)
    before = dict(given)
    leak = scaledot.future_leak(model, given)
    assert not leak.found
    assert leak.movement <= leak.tolerance < 1e-4
    assert given == before


@pytest.mark.parametrize("name", ["bert", "albert", "modernbert", "esm"])
def test_an_encoder_looks_both_ways(name: str) -> None:
    family = FAMILIES[name]
    model, config = build(family)
    assert scaledot.future_leak(model, inputs(family, config)).found


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_a_module_that_is_no_longer_causal_leaks(name: str) -> None:
    """sdpa without a mask goes by the module's own flag."""
    model, config = build(FAMILIES[name])
    model.set_attn_implementation("sdpa")
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
    text = {"input_ids": inputs(FAMILIES[name], config)["input_ids"][1:]}
    leak = scaledot.future_leak(model, text)
    assert leak.found
    assert leak.output == "logits"


DOCUMENTS = [[5, 6, 7, 8, 9, 5], [9, 8, 7], [4, 6]]


def joined(texts: list[list[int]]) -> dict[str, Tensor]:
    """A packed row with an attention_mask, which has transformers take it for one text."""
    row = torch.tensor([[token for text in texts for token in text]])
    positions = torch.cat([torch.arange(len(x)) for x in texts])[None]
    return {"input_ids": row, "position_ids": positions, "attention_mask": torch.ones_like(row)}


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gpt2"])
def test_packed_documents_are_apart_or_not(name: str) -> None:
    model, _ = build(FAMILIES[name])
    apart = scaledot.document_leak(model, DOCUMENTS)
    assert not apart.found
    assert apart.tested == (0, 1, 2)
    leak = scaledot.document_leak(model, DOCUMENTS, joined)
    assert leak.found
    assert leak.changed < (leak.first or 0)
    assert leak.kind == "documents"


def test_a_document_may_leak_backwards() -> None:
    model, _ = build(FAMILIES["bert"])
    leak = scaledot.document_leak(model, DOCUMENTS, joined)
    assert leak.found
    with pytest.raises(ScaledotError, match="pack them in order"):
        scaledot.document_leak(model, DOCUMENTS, lambda texts: joined(texts[:2]))
