"""Settings of planes and bridges: NATS servers and logins, the streams of a plane, limits and timers."""

# Without `from __future__ import annotations`, as in `kvevents.client.schemas`.
import re
import socket
import stat
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec

from kvevents.errors import ConfigError
from kvevents.settings import Bytes, FilePath, Host, Name, Positive, Range, Seconds, Secret, Settings, Subject, Unit, Url
from kvevents_plane.records import MAX_HEARTBEAT_SECONDS

MAX_PARTITIONS: Final = 256
MAX_RECEIVED_BATCHES: Final = 256
"""Default of `BridgeSettings.receive_queue`. A bridge reads about this many batches from one engine at a time."""
MAX_SECRET_BYTES: Final = 64 << 10
"""Maximum size in bytes of a file with credentials (usually a few thousand bytes) or with a seed (58 bytes)."""
MAX_INBOX_CHARACTERS: Final = 64
"""Maximum number of characters of an inbox prefix; NATS appends at least 22 further characters."""

_TLS_FILES: Final = ("tls_ca", "tls_certificate", "tls_key")
_NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9_-]{1,32}")
_SUBJECT_PATTERN: Final = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_SEED_PATTERN: Final = re.compile(r"SU[A-Z2-7]{56}")
_JWT_PATTERN: Final = re.compile(r"-+BEGIN NATS USER JWT-+\s+(\S+)\s+-+END NATS USER JWT-+")
_SEED_BLOCK_PATTERN: Final = re.compile(r"-+BEGIN USER NKEY SEED-+\s+(\S+)\s+-+END USER NKEY SEED-+")


class Credentials(NamedTuple):
    """A user's JWT, which the client sends to the servers, and the seed with which it signs."""

    jwt: str
    seed: str

    def __repr__(self) -> str:
        return "<Credentials>"


class Login(NamedTuple):
    """The login in a server's URL, before the `@`: a user with a password, or a token."""

    user: str | None = None
    password: str | None = None
    token: str | None = None

    def __repr__(self) -> str:
        return "<Login>"


