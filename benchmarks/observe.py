"""What observing costs: a model's forward observed, plain with sdpa, and eager keeping its weights.

    python benchmarks/observe.py [MODEL] [--tokens 2048] [--eager-tokens 4096] [--json OUT]

MODEL is a folder, hub id or .gguf file; without one the embedded sample serves, at its 256 tokens.
Times are interleaved in one process, the least and the median of several. Memory is the peak of a
process of its own above what it held with the model loaded.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

import torch

import scaledot
from scaledot.loading import load

MODES = ("sdpa", "observed", "eager")


def forward(model, ids, mode):
    """One forward pass in a mode, without a cache."""
    if mode == "observed":
        with scaledot.observe(model):
            model(input_ids=ids, use_cache=False)
    else:
        model.set_attn_implementation(mode)
        model(input_ids=ids, use_cache=False, output_attentions=mode == "eager")
        model.set_attn_implementation("sdpa")


def times(model, ids, modes, rounds):
    """Seconds of each mode, in turns."""
    found = {mode: [] for mode in modes}
    for _ in range(rounds):
        for mode in modes:
            start = time.perf_counter()
            forward(model, ids, mode)
            found[mode].append(time.perf_counter() - start)
    return {mode: (min(x), statistics.median(x)) for mode, x in found.items()}


def high_water():
    """The most memory this process has held, in MiB."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024


def peak(source, tokens, mode):
    """MiB above the loaded model, in a process of its own."""
    command = [sys.executable, __file__, *([source] if source else []), "--tokens", str(tokens)]
    done = subprocess.run(
        [*command, "--peak-of", mode], capture_output=True, text=True, check=True, timeout=1200
    )
    return float(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--eager-tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    parser.add_argument("--peak-of", choices=MODES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    model = load(options.model).model
    limit = model.config.max_position_embeddings
    generator = torch.Generator().manual_seed(0)

    def ids(tokens):
        size = (1, min(tokens, limit))
        return torch.randint(5, model.config.vocab_size, size, generator=generator)

    with torch.no_grad():
        if options.peak_of:
            forward(model, ids(8), options.peak_of)
            before = high_water()
            forward(model, ids(options.tokens), options.peak_of)
            print(high_water() - before)
            return
        rows = []
        print(f"{'tokens':>7}  {'mode':<9} {'s (least)':>10} {'s (median)':>10} {'MiB':>8}  ratio")
        for tokens, modes, base, rounds in (
            (min(options.tokens, limit), ("sdpa", "observed"), "sdpa", options.rounds),
            (min(options.eager_tokens, limit), ("eager", "observed"), "eager", 2),
        ):
            found = times(model, ids(tokens), modes, rounds)
            memory = {mode: peak(options.model, tokens, mode) for mode in modes}
            for mode in modes:
                least, median = found[mode]
                ratio = least / found[base][0]
                space = memory[mode] / max(memory[base], 1e-9)
                rows.append((tokens, mode, least, median, memory[mode], ratio, space))
                line = f"{tokens:>7}  {mode:<9} {least:>10.3f} {median:>10.3f} {memory[mode]:>8.0f}"
                print(f"{line}  {ratio:.2f} of the time, {space:.2f} of the memory of {base}")
        if options.json:
            with open(options.json, "w") as file:
                json.dump({"threads": torch.get_num_threads(), "rows": rows}, file)


if __name__ == "__main__":
    main()
