"""What the service is told: one definition for the TOML file, the flags and the documentation."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
from msgspec import Struct, field

from kvevents.config import Curve
from kvevents.errors import ConfigError
from kvevents.plane.settings import PlaneSettings
from kvevents.plane.sharding import MAX_HOLDERS, SharePace, is_url
from kvevents.service.access import AccessConfig
from kvevents.service.discovery.tables import SourceTable, Template
from kvevents.service.hosts import HostPatterns, is_loopback
from kvevents.structs import prepared

_REPLICA: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_ASK_SECONDS: Final = 30.0
MAX_GRACE_SECONDS: Final = 3_600.0
MAX_AWAKE_MICROSECONDS: Final = 10_000
DEFAULT_PORT: Final = 8090
"""As Dynamo's standalone indexer."""


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of what peers and clients can make the service do. Reaching one is an error with its name in it."""

    max_body_bytes: int = 16 << 20
    """Of one request: two million token ids as JSON."""
    max_tokens: int = 2_000_000
    """Of one prompt, and of all prompts of one request."""
    max_json_bytes: int = 2 << 20
    """Of one JSON or msgpack body without the token ids of a JSON prompt: Python reads it in one piece, in some 5 ms."""
    max_hashes: int = 131_072
    """Of one `/query_by_hash`: those of two million tokens in blocks of 16."""
    max_candidates: int = 4_096
    """Of one `/v1/select`: as many as registered ranks."""
    inline_candidates: int = 512
    """An answer about more workers is made by a thread."""
    max_sources: int = 4_096
    """Registered ranks."""
    max_clients: int = 1_024
    """Connections at one time. A further one takes the place of an idle one, if there is any."""
    reserved_clients: int = 32
    """Connections beyond these, on which only probes are answered."""
    max_received_bytes: int = 256 << 20
    """Of all requests that are being received or answered, beyond the first 64 KiB of each."""
    max_unread_bytes: int = 256 << 20
    """Of all answers that clients have not read yet; above it the connection with the most is cut off."""
    max_listeners: int = 64
    """Clients of `/v1/events` at one time."""
    max_waiting: int = 64
    """Requests of one kind that may wait for its threads, and clients for a `/dump`."""
    max_dump_blocks: int = 1_000_000
    """Blocks that `/dump` tells; more of them are read page by page from `/v1/blocks`."""
    max_listed_blocks: int = 4_000_000
    """Blocks that are kept for further pages of `/v1/blocks`, 32 bytes each; the newest listing is kept whatever it has."""
    listing_seconds: float = 60.0
    """How long a listing waits for the next page to be asked for."""
    request_seconds: float = 10.0
    """How long a client may take to send a request, from its first byte on, and to send the first byte after it connects."""
    idle_seconds: float = 75.0
    """How long an idle connection is kept: longer than the pools of common clients, so that they close first."""
    unread_seconds: float = 10.0
    """How long a client may take to read an answer, or the next MiB of a long one."""
    drain_seconds: float = 5.0
    """How long requests that are in progress may take once the service ends."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) <= 0:
                raise ConfigError(f"limits.{name} is {getattr(self, name)}; it must be above 0")


