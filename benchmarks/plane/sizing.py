"""`python -m benchmarks.plane sizing`: how large a plane must be, computed from what is measured and from what is assumed.

Three kinds of numbers, kept apart. *Measured here*: bytes of batches, pages, blocks in memory and in a snapshot, and CPU time
of applying and restoring, each by doing it, on a small fleet with caches that are full. *Measured elsewhere*: what takes
minutes, with the command that measures it (`BRIDGE_CPU`). *Assumed*: the fleet and its traffic, which are yours: flags. The
rest is arithmetic, in `plan`.
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

from benchmarks.history import Engine
from benchmarks.plane.servers import one_server
from benchmarks.report import machine
from kvevents.index import PrefixIndex
from kvevents.plane.connection import opened
from kvevents.plane.layout import Layout
from kvevents.plane.ledger import Ledger
from kvevents.plane.records import VERSION, Batched, Join, Page, Record, decode_page, encode_page
from kvevents.plane.settings import MAX_LANES, PlaneSettings
from kvevents.plane.sharding import owners
from kvevents.plane.sharding import plan as cover
from kvevents.plane.snapshots import CHUNK_BYTES
from kvevents.stream import RawBatch
from kvevents.wire import encode_batch

SAMPLE_BLOCKS: Final = 400_000
SAMPLE_ENGINES: Final = 8
SAMPLE_BATCHES: Final = 4_000
PAGE: Final = 250
"""Batches of a page."""
SAMPLE_OBJECT: Final = 64 << 20
BUSY: Final = 0.7
"""Share of one core above which it is not planned; the rest is for bursts."""
FULL: Final = 0.6
"""Share of a machine's memory for the index; the rest is for a second generation's beginning, snapshots and queries."""


BRIDGE_CPU: Final = {1: 8.8, 32: 23.8}
"""Microseconds a batch, by the blocks of it."""


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
    """Replicas that hold each lane."""
    copies: int

    @property
    def blocks_per_batch(self) -> int:
        return max(1, round(self.tokens_per_second / self.block_size / self.batches_per_second))


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


# --- measured here -----------------------------------------------------------------------------------------------------------


class Sample:
    """Engines that share nothing, whose caches are full, and an index that has read all of it from pages."""

    def __init__(self, blocks_per_batch: int) -> None:
        self.index = PrefixIndex()
        self._ledger = Ledger()
        self._engines = [Engine(blocks_per_batch, SAMPLE_BLOCKS // SAMPLE_ENGINES) for _ in range(SAMPLE_ENGINES)]
        self._numbers = [0] * SAMPLE_ENGINES
        for number, engine in enumerate(self._engines):
            engine._next = 1 + (number << 40)  # noqa: SLF001 - no two engines hold the same
            self.take(_page([Join(_name(number), 0, b"")]))
            for _ in range(SAMPLE_BLOCKS // SAMPLE_ENGINES // (blocks_per_batch * PAGE) + 1):
                self.take(_page([*self.batches(number, PAGE)]))

    def batches(self, number: int, count: int) -> list[Batched]:
        """What an engine says next."""
        first, payloads = self._numbers[number], map(encode_batch, self._engines[number].batches(count))
        self._numbers[number] += count
        return [Batched(_name(number), 0, 0, first + at, False, payload) for at, payload in enumerate(payloads)]

    def take(self, data: bytes) -> None:
        """A page, as a replica takes it."""
        page = decode_page(data)
        assert page is not None
        found = self._ledger.feed(self._ledger.position + 1, page)
        self.index.apply_many([event for event in found if isinstance(event, RawBatch)])
        assert not self._ledger.breaches


def _name(number: int) -> str:
    return f"engine-{number:05}"


def _page(records: list[Record]) -> bytes:
    return encode_page(Page(VERSION, "sizing", 0.0, records, "made"))


def measure(blocks_per_batch: int) -> Costs:
    """Everything that is measured here."""
    sample = Sample(blocks_per_batch)
    stats = sample.index.stats()
    found = [sample.batches(number, SAMPLE_BATCHES // SAMPLE_ENGINES) for number in range(SAMPLE_ENGINES)]
    pages = [_page([*each[at : at + PAGE]]) for each in found for at in range(0, len(each), PAGE)]
    apply = _cpu(lambda: [sample.take(page) for page in pages])  # type: ignore[func-returns-value]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "index")
        sample.index.snapshot(path)
        saved, blocks = path.stat().st_size, sample.index.stats().blocks
        restore = _cpu(lambda: PrefixIndex().absorb(path))
    payload = sum(len(record.payload) for each in found for record in each)
    record = sum(map(len, pages))
    return Costs(
        payload / SAMPLE_BATCHES,
        record / SAMPLE_BATCHES,
        stats.bytes / stats.blocks,
        saved / blocks,
        apply / SAMPLE_BATCHES,
        restore / blocks,
        *asyncio.run(transfer()),
    )


async def transfer() -> tuple[float, float]:
    """Bytes a second of an object that is written, and read, as snapshots are."""
    from nats.js import api  # noqa: PLC0415 - an extra

    with tempfile.TemporaryDirectory() as folder, one_server(Path(folder)) as server:
        async with opened(PlaneSettings(servers=(server.url,)), name="sizing") as client:
            store = await client.jetstream(timeout=30.0).create_object_store("sizing")
            begin = time.monotonic()
            meta = api.ObjectMeta(options=api.ObjectMetaOptions(max_chunk_size=CHUNK_BYTES))
            await store.put("x", io.BytesIO(bytes(SAMPLE_OBJECT)), meta)
            written = time.monotonic()
            await store.get("x", writeinto=io.BytesIO())
            return SAMPLE_OBJECT / (written - begin), SAMPLE_OBJECT / (time.monotonic() - written)


def _cpu(work: Callable[[], object]) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


def bridge_cpu(blocks: int) -> float:
    """Microseconds of a batch, on the line through what was measured: a bridge copies what it does not look into."""
    (few, least), (many, most) = sorted(BRIDGE_CPU.items())
    return least + (most - least) * (blocks - few) / (many - few)


# --- arithmetic --------------------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """What a fleet needs: one plane, and replicas that hold a share of its lanes each."""

    batches: float
    """A second, of the whole fleet."""
    bytes: float
    """A second, into all lanes; JetStream keeps each `copies` times."""
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
    lanes: int
    share: float
    """Largest share of the lanes that a replica holds."""
    asked: int
    """Replicas, the one that is asked among them, that an answer is of."""
    read: float
    """Bytes a second, that the replica with the largest share reads."""
    lane_bytes: float
    """Of a lane, for what comes within three snapshots."""
    memory: float
    """Of the largest index."""
    snapshot: float
    """Bytes, of a lane."""
    move: float
    """Seconds until a lane is shown by who takes it over: its snapshot, and what came since that was taken."""
    bootstrap: float
    """The same of the largest share."""
    subjects: int
    bridge_cores: float


def plan(fleet: Fleet, costs: Costs) -> Plan:
    """No number in here but those of its arguments, and how evenly lanes are spread."""
    batches = fleet.engines * fleet.batches_per_second
    wanted = [
        fleet.blocks * costs.memory / (fleet.machine_bytes * FULL),
        batches * costs.apply / BUSY,
        fleet.blocks * costs.saved / (costs.written * fleet.snapshot_seconds * BUSY) / fleet.holders,
    ]
    by_memory, by_apply, by_saving = (_replicas(need, fleet.holders) for need in wanted)
    by_bootstrap = least = max(by_memory, by_apply, by_saving)
    while _bootstrap(by_bootstrap, fleet, costs) > fleet.bootstrap_seconds and by_bootstrap < MAX_LANES:
        by_bootstrap += 1
    replicas = max(least, by_bootstrap)
    shares = _shares(replicas, fleet.holders)
    share = _largest(replicas, fleet.holders)
    load, lane = batches * share * costs.apply, fleet.blocks / MAX_LANES
    return Plan(
        batches,
        batches * costs.record,
        fleet.blocks * costs.saved / fleet.snapshot_seconds,
        by_memory,
        by_apply,
        by_saving,
        by_bootstrap,
        replicas,
        MAX_LANES,
        share,
        _asked(shares),
        batches * costs.record * share,
        3 * fleet.snapshot_seconds * batches * costs.record / MAX_LANES,
        fleet.blocks * share * costs.memory,
        lane * costs.saved,
        _ready(lane, batches / MAX_LANES * costs.apply, load, fleet, costs),
        _bootstrap(replicas, fleet, costs),
        len({Layout("p", MAX_LANES).subject(lane) for lane in range(MAX_LANES)}),
        batches * bridge_cpu(fleet.blocks_per_batch) / 1e6 / BUSY,
    )


def _shares(replicas: int, holders: int) -> dict[str, list[int]]:
    """Lanes by replica."""
    names = [f"replica-{number}" for number in range(replicas)]
    found: dict[str, list[int]] = {name: [] for name in names}
    for lane in range(MAX_LANES):
        for name in owners(lane, names, holders):
            found[name].append(lane)
    return found


def _largest(replicas: int, holders: int) -> float:
    """Share of the lanes that the replica with the most of them holds."""
    return max(map(len, _shares(replicas, holders).values())) / MAX_LANES


def _bootstrap(replicas: int, fleet: Fleet, costs: Costs) -> float:
    share = _largest(replicas, fleet.holders)
    load = fleet.engines * fleet.batches_per_second * share * costs.apply
    return _ready(fleet.blocks * share, load, load, fleet, costs)


def _replicas(whole: float, holders: int) -> int:
    """The fewest of which none has more to do than one can, where `whole` is how many could do all of it once."""
    replicas = max(holders, math.ceil(whole * holders))
    while _largest(replicas, holders) * whole > 1 and replicas < MAX_LANES:
        replicas += 1
    return replicas


def _asked(shares: dict[str, list[int]]) -> int:
    """Replicas in an answer, on the mean of whom is asked."""
    counts = []
    for name, lanes in shares.items():
        rest = {other: held for other, held in shares.items() if other != name}
        counts.append(1 + len(cover(name, set(range(MAX_LANES)) - set(lanes), rest)[0]))
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
        ("a batch in a lane", amount(costs.record, "B"), "measured here"),
        ("a block in the index", amount(costs.memory, "B"), "measured here"),
        ("a block in a snapshot", amount(costs.saved, "B"), "measured here"),
        ("CPU to apply a batch", f"{costs.apply * 1e6:.1f} us", "measured here"),
        ("CPU to restore a million blocks", f"{costs.restore * 1e6:.2f} s", "measured here"),
        ("a snapshot into JetStream", f"{amount(costs.written, 'B')}/s", "measured here, one server, wall time"),
        ("a snapshot out of it", f"{amount(costs.read, 'B')}/s", "measured here, one server, wall time"),
        ("CPU of a bridge for a batch", f"{bridge_cpu(fleet.blocks_per_batch):.0f} us", "`python -m benchmarks.plane bridge`"),
        ("batches a second", amount(found.batches, ""), "engines x batches"),
        ("bytes a second into lanes", amount(found.bytes, "B"), f"each kept {fleet.copies} times by JetStream"),
        ("bytes a second of snapshots", amount(found.saved, "B"), "the same"),
        ("replicas that memory wants", str(found.by_memory), f"{FULL:.0%} of {amount(fleet.machine_bytes, 'B')}"),
        ("replicas that applying wants", str(found.by_apply), f"{BUSY:.0%} of one core"),
        (
            "replicas that snapshots want",
            str(found.by_saving),
            f"{BUSY:.0%} of {fleet.snapshot_seconds:.0f} s to write its lanes'",
        ),
        ("replicas that their bootstrap wants", str(found.by_bootstrap), f"at most {fleet.bootstrap_seconds:.0f} s, assumed"),
        ("replicas", str(found.replicas), f"each lane held by {fleet.holders}"),
        ("lanes", str(found.lanes), "as many as there can be: the more, the more even"),
        ("the largest share", f"{found.share:.1%} of the lanes", f"{fleet.holders / found.replicas:.1%} were even"),
        ("replicas that an answer is of", str(found.asked), "the fewest that hold all lanes"),
        ("memory of the largest index", amount(found.memory, "B"), ""),
        ("bytes a second to its replica", amount(found.read, "B"), ""),
        ("size of a lane", amount(found.lane_bytes, "B"), "three snapshots' time"),
        ("subjects of pages", str(found.subjects), "whatever the number of engines"),
        ("a snapshot", amount(found.snapshot, "B"), "of a lane; two are kept"),
        (
            "until a lane has moved",
            f"{found.move:.0f} s",
            "snapshot, then what came since; its former holder answers meanwhile",
        ),
        ("bootstrap of a replica", f"{found.bootstrap:.0f} s", "the same of its whole share"),
        ("cores of bridges", f"{found.bridge_cores:.0f}", "twice that where each engine is watched by two"),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plane sizing", description=__doc__)
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
    parser.add_argument("--holders", type=int, default=2, help="replicas that hold each lane (default: %(default)s)")
    parser.add_argument("--copies", type=int, default=3)
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
    )
    costs = measure(fleet.blocks_per_batch)
    print(machine())
    print(f"\n| {fleet.engines:,} engines, {fleet.blocks:,.0f} blocks | | |\n|---|---|---|")
    for name, value, source in rows(fleet, costs, plan(fleet, costs)):
        print(f"| {name} | {value} | {source} |")
    return 0
