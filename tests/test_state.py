"""A state on disk: bit for bit what it was, or one line that says what is wrong with it."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from forked import Forked
from scaledot import ScaledotError, heads, state
from scaledot.corpus import Document
from scaledot.loading import load
from scaledot.state import Counted, State
from scaledot.streaming import Run, begin

TEXTS = ("In the beginning.", "And the earth was without form.", "And God said, Let there be.")


@pytest.fixture(scope="module")
def sample():
    return load()


@pytest.fixture(scope="module")
def blank(sample):
    return begin(sample.model, sample.tokenizer, TEXTS[0], name=sample.name)


@pytest.fixture(scope="module")
def counted(sample, blank):
    """The state of each text alone."""
    result = []
    for index, text in enumerate(TEXTS):
        run = Run(sample.model, sample.tokenizer, blank)
        run.read([Document("a.jsonl", index, text)])
        result.append(run.state())
    return result


def one_line(call, *args):
    with pytest.raises(ScaledotError) as error:
        call(*args)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def contents(found):
    """What a state's file holds; safetensors writes metadata in any order."""
    tensors, meta = heads.parsed(state.packed(found), "this")
    return {name: x.numpy().tobytes() for name, x in tensors.items()}, meta


def test_what_is_written_is_read_bit_for_bit(tmp_path, counted):
    path = tmp_path / "run.safetensors"
    whole = state.together([(str(i), x) for i, x in enumerate(counted)])
    whole.counted.mark("b.jsonl", 70_000, windows=3)
    state.save(path, whole)
    again = state.load(path)
    assert contents(again) == contents(whole)
    assert again.settings == whole.settings
    assert again.subject.layers == whole.subject.layers
    assert again.subject.trials == whole.subject.trials
    assert again.counted == whole.counted
    assert not again.part
    assert not state.is_state(path, part=True)
    state.save(path, replace(whole, part=True))
    assert state.load(path).part
    assert state.is_state(path, part=True)
    for path_, facts in whole.gathered.masks.items():
        for name, x in vars(facts).items():
            y = getattr(again.gathered.masks[path_], name)
            assert x.equal(y) if isinstance(x, torch.Tensor) else repr(x) == repr(y), name
    # Its statistics are a file of heads.py also.
    assert list(heads.load(path)) == list(whole.gathered.stats)


def test_merging_is_exact_and_in_any_order(counted):
    a, b, c = counted
    one, other = state.merge(state.merge(a, b), c), state.merge(c, state.merge(b, a))
    assert one.counted == other.counted
    assert one.gathered.tokens == sum(x.gathered.tokens for x in counted)
    for path, x in one.gathered.stats.items():
        for name, m in x.measures.items():
            n = other.gathered.stats[path].measures[name]
            assert m.count.equal(n.count)
            assert m.histogram.equal(n.histogram)
            assert m.minimum.equal(n.minimum)
            assert m.maximum.equal(n.maximum)
            torch.testing.assert_close(m.mean, n.mean, rtol=1e-12, atol=1e-300)
            torch.testing.assert_close(m.m2, n.m2, rtol=1e-12, atol=1e-300)


def test_a_document_in_two_states_is_an_error(counted):
    a, b, _ = counted
    both = state.merge(a, b)
    assert one_line(state.merge, both, b) == "document 2 of a.jsonl is counted in both"
    begun = replace(a, counted=Counted(begun={("a.jsonl", 1): 4}))
    assert one_line(state.merge, begun, b) == "document 2 of a.jsonl is counted in both"
    said = one_line(state.together, [("x", both), ("y", begun)])
    assert said == "cannot merge y with x: document 2 of a.jsonl is counted in both"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"model": "other"}, "the model or its tokenizer differs"),
        ({"context": 7}, "--context differs (256 and 7)"),
        ({"quick": True}, "--quick differs (False and True)"),
        ({"chunk": 2048}, "the size of parts (memory decides it) differs (None and 2048)"),
        ({"dtype": "bfloat16"}, "--dtype differs (float32 and bfloat16)"),
    ],
)
def test_sums_of_two_kinds_do_not_merge(counted, changed, says):
    a, b, _ = counted
    other = replace(b, settings=replace(b.settings, **changed))
    assert one_line(state.merge, a, other) == says


def test_other_threads_are_kept_in_mind(counted):
    a, b, _ = counted
    other = replace(b, subject=replace(b.subject, threads=7))
    assert state.merge(a, other).subject.threads is None


