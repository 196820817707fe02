"""What does a model in this kernel hold in memory, item by item, while it samples and while it trains?

Every figure is a formula over a configuration; each item says its own. What stands under ``held`` is
there all the time, what stands under ``sampling`` or ``training`` only then.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from artnb.architecture import Architecture, architecture
from artnb.config import LoraConfig, TrainConfig
from artnb.errors import ConfigurationError
from artnb.sizes import CHUNK, SCORES_ON_CPU, SCORES_ON_GPU, SMALLEST_BLOCK

Phase = Literal["held", "sampling", "training"]

GPUS = {
    "T4": 15_100 << 20,
    "L4": 22_500 << 20,
    "A100-40": 40_300 << 20,
    "A100-80": 81_000 << 20,
    "H100": 81_000 << 20,
    "H200": 143_000 << 20,
}
"""Bytes that CUDA reports on each card, a little less than the name says."""

MOMENTS = {"adamw": 8.0, "adamw_8bit": 2 * (1 + 4 / 256)}
"""Bytes that an optimizer keeps of a parameter; of small tensors also the second keeps 8."""
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
FOUR_BITS = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of an nf4 weight: 4 bits, one byte of scale for 64 of them, one float32 for 256 scales."""
_RUNTIME = {"cpu": 380 << 20, "gpu": 1536 << 20}
"""CPU: Python with torch, transformers, peft and a kernel, measured. GPU: CUDA context, workspaces and
graphs, an allowance that was not measured."""
_PEFT_LOADS = {"bitsandbytes": 70 << 20, "torchao": 70 << 20}
"""What peft imports besides where it is installed; measured for both together."""
_VLLM = 200 << 20
"""What importing and making a vLLM engine takes on a CPU besides weights and cache; measured."""
_HOLES = {"one": 0.2, "several": 0.4}
"""Share of the training step's memory that the CPU's allocator loses between what is in use: measured
1.2 for one micro-batch in a step, 1.4 to 1.55 for several."""
_PREFILL = 2048
"""Prompt tokens that an engine reads in one forward."""
_FIRST_SLOT = 256
"""Tokens of a TorchEngine slot; they double until a sequence fits."""
_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
"""A container's limit, what of it is used, and for what: in cgroups of the second and the first kind."""
_SPARE = 0.05
"""Share of a GPU that a cache cut to fit leaves free: these figures are computed, not measured."""


@dataclass(frozen=True)
class Item:
    """One thing that takes memory."""

    name: str
    bytes: int
    phase: Phase
    how: str
    """The formula, or why there is this copy."""


