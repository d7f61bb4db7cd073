"""What the replicas of a plane hold, told to each other and compared.

They tell each other the digests of all streams at the same places of the log. One that is alone with what it holds is in the
wrong; where nobody has a majority they build anew one after the other.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from kvevents.errors import PlaneError
from kvevents.plane.entries import entries
from kvevents.plane.faults import told
from kvevents.plane.layout import Layout
from kvevents.plane.opinions import PREFIX, Opinion
from kvevents.service.replica.generation import Generation

if TYPE_CHECKING:
    from nats.js.kv import KeyValue

    from kvevents.plane.client import PlaneClient

log = logging.getLogger(__name__)

TURN_SECONDS: Final = 20.0
"""That replicas of different opinions, none of them a majority, leave each other to build anew."""


class Comparing:
    """One replica's side of it."""

    def __init__(self, name: str) -> None:
        self.disagreements = 0
        """How often another replica held something else at the same place."""
        self.unheard = ""
        """Why the other replicas are not told what this one holds, as where it may only read."""
        self._name: Final = name
        self._differs_since: float | None = None

    @property
    def differs(self) -> bool:
        """Whether another replica holds something else, so that it may be this one that is in the wrong."""
        return self._differs_since is not None

    def forget(self) -> None:
        """What was found out about an index that is replaced."""
        self._differs_since = None

    async def compare(self, client: PlaneClient, layout: Layout, generation: Generation, built_at: float) -> str:
        """Why the index must be built anew; empty where it need not."""
        own = Opinion.of(dict(generation.subscriber.census))
        try:
            others = await self._opinions(client, layout, own)
        except PlaneError as error:
            log.debug("the other replicas cannot be asked: %s", error)
            return ""
        now = time.monotonic()
        against = Counter(own.agrees(opinion) for opinion in others.values())
        if not against[False]:
            if against[True] or not others:
                self._differs_since = None
            return ""
        if self._differs_since is None:
            self._differs_since = now
            self.disagreements += 1
            log.error("%d of %d replicas hold something else at the same place", against[False], len(others))
        turn = sorted([self._name, *others]).index(self._name)
        outvoted = against[False] > against[True] + 1
        in_turn = against[False] == against[True] + 1 and now - self._differs_since > (turn + 1) * TURN_SECONDS
        is_due = (outvoted or in_turn) and now - built_at > TURN_SECONDS
        return "the other replicas hold something else" if is_due else ""

    async def _opinions(self, client: PlaneClient, layout: Layout, own: Opinion) -> dict[str, Opinion]:
        """What the others say, after this one has."""
        js = client.jetstream()
        with told("telling the other replicas what this one holds"):
            await self._say(await js.key_value(layout.leases), own)
        found = await entries(js, layout, "asking what the other replicas hold", PREFIX)
        said = {name: Opinion.decode(value) for name, value in found.items() if name != self._name}
        return {name: opinion for name, opinion in said.items() if opinion is not None}

    async def _say(self, bucket: KeyValue, own: Opinion) -> None:
        """What this one holds. One that may only read compares itself all the same."""
        try:
            with told("telling the other replicas what this one holds"):
                await bucket.put(PREFIX + self._name, own.encode())
        except PlaneError as error:
            if error.fault != "denied":
                raise
            if not self.unheard:
                log.warning("this replica only reads: %s", error)
            self.unheard = str(error)
        else:
            self.unheard = ""
