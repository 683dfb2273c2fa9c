"""`scaledot lab`: each experiment a few lines over `scaledot.lab`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from scaledot.options import (
    Ascii,
    Color,
    Command,
    InputError,
    Json,
    Model,
    check_writable,
    consoles,
)

if TYPE_CHECKING:
    from scaledot.lab import Result

LAB_HELP = """\
Usage: scaledot lab EXPERIMENT [OPTIONS]
Seeded experiments, theory beside estimate and standard error.

  variance     q·k grows as d_k: drawn, or from the heads of a model
  saturation   what softmax makes of scores, by d_k and by number of keys
  gradient     what passes back through softmax, by scale and d_k
  scales       1/√d_k, 1/d_k, none, log n: entropy as texts grow
  multihead    one width split into heads: shapes, work, two relations
  cost         FLOPs, bytes and time of each stage of a model
  models       the sizes and scales of published models
  train        the same small model trained with each scale
  article      r, exercises or claims: the articles' numbers, recomputed

Start    scaledot lab variance
"""
OUTPUT = """\
Output   --json PATH   --csv PATH   - is stdout; --plot PATH.png|svg|pdf
         --ascii   --color auto|always|never
"""
SCALES = """\
         a scale is 1/sqrt_d_k, 1/d_k, none, 1/sqrt_d_model,
         log_n/sqrt_d_k, sqrt_log_n/sqrt_d_k or a number
"""
VARIANCE_HELP = f"""\
Usage: scaledot lab variance [OPTIONS]
The variance of q·k for random q and k of each size, before and after the scale.

Draw     --d-k 4,16,64,256,1024   --trials 5000   --seed N
         --components normal|uniform|signs|student [normal]
         --degrees 5           of Student's t: the fewer, the heavier its tails
         --mean 0              of every component
         --correlation 0       of any two components of one vector, 0 to 1
         --scale 1/sqrt_d_k    --d-model N, --keys N where its rule needs them
Model    --model MODEL         q and k of a model's heads instead (sample: the
                               embedded one; a folder, hub id or .gguf file)
         --text "…"            what it reads [the embedded text]
{SCALES}{OUTPUT}
Example  scaledot lab variance --d-k 1024 --components student --degrees 3
"""
SATURATION_HELP = f"""\
Usage: scaledot lab saturation [OPTIONS]
What softmax makes of scores, unscaled and scaled: entropy, largest weight,
p(1−p) without cancellation, Jacobian.

Given    --scores 10,8,6       a row of q·k; may be repeated
         --d-k 64   --scale 1/sqrt_d_k   --d-model N where the scale needs it
Drawn    --d-k 16,64,256,1024   --keys 16,1024   --trials N   --seed N
{SCALES}{OUTPUT}
Example  scaledot lab saturation --scores 10,1,1,1 --scores 100,91,91,91
"""
GRADIENT_HELP = f"""\
Usage: scaledot lab gradient [OPTIONS]
The gradients of scores, q and k by d_k, without scale and with each rule:
median row, 10th percentile, root mean square.

Draw     --d-k 16,64,256,1024   --keys 1024   --value-dim 64
         --rule RULE [none, 1/sqrt_d_k, 1/d_k]   may be repeated
         --d-model N           where a rule needs it
         --trials N   --seed N
{SCALES}{OUTPUT}
Example  scaledot lab gradient --keys 128
"""
SCALES_HELP = f"""\
Usage: scaledot lab scales [OPTIONS]
What each rule of scaling does to entropy as the number of keys grows;
temperature is the same knob.

Draw     --keys 64,2048,65536   --d-k 64   --d-model 512   --trials N   --seed N
         --rule RULE [all]     may be repeated
         --temperature 1
{SCALES}{OUTPUT}
Example  scaledot lab scales --rule 1/sqrt_d_k --temperature 0.5
"""
MULTIHEAD_HELP = f"""\
Usage: scaledot lab multihead [OPTIONS]
One width split into heads: shapes at each step, work counted and measured, and
two relations that one head can only average.

Draw     --d-model 512   --heads 1,8   --keys N   --seed N
{OUTPUT}
Example  scaledot lab multihead --heads 1,2,4,8,16
"""
COST_HELP = f"""\
Usage: scaledot lab cost [MODEL] [OPTIONS]
FLOPs, bytes and time of each stage of a model's attention by number of tokens.
MODEL: a name of `scaledot lab models`, or a folder with a config.json; without
one, the sizes given.

Sizes    --layers N   --heads N   --kv-heads N   --d-model N   --d-k N
Run      --tokens 1024,8192,131072
         --measure             time the stages on this machine, where they fit
{OUTPUT}
Example  scaledot lab cost llama-3-8b --tokens 8192,131072
"""
MODELS_HELP = f"""\
Usage: scaledot lab models [NAME] [OPTIONS]
The sizes and scales of published models, and where each is published; with NAME
those whose name holds it.

{OUTPUT}
Example  scaledot lab models gemma
"""
TRAIN_HELP = f"""\
Usage: scaledot lab train [OPTIONS]
Trains the sample's architecture several times, alike but for the scale, and
watches loss, entropy, variance and gradient. Minutes on two cores.

