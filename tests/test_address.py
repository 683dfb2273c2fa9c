"""The page's address in a browser, what Back undoes, what if against NumPy, a report's gaps."""

import math
from urllib.parse import urlencode

import numpy as np
import pytest

import scaledot
from browsing import (
    ENGLISH,
    VIEWS,
    close,
    focus,
    inputs,
    numbers,
    state_of,
    text_of,
    until,
    until_state,
)
from scaledot.loading import load

LAYER, HEAD = 1, 2


def test_an_address_restores_every_field(served, opened):
    """All fields that page.md lists, none at its default; what each changes is looked at."""
    address = served("sample")
    settings = {
        "rule": "custom", "scale": "0.05", "temp": "2", "cap": "5", "mask": "window",
        "window": "3", "seed": "7",
    }  # fmt: skip
    place = {"layer": "1", "head": "2", "q": "6", "k": "5"}
    look = {"stage": "scaled", "range": "one", "centre": "1", "lang": "ja", "theme": "dark"}
    grid = {"stat": "entropy", "sort": "value"}
    whole = {**place, **look, **grid, **settings, "text": ENGLISH}
    page = opened(address, view="head", **whole)
    assert state_of(page) == {"view": "head", **whole}
    root = "document.documentElement"
    assert page.evaluate(f"[{root}.lang, {root}.dataset.theme]") == ["ja", "dark"]
    assert page.is_checked(focus("toggle-one_range"))
    assert page.is_checked(focus("toggle-centre"))
    qkv = inputs(page, address, text_of(page, address, ENGLISH), LAYER, HEAD)
    close(numbers(page, ".readout")[:1], [qkv[0][0, 6] @ qkv[1][0, 5]])
    page.click(focus("path-model"))
    assert page.get_attribute(focus("stat-entropy"), "aria-pressed") == "true"
    rows = np.reshape(numbers(page, ".grid-cell"), (4, -1))
    assert (np.diff(rows) >= 0).all() or (np.diff(rows) <= 0).all()
    page.click(focus("path-whatif"))
    page.wait_for_selector(VIEWS["whatif"])
    assert page.input_value(focus("seed")) == "7"
    assert page.input_value(focus("window")) == "3"
    assert page.get_attribute(focus("mask-window"), "aria-pressed") == "true"
    assert page.is_enabled(focus("reset"))
    assert state_of(page) == {"view": "whatif", **whole}


@pytest.mark.parametrize(
    "asked", [{"rule": "custom", "scale": "1e308"}, {"temp": "1e-308"}, {"cap": "1e-300"}]
)
def test_what_cannot_be_computed_is_said_and_the_nearest_is_shown(served, opened, asked):
    state = {"view": "whatif", "layer": LAYER, "head": HEAD, "text": ENGLISH}
    page = opened(served("sample"), **state, **asked)
    (given,) = [x for x in asked.values() if x != "custom"]
    page.locator("[role=alert]", has_text=f"asks for {given.replace('1e308', '1e+308')}").wait_for()
    assert "NaN" not in page.inner_text("#view")
    assert not any(map(math.isnan, numbers(page, "[data-entropy]", "data-entropy")))
    page.click(focus("reset"))
    page.wait_for_selector("[role=alert]", state="detached")


def test_back_undoes_a_pin_but_not_a_drag_nor_a_setting(served, opened):
    page = opened(served("sample"), view="head", layer=LAYER, head=HEAD, text=ENGLISH)
    page.locator("[data-token='3']").click()
    until_state(page, q="3")
    page.click(focus("path-whatif"))
    page.wait_for_selector(VIEWS["whatif"])
    steps = page.evaluate("history.length")
    box = page.locator(focus("scale")).bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.5, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.72, middle, steps=8)
    page.mouse.up()
    until_state(page, rule="custom")
    page.click(focus("rule-none"))
    until_state(page, rule="none")
    assert page.evaluate("history.length") == steps
    page.go_back()  # neither was a step: the level is left at once
    until_state(page, view="head", q="3", rule=None)
    page.go_back()
    until_state(page, view="head", q=None)


