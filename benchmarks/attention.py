"""The table of speeds: the native kernel, with all statistics, against torch's fused attention.

    python benchmarks/attention.py [--quick] [--threads 1 2] [--only forward …] [--json OUT]

Every line is one comparison in this process: the two sides take turns, so that a busy machine slows
both, and the ratio is of their fastest runs (beside it the ratio of the medians). Below 1 is faster
than torch. "peak" is the measured multiply-add peak of one thread; its share counts the flops of
the matrix products only (4·d a visible score forward, 10·d backward).
"""

# ruff: noqa: B023 — every lambda runs before its loop goes on

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from scaledot import checks
from scaledot.kernels import Terms, native
from scaledot.masks import resolve
from scaledot.rows import RowStats


@dataclass(frozen=True)
class Line:
    """One comparison. Times in milliseconds; `flops` of the matrix products, 0 if not counted."""

    work: str
    shape: str
    threads: int
    theirs: float
    ours: float
    theirs_median: float
    ours_median: float
    flops: float

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


def compare(
    work: str, shape: str, theirs: Callable, ours: Callable, *, flops: float = 0.0, seconds: float
) -> Line:
    """Let both sides take turns for about `seconds`."""
    times: tuple[list[float], list[float]] = ([], [])
    sides = (theirs, ours)
    for side in sides:
        side()
    end = time.perf_counter() + seconds
    while len(times[0]) < 5 or time.perf_counter() < end:
        for side, taken in zip(sides, times, strict=True):
            start = time.perf_counter()
            side()
            taken.append(1000 * (time.perf_counter() - start))
    best, middle = [min(t) for t in times], [statistics.median(t) for t in times]
    return Line(work, shape, torch.get_num_threads(), *best, *middle, flops)


