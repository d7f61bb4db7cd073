"""`make soak`: an engine, a relay, consumers and a service under churn and reconnects, watched for what grows.

Every few seconds the memory, descriptors and threads of each process are noted. The later half of the time is judged: a line is
laid through the least that each process had in each `WINDOWS`th of it, and one that rises by more than its allowance fails the
run. The least, since buffers fill and empty at any time, while what is never given back is there in every moment.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from multiprocessing.connection import Connection
from operator import itemgetter
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final, NamedTuple, Self

from kvevents.cli.process import trimming_memory
from kvevents.events import KVEventBatch
from kvevents.index import PrefixIndex
from kvevents.publisher import ZmqEventPublisher
from kvevents.stream import Batch
from kvevents.testing.ports import reserve_port
from kvevents.wire import dialect_for
from tests.system.chaos import report
from tests.system.chaos.cache import Cache, Habits, Speech
from tests.system.chaos.consumer import Consumer, Report
from tests.system.chaos.consumer import run as follow
from tests.system.chaos.parts import Leg, Part, until
from tools.released import CHECKOUT

HOST: Final = "127.0.0.1"
MINUTES: Final = 4.0
RATE: Final = 1_000
"""Batches per second of the engine."""
BLOCKS: Final = 5_000
"""That it holds."""
FLAP_SECONDS: Final = 3.0
"""About, between two cuts."""
OUTAGE_SECONDS: Final = 20.0
"""Of each of `OUTAGES`: more batches than any replay buffer here holds."""
OUTAGES: Final = ((0.05, 0.05), (1.0, 0.0))
"""Shares of live and of replayed batches that are lost at first. Many wait then for what replay loses again and again; and all
that was said is too old for replay. What such times leave behind in an allocator would else look like growth whenever the
first of them comes. With more of replay lost a consumer may give up, DEGRADED until the cache is cleared."""
BEHIND_SECONDS: Final = 0.5
"""An engine that was held up longer does not hurry afterwards: no engine does, and its queue would measure the machine."""
WARM_UP: Final = 0.5
"""Share of the time that is not looked at: caches, buffers and the allocator fill."""
WINDOWS: Final = 20
"""Parts of the time that is looked at, for each of which the lowest note counts."""
SETTLE_SECONDS: Final = 60.0
START_SECONDS: Final = 30.0


class Allowance(NamedTuple):
    """How much a line may rise."""

    unit: str
    per_hour: float
    """Less than this is flat, however long it is watched."""
    noise: float
    """Less than this, from the beginning of the line to its end, is noise, however steep."""


ALLOWANCES: Final[Mapping[str, Allowance]] = {
    "memory": Allowance("MiB", 16.0, 8.0),
    "descriptors": Allowance("", 4.0, 3.0),
    "threads": Allowance("", 1.0, 0.9),
}


class Note(NamedTuple):
    """What one process uses at one moment."""

    at: float
    memory: float
    """Resident, MiB. Every process has glibc give back what is free (`trimming_memory`), which else looks like what is held."""
    descriptors: float
    threads: float


@dataclass(frozen=True, slots=True)
class Trend:
    """The line through the least that one process used of one thing."""

    process: str
    what: str
    first: float
    """Where the line begins, after the warm-up."""
    last: float
    """Where it ends."""
    highest: float
    per_hour: float
    grows: bool


def trends(process: str, notes: Sequence[Note], warm_up: float) -> list[Trend]:
    """One for each allowance, of the notes from `warm_up` seconds after the first on. None where those are fewer than three."""
    seen = [note for note in notes if note.at - notes[0].at >= warm_up] if notes else []
    if len(seen) < 3:
        return []
    return [_trend(process, what, [(note.at, getattr(note, what)) for note in seen]) for what in ALLOWANCES]


def _trend(process: str, what: str, points: Sequence[tuple[float, float]]) -> Trend:
    """The line whose slope is the median of those between any two of the lowest points (Theil, Sen): a few cannot bend it."""
    lowest = _lowest(points)
    slope = median((late - early) / (then - at) for (at, early), (then, late) in itertools.combinations(lowest, 2))
    level = median(value - slope * at for at, value in lowest)
    begin, end = points[0][0], points[-1][0]
    allowance = ALLOWANCES[what]
    grows = slope * 3600 > allowance.per_hour and slope * (end - begin) > allowance.noise
    highest = max(value for _, value in points)
    return Trend(process, what, level + slope * begin, level + slope * end, highest, slope * 3600, grows)


def _lowest(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The lowest point of each window."""
    begin, span = points[0][0], points[-1][0] - points[0][0]
    windows = itertools.groupby(points, lambda point: min(WINDOWS - 1, int((point[0] - begin) / span * WINDOWS)))
    return [min(window, key=itemgetter(1)) for _, window in windows]


