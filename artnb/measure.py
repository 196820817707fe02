"""What does a loaded model really hold, beside what was planned for it?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from artnb.errors import ConfigurationError
from artnb.memory import size_text
from artnb.plan import Plan, plan
from artnb.ui.html import esc, table_html
from artnb.ui.text import table_text


@dataclass(frozen=True)
class Comparison:
    """A plan beside what is really held."""

    plan: Plan
    held: Mapping[str, int]
    """Bytes of tensors by item."""
    process: int | None
    """Resident bytes of this process now; None where the system does not say."""
    peak: int | None
    """The most they ever were."""

    @property
    def ratio(self) -> float | None:
        """Planned total over the process's peak, on a CPU: 1.0 is a perfect plan. It means something
        once the model has sampled and trained as planned."""
        return self.plan.total / self.peak if self.peak and not self.plan.setting.on_gpu else None

    def to_dict(self) -> dict[str, Any]:
        reality = {"held": dict(self.held), "process": self.process, "peak": self.peak, "ratio": self.ratio}
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
        real = "–" if self.peak is None else f"{size_text(self.peak)} at most"
        return [*rows, {"memory": "process", "planned": size_text(self.plan.total), "held": real, "when": ""}]

    def _title(self) -> str:
        now = "" if self.process is None else f", process {size_text(self.process)} now"
        return f"{self.plan.setting.base}: planned and held{now}"

    def __repr__(self) -> str:
        return "\n".join([self._title(), table_text(self._rows()), "", repr(self.plan)])

    def _repr_html_(self) -> str:
        table = f"<b>{esc(self._title())}</b>{table_html(self._rows())}"
        return f"<div>{table}</div>{self.plan._repr_html_()}"


def plan_model(model: Any, **options: Any) -> Comparison:
    """Plan a loaded ``Model`` (or backend) as it was made, and compare; options as for ``plan``."""
    backend = getattr(model, "backend", model)
    _check_local(backend)
    cache, config = backend.engine.cache, backend.trainer.model.config
    made = {
        "dtype": str(backend.dtype).removeprefix("torch."),
        "lora": backend.lora,
        "kv_bytes": cache.budget_bytes,
        "max_running": cache.wanted_slots,
        "context": min(4096, backend.max_context),
    }
    found = plan(config, "cpu", **{**made, **options})
    return replace(found, setting=replace(found.setting, base=backend.base_model)).compare(backend)


def _check_local(backend: Any) -> None:
    if not hasattr(backend, "trainer") or not hasattr(getattr(backend, "engine", None), "cache"):
        raise ConfigurationError(
            f"{type(backend).__name__} does not say what it holds: only a model in this kernel, on the "
            "torch engine, can be measured. artnb.plan(base, device) plans any model"
        )


def measure(backend: Any) -> dict[str, int]:
    """Bytes of the tensors that a ``LocalBackend`` holds, by the plan's item names; shared ones once.

    Call it while no step runs. Raises ConfigurationError for other backends.
    """
    _check_local(backend)
    trainer, engine, seen = backend.trainer, backend.engine, set[int]()
    adapter = list(trainer.parameters.values())
    factors = {id(p) for p in adapter}
    model = [t for t in (*trainer.model.parameters(), *trainer.model.buffers()) if id(t) not in factors]
    packed = [t for p in set(engine.decoder.linears.home.values()) for t in (p.weight, p.bias)]
    cache = engine.cache
    keys = [*cache.keys, *cache.values, *(t for b in cache.blocks for t in (*b.keys, *b.values))]
    published = [t for pair in backend._published.values() for t in pair]
    parts = {
        "base weights": model,
        # a layer that forms its effective weight when asked for it holds none
        "merged weights": [vars(layer).get("merged") for layer in trainer.layers],
        "packed weights": packed,
        "KV cache": keys,
        "adapter": [*adapter, *published],
        "optimizer": [t for state in trainer.optimizer.state.values() for t in state.values()],
        "gradients": [p.grad for p in adapter],
    }
    return {name: sum(_bytes(t, seen) for t in tensors) for name, tensors in parts.items()}


def _bytes(tensor: Any, seen: set[int]) -> int:
    """Bytes of a tensor's storage, 0 for one that was counted before."""
    if tensor is None:
        return 0
    if tensor.is_mkldnn:  # packed by oneDNN: it has no storage to ask
        return tensor.numel() * tensor.element_size()
    storage = tensor.untyped_storage()
    if storage.data_ptr() in seen:
        return 0
    seen.add(storage.data_ptr())
    return storage.nbytes()
