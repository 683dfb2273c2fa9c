"""From a keystroke to drawn stages, and the memory of the tab: python benchmarks/page.py

The real server and a real chromium (Playwright for Python drives it). The model is the embedded
sample with its position embeddings stretched to 2,048 tokens, so that its text may be longer than
256; everything else is its own. A time runs from the keydown event to the frame after the five
stages of a head stand on the page: model, transfer, every stage and histogram, drawing. It is the
least and the median of several texts, each new to the server. Typing is read when it pauses for
250 ms, Ctrl+Enter at once; the goals are of Ctrl+Enter.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from playwright.sync_api import Browser, Page, sync_playwright

from scaledot.loading import load, sample_text

GOALS = {64: 300, 512: 2000}
LONG = 2000
CONTEXT = 2048
RUNS = 7
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]

WATCH = """() => {
    // A new text has a new element of its own; the old one's pictures may be drawn again before.
    const before = document.querySelector(".view");
    let pressed = 0;
    globalThis.drawn = new Promise((done) => {
        const press = (event) => { pressed = event.timeStamp; };
        addEventListener("keydown", press, true);
        const watch = new MutationObserver(() => {
            const now = document.querySelector(".view");
            if (!now || now === before) return;
            if (now.querySelectorAll(".moments[data-sd]").length < 5) return;
            watch.disconnect();
            removeEventListener("keydown", press, true);
            // The second frame comes after the first was painted.
            requestAnimationFrame(() => requestAnimationFrame(() =>
                done(performance.now() - pressed)));
        });
        watch.observe(document.querySelector("#view"), { childList: true, subtree: true });
    });
}"""


def stretched(folder: Path) -> None:
    """The sample with room for longer texts, as an ordinary folder."""
    loaded = load(predicts=True)
    model = loaded.predictor
    old = model.transformer.wpe.weight.data
    wide = torch.nn.functional.interpolate(old.T[None], CONTEXT, mode="linear")[0].T
    model.transformer.wpe = torch.nn.Embedding.from_pretrained(wide.contiguous())
    model.config.n_positions = CONTEXT
    for block in model.transformer.h:
        block.attn.bias = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).tril()[None, None]
    loaded.tokenizer.model_max_length = CONTEXT
    model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)


def text(tokenizer: object, ids: list[int], length: int, shift: int) -> str:
    return tokenizer.decode(ids[shift : shift + length]).strip()


def milliseconds(page: Page, typed: str, key: str) -> float:
    """Of one text: all but its last character is there when the key is pressed."""
    page.focus("#typed")
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(typed)
    page.evaluate(WATCH)
    page.keyboard.press(key)
    return page.evaluate("globalThis.drawn")


def memory(browser: Browser, page: Page, when: str) -> None:
    """Prints MiB after a collection: JavaScript with its arrays; the process, now and at most."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    heap = session.send("Runtime.getHeapUsage")
    script = (heap["usedSize"] + heap["backingStorageSize"]) / 2**20
    told = browser.new_browser_cdp_session().send("SystemInfo.getProcessInfo")["processInfo"]
    found = []
    for process in told:
        if process["type"] == "renderer":
            lines = Path(f"/proc/{process['id']}/status").read_text().splitlines()
            sizes = dict(line.split(":", 1) for line in lines)
            found.append([int(sizes[x].split()[0]) / 1024 for x in ("VmRSS", "VmHWM")])
    now, most = max(found)
    print(f"memory       {when:20} {script:5.0f} MiB of JavaScript and its arrays, "
          f"{now:4.0f} MiB the process, {most:.0f} MiB at most", flush=True)  # fmt: skip


def measure(address: str, browser: Browser) -> None:
    loaded = load()
    ids = loaded.tokenizer(sample_text() * 3, verbose=False)["input_ids"]
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{address}#view=head&layer=1&head=2")
    page.wait_for_selector("html[data-ready]", state="attached")
    page.focus("#typed")
    page.keyboard.insert_text("In the beginning.")
    page.wait_for_selector(".moments[data-sd]")
    memory(browser, page, "a short text")
    for length, goal in GOALS.items():
        for key, what in (("Control+Enter", "Ctrl+Enter"), (".", "a full stop typed")):
            times = sorted(
                milliseconds(page, text(loaded.tokenizer, ids, length - 1, i + len(what)), key)
                for i in range(RUNS)
            )
            told = f", goal {goal} ms" if key == "Control+Enter" else ", with the pause of 250 ms"
            print(f"{tokens(page):12} {what:20} {times[0]:5.0f} ms least, "
                  f"{statistics.median(times):5.0f} ms median{told}", flush=True)  # fmt: skip
    for shift in range(2):
        took = milliseconds(page, text(loaded.tokenizer, ids, LONG, shift), "Control+Enter")
        print(f"{tokens(page):12} {'Ctrl+Enter':20} {took:5.0f} ms")
        memory(browser, page, "one head of it")
    page.evaluate("document.activeElement.blur()")
    for _ in range(3):
        page.keyboard.press("]")
        page.wait_for_timeout(1)
        page.locator(".moments[data-sd]").first.wait_for()
    memory(browser, page, "four heads of it")
    page.click('[data-focus="path-whatif"]')
    page.wait_for_selector("[data-panel=chance] .figure[data-sd]")
    memory(browser, page, "what if")


def tokens(page: Page) -> str:
    return page.inner_text("#text-note").split(" · ")[0]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        stretched(Path(folder))
        command = [sys.executable, "-m", "scaledot", "explore", folder, "--no-open"]
        os.environ["HF_HUB_OFFLINE"] = "1"
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving,
            sync_playwright() as playwright,
        ):
            address = serving.stdout.readline().split()[-1]
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=FLAGS
            )
            try:
                measure(address, browser)
            finally:
                browser.close()
                serving.terminate()


if __name__ == "__main__":
    main()
