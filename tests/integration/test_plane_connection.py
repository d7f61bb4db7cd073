"""Tests of connections to real NATS servers: every login, every rejection, and the reconnect after each kind of fault."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import pytest

from certificate_cases import make_certificates
from discovery_cases import DEADLINE, await_in_time
from kvevents.errors import ConfigError, PlaneError
from kvevents_plane.connection import close, connect, open_client, require_jetstream
from kvevents_plane.nats_client import PlaneClient
from kvevents_plane.nats_errors import map_errors
from kvevents_plane.settings import ConnectionLimits, PlaneSettings
from nats_cases import needs_nats
from nats_logins import Key, Operator
from tools.nats_servers import NatsServer, nats_cluster, nats_server

IMPATIENT = ConnectionLimits(reconnect_seconds=0.01, max_reconnect_seconds=0.02)
"""The client reconnects almost at once, so that no test waits for a pause."""
pytestmark = needs_nats
PASSWORD = "p@ss/word%"  # noqa: S105 - for a server that the test starts
IN_URL = "p%40ss%2Fword%25"
TOKEN = "t0ken-of-the-test"  # noqa: S105 - as above
USER = Key.new()


class States:
    """The states that `on_state` received."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._changed = asyncio.Event()

    def __call__(self, state: str) -> None:
        self.all.append(state)
        self._changed.set()

    async def wait(self, *states: str) -> None:
        """Wait until exactly these have been received."""

        async def receive_all() -> None:
            while len(self.all) < len(states):
                self._changed.clear()
                await self._changed.wait()

        await await_in_time(receive_all())
        assert self.all == list(states)


async def until(what: str, condition: Callable[[], bool]) -> None:
    """Wait until `condition` returns true; check every 10 ms."""
    end = monotonic() + DEADLINE
    while not condition():
        assert monotonic() < end, f"waited for {what}"
        await asyncio.sleep(0.01)


def settings_of(server: NatsServer, **fields: Any) -> PlaneSettings:
    return PlaneSettings(**{"servers": (server.url,), "connection": IMPATIENT, **fields})


async def connect_and_fail(settings: PlaneSettings) -> PlaneError:
    with pytest.raises(PlaneError) as caught:
        await connect(settings, name="test")
    return caught.value


async def can_publish(client: PlaneClient) -> bool:
    """Return whether a published message is delivered to its subscriber."""
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox)
    await client.publish(inbox, b"x")
    return (await subscription.next_msg(DEADLINE)).data == b"x"


async def flood(client: PlaneClient) -> None:
    while True:
        await client.publish("flood", bytes(100_000))


# --- logins ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", name="plain")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with nats_server(tmp_path_factory.mktemp("plain")) as server:
        yield server


@pytest.fixture(scope="module", name="users")
def server_of_users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """Run a server with users by password and by NKey, one user that may only read, and an account without JetStream."""
    reads = {"publish": {"allow": ["$JS.API.CONSUMER.>"]}, "subscribe": ["_INBOX.>"]}
    users = [{"user": "a", "password": PASSWORD}, {"nkey": USER.public}]
    users.append({"user": "reader", "password": PASSWORD, "permissions": reads})  # type: ignore[dict-item]
    accounts = {
        "plane": {"jetstream": "enabled", "users": users},
        "other": {"users": [{"user": "other", "password": PASSWORD}]},
    }
    with nats_server(tmp_path_factory.mktemp("users"), accounts=accounts) as server:
        yield server