class Readiness(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When `/readyz` says yes."""

    quorum: float = 1.0
    """Share of the sources that must be EXACT, 0 to 1."""
    deadline_seconds: float = 30.0
    """Seconds after the start from which it says yes though sources are not EXACT, and tells what is missing. It never says yes
    without a single source where engines are expected: those of the settings, those registered before a restart, `expected`."""
    expected: int = 0
    """Sources that are registered over HTTP sooner or later: so many must be there before the deadline."""
    grace_seconds: float = 0.0
    """After SIGTERM, how long it says no while everything else is answered as before: for load balancers to notice."""

    def __post_init__(self) -> None:
        if not 0 <= self.quorum <= 1:
            raise ConfigError(f"ready.quorum is {self.quorum}; it is a share from 0 to 1")
        if self.deadline_seconds < 0:
            raise ConfigError(f"ready.deadline_seconds is {self.deadline_seconds}; it must be at least 0")
        if self.expected < 0:
            raise ConfigError(f"ready.expected is {self.expected}; it is a number of sources, at least 0")
        if not 0 <= self.grace_seconds <= MAX_GRACE_SECONDS:
            raise ConfigError(f"ready.grace_seconds is {self.grace_seconds}; it must be from 0 to {MAX_GRACE_SECONDS:g}")


class Probing(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How endpoints are probed that have no connection or answer no replay: a fault is named within 10 s by the defaults."""

    connect_seconds: float = 2.0
    """How long a probe may take: connecting, and ZeroMQ's greeting."""
    pause_seconds: float = 5.0
    """Between two probes of one endpoint at most; the first pauses are shorter."""
    patience_seconds: float = 3.0
    """How long a replay, an engine that is to connect here, or CURVE keys may take before they count as a fault."""
    at_once: int = 64
    """Probes at one time."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) <= 0:
                raise ConfigError(f"probe.{name} is {getattr(self, name)}; it must be above 0")


class Tls(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The server's certificate, as PEM files."""

    certificate: str
    key: str
    client_ca: str | None = None
    """Clients must have a certificate that one of these has signed."""


class DnsTable(Template, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One name that stands for several engines."""

    target: str
    """`HOST:PORT` for addresses, `_kv._tcp.NAME` for an SRV record; behind `http://` each engine is asked for its endpoints."""


class ShardSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hold a share of a plane's lanes, and ask the other replicas for the rest."""

    url: str
    """Where the other replicas reach this one: `http://HOST:PORT` or `https://HOST:PORT`."""
    holders: int = 2
    """Replicas that are to hold each lane, 1 to 8: so many less one may fail, and every answer is still whole."""
    ask_seconds: float = 0.5
    """For another replica to answer; then the next one that holds the same is asked."""
    token_file: str | None = None
    """File with the bearer token that the others want to see, where they do; it takes the role `read`."""
    tls_ca: str | None = None
    """PEM file of the authorities that the others' certificates are checked against; None for those of the system."""
    tls_certificate: str | None = None
    """PEM file of the certificate that the others want to see, where they do (`tls.client_ca`)."""
    tls_key: str | None = None
    """PEM file of its key."""
    allow: list[str] = []
    """Hosts that the other replicas may have: `HOST`, `*.SUFFIX`, or a network such as `10.1.0.0/16`; no others are asked.
    Without any: hosts of the same domain as `url`, if that has two parts at least, else the host of `url` itself."""
    pace: SharePace = SharePace()

    def __post_init__(self) -> None:
        HostPatterns(self.allow, "shard.allow")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError("shard.tls_certificate and shard.tls_key belong together: give both, or neither")
        if not is_url(self.url):
            raise ConfigError(f"shard.url is {self.url!r}; write http://HOST:PORT as the other replicas reach this one")
        if not 1 <= self.holders <= MAX_HOLDERS:
            raise ConfigError(f"shard.holders is {self.holders}; it is a number of replicas from 1 to {MAX_HOLDERS}")
        if not 0 < self.ask_seconds <= MAX_ASK_SECONDS:
            raise ConfigError(f"shard.ask_seconds is {self.ask_seconds}; it must be above 0 and at most {MAX_ASK_SECONDS:g}")


@prepared
class ServiceConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything `kvevents serve` can be told."""

    host: str = "127.0.0.1"
    """Address to listen at."""
    port: int = DEFAULT_PORT
    """0 takes any free one."""
    insecure: bool = False
    """Listen at an address that other machines reach although requests need no token."""
    allowed_hosts: list[str] = []
    """Host names that the service is reached by, beside its addresses: `HOST` or `*.SUFFIX`, without a port. Browsers may send
    requests from pages of these, and while requests need no token, `Host` must be one of them or an address."""
    state_dir: str | None = None
    """Where snapshots and registrations are kept; without it a restart begins with nothing."""
    snapshot_seconds: float = 60.0
    """Between two snapshots."""
    memory_limit: int | None = None
    """Bytes of the index; at the limit new blocks are refused and their workers are DEGRADED."""
    hide_stale_seconds: float = 300.0
    """After so long without a connection a worker is left out of the answers of /query and /query_by_hash, whose clients may
    not look at trust."""
    awake_microseconds: int = 100
    """How long the process looks for the next question before it sleeps, where the last one had come so soon after an answer.
    0 to 10,000; each such look takes so much CPU time at most."""
    ready: Readiness = Readiness()
    limits: Limits = Limits()
    probe: Probing = Probing()
    access: AccessConfig = AccessConfig()
    tls: Tls | None = None
    curve: Curve | None = None
    """Keys towards engines whose source has none of its own."""
    allow: list[str] = []
    """Endpoints that registrations over HTTP may name; see docs/service.md."""
    sources: list[SourceTable] = field(default_factory=list)
    """Engines; those of a configuration file are read again whenever it changes."""
    source_files: list[str] = []
    """More TOML files of `[[sources]]`, watched as well."""
    dns: list[DnsTable] = []
    plane: PlaneSettings | None = None
    """Build the index from the log of this plane, in the place of following engines: nothing else is followed then."""
    replica: str | None = None
    """Name of this replica, which no other of its plane has; the host's and something random unless told otherwise."""
    shard: ShardSettings | None = None
    """Hold a share of the plane alone, as one of several replicas, for an index that is too large for one machine."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be from 0 to 65535")
        if not self.snapshot_seconds > 0:
            raise ConfigError(f"snapshot_seconds is {self.snapshot_seconds}; it must be above 0")
        if self.memory_limit is not None and self.memory_limit < 1:
            raise ConfigError(f"memory_limit is {self.memory_limit}; it is a number of bytes above 0")
        if not 0 <= self.awake_microseconds <= MAX_AWAKE_MICROSECONDS:
            raise ConfigError(f"awake_microseconds is {self.awake_microseconds}; it must be from 0 to {MAX_AWAKE_MICROSECONDS}")
        HostPatterns(self.allowed_hosts, "allowed_hosts")
        if self.is_open and not self.insecure:
            raise ConfigError(
                f"host {self.host} is reached by other machines and requests need no token: set access.tokens, "
                "access.anonymous or tls.client_ca, listen at 127.0.0.1, or set insecure (--insecure)"
            )
        self._check_plane()

    def _check_plane(self) -> None:
        if self.plane is None:
            if self.replica is not None:
                raise ConfigError("replica is a name within a plane; tell which plane, with `plane` or --from")
            if self.shard is not None:
                raise ConfigError("shard is a share of a plane; tell which plane, with `plane` or --from")
            return
        if self.sources or self.source_files or self.dns:
            raise ConfigError(
                "a replica follows no engines itself, its plane's bridges do: leave out sources, source_files, dns"
            )
        if self.state_dir is not None:
            raise ConfigError("a replica keeps nothing on the disk, its plane does: leave state_dir out")
        if self.replica is not None and not _REPLICA.fullmatch(self.replica):
            raise ConfigError(f"replica is {self.replica!r}; it has 1 to 64 letters, digits, '-' and '_'")
        if self.shard is not None and self.replica is None:
            raise ConfigError("a replica that holds a share needs a name that lasts, which says which share: give it `replica`")
        if self.shard is not None and self.access.tokens and self.shard.token_file is None:
            raise ConfigError("the other replicas want a token too: name its file as shard.token_file, with the role read")
        if self.shard is not None and self.tls is not None and self.tls.client_ca and self.shard.tls_certificate is None:
            raise ConfigError("the other replicas want a certificate too: name it as shard.tls_certificate and shard.tls_key")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the service."""
        return is_loopback(self.host)

    @property
    def is_open(self) -> bool:
        """Whether other machines reach the service and may do everything without a token or certificate."""
        has_access = bool(self.access.tokens) or self.access.anonymous is not None
        return not (self.is_loopback or has_access or (self.tls is not None and self.tls.client_ca is not None))


def read_config(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises `ConfigError`."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(f"cannot read {path}: {reason}") from error


def to_config(tables: dict[str, Any], origin: str) -> ServiceConfig:
    """Checked settings. Raises `ConfigError` that names the field."""
    try:
        return msgspec.convert(tables, ServiceConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {_explained(error)}") from error


def _explained(error: msgspec.ValidationError) -> str:
    """The sentence, behind where it is: `limits: unknown field 'max_token'; known fields: ...`."""
    sentence, _, place = str(error).partition(" - at `$")
    place = place.rstrip("`").lstrip(".")
    where = f"{place}: " if place else ""
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", sentence)
    table = _table_at(place) if unknown is not None else None
    if unknown is None or table is None:
        return where + sentence
    near = difflib.get_close_matches(unknown[1], table.__struct_fields__, 1)
    meant = f"; did you mean {near[0]!r}?" if near else ";"
    return f"{where}unknown field {unknown[1]!r}{meant} known fields: {', '.join(table.__struct_fields__)}"


def _table_at(place: str) -> type[Struct] | None:
    """The type of the table at a path such as `sources[0].curve`; None where it is no table."""
    found: type[Struct] = ServiceConfig
    for name in filter(None, re.sub(r"\[[^]]*\]", "", place).split(".")):
        field = next((each for each in msgspec.structs.fields(found) if each.name == name), None)
        inner = [each for each in _types_in(field.type) if issubclass(each, Struct)] if field is not None else []
        if not inner:
            return None
        found = inner[0]
    return found


def _types_in(kind: Any) -> Iterator[type]:
    """The plain types within a type: of `list[X] | None` they are X and None's."""
    if args := get_args(kind):
        for each in args:
            yield from _types_in(each)
    elif isinstance(kind, type):
        yield kind
