"""When answers are written, and when the event loop sleeps: what is decided once for all connections in each of its turns.

Theory of operation. Where a CPU has nothing to do, to wake whoever sleeps on it takes longer than to answer a question: tens of
microseconds in a virtual machine, of which the one that wakes pays a part. So:

- Where many ask, answers of one turn are written in groups: who is awake for the first of them need not be woken for the rest.
  Where one asks after the other, each is written at once.
- After a turn with an answer the loop *stays awake*, and looks for what comes next rather than sleep, for `awake_seconds` at
  most; but only where the last question had come so soon after the answer before it. Other threads run meanwhile, since it
  holds no lock. That takes CPU time which nobody else should need: on a machine with one CPU the loop sleeps.
- What need not be done before an answer is done *behind* the answers of a turn, while those who asked read them.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Callable
from time import perf_counter
from typing import Any, Final

GROUP: Final = 4
"""Answers that are written together; more of them would wait for too long."""
FEW: Final = 1
"""Answers of the turn before, above which those of the next one are written in groups."""


class Turns:
    """Of one event loop, which must be running when something is answered.

    `before` is called before the first question of a turn is answered, `behind` behind all its answers. `look` waits for
    something to read from a descriptor, for so many seconds at most, without sleeping.
    """

    def __init__(
        self,
        awake_seconds: float,
        *,
        before: Callable[[], None],
        behind: Callable[[], None],
        clock: Callable[[], float] = perf_counter,
        look: Callable[[int, float], bool] | None = None,
    ) -> None:
        self._awake_seconds: Final = awake_seconds if look is not None or _has_cpus() else 0.0
        self._before: Final = before
        self._behind: Final = behind
        self._clock: Final = clock
        # Not imported by name: only the index may need it, and who has none has no service either.
        self._look: Final = importlib.import_module("kvevents._native").look_for if look is None else look
        self._loop: Any = None
        self._descriptor = -1
        self._waiting: list[tuple[Any, bytes]] = []
        self._begun = False
        self._answers = self._earlier = 0
        """Of this turn, and of the one before."""
        self._answered_at = float("-inf")
        self._stays = False

    def ask(self) -> None:
        """To be called before a question is answered."""
        if not self._begun:
            self._begin()
            self._before()

    def answer(self, transport: Any, data: bytes, came_at: float) -> None:
        """Write an answer to a question that had come at a moment of the clock; in order, before the next turn ends."""
        if not self._begun:
            self._begin()
        self._answers += 1
        if self._earlier <= FEW:
            transport.write(data)
        else:
            self._waiting.append((transport, data))
            if len(self._waiting) >= GROUP:
                self.flush()
        self._stays = came_at - self._answered_at < self._awake_seconds
        self._answered_at = self._clock()

    def flush(self) -> None:
        """Write what waits. To be called before anything else is done with a transport that something was answered on."""
        waiting, self._waiting = self._waiting, []
        for transport, data in waiting:
            if not transport.is_closing():
                transport.write(data)

    def _begin(self) -> None:
        self._begun = True
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._descriptor = descriptor_of(self._loop)
        # Behind what is ready in this turn, other connections among that.
        self._loop.call_soon(self._end)

    def _end(self) -> None:
        self.flush()
        self._earlier, self._answers, self._begun = self._answers, 0, False
        self._behind()
        if self._stays and self._descriptor >= 0:
            self._look(self._descriptor, self._awake_seconds)


def descriptor_of(loop: asyncio.AbstractEventLoop) -> int:
    """One that can be read when there is something to do for uvloop's; -1 for other loops, which have none."""
    return int(getattr(loop, "_get_backend_id", lambda: -1)())


def _has_cpus() -> bool:
    """Whether somebody else can run while this process looks."""
    return (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) > 1
