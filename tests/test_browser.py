"""The page in a browser, served by `scaledot explore`: typed into, moved, compared with `trace`."""

import math
import re
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

import pytest
import torch

import scaledot
from browsing import (
    ENGLISH,
    HOSTILE,
    JAPANESE,
    LONG,
    STAGES,
    STATISTICS,
    TYPED,
    VIEWS,
    close,
    focus,
    given,
    inputs,
    numbers,
    state_of,
    text_of,
    type_text,
    until,
    until_state,
)
from scaledot.loading import load


@pytest.mark.parametrize("text", [TYPED, JAPANESE, "🙂 👩‍👩‍👧 🇯🇵", "שלום world مرحبا", HOSTILE])
def test_a_typed_text_is_shown_as_it_is_and_never_run(served, opened, text):
    address = served("sample")
    page = opened(address)
    type_text(page, text, enter=text != TYPED)  # it is measured when typing stops, too
    told = text_of(page, address, text)
    wanted = load().tokenizer(text)["input_ids"]
    assert len(told["tokens"]) == len(wanted)
    assert page.inner_text("#text-note").startswith(f"{len(wanted)} tokens")
    assert page.input_value("#typed") == text
    shown = "".join(page.locator(".tokens .token").all_text_contents())
    assert re.sub(r"[␣ ]", "", shown) == text.replace(" ", "")
    for view in ("head", "layer", "whatif"):
        page.click(focus(f"path-{view}"))
        page.wait_for_selector(VIEWS[view])
    assert page.evaluate("globalThis.ran ?? document.querySelectorAll('img').length") == 0
    assert "undefined" not in page.inner_text("body")


@pytest.mark.parametrize(
    ("model", "text", "layer", "head", "q", "k"),
    [
        ("sample", ENGLISH, 1, 2, 10, 4),
        ("sample", JAPANESE, 0, 1, 30, 7),
        ("sample", "🙂 שלום", 3, 0, 9, 9),
        ("sample", LONG, 2, 1, 150, 41),  # an overview and a tile
        ("minilm", ENGLISH, 0, 2, 5, 4),
        ("minilm", ENGLISH, 4, 11, 12, 0),
    ],
)
def test_every_number_of_a_head_is_that_of_trace(served, opened, model, text, layer, head, q, k):
    address = served(model)
    page = opened(address, view="head", layer=layer, head=head, q=q, k=k, text=text)
    told = text_of(page, address, text)
    found = told["layers"][layer]
    assert found["mask"]["kind"] == ("causal" if model == "sample" else "none")
    qkv = inputs(page, address, told, layer, head)
    causal = found["mask"]["kind"] == "causal"
    trace = scaledot.trace(*qkv, is_causal=causal, scale=found["scale"])
    stages = [getattr(trace, x)[0] for x in STAGES]
    cells = [x[q, 0 if x is stages[-1] else k] for x in stages]
    close(numbers(page, ".readout"), cells)
    seen = trace.masked[0] > -math.inf
    whole = [x[seen] if i in (2, 3) else x.flatten() for i, x in enumerate(stages)]
    close(numbers(page, ".moments", "data-mean"), [x.mean() for x in whole])
    close(numbers(page, ".moments", "data-sd"), [x.std(correction=0) for x in whole])
    rows, scale = trace.rows, found["scale"]
    entropy, trail, var = rows.entropy[0], rows.jacobian_trace[0], rows.score_var[0]
    largest = trace.weights[0].amax(-1)
    close(numbers(page, ".number-row"), [
        entropy[q], entropy[q].exp(), largest[q], trail[q], var[q] / scale**2, var[q],
    ])  # fmt: skip
    spread = trace.scaled[0][seen].var(correction=0)
    close(numbers(page, ".number-mean"), [
        entropy.mean(), entropy.mean().exp(), largest.mean(), trail.mean(), spread / scale**2,
        spread,
    ])  # fmt: skip


