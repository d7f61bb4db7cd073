"""Settings of a relay: what operators choose (`RelaySettings`), and limits and timers (`RelayLimits`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from kvevents.endpoints import connectable_endpoint
from kvevents.errors import ConfigError
from kvevents.relay.journal import JournalLimits
from kvevents.settings import Endpoint, FolderPath, Name, Positive, Range, Seconds, Settings, check_heartbeat
from kvevents.stream import DEFAULT_STREAM_LIMITS, Source, StreamLimits
from kvevents.wire import DEFAULT_WIRE_LIMITS, resolve_dialect
from kvevents.wire.dialects import Dialect
from kvevents.zeromq.keys import Curve


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLimits:
    """Limits and timers of a relay. Times are in seconds."""

    turn_timeout: float = 0.25
    """Maximum time for which a turn waits for deliveries. A heartbeat can be late by this time."""
    maintenance_interval: float = 0.05
    """Minimum time between two runs of periodic work (heartbeats, journal, status) if batches arrive all the time."""
    trust_interval: float = 0.5
    """Minimum time between two heartbeats if trust has risen or its reason has changed. A drop of trust is sent at once."""
    checkpoint_interval: float = 1.0
    """Time between two checkpoints in the journal. After a kill, the relay requests all batches after a checkpoint again."""
    snapshot_retry_interval: float = 2.0
    """Time between two attempts to write a snapshot of the journal. Attempts fail while the history is incomplete."""
    close_timeout: float = 2.0
    """Maximum time for which `close` waits until consumers have received what was sent."""
    max_upstream_blocks: int = 8_000_000
    """Maximum number of different blocks of one upstream in a shared stream, about 1 GB of memory; engines hold fewer."""
    max_payload_bytes: int = DEFAULT_WIRE_LIMITS.max_payload_bytes
    """Maximum size of a payload that consumers accept."""
    stream: StreamLimits = DEFAULT_STREAM_LIMITS
    """Limits of the upstreams' streams."""
    journal: JournalLimits = field(default_factory=JournalLimits)
    """Limits of the journal."""


class RelayOptions(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a relay except its upstreams. Raises `ConfigError` for values that cannot work."""

    endpoint: Endpoint = "tcp://127.0.0.1:6557"
    """Endpoint to publish at."""
    replay_endpoint: Endpoint | None = "tcp://127.0.0.1:6558"
    """Endpoint at which requests for replay and history are answered."""
    topic: str | None = None
    """First frame of every batch (default: the topic of the first upstream)."""
    dialect: Name | None = None
    """Engine and release whose dialect to send, such as vllm-0.24 (default: payloads as received)."""
    tokens: Literal["keep", "hash", "drop"] = "keep"
    """Forward token ids (keep), replace them with block keys that prompts still match (hash), or with placeholders (drop)."""
    buffer_steps: Positive = 10_000
    """Number of batches in the replay buffer; older batches are compacted."""
    hwm: Annotated[int, Range(1, 2**31 - 1)] = 100_000
    """Maximum number of batches that wait for a slow consumer, which must request further batches by replay."""
    heartbeat: Seconds = 5.0
    """Seconds between two heartbeats, from which consumers learn the relay's trust."""
    journal: FolderPath | None = None
    """Folder of the journal, from which a restarted relay continues; without a journal, a restart begins a new incarnation."""
    curve: Curve | None = None
    """Keys of the relay's own sockets. Keys for the connection to an engine are part of its `Source`."""

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        check_heartbeat(self.heartbeat)
        dialect = self.resolved_dialect
        if dialect is not None and dialect.event_form == "array" and self.tokens != "keep":
            raise ConfigError(
                f"tokens={self.tokens!r} replaces tokens with keys, for which {dialect} has no field; choose a dialect with "
                "events as maps: vllm from 0.24 on, sglang from 0.5.20 on, or None"
            )

    @property
    def resolved_dialect(self) -> Dialect | None:
        """The dialect to send; None to send payloads as received. Raises `UnknownDialectError`."""
        return resolve_dialect(self.dialect)


class RelaySettings(RelayOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One relay with its upstreams. Raises `ConfigError` for values that cannot work."""

    upstreams: tuple[Source, ...]
    """One stream to relay, or several streams that become one stream: tiers of a worker, or ranks of an engine."""

    def __post_init__(self) -> None:
        RelayOptions.__post_init__(self)
        if not self.upstreams:
            raise ConfigError("a relay needs at least one upstream: the endpoint of an engine")
        names = [f"{source.label} rank {source.rank}" for source in self.upstreams]
        for number, (name, source) in enumerate(zip(names, self.upstreams, strict=True)):
            if (first := names.index(name)) < number:
                both = f"{self.upstreams[first].endpoint} and {source.endpoint}"
                raise ConfigError(f"the upstreams {both} have the same name and rank, {name}; give them different ones")
            if source.endpoint.replace("//localhost:", "//127.0.0.1:") == connectable_endpoint(self.endpoint):
                raise ConfigError(
                    f"the upstream {source.endpoint} is the relay's own endpoint; name the engine's, or publish at another one"
                )
        dialect = self.resolved_dialect
        if dialect is not None and not dialect.has_rank and len({source.rank for source in self.upstreams}) > 1:
            raise ConfigError(f"{dialect} has no field for the rank, so consumers would mix the ranks; run one relay for each")

    @property
    def changes_payloads(self) -> bool:
        """Whether payloads are decoded, changed and encoded again, instead of forwarded as received."""
        return self.dialect is not None or self.tokens != "keep" or len(self.upstreams) > 1

    def fingerprint(self) -> str:
        """Return a text of the settings that must be equal to continue the stream: upstreams, dialect, tokens."""
        ends = [(source.label, source.rank, source.endpoint, source.topic) for source in self.upstreams]
        return msgspec.json.encode([ends, self.dialect, self.tokens]).decode()
