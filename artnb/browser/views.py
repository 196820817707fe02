"""How does its environment draw a trajectory? By the ``render`` of the one that its scenario names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from artnb.browser.plain import mapping, text
from artnb.environments import available_environments, load_environment
from artnb.types import Trajectory

_LONGEST = 2_000_000


def rendering(record: Mapping[str, Any], environment: Any = None) -> dict[str, str | None]:
    """``rendered``, escaped HTML or None, and ``render_error``, words or None.

    ``environment`` is an Environment or anything with a ``render``; None takes the one whose name begins the
    scenario's id, as ``game_2048/train/17``.
    """
    trajectory = mapping(record.get("trajectory"))
    try:
        render = _render_of(trajectory, environment)
        if render is None:
            return {"rendered": None, "render_error": None}
        drawn = render(Trajectory.from_json(trajectory))
    except Exception as error:  # an environment's own code, on whatever was stored: the rest is still shown
        words = f"the environment could not draw it: {type(error).__name__}: {error}"
        return {"rendered": None, "render_error": text(words[:1000])}
    if not isinstance(drawn, str):
        return {"rendered": None, "render_error": f"render returned {type(drawn).__name__}, no text"}
    if len(drawn) > _LONGEST:
        words = f"the environment's drawing is too long to be shown: {len(drawn):,} characters"
        return {"rendered": None, "render_error": words}
    return {"rendered": text(drawn), "render_error": None}


def _render_of(trajectory: Mapping[str, Any], environment: Any) -> Any:
    if environment is not None:
        return getattr(environment, "render", None)
    return _installed(str(trajectory.get("scenario_id") or "").partition("/")[0])


@lru_cache(64)  # looking through all installed packages takes longer than all the rest
def _installed(name: str) -> Any:
    return load_environment(name).render if name in available_environments() else None