@pytest.mark.parametrize("model", ["sample", "minilm"])
def test_the_grid_shows_what_observe_measures(served, opened, model):
    """The model runs here a second time: what the server sends is not asked."""
    address = served(model)
    page = opened(address, text=ENGLISH)
    loaded = load(*given(model))
    with torch.no_grad(), scaledot.observe(loaded.model, keep="qk") as seen:
        loaded.model(**loaded.tokenizer(ENGLISH, return_tensors="pt"))
    stats = list(seen.heads.values())
    measured = {
        "variance": [x.scaled.var for x in stats],
        "entropy": [x.measures["normalised_entropy"].average for x in stats],
        "gradient": [x.measures["jacobian_trace"].average for x in stats],
        "max_score": [x.measures["max_score"].maximum for x in stats],
        # The heaviest key's weight is 1/(1 + r), r = e^−margin the mass of all others over its own.
        "largest": [
            seen.kept(path).rows.top_margin[0].double().sigmoid().nanmean(-1) for path in seen.heads
        ],
    }
    for statistic, wanted in measured.items():
        page.click(focus(f"stat-{statistic}"))
        close(numbers(page, ".grid-cell"), torch.cat(wanted))
        page.click(focus("sort"))
        rows = torch.tensor(numbers(page, ".grid-cell")).reshape(len(stats), -1)
        assert rows.equal(rows.sort(dim=-1, descending=True).values)
        page.click(focus("sort"))
    page.click(focus("stat-role"))
    shown = page.locator(".grid-cell").all_inner_texts()
    strongest = [
        x["role"] for layer in text_of(page, address, ENGLISH)["layers"] for x in layer["heads"]
    ]
    assert any(strongest)
    # Behind its name a cell says its letter, if any, and a finding's number.
    said = [re.findall(r"\b[A-Z]\b", x.partition("\n")[2]) for x in shown]
    assert said == [[x["letter"]] if x else [] for x in strongest]


OUT = {"sample": lambda m: m.h[1].attn.c_proj,
       "minilm": lambda m: m.encoder.layer[1].attention.output.dense}  # fmt: skip