# ------------------------------------------------------------------------------ against NumPy


def row_means(query, key, scale, cap=None, window=None, causal=True):
    """Means over the rows: entropy, largest weight, Σp(1−p). Nothing of scaledot is used."""
    scores = query @ key.T * scale
    if cap is not None:
        scores = cap * np.tanh(scores / cap)
    behind = np.subtract.outer(np.arange(len(query)), np.arange(len(key)))
    if causal:
        scores = np.where(behind < 0, -np.inf, scores)
    if window is not None:
        scores = np.where(behind >= window, -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    entropy = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)
    return [x.mean() for x in (entropy, weights.max(-1), (weights * (1 - weights)).sum(-1))]


D_K, D_MODEL = 32, 128
CONTROLS = {
    "rule=none": {"scale": 1.0},
    "rule=1/d_k": {"scale": 1 / D_K},
    "rule=1/sqrt_d_model": {"scale": 1 / math.sqrt(D_MODEL)},
    "rule=custom&scale=0.4": {"scale": 0.4},
    "temp=0.25": {"temperature": 0.25},
    "temp=3": {"temperature": 3.0},
    "cap=0.5": {"cap": 0.5},
    "mask=none": {"causal": False},
    "mask=window&window=1": {"window": 1},
    "mask=window&window=4": {"window": 4},
    "rule=none&temp=2&cap=6&mask=window&window=5":
        {"scale": 1.0, "temperature": 2.0, "cap": 6.0, "window": 5},
}  # fmt: skip


@pytest.mark.parametrize("shown", ["", "&range=one&centre=1"])
def test_every_control_gives_what_numpy_gives(served, opened, shown):
    """Range and centre change colours only: softmax does not see what is taken off a row."""
    address = served("sample")
    page = opened(address, view="whatif", layer=LAYER, head=HEAD, text=ENGLISH)
    told = text_of(page, address, ENGLISH)
    query, key, _ = (x[0].numpy() for x in inputs(page, address, told, LAYER, HEAD))
    assert query.shape[-1] == D_K
    seen = []
    for settings, change in CONTROLS.items():
        place = urlencode({"view": "whatif", "layer": LAYER, "head": HEAD, "text": ENGLISH})
        page.evaluate("x => { location.hash = x; }", f"{place}&{settings}{shown}")
        change = {"scale": told["layers"][LAYER]["scale"], **change}
        change["scale"] /= change.pop("temperature", 1.0)
        wanted = row_means(query, key, **change)
        until(page, f"Math.abs(document.querySelector('[data-largest]')?.dataset.largest - "
              f"{wanted[1]}) < 1e-6")  # fmt: skip
        close([numbers(page, "[data-entropy]", f"data-{x}")[0]
               for x in ("entropy", "largest", "gradient")], wanted)  # fmt: skip
        seen.append(tuple(wanted))
    assert len({*seen}) == len(CONTROLS)  # no control stood still


# ------------------------------------------------------------------------------ a report


def test_a_layer_of_a_report_draws_the_heads_that_are_there(opened, tmp_path):
    loaded = load()
    path = tmp_path / "report.html"
    scaledot.audit(loaded.model, loaded.tokenizer, ENGLISH).save(path)
    html = path.read_text(encoding="utf-8")
    name = '/1/2":'
    assert html.count(name) == 1
    # One head is taken out of the file, as where its budget holds no more.
    path.write_text(html.replace(name, '/9/9":'), encoding="utf-8")
    page = opened(path.as_uri(), offline=True, view="layer", layer=1, expects=VIEWS["layer"])
    assert "1 of 4 heads" in page.inner_text(".layer-picture")
    assert page.locator(".layer-head").count() == 4
    assert "–" in page.inner_text(focus("layer-head-2"))
    assert "–" not in page.inner_text(focus("layer-head-1"))
    page.click(focus("path-head"))
    page.wait_for_selector(VIEWS["head"])
    page.keyboard.press("]")
    page.keyboard.press("]")
    page.locator("#view", has_text="does not hold this head").wait_for()