def kernel(
    q: Tensor, k: Tensor, v: Tensor | None, mask: Tensor | None = None, causal: bool = False
) -> Callable[..., tuple]:
    """A call of the native kernel, checked once."""
    p = checks.problem(q, k, v, enable_gqa=True)
    seen = resolve(p, mask, causal)
    terms = Terms(p.scale, p.softcap, p.sinks, 0.0, 0)
    return lambda **more: native.forward(p.query, p.key, p.value, seen, terms, **more)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def heads_for(n: int, d: int) -> int:
    """So many heads that a run takes tens of milliseconds."""
    return max(2, min(12, (1 << 30) // (n * n * d) * 2 or 2))


def forward(quick: bool, seconds: float) -> Iterator[Line]:
    shapes = [(1024, 64), (2048, 128)] if quick else [
        (512, 64), (1024, 64), (2048, 64), (4096, 64),
        (512, 128), (1024, 128), (2048, 128), (4096, 128),
    ]  # fmt: skip
    for n, d in shapes:
        h = heads_for(n, d)
        q, k, v = (randn(1, h, n, d) for _ in range(3))
        for causal in (False, True):
            yield compare(
                "forward, causal" if causal else "forward, full", f"{h}×{n}×{d}",
                lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
                kernel(q, k, v, causal=causal),
                flops=4.0 * h * n * n * d / (2 if causal else 1), seconds=seconds,
            )  # fmt: skip


def masked(quick: bool, seconds: float) -> Iterator[Line]:
    for n, d in [(1024, 64)] if quick else [(1024, 64), (2048, 64), (1024, 128)]:
        h = heads_for(n, d)
        q, k, v = (randn(1, h, n, d) for _ in range(3))
        allowed = torch.rand(1, 1, n, n) < 0.8
        for name, mask in (("boolean mask", allowed), ("additive mask", randn(1, 1, n, n))):
            yield compare(
                name, f"{h}×{n}×{d}",
                lambda: F.scaled_dot_product_attention(q, k, v, mask),
                kernel(q, k, v, mask), seconds=seconds,
            )  # fmt: skip


def statistics_cost(quick: bool, seconds: float) -> Iterator[Line]:
    for n, d in [(2048, 64)] if quick else [(1024, 64), (2048, 64), (2048, 128)]:
        h = heads_for(n, d)
        q, k, v = (randn(1, h, n, d) for _ in range(3))
        call = kernel(q, k, v)
        shape = f"{h}×{n}×{d}"
        yield compare(
            "statistics on, against off", shape, lambda: call(statistics=False), call,
            seconds=seconds,
        )  # fmt: skip
        yield compare(
            "statistics only", shape, lambda: F.scaled_dot_product_attention(q, k, v),
            kernel(q, k, None), seconds=seconds,
        )  # fmt: skip
        p = checks.problem(q, k, v)
        seen, terms = resolve(p), Terms(p.scale, None, None, 0.0, 0)
        yield compare(
            "four scales, against one", shape, lambda: native.sweep(q, k, seen, terms, (1.0,)),
            lambda: native.sweep(q, k, seen, terms, (1.0, 2.0, 4.0, 8.0)), seconds=seconds,
        )  # fmt: skip


def backward(quick: bool, seconds: float) -> Iterator[Line]:
    for n, d in (
        [(1024, 64)] if quick else [(512, 64), (1024, 64), (2048, 64), (1024, 128), (2048, 128)]
    ):
        h = heads_for(n, d)
        q, k, v = (randn(1, h, n, d).requires_grad_() for _ in range(3))
        for causal in (False, True):
            with torch.no_grad():
                p = checks.problem(q, k, v)
                seen, terms = resolve(p, None, causal), Terms(p.scale, None, None, 0.0, 0)
                out, rows, top, mass = native.forward(q, k, v, seen, terms)
                d_out, d_lse, d_entropy = (torch.randn_like(x) for x in (out, top, top))
                counted = rows.visible > 0
            fused = F.scaled_dot_product_attention(q, k, v, is_causal=causal)

            @torch.no_grad()
            def ours(**more: bool) -> None:
                native.backward(
                    q, k, v, seen, terms, top, mass, rows.entropy, counted, out, d_out, d_lse,
                    d_entropy, bias_gradient=False, **more,
                )  # fmt: skip

            yield compare(
                "backward, causal" if causal else "backward, full", f"{h}×{n}×{d}",
                lambda: torch.autograd.grad(fused, (q, k, v), d_out, retain_graph=True), ours,
                flops=10.0 * h * n * n * d / (2 if causal else 1), seconds=seconds,
            )  # fmt: skip
            yield compare(
                "gradient sums on, against off", f"{h}×{n}×{d}", ours, lambda: ours(rows=True),
                seconds=seconds,
            )  # fmt: skip


def decode(quick: bool, seconds: float) -> Iterator[Line]:
    for h, kv, d, n in [(12, 12, 64, 4096), (32, 8, 128, 4096)] if quick else [
        (12, 12, 64, 4096), (12, 12, 64, 32768), (8, 8, 128, 4096), (8, 8, 128, 32768),
        (9, 3, 64, 4096), (9, 3, 64, 32768), (32, 8, 128, 4096), (1, 1, 64, 32768),
    ]:  # fmt: skip
        q, k, v = randn(1, h, 1, d), randn(1, kv, n, d), randn(1, kv, n, d)
        yield compare(
            "one query, cached keys", f"{h}/{kv}×{n}×{d}",
            lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=h != kv),
            kernel(q, k, v), seconds=seconds,
        )  # fmt: skip


def small(quick: bool, seconds: float) -> Iterator[Line]:
    for n in (16, 128) if quick else (16, 32, 64, 128, 197, 256):
        q, k, v = (randn(1, 12, n, 64) for _ in range(3))
        for causal in (False, True):
            yield compare(
                "small, causal" if causal else "small, full", f"12×{n}×64",
                lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
                kernel(q, k, v, causal=causal), seconds=seconds,
            )  # fmt: skip


def inputs(quick: bool, seconds: float) -> Iterator[Line]:
    for n, d in [(1024, 64)] if quick else [(1024, 64), (2048, 128)]:
        h = heads_for(n, d)
        for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
            q, k, v = (randn(1, h, n, d, dtype=dtype) for _ in range(3))
            yield compare(
                name, f"{h}×{n}×{d}", lambda: F.scaled_dot_product_attention(q, k, v),
                kernel(q, k, v), seconds=seconds,
            )  # fmt: skip
        q, k, v = randn(1, 9, n, d), randn(1, 3, n, d), randn(1, 3, n, d)
        for causal in (False, True):
            yield compare(
                "grouped heads 9/3" + (", causal" if causal else ""), f"9/3×{n}×{d}",
                lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True),
                kernel(q, k, v, causal=causal), seconds=seconds,
            )  # fmt: skip
        q, k, v = (randn(1, n, h, d).transpose(1, 2) for _ in range(3))
        yield compare(
            "heads inside (batch, n, heads, d)", f"{h}×{n}×{d}",
            lambda: F.scaled_dot_product_attention(q, k, v), kernel(q, k, v), seconds=seconds,
        )  # fmt: skip


