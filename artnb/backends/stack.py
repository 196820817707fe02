"""Which trainer and which engine hold the model in this kernel, and how are they made?

On a CPU: transformers with peft, and our own engine on the same tensors. On a GPU: Unsloth and vLLM.
Each can be chosen by name; the results are the same within rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from artnb.backends.quiet import without_bars, without_remarks
from artnb.backends.trainer import Trainer
from artnb.config import LoraConfig
from artnb.errors import ConfigurationError

EngineName = Literal["torch", "vllm"]
TrainerName = Literal["peft", "unsloth"]
Provider = Callable[[str], tuple[Any, int]]


@dataclass(frozen=True)
class Stack:
    """A trainer and an engine by name, and where they run."""

    trainer: TrainerName
    engine: EngineName
    device: str
    """``cpu`` or ``cuda``"""


def choose(trainer: str | None = None, engine: str | None = None) -> Stack:
    """The stack of this machine, or the one that is named. Raises ConfigurationError."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    on_gpu = device == "cuda"
    trainer = trainer or ("unsloth" if on_gpu else "peft")
    engine = engine or ("vllm" if on_gpu else "torch")
    for kind, name, known in (
        ("trainer", trainer, TrainerName.__args__),  # type: ignore[attr-defined]
        ("engine", engine, EngineName.__args__),  # type: ignore[attr-defined]
    ):
        if name not in known:
            raise ConfigurationError(f"{kind} must be one of {', '.join(known)}; got {name!r}")
    if on_gpu and engine == "torch":
        raise ConfigurationError('the torch engine samples on CPUs only; use engine="vllm" on a GPU')
    return Stack(trainer, engine, device)  # type: ignore[arg-type]


def prepare(stack: Stack) -> None:
    """Import what has to come before transformers. Raises MissingDependency, ConfigurationError."""
    if stack.trainer == "unsloth":
        from artnb.backends.trainer_unsloth import import_unsloth

        with without_remarks():
            import_unsloth()


_TRAINER_OPTIONS = ("gradient_checkpointing", "optimizer", "full_finetuning")
"""What either trainer takes; the rest goes to Unsloth's ``from_pretrained``."""


def trains_all(
    stack: Stack, lora: LoraConfig, trainer_options: Mapping[str, Any], engine_options: Mapping[str, Any]
) -> bool:
    """Whether all weights learn instead of an adapter. Raises ConfigurationError where that cannot be."""
    if not trainer_options.get("full_finetuning"):
        return False
    problems = {
        "trains no adapter: leave lora out": lora != LoraConfig(),
        'needs trainer="peft" on a GPU: Unsloth\'s kernels were not tried with it': (
            stack.trainer == "unsloth" and stack.device != "cpu"
        ),
        "needs weights that are not in 4 bit": bool(trainer_options.get("load_in_4bit")),
        'publishes merged weights: leave publish="lora" out': engine_options.get("publish") == "lora",
    }
    for problem, is_there in problems.items():
        if is_there:
            raise ConfigurationError(f"trainer_kwargs: full_finetuning {problem}")
    return True


