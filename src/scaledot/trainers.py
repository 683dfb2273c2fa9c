"""Monitor inside the trainers people use: transformers' Trainer and Lightning's.

Each opens the monitor where training begins, calls `step` after each optimizer step, and closes it
at the end, also after an exception.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from scaledot import ScaledotError
from scaledot.tracking import scalars, writer
from scaledot.training import Monitor


def attach(monitor: Monitor, trainer: Any) -> None:
    """`Monitor.attach`."""
    roots = {kind.__module__.split(".")[0] for kind in type(trainer).__mro__}
    if "transformers" in roots:
        _transformers(monitor, trainer)
    elif lightning := roots & {"lightning", "pytorch_lightning"}:
        _lightning(monitor, trainer, lightning.pop())
    else:
        raise TypeError(
            f"attach takes transformers' Trainer or Lightning's, got {type(trainer).__name__}: "
            "in a loop of your own use `with Monitor(…)` and call step()"
        )


def _transformers(monitor: Monitor, trainer: Any) -> None:
    from transformers import TrainerCallback

    if not _same(monitor.model, trainer.model):
        raise ScaledotError("the Monitor is of another model than the Trainer's: pass that one")
    train, one_step = trainer.train, trainer.training_step
    losses: list[Tensor] = []

    def training(*args: Any, **kwargs: Any) -> Any:
        # A Trainer tells its callbacks nothing of an exception.
        try:
            return train(*args, **kwargs)
        finally:
            monitor.close()

    def training_step(*args: Any, **kwargs: Any) -> Tensor:
        # Nor of a loss until it logs one. Where it looks for a batch that fits, it begins anew
        # inside of `train` after a step that did not.
        try:
            loss = one_step(*args, **kwargs)
        except BaseException:
            monitor.close()
            raise
        losses.append(loss.detach())
        return loss

    trainer.train, trainer.training_step = training, training_step

    class Callback(TrainerCallback):
        told = 0

        def on_train_begin(self, _args: Any, state: Any, *_: Any, **_kwargs: Any) -> None:
            losses.clear()
            self.told = state.global_step
            monitor.open(steps=state.global_step, model=trainer.model_wrapped)

        def on_step_end(self, _args: Any, _state: Any, control: Any, **_kwargs: Any) -> None:
            # Each forward's share of the step's loss, divided already.
            monitor.step(loss=torch.stack(losses).sum())
            losses.clear()
            control.should_training_stop |= monitor.stopped

        def on_log(self, *_: Any, logs: dict[str, Any], **_kwargs: Any) -> None:
            look = monitor.last
            if "loss" in logs and look is not None and look.step > self.told:
                self.told = look.step
                logs |= scalars(look)

        def on_train_end(self, *_: Any, **_kwargs: Any) -> None:
            monitor.close()

    # What reports comes after: it must find the keys.
    trainer.callback_handler.callbacks.insert(0, Callback())


def _lightning(monitor: Monitor, trainer: Any, package: str) -> None:
    root = import_module("lightning.pytorch" if package == "lightning" else package)
    losses: list[Tensor] = []
    own = tuple(monitor.writers)

    class Callback(root.Callback):  # type: ignore[name-defined]
        done = 0  # optimizer steps, of all optimizers

        def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
            if not _same(monitor.model, pl_module):
                raise ScaledotError("the Monitor is of another model than fit's: pass that one")
            monitor.writers = [*own, *(writer(log) for log in trainer.loggers)]
            losses.clear()
            self.done = trainer.global_step
            monitor.open(steps=trainer.global_step, model=monitor.model)

        def on_train_batch_end(self, trainer: Any, _module: Any, outputs: Any, *_: Any) -> None:
            # Each batch's share of the step's loss, divided already; none of a skipped batch, nor
            # where a module that steps its optimizers itself gives none.
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            if loss is not None:
                losses.append(loss.detach())
            # Gradients accumulate until a batch after which an optimizer has stepped.
            if trainer.global_step > self.done:
                self.done = trainer.global_step
                monitor.step(loss=torch.stack(losses).sum() if losses else None)
                losses.clear()
                trainer.should_stop |= monitor.stopped

        def on_train_end(self, *_: Any) -> None:
            monitor.close()

        def on_exception(self, *_: Any) -> None:
            monitor.close()

    trainer.callbacks.append(Callback())


def _same(mine: nn.Module, theirs: nn.Module) -> bool:
    """Whether a trainer's model holds the monitor's, wrapped or as a part."""
    return any(m is mine for m in theirs.modules())
