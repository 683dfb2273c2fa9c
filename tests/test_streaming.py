"""Documents through a model: the sums of an audit, whatever happens between two windows."""

import pytest

import scaledot
from scaledot import ScaledotError, gathered
from scaledot.corpus import Document
from scaledot.gathered import conclude
from scaledot.loading import load
from scaledot.state import Counted
from scaledot.streaming import Run, begin, check_goes_on, share_of
from states import assert_same

TEXTS = ["In the beginning. " * 3, "Let there be light.", "And it was so. " * 12, "Amen."]
CONTEXT = 16


@pytest.fixture(scope="module")
def sample():
    return load()


@pytest.fixture(scope="module")
def blank(sample):
    return begin(sample.model, sample.tokenizer, TEXTS[0], context=CONTEXT, quick=True, name="x")


@pytest.fixture(scope="module")
def whole(sample, blank):
    return read(sample, blank).state()


def documents(texts=TEXTS):
    return [Document("a.jsonl", i, text) for i, text in enumerate(texts)]


def read(sample, state, texts=TEXTS, **how):
    run = Run(sample.model, sample.tokenizer, state)
    run.read(documents(texts), **how)
    return run


def test_a_corpus_gives_what_an_audit_of_its_texts_gives(sample, whole):
    report = scaledot.audit(
        sample.model, sample.tokenizer, TEXTS, context=CONTEXT, quick=True, name="x"
    )
    got = conclude(whole.subject, whole.gathered)
    assert got.model == report.model
    assert got.text == report.text
    assert repr(got.heads) == repr(report.heads)
    assert repr(got.findings) == repr(report.findings)
    assert got.theory == report.theory


class Interrupts:
    """Ctrl-C in the n-th forward of a module in the middle of the model."""

    def __init__(self, module, at):
        self.left = at
        self.hook = module.register_forward_pre_hook(self)

    def __call__(self, *_):
        self.left -= 1
        if self.left == 0:
            self.hook.remove()
            raise KeyboardInterrupt


@pytest.mark.parametrize("at", [1, 2, 4, 6])
def test_an_interrupt_inside_a_window_loses_that_window_alone(sample, blank, whole, at):
    run = Run(sample.model, sample.tokenizer, blank)
    Interrupts(sample.model.h[2], at)
    with pytest.raises(KeyboardInterrupt):
        run.read(documents())
    stopped = run.state()
    assert stopped.gathered.windows == at - 1
    assert_same(read(sample, stopped).state(), whole)


def test_an_interrupt_between_sum_and_mark_counts_once(sample, blank, whole, monkeypatch):
    """The one place where they could part."""
    mark, left = Counted.mark, [3]

    def interrupted(self, *args):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        mark(self, *args)

    run = Run(sample.model, sample.tokenizer, blank)
    monkeypatch.setattr(Counted, "mark", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.read(documents())
    monkeypatch.undo()
    stopped = run.state()
    assert stopped.gathered.windows == 3
    assert_same(read(sample, stopped).state(), whole)


def test_a_long_document_goes_on_in_its_middle(sample, blank, whole):
    stopped = read(sample, blank, max_tokens=80).state()
    assert stopped.counted.begun
    assert stopped.gathered.tokens >= 80 > stopped.gathered.tokens - CONTEXT
    assert_same(read(sample, stopped).state(), whole)


def test_a_state_is_saved_between_windows(sample, blank, whole):
    saved = []
    read(sample, blank, save=saved.append, every=0.0)
    assert [x.gathered.windows for x in saved] == list(range(1, whole.gathered.windows + 1))
    assert_same(saved[-1], whole)
    assert_same(read(sample, saved[2]).state(), whole)
    read(sample, blank, save=lambda _: pytest.fail("not yet due"), every=60.0)


def test_shares_are_all_documents_once_and_begun_ones_the_firsts():
    counted = Counted()
    counted.mark("a", 3)
    counted.mark("b", 5, windows=2)
    places = [(name, i) for name in "ab" for i in range(10)]
    shares = [[x for x in places if share_of(counted, rank, 3)(*x)] for rank in range(3)]
    assert sorted(x for share in shares for x in share) == [x for x in places if x != ("a", 3)]
    assert ("b", 5) in shares[0]
    alike = [sum(share_of(Counted(), rank, 3)(*x) for x in places) for rank in range(3)]
    assert max(alike) - min(alike) <= 2  # one a file


def test_a_run_may_read_twice_and_a_document_that_shrank_is_done(sample, blank, whole):
    run = Run(sample.model, sample.tokenizer, blank)
    run.read(documents()[:2])
    run.read(documents()[2:])
    assert_same(run.state(), whole)
    stopped = read(sample, blank, max_tokens=80).state()
    ((file, index),) = stopped.counted.begun
    again = Run(sample.model, sample.tokenizer, stopped)
    again.read([Document(file, index, "Short.")])
    assert (file, index) in again.state().counted
    assert not again.state().counted.begun


def test_a_run_goes_on_only_with_what_it_began_with(sample, blank):
    def check(**how):
        check_goes_on(blank, sample.model, sample.tokenizer, **{"context": 16, "quick": True} | how)

    check()
    with pytest.raises(ScaledotError, match=r"^--context differs \(16 and 256\)$"):
        check(context=None)
    with pytest.raises(ScaledotError, match=r"^--quick differs \(True and False\)$"):
        check(quick=False)


def test_before_it_has_read_anything_a_state_knows_the_model(sample, blank):
    assert [x.path for x in blank.subject.layers] == [f"h.{i}.attn" for i in range(4)]
    assert blank.subject.trials.leaks == ()
    full = begin(sample.model, sample.tokenizer, TEXTS[1])
    assert [x.kind for x in full.subject.trials.leaks] == ["future", "documents"]
    assert full.subject.trials.matched
    with pytest.raises(ScaledotError, match="learned 256 positions"):
        begin(sample.model, sample.tokenizer, TEXTS[0], context=10**6)


def test_what_was_gathered_merges(whole, blank):
    nothing = gathered.Gathered({}, {})
    assert repr(gathered.merge(nothing, whole.gathered)) == repr(whole.gathered)
    twice = gathered.merge(whole.gathered, whole.gathered)
    assert (twice.tokens, twice.longest) == (2 * whole.gathered.tokens, whole.gathered.longest)
