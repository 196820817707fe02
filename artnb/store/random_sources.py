"""Which random numbers come next, after a resume as without one? A checkpoint keeps every global source.

The engine's own source is saved by its backend. A rollout, a reward or a cell may draw from Python's,
numpy's or torch's as well: their states lie in ``random.json`` beside the weights. JSON, no pickle.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from artnb.errors import CheckpointError

_FILE = "random.json"


def save_random_sources(folder: Path) -> None:
    """Write the states of the sources that this process uses; packages that it did not import have none."""
    version, numbers, gauss = random.getstate()
    record: dict[str, Any] = {"python": [version, list(numbers), gauss]}
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = numpy.random.get_state(legacy=True)
        record["numpy"] = [name, keys.tolist(), *rest]
    if (torch := sys.modules.get("torch")) is not None:
        record["torch"] = _hex(torch.get_rng_state())
        if torch.cuda.is_initialized():
            record["cuda"] = [_hex(state) for state in torch.cuda.get_rng_state_all()]
    (folder / _FILE).write_text(json.dumps(record), encoding="utf-8")


def load_random_sources(folder: Path) -> None:
    """Go on where ``save_random_sources`` stood; a checkpoint without the file leaves the sources alone.

    Raises CheckpointError when the file holds anything else.
    """
    path = folder / _FILE
    if not path.is_file():
        return
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        version, numbers, gauss = record["python"]
        random.setstate((version, tuple(numbers), gauss))
        if "numpy" in record and (numpy := sys.modules.get("numpy")) is not None:
            name, keys, *rest = record["numpy"]
            numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
        if "torch" in record and (torch := sys.modules.get("torch")) is not None:
            torch.set_rng_state(_bytes(torch, record["torch"]))
            states = record.get("cuda", [])
            if torch.cuda.is_initialized() and len(states) == torch.cuda.device_count():
                torch.cuda.set_rng_state_all([_bytes(torch, state) for state in states])
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{path} holds no random states: {error!r}") from error


def _hex(state: Any) -> str:
    return bytes(state.tolist()).hex()


def _bytes(torch: Any, text: str) -> Any:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
