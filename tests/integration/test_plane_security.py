"""What each role may do with a plane: a server with the configuration of `deploy/nats`, see docs/guides/plane-security.md.

TLS with certificates on both ends, NKeys, and users of an operator's by credentials, with the same permissions.
"""

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
from kvevents.plane.connection import open_client, require_jetstream
from kvevents.plane.layout import Layout, create_plane
from kvevents.plane.nats_client import PlaneClient
from kvevents.plane.nats_errors import map_errors
from kvevents.plane.records import decode_page
from kvevents.plane.settings import PlaneSettings
from nats_logins import Key, Operator
from nats_servers import NatsServer, nats_server, needs_nats
from plane_cases import bridging
from service_cases import MODEL, Service, engine, serving, until
from service_replica_cases import watch_of

pytestmark = needs_nats
DEPLOY: Final = paths.ROOT / "deploy" / "nats"
ROLES: Final = ("router", "replica", "bridge", "operator")
KEYS: Final = {role: Key.new() for role in (*ROLES, "stranger")}
LAYOUT: Final = Layout("default", 8)
KEPT: Final = f"KV_{LAYOUT.bucket}", f"KV_{LAYOUT.leases}", f"OBJ_{LAYOUT.snapshots}"


def permissions() -> dict[str, dict[str, dict[str, list[str]]]]:
    """`permissions.conf` by role: what is behind each name is JSON."""
    text = re.sub(r"^#.*$", "", (DEPLOY / "permissions.conf").read_text(), flags=re.MULTILINE)
    found = re.findall(r"^KVEVENTS_(\w+): (\{.*?^\})", text, re.MULTILINE | re.DOTALL)
    return {name.lower(): json.loads(value) for name, value in found}


class SecureServer(NatsServer):
    """A server whose configuration is `deploy/nats/server.conf`, with ports, keys and files of the test's."""

    def __init__(self, home: Path, certificates: Path) -> None:
        super().__init__(home)
        self._certificates = certificates

    def _write(self) -> None:
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
    """Of `kvevents serve`."""
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
        yield client, client.jetstream(timeout=3)


async def is_denied(what: Awaitable[Any]) -> bool:
    """Whether the server does not permit it; what it permits, and refuses for another reason, is not denied."""
    try:
        with map_errors("trying"):
            await what
    except PlaneError as error:
        return error.fault == "denied"
    return False


# --- logins -----------------------------------------------------------------------------------------------------------------


async def test_a_stranger_gets_nothing(login: Login) -> None:
    """With a certificate of the authority and a key that no configuration lists."""
    with pytest.raises(PlaneError) as caught:
        async with jetstream(login("stranger")):
            pass
    assert caught.value.fault == "denied"


def test_a_replica_that_is_not_let_in_says_so_and_is_not_ready(login: Login) -> None:
    with serving(*flags(login("stranger"), "x")) as service:
        until("the reason", lambda: service.log_lines("it rejects this login"))
        assert service.get("/readyz").status == 503
        assert "kvevents_plane_readable 0" in service.get("/metrics").body.decode()


async def test_a_key_without_a_certificate_gets_nothing(login: Login, certificates: Path) -> None:
    settings = PlaneSettings(
        servers=login("operator").servers, nkey=str(certificates / "operator.nk"), tls_ca=str(certificates / "ca.pem")
    )
    with pytest.raises(PlaneError) as caught:
        async with jetstream(settings):
            pass
    assert caught.value.fault in {"tls", "away"}


# --- what each role may do ---------------------------------------------------------------------------------------------------


