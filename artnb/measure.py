"""What does a loaded model really hold, beside what was planned for it?"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from artnb.errors import ConfigurationError
from artnb.memory import process_bytes, size_text
from artnb.plan import Plan, plan
from artnb.ui.html import esc, table_html, visible
from artnb.ui.snapshot import seconds_text
from artnb.ui.text import table_text


@dataclass(frozen=True)
class Comparison:
    """A plan beside what is really held."""

    plan: Plan
    held: Mapping[str, int]
    """Bytes of tensors by item."""
    process: int | None
    """Bytes of this process now: resident ones, or on a GPU those that torch has reserved, without the
    CUDA context. None where the system does not say."""
    peak: int | None
    """The most they ever were."""
    pace: Pace | None = None
    """What the run's last steps took; None before the first."""

    @property
    def ratio(self) -> float | None:
        """Planned total over the process's peak, on a CPU: 1.0 is a perfect plan. It means something
        once the model has sampled and trained as planned."""
        return self.plan.total / self.peak if self.peak and not self.plan.setting.on_gpu else None

    def to_dict(self) -> dict[str, Any]:
        reality = {"held": dict(self.held), "process": self.process, "peak": self.peak, "ratio": self.ratio}
        reality["pace"] = asdict(self.pace) if self.pace else None
        return {"plan": self.plan.to_dict(), **reality}

    def _rows(self) -> list[dict[str, Any]]:
        rows = [
            {
                "memory": i.name,
                "planned": size_text(i.bytes),
                "held": size_text(self.held[i.name]) if i.name in self.held else "–",
                "when": i.phase,
            }
            for i in self.plan.items
        ]
        planned = {i.name for i in self.plan.items}
        rows += [
            {"memory": name, "planned": "–", "held": size_text(size), "when": "now"}
            for name, size in self.held.items()
            if size and name not in planned
        ]
        real = "–" if self.peak is None else f"{size_text(self.peak)} at most"
        return [*rows, {"memory": "process", "planned": size_text(self.plan.total), "held": real, "when": ""}]

    def _title(self) -> str:
        now = "" if self.process is None else f", process {size_text(self.process)} now"
        return f"{self.plan.setting.base}: planned and held{now}"

    def _measured(self) -> str:
        return f"measured: {self.pace or 'no step yet'}"

    def __repr__(self) -> str:
        parts = [visible(self._title()), table_text(self._rows()), self._measured(), "", repr(self.plan)]
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        table = f"<b>{esc(self._title())}</b>{table_html(self._rows())}<p>{esc(self._measured())}</p>"
        return f"<div>{table}</div>{self.plan._repr_html_()}"


def plan_model(model: Any, **options: Any) -> Comparison:
    """Plan a loaded ``Model`` (or backend) as it was made, and compare; options as for ``plan``.

    Rates of sampling and training are those of its run's last steps, where it has any.
    """
    backend = getattr(model, "backend", model)
    held = measure(backend)
    engine, base = backend.engine, backend.trainer.model
    made: dict[str, Any] = {
        "dtype": str(backend.dtype).removeprefix("torch."),
        "lora": backend.lora,
        "engine": backend.stack.engine,
        "trainer": backend.stack.trainer,
        "load_in_4bit": bool(getattr(base, "is_loaded_in_4bit", False)),
        "gradient_checkpointing": bool(getattr(base, "is_gradient_checkpointing", False)),
        "full_finetuning": backend.trains_all,
        "optimizer": backend.trainer.optimizer_name,
        "context": min(4096, backend.max_context),
    }
    if backend.stack.engine == "torch":
        made |= {"kv_bytes": engine.cache.budget_bytes, "max_running": engine.cache.wanted_slots}
    else:
        made |= {"kv_bytes": held["KV cache"], "max_running": engine.max_running}
    measured = _pace_of(model)
    if measured:
        made |= {
            "sampled_per_second": measured.sampled_per_second,
            "trained_per_second": measured.trained_per_second,
        }
    found = plan(base.config, "cpu" if backend.stack.device == "cpu" else None, **{**made, **options})
    shared = held.get("engine weights", 0) < 0.5 * held["base weights"]
    setting = replace(found.setting, base=backend.base_model, shared_weights=shared)
    other = measured.other_seconds if measured else 0.0
    return _beside(replace(found, setting=setting, other_seconds=other), held, measured)


def compare(planned: Plan, model: Any) -> Comparison:
    """A plan beside what a loaded ``Model`` (or backend) holds and what its run's last steps took."""
    return _beside(planned, measure(getattr(model, "backend", model)), _pace_of(model))


def _pace_of(model: Any) -> Pace | None:
    return pace(model.run.metrics()) if hasattr(model, "run") else None


def _beside(planned: Plan, held: dict[str, int], measured: Pace | None) -> Comparison:
    now, most = process_bytes()
    if planned.setting.on_gpu:
        import torch

        now, most = torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()
    return Comparison(planned, held, now, most, measured)


