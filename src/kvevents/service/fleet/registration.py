"""Registrations: one rank of one engine, and the scope of its prompts."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from hashlib import sha256
from typing import Final, NamedTuple, TypeAlias
from urllib.parse import urlsplit

import msgspec

from kvevents.client.schemas import DEFAULT_GROUP, MAX_LABEL_BYTES, MAX_LABELS, MAX_NAME_BYTES
from kvevents.errors import ConfigError
from kvevents.service.errors import ConflictError
from kvevents.settings import build_decoder_now
from kvevents.stream import Source
from kvevents.stream.deliveries import check_stores_only
from kvevents.zeromq.keys import Curve

MAX_BLOCK_SIZE: Final = 1 << 20
"""Maximum size of a block in tokens. Engines use 1 to 256."""
MAX_DRAFT_GROUPS: Final = 64
"""Maximum number of draft groups of one engine. Engines have a few KV cache groups in all."""
MAX_GROUP: Final = (1 << 31) - 1
"""Largest number of a KV cache group."""
MAX_SHOWN: Final = 40
"""Maximum number of characters of an invalid value that an error quotes."""
_SCHEMES: Final = frozenset({"http", "https", "grpc"})
SEPARATOR: Final = "\x1f"
"""Separates the parts of a name inside the index. No part can contain it."""


Key: TypeAlias = tuple[str, int]
"""Name of a stream in subscriber and index: source and rank."""


class Scope(NamedTuple):
    """The boundary of prefix matches: one model of one tenant and routing group.

    An engine whose events have no LoRA or salt, and that was registered with one, has a scope of its own.
    """

    model: str
    tenant: str = DEFAULT_GROUP
    group: str = DEFAULT_GROUP
    lora: str | int | None = None
    """Name of the LoRA, or its number for engines whose events have no name (vLLM before 0.14)."""
    salt: str | None = None

    def admits(self, prompt: Scope) -> bool:
        """Whether streams in this scope may hold blocks of a prompt.

        Model, tenant and group are equal then, and the prompt has the LoRA and the salt of this scope, if it has any.
        """
        return self[:3] == prompt[:3] and self.lora in {None, prompt.lora} and self.salt in {None, prompt.salt}

    @property
    def salt_digest(self) -> str | None:
        """A digest that is written and sent in place of the salt, which is a secret."""
        return None if self.salt is None else sha256(self.salt.encode()).hexdigest()

    @property
    def name(self) -> str:
        """The name of this scope in the index. It contains a digest of the salt, because names are written into snapshots."""
        parts = [self.tenant, self.group, self.model]
        if self.lora is not None or self.salt is not None:
            parts += ["" if self.lora is None else f"+{self.lora}", self.salt_digest or ""]
        return SEPARATOR.join(parts)


@build_decoder_now
class Registration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One data-parallel rank of one engine, and the scope whose prompts can match it."""

    instance: str
    """Name of the engine, as routers know it."""
    endpoint: str
    """Endpoint at which it publishes: `tcp://HOST:PORT`."""
    model: str
    rank: int = 0
    replay_endpoint: str | None = None
    topic: str = ""
    replay_is_proven: bool = False
    """Whether the engine itself has named both endpoints (`Source.replay_is_proven`)."""
    block_size: int | None = None
    """Declared tokens per block; None accepts the block size of the events. Blocks of another size are reported as a fault."""
    tenant: str = DEFAULT_GROUP
    """Mooncake's `tenant_id`: a scope."""
    group: str = DEFAULT_GROUP
    """Dynamo's `routing_group`: a scope."""
    lora_name: str | None = None
    """LoRA of events that do not name one."""
    salt: str | None = None
    """Cache salt that a query must contain to match this engine."""
    bind: bool = False
    """Listen at `endpoint` instead of connecting to it."""
    curve: Curve | None = None
    stores_only: tuple[str, ...] = ()
    """Tiers whose stores the engine announces and whose removals it does not."""
    drafts: tuple[int, ...] | None = None
    """KV cache groups of its draft model (EAGLE, MTP), in which the engine computes the last block of a hit again; an empty
    list means all groups. None, the default, means no draft model: events do not say whether there is one."""
    load: str | None = None
    """Where the load of the rank is read, as in `LoadSource.endpoint`; None if it is not read."""
    url: str | None = None
    """Where the engine takes requests, such as `http://10.0.0.7:8000`: answers return it, so that a router can send them."""
    labels: Mapping[str, str] = {}
    """Labels by name, such as `role = "decode"`, by which `/v1/select` filters."""

    def __post_init__(self) -> None:
        for name in (
            "instance",
            "endpoint",
            "model",
            "tenant",
            "group",
            "topic",
            "lora_name",
            "salt",
            "replay_endpoint",
            "load",
            "url",
        ):
            text: str | None = getattr(self, name)
            if text is None:
                continue
            if len(text.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
                raise ConfigError(f"{name} has more than {MAX_NAME_BYTES} bytes")
            if not text.isprintable():
                raise ConfigError(f"{name} {text!r} has unprintable characters")
        for name in ("instance", "endpoint", "model", "tenant", "group"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is empty")
        if self.rank < 0 or self.rank >= 1 << 32:
            raise ConfigError(f"rank {self.rank} is not from 0 to 2**32 - 1")
        check_stores_only(self.stores_only)
        check_drafts(self.drafts)
        check_serving_url(self.url)
        check_labels(self.labels)
        if self.block_size is not None and not 0 < self.block_size <= MAX_BLOCK_SIZE:
            raise ConfigError(f"block_size is {self.block_size}; it must be from 1 to {MAX_BLOCK_SIZE} tokens")

    @property
    def key(self) -> Key:
        """Name in subscriber and index. An instance name that two tenants use means two streams."""
        return source_name(self.tenant, self.group, self.instance), self.rank

    @property
    def scope(self) -> Scope:
        """The scope of the prompts that can match it."""
        return Scope(self.model, self.tenant, self.group, self.lora_name, self.salt)

    @property
    def label(self) -> str:
        """Name for people: `engine-0 rank 1`."""
        return f"{self.instance} rank {self.rank}"

    def differences(self, other: Registration) -> list[str]:
        """Return the names of the fields in which another registration of this rank differs.

        Whether the engine itself named the endpoints makes no difference.
        """
        if self == other:  # the usual case, and a tenth of the time
            return []
        names = [name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)]
        return [name for name in names if name != "replay_is_proven"]

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
    return SEPARATOR.join((tenant, group, instance))


class Lease(NamedTuple):
    """The time until which a registration stays unless it is renewed."""

    seconds: int
    ends: float
    """Time of the monotonic clock."""
    expires_at: float
    """Unix time, for answers."""

    @classmethod
    def of(cls, seconds: int | None) -> Lease | None:
        """Return a lease that begins now; None for a registration that never ends by itself."""
        return None if seconds is None else cls(seconds, time.monotonic() + seconds, time.time() + seconds)


def check_drafts(drafts: Collection[int] | None) -> None:
    """Raise `ConfigError` unless these can be the KV cache groups of a draft model."""
    if drafts is None:
        return
    if len(drafts) > MAX_DRAFT_GROUPS:
        raise ConfigError(f"drafts has {len(drafts)} KV cache groups; the most is {MAX_DRAFT_GROUPS}, and [] means all")
    for group in drafts:
        if not 0 <= group <= MAX_GROUP:
            raise ConfigError(f"drafts has {group}; KV cache groups have numbers from 0 to 2**31 - 1")


def check_serving_url(url: str | None) -> None:
    """Raise `ConfigError` unless this is None or the URL of a server: `http://`, `https://` or `grpc://` with a host."""
    if url is None:
        return
    try:
        parts = urlsplit(url)
        is_server = parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0 and parts.username is None
    except ValueError:
        is_server = False
    if not is_server or " " in url:
        raise ConfigError(f"invalid url {url!r}: expected http://HOST:PORT, https://HOST:PORT or grpc://HOST:PORT")


def check_labels(labels: Mapping[str, str]) -> None:
    """Raise `ConfigError` for too many labels, and for a name or a value that is empty, too long or unprintable."""
    if len(labels) > MAX_LABELS:
        raise ConfigError(f"{len(labels)} labels were given; the most is {MAX_LABELS}")
    length = sum(len(text.encode("utf-8", "surrogatepass")) for text in (*labels, *labels.values()))
    if length > MAX_LABEL_BYTES:
        raise ConfigError(f"the labels have {length} bytes together; the most is {MAX_LABEL_BYTES}")
    for text in (*labels, *labels.values()):
        if not text or len(text.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES or not text.isprintable():
            raise ConfigError(f"invalid label {text[:MAX_SHOWN]!r}: expected 1 to {MAX_NAME_BYTES} printable bytes")


def check_same_engine(registration: Registration, other: Registration) -> None:
    """Raise `ConflictError` if two ranks of one instance cannot belong to one engine."""
    label = registration.label
    if other.scope != registration.scope:
        raise ConflictError(
            f"{label} has model {registration.model!r}, and {other.label} {other.model!r} or another LoRA or salt",
            "other-model",
            "ranks of one instance serve one model; give this instance another name",
        )
    if other.block_size != registration.block_size:
        raise ConflictError(
            f"{label} has blocks of {registration.block_size} tokens, and {other.label} of {other.block_size}",
            "other-block-size",
            "ranks of one instance have blocks of one size",
        )
    if other.drafts != registration.drafts:
        raise ConflictError(
            f"{label} has the draft groups {registration.drafts}, and {other.label} {other.drafts}",
            "other-drafts",
            "ranks of one instance have one draft model",
        )