def test_a_replica_a_router_and_a_bridge_do_all_they_have_to(login: Login) -> None:
    """Under the permissions of their roles. The replica takes snapshots and purges what they stand for; the router, which may
    write nothing, begins with such a snapshot, follows, and is EXACT."""
    with (
        engine() as one,
        bridging(login("bridge"), watch_of("one", one)),
        serving(*flags(login("replica"), "a"), "--snapshot-seconds", "0.3") as replica,
    ):
        one.store(range(64))
        replica.exact("one", blocks=4)
        until("two snapshots, and a purge", lambda: first_pages(login("operator")) > LAYOUT.partitions)
        assert not replica.log_lines("permission")
        with serving(*flags(login("router"), "b")) as router:
            router.exact("one", blocks=4)
            router.says("begun with snapshot")
            one.store(range(100, 132))
            for service in (replica, router):
                service.exact("one", blocks=6)
            only_reads(router)


def test_the_program_bridge_needs_no_more_than_its_role(login: Login) -> None:
    """With the lease of its name, which no other role can take."""
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


def only_reads(router: Service) -> None:
    until("the missing permission", lambda: router.log_lines("this replica publishes no digests"))
    assert len(router.log_lines("this replica publishes no digests")) == 1
    router.says("must not publish to '\\$KV.KVEVENTS_default_leases.digest.\\w+'; grant this user the permission")


def test_a_router_alone_says_once_that_it_takes_no_snapshots(login: Login) -> None:
    """If no other process takes any, it tries again and again, and its metrics show it; otherwise it goes on."""
    with (
        engine() as one,
        bridging(login("bridge"), watch_of("one", one)),
        serving(*flags(login("router"), "c"), "--snapshot-seconds", "0.1") as router,
    ):
        one.store(range(64))
        router.exact("one", blocks=4)
        failing = "kvevents_plane_snapshot_failed 1"
        until("a refused snapshot", lambda: failing in router.get("/metrics").body.decode())
        only_reads(router)
        one.store(range(100, 132))
        router.exact("one", blocks=6)
        assert (
            len(
                router.log_lines(
                    "no snapshot was written: .*must not publish to '\\$KV.KVEVENTS_default_leases.lease.snapshot.\\d'"
                )
            )
            == 1
        )
        assert len(router.log_lines("no snapshot was written")) == 1


def first_pages(settings: PlaneSettings) -> int:
    """Sum of the numbers of the partitions' oldest pages: as many as there are partitions before anything is purged."""

    async def ask() -> int:
        async with jetstream(settings) as (_, js):
            return sum(
                [(await js.stream_info(LAYOUT.stream(partition))).state.first_seq for partition in range(LAYOUT.partitions)]
            )

    return asyncio.run(ask())


async def plane_of(login: Login) -> None:
    settings = login("bridge")
    async with jetstream(settings) as (_, js):
        await create_plane(js, settings)


WRITES: Final[dict[str, Callable[[JetStreamContext], Awaitable[Any]]]] = {
    "a page": lambda js: js.publish(LAYOUT.subject(0), b"page"),
    "purge a partition": lambda js: js.purge_stream(LAYOUT.stream(0), seq=1),
    "purge a bucket": lambda js: js.purge_stream(KEPT[1]),
    "delete a partition": lambda js: js.delete_stream("FOREIGN"),
    "delete a page": lambda js: js.delete_msg(LAYOUT.stream(0), 1 << 40),
    "make a stream": lambda js: js.add_stream(name="FOREIGN", subjects=["foreign"]),
    "change a partition": lambda js: js.update_stream(name="FOREIGN", subjects=["foreign"]),
    "a digest": lambda js: js.publish(f"$KV.{LAYOUT.leases}.digest.x", b""),
    "a snapshot's lease": lambda js: js.publish(f"$KV.{LAYOUT.leases}.lease.snapshot.0", b""),
    "a replica's name": lambda js: js.publish(f"$KV.{LAYOUT.leases}.replica.x", b""),
    "a share": lambda js: js.publish(f"$KV.{LAYOUT.leases}.shard.x", b""),
    "which snapshot counts": lambda js: js.publish(f"$KV.{LAYOUT.bucket}.snapshot.0", b"{}"),
    "a part of a snapshot": lambda js: js.publish(f"$O.{LAYOUT.snapshots}.C.x", b""),
    "remove a snapshot's parts": lambda js: js.purge_stream(KEPT[2], subject="foreign"),
    "something else": lambda js: js.publish("anything", b""),
}
"""What can be done to a plane beside reading it."""
MAY: Final = {
    "router": set[str](),
    "replica": {
        *("purge a partition", "a digest", "a snapshot's lease", "which snapshot counts", "a part of a snapshot"),
        *("remove a snapshot's parts", "a replica's name", "a share"),
    },
    "bridge": {"a page", "make a stream"},
    "operator": WRITES.keys() - {"a page", "something else"},
}


