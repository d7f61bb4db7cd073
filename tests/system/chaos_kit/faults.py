"""Faults: what each affects, and how it begins and ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Any, Generic, TypeVar

from kvevents.testing import FaultProxy

TargetT = TypeVar("TargetT")


@dataclass(frozen=True, slots=True)
class Fault(Generic[TargetT]):
    """A fault: a function that finds its targets at a place of a stage, and those that begin and end it at each target."""

    find: Callable[[Any, int], Iterable[TargetT]]
    strike: Callable[[TargetT, Random], object]
    heal: Callable[[TargetT], object] | None = None


def always(act: Callable[[TargetT], object]) -> Callable[[TargetT, Random], object]:
    """Return a function for `Fault.strike` that draws nothing."""
    return lambda target, _: act(target)


def refuse(proxy: FaultProxy) -> None:
    """Close every connection, and refuse new ones until the proxy is healed."""
    proxy.cut(refuse=True)


def draw_seed(random: Random) -> int:
    return random.randrange(1 << 30)