@pytest.fixture(scope="module", name="tokens")
def server_of_a_token(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with nats_server(tmp_path_factory.mktemp("token"), authorization={"token": TOKEN}) as server:
        yield server


@pytest.fixture(name="seed")
def seed_file(tmp_path: Path) -> str:
    (tmp_path / "seed").write_text(USER.seed + "\n")
    return str(tmp_path / "seed")


async def connect_and_publish(settings: PlaneSettings) -> None:
    async with open_client(settings, name="test") as client:
        await require_jetstream(client)
        assert await can_publish(client)


async def test_a_server_without_authentication_accepts_a_client_without_login(plain: NatsServer) -> None:
    await connect_and_publish(settings_of(plain))


async def test_a_password_in_the_url_is_accepted(users: NatsServer) -> None:
    """The password has characters that must be escaped in a URL."""
    await connect_and_publish(PlaneSettings(connection=IMPATIENT, servers=(users.url_of(f"a:{IN_URL}"),)))


async def test_a_token_in_the_url_or_the_settings_is_accepted(tokens: NatsServer) -> None:
    """The token is in the URL, or a setting of its own."""
    await connect_and_publish(PlaneSettings(connection=IMPATIENT, servers=(tokens.url_of(TOKEN),)))
    await connect_and_publish(settings_of(tokens, token=TOKEN))


async def test_an_nkey_is_accepted(users: NatsServer, seed: str) -> None:
    await connect_and_publish(settings_of(users, nkey=seed))


async def test_a_credentials_file_is_read_again_for_each_connection(tmp_path: Path) -> None:
    """The credentials are of a user in an operator's account. The file is read again for each connection, so that renewed
    credentials are used."""
    operator, states = Operator(), States()
    with nats_server(tmp_path / "nats", **operator.options) as server:
        path = operator.credentials(tmp_path / "user.creds")
        async with open_client(settings_of(server, credentials=str(path)), name="test", on_state=states) as client:
            await require_jetstream(client)
            server.kill()
            await states.wait("connected", "reconnecting")
            wrong = path.read_text()
            path.write_text("nothing of the kind")
            server.start()
            await until("five attempts without credentials", lambda: client.server_pool[0].reconnects >= 5)
            path.write_text(re.sub(r"SU[A-Z2-7]{56}", "SU" + "7" * 56, wrong))
            await until("five with an invalid seed", lambda: client.server_pool[0].reconnects >= 10)
            assert states.all == ["connected", "reconnecting"]
            operator.credentials(path, "the same, renewed")
            await states.wait("connected", "reconnecting", "connected")
            assert await can_publish(client)


@pytest.mark.parametrize(
    "login",
    [{}, {"servers": "a:wrong"}, {"servers": f"b:{IN_URL}"}, {"token": TOKEN}, {"nkey": "wrong"}],
    ids=["nothing", "password", "user", "token", "nkey"],
)
async def test_a_rejected_login_raises_at_once_and_reveals_no_secret(
    users: NatsServer, tmp_path: Path, login: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The error is raised at once, and once, with the server's name and without the secret."""
    seed = Key.new().seed
    (tmp_path / "seed").write_text(seed)
    fields: dict[str, Any] = {"servers": (users.url_of(login["servers"]),)} if "servers" in login else dict(login)
    if "nkey" in fields:
        fields["nkey"] = str(tmp_path / "seed")
    before = monotonic()
    error = await connect_and_fail(settings_of(users, **fields))
    assert monotonic() - before < ConnectionLimits().connect_seconds / 2
    assert error.fault == "denied"
    assert f"cannot use the NATS server at {users.url}: 'Authorization Violation'; it rejects this login" in str(error)
    assert not any(secret in str(error) for secret in ("wrong", IN_URL, PASSWORD, TOKEN, seed))
    assert not caplog.records


async def test_expired_credentials_are_rejected(tmp_path: Path) -> None:
    operator = Operator()
    with nats_server(tmp_path / "nats", **operator.options) as server:
        path = operator.credentials(tmp_path / "user.creds", exp=1_600_000_000)
        assert (await connect_and_fail(settings_of(server, credentials=str(path)))).fault == "denied"


async def test_an_invalid_seed_raises(tmp_path: Path, plain: NatsServer) -> None:
    (tmp_path / "seed").write_text("SU" + "7" * 56)
    with pytest.raises(ConfigError, match="is invalid: nkeys: invalid"):
        await connect(settings_of(plain, nkey=str(tmp_path / "seed")), name="test")


# --- TLS ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", name="certificates")
def made_certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def tls_options(folder: Path, **more: Any) -> dict[str, Any]:
    files = {"cert_file": "server.pem", "key_file": "server.key", "ca_file": "ca.pem"}
    return {"tls": {name: str(folder / file) for name, file in files.items()} | more}


@pytest.fixture(scope="module", name="secure")
def server_with_tls(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[NatsServer]:
    with nats_server(tmp_path_factory.mktemp("tls"), **tls_options(certificates)) as server:
        yield server


@pytest.fixture(scope="module", name="mutual")
def server_with_mutual_tls(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[NatsServer]:
    with nats_server(tmp_path_factory.mktemp("mutual"), **tls_options(certificates, verify=True)) as server:
        yield server


@pytest.mark.parametrize("scheme", ["nats", "tls"])
async def test_tls_connects_with_the_right_certificate_authority(secure: NatsServer, certificates: Path, scheme: str) -> None:
    url = secure.url.replace("nats", scheme)
    await connect_and_publish(PlaneSettings(connection=IMPATIENT, servers=(url,), tls_ca=str(certificates / "ca.pem")))


async def test_tls_fails_with_another_certificate_authority(secure: NatsServer) -> None:
    error = await connect_and_fail(settings_of(secure))
    assert error.fault == "tls"
    assert "its certificate is not trusted: unable to get local issuer certificate; check tls_ca" in str(error)


async def test_tls_fails_with_another_host_name(secure: NatsServer, certificates: Path) -> None:
    error = await connect_and_fail(settings_of(secure, tls_ca=str(certificates / "ca.pem"), tls_hostname="elsewhere"))
    assert "not valid for 'elsewhere'" in str(error)


async def test_a_client_certificate_is_accepted(mutual: NatsServer, certificates: Path) -> None:
    files = {"tls_ca": "ca.pem", "tls_certificate": "client.pem", "tls_key": "client.key"}
    await connect_and_publish(settings_of(mutual, **{name: str(certificates / file) for name, file in files.items()}))


async def test_a_missing_client_certificate_is_rejected(mutual: NatsServer, certificates: Path) -> None:
    """The server closes the connection after a handshake that the client considers complete."""
    assert (await connect_and_fail(settings_of(mutual, tls_ca=str(certificates / "ca.pem")))).fault in {"tls", "away"}


async def test_a_key_that_does_not_match_the_certificate_raises(plain: NatsServer, certificates: Path) -> None:
    files = {"tls_certificate": str(certificates / "client.pem"), "tls_key": str(certificates / "server.key")}
    with pytest.raises(ConfigError, match="or certificate and key do not match"):
        await connect(settings_of(plain, **files), name="test")


async def test_no_login_is_sent_to_a_server_without_tls(users: NatsServer) -> None:
    """A man in the middle that claims that TLS is not available receives no login."""
    received = bytearray()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection("127.0.0.1", users.port)
        writer.write(await theirs.readline())  # the INFO of a server that accepts passwords
        received.extend(await reader.read())
        writer.close()
        ours.close()

    async with fake_server(listen) as port:
        error = await connect_and_fail(PlaneSettings(connection=IMPATIENT, servers=(f"tls://a:{IN_URL}@127.0.0.1:{port}",)))
    assert error.fault == "tls"
    assert "secure connection not available" in str(error)
    assert not received


# --- no server ---------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def fake_server(listen: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]) -> AsyncIterator[int]:
    """Listen at a port and call `listen` for each connection; wait at the end for all calls to return."""
    ended: list[asyncio.Task[None]] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        ended.append(task)
        await listen(reader, writer)

    server = await asyncio.start_server(accept, "127.0.0.1")
    async with server:
        yield int(server.sockets[0].getsockname()[1])
        for task in ended:
            await await_in_time(task)


@pytest.fixture(name="no_listener")
def url_without_listener() -> Iterator[str]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield f"nats://127.0.0.1:{holder.getsockname()[1]}"


async def test_an_address_where_nothing_listens_is_an_error_without_secrets(
    no_listener: str, caplog: pytest.LogCaptureFixture
) -> None:
    error = await connect_and_fail(PlaneSettings(connection=IMPATIENT, servers=(no_listener.replace("//", "//u:secret@"),)))
    assert error.fault == "away"
    assert str(error).startswith(f"cannot use the NATS server at {no_listener}: Connect call failed")
    assert "check that it runs" in str(error)
    assert "secret" not in str(error)
    assert not caplog.records


async def test_an_unknown_host_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    error = await connect_and_fail(PlaneSettings(connection=IMPATIENT, servers=("nats://nats.test",)))
    assert "nats://nats.test:4222: Name or service not known" in str(error)


async def test_an_invalid_host_name_is_an_error() -> None:
    assert "nats://a..b:4222: " in str(await connect_and_fail(PlaneSettings(connection=IMPATIENT, servers=("nats://a..b",))))


@pytest.mark.parametrize(
    "greeting", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"INFO {\r\n"], ids=["silent", "http", "incomplete"]
)
async def test_an_address_where_another_service_listens_is_an_error(greeting: bytes) -> None:
    """The error is raised within the time limit."""
    limits = ConnectionLimits(connect_seconds=DEADLINE / 2 if greeting else 0.3)

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        with suppress(ConnectionResetError):
            await reader.read()
        writer.close()

    async with fake_server(listen) as port:
        error = await await_in_time(connect_and_fail(PlaneSettings(connection=limits, servers=(f"nats://127.0.0.1:{port}",))))
    assert error.fault == ("refused" if greeting else "timeout")


async def test_the_first_connection_waits_longer_for_a_slow_server_than_a_reconnect(tmp_path: Path) -> None:
    """A busy machine answers late, and a program that cannot connect at first ends."""
    limits = ConnectionLimits(connect_seconds=DEADLINE, attempt_seconds=0.05)
    with nats_server(tmp_path) as server:
        server.pause()
        connecting = asyncio.create_task(connect(settings_of(server, connection=limits), name="test"))
        await asyncio.wait({connecting}, timeout=4 * limits.attempt_seconds)
        assert not connecting.done()
        server.resume()
        client = await await_in_time(connecting)
        assert client.options["connect_timeout"] == limits.attempt_seconds
        await close(client)


async def test_one_server_of_several_is_enough(plain: NatsServer, no_listener: str) -> None:
    """The client also knows the other servers, in case this one fails."""
    async with open_client(PlaneSettings(connection=IMPATIENT, servers=(no_listener, plain.url)), name="test") as client:
        assert {url.geturl() for url in client.servers} >= {no_listener, plain.url}
        assert await can_publish(client)


async def test_the_version_of_one_server_of_several_is_known(plain: NatsServer, no_listener: str) -> None:
    """A server without a known version would be refused as too old."""
    async with open_client(PlaneSettings(servers=(no_listener, plain.url)), name="test") as client:
        await require_jetstream(client)
        assert len(client.servers) == 2


async def test_the_error_names_every_server_that_failed(no_listener: str) -> None:
    error = await connect_and_fail(PlaneSettings(connection=IMPATIENT, servers=(no_listener, "nats://a..b")))
    assert str(error).startswith("cannot use any of the NATS servers at ")
    assert no_listener in str(error)
    assert "nats://a..b:4222" in str(error)


async def test_a_server_without_jetstream_is_an_error(tmp_path: Path) -> None:
    with nats_server(tmp_path, jetstream=None) as server:
        async with open_client(settings_of(server), name="test") as client:
            where = rf"JetStream is disabled for this account at 127.0.0.1:{server.port}; a plane needs"
            with pytest.raises(PlaneError, match=where):
                await require_jetstream(client)


async def test_an_account_without_jetstream_is_an_error(users: NatsServer) -> None:
    async with open_client(
        PlaneSettings(connection=IMPATIENT, servers=(users.url_of(f"other:{IN_URL}"),)), name="test"
    ) as client:
        with pytest.raises(PlaneError, match="JetStream is disabled for this account"):
            await require_jetstream(client)


async def test_a_user_without_access_to_jetstream_is_an_error(users: NatsServer) -> None:
    """The error does not claim that JetStream is disabled."""
    async with open_client(
        PlaneSettings(connection=IMPATIENT, servers=(users.url_of(f"reader:{IN_URL}"),)), name="test"
    ) as client:
        with pytest.raises(PlaneError, match=r"querying JetStream: this user must not publish to '\$JS.API.INFO'; grant"):
            await require_jetstream(client)


async def test_a_forbidden_request_fails_at_once(users: NatsServer, caplog: pytest.LogCaptureFixture) -> None:
    """The request does not wait for its timeout, and the rejection is logged once."""
    async with open_client(
        PlaneSettings(connection=IMPATIENT, servers=(users.url_of(f"reader:{IN_URL}"),)), name="reader"
    ) as client:
        before = monotonic()
        for _ in range(3):
            with (
                pytest.raises(PlaneError, match=r"^writing: this user must not publish to 'Lane.1'; ") as caught,
                map_errors("writing"),
            ):
                await client.jetstream(timeout=60).publish("Lane.1", b"")
        assert caught.value.fault == "denied"
        assert monotonic() - before < 30
        with pytest.raises(PlaneError) as timed, map_errors("requesting"):
            await client.request("$JS.API.CONSUMER.X", timeout=0.01)
        assert timed.value.fault in {"timeout", "away"}
    assert [record.getMessage() for record in caplog.records] == ['reader: permissions violation for publish to "lane.1"']


# --- faults ------------------------------------------------------------------------------------------------------------------


async def test_the_client_reconnects_to_a_server_that_was_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The state is reported, each line is logged once regardless of how many attempts fail, and the subscriptions are
    restored."""
    caplog.set_level(logging.INFO)
    states = States()
    with nats_server(tmp_path) as server:
        async with open_client(settings_of(server), name="bridge", on_state=states) as client:
            subscription = await client.subscribe("a")
            server.kill()
            await until("ten attempts", lambda: client.server_pool[0].reconnects >= 10)
            server.start()
            await states.wait("connected", "reconnecting", "connected")
            await client.publish("a", b"again")
            assert (await subscription.next_msg(DEADLINE)).data == b"again"
    await states.wait("connected", "reconnecting", "connected", "closed")
    lines = [record.getMessage() for record in caplog.records if record.name.startswith(("kvevents", "nats"))]
    where = f"127.0.0.1:{server.port}"
    assert [line for line in lines if "call failed" in line] == [f"bridge: Connect call failed ('127.0.0.1', {server.port})"]
    assert len(lines) - len(set(lines)) == 1  # `connected`, twice
    assert lines[0] == f"bridge: connected to {where}"
    assert lines[-2:] == [f"bridge: connected to {where}", "bridge: closed the connection to its servers"]


async def test_the_client_leaves_a_server_that_stops_responding_for_another(tmp_path: Path) -> None:
    """The server still accepts connections, and much written data has not been read."""
    limits = msgspec.structs.replace(IMPATIENT, ping_seconds=1.0, attempt_seconds=2.0)  # a busy server answers in this time
    states = States()
    with nats_cluster(tmp_path) as cluster:
        async with open_client(PlaneSettings(connection=limits, servers=cluster.urls), name="test", on_state=states) as client:
            url = client.connected_url
            assert url
            (node,) = (node for node in cluster.nodes.values() if node.port == url.port)
            node.pause()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await flood(client)
            await states.wait("connected", "reconnecting", "connected")
            assert client.connected_url != url
            assert await can_publish(client)
            node.resume()


async def test_the_client_reconnects_when_a_revoked_login_is_restored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The server closes the connection with a reason; the client continues to reconnect."""
    states = States()
    ours = {"users": [{"user": "a", "password": PASSWORD}]}
    with nats_server(tmp_path, authorization=ours) as server:
        async with open_client(
            PlaneSettings(connection=IMPATIENT, servers=(server.url_of(f"a:{IN_URL}"),)), name="test", on_state=states
        ) as client:
            server.configure(authorization={"users": [{"user": "b", "password": PASSWORD}]})
            await states.wait("connected", "reconnecting")
            await until("five attempts", lambda: client.server_pool[0].reconnects >= 5)
            server.configure(authorization=ours)
            await states.wait("connected", "reconnecting", "connected")
            assert await can_publish(client)
    lines = [record.getMessage().lower() for record in caplog.records]
    assert sum(line == "test: 'authorization violation'" for line in lines) == 1
    assert not any(PASSWORD in line or IN_URL in line for line in lines)


async def test_pending_messages_are_bounded_while_no_server_is_connected(tmp_path: Path) -> None:
    limits = msgspec.structs.replace(IMPATIENT, pending_bytes=1 << 20)
    states = States()
    with nats_server(tmp_path) as server:
        async with open_client(settings_of(server, connection=limits), name="test", on_state=states) as client:
            server.kill()
            await states.wait("connected", "reconnecting")
            with pytest.raises(PlaneError) as caught, map_errors("writing"):
                await await_in_time(flood(client))
            assert caught.value.fault == "backlog"
            assert client.pending_data_size < 1 << 20


# --- closing -----------------------------------------------------------------------------------------------------------------


async def test_messages_published_before_closing_arrive(plain: NatsServer) -> None:
    async with open_client(settings_of(plain), name="reader") as reader:
        await reader.jetstream().add_stream(name="end", subjects=["end"])
        async with open_client(settings_of(plain), name="writer") as writer:
            for _ in range(1000):
                await writer.publish("end", b"x" * 1000)
        async with asyncio.timeout(DEADLINE):  # a server may answer before it has stored earlier messages
            while (await reader.jetstream().stream_info("end")).state.messages < 1000:
                pass


@pytest.mark.parametrize("fault", ["pause", "kill"])
async def test_closing_takes_bounded_time_whatever_the_server_does(tmp_path: Path, fault: str) -> None:
    states = States()
    with nats_server(tmp_path) as server:
        client = await connect(settings_of(server), name="test", on_state=states)
        subscription = await client.subscribe("a")
        getattr(server, fault)()
        for _ in range(5):
            await client.publish("a", bytes(1 << 20))
        await await_in_time(close(client, 0.2))
        assert client.is_closed
        assert states.all[-1] == "closed"
        await close(client, 0.2)
        with pytest.raises(PlaneError) as caught, map_errors("writing"):
            await client.publish("a", b"")
        assert caught.value.fault == "closed"
        assert subscription.pending_msgs == 0


async def test_a_closed_client_does_not_reconnect(tmp_path: Path) -> None:
    """Clients are closed at many moments of their attempts to reconnect, one of them the moment at which an attempt fails."""
    settings = msgspec.structs.replace(IMPATIENT, reconnect_seconds=0.0001, max_reconnect_seconds=0.0002)
    with nats_server(tmp_path) as server:
        clients = [await connect(settings_of(server, connection=settings), name=f"test {n}") for n in range(50)]
        server.kill()
        await until("attempts of each client", lambda: all(client.server_pool[0].reconnects for client in clients))
        for turns, client in enumerate(clients):
            for _ in range(turns):
                await asyncio.sleep(0)
            await close(client, 0.2)
    assert all(client.is_closed for client in clients)
    await until("all tasks of the clients to end", lambda: asyncio.all_tasks() == {asyncio.current_task()})
