"""Take the README's picture: `scaledot explore` on the embedded sample, one head, in a browser.

python docs/screenshot.py docs/explore.png     needs Playwright for Python, chromium and [hf,web]
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from urllib.parse import urlencode

TEXT = "The LORD said unto Moses, and the LORD said unto Aaron."
STATE = {"view": "head", "layer": 2, "head": 1, "q": 12, "lang": "en", "theme": "light"}
"""An induction head: the second "unto" looks at what followed the first."""

SIZE = {"width": 1280, "height": 868}
"""Cut where the page has a gap: below the stages and the sum, above the row's walk."""


def take(path: str) -> None:
    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-m", "scaledot", "explore", "--text", TEXT, "--no-open"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving,
        sync_playwright() as playwright,
    ):
        address = serving.stdout.readline().split()[-1]
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport=SIZE)
        page.goto(f"{address}#{urlencode(STATE)}")
        page.wait_for_selector(".moments[data-sd]")
        # A drawn frame, with every panel in its place.
        page.evaluate("() => new Promise((done) => requestAnimationFrame("
                      "() => requestAnimationFrame(done)))")  # fmt: skip
        page.screenshot(path=path)
        browser.close()
        serving.terminate()


if __name__ == "__main__":
    take(sys.argv[1] if len(sys.argv) > 1 else "docs/explore.png")
