"""Every test runs the package's shape annotations, with fixed seeds, on one thread."""

import re

import jaxtyping
import pytest
import torch
import torch._dynamo  # now: what is imported under jaxtyping's hook is compiled anew each time
from beartype import BeartypeConf, beartype
from hypothesis import settings

pytest_plugins = ["browsing"]

# An int is a float to whoever calls, so it is to the type checker.
typechecker = beartype(conf=BeartypeConf(is_pep484_tower=True))
where_shapes_are = jaxtyping.jaxtyped


def jaxtyped(*, typechecker):
    """The import hook's decorator, where an annotation has a shape; the others are for mypy: to run
    them too takes longer than the tests."""
    decorate = where_shapes_are(typechecker=typechecker)

    def decorated(x):
        hints = " ".join(map(str, x.__annotations__.values()))
        return decorate(x) if re.search(r"(Bool|Float|Int|Num|UInt8)\[", hints) else x

    return decorated


jaxtyping.jaxtyped = jaxtyped
jaxtyping.install_import_hook("scaledot", "conftest.typechecker")

settings.register_profile("scaledot", deadline=None, derandomize=True, database=None)
settings.load_profile("scaledot")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(20260714)


@pytest.fixture
def unannotated():
    """Annotations off: what a user sees who passes the wrong type."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def force_variant(monkeypatch):
    """Called with a variant of the native kernel: it runs until the test ends, or is skipped."""
    from scaledot.kernels import native

    def force(name):
        monkeypatch.setenv("SCALEDOT_ISA", name)
        native._library.cache_clear()
        if reason := native.available():
            pytest.skip(reason)
        assert native.info()["isa"] == name

    yield force
    # However it ended: what this processor lacks must not be what later tests remember.
    monkeypatch.undo()
    native._library.cache_clear()
