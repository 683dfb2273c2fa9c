"""A training run on the page: in a browser, from one file and from the server while it goes on."""

import json
import re

import pytest

from scaledot import ScaledotError, timeline
from scaledot.following import Followed
from scaledot.report import page as report_page
from scaledot.server import Refused
from scaledot.timeline_page import page_document
from test_timeline import BLOW, lines, put


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
    with pytest.raises(Refused, match="cannot be read any more"):
        followed.document()
    with pytest.raises(ScaledotError, match="holds no model"):
        followed.put("a text")
    with pytest.raises(ScaledotError, match="no such file"):
        Followed(path)


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
