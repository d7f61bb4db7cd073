"""Faults of a round (`FAULTS`), by the names that the report uses."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

import nats

from tests.system.chaos_kit import faults
from tests.system.chaos_kit.faults import TargetT, always, draw_seed, refuse
from tests.system.chaos_kit.parts import Leg, Part
from tests.system.chaos_kit.redirecting_proxy import RedirectingProxy
from tools.nats_servers import NatsServer

if TYPE_CHECKING:
    from tests.system.plane_chaos.stage import PlaneEngine, Stage


@dataclass(frozen=True, slots=True)
class Fault(faults.Fault[TargetT]):
    """A fault, how long it lasts, and how frequent it is."""

    seconds: tuple[float, float] = (0.1, 1.5)
    """Shortest and longest duration, if it has an end."""
    weight: int = 4


# --- targets -----------------------------------------------------------------------------------------------------------------


def find_stage(stage: Stage, _: int) -> list[Stage]:
    return [stage]


def find_bridge(stage: Stage, number: int) -> list[Part]:
    return [stage.bridges[number]]


def find_bridge_number(stage: Stage, number: int) -> list[tuple[Stage, int]]:
    return [(stage, number)]


def find_replica(stage: Stage, number: int) -> list[Part]:
    return [stage.replicas[number]]


def find_server(stage: Stage, number: int) -> list[NatsServer]:
    return [stage.servers[number]]


def find_engine(stage: Stage, number: int) -> list[PlaneEngine]:
    return [stage.engines[number]]


def find_partition(stage: Stage, number: int) -> list[tuple[Stage, int]]:
    return [(stage, number)]


def find_proxies(stage: Stage, number: int) -> list[RedirectingProxy]:
    return stage.legs[number].proxies


def find_leg(stage: Stage, number: int) -> list[Leg]:
    return [stage.legs[number]]


# --- faults ------------------------------------------------------------------------------------------------------------------


def _drop(leg: Leg, random: Random) -> None:
    assert leg.live is not None
    leg.live.drop(0.2, seed=draw_seed(random))


def _miss_incarnation(place: tuple[Stage, int]) -> None:
    """Stop a bridge, then start the next incarnation of an engine."""
    stage, number = place
    stage.bridges[number].stop()
    stage.find_missed_engine(number).restart()


def _end_missed_incarnation(place: tuple[Stage, int]) -> None:
    """Start a further incarnation and kill the bridge that has written the missed one, then resume the stopped bridge."""
    stage, number = place
    stage.find_missed_engine(number).restart()
    stage.bridges[(number + 1) % len(stage.bridges)].kill()
    stage.bridges[number].resume()


def _copy_servers(stage: Stage) -> None:
    """Copy the files of all servers, for `_lose_pages`. The servers are restarted, so that each copy is complete."""
    number = stage.counted["copies of servers"]
    stage.counted["copies of servers"] += 1
    copies = {node.name: stage.folder / f"{node.name}-{number}" for node in stage.servers}
    for node in stage.servers:
        node.stop()
    for node in stage.servers:
        shutil.copytree(node.store, copies[node.name])
        node.launch()
    stage.copies.append(copies)


def _lose_pages(stage: Stage) -> None:
    """Return all servers to their oldest copy, so that they lose what they have acknowledged since."""
    copies = stage.copies.pop(0)
    for node in stage.servers:
        node.replace_store(copies[node.name])
    for node in stage.servers:
        node.launch()


def _damage(change: Callable[[Path, Random], None]) -> Callable[[NatsServer, Random], None]:
    """Return a strike that ends a server and changes the newest file of one of its partitions."""

    def strike(server: NatsServer, random: Random) -> None:
        # After SIGTERM the server knows the last number; after SIGKILL it finds the number in the damaged file.
        (server.stop if random.random() < 0.5 else server.kill)()
        folders = sorted(server.store.rglob("KVEVENTS_chaos_[0-9]*/msgs"))
        blocks = [max(found, key=lambda file: int(file.stem)) for each in folders if (found := [*each.glob("*.blk")])]
        files = [block for block in blocks if block.stat().st_size]
        if files:
            change(random.choice(files), random)

    return strike


def _flip_byte(file: Path, random: Random) -> None:
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] ^= 0x55
    file.write_bytes(content)


def _cut_in_the_middle(file: Path, random: Random) -> None:
    os.truncate(file, random.randrange(file.stat().st_size))


def _change_partition(
    change: Callable[[Any, str, str, Random], Coroutine[Any, Any, Any]],
) -> Callable[[tuple[Stage, int], Random], None]:
    """Return a strike that changes a partition as another client of NATS. It does nothing if the servers do not respond."""

    def strike(place: tuple[Stage, int], random: Random) -> None:
        stage, number = place
        name, subject = stage.layout.stream(number), stage.layout.subject(number)

        async def main() -> None:
            async with asyncio.timeout(2.0):
                client = await nats.connect(list(stage.plane.servers), allow_reconnect=False)
                try:
                    await change(client.jetstream(timeout=1.0), name, subject, random)
                finally:
                    await client.close()

        with suppress(Exception):
            asyncio.run(main())
            stage.counted["done to partitions"] += 1

    return strike


async def _delete(js: Any, name: str, _: str, __: Random) -> None:
    await js.delete_stream(name)


async def _purge(js: Any, name: str, _: str, __: Random) -> None:
    await js.purge_stream(name, seq=(await js.stream_info(name)).state.last_seq)


async def _delete_newest(js: Any, name: str, _: str, __: Random) -> None:
    await js.delete_msg(name, (await js.stream_info(name)).state.last_seq)


async def _delete_middle(js: Any, name: str, _: str, random: Random) -> None:
    state = (await js.stream_info(name)).state
    await js.delete_msg(name, random.randint(state.first_seq, state.last_seq))


async def _publish_foreign_message(js: Any, _: str, subject: str, __: Random) -> None:
    await js.publish(subject, Random(subject).randbytes(100))


FAULTS: Final[dict[str, Fault[Any]]] = {
    "kill bridge": Fault(find_bridge, always(Part.kill), Part.resume, weight=6),
    "stop bridge": Fault(find_bridge, always(Part.stop), Part.go_on),
    "bridge misses an incarnation": Fault(find_bridge_number, always(_miss_incarnation), _end_missed_incarnation, weight=3),
    "kill replica": Fault(find_replica, always(Part.kill), Part.resume, weight=6),
    "stop replica": Fault(find_replica, always(Part.stop), Part.go_on),
    "kill server": Fault(find_server, always(NatsServer.kill), NatsServer.launch, weight=6),
    "stop server": Fault(find_server, always(NatsServer.pause), NatsServer.resume),
    "servers lose pages": Fault(find_stage, always(_copy_servers), _lose_pages, weight=3),
    "kill engine": Fault(find_engine, lambda engine, _: engine.restart()),
    "end engine": Fault(find_engine, lambda engine, _: engine.close_and_restart()),
    "stop engine": Fault(find_engine, lambda engine, _: engine.part.stop(), lambda engine: engine.part.go_on()),
    "delete partition": Fault(find_partition, _change_partition(_delete), weight=2),
    "purge partition": Fault(find_partition, _change_partition(_purge), weight=1),
    "delete newest page": Fault(find_partition, _change_partition(_delete_newest), weight=2),
    "delete page in the middle": Fault(find_partition, _change_partition(_delete_middle), weight=2),
    "flip byte": Fault(find_server, _damage(_flip_byte), NatsServer.launch, weight=3),
    "cut file": Fault(find_server, _damage(_cut_in_the_middle), NatsServer.launch, weight=3),
    "stranger's message": Fault(find_partition, _change_partition(_publish_foreign_message), weight=1),
    "cut engine off": Fault(find_proxies, always(refuse), RedirectingProxy.heal),
    "half-open engine": Fault(find_proxies, always(RedirectingProxy.half_open), RedirectingProxy.heal, weight=2),
    "drop live batches": Fault(find_leg, _drop, Leg.heal),
}

LINK_FAULTS: Final = frozenset({"cut engine off", "half-open engine", "drop live batches"})
"""Faults between engine and bridge, after which the bridge itself needs time to notice that something is missing."""