Arms     --rule RULE [none, 1/sqrt_d_k, 1/d_k]   may be repeated
         --d-k 32              32, 64, 128: heads of that size at one width
         --init unit --init gpt2   q and k of variance 1, or weights of 0.02
Run      --steps 240   --seeds 2   --learning-rate 0.003   --seed N
{SCALES}{OUTPUT}
Example  scaledot lab train --rule none --rule 1/sqrt_d_k --d-k 128
"""
ARTICLE_HELP = f"""\
Usage: scaledot lab article r|exercises|claims [OPTIONS]
r          an R article's output to its last digit, with R's random numbers
exercises  the exercises of an article, with torch's random numbers
claims     every number the four articles print, computed, and a verdict

Run      --seed N              of r; another seed gives what R would print
{OUTPUT}
Example  scaledot lab article claims
"""


class _Lab(TyperGroup):
    def get_help(self, ctx: Any) -> str:  # noqa: ARG002
        return LAB_HELP.rstrip()


app = typer.Typer(cls=_Lab, rich_markup_mode=None, pretty_exceptions_enable=False)

Sizes = Annotated[str | None, typer.Option("--d-k")]
Keys = Annotated[str | None, typer.Option("--keys")]
Trials = Annotated[int | None, typer.Option("--trials")]
Seed = Annotated[int | None, typer.Option("--seed")]
Rules = Annotated[list[str] | None, typer.Option("--rule")]
Scale = Annotated[str | None, typer.Option("--scale")]
Width = Annotated[int | None, typer.Option("--d-model")]
Csv = Annotated[str | None, typer.Option("--csv")]
Plot = Annotated[str | None, typer.Option("--plot")]


def _outputs(
    json: Json = None,
    csv: Csv = None,
    plot: Plot = None,
    ascii: Ascii = False,
    color: Color = "auto",
) -> None:
    """The options that every experiment has besides its own."""


Asked = Callable[..., dict[str, Any]]


def _experiment(help: str) -> Callable[[Asked], Asked]:
    """A command of the function's name: the function says what its options ask of `scaledot.lab`,
    and what it leaves at None is not asked."""

    def command(asked: Asked) -> Asked:
        name = asked.__name__.strip("_")

        def run(
            json: str | None, csv: str | None, plot: str | None, ascii: bool, color: str, **own: Any
        ) -> int:
            given = {key: value for key, value in asked(**own).items() if value is not None}
            return _run(name, given, json, csv, plot, ascii, color)

        both = [inspect.signature(f, eval_str=True) for f in (asked, _outputs)]
        parameters = [p for signature in both for p in signature.parameters.values()]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command(name, cls=Command, help=help)(run)
        return asked

    return command


@_experiment(VARIANCE_HELP)
def _variance(
    d_k: Sizes = None,
    trials: Trials = None,
    seed: Seed = None,
    components: Annotated[str | None, typer.Option("--components")] = None,
    degrees: Annotated[float | None, typer.Option("--degrees")] = None,
    mean: Annotated[float | None, typer.Option("--mean")] = None,
    correlation: Annotated[float | None, typer.Option("--correlation")] = None,
    scale: Scale = None,
    d_model: Width = None,
    keys: Annotated[int | None, typer.Option("--keys")] = None,
    model: Model = None,
    text: Annotated[str | None, typer.Option("--text")] = None,
) -> dict[str, Any]:
    return {
        "d_k": _numbers("--d-k", d_k), "trials": trials, "seed": seed, "components": components,
        "degrees": degrees, "mean": mean, "correlation": correlation, "scale": _scale(scale),
        "d_model": d_model, "keys": keys, "model": model, "text": text,
    }  # fmt: skip


@_experiment(SATURATION_HELP)
def _saturation(
    scores: Annotated[list[str] | None, typer.Option("--scores")] = None,
    d_k: Sizes = None,
    keys: Keys = None,
    scale: Scale = None,
    d_model: Width = None,
    trials: Trials = None,
    seed: Seed = None,
) -> dict[str, Any]:
    rows = [_numbers("--scores", row, float) for row in scores] if scores else None
    return {
        "scores": rows, "d_k": _numbers("--d-k", d_k), "keys": _numbers("--keys", keys),
        "scale": _scale(scale), "d_model": d_model, "trials": trials, "seed": seed,
    }  # fmt: skip


@_experiment(GRADIENT_HELP)
def _gradient(
    d_k: Sizes = None,
    keys: Annotated[int | None, typer.Option("--keys")] = None,
    value_dim: Annotated[int | None, typer.Option("--value-dim")] = None,
    rule: Rules = None,
    d_model: Width = None,
    trials: Trials = None,
    seed: Seed = None,
) -> dict[str, Any]:
    return {
        "d_k": _numbers("--d-k", d_k), "keys": keys, "value_dim": value_dim,
        "rules": _rules(rule), "d_model": d_model, "trials": trials, "seed": seed,
    }  # fmt: skip


@_experiment(SCALES_HELP)
def _scales(
    keys: Keys = None,
    d_k: Annotated[int | None, typer.Option("--d-k")] = None,
    d_model: Width = None,
    rule: Rules = None,
    temperature: Annotated[float | None, typer.Option("--temperature")] = None,
    trials: Trials = None,
    seed: Seed = None,
) -> dict[str, Any]:
    return {
        "keys": _numbers("--keys", keys), "d_k": d_k, "d_model": d_model, "rules": _rules(rule),
        "temperature": temperature, "trials": trials, "seed": seed,
    }  # fmt: skip


@_experiment(MULTIHEAD_HELP)
def _multihead(
    d_model: Width = None,
    heads: Annotated[str | None, typer.Option("--heads")] = None,
    keys: Annotated[int | None, typer.Option("--keys")] = None,
    seed: Seed = None,
) -> dict[str, Any]:
    return {"d_model": d_model, "heads": _numbers("--heads", heads), "keys": keys, "seed": seed}


@_experiment(COST_HELP)
def _cost(
    model: Annotated[str | None, typer.Argument()] = None,
    layers: Annotated[int | None, typer.Option("--layers")] = None,
    heads: Annotated[int | None, typer.Option("--heads")] = None,
    kv_heads: Annotated[int | None, typer.Option("--kv-heads")] = None,
    d_model: Width = None,
    d_k: Annotated[int | None, typer.Option("--d-k")] = None,
    tokens: Annotated[str | None, typer.Option("--tokens")] = None,
    measure: Annotated[bool, typer.Option("--measure")] = False,
) -> dict[str, Any]:
    return {
        "model": model, "layers": layers, "heads": heads, "kv_heads": kv_heads,
        "d_model": d_model, "d_k": d_k, "tokens": _numbers("--tokens", tokens),
        "measure": measure,
    }  # fmt: skip


@_experiment(MODELS_HELP)
def _models(name: Annotated[str | None, typer.Argument()] = None) -> dict[str, Any]:
    return {"name": name}


@_experiment(TRAIN_HELP)
def _train(
    rule: Rules = None,
    d_k: Sizes = None,
    init: Annotated[list[str] | None, typer.Option("--init")] = None,
    steps: Annotated[int | None, typer.Option("--steps")] = None,
    seeds: Annotated[int | None, typer.Option("--seeds")] = None,
    learning_rate: Annotated[float | None, typer.Option("--learning-rate")] = None,
    seed: Seed = None,
) -> dict[str, Any]:
    return {
        "rules": _rules(rule), "d_k": _numbers("--d-k", d_k), "init": init or None,
        "steps": steps, "seeds": seeds, "learning_rate": learning_rate, "seed": seed,
    }  # fmt: skip


@_experiment(ARTICLE_HELP)
def _article(
    name: Annotated[str | None, typer.Argument()] = None, seed: Seed = None
) -> dict[str, Any]:
    if name is None:
        raise InputError("article needs a name: r, exercises or claims")
    return {"name": name, "seed": seed}


def _numbers(name: str, text: str | None, kind: type = int) -> list[Any] | None:
    """ "4,16,64" """
    if text is None:
        return None
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise InputError(f"{name} is {text!r}: pass {what} with commas, as 4,16,64") from None


def _scale(text: str | None) -> str | float | None:
    """The name of a rule, or a number."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def _rules(texts: list[str] | None) -> list[str | float | None] | None:
    return [_scale(text) for text in texts] if texts else None