def note(pid: int, now: float) -> Note:
    """What a process uses now. Raises `OSError` when it is gone."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if "VmRSS" not in fields:
        raise ProcessLookupError(f"process {pid} has ended")
    memory = int(fields["VmRSS"].split()[0]) / 1024
    return Note(now, memory, len(os.listdir(f"/proc/{pid}/fd")), int(fields["Threads"]))  # noqa: PTH208 - names, not paths


# --- the chain ---------------------------------------------------------------------------------------------------------------


def publish_on(pipe: Connection, endpoint: str, replay_endpoint: str) -> None:
    """An engine without an end, in a process of its own; on a request to stop, it reports what is true then."""
    with trimming_memory():
        _publish_on(pipe, endpoint, replay_endpoint)


def follow_on(pipe: Connection, consumer: Consumer) -> None:
    """A consumer in a process of its own."""
    with trimming_memory():
        follow(pipe, consumer)


def _publish_on(pipe: Connection, endpoint: str, replay_endpoint: str) -> None:
    dialect = dialect_for("vllm")
    cache = Cache(Random("soak"), Speech.of(dialect), Habits(BLOCKS, 16, True, 0.00001, 3))
    options: dict[str, Any] = {"bind": True, "dialect": dialect, "buffer_steps": 2_000, "heartbeat": 1.0}
    publisher, index = ZmqEventPublisher(0, endpoint, replay_endpoint, **options), PrefixIndex()
    pipe.send("open")
    began, reported = time.monotonic(), 0
    with suppress(EOFError):
        for number in itertools.count():
            batch = KVEventBatch(time.time(), cache.step(), 0)
            index.apply(Batch("truth", 0, 0, number, batch.ts, batch.events, False))
            publisher.publish(batch)
            ahead = number / RATE - (time.monotonic() - began)
            if ahead > 0.01:
                time.sleep(ahead)
            elif ahead < -BEHIND_SECONDS:
                began -= ahead
            if number % RATE == 0 and pipe.poll():
                pipe.recv()
                reported = number + 1
                break
        pipe.send((reported, bytes.fromhex(index.digest("truth"))))
        pipe.recv()


class Chain:
    """Engine, relay, consumers of both, and a service. A context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._undo = ExitStack()
        self.pids: dict[str, int] = {}
        self.legs: list[Leg] = []
        self.consumers: dict[str, Part] = {}

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _open(self) -> None:
        ports = [self._port() for _ in range(5)]
        self.engine = self._part("engine", publish_on, ports[0], ports[1])
        self.engine.receive(START_SECONDS)
        first = self._leg(ports[0], ports[1])
        relayed = ("--endpoint", ports[2], "--replay-endpoint", ports[3], "--journal", str(self._folder / "journal"))
        self._program("relay", "relay", f"engine={first.endpoint},{first.replay_endpoint}", *relayed, "--heartbeat", "1")
        second = self._leg(ports[2], ports[3])
        for name, leg, asynchronous in (("consumer", first, False), ("asyncio consumer, relayed", second, True)):
            consumer = Consumer(
                name, leg.endpoint, leg.replay_endpoint, str(self._folder), topic="", asynchronous=asynchronous, claims=False
            )
            self.consumers[name] = self._part(name, follow_on, consumer)
        self.http = ports[4].rpartition(":")[2]
        worker = f"engine={second.endpoint},{second.replay_endpoint}"
        state = ("--state-dir", str(self._folder / "state"), "--snapshot-seconds", "10")
        self._program("service, relayed", "serve", "--port", self.http, "--model", "m", "--worker", worker, *state)

    def _port(self) -> str:
        held = reserve_port(f"tcp://{HOST}:0")
        if held.holder is not None:
            self._undo.callback(held.holder.close)
        return held.endpoint

    def _leg(self, endpoint: str, replay_endpoint: str) -> Leg:
        leg = Leg(endpoint, replay_endpoint)
        self._undo.callback(leg.close)
        self.legs.append(leg)
        return leg

    def _part(self, name: str, target: Callable[..., None], *arguments: Any) -> Part:
        part = Part(name, target, *arguments)
        self._undo.callback(part.kill)
        self.pids[name] = part.pid
        return part

    def _program(self, name: str, *words: str | None) -> None:
        """A command of kvevents as operators start it, its log in the folder."""
        log = self._undo.enter_context((self._folder / f"{name}.log").open("wb"))
        command = [sys.executable, "-m", "kvevents", *(word or "" for word in words)]
        process = subprocess.Popen(command, cwd=CHECKOUT, stdout=log, stderr=log)
        self._undo.callback(process.wait)
        self._undo.callback(process.kill)
        self.pids[name] = process.pid

    def note(self, name: str, pid: int, now: float) -> Note:
        """Raises `RuntimeError`, with the end of its log, when a process is gone."""
        try:
            return note(pid, now)
        except OSError as error:
            log = self._folder / f"{name}.log"
            output = log.read_text(errors="replace")[-2_000:] if log.exists() else ""
            raise RuntimeError(f"{name} has ended: {output}") from error

    def ask_service(self) -> int:
        """One request; its status, 0 if nothing answers."""
        connection = HTTPConnection(HOST, int(self.http), timeout=5.0)
        try:
            connection.request("GET", "/v1/sources")
            response = connection.getresponse()
            response.read()
        except OSError:
            return 0
        else:
            return response.status
        finally:
            connection.close()

    def reports(self) -> dict[str, Report]:
        return {name: part.ask() for name, part in self.consumers.items()}


