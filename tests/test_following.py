"""A training run on the page: in a browser, from one file and from the server while it goes on."""

import json
import re
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from browsing import AXE, ROOT, focus, missing, until, until_state
from forked import SCALEDOT, Forked
from scaledot import ScaledotError, timeline
from scaledot.alarms import Alarm
from scaledot.following import Followed
from scaledot.report import page as report_page
from scaledot.server import Refused
from scaledot.timeline_page import page_document
from scaledot.training import Monitor
from test_page import WORDS
from test_timeline import BLOW, CALM, lines, put

MARK = focus("timeline-mark")
LAST = "document.querySelector('.timeline-top .note').textContent.match(/to (\\d+)/)[1]"
"""The last step that the page says it has."""


def training(path, *, start=0, layers=2, seed=0):
    """A real run, a step at each `next`, that says more and more to every alarm: its queries and
    keys grow. Sent "nan" it looks at a step whose scores are none."""
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(16, nhead=4, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    alarms = [
        Alarm("max_score", above=2.0), Alarm("entropy", below=1.0), Alarm("nonfinite", above=0),
        Alarm("score_var_within", doubles_within=2, then="stop"),
    ]  # fmt: skip
    with Monitor(model, every=1, file=path, alarms=alarms, start=start) as monitor:
        while True:
            loss = model(torch.randn(1, 6, 16)).square().mean()
            monitor.step(loss=loss)
            if (yield monitor.last.step) == "nan":
                nn.init.constant_(model.layers[1].self_attn.in_proj_weight, float("inf"))
            with torch.no_grad():
                for x in model.layers:
                    x.self_attn.in_proj_weight[:32] *= 1.3


@pytest.fixture(scope="module")
def blown_up(tmp_path_factory):
    """Twelve steps of `training`, the last without a finite score, of which a line was cut off, on
    the page of a report."""
    path = tmp_path_factory.mktemp("run") / "run.timeline.jsonl"
    run = training(path)
    for _ in range(11):
        next(run)
    run.send("nan")
    run.close()
    with path.open("a") as file:
        file.write('{"step": 13')
    page = path.with_suffix(".html")
    page.write_text(report_page(page_document(timeline.read(path))), "utf-8")
    return page.as_uri()


# ------------------------------------------------------------------------------ what is answered


def test_the_file_is_read_again_and_a_lost_one_is_said(tmp_path):
    head, *rest = lines()
    path = put(tmp_path, [head, *rest[:2]])
    followed = Followed(path)
    assert followed.document()["timeline"]["steps"] == [1, 10]
    with path.open("a") as file:
        file.write(json.dumps(rest[2]) + "\n" + '{"step": 3')
    told = followed.document()["timeline"]
    assert told["steps"] == [1, 10, 20]
    assert len(told["notes"]) == 1
    path.unlink()
    with pytest.raises(Refused, match="cannot be read any more") as raised:
        followed.document()
    assert raised.value.about == {"id": "missing", "line": 0}
    with pytest.raises(ScaledotError, match="holds no model"):
        followed.put("a text")
    with pytest.raises(ScaledotError, match="no such file"):
        Followed(path)


def test_news_of_a_run_that_goes_on_are_its_new_steps(tmp_path):
    path = tmp_path / "run.timeline.jsonl"
    run = training(path)
    for _ in range(3):
        next(run)
    followed = Followed(path)
    mark = followed.document()["timeline"]["mark"]
    assert followed.news(mark) == {"mark": mark, "notes": []}
    for step in range(4, 9):
        assert next(run) == step
        told = followed.news(mark)
        assert told["steps"] == [step]
        assert {x["step"] for x in told["alarms"]} == {step}
        assert followed.news(mark) == told  # another page may be as far
        mark = told["mark"]
        assert followed.news(mark) == {"mark": mark, "notes": []}
    run.close()
    whole = followed.document()["timeline"]
    assert whole["steps"] == [*range(1, 9)]
    assert whole["mark"] == mark
    for stranger in ("", "x", "x.3", mark + "9", mark.replace(".", ".x")):
        assert followed.news(stranger)["document"]["timeline"] == whole


def test_a_run_that_was_resumed_replaces_its_steps(tmp_path):
    path = tmp_path / "run.timeline.jsonl"
    run = training(path)
    for _ in range(5):
        next(run)
    run.close()
    followed = Followed(path)
    mark = followed.document()["timeline"]["mark"]
    again = training(path, start=3, seed=1)
    assert [next(again), next(again), next(again)] == [4, 5, 6]
    again.close()
    told = followed.news(mark)
    assert told["steps"] == [4, 5, 6]
    assert followed.document()["timeline"]["steps"] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("kept", [1, 40, -3, -1])
def test_half_a_last_line_waits_for_its_rest(tmp_path, kept):
    head, *rest = lines()
    path = put(tmp_path, [head, *rest[:2]])
    followed = Followed(path)
    mark = followed.document()["timeline"]["mark"]
    line = json.dumps(rest[2]) + "\n"
    with path.open("a", buffering=1) as file:
        file.write(line[:kept])
        file.flush()
        told = followed.news(mark)
        if kept == -1:  # all but its end: it is whole
            assert told["steps"] == [20]
        else:
            assert told == {"mark": mark, "notes": [{"id": "torn", "numbers": {"line": 4}}]}
        file.write(line[kept:])
    assert followed.news(mark)["steps"] == [20]
    assert followed.news(mark)["notes"] == []


@pytest.mark.parametrize("how", ["renamed over it", "written anew", "cut", "one digit changed"])
def test_a_file_that_was_replaced_or_cut_is_read_anew(tmp_path, how):
    path = put(tmp_path, lines(CALM)[:6])
    followed = Followed(path)
    mark = followed.document()["timeline"]["mark"]
    if how == "renamed over it":
        other = tmp_path / "other"
        other.write_bytes(path.read_bytes())
        other.replace(path)
    elif how == "written anew":
        path.write_bytes(BLOW.read_bytes())
    elif how == "cut":
        put(tmp_path, lines(CALM)[:4])
    else:
        data = bytearray(path.read_bytes())
        data[data.rindex(b'"loss": ') + len('"loss": ')] ^= 1
        path.write_bytes(data)
    told = followed.news(mark)
    assert told["document"]["timeline"]["steps"] == list(timeline.read(path).steps)
    assert told["document"]["timeline"]["mark"].partition(".")[0] != mark.partition(".")[0]


def test_other_layers_are_another_document(tmp_path):
    path = tmp_path / "run.timeline.jsonl"
    run = training(path)
    next(run)
    followed = Followed(path)
    mark = followed.document()["timeline"]["mark"]
    run.close()
    other = training(path, start=1, layers=3)
    next(other)
    other.close()
    told = followed.news(mark)["document"]["timeline"]
    assert told["steps"] == [2]
    assert len(told["layers"]) == 3
    assert told["notes"] == [{"id": "others", "numbers": {"n": 1, "all": 2}}]


# ------------------------------------------------------------------------------ one file


def test_the_page_shows_the_run_and_keeps_every_choice_in_its_address(tmp_path, browser):
    file = tmp_path / "run.html"
    file.write_text(report_page(page_document(timeline.read(BLOW))), "utf-8")
    opened = browser.new_page(viewport={"width": 360, "height": 800})
    problems, asked = [], []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("request", lambda request: asked.append(request.url))
    last = lines(BLOW)[-1]["heads"]
    try:
        for width in (360, 600, 1280, 2560):
            opened.set_viewport_size({"width": width, "height": 800})
            opened.goto(f"{file.as_uri()}#lang=en")
            opened.wait_for_selector(".timeline-cell")
            assert opened.evaluate("document.documentElement.scrollWidth") == width
        cells = opened.locator(".timeline-cell")
        shown = [float(x.get_attribute("data-value")) for x in cells.all()]
        assert shown == pytest.approx([h for x in last["max_score"] for h in x])
        assert cells.nth(3).get_attribute("aria-selected") == "true"  # 0.3 is the worst
        opened.click("[data-focus=measure-entropy]")
        assert "measure=entropy" in opened.url
        opened.focus("[data-focus=timeline-step]")
        for _ in range(3):
            opened.keyboard.press("ArrowLeft")
        assert "step 270" in opened.inner_text(".timeline-readout")
        opened.wait_for_url(re.compile("step=270"))
        opened.focus(".timeline-cell.picked")
        opened.keyboard.press("ArrowDown")
        assert re.search(r"layer=1&head=3", opened.url)
        assert opened.evaluate("document.activeElement.className") == "timeline-cell picked"
        opened.reload()
        opened.wait_for_selector(".timeline-cell")
        told = lines(BLOW)[-4]["heads"]["entropy"][1][3]
        picked = opened.get_attribute(".timeline-cell.picked", "data-value")
        assert float(picked) == pytest.approx(told)
        opened.click("[data-focus=lang-ja]")
        assert "警報" in opened.inner_text(".timeline-alarms")
        opened.click(".timeline-alarms li:nth-child(3) button")
        assert "step=60" in opened.url
        assert "undefined" not in opened.inner_text("body")
        assert problems == []
        assert all(x.startswith(("file:", "data:", "blob:")) for x in asked)
    finally:
        opened.close()


def test_japanese_leaves_no_english_word_on_a_time_line(opened, blown_up):
    files = (ROOT / "src" / "scaledot" / "web").glob("*.ja.json")
    japanese = " ".join(y for x in files for y in json.loads(x.read_text("utf-8")).values())
    known = {*re.findall("[A-Za-z]{3,}", f"{japanese} TransformerEncoder layers self attn SVG PNG")}
    page = opened(blown_up, offline=True, expects=".timeline-cell", lang="ja")
    page.focus(MARK)  # what an alarm says stands there too
    for step in (1, 6, 12):
        page.evaluate(f"location.hash = 'lang=ja&step={step}'")
        until(page, "document.querySelector('.timeline-heads h2').textContent.includes("
              f"'ステップ {step} ')")  # fmt: skip
        said = page.evaluate(WORDS)
        assert {x for text in said for x in re.findall("[A-Za-z]{3,}", text)} - known == set()
        assert not re.search(r"\{\w+\}|undefined|NaN", " ".join(said))
    alarms = page.inner_text(".timeline-alarms")
    for words in (
        "ステップ 1 と比べて", "向きの一致は", "有限でない行の数が 0 を超えた", "倍になった",
        "直前のステップの最大スコアは", "学習を止める指示が出た",
    ):  # fmt: skip
        assert words in alarms
    assert "書き込みの途中で切れている" in page.inner_text(".timeline-top")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("lang", ["en", "ja"])
@pytest.mark.parametrize("width", [360, 1280])
def test_axe_finds_nothing_serious_on_a_time_line(opened, blown_up, width, lang, theme):
    if not AXE.exists():
        missing("axe-core is missing: npm ci")
    state = {"lang": lang, "theme": theme, "step": 6}
    page = opened(blown_up, width, offline=True, expects=".timeline-cell", **state)
    page.evaluate(AXE.read_text(encoding="utf-8"))
    for marked in (False, True):
        if marked:
            page.focus(MARK)
            page.wait_for_selector(".timeline-tip:visible")
        found = page.evaluate("axe.run().then(x => x.violations.map(y => [y.impact, y.id, "
                              "y.nodes.slice(0, 3).map(z => z.html)]))")  # fmt: skip
        assert not [x for x in found if x[0] in ("moderate", "serious", "critical")]
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_alarms_are_reached_by_the_keyboard_and_said(opened, blown_up):
    page = opened(blown_up, offline=True, expects=".timeline-cell")
    steps = []
    page.focus(focus("measure-gradient"))
    while page.evaluate("document.activeElement.dataset.focus") != "timeline-mark":
        page.keyboard.press("Tab")
        assert len(steps) < 9
        steps.append(1)
    assert len(steps) == 1  # all marks are one stop, after the measures
    tip = ".timeline-tip"
    said = page.evaluate("document.activeElement.ariaLabel")
    for text in (said, page.inner_text(tip)):
        assert text.startswith("Step 12: ")
        assert "Step 12: Rows that are not finite above 0: 6 in head 1.0" in text
    page.keyboard.press("Home")
    first = page.evaluate("document.activeElement.ariaLabel")
    assert first.startswith("Step 1: ")
    shown = page.inner_text(tip)
    for words in re.split(r" · |(?<=\d\)) ", first):
        assert words in re.sub(r"\s+", " ", shown)
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.ariaLabel").startswith("Step 2: ")
    page.keyboard.press("Enter")
    until_state(page, step="2")
    until(page, "document.activeElement.dataset.focus", "timeline-mark")
    assert page.inner_text(tip).startswith("Step 2: ")
    page.keyboard.press("Escape")
    assert not page.is_visible(tip)
    page.keyboard.press("ArrowLeft")
    assert page.inner_text(tip).startswith("Step 1: ")
    page.keyboard.press("Tab")
    page.wait_for_selector(tip, state="hidden")


def test_alarms_are_reached_by_touch_and_by_a_pointer_nearby(opened, blown_up):
    page = opened(blown_up, 360, offline=True, expects=".timeline-cell", has_touch=True,
                  is_mobile=True)  # fmt: skip
    strip = page.locator(".timeline-marks").bounding_box()
    assert strip["height"] >= 36
    at = page.evaluate("[...document.querySelectorAll('.timeline-marks button')].map(x => "
                       "parseFloat(x.style.left))")  # fmt: skip
    page.touchscreen.tap(strip["x"] + at[3] + 4, strip["y"] + 6)
    until_state(page, step="4")
    assert page.inner_text(".timeline-tip").startswith("Step 4: ")
    page.touchscreen.tap(strip["x"] + 8, strip["y"] - 80)
    page.wait_for_selector(".timeline-tip", state="hidden")
    wide = opened(blown_up, offline=True, expects=".timeline-cell")
    strip = wide.locator(".timeline-marks").bounding_box()
    at = wide.evaluate("[...document.querySelectorAll('.timeline-marks button')].map(x => "
                       "parseFloat(x.style.left))")  # fmt: skip
    wide.mouse.move(strip["x"] + at[5], strip["y"] + 20)
    assert wide.inner_text(".timeline-tip").startswith("Step 6: ")
    wide.mouse.move(strip["x"] + at[5], strip["y"] + 45)  # into what it says
    assert wide.is_visible(".timeline-tip")
    wide.mouse.move(strip["x"] + at[5], strip["y"] + 400)
    wide.wait_for_selector(".timeline-tip", state="hidden")


# ------------------------------------------------------------------------------ while it goes on


@contextmanager
def served_run(path):
    """The address of `scaledot explore` for a file."""
    process = Forked(SCALEDOT, "explore", str(path), "--no-open")
    try:
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.communicate(timeout=10)


def test_the_page_grows_with_the_run_and_stays_as_it_was(tmp_path, opened):
    path = tmp_path / "run.timeline.jsonl"
    run = training(path)
    for _ in range(8):
        next(run)
    with served_run(path) as address:
        page = opened(address, expects=".timeline-cell")
        news = []
        page.on("response", lambda x: "api/" in x.url and news.append((x.url, x.text())))
        page.click(".timeline-row:nth-child(3) .timeline-cell:nth-child(2)")
        until_state(page, layer="1", head="0")
        page.evaluate("globalThis.slider = document.querySelector('[data-focus=timeline-step]')")
        slider = page.locator(focus("timeline-step")).bounding_box()
        page.mouse.move(slider["x"] + slider["width"] / 2, slider["y"] + slider["height"] / 2)
        page.mouse.down()
        held = page.locator(".timeline-readout").inner_text()
        until(page, "performance.getEntriesByType('resource').filter(x => "
              "x.name.includes('api/timeline')).length", 1)  # fmt: skip
        for _ in range(4):
            next(run)
        until(page, LAST, "12")
        assert page.locator(".timeline-readout").inner_text() == held
        assert page.evaluate("document.querySelector('[data-focus=timeline-step]') === slider")
        page.mouse.move(slider["x"] + 4, slider["y"] + slider["height"] / 2)
        page.mouse.up()
        until_state(page, step="1", layer="1", head="0")  # it was still in hand
        marks = page.locator(".timeline-marks").bounding_box()
        left = page.evaluate(f"parseFloat(document.querySelector('{MARK}').style.left)")
        page.mouse.move(marks["x"] + left, marks["y"] + 20)
        shown = page.inner_text(".timeline-tip")
        assert shown.startswith("Step 12: ")
        line = path.read_text("utf-8").splitlines()[-1].replace('"step": 12', '"step": 13')
        with path.open("a") as file:
            file.write(line[:100])
            file.flush()
            until(page, "document.querySelectorAll('.timeline-top .note').length", 2)
            assert "Line 14 of the file was cut off" in page.inner_text(".timeline-top")
            file.write(line[100:] + "\n")
        until(page, LAST, "13")
        assert page.inner_text(".timeline-tip") == shown
        assert "cut off" not in page.inner_text(".timeline-top")
        first, *more = [(url, json.loads(x)) for url, x in news]
        assert first[1].keys() == {"mark", "notes"}
        assert all("api/timeline" in url and "document" not in told for url, told in more)
        assert [x["steps"] for _, x in more if "steps" in x] == [[9, 10, 11, 12], [13]]
        assert (
            page.locator(".timeline-cell.picked")
            .get_attribute("aria-label")
            .startswith("layer 1, head 0")
        )

        page.click(focus("lang-ja"))
        moved = path.rename(tmp_path / "away")
        page.locator("[role=alert]", has_text="ファイルを開けなくなりました").wait_for()
        assert page.locator(".timeline-cell").count() == 8
        page.click(focus("lang-en"))
        page.locator("[role=alert]", has_text="cannot be opened any more").wait_for()
        other = training(path, layers=3, seed=5)
        for _ in range(2):
            next(other)
        page.wait_for_selector("[role=alert]", state="detached")
        assert page.evaluate(LAST) == "2"
        assert page.locator(".timeline-cell").count() == 12
        other.close()
        assert moved.exists()
    run.close()
