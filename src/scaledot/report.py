"""The page with its data inside: one .html file that works from anywhere, without a request.

`page` puts the page's own files and a document into one text: styles and one script, whose hashes
its content-security policy names, so that nothing else in the file can run; and data in
<script type="application/json">, every "<" escaped, so that no text can end it. `frame` is the same
for a notebook: isolated, and packed, because a notebook keeps every output.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from scaledot.document import dump

WEB = Path(__file__).parent / "web"

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
"""What the page consists of."""

LANGUAGES = ("en", "ja")

_STYLE = '<link rel="stylesheet" href="style.css">\n<link rel="stylesheet" href="timeline.css">'
_SCRIPT = '<script type="module" src="page.js"></script>'
_CHARSET = '<meta charset="utf-8">'

_IMPORT = re.compile(r'^import\s+(?:\{([^{}]*)\}\s+from\s+)?"\./([\w.-]+)";[ \t]*\n', re.M)
_EXPORT = re.compile(r"^export\s+((?:async\s+)?function\*?|const|class)\s+(\w+)", re.M)
_COMMENT = re.compile(r"^[ \t]*(?:/\*(?:[^*]|\*(?!/))*\*/|//[^\n]*)[ \t]*\n", re.M)
"""Comments that stand on lines of their own."""
_SPACED = re.compile(r" ?([][{}(),;:=?&|<>*]) ?")
_QUOTING = re.compile(r"[`/\\]")
"""What may begin a template, a pattern or a comment, or escape a quote."""
_STRING = re.compile(r"""("[^"]*"|'[^']*')""")
_LEFT = re.compile(r"^(?:import|export)\b.*", re.M)

HEIGHT = 720
"""Of a frame in a notebook, in pixels."""


def files() -> dict[str, Path]:
    """The page's own files by name."""
    return {path.name: path for path in WEB.iterdir() if path.suffix in TYPES}


def page(document: Mapping[str, Any]) -> str:
    """A document as one self-contained HTML file."""
    return _assembled(
        {path.name: path.read_text(encoding="utf-8") for path in files().values()}, document
    )


def frame(document: Mapping[str, Any], title: str) -> str:
    """A document as an isolated frame: no page around it sees into it, nor it out."""
    packed = base64.b64encode(gzip.compress(page(document).encode(), 9, mtime=0)).decode()
    unpack = (
        "<!doctype html><meta charset=utf-8><script>"
        f'const packed = Uint8Array.from(atob("{packed}"), (c) => c.charCodeAt(0));'
        'const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));'
        "new Response(stream).text().then((text) => {"
        "document.open(); document.write(text); document.close(); });</script>"
    )
    return (
        f'<iframe title="{html.escape(title)}" sandbox="allow-scripts allow-downloads" '
        f'style="width:100%;height:{HEIGHT}px;border:0" loading="lazy" '
        f'srcdoc="{html.escape(unpack)}"></iframe>'
    )


def still(title: str, text: str, drawn: bytes | None = None) -> str:
    """Text as it stands and an SVG picture, in a frame where nothing runs."""
    lines = text.count("\n") + 1
    height = 17 * lines + 24
    inside = (
        "<!doctype html><meta charset=utf-8><meta name=color-scheme content='light dark'>"
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; img-src data:\">"
        "<style>body { margin: 0 } pre { font: 12px/17px ui-monospace, Menlo, Consolas, monospace }"
        "img { max-width: 100%; background: #fff }</style>"
        f"<pre>{html.escape(text)}</pre>"
    )
    if drawn is not None:
        packed = base64.b64encode(drawn).decode()
        inside += f'<img alt="{html.escape(title)}" src="data:image/svg+xml;base64,{packed}">'
        height += 420
    return (
        f'<iframe title="{html.escape(title)}" sandbox="" '
        f'style="width:100%;height:{min(height, HEIGHT)}px;border:0" '
        f'srcdoc="{html.escape(inside)}"></iframe>'
    )


def bundle(sources: Mapping[str, str], entry: str = "app.js") -> str:
    """ES modules as one script that imports nothing: each a function called once, in the order in
    which they need each other, `entry` last.

    Comments on lines of their own and needless spaces are left out. Only
    `import { a, b } from "./x.js";`, `import "./x.js";` and `export` before a function, const or
    class are understood.

    Raises: ValueError naming the file for anything else, for a file that is missing, and for
    modules that need each other in a circle.

    >>> print(bundle({"a.js": "export const one = 1;\\n",
    ...               "app.js": 'import { one } from "./a.js";\\nconsole.log(one);\\n'}))
    const module_a = (() => {
    const one=1;
    return { one };
    })();
    const{one}=module_a;
    console.log(one);
    <BLANKLINE>
    """
    exports = {
        name: [found[2] for found in _EXPORT.finditer(source)] for name, source in sources.items()
    }
    parts = []
    for name in _in_order(sources, entry):
        source = _COMMENT.sub("", sources[name])
        for found in _IMPORT.finditer(source):
            for wanted in _names(found):
                if wanted not in exports[found[2]]:
                    there = ", ".join(exports[found[2]])
                    raise ValueError(f"{name} needs {wanted} of {found[2]}, which exports {there}")
        source = _EXPORT.sub(r"\1 \2", _IMPORT.sub(_taken, source))
        if left := _LEFT.search(source):
            raise ValueError(f"{name}: {left[0]!r} cannot be put into one file")
        source = _tightened(source)
        if name == entry:
            parts.append(source)
            continue
        given = f"return {{ {', '.join(exports[name])} }};\n" if exports[name] else ""
        parts.append(f"const {_variable(name)} = (() => {{\n{source}{given}}})();\n")
    return "".join(parts)


