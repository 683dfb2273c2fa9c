"""A training that blows up, the alarm that says so first, and what cures it.

    python examples/blow_up.py                      # minutes on two cores
    python examples/blow_up.py --out docs           # also writes docs/blow_up.svg and blow_up.csv

A small causal model of characters is trained at a learning rate that is too high for attention
without its scale: scores grow into the thousands, every softmax becomes one token, and the loss
stays where a model without attention would be. `scaledot.Monitor` sees the largest score of every
head in every step; its alarm comes long before the loss says anything. The same model, data, seed
and learning rate are then trained with one thing changed:

    no scale           scores = q·k: what goes wrong
    no scale, clipped  the same, and W_Q and W_K of a head are made smaller whenever its largest
                       score exceeded 30 in the step before (QK-Clip, Kimi K2, 2025)
    1/√d_k             the scale of Vaswani et al. 2017: at this learning rate it goes wrong later
    1/√d_k, clipped    the same with QK-Clip
    1/d_k              scores = q·k / d_k
    QK-norm            q and k are normalised first (Henry et al. 2020), scores = q·k / √d_k

QK-Clip's published threshold is 100, for models of thousands of tokens. Here a row has 64 keys at
most, and a lead of a few nats is as good as one token: `--clip 100` helps little.

Source of the phenomenon: attention logits grow at high learning rates, Wortsman et al. 2023,
arXiv 2309.14322, section 3.1; entropy collapse, Zhai et al. 2023, arXiv 2303.06296.
"""

from __future__ import annotations

import argparse
import csv
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import scaledot
from scaledot.loading import sample_text

WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 128, 2, 4, 64, 16
THRESHOLD = 100.0  # of the alarm
SHOWN = 0.1  # nats by which the loss must be above the best run's before we say that it shows
WINDOW = 25  # steps over which a loss is averaged, the noise of single batches being larger

RECIPES: dict[str, dict] = {
    "no scale": {"scale": "none"},
    "no scale, clipped": {"scale": "none"},
    "1/√d_k": {"scale": "1/sqrt_d_k"},
    "1/√d_k, clipped": {"scale": "1/sqrt_d_k"},
    "1/d_k": {"scale": "1/d_k"},
    "QK-norm": {"scale": "1/sqrt_d_k", "qk_norm": True},
}


class Block(nn.Module):
    """Attention and feed-forward, normalised before, as GPT-2's."""

    def __init__(self, **attention) -> None:
        super().__init__()
        self.attention = scaledot.MultiheadAttention(WIDTH, HEADS, batch_first=True, **attention)
        self.norm, self.norm_ff = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.ff = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, is_causal=True)[0]
        return x + self.ff(self.norm_ff(x))


