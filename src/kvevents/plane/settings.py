"""What a plane is told: where its NATS servers are, how to log in there, and how its streams are made."""

from __future__ import annotations

import re
import socket
import stat
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec

from kvevents.errors import ConfigError
from kvevents.plane.records import MOST_BEAT_SECONDS
from kvevents.settings import Bytes, FilePath, Host, Name, Positive, Range, Seconds, Secret, Settings, Subject, Unit, Url

MAX_PARTITIONS: Final = 256
COPIES: Final = (1, 3, 5)
"""What JetStream can keep a majority of."""
LEAST_PARTITION_BYTES: Final = 1 << 20
"""Room for one message of the size that servers take unless told otherwise."""
DEFAULT_PARTITION_BYTES: Final = 1 << 30
RECEIVE_QUEUE: Final = 256
"""Batches of one engine that may wait in its connection: about as many as are read of it in one turn."""
MAX_SECRET_BYTES: Final = 64 << 10
"""Of a file of credentials or of a seed, which have some thousand bytes and 58."""

MAX_INBOX: Final = 64
"""Characters of an inbox prefix; a subject has 22 and more behind it."""

DEFAULT_PORTS: Final = {"nats": 4222, "tls": 4222, "ws": 80, "wss": 443}
_WEB: Final = frozenset({"ws", "wss"})
_ENCRYPTED: Final = frozenset({"tls", "wss"})
_TLS_FILES: Final = ("tls_ca", "tls_certificate", "tls_key")
_TLS_FIELDS: Final = (*_TLS_FILES, "tls_hostname")
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,32}")
_SUBJECT: Final = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_SEED: Final = re.compile(r"SU[A-Z2-7]{56}")
_JWT_BLOCK: Final = re.compile(r"-+BEGIN NATS USER JWT-+\s+(\S+)\s+-+END NATS USER JWT-+")
_SEED_BLOCK: Final = re.compile(r"-+BEGIN USER NKEY SEED-+\s+(\S+)\s+-+END USER NKEY SEED-+")


class Credentials(NamedTuple):
    """A user's JWT, which the servers are shown, and the seed by which this user signs."""

    jwt: str
    seed: str

    def __repr__(self) -> str:
        return "<Credentials>"


class Login(NamedTuple):
    """What stands before the `@` of a server's URL: a user with a password, or a token."""

    user: str | None = None
    password: str | None = None
    token: str | None = None

    def __repr__(self) -> str:
        return "<Login>"


class PlaneSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One plane. Raises `ConfigError` for what cannot work; neither its text nor this object's holds a secret."""

    ALTERNATIVES: ClassVar = ("credentials", "nkey", "token")
    """Settings of which a server is shown one."""

    servers: tuple[Url, ...]
    """NATS server of the plane: nats://HOST:4222, or tls://, ws://, wss://; one of a cluster is enough. More are tried when it
    is away. `USER:PASSWORD@` or `TOKEN@` may be before the host. With `tls://` nothing is sent to a server without TLS."""
    name: Annotated[Name, "--plane"] = "default"
    """Name of the plane; planes of different names share servers and nothing else. 1 to 32 letters, digits, `-` and `_`."""
    partitions: Annotated[int, "--partitions", Range(1, MAX_PARTITIONS)] = 8
    """Streams of JetStream to spread engines over, 1 to 256; counts when the plane is made, and never after."""
    copies: Annotated[int, "--copies"] = 1
    """Servers that keep each partition of a new plane: 1, 3 or 5."""
    partition_bytes: Annotated[int, "--partition-size", Unit.BYTES, Range(LEAST_PARTITION_BYTES)] = DEFAULT_PARTITION_BYTES
    """Room of each partition of a new plane. A full partition refuses what is new rather than forget what is old."""
    credentials: Annotated[FilePath, "--creds"] | None = None
    """File of a user's JWT and seed, as `nsc` makes it. It is read again for each connection."""
    nkey: Annotated[FilePath, "--nkey"] | None = None
    """File of a user's NKey seed."""
    token: Secret | None = None
    """Token of the servers, instead of credentials or an NKey."""
    tls_ca: Annotated[FilePath, "--tls-ca"] | None = None
    """PEM file of the authorities that sign the servers' certificates (default: the system's); enables TLS."""
    tls_certificate: Annotated[FilePath, "--tls-cert"] | None = None
    """PEM file of the certificate of this end, for servers that ask for one."""
    tls_key: Annotated[FilePath, "--tls-key"] | None = None
    """PEM file of the key of this end."""
    tls_hostname: Host | None = None
    """Name that the servers' certificates must have, if it is not that of the URL."""
    inbox_prefix: Annotated[Subject, "--inbox-prefix"] = "_INBOX"
    """Prefix of the subjects at which answers come. One that this user alone may subscribe to keeps others of the account from
    listening."""

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if not self.servers:
            raise ConfigError("a plane needs at least one server, such as nats://127.0.0.1:4222")
        for url in self.servers:
            _check_url(url)
        if len({scheme in _WEB for scheme in self._schemes()}) > 1:
            raise ConfigError(f"{self.where}: a plane's servers are all reached by WebSocket, or none is")
        self._check_streams()
        self._check_login()
        self._check_inbox()
        self._check_tls()

    def _check_streams(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"name is {self.name!r}; a plane's has 1 to 32 letters, digits, '-' and '_'")
        if self.copies not in COPIES:
            raise ConfigError(f"copies is {self.copies}; JetStream keeps a majority of 1, 3 or 5")

    def _check_login(self) -> None:
        if len({_login_of(url) for url in self.servers} - {Login()}) > 1:
            raise ConfigError(f"{self.where}: all servers of a plane take the same login; the URLs have different ones")
        ways = [name for name in ("credentials", "nkey", "token") if getattr(self, name) is not None]
        if any(_login_of(url) != Login() for url in self.servers):
            ways.append("the login in the URL")
        if len(ways) > 1:
            raise ConfigError(f"there are {' and '.join(ways)}: a server is shown one; leave out the others")
        if self.credentials is not None:
            self.read_credentials()
        if self.nkey is not None:
            self.read_seed()

    def _check_inbox(self) -> None:
        if len(self.inbox_prefix) > MAX_INBOX or not _SUBJECT.fullmatch(self.inbox_prefix):
            raise ConfigError(
                f"inbox_prefix is {self.inbox_prefix!r}; it is the beginning of a subject, such as _INBOX_replica: at most "
                f"{MAX_INBOX} letters, digits, '-', '_', and '.' between them"
            )

    def _check_tls(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            given, wanting = ("tls_certificate", "tls_key") if self.tls_key is None else ("tls_key", "tls_certificate")
            raise ConfigError(f"{given} is there without {wanting}: a certificate and its key go together")
        for name in _TLS_FILES:
            if (path := getattr(self, name)) is not None:
                _begin(name, path)
        if "ws" in self._schemes() and any(getattr(self, name) is not None for name in _TLS_FIELDS):
            raise ConfigError(f"{self.where}: there is no TLS in ws://; write wss://, or leave out what begins with tls_")

    def _schemes(self) -> set[str]:
        return {urlsplit(url).scheme for url in self.servers}

    @property
    def addresses(self) -> tuple[str, ...]:
        """The servers' URLs with a port and without a login."""
        return tuple(_address(urlsplit(url)) for url in self.servers)

    @property
    def where(self) -> str:
        """The servers as people may be told of them."""
        return ", ".join(map(without_login, self.servers))

    @property
    def login(self) -> Login:
        """User and password or token; empty where there is another way in, or none."""
        if self.token is not None:
            return Login(token=self.token)
        return next((found for url in self.servers if (found := _login_of(url)) != Login()), Login())

    @property
    def needs_tls(self) -> bool:
        """Whether nothing, not even a login, is said to a server without TLS."""
        told = any(getattr(self, name) is not None for name in _TLS_FIELDS)
        return told or bool(self._schemes() & _ENCRYPTED)

    @property
    def over_web(self) -> bool:
        """Whether the servers are reached by WebSocket."""
        return bool(self._schemes() & _WEB)

    def read_credentials(self) -> Credentials:
        """What the file of credentials holds now. Raises `ConfigError`."""
        path = self.credentials or ""
        text = _read("credentials", path)
        jwt, seed = _JWT_BLOCK.search(text), _SEED_BLOCK.search(text)
        if jwt is None or seed is None or not _SEED.fullmatch(seed[1]):
            raise ConfigError(f"credentials: {path} has no user's JWT and seed in it; `nsc generate creds` makes such a file")
        return Credentials(jwt[1], seed[1])

    def read_seed(self) -> str:
        """The user's seed. Raises `ConfigError`."""
        path = self.nkey or ""
        seed = _read("nkey", path).strip()
        if not _SEED.fullmatch(seed):
            raise ConfigError(f"nkey: {path} has no user's seed in it: 58 characters from SU on, as `nk -gen user` makes them")
        return seed

    def __repr__(self) -> str:
        return f"<PlaneSettings {self.name!r} at {self.where}>"

    def __rich_repr__(self) -> Any:
        """No secret, however this is printed."""
        for field in self.__struct_fields__:
            if field not in {"servers", "token"}:
                yield field, getattr(self, field)
        yield "servers", tuple(map(without_login, self.servers))


class BridgeOptions(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a bridge does, whichever plane it writes to. Raises `ConfigError` for what cannot work."""

    name: Name = msgspec.field(default_factory=socket.gethostname)
    """Name of this bridge, for people; the host's unless given. Each bridge has its own."""
    hold_back: Annotated[float, "--standby-delay", Unit.SECONDS, Range(0, 3600)] = 0.0
    """Write only what no other bridge has written after so many seconds."""
    dead_seconds: Seconds = 30.0
    """Drop an engine from the log after so many seconds without a connection to any bridge."""
    unnamed_seconds: Seconds = 600.0
    """Drop an engine from the log that no bridge has named for so many seconds. So long may bridges take to start again."""
    unreadable_seconds: Seconds = 20.0
    """Write a partition again if pages that nobody has read are missing for so many seconds. No snapshot contains those."""
    beat: Annotated[float, Unit.SECONDS, Range(0, MOST_BEAT_SECONDS, is_open=True)] = 2.0
    """Seconds between two heartbeats in each partition, at most 60. Others do not believe for longer that the bridge is
    alive."""
    late_seconds: Seconds = 1.0
    """Seconds that what engines say may wait in the bridge before replicas trust none of its streams."""
    receive_queue: Positive = RECEIVE_QUEUE
    """Batches of each engine that wait in its connection while nothing is read. Others wait at the engine, or are dropped."""
    max_queued_bytes: Bytes = 64 << 20
    """Most that may wait for the servers; above it nothing more is received."""

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if not self.name or len(self.name) > 128 or not self.name.isprintable():
            raise ConfigError(f"a bridge's name is {self.name!r}; it is 1 to 128 characters that can be read")


class BridgeSettings(BridgeOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One bridge. Raises `ConfigError` for what cannot work."""

    plane: PlaneSettings


def without_login(url: str) -> str:
    """A server's URL as people may be told of it, whatever is wrong with it: without what stands before the last `@`."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}" if separator else url.rpartition("@")[2]


def _check_url(url: str) -> None:
    told = without_login(url)
    shape = "it must look like nats://HOST:4222, tls://HOST:4222, ws://HOST:80 or wss://HOST:443"
    try:
        found = urlsplit(url)
        port = found.port
    except ValueError:
        # The error behind this one has the bytes in it that stand where a port should, which may be half a password.
        raise ConfigError(f"{told!r} is no server of a plane; {shape}") from None
    if found.scheme not in DEFAULT_PORTS or not found.hostname or port == 0:
        raise ConfigError(f"{told!r} is no server of a plane; {shape}")
    if found.query or found.fragment or (found.path.strip("/") and found.scheme not in _WEB):
        raise ConfigError(f"{told!r} has something behind its port; {shape}, and a password's / ? # @ like %2F %3F %23 %40")


def _address(url: SplitResult) -> str:
    host = f"[{url.hostname}]" if ":" in (url.hostname or "") else url.hostname
    return f"{url.scheme}://{host}:{url.port or DEFAULT_PORTS[url.scheme]}{url.path if url.scheme in _WEB else ''}"


def _login_of(url: str) -> Login:
    found = urlsplit(url)
    if found.username is None:
        return Login()
    if found.password is None:
        return Login(token=unquote(found.username))
    return Login(unquote(found.username), unquote(found.password))


def _begin(name: str, path: str, length: int = 1) -> bytes:
    """The first bytes of a file that a setting names. Raises `ConfigError`."""
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise ConfigError(f"{name}: {path} is no file")
        with Path(path).open("rb") as file:
            return file.read(length)
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {path}: {error.strerror}") from error


def _read(name: str, path: str) -> str:
    found = _begin(name, path, MAX_SECRET_BYTES + 1)
    if len(found) > MAX_SECRET_BYTES:
        raise ConfigError(f"{name}: {path} is longer than {MAX_SECRET_BYTES} bytes, as no such file is")
    return found.decode("ascii", errors="replace")
