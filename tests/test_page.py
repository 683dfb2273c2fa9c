"""The page for everybody: languages, widths, themes, screen readers; as a report, in a notebook."""

import json
import re

import pytest
import torch

import scaledot
from browsing import (
    AXE,
    ENGLISH,
    HOSTILE,
    JAPANESE,
    ROOT,
    VIEWS,
    focus,
    missing,
    numbers,
    state_of,
    text_of,
    until,
    until_state,
)
from scaledot import prefill
from scaledot.loading import load
from test_prefill import mistral, sample_text

WORDS = r"""() => {
    const own = ".tokens, textarea, .tab, code, .brand, .model-name, [lang=en], .examples";
    const said = [];
    for (const x of document.querySelectorAll("body *")) {
        if (x.closest(own) || x.closest("#announcer, script, style, noscript")) continue;
        for (const y of x.childNodes) if (y.nodeType === 3) said.push(y.data);
        for (const name of ["aria-label", "aria-roledescription", "placeholder", "aria-valuetext"])
            if (x.hasAttribute(name)) said.push(x.getAttribute(name));
    }
    return said;
}"""


def test_japanese_leaves_no_english_word(served, opened):
    catalogue = ROOT / "src" / "scaledot" / "web" / "messages.ja.json"
    japanese = " ".join(json.loads(catalogue.read_text(encoding="utf-8")).values())
    address = served("sample")
    page = opened(address, text=JAPANESE)
    predicted = text_of(page, address, JAPANESE)["next"]["tokens"]
    own = " ".join(["embedded sample SVG PNG", *(label for label, _ in predicted)])
    known = {*re.findall("[A-Za-z]{3,}", f"{japanese} {own}")}
    for view, shown in VIEWS.items():
        page.click(focus(f"path-{view}"))
        page.wait_for_selector(shown)
        page.click(focus("lang-ja"))
        until(page, "document.documentElement.lang", "ja")
        page.wait_for_selector(shown)
        said = page.evaluate(WORDS)
        words = {x for text in said for x in re.findall("[A-Za-z]{3,}", text)}
        assert words - known == set()
        assert re.search("[ぁ-ん]", page.inner_text("main"))
        page.click(focus("lang-en"))
        until(page, "document.documentElement.lang", "en")
        page.wait_for_selector(shown)
        left = [x for x in page.evaluate(WORDS) if re.search("[ぁ-ん]{2,}", x)]
        assert all(x in JAPANESE or "日本語" in x for x in left), left


SIZES = [(360, "dark", "ja"), (360, "light", "en"), (1280, "dark", "en"), (2560, "light", "ja")]


@pytest.mark.parametrize(("width", "theme", "lang"), SIZES)
def test_every_width_and_theme_holds_the_page(served, opened, width, theme, lang):
    page = opened(
        served("sample"), width, text=ENGLISH, layer=1, head=2, lang=lang, color_scheme=theme,
        reduced_motion="reduce",
    )  # fmt: skip
    for view, shown in VIEWS.items():
        page.click(focus(f"path-{view}"))
        page.wait_for_selector(shown)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, view
        assert page.evaluate("document.documentElement.dataset.theme") == theme
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 200) == (theme == "dark")
        moving = page.evaluate(
            "[...document.querySelectorAll('*')].filter(x => "
            "parseFloat(getComputedStyle(x).transitionDuration) > 0.001 || "
            "parseFloat(getComputedStyle(x).animationDuration) > 0.001).length"
        )
        assert moving == 0
    page.emulate_media(media="print")
    until(page, "document.documentElement.dataset.theme", "light")
    page.wait_for_selector(VIEWS["whatif"])
    assert page.pdf().startswith(b"%PDF")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("width", "lang"), [(360, "ja"), (1280, "en")])
def test_axe_finds_nothing_serious(served, opened, width, lang, theme):
    if not AXE.exists():
        missing("axe-core is missing: npm ci")
    axe = AXE.read_text(encoding="utf-8")
    page = opened(served("sample"), width, text=HOSTILE, layer=1, head=2, lang=lang, theme=theme)
    page.evaluate(axe)
    for view, shown in VIEWS.items():
        page.click(focus(f"path-{view}"))
        page.wait_for_selector(shown)
        found = page.evaluate("axe.run().then(x => x.violations.map(y => [y.impact, y.id, "
                              "y.nodes.slice(0, 3).map(z => z.html)]))")  # fmt: skip
        assert not [x for x in found if x[0] in ("serious", "critical")], view


