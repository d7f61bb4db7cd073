"""Concurrent rounds: each job is a process that plays one round after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Final, Protocol, TypeVar

from tests.system.chaos.engine import Make
from tests.system.chaos.judging import Outcome
from tests.system.chaos.parts import Part, SilentPartError
from tests.system.chaos.plan import Plan, draw_plan
from tests.system.chaos.settling import SettleLimits
from tests.system.chaos.stage import play

ROUND_SECONDS: Final = 300.0
"""Limit of one round, after which its job counts as dead."""
T_co = TypeVar("T_co", covariant=True)


class Rounds(Protocol[T_co]):
    """Rounds that a job can play."""

    @property
    def seed(self) -> str:
        """Return the seed that rounds are drawn from."""
        ...

    def play(self, number: int) -> T_co:
        """Play the round with this number."""
        ...


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that a round depends on, except its number."""

    seed: str
    batches: int
    makes: Collection[Make]
    only: Collection[str] = ()
    without: Collection[str] = ()
    can_mount: bool = False
    limits: SettleLimits = field(default_factory=SettleLimits)

    def plan(self, number: int) -> Plan:
        return draw_plan(self.seed, number, self.batches, self.makes, self.only, self.without, can_mount=self.can_mount)

    def play(self, number: int) -> Outcome:
        return play(self.plan(number), self.limits)


def run_job(pipe: Connection, run: Rounds[object]) -> None:
    """Run the process of a job: receive numbers of rounds and send their outcomes."""
    with suppress(EOFError, BrokenPipeError):
        while True:
            pipe.send(run.play(pipe.recv()))


def play_rounds(run: Rounds[T_co], numbers: Iterator[int], jobs: int, may_begin: Callable[[], bool]) -> Iterator[T_co]:
    """Play rounds and yield each outcome when it is there. No round begins after `may_begin` has returned False."""
    found: SimpleQueue[T_co | BaseException | None] = SimpleQueue()
    numbers_lock, is_over = threading.Lock(), threading.Event()

    def job() -> None:
        part = Part("job", run_job, run)
        try:
            while may_begin() and not is_over.is_set():
                with numbers_lock:
                    number = next(numbers, None)
                if number is None:
                    break
                found.put(_play_round(part, run, number))
        except BaseException as error:  # noqa: BLE001 - raised below, in the process that reads the pipe
            found.put(error)
        finally:
            part.pipe.close()
            part.end()
            found.put(None)

    with ThreadPoolExecutor(jobs) as pool:
        for _ in range(jobs):
            pool.submit(job)
        try:
            for _ in range(jobs):
                while (outcome := found.get()) is not None:
                    if isinstance(outcome, BaseException):
                        raise outcome
                    yield outcome
        finally:
            is_over.set()  # no further rounds, also if the caller stops iterating


def _play_round(part: Part, run: Rounds[T_co], number: int) -> T_co:
    try:
        outcome: T_co = part.exchange(number, ROUND_SECONDS)
    except SilentPartError as error:
        raise RuntimeError(f"round {number} of seed {run.seed} ended its process: {error}") from error
    return outcome