@pytest.mark.parametrize("role", ROLES)
async def test_what_a_role_may_write(login: Login, role: str) -> None:
    """Just that: all else the server refuses, whatever would become of it."""
    await plane_of(login)
    allowed = set()
    async with jetstream(login(role)) as (_, js):
        for name, write in WRITES.items():
            if not await is_denied(write(js)):
                allowed.add(name)
    assert allowed == MAY[role]


@pytest.mark.parametrize("role", ROLES)
async def test_every_role_reads(login: Login, role: str) -> None:
    """It listens to nothing else: a page that arrives belongs to its own subscriptions."""
    await plane_of(login)
    async with jetstream(login(role)) as (client, js):
        await require_jetstream(client)
        assert (await js.stream_info(LAYOUT.stream(0))).config.name == LAYOUT.stream(0)
        overheard: list[Any] = []

        async def overhear(message: Any) -> None:
            overheard.append(message)

        await client.subscribe(LAYOUT.subject(0), cb=overhear)
        async with jetstream(login("bridge")) as (_, writing):
            await writing.publish(LAYOUT.subject(0), b"page")
        await client.flush()
        assert overheard == []


# --- what permissions do not stop --------------------------------------------------------------------------------------------


async def test_any_requester_can_have_the_answer_put_into_a_partition(login: Login) -> None:
    """Servers look at the subject of a request, not at where its answer is to go, so partitions are not proof against the
    plane's own users. An answer is not a page, and readers ignore it."""
    await plane_of(login)
    async with jetstream(login("router")) as (client, js):
        await client.publish("$JS.API.INFO", b"", reply=LAYOUT.subject(0))
        await js.stream_info(LAYOUT.stream(0))
        await until_async(lambda: last_page(js), 1)
        found = await js.get_msg(LAYOUT.stream(0), 1)
    assert found.data is not None
    assert decode_page(found.data) is None


async def test_a_writer_of_digests_can_have_one_delivered_into_a_partition(login: Login) -> None:
    """By a consumer that delivers there. So a replica is trusted with the log as a bridge is; a router has
    nothing to deliver."""
    await plane_of(login)
    async with jetstream(login("replica")) as (_, js):
        await js.publish(f"$KV.{LAYOUT.leases}.digest.x", b"whatever it likes")
        await js.add_consumer(KEPT[1], deliver_subject=LAYOUT.subject(0), ack_policy="none")
        await until_async(lambda: last_page(js), 1)
        found = await js.get_msg(LAYOUT.stream(0), 1)
    assert found.data == b"whatever it likes"


def test_pages_that_a_router_has_delivered_into_another_partition_mean_nothing(login: Login) -> None:
    """The server refuses them where they do not fit, by the number in their header; those that it takes name another
    partition."""

    async def deliver(partition: int) -> None:
        other = (partition + 1) % LAYOUT.partitions
        async with jetstream(login("router")) as (_, js):
            await js.add_consumer(LAYOUT.stream(partition), deliver_subject=LAYOUT.subject(other), ack_policy="none")
            data = (await js.get_msg(LAYOUT.stream(partition), 1)).data
        async with jetstream(login("bridge")) as (_, js):  # as it would come without the header
            assert data is not None
            await js.publish(LAYOUT.subject(other), data)

    with engine() as one, bridging(login("bridge"), watch_of("one", one)) as bridge:
        with serving(*flags(login("router"), "a")) as router:
            one.store(range(64))
            router.exact("one", blocks=4)
            asyncio.run(deliver(LAYOUT.partition_of(watch_of("one", one).key[0])))
            one.store(range(100, 132))
            router.exact("one", blocks=6)
        with serving(*flags(login("router"), "b")) as router:
            router.exact("one", blocks=6)
        assert bridge.status().invalid_records == 0


