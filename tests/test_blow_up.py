"""The demonstration: what docs/blow_up.md says is what its curves say, and a run says so too."""

import csv
import importlib.util
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOC = (ROOT / "docs" / "blow_up.md").read_text(encoding="utf-8")


def example():
    spec = importlib.util.spec_from_file_location("blow_up", ROOT / "examples" / "blow_up.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["blow_up"] = module
    spec.loader.exec_module(module)
    return module


def stored(module):
    runs = {name: module.Run(name, [], [], 0) for name in module.RECIPES}
    with (ROOT / "docs" / "blow_up.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            runs[row["run"]].loss.append(float(row["loss"]))
            runs[row["run"]].largest.append(float(row["largest_score"]))
    return list(runs.values())


def test_the_table_is_that_of_the_stored_curves():
    module = example()
    assert module.table(stored(module)) in DOC


def test_the_alarm_comes_before_the_loss_shows_it_and_the_cures_cure():
    module = example()
    runs = {run.name: run for run in stored(module)}
    best = runs["QK-norm"]
    for name in ("no scale", "1/√d_k"):
        assert runs[name].alarm < module.shows(runs[name], best)
    final = {name: module.smoothed(run.loss)[-1] for name, run in runs.items()}
    assert final["no scale"] > 2
    for name, others in (("no scale, clipped", "no scale"), ("1/√d_k, clipped", "1/√d_k")):
        assert final[name] < 0.6 * final[others]
    assert all(runs[name].alarm is None for name in final if name not in ("no scale", "1/√d_k"))


def test_a_loss_that_shows_it_stays_above():
    module = example()
    flat = module.Run("flat", [1.0] * 100, [0.0] * 100, 0)
    rises = module.Run("rises", [1.0] * 40 + [2.0] * 60, [0.0] * 100, 0)
    # The mean of 25 steps is 0.1 above once 3 of them are: at the 43rd.
    assert module.shows(rises, flat) == 43
    returns = module.Run("returns", [1.0] * 40 + [2.0] * 20 + [1.0] * 40, [0.0] * 100, 0)
    assert module.shows(returns, flat) is None


def test_it_runs_and_the_alarm_rings(tmp_path, capsys, monkeypatch):
    """60 steps of two recipes: enough for the alarm, which a mere threshold on the loss is not."""
    module = example()
    monkeypatch.setattr(module, "RECIPES", {x: module.RECIPES[x] for x in ("no scale", "QK-norm")})
    monkeypatch.setattr(sys, "argv", ["blow_up.py", "--steps", "60", "--out", str(tmp_path)])
    module.main()
    said = capsys.readouterr().out
    step = int(re.search(r"no scale: step (\d+): max_score above 100: ", said)[1])
    assert 20 < step < 60
    assert "the scale is 8 times 1/√d_k" in said
    assert "QK-norm: step" not in said
    assert {x.name for x in tmp_path.iterdir()} == {"blow_up.svg", "blow_up.csv"}
