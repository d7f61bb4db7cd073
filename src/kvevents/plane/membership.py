"""Which engines are gone: what a bridge hears of them, for how long, and whether to believe it.

An engine that cannot be reached for `dead_seconds` is gone. Where more than half of a bridge's engines cannot be reached at
once it is the network that is suspected, and nobody is said to be gone; a single engine is too few to tell, and goes. When the
network is back, connections come back one after the other: who is still away then has the same time once more.

An engine of the log that no bridge names for `unnamed_seconds` was forgotten while no bridge was there to say so. Where that is
more than half of all engines of the log at once it is a setting, or a bridge that does not come back, that is suspected.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Final

from kvevents.plane.records import Key, Trusting

log = logging.getLogger(__name__)

ALIVE: Final = frozenset({"EXACT", "DEGRADED", "REPLAYING"})
"""Trust of streams whose engine was reached."""
LEAST_SUSPECT: Final = 2
"""Engines that must be out of reach for the network to be suspected."""


class Members:
    """The engines of one bridge, as it hears them."""

    def __init__(self, dead_seconds: float) -> None:
        self.suspects = ""
        """Why this end's network is suspected rather than the engines."""
        self._dead_seconds: Final = dead_seconds
        self._said: dict[Key, Trusting] = {}
        self._away_since: dict[Key, float] = {}

    def hear(self, said: Trusting) -> None:
        """What is trusted of a stream now."""
        self._said[said.key] = said

    def forget(self, key: Key) -> None:
        """The stream is followed no more, or anew."""
        self._said.pop(key, None)
        self._away_since.pop(key, None)

    def begin_anew(self, key: Key) -> None:
        """The stream is followed anew; for how long it has been away still counts."""
        self._said.pop(key, None)

    def said(self, key: Key) -> Trusting | None:
        """What is trusted of a stream; None where that is not known yet."""
        return self._said.get(key)

    def is_reached(self, key: Key) -> bool:
        """Whether its engine is."""
        said = self._said.get(key)
        return said is not None and said.trust in ALIVE

    def gone(self, present: Collection[Key], now: float) -> list[Key]:
        """Those of the streams in the log that have been away for too long. Call it now and then: away is what it sees."""
        for key in present:
            if self.is_reached(key):
                self._away_since.pop(key, None)
            elif key in self._said:
                self._away_since.setdefault(key, now)
        for key in self._away_since.keys() - set(present):
            del self._away_since[key]
        suspected = bool(self.suspects)
        self._suspect(present, now)
        if suspected and not self.suspects:
            self._away_since = dict.fromkeys(self._away_since, now)
        return [] if self.suspects else [key for key, since in self._away_since.items() if now - since > self._dead_seconds]

    def _suspect(self, present: Collection[Key], now: float) -> None:
        """Engines are counted, whatever the number of their ranks; none before it could matter."""
        engines, away = {source for source, _ in present}, {source for source, _ in self._away_since}
        longest = max((now - since for since in self._away_since.values()), default=0.0)
        suspects = len(away) >= LEAST_SUSPECT and len(away) * 2 > len(engines) and longest > self._dead_seconds / 2
        why = f"{len(away)} of {len(engines)} engines cannot be reached" if suspects else ""
        if bool(why) != bool(self.suspects):
            told = f"{why}: the network is suspected, and none of them leaves" if why else "engines are reached again"
            log.warning("%s", told)
        self.suspects = why


class Unnamed:
    """The engines of the log that no bridge names, as one bridge reads it."""

    def __init__(self, unnamed_seconds: float) -> None:
        self.engines = 0
        """How many there are."""
        self.suspects = ""
        """Why they do not leave."""
        self._unnamed_seconds: Final = unnamed_seconds
        self._since: dict[Key, float] = {}

    def clear(self) -> None:
        """It cannot be known at the moment who names what."""
        self._since.clear()

    def gone(self, joined: Collection[Key], unnamed: Collection[Key], now: float) -> list[Key]:
        """Those of all streams of the log that nobody has named for too long. Call it now and then: what it sees counts."""
        self._since = {key: self._since.get(key, now) for key in unnamed}
        engines, without = {source for source, _ in joined}, {source for source, _ in unnamed}
        self.engines = len(without)
        suspects = len(without) >= LEAST_SUSPECT and len(without) * 2 > len(engines)
        why = f"no bridge names {len(without)} of the {len(engines)} engines of the log" if suspects else ""
        if bool(why) != bool(self.suspects):
            told = f"{why}: none of them leaves; look whether all bridges run, and what they are to follow" if why else ""
            log.warning("%s", told or "most engines of the log are named by a bridge again")
        self.suspects = why
        return [] if why else [key for key, since in self._since.items() if now - since > self._unnamed_seconds]