def eager(quick: bool, seconds: float) -> Iterator[Line]:  # noqa: ARG001
    """What people write today to see the same numbers: keep the weights, compute from them."""
    q, k, v = (randn(1, 4, 2048, 64) for _ in range(3))

    def keep_the_weights() -> tuple[Tensor, RowStats]:
        scores = q @ k.mT / 8
        weights = scores.softmax(-1)
        log_p = scores.log_softmax(-1)
        collision = weights.square().sum(-1)
        others = weights.scatter(-1, weights.argmax(-1, keepdim=True), 0.0).sum(-1)
        index = torch.arange(2048, dtype=weights.dtype)
        top = weights.max(-1)
        return weights @ v, RowStats(
            visible=torch.full(others.shape, 2048, dtype=torch.int32),
            score_mean=scores.mean(-1), score_var=scores.var(-1, correction=0),
            max_score=scores.amax(-1), lse=scores.logsumexp(-1), entropy=-(weights * log_p).sum(-1),
            top_key=top.indices.int(), top_margin=(top.values / others).log(), collision=collision,
            jacobian_trace=1 - collision, mean_key=weights @ index,
            nonfinite=~scores.isfinite().all(-1), sink_mass=None, kernel="eager",
        )  # fmt: skip

    yield compare(
        "eager with the same statistics", "4×2048×64", keep_the_weights, kernel(q, k, v),
        seconds=seconds,
    )  # fmt: skip


WORKS = {
    "forward": forward, "masked": masked, "statistics": statistics_cost, "backward": backward,
    "decode": decode, "small": small, "inputs": inputs, "eager": eager,
}  # fmt: skip


def peak() -> float:
    """Multiply-adds of one thread, GFLOP/s, the best of several."""
    run = native._loaded().scaledot_peak
    run.argtypes, run.restype = [ctypes.c_int64, ctypes.c_void_p], ctypes.c_int64
    room = torch.empty(12 * 16)
    best = 0.0
    for _ in range(20):
        start = time.perf_counter()
        flops = run(200_000, room.data_ptr())
        best = max(best, flops / (time.perf_counter() - start) / 1e9)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few shapes, under a minute")
    parser.add_argument("--threads", type=int, nargs="+", default=None)
    parser.add_argument("--only", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--json", metavar="OUT")
    given = parser.parse_args()
    if reason := native.available():
        sys.exit(f"benchmarks: no native kernel: {reason}")
    threads = given.threads or sorted({1, torch.get_num_threads()})
    torch.manual_seed(20260714)
    machine = {
        "processor": platform.processor() or platform.machine(), "isa": native.info()["isa"],
        "torch": torch.__version__, "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(), "peak": round(peak(), 1),
    }  # fmt: skip
    print("  ".join(f"{name} {value}" for name, value in machine.items()))
    print(f"{'work':34}{'shape':16}{'threads':>8}{'torch ms':>10}{'ours ms':>10}"
          f"{'ratio':>7}{'median':>8}{'of peak':>9}")  # fmt: skip
    lines = []
    for count in threads:
        torch.set_num_threads(count)
        for name in given.only:
            for line in WORKS[name](given.quick, 0.5 if given.quick else 2.0):
                share = line.flops / line.ours / 1e6 / machine["peak"] / count
                lines.append(line)
                print(f"{line.work:34}{line.shape:16}{line.threads:8}{line.theirs:10.3f}"
                      f"{line.ours:10.3f}{line.ratio:7.2f}"
                      f"{line.ours_median / line.theirs_median:8.2f}"
                      + (f"{share:9.0%}" if share else ""), flush=True)  # fmt: skip
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, "lines": [asdict(x) for x in lines]}, file, indent=1)


if __name__ == "__main__":
    main()
