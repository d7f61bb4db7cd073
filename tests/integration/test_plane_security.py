"""Tests of what each role may do with a plane, on a server with the configuration of `deploy/nats`
(docs/guides/plane-security.md).

They use TLS with certificates on both ends and NKeys, and credentials of an operator's users with the same permissions."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from nats.js import JetStreamContext

import paths
from certificate_cases import make_certificates
from cli_cases import Program
from kvevents.errors import PlaneError
from kvevents_plane.connection import open_client, require_jetstream
from kvevents_plane.layout import Layout, create_plane
from kvevents_plane.nats_client import PlaneClient
from kvevents_plane.nats_errors import map_errors
from kvevents_plane.records import decode_page
from kvevents_plane.settings import PlaneSettings
from nats_cases import needs_nats
from nats_logins import Key, Operator
from plane_cases import SECONDS, run_bridge
from service_cases import MODEL, Service, engine, serving, wait_for
from service_replica_cases import watch_of
from tools.nats_servers import NatsServer, nats_server

pytestmark = needs_nats
DEPLOY: Final = paths.ROOT / "deploy" / "nats"
ROLES: Final = ("router", "replica", "bridge", "operator")
KEYS: Final = {role: Key.new() for role in (*ROLES, "stranger")}
LAYOUT: Final = Layout("default", 8)
BUCKETS: Final = f"KV_{LAYOUT.bucket}", f"KV_{LAYOUT.digests}", f"OBJ_{LAYOUT.snapshots}"


def permissions() -> dict[str, dict[str, dict[str, list[str]]]]:
    """Return the permissions of each role in `permissions.conf`; the value of each name in that file is JSON."""
    text = re.sub(r"^#.*$", "", (DEPLOY / "permissions.conf").read_text(), flags=re.MULTILINE)
    found = re.findall(r"^KVEVENTS_(\w+): (\{.*?^\})", text, re.MULTILINE | re.DOTALL)
    return {name.lower(): json.loads(value) for name, value in found}


class SecureServer(NatsServer):
    """Runs a server with the configuration `deploy/nats/server.conf`, with ports, keys and files of the test."""

    def __init__(self, home: Path, certificates: Path) -> None:
        super().__init__(home)
        self._certificates = certificates

    def _write_configuration(self) -> None:
        text = (DEPLOY / "server.conf").read_text()
        for role in ROLES:
            text = text.replace(f'"U{role.upper()}"', f'"{KEYS[role].public}"')
        text = text.replace("/etc/nats/tls", str(self._certificates)).replace("/var/lib/nats", str(self.store))
        text = text.replace("port: 4222", f"host: 127.0.0.1\nport: {self.port}").replace(":8222", f":{self.monitor_port}")
        (self.home / "permissions.conf").write_text((DEPLOY / "permissions.conf").read_text())
        (self.home / "conf").write_text(text)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_certificates(tmp_path_factory.mktemp("certificates"))
    for role, key in KEYS.items():
        (folder / f"{role}.nk").write_text(key.seed)
        (folder / f"{role}.nk").chmod(0o600)
    return folder


@pytest.fixture
def server(tmp_path: Path, certificates: Path) -> Iterator[NatsServer]:
    with SecureServer(tmp_path / "nats", certificates) as found:
        yield found


Login = Callable[[str], PlaneSettings]


@pytest.fixture
def login(server: NatsServer, certificates: Path) -> Login:
    def settings(role: str) -> PlaneSettings:
        return PlaneSettings(
            servers=(f"tls://127.0.0.1:{server.port}",),
            partition_bytes=64 << 20,
            nkey=str(certificates / f"{role}.nk"),
            tls_ca=str(certificates / "ca.pem"),
            tls_certificate=str(certificates / "client.pem"),
            tls_key=str(certificates / "client.key"),
        )

    return settings


def flags(settings: PlaneSettings, replica: str) -> list[str]:
    """Return options of `kvevents serve`."""
    found = {
        "--nats": settings.servers[0],
        "--replica-name": replica,
        "--nkey": settings.nkey,
        "--creds": settings.credentials,
        "--tls-ca": settings.tls_ca,
        "--tls-cert": settings.tls_certificate,
        "--tls-key": settings.tls_key,
        "--inbox-prefix": settings.inbox_prefix,
    }
    return [part for name, value in found.items() if value is not None for part in (name, value)]


@asynccontextmanager
async def jetstream(settings: PlaneSettings) -> AsyncIterator[tuple[PlaneClient, JetStreamContext]]:
    async with open_client(settings, name="a test") as client:
        yield client, client.jetstream(timeout=SECONDS)


async def is_denied(what: Awaitable[Any]) -> bool:
    """Return whether the server does not permit the request. A request that it permits but refuses for another reason is not
    denied."""
    try:
        with map_errors("trying"):
            await what
    except PlaneError as error:
        return error.fault == "denied"
    return False


# --- logins -----------------------------------------------------------------------------------------------------------------


async def test_an_unknown_key_is_denied(login: Login) -> None:
    """The client has a certificate of the authority, and a key that the configuration does not list."""
    with pytest.raises(PlaneError) as caught:
        async with jetstream(login("stranger")):
            pass
    assert caught.value.fault == "denied"


def test_a_replica_whose_login_is_rejected_logs_the_reason_and_is_not_ready(login: Login) -> None:
    with serving(*flags(login("stranger"), "x")) as service:
        wait_for("the log line", lambda: service.log_lines("it rejects this login"))
        assert service.get("/readyz").status == 503
        assert "kvevents_plane_readable 0" in service.get("/metrics").body.decode()


async def test_a_key_without_a_client_certificate_is_denied(login: Login, certificates: Path) -> None:
    settings = PlaneSettings(
        servers=login("operator").servers, nkey=str(certificates / "operator.nk"), tls_ca=str(certificates / "ca.pem")
    )
    with pytest.raises(PlaneError) as caught:
        async with jetstream(settings):
            pass
    assert caught.value.fault in {"tls", "away"}


# --- what each role may do ---------------------------------------------------------------------------------------------------


def test_replica_router_and_bridge_work_with_the_permissions_of_their_roles(login: Login) -> None:
    """The replica writes snapshots and purges the pages before them. The router may write nothing; it starts with a snapshot,
    follows the log, and is EXACT."""
    with (
        engine() as one,
        run_bridge(login("bridge"), watch_of("one", one)),
        serving(*flags(login("replica"), "a"), "--snapshot-seconds", "0.3") as replica,
    ):
        one.store(range(64))
        replica.exact("one", blocks=4)
        wait_for("two snapshots, and a purge", lambda: first_pages(login("operator")) > LAYOUT.partitions)
        assert not replica.log_lines("permission")
        with serving(*flags(login("router"), "b")) as router:
            router.exact("one", blocks=4)
            router.wait_for_log("loaded from snapshot")
            one.store(range(100, 132))
            for service in (replica, router):
                service.exact("one", blocks=6)
            wait_for_missing_permission(router)


def test_the_bridge_program_works_with_the_permissions_of_its_role(login: Login) -> None:
    settings = login("bridge")
    to = ["--bridge-name" if each == "--replica-name" else each for each in flags(settings, "one")]
    with (
        engine() as one,
        serving(*flags(login("router"), "a")) as router,
        Program(
            "bridge",
            *to,
            "--partition-size",
            "64MiB",
            "--model",
            MODEL,
            "--worker",
            f"one={one.endpoint},{one.replay_endpoint}",
        ) as bridge,
    ):
        one.store(range(64))
        router.exact("one", blocks=4)
        assert not [line for line in bridge.err.all if re.search("permission|Traceback", line)]


def wait_for_missing_permission(router: Service) -> None:
    wait_for("the missing permission", lambda: router.log_lines("this replica publishes no digests"))
    assert len(router.log_lines("this replica publishes no digests")) == 1
    router.wait_for_log("must not publish to '\\$KV.KVEVENTS_default_digests.\\w+'; grant this user the permission")


def test_a_router_logs_once_that_it_cannot_write_snapshots(login: Login) -> None:
    """If no other process writes snapshots, the router retries, and its metrics show the failures. The router still follows the
    log."""
    with (
        engine() as one,
        run_bridge(login("bridge"), watch_of("one", one)),
        serving(*flags(login("router"), "c"), "--snapshot-seconds", "0.1") as router,
    ):
        one.store(range(64))
        router.exact("one", blocks=4)
        failing = "kvevents_plane_snapshot_failed 1"
        wait_for("a refused snapshot", lambda: failing in router.get("/metrics").body.decode())
        wait_for_missing_permission(router)
        one.store(range(100, 132))
        router.exact("one", blocks=6)
        router.wait_for_log("no snapshot was written: .*must not publish to ")
        assert len(router.log_lines("no snapshot was written")) == 1


def first_pages(settings: PlaneSettings) -> int:
    """Return the sum of the first sequence numbers of all partitions; it is the number of partitions until pages are purged."""

    async def read_sequence_numbers() -> int:
        async with jetstream(settings) as (_, js):
            return sum(
                [(await js.stream_info(LAYOUT.stream(partition))).state.first_seq for partition in range(LAYOUT.partitions)]
            )

    return asyncio.run(read_sequence_numbers())


async def create_plane_of(login: Login) -> None:
    settings = login("bridge")
    async with jetstream(settings) as (_, js):
        await create_plane(js, settings)


WRITES: Final[dict[str, Callable[[JetStreamContext], Awaitable[Any]]]] = {
    "a page": lambda js: js.publish(LAYOUT.subject(0), b"page"),
    "purge a partition": lambda js: js.purge_stream(LAYOUT.stream(0), seq=1),
    "purge a bucket": lambda js: js.purge_stream(BUCKETS[1]),
    "delete a partition": lambda js: js.delete_stream("FOREIGN"),
    "delete a page": lambda js: js.delete_msg(LAYOUT.stream(0), 1 << 40),
    "make a stream": lambda js: js.add_stream(name="FOREIGN", subjects=["foreign"]),
    "change a partition": lambda js: js.update_stream(name="FOREIGN", subjects=["foreign"]),
    "a digest": lambda js: js.publish(f"$KV.{LAYOUT.digests}.x", b""),
    "which snapshot counts": lambda js: js.publish(f"$KV.{LAYOUT.bucket}.snapshot.0", b"{}"),
    "a part of a snapshot": lambda js: js.publish(f"$O.{LAYOUT.snapshots}.C.x", b""),
    "remove a snapshot's parts": lambda js: js.purge_stream(BUCKETS[2], subject="foreign"),
    "something else": lambda js: js.publish("anything", b""),
}
"""Operations that change a plane."""
ALLOWED: Final = {
    "router": set[str](),
    "replica": {
        *("purge a partition", "a digest", "which snapshot counts", "a part of a snapshot"),
        "remove a snapshot's parts",
    },
    "bridge": {"a page", "make a stream"},
    "operator": WRITES.keys() - {"a page", "something else"},
}


@pytest.mark.parametrize("role", ROLES)
async def test_a_role_can_write_only_what_it_is_allowed_to(login: Login, role: str) -> None:
    """The server refuses all other writes."""
    await create_plane_of(login)
    allowed = set()
    async with jetstream(login(role)) as (_, js):
        for name, write in WRITES.items():
            if not await is_denied(write(js)):
                allowed.add(name)
    assert allowed == ALLOWED[role]


@pytest.mark.parametrize("role", ROLES)
async def test_every_role_can_read_but_not_overhear(login: Login, role: str) -> None:
    """It can receive only what its own subscriptions request: it overhears no page that the bridge publishes."""
    await create_plane_of(login)
    async with jetstream(login(role)) as (client, js):
        await require_jetstream(client)
        assert (await js.stream_info(LAYOUT.stream(0))).config.name == LAYOUT.stream(0)
        received: list[Any] = []

        async def receive(message: Any) -> None:
            received.append(message)

        await client.subscribe(LAYOUT.subject(0), cb=receive)
        async with jetstream(login("bridge")) as (_, writing):
            await writing.publish(LAYOUT.subject(0), b"page")
        await client.flush()
        assert received == []


# --- what permissions do not prevent -----------------------------------------------------------------------------------------


async def test_a_response_delivered_into_a_partition_is_not_a_page(login: Login) -> None:
    """Servers check the subject of a request, but not the subject of the response. So users of the plane can write responses
    into partitions. A response is not a page, and readers ignore it."""
    await create_plane_of(login)
    async with jetstream(login("router")) as (client, js):
        await client.publish("$JS.API.INFO", b"", reply=LAYOUT.subject(0))
        await js.stream_info(LAYOUT.stream(0))
        await until_async(lambda: last_page(js), 1)
        found = await js.get_msg(LAYOUT.stream(0), 1)
    assert found.data is not None
    assert decode_page(found.data) is None


async def test_a_replica_can_have_a_digest_delivered_into_a_partition(login: Login) -> None:
    """A consumer delivers the digest there. So a replica must be trusted with the log like a bridge; a router has nothing to
    deliver."""
    await create_plane_of(login)
    async with jetstream(login("replica")) as (_, js):
        await js.publish(f"$KV.{LAYOUT.digests}.x", b"whatever it likes")
        await js.add_consumer(BUCKETS[1], deliver_subject=LAYOUT.subject(0), ack_policy="none")
        await until_async(lambda: last_page(js), 1)
        found = await js.get_msg(LAYOUT.stream(0), 1)
    assert found.data == b"whatever it likes"


def test_pages_delivered_into_another_partition_are_ignored(login: Login) -> None:
    """The server refuses pages whose expected sequence number does not fit. Pages that it accepts name another partition."""

    async def deliver(partition: int) -> None:
        other = (partition + 1) % LAYOUT.partitions
        async with jetstream(login("router")) as (_, js):
            await js.add_consumer(LAYOUT.stream(partition), deliver_subject=LAYOUT.subject(other), ack_policy="none")
            data = (await js.get_msg(LAYOUT.stream(partition), 1)).data
        async with jetstream(login("bridge")) as (_, js):  # as if it arrived without the header
            assert data is not None
            await js.publish(LAYOUT.subject(other), data)

    with engine() as one, run_bridge(login("bridge"), watch_of("one", one)) as bridge:
        with serving(*flags(login("router"), "a")) as router:
            one.store(range(64))
            router.exact("one", blocks=4)
            asyncio.run(deliver(LAYOUT.partition_of(watch_of("one", one).key[0])))
            one.store(range(100, 132))
            router.exact("one", blocks=6)
        with serving(*flags(login("router"), "b")) as router:
            router.exact("one", blocks=6)
        assert bridge.invalid_records == 0


async def last_page(js: JetStreamContext) -> int:
    return (await js.stream_info(LAYOUT.stream(0))).state.last_seq


async def until_async(read_number: Callable[[], Awaitable[int]], wanted: int) -> None:
    async with asyncio.timeout(SECONDS):
        while await read_number() < wanted:  # noqa: ASYNC110 - a server has no event for it
            await asyncio.sleep(0.01)


# --- the file itself ---------------------------------------------------------------------------------------------------------


def test_the_tests_cover_all_permissions() -> None:
    """Each pattern of `permissions.conf` permits reading, or is used by one of `WRITES`."""
    found = permissions()
    assert found.keys() == set(ROLES)
    reading = set(found["router"]["publish"]["allow"])
    assert not [subject for subject in reading if not re.match(r"\$JS\.(API\.(INFO|STREAM|CONSUMER)|FC)", subject)]
    for role in ("replica", "bridge"):
        assert reading <= set(found[role]["publish"]["allow"])
    assert all(each.keys() == {"publish", "subscribe"} and each["publish"].keys() == {"allow"} for each in found.values())
    partitions = [subject for subject in found["replica"]["publish"]["allow"] if "STREAM.PURGE.KVEVENTS" in subject]
    assert partitions == [f"$JS.API.STREAM.PURGE.{LAYOUT.stream(partition)}" for partition in range(LAYOUT.partitions)]


# --- credentials of an operator's users --------------------------------------------------------------------------------------


def test_credentials_carry_the_same_permissions(tmp_path: Path) -> None:
    """If accounts and users are JWTs of an operator, the JWTs contain the permissions, which are equal for equal roles."""
    operator, roles = Operator(), permissions()

    def settings(role: str) -> PlaneSettings:
        path = operator.credentials(tmp_path / f"{role}.creds", role, roles[role])
        return PlaneSettings(servers=(server_of_operator.url,), partition_bytes=64 << 20, credentials=str(path))

    with nats_server(tmp_path / "nats", **operator.options) as server_of_operator, engine() as one:
        with (
            run_bridge(settings("bridge"), watch_of("one", one)),
            serving(*flags(settings("replica"), "a")) as replica,
            serving(*flags(settings("router"), "b")) as router,
        ):
            one.store(range(64))
            for service in (replica, router):
                service.exact("one", blocks=4)
            wait_for_missing_permission(router)

        async def try_to_write() -> None:
            for role in ("router", "replica"):
                async with jetstream(settings(role)) as (_, js):
                    assert await is_denied(js.publish(LAYOUT.subject(0), b"page"))

        asyncio.run(try_to_write())


# --- private inboxes ---------------------------------------------------------------------------------------------------------


def test_roles_work_with_private_inboxes(tmp_path: Path) -> None:
    """Each user has an inbox prefix that its permissions name. All roles work, and none receives messages of another."""
    operator, roles = Operator(), permissions()

    def settings(role: str, prefix: str | None = None) -> PlaneSettings:
        own = f"_INBOX_{role}"
        role_permissions = {**roles[role], "subscribe": {"allow": [f"{own}.>"]}}
        path = operator.credentials(tmp_path / f"{role}.creds", role, role_permissions)
        return PlaneSettings(
            servers=(server_of_private_inboxes.url,),
            partition_bytes=64 << 20,
            credentials=str(path),
            inbox_prefix=prefix or own,
        )

    with nats_server(tmp_path / "nats", **operator.options) as server_of_private_inboxes, engine() as one:
        with (
            run_bridge(settings("bridge"), watch_of("one", one)),
            serving(*flags(settings("replica"), "a"), "--snapshot-seconds", "0.3") as replica,
            serving(*flags(settings("router"), "b")) as router,
        ):
            one.store(range(64))
            for service in (replica, router):
                service.exact("one", blocks=4)
            wait_for(
                "a snapshot",
                lambda: "kvevents_plane_partition_snapshot_timestamp_seconds{" in replica.get("/metrics").body.decode(),
            )
            wait_for_missing_permission(router)

        async def listen() -> None:
            async with jetstream(settings("router")) as (client, _):
                await client.subscribe("_INBOX_replica.>")
                await client.flush()
                wait_for("the refusal", lambda: "Subscription Violation" in server_of_private_inboxes.read_log())
            with pytest.raises(PlaneError):  # it receives no response
                async with jetstream(settings("router", "_INBOX")) as (client, _):
                    await require_jetstream(client)

        asyncio.run(listen())
