"""Settings of the service: one definition for options, environment variables and the TOML file."""

# No `from __future__ import annotations`: `kvevents.client.schemas` has the reason.
import re
from typing import Annotated, Any, Final

from msgspec import Struct, field

from kvevents.client.schemas import MAX_RESERVATION_SECONDS
from kvevents.errors import ConfigError
from kvevents.routing import LoadSettings
from kvevents.service.access import AccessSettings, is_loopback, parse_hosts
from kvevents.service.discovery.provider import SourceTable, Template, check_endpoint
from kvevents.service.fleet.registration import GroupFields, Registration
from kvevents.settings import (
    Bytes,
    Endpoint,
    FilePath,
    FolderPath,
    Host,
    Name,
    Port,
    Positive,
    Range,
    Seconds,
    Settings,
    Unit,
    build_decoder_now,
)
from kvevents.stream import Source
from kvevents.zeromq.keys import Curve

_LABEL: Final = r"(?:[A-Za-z0-9.-]+/)?[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?"
_VALUE: Final = r"(?:[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?)?"
_REQUIREMENT: Final = (
    rf"\s*(?:!?{_LABEL}|{_LABEL}\s*(?:==?|!=)\s*{_VALUE}|{_LABEL}\s+(?:not)?in\s*\({_VALUE}(?:\s*,\s*{_VALUE})*\))\s*"
)
_SELECTOR: Final = re.compile(rf"{_REQUIREMENT}(?:,{_REQUIREMENT})*", re.ASCII)
_OBJECT_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")


