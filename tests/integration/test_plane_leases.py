"""Leases on real NATS servers have one holder at a time, through stops, kills, restarts and faults of servers."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_cases import Program
from kvevents.errors import PlaneError
from kvevents.plane import leases
from kvevents.plane.connection import open_client
from kvevents.plane.layout import LEASE_SECONDS
from kvevents.plane.leases import Lease, LeaseHolder, LeaseTimers, lease_key, lease_name
from nats_servers import NatsServer, nats_cluster, nats_server, needs_nats, server_of_module  # noqa: F401 - a fixture
from plane_cases import plane_at
from plane_lease_cases import KEY, Bucket, Clock, bucket

pytestmark = needs_nats

SHORT = 3.0
"""Of a lease that a test waits for: longer than a busy machine keeps a process waiting."""
WAIT = 20.0


def held(lease: Lease) -> bool:
    """A type checker would not look twice at a property."""
    return lease.is_held


async def eventually(look: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WAIT):
        while not await look():  # noqa: ASYNC110 - what servers do has no event here
            await asyncio.sleep(0.02)


# --- keys and holders --------------------------------------------------------------------------------------------------------


@given(st.lists(st.text(), min_size=2, max_size=2, unique=True))
def test_names_have_keys_of_their_own_that_servers_take(names: list[str]) -> None:
    first, second = (lease_key("bridge", name) for name in names)
    assert first != second
    for key, name in ((first, names[0]), (second, names[1])):
        assert re.fullmatch(r"bridge\.[-=A-Za-z0-9_]*", key), key
        assert name == "" or re.fullmatch(r"[-/_=.a-zA-Z0-9]+", key)
        assert lease_name(key) == name


def test_a_key_can_be_read() -> None:
    assert lease_key("bridge", "node-7") == "bridge.node-7"
    assert lease_key("bridge", "node-7.example") == "bridge.node-7=2Eexample"


def test_a_holder_describes_itself() -> None:
    here = LeaseHolder.current()
    assert (here.host, here.pid) == (socket.gethostname(), os.getpid())
    assert str(here) == f"process {os.getpid()} at {socket.gethostname()}"
    assert here.nonce != LeaseHolder.current().nonce
    assert not here.has_ended()


def test_only_what_is_known_to_have_ended_has_ended() -> None:
    """A process that was not buried has; one that has the number of an earlier one, too; those of other machines never."""
    with Program(command=(sys.executable, "-c", "input()")) as program:
        pid = program.process.pid
        born = leases._process_start(pid)
        assert born
        there = LeaseHolder("here", pid, "life", leases._machine(), born)
        assert not there.has_ended()
        assert msgspec.structs.replace(there, started=born - 1).has_ended()
        assert not msgspec.structs.replace(there, started=0).has_ended()
        program.process.kill()
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert leases._process_start(pid) == 0
        assert there.has_ended()
        program.end()
        assert there.has_ended()
        assert not msgspec.structs.replace(there, machine="another").has_ended()
        assert not msgspec.structs.replace(there, machine="").has_ended()
    assert not LeaseHolder("here", 1, "life", leases._machine(), leases._process_start(1) or 0).has_ended()


# --- one holder --------------------------------------------------------------------------------------------------------------


async def test_one_has_it_until_it_gives_it_back(server: NatsServer) -> None:
    async with bucket(server, name="one") as found:
        first, second = found.lease("a"), found.lease("b")
        assert await second.holder() is None
        assert not held(first)
        assert await first.acquire()
        assert await first.acquire(), "having it is enough"
        assert not await second.acquire()
        assert not await second.acquire(within=0.1)
        assert second.rival == await second.holder() == first._own
        assert (held(first), held(second), first.lost, second.lost) == (True, False, "", "")
        revision = await found.revision()
        assert await first.renew()
        assert await found.revision() > revision
        assert not await second.renew()
        await second.release()
        assert held(first)
        await first.release()
        assert (held(first), first.lost, await first.holder()) == (False, "", None)
        assert await second.acquire()
        assert not await first.acquire()
        assert repr(second) == f"<Lease {KEY} held>"
        assert repr(first) == f"<Lease {KEY} not held>"


async def test_of_many_processes_one_has_it_at_a_time(server: NatsServer) -> None:
    """Eight on connections of their own, each until it has had it five times; half of them never give it back."""
    having: list[Lease] = []
    turns = 0

    async def take_turns(mine: Lease, found: Bucket, *, gives_back: bool) -> None:
        nonlocal turns
        for _ in range(5):
            assert await mine.acquire(within=WAIT)
            assert not [other for other in having if held(other)]
            having.append(mine)
            assert await mine.renew()
            await asyncio.sleep(0)
            assert held(mine)
            turns += 1
            having.remove(mine)
            if gives_back:
                await mine.release()
            else:
                await found.store.delete(KEY, last=mine._revision)
                assert not await mine.renew()
                assert mine.lost == "its entry is gone" or mine.lost.endswith("has taken it")

    async with AsyncExitStack() as stack:
        buckets = [await stack.enter_async_context(bucket(server, name="many")) for _ in range(8)]
        timers = LeaseTimers(retry_seconds=0.002)
        leases = [each.lease(str(number), timers=timers) for number, each in enumerate(buckets)]
        async with asyncio.TaskGroup() as tasks:
            for number, (mine, found) in enumerate(zip(leases, buckets, strict=True)):
                tasks.create_task(take_turns(mine, found, gives_back=number % 2 == 0))
    assert turns == 40


async def test_what_is_not_renewed_expires(server: NatsServer) -> None:
    """Not before its holder believes so, and for others soon after."""
    async with bucket(server, name="expires", ttl=SHORT) as found:
        first, second = found.lease("a", seconds=SHORT), found.lease("b", seconds=SHORT)
        assert await first.acquire()
        assert await second.acquire(within=WAIT)
        assert not held(first)
        assert first.lost == "it could not be renewed for 3 s"
        assert not await first.renew()
        assert not await first.acquire()
        assert first.rival == second._own


async def test_what_is_renewed_does_not_expire(server: NatsServer) -> None:
    async with bucket(server, name="kept", ttl=SHORT) as found:
        first, second = found.lease("a", seconds=SHORT), found.lease("b", seconds=SHORT)
        assert await first.acquire()
        keeping = asyncio.create_task(first.renew_until_lost())
        assert not await second.acquire(within=SHORT + 1.0)
        assert held(first)
        keeping.cancel()
        await first.release()
        # Where it was being renewed just then, its newest revision is not known, and it can only expire.
        assert await second.acquire(within=WAIT)


async def test_a_stopped_clock_of_the_servers_makes_no_holder_wait(server: NatsServer) -> None:
    """An entry without renewals is taken over by the time of the process that wants it; a renewed one never."""
    async with bucket(server, name="still") as found:
        clock = Clock()
        first, second = found.lease("a", clock=clock), found.lease("b", clock=clock)
        assert await first.acquire()
        for _ in range(5):
            clock.now += LEASE_SECONDS - 1
            assert await first.renew()
            assert not await second.acquire()
        clock.now += LEASE_SECONDS - 0.01
        assert held(first)
        assert not await second.acquire()
        clock.now += 0.02
        assert not held(first)
        assert await second.acquire()
        assert not await first.acquire()


async def test_a_clock_of_the_servers_that_was_set_forward_is_seen_by_the_next_renewal(server: NatsServer) -> None:
    """It lets the entry expire while its holder believes in it."""
    async with bucket(server, name="forward") as found:
        first, second = found.lease("a"), found.lease("b")
        assert await first.acquire()
        await found.js.purge_stream(f"KV_{found.layout.leases}")
        assert await first.holder() is None
        assert held(first)
        assert not await first.renew()
        assert first.lost == "its entry is gone"
        assert await first.acquire()
        await found.js.purge_stream(f"KV_{found.layout.leases}")
        assert await second.acquire()
        assert not await first.renew()
        assert first.lost == "process 1 at b has taken it"
        assert first.rival == second._own
        assert not held(first)
        assert repr(first) == f"<Lease {KEY} process 1 at b has taken it>"


async def test_an_entry_of_an_unknown_holder_is_respected_and_expires(server: NatsServer) -> None:
    async with bucket(server, name="unknown") as found:
        clock = Clock()
        lease = found.lease(clock=clock)
        await found.store.put(KEY, b"\xff nonsense")
        assert not await lease.acquire()
        assert str(lease.rival) == "process 0 at an unknown place"
        clock.now += LEASE_SECONDS
        assert await lease.acquire()


# --- holders that stop and die -----------------------------------------------------------------------------------------------

HOLDER = """
import asyncio, sys
from kvevents.plane.connection import open_client
from kvevents.plane.layout import Layout
from kvevents.plane.leases import Lease, LeaseHolder
from kvevents.plane.settings import PlaneSettings

