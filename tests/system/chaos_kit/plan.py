"""The plan of a round, drawn from a seed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from random import Random
from typing import Any

Command = tuple[Any, ...]
"""The name of a method of the stage, and its arguments, as in `("strike", fault, place)` and `("heal", fault, place)`."""


@dataclass(frozen=True, slots=True)
class Plan(ABC):
    """Everything that happens in a round. Nothing else is drawn while it is played, except details of faults by `draw`."""

    seed: str
    number: int
    faults: tuple[str, ...]
    """Names of everything that the round counts for in the report."""
    script: tuple[Command, ...]

    @property
    def name(self) -> str:
        return f"--seed {self.seed} --round {self.number}"

    def draw(self, what: str) -> Random:
        """Return a random generator for one purpose."""
        return Random(f"{self.seed}/{self.number}/{what}")

    def schedule(self) -> str:
        """Return the plan as text."""
        commands = [" ".join(map(str, command)) for command in self.script]
        return "\n  ".join([f"{self.name}: {', '.join(self.faults) or 'no faults'}", *self.describe(), *commands])

    @abstractmethod
    def describe(self) -> list[str]:
        """Return lines about everything except the script."""
