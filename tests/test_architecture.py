"""The house as drawn: who may import whom, read from the source."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "scaledot"
TESTS = Path(__file__).parent

# What each module may import when it loads. A module not named here fails its test: draw its arrow.
CORE = {"checks", "masks", "rows", "stages", "heads", "moments", "scales", "dispatch"}
LAB = {"lab.results", "lab.arguments"}
ARROWS = {
    "__init__": set(),
    "__main__": set(),
    # The definition and the kernels.
    "checks": set(),
    "rows": set(),
    "masks": {"checks", "rows"},
    "stages": {"checks", "rows", "masks"},
    "files": set(),
    "heads": {"checks", "rows", "masks", "files"},
    "intervals": {"masks"},
    "moments": {"checks", "rows", "masks", "heads", "intervals"},
    "scales": set(),
    "kernels.__init__": {"rows"},
    "kernels.tiled": {"kernels", "rows", "masks"},
    "kernels.native": {"kernels", "rows", "masks"},
    "kernels.triton": {"kernels", "rows", "masks"},
    "operators": {"kernels", "kernels.tiled", "rows", "masks"},
    "dispatch": {"checks", "rows", "masks", "kernels", "operators"},
    # What uses them.
    "roles": CORE | {"intervals", "kernels", "operators"},
    "whatif": CORE | {"kernels", "operators"},
    "received": CORE | {"kernels", "operators"},
    "precision": CORE,
    "reference": CORE,
    "spread": CORE,
    "multihead": CORE,
    # Experiments: none knows another; gaussian and given are parts of some.
    "lab.__init__": set(),
    "lab.results": set(),
    "lab.arguments": {"checks"},
    "lab.figures": {"lab.results"},
    "lab.dots": LAB,
    "lab.draws": CORE | LAB | {"lab.dots", "numerals"},
    "lab.gaussian": LAB | {"scales", "numerals"},
    "lab.given": CORE | LAB | {"lab.gaussian", "numerals"},
    "lab.softmaxes": CORE | LAB | {"lab.gaussian", "lab.given", "numerals"},
    "lab.slopes": CORE | LAB | {"lab.gaussian", "numerals"},
    "lab.timings": set(),
    "lab.published": CORE | LAB,
    "lab.splitting": CORE | LAB | {"lab.timings", "numerals"},
    "lab.costs": CORE | LAB | {"lab.published", "lab.timings"},
    "lab.curves": {"lab.results", "numerals"},
    "lab.learning": CORE | LAB | {"kernels", "lab.curves"},
    "lab.rstream": set(),
    "lab.rprint": set(),
    "lab.replicas": CORE | {"lab.rstream"},
    "lab.evidence": CORE | LAB | {"lab.published", "lab.replicas", "reference"},
    "lab.claims": CORE | LAB | {"lab.replicas", "lab.evidence", "reference"},
    "lab.articles": CORE | LAB | {"lab.replicas", "lab.rprint", "lab.claims"},
    "probe": set(),
    "properties": CORE | {"probe"},
    "conformance": {"probe", "properties"},
    "frames": set(),
    "parts": CORE,
    "calls": CORE
    | {
        "frames",
        "parts",
        "roles",
        "whatif",
        "received",
        "precision",
        "reference",
        "spread",
        "kernels",
        "operators",
    },
    "mask_check": CORE | {"calls", "frames", "operators", "kernels"},
    "observation": CORE
    | {"roles", "received", "calls", "frames", "parts", "mask_check", "kernels"},
    "huggingface": CORE | {"calls", "observation"},
    "torch_route": CORE | {"calls", "observation", "multihead"},
    "graph_route": CORE | {"calls", "frames", "observation", "operators", "kernels"},
    # A training run, watched.
    "losses": {"rows"},
    "clipping": {"heads", "observation"},
    "alarms": {"checks", "heads", "tracking"},
    "distributed": {"heads"},
    "picture": set(),
    "tracking": {"heads", "picture"},
    "training": {"heads", "observation", "alarms", "tracking", "distributed"},
    "trainers": {"tracking", "training"},
    "snapshots": set(),
    "timeline": {"alarms", "tracking"},
    "timeline_table": {"screen", "numerals", "timeline"},
    # A corpus through a model.
    "numerals": set(),
    "tokens": set(),
    "loading": set(),
    "leakage": {"checks"},
    "profiles": CORE | {"roles", "whatif", "precision", "reference"},
    "findings": {"heads", "scales", "precision", "profiles", "numerals"},
    "scale_faults": {"scales", "findings", "numerals"},
    "mask_faults": {"leakage", "mask_check", "findings", "numerals"},
    "diagnose": {
        "heads",
        "whatif",
        "precision",
        "reference",
        "profiles",
        "findings",
        "scale_faults",
        "mask_faults",
        "leakage",
        "mask_check",
        "numerals",
    },
    "windows": set(),
    "prefill": {"parts", "windows"},
    "trials": {"roles", "leakage", "mask_check", "observation", "windows"},
    "gathered": {
        "parts",
        "heads",
        "mask_check",
        "findings",
        "diagnose",
        "trials",
        "windows",
    },
    "auditing": {
        "heads",
        "roles",
        "observation",
        "mask_check",
        "leakage",
        "gathered",
        "prefill",
        "trials",
        "windows",
    },
    # Many documents, many processes.
    "corpus": set(),
    "state": {
        "files",
        "heads",
        "scales",
        "findings",
        "leakage",
        "mask_check",
        "trials",
        "gathered",
    },
    "streaming": {
        "roles",
        "observation",
        "leakage",
        "prefill",
        "trials",
        "windows",
        "gathered",
        "corpus",
        "state",
    },
    "processes": set(),
    "jobs": {"corpus", "gathered", "processes", "state", "streaming"},
    "ray_engine": {"corpus", "state", "streaming"},
    # One text through a model, for the page.
    "projections": {"calls", "kernels", "operators"},
    "exploring": CORE
    | {
        "calls",
        "projections",
        "roles",
        "observation",
        "leakage",
        "findings",
        "diagnose",
        "loading",
        "numerals",
        "tokens",
        "windows",
    },
    # What people see.
    "page_document": {"document", "loading", "scales"},
    "document": {"stages", "heads", "scales", "whatif", "gathered", "lab.results", "loading"},
    "screen": {"numerals", "tokens"},
    "head_table": {"document", "screen", "numerals"},
    "head_grid": {"document", "screen", "numerals", "head_table"},
    "head_file": {"document", "screen", "numerals", "head_table"},
    "trace_table": {"document", "screen", "numerals", "tokens"},
    "check_table": {"document", "screen", "numerals"},
    "lab_table": {"document", "screen", "numerals"},
    "terminal": {
        "document",
        "screen",
        "numerals",
        "head_table",
        "head_grid",
        "head_file",
        "trace_table",
        "check_table",
        "lab_table",
    },
    "options": set(),
    "corpus_options": {"options"},
    "report": {"document"},
    "server": {"document", "page_document", "exploring", "report"},
    "timeline_page": {"alarms", "page_document", "timeline", "tracking"},
    "following": {"timeline", "timeline_page", "server"},
}
# Inside functions: a result may reach for its presentation, a chooser for what it chooses.
SHOWN = {"document", "page_document", "terminal", "report"}
LATER = {
    "lab.results": SHOWN | {"lab.figures", "files"},
    "lab.figures": {"files"},
    "lab.draws": {"observation", "loading", "windows"},
    "__main__": {"cli"},
    "stages": SHOWN | {"exploring"},
    "heads": SHOWN,
    "conformance": SHOWN,
    "observation": SHOWN | {"exploring", "huggingface", "torch_route", "graph_route"},
    "gathered": SHOWN,
    "auditing": SHOWN | {"tokens", "exploring", "loading"},
    "ray_engine": {"loading"},
    "corpus_options": SHOWN
    | {
        "auditing",
        "corpus",
        "gathered",
        "jobs",
        "loading",
        "processes",
        "ray_engine",
        "windows",
    },
    "dispatch": {"kernels.native", "kernels.triton"},
    "moments": {"kernels.native"},
    "operators": {"kernels.native", "kernels.triton"},
    "page_document": {"exploring", "tokens"},
    "document": {"findings", "exploring", "tokens"},
    "options": SHOWN | {"loading"},
    "training": {"snapshots", "trainers"},
}
EXTRAS = {
    "test_architecture", "test_course", "test_imports", "test_families", "test_mask_findings",
    "test_onnx", "test_compile", "test_gradients", "test_kernels", "test_readme",
    "test_real_figures", "test_real_models", "test_row_stats", "test_sample", "test_browser",
    "test_address", "test_blow_up", "test_page", "test_web", "test_stages_golden", "test_trackers",
}  # fmt: skip
MODULES = sorted(
    ".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in SOURCE.rglob("*.py")
)


def imports(module):
    """(when it loads, inside functions): scaledot's modules that a module imports."""
    tree = ast.parse((SOURCE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    typing = {
        id(node)
        for test in ast.walk(tree)
        if isinstance(test, ast.If) and "TYPE_CHECKING" in ast.unparse(test.test)
        for node in ast.walk(test)
    }
    first, later = set(), set()
    for node in ast.walk(tree):
        if id(node) in typing:
            continue
        found = set()
        if isinstance(node, ast.Import):
            found = {
                a.name.removeprefix("scaledot.")
                for a in node.names
                if a.name.startswith("scaledot.")
            }
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively: the arrows are read by full name"
            name = node.module or ""
            if name == "scaledot" or name.startswith("scaledot."):
                base = name.removeprefix("scaledot").removeprefix(".")
                for alias in node.names:
                    full = f"{base}.{alias.name}".lstrip(".")
                    found.add(full if full in MODULES else base)
        (later if id(node) in inside else first).update(found - {""})
    return first, later


@pytest.mark.parametrize("module", [m for m in MODULES if not m.startswith("cli")])
def test_modules_import_only_along_the_arrows(module):
    first, later = imports(module)
    assert module in ARROWS, f"{module} has no arrow: draw it here and in the design"
    assert first <= ARROWS[module]
    assert later <= ARROWS[module] | LATER.get(module, set())


def test_arrows_have_no_circle():
    done, left = set(), set(ARROWS)
    while left:
        free = {m for m in left if not (ARROWS[m] & left - {m})}
        assert free, f"a circle among {sorted(left)}"
        left -= free
        done |= free


def test_nobody_imports_the_command_line():
    for module in MODULES:
        first, later = imports(module)
        assert "cli" not in first
        assert "cli" not in later or module == "__main__"
        assert not any(x.startswith("cli_") for x in first | later) or module == "cli"


def test_kernels_know_neither_the_definition_nor_each_other():
    for module in (m for m in MODULES if m.startswith("kernels.")):
        known = set.union(*imports(module))
        assert "stages" not in known
        assert not any(name.startswith("kernels.") for name in known)


def test_no_module_bears_a_public_functions_name():
    """The second access to scaledot.name would give the module instead."""
    import scaledot

    assert not set(scaledot.__all__) & {m.split(".")[0] for m in MODULES}


def test_no_module_is_a_drawer():
    drawers = {
        "utils",
        "util",
        "common",
        "base",
        "helpers",
        "misc",
        "registry",
        "manager",
        "config",
    }
    assert not drawers & {part for m in MODULES for part in m.split(".")}


def test_every_test_file_mirrors_a_module_or_is_a_named_extra():
    modules = {m.split(".")[-1] for m in MODULES}
    for path in TESTS.rglob("test_*.py"):
        name = path.stem
        assert name.removeprefix("test_") in modules or name in EXTRAS, name


CORE_TESTED = (
    "checks", "masks", "stages", "rows", "heads", "moments", "roles", "dispatch", "kernels.tiled",
    "whatif", "received", "precision", "reference", "spread",
)  # fmt: skip


@pytest.mark.parametrize("module", CORE_TESTED)
def test_every_module_of_the_core_has_its_test_file(module):
    assert (TESTS / f"test_{module.split('.')[-1]}.py").exists()
