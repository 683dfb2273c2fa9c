"""The page as one file: nothing in it can end it, run in it, or be asked for by it."""

import base64
import gzip
import hashlib
import html
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
import torch

import scaledot
from scaledot import ScaledotError, report
from scaledot.loading import load
from scaledot.page_document import FRAMED, report_document
from scaledot.report import bundle, frame, page, still

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)><!-- --!> ]]> \u2028"

INDEX = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>scaledot</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="style.css">
<link rel="stylesheet" href="timeline.css">
<script type="module" src="page.js"></script>
</head>
<body></body>
</html>
"""


@pytest.fixture(autouse=True)
def web(tmp_path, monkeypatch):
    """A small page in place of the real one."""
    folder = tmp_path / "web"
    folder.mkdir()
    (folder / "index.html").write_text(INDEX)
    (folder / "style.css").write_text("body { margin: 0 }\n")
    (folder / "words.js").write_text("export const greeting = 'grüße';\n")
    (folder / "app.js").write_text(
        'import { greeting } from "./words.js";\n\ndocument.title = greeting;\n'
    )
    (folder / "messages.en.json").write_text('{"a": "<b>"}\n')
    (folder / "messages.ja.json").write_text('{"a": "あ"}\n', encoding="utf-8")
    monkeypatch.setattr(report, "WEB", folder)
    return folder


@pytest.fixture(scope="module")
def audit():
    loaded = load()
    return scaledot.audit(
        loaded.model, loaded.tokenizer, [HOSTILE * 3, "Another."], name=loaded.name
    )


class Elements(HTMLParser):
    """Every element with its attributes and text."""

    def __init__(self, text):
        super().__init__(convert_charrefs=False)
        self.found = []
        self.inside = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append([tag, dict(attrs), ""])
        self.inside = True

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.found[-1][2] += data

    def all(self, tag):
        return [(attrs, text) for name, attrs, text in self.found if name == tag]


# One file


def test_the_page_holds_its_document_and_its_words(audit):
    document = report_document(audit)
    elements = Elements(page(document))
    scripts = elements.all("script")
    assert [a.get("id") for a, _ in scripts] == ["document", "messages-en", "messages-ja", None]
    assert json.loads(scripts[0][1]) == json.loads(json.dumps(document))
    assert json.loads(scripts[1][1]) == {"a": "<b>"}
    assert json.loads(scripts[2][1]) == {"a": "あ"}
    assert "grüße" in scripts[3][1]
    assert scripts[3][0] == {"type": "module"}


def test_hostile_text_is_data_only(audit):
    whole = page(report_document(audit))
    elements = Elements(whole)
    assert not elements.all("img")
    assert len(elements.all("script")) == 4
    assert HOSTILE[:20] not in whole
    shown = json.loads(elements.all("script")[0][1])["texts"][0]
    assert shown["text"].startswith("</script><script>")


def test_lone_surrogates_pass_through():
    document = {"format": "scaledot/page", "texts": [{"text": "a\ud800b"}]}
    whole = page(document)
    whole.encode("utf-8")
    assert json.loads(Elements(whole).all("script")[0][1]) == document


def test_nothing_is_asked_for(audit):
    elements = Elements(page(report_document(audit)))
    for _, attributes, _ in elements.found:
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            assert attributes.get(name, "data:,").startswith("data:")
    assert not re.search(r"https?:|@import|url\(", page({"format": "scaledot/page"}))


def test_only_its_own_script_and_style_may_run(audit):
    elements = Elements(page(report_document(audit)))
    ((attributes, _),) = [
        x for x in elements.all("meta") if x[0].get("http-equiv") == "Content-Security-Policy"
    ]
    policy = dict(part.strip().split(" ", 1) for part in attributes["content"].split(";"))
    assert policy["default-src"] == "'none'"
    assert "unsafe" not in attributes["content"]
    for directive, tag in (("script-src", "script"), ("style-src", "style")):
        text = elements.all(tag)[-1][1]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'"


def test_what_would_end_a_script_is_refused(web):
    (web / "words.js").write_text('export const greeting = "</SCRIPT>";\n')
    with pytest.raises(ValueError, match="would end it inside a page"):
        page({})
    (web / "words.js").write_text("export const greeting = 1;\n")
    (web / "style.css").write_text("a { content: '</style>' }")
    with pytest.raises(ValueError, match=r"style\.css holds '</style'"):
        page({})


def test_an_index_without_its_lines_is_refused(web):
    (web / "index.html").write_text(INDEX.replace("page.js", "main.js"))
    with pytest.raises(ValueError, match="holds 0 of"):
        page({})


# One script


def run(script):
    """What a script prints under node."""
    command = ["node", "--input-type=module", "-"]
    return subprocess.run(
        command, input=script, capture_output=True, text=True, check=True
    ).stdout.split()


def test_modules_become_one_script_that_does_the_same():
    sources = {
        "app.js": """// The entry.