async def last_page(js: JetStreamContext) -> int:
    return (await js.stream_info(LAYOUT.stream(0))).state.last_seq


async def until_async(look: Callable[[], Awaitable[int]], wanted: int) -> None:
    async with asyncio.timeout(20):
        while await look() < wanted:  # noqa: ASYNC110 - of a server
            await asyncio.sleep(0.01)


# --- the file itself ---------------------------------------------------------------------------------------------------------


def test_the_test_names_all_that_is_permitted() -> None:
    """Each pattern of `permissions.conf` is a way of reading, or one of `WRITES` proves what it is for."""
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
    """Where accounts and users are an operator's JWTs, permissions are in those; the roles are the same."""
    operator, roles = Operator(), permissions()

    def settings(role: str) -> PlaneSettings:
        path = operator.credentials(tmp_path / f"{role}.creds", role, roles[role])
        return PlaneSettings(servers=(operated.url,), partition_bytes=64 << 20, credentials=str(path))

    with nats_server(tmp_path / "nats", **operator.options) as operated, engine() as one:
        with (
            bridging(settings("bridge"), watch_of("one", one)),
            serving(*flags(settings("replica"), "a")) as replica,
            serving(*flags(settings("router"), "b")) as router,
        ):
            one.store(range(64))
            for service in (replica, router):
                service.exact("one", blocks=4)
            only_reads(router)

        async def try_to_write() -> None:
            for role in ("router", "replica"):
                async with jetstream(settings(role)) as (_, js):
                    assert await is_denied(js.publish(LAYOUT.subject(0), b"page"))

        asyncio.run(try_to_write())


# --- inboxes of their own ----------------------------------------------------------------------------------------------------


def test_users_with_inboxes_of_their_own(tmp_path: Path) -> None:
    """Each has an inbox prefix that its permissions name: all do what they have to, and receive nothing of the others."""
    operator, roles = Operator(), permissions()

    def settings(role: str, prefix: str | None = None) -> PlaneSettings:
        own = f"_INBOX_{role}"
        may = {**roles[role], "subscribe": {"allow": [f"{own}.>"]}}
        path = operator.credentials(tmp_path / f"{role}.creds", role, may)
        return PlaneSettings(
            servers=(private.url,), partition_bytes=64 << 20, credentials=str(path), inbox_prefix=prefix or own
        )

    with nats_server(tmp_path / "nats", **operator.options) as private, engine() as one:
        with (
            bridging(settings("bridge"), watch_of("one", one)),
            serving(*flags(settings("replica"), "a"), "--snapshot-seconds", "0.3") as replica,
            serving(*flags(settings("router"), "b")) as router,
        ):
            one.store(range(64))
            for service in (replica, router):
                service.exact("one", blocks=4)
            until(
                "a snapshot",
                lambda: "kvevents_plane_partition_snapshot_timestamp_seconds{" in replica.get("/metrics").body.decode(),
            )
            only_reads(router)

        async def listen() -> None:
            async with jetstream(settings("router")) as (client, _):
                await client.subscribe("_INBOX_replica.>")
                await client.flush()
                until("the refusal", lambda: "Subscription Violation" in private.said())
            with pytest.raises(PlaneError):  # it receives no answer
                async with jetstream(settings("router", "_INBOX")) as (client, _):
                    await require_jetstream(client)

        asyncio.run(listen())
