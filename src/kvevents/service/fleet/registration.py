"""Registrations of ranks: each describes one rank of one engine, and the scope of prompts for the rank."""

# No `from __future__ import annotations`: `kvevents.client.schemas` has the reason.
import time
from collections.abc import Mapping
from hashlib import sha256
from typing import Annotated, Final, NamedTuple, TypeAlias

from kvevents.client.schemas import DEFAULT_GROUP, MAX_LABEL_BYTES, MAX_LABELS, MAX_NAME_BYTES
from kvevents.endpoints import split_url
from kvevents.errors import ConfigError
from kvevents.service.errors import ConflictError
from kvevents.settings import Range, Settings, build_decoder_now
from kvevents.stream import Source
from kvevents.stream.deliveries import check_stores_only
from kvevents.zeromq.keys import Curve

MAX_BLOCK_SIZE: Final = 1 << 20
"""Maximum size of a block in tokens. Engines use 1 to 256."""
MAX_DRAFT_GROUPS: Final = 64
"""Maximum number of draft groups of one engine. An engine has only a few KV cache groups."""
QUOTE_LENGTH: Final = 40
"""Maximum number of characters of an invalid value that an error quotes."""
_URL_SCHEMES: Final = frozenset({"http", "https", "grpc"})
_REQUIRED_TEXTS: Final = frozenset({"instance", "endpoint", "model", "tenant", "group"})
"""Fields of a registration that must not be empty."""
NAME_SEPARATOR: Final = "\x1f"
"""Character between the parts of a name in the index. No part can contain this character."""


StreamKey: TypeAlias = tuple[str, int]
"""Key of a stream in subscriber and index: the name of its source, and its rank."""


class Scope(NamedTuple):
    """The boundary of prefix matches: one model of one tenant and routing group.

    If an engine's events name no LoRA or salt, its registration can name them, which gives the engine a scope of its own.
    """

    model: str
    tenant: str = DEFAULT_GROUP
    group: str = DEFAULT_GROUP
    lora: str | int | None = None
    """Name of the LoRA, or its number for engines whose events lack the name (vLLM before 0.14)."""
    salt: str | None = None

    @property
    def name(self) -> str:
        """The name of this scope in the index, with a digest of the salt, because snapshots contain names."""
        parts = [self.tenant, self.group, self.model]
        if self.lora is not None or self.salt is not None:
            parts.append("" if self.lora is None else f"+{self.lora}")
            parts.append("" if self.salt is None else sha256(self.salt.encode()).hexdigest())
        return NAME_SEPARATOR.join(parts)


