"""What one text far beyond n² memory costs: time, and the most memory above the loaded model.

    python benchmarks/long.py [MODEL] [--tokens 8192 …] [--chunk 0 2048] [--quick] [--json OUT]

MODEL is a folder, hub id or .gguf file. Without one it is the architecture of the embedded sample:
its learned positions end at 256, so the table is continued with random rows of the same size, and
what the model says there means nothing; what it costs is what it costs. A model that computes its
positions goes on by itself. chunk 0 is the text whole, else so many tokens at a time over a cache.
Each line is a process of its own; "estimate" is what scaledot.prefill expects and refuses by.
"""

import argparse
import json
import subprocess
import sys
import time

import torch

from scaledot import observe, prefill
from scaledot.leakage import resting
from scaledot.loading import load, sample_text
from scaledot.roles import delimiters
from scaledot.windows import context_of

CPU = torch.device("cpu")


def extended(model, tokens):
    """A model of learned positions with so many, those past its own random."""
    table = model.wpe.weight
    more = torch.randn(tokens - len(table), table.shape[1], generator=torch.Generator())
    model.wpe.weight = torch.nn.Parameter(torch.cat([table, more.to(table) * table.std()]))
    model.config.n_positions = tokens
    return model


def window_of(loaded, tokens):
    """So many tokens of the sample's text, said again and again."""
    ids = loaded.tokenizer(sample_text(), verbose=False, return_tensors="pt")["input_ids"]
    return {"input_ids": ids.repeat(1, 1 + tokens // ids.shape[1])[:, :tokens]}


def high_water():
    """The most memory this process has held, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024


@torch.no_grad()
def measure(source, tokens, chunk, quick):
    """(seconds, bytes at the most above the loaded model, bytes estimated)."""
    loaded = load(source)
    model = loaded.model
    if hasattr(model, "wpe") and tokens > context_of(model, None):
        extended(model, tokens)
    window = window_of(loaded, tokens)
    marks = None if quick else delimiters(loaded.tokenizer)
    # What is loaded with the first forward is none of the text's.
    with resting(model), observe(model, full=not quick, delimiters=marks):
        prefill.forward(model, window_of(loaded, 64), CPU, chunk=32 if chunk else None)
    before, start = high_water(), time.perf_counter()
    with resting(model), observe(model, full=not quick, delimiters=marks):
        prefill.forward(model, window, CPU, chunk=chunk or None)
    seconds = time.perf_counter() - start
    estimate = prefill.activations(model, min(chunk or tokens, tokens))
    if chunk:
        estimate += prefill.cache_bytes(model, tokens)
    return seconds, high_water() - before, estimate


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--chunk", type=int, nargs="+", default=[0, prefill.CHUNK])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        found = measure(options.model, options.tokens[0], options.chunk[0], options.quick)
        print(json.dumps(found))
        return
    rows = []
    print(f"{'tokens':>8} {'chunk':>6} {'seconds':>9} {'MiB above':>10} {'estimate':>9}")
    for tokens in options.tokens:
        for chunk in options.chunk:
            command = [sys.executable, __file__, *([options.model] if options.model else [])]
            command += ["--tokens", str(tokens), "--chunk", str(chunk), "--one"]
            command += ["--quick"] if options.quick else []
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            seconds, above, estimate = json.loads(done.stdout)
            rows.append((tokens, chunk, options.quick, seconds, above, estimate))
            print(
                f"{tokens:>8} {chunk:>6} {seconds:>9.1f} {above / 2**20:>10.0f} "
                f"{estimate / 2**20:>9.0f}", flush=True,
            )  # fmt: skip
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"threads": torch.get_num_threads(), "rows": rows}, file)


if __name__ == "__main__":
    main()
