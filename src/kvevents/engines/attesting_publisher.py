"""The publisher inside an engine, which sends the digest of the engine's own prefix cache in heartbeats.

`kvevents.wire.attestation` has the digest. A plugin keeps it beside the engine's cache: a block that enters adds its term, a
block that leaves subtracts it, so reading it costs nothing. Consumers compare it with the blocks they hold.
"""

from __future__ import annotations

import logging
from typing import Any

from kvevents.publisher import ZmqEventPublisher


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