def test_a_model_is_known_by_its_weights_and_tokenizer(sample):
    before = state.digest(sample.model, sample.tokenizer)
    assert before == state.digest(sample.model, sample.tokenizer)
    weight = sample.model.h[2].attn.c_attn.weight
    kept = weight.detach().clone()
    try:
        with torch.no_grad():
            weight[5, 77] *= 1.001
        assert state.digest(sample.model, sample.tokenizer) != before
    finally:
        with torch.no_grad():
            weight.copy_(kept)
    sample.model.config.scale_attn_by_inverse_layer_idx = True
    try:
        assert state.digest(sample.model, sample.tokenizer) != before
    finally:
        sample.model.config.scale_attn_by_inverse_layer_idx = False
    assert state.digest(sample.model, sample.tokenizer) == before
    assert state.digest(sample.model, lambda _: {"input_ids": torch.ones(1, 3)}) != before


def test_marks_of_documents():
    counted = Counted()
    for index in (0, 9, 4_000):
        counted.mark("a", index)
    counted.mark("a", 5, windows=2)
    assert [i for i in range(5_000) if ("a", i) in counted] == [0, 9, 4_000]
    assert ("b", 0) not in counted
    assert counted.begun == {("a", 5): 2}
    other = counted.copy()
    other.mark("a", 5)
    assert (other.begun, ("a", 5) in other, ("a", 5) in counted) == ({}, True, False)
    assert counted.within(other)
    assert not other.within(counted)
    assert counted.within(counted)
    assert not counted.within(Counted())
    assert Counted().within(counted)
    assert Counted(begun={("a", 5): 2}).within(counted)
    assert not Counted(begun={("a", 5): 3}).within(counted)


def test_what_is_no_state_is_one_line(tmp_path, counted):
    path = tmp_path / "run.safetensors"
    state.save(path, counted[0])
    data = path.read_bytes()
    assert state.is_state(path)
    for cut in (0, 7, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:cut])
        assert one_line(state.load, path).startswith(f"cannot read {path}: ")
    assert one_line(state.load, tmp_path / "none") == f"no file {tmp_path / 'none'}"
    assert not state.is_state(tmp_path / "none")
    heads.save(path, counted[0].gathered.stats)
    assert not state.is_state(path)
    assert "is not a state of this version" in one_line(state.load, path)
    save_file({"weight": torch.zeros(2)}, path)
    assert not state.is_state(path)
    for about in ("{}", "[]", "[", json.dumps({"settings": {}, "subject": {}})):
        also = {name: torch.tensor(list(x.encode()), dtype=torch.uint8)
                for name, x in (("about", about), ("documents", ""))}  # fmt: skip
        path.write_bytes(heads.packed(counted[0].gathered.stats, also, {"state": state.FORMAT}))
        assert one_line(state.load, path) == f"{path} is damaged: some of its facts are missing"


def test_a_failed_save_leaves_the_old_state(tmp_path, counted):
    """The limit is the system's own: a file of more bytes cannot be written."""
    path = tmp_path / "run.safetensors"
    state.save(path, counted[0])
    before = path.read_bytes()
    code = """
import resource, sys
from scaledot import state
found = state.load(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    state.save(sys.argv[1], found)
except state.ScaledotError as error:
    print(error)
"""
    saving = Forked(code, path)
    said, failed = saving.communicate()
    assert saving.returncode == 0, failed
    assert said == f"cannot write {path}: file too large\n"
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_state_is_of_one_run_at_a_time(tmp_path):
    path = tmp_path / "run.safetensors"
    code = """
import sys, time
from scaledot import state
with state.locked(sys.argv[1]):
    print("mine", flush=True)
    time.sleep(600)
"""
    other = Forked(code, path)
    try:
        assert other.stdout.readline() == "mine\n"
        with pytest.raises(ScaledotError, match="is in use by another run: wait, or pass"):
            state.locked(path).__enter__()
    finally:
        other.kill()
        other.communicate()
    leftover = tmp_path / ".run.safetensors.123.part"
    leftover.write_bytes(b"half")
    with state.locked(path):  # the system has taken the dead one's lock away
        assert not leftover.exists()


def test_a_fresh_state_has_counted_nothing(blank):
    assert blank.counted == Counted()
    assert not blank.gathered.stats
    again = state.merge(blank, State.fresh(blank.settings, blank.subject))
    assert contents(again) == contents(blank)