class ConnectionLimits(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Timers and limits of the connection to the NATS servers."""

    connect_seconds: Seconds = 10.0
    """Timeout for the first connection to any server. A program that cannot connect ends; a supervisor can restart it."""
    attempt_seconds: Seconds = 2.0
    """Timeout for each step of an attempt to reconnect. A running server answers within milliseconds."""
    ping_seconds: Seconds = 5.0
    """Seconds between two pings."""
    max_unanswered_pings: Positive = 2
    """Number of unanswered pings after which a connection counts as dead. With the defaults, this is after 15 seconds."""
    reconnect_seconds: Seconds = 0.2
    """Maximum pause before the first attempt to reconnect. In a cluster, another server is available at once."""
    max_reconnect_seconds: Seconds = 5.0
    """Maximum pause between two rounds of attempts to connect to all servers."""
    pending_bytes: Bytes = 8 << 20
    """Maximum number of bytes that wait to be sent. At the limit, publishing waits; without a connection it fails."""
    close_seconds: Seconds = 5.0
    """Timeout for sending published messages to the server when a program ends."""


class ReaderLimits(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Timers and limits of reading a partition."""

    heartbeat_seconds: Seconds = 1.0
    """Seconds between two heartbeats that the server sends for an idle consumer."""
    silent_seconds: Seconds = 3.5
    """Seconds without messages and heartbeats after which the consumer is replaced."""
    check_seconds: Seconds = 5.0
    """Seconds between two comparisons of the received pages with the partition. A server whose copy has stopped or differs
    from the other copies still sends heartbeats."""
    retry_seconds: Seconds = 0.5
    """Seconds between two attempts to create the consumer."""
    poll_seconds: Seconds = 1.0
    """Seconds between two queries of a reader that polls instead of using a consumer."""
    quiet_heartbeats: Positive = 3
    """Number of consecutive heartbeats with few pages of other bridges, after which a bridge's reader polls."""
    pending_bytes: Bytes = 64 << 20
    """Maximum number of bytes of pages that wait to be processed. Pages beyond the limit are read again later."""
    max_lag_seconds: Seconds = 1.0
    """Seconds after which a page that the index still lacks makes the partition's streams REPLAYING."""
    digest_pages: Positive = 64
    """Number of pages between two digests of a partition. The value must be equal in all replicas, because replicas compare
    digests of equal positions."""

    @property
    def digest_intervals(self) -> tuple[int, int, int]:
        """Intervals in pages. A replica publishes its digest at the newest multiple of each, for slow replicas."""
        return self.digest_pages, self.digest_pages * 16, self.digest_pages * 256


class ReplicaTimers(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Timers of a replica, which builds its index from the plane's log."""

    retry_seconds: Seconds = 2.0
    """Seconds between two attempts to reach the servers or to build an index."""
    compare_seconds: Seconds = 1.0
    """Seconds between two comparisons of digests with the other replicas."""
    turn_seconds: Seconds = 20.0
    """Seconds that each replica in turn gets to rebuild its index before the next one does, if no digest has a majority."""
    rebuild_seconds: Seconds = 60.0
    """Minimum number of seconds between two rebuilds that are caused by an engine's digest."""


class PlaneSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one plane. Raises `ConfigError` for impossible settings. Neither the error nor the repr contains a secret."""

    ALTERNATIVES: ClassVar = ("credentials", "nkey", "token")
    """Settings that exclude each other, because the client logs in with only one of them."""

    servers: tuple[Url, ...]
    """NATS server of the plane: nats://HOST:4222 or tls://HOST:4222; one of a cluster is enough. If it is unreachable, the
    client tries others. `USER:PASSWORD@` or `TOKEN@` may be before the host. With `tls://` nothing is sent without TLS."""
    name: Annotated[Name, "--plane"] = "default"
    """Name of the plane; planes of different names share servers and nothing else. 1 to 32 letters, digits, `-` and `_`."""
    partitions: Annotated[int, "--partitions", Range(1, MAX_PARTITIONS)] = 8
    """Number of partitions of a new plane, 1 to 256, each a JetStream stream; it cannot change later."""
    copies: Annotated[int, "--copies"] = 1
    """Number of servers that store each partition of a new plane: 1, 3 or 5; JetStream needs a majority of them."""
    partition_bytes: Annotated[int, "--partition-size", Unit.BYTES, Range(1 << 20)] = 1 << 30
    """Size of each partition of a new plane. A full partition rejects new pages; it never drops old ones."""
    credentials: Annotated[FilePath, "--creds"] | None = None
    """File with a user's JWT and seed, as `nsc` creates it. It is read again for each connection."""
    nkey: Annotated[FilePath, "--nkey"] | None = None
    """File with a user's NKey seed."""
    token: Secret | None = None
    """Token of the servers, instead of credentials or an NKey."""
    tls_ca: Annotated[FilePath, "--tls-ca"] | None = None
    """PEM file of the CA certificates for the servers (default: certificates of the system); enables TLS."""
    tls_certificate: Annotated[FilePath, "--tls-cert"] | None = None
    """PEM file of the client certificate, for servers that require one."""
    tls_key: Annotated[FilePath, "--tls-key"] | None = None
    """PEM file of the client certificate's key."""
    tls_hostname: Host | None = None
    """Host name that the servers' certificates must have, if it differs from the URL."""
    inbox_prefix: Annotated[Subject, "--inbox-prefix"] = "_INBOX"
    """Prefix of the subjects that receive replies. If only this user may subscribe to the prefix, other users of the account
    cannot read the replies."""
    connection: ConnectionLimits = ConnectionLimits()
    reader: ReaderLimits = ReaderLimits()
    replicas: ReplicaTimers = ReplicaTimers()

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if not self.servers:
            raise ConfigError("servers is empty; a plane needs at least one server, such as nats://127.0.0.1:4222")
        for url in self.servers:
            _check_url(url)
        if not _NAME_PATTERN.fullmatch(self.name):
            raise ConfigError(f"invalid plane name {self.name!r}: expected 1 to 32 letters, digits, '-' and '_'")
        if self.copies not in {1, 3, 5}:
            raise ConfigError(f"copies is {self.copies}; it must be 1, 3 or 5")
        if len(self.inbox_prefix) > MAX_INBOX_CHARACTERS or not _SUBJECT_PATTERN.fullmatch(self.inbox_prefix):
            raise ConfigError(
                f"invalid inbox_prefix {self.inbox_prefix!r}: expected the beginning of a subject, at most "
                f"{MAX_INBOX_CHARACTERS} letters, digits, '-', '_', and '.' between them"
            )
        self._check_login()
        self._check_tls()

    def _check_login(self) -> None:
        if len({_login_of(url) for url in self.servers} - {Login()}) > 1:
            raise ConfigError(f"the URLs have different logins: {self.server_list}; use the same login for all servers")
        ways = [name for name in ("credentials", "nkey", "token") if getattr(self, name) is not None]
        if any(_login_of(url) != Login() for url in self.servers):
            ways.append("the login in the URL")
        if len(ways) > 1:
            raise ConfigError(f"{' and '.join(ways)} exclude each other; set one of them")
        if self.credentials is not None:
            self.read_credentials()
        if self.nkey is not None:
            self.read_seed()

    def _check_tls(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            name, missing_name = ("tls_certificate", "tls_key") if self.tls_key is None else ("tls_key", "tls_certificate")
            raise ConfigError(f"{name} is set but {missing_name} is not; set both or neither")
        for name in _TLS_FILES:
            if (path := getattr(self, name)) is not None:
                _read_start(name, path)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The URLs of the servers, each with a port and without a login."""
        return tuple(_address_of(urlsplit(url)) for url in self.servers)

    @property
    def server_list(self) -> str:
        """The addresses of the servers as messages show them, without logins."""
        return ", ".join(map(without_login, self.servers))

    @property
    def login(self) -> Login:
        """The user and the password, or the token, to log in with; empty if the client uses other means or no login."""
        if self.token is not None:
            return Login(token=self.token)
        return next((login for url in self.servers if (login := _login_of(url)) != Login()), Login())

    @property
    def needs_tls(self) -> bool:
        """Whether the client must not send anything, not even a login, to a server that does not offer TLS."""
        is_set = any(getattr(self, name) is not None for name in (*_TLS_FILES, "tls_hostname"))
        return is_set or any(urlsplit(url).scheme == "tls" for url in self.servers)

    def read_credentials(self) -> Credentials:
        """Read the credentials file. Raises `ConfigError`."""
        path = self.credentials or ""
        text = _read_text("credentials", path)
        jwt, seed = _JWT_PATTERN.search(text), _SEED_BLOCK_PATTERN.search(text)
        if jwt is None or seed is None or not _SEED_PATTERN.fullmatch(seed[1]):
            raise ConfigError(f"credentials: {path} contains no user JWT and seed; create the file with `nsc generate creds`")
        return Credentials(jwt[1], seed[1])

    def read_seed(self) -> str:
        """Read the user's NKey seed. Raises `ConfigError`."""
        path = self.nkey or ""
        seed = _read_text("nkey", path).strip()
        if not _SEED_PATTERN.fullmatch(seed):
            raise ConfigError(
                f"nkey: {path} contains no user seed: expected 58 characters that begin with SU, as `nk -gen user` prints them"
            )
        return seed

    def __repr__(self) -> str:
        return f"<PlaneSettings {self.name!r} at {self.server_list}>"

    def __rich_repr__(self) -> Any:
        """Yield the fields for a repr. Secrets are left out."""
        for field in self.__struct_fields__:
            if field not in {"servers", "token"}:
                yield field, getattr(self, field)
        yield "servers", tuple(map(without_login, self.servers))


class BridgeSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a bridge that do not depend on its plane. Raises `ConfigError` for impossible settings."""

    name: Name = msgspec.field(default_factory=socket.gethostname)
    """Name of this bridge for operators (default: the host name); each bridge needs its own."""
    dead_seconds: Seconds = 30.0
    """Drop an engine from the log after this many seconds without a connection to any bridge."""
    unclaimed_seconds: Seconds = 600.0
    """Drop an engine from the log if no bridge has claimed it for this many seconds; set more than a restart of a bridge
    takes."""
    heartbeat_seconds: Annotated[float, Unit.SECONDS, Range(0, MAX_HEARTBEAT_SECONDS, is_open=True)] = 0.5
    """Seconds between two heartbeats in each partition, at most 60. A state that replicas report as EXACT is at most three
    heartbeats and half a second old."""
    max_lag_seconds: Seconds = 1.0
    """If events wait in the bridge for more than this many seconds, replicas stop trusting its streams."""
    receive_queue: Positive = MAX_RECEIVED_BATCHES
    """Number of batches of each engine that wait in its connection while the bridge reads nothing. Further batches
    wait at the engine, or are dropped."""
    max_queued_bytes: Bytes = 64 << 20
    """Maximum number of bytes that wait for the servers; at this limit the bridge stops reading."""

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if not self.name or len(self.name) > 128 or not self.name.isprintable():
            raise ConfigError(f"invalid bridge name {self.name!r}: expected 1 to 128 printable characters")


def without_login(url: str) -> str:
    """Return a server's URL without the text between the scheme and the last `@`, even if the URL is invalid."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}" if separator else url.rpartition("@")[2]


def _check_url(url: str) -> None:
    shown = without_login(url)
    expected = "expected nats://HOST:4222 or tls://HOST:4222"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        # The original error contains the text at the position of the port, which may be a part of a password.
        raise ConfigError(f"invalid server {shown!r}: {expected}") from None
    if parts.scheme not in {"nats", "tls"} or not parts.hostname or port == 0:
        raise ConfigError(f"invalid server {shown!r}: {expected}")
    if parts.query or parts.fragment or parts.path.strip("/"):
        raise ConfigError(
            f"invalid server {shown!r}: text after the port; {expected}, and write / ? # @ in a password as %2F %3F %23 %40"
        )


def _address_of(url: SplitResult) -> str:
    host = f"[{url.hostname}]" if ":" in (url.hostname or "") else url.hostname
    return f"{url.scheme}://{host}:{url.port or 4222}"


def _login_of(url: str) -> Login:
    parts = urlsplit(url)
    if parts.username is None:
        return Login()
    if parts.password is None:
        return Login(token=unquote(parts.username))
    return Login(unquote(parts.username), unquote(parts.password))


def _read_start(name: str, path: str, length: int = 1) -> bytes:
    """Return the first `length` bytes of the file at `path`. `name` is the setting that has the path. Raises `ConfigError`."""
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise ConfigError(f"{name}: {path} is not a regular file")
        with Path(path).open("rb") as file:
            return file.read(length)
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {path}: {error.strerror}") from error


def _read_text(name: str, path: str) -> str:
    content = _read_start(name, path, MAX_SECRET_BYTES + 1)
    if len(content) > MAX_SECRET_BYTES:
        raise ConfigError(f"{name}: the file {path} is longer than {MAX_SECRET_BYTES} bytes; set {name} to the right file")
    return content.decode("ascii", errors="replace")
