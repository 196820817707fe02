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

from artnb.architecture import Architecture
from artnb.config import LoraConfig
from artnb.errors import ConfigurationError

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

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
FOUR_BITS = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of an nf4 weight: 4 bits, one byte of scale for 64 of them, one float32 for 256 scales."""
_RUNTIME = {"cpu": 380 << 20, "gpu": 1536 << 20}
"""CPU: Python with torch, transformers, peft and a kernel, measured. GPU: CUDA context, workspaces and
graphs, an allowance that was not measured."""
_PEFT_LOADS = {"bitsandbytes": 70 << 20, "torchao": 70 << 20}
"""What peft imports besides where it is installed; measured for both together."""
_HOLES = {"one": 0.2, "several": 0.4}
"""Share of the training step's memory that the CPU's allocator loses between what is in use: measured
1.2 for one micro-batch in a step, 1.4 to 1.55 for several."""
_PREFILL = 2048
"""Prompt tokens that an engine reads in one forward."""
_LOGITS = 512
"""Rows of logits that the trainer holds at a time."""
_FIRST_SLOT = 256
"""Tokens of a TorchEngine slot; they double until a sequence fits."""


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
    group_size: int
    groups: int
    load_in_4bit: bool
    microbatch_tokens: int
    kv_bytes: int | None
    max_running: int
    gradient_checkpointing: bool

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
    def sequences(self) -> int:
        """Trajectories that want to run at once."""
        return min(self.max_running, self.trajectories)

    @property
    def shares_weights(self) -> bool:
        """Engine and trainer use the same base weights: Unsloth's vLLM on a GPU."""
        return self.engine == "vllm" and self.trainer == "unsloth" and self.on_gpu

    @cached_property
    def items(self) -> tuple[Item, ...]:
        found = [*_weights(self), *_adapter(self), *_training(self), _working(self)]
        if not self.on_gpu:
            share = _HOLES["one" if self.batch_tokens >= self.packed_tokens else "several"]
            lost = int(share * _sum(found, "training"))
            how = f"{share:.0%} of the training step lie unused between what is in use"
            found.append(Item("allocator", lost, "training", how))
        device = "gpu" if self.on_gpu else "cpu"
        what = "CUDA context, workspaces (an allowance)" if self.on_gpu else "Python, torch, transformers"
        beside = 0 if self.on_gpu else sum(size for name, size in _PEFT_LOADS.items() if find_spec(name))
        found.append(Item("runtime", _RUNTIME[device] + beside, "held", what))
        rest = _sum(found, "held") + _sum(found, "sampling")
        found.append(_kv_cache(self, self.capacity - rest))
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
    if setting.trainer == "peft" and not setting.load_in_4bit:
        merged = sum(x.weights for x in a.targets(setting.lora)) * size
        items.append(
            Item("merged weights", merged, "held", "W + scale * B @ A of each target, for the trainer")
        )
    if setting.engine == "torch" and not setting.on_gpu:
        packed = a.linear_weights + sum(x.biases for x in a.linears) + a.embedding
        how = "linear and output layers in oneDNN's order, for the engine"
        items.append(Item("packed weights", packed * size, "held", how))
    if setting.engine == "vllm" and not setting.shares_weights:
        how = "a second copy: vLLM does not share weights with this trainer"
        items.append(Item("engine weights", weight_bytes(setting), "held", how))
    return items


def _adapter(setting: Setting) -> list[Item]:
    count = setting.architecture.adapter_parameters(setting.lora)
    ranks = f"{count:,} parameters, rank {setting.lora.rank}"
    return [
        Item("adapter", 8 * count, "held", f"{ranks}, float32, trained and published"),
        Item("optimizer", 8 * count, "held", "AdamW: two float32 for each"),
        Item("gradients", 4 * count, "training", "float32"),
        Item("undo", 12 * count, "training", "adapter and optimizer as they were before the step"),
    ]


def _training(setting: Setting) -> list[Item]:
    a, size, tokens = setting.architecture, setting.itemsize, setting.batch_tokens
    layer = saved_bytes(a, size)
    if setting.gradient_checkpointing:
        saved, how = tokens * (a.layers * a.hidden * size + layer), "one hidden state a layer, one layer open"
    else:
        saved, how = tokens * a.layers * layer, f"{a.layers} layers * {layer:,} bytes a token"
    saved += tokens * (3 * a.mlp_width * size + 16 * a.hidden)  # the layer whose backward pass runs
    items = [Item("activations", saved, "training", f"{tokens:,} tokens * ({how})")]
    own = min(tokens - setting.shared, setting.group_size * (setting.context - setting.shared))
    seen = max(own * setting.context if setting.shared else setting.context**2, setting.shared**2)
    how = "heads * queries * keys * 4 float32, one layer at a time"
    items.append(Item("attention scores", 16 * a.heads * seen, "training", how))
    rows = min(_LOGITS, setting.batch_sampled)
    logits = rows * a.vocabulary * (size + 8) + 3 * setting.batch_sampled * a.hidden * size
    items.append(Item("sampled logits", logits, "training", f"{rows} * vocabulary * {size + 8} bytes"))
    return items


def saved_bytes(a: Architecture, itemsize: int) -> int:
    """Bytes a token that one layer keeps for its backward pass.

    8 H for the two norms' float32 inputs; the inputs of the linear layers (2 H + Q + 4 I, with the
    gate before and after its activation), and queries, keys and values (Q + 2 K) in the model's dtype;
    4 (Q + K) where queries and keys are normed.
    """
    queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
    linear = 2 * a.hidden + 2 * queries + 2 * keys + 4 * a.mlp_width
    return 8 * a.hidden + itemsize * linear + 4 * (queries + keys) * a.normed_heads


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


def _kv_cache(setting: Setting, left: int) -> Item:
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
    wanted = setting.kv_bytes or setting.sequences * one + prompts
    least = a.kv_bytes(setting.context, setting.itemsize)
    phase: Phase = "sampling" if setting.on_gpu else "held"
    asleep = "; freed while the trainer steps" if setting.on_gpu else ""
    size = wanted if setting.kv_bytes else max(least, min(wanted, left))
    return Item("KV cache", size, phase, f"{formula}{asleep}")


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


def cpu_bytes() -> int:
    """Main memory that is free or this process's own, within the limit of its container."""
    own = process_bytes()[0] or 0
    sources = {line.split(":")[0]: line.split()[1] for line in read_if_there("/proc/meminfo").splitlines()}
    if "MemAvailable" in sources:
        free = int(sources["MemAvailable"]) * 1024 + own
    elif "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        raise ConfigurationError("this system does not say how much memory it has; pass device=bytes")
    limit = read_if_there("/sys/fs/cgroup/memory.max")
    if limit.isdigit():
        used = int(read_if_there("/sys/fs/cgroup/memory.current") or 0)
        free = min(free, int(limit) - used + own)
    return free


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
