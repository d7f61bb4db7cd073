"""Settings of the service: one definition for options, environment variables and the TOML file."""

from __future__ import annotations

import re
from typing import Annotated, Final

from msgspec import Struct, field

from kvevents.errors import ConfigError
from kvevents.plane.settings import PlaneSettings
from kvevents.plane.sharding import MAX_HOLDERS, ShardTimers, is_url
from kvevents.security import Curve
from kvevents.service.access import AccessConfig
from kvevents.service.discovery.source_config import SourceTable, Template
from kvevents.service.hosts import HostPatterns, is_loopback
from kvevents.settings import Bytes, FilePath, FolderPath, Host, Name, Port, Positive, Range, Seconds, Settings, Unit, Url
from kvevents.structs import build_decoder_now

_REPLICA: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_ASK_SECONDS: Final = 30.0
MAX_GRACE_SECONDS: Final = 3_600.0
DEFAULT_PORT: Final = 8090
"""As Dynamo's standalone indexer."""


class Limits(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of what peers and clients can make the service do. Reaching one is an error with its name in it."""

    max_body_bytes: Bytes = 16 << 20
    """Size of the body of one request. The default is two million token ids as JSON."""
    max_tokens: Positive = 2_000_000
    """Tokens of one prompt, and of all prompts of one request."""
    max_json_bytes: Bytes = 2 << 20
    """Size of one JSON or msgpack body without the token ids of a JSON prompt. Python reads it in one piece, in some 5 ms."""
    max_hashes: Positive = 131_072
    """Hashes of one `/query_by_hash`. The default is those of two million tokens in blocks of 16."""
    max_candidates: Positive = 4_096
    """Candidates of one `/v1/select`. The default is as many as registered ranks."""
    inline_candidates: Positive = 512
    """Workers up to which the control plane makes an answer without a thread."""
    max_sources: Positive = 4_096
    """Registered ranks."""
    max_clients: Positive = 1_024
    """Connections at one time. A further one takes the place of an idle one, if there is any."""
    reserved_clients: Positive = 32
    """Connections beyond these, on which only probes are answered."""
    max_received_bytes: Bytes = 256 << 20
    """Memory of all requests that are being received or answered, beyond the first 64 KiB of each."""
    max_unread_bytes: Bytes = 256 << 20
    """Memory of all answers that clients have not read yet; above it the connection with the most is cut off."""
    max_listeners: Positive = 64
    """Clients of `/v1/events` at one time."""
    max_waiting: Positive = 64
    """Requests of one kind that may wait for its threads, and clients for a `/dump`."""
    max_dump_blocks: Positive = 1_000_000
    """Blocks that `/dump` returns; more of them are read page by page from `/v1/blocks`."""
    max_listed_blocks: Positive = 4_000_000
    """Blocks that are kept for further pages of `/v1/blocks`, 32 bytes each; the newest listing is kept whatever it has."""
    listing_seconds: Seconds = 60.0
    """How long a listing waits for the next page to be asked for."""
    request_seconds: Seconds = 10.0
    """How long a client may take to send a request, from its first byte on, and to send the first byte after it connects."""
    idle_seconds: Seconds = 75.0
    """How long an idle connection is kept: longer than the pools of common clients, so that they close first."""
    unread_seconds: Seconds = 10.0
    """How long a client may take to read an answer, or the next MiB of a long one."""
    drain_seconds: Seconds = 5.0
    """How long requests that are in progress may take once the service ends."""


class Readiness(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When `/readyz` says yes."""

    quorum: Annotated[float, Range(0, 1)] = 1.0
    """Share of the sources that must be EXACT, 0 to 1."""
    deadline_seconds: Annotated[float, Unit.SECONDS, Range()] = 30.0
    """Seconds after the start from which `/readyz` is 200 although sources are not EXACT. It lists what is missing, and is
    never 200 without a single source where engines are expected: by settings, registrations before a restart, `expected`."""
    expected: Annotated[int, Range()] = 0
    """Sources that clients will register over HTTP; so many must be there before the deadline."""
    grace_seconds: Annotated[float, "--grace-seconds", Unit.SECONDS, Range(0, MAX_GRACE_SECONDS)] = 0.0
    """After SIGTERM, how long /readyz says no while everything else is answered. Load balancers notice meanwhile."""


class Probing(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How endpoints are probed that have no connection or answer no replay: a fault is named within 10 s by the defaults."""

    connect_seconds: Seconds = 2.0
    """How long a probe may take: connecting, and ZeroMQ's greeting."""
    pause_seconds: Seconds = 5.0
    """Between two probes of one endpoint at most; the first pauses are shorter."""
    patience_seconds: Seconds = 3.0
    """How long a replay, an engine that is to connect here, or CURVE keys may take before they count as a fault."""
    at_once: Positive = 64
    """Probes at one time."""


class Tls(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The server's certificate, as PEM files."""

    certificate: FilePath
    """PEM file of the certificate of the HTTP server."""
    key: FilePath
    """PEM file of its key."""
    client_ca: FilePath | None = None
    """PEM file of authorities; clients must have a certificate that one of these has signed."""


class DnsTable(Template, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One name that stands for several engines."""

    target: str
    """`HOST:PORT` for addresses, `_kv._tcp.NAME` for an SRV record; behind `http://` each engine is asked for its endpoints."""


class EngineSources(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which engines are followed."""

    curve: Curve | None = None
    """Keys towards engines whose source has none of its own."""
    sources: list[SourceTable] = field(default_factory=list)
    """Engines; those of a configuration file are read again whenever it changes."""
    source_files: Annotated[list[FilePath], "--sources"] = field(default_factory=list)
    """TOML file of [[sources]], read again whenever it changes; may be given many times."""
    dns: list[DnsTable] = field(default_factory=list)
    """Names that stand for several engines."""


class ShardSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hold a share of a plane's partitions, and ask the other replicas for the rest."""

    url: Url
    """Hold a share of the plane's partitions; the other replicas ask this one for it at http://HOST:PORT. Also `https://`."""
    holders: Annotated[int, "--replication-factor", Range(1, MAX_HOLDERS)] = 2
    """Replicas that hold each partition, 1 to 8. So many less one may fail, and every answer is still whole."""
    ask_seconds: Annotated[float, Unit.SECONDS, Range(0, MAX_ASK_SECONDS, is_open=True)] = 0.5
    """Seconds for another replica to answer; then the next one that holds the same is asked."""
    token_file: FilePath | None = None
    """File of the bearer token for the other replicas, if they need one; it has the role `read`."""
    tls_ca: FilePath | None = None
    """PEM file of the authorities that sign the other replicas' certificates (default: the system's)."""
    tls_certificate: FilePath | None = None
    """PEM file of the certificate for the other replicas, if they need one (`tls.client_ca`)."""
    tls_key: FilePath | None = None
    """PEM file of its key."""
    allow: list[Host] = field(default_factory=list)
    """Hosts of the other replicas, which alone are asked: HOST, *.SUFFIX or NETWORK/BITS (default: the domain of the URL). If
    that domain has fewer than two parts, the default is the host of `url` itself."""
    pace: ShardTimers = ShardTimers()

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        HostPatterns(self.allow, "shard.allow")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError("shard.tls_certificate and shard.tls_key belong together: give both, or neither")
        if not is_url(self.url):
            raise ConfigError(f"shard.url is {self.url!r}; write http://HOST:PORT as the other replicas reach this one")


@build_decoder_now
class ServiceConfig(EngineSources, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything `kvevents serve` can be told."""

    host: Host = "127.0.0.1"
    """Address to listen at."""
    port: Port = DEFAULT_PORT
    """Port to listen at; 0 takes a free one."""
    insecure: bool = False
    """Listen at an address that other machines reach although requests need no token."""
    allowed_hosts: Annotated[list[Host], "--allowed-host"] = field(default_factory=list)
    """Host name that clients reach the service by, beside its addresses: HOST or *.SUFFIX; may be given many times. Browsers
    may send requests from pages of these, and while requests need no token, `Host` must be one of them or an address."""
    state_dir: FolderPath | None = None
    """Folder in which snapshots and registrations outlive the process; without it a restart begins with nothing."""
    snapshot_seconds: Seconds = 60.0
    """Seconds between two snapshots."""
    memory_limit: Bytes | None = None
    """Most memory of the index, such as 8GiB; at the limit new blocks are refused. Their workers are DEGRADED then."""
    hide_stale_seconds: Seconds = 300.0
    """Workers without a connection for so many seconds are omitted from /query and /query_by_hash. Clients of those endpoints
    might ignore trust."""
    ready: Readiness = Readiness()
    limits: Limits = Limits()
    probe: Probing = Probing()
    access: AccessConfig = AccessConfig()
    tls: Tls | None = None
    allow: list[str] = field(default_factory=list)
    """Endpoint that registrations over HTTP may name; see docs/service.md."""
    plane: PlaneSettings | None = None
    """Build the index from the log of this plane, in the place of following engines: nothing else is followed then."""
    replica: Name | None = None
    """Name of this replica, which no other of its plane has (default: made of the host's name)."""
    shard: ShardSettings | None = None
    """Hold a share of the plane alone, as one of several replicas, for an index that is too large for one machine."""

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
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
                raise ConfigError("replica is a name within a plane; tell which plane, with `plane` or --nats")
            if self.shard is not None:
                raise ConfigError("shard is a share of a plane; tell which plane, with `plane` or --nats")
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