class Limits(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits on the resources that peers and clients can use. An error due to a limit names the limit."""

    max_body_bytes: Bytes = 16 << 20
    """Maximum size in bytes of a request's body. The default is enough for two million token ids as JSON."""
    max_tokens: Positive = 2_000_000
    """Maximum number of tokens of one prompt, and of all prompts in one request together."""
    max_json_bytes: Bytes = 2 << 20
    """Maximum size in bytes of a JSON or msgpack body, not counting the token ids of a JSON prompt. Python decodes a body of
    the default size in about 5 ms."""
    max_hashes: Positive = 131_072
    """Maximum number of hashes in one request to `/query_by_hash`. The default is for two million tokens in blocks of 16."""
    max_candidates: Positive = 4_096
    """Maximum number of candidates in one request to `/v1/select`. The default equals `max_sources`."""
    max_rows: Positive = 262_144
    """Maximum number of matches of workers in one answer of `/v1/match_many`. The default allows answers of 50 MB of JSON."""
    max_sources: Positive = 4_096
    """Maximum number of registered ranks."""
    max_metric_sources: Positive = 128
    """Maximum number of ranks with metrics at `/metrics`, about 5 kB each. The ranks registered first have metrics."""
    max_clients: Positive = 1_024
    """Maximum number of open connections. A further connection replaces an idle connection, if any connection is idle."""
    reserved_clients: Positive = 32
    """Number of connections beyond `max_clients`, on which the service answers only probes and `/metrics`."""
    max_received_bytes: Bytes = 256 << 20
    """Maximum memory of all requests that are being received or answered, not counting the first 64 KiB of each request."""
    max_unread_bytes: Bytes = 256 << 20
    """Maximum memory of all unread answers. Above this limit, the connection with the largest unread answers is closed."""
    max_listeners: Positive = 64
    """Maximum number of concurrent clients of `/v1/events`."""
    max_reservations: Positive = 65_536
    """Maximum number of open reservations, about 500 bytes each. Further reservations are refused."""
    reservation_seconds: Annotated[float, Unit.SECONDS, Range(1, MAX_RESERVATION_SECONDS)] = 300.0
    """Seconds after which a reservation expires, unless its request or an update states another time."""
    max_waiting: Positive = 64
    """Maximum number of requests of one kind that wait for a thread, and of clients that wait for `/dump`."""
    max_dump_blocks: Positive = 1_000_000
    """Maximum number of blocks that `/dump` returns. For a larger index, read `/v1/blocks` page by page."""
    max_listed_blocks: Positive = 4_000_000
    """Maximum number of blocks stored for further pages of `/v1/blocks`, 32 bytes each. The newest listing can exceed it."""
    listing_seconds: Seconds = 60.0
    """Seconds for which a listing is stored after the newest request for one of its pages."""
    request_seconds: Seconds = 10.0
    """Maximum seconds from a client's connection to its first byte, and from the first byte to the end of the request."""
    idle_seconds: Seconds = 75.0
    """Seconds after which an idle connection is closed. Common HTTP clients close idle connections earlier."""
    unread_seconds: Seconds = 10.0
    """Seconds in which a client must read 1 MiB, or the rest of the answer. An HTTP/2 ping has the same limit."""
    drain_seconds: Seconds = 5.0
    """Maximum seconds for requests in progress after the service has received a stop signal."""


class Readiness(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The conditions for `/readyz` to return 200."""

    quorum: Annotated[float, Range(0, 1)] = 1.0
    """Fraction of the sources that must be EXACT, 0 to 1."""
    deadline_seconds: Annotated[float, Unit.SECONDS, Range()] = 30.0
    """Seconds after the start from which `/readyz` returns 200 even if fewer sources than the quorum are EXACT.
    One source is required even then if engines are expected: by the settings, by registrations before a restart, or by
    `expected`. With a selector of pods, engines are expected until the API server has listed the pods."""
    expected: Annotated[int, Range()] = 0
    """Number of sources that clients will register over HTTP. Until the deadline, `/readyz` requires this number of sources."""
    grace_seconds: Annotated[float, "--grace-seconds", Unit.SECONDS, Range(0, 3_600)] = 0.0
    """Seconds after SIGTERM for which /readyz returns 503, so that load balancers react; other requests are answered."""


class Probing(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for probes of endpoints that have no connection or do not answer replay requests.

    With the defaults a fault is reported within 10 s.
    """

    connect_seconds: Seconds = 2.0
    """Maximum seconds for one probe, which connects and exchanges ZeroMQ's greeting."""
    pause_seconds: Seconds = 5.0
    """Maximum pause in seconds between two probes of one endpoint; the first pauses are shorter."""
    patience_seconds: Seconds = 3.0
    """Seconds after which a missing replay answer, a missing connection or a failed CURVE handshake counts as a fault."""
    at_once: Positive = 64
    """Maximum number of concurrent probes."""


class Tls(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The server's certificate, as PEM files, which are read again when they change."""

    certificate: FilePath
    """PEM file of the HTTP server's certificate."""
    key: FilePath
    """PEM file of the certificate's private key."""
    client_ca: FilePath | None = None
    """PEM file of certificate authorities. If set, clients need a certificate that one of these authorities has signed."""


class DnsTable(Template, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A DNS name that resolves to several engines."""

    target: str
    """`HOST:PORT` to look up addresses, or `_kv._tcp.NAME` to look up SRV records. If it begins with `http://`, each engine
    is queried for its endpoints."""


class TopicSettings(GroupFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engines that connect to the service, as llm-d's do. The service finds an engine by its topic: `kv@INSTANCE@MODEL`."""

    endpoint: Annotated[Endpoint, "--listen"]
    """Listen at this endpoint for engines that connect, such as `tcp://*:5557`; their topics are kv@INSTANCE@MODEL."""
    topic: str = "kv@"
    """Prefix of the topics that the service receives."""

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        check_endpoint("endpoint", self.endpoint, bind=True)
        self.registration_of("kv@engine@model")

    def source(self, curve: Curve | None) -> Source:
        """Return the source that listens for the engines. `curve` has the keys to use if this table has no keys."""
        return Source(self.endpoint, topic=self.topic, bind=True, by_topic=True, curve=self.curve or curve)

    def registration_of(self, topic: str) -> Registration:
        """Return the registration of the engine that publishes under a topic. Raises `ConfigError`."""
        _, *names = topic.split("@", 2)
        instance, model = names if len(names) == 2 else (topic, "")
        if not (self.model or model):
            raise ConfigError("its topic names no model: expected kv@INSTANCE@MODEL, or the setting topics.model")
        fields: dict[str, Any] = {name: getattr(self, name) for name in GroupFields.__struct_fields__}
        fields["model"] = self.model or model
        return Registration(instance=instance, endpoint=self.endpoint, topic=topic, bind=True, **fields)


class KubernetesSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pods with engines; labels select the pods."""

    selector: str | None = None
    """Follow the engines in pods with these labels, such as `app=vllm` or `app in (vllm,sglang)`."""
    namespaces: Annotated[tuple[Name, ...], "--kubernetes-namespace"] = ()
    """Namespace of the pods, by default the service's own; can be repeated."""
    pools: Annotated[tuple[Name, ...], "--kubernetes-pool"] = ()
    """Follow the engines in pods of this `InferencePool`; can be repeated. With `selector`, only pods that both select."""
    kubeconfig: Annotated[FilePath | None, "--kubeconfig"] = None
    """Kubeconfig to use instead of the pod's service account; outside of a cluster the default is kubectl's kubeconfig."""
    http_port: Port = 8000
    """Port of the HTTP server in pods that do not declare the port."""
    events_port: Port = 5557
    """Port for events if neither the engine nor its pod names the port."""
    replay_port: Port | None = None
    """Port for replay if neither the engine nor its pod names the port."""

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if self.selector is None and not self.pools:
            raise ConfigError("discovery by Kubernetes needs a selector or pools: without these, all pods would be engines")
        if self.selector is not None and not _SELECTOR.fullmatch(self.selector):
            raise ConfigError(f"invalid selector {self.selector!r}: expected labels, such as app=vllm,tier in (a,b)")
        for name in (*self.namespaces, *self.pools):
            if not _OBJECT_NAME.fullmatch(name):
                raise ConfigError(f"invalid name {name!r}: expected lower-case letters, digits, '-' and '.'")


class EngineSources(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engines that the service follows."""

    curve: Curve | None = None
    """CURVE keys for engines whose source has no keys."""
    sources: list[SourceTable] = field(default_factory=list)
    """Engines to follow, which are read again when the configuration file changes."""
    source_files: Annotated[list[FilePath], "--sources"] = field(default_factory=list)
    """TOML file of [[sources]], which is read again when it changes; can be repeated."""
    dns: list[DnsTable] = field(default_factory=list)
    """DNS names that resolve to several engines."""
    kubernetes: KubernetesSettings | None = None
    """Kubernetes pods with engines."""

    @property
    def names_engines(self) -> bool:
        """Whether the settings name any engine, or any discovery provider."""
        return bool(self.sources or self.source_files or self.dns or self.kubernetes)


@build_decoder_now
class ServiceSettings(EngineSources, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of `kvevents serve`."""

    host: Host = "127.0.0.1"
    """Address at which the service listens."""
    port: Port = 8090  # the port of Dynamo's standalone indexer
    """Port to listen at; 0 means any free port."""
    insecure: bool = False
    """Allow requests without a token even if other machines can reach the address."""
    allowed_hosts: Annotated[list[Host], "--allowed-host"] = field(default_factory=list)
    """Host name of the service for clients, in addition to its addresses: HOST or *.SUFFIX; can be repeated. Pages from these
    hosts can send requests from browsers. Without tokens, the header `Host` must be such a name or an IP address."""
    state_dir: FolderPath | None = None
    """Folder for snapshots and registrations, which the service loads when it starts; default: the service stores no state."""
    snapshot_seconds: Seconds = 60.0
    """Seconds between two snapshots."""
    memory_limit: Bytes | None = None
    """Maximum memory of the index, for example 8GiB. At the limit the index refuses new blocks, and workers become DEGRADED."""
    hide_stale_seconds: Seconds = 300.0
    """Seconds without a connection after which a worker is omitted from /query and /query_by_hash, whose clients might ignore
    the trust."""
    ready: Readiness = Readiness()
    limits: Limits = Limits()
    probe: Probing = Probing()
    load: LoadSettings = LoadSettings()
    access: AccessSettings = AccessSettings()
    tls: Tls | None = None
    topics: TopicSettings | None = None
    """Engines that connect to the service and are found by their topic."""
    allow: list[str] = field(default_factory=list)
    """Pattern of endpoints that registrations over HTTP can name, such as `tcp://10.1.0.0/16:5557-5700`."""

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        parse_hosts(self.allowed_hosts)
        if self.is_open and not self.insecure:
            raise ConfigError(
                f"host {self.host} is reachable from other machines and requests need no token: set access.tokens, "
                "access.anonymous or tls.client_ca, listen at 127.0.0.1, or set insecure (--insecure)"
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the service."""
        return is_loopback(self.host)

    @property
    def is_open(self) -> bool:
        """Whether other machines can reach the service and have all permissions without a token or certificate."""
        has_access = bool(self.access.tokens) or self.access.anonymous is not None
        return not (self.is_loopback or has_access or (self.tls is not None and self.tls.client_ca is not None))