@pytest.mark.parametrize("model", ["sample", "minilm"])
def test_the_result_of_w_o_is_the_module_s_own(served, opened, model):
    """What torch's module gives is listened to here; the server is not asked."""
    page = opened(served(model), view="layer", layer=1, q=3, text=ENGLISH)
    loaded, given_out = load(*given(model)), []
    module = OUT[model](loaded.model)
    module.register_forward_hook(lambda _, args, out: given_out.append(out[0].double()))
    with torch.no_grad(), scaledot.observe(loaded.model):
        loaded.model(**loaded.tokenizer(ENGLISH, return_tensors="pt"))
    result = given_out[0]
    readout = ".layer-result .readout"
    page.wait_for_selector(readout)
    assert page.inner_text(".layer-result .note") == "The module’s bias is included."
    dimension = int(result[3].abs().argmax())
    assert numbers(page, readout, "data-dimension") == [dimension]
    close(numbers(page, readout), [result[3, dimension]])
    page.focus(focus("layer-result"))
    for key in ("Home", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    until_state(page, q="4")
    until(page, "document.activeElement.dataset.focus", "layer-result")
    close(numbers(page, readout), [result[4, 1]])
    box = page.locator(focus("layer-result")).bounding_box()
    at = (2.5 / result.shape[1], 7.5 / len(result))
    page.mouse.move(box["x"] + at[0] * box["width"], box["y"] + at[1] * box["height"])
    close(numbers(page, readout), [result[7, 2]])
    page.click(focus("save"))
    with page.expect_download() as saved:
        page.click(focus("save-svg"))
    # The chosen row is framed in every head's map and in the result's.
    frames = Path(saved.value.path()).read_text("utf-8").upper().count('STROKE="#B0125B"')
    assert frames == page.locator(".layer-head").count() + 1


WHAT_IF = {
    "rule=none": {"scale": 1.0},
    "rule=1/d_k": {"scale": 1 / 32},
    "rule=custom&scale=0.02": {"scale": 0.02},
    "temp=2.5": {"temperature": 2.5},
    "cap=3": {"softcap": 3.0},
    "mask=window&window=3&cap=8": {"softcap": 8.0, "window": 3},
    "mask=none&temp=0.5": {"is_causal": False, "temperature": 0.5},
    "mask=causal": {"is_causal": True},
}


@pytest.mark.parametrize("model", ["sample", "minilm"])
def test_what_if_is_trace_under_other_settings(served, opened, model):
    address = served(model)
    page = opened(address, view="whatif", layer=1, head=2, text=ENGLISH)
    told = text_of(page, address, ENGLISH)
    found = told["layers"][1]
    qkv = inputs(page, address, told, 1, 2)
    limits = set()
    for settings, change in WHAT_IF.items():
        page.evaluate("x => { location.hash = x; }", "#" + urlencode(
            dict(parse_qsl(settings)) | {"view": "whatif", "layer": 1, "head": 2, "text": ENGLISH}
        ))  # fmt: skip
        change = {"scale": found["scale"], "is_causal": model == "sample", **change}
        change["scale"] /= change.pop("temperature", 1.0)
        if "window" in change:
            change["is_causal"] = True
        trace = scaledot.trace(*qkv, **change)
        largest = trace.weights[0].amax(-1).mean()
        until(page, f"Math.abs(document.querySelector('[data-largest]')?.dataset.largest - "
              f"{float(largest)}) < 1e-6")  # fmt: skip
        curves = [numbers(page, "[data-entropy]", f"data-{x}")[0]
                  for x in ("entropy", "largest", "gradient")]  # fmt: skip
        rows = trace.rows
        close(curves, [rows.entropy[0].mean(), largest, rows.jacobian_trace[0].mean()])
        # A panel's axes stay where they are, whatever moves.
        ends = page.locator(".scale-ticks").inner_text()
        limits.add(ends)
    assert len(limits) == 1
    page.wait_for_selector(VIEWS["whatif"])
    measured = numbers(page, "[data-panel=chance] .figure", "data-sd")
    for d_k, sd in zip((4, 16, 64, 256, 1024), measured, strict=True):
        assert abs(sd / math.sqrt(d_k) - 1) < 5 * math.sqrt(1 / 5000 + 3 / 5000 / d_k), d_k


# ------------------------------------------------------------------------------ moving it


def test_every_control_moves_and_the_address_restores_it(served, opened):
    address = served("sample")
    page = opened(address, text=ENGLISH)
    for statistic in STATISTICS:
        page.click(focus(f"stat-{statistic}"))
        assert page.get_attribute(focus(f"stat-{statistic}"), "aria-pressed") == "true"
    page.click(focus("sort"))
    until_state(page, stat="role", sort="value")
    page.click("[data-layer='1'][data-head='2']")
    page.wait_for_selector(VIEWS["head"])
    page.click(focus("toggle-one_range"))
    page.click(focus("toggle-centre"))
    page.locator(focus("within")).click()
    page.focus(focus("matrix-weights"))
    page.keyboard.press("Home")
    until_state(page, view="head", layer="1", head="2", range="one", centre="1", k="0")
    for key, stage in zip("12345", STAGES, strict=True):
        page.keyboard.press(key)
        until(page, "document.activeElement.dataset.focus", f"matrix-{stage}")
    page.keyboard.press("]")
    until_state(page, head="3", stage="output")
    page.keyboard.press("}")
    until_state(page, layer="2")
    page.keyboard.press("{")
    page.keyboard.press("[")
    until_state(page, layer="1", head="2")
    page.click(focus("path-whatif"))
    page.wait_for_selector(VIEWS["whatif"])
    seen = set()

    def moved(**wanted):
        """The state is as wanted, and the curves show something that was not there before."""
        until_state(page, **wanted)
        now = tuple(numbers(page, "[data-entropy]", x)[0] for x in ("data-entropy", "data-largest"))
        assert now not in seen
        seen.add(now)

    moved()
    page.focus(focus("scale"))
    page.keyboard.press("ArrowRight")
    until_state(page, rule="custom")
    box = page.locator(focus("scale")).bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + box["height"] / 2, steps=4)
    page.mouse.up()
    moved(rule="custom")
    for rule in ("1/d_k", "1/sqrt_d_model", "none"):
        page.click(focus(f"rule-{rule}"))
        moved(rule=rule)
    page.focus(focus("temperature"))
    page.keyboard.press("PageUp")
    moved(rule="none")
    page.focus(focus("cap"))
    page.keyboard.press("PageDown")
    moved(rule="none")
    page.click(focus("mask-none"))
    moved(mask="none")
    page.click(focus("mask-window"))
    page.fill(focus("window"), "3")
    page.keyboard.press("Enter")
    moved(mask="window", window="3")
    before = page.input_value(focus("seed"))
    page.click(focus("again"))
    assert page.input_value(focus("seed")) == str(int(before) + 1)
    page.fill(focus("seed"), "7")
    page.keyboard.press("Enter")
    until_state(page, seed="7")
    until(page, "document.querySelectorAll('[data-panel=chance] .figure[data-sd]').length", 5)
    state = state_of(page)
    assert {"temp", "cap"} <= state.keys()
    curves = numbers(page, "[data-entropy]", "data-entropy")
    again = opened(address, expects=VIEWS["whatif"], **state)
    assert state_of(again) == state
    assert numbers(again, "[data-entropy]", "data-entropy") == curves
    assert again.input_value(focus("seed")) == "7"
    assert again.inner_text(".whatif-formula") == page.inner_text(".whatif-formula")
    page.click(focus("reset"))
    until_state(page, rule=None, temp=None, cap=None, mask=None)
    for theme in ("dark", "light"):
        page.click(focus("theme"))
        until(page, "document.documentElement.dataset.theme", theme)
    page.click(focus("path-layer"))
    page.wait_for_selector(VIEWS["layer"])
    page.click(focus("layer-head-3"), position={"x": 8, "y": 8})
    until_state(page, view="layer", head="3")