def flaps(legs: Sequence[Leg], draw: Random) -> Iterator[float]:
    """Does something to the network each time, the worst at first; seconds until the next."""
    for shares in OUTAGES:
        for leg in legs:
            for proxy, share in zip((leg.live, leg.replay), shares, strict=True):
                if proxy is not None:
                    proxy.drop(share, seed=draw.randrange(1 << 30))
        yield OUTAGE_SECONDS
    for leg in legs:
        leg.heal()
    while True:
        proxy = draw.choice([proxy for leg in legs for proxy in leg.proxies])
        proxy.drop(draw.choice((0.0, 0.0, 0.05)), seed=draw.randrange(1 << 30))
        proxy.cut()
        yield draw.expovariate(1 / FLAP_SECONDS)


def soak(chain: Chain, seconds: float, every: float) -> dict[str, list[Note]]:
    """Watch every process, and cut connections meanwhile."""
    notes: dict[str, list[Note]] = {name: [] for name in chain.pids}
    until(lambda: chain.ask_service() == 200, START_SECONDS)
    cuts = flaps(chain.legs, Random("flaps"))
    began = time.monotonic()
    flap_at = note_at = 0.0
    while (now := time.monotonic() - began) < seconds:
        if now >= flap_at:
            flap_at = now + next(cuts)
            chain.ask_service()
        if now >= note_at:
            note_at = now + every
            for name, pid in chain.pids.items():
                notes[name].append(chain.note(name, pid, now))
        time.sleep(min(flap_at, note_at) - now if min(flap_at, note_at) > now else 0.0)
    return notes


def settle(chain: Chain) -> list[str]:
    """When the network is whole again and the engine quiet, an EXACT consumer must hold what it holds; others are printed."""
    batches, truth = chain.engine.ask("stop", START_SECONDS)
    for leg in chain.legs:
        leg.heal()
    until(lambda: all(_is_right(each, truth) for each in chain.reports().values()), SETTLE_SECONDS, look=0.1)
    print(f"{batches:,} batches")
    found = []
    for name, each in chain.reports().items():
        counted, standing = each.counted, " ".join([each.trust, *each.reasons])
        print(f"{name}: {standing}, {counted['delivered']:,} deliveries, {counted['reconnects']:,} reconnects")
        if each.exact and each.digest != truth:
            found.append(f"{name} says EXACT, and does not hold what the engine holds")
    return found


def _is_right(report: Report, truth: bytes) -> bool:
    return report.exact and report.digest == truth


def table(found: Sequence[Trend]) -> str:
    """A row for each line."""
    rows = [["process", "what", "from", "to", "at most", "per hour", ""], ["---"] * 7]
    for trend in found:
        unit = ALLOWANCES[trend.what].unit
        figures = [f"{value:,.1f} {unit}".strip() for value in (trend.first, trend.last, trend.highest)]
        rows.append([trend.process, trend.what, *figures, f"{trend.per_hour:+,.1f}", "**grows**" if trend.grows else "flat"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def summary(found: Sequence[Trend]) -> str:
    """The rows of memory and of everything that grows, and how many others are flat."""
    shown = [trend for trend in found if trend.what == "memory" or trend.grows]
    return f"{table(shown)}\n\n{len(found) - len(shown)} trends of descriptors and threads are flat."


def main() -> int:
    """Returns 1 if something grows, or if a consumer is exact and wrong at the end."""
    options = _options()
    seconds = options.minutes * 60
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, Chain(Path(folder)) as chain:
        notes = soak(chain, seconds, options.every)
        failures = settle(chain)
    warm_up = seconds * WARM_UP
    found = [trend for name, each in notes.items() for trend in trends(name, each, warm_up)]
    print(f"\n{table(found)}\n")
    failures += [f"{trend.process}: {trend.what} grows by {trend.per_hour:,.1f} an hour" for trend in found if trend.grows]
    watched = f"{options.minutes:g} minutes, of which {warm_up / 60:.1f} to warm up"
    print("\n".join(failures) or f"{watched}: nothing grows")
    if options.write:
        before = report.DOCUMENT.read_text(encoding="utf-8")
        report.DOCUMENT.write_text(report.with_soak(before, f"{watched}.\n\n{summary(found)}"), encoding="utf-8")
    return int(bool(failures))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.system.chaos.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"how long ({MINUTES:g})")
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="between two notes (2)")
    parser.add_argument("--write", action="store_true", help="put the table into docs/developers/chaos.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
