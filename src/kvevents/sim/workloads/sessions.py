"""Infers the sessions of requests from a trace that does not contain sessions.

The rule. The next prompt of a conversation begins with all whole pieces of an earlier one. So each prompt's last whole piece is
remembered with its session, and a request belongs to the session of the deepest remembered piece of its own prompt; otherwise
it begins a new one. Two kinds of pieces are ignored, since many conversations share them: the first piece of a prompt, and a
piece that was followed by more than `SHARED_AFTER` different pieces.

Known errors: a prompt of at most one whole piece always begins a session, and up to `SHARED_AFTER` users whose prompts continue
exactly the end of another user's first prompt become one session.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

SHARED_AFTER: Final = 4
"""Most different continuations of one conversation: the next turn, its regenerations and edits."""
MAX_ENDS: Final = 100_000
"""Most prompts that are stored, about 300 bytes each; the oldest is evicted first."""


class Sessions:
    """Assigns a session to each request, in their order."""

    def __init__(self, name: str = "session", max_ends: int = MAX_ENDS) -> None:
        self._name = name
        self._max_ends = max_ends
        self._begun = 0
        self._ends: dict[Hashable, tuple[str, set[Hashable]]] = {}

    def of(self, pieces: Sequence[Hashable], whole: int) -> str:
        """Return the session of a prompt of these pieces, of which the first `whole` are complete.

        A piece identifies itself and all pieces before it.
        """
        session = self._continued(pieces, whole) or self._new()
        if whole > 1:
            end = pieces[whole - 1]
            _, followers = self._ends.pop(end, (session, set()))
            self._ends[end] = session, followers
            if len(self._ends) > self._max_ends:
                del self._ends[next(iter(self._ends))]
        return session

    def _continued(self, pieces: Sequence[Hashable], whole: int) -> str | None:
        for place in range(whole - 1, 0, -1):
            known = self._ends.get(pieces[place])
            if known is None:
                continue
            session, followers = known
            if place + 1 < len(pieces) and len(followers) <= SHARED_AFTER:
                followers.add(pieces[place + 1])
            return session if len(followers) <= SHARED_AFTER else None
        return None

    def _new(self) -> str:
        self._begun += 1
        return f"{self._name}-{self._begun}"