@dataclass(frozen=True)
class Pace:
    """What the last steps of a run took: medians."""

    steps: int
    """How many steps that is."""
    sampled: float
    """Tokens that the model wrote in a step."""
    packed: float
    """Tokens that were trained on, shared prompts once."""
    minutes: float
    """Of a step: gathering, training, publication and checkpoint."""
    sampled_per_second: float
    trained_per_second: float
    other_seconds: float
    """Of a step, for publication, checkpoint, and what is neither sampling nor training."""

    def __str__(self) -> str:
        tokens = f"{self.sampled:,.0f} sampled, {self.packed:,.0f} trained tokens"
        return f"{seconds_text(60 * self.minutes)} a step with {tokens} (median of the last {self.steps})"


def pace(records: Iterable[Mapping[str, Any]], last: int = 5) -> Pace | None:
    """The pace of a run's last steps, from its metrics; None before a step was gathered and trained."""
    needed = ("tokens_per_second_gather", "tokens_per_second_train")
    steps = [r for r in records if r.get("kind") == "train" and all(r.get(name) for name in needed)][-last:]
    if not steps:
        return None

    def median(value: Callable[[Mapping[str, Any]], float]) -> float:
        return statistics.median(map(value, steps))

    return Pace(
        steps=len(steps),
        sampled=median(lambda r: r["tokens_sampled"]),
        packed=median(lambda r: r["packed_tokens"]),
        minutes=median(lambda r: (r["seconds_gather"] + r["seconds"]) / 60),
        sampled_per_second=median(lambda r: r["tokens_per_second_gather"]),
        trained_per_second=median(lambda r: r["tokens_per_second_train"]),
        other_seconds=median(lambda r: r["seconds"] - r["seconds_train"]),
    )


def _check_local(backend: Any) -> None:
    if not hasattr(backend, "trainer") or not hasattr(backend, "stack"):
        raise ConfigurationError(
            f"{type(backend).__name__} does not say what it holds: only a model in this kernel can be "
            "measured. artnb.plan(base, device) plans any model"
        )


def measure(backend: Any) -> dict[str, int]:
    """Bytes of the tensors that a ``LocalBackend`` holds, by the plan's item names; shared ones once.

    Call it while no step runs. Raises ConfigurationError for other backends.
    """
    _check_local(backend)
    trainer, engine, seen = backend.trainer, backend.engine, set[int]()
    trained = list(trainer.parameters.values())
    learns = {id(p) for p in trained}
    model = [t for t in (*trainer.model.parameters(), *trainer.model.buffers()) if id(t) not in learns]
    parts = {
        # a layer that forms its effective weight when asked for it holds none
        "merged weights": [vars(layer).get("merged") for layer in trainer.layers],
        "base weights": [*model, *(vars(layer).get("base") for layer in trainer.layers)],
        **(_of_vllm(engine) if hasattr(engine, "llm") else _of_torch(engine)),
        "trained weights" if backend.trains_all else "adapter": [
            *trained,
            *(t for each in backend._published.values() for t in each),
        ],
        "optimizer": [t for state in trainer.optimizer.state.values() for t in state.values()],
        "gradients": [p.grad for p in trained],
    }
    return {name: sum(_bytes(t, seen) for t in tensors) for name, tensors in parts.items()}


def _of_torch(engine: Any) -> dict[str, list[Any]]:
    cache = engine.cache
    keys = [*cache.keys, *cache.values, *(t for b in cache.blocks for t in (*b.keys, *b.values))]
    linears = engine.decoder.linears
    packed = [t for p in set(linears.home.values()) for t in (p.weight, p.bias)]
    own = [each.weight for each in linears.others.values()]  # the base's until others are published
    return {"packed weights": [*packed, *own], "KV cache": keys}


def _of_vllm(engine: Any) -> dict[str, list[Any]]:
    """What vLLM holds. A layer whose parameter the CPU build has emptied keeps its weight in the
    closure of ``cpu_linear``: as a tensor, or as a oneDNN product that knows its sizes alone."""
    model = engine._runner.get_model()
    weights: list[Any] = [*model.parameters(), *model.buffers()]
    adapters: list[Any] = []
    for module in model.modules():
        for cell in getattr(getattr(module, "cpu_linear", None), "__closure__", None) or ():
            kept = cell.cell_contents
            is_product = hasattr(kept, "handler_tensor")
            weights.append(kept.n * kept.k * module.weight.dtype.itemsize if is_product else kept)
        for name in ("lora_a_stacked", "lora_b_stacked"):
            adapters += getattr(module, name, ())
    return {"engine weights": weights, "engine's adapter": adapters, "KV cache": engine._runner.kv_caches}


def _bytes(tensor: Any, seen: set[int]) -> int:
    """Bytes of a tensor's storage, 0 for one that was counted before; a number stands for itself."""
    if isinstance(tensor, int):
        return tensor
    if not hasattr(tensor, "is_mkldnn"):  # None, or nothing that takes memory
        return 0
    if tensor.is_mkldnn:  # packed by oneDNN: it has no storage to ask
        return tensor.numel() * tensor.element_size()
    storage = tensor.untyped_storage()
    if storage.data_ptr() in seen:
        return 0
    seen.add(storage.data_ptr())
    return storage.nbytes()
