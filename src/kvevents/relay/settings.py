"""What a relay is told."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

from kvevents.config import Curve, check_heartbeat, resolve_dialect
from kvevents.errors import ConfigError
from kvevents.settings import Endpoint, FolderPath, Name, Positive, Seconds, Settings
from kvevents.stream import Source
from kvevents.wire.dialects import Dialect

Tokens: TypeAlias = Literal["keep", "hash", "drop"]
"""What becomes of token ids: sent on; replaced by the blocks' keys, which prompts still match; or by numbers of no meaning."""

DEFAULT_ENDPOINT: Final = "tcp://127.0.0.1:6557"
DEFAULT_REPLAY_ENDPOINT: Final = "tcp://127.0.0.1:6558"
DEFAULT_HEARTBEAT: Final = 5.0


class RelayOptions(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a relay does, whichever engines it follows. Raises `ConfigError` for what cannot work."""

    endpoint: Endpoint = DEFAULT_ENDPOINT
    """Where to publish."""
    replay_endpoint: Endpoint | None = DEFAULT_REPLAY_ENDPOINT
    """Where to answer requests for replay and history."""
    snapshot_endpoint: Endpoint | None = None
    """Where to answer SGLang's snapshot-v1 (default: nowhere)."""
    topic: str | None = None
    """First frame of every batch (default: the first engine's)."""
    dialect: Name | None = None
    """Engine and release to be understood by, such as vllm-0.24 (default: as they came)."""
    tokens: Tokens = "keep"
    """Forward token ids (keep), replace them with block keys that prompts still match (hash), or with placeholders (drop)."""
    buffer_steps: Positive = 10_000
    """Batches kept as they were sent; older ones are compacted."""
    hwm: Positive = 100_000
    """Batches that one slow consumer may be behind. It loses further ones, and asks for them again."""
    heartbeat: Seconds = DEFAULT_HEARTBEAT
    """Seconds between two heartbeats. There is no relay without: consumers could not learn what it doubts."""
    journal: FolderPath | None = None
    """Folder of the journal, by which a restarted relay continues; without it a restart begins a new incarnation."""
    curve: Curve | None = None
    """Keys of the relay's own sockets; those towards an engine are in its `Source`."""

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        check_heartbeat(self.heartbeat)
        if self.spelling is not None and self.spelling.events == "array" and self.tokens != "keep":
            raise ConfigError(
                f"tokens={self.tokens!r} puts keys in the place of tokens, for which {self.spelling} has no room; choose a "
                "dialect with events as maps: vllm from 0.24 on, sglang from 0.5.20 on, or None"
            )

    @property
    def spelling(self) -> Dialect | None:
        """The dialect. Raises `UnknownDialectError`."""
        return resolve_dialect(self.dialect)


class RelaySettings(RelayOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One relay. Raises `ConfigError` for what cannot work."""

    upstreams: tuple[Source, ...]
    """One stream to repeat, or several that become one: tiers of a worker, or ranks of an engine."""

    def __post_init__(self) -> None:
        RelayOptions.__post_init__(self)
        if not self.upstreams:
            raise ConfigError("a relay needs at least one upstream: the endpoint of an engine")
        names = [(source.label, source.rank) for source in self.upstreams]
        if len(set(names)) < len(names):
            raise ConfigError("two upstreams have the same name and rank; name them, or give their ranks")

    @property
    def rewrites(self) -> bool:
        """Whether payloads are read and written anew, rather than sent on as they came."""
        return self.dialect is not None or self.tokens != "keep" or len(self.upstreams) > 1

    def fingerprint(self) -> str:
        """What must be the same for a later process to go on: where events come from, and how they are told."""
        ends = [(source.label, source.rank, source.endpoint, source.topic) for source in self.upstreams]
        return msgspec.json.encode([ends, self.dialect, self.tokens]).decode()
