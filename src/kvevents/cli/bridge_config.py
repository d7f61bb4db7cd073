"""Settings of `kvevents bridge`."""

from __future__ import annotations

import msgspec

from kvevents.plane.settings import BridgeOptions, BridgeSettings, PlaneSettings
from kvevents.service.config import EngineSources
from kvevents.settings import Host, Port, Seconds


class BridgeTable(BridgeOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One bridge, and what operators see of it."""

    metrics_port: Port | None = None
    """Port at which Prometheus may scrape (default: nowhere)."""
    metrics_host: Host = "127.0.0.1"
    """Address of that port."""
    status_seconds: Seconds | None = None
    """Log figures every so many seconds."""


class BridgeConfig(EngineSources, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A bridge as a process."""

    plane: PlaneSettings
    bridge: BridgeTable = msgspec.field(default_factory=BridgeTable)

    def settings(self) -> BridgeSettings:
        """The bridge of this process."""
        options = {name: getattr(self.bridge, name) for name in BridgeOptions.__struct_fields__}
        return BridgeSettings(plane=self.plane, **options)
