"""`python -m tools.plane_sizing`: how large a plane must be, computed from what is measured and from what is assumed.

Three kinds of numbers, kept apart. *Measured here*: bytes of batches, pages, blocks in memory and in a snapshot, and CPU time
of applying and restoring, each by doing it, on a small fleet with caches that are full; what a snapshot costs a server.
*Measured elsewhere*: what takes minutes, with the command that measures it (`FLEET`: 1,000 engines, one bridge, three
servers). *Assumed*: the fleet, its traffic and its network, which are yours: flags. The rest is arithmetic, in `plan`.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from msgspec.structs import fields

from benchmarks.history import Engine
from benchmarks.indexing.procfs import cpu_of_threads
from benchmarks.report import machine
from kvevents.index import PrefixIndex
from kvevents.plane.bridge import PAGE_BYTES, BridgeSettings
from kvevents.plane.connection import open_client
from kvevents.plane.layout import Layout
from kvevents.plane.partition_state import PartitionState
from kvevents.plane.records import VERSION, BatchRecord, JoinRecord, Page, Record, decode_page, encode_page
from kvevents.plane.replicas import assigned_replicas, plan_queries
from kvevents.plane.settings import MAX_PARTITIONS, RECEIVE_QUEUE, PlaneSettings
from kvevents.plane.snapshots import CHUNK_BYTES
from kvevents.stream import RawBatch
from kvevents.wire import encode_batch
from tools.nats_process import one_server

SAMPLE_BLOCKS: Final = 400_000
SAMPLE_ENGINES: Final = 8
SAMPLE_BATCHES: Final = 4_000
PAGE: Final = 250
"""Batches of a page."""
SAMPLE_OBJECT: Final = 64 << 20
BUSY: Final = 0.7
"""Share of one core above which it is not planned; the rest is for bursts."""
MAX_QUEUED_BYTES: Final = next(field.default for field in fields(BridgeSettings) if field.name == "max_queued_bytes")
MEASURED: Final = "`python -m benchmarks.plane bridge`"
FULL: Final = 0.6
"""Share of a machine's memory for the index; the rest is for a second generation's beginning, snapshots and queries."""


class Measured(NamedTuple):
    """What `python -m benchmarks.plane bridge --only fleet` has printed of one bridge."""

    engines: int
    pace: float
    """Batches a second."""
    bridge: float
    """Microseconds of CPU of the bridge for a batch."""
    bridge_idle: float
    """Memory of the bridge that follows all engines, which say nothing."""
    servers: float
    """Microseconds of CPU of three servers together for a batch."""
    server_idle: float
    """Memory of the largest server, nothing being said."""
    server_bytes: float
    """The same at that pace."""


FLEET: Final = Measured(1_000, 10_000.0, 60.3, 110e6, 32.3, 92e6, 416e6)
BRIDGE_BYTES: Final = 47e6
"""Memory of a bridge that follows one engine."""


class Fleet(NamedTuple):
    """What is assumed."""

    engines: int
    blocks: float
    """Of all engines together; those that several hold count for each."""
    tokens_per_second: float
    """Of an engine, that its cache did not have: they become blocks, and as many blocks go."""
    batches_per_second: float
    """Of an engine: one for each step in which something was stored or removed."""
    block_size: int
    machine_bytes: float
    snapshot_seconds: float
    bootstrap_seconds: float
    """That a replica may take until it answers."""
    holders: int
    """Replicas that hold each partition."""
    copies: int
    latency: float
    """Seconds until a majority of servers has what is sent to one of them."""

    @property
    def blocks_per_batch(self) -> int:
        return max(1, round(self.tokens_per_second / self.block_size / self.batches_per_second))


class Sizes(NamedTuple):
    """Bytes that are measured here; the first fields of `Costs`, which says what they are."""

    payload: float
    record: float
    memory: float
    saved: float


class Costs(NamedTuple):
    """What is measured here."""

    payload: float
    """Bytes of a batch as the engine sends it."""
    record: float
    """Bytes of it in a page, with what is around it."""
    memory: float
    """Bytes of a block in the index."""
    saved: float
    """Bytes of a block in a snapshot."""
    apply: float
    """Seconds of CPU of a batch, from the bytes of its page to the index."""
    restore: float
    """Seconds of CPU of a block, from a snapshot's bytes to the index."""
    written: float
    """Bytes a second into JetStream's object store, of one client and one server of this machine."""
    read: float
    """Bytes a second out of it."""
    store: float
    """Seconds of CPU of a server for each byte that is written into it."""


