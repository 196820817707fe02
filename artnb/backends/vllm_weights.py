"""Which weights must vLLM be given to serve a policy, and does it hold them now?

vLLM keeps the q, k and v of a layer in one matrix, gate and up in another, and on a CPU in an order
of its own that cannot be read. Nothing here imports vLLM: its model is looked at from outside.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from artnb.backends.decoder import Weights
from artnb.errors import ConfigurationError

_COLUMNS = 32
"""How many columns of a matrix that cannot be read are compared at a time."""


@dataclass(frozen=True)
class Adapter:
    """LoRA factors of a policy; without tensors it is the base model."""

    tensors: Weights
    """``<layer>.lora_A.weight`` (rank, in) and ``<layer>.lora_B.weight`` (out, rank) by layer name."""
    rank: int
    alpha: float

    @property
    def layers(self) -> list[str]:
        return [n.removesuffix(".lora_A.weight") for n in self.tensors if n.endswith(".lora_A.weight")]

    @property
    def changes_nothing(self) -> bool:
        return not any(t.any() for n, t in self.tensors.items() if n.endswith(".lora_B.weight"))


@contextlib.contextmanager
def as_folder(adapter: Adapter) -> Iterator[str]:
    """A folder with the adapter in peft's format, in memory where the system has such a place."""
    from safetensors.torch import save_file

    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="artnb-", dir=in_memory) as folder:
        tensors = {f"base_model.model.{n}": t.detach().contiguous() for n, t in adapter.tensors.items()}
        save_file(tensors, Path(folder) / "adapter_model.safetensors")
        targets = sorted({layer.rpartition(".")[2] for layer in adapter.layers})
        shape = {"peft_type": "LORA", "r": adapter.rank, "lora_alpha": adapter.alpha}
        (Path(folder) / "adapter_config.json").write_text(json.dumps({**shape, "target_modules": targets}))
        yield folder


class BaseWeights:
    """The tensors of a model's safetensors files, read one at a time."""

    def __init__(self, model: str) -> None:
        self.model = model

    @cached_property
    def files(self) -> dict[str, Path]:
        """The file of each tensor."""
        from safetensors import safe_open

        folder = Path(self.model)
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(self.model, allow_patterns="*.safetensors"))
        found: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                found.update(dict.fromkeys(file.keys(), path))
        if not found:
            raise ConfigurationError(f"{folder} holds no safetensors file, which merged weights need")
        return found

    @cached_property
    def layers(self) -> dict[str, list[str]]:
        """Names of each layer's tensors, its bias among them."""
        found: dict[str, list[str]] = {}
        for name in self.files:
            found.setdefault(name.rpartition(".")[0], []).append(name)
        return found

    def read(self, name: str) -> torch.Tensor:
        from safetensors import safe_open

        if name not in self.files:
            raise ConfigurationError(f"the base model has no tensor {name}")
        with safe_open(self.files[name], "pt") as file:
            return file.get_tensor(name)


