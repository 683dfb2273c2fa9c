"""Draw the README's picture: `scaledot audit` on the embedded sample, as a terminal shows it.

python docs/picture.py docs/audit.svg
"""

import io
import re
import sys
from pathlib import Path

from rich.terminal_theme import TerminalTheme

import scaledot
from scaledot import document, terminal
from scaledot.loading import load, sample_text

DARK = TerminalTheme(
    (12, 17, 24),
    (201, 209, 217),
    [(72, 79, 88), (255, 123, 114), (63, 185, 80), (210, 172, 60), (88, 166, 255),
     (200, 120, 221), (57, 197, 207), (177, 186, 196)],
)  # fmt: skip
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def draw(path: Path, width: int = 96) -> None:
    """Write the audit's screen as an SVG that fetches nothing."""
    sample = load()
    report = scaledot.audit(sample.model, sample.tokenizer, sample_text(), name=sample.name)
    screen = terminal.console(color="always", width=width)
    screen.file, screen.record = io.StringIO(), True
    commands = {"audit": "scaledot audit audit.json", "trace": "scaledot trace"}
    terminal.print_audit(screen, document.audit_document(report, commands))
    svg = screen.export_svg(title="scaledot audit", theme=DARK)
    # Rich's own font would be fetched from a network.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S)
    svg = re.sub(r"font-family: (Fira Code|arial)[^;]*;", f"font-family: {FONTS};", svg)
    path.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    draw(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/audit.svg"))
