"""Selections made by Dynamo's `/select`, until a request to `/reservations` reserves them by name."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

from kvevents.service.fleet.registration import Scope

MAX_AGE_SECONDS: Final = 120.0
"""Number of seconds for which a selection waits for its reservation, as in Dynamo's service."""
MAX_SELECTIONS: Final = 4_096
MAX_BYTES: Final = 64 << 20
"""Maximum size in bytes of the token ids of all selections."""
_SelectionKey: TypeAlias = tuple[tuple[str, str, str], str]
"""Key of a selection: model, tenant, group and the name of the selection."""


class PendingSelection(NamedTuple):
    """A selection that is not reserved yet."""

    instance: str
    rank: int
    scope: Scope
    tokens: Any
    """Token ids of the prompt; if the request had only hashes, placeholders for the tokens that the worker must compute."""
    ignores_cache: bool
    is_waiting: bool
    """Whether the worker must still compute the first token of the request."""
    session: str | None

    @property
    def worker(self) -> tuple[str, int]:
        """Instance and rank."""
        return self.instance, self.rank


class SelectionCache:
    """Selections by scope and name. Above a limit of age, number or bytes, the oldest are removed. Any thread may use this."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock: Final = clock
        self._lock: Final = threading.Lock()
        self._entries: Final[OrderedDict[_SelectionKey, tuple[float, PendingSelection]]] = OrderedDict()
        self._bytes = 0
        self.booking_lock: Final = threading.Lock()
        """Lock for the check and the reservation of a name, so that two requests cannot both find the name free."""

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, name: str, selection: PendingSelection) -> None:
        """Store a selection; the new selection replaces a selection with the same scope and name."""
        with self._lock:
            now = self._clock()
            self._remove(_key_of(selection.scope, name))
            self._entries[_key_of(selection.scope, name)] = (now, selection)
            self._bytes += 4 * len(selection.tokens)
            while self._entries:
                oldest, (added_at, _) = next(iter(self._entries.items()))
                if now - added_at <= MAX_AGE_SECONDS and len(self._entries) <= MAX_SELECTIONS and self._bytes <= MAX_BYTES:
                    break
                self._remove(oldest)

    def get(self, scope: Scope, name: str) -> PendingSelection | None:
        """Return a selection; None if the selection is missing or too old."""
        with self._lock:
            entry = self._entries.get(_key_of(scope, name))
            return None if entry is None or self._clock() - entry[0] > MAX_AGE_SECONDS else entry[1]

    def discard(self, scope: Scope, name: str) -> None:
        """Remove a selection; a missing selection is no error."""
        with self._lock:
            self._remove(_key_of(scope, name))

    def _remove(self, key: _SelectionKey) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            self._bytes -= 4 * len(entry[1].tokens)


def _key_of(scope: Scope, name: str) -> _SelectionKey:
    return scope[:3], name  # The request that reserves a selection names neither LoRA nor salt.
