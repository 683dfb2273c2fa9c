"""Importing scaledot, and asking for help, loads nothing heavy."""

import json
import subprocess
import sys

import pytest

import scaledot

HEAVY = ("torch", "transformers", "numpy", "rich", "typer", "jaxtyping", "safetensors")


def loaded_after(code):
    """Modules loaded by a fresh interpreter that ran some code, and what it printed."""
    script = f"{code}\nimport sys, json; print(json.dumps(sorted(sys.modules)))"
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    *printed, names = result.stdout.splitlines()
    return set(json.loads(names)), "\n".join(printed)


def test_import_loads_no_library():
    loaded, _ = loaded_after("import scaledot; dir(scaledot); scaledot.ScaledotError")
    assert not loaded & set(HEAVY)
    assert {name for name in loaded if name.startswith("scaledot.")} == set()


def test_names_load_their_own_module_when_used():
    loaded, _ = loaded_after("import scaledot; scaledot.attention")
    assert {"torch", "scaledot.dispatch"} <= loaded
    assert not loaded & {"transformers", "rich", "typer", "scaledot.observation", "scaledot.stages"}


@pytest.mark.parametrize("name", ["Mask", "RowStats", "Trace", "attention", "trace", "HeadStats"])
def test_public_names_are_what_their_modules_define(name):
    value = getattr(scaledot, name)
    assert value.__name__ == name
    assert getattr(scaledot, name) is value


def test_modules_load_when_they_are_used():
    loaded, printed = loaded_after("""
import scaledot
print(scaledot.losses.z_loss.__name__)""")
    assert printed == "z_loss"
    assert "scaledot.losses" in loaded
    assert "scaledot.dispatch" not in loaded


def test_the_public_names_are_listed():
    public = {
        "attention", "trace", "Mask", "Trace", "RowStats", "HeadStats", "observe", "audit",
        "ScaledotError", "__version__", "lab", "losses",
    }  # fmt: skip
    assert public <= set(dir(scaledot))
    assert public - {"lab", "losses"} <= set(scaledot.__all__)
    with pytest.raises(AttributeError, match="module 'scaledot' has no attribute 'atention'"):
        _ = scaledot.atention


def test_help_loads_neither_torch_nor_transformers():
    loaded, printed = loaded_after("""
import runpy, sys
sys.argv = ["scaledot", "--help"]
try:
    runpy.run_module("scaledot", run_name="__main__")
except SystemExit as end:
    assert end.code in (0, None), end.code
""")
    assert "audit" in printed
    assert not loaded & {"torch", "transformers", "numpy", "safetensors"}
