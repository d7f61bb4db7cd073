"""A proxy whose port seems to belong to another engine."""

from __future__ import annotations

from typing import Any

from kvevents.endpoints import connectable_endpoint
from kvevents.testing import FaultProxy
from kvevents.testing.proxy import tcp_address


class RedirectingProxy(FaultProxy):
    """A `FaultProxy` that can connect its clients to another endpoint."""

    def __init__(self, upstream: str, listen: str = "tcp://127.0.0.1:*", **options: Any) -> None:
        super().__init__(upstream, listen, **options)
        self._original_upstream = self._upstream

    def redirect(self, upstream: str) -> None:
        """Close every connection, and connect clients to another TCP endpoint until `heal`. Raise `ConfigError`."""
        self._upstream = tcp_address(connectable_endpoint(upstream))
        self.cut()

    def heal(self) -> None:
        """End every fault. Connections that were redirected are closed."""
        if self._upstream != self._original_upstream:
            self._upstream = self._original_upstream
            self.cut()
        super().heal()