# --- measured here -----------------------------------------------------------------------------------------------------------


class Sample:
    """Engines that share nothing, whose caches are full, and an index that has read all of it from pages."""

    def __init__(self, blocks_per_batch: int, blocks: int) -> None:
        self.index = PrefixIndex()
        self._state = PartitionState()
        self._engines = [Engine(blocks_per_batch, blocks // SAMPLE_ENGINES) for _ in range(SAMPLE_ENGINES)]
        self._numbers = [0] * SAMPLE_ENGINES
        for number, engine in enumerate(self._engines):
            engine._next = 1 + (number << 40)  # noqa: SLF001 - no two engines hold the same
            self.take(_page([JoinRecord(_name(number), 0, b"")]))
            for _ in range(blocks // SAMPLE_ENGINES // (blocks_per_batch * PAGE) + 1):
                self.take(_page([*self.batches(number, PAGE)]))

    def batches(self, number: int, count: int) -> list[BatchRecord]:
        """What an engine says next."""
        first, payloads = self._numbers[number], map(encode_batch, self._engines[number].batches(count))
        self._numbers[number] += count
        return [BatchRecord(_name(number), 0, 0, first + at, False, payload) for at, payload in enumerate(payloads)]

    def take(self, data: bytes) -> None:
        """A page, as a replica takes it."""
        page = decode_page(data)
        assert page is not None
        found = self._state.apply(self._state.position + 1, page)
        self.index.apply_many([event for event in found if isinstance(event, RawBatch)])
        assert not self._state.invalid_records


def _name(number: int) -> str:
    return f"engine-{number:05}"


def _page(records: list[Record]) -> bytes:
    return encode_page(Page(VERSION, "sizing", 0.0, records, "made"))


def sizes(blocks_per_batch: int, blocks: int = SAMPLE_BLOCKS) -> Sizes:
    """Bytes, which are the same on every machine."""
    return _measured(Sample(blocks_per_batch, blocks))[0]


def measure(blocks_per_batch: int) -> Costs:
    """Everything that is measured here."""
    found, apply, restore = _measured(Sample(blocks_per_batch, SAMPLE_BLOCKS))
    return Costs(*found, apply, restore, *asyncio.run(transfer()))


def _measured(sample: Sample) -> tuple[Sizes, float, float]:
    """Sizes, seconds of CPU to apply a batch, and to restore a block."""
    stats = sample.index.stats()
    found = [sample.batches(number, SAMPLE_BATCHES // SAMPLE_ENGINES) for number in range(SAMPLE_ENGINES)]
    pages = [_page([*each[at : at + PAGE]]) for each in found for at in range(0, len(each), PAGE)]
    apply = _cpu(lambda: [sample.take(page) for page in pages])  # type: ignore[func-returns-value]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "index")
        sample.index.snapshot(path)
        saved, blocks = path.stat().st_size, sample.index.stats().blocks
        restore = _cpu(lambda: PrefixIndex().merge(path))
    payload = sum(len(record.payload) for each in found for record in each)
    record = sum(map(len, pages))
    bytes_of = Sizes(payload / SAMPLE_BATCHES, record / SAMPLE_BATCHES, stats.bytes / stats.blocks, saved / blocks)
    return bytes_of, apply / SAMPLE_BATCHES, restore / blocks


async def transfer() -> tuple[float, float, float]:
    """Bytes a second of an object that is written, and read, as snapshots are; the server's seconds of CPU for one written."""
    from nats.js import api  # noqa: PLC0415 - an extra

    with tempfile.TemporaryDirectory() as folder, one_server(Path(folder)) as server:
        async with open_client(PlaneSettings(servers=(server.url,)), name="sizing") as client:
            store = await client.jetstream(timeout=30.0).create_object_store("sizing")
            begin, used = time.monotonic(), cpu_of_threads(server.pid)
            meta = api.ObjectMeta(options=api.ObjectMetaOptions(max_chunk_size=CHUNK_BYTES))
            await store.put("x", io.BytesIO(bytes(SAMPLE_OBJECT)), meta)
            written, used = time.monotonic(), cpu_of_threads(server.pid) - used
            await store.get("x", writeinto=io.BytesIO())
            read = time.monotonic() - written
            return SAMPLE_OBJECT / (written - begin), SAMPLE_OBJECT / read, used / SAMPLE_OBJECT


def _cpu(work: Callable[[], object]) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


# --- arithmetic --------------------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """What a fleet needs: one plane, and replicas that hold a share of its partitions each."""

    batches: float
    """A second, of the whole fleet."""
    bytes: float
    """A second, into all partitions; JetStream keeps each `copies` times."""
    saved: float
    """Bytes a second of snapshots."""
    by_memory: int
    """Replicas that memory wants."""
    by_apply: int
    """Replicas that the thread which applies wants."""
    by_saving: int
    """Replicas that writing snapshots wants."""
    by_bootstrap: int
    """Replicas that their bootstrap wants."""
    replicas: int
    partitions: int
    share: float
    """Largest share of the partitions that a replica holds."""
    replicas_per_answer: int
    """Replicas that an answer is of, including the one that receives the request."""
    read: float
    """Bytes a second, that the replica with the largest share reads."""
    partition_bytes: float
    """Of a partition, for what comes within three snapshots."""
    memory: float
    """Of the largest index."""
    snapshot: float
    """Bytes, of a partition."""
    move: float
    """Seconds until a new holder shows a partition: its snapshot, and what came since that was taken."""
    bootstrap: float
    """The same of the largest share."""
    subjects: int
    written: float
    """Bytes a second of a snapshot into JetStream, each chunk of which waits for a majority."""
    partition_takes: float
    """Bytes a second that a partition takes at most."""
    bridges: int
    """That are busy with one core each."""
    bridge_memory: float
    """Of each of them, when its queue is full."""
    server_cores: float
    """Of all servers."""
    server_memory: float
    """Of each server."""
    disk_bytes: float
    """Of all servers."""
    disk_writes: float
    """Bytes a second, of all servers."""


def plan(fleet: Fleet, costs: Costs) -> Plan:
    """No number in here but those of its arguments, and how evenly partitions are spread."""
    batches = fleet.engines * fleet.batches_per_second
    written = 1 / (1 / costs.written + fleet.latency / CHUNK_BYTES)
    wanted = [
        fleet.blocks * costs.memory / (fleet.machine_bytes * FULL),
        batches * costs.apply / BUSY,
        fleet.blocks * costs.saved / (written * fleet.snapshot_seconds * BUSY) / fleet.holders,
    ]
    by_memory, by_apply, by_saving = (_replicas(need, fleet.holders) for need in wanted)
    by_bootstrap = least = max(by_memory, by_apply, by_saving)
    while _bootstrap(by_bootstrap, fleet, costs) > fleet.bootstrap_seconds and by_bootstrap < MAX_PARTITIONS:
        by_bootstrap += 1
    replicas = max(least, by_bootstrap)
    shares = _shares(replicas, fleet.holders)
    share = _largest(replicas, fleet.holders)
    load, partition = batches * share * costs.apply, fleet.blocks / MAX_PARTITIONS
    pages, saved = batches * costs.record, fleet.blocks * costs.saved / fleet.snapshot_seconds
    bridges = max(1, math.ceil(batches * FLEET.bridge / 1e6 / BUSY))
    each = (FLEET.bridge_idle - BRIDGE_BYTES) / FLEET.engines
    partition_bytes = 3 * fleet.snapshot_seconds * pages / MAX_PARTITIONS
    cached = (FLEET.server_bytes - FLEET.server_idle) / FLEET.pace
    return Plan(
        batches,
        pages,
        saved,
        by_memory,
        by_apply,
        by_saving,
        by_bootstrap,
        replicas,
        MAX_PARTITIONS,
        share,
        _replicas_per_answer(shares),
        pages * share,
        partition_bytes,
        fleet.blocks * share * costs.memory,
        partition * costs.saved,
        _ready(partition, batches / MAX_PARTITIONS * costs.apply, load, fleet, costs),
        _bootstrap(replicas, fleet, costs),
        len({Layout("p", MAX_PARTITIONS).subject(partition) for partition in range(MAX_PARTITIONS)}),
        written,
        PAGE_BYTES / fleet.latency,
        bridges,
        BRIDGE_BYTES + fleet.engines / bridges * (each + RECEIVE_QUEUE * costs.payload) + 2 * MAX_QUEUED_BYTES,
        (batches * FLEET.servers / 1e6 + saved * costs.store * fleet.copies) / BUSY,
        FLEET.server_idle + batches * cached,
        fleet.copies * (MAX_PARTITIONS * partition_bytes + 3 * fleet.blocks * costs.saved),
        fleet.copies * (pages + saved),
    )


def _shares(replicas: int, holders: int) -> dict[str, list[int]]:
    """Partitions by replica."""
    names = [f"replica-{number}" for number in range(replicas)]
    found: dict[str, list[int]] = {name: [] for name in names}
    for partition in range(MAX_PARTITIONS):
        for name in assigned_replicas(partition, names, holders):
            found[name].append(partition)
    return found


def _largest(replicas: int, holders: int) -> float:
    """Share of the partitions that the replica with the most of them holds."""
    return max(map(len, _shares(replicas, holders).values())) / MAX_PARTITIONS


def _bootstrap(replicas: int, fleet: Fleet, costs: Costs) -> float:
    share = _largest(replicas, fleet.holders)
    load = fleet.engines * fleet.batches_per_second * share * costs.apply
    return _ready(fleet.blocks * share, load, load, fleet, costs)


def _replicas(whole: float, holders: int) -> int:
    """The fewest of which none has more to do than one can, where `whole` is how many could do all of it once."""
    replicas = max(holders, math.ceil(whole * holders))
    while _largest(replicas, holders) * whole > 1 and replicas < MAX_PARTITIONS:
        replicas += 1
    return replicas


def _replicas_per_answer(shares: dict[str, list[int]]) -> int:
    """Replicas that an answer asks, on average."""
    counts = []
    for name, partitions in shares.items():
        rest = {other: held for other, held in shares.items() if other != name}
        counts.append(1 + len(plan_queries(name, set(range(MAX_PARTITIONS)) - set(partitions), rest)[0]))
    return round(sum(counts) / len(counts))


def _ready(blocks: float, load: float, busy: float, fleet: Fleet, costs: Costs) -> float:
    """Seconds for a snapshot of some blocks, and to catch up with the `load` that came since, by a thread that is `busy`."""
    restored = blocks * costs.saved / costs.read + blocks * costs.restore
    return (restored + fleet.snapshot_seconds * load) / (1 - busy)


# --- the table ---------------------------------------------------------------------------------------------------------------


def amount(value: float, unit: str) -> str:
    """With a prefix: `1.2 GB`."""
    for prefix in ("", "k", "M", "G", "T"):
        if value < 1000 or prefix == "T":
            break
        value /= 1000
    return f"{value:.3g} {prefix}{unit}"


def rows(fleet: Fleet, costs: Costs, found: Plan) -> list[tuple[str, str, str]]:
    """Name, value and where it comes from."""
    return [
        ("blocks of a batch", f"{fleet.blocks_per_batch} stored, {fleet.blocks_per_batch} removed", "assumed"),
        ("a batch", amount(costs.payload, "B"), "measured here"),
        ("a batch in a partition", amount(costs.record, "B"), "measured here"),
        ("a block in the index", amount(costs.memory, "B"), "measured here"),
        ("a block in a snapshot", amount(costs.saved, "B"), "measured here"),
        ("CPU to apply a batch", f"{costs.apply * 1e6:.1f} us", "measured here"),
        ("CPU to restore a million blocks", f"{costs.restore * 1e6:.2f} s", "measured here"),
        ("a snapshot into JetStream", f"{amount(costs.written, 'B')}/s", "measured here, one server, wall time"),
        ("a snapshot out of it", f"{amount(costs.read, 'B')}/s", "measured here, one server, wall time"),
        (
            "a snapshot into three servers",
            f"{amount(found.written, 'B')}/s",
            f"{fleet.latency * 1e3:.0f} ms, assumed",
        ),
        ("CPU of a bridge for a batch", f"{FLEET.bridge:.0f} us", MEASURED),
        ("CPU of three NATS servers for a batch", f"{FLEET.servers:.0f} us", MEASURED),
        ("between two snapshots of a partition", f"{fleet.snapshot_seconds:.0f} s", "assumed; replicas' default is 60 s"),
        ("batches a second", amount(found.batches, ""), "engines x batches"),
        ("bytes a second into partitions", amount(found.bytes, "B"), f"each kept {fleet.copies} times by JetStream"),
        ("bytes a second of snapshots", amount(found.saved, "B"), "the same"),
        ("replicas that memory wants", str(found.by_memory), f"{FULL:.0%} of {amount(fleet.machine_bytes, 'B')}"),
        ("replicas that applying wants", str(found.by_apply), f"{BUSY:.0%} of one core"),
        (
            "replicas that snapshots want",
            str(found.by_saving),
            f"{BUSY:.0%} of {fleet.snapshot_seconds:.0f} s to write its partitions'",
        ),
        ("replicas that their bootstrap wants", str(found.by_bootstrap), f"at most {fleet.bootstrap_seconds:.0f} s, assumed"),
        ("replicas", str(found.replicas), f"each partition held by {fleet.holders}"),
        ("partitions", str(found.partitions), "as many as there can be: the more, the more even"),
        ("the largest share", f"{found.share:.1%} of the partitions", f"{fleet.holders / found.replicas:.1%} were even"),
        ("replicas that an answer is of", str(found.replicas_per_answer), "the fewest that hold all partitions"),
        ("memory of the largest index", amount(found.memory, "B"), ""),
        ("bytes a second to its replica", amount(found.read, "B"), ""),
        ("size of a partition", amount(found.partition_bytes, "B"), "three snapshots' time"),
        ("subjects of pages", str(found.subjects), "independent of the number of engines"),
        ("a snapshot", amount(found.snapshot, "B"), "of a partition; two are kept"),
        (
            "until a partition has moved",
            f"{found.move:.0f} s",
            "snapshot, then what came since; its former holder answers meanwhile",
        ),
        ("bootstrap of a replica", f"{found.bootstrap:.0f} s", "the same of its whole share"),
        (
            "a partition takes at most",
            f"{amount(found.partition_takes, 'B')}/s",
            "one page under way",
        ),
        ("bridges", str(found.bridges), f"{BUSY:.0%} of one core each; twice as many where each engine is watched by two"),
        ("memory of a bridge", amount(found.bridge_memory, "B"), "while it reads nothing, as its queue is full"),
        ("cores of NATS servers", f"{found.server_cores:.0f}", "of all three together; pages and snapshots"),
        ("memory of a NATS server", amount(found.server_memory, "B"), "it keeps its newest messages in memory"),
        ("disk of NATS servers", amount(found.disk_bytes, "B"), "all partitions full, three snapshots of each, all copies"),
        ("bytes a second to their disks", amount(found.disk_writes, "B"), "pages and snapshots, all copies"),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tools.plane_sizing", description=__doc__)
    parser.add_argument("--engines", type=int, default=10_000)
    parser.add_argument("--blocks", type=float, default=5e9, help="of all engines together (default: %(default)g)")
    parser.add_argument(
        "--tokens", type=float, default=1_600, help="a second and engine that were not cached (default: %(default)g)"
    )
    parser.add_argument("--batches", type=float, default=10, help="a second and engine (default: %(default)g)")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--machine", type=float, default=256e9, help="memory of a replica's machine (default: %(default)g)")
    parser.add_argument("--snapshot-seconds", type=float, default=300.0)
    parser.add_argument("--bootstrap", type=float, default=600.0, help="seconds that one may take (default: %(default)g)")
    parser.add_argument("--holders", type=int, default=2, help="replicas that hold each partition (default: %(default)s)")
    parser.add_argument("--copies", type=int, default=3)
    parser.add_argument(
        "--latency", type=float, default=0.010, help="seconds until a majority of servers has a message (default: %(default)g)"
    )
    given = parser.parse_args(arguments)
    fleet = Fleet(
        given.engines,
        given.blocks,
        given.tokens,
        given.batches,
        given.block_size,
        given.machine,
        given.snapshot_seconds,
        given.bootstrap,
        given.holders,
        given.copies,
        given.latency,
    )
    costs = measure(fleet.blocks_per_batch)
    print(machine())
    print(f"\n| {fleet.engines:,} engines, {fleet.blocks:,.0f} blocks | | |\n|---|---|---|")
    for name, value, source in rows(fleet, costs, plan(fleet, costs)):
        print(f"| {name} | {value} | {source} |")
    return 0
