"""The digest of an engine's own prefix cache, and the publisher that sends it in heartbeats.

`kvevents.events.Heartbeat.attestation` defines the digest. A plugin keeps it beside the engine's cache: a block that enters
adds its term, a block that leaves subtracts it, so reading it costs nothing. Consumers compare it with the blocks they hold.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from kvevents.publisher import ZmqEventPublisher

DIGEST_MASK: Final = 2**64 - 1
_GROUP_FACTOR: Final = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: the multiples of it for small groups differ in many bits."""


def group_term(group: int | None) -> int:
    """Return what the hashes of a KV cache group are combined with; a block without a group is in group 0."""
    return (group or 0) * _GROUP_FACTOR & DIGEST_MASK


def hash_term(block_hash: int | bytes) -> int:
    """Return 64 bits of a block hash as announced: the low ones of an integer, or the last 8 bytes, big-endian."""
    if isinstance(block_hash, int):
        return block_hash & DIGEST_MASK
    return int.from_bytes(block_hash[-8:], "big")


def block_term(block_hash: int | bytes, group: int | None = None) -> int:
    """Return what one copy of a block adds to the digest."""
    return hash_term(block_hash) ^ group_term(group)


class AttestingPublisher(ZmqEventPublisher):
    """A publisher inside an engine. Its heartbeats carry the digest of the engine's cache when no batch is on its way.

    All methods but the heartbeat's are called by the engine's scheduler thread.
    """

    logger = logging.getLogger(__name__)
    _accepted = 0
    """Batches given to `publish`."""
    _cache_state: tuple[int, int] | None = None
    """How many batches lead to the newest known state of the cache, and its digest. It is replaced as a whole."""
    _expects_attestation = False
    _is_stopped = False

    def publish(self, events: Any) -> None:
        """Accept one batch, as the base class does."""
        super().publish(events)
        self._accepted += 1

    def expect_attestation(self) -> None:
        """Log a warning at the first heartbeat after a batch if no state of the cache is known by then."""
        self._expects_attestation = True

    def record_cache(self, digest: int, *, is_batch_pending: bool) -> None:
        """Record the engine's cache after all batches so far, and after the next one if that `is_batch_pending`."""
        self._cache_state = (self._accepted + is_batch_pending, digest)

    def stop_attesting(self) -> bool:
        """Send no attestation from now on. Return whether it was not stopped before."""
        was_stopped, self._is_stopped = self._is_stopped, True
        return not was_stopped

    def _attestation(self) -> int | None:
        state = self._cache_state
        if self._is_stopped:
            return None
        if state is None:
            if self._expects_attestation and self._accepted:
                self._expects_attestation = False
                self.logger.warning("kvevents: heartbeats carry no attestation: this engine's cache was not found")
            return None
        accepted, digest = state
        return digest if accepted == self._count_taken() else None
