"""The source of a stream: where a subscriber follows it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvevents.endpoints import offset_endpoint_port, validate_endpoint
from kvevents.errors import ConfigError
from kvevents.security import Curve


@dataclass(frozen=True, slots=True)
class Source:
    """One stream to subscribe to: one data-parallel rank of one engine."""

    endpoint: str
    """Where the engine publishes, such as `tcp://10.0.0.7:5557`."""
    replay_endpoint: str | None = None
    """Where it answers replay requests. Without it, losses are noticed but not repaired."""
    topic: str = ""
    """Prefix of the topics to receive. Batches with another topic are not received."""
    name: str | None = None
    """Name of the engine in deliveries; its endpoint if None. Ranks of one engine share a name."""
    rank: int = 0
    bind: bool = False
    """Bind `endpoint` and let the engine connect, instead of connecting to it."""
    curve: Curve | None = field(default=None, repr=False)
    """CURVE keys; `server_key` is the engine's public key."""

    def __post_init__(self) -> None:
        for endpoint in (self.endpoint, self.replay_endpoint):
            if endpoint is not None:
                validate_endpoint(endpoint)
        if self.rank < 0:
            raise ConfigError(f"invalid rank {self.rank} of {self.label}: expected a number from 0")

    def ranks(self, count: int) -> list[Source]:
        """Return the source of each of `count` data-parallel ranks. Ports count up from this one's, as in the engines.

        Raises `ConfigError` if a port would be above 65535.
        """
        return [
            replace(
                self,
                endpoint=offset_endpoint_port(self.endpoint, rank) or self.endpoint,
                replay_endpoint=offset_endpoint_port(self.replay_endpoint, rank),
                name=self.label,
                rank=self.rank + rank,
            )
            for rank in range(count)
        ]

    @property
    def label(self) -> str:
        """The name of this source in deliveries and in `trust()`."""
        return self.name or self.endpoint
