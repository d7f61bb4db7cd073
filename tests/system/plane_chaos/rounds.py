"""The rounds of a run, in a module of their own, which processes can import; they cannot import `__main__`."""

from __future__ import annotations

from dataclasses import dataclass

from tests.system.plane_chaos.judging import Outcome
from tests.system.plane_chaos.plan import draw_plan
from tests.system.plane_chaos.stage import play


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that a round depends on, except its number."""

    seed: str
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    logs: str = ""

    def play(self, number: int) -> Outcome:
        """Play the round with this number."""
        return play(draw_plan(self.seed, number, self.only, self.without), self.logs)
