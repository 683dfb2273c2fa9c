"""`train`: the experiment behind "without the scale, learning stops", run instead of asserted.

The sample's architecture is trained again and again, each time from the same initial numbers and on
the same sequences, and only the factor applied to QKᵀ differs. Each run is looked at on the same
held-out sequences along the way: loss, entropy, variance within rows, and how much gradient rows
pass to their scores.

Three choices make it an experiment. d_k grows at one width: 128 = heads · d_k, so 4, 2 or 1 heads
share the very same weights and the number of parameters never changes. What the articles assume, q
and k of variance 1, is a choice of initialisation; it is one of two arms, GPT-2's own the other
(docs/maths.md#initialisation). And the task is one that attention alone can do: 32 random tokens
said twice; only the second half is scored, where 31 positions back stands what comes next.

Source: Vaswani et al. 2017, section 3.2.1 with footnote 4 (the claim); Radford et al. 2019 (the
architecture). What is imperfect: one task, one optimiser, sequences of 64; an arm that has not
learned in these steps may learn in more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from scaledot.checks import whole
from scaledot.dispatch import attention, compute
from scaledot.kernels import Gradients
from scaledot.lab.arguments import one_of, sizes
from scaledot.lab.arguments import seed as checked_seed
from scaledot.lab.curves import VOCABULARY, Arm, Point, report
from scaledot.lab.results import Result
from scaledot.rows import RowStats
from scaledot.scales import RULES, factor

D_MODEL, LAYERS, POSITIONS, WEIGHT_STD = 128, 4, 256, 0.08
"""Of the sample: docs/sample.md and sample/config.json."""

INITS = {"unit": D_MODEL**-0.5, "gpt2": 0.02}
"""Standard deviation of the weights of W_Q and W_K: with "unit" the components of q and k start
with variance 1, as after a layer norm their input has; "gpt2" is GPT-2's number."""

BLOCK, BATCH, HELD_OUT, WARMUP, MEASURED = 32, 8, 16, 20, 15
"""Tokens that are said twice, sequences a step, sequences kept aside, steps of warmup, and about
how often a run is measured: chosen so that a run takes ten seconds."""

# The model: the sample's GPT-2


