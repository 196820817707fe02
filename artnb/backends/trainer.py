"""How are samples turned into a gradient and an update? What all trainers of this kernel have in common.

A trainer says how the model is made (``trainer_peft``, ``trainer_unsloth``) and what of it is trained
(``trainer_lora``, ``trainer_full``); packing, the objective, the update and its undoing are here.
"""

from __future__ import annotations

import copy
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch

from artnb.backends.adapter_files import read_moments, read_weights, write_weights
from artnb.backends.attention import TreePlan
from artnb.backends.loss_scale import LossScale
from artnb.backends.out_of_memory import (
    GROW_AFTER,
    DoesNotFit,
    Pieces,
    Shortened,
    free_memory,
    hopeless,
    noticing,
    shorten,
)
from artnb.backends.packing_check import PackingCheck, PackingWarning, check_packing
from artnb.config import TrainConfig
from artnb.errors import ConfigurationError, require
from artnb.logprobs import sampled_logprobs
from artnb.loss import objective, token_loss
from artnb.packing import PackedBatch, pack
from artnb.sizes import CHUNK
from artnb.types import Sample

T = TypeVar("T")
Statistics = dict[str, torch.Tensor]
Policy = dict[str, tuple[torch.Tensor, ...]]
"""What makes a policy, by layer: an adapter's A (rank, in) and B (out, rank), or the weight alone."""
OptimizerName = Literal["adamw", "adamw_8bit"]

MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "adamw_8bit": ("state1", "state2")}
"""What each optimizer keeps in the shape of its parameter."""


class TrainedLayer(Protocol):
    """A layer whose weight a trainer changes."""

    layer: Any
    """The module."""
    name: str
    """The layer's in the model as it was loaded: ``model.layers.0.self_attn.q_proj``."""

    @property
    def base(self) -> torch.Tensor: ...

    @property
    def merged(self) -> torch.Tensor:
        """The effective weight, in the base's dtype."""
        ...

    def merge(self) -> tuple[float, float]:
        """Form the effective weight. Returns the update D times itself, and times the change of the
        stored weight: equal where rounding to its dtype lost none of it."""
        ...


