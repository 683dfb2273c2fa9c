"""A corpus over a real Ray: two workers give what one process gives, a lost one is made good."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from scaledot import ScaledotError, jobs
from scaledot.corpus import sources
from scaledot.loading import load
from scaledot.processes import Processes
from scaledot.ray_engine import RayRun
from scaledot.streaming import Run
from states import assert_same

if "SCALEDOT_REQUIRE_CORPUS" not in os.environ:
    pytest.importorskip("ray")
import ray

TEXTS = ["And it came to pass, " * 9, *(f"On day {i}." for i in range(1, 70))]
"""Three batches, the first document several windows."""


@pytest.fixture(scope="module")
def sample():
    return load()


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        # Workers are processes of their own, and get this one's environment.
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "src"))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.chdir(tmp_path_factory.mktemp("corpus"))
        Path("a.jsonl").write_text("".join(json.dumps({"text": x}) + "\n" for x in TEXTS))
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=40)
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def whole(sample, here):
    return run(sample).state


def run(sample, runner=Run, path=None, on_progress=None, **how):
    job = jobs.Job(
        sources(["a.jsonl"]), path=path and Path(path), context=16, quick=True, threads=1, **how
    )
    return jobs.run(job, sample, Processes(), runner=runner, on_progress=on_progress)


def over_ray(model=None, workers=2):
    return lambda *args: RayRun({"source": model}, Run(*args), workers=workers, threads=1)


def auditors():
    """Processes of Ray's actors."""
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal() and b"ray::_Auditor" in (folder / "cmdline").read_bytes():
                yield int(folder.name)
        except OSError:
            continue


def test_two_workers_one_of_them_lost_give_what_one_process_gives(sample, whole):
    lost = []

    def kill(*_):
        if not lost:
            lost.append(next(auditors()))
            os.kill(lost[0], signal.SIGKILL)

    # What an earlier run without Ray has begun, the middle of a document among it.
    begun = run(sample, path="run.safetensors", max_tokens=30).state
    assert begun.counted.begun
    found = run(sample, over_ray(), "run.safetensors", kill)
    assert lost
    assert found.failed is None
    assert_same(found.state, whole)


def test_a_run_that_is_stopped_keeps_what_came_back(sample, whole):
    def stop(done, *_):
        raise KeyboardInterrupt

    stopped = run(sample, over_ray(workers=1), "stopped.safetensors", stop)
    assert not stopped.complete
    assert 0 < stopped.state.gathered.texts < len(TEXTS)
    assert_same(run(sample, over_ray(workers=1), "stopped.safetensors").state, whole)


def test_what_cannot_be_is_said(sample, monkeypatch):
    assert "no model at 'none'" in str(run(sample, over_ray("none", workers=1)).failed)
    assert str(run(sample, over_ray(workers=4096)).failed).startswith("4096 workers need more")
    monkeypatch.setitem(sys.modules, "ray", None)
    assert 'pip install "scaledot[ray]"' in str(run(sample, over_ray()).failed)
    with pytest.raises(ScaledotError):
        raise run(sample, over_ray()).failed