def _run(
    experiment: str, given: dict[str, Any], json: str | None, csv: str | None, plot: str | None,
    ascii: bool, color: str,
) -> int:  # fmt: skip
    """Run an experiment with what was given, print it and write the files asked for."""
    if json == csv == "-":
        raise InputError("--json - and --csv - both write to standard output: pass one of them")
    out, err = consoles(ascii, color, "-" in (json, csv))
    if "" in (json, csv, plot):
        raise InputError("the name of a file to write is empty: pass one")
    files = [Path(path) for path in (json, csv, plot) if path not in (None, "-")]
    for file in files:
        check_writable(file)
        if [other.resolve() for other in files].count(file.resolve()) > 1:
            raise InputError(f"two results would be written to {file}: pass two names")
    from scaledot import document, lab, terminal
    from scaledot.files import write
    from scaledot.lab import figures

    run = getattr(lab, experiment)
    try:
        if plot is not None:
            figures.checked(plot)
        with terminal.progress(err, experiment.capitalize(), "") as update:
            if "on_progress" in inspect.signature(run).parameters:
                given["on_progress"] = lambda done, total: update(done, total, 0)
            result: Result = run(**given)
    except (TypeError, ValueError) as error:  # of what was asked
        raise InputError(str(error)) from None
    wrote = []
    doc = document.lab_document(result)
    for path, data in ((json, document.dump(doc)), (csv, result.csv().encode())):
        if path == "-":
            sys.stdout.buffer.write(data)
            sys.stdout.flush()
        elif path is not None:
            write(path, data)
            wrote.append(path)
    if plot is not None:
        figures.save(result, plot)
        wrote.append(plot)
    terminal.print_lab(out, doc, wrote=wrote)
    return 0