class Trainer(ABC):
    """What is trained of a causal language model, its optimizer and its gradient.

    model: the transformers model whose layers compute with the trained weights. parameters: what the
    optimizer changes, by its name in a checkpoint; they are kept in float32 at least. optimizer:
    ``adamw``, or ``adamw_8bit`` of bitsandbytes, which keeps the moments of large ones in 8 bits.
    """

    weights_file: str
    """Name of the file of the trained weights in a checkpoint."""
    names_begin: str = ""
    """What stands before the name of a parameter in it."""

    def __init__(
        self,
        model: Any,
        layers: Sequence[TrainedLayer],
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        optimizer: OptimizerName = "adamw",
    ) -> None:
        self.model, self.parameters = model, dict(parameters)
        self.layers: Sequence[Any] = list(layers)
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.get_output_embeddings().weight.dtype
        self.packing: PackingCheck | None = None
        """The comparison of packed with unpacked logprobs; None until there were rows to compare."""
        self.pieces = Pieces()
        """How finely steps have to be cut; finer since memory ran out in one."""
        self._fitted = 0
        """Calls since then."""
        for parameter in self.parameters.values():
            parameter.data = parameter.data.to(torch.promote_types(self.dtype, torch.float32))
        self.optimizer_name: OptimizerName = optimizer
        self.optimizer = _make_optimizer(optimizer, list(self.parameters.values()))
        self.loss_scale = LossScale(self.parameters.values(), enabled=self.dtype == torch.float16)
        self.merge()

    # ---- what is trained ----------------------------------------------------------------------

    @abstractmethod
    def as_base(self) -> AbstractContextManager[Any]:
        """A context in which the model computes with the base's weights."""

    @abstractmethod
    def policy(self) -> Policy:
        """A copy of the policy as it is."""

    @abstractmethod
    def policy_of(self, folder: Path) -> Policy:
        """A saved policy, without loading it into the trainer."""

    @abstractmethod
    def weights_from(self, policy: Policy) -> dict[str, torch.Tensor]:
        """The effective weights of a policy by layer, in the model's dtype."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the trained weights and the optimizer's state into an existing folder."""

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
        Where memory runs out, everything is computed again in smaller pieces, which are remembered;
        after GROW_AFTER calls that fitted, twice their size is tried. A row that does not fit by itself
        loses its end, with a ShortenedRowWarning and counted in ``rows_shortened`` and
        ``tokens_dropped``. Raises OutOfMemory, the gradient being what it was, for one that does not
        fit even then.
        """
        before = [None if p.grad is None else p.grad.clone() for p in self.parameters.values()]

        def attempt(pieces: Pieces) -> tuple[Shortened, list[Statistics], dict[str, float]]:
            shortened = shorten(samples, pieces.row_tokens)
            return shortened, *self._accumulate(shortened.rows, config, pieces, denominator, cancelled)

        def undo() -> None:
            for parameter, gradient in zip(self.parameters.values(), before, strict=True):
                parameter.grad = None if gradient is None else gradient.clone()

        (shortened, statistics, sizes), attempts = self.in_pieces(attempt, samples, config, undo)
        shortened.tell(samples)
        sizes["rows_shortened"] = float(len(shortened.places))
        sizes["tokens_dropped"] = float(shortened.tokens_dropped)
        sizes["microbatch_tokens_used"] = float(min(config.microbatch_tokens, self.pieces.microbatch_tokens))
        sizes["out_of_memory_retries"] = float(attempts - 1)
        return statistics, sizes

    def in_pieces(
        self,
        attempt: Callable[[Pieces], T],
        samples: Sequence[Sample],
        config: TrainConfig,
        undo: Callable[[], None] | None = None,
    ) -> tuple[T, int]:
        """Let ``attempt`` work on these rows in smaller and smaller pieces, until it fits. Returns what it
        does and the number of attempts.

        undo: takes back what a failed attempt did; None for one that only reads rows, of which then all
        is read or nothing. Raises OutOfMemory.
        """
        grows = self._fitted >= GROW_AFTER
        tried = [self.pieces.larger() if grows else self.pieces]
        self._fitted = 0 if grows else self._fitted + 1
        while True:
            try:
                result = attempt(tried[-1])
                break
            except DoesNotFit as error:
                problem, smaller = error.with_traceback(None), tried[-1].smaller(error.batch)
            if undo is not None:
                undo()
            free_memory(self.device)
            self._fitted = 0
            if smaller is None or (undo is None and smaller.row_tokens < tried[-1].row_tokens):
                raise hopeless(problem, samples, tried, config.microbatch_tokens, learns=undo is not None)
            tried.append(smaller)
        self.pieces = tried[-1]
        return result, len(tried)

    def _accumulate(
        self,
        samples: Sequence[Sample],
        config: TrainConfig,
        pieces: Pieces,
        denominator: float,
        cancelled: threading.Event | None,
    ) -> tuple[list[Statistics], dict[str, float]]:
        """One attempt of ``forward_backward``. Raises DoesNotFit, having added a part of the gradient."""
        statistics: list[Statistics] = []
        sizes = {"packed_tokens": 0.0, "row_tokens": 0.0, "padded_tokens": 0.0, "loss": 0.0}
        for batch in self.batches(samples, config, pieces):
            if cancelled is not None and cancelled.is_set():
                self.optimizer.zero_grad(set_to_none=True)
                break
            with noticing(batch):
                loss, stats = self.loss_scale.backward(lambda: self._loss(batch, config, denominator, pieces))  # noqa: B023
            if config.record_tokens:
                stats["row"] = torch.from_numpy(batch.rows_R[batch.row_S])  # among ``samples``
            statistics.append(stats)
            sizes["loss"] += float(loss.detach())
            sizes["packed_tokens"] += batch.tokens
            sizes["row_tokens"] += batch.row_tokens
            sizes["padded_tokens"] += batch.padded_tokens
        sizes["packing_error"] = self.packing.error if self.packing else 0.0
        sizes["rows_unpacked"] = float(self.packing is not None and not self.packing.is_true)
        return statistics, sizes

    def batches(self, samples: Sequence[Sample], config: TrainConfig, pieces: Pieces) -> list[PackedBatch]:
        """The largest first: what does not fit is noticed before much is computed."""
        most, share = min(config.microbatch_tokens, pieces.microbatch_tokens), config.share_prefixes
        if self.packing is None and most > 1:
            with noticing(None):
                self.verify_packing(samples, most_rows=pieces.compared_rows)
        if self.packing is not None and not self.packing.is_true:
            most, share = 1, False
        batches = pack(samples, max_tokens=most, share_prefixes=share)
        return sorted(batches, key=lambda batch: -batch.tokens)

    def verify_packing(self, samples: Sequence[Sample], *, most_rows: int = 4) -> PackingCheck | None:
        """Compare packed and unpacked logprobs of a few of these rows; where they differ, warn, and
        compute rows one by one from here on. The first step does this by itself."""
        self.packing = check_packing(
            samples, lambda batch: self.logprobs(batch)[0], self.dtype, most_rows=most_rows
        )
        if self.packing is not None and not self.packing.is_true:
            warnings.warn(str(self.packing), PackingWarning, stacklevel=2)
        return self.packing

    def _loss(
        self, batch: PackedBatch, config: TrainConfig, denominator: float, pieces: Pieces
    ) -> tuple[torch.Tensor, Statistics]:
        base_logprobs = self._base_logprobs(batch, pieces.chunk) if config.kl_coef > 0 else None
        logprobs, entropy = self.logprobs(
            batch, entropy_gradient=config.entropy_coef != 0, chunk=pieces.chunk
        )
        losses, stats = token_loss(
            logprobs,
            self._tensor(batch.logprobs_S),
            self._tensor(batch.advantages_S),
            self._tensor(batch.row_S),
            entropy,
            config,
            base_logprobs,
        )
        return objective(losses, self._tensor(batch.weights_S), denominator), stats

    def logprobs(
        self, batch: PackedBatch, *, entropy_gradient: bool = False, chunk: int = CHUNK
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs and entropies (S,) float32 of the batch's sampled tokens under the policy.

        chunk: positions whose logits are held at once.
        """
        head = self.model.get_output_embeddings().weight
        return sampled_logprobs(
            self.hidden(batch)[self._tensor(batch.source_S)].to(head.dtype),
            head,
            self._tensor(batch.target_S),
            self._tensor(batch.temperature_S),
            chunk=chunk,
            entropy_gradient=entropy_gradient,
        )

    def hidden(self, batch: PackedBatch) -> torch.Tensor:
        """Last hidden states (N, H) of a batch's packed tokens, in the model's dtype."""
        output = self.model.get_decoder()(
            input_ids=self._tensor(batch.ids_N)[None],
            position_ids=self._tensor(batch.positions_N)[None],
            use_cache=False,
            plan=TreePlan(batch.segments, self.device),
        )
        return output.last_hidden_state[0]

    def _base_logprobs(self, batch: PackedBatch, chunk: int = CHUNK) -> torch.Tensor:
        with torch.no_grad(), self.as_base():
            return self.logprobs(batch, chunk=chunk)[0]

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
        """Trained weights and optimizer as they are, for ``restore`` when a step does not succeed."""
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
        """The trained weights have changed: form every effective one."""
        self._products = [layer.merge() for layer in self.layers]

    @property
    def rounding_lost(self) -> float:
        """Share of the update that the stored weights do not show in its own direction;
        rounding noise beside it is not counted."""
        total, kept = sum(p[0] for p in self._products), sum(p[1] for p in self._products)
        return 1.0 - kept / total if total > 0 else 0.0

    # ---- weights for the engine ---------------------------------------------------------------

    def merged_weights(self) -> dict[str, torch.Tensor]:
        """Effective weights by layer, in the model's dtype."""
        return {layer.name: layer.merged for layer in self.layers}

    def base_weights(self) -> dict[str, torch.Tensor]:
        return {layer.name: layer.base for layer in self.layers}

    def weights_of(self, folder: Path) -> dict[str, torch.Tensor]:
        """The effective weights of a saved policy, without loading it into the trainer."""
        return self.weights_from(self.policy_of(folder))

    # ---- saving -------------------------------------------------------------------------------

    def _write(self, folder: Path) -> None:
        weights = {self.names_begin + n: t for n, t in (self.parameters | self._untrained()).items()}
        write_weights(folder, self.weights_file, weights, dict(self._moments()))

    def _read(self, folder: Path) -> dict[str, torch.Tensor]:
        """The trained weights of a checkpoint, which must fit this model. Raises CheckpointError."""
        wanted = {self.names_begin + n: t for n, t in (self.parameters | self._untrained()).items()}
        found = read_weights(folder, self.weights_file, wanted)
        return {name: found[self.names_begin + name] for name in self.parameters}

    def _untrained(self) -> dict[str, torch.Tensor]:
        """What else belongs into the file of the weights."""
        return {}

    def load(self, folder: Path, *, optimizer: bool = True) -> None:
        """Restore what ``save`` wrote. Everything is read and checked before anything changes."""
        weights = self._read(folder)
        kinds = MOMENTS[self.optimizer_name]
        moments = read_moments(folder, self.parameters, kinds) if optimizer else {}
        state = {index: moments[name] for index, name in enumerate(self.parameters) if name in moments}
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(weights[name])
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.optimizer.zero_grad(set_to_none=True)
        self.merge()

    def _moments(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                moment = torch.as_tensor(value).contiguous()
                # bitsandbytes shares small tables between parameters, which safetensors would refuse
                yield f"{name}/{key}", moment if moment.shape == parameter.shape else moment.clone()


def _make_optimizer(name: OptimizerName, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if name not in MOMENTS:
        raise ConfigurationError(f"optimizer must be one of {', '.join(MOMENTS)}; got {name!r}")
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-5, weight_decay=0.0)
    bitsandbytes = require("bitsandbytes", extra="gpu", why="for optimizer='adamw_8bit'")
    return bitsandbytes.optim.AdamW8bit(parameters, lr=1e-5, weight_decay=0.0)


def checkpoint_gradients(model: Any) -> None:
    """Keep only the inputs of a transformers model's layers and compute them again in the backward pass."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    recompute_activations(model)


def recompute_activations(model: torch.nn.Module) -> None:
    """Put a model whose gradient checkpointing is on into the mode in which it takes place, without
    the dropout that the mode would bring: a policy's logprobs are not random."""
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