@dataclass(frozen=True)
class Setting:
    """A model, a machine, and how it is to be used."""

    base: str
    architecture: Architecture
    device: str
    capacity: int
    """Bytes that may be used."""
    dtype: str
    engine: Literal["torch", "vllm"]
    trainer: Literal["peft", "unsloth"]
    lora: LoraConfig
    context: int
    """Longest trajectory, in tokens."""
    prompt: int
    """Tokens at its start that the members of a group share."""
    sampled: int
    """Tokens of a trajectory that the model writes."""
    group_size: int = 8
    groups: int = 8
    load_in_4bit: bool = False
    microbatch_tokens: int = TrainConfig.microbatch_tokens
    kv_bytes: int | None = None
    """Room for keys and values that is asked for; None: as much as is of use and there is."""
    max_running: int = 128
    gradient_checkpointing: bool = False
    full_finetuning: bool = False
    """All weights learn instead of an adapter."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    shared_weights: bool | None = None
    """Whether engine and trainer use one copy of the base; None: where Unsloth can have it so."""

    @classmethod
    def of(
        cls,
        config: Any,
        *,
        context: int = 4096,
        prompt: int | None = None,
        sampled: int | None = None,
        **rest: Any,
    ) -> Setting:
        """The setting of a configuration as ``architecture.read_config`` gives it. Half the context is a
        shared prompt where nothing else is said, and all the rest is sampled."""
        prompt = context // 2 if prompt is None else prompt
        sampled = context - prompt if sampled is None else sampled
        return cls(architecture=architecture(config), context=context, prompt=prompt, sampled=sampled, **rest)

    def with_context(self, context: int) -> Setting:
        """The same for another length, cut into prompt and sampled tokens in the same shares."""
        share = context / self.context
        own = max(1, int(self.sampled * share))
        return replace(
            self, context=context, prompt=min(int(self.prompt * share), context - own), sampled=own
        )

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def trajectories(self) -> int:
        return self.group_size * self.groups

    @property
    def shared(self) -> int:
        """Prompt tokens that are computed and cached once for a group."""
        return self.prompt if self.group_size > 1 else 0

    @property
    def packed_tokens(self) -> int:
        """Tokens of one training step, a shared prompt counted once."""
        own = self.context - self.shared
        return self.groups * self.shared + self.trajectories * own

    @property
    def batch_tokens(self) -> int:
        """Tokens of the largest micro-batch: whole groups where they fit; a longer row is alone in one."""
        group, most = self.packed_tokens // self.groups, max(self.microbatch_tokens, self.context)
        return min(most // group * group if group <= most else most, self.packed_tokens)

    @property
    def batch_sampled(self) -> int:
        return round(self.batch_tokens * self.trajectories * self.sampled / self.packed_tokens)

    @property
    def updates_at_once(self) -> bool:
        """A step has one micro-batch: what it computed is let go of before the gradients are complete."""
        return self.batch_tokens >= self.packed_tokens

    @property
    def trained(self) -> int:
        """Parameters that learn. Without an adapter all but biases and stacked experts, see FullTrainer."""
        a = self.architecture
        if not self.full_finetuning:
            return a.adapter_parameters(self.lora)
        return a.parameters - a.experts - sum(x.biases for x in a.linears)

    @property
    def sequences(self) -> int:
        """Trajectories that want to run at once."""
        return min(self.max_running, self.trajectories)

    @property
    def shares_weights(self) -> bool:
        """Engine and trainer use the same base weights: Unsloth's vLLM on a GPU."""
        can = self.engine == "vllm" and self.trainer == "unsloth" and self.on_gpu
        return can if self.shared_weights is None else can and self.shared_weights

    @cached_property
    def items(self) -> tuple[Item, ...]:
        found = [*_weights(self), *_learning(self), *_training(self), _working(self)]
        if not self.on_gpu:
            share = _HOLES["one" if self.updates_at_once else "several"]
            lost = int(share * _sum(found, "training"))
            how = f"{share:.0%} of the training step lie unused between what is in use"
            found.append(Item("allocator", lost, "training", how))
        device = "gpu" if self.on_gpu else "cpu"
        what = "CUDA context, workspaces (an allowance)" if self.on_gpu else "Python, torch, transformers"
        beside = 0
        if not self.on_gpu:
            beside = sum(size for name, size in _PEFT_LOADS.items() if find_spec(name))
            beside += _VLLM * (self.engine == "vllm")
        found.append(Item("runtime", _RUNTIME[device] + beside, "held", what))
        found.append(_kv_cache(self, found))
        return tuple(item for item in found if item.bytes)

    @property
    def total(self) -> int:
        """Bytes at the worst moment: what is held, and the larger of sampling and training."""
        return _sum(self.items, "held") + max(_sum(self.items, "sampling"), _sum(self.items, "training"))

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity

    def bytes_of(self, name: str) -> int:
        return sum(item.bytes for item in self.items if item.name == name)


def _sum(items: Any, phase: Phase) -> int:
    return sum(item.bytes for item in items if item.phase == phase)


def weight_bytes(setting: Setting) -> int:
    """One copy of the base. In 4 bit only linear layers are small: embeddings, output layer, norms and
    routed experts, which are no linear layers, stay as they are."""
    a = setting.architecture
    if not setting.load_in_4bit:
        return a.parameters * setting.itemsize
    return int(a.linear_weights * FOUR_BITS) + (a.parameters - a.linear_weights) * setting.itemsize


