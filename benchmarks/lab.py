"""Time of lab.variance against the R article's own simulation: python benchmarks/lab.py

Both at the article's setting: d_k 4 to 1,024, 5,000 trials each, q·k raw and divided by √d_k, seed
20260714. R draws anew for each of the two, as its script does; lab.variance scales the same draws.
Each time is taken inside its process, after start-up and imports, the least of several runs that
take turns; "one thread" sets torch's threads to 1. "cpu" is processor time, of all threads, which
other work on the machine disturbs less than seconds. R comes with Debian's r-base-core.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import time

SIZES, TRIALS, SEED = (4, 16, 64, 256, 1024), 5000, 20260714

R = """
begin <- proc.time()
set.seed(%d)
products <- function(d_k, n_trials, divide) {
  var(replicate(n_trials, {
    q <- rnorm(d_k, mean = 0, sd = 1)
    k <- rnorm(d_k, mean = 0, sd = 1)
    if (divide) sum(q * k) / sqrt(d_k) else sum(q * k)
  }))
}
sizes <- c(%s)
raw <- sapply(sizes, products, n_trials = %d, divide = FALSE)
scaled <- sapply(sizes, products, n_trials = %d, divide = TRUE)
spent <- proc.time() - begin
cat(sprintf("[%%.6f, %%.6f, [%%s], [%%s]]\\n", spent[["elapsed"]], spent[[1]] + spent[[2]],
            paste(sprintf("%%.6f", raw), collapse = ", "),
            paste(sprintf("%%.7f", scaled), collapse = ", ")))
"""


def in_r():
    """(seconds, cpu seconds, variances, scaled variances) of the article's simulation."""
    script = R % (SEED, ", ".join(map(str, SIZES)), TRIALS, TRIALS)
    command = ["Rscript", "--vanilla", "-e", script]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    if shutil.which("Rscript") is None:
        sys.exit("no Rscript here: install R, on Debian apt-get install r-base-core")

    import torch

    from scaledot import lab

    every = torch.get_num_threads()
    ways = {"R script": None, "lab.variance, one thread": 1}
    if every > 1:
        ways[f"lab.variance, {every} threads"] = every
    best = dict.fromkeys(ways, (math.inf, math.inf))
    lab.variance(SIZES, 10, SEED)
    for _ in range(repeats):
        for way, number in ways.items():
            if number is None:
                *times, raw, scaled = in_r()
                best[way] = tuple(map(min, best[way], times))
                continue
            torch.set_num_threads(number)
            for _ in range(3):
                start, cpu = time.perf_counter(), time.process_time()
                found = lab.variance(SIZES, TRIALS, SEED)
                times = time.perf_counter() - start, time.process_time() - cpu
                best[way] = tuple(map(min, best[way], times))
    print(f"{'d_k':>6}{'R':>14}{'R, scaled':>12}{'lab':>14}{'lab, scaled':>14}{'std. err.':>12}")
    for d, r, s, row in zip(SIZES, raw, scaled, found.rows, strict=True):
        a, b = row["raw"], row["scaled"]
        print(f"{d:>6}{r:>14.6f}{s:>12.7f}{a.value:>14.6f}{b.value:>14.7f}{b.error:>12.7f}")
    print(f"{'':28}{'seconds':>10}{'of R':>8}{'cpu':>10}{'of R':>8}")
    for way, times in best.items():
        shares = [x / of for x, of in zip(times, best["R script"], strict=True)]
        print(
            f"{way:28}"
            + "".join(f"{x:>10.4f}{y:>8.3f}" for x, y in zip(times, shares, strict=True))
        )


if __name__ == "__main__":
    main()
