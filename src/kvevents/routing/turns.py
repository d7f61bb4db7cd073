"""Who comes next of workers that are equally good."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from random import Random
from typing import Final

from kvevents.routing.choice import Worker

MAX_TURNS: Final = 16_384
"""Workers whose last turn is remembered, 200 bytes each at most: four times as many as a service follows by default."""


class Turns:
    """Who comes next of equal workers. One for each router; any thread may ask.

    The first turn is at a random place, so that many routers that have just started do not send to one worker at once.
    """

    def __init__(self, random: Random | None = None, max_workers: int = MAX_TURNS) -> None:
        self._random = random or Random()  # noqa: S311 - spreads load, keeps no secret
        self._start = self._random.random()
        self._max_workers = max_workers
        self._number = 0
        self._last: dict[int, int] = {}
        self._lock = threading.Lock()

    def pick(self, how: str, scope: Hashable, equal: Sequence[Worker]) -> int:
        """Place of the one to take; `how` is one of `TIES`. `scope` is what keeps workers of one name apart."""
        return _TIES[how](self, scope, equal) if len(equal) > 1 else 0

    def took(self, scope: Hashable, worker: Worker) -> None:
        """A worker was chosen, whatever for: of equal ones it is the last to come next."""
        key = hash((scope, worker))  # the names themselves are as long as a client likes
        with self._lock:
            self._number += 1
            self._last.pop(key, None)
            self._last[key] = self._number
            if len(self._last) > self._max_workers:
                del self._last[next(iter(self._last))]

    def _rotate(self, scope: Hashable, equal: Sequence[Worker]) -> int:
        """The one chosen longest ago; of those that never were, the next from a random place on."""
        start = int(self._start * len(equal))

        def waited(place: int) -> tuple[int, int]:
            return self._last.get(hash((scope, equal[place])), 0), (place - start) % len(equal)

        return min(range(len(equal)), key=waited)

    def _draw(self, _: Hashable, equal: Sequence[Worker]) -> int:
        return self._random.randrange(len(equal))

    def _first(self, _: Hashable, __: Sequence[Worker]) -> int:
        return 0


_TIES: Final[dict[str, Callable[[Turns, Hashable, Sequence[Worker]], int]]] = {
    "rotate": Turns._rotate,  # noqa: SLF001 - a table of its own methods
    "random": Turns._draw,  # noqa: SLF001
    "first": Turns._first,  # noqa: SLF001
}
TIES: Final = tuple(_TIES)
"""Ways to end a tie: who was chosen longest ago, chance, or the order of the candidates."""