def _weights(setting: Setting) -> list[Item]:
    a, size = setting.architecture, setting.itemsize
    small = ", linear layers in 4 bit" if setting.load_in_4bit else ""
    how = f"{a.parameters:,} parameters in {setting.dtype}{small}"
    items = [Item("base weights", weight_bytes(setting), "held", how)]
    if setting.full_finetuning:
        how = "what learned, rounded to what the model computes with"
        items.append(Item("merged weights", setting.trained * size, "held", how))
    elif setting.trainer == "peft" or not setting.on_gpu:  # on a GPU Unsloth's layers read the factors
        merged = sum(x.weights for x in a.targets(setting.lora)) * size
        items.append(
            Item("merged weights", merged, "held", "W + scale * B @ A of each target, for the trainer")
        )
    if setting.engine == "torch" and not setting.on_gpu:
        packed = a.linear_weights + sum(x.biases for x in a.linears) + a.embedding
        how = "linear and output layers in oneDNN's order, for the engine"
        if setting.full_finetuning:
            packed += a.embedding + a.other
            how += "; embedding and norms as they learn"
        items.append(Item("packed weights", packed * size, "held", how))
    if setting.engine == "vllm" and not setting.shares_weights:
        how = "a second copy of the base: vLLM does not share weights with this trainer"
        copy = a.parameters
        if not setting.on_gpu:
            copy += 2 * a.embedding
            how += "; embedding and output layer are packed besides"
        items.append(Item("engine weights", copy * size, "held", how))
    return items


def _learning(setting: Setting) -> list[Item]:
    """What learns, with its optimizer, its gradient, and its past."""
    count, size = setting.trained, setting.itemsize
    moments = MOMENTS[setting.optimizer]
    if setting.full_finetuning:
        how = f"{count:,} parameters in float32, and as published in {setting.dtype}"
        own = [Item("trained weights", (4 + size) * count, "held", how)]
    else:
        how = f"{count:,} parameters, rank {setting.lora.rank}, float32, trained and published"
        room = size * count if setting.engine == "vllm" and setting.on_gpu else 0
        own = [
            Item("adapter", 8 * count, "held", how),
            Item("engine's adapter", room, "held", f"vLLM's own, {setting.dtype}"),
        ]
    kind = "8 bits" if setting.optimizer == "adamw_8bit" else "float32"
    return [
        *own,
        Item("optimizer", int(moments * count), "held", f"AdamW: two of {kind} for each"),
        Item("gradients", 4 * count, "training", "float32"),
        Item("undo", int((4 + moments) * count), "training", "weights and optimizer before the step"),
    ]


def _training(setting: Setting) -> list[Item]:
    a, size, tokens = setting.architecture, setting.itemsize, setting.batch_tokens
    full = setting.full_finetuning
    layer = saved_bytes(a, size, lean=setting.trainer == "peft" and not full, norms_learn=full)
    if setting.gradient_checkpointing:
        saved, how = tokens * (a.layers * a.hidden * size + layer), "one hidden state a layer, one layer open"
    else:
        saved, how = tokens * a.layers * layer, f"{a.layers} layers * {layer:,} bytes a token"
    saved += tokens * (3 * a.mlp_width * size + 16 * a.hidden)  # the layer whose backward pass runs
    items = [Item("activations", saved, "training", f"{tokens:,} tokens * ({how})")]
    own = min(tokens - setting.shared, setting.group_size * (setting.context - setting.shared))
    seen = max(own * setting.context if setting.shared else setting.context**2, setting.shared**2)
    most = max(SCORES_ON_GPU if setting.on_gpu else SCORES_ON_CPU, a.heads * SMALLEST_BLOCK * setting.context)
    scores, each = min(a.heads * seen, most), 2 * size
    how = f"{scores:,} at a time * {each} bytes: scores and their gradients"
    items.append(Item("attention scores", scores * each, "training", how))
    rows = min(CHUNK, setting.batch_sampled)
    logits = rows * a.vocabulary * (size + 8) + 3 * setting.batch_sampled * a.hidden * size
    items.append(Item("sampled logits", logits, "training", f"{rows} * vocabulary * {size + 8} bytes"))
    if full:
        how = "of output layer and embedding, before they are added up"
        items.append(Item("vocabulary gradients", (4 + size) * a.embedding, "training", how))
    if full and setting.on_gpu:
        room = max(0, 4 * setting.trained - saved)
        items.append(Item("update", room, "training", "AdamW's roots, where activations were"))
    return items


