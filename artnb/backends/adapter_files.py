"""How do trained weights and their optimizer get to disk and back? As safetensors, checked before use."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from artnb.errors import CheckpointError

_OPTIMIZER = "optimizer.safetensors"

Parameters = Mapping[str, torch.Tensor]
"""By name: ``model.layers.0.self_attn.q_proj.lora_A.weight``."""


def write_weights(folder: Path, file: str, weights: Parameters, moments: Mapping[str, torch.Tensor]) -> None:
    """Write weights to ``file``, and moments by ``parameter/moment`` beside it."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {name: p.detach().contiguous() for name, p in weights.items()}
    try:
        save_file(tensors, folder / file, metadata={"format": "pt"})
        save_file(dict(moments), folder / _OPTIMIZER)
    except SafetensorError as error:
        raise CheckpointError(
            f"cannot write the checkpoint: {error}. Free space, or choose another root="
        ) from error


def read_weights(folder: Path, file: str, parameters: Parameters) -> dict[str, torch.Tensor]:
    """The tensors of a saved file, which has the names and shapes of ``parameters``."""
    state = _read_file(folder / file)
    missing, extra = sorted(parameters.keys() - state.keys()), sorted(state.keys() - parameters.keys())
    if missing or extra:
        raise CheckpointError(
            f"{folder.name} holds other weights: {len(missing)} of this model's tensors are missing "
            f"({', '.join(missing[:2])}...), {len(extra)} are unknown ({', '.join(extra[:2])}...)"
        )
    for name, parameter in parameters.items():
        if state[name].shape != parameter.shape:
            raise CheckpointError(
                f"{folder.name}: {name} is {tuple(state[name].shape)}, "
                f"this model's is {tuple(parameter.shape)}"
            )
    return state


def read_moments(
    folder: Path, parameters: Parameters, full_size: Sequence[str]
) -> dict[str, dict[str, torch.Tensor | int]]:
    """Saved optimizer state by parameter. ``full_size`` names those moments of this optimizer that
    have their parameter's shape."""
    state: dict[str, dict[str, torch.Tensor | int]] = {}
    for key, moment in _read_file(folder / _OPTIMIZER).items():
        name, _, kind = key.rpartition("/")
        parameter = parameters.get(name)
        if parameter is None or (kind in full_size and moment.shape != parameter.shape):
            raise CheckpointError(f"{folder.name}: {key} of its optimizer does not fit this model")
        # bitsandbytes counts its steps in a Python integer
        state.setdefault(name, {})[kind] = int(moment) if moment.dtype == torch.int64 else moment
    for name, moments in state.items():
        if not set(full_size) <= moments.keys():
            raise CheckpointError(
                f"{folder.name}: its optimizer is another one: {name} has {', '.join(sorted(moments))}, "
                f"this trainer's has {', '.join(full_size)}"
            )
    return state


def _read_file(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
