"""Settings of a service that can build its index from the log of a plane."""

from __future__ import annotations

import re
import secrets
import socket
from typing import Final

from kvevents.errors import ConfigError, MissingDependencyError
from kvevents.service.index_source import OpenIndexSource
from kvevents.service.settings import ServiceSettings
from kvevents.settings import Name, build_decoder_now
from kvevents_plane.settings import PlaneSettings

_NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


@build_decoder_now
class ReplicaSettings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of `kvevents serve` if the package with the plane is installed."""

    plane: PlaneSettings | None = None
    """Build the index from the log of this plane instead of following engines."""
    replica: Name | None = None
    """Name of this replica, unique in its plane (default: derived from the host's name)."""

    def __post_init__(self) -> None:
        ServiceSettings.__post_init__(self)
        if self.plane is None:
            if self.replica is not None:
                raise ConfigError("replica needs a plane: set `plane` or --nats")
            return
        if self.names_engines or self.topics is not None:
            raise ConfigError(
                "a replica follows no engines, as its plane's bridges do: remove the options (--worker, --engine, "
                "--dns, --kubernetes-selector, --sources, --listen) or keys (sources, dns, ...) that name engines"
            )
        if self.state_dir is not None:
            raise ConfigError("a replica needs no state_dir, because it restores its index from the plane: remove state_dir")
        if self.replica is not None and not _NAME_PATTERN.fullmatch(self.replica):
            raise ConfigError(f"replica is {self.replica!r}: expected 1 to 64 letters, digits, '-' and '_'")


def index_source(config: ReplicaSettings) -> OpenIndexSource | None:
    """Return a function that creates the replica that the settings describe, or None if the service follows engines.

    Raises `ConfigError` for settings of a connection that this host cannot use, and `MissingDependencyError`.
    """
    plane = config.plane
    if plane is None:
        return None
    try:  # imported here, because a service that follows engines needs no NATS client
        from kvevents_plane.connection import client_options  # noqa: PLC0415 - only replicas need it
        from kvevents_plane.replica.replica import Replica  # noqa: PLC0415 - only replicas need it
    except ImportError as error:
        raise MissingDependencyError(f"a replica of a plane needs the package {error.name}", "plane") from error
    client_options(plane)
    # Each process has its own name, because several processes can run on one host.
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:50]
    name = config.replica or f"{host}-{secrets.token_hex(3)}"
    return lambda fleet: Replica(plane, name, fleet, snapshot_seconds=config.snapshot_seconds, memory_limit=config.memory_limit)