# ------------------------------------------------------------------------------ without a server


def test_a_report_asks_for_nothing(opened, tmp_path):
    loaded = load()
    report = scaledot.audit(loaded.model, loaded.tokenizer, f"{ENGLISH} {HOSTILE}")
    path = tmp_path / "report.html"
    report.save(path)
    assert path.stat().st_size < 450_000
    page = opened(path.as_uri(), offline=True, expects=VIEWS["model"])
    assert len(numbers(page, ".grid-cell")) == 16
    page.click("[data-layer='1'][data-head='2']")
    for view in ("head", "whatif", "layer"):
        page.click(focus(f"path-{view}"))
        page.wait_for_selector(VIEWS[view])
    page.wait_for_selector(".layer-result")
    assert "not in this report" in page.inner_text(".layer-result")
    page.click(focus("path-whatif"))
    page.click(focus("rule-none"))
    until_state(page, rule="none", view="whatif")
    assert page.evaluate("document.querySelector('#typed').readOnly")
    again = opened(page.url.replace("#", "#lang=ja&"), offline=True, expects=VIEWS["whatif"])
    assert again.evaluate("document.documentElement.lang") == "ja"
    assert state_of(again)["rule"] == "none"
    assert page.evaluate("globalThis.ran ?? document.querySelectorAll('img').length") == 0


def test_a_report_says_how_its_text_ran(opened, tmp_path, monkeypatch):
    """Longer than the model was made for, or in parts for want of memory: in both languages."""
    loaded = load()
    run = {"max_tokens": 300, "quick": True}
    monkeypatch.setattr(prefill, "CHUNK", 64)
    small = prefill.activations(loaded.model, 64) + prefill.cache_bytes(loaded.model, 256)
    monkeypatch.setattr(prefill, "free", lambda _: small)
    in_parts = scaledot.audit(loaded.model, loaded.tokenizer, sample_text(), **run)
    monkeypatch.undo()
    model = mistral()
    model.embed_tokens = torch.nn.Embedding(len(loaded.tokenizer), 32)
    beyond = scaledot.audit(model, loaded.tokenizer, sample_text(), context=300, **run)
    plain = scaledot.audit(loaded.model, loaded.tokenizer, sample_text(), **run)
    en = [
        "The text ran in parts of 64 tokens, without bf16_cost_centred.",
        "The longest window has 300 tokens, the model was made for 256: this is extrapolation.",
    ]
    ja = [
        "文章は 64 トークンずつに分けて測定しました（bf16_cost_centred は除く）。",
        "最も長い窓は 300 トークンで、モデルが想定する 256 トークンを超える外挿です。",
    ]
    for i, audit in enumerate((in_parts, beyond, plain)):
        path = tmp_path / f"{i}.html"
        audit.save(path)
        for lang, sentences in (("en", en), ("ja", ja)):
            page = opened(path.as_uri(), offline=True, expects=VIEWS["model"], lang=lang)
            said = page.inner_text("#under-text .note")
            assert [x for x in sentences if x in said] == sentences[i : i + 1]


def test_frames_of_a_notebook_stand_beside_each_other(opened, tmp_path):
    loaded = load()
    with torch.no_grad(), scaledot.observe(loaded.model, keep="qk") as seen:
        loaded.model(**loaded.tokenizer(ENGLISH, return_tensors="pt"))
    trace = seen.trace(list(seen.heads)[1], head=2)
    path = tmp_path / "notebook.html"
    frames = "".join(x._repr_html_() for x in (seen, trace, seen))
    path.write_text(f"<!doctype html><meta charset=utf-8>{frames}", encoding="utf-8")
    page = opened(path.as_uri(), offline=True, framed=True)
    assert page.locator("iframe").count() == 3
    for frame in page.locator("iframe").all():
        frame.scroll_into_view_if_needed()
        inside = frame.content_frame
        inside.locator(VIEWS["model"]).first.wait_for()
        inside.locator(focus("path-whatif")).click()
        inside.locator(VIEWS["whatif"]).first.wait_for()
        inside.locator(focus("rule-none")).click()
        inside.locator(f"{focus('rule-none')}[aria-pressed=true]").wait_for()