class Block(nn.Module):
    """Pre-norm attention and MLP, as GPT-2's."""

    def __init__(self, heads: int, scale: float) -> None:
        super().__init__()
        self.heads, self.scale = heads, scale
        self.ln_1, self.ln_2 = nn.LayerNorm(D_MODEL), nn.LayerNorm(D_MODEL)
        self.c_attn, self.c_proj = nn.Linear(D_MODEL, 3 * D_MODEL), nn.Linear(D_MODEL, D_MODEL)
        self.c_fc, self.mlp_proj = nn.Linear(D_MODEL, 4 * D_MODEL), nn.Linear(4 * D_MODEL, D_MODEL)

    def forward(
        self, x: Float[Tensor, "batch n 128"], seen: list[Seen] | None
    ) -> Float[Tensor, "batch n 128"]:
        qkv = self.c_attn(self.ln_1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # three of (batch, heads, n, d_k)
        if seen is None:
            out = attention(q, k, v, is_causal=True, scale=self.scale)
        else:
            passed: list[Gradients] = []
            out, rows = compute(
                q, k, v, None, 0.0, True, self.scale, False, softcap=None, sinks=None,
                kernel="auto", return_stats=True, watch=passed.append,
            )  # fmt: skip
            assert rows is not None  # asked for
            seen.append(Seen(rows, passed))
        x = x + self.c_proj(out.transpose(1, 2).flatten(2))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Decoder(nn.Module):
    """Token ids → logits; with `seen`, what each layer's attention did and passed back."""

    def __init__(self, vocabulary: int, d_k: int, scale: float) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, D_MODEL), nn.Embedding(POSITIONS, D_MODEL)
        self.h = nn.ModuleList(Block(D_MODEL // d_k, scale) for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(D_MODEL)

    def forward(
        self, ids: Int[Tensor, "batch n"], seen: list[Seen] | None = None
    ) -> Float[Tensor, "batch n vocabulary"]:
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.h:
            x = block(x, seen)
        return self.ln_f(x) @ self.wte.weight.T


@dataclass(frozen=True, eq=False)
class Seen:
    """One attention call: its rows, and after backward its gradients."""

    rows: RowStats
    passed: list[Gradients]


def initial(d_k: int, scale: float, init: str, generator: torch.Generator) -> Decoder:
    """A model whose numbers depend on the generator alone, but for the size of W_Q and W_K."""
    with torch.random.fork_rng(devices=[]):  # the layers draw numbers of their own first
        model = Decoder(VOCABULARY, d_k, scale)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.fill_(1.0 if name.endswith("weight") else 0.0)  # a norm's gain, or a bias
            else:
                p.normal_(generator=generator).mul_(WEIGHT_STD)
                if "proj" in name:  # what adds to the residual stream, as GPT-2
                    p.div_(math.sqrt(2 * LAYERS))
                if "c_attn" in name:
                    p[: 2 * D_MODEL].mul_(INITS[init] / WEIGHT_STD)
        wavelengths = 2.5 * (POSITIONS / 5) ** torch.linspace(0, 1, D_MODEL // 2)
        angle = 2 * math.pi * torch.arange(POSITIONS)[:, None] / wavelengths
        model.wpe.weight.copy_(0.3 * torch.stack([angle.sin(), angle.cos()], -1).flatten(1))
    return model


# One run


def sequences(count: int, generator: torch.Generator) -> Int[Tensor, "count 64"]:
    """Random tokens, and the same again."""
    return torch.randint(VOCABULARY, (count, BLOCK), generator=generator).repeat(1, 2)


def loss_of(
    model: Decoder, ids: Int[Tensor, "batch 64"], seen: list[Seen] | None = None
) -> Float[Tensor, ""]:
    """Mean nats of the tokens that stood there before."""
    logits = model(ids[:, :-1], seen)[:, BLOCK - 1 :]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, BLOCK:].flatten())


def measure(model: Decoder, ids: Int[Tensor, "batch 64"], step: int) -> Point:
    """Loss, rows and gradients of all heads; leaves no gradient behind."""
    seen: list[Seen] = []
    loss = loss_of(model, ids, seen)
    if not loss.isfinite():
        return Point(step, math.nan)
    loss.backward()
    model.zero_grad()
    layers = [_of_heads(x) for x in seen]
    entropy, variance, gradient, tail, query = (torch.cat(x) for x in zip(*layers, strict=True))
    worst = int(gradient.nan_to_num(math.inf).argmin())
    layer, head = divmod(worst, len(gradient) // LAYERS)
    return Point(
        step, _six(loss), _six(entropy.quantile(0.5)), _six(variance.quantile(0.5)),
        _six(gradient.nanquantile(0.5)), _six(tail.nanquantile(0.5)), _six(query.quantile(0.5)),
        f"{layer}.{head}", _six(gradient[worst]),
    )  # fmt: skip


def _of_heads(x: Seen) -> tuple[Float[Tensor, " heads"], ...]:
    """entropy, variance, gradient, tail, query of one layer's heads."""
    passed = x.passed[0]
    assert passed.rows is not None  # what `watch` is for
    # The first row sees one key: nothing to choose, and no transmission.
    sees = x.rows.visible[..., 1:].double()
    through = passed.rows.transmission.transpose(0, 1).flatten(1).double()
    return (
        (x.rows.entropy[..., 1:].double() / sees.log()).mean((0, 2)),
        x.rows.score_var[..., 1:].double().mean((0, 2)),
        through.nanquantile(0.5, 1),
        through.nanquantile(0.1, 1),
        passed.query.double().square().sum(-1).mean((0, 2)).sqrt(),
    )


def _six(x: Tensor) -> float:
    """Six digits, all that float32 holds of a mean."""
    return float(f"{x.item():.6g}")


def run(
    model: Decoder,
    held_out: Int[Tensor, "batch 64"],
    steps: int,
    learning_rate: float,
    generator: torch.Generator,
    stepped: Callable[[], None],
) -> Iterator[Point]:
    """Train in place; a point now and then, the first before any step and one after the last.

    A loss that is not finite ends it, with a point that says so.
    """
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.01},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.99),
    )
    every = max(1, steps // MEASURED)
    for step in range(steps + 1):
        if step % every == 0 or step == steps:
            point = measure(model, held_out, step)
            yield point
            if not math.isfinite(point.loss) or step == steps:
                return
        rate = min(1, (step + 1) / WARMUP) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * rate
        loss = loss_of(model, sequences(BATCH, generator))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        stepped()


# The experiment


def train(
    rules: str | float | Sequence[str | float] = ("none", "1/sqrt_d_k", "1/d_k"),
    *,
    d_k: int | Sequence[int] = (32,),
    init: str | Sequence[str] = ("unit", "gpt2"),
    steps: int = 240,
    seeds: int = 2,
    learning_rate: float = 0.003,
    seed: int = 20260714,
    on_progress: Callable[[int, int], None] | None = None,
) -> Result:
    """How the sample's architecture learns to copy under each scale rule, d_k and initialisation.

    Every rule × d_k × init is an arm, trained `seeds` times. All arms have the same parameters,
    which start from the same numbers and see the same sequences; d_k splits d_model 128 into 128 ÷
    d_k heads. init: the size of W_Q and W_K alone, a name of `INITS`. The first table is the arms,
    the second (in files only) every measured point of every run. Of more than seven arms the
    pictures show those of the largest d_k.

    Runs on one thread whatever torch is set to, so that the same arguments give the same curves.
    Cost: about ten seconds a run of 240 steps, two minutes as it stands.
    Raises: ValueError, TypeError. KeyboardInterrupt passes through between steps.
    Source: docs/train.md.

    >>> result = train("1/sqrt_d_k", init="unit", steps=1, seeds=1)
    >>> [row["d_k"] for row in result.rows]
    [32]
    """
    settings: dict[str, Any] = {
        "rules": _each("rules", rules, lambda rule: factor(rule, D_MODEL, d_model=D_MODEL)),
        "d_k": list(sizes("d_k", d_k)),
        "init": _each("init", init, lambda name: one_of("init", name, INITS)),
        "steps": whole("steps", steps),
        "seeds": whole("seeds", seeds),
        "learning_rate": _rate(learning_rate),
        "seed": checked_seed(seed),
    }
    for size in settings["d_k"]:
        if D_MODEL % size:
            raise ValueError(
                f"d_k is {size}: pass a divisor of {D_MODEL}, the width that heads share"
            )
    places = [
        (start, size, rule)
        for start in settings["init"]
        for size in settings["d_k"]
        for rule in settings["rules"]
    ]
    total, done = len(places) * seeds * steps, 0

    def stepped() -> None:
        nonlocal done
        done += 1
        if on_progress is not None:
            on_progress(done, total)

    arms = []
    with _one_thread(), torch.enable_grad():
        held_out = sequences(HELD_OUT, _generator(seed, 0, 0))
        for start, size, rule in places:
            runs = []
            for i in range(seeds):
                model = initial(
                    size, factor(rule, size, d_model=D_MODEL), start, _generator(seed, i + 1, 0)
                )
                data, first = _generator(seed, i + 1, 1), done
                runs.append(tuple(run(model, held_out, steps, learning_rate, data, stepped)))
                done = first + steps  # also where it diverged
            arms.append(Arm(start, size, _rule_name(rule), tuple(runs)))
    return report(arms, settings)


def _each(name: str, values: Any, check: Callable[[Any], object]) -> list[Any]:
    """One or several, each checked, each once."""
    alone = isinstance(values, str) or not isinstance(values, Iterable)
    several = [values] if alone else list(values)
    for value in several:
        check(value)
    if not several:
        raise ValueError(f"{name} is empty: pass at least one")
    return list(dict.fromkeys(several))


def _rate(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"learning_rate is {value!r}: pass a number")
    if not 0 < value < math.inf:
        raise ValueError(f"learning_rate is {value}: pass a finite number above 0")
    return float(value)


def _rule_name(rule: str | float) -> str:
    return RULES[rule] if isinstance(rule, str) else str(rule)


def _generator(seed: int, *stream: int) -> torch.Generator:
    """A stream of its own for each purpose, and not the global one."""
    state = np.random.SeedSequence((seed, *stream)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums are rounded in another order on more threads, and training makes that grow."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
