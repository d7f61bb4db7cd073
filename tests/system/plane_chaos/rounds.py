"""What a run of plane chaos plays. Its processes import it by this name, which they cannot do from `__main__`."""

from __future__ import annotations

from dataclasses import dataclass

from tests.system.plane_chaos.judging import Outcome
from tests.system.plane_chaos.plan import draw_plan
from tests.system.plane_chaos.stage import play


@dataclass(frozen=True, slots=True)
class Run:
    """What is played: all that a round depends on, besides its number."""

    seed: str
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    logs: str = ""

    def play(self, number: int) -> Outcome:
        return play(draw_plan(self.seed, number, self.only, self.without), self.logs)
