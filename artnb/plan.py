"""Does a model fit, how long does a step take, and what is to be lowered when it does not fit?

Nothing is loaded: the answer comes from the model's configuration and the formulas of ``memory``. On a
loaded model ``Plan.compare`` sets every planned item beside what is really held.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from artnb import memory
from artnb.architecture import read_config
from artnb.bundled import BUNDLED
from artnb.config import LoraConfig, TrainConfig
from artnb.errors import ConfigurationError
from artnb.memory import GPUS, ITEMSIZE, Item, Setting, size_text
from artnb.ui.html import esc, facts_html, table_html, visible
from artnb.ui.snapshot import seconds_text
from artnb.ui.text import table_text

if TYPE_CHECKING:
    from artnb.measure import Comparison

_BUNDLED_CONFIG = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def plan(
    base: Any = None,
    device: str | int | None = None,
    *,
    context: int = 4096,
    prompt: int | None = None,
    sampled: int | None = None,
    group_size: int = 8,
    groups: int = 8,
    lora: LoraConfig | None = None,
    load_in_4bit: bool = False,
    dtype: str | None = None,
    engine: Literal["torch", "vllm"] | None = None,
    trainer: Literal["peft", "unsloth"] | None = None,
    microbatch_tokens: int | None = None,
    kv_bytes: int | None = None,
    max_running: int = 128,
    gradient_checkpointing: bool = False,
    full_finetuning: bool = False,
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw",
    sampled_per_second: float | None = None,
    trained_per_second: float | None = None,
) -> Plan:
    """Plan a model's memory and steps before anything is loaded.

    base: None for the bundled model, a folder, a Hugging Face id (only its config.json is fetched), a
    mapping like config.json, or a transformers config. device: None for this machine, ``cpu``, a GPU
    (``T4``, ``L4``, ``A100-40``, ``A100-80``, ``H100``, ``H200``), or the bytes of any other GPU.
    context: tokens of the longest trajectory; prompt: how many of them, from the start, a group shares
    (half of them when not given); sampled: how many the model writes (the rest). groups: groups of
    ``group_size`` trajectories in a step. engine, trainer: torch and peft on a CPU, vllm and unsloth on
    a GPU when not given. full_finetuning: all weights learn instead of an adapter (on a GPU with peft).
    optimizer: ``adamw``, or ``adamw_8bit`` of bitsandbytes. kv_bytes: room for keys and values.
    sampled_per_second, trained_per_second: measured tokens per second of sampling and of training, for
    the minutes of a step.

    Raises ConfigurationError when the configuration cannot be read or a parameter cannot work.

    >>> found = plan(device="T4", context=2048)
    >>> found.fits, found.tokens_per_step["sampled"]
    (True, 65536)
    """
    kind, capacity = _device(device)
    on_gpu = kind != "cpu"
    config = read_config(_BUNDLED_CONFIG if base is None else base)
    setting = Setting.of(
        config,
        base=_name(base, config),
        device=kind,
        capacity=capacity,
        dtype=_dtype(dtype, kind),
        engine=_one_of("engine", engine or ("vllm" if on_gpu else "torch"), ("torch", "vllm")),
        trainer=_one_of("trainer", trainer or _trainer(on_gpu, full_finetuning), ("peft", "unsloth")),
        lora=lora or LoraConfig(),
        context=context,
        prompt=prompt,
        sampled=sampled,
        group_size=group_size,
        groups=groups,
        load_in_4bit=load_in_4bit,
        microbatch_tokens=microbatch_tokens or TrainConfig.microbatch_tokens,
        kv_bytes=kv_bytes,
        max_running=max_running,
        gradient_checkpointing=gradient_checkpointing,
        full_finetuning=full_finetuning,
        optimizer=_one_of("optimizer", optimizer, tuple(memory.MOMENTS)),
    )
    _check(setting)
    return Plan(setting, sampled_per_second, trained_per_second)


def _name(base: Any, config: Any) -> str:
    if isinstance(base, str | Path):
        return str(base)
    return BUNDLED if base is None else config.name_or_path or config.model_type


def _trainer(on_gpu: bool, full_finetuning: bool) -> str:
    return "unsloth" if on_gpu and not full_finetuning else "peft"


def _device(device: str | int | None) -> tuple[str, int]:
    if device is None:
        return memory.machine()
    if device == "cpu":
        return "cpu", memory.cpu_bytes()
    if isinstance(device, str) and device in GPUS:
        return device, GPUS[device]
    if isinstance(device, int) and device > 0:
        return "gpu", device
    raise ConfigurationError(
        f"device must be None, 'cpu', {', '.join(map(repr, GPUS))} or bytes of memory; got {device!r}"
    )


def _dtype(name: str | None, device: str) -> str:
    if name is not None:
        return _one_of("dtype", name, tuple(ITEMSIZE))
    if device == "T4":
        return "float16"  # it has no bfloat16
    if device != "cpu":
        return "bfloat16"
    from artnb.backends.local import multiplies_bfloat16

    return "bfloat16" if multiplies_bfloat16() else "float32"


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> Any:
    if value not in allowed:
        raise ConfigurationError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
    return value


def _check(setting: Setting) -> None:
    for name in ("context", "sampled", "group_size", "groups", "microbatch_tokens", "max_running"):
        if getattr(setting, name) < 1:
            raise ConfigurationError(f"{name} must be >= 1, got {getattr(setting, name)}")
    if setting.prompt < 0 or setting.prompt + setting.sampled > setting.context:
        raise ConfigurationError(
            f"a prompt of {setting.prompt} and {setting.sampled} sampled tokens do not fit a context of "
            f"{setting.context}"
        )
    if setting.context > setting.architecture.max_context:
        raise ConfigurationError(
            f"context={setting.context}, but {setting.base} has positions for "
            f"{setting.architecture.max_context} tokens"
        )
    if setting.load_in_4bit and not setting.on_gpu:
        raise ConfigurationError(
            "load_in_4bit needs a GPU: bitsandbytes has no such kernels for training here"
        )
    if setting.load_in_4bit and setting.trainer != "unsloth":
        raise ConfigurationError('load_in_4bit needs trainer="unsloth": the peft trainer does not quantise')
    setting.architecture.targets(setting.lora)
    if setting.full_finetuning:
        _check_full(setting)


def _check_full(setting: Setting) -> None:
    problems = {
        "trains no adapter: leave lora out": setting.lora != LoraConfig(),
        'needs trainer="peft" on a GPU': setting.on_gpu and setting.trainer != "peft",
        "needs weights that are not in 4 bit": setting.load_in_4bit,
    }
    for problem, is_there in problems.items():
        if is_there:
            raise ConfigurationError(f"full_finetuning {problem}")


@dataclass(frozen=True)
class Plan:
    """What a model will hold, whether that fits, and how much work a step is."""

    setting: Setting
    sampled_per_second: float | None = None
    trained_per_second: float | None = None
    other_seconds: float = 0.0
    """Of a step, for publication and checkpoint."""

    @property
    def items(self) -> tuple[Item, ...]:
        return self.setting.items

    @property
    def total(self) -> int:
        """Bytes at the worst moment: what is held, and the larger of sampling and training."""
        return self.setting.total

    @property
    def left(self) -> int:
        """Bytes that stay free; negative when it does not fit."""
        return self.setting.capacity - self.total

    @property
    def fits(self) -> bool:
        return self.setting.fits

    @property
    def weight_copies(self) -> int:
        """Copies of the linear layers' weights: 1 where engine and trainer share them on a GPU."""
        names = ("base weights", "merged weights", "trained weights", "packed weights", "engine weights")
        return sum(item.name in names for item in self.items)

    @property
    def tokens_per_step(self) -> dict[str, int]:
        """``sampled``: written by the model; ``packed``: trained on, shared prompts once; ``rows``: twice."""
        s = self.setting
        return {
            "sampled": s.trajectories * s.sampled,
            "packed": s.packed_tokens,
            "rows": s.trajectories * s.context,
        }

    @property
    def minutes_per_step(self) -> float | None:
        """Expected minutes, once both rates were measured."""
        if not self.sampled_per_second or not self.trained_per_second:
            return None
        tokens = self.tokens_per_step
        sampling = tokens["sampled"] / self.sampled_per_second
        return (sampling + tokens["packed"] / self.trained_per_second + self.other_seconds) / 60

    @property
    def concurrency(self) -> int:
        """Trajectories of the full context that sample at once."""
        return min(self.setting.sequences, memory.kv_sequences(self.setting))

    @cached_property
    def largest_concurrency(self) -> int:
        """How many could, if all the memory that is left held keys and values; 0 when not one."""
        s = self.setting
        rest = sum(item.bytes for item in s.items if item.phase != "training" and item.name != "KV cache")
        if not s.on_gpu:  # the cache stays while the trainer works
            rest = s.total - s.bytes_of("KV cache")
        return max(0, (s.capacity - rest - memory.kv_prompts(s)) // memory.kv_per_sequence(s))

    @cached_property
    def longest_context(self) -> int:
        """The longest trajectory that fits with everything else unchanged, in steps of 256; 0 if none."""
        low, high = 0, self.setting.architecture.max_context // 256
        while low < high:
            middle = (low + high + 1) // 2
            if self.setting.with_context(middle * 256).fits:
                low = middle
            else:
                high = middle - 1
        return low * 256

    @cached_property
    def advice(self) -> list[str]:
        """What to change so that it fits; empty when it does."""
        if self.fits:
            return []
        single = [(text, s) for text, s in _changes(self.setting) if s.total < 0.99 * self.total]
        lines = []
        for text, changed in single:
            saved = size_text(self.total - changed.total)
            lines.append(f"{text} saves {saved}" + (": then it fits" if changed.fits else ""))
        if not any(changed.fits for _, changed in single):
            lines.append(self._together())
        return lines

    def _together(self) -> str:
        setting, texts = copy.copy(self.setting), []
        for name in _CHANGES:
            for text, changed in name(setting):
                if changed.total < 0.99 * setting.total:
                    texts.append(text)
                    setting = changed
            if setting.fits:
                return f"together these fit: {', '.join(texts)}"
        weights = sum(i.bytes for i in setting.items if i.name.endswith("weights"))
        room = setting.capacity - (setting.total - weights)
        most = max(0.0, room / weights) * setting.architecture.parameters
        return f"choose a smaller base: at these settings about {_count_text(most)} parameters fit"

    @cached_property
    def notes(self) -> list[str]:
        """What a reader should know about these figures."""
        s = self.setting
        notes = [
            f"{self.weight_copies} × the linear weights: "
            + ", ".join(i.name for i in self.items if i.name.endswith("weights"))
        ]
        if s.shares_weights:
            notes.append('one copy of the base for both: Model(trainer_kwargs={"fast_inference": True})')
        elif second := s.bytes_of("engine weights"):
            notes.append(
                f"two copies of the base weights: vLLM holds {size_text(second)} of its own; it shares the "
                'trainer\'s only on a GPU, with trainer="unsloth", trainer_kwargs={"fast_inference": True}'
            )
        if s.load_in_4bit and s.architecture.experts:
            notes.append(f"routed experts stay in {s.dtype}: bitsandbytes makes only linear layers small")
        if s.architecture.experts and s.full_finetuning:
            notes.append("routed experts do not learn: they are no layers of their own")
        elif s.architecture.experts and s.lora.targets == "all-linear":
            notes.append("routed experts get no adapter: name the linear layers in LoraConfig(targets=...)")
        if s.architecture.latent and s.engine == "torch":
            notes.append("the torch engine does not run latent attention; the cache is vLLM's")
        if s.on_gpu:
            notes.append("computed for this GPU, not measured on one")
        return notes

    def compare(self, model: Any) -> Comparison:
        """This plan beside what a loaded model really holds. model: a ``Model`` or its backend."""
        from artnb.measure import compare

        return compare(self, model)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: every item and every answer."""
        s = self.setting
        return {
            "base": s.base,
            "device": s.device,
            "capacity": s.capacity,
            "total": self.total,
            "left": self.left,
            "fits": self.fits,
            "items": [asdict(item) for item in self.items],
            "parameters": s.architecture.parameters,
            "active_parameters": s.architecture.active_parameters,
            "trained_parameters": s.trained,
            "weight_copies": self.weight_copies,
            "tokens_per_step": self.tokens_per_step,
            "minutes_per_step": self.minutes_per_step,
            "concurrency": self.concurrency,
            "largest_concurrency": self.largest_concurrency,
            "longest_context": self.longest_context,
            "advice": self.advice,
            "notes": self.notes,
        }

    # ---- on screen ----------------------------------------------------------------------------

    def _title(self) -> str:
        s = self.setting
        answer = f"fits, {size_text(self.left)} left" if self.fits else f"{size_text(-self.left)} too much"
        where = f"{s.device}, {s.engine} + {s.trainer}"
        return f"{s.base} on {where}: {size_text(self.total)} of {size_text(s.capacity)}, {answer}"

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {"memory": i.name, "size": size_text(i.bytes), "when": i.phase, "how": i.how} for i in self.items
        ]

    def _facts(self) -> dict[str, str]:
        s, tokens = self.setting, self.tokens_per_step
        a = s.architecture
        active = f", {_count_text(a.active_parameters)} active" if a.experts else ""
        facts = {
            "parameters": f"{_count_text(a.parameters)}{active}",
            "a step": f"{tokens['sampled']:,} sampled, {tokens['packed']:,} trained tokens "
            f"({tokens['rows']:,} unshared)",
            "at once": f"{self.concurrency} trajectories, {self.largest_concurrency} would fit",
            "longest context": f"{self.longest_context:,} tokens",
        }
        minutes = self.minutes_per_step
        facts["expected"] = "not measured yet" if minutes is None else f"{seconds_text(60 * minutes)} a step"
        facts |= {f"note {i}": note for i, note in enumerate(self.notes, 1)}
        return facts | {f"advice {i}": line for i, line in enumerate(self.advice, 1)}

    def __repr__(self) -> str:
        facts = [f"{name}: {value}" for name, value in self._facts().items()]
        return visible("\n".join([self._title(), table_text(self._rows()), *facts]))

    def _repr_html_(self) -> str:
        body = table_html(self._rows()) + facts_html(self._facts())
        return f"<div><b>{esc(self._title())}</b>{body}</div>"


# ---- what can be lowered, in the order in which it hurts least ------------------------------------

Changes = Iterator[tuple[str, Setting]]


def _share_weights(s: Setting) -> Changes:
    if s.on_gpu and s.engine == "vllm" and s.trainer != "unsloth" and not s.full_finetuning:
        yield 'trainer="unsloth" (one copy of the base)', replace(s, trainer="unsloth")


def _four_bits(s: Setting) -> Changes:
    if s.on_gpu and s.trainer == "unsloth" and not s.load_in_4bit:
        yield "load_in_4bit=True", replace(s, load_in_4bit=True)


def _eight_bits(s: Setting) -> Changes:
    if s.optimizer == "adamw" and s.on_gpu:
        yield 'optimizer="adamw_8bit"', replace(s, optimizer="adamw_8bit")


def _adapter(s: Setting) -> Changes:
    if s.full_finetuning:
        yield "full_finetuning=False (an adapter)", replace(s, full_finetuning=False)


def _microbatch(s: Setting) -> Changes:
    yield from _lowered(s, "microbatch_tokens", s.microbatch_tokens, 256)


def _checkpointing(s: Setting) -> Changes:
    if not s.gradient_checkpointing:
        yield "gradient_checkpointing=True", replace(s, gradient_checkpointing=True)


def _cache(s: Setting) -> Changes:
    if s.engine == "torch" or s.kv_bytes:
        yield from _lowered(s, "kv_bytes", s.kv_bytes or 3 << 30, 64 << 20)


def _group(s: Setting) -> Changes:
    yield from _lowered(s, "group_size", s.group_size, 4)


def _context(s: Setting) -> Changes:
    """A shorter context lets micro-batches be as short."""
    options = [
        replace(s.with_context(c), microbatch_tokens=min(c, s.microbatch_tokens))
        for c in _halves(s.context, 256)
    ]
    best = next((each for each in options if each.fits), options[-1] if options else None)
    if best is not None:
        yield f"context={best.context} with microbatch_tokens={best.microbatch_tokens}", best


def _lowered(s: Setting, name: str, value: int, least: int) -> Changes:
    """The largest halved value with which it fits, or the least one."""
    options = [replace(s, **{name: half}) for half in _halves(value, least)]  # type: ignore[arg-type]
    best = next((each for each in options if each.fits), options[-1] if options else None)
    if best is not None:
        yield f"{name}={getattr(best, name)}", best


def _halves(value: int, least: int) -> list[int]:
    halves = []
    while value // 2 >= least:
        value //= 2
        halves.append(value)
    return halves


_CHANGES = (
    *(_share_weights, _four_bits, _eight_bits, _microbatch, _checkpointing),
    *(_cache, _adapter, _group, _context),
)


def _changes(setting: Setting) -> Changes:
    for change in _CHANGES:
        yield from change(setting)


def _count_text(count: float) -> str:
    """
    >>> _count_text(7_615_616_512), _count_text(134_515_008)
    ('7.62 B', '135 M')
    """
    for unit, scale in (("T", 1e12), ("B", 1e9)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count / 1e6:.3g} M"