class Model(nn.Module):
    """Characters in, the next character's logits out, (batch, length, characters)."""

    def __init__(self, characters: int, **attention) -> None:
        super().__init__()
        self.token = nn.Embedding(characters, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(**attention) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass
class Run:
    """What one recipe did: a loss and a largest score a step, and how often a head was clipped."""

    name: str
    loss: list[float]
    largest: list[float]
    clips: int

    @property
    def alarm(self) -> int | None:
        """The first step in which a score was above THRESHOLD."""
        return next((i for i, x in enumerate(self.largest, 1) if x > THRESHOLD), None)


def train(name: str, data: Tensor, characters: int, given: argparse.Namespace) -> Run:
    torch.manual_seed(given.seed)
    model = Model(characters, **RECIPES[name])
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=given.rate, betas=(0.9, 0.95), weight_decay=0
    )
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    draw = torch.Generator().manual_seed(given.seed)
    run, alarms = Run(name, [], [], 0), []
    rule = scaledot.Alarm("max_score", above=THRESHOLD, then=alarms.append)
    with scaledot.Monitor(model, every=1, alarms=[rule]) as monitor:
        for _ in range(given.steps):
            starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=draw)
            text = torch.stack([data[i : i + CONTEXT + 1] for i in starts.tolist()])
            logits = model(text[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            warm.step()
            look = monitor.step(loss=loss)
            if name.endswith("clipped"):
                run.clips += len(scaledot.qk_clip(model, look.heads, given.clip))
            run.loss.append(look.loss)
            run.largest.append(max(float(layer.max()) for layer in look.values["max_score"]))
    if alarms:
        print(f"{name}: {alarms[0]}", flush=True)
    return run


def smoothed(loss: list[float]) -> list[float]:
    """The mean of the last WINDOW losses at each step; of those so far where they are fewer."""
    sums = [0.0]
    for x in loss:
        sums.append(sums[-1] + x)
    return [(sums[i] - sums[max(0, i - WINDOW)]) / min(i, WINDOW) for i in range(1, len(sums))]


def shows(run: Run, best: Run) -> int | None:
    """The first step from which on the smoothed loss stays above the best run's by SHOWN nats."""
    gap = [a - b for a, b in zip(smoothed(run.loss), smoothed(best.loss), strict=True)]
    inside = [i for i, x in enumerate(gap) if x <= SHOWN]
    first = inside[-1] + 1 if inside else 0
    return None if first == len(gap) else first + 1


def table(runs: list[Run]) -> str:
    best = min(runs, key=lambda run: smoothed(run.loss)[-1])
    heads = ("alarm", "loss shows it", "final loss", "largest score")
    lines = [f"{'':<18}" + "".join(f"{x:>15}" for x in heads)]
    for run in runs:
        seen = None if run is best else shows(run, best)
        cells = (run.alarm or "–", seen or "–", f"{smoothed(run.loss)[-1]:.3f}",
                 f"{run.largest[-1]:,.1f}")  # fmt: skip
        lines.append(f"{run.name:<18}" + "".join(f"{x:>15}" for x in cells))
    return "\n".join(lines)


def draw(runs: list[Run], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "scaledot"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.6, 3.6), layout="constrained")
    colours = {"no scale": "#B0125B", "1/√d_k": "#2B6CB3", "1/d_k": "#B9570F", "QK-norm": "#12606C"}
    for run in runs:
        colour = colours[run.name.removesuffix(", clipped")]
        steps = range(1, len(run.loss) + 1)
        style = {"color": colour, "lw": 1.4, "ls": ":" if run.name.endswith("clipped") else "-"}
        left.plot(steps, smoothed(run.loss), label=run.name, **style)
        right.plot(steps, run.largest, **style)
        if at := run.alarm:
            for axis, y in ((left, smoothed(run.loss)[at - 1]), (right, run.largest[at - 1])):
                axis.plot([at], [y], "o", color=colour, ms=6, mfc="none", mew=1.6)
    right.axhline(THRESHOLD, color="#4A4F57", lw=0.8, ls="--")
    right.set_yscale("log")
    left.set_title("loss, nats (mean of 25 steps)", fontsize=10)
    right.set_title("largest scaled score of any head (○ alarm)", fontsize=10)
    for axis in (left, right):
        axis.set_xlabel("step")
        axis.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False, fontsize=9)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clip", type=float, default=30.0, help="threshold of QK-Clip")
    parser.add_argument("--text", type=Path, help="any UTF-8 text; default: the embedded one")
    parser.add_argument("--out", type=Path, help="folder for blow_up.svg and blow_up.csv")
    given = parser.parse_args()
    text = given.text.read_text(encoding="utf-8") if given.text else sample_text()
    letters = sorted(set(text))
    data = torch.tensor([letters.index(c) for c in text])
    runs = []
    started = time.perf_counter()
    for name in RECIPES:
        runs.append(train(name, data, len(letters), given))
    print(f"{len(runs)} runs in {time.perf_counter() - started:.0f} s")
    print()
    print(table(runs))
    if given.out:
        draw(runs, given.out / "blow_up.svg")
        with (given.out / "blow_up.csv").open("w", newline="", encoding="utf-8") as file:
            write = csv.writer(file)
            write.writerow(["run", "step", "loss", "largest_score"])
            for run in runs:
                rows = zip(run.loss, run.largest, strict=True)
                write.writerows([run.name, i, f"{a:.5f}", f"{b:.5g}"]
                                for i, (a, b) in enumerate(rows, 1))  # fmt: skip


if __name__ == "__main__":
    main()
