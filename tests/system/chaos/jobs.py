"""Rounds side by side: each job is a process that plays one after the other."""

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
from tests.system.chaos.parts import Part, Silent
from tests.system.chaos.plan import Plan, draw_plan
from tests.system.chaos.settling import SettleLimits
from tests.system.chaos.stage import play

ROUND_SECONDS: Final = 300.0
"""After which a job is taken for dead."""
T_co = TypeVar("T_co", covariant=True)


class Rounds(Protocol[T_co]):
    """What is played."""

    @property
    def seed(self) -> str:
        """What rounds are drawn from."""
        ...

    def play(self, number: int) -> T_co:
        """One of them."""
        ...


@dataclass(frozen=True, slots=True)
class Run:
    """What is played: all that a round depends on, besides its number."""

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


def work(pipe: Connection, run: Rounds[object]) -> None:
    """A job: given a number, it answers with an outcome."""
    with suppress(EOFError, BrokenPipeError):
        while True:
            pipe.send(run.play(pipe.recv()))


def outcomes(run: Rounds[T_co], numbers: Iterator[int], jobs: int, go_on: Callable[[], bool]) -> Iterator[T_co]:
    """What comes of each round, as it comes; no further round is begun once `go_on` says no."""
    found: SimpleQueue[T_co | BaseException | None] = SimpleQueue()
    drawing, over = threading.Lock(), threading.Event()

    def job() -> None:
        part = Part("job", work, run)
        try:
            while go_on() and not over.is_set():
                with drawing:
                    number = next(numbers, None)
                if number is None:
                    break
                found.put(_played(part, run, number))
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
            over.set()  # the reader has had enough: rounds that are being played are the last ones


def _played(part: Part, run: Rounds[T_co], number: int) -> T_co:
    try:
        outcome: T_co = part.ask(number, ROUND_SECONDS)
    except Silent as error:
        raise RuntimeError(f"round {number} of seed {run.seed} ended its job: {error}") from error
    return outcome