def test_back_undoes_a_level_a_cell_and_a_text(served, opened):
    page = opened(served("sample"), text=ENGLISH)
    page.click("[data-layer='2'][data-head='1']")
    page.wait_for_selector(VIEWS["head"])
    page.locator("[data-token='3']").click()
    until_state(page, q="3")
    type_text(page, "The light and the darkness.")
    page.go_back()
    until_state(page, text=ENGLISH, q="3")
    until(page, "document.querySelector('#typed').value", ENGLISH)
    page.go_back()
    until_state(page, q=None, view="head")
    page.go_back()
    until_state(page, view=None, text=ENGLISH)
    page.wait_for_selector(VIEWS["model"])
    page.go_forward()
    until_state(page, view="head", layer="2", head="1")


def test_the_keyboard_alone_reaches_everything(served, opened):
    page = opened(served("sample"), text=ENGLISH)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "skip"
    walked = []
    while (name := page.evaluate("document.activeElement.dataset.focus")) != "grid-cell":
        walked.append(name)
        assert len(walked) < 60
        page.keyboard.press("Tab")
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        if page.evaluate("document.activeElement.dataset.focus"):
            assert page.evaluate(outline) != "none", walked
    assert {"path-head", "save", "theme", "lang-ja", "stat-variance", "sort"} <= {*walked}
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert "layer" in page.inner_text("#announcer")
    state = state_of(page)
    page.keyboard.press("Enter")
    until_state(page, view="head", layer=state["layer"], head=state["head"])
    page.wait_for_selector(VIEWS["head"])
    while page.evaluate("document.activeElement.dataset.focus") != "matrix-scores":
        page.keyboard.press("Tab")
    for key in ("ArrowUp", "ArrowUp", "Home", "ArrowRight"):
        page.keyboard.press(key)
    assert re.search(r"score .+ scaled .+ weight", page.inner_text("#announcer"))
    page.keyboard.press("Enter")
    until_state(page, k="1")
    page.keyboard.press("?")
    until(page, "document.querySelector('#keys').open")
    assert "PageUp" in page.inner_text("#keys").replace(" ", "")
    page.keyboard.press("Escape")
    until(page, "document.querySelector('#keys').open", False)
    for view in ("layer", None):
        page.keyboard.press("Escape")
        until_state(page, view=view)


def test_texts_are_kept_and_compared(served, opened):
    page = opened(served("sample"), text=ENGLISH)
    page.click(focus("keep"))
    type_text(page, "The light and the darkness.")
    page.wait_for_selector(focus("text-1"))
    page.click(focus("compare"))
    until(page, "document.querySelectorAll('.beside .grid-cell').length > 16")
    page.click(focus("text-0"))
    page.wait_for_selector(f"{focus('text-0')}[aria-pressed=true]")
    assert page.locator(".beside .grid-cell").count() > 16
    assert page.locator(".tokens").inner_text().startswith("In the")


def test_layers_fill_in_while_a_text_is_measured(served, opened):
    """The server's answers are held back here, as a slow model would."""
    address = served("sample")
    page = opened(address, text=ENGLISH)
    layers = text_of(page, address, ENGLISH)["layers"]
    held, done, asked = [], [0], []

    def progress(route):
        first = int(route.request.url.partition("first=")[2])
        asked.append(first)
        route.fulfill(json={"layers": done[0], "of": 4, "seconds": 1.0,
                            "measured": layers[first : done[0]]})  # fmt: skip

    page.route("**/api/texts", lambda route: held.append(route))
    page.route("**/api/progress*", progress)
    page.route("**/api/stop", lambda route: (route.fulfill(json={}), held[0].continue_()))
    page.focus("#typed")
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(f"{TYPED} Amen.")  # in no other test: the server keeps texts
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#progress button")
    assert page.locator(".progress-grid").count() == 0
    for n in (1, 3):
        done[0] = n
        page.wait_for_selector(f".progress-grid[data-layers='{n}']")
        cells = page.locator(".progress-grid rect").evaluate_all(
            "all => all.map(x => x.getAttribute('fill'))"
        )
        drawn = [x not in (None, "none") for x in cells]
        assert drawn == [True] * 4 * n + [False] * 4 * (4 - n)
        assert f"Layer {n} of 4" in page.inner_text("#progress")
        assert "s left" in page.inner_text("#progress")
    assert 1 in asked  # what is there is not sent again
    assert page.inner_text(focus("stop")) == "Stop and keep these 3"
    page.click(focus("stop"))
    page.wait_for_selector("#text-note:not(:empty)")
    assert page.locator("#progress").count() == 0


