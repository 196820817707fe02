"""How are samples turned into a gradient and an update, with transformers and peft?"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from artnb.backends.attention import TreePlan
from artnb.backends.lora import MergedLora, merged_layers
from artnb.config import LoraConfig, TrainConfig
from artnb.errors import CheckpointError, ConfigurationError
from artnb.logprobs import sampled_logprobs
from artnb.loss import objective, token_loss
from artnb.packing import PackedBatch, pack
from artnb.types import Sample

Statistics = dict[str, torch.Tensor]


class PeftTrainer:
    """A LoRA adapter over a frozen causal language model, its optimizer and its gradient."""

    def __init__(self, model: Any, lora: LoraConfig) -> None:
        import peft

        targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
        peft_config = peft.LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft takes floats too
            target_modules=targets,
            lora_dropout=0.0,
            bias="none",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(lora.seed)
            try:
                self.peft_model = peft.get_peft_model(model, peft_config)
            except ValueError as error:
                raise ConfigurationError(f"LoRA targets: {error}") from error
        self.model = model
        self.device = model.device
        self.layers: list[MergedLora] = list(merged_layers(self.peft_model))
        if any(layer.layer is model.get_output_embeddings() for layer in self.layers):
            raise ConfigurationError("LoRA targets: the output layer cannot have an adapter")
        self.parameters: dict[str, torch.nn.Parameter] = {}
        for layer in self.layers:
            for kind, parameter in (("lora_A", layer.a), ("lora_B", layer.b)):
                parameter.data = parameter.data.to(torch.promote_types(model.dtype, torch.float32))
                self.parameters[f"{layer.name}.{kind}.weight"] = parameter
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=1e-5, weight_decay=0.0)
        self.merge()

    # ---- the objective ------------------------------------------------------------------------

    def forward_backward(
        self,
        samples: Sequence[Sample],
        config: TrainConfig,
        *,
        denominator: float,
        cancelled: threading.Event | None = None,
    ) -> tuple[list[Statistics], dict[str, float]]:
        """Add these rows' gradient. Returns token statistics by micro-batch, and sizes in all.

        ``cancelled`` is looked at before each micro-batch; once it is set, the gradient is dropped.
        """
        statistics: list[Statistics] = []
        sizes = {"packed_tokens": 0.0, "row_tokens": 0.0, "padded_tokens": 0.0, "loss": 0.0}
        batches = pack(samples, max_tokens=config.microbatch_tokens, share_prefixes=config.share_prefixes)
        for batch in batches:
            if cancelled is not None and cancelled.is_set():
                self.optimizer.zero_grad(set_to_none=True)
                break
            base_logprobs = self._base_logprobs(batch) if config.kl_coef > 0 else None
            logprobs, entropy = self.logprobs(batch, entropy_gradient=config.entropy_coef != 0)
            losses, stats = token_loss(
                logprobs,
                self._tensor(batch.logprobs_S),
                self._tensor(batch.advantages_S),
                self._tensor(batch.row_S),
                entropy,
                config,
                base_logprobs,
            )
            loss = objective(losses, self._tensor(batch.weights_S), denominator)
            loss.backward()
            statistics.append(stats)
            sizes["loss"] += float(loss.detach())
            sizes["packed_tokens"] += batch.tokens
            sizes["row_tokens"] += batch.row_tokens
            sizes["padded_tokens"] += batch.padded_tokens
        return statistics, sizes

    def logprobs(
        self, batch: PackedBatch, *, entropy_gradient: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs and entropies (S,) float32 of the batch's sampled tokens under the adapter."""
        output = self.model.get_decoder()(
            input_ids=self._tensor(batch.ids_N)[None],
            position_ids=self._tensor(batch.positions_N)[None],
            use_cache=False,
            plan=TreePlan(batch.segments),
        )
        return sampled_logprobs(
            output.last_hidden_state[0][self._tensor(batch.source_S)],
            self.model.get_output_embeddings().weight,
            self._tensor(batch.target_S),
            self._tensor(batch.temperature_S),
            entropy_gradient=entropy_gradient,
        )

    def _base_logprobs(self, batch: PackedBatch) -> torch.Tensor:
        with torch.no_grad(), self.peft_model.disable_adapter():
            return self.logprobs(batch)[0]

    def score(self, ids: Sequence[int]) -> torch.Tensor:
        """Logprobs (T - 1,) of each token after the first, temperature 1."""
        row = Sample(
            tuple(ids),
            (False,) + (True,) * (len(ids) - 1),
            (0.0,) * len(ids),
            (0.0,) * len(ids),
            (1.0,) * len(ids),
            trajectory_id="probe",
            group=0,
        )
        (batch,) = pack([row], max_tokens=len(ids))
        with torch.no_grad():
            return self.logprobs(batch)[0]

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    # ---- the update ---------------------------------------------------------------------------

    def optim_step(self, config: TrainConfig) -> dict[str, float]:
        """One AdamW update with the accumulated gradient, which is then cleared."""
        for group in self.optimizer.param_groups:
            group.update(
                lr=config.learning_rate, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
            )
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), config.max_grad_norm)
        if not torch.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(f"the gradient's norm is {norm.item()}; the update was not applied")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.merge()
        return {"grad_norm": float(norm), "learning_rate": config.learning_rate}

    def snapshot(self) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Adapter and optimizer as they are, for ``restore`` when a step does not succeed."""
        return [p.detach().clone() for p in self.parameters.values()], copy.deepcopy(
            self.optimizer.state_dict()
        )

    def restore(self, snapshot: tuple[list[torch.Tensor], dict[str, Any]]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.parameters.values(), snapshot[0], strict=True):
                parameter.copy_(value)
        self.optimizer.load_state_dict(copy.deepcopy(snapshot[1]))  # it would train on in the snapshot
        self.optimizer.zero_grad(set_to_none=True)
        self.merge()

    def merge(self) -> None:
        """Form every effective weight. ``rounding_lost`` is the share of the adapter's update that
        the stored weights do not show in its own direction; rounding noise beside it is not counted."""
        products = [layer.merge() for layer in self.layers]
        total, kept = sum(p[0] for p in products), sum(p[1] for p in products)
        self.rounding_lost = 1.0 - kept / total if total > 0 else 0.0

    # ---- weights for the engine ---------------------------------------------------------------

    def merged_weights(self) -> dict[str, torch.Tensor]:
        return {layer.name: layer.merged for layer in self.layers}

    def base_weights(self) -> dict[str, torch.Tensor]:
        return {layer.name: layer.base for layer in self.layers}

    def weights_of(self, folder: Path) -> dict[str, torch.Tensor]:
        """The effective weights of a saved adapter, without loading it into the trainer."""
        state = _read_tensors(folder / "adapter_model.safetensors", self._shapes())
        return {
            layer.name: layer.merged_with(
                state[f"{layer.name}.lora_A.weight"], state[f"{layer.name}.lora_B.weight"]
            )
            for layer in self.layers
        }

    # ---- saving -------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write adapter (peft's format) and optimizer state into an existing folder."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        prefix = "base_model.model."
        adapter = {prefix + name: p.detach().contiguous() for name, p in self.parameters.items()}
        try:
            save_file(adapter, folder / "adapter_model.safetensors", metadata={"format": "pt"})
            save_file(dict(self._moments()), folder / "optimizer.safetensors")
        except SafetensorError as error:
            raise CheckpointError(
                f"cannot write the checkpoint: {error}. Free space, or choose another root="
            ) from error
        self.peft_model.peft_config["default"].save_pretrained(str(folder))

    def load(self, folder: Path, *, optimizer: bool = True) -> None:
        """Restore what ``save`` wrote. Everything is read and checked before anything changes."""
        adapter = _read_tensors(folder / "adapter_model.safetensors", self._shapes())
        moments = _read_file(folder / "optimizer.safetensors") if optimizer else {}
        for key, moment in moments.items():
            parameter = self.parameters.get(key.rpartition("/")[0])
            if parameter is None or (moment.dim() and moment.shape != parameter.shape):
                raise CheckpointError(f"{folder.name}: {key} of its optimizer does not fit this adapter")
        state: dict[int, dict[str, torch.Tensor]] = {}
        for index, name in enumerate(self.parameters):
            kept = {key.rpartition("/")[2]: t for key, t in moments.items() if key.rpartition("/")[0] == name}
            if kept:
                state[index] = kept
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(adapter[name])
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.optimizer.zero_grad(set_to_none=True)
        self.merge()

    def _moments(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                yield f"{name}/{key}", value.contiguous()

    def _shapes(self) -> dict[str, torch.Size]:
        return {name: parameter.shape for name, parameter in self.parameters.items()}


def _read_file(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _read_tensors(path: Path, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
    state = {name.removeprefix("base_model.model."): t for name, t in _read_file(path).items()}
    missing, extra = sorted(shapes.keys() - state.keys()), sorted(state.keys() - shapes.keys())
    if missing or extra:
        raise CheckpointError(
            f"{path.parent.name} holds another adapter: {len(missing)} of this model's tensors are missing "
            f"({', '.join(missing[:2])}...), {len(extra)} are unknown ({', '.join(extra[:2])}...)"
        )
    for name, shape in shapes.items():
        if state[name].shape != shape:
            raise CheckpointError(
                f"{path.parent.name}: {name} is {tuple(state[name].shape)}, this model's is {tuple(shape)}"
            )
    return state


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
