"""Whole runs in processes of their own: killed, stopped, short of disk, several on one corpus."""

import json
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from forked import Forked, environments
from scaledot import ScaledotError, jobs, state
from scaledot.corpus import sources
from scaledot.loading import load
from scaledot.processes import Processes
from states import assert_same

SOURCE = Path(__file__).parents[1] / "src"
SCRIPT = """
import resource, sys
from scaledot import jobs
from scaledot.corpus import sources
from scaledot.loading import load
from scaledot.processes import processes

path, limit, every, skip = sys.argv[1:]
with processes() as here:
    job = jobs.Job(sources(["s*.jsonl"]), path=jobs.Path(path), context=16, quick=True, threads=1,
                   every=float(every), skip=skip == "skip")
    found = load()
    if int(limit):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    def say(text):
        print(here.rank, text, flush=True)
    outcome = jobs.run(job, found, here, note=say,
                       on_progress=lambda done, _, tokens: say(f"done {done}"))
    say(f"end {outcome.complete} {outcome.failed} {outcome.unreadable}")
"""
TEXTS = [f"{i}: And it came to pass, on the {'very ' * (i % 7)}day." for i in range(24)]


def corpus(folder):
    for k in range(2):
        (folder / f"s{k}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[k::2])
        )


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    corpus(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def sample():
    return load()


@pytest.fixture(scope="module")
def whole(tmp_path_factory, sample):
    """What one process gives that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    corpus(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return run(sample).state


def run(sample, path=None, **how):
    job = jobs.Job(
        sources(["s*.jsonl"]), path=path and Path(path), context=16, quick=True, threads=1, **how
    )
    return jobs.run(job, sample, Processes())


def process(path="run.safetensors", limit=0, every=0.0, bad="stop", **environment):
    return Forked(SCRIPT, path, str(limit), str(every), bad, **environment)


def until(started, line):
    for said in started.stdout:
        if said.strip() == line:
            return
    pytest.fail(f"it ended without {line!r}: {started.communicate()[1][-2000:]}")


def ended(started, code=0):
    out, err = started.communicate(timeout=240)
    assert started.returncode == code, err[-2000:]
    return out


def test_a_run_that_is_killed_goes_on_and_counts_nothing_twice(sample, whole):
    """kill -9 in the middle of a shard, several times, wherever it is: in a window, in a save."""
    dice = random.Random(0)
    for stop in (3, 5, 4):
        started = process()
        until(started, f"0 done {stop}")
        time.sleep(dice.random() / 10)
        started.kill()
        started.communicate()
        done = state.load("run.safetensors").gathered.texts
        assert done >= stop - 1  # what is said is saved next
    assert done < len(TEXTS)
    found = run(sample, "run.safetensors").state
    assert_same(found, whole)
    assert not list(Path().glob(".*.part"))
    # And once more does nothing.
    again = run(sample, "run.safetensors")
    assert again.failed is None
    assert_same(again.state, whole)
    assert run(sample, "run.safetensors", max_tokens=1).failed is None


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_told_to_stop_saves_all_it_has(sample, whole, sent):
    started = process(every=600.0)
    until(started, "0 done 5")
    started.send_signal(sent)
    time.sleep(0.01)
    started.send_signal(signal.SIGTERM)  # as launchers do; it must not end the saving
    assert "0 end False None []" in ended(started)
    assert state.load("run.safetensors").gathered.texts >= 5
    assert_same(run(sample, "run.safetensors").state, whole)


def test_a_disk_that_fills_is_said_and_tried_again(sample, whole):
    """The system lets no file grow past what a state of nothing takes."""
    run(sample, "run.safetensors", max_tokens=1)
    size = Path("run.safetensors").stat().st_size
    started = process(limit=size - 100)
    out, err = started.communicate(timeout=240)
    assert started.returncode == 1
    said = "cannot write run.safetensors: file too large"
    assert said in err  # it was full from the beginning: nothing ran
    assert "done" not in out
    blank = process(path="new.safetensors", limit=size - 100)
    out, err = blank.communicate(timeout=240)
    told = f"0 {said.replace('run', 'new')}: the older state is whole, the run goes on and will"
    assert out.count(told) == 1
    assert f"done {len(TEXTS)}" in out
    assert err.strip().endswith(said.replace("run", "new"))  # the end could not be saved
    assert state.load("new.safetensors").gathered.texts == 0
    for path in ("run.safetensors", "new.safetensors"):
        assert_same(run(sample, path).state, whole)


def test_a_bad_line_ends_a_run_or_is_left_out_until_it_is_mended(sample, whole):
    good = Path("s1.jsonl").read_text()
    lines = good.splitlines(keepends=True)
    Path("s1.jsonl").write_text("".join([*lines[:7], lines[7][:9] + "\n", *lines[8:]]))
    stopped = run(sample, "run.safetensors")
    assert "s1.jsonl line 8 is not JSON" in str(stopped.failed)
    assert stopped.state.gathered.texts == len(TEXTS) // 2 + 7
    skipping = run(sample, "run.safetensors", skip=True)
    assert skipping.failed is None
    assert skipping.skipped == 1
    assert [x.split(" is")[0] for x in skipping.unreadable] == ["s1.jsonl line 8"]
    assert skipping.state.gathered.texts == len(TEXTS) - 1
    Path("s1.jsonl").write_text(good)
    assert_same(run(sample, "run.safetensors").state, whole)


def test_a_model_that_fails_takes_nothing_with_it(sample, whole):
    left = [20]

    def fail(*_):
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("a kernel of the model's own")

    hook = sample.model.h[2].register_forward_pre_hook(fail)
    try:
        found = run(sample, "run.safetensors")
    finally:
        hook.remove()
    assert isinstance(found.failed, RuntimeError)
    assert state.load("run.safetensors").gathered.windows == 18  # one tried the model
    assert_same(run(sample, "run.safetensors").state, whole)


def test_several_processes_give_what_one_gives(sample, whole):
    """Two, killed once, then one, then three: each goes on from what the others left."""
    started = [process(**rank) for rank in environments(2)]
    until(started[1], "1 done 3")
    for one in started:
        one.kill()
        one.communicate()
    part = state.load("run.rank1.safetensors")
    assert part.gathered.texts >= 2  # the third was said before it was saved
    one = run(sample, "run.safetensors", max_tokens=150)
    assert not Path("run.rank1.safetensors").exists()
    assert one.state.gathered.texts >= part.gathered.texts
    Path("s1.jsonl").write_text(Path("s1.jsonl").read_text() + "no JSON\n" * 3)  # one a process
    started = [process(every=600.0, bad="skip", **rank) for rank in environments(3)]
    out = "".join(ended(one) for one in started)
    assert out.count("end True None") == 3
    assert sum(line.count("s1.jsonl line") for line in out.splitlines()) == 3
    assert max(line.count("s1.jsonl line") for line in out.splitlines()) == 3  # the first has them
    assert_same(state.load("run.safetensors"), whole)
    assert [x.name for x in Path().glob("*.safetensors")] == ["run.safetensors"]


def test_a_state_of_another_run_is_refused(sample):
    run(sample, "run.safetensors", max_tokens=1)
    with pytest.raises(ScaledotError, match=r"run\.safetensors is of another run: --context"):
        jobs.run(
            jobs.Job(sources(["s0.jsonl"]), path=Path("run.safetensors"), context=8, quick=True),
            sample, Processes(),
        )  # fmt: skip
    # A state that merely bears such a name is nobody's part; of a part the state must be there.
    found = state.load("run.safetensors")
    state.save("run.rank2.safetensors", found)
    run(sample, "run.safetensors", max_tokens=1)
    state.save("run.rank2.safetensors", replace(found, part=True))
    Path("run.safetensors").unlink()
    with pytest.raises(ScaledotError, match=r"run\.rank2\.safetensors is part of a run whose"):
        run(sample, "run.safetensors")
    Path("run.rank2.safetensors").unlink()
    # A part that another process has counted on with does not go with what was read since.
    first = run(sample, "run.safetensors", max_tokens=20).state
    more = run(sample, "run.safetensors", max_tokens=40).state
    state.save("run.rank3.safetensors", replace(more, part=True))
    state.save("run.safetensors", first)
    with pytest.raises(ScaledotError, match=r"counted in both; remove it, and its documents are"):
        run(sample, "run.safetensors")
    with state.locked("other.safetensors"), pytest.raises(ScaledotError, match="is in use by"):
        run(sample, "other.safetensors")


def test_no_text_is_an_error(sample):
    Path("s0.jsonl").write_text('{"text": " "}\n')
    Path("s1.jsonl").write_text("")
    with pytest.raises(ScaledotError, match="every document is blank or cannot"):
        run(sample)


def test_the_guides_own_lines_run(capsys):
    Path("shards").mkdir()
    for name in ("s0.jsonl", "s1.jsonl"):
        Path(name).rename(f"shards/{name}")
    guide = (SOURCE.parent / "docs" / "corpus.md").read_text(encoding="utf-8")
    code = guide.split("```python\n")[1].split("```")[0]
    exec(compile(code, "docs/corpus.md", "exec"), {})
    assert f"{len(TEXTS)} texts" in capsys.readouterr().out
