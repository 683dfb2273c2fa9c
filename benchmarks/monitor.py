"""What watching every step costs: a training loop monitored with the default set at each step,
the same loop with SDPA unmonitored, and with our kernel unmonitored.

    python benchmarks/monitor.py [--steps 12] [--rounds 3] [--threads 1] [--json OUT]

Two models: the sample's, trained as examples/train_sample.py does (windows of 32 tokens, then of
256, clipping and AdamW), and a GPT-2 of 30 million parameters (6 layers, 8 heads of 64, 512 wide,
20,000 tokens, without dropout) on windows of 256. The three loops take the same windows from the
same weights and take turns step by step, so that whatever else the machine does hits all. Ratios
are of median times of a step, the median of several rounds and the range they span.
"""

import argparse
import importlib.util
import json
import statistics
import tempfile
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import scaledot
from scaledot.huggingface import SDPA
from scaledot.loading import load, sample_text

MODES = ("sdpa", "ours", "monitored")


def example():
    """examples/train_sample.py, whose configuration and windows these are."""
    path = Path(__file__).parents[1] / "examples" / "train_sample.py"
    spec = importlib.util.spec_from_file_location("train_sample", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def medium():
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=20_000, n_positions=256, n_embd=512, n_layer=6, n_head=8,
            attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


class Loop:
    """A training loop in one of the modes, one step at a time."""

    def __init__(self, build, mode, folder):
        torch.manual_seed(0)
        self.model, self.mode = build(), mode
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}],
            lr=1e-3, betas=(0.9, 0.99),
        )  # fmt: skip
        self.monitor, self.losses = nullcontext(), []
        if mode == "monitored":
            path = Path(folder) / "run.timeline.jsonl"
            self.monitor = scaledot.Monitor(self.model, every=1, file=path)
        elif mode == "ours":
            self.model.set_attn_implementation(SDPA)

    def step(self, ids):
        """Seconds of one step."""
        start = time.perf_counter()
        self.model.train()
        logits = self.model(ids).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if self.mode == "monitored":
            self.monitor.step(loss=loss)
        self.losses.append(loss.item())
        return time.perf_counter() - start


def compare(build, batches):
    """(median seconds of a step by mode, losses by mode)."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as context:
        loops = [Loop(build, mode, folder) for mode in MODES]
        for loop in loops:
            context.enter_context(loop.monitor)
        found = {mode: [] for mode in MODES}
        for number, ids in enumerate(batches):
            for turn in range(len(loops)):
                loop = loops[(turn + number) % len(loops)]
                seconds = loop.step(ids)
                if number >= 2:
                    found[loop.mode].append(seconds)
    return (
        {mode: statistics.median(x) for mode, x in found.items()},
        {loop.mode: loop.losses for loop in loops},
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    train_sample = example()
    tokenizer = load(None).tokenizer
    ids = tokenizer(sample_text(), verbose=False)["input_ids"]
    stream = torch.tensor(ids * (1 + 4096 // len(ids)))

    def sample():
        return train_sample.build_model(len(tokenizer))

    def windows(length, rows):
        generator = torch.Generator().manual_seed(0)
        return [
            torch.stack([train_sample.draw(stream, length, generator) for _ in range(rows)])
            for _ in range(options.steps + 2)
        ]

    cases = {
        "sample, 64 windows of 32": (sample, windows(32, 64)),
        "sample, 8 windows of 256": (sample, windows(256, 8)),
        "30M GPT-2, 2 windows of 256": (medium, windows(256, 2)),
    }
    print(f"{sum(p.numel() for p in medium().parameters()):,} parameters in the larger model")
    rows = []
    for name, (build, batches) in cases.items():
        ratios = {"ours": [], "monitored": []}
        for _ in range(options.rounds):
            seconds, losses = compare(build, batches)
            for mode, values in ratios.items():
                values.append(seconds[mode] / seconds["sdpa"])
        same = losses["ours"] == losses["monitored"]
        apart = max(abs(a - b) for a, b in zip(losses["sdpa"][:5], losses["ours"][:5], strict=True))
        said = ", ".join(
            f"{mode} {statistics.median(x):.3f} ({min(x):.3f} to {max(x):.3f})"
            for mode, x in ratios.items()
        )
        print(f"{name}: sdpa {1e3 * seconds['sdpa']:.1f} ms a step; of it {said}")
        print(f"    losses of ours and monitored {'are the same bits' if same else 'DIFFER'}; "
              f"from sdpa's over the first 5 steps {apart:.1e} at most")  # fmt: skip
        rows.append({"case": name, "sdpa_seconds": seconds["sdpa"], "ratios": ratios, "same": same})
    if options.json:
        Path(options.json).write_text(json.dumps({"threads": options.threads, "rows": rows}))


if __name__ == "__main__":
    main()
