"""What a backend is: four verbs, undo, saving and loading; nothing above knows which it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from artnb.config import SamplingConfig, TrainConfig
from artnb.types import Sample

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class SampleRequest:
    """One prompt to continue."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingConfig
    stop_ids: tuple[int, ...] = ()
    """Token ids that end the completion; the sampled stop token is kept."""
    top_logprobs: int = 0
    """How many alternatives to report beside each sampled token."""
    request_id: str = ""
    structured: Mapping[str, Any] | None = None
    """A form that the completion must have: one of ``json_schema`` (a schema), ``regex`` (a pattern)
    or ``choice`` (a list of texts). Engines that cannot force it raise RequestError."""
    on_token: Callable[[int], object] | None = field(default=None, repr=False, compare=False)
    """Called with each token id as it is sampled, on the engine's thread: quick, and never raising. The
    result still holds them all."""


@dataclass(frozen=True)
class SampleResult:
    """What the engine sampled for a request."""

    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural log-probabilities of the sampled ids under the processed distribution."""
    finish_reason: str
    """``stop`` (a stop token or stop string) or ``length``."""
    policy_version: int
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each sampled token up to ``top_logprobs`` pairs (token id, logprob)."""
    queued: float = 0.0
    """Seconds between submission and the first prefill."""
    seconds: float = 0.0
    """Seconds between submission and the last token."""


@dataclass(frozen=True)
class Publication:
    """Proof that the engine serves a policy version."""

    policy_version: int
    seconds: float
    probe_mean: float
    """Mean |logprob(engine) - logprob(trainer)| on a fixed prompt."""
    probe_max: float
    tolerance: float
    rounding_lost: float
    """Share of the adapter's update (L2 norm) that rounding to the engine's dtype lost."""
    changed: bool
    """False when the published weights equal the previous ones bit for bit."""


class TokenValues(NamedTuple):
    """What a trainer made of one row's sampled tokens, in order: arrays (S,).

    Shorter than the row where its end did not fit into memory.
    """

    logprobs: np.ndarray
    """float32, of the policy before the update, at the row's temperature."""
    entropies: np.ndarray | None = None
    """float32, in nats."""
    is_masked: np.ndarray | None = None
    """bool: left out of the loss by ``TrainConfig.mask``."""


class StepStats(dict[str, float]):
    """What was measured in forward_backward, by name, and perhaps of each token."""

    tokens: Sequence[TokenValues] | None = None
    """One for each sample."""


@runtime_checkable
class Backend(Protocol):
    """A place where a policy is sampled from and trained.

    All coroutines may be awaited from the notebook's event loop; slow work runs in the backend's
    own threads. Cancelling ``sample`` frees its slot at once.
    """

    tokenizer: Any
    """A transformers tokenizer with a chat template."""
    base_model: str
    max_context: int
    """Longest prompt plus completion, in tokens."""

    @property
    def policy_version(self) -> int:
        """Version that ``sample`` serves: the number of finished training steps."""
        ...

    async def sample(self, request: SampleRequest, *, policy: str = "current") -> SampleResult:
        """Continue one prompt. ``policy``: ``current``, ``base``, or a checkpoint name such as
        ``step_000012``. Raises PromptTooLong, NonFiniteLogits."""
        ...

    async def forward_backward(
        self, samples: Sequence[Sample], config: TrainConfig, *, loss_denominator: float
    ) -> dict[str, float]:
        """Accumulate the gradient of the objective on these rows; returns its statistics.

        They may be a StepStats with the values of each token, which a step then records; a plain dict
        will do."""
        ...

    async def optim_step(self, config: TrainConfig) -> dict[str, float]:
        """Apply the accumulated gradient once and clear it; returns grad_norm."""
        ...

    async def publish_weights(self, policy_version: int) -> Publication:
        """Make the engine serve the trained weights under this version, and prove it."""
        ...

    async def snapshot(self) -> Any:
        """Policy, optimizer and version as they are now, held in memory for ``restore``."""
        ...

    async def restore(self, snapshot: Any) -> None:
        """Undo every gradient, update and publication since ``snapshot`` was taken."""
        ...

    async def save(self, folder: Path) -> None:
        """Write adapter, optimizer and RNG state as safetensors and JSON into an existing folder."""
        ...

    async def load(self, folder: Path, *, policy_version: int) -> None:
        """Restore what ``save`` wrote and serve it. Raises CheckpointError."""
        ...

    async def load_adapter(self, folder: Path) -> None:
        """Start from the policy of another run's checkpoint: a fresh optimizer, version 0. Raises
        CheckpointError."""
        ...

    def describe(self) -> dict[str, Any]:
        """Facts worth recording: dtype, device, engine; and under ``identity`` what must match for a
        run to be continued: base model, tokenizer, adapter shape."""
        ...

    async def close(self) -> None:
        """Stop threads and free memory. Idempotent."""
        ...