class VllmWeights:
    """Linear layers under transformers' names, as vLLM's model holds them."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, base: BaseWeights) -> None:
        self.model, self.dtype, self.base = model, dtype, base
        self._packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        self._generator = torch.Generator()
        self._generator.seed()

    def complete(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors to load, in order: a fused matrix whose parts are not all given gets the missing
        ones, and biases, from the base model; vLLM would fill them with whatever the memory holds."""
        for _, members in self._groups(weights):
            for layer in members:
                for tensor in self.base.layers[layer]:
                    given = layer in weights and tensor == f"{layer}.weight"
                    yield tensor, weights[layer].detach() if given else self.base.read(tensor)

    def pack_head(self, weights: Weights) -> None:
        """After these were loaded: a CPU multiplies by a packed copy of the output layer, which vLLM leaves
        as it was where the layer is tied to an embedding."""
        head: Any = getattr(self.model, "lm_head", None)
        if not hasattr(head, "cpu_linear"):
            return
        modules = self.model.named_modules()
        tied = {name for name, m in modules if m is not head and getattr(m, "weight", None) is head.weight}
        if tied & weights.keys():
            head.quant_method.process_weights_after_loading(head)

    def base_of(self, layer: str) -> torch.Tensor:
        """The base model's weight of a layer."""
        return self.base.read(f"{layer}.weight").to(self.dtype)

    def wrong(self, weights: Weights) -> list[str]:
        """Names of the layers whose weight is not, bit for bit, the one given.

        Matrices that vLLM does not let be read are multiplied by columns of the identity, which
        gives the weight's own columns back exactly; 32 others are drawn at each call.
        """
        names = []
        drawn: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for module, members in self._groups(weights):
            held, columns = self._read(module, drawn)
            rows = [len(weights[m]) if m in weights else self._rows(m) for m in members]
            held = held[: sum(rows)]  # vLLM pads the vocabulary
            for layer, part in zip(members, held.split(rows), strict=True):
                if layer in weights:
                    expected = weights[layer].detach()[..., columns].to(part.dtype)
                    if not torch.equal(part.to(expected.device), expected):
                        names.append(layer)
        return names

    def wrong_factors(self, adapter: Adapter, manager: Any, number: int) -> list[str]:
        """Names of the layers whose factors are not those of the adapter, in vLLM's active slot."""
        if number not in manager.lora_index_to_id:
            return adapter.layers
        slot = manager.lora_index_to_id.index(number)
        names = []
        for layer in adapter.layers:
            path, siblings = self._home(layer)
            module, index = manager.modules[path], siblings.index(layer)
            a, b = (adapter.tensors[f"{layer}.lora_{x}.weight"].detach() for x in "AB")
            held_a, held_b = module.lora_a_stacked[index][slot, 0], module.lora_b_stacked[index][slot, 0]
            scaled = b.to(held_b) * (adapter.alpha / adapter.rank)  # as vLLM does when it loads them
            same_a = torch.equal(held_a[: a.shape[0], : a.shape[1]], a.to(held_a))
            if not (same_a and torch.equal(held_b[: b.shape[0], : b.shape[1]], scaled)):
                names.append(layer)
        return names

    def _groups(self, weights: Weights) -> Iterator[tuple[Any, tuple[str, ...]]]:
        """vLLM's module and the layers that it fuses, for each module that these weights concern."""
        unknown = [layer for layer in weights if layer not in self.base.layers]
        if unknown:
            raise ConfigurationError(f"the base model has no layer {unknown[0]}")
        for path, siblings in dict(map(self._home, weights)).items():
            if ".experts." in path:
                raise ConfigurationError(f"{path}: merged experts cannot be published; use publish='lora'")
            try:
                module = self.model.get_submodule(path)
            except AttributeError as error:
                raise ConfigurationError(f"vLLM's model has no layer {path}; use publish='lora'") from error
            members = tuple(layer for layer in siblings if layer in self.base.layers)
            yield getattr(module, "base_layer", module), members

    def _home(self, layer: str) -> tuple[str, tuple[str, ...]]:
        """Path of vLLM's module that holds a layer, and all layers that such a module may fuse."""
        parent, _, leaf = layer.rpartition(".")
        for packed, leaves in self._packed.items():
            if leaf in leaves:
                return f"{parent}.{packed}", tuple(f"{parent}.{each}" for each in leaves)
        return layer, (layer,)

    def _rows(self, layer: str) -> int:
        from safetensors import safe_open

        name = f"{layer}.weight"
        with safe_open(self.base.files[name], "pt") as file:
            return int(file.get_slice(name).get_shape()[0])

    @torch.no_grad()
    def _read(
        self, module: Any, drawn: dict[int, tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor | slice]:
        """Columns (out, C) of a layer's weight, and which they are; norms and embeddings as a whole.

        drawn: the columns, and those of the identity, for each width of a layer.
        """
        inputs = getattr(module, "input_size", None)
        if inputs is None or (module.weight.dim() == 2 and module.weight.shape[1] == inputs):
            return module.weight, slice(None)
        if inputs not in drawn:
            columns = torch.randperm(inputs, generator=self._generator)[:_COLUMNS]
            identity = torch.zeros(len(columns), inputs, dtype=self.dtype)
            identity[torch.arange(len(columns)), columns] = 1.0
            drawn[inputs] = columns, identity
        columns, identity = drawn[inputs]
        return module.quant_method.apply(module, identity, None).T, columns


def checksum(tensor: torch.Tensor) -> int:
    """64 bits that tell a tensor from any other that training makes of it, computed where it lies.

    Sums of its 8-byte words, each times an odd number of its own, modulo 2 ** 64: faster than a CRC,
    which tensors of an odd size get, and on all threads.
    """
    content = tensor.detach().contiguous().flatten().view(torch.uint8)
    if content.numel() % 8:
        data: Any = content.cpu().numpy()
        return zlib.crc32(data)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for words in content.view(torch.int64).split(_WORDS):
        total = 31 * total + (words * _odd(tensor.device)[: len(words)]).sum()
    return int(total)


_WORDS = 1 << 18
"""How many are multiplied at a time: they stay in the processor's cache."""


@cache
def _odd(device: torch.device) -> torch.Tensor:
    return torch.arange(1, 2 * _WORDS, 2, device=device)
