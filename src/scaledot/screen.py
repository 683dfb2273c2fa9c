"""What every screen shares: the console, and lines of exact width.

Layout is done here by hand, cell by cell (猫 is two), because columns must keep their place at any
width. Text is made safe and, where needed, ASCII *before* it is measured; whatever is measured
must have gone through :meth:`Page.say`.
"""

import io
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.live import Live
from rich.text import Text

from scaledot.numerals import count, share
from scaledot.tokens import safe

Part = str | tuple[str, str]  # text, or text and its style

TEXT_WIDTH = 112  # sentences wrap here at the latest
PIPED_WIDTH = 100  # where no terminal and no $COLUMNS gives a width
NARROWEST = 40
WIDE = 150  # from here on everything is shown

_BELOW = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_ASCII = str.maketrans(
    {
        "·": ".",
        "┃": "|",
        "│": "|",
        "─": "-",
        "●": "o",
        "▽": "v",
        "▁": "_",
        **{glyph: str(level) for level, glyph in enumerate("▂▃▄▅▆▇█", 1)},
        "━": "=",
        "╸": "-",
        "−": "-",
        "–": "-",
        "×": "x",
        "÷": "/",
        "…": "...",
        "≈": "~",
        "∞": "inf",
        "Σ": "",
        "‖": "|",
        "½": "1/2",
        "⅛": "1/8",
        "≤": "<=",
        "≥": ">=",
        "±": "+-",
        "␣": "_",
        "↵": "\\n",
        "⇥": "\\t",
        "⟨": "<",
        "⟩": ">",
        "◌": "",
        "√": "sqrt ",
        "ᵀ": "^T",
        "²": "^2",
        "λ": "lambda",
        "≠": "!=",
    }
)


# Text by terminal cells


def point(text: str, width: int) -> str:
    """The number in a column of that width, its decimal point in the column's own place."""
    head, dot, tail = text.partition(".")
    if len(head) > width - 4 or len(dot + tail) > 3 or text in ("≈0", "~0"):
        return text.rjust(width)
    return head.rjust(width - 3) + (dot + tail).ljust(3)


def pad(text: str, width: int, right: bool = False) -> str:
    space = " " * (width - cell_len(text))
    return space + text if right else text + space


def cut(text: str, width: int, mark: str = "…") -> str:
    """At most that many cells, the mark standing for what is cut off."""
    if cell_len(text) <= width:
        return text
    lines = chop_cells(text, max(width - len(mark), 1))
    return lines[0] + mark