def saved_bytes(a: Architecture, itemsize: int, *, lean: bool, norms_learn: bool = False) -> int:
    """Bytes a token that one layer keeps for its backward pass.

    In the model's dtype: the inputs of the linear layers (2 H + Q, and 4 I with the gate before and
    after its activation), queries, keys and values (Q + 2 K). In float32: the two norms' inputs (8 H),
    and queries and keys where they are normed. lean: norms keep their input as it is, and a gated
    feed-forward its two projections alone (2 I), as PeftTrainer has it. norms_learn: what they normed, too.
    """
    queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
    linear = 2 * a.hidden + 2 * queries + 2 * keys + (2 if lean else 4) * a.mlp_width
    normed = 2 * a.hidden + (queries + keys) * a.normed_heads
    return itemsize * (linear + normed * norms_learn) + (itemsize if lean else 4) * normed


def _working(setting: Setting) -> Item:
    a, size = setting.architecture, setting.itemsize
    prompt = setting.shared or setting.context
    tokens = min(_PREFILL, setting.sequences * prompt)
    hidden = tokens * size * (3 * a.mlp_width + 4 * a.heads * a.head_dim + 6 * a.hidden)
    logits = setting.sequences * a.vocabulary * (size + 16)
    scores = 0
    if setting.engine == "torch":
        scores = 16 * a.heads * max(min(_PREFILL, prompt) * prompt, setting.sequences * setting.context)
    how = f"a forward of {tokens:,} tokens, logits of {setting.sequences} sequences"
    return Item("engine's forward", hidden + logits + scores, "sampling", how)


def kv_per_sequence(setting: Setting) -> int:
    """Bytes that one more trajectory needs when its prompt is cached already."""
    a, size = setting.architecture, setting.itemsize
    if setting.engine == "torch":
        return a.layers * a.kv_elements * size * _slot_tokens(setting)
    return max(1, a.kv_bytes(setting.context, size) - a.kv_bytes(setting.shared, size))


def _slot_tokens(setting: Setting) -> int:
    room = _FIRST_SLOT
    while room < setting.context - setting.shared:
        room *= 2
    return room


