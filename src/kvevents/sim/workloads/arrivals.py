"""Arrival processes: the times of requests, and traces at another speed."""

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
"""Returns the seconds to the next arrival for a mean gap, a coefficient of variation and a random generator."""


def _constant(mean: float, _variation: float, _random: Random) -> float:
    return mean


def _poisson(mean: float, _variation: float, random: Random) -> float:
    return random.expovariate(1 / mean)


def _bursty(mean: float, variation: float, random: Random) -> float:
    shape = 1 / variation**2
    return random.gammavariate(shape, mean / shape)


ARRIVALS: Final[Mapping[str, Gap]] = MappingProxyType({"constant": _constant, "poisson": _poisson, "bursty": _bursty})
"""Arrival processes by name. `constant`: one request every `1 / rate` seconds. `poisson`: independent requests. `bursty`: gaps
of a gamma distribution; a coefficient of variation above 1 makes bursts (1 is `poisson`), like `burstiness` of
`vllm bench serve` (`1 / variation**2`)."""


def arrivals(name: str, rate: float, random: Random, variation: float = 2.0) -> Iterator[float]:
    """Yield arrival times without end, in seconds from 0, never decreasing.

    `rate` is the mean number of requests per second; `variation` is the standard deviation of the gaps divided by their mean,
    for `bursty`. Raises `ConfigError`.
    """
    if name not in ARRIVALS:
        raise ConfigError(f"unknown arrivals {name!r}: expected {', '.join(ARRIVALS)}")
    _check("rate", rate)
    _check("variation", variation)
    gap = ARRIVALS[name]
    return accumulate(gap(1 / rate, variation, random) for _ in repeat(None))


def rescaled(requests: Iterable[Request], speed: float) -> Iterator[Request]:
    """Yield the requests with their times divided by `speed`: 2 is twice as fast. Raises `ConfigError`."""
    _check("speed", speed)
    return (replace(request, at=request.at / speed) for request in requests)


def _check(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"invalid {name} {value}: expected a finite number above 0")
