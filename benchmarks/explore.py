"""From a text sent to the explorer to its answer: python benchmarks/explore.py [MODEL …]

Over HTTP on this machine, as the page asks: the document of a new text, then one head's query, key
and value; what the browser computes and draws comes on top. Each time is the least of several
texts, which differ, because a text that is kept is answered at once. "model" is the part of the
first that the model takes, with its statistics.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.request

from scaledot import server
from scaledot.exploring import prepare
from scaledot.loading import load, sample_text

LENGTHS = (64, 256, 512, 2048)


def asked(address, path, body=None):
    """(answer, its size in bytes, seconds)."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, {"content-type": "application/json"})
    started = time.perf_counter()
    with urllib.request.urlopen(request) as answer:
        content = answer.read()
    return json.loads(content), len(content), time.perf_counter() - started


def measure(name):
    explorer = prepare(load(name, predicts=True))
    tokenizer = explorer.loaded.tokenizer
    ids = tokenizer(sample_text() * 8, add_special_tokens=False, verbose=False)["input_ids"]
    address, ready = [], threading.Event()

    def listening(url):
        address.append(url)
        ready.set()

    shelf = server.Shelf(explorer)
    serving = threading.Thread(
        target=server.serve, args=(shelf,), kwargs={"on_ready": listening}, daemon=True
    )
    serving.start()
    ready.wait()
    about = explorer.about
    print(f"{about['name']}: {about['layers']} × {about['heads']} heads, d_k {about['d_k']}")
    print("  tokens    document     model  one head   document, head in bytes")
    special = tokenizer.num_special_tokens_to_add()
    for length in LENGTHS:
        if length > explorer.context:
            break
        best = (float("inf"),) * 3
        for shift in range(5 if length < 1000 else 2):
            text = tokenizer.decode(ids[shift : shift + length - special])
            document, size, whole = asked(address[0], "api/texts", {"text": text})
            (found,) = document["texts"]
            _, part, head = asked(address[0], f"api/texts/{found['id']}/heads/0/0")
            best = tuple(map(min, best, (whole, found["seconds"], head)))
        times = "  ".join(f"{1000 * x:5.0f} ms" for x in best)
        print(f"  {len(found['tokens']):6,}    {times}   {size:,}, {part:,}", flush=True)


def main():
    # uvicorn listens for Ctrl-C in the main thread alone; here it runs in another.
    import contextlib

    import uvicorn

    uvicorn.Server.capture_signals = lambda _: contextlib.nullcontext()
    for name in sys.argv[1:] or [None]:
        measure(name)


if __name__ == "__main__":
    main()
