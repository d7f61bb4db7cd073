"""Tests of leases on real NATS servers: one holder at a time, through stops, kills, restarts and faults of servers."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cli_cases import Program
from kvevents.errors import PlaneError
from kvevents.plane import leases
from kvevents.plane.connection import open_client
from kvevents.plane.layout import LEASE_SECONDS
from kvevents.plane.leases import Lease, LeaseHolder, LeaseTimers
from nats_cases import needs_nats, server_of_module  # noqa: F401 - a fixture
from plane_cases import plane_at
from plane_lease_cases import KEY, Bucket, Clock, bucket
from tools.nats_servers import NatsServer, nats_cluster, nats_server

pytestmark = needs_nats

SHORT = 3.0
"""The duration of a lease whose expiry a test waits for: longer than a busy machine delays a process."""
WAIT = 60.0


def is_held_now(lease: Lease) -> bool:
    """Return `lease.is_held`; a type checker assumes that a property does not change between two assertions."""
    return lease.is_held


async def wait_until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WAIT):
        while not await condition():  # noqa: ASYNC110 - the test receives no event from servers
            await asyncio.sleep(0.02)


# --- holders -----------------------------------------------------------------------------------------------------------------


def test_a_holder_describes_itself() -> None:
    this_process = LeaseHolder.current()
    assert (this_process.host, this_process.pid) == (socket.gethostname(), os.getpid())
    assert str(this_process) == f"process {os.getpid()} at {socket.gethostname()}"
    assert this_process.nonce != LeaseHolder.current().nonce
    assert not this_process.has_ended()


def test_a_holder_counts_as_ended_only_if_that_is_certain() -> None:
    """A zombie has ended, and so has a process whose number is used again. Processes of other machines have never ended."""
    with Program(command=(sys.executable, "-c", "input()")) as program:
        pid = program.process.pid
        start_time = leases._process_start(pid)
        assert start_time
        other_holder = LeaseHolder("here", pid, "life", leases._machine(), start_time)
        assert not other_holder.has_ended()
        assert msgspec.structs.replace(other_holder, started=start_time - 1).has_ended()
        assert not msgspec.structs.replace(other_holder, started=0).has_ended()
        program.process.kill()
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert leases._process_start(pid) == 0
        assert other_holder.has_ended()
        program.end()
        assert other_holder.has_ended()
        assert not msgspec.structs.replace(other_holder, machine="another").has_ended()
        assert not msgspec.structs.replace(other_holder, machine="").has_ended()
    assert not LeaseHolder("here", 1, "life", leases._machine(), leases._process_start(1) or 0).has_ended()


# --- one holder --------------------------------------------------------------------------------------------------------------


async def test_a_lease_has_one_holder_until_it_is_released(server: NatsServer) -> None:
    async with bucket(server, name="one") as found:
        first, second = found.lease("a"), found.lease("b")
        assert await second.holder() is None
        assert not is_held_now(first)
        assert await first.acquire()
        assert await first.acquire(), "acquiring a held lease succeeds"
        assert not await second.acquire()
        assert not await second.acquire(within=0.1)
        assert second.rival == await second.holder() == first._own
        assert (is_held_now(first), is_held_now(second), first.lost, second.lost) == (True, False, "", "")
        revision = await found.revision()
        assert await first.renew()
        assert await found.revision() > revision
        assert not await second.renew()
        await second.release()
        assert is_held_now(first)
        await first.release()
        assert (is_held_now(first), first.lost, await first.holder()) == (False, "", None)
        assert await second.acquire()
        assert not await first.acquire()
        assert repr(second) == f"<Lease {KEY} held>"
        assert repr(first) == f"<Lease {KEY} not held>"


async def test_one_of_many_competing_processes_holds_a_lease_at_a_time(server: NatsServer) -> None:
    """Eight holders have their own connections, and each acquires the lease five times. Half of them never release it."""
    holders: list[Lease] = []
    turns = 0

    async def take_turns(lease_of_task: Lease, found: Bucket, *, gives_back: bool) -> None:
        nonlocal turns
        for _ in range(5):
            assert await lease_of_task.acquire(within=WAIT)
            assert not [other for other in holders if is_held_now(other)]
            holders.append(lease_of_task)
            assert await lease_of_task.renew()
            await asyncio.sleep(0)
            assert is_held_now(lease_of_task)
            turns += 1
            holders.remove(lease_of_task)
            if gives_back:
                await lease_of_task.release()
            else:
                await found.store.delete(KEY, last=lease_of_task._revision)
                assert not await lease_of_task.renew()
                assert lease_of_task.lost == "its entry is gone" or lease_of_task.lost.endswith("has taken it")

    async with AsyncExitStack() as stack:
        buckets = [await stack.enter_async_context(bucket(server, name="many")) for _ in range(8)]
        timers = LeaseTimers(retry_seconds=0.002)
        leases = [each.lease(str(number), timers=timers) for number, each in enumerate(buckets)]
        async with asyncio.TaskGroup() as tasks:
            for number, (lease_of_task, found) in enumerate(zip(leases, buckets, strict=True)):
                tasks.create_task(take_turns(lease_of_task, found, gives_back=number % 2 == 0))
    assert turns == 40


async def test_a_lease_that_is_not_renewed_expires(server: NatsServer) -> None:
    """It does not expire before its holder assumes so, and others can acquire it soon after."""
    async with bucket(server, name="expires", ttl=SHORT) as found:
        first, second = found.lease("a", seconds=SHORT), found.lease("b", seconds=SHORT)
        assert await first.acquire()
        assert await second.acquire(within=WAIT)
        assert not is_held_now(first)
        assert first.lost == "it could not be renewed for 3 s"
        assert not await first.renew()
        assert not await first.acquire()
        assert first.rival == second._own


async def test_a_lease_that_is_renewed_does_not_expire(server: NatsServer) -> None:
    async with bucket(server, name="kept", ttl=SHORT) as found:
        first, second = found.lease("a", seconds=SHORT), found.lease("b", seconds=SHORT)
        assert await first.acquire()
        renewing = asyncio.create_task(first.renew_until_lost())
        assert not await second.acquire(within=SHORT + 1.0)
        assert is_held_now(first)
        renewing.cancel()
        await first.release()
        # If it was being renewed just then, its newest revision is unknown, and it can only expire.
        assert await second.acquire(within=WAIT)


async def test_a_lease_can_be_taken_over_while_the_clock_of_the_servers_stands_still(server: NatsServer) -> None:
    """An entry without renewals is taken over by the clock of the process that requests it; a renewed entry never is."""
    async with bucket(server, name="still") as found:
        clock = Clock()
        first, second = found.lease("a", clock=clock), found.lease("b", clock=clock)
        assert await first.acquire()
        for _ in range(5):
            clock.now += LEASE_SECONDS - 1
            assert await first.renew()
            assert not await second.acquire()
        clock.now += LEASE_SECONDS - 0.01
        assert is_held_now(first)
        assert not await second.acquire()
        clock.now += 0.02
        assert not is_held_now(first)
        assert await second.acquire()
        assert not await first.acquire()


async def test_the_next_renewal_detects_an_entry_that_expired_too_early(server: NatsServer) -> None:
    """The server expires the entry while its holder still assumes to hold it."""
    async with bucket(server, name="forward") as found:
        first, second = found.lease("a"), found.lease("b")
        assert await first.acquire()
        await found.js.purge_stream(f"KV_{found.layout.leases}")
        assert await first.holder() is None
        assert is_held_now(first)
        assert not await first.renew()
        assert first.lost == "its entry is gone"
        assert await first.acquire()
        await found.js.purge_stream(f"KV_{found.layout.leases}")
        assert await second.acquire()
        assert not await first.renew()
        assert first.lost == "process 1 at b has taken it"
        assert first.rival == second._own
        assert not is_held_now(first)
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


# --- holders that pause or die -----------------------------------------------------------------------------------------------

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


def start_holder(server: NatsServer, name: str, seconds: float) -> Program:
    return Program(server.url, name, KEY, seconds, command=(sys.executable, "-c", HOLDER))


async def test_a_paused_holder_loses_the_lease_and_knows_it_when_it_resumes(server: NatsServer) -> None:
    async with bucket(server, name="stops", ttl=SHORT) as found:
        lease = found.lease("b", seconds=SHORT)
        with start_holder(server, "stops", SHORT) as program:
            await asyncio.to_thread(program.out.wait, "held")
            assert not await lease.acquire(within=SHORT + 1.0)
            program.process.send_signal(signal.SIGSTOP)
            assert await lease.acquire(within=WAIT)
            renewing = asyncio.create_task(lease.renew_until_lost())
            program.process.send_signal(signal.SIGCONT)
            line = await asyncio.to_thread(program.out.wait, "lost: ")
            assert line.endswith(" False")
            assert is_held_now(lease)
            renewing.cancel()


async def test_the_lease_of_a_killed_holder_on_the_same_machine_is_available_at_once(server: NatsServer) -> None:
    async with bucket(server, name="killed") as found:
        lease = found.lease("b")
        with start_holder(server, "killed", LEASE_SECONDS) as program:
            await asyncio.to_thread(program.out.wait, "held")
            assert not await lease.acquire()
            assert lease.rival
            assert lease.rival.pid == program.process.pid
            program.process.kill()
            program.process.wait(WAIT)
            assert await lease.acquire()


# --- unavailable servers -----------------------------------------------------------------------------------------------------


async def test_a_lease_survives_a_restart_of_the_server(tmp_path: Path) -> None:
    with nats_server(tmp_path) as server:
        async with bucket(server, name="restart") as found:
            first, second = found.lease("a"), found.lease("b")
            assert await first.acquire()
            renewing = asyncio.create_task(first.renew_until_lost())
            await asyncio.to_thread(server.restart)
            assert await second.holder() == first._own
            assert not await second.acquire()
            assert await first.renew()
            assert not renewing.done()
            renewing.cancel()


async def test_a_late_renewal_is_not_mistaken_for_another_holder(server: NatsServer) -> None:
    """The renewal waited in the client for the servers to return. It changes the entry between reading it and taking it."""
    async with bucket(server, name="late") as found:
        lease = found.lease()
        assert await lease.acquire()
        before = await found.store.get(KEY)
        await found.store.update(KEY, before.value, before.revision)
        now = lease._clock()
        lease._clock = lambda: now + 2 * lease.seconds  # type: ignore[misc]
        assert not is_held_now(lease)
        read = lease._read
        reads = iter([leases._Entry(before.revision, lease._own)])

        async def stale() -> leases._Entry | None:
            return next(reads, None) or await read()

        lease._read = stale  # type: ignore[method-assign]
        assert await lease.acquire()
        assert is_held_now(lease)


async def test_a_lease_that_cannot_be_renewed_is_lost_by_the_clock_of_its_holder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with nats_server(tmp_path) as server:
        async with bucket(server, name="away") as found:
            lease = found.lease(seconds=1.0)
            assert await lease.acquire()
            began = asyncio.get_running_loop().time()
            await asyncio.to_thread(server.kill)
            assert await lease.renew_until_lost() == "it could not be renewed for 1 s"
            assert asyncio.get_running_loop().time() - began < WAIT
            assert not is_held_now(lease)
            await asyncio.to_thread(server.start)
            assert await lease.acquire(within=WAIT), "its own entry still exists"
            assert lease.lost == ""


async def test_servers_that_do_not_answer_are_an_error_and_the_lease_stays_held(tmp_path: Path) -> None:
    """Requests that timed out may still have been processed. A holder recognises its own renewal, and its own new entry."""
    timers = LeaseTimers(answer_seconds=0.2)
    with nats_server(tmp_path) as server:
        async with bucket(server, name="silent") as found:
            lease, other = found.lease("a", timers=timers), found.lease("b", timers=timers)
            assert await lease.acquire()
            revision = await found.revision()
            server.pause()
            with pytest.raises(PlaneError, match=rf"writing lease {KEY}: no answer in 0.2 s") as raised:
                await lease.renew()
            assert raised.value.fault == "timeout"
            with pytest.raises(PlaneError, match="reading lease"):
                await lease.holder()
            with pytest.raises(PlaneError, match="no answer"):
                await other.acquire()
            assert is_held_now(lease)
            server.resume()
            for each in (lease, other):
                vars(each)["_timers"] = LeaseTimers(answer_seconds=WAIT)
            await wait_until(lambda: has_newer_revision(found, revision))
            assert await lease.renew()
            assert not await other.acquire()
            await lease.release()
            assert await other.acquire()


async def has_newer_revision(found: Bucket, revision: int) -> bool:
    return await found.revision() > revision


async def test_a_request_can_be_cancelled_while_its_answer_arrives(server: NatsServer) -> None:
    """The task is cancelled in the same turn of the event loop in which the answer arrives."""
    async with open_client(plane_at(server.url), name="tests") as client:

        async def answer(message: Any) -> None:
            await message.respond(b"answer")

        await client.subscribe("echo", cb=answer)
        assert (await client.request("echo")).data == b"answer"
        query = asyncio.create_task(client.request("echo", timeout=WAIT))
        while not client._resp_map:  # noqa: ASYNC110 - the client has no event for it
            await asyncio.sleep(0)
        client._resp_map[next(iter(client._resp_map))].add_done_callback(lambda _: query.cancel())
        with pytest.raises(asyncio.CancelledError):
            await query


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


async def test_a_lease_survives_the_loss_of_the_leader_of_its_bucket(tmp_path: Path) -> None:
    """The bucket is in a cluster of three, and no other process acquires the lease meanwhile."""
    with nats_cluster(tmp_path) as cluster:
        async with bucket(*cluster.nodes.values(), name="led", ttl=LEASE_SECONDS, copies=3) as found:
            first, second = found.lease("a"), found.lease("b")
            assert await first.acquire(within=WAIT), "a new bucket may have no leader yet"
            renewing = asyncio.create_task(first.renew_until_lost())
            competing = asyncio.create_task(second.acquire(within=600.0))
            stream = f"KV_{found.layout.leases}"
            await asyncio.to_thread(lambda: cluster.kill(cluster.leader_of(stream)))
            await wait_until(lambda: can_renew(first))
            assert is_held_now(first)
            assert not renewing.done()
            assert not competing.done()
            renewing.cancel()
            await first.release()
            async with asyncio.timeout(WAIT):
                assert await competing


async def can_renew(lease: Lease) -> bool:
    try:
        return await lease.renew()
    except PlaneError:
        return False
