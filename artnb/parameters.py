"""Which parameters does a notebook take, and are those given spelt and typed right?

All notebooks share the names below, so that one papermill command fits every one of them.
"""

from __future__ import annotations

import ast
import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from artnb.errors import ConfigurationError


class _Rule(NamedTuple):
    """What a parameter may be: a type, whether None is fine, and the smallest value."""

    type: type
    optional: bool = False
    least: float | None = None


SHARED: dict[str, _Rule] = {
    "base": _Rule(str, optional=True),
    "run_name": _Rule(str),
    "out_dir": _Rule(str),
    "steps": _Rule(int, least=0),
    "scenarios_per_step": _Rule(int, least=1),
    "group_size": _Rule(int, least=2),
    "evaluation_scenarios": _Rule(int, least=2),
    "learning_rate": _Rule(float, least=0.0),
    "seed": _Rule(int, least=0),
}
"""base: model to start from, None for the bundled one. run_name and out_dir: where the run is kept.
steps: train steps in all. scenarios_per_step x group_size: rollouts in a step.
evaluation_scenarios: held-out scenarios before and after. learning_rate; seed of the scenarios."""

_PAPERMILL = "# Parameters"
"""How papermill begins the cell that it injects."""


class Parameters(SimpleNamespace):
    """The checked values, to be read as attributes; they do not change."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # IPython draws every SimpleNamespace in a way of its own

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"parameters do not change; set {name} in the notebook's parameters cell")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"no parameter {name!r}{_did_you_mean(name, list(vars(self)))}")


def parameters(
    namespace: Mapping[str, Any] | None = None, /, *, extra: Mapping[str, Any] | None = None, **given: Any
) -> Parameters:
    """Check a notebook's parameters; misspelt names and wrong types raise ConfigurationError.

    >>> parameters(steps=3, learning_rate=1e-3)
    Parameters(steps=3, learning_rate=0.001)
    >>> parameters(grup_size=8)
    Traceback (most recent call last):
    ...
    artnb.errors.ConfigurationError: unknown parameter 'grup_size'; did you mean 'group_size'?

    namespace: a notebook passes ``globals()`` after its parameters cell. What that cell sets is
    taken; what papermill injects after it must be among those names, which papermill itself does
    not check.
    extra: this notebook's own parameters, each with a value that shows its type, or with None
    where anything goes.
    """
    rules = SHARED | {name: _rule_like(value) for name, value in (extra or {}).items()}
    values = dict(given)
    if namespace is not None:
        own, injected = _parameter_cells(namespace.get("In") or [])
        _refuse_unknown(injected, own or list(rules))
        wanted = dict.fromkeys([*own, *injected] or rules)
        values |= {name: namespace[name] for name in wanted if name in namespace}
    _refuse_unknown(values, list(rules))
    return Parameters(**{name: _checked(name, value, rules[name]) for name, value in values.items()})


def _refuse_unknown(names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigurationError(f"unknown parameter {name!r}{_did_you_mean(name, known)}")


def _rule_like(value: Any) -> _Rule:
    return _Rule(object, optional=True) if value is None else _Rule(type(value))


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(sorted(known))}"


def _checked(name: str, value: Any, rule: _Rule) -> Any:
    if value is None and rule.optional:
        return None
    if rule.type is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    is_bool_for_number = isinstance(value, bool) and rule.type in (int, float)
    if not isinstance(value, rule.type) or is_bool_for_number:
        wanted = rule.type.__name__ + (" or None" if rule.optional else "")
        raise ConfigurationError(f"{name} must be {wanted}, got {value!r} ({type(value).__name__})")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigurationError(f"{name} must be finite, got {value}")
    if isinstance(value, str) and not value.strip():
        raise ConfigurationError(f"{name} must not be empty")
    if rule.least is not None and isinstance(value, int | float) and value < rule.least:
        raise ConfigurationError(f"{name} must be at least {rule.least:g}, got {value}")
    return value


def _parameter_cells(cells: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names that the last parameters cell sets, and those of the cell that papermill put after it."""
    own: list[str] = []
    injected: list[str] = []
    for source in cells:
        names = list(_assigned(source))
        if source.lstrip().startswith(_PAPERMILL):
            injected = names
        elif sum(name in SHARED for name in names) >= 3:
            own, injected = names, []
    return own, injected


def _assigned(source: str) -> Iterator[str]:
    """Names that a cell of plain assignments sets; nothing for any other cell."""
    try:
        body = ast.parse(source).body
    except SyntaxError:  # a cell with magics or shell lines is no parameters cell
        return
    names: list[str] = []
    for statement in body:
        if isinstance(statement, ast.Assign) and all(isinstance(t, ast.Name) for t in statement.targets):
            names += [t.id for t in statement.targets if isinstance(t, ast.Name)]
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names.append(statement.target.id)
        elif not isinstance(statement, ast.Import | ast.ImportFrom | ast.Expr):
            return
    yield from (name for name in names if not name.startswith("_"))
