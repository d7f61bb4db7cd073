"""What settings of policies have in common: how a wrong one is told."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from kvevents.errors import ConfigError


def check_range(name: str, value: float, low: float, high: float = math.inf, *, finite: bool = False) -> None:
    """Raises `ConfigError` for what is not between the two, which are allowed themselves unless only finite numbers are."""
    if not low <= value <= high or (finite and math.isinf(value)):
        upper = f" to {high:g}" if math.isfinite(high) else " on"
        raise ConfigError(f"{name} is {value}; it is a{' finite' if finite else ''} number from {low:g}{upper}")


def check_count(name: str, value: int) -> None:
    """Raises `ConfigError` for what is not a whole number from 0 on."""
    if type(value) is not int or value < 0:
        raise ConfigError(f"{name} is {value!r}; it is a whole number from 0 on")


def check_name(name: str, value: str, known: Collection[str]) -> None:
    """Raises `ConfigError` for what is not one of the known names."""
    if value not in known:
        raise ConfigError(f"{name} is {value!r}; it is one of {', '.join(known)}")


def check_weights(name: str, weights: Mapping[str, float], known: Collection[str] | None = None) -> None:
    """Raises `ConfigError` for a weight that is not from 0 to 1, or of a name that is not known."""
    for key, weight in weights.items():
        if known is not None:
            check_name(f"a key of {name}", key, known)
        check_range(f"{name}[{key!r}]", weight, 0, 1)