# A number stays with its unit and with the word that says what it is.
_TOGETHER = re.compile(
    r"(\d(?= [%×])|[×<>≈]|\b(?:theory|chance|median|layers?|heads?|d_k)(?= [\d.])) "
)


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most that many cells, broken at spaces; words without one (Japanese, paths)
    break anywhere."""
    lines = [""]
    for word in _TOGETHER.sub("\\1\0", text).split(" "):
        word = word.replace("\0", " ")
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if cell_len(joined) <= width:
            lines[-1] = joined
        else:
            chopped = chop_cells(word, width) if cell_len(word) > width else [word]
            lines[len(lines) - (not lines[-1]) :] = chopped
    return lines


def flow(pieces: Sequence[str], width: int) -> list[str]:
    """The pieces joined with ``·``; a line breaks between pieces, and the dot goes with it."""
    lines: list[str] = []
    for piece in pieces:
        if lines and cell_len(joined := f"{lines[-1]} · {piece}") <= width:
            lines[-1] = joined
        else:
            lines += wrap(piece, width)
    return lines


_WORD = re.compile(r"""(?:[^\s"']|"(?:\\.|[^"\\])*"|'[^']*'|["'])+""")


def wrap_command(command: str, width: int) -> list[str]:
    """A shell command on lines that can still be copied: broken with ``\\`` between words, an
    option staying with its value. A single word longer than the width stays whole."""
    if cell_len(command) <= width:
        return [command]
    groups: list[str] = []
    for word in _WORD.findall(command):
        if groups and re.fullmatch(r"--?[\w-]+", groups[-1]) and not word.startswith("-"):
            groups[-1] += f" {word}"
        else:
            groups.append(word)
    lines = groups[:1]
    for group in groups[1:]:
        if cell_len(lines[-1]) + cell_len(group) + 3 <= width:
            lines[-1] += f" {group}"
        else:
            lines[-1] += " \\"
            lines.append(f"  {group}")
    return lines


class Screen(Console):
    """A rich console that knows whether to draw in ASCII; see :func:`console`."""

    def __init__(self, *, ascii: bool = False, **settings: Any) -> None:
        super().__init__(
            highlight=False,
            markup=False,
            emoji=False,
            soft_wrap=False,
            force_jupyter=False,
            **settings,
        )
        self.ascii = ascii


def console(
    color: str = "auto", ascii: bool = False, stderr: bool = False, width: int | None = None
) -> Screen:
    """The console of all screens. ``color`` is auto, always or never.

    Auto: colour on a terminal; ``NO_COLOR`` and never keep bold and dim, ``TERM=dumb`` drops both.
    Into a pipe: plain, ``$COLUMNS`` or 100 wide.
    """
    stream = sys.stderr if stderr else sys.stdout
    if width is None and not _is_terminal(stream):
        columns = os.environ.get("COLUMNS", "")
        width = int(columns) if columns.isdigit() and int(columns) else PIPED_WIDTH
    settings: dict[str, Any] = {"stderr": stderr, "width": width}
    if color == "always":
        settings |= {"force_terminal": True, "no_color": False, "color_system": "standard"}
    elif color == "never":
        settings |= {"no_color": True}
    return Screen(ascii=ascii, **settings)


def printed(show: Callable[[Console], None], width: int) -> str:
    """What is printed onto a console of that width, without colour and without a last newline."""
    file = io.StringIO()
    show(Screen(file=file, width=width, color_system=None))
    return file.getvalue().rstrip("\n")


def _is_terminal(stream: Any) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


class Page:
    """Lines for a console, not wider than it, nor narrower than 40 columns. Used as a context it
    prints them at its end, all or, after an exception, none."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.lines: list[Text] = []
        self.encoding = console.encoding
        self.unicode = self.encoding.startswith("utf")
        self.ascii = getattr(console, "ascii", False) or not self.unicode
        self.width = max(console.width, NARROWEST)
        self.text_width = min(self.width, TEXT_WIDTH)

    def __enter__(self) -> "Page":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for line in self.lines if kind is None else ():
            self.console.print(line, no_wrap=True, overflow="ignore", crop=False)

    def say(self, text: str) -> str:
        """The text as it can be shown here. Saying twice changes nothing."""
        text = safe(text)
        if self.ascii:
            text = re.sub(r"√(\w+)|√(?=\()", lambda m: f"sqrt({m[1]})" if m[1] else "sqrt", text)
            text = re.sub("[₀-₉]+", lambda m: "_" + m[0].translate(_BELOW), text)
            text = text.translate(_ASCII)
        if not self.unicode:
            text = text.encode(self.encoding, "backslashreplace").decode(self.encoding)
        return text

    def cut(self, text: str, width: int) -> str:
        return cut(self.say(text), width, self.say("…"))

    def compose(self, *parts: Part) -> Text:
        text = Text()
        for part in parts:
            shown, style = (part, "") if isinstance(part, str) else part
            text.append(self.say(shown), style)
        text.rstrip()
        return text

    def line(self, *parts: Part) -> None:
        self.lines.append(self.compose(*parts))

    def beside(self, left: Sequence[Text], right: Sequence[Text], gap: int = 4) -> None:
        """Two blocks next to each other."""
        width = max(line.cell_len for line in left) + gap
        for i in range(max(len(left), len(right))):
            line = left[i] if i < len(left) else Text()
            if i < len(right):
                line = Text.assemble(line, " " * (width - line.cell_len), right[i])
            line.rstrip()
            self.lines.append(line)

    def hang(
        self, label: Sequence[Part], lines: Sequence[str], indent: int, style: str = ""
    ) -> None:
        """Lines beside a label of ``indent`` cells."""
        for i, line in enumerate(lines or [""]):
            self.line(*(label if i == 0 else [" " * indent]), (line, style))

    def text(self, label: Sequence[Part], text: str, indent: int, style: str = "") -> None:
        self.hang(label, wrap(self.say(text), self.text_width - indent), indent, style)

    def title(self, command: str, name: str, after: str = "") -> None:
        after = f"  {after}" if after else ""
        room = self.width - len(f"scaledot {command}  {after}")
        self.line((f"scaledot {command}", "bold"), f"  {self.cut(name, room)}{after}")
        self.line()

    def field(self, label: str, pieces: Sequence[str | None]) -> None:
        """A line of a header: its name, then the pieces that there are."""
        shown = [self.say(piece) for piece in pieces if piece]
        self.hang([(f"  {label:<9}", "cyan")], flow(shown, self.text_width - 11), 11)


@contextmanager
def progress(
    console: Console, label: str = "Auditing", unit: str = "windows", after: float = 1.0
) -> Iterator[Callable[[int, int, int], None]]:
    """Yields ``update(done, total, tokens)``. The bar appears after a second, vanishes at the end,
    and is not drawn at all unless the console is a terminal."""
    state = (0, 0, 0)
    started = time.monotonic()

    def update(done: int, total: int, tokens: int = 0) -> None:
        nonlocal state
        state = (done, total, tokens)

    def draw() -> Text:
        return progress_line(Page(console), label, unit, *state, time.monotonic() - started)

    if not (console.is_terminal and _is_terminal(console.file)) or console.is_dumb_terminal:
        yield update
        return
    live = Live(
        console=console,
        transient=True,
        get_renderable=draw,
        redirect_stdout=False,
    )
    timer = threading.Timer(after, live.start)
    timer.daemon = True
    timer.start()
    try:
        yield update
    finally:
        timer.cancel()
        timer.join()
        live.stop()


def progress_line(
    page: Page, label: str, unit: str, done: int, total: int, tokens: int, elapsed: float
) -> Text:
    """``Auditing  ━━━╸───  12/40 windows · 12,288 tokens · 1,930/s · 0:15 left``; too narrow, parts
    go from the right. Without a unit the share that is done stands in place of the counts."""
    cells = 15
    full = cells * done // total if total else 0
    tip = "╸" if full < cells else ""
    line = Text(f"{label}  ")
    line.append(page.say("━" * full + tip), "cyan")
    line.append(page.say("─" * (cells - full - len(tip))), "dim")
    parts = [f"  {done}/{total} {unit}" if unit else f"  {share(done / total)}"] if total else []
    if done and not total:  # how many there are is not known
        parts = [f"  {count(done)} {unit}"]
    if tokens:
        parts += [f" · {count(tokens)} tokens", f" · {count(round(tokens / max(elapsed, 1e-9)))}/s"]
    if done and total:
        left = round(elapsed / done * (total - done))
        parts.append(f" · {left // 60}:{left % 60:02} left")
    for part in parts:
        if line.cell_len + cell_len(part) >= page.width:
            break
        line.append(page.say(part))
    return line