async def main(url, name, key, seconds):
    async with open_client(PlaneSettings(servers=(url,)), name="holder") as client:
        lease = Lease(client.jetstream(), Layout(name, 1), key, LeaseHolder.current(), seconds=float(seconds))
        assert await lease.acquire()
        print("held", flush=True)
        why = await lease.renew_until_lost()
        print(f"lost: {why} {lease.is_held}", flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


def holding(server: NatsServer, name: str, seconds: float) -> Program:
    return Program(server.url, name, KEY, seconds, command=(sys.executable, "-c", HOLDER))


async def test_a_holder_that_stops_loses_it_and_knows_when_it_goes_on(server: NatsServer) -> None:
    async with bucket(server, name="stops", ttl=SHORT) as found:
        lease = found.lease("b", seconds=SHORT)
        with holding(server, "stops", SHORT) as program:
            await asyncio.to_thread(program.out.wait, "held")
            assert not await lease.acquire(within=SHORT + 1.0)
            program.process.send_signal(signal.SIGSTOP)
            assert await lease.acquire(within=WAIT)
            keeping = asyncio.create_task(lease.renew_until_lost())
            program.process.send_signal(signal.SIGCONT)
            line = await asyncio.to_thread(program.out.wait, "lost: ")
            assert line.endswith(" False")
            assert held(lease)
            keeping.cancel()


async def test_a_killed_holder_of_this_machine_makes_no_other_wait(server: NatsServer) -> None:
    async with bucket(server, name="killed") as found:
        lease = found.lease("b")
        with holding(server, "killed", LEASE_SECONDS) as program:
            await asyncio.to_thread(program.out.wait, "held")
            assert not await lease.acquire()
            assert lease.rival
            assert lease.rival.pid == program.process.pid
            program.process.kill()
            program.process.wait(WAIT)
            assert await lease.acquire()


# --- servers that are away ---------------------------------------------------------------------------------------------------


async def test_a_lease_outlives_a_server_that_is_killed_and_comes_back(tmp_path: Path) -> None:
    with nats_server(tmp_path) as server:
        async with bucket(server, name="restart") as found:
            first, second = found.lease("a"), found.lease("b")
            assert await first.acquire()
            keeping = asyncio.create_task(first.renew_until_lost())
            await asyncio.to_thread(server.restart)
            assert await second.holder() == first._own
            assert not await second.acquire()
            assert await first.renew()
            assert not keeping.done()
            keeping.cancel()


async def test_a_late_renewal_is_not_taken_for_another_holder(server: NatsServer) -> None:
    """As one that waited in the client for the servers to come back: it changes the entry between reading and taking it."""
    async with bucket(server, name="late") as found:
        lease = found.lease()
        assert await lease.acquire()
        before = await found.store.get(KEY)
        await found.store.update(KEY, before.value, before.revision)
        now = lease._clock()
        lease._clock = lambda: now + 2 * lease.seconds  # type: ignore[misc]
        assert not held(lease)
        read = lease._read
        reads = iter([leases._Entry(before.revision, lease._own)])

        async def stale() -> leases._Entry | None:
            return next(reads, None) or await read()

        lease._read = stale  # type: ignore[method-assign]
        assert await lease.acquire()
        assert held(lease)


async def test_what_cannot_be_renewed_is_lost_by_the_own_clock(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with nats_server(tmp_path) as server:
        async with bucket(server, name="away") as found:
            lease = found.lease(seconds=1.0)
            assert await lease.acquire()
            began = asyncio.get_running_loop().time()
            await asyncio.to_thread(server.kill)
            assert await lease.renew_until_lost() == "it could not be renewed for 1 s"
            assert asyncio.get_running_loop().time() - began < WAIT
            assert not held(lease)
            await asyncio.to_thread(server.start)
            assert await lease.acquire(within=WAIT), "its own entry is there still"
            assert lease.lost == ""


async def test_servers_that_do_not_answer_are_reported_and_change_nothing(tmp_path: Path) -> None:
    """What was sent meanwhile may have come: a renewal that did is known as the own one, and so is an entry that was made."""
    timers = LeaseTimers(answer_seconds=0.2)
    with nats_server(tmp_path) as server:
        async with bucket(server, name="silent") as found:
            lease, other = found.lease("a", timers=timers), found.lease("b", timers=timers)
            assert await lease.acquire()
            revision = await found.revision()
            server.pause()
            with pytest.raises(PlaneError, match=r"writing lease replica.node: no answer in 0.2 s") as raised:
                await lease.renew()
            assert raised.value.fault == "timeout"
            with pytest.raises(PlaneError, match="reading lease"):
                await lease.holder()
            with pytest.raises(PlaneError, match="no answer"):
                await other.acquire()
            assert held(lease)
            server.resume()
            for each in (lease, other):
                vars(each)["_timers"] = LeaseTimers(answer_seconds=WAIT)
            await eventually(lambda: is_beyond(found, revision))
            assert await lease.renew()
            assert not await other.acquire()
            await lease.release()
            assert await other.acquire()


async def is_beyond(found: Bucket, revision: int) -> bool:
    return await found.revision() > revision


async def test_cancelling_while_an_answer_arrives_is_cancelling(server: NatsServer) -> None:
    """In the very turn of the event loop in which it comes."""
    async with open_client(plane_at(server.url), name="tests") as client:

        async def answer(message: Any) -> None:
            await message.respond(b"answer")

        await client.subscribe("echo", cb=answer)
        assert (await client.request("echo")).data == b"answer"
        asking = asyncio.create_task(client.request("echo", timeout=WAIT))
        while not client._resp_map:  # noqa: ASYNC110 - the task has no event for it
            await asyncio.sleep(0)
        client._resp_map[next(iter(client._resp_map))].add_done_callback(lambda _: asking.cancel())
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_a_deleted_bucket_is_reported(server: NatsServer) -> None:
    async with bucket(server, name="deleted") as found:
        lease, late = found.lease(), found.lease()
        assert await lease.acquire()
        await found.js.delete_key_value(found.layout.leases)
        with pytest.raises(PlaneError) as raised:
            await lease.renew()
        assert raised.value.fault == "away"
        with pytest.raises(PlaneError) as raised:
            await late.acquire()
        assert raised.value.fault == "missing"


async def test_a_lease_outlives_the_leader_of_its_bucket(tmp_path: Path) -> None:
    """In a cluster of three; no other process gets it meanwhile."""
    with nats_cluster(tmp_path) as cluster:
        async with bucket(*cluster.nodes.values(), name="led", ttl=LEASE_SECONDS, copies=3) as found:
            first, second = found.lease("a"), found.lease("b")
            assert await first.acquire(within=WAIT), "a bucket that is new may have no leader yet"
            keeping = asyncio.create_task(first.renew_until_lost())
            competing = asyncio.create_task(second.acquire(within=600.0))
            stream = f"KV_{found.layout.leases}"
            await asyncio.to_thread(lambda: cluster.kill(cluster.leader_of(stream)))
            await eventually(lambda: renewed(first))
            assert held(first)
            assert not keeping.done()
            assert not competing.done()
            keeping.cancel()
            await first.release()
            async with asyncio.timeout(WAIT):
                assert await competing


async def renewed(lease: Lease) -> bool:
    try:
        return await lease.renew()
    except PlaneError:
        return False
