"""What observing costs: a model's forward observed, in full, plain with sdpa, and eager keeping its
weights.

    python benchmarks/observe.py [MODEL] [--tokens 8192] [--eager-tokens 4096] [--json OUT]

MODEL is a folder, hub id or .gguf file; without one the embedded sample serves, at its 256 tokens.
"full" adds what an audit measures besides: other scales, roles, the spread of values; "audit" is
the whole of one, with its trials. Times are interleaved in one process, the least and the median of
several. Memory is the peak of a process of its own, and how much of it is above what it held with
the model loaded.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

import torch

import scaledot
from scaledot.loading import load, sample_text

MODES = ("sdpa", "observed", "full", "audit", "eager")


def forward(loaded, text, tokens, mode):
    """One pass over so many tokens of a text in a mode, without a cache."""
    model = loaded.model
    if mode == "audit":
        scaledot.audit(model, loaded.tokenizer, text, max_tokens=tokens)
        return
    ids = loaded.tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][:, :tokens]
    if mode in ("observed", "full"):
        with scaledot.observe(model, full=mode == "full"):
            model(input_ids=ids, use_cache=False)
    else:
        model.set_attn_implementation(mode)
        model(input_ids=ids, use_cache=False, output_attentions=mode == "eager")
        model.set_attn_implementation("sdpa")


def times(loaded, text, tokens, modes, rounds):
    """Seconds of each mode, in turns."""
    found = {mode: [] for mode in modes}
    for _ in range(rounds):
        for mode in modes:
            start = time.perf_counter()
            forward(loaded, text, tokens, mode)
            found[mode].append(time.perf_counter() - start)
    return {mode: (min(x), statistics.median(x)) for mode, x in found.items()}


def high_water():
    """The most memory this process has held, in MiB."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024


def peak(source, tokens, mode):
    """(MiB in all, above the loaded model) at the most, in a process of its own."""
    command = [sys.executable, __file__, *([source] if source else []), "--tokens", str(tokens)]
    done = subprocess.run(
        [*command, "--peak-of", mode], capture_output=True, text=True, check=True, timeout=1200
    )
    whole, above = map(float, done.stdout.split())
    return whole, above


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--eager-tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    parser.add_argument("--peak-of", choices=MODES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    loaded = load(options.model)
    limit = loaded.model.config.max_position_embeddings
    text = sample_text()
    text *= 1 + 2 * max(options.tokens, options.eager_tokens) // len(text.split())

    with torch.no_grad():
        if options.peak_of:
            forward(loaded, text, 8, options.peak_of)
            before = high_water()
            forward(loaded, text, options.tokens, options.peak_of)
            print(high_water(), high_water() - before)
            return
        rows = []
        names = ("tokens", "mode", "s (least)", "s (median)", "MiB", "above model")
        print("{:>7}  {:<9} {:>10} {:>10} {:>8} {:>12}  ratio".format(*names))
        for tokens, modes, base, rounds in (
            (min(options.tokens, limit), MODES[:4], "sdpa", options.rounds),
            (min(options.eager_tokens, limit), ("eager", "observed"), "eager", 2),
        ):
            found = times(loaded, text, tokens, modes, rounds)
            memory = {mode: peak(options.model, tokens, mode) for mode in modes}
            for mode in modes:
                (least, median), (whole, above) = found[mode], memory[mode]
                ratio, space = least / found[base][0], whole / memory[base][0]
                rows.append((tokens, mode, least, median, whole, above, ratio, space))
                line = f"{tokens:>7}  {mode:<9} {least:>10.3f} {median:>10.3f} {whole:>8.0f}"
                said = f"{ratio:.2f} of the time, {space:.2f} of the memory of {base}"
                print(f"{line} {above:>12.0f}  {said}")
        if options.json:
            with open(options.json, "w") as file:
                json.dump({"threads": torch.get_num_threads(), "rows": rows}, file)


if __name__ == "__main__":
    main()
