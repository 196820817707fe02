"""The knobs of sampling, the adapter and the training step: small, frozen, with vetted defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from artnb.errors import ConfigurationError

LossName = Literal["cispo", "ppo", "gspo", "reinforce", "dppo"]
AdvantageName = Literal["mean", "grpo", "rloo"]
AggregateName = Literal["token", "trajectory", "constant"]
MaskName = Literal["none", "token", "sequence"]


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigurationError(message)


@dataclass(frozen=True)
class SamplingConfig:
    """How the engine draws tokens. Training wants temperature 1 and no truncation."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        _check(self.temperature >= 0, f"temperature must be >= 0, got {self.temperature}")
        _check(0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}")
        _check(self.top_k >= 0, f"top_k must be >= 0 (0 keeps every token), got {self.top_k}")
        _check(0 <= self.min_p < 1, f"min_p must be in [0, 1), got {self.min_p}")
        _check(self.max_tokens >= 1, f"max_tokens must be >= 1, got {self.max_tokens}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        _check(all(stop), "stop strings must not be empty")
        object.__setattr__(self, "stop", stop)

    @property
    def truncates(self) -> bool:
        """True when part of the vocabulary is cut off, which biases the policy ratio."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def replace(self, **changes: Any) -> SamplingConfig:
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class LoraConfig:
    """Shape of the adapter (LoRA, https://arxiv.org/abs/2106.09685)."""

    rank: int = 8
    alpha: float = 16.0
    targets: str | Sequence[str] = "all-linear"
    """``all-linear`` or names of linear layers, for example ``("q_proj", "v_proj")``."""
    seed: int = 0
    """Seed of the adapter's random A matrices; B starts at zero."""

    def __post_init__(self) -> None:
        _check(self.rank >= 1, f"LoRA rank must be >= 1, got {self.rank}")
        _check(self.alpha > 0, f"LoRA alpha must be > 0, got {self.alpha}")
        if not isinstance(self.targets, str):
            object.__setattr__(self, "targets", tuple(self.targets))

    @property
    def peft_targets(self) -> str | list[str]:
        """The targets as peft and JSON want them."""
        return self.targets if isinstance(self.targets, str) else list(self.targets)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class TrainConfig:
    """How rewards become one update of the adapter."""

    learning_rate: float = 5e-5
    loss: LossName = "cispo"
    """cispo (MiniMax-M1, arXiv 2506.13585), ppo (arXiv 1707.06347), gspo (arXiv 2507.18071),
    reinforce (no correction for the sampling policy), dppo (mask on the change of probability)."""
    advantage: AdvantageName = "mean"
    """mean: reward minus group mean; grpo: also divided by the group's standard deviation
    (arXiv 2402.03300); rloo: minus the mean of the others (arXiv 2402.14740)."""
    aggregate: AggregateName = "token"
    """token: mean over all sampled tokens of the step (DAPO, arXiv 2503.14476); trajectory: every
    trajectory weighs the same; constant: divided by constant_tokens per trajectory (Dr.GRPO,
    arXiv 2503.20783)."""
    constant_tokens: int = 256
    ratio_cap: float = 5.0
    """Upper bound of the ratio in cispo; 2 is usual where it only mends engine against trainer."""
    mask: MaskName = "none"
    """What is left out of any loss when the trained policy's probability over the sampling engine's lies
    outside [mask_low, mask_high]. token: each token by its own ratio (as IcePop, arXiv 2510.18855);
    sequence: whole rows by the geometric mean of their sampled tokens' ratios, which does not grow with
    length. Early in a step the ratio is engine against trainer; later updates add the policy's change."""
    mask_low: float = 0.5
    mask_high: float = 2.0
    """The defaults suit tokens. A row's mean is steadier: SkyRL advises 0.99 and 1.01 for long rows."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    dppo_threshold: float = 0.2
    kl_coef: float = 0.0
    """Weight of the k3 estimate of KL(policy || base); needs one more forward when > 0."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus."""
    credit_weight: float = 0.0
    """w in A = (1 - w) * A_trajectory + w * (turn credit - baseline)."""
    minibatches: int = 1
    """Optimizer updates in one step."""
    max_samples: int | None = None
    """Train on at most this many rows a step. Rows with large advantages are drawn sooner and weigh
    less in return, so that the expected gradient stays (see ``draw``); the rest are counted, not lost."""
    microbatch_tokens: int = 4096
    """Packed tokens in one forward and backward."""
    share_prefixes: bool = True
    """Compute a prompt that several rows share once."""
    max_staleness: int = 0
    """How many policy versions old a turn may be."""
    record_tokens: bool = True
    """Keep the trainer's logprob, the advantage and the loss weight of every sampled token in the run's
    ``tokens`` folder: 12 to 16 bytes a token, and nothing computed for it."""
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        names = {"loss": LossName, "advantage": AdvantageName, "aggregate": AggregateName, "mask": MaskName}
        for name, literal in names.items():
            allowed = literal.__args__  # type: ignore[attr-defined]
            value = getattr(self, name)
            _check(value in allowed, f"{name} must be one of {', '.join(allowed)}; got {value!r}")
        _check(self.learning_rate > 0, f"learning_rate must be > 0, got {self.learning_rate}")
        _check(self.minibatches >= 1, f"minibatches must be >= 1, got {self.minibatches}")
        _check(0 <= self.credit_weight <= 1, f"credit_weight must be in [0, 1], got {self.credit_weight}")
        _check(self.ratio_cap > 0, f"ratio_cap must be > 0, got {self.ratio_cap}")
        _check(
            0 <= self.mask_low < 1 < self.mask_high,
            "mask_low must be in [0, 1) and mask_high > 1 (float('inf') for no limit), "
            f"got {self.mask_low} and {self.mask_high}",
        )
        _check(self.max_staleness >= 0, f"max_staleness must be >= 0, got {self.max_staleness}")
        _check(self.microbatch_tokens >= 1, "microbatch_tokens must be >= 1")
        _check(self.max_grad_norm > 0, "max_grad_norm must be > 0; use float('inf') for no limit")
        _check(self.max_samples is None or self.max_samples >= 1, "max_samples must be >= 1 or None")

    def replace(self, **changes: Any) -> TrainConfig:
        known = {f.name for f in dataclasses.fields(self)}
        unknown = sorted(set(changes) - known)
        _check(
            not unknown, f"unknown training option {', '.join(unknown)}; known: {', '.join(sorted(known))}"
        )
        return dataclasses.replace(self, **changes)