import { sum } from "./maths.js";
import {
  name,
  twice as double,
} from "./words.js";
import "./effect.js";

/**
 * A comment of its own.
 */
const local = "app's";
const quoted = `/* kept */ // kept`;
console.log(sum(1, 2), name, double(4), globalThis.effect, local, quoted.length);
""",
        "maths.js": """const local = 10;
export function sum(a, b) { // on its line: kept
  return a + b + local;
}
export const unused = 1, other = 2;
""",
        "words.js": """import { sum } from "./maths.js";

const local = "words'";
export const name = "x";
export async function* later() {}
export class Word {}
export function twice(x) {
  return sum(x, x) + local.length;
}
""",
        "effect.js": "globalThis.effect = 'done';\n",
        "forgotten.js": "export const no = 1;\n",
    }
    script = bundle(sources)
    assert "import" not in script
    assert "export" not in script
    assert "A comment" not in script
    assert "forgotten" not in script
    assert run(script) == ["13", "x", "24", "done", "app's", "18"]


def test_a_tightened_script_says_the_same():
    source = """
const text = "a ,  b";
const lines = `one ,
    two  ${ [1, 2].map((x) => `<${ x }>`).join(" , ") }
   three`;

const found = "x , y".replace(/ , /g, ";");
const sum = (a, b = 2) => {
  return a + +b - -a;
};
const one = sum( 1 ) > 3 ? .5 : [ 7 ].length;
for (const x of [text, lines, found, one]) {
  console.log(JSON.stringify(x));
}
"""
    tight = bundle({"app.js": source})
    assert run(tight) == run(source)
    assert len(run(tight)) > 4
    assert "const sum=(a,b=2)=>{\nreturn a + +b - -a;\n};\n" in tight
    assert len(tight) < len(source)


def test_a_packed_style_keeps_its_strings(web, audit):
    (web / "style.css").write_text(
        'a::after , b { content: "; /* x */ }  y" ;  color: red; } /* isn\'t */\n'
    )
    (style,) = (text for _, text in Elements(page(report_document(audit))).all("style"))
    assert style == 'a::after,b{content: "; /* x */ }  y";color: red}'


def test_modules_are_in_the_order_of_their_needs():
    sources = {
        "app.js": 'import { b } from "./b.js";\nimport { a } from "./a.js";\n',
        "a.js": 'import { c } from "./c.js";\nexport const a = c;\n',
        "b.js": 'import { a } from "./a.js";\nexport const b = a;\n',
        "c.js": "export const c = 1;\n",
    }
    assert re.findall(r"const (module_\w+) =", bundle(sources)) == [
        "module_c", "module_a", "module_b"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("export default 1;\n", "app.js: 'export default 1;' cannot be put into one file"),
        ('import x from "./b.js";\n', "cannot be put into one file"),
        ('import * as x from "./b.js";\n', "cannot be put into one file"),
        ('import { x } from "https://cdn.example/x.js";\n', "cannot be put into one file"),
        ("export let x = 1;\n", "cannot be put into one file"),
        ('export { x } from "./b.js";\n', "cannot be put into one file"),
        ('import { z } from "./c.js";\n', "app.js needs z of c.js, which exports x, y"),
        ('import { x } from "./gone.js";\n', "app.js needs gone.js, which is not there"),
        ('import { x } from "./b.js";\n', "a circle of imports: app.js → b.js → app.js"),
    ],
)
def test_what_it_does_not_understand_is_named(source, says):
    sources = {
        "app.js": source,
        "b.js": 'import { y } from "./app.js";\nexport const x = y;\n',
        "c.js": "export const x = 1;\nexport const y = 2, z = 3;\n",
    }
    with pytest.raises(ValueError, match=re.escape(says)):
        bundle(sources)


# In a notebook


def unpacked(shown):
    srcdoc = html.unescape(re.search(r'srcdoc="([^"]*)"', shown)[1])
    return gzip.decompress(base64.b64decode(re.search(r'atob\("([^"]*)"\)', srcdoc)[1])).decode()


def test_a_frame_holds_the_page_and_is_isolated(audit):
    document = report_document(audit, budget=FRAMED)
    shown = frame(document, '"><script>alert(1)</script>')
    ((attributes, _),) = Elements(shown).all("iframe")
    assert attributes["sandbox"] == "allow-scripts allow-downloads"
    assert len(Elements(shown).found) == 1
    assert unpacked(shown) == page(document)
    assert frame(document, "x") == frame(document, "x")


def test_results_show_themselves(audit, web):
    trace = scaledot.trace(torch.eye(3), torch.eye(3), torch.eye(3), tokens=["<b>", "&", '"'])
    layer = torch.nn.TransformerEncoderLayer(16, nhead=2, batch_first=True)
    with scaledot.observe(layer, keep="qk") as seen:
        layer(torch.randn(1, 5, 16))
    for result in (trace, seen, audit):
        elements = Elements(unpacked(result._repr_html_()))
        document = json.loads(elements.all("script")[0][1])
        assert document["format"] == "scaledot/page"
        assert document["included"]["heads"] >= 1
        assert len(result._repr_html_()) < 300_000
    # Three on one page, and again: the same.
    assert trace._repr_html_() == trace._repr_html_()
    tall = scaledot.trace(torch.eye(3), torch.eye(3)[:2])
    assert tall._repr_html_().startswith('<div class="scaledot-trace">')


def test_an_experiment_shows_what_it_prints_and_its_figures(monkeypatch):
    found = scaledot.lab.variance(d_k=(4, 16), trials=50, seed=1)
    shown = found._repr_html_()
    ((attributes, _),) = Elements(shown).all("iframe")
    assert attributes["sandbox"] == ""
    inside = attributes["srcdoc"]
    assert html.unescape(re.search(r"<pre>(.*?)</pre>", inside, re.S)[1]) == str(found)
    picture = re.search(r'src="data:image/svg\+xml;base64,([^"]*)"', inside)[1]
    assert b"<svg" in base64.b64decode(picture)
    assert found._repr_html_() == shown
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "data:image" not in found._repr_html_()
    assert "<pre>" in html.unescape(found._repr_html_())


def test_still_text_is_shown_as_it_is():
    shown = still("t", HOSTILE)
    assert len(Elements(shown).found) == 1
    inside = Elements(Elements(shown).all("iframe")[0][0]["srcdoc"])
    assert {tag for tag, *_ in inside.found} == {"meta", "style", "pre"}


# An audit's


def test_an_audit_s_report_has_its_numbers_over_the_whole_text(audit, tmp_path):
    size = audit.to_html(tmp_path / "report.html")
    data = (tmp_path / "report.html").read_bytes()
    assert len(data) == size
    assert audit.save(tmp_path / "again.html") == size
    assert (tmp_path / "again.html").read_bytes() == data
    document = json.loads(Elements(data.decode()).all("script")[0][1])
    (text,) = document["texts"]
    assert text["measured"] == {
        "texts": 2, "windows": 2, "tokens": audit.text["tokens"], "longest": audit.text["longest"],
        "beyond": None, "chunk": None, "left_out": [],
    }  # fmt: skip
    assert len(text["tokens"]) == 13 < audit.text["tokens"]
    rows = [h for layer in text["layers"] for h in layer["heads"]]
    for head, row in zip(audit.heads, rows, strict=True):
        assert row["score_var"] == pytest.approx(head.after, rel=1e-8)
    assert [f["title"] for f in text["findings"]] == [f.title for f in audit.findings]
    assert document["included"] == {"heads": 16, "of": 16}


def test_as_many_heads_as_fit_those_of_findings_first(audit):
    one = report_document(audit, budget=5000)
    assert one["included"] == {"heads": 1, "of": 16}
    named = next(f.heads[0] for f in audit.findings if f.heads)
    assert set(one["heads"]) == {f"t1/{named[0]}/{named[1]}"}
    arrays = one["heads"].popitem()[1]
    packed = sum(len(arrays[name]["float32"]) for name in ("query", "key", "value"))
    three = report_document(audit, budget=3 * packed)
    assert three["included"]["heads"] == 3
    assert set(three["contributions"]) == {
        f"t1/{layer}" for layer in {int(key.split("/")[1]) for key in three["heads"]}
    }


def test_some_layers_of_an_audit():
    loaded = load()
    found = scaledot.audit(loaded.model, loaded.tokenizer, "In the beginning.", layers=[1, 3])
    document = report_document(found)
    assert [x["index"] for x in document["texts"][0]["layers"]] == [1, 3]
    assert {key.split("/")[1] for key in document["heads"]} == {"1", "3"}


def test_without_an_example_the_report_says_why(audit):
    import dataclasses

    bare = dataclasses.replace(audit, example=None)
    with pytest.raises(ScaledotError, match="no example to show"):
        bare.to_html("unwritten.html")
