"""Time and memory of score_moments against the n² computation: python benchmarks/moments.py

One head of d_k 64 in float32, on one thread. Each line is the best of a few runs in a process of
its own. "cpu" is the processor time spent, which other work on the machine disturbs less than
seconds; "MiB" the peak beyond what inputs and imports already held; "GFLOP/s" that of a plain
float32 matmul right after, to compare ratios where machines differ.
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
    """One line of the table, measured here."""
    import torch

    import scaledot

    torch.set_num_threads(1)
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, n, D), torch.randn(1, 1, n, D)
    square = torch.randn(1536, 1536)
    square @ square
    scaledot.score_moments(q[:, :, :256], k[:, :, :256], is_causal=True)
    arguments = {"full": {}, "causal": {"is_causal": True}, "window": {"window": 4096},
                 "naive full": {}, "naive causal": {"is_causal": True}}[what]  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times, spent, speeds = [], [], []
    for _ in range(repeats):
        start, cpu = time.perf_counter(), time.process_time()
        if what.startswith("naive"):
            mean, var = naive(q, k, bool(arguments))
        else:
            m = scaledot.score_moments(q, k, **arguments)
            mean, var = m.mean.item(), m.var.item()
        times.append(time.perf_counter() - start)
        spent.append(time.process_time() - cpu)
        start = time.perf_counter()
        square @ square
        speeds.append(2 * 1536**3 / (time.perf_counter() - start) / 1e9)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    best = min(range(repeats), key=times.__getitem__)
    print(json.dumps({"seconds": times[best],
                "cpu": spent[best], "mib": (peak - before) / 1024, "mean": mean,
                      "var": var, "gflops": speeds[best]}))  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        run(chosen.one[0], int(chosen.one[1]), chosen.repeats)
        return
    print(f"{'':14}{'tokens':>10}{'seconds':>10}{'cpu':>8}{'MiB':>8}{'GFLOP/s':>9}  mean, variance")
    for what, n in (
        ("naive full", 8192), ("full", 8192), ("naive causal", 8192), ("causal", 8192),
        ("naive causal", 16384), ("causal", 16384), ("window", 131072), ("causal", 131072),
        ("full", 1048576), ("causal", 1048576),
    ):  # fmt: skip
        command = [sys.executable, __file__, "--one", what, str(n)]
        command += ["--repeats", str(chosen.repeats)]
        r = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(
            f"{what:14}{n:>10,}{r['seconds']:>10.3f}{r['cpu']:>8.3f}{r['mib']:>8.0f}{r['gflops']:>9.0f}"
            f"  {r['mean']:+.9f}, {r['var']:.9f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
