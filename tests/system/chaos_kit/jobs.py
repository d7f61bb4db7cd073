"""Concurrent rounds: each job is a process that plays one round after the other."""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Final

from tests.system.chaos_kit.judging import Outcome
from tests.system.chaos_kit.parts import BrokenStageError, SilentPartError, begin_process, context
from tests.system.chaos_kit.plan import Plan
from tests.system.chaos_kit.stage import RoundStage

ROUND_SECONDS: Final = 300.0
"""Limit of one round."""


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that a round depends on, except its number. Jobs receive it pickled."""

    seed: str
    plan: Callable[[int], Plan]
    stage: Callable[[Any], RoundStage[Any]]
    """Returns the stage for a plan."""

    def play(self, number: int) -> Outcome:
        """Play one round. If it takes too long, end the process, which ends the run."""
        faulthandler.dump_traceback_later(ROUND_SECONDS, exit=True)
        try:
            return play(self.stage(self.plan(number)))
        finally:
            faulthandler.cancel_dump_traceback_later()


def play(stage: RoundStage[Any]) -> Outcome:
    """Play one round. If its stage fails, the outcome has the error."""
    began = time.monotonic()
    try:
        with stage:
            return stage.play()
    except (BrokenStageError, SilentPartError, TimeoutError) as error:
        plan, seconds = stage.plan, time.monotonic() - began
        return Outcome(plan.seed, plan.number, plan.faults, error=f"{type(error).__name__}: {error}", seconds=seconds)


def play_rounds(run: Run, numbers: Iterator[int], jobs: int, may_begin: Callable[[], bool]) -> Iterator[Outcome]:
    """Play rounds and yield each outcome when it is there. No round begins after `may_begin` has returned False."""
    waiting: set[Future[Outcome]] = set()
    with ProcessPoolExecutor(jobs, context, initializer=begin_process) as pool:
        while True:
            while len(waiting) < jobs and may_begin() and (number := next(numbers, None)) is not None:
                waiting.add(pool.submit(run.play, number))
            if not waiting:
                return
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
