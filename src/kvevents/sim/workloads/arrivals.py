"""When requests come: arrival processes, and traces at another speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate, repeat
from random import Random
from types import MappingProxyType
from typing import Final, TypeAlias

from kvevents.errors import ConfigError
from kvevents.sim.requests import Request

Gap: TypeAlias = Callable[[float, float, Random], float]
"""Seconds to the next arrival, of the mean gap, the coefficient of variation and a source of chance."""


def _constant(mean: float, _variation: float, _random: Random) -> float:
    return mean


def _poisson(mean: float, _variation: float, random: Random) -> float:
    return random.expovariate(1 / mean)


def _bursty(mean: float, variation: float, random: Random) -> float:
    shape = 1 / variation**2
    return random.gammavariate(shape, mean / shape)


ARRIVALS: Final[Mapping[str, Gap]] = MappingProxyType({"constant": _constant, "poisson": _poisson, "bursty": _bursty})
"""By name: one request every `1 / rate` seconds; independent ones; gaps of a gamma distribution, of which a coefficient of
variation above 1 makes bursts (1 is `poisson`), as `burstiness` does in vLLM's `vllm bench serve` (`1 / variation**2`)."""


def arrivals(name: str, rate: float, random: Random, variation: float = 2.0) -> Iterator[float]:
    """Endless times of arrival, in seconds from 0, never decreasing.

    `rate` is the mean number a second; `variation` is the standard deviation of the gaps over their mean, for `bursty`. Raises
    `ConfigError`.
    """
    if name not in ARRIVALS:
        raise ConfigError(f"there are no {name!r} arrivals; there are {', '.join(ARRIVALS)}")
    _check("rate", rate)
    _check("variation", variation)
    gap = ARRIVALS[name]
    return accumulate(gap(1 / rate, variation, random) for _ in repeat(None))


def rescaled(requests: Iterable[Request], speed: float) -> Iterator[Request]:
    """The same requests with their times divided by `speed`: 2 is twice as fast. Raises `ConfigError`."""
    _check("speed", speed)
    return (replace(request, at=request.at / speed) for request in requests)


def _check(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} is {value}; it is a finite number above 0")
