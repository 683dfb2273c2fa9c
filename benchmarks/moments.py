"""Time and memory of score_moments against the n² computation: python benchmarks/moments.py

One head of d_k 64 in float32, on one thread. Each line is the best of a few runs in a process of
its own: of both kernels, in turn, or of the n² computation. "cpu" is the processor time spent,
which other work on the machine disturbs less than seconds; "MiB" the peak beyond what inputs and
imports already held, of all that ran; "GFLOP/s" that of a plain float32 matmul in between, to
compare ratios where machines differ.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

D = 64


def naive(q, k, causal):
    """Mean and variance of all scores, and of each row, through the n × n matrix."""
    import torch

    s = (q @ k.mT) / D**0.5
    seen = torch.ones_like(s, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    n = seen.sum(-1)
    row_mean = s.masked_fill(~seen, 0).sum(-1) / n
    square = (s - row_mean[..., None]).masked_fill_(~seen, 0).square_().sum(-1)
    mean = (row_mean.double() * n).sum() / n.sum()
    between = (n * (row_mean.double() - mean).square()).sum()
    return mean.item(), ((square.double().sum() + between) / n.sum()).item()


def run(what, n, repeats):
    """A line of the table for each kernel, measured here."""
    import torch

    import scaledot
    from scaledot.kernels import native

    torch.set_num_threads(1)
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, n, D), torch.randn(1, 1, n, D)
    square = torch.randn(1536, 1536)
    square @ square
    packed = scaledot.Mask("top_left", segments=torch.arange(n) // 999)
    arguments = {"full": {}, "causal": {"is_causal": True}, "window": {"window": 4096},
                 "packed": {"attn_mask": packed},
                 "naive full": {}, "naive causal": {"is_causal": True}}[what]  # fmt: skip

    def moments(kernel):
        m = scaledot.score_moments(q, k, kernel=kernel, **arguments)
        return m.mean.item(), m.var.item()

    kernels = ["tiled"] if native.available() else ["native", "tiled"]
    ways = {kernel: lambda kernel=kernel: moments(kernel) for kernel in kernels}
    if what.startswith("naive"):
        ways = {"": lambda: naive(q, k, bool(arguments))}
    else:
        scaledot.score_moments(q[:, :, :256], k[:, :, :256], is_causal=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    best = {way: {"seconds": float("inf")} for way in ways}
    speed = 0
    for _ in range(repeats):
        for way, measure in ways.items():
            start, cpu = time.perf_counter(), time.process_time()
            mean, var = measure()
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
            if seconds < best[way]["seconds"]:
                best[way] = {"seconds": seconds, "cpu": cpu, "mean": mean, "var": var}
        start = time.perf_counter()
        square @ square
        speed = max(speed, 2 * 1536**3 / (time.perf_counter() - start) / 1e9)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    shared = {"mib": (peak - before) / 1024, "gflops": speed}
    print(json.dumps([{"kernel": way, **found, **shared} for way, found in best.items()]))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        run(chosen.one[0], int(chosen.one[1]), chosen.repeats)
        return
    print(
        f"{'':14}{'kernel':8}{'tokens':>10}{'seconds':>10}{'cpu':>8}{'MiB':>8}{'GFLOP/s':>9}"
        "  mean, variance"
    )
    for what, n in (
        ("naive full", 8192), ("full", 8192), ("naive causal", 8192), ("causal", 8192),
        ("naive causal", 16384), ("causal", 16384), ("window", 131072), ("packed", 131072),
        ("causal", 131072), ("full", 1048576), ("window", 1048576), ("packed", 1048576),
        ("causal", 1048576),
    ):  # fmt: skip
        command = [sys.executable, __file__, "--one", what, str(n)]
        command += ["--repeats", str(chosen.repeats)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        for r in json.loads(output):
            print(
                f"{what:14}{r['kernel']:8}{n:>10,}{r['seconds']:>10.3f}{r['cpu']:>8.3f}"
                f"{r['mib']:>8.0f}{r['gflops']:>9.0f}  {r['mean']:+.9f}, {r['var']:.9f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