def check_full_fits(base: str | Path, dtype: torch.dtype, options: Mapping[str, Any], capacity: int) -> None:
    """Refuse a model of which training all weights takes more than ``capacity`` bytes. Nothing is loaded.

    Activations and the engine's cache come on top.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(base)
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    moments = 2 if options.get("optimizer") == "adamw_8bit" else 8
    copies = "in the model's dtype: base, trained, published, the engine's"
    wide = f"of float32: the trained one, its gradient, {moments} bytes of moments, and undo"
    each = 4 * dtype.itemsize + 4 + 4 + moments + (4 + moments)
    if count * each > capacity:
        raise ConfigurationError(
            f"full_finetuning of {base} needs {count * each / 1e9:.1f} GB before any activation: "
            f"{count / 1e6:.0f} M parameters of {each} bytes ({copies}; {wide}). There are "
            f"{capacity / 1e9:.1f} GB. Train an adapter instead (leave full_finetuning out), or a smaller "
            "model"
        )


def load_model(
    stack: Stack,
    base: str | Path,
    dtype: torch.dtype,
    lora: LoraConfig,
    options: Mapping[str, Any],
    engine_options: Mapping[str, Any],
) -> Any:
    """The frozen base model, its attention ours, on a GPU with the engine that Unsloth makes on it where
    that can be. Raises ConfigurationError."""
    rest = {name: value for name, value in options.items() if name not in _TRAINER_OPTIONS}
    if stack.trainer == "unsloth":
        from artnb.backends import trainer_unsloth

        trainer_unsloth.import_unsloth()  # before transformers
        _check_attention(base)
        checkpointing = bool(options.get("gradient_checkpointing", False))
        if stack.device != "cpu" and stack.engine == "vllm":
            from artnb.backends.vllm_memory import shared_options

            rest |= shared_options(base, dtype, lora, options, engine_options)
        return trainer_unsloth.load(base, dtype=dtype, gradient_checkpointing=checkpointing, **rest)[0]
    if rest:
        raise ConfigurationError(
            f"trainer_kwargs: the peft trainer has no {', '.join(sorted(rest))}; it knows "
            f'{" and ".join(_TRAINER_OPTIONS)}. Others go to Unsloth: trainer="unsloth"'
        )
    return _transformers_model(base, dtype, stack.device)


def make_trainer(stack: Stack, model: Any, lora: LoraConfig, options: Mapping[str, Any]) -> Trainer:
    """What is trained of a model that ``load_model`` made, with its optimizer: an adapter, or all weights.

    options: ``gradient_checkpointing`` and ``optimizer``, see ``Trainer``; ``full_finetuning``.
    """
    own = {name: options[name] for name in _TRAINER_OPTIONS if name in options}
    if own.pop("full_finetuning", False):
        from artnb.backends.trainer_full import FullTrainer

        return FullTrainer(model, **own)
    if stack.trainer == "peft":
        from artnb.backends.trainer_peft import PeftTrainer

        return PeftTrainer(model, lora, **own)
    from artnb.backends.trainer_unsloth import UnslothTrainer

    # on a CPU Unsloth has no layers of its own: one product instead of three is faster there
    merged = stack.device == "cpu" and not options.get("load_in_4bit")
    return UnslothTrainer(model, lora, merged=merged, **own)


def _transformers_model(base: str | Path, dtype: torch.dtype, device: str) -> Any:
    import transformers

    from artnb.backends import attention

    attention.register()
    _check_attention(base)
    with without_bars():
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            base, dtype=dtype, attn_implementation=attention.NAME
        )
    return model.requires_grad_(False).to(device)


def _check_attention(base: str | Path) -> None:
    import transformers

    from artnb.backends.attention import check_supported

    check_supported(transformers.AutoConfig.from_pretrained(base))


def make_engine(
    stack: Stack,
    base: str | Path,
    model: Any,
    tokenizer: Any,
    provider: Provider,
    compute: Executor,
    *,
    lora: LoraConfig | None,
    seed: int,
    options: Mapping[str, Any],
    trainer_options: Mapping[str, Any],
) -> Any:
    """The engine, on its compute thread. Ours shares the tensors of ``model``, which must not have an
    adapter yet; vLLM loads its own, unless Unsloth put it on the same ones (``fast_inference=True``).
    lora: None where all weights are trained."""
    if stack.engine == "torch":
        from artnb.backends.engine_torch import TorchEngine

        make: Callable[..., Any] = TorchEngine
        arguments: tuple[Any, ...] = (model, tokenizer, provider, compute)
        own: dict[str, Any] = {}
    else:
        from artnb.backends.engine_vllm import VllmEngine

        make, arguments = VllmEngine, (base, tokenizer, provider, compute)
        own = {
            "dtype": model.dtype,
            **({"lora_rank": lora.rank} if lora else {"publish": "merged"}),
            "llm": getattr(model, "vllm_engine", None),
        }
        if stack.device != "cpu" and own["llm"] is None:
            from artnb.backends.vllm_memory import planned_options

            own |= planned_options(model, stack.trainer, lora, options, trainer_options)
    try:
        return make(*arguments, seed=seed, **{**own, **options})
    except TypeError as error:
        raise ConfigurationError(f"engine_kwargs: {error}") from error
