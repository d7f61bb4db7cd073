"""What becomes of one connection: when it is tried again, and how people and programs are told."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kvevents.backoff import Backoff
from kvevents.plane.faults import text_of

if TYPE_CHECKING:
    from nats.aio.client import Client, Server

RECONNECT_FIRST_SECONDS: Final = 0.2
"""Until the first attempt to come back, at most: another server of the cluster is there already."""
RECONNECT_MOST_SECONDS: Final = 5.0
"""Between two rounds over all servers."""
STEADY_SECONDS: Final = 1.0
"""What lasted at least so long was a connection: the next attempts begin with short pauses again."""
MAX_LINES: Final = 16
"""Different errors that are logged between two changes of state; the same one is logged once."""
_LEVELS: Final = {
    "connected": (logging.INFO, "%s: connected to %s"),
    "reconnecting": (logging.WARNING, "%s: lost the connection to %s; coming back"),
    "closed": (logging.INFO, "%s: closed the connection to %s"),
}

log = logging.getLogger(__name__)


class Rounds:
    """Which server is tried next, and when: all of them in a random order, then again after a pause that grows."""

    def __init__(self) -> None:
        self._backoff = Backoff(initial=RECONNECT_FIRST_SECONDS, maximum=RECONNECT_MOST_SECONDS)
        self._tried: set[str] = set()

    def begin(self, lasted: float) -> None:
        """A connection was lost after so many seconds."""
        self._tried.clear()
        if lasted >= STEADY_SECONDS:
            self._backoff.reset()

    def choose(self, servers: list[Server], _: dict[str, Any]) -> tuple[Server, float]:
        """One of the servers that nats-py knows, and the seconds to wait before."""
        left = [server for server in servers if server.uri.netloc not in self._tried]
        pause = 0.0
        if not self._tried or not left:
            self._tried.clear()
            left, pause = servers, self._backoff.next_delay()
        chosen = random.choice(left)  # noqa: S311 - no secret
        self._tried.add(chosen.uri.netloc)
        return chosen, pause


class Voice:
    """What happens to one connection, as lines of the log and words for `on_state`, each said once."""

    def __init__(self, name: str, on_state: Callable[[str], None] | None) -> None:
        self._name = name
        self._on_state = on_state
        self._state: str | None = None
        self._said: set[str] = set()
        self._rounds = Rounds()
        self._since = 0.0

    def callbacks(self, client: Client) -> dict[str, Any]:
        """Arguments of nats-py's `connect`."""
        self._client = client
        return {
            "name": self._name,
            "error_cb": self._failed,
            "disconnected_cb": self._disconnected,
            "reconnected_cb": self._reconnected,
            "closed_cb": self._closed,
            "reconnect_to_server_handler": self._rounds.choose,
        }

    def say(self, state: str) -> None:
        """It is so now."""
        if state == self._state:
            return
        self._state = state
        self._since = time.monotonic()
        self._said.clear()
        url = self._client.connected_url
        log.log(*_LEVELS[state], self._name, f"{url.hostname}:{url.port}" if url is not None else "its servers")
        if self._on_state is not None:
            self._on_state(state)

    def silence(self) -> None:
        """There will be no such connection, and nothing more to say."""
        self._state = "closed"

    async def _failed(self, error: Exception) -> None:
        if self._state is None:  # the first connection: `connect` tells of it
            raise error
        text = text_of(error)
        if self._state != "closed" and text not in self._said and len(self._said) < MAX_LINES:
            self._said.add(text)
            log.warning("%s: %s", self._name, text)

    async def _disconnected(self) -> None:
        if not self._client.is_closed and self._state == "connected":
            self._rounds.begin(time.monotonic() - self._since)
            self.say("reconnecting")

    async def _reconnected(self) -> None:
        self.say("connected")

    async def _closed(self) -> None:
        self.say("closed")
