"""A model's weights in one safetensors file, whole or not at all: what an alarm keeps."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scaledot import ScaledotError


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor of a model's state dict; in a process group, where all ranks must call it, put
    together from all shards on rank 0."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        from torch.distributed.checkpoint import state_dict as parallel

        options = parallel.StateDictOptions(full_state_dict=True, cpu_offload=True)
        found: Mapping[str, Any] = parallel.get_model_state_dict(model, options=options)
    else:
        found = model.state_dict()
    return {name: x for name, x in found.items() if isinstance(x, Tensor)}


def save(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write a safetensors file, `about` as its metadata, beside its place and rename it into it.

    Tied weights are written under each of their names: read it with
    `model.load_state_dict(safetensors.torch.load_file(path))`.
    Raises: ScaledotError saying why it cannot be written.
    """
    from safetensors.torch import save_file

    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(_apart(tensors), partial, {"scaledot": json.dumps(about)})
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        reason = (error.strerror or str(error)).lower()
        raise ScaledotError(f"cannot write {path}: {reason}") from None


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """safetensors wants memory of its own for each tensor."""
    taken: set[int] = set()
    result = {}
    for name, x in tensors.items():
        place = x.untyped_storage().data_ptr()
        if place in taken or not x.is_contiguous():
            x = x.clone(memory_format=torch.contiguous_format)
        taken.add(place)
        result[name] = x.detach()
    return result