class GroupFields(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine, or of all engines that connect to one endpoint."""

    model: str | None = None
    """Name of the model; required unless the engine reports the name itself."""
    block_size: Annotated[int | None, Range(1, MAX_BLOCK_SIZE)] = None
    """Number of tokens in a block. An engine that sends blocks of another size is DEGRADED."""
    tenant: str = DEFAULT_GROUP
    """Tenant of the engine: prompts of other tenants do not match its blocks."""
    group: str = DEFAULT_GROUP
    """Routing group of the engine, which separates fleets of one model."""
    curve: Curve | None = None
    """CURVE keys for this engine, which replace the keys for all engines."""
    stores_only: tuple[str, ...] = ()
    """Tiers, such as `cpu`, for which the engine announces stores but no removals. Matches on them count, but are not EXACT."""


class EngineFields(GroupFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of an engine except its name and endpoints, in settings and registrations.

    Raises `ConfigError` for an invalid field.
    """

    topic: str = ""
    """Prefix of the topics to subscribe to; by default all topics."""
    bind: bool = False
    """Whether to listen at the endpoint, for an engine that connects."""
    lora_name: str | None = None
    """LoRA of all events that do not name a LoRA."""
    salt: str | None = None
    """Cache salt that a query must contain to match this engine."""
    load: str | None = None
    """Address from which the load is read: `tcp://HOST:PORT` where the first rank publishes it (SGLang:
    --load-publish-endpoint), or `http://HOST:PORT` of a server with metrics to poll (vLLM). A wildcard host, as in
    `http://*:8000`, means the engine's own host. A queried engine reports the address itself. With `none` no load is read."""
    drafts: tuple[int, ...] | None = None
    """KV cache groups of a draft model (EAGLE, MTP); an empty list means all groups. In these groups the engine recomputes
    the final block of a match. None, the default, means no draft model: events do not show whether one exists."""
    url: str | None = None
    """URL at which the engine takes requests, such as `http://10.0.0.7:8000`; answers return this URL. A wildcard host, as in
    `http://*:8000`, means the engine's own host. Default for a queried engine: its base URL."""
    labels: Mapping[str, str] = {}
    """Names and values of labels, such as `role = "decode"`. Answers return labels, and `/v1/select` filters by labels."""

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        check_stores_only(self.stores_only)
        drafts = self.drafts or ()
        if len(drafts) > MAX_DRAFT_GROUPS or not all(0 <= group < 1 << 31 for group in drafts):
            raise ConfigError(f"invalid drafts: expected at most {MAX_DRAFT_GROUPS} KV cache groups, each from 0 to 2**31 - 1")
        if self.url is not None and (split_url(self.url, _URL_SCHEMES) is None or " " in self.url):
            raise ConfigError(f"invalid url {self.url!r}: expected http://HOST:PORT, https://HOST:PORT or grpc://HOST:PORT")
        _check_labels(self.labels)


@build_decoder_now
class Registration(EngineFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One data-parallel rank of one engine, and the scope of prompts that can match it. `load` and `url` have no wildcard."""

    instance: str
    """Name of the engine, as routers use it."""
    endpoint: str
    """Endpoint at which the rank publishes: `tcp://HOST:PORT`."""
    model: str  # pyright: ignore[reportGeneralTypeIssues]  # required here; all fields are given by name
    rank: Annotated[int, Range(0, (1 << 32) - 1)] = 0
    replay_endpoint: str | None = None
    replay_is_proven: bool = False
    """Whether the engine itself has named both endpoints (`Source.replay_is_proven`)."""

    def __post_init__(self) -> None:
        EngineFields.__post_init__(self)
        for name in self.__struct_fields__:
            text = getattr(self, name)
            if not isinstance(text, str):
                continue
            if len(text.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
                raise ConfigError(f"{name} has more than {MAX_NAME_BYTES} bytes")
            if not text.isprintable():
                raise ConfigError(f"{name} {text!r} has unprintable characters")
            if not text and name in _REQUIRED_TEXTS:
                raise ConfigError(f"{name} is empty")

    @property
    def key(self) -> StreamKey:
        """Name of the stream in subscriber and index. Two tenants that use the same instance name have two streams."""
        return source_name(self.tenant, self.group, self.instance), self.rank

    @property
    def scope(self) -> Scope:
        """The scope of the prompts that can match this rank."""
        return Scope(self.model, self.tenant, self.group, self.lora_name, self.salt)

    @property
    def label(self) -> str:
        """Name for people: `engine-0 rank 1`."""
        return f"{self.instance} rank {self.rank}"

    def differences(self, other: "Registration") -> list[str]:
        """Return the names of the fields in which another registration of this rank differs.

        `replay_is_proven` is not compared.
        """
        if self == other:  # Registrations are usually equal. This is ten times as fast as the comparison below.
            return []
        names = (name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name))
        return sorted(name for name in names if name != "replay_is_proven")

    def source(self) -> Source:
        """Return the source for a subscriber."""
        return Source(
            self.endpoint,
            self.replay_endpoint,
            topic=self.topic,
            name=self.key[0],
            rank=self.rank,
            bind=self.bind,
            curve=self.curve,
            replay_is_proven=self.replay_is_proven,
            stores_only=self.stores_only,
        )


def source_name(tenant: str, group: str, instance: str) -> str:
    """Return the name of an engine's streams in subscriber and index."""
    return NAME_SEPARATOR.join((tenant, group, instance))


class Lease(NamedTuple):
    """The time at which a registration ends unless the client renews it."""

    seconds: int
    ends_at: float
    """End of the lease on the monotonic clock."""
    expires_at: float
    """End of the lease as Unix time, for answers."""

    @classmethod
    def start(cls, seconds: int | None) -> "Lease | None":
        """Return a lease that begins now; None if `seconds` is None, for a registration that does not expire."""
        return None if seconds is None else cls(seconds, time.monotonic() + seconds, time.time() + seconds)


def _check_labels(labels: Mapping[str, str]) -> None:
    if len(labels) > MAX_LABELS:
        raise ConfigError(f"{len(labels)} labels are too many: expected at most {MAX_LABELS}")
    texts = [*labels, *labels.values()]
    lengths = [len(text.encode("utf-8", "surrogatepass")) for text in texts]
    if sum(lengths) > MAX_LABEL_BYTES:
        raise ConfigError(f"labels of {sum(lengths)} bytes together are too long: expected at most {MAX_LABEL_BYTES} bytes")
    for text, length in zip(texts, lengths, strict=True):
        if not 0 < length <= MAX_NAME_BYTES or not text.isprintable():
            raise ConfigError(f"invalid label {text[:QUOTE_LENGTH]!r}: expected 1 to {MAX_NAME_BYTES} printable bytes")


def check_same_engine(registration: Registration, other: "Registration") -> None:
    """Raise `ConflictError` if two ranks of one instance cannot belong to one engine."""
    label = registration.label
    if other.scope != registration.scope:
        sentence = f"{label} has model {registration.model!r}, and {other.label} {other.model!r} or another LoRA or salt"
        hint = "ranks of one instance serve one model; give this instance another name"
        raise ConflictError(sentence, "other-model", hint)
    for name, what in (("block_size", "blocks of"), ("drafts", "draft groups")):
        own, different = getattr(registration, name), getattr(other, name)
        if own != different:
            sentence = f"{label} has {what} {own}, and {other.label} {what} {different}"
            raise ConflictError(sentence, f"other-{name.replace('_', '-')}", f"all ranks of an instance need the same {name}")