def kv_prompts(setting: Setting) -> int:
    """Bytes of the prompts that groups share."""
    prompts = min(setting.groups, -(-setting.sequences // setting.group_size))
    a = setting.architecture
    if setting.engine == "torch":
        return prompts * a.layers * a.kv_elements * setting.itemsize * setting.shared
    return prompts * a.kv_bytes(setting.shared, setting.itemsize)


def kv_sequences(setting: Setting) -> int:
    """Trajectories whose keys and values fit the cache at once."""
    if setting.engine == "torch":
        budget = setting.kv_bytes or 3 << 30
        return max(1, min(setting.max_running, budget // kv_per_sequence(setting)))
    room = setting.bytes_of("KV cache") - kv_prompts(setting)
    return max(1, min(setting.sequences, room // kv_per_sequence(setting)))


def _kv_cache(setting: Setting, others: list[Item]) -> Item:
    a = setting.architecture
    token = a.layers * a.kv_elements * setting.itemsize
    if a.latent:
        formula = f"layers * (latent + rope) * {setting.itemsize} = {token:,} bytes a token"
    else:
        formula = f"2 * layers * kv_heads * head_dim * {setting.itemsize} = {token:,} bytes a token"
    one, prompts = kv_per_sequence(setting), kv_prompts(setting)
    if setting.engine == "torch":
        count = kv_sequences(setting)
        how = f"{count} slots of {_slot_tokens(setting):,} tokens, {formula}"
        return Item("KV cache", count * one + prompts, "held", how)
    spare = int(_SPARE * setting.capacity) if setting.on_gpu else 0
    left = setting.capacity - spare - _sum(others, "held")
    asleep, awake = (left - _sum(others, phase) for phase in ("sampling", "training"))
    awake = min(asleep, awake)
    wanted = setting.kv_bytes or setting.sequences * one + prompts
    phase: Phase
    if wanted <= awake or not setting.on_gpu:
        room, phase, ending = awake, "held", ""
    else:
        room, phase, ending = asleep, "sampling", "; freed while the trainer steps"
    least = a.kv_bytes(setting.context, setting.itemsize)
    size = wanted if setting.kv_bytes else max(least, min(wanted, room))
    return Item("KV cache", size, phase, f"{formula}{ending}")


@dataclass(frozen=True)
class EngineBudget:
    """What an engine may take, so that it and the trainer fit one device."""

    kv_bytes: int
    """For keys and values: vLLM's ``kv_cache_memory_bytes``."""
    sleeps: bool
    """Whether these have to be freed while the trainer steps. Never on a CPU."""
    engine_bytes: int
    """Keys and values with everything else that an engine counts as its own: one copy of the weights,
    its forward pass, the CUDA context. Over the card's memory it is vLLM's ``gpu_memory_utilization``."""
    sequences: int
    """Trajectories of the whole context that they hold at once."""
    weight_copies: int
    """Copies of the base weights on this device: 2 where engine and trainer do not share them."""


def engine_budget(setting: Setting) -> EngineBudget:
    """How large vLLM's cache may be, and whether it has to sleep while the trainer steps.

    The cache is as large as the trajectories of a step need. It stays where that fits beside a training
    step; where it does not, a GPU's engine sleeps then and the cache takes what sampling leaves, at
    least one trajectory of the whole context, even if ``setting.fits`` is False then.
    """
    (cache,) = (item for item in setting.items if item.name == "KV cache")
    own = sum(setting.bytes_of(name) for name in ("engine's forward", "runtime"))
    return EngineBudget(
        kv_bytes=cache.bytes,
        sleeps=cache.phase == "sampling",
        engine_bytes=cache.bytes + own + (setting.bytes_of("engine weights") or weight_bytes(setting)),
        sequences=kv_sequences(setting),
        weight_copies=1 + bool(setting.bytes_of("engine weights")),
    )


def machine() -> tuple[str, int]:
    """This machine: ``cpu`` or ``gpu``, and the bytes that this process may come to use there."""
    try:
        import torch
    except ModuleNotFoundError:  # then a plan is for a model that will run elsewhere
        return "cpu", cpu_bytes()
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return "gpu", min(total, free + torch.cuda.memory_reserved())
    return "cpu", cpu_bytes()


def cpu_bytes(cgroup: Path = _CGROUP) -> int:
    """Main memory that is free or this process's own, within the limit of its container."""
    own = process_bytes()[0] or 0
    sources = {line.split(":")[0]: line.split()[1] for line in read_if_there("/proc/meminfo").splitlines()}
    total = cpu_total(cgroup)
    free = int(sources["MemAvailable"]) * 1024 + own if "MemAvailable" in sources else total
    if free is None or total is None:
        raise ConfigurationError("this system does not say how much memory it has; pass device=bytes")
    for limit, used, stat in _LIMITS:
        if (most := read_if_there(cgroup / limit)).isdigit():
            kinds = dict(line.split() for line in read_if_there(cgroup / stat).splitlines())
            cached = int(kinds.get("inactive_file", 0))  # pages of files, which give way
            free = min(free, int(most) - int(read_if_there(cgroup / used) or 0) + cached + own)
    return free


def cpu_total(cgroup: Path = _CGROUP) -> int | None:
    """All main memory, within the limit of the container; None where the system does not say."""
    found = []
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limits = [read_if_there(cgroup / limit) for limit, *_ in _LIMITS]
    return min([*found, *(int(limit) for limit in limits if limit.isdigit())], default=None)


def process_bytes() -> tuple[int | None, int | None]:
    """Resident memory of this process, now and at its highest; None where the system does not say."""
    status = dict(
        line.split(":", 1) for line in read_if_there("/proc/self/status").splitlines() if ":" in line
    )
    if "VmRSS" not in status:
        return None, None
    now, most = (int(status[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, max(now, most)


def read_if_there(path: str | Path) -> str:
    """A small file of the system's without the blanks around it; empty where there is none."""
    file = Path(path)
    return file.read_text().strip() if file.is_file() else ""


def size_text(size: float) -> str:
    """Bytes as a person would say them, in powers of 1000.

    >>> size_text(1_250_000_000), size_text(35_000_000), size_text(900)
    ('1.25 GB', '35 MB', '0.9 kB')
    """
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if abs(size) >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size / 1e3:.3g} kB"