def _tightened(source: str) -> str:
    """A script without indentation and empty lines, and without spaces that its signs do not need.

    Strings stay as they are, and so does a line that holds a slash or a backtick: some of its
    spaces may be those of a pattern or a template. A template over several lines, whose first and
    last line have an odd number of backticks, is left alone.
    """
    lines, inside = [], False
    for line in source.split("\n"):
        text = line if inside else line.strip()
        if text or inside:
            lines.append(text if inside or _QUOTING.search(text) else _spaced(text))
        inside ^= text.count("`") % 2 == 1
    return "\n".join(lines) + "\n"


def _spaced(line: str) -> str:
    """A line of script without needless spaces outside its strings."""
    parts = _STRING.split(line)
    return "".join(x if i % 2 else _SPACED.sub(r"\1", x) for i, x in enumerate(parts))


def _packed_style(style: str) -> str:
    """A style sheet without comments and needless spaces; its strings stay as they are."""
    parts = re.split(r"""("[^"]*"|'[^']*')|/\*.*?\*/""", style, flags=re.S)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r" ?([{};,]) ?", r"\1", re.sub(r"\s+", " ", parts[i]))
    return "".join(filter(None, parts)).replace(";}", "}").strip()


def _in_order(sources: Mapping[str, str], entry: str) -> list[str]:
    """Each file after those that it imports."""
    order: list[str] = []

    def add(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            raise ValueError(f"a circle of imports: {' → '.join((*path, name))}")
        if name in order:
            return
        if name not in sources:
            raise ValueError(f"{path[-1] if path else 'the page'} needs {name}, which is not there")
        for found in _IMPORT.finditer(sources[name]):
            add(found[2], (*path, name))
        order.append(name)

    add(entry, ())
    return order


def _names(found: re.Match[str]) -> list[str]:
    """What an import takes, by the name it was exported with."""
    return [part.split()[0] for part in (found[1] or "").split(",") if part.strip()]


def _taken(found: re.Match[str]) -> str:
    """An import as an assignment, on as many lines."""
    if found[1] is None:
        return "\n"
    names = re.sub(r"\s+as\s+", ": ", found[1])
    return f"const {{{names}}} = {_variable(found[2])};\n"


def _variable(name: str) -> str:
    return "module_" + re.sub(r"\W", "_", name.removesuffix(".js"))


def _assembled(sources: Mapping[str, str], document: Mapping[str, Any]) -> str:
    scripts = {name: text for name, text in sources.items() if name.endswith(".js")}
    # The view of a training run, its words and its styles are only there where there is one.
    run = bool(document.get("timeline"))
    script = bundle(scripts, "page.js" if run else "app.js")
    style = _packed_style(sources["style.css"] + (sources["timeline.css"] if run else ""))
    words = ("messages", "timeline") if run else ("messages",)
    for name, text in (("style.css", style), ("a script", script)):
        if found := re.search(r"</(?:style|script)|<!--", text, re.I):
            raise ValueError(f"{name} holds {found[0]!r}, which would end it inside a page")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    data = [_inlined("document", document)] + [
        f'<script type="application/json" id="messages-{language}">'
        f"{_harmless(_together([sources[f'{x}.{language}.json'] for x in words]))}</script>"
        for language in LANGUAGES
    ]
    return _replaced(
        sources["index.html"],
        {
            _CHARSET: f'{_CHARSET}\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
            _STYLE: f"<style>{style}</style>",
            # The data before what reads it.
            _SCRIPT: "\n".join([*data, f'<script type="module">{script}</script>']),
        },
    )


def _inlined(id: str, document: Mapping[str, Any]) -> str:
    text = _harmless(dump(document).decode().strip())
    return f'<script type="application/json" id="{id}">{text}</script>'


def _together(catalogues: Iterable[str]) -> str:
    """Messages of several files as one."""
    words = {key: text for x in catalogues for key, text in json.loads(x).items()}
    return json.dumps(words, ensure_ascii=False, separators=(",", ":"))


def _harmless(text: str) -> str:
    """JSON in which no tag begins or ends."""
    return text.replace("<", "\\u003c")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _replaced(text: str, parts: Mapping[str, str]) -> str:
    """The text with each of these lines, which stands in it once, replaced, in one pass: what is
    put in is not searched."""
    for line in parts:
        if text.count(line) != 1:
            raise ValueError(f"index.html holds {text.count(line)} of {line}, not one")
    pattern = "|".join(map(re.escape, parts))
    return re.sub(pattern, lambda found: parts[found[0]], text)
