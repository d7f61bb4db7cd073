"""The thread that follows engines and the one that answers take turns.

Theory of operation. Both need the interpreter. To let go of it is not enough: who does takes it back before another thread,
which sleeps, is awake, so that a single client that asks without pause would keep what engines send out of the index for
milliseconds. So each of the two sees whether there is something to read for the other one, and if there is waits until it is
read: that one has the interpreter then. News go first: before it answers, the one lets the other bring into the index what
has come; and when that has been done, the other lets the one answer, before it does what nobody waits for.
"""

from __future__ import annotations

import importlib
from typing import Final

MAX_SECONDS: Final = 0.000_2
"""How long one waits for the other at most. To wake up takes a thread a quarter of that, or less."""


class Alternation:
    """Of one process. Where a descriptor is not known, nobody waits."""

    def __init__(self, news: int) -> None:
        self.news = news
        """Descriptor that can be read while something from engines waits; -1 where there is none."""
        self.questions = -1
        """The same of the event loop that answers."""
        # Not imported by name: only the index may need it, and who has none has no service either.
        self._give_way: Final = importlib.import_module("kvevents._native").give_way

    def follow(self) -> None:
        """Let what engines have sent be brought into the index; to be called before questions are answered."""
        if self.news >= 0:
            self._give_way(self.news, MAX_SECONDS)

    def answer(self) -> None:
        """Let questions be answered; to be called when what engines have sent is in the index."""
        if self.questions >= 0:
            self._give_way(self.questions, MAX_SECONDS)
