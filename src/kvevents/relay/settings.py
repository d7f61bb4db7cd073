"""What a relay is told."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

from kvevents.config import Curve, check_heartbeat, resolve_dialect
from kvevents.errors import ConfigError
from kvevents.stream import Source
from kvevents.wire.dialects import Dialect

Tokens: TypeAlias = Literal["keep", "hash", "drop"]
"""What becomes of token ids: sent on; replaced by the blocks' keys, which prompts still match; or by numbers of no meaning."""
Fsync: TypeAlias = Literal["always", "interval", "never"]
"""When what was written must be on the disk; `kvevents.relay.journal` says what a power loss costs with each."""

DEFAULT_ENDPOINT: Final = "tcp://127.0.0.1:6557"
DEFAULT_REPLAY_ENDPOINT: Final = "tcp://127.0.0.1:6558"
DEFAULT_HEARTBEAT: Final = 5.0


class RelaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One relay. Raises `ConfigError` for what cannot work."""

    upstreams: tuple[Source, ...]
    """One stream to repeat, or several that become one: tiers of a worker, or ranks of an engine."""
    endpoint: str = DEFAULT_ENDPOINT
    """Where consumers subscribe; on this host only unless told otherwise."""
    replay_endpoint: str | None = DEFAULT_REPLAY_ENDPOINT
    """Where they ask for replay and history."""
    snapshot_endpoint: str | None = None
    """Where SGLang's `snapshot-v1` is answered."""
    topic: str | None = None
    """First frame of every batch; None repeats the topic of the first upstream."""
    dialect: str | None = None
    """Engine and release to be understood by, such as `vllm-0.22`; None sends payloads on as they came."""
    tokens: Tokens = "keep"
    buffer_steps: int = 10_000
    """Batches kept as they were sent; older ones are collapsed."""
    hwm: int = 100_000
    """Batches that one slow consumer may be behind before it loses some, and asks for them."""
    heartbeat: float = DEFAULT_HEARTBEAT
    """Seconds between two heartbeats. There is no relay without: consumers could not learn what it doubts."""
    journal: str | None = None
    """Folder in which the relay outlives its process; None keeps everything in memory."""
    fsync: Fsync = "interval"
    curve: Curve | None = None
    """Keys of the relay's own sockets; those towards an engine are in its `Source`."""

    def __post_init__(self) -> None:
        if not self.upstreams:
            raise ConfigError("a relay needs at least one upstream: the endpoint of an engine")
        names = [(source.label, source.rank) for source in self.upstreams]
        if len(set(names)) < len(names):
            raise ConfigError("two upstreams have the same name and rank; name them, or give their ranks")
        check_heartbeat(self.heartbeat)
        for name in ("buffer_steps", "hwm"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it is a number of batches, at least 1")
        if self.spelling is not None and self.spelling.events == "array" and self.tokens != "keep":
            raise ConfigError(
                f"tokens={self.tokens!r} puts keys in the place of tokens, for which {self.spelling} has no room; choose a "
                "dialect with events as maps: vllm from 0.24 on, sglang from 0.5.20 on, or None"
            )

    @property
    def spelling(self) -> Dialect | None:
        """The dialect. Raises `UnknownDialectError`."""
        return resolve_dialect(self.dialect)

    @property
    def rewrites(self) -> bool:
        """Whether payloads are read and written anew, rather than sent on as they came."""
        return self.dialect is not None or self.tokens != "keep" or len(self.upstreams) > 1

    def fingerprint(self) -> str:
        """What must be the same for a later process to go on: where events come from, and how they are told."""
        ends = [(source.label, source.rank, source.endpoint, source.topic) for source in self.upstreams]
        return msgspec.json.encode([ends, self.dialect, self.tokens]).decode()