def test_what_cannot_be_measured_is_said_and_what_was_there_stays(served, opened):
    address = served("sample")
    page = opened(address, text=ENGLISH)
    page.fill("#typed", "a" * (1 << 19))
    page.locator("[role=alert]", has_text="too long").wait_for()
    assert page.locator(".grid-cell").count() >= 16
    page.fill("#typed", " ")
    page.locator("[role=alert]", has_text="empty").wait_for()
    page.context.set_offline(True)
    page.fill("#typed", "Nobody answers.")
    page.locator("[role=alert]", has_text="does not answer").wait_for()
    page.context.set_offline(False)
    type_text(page, "Now somebody answers.")
    assert page.locator("[role=alert]").count() == 0
    page.fill("#typed", "")
    page.locator(".examples button").first.click()
    page.wait_for_selector(VIEWS["model"])


def test_a_text_too_long_for_the_address_stays_when_it_is_edited(served, opened):
    page = opened(served("sample"), text=ENGLISH)
    long = ENGLISH * 40
    page.fill("#typed", long)
    page.keyboard.press("Control+Enter")
    until_state(page, text=None)
    page.wait_for_selector("#text-note:not(:empty)")
    page.evaluate("location.hash = 'view=layer&layer=1'")
    page.wait_for_selector(VIEWS["layer"])
    assert page.input_value("#typed") == long
    page.go_back()
    until(page, "document.querySelector('#typed').value", long)
    page.go_back()
    until(page, "document.querySelector('#typed').value", ENGLISH)


def test_a_value_is_copied(served, opened):
    page = opened(served("sample"), view="head", layer=1, head=2, q=4, k=1, text=ENGLISH)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.focus(focus("matrix-scaled"))
    page.keyboard.press("c")
    until(page, "document.querySelector('#announcer').textContent.startsWith('Copied')")
    told = text_of(page, page.url.partition("#")[0], ENGLISH)
    query, key, _ = inputs(page, page.url.partition("#")[0], told, 1, 2)
    scaled = told["layers"][1]["scale"] * (query[0, 4] @ key[0, 1])
    close([float(page.evaluate("navigator.clipboard.readText()"))], [scaled])


def test_a_text_that_the_server_forgot_is_sent_again(served, opened):
    address = served("sample")
    page = opened(address, text=ENGLISH)
    for i in range(9):  # it keeps eight
        sent = page.request.post(f"{address}api/texts", data={"text": f"Text number {i} of nine."})
        assert sent.ok
    page.click("[data-layer='2'][data-head='1']")
    page.wait_for_selector(VIEWS["head"])
    assert page.locator("[role=alert], .problem").count() == 0
    assert text_of(page, address, ENGLISH)


def test_pictures_are_saved(served, opened):
    page = opened(served("sample"), view="head", layer=1, head=2, text=HOSTILE)
    page.focus(focus("matrix-weights"))
    page.click(focus("save"))
    for kind, start in (("svg", b"<svg"), ("png", b"\x89PNG")):
        with page.expect_download() as saved:
            page.click(focus(f"save-{kind}"))
        content = Path(saved.value.path()).read_bytes()
        assert content.lstrip().startswith(start)
        assert saved.value.suggested_filename == f"scaledot-layer1-head2-weights.{kind}"
        if kind == "svg":
            assert b"<img" not in content
            assert b"<script" not in content


def test_a_telephone_has_every_control(served, opened):
    page = opened(served("sample"), 360, text=ENGLISH, has_touch=True, is_mobile=True)
    page.select_option(focus("stat-menu"), "entropy")
    until_state(page, stat="entropy")
    page.click("[data-layer='1'][data-head='2']")
    page.wait_for_selector(VIEWS["head"])
    for stage in STAGES:
        page.click(focus(f"stage-{stage}"))
        page.wait_for_selector(focus(f"matrix-{stage}"))
    page.click(focus("step-ArrowUp"))
    until_state(page, q="15")
    assert "tokens" in page.inner_text("#text-note")
    page.click(focus("more"))
    page.click(focus("theme"))
    until(page, "document.documentElement.dataset.theme", "dark")
    page.click(focus("path-whatif"))
    page.wait_for_selector(VIEWS["whatif"])
    assert page.locator("[data-panel=chance] .figure").count() == 3
    page.click(focus("step-ArrowLeft"))
    assert "k" in state_of(page)
