"""`make soak`: an engine, a relay, consumers and a service under churn and reconnects, whose use of resources must not grow.

Every few seconds the memory, descriptors and threads of each process are measured. The later half of the time counts: a line is
fitted through the lowest sample of each process in each of `WINDOWS` windows. A line that rises more than its allowance fails
the run. The lowest samples count since buffers fill and empty at any time, while a leak is part of every sample.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from multiprocessing.connection import Connection
from operator import itemgetter
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final, NamedTuple

from kvevents.cli.signals import trimming_memory
from kvevents.events import KVEventBatch
from kvevents.index import PrefixIndex
from kvevents.publisher import ZmqEventPublisher
from kvevents.stream import Batch
from kvevents.wire import dialect_for
from tests.system.chaos import report
from tests.system.chaos.consumer import Consumer, Report
from tests.system.chaos.consumer import run as follow_source
from tests.system.chaos_kit.cache import Cache, CacheSettings, DialectFeatures
from tests.system.chaos_kit.parts import Leg, Part, wait_until
from tests.system.chaos_kit.report import format_table
from tests.system.chaos_kit.stage import Stage
from tools.released import CHECKOUT

HOST: Final = "127.0.0.1"
MINUTES: Final = 4.0
RATE: Final = 1_000
"""Batches per second that the engine publishes."""
BLOCKS: Final = 5_000
"""Blocks that the engine holds."""
FLAP_SECONDS: Final = 3.0
"""Mean seconds between two cuts."""
OUTAGE_SECONDS: Final = 20.0
"""Seconds of each of `OUTAGES`, in which more batches are published than a replay buffer holds."""
OUTAGES: Final = ((0.05, 0.05), (1.0, 0.0))
"""Shares of live and of replayed batches that are lost at first. In the first outage many batches wait for missing ones, in the
second all batches leave the replay buffer. Memory that an allocator keeps after such times would else look like growth when the
first of them comes later. If replay lost more, a consumer might stay DEGRADED until the cache is cleared."""
MAX_BEHIND_SECONDS: Final = 0.5
"""Delay after which the engine does not catch up, as real engines do not: its queue would measure the machine."""
WARM_UP: Final = 0.5
"""Share of the time before measurements count: caches, buffers and the allocator fill."""
WINDOWS: Final = 20
"""Windows of the measured time. The lowest sample of each window counts."""
SETTLE_SECONDS: Final = 60.0
START_SECONDS: Final = 30.0


class Allowance(NamedTuple):
    """Limits of the rise of a trend."""

    unit: str
    per_hour: float
    """A slower rise is flat, however long it lasts."""
    noise: float
    """A smaller rise from begin to end is noise, however steep it is."""


ALLOWANCES: Final[Mapping[str, Allowance]] = {
    "memory": Allowance("MiB", 16.0, 8.0),
    "descriptors": Allowance("", 4.0, 3.0),
    "threads": Allowance("", 1.0, 0.9),
}


class Sample(NamedTuple):
    """Resources that a process uses at one moment."""

    at: float
    memory: float
    """Resident memory in MiB. Processes let glibc return free memory (`trimming_memory`), which would look like used memory."""
    descriptors: float
    threads: float


@dataclass(frozen=True, slots=True)
class Trend:
    """The line through the lowest samples of one quantity of one process."""

    process: str
    quantity: str
    first: float
    """Value at the begin of the line, after the warm-up."""
    last: float
    """Value at the end of the line."""
    highest: float
    per_hour: float
    grows: bool


def trends(process: str, samples: Sequence[Sample], warm_up: float) -> list[Trend]:
    """Return a trend for each allowance, of the samples after `warm_up` seconds; none if there are fewer than three."""
    measured = [sample for sample in samples if sample.at - samples[0].at >= warm_up] if samples else []
    if len(measured) < 3:
        return []
    return [
        _fit_trend(process, quantity, [(sample.at, getattr(sample, quantity)) for sample in measured])
        for quantity in ALLOWANCES
    ]


def _fit_trend(process: str, quantity: str, points: Sequence[tuple[float, float]]) -> Trend:
    """Return the Theil-Sen line of the lowest points. Its slope is the median of the slopes between two points."""
    lowest = _lowest_points(points)
    slope = median((late - early) / (then - at) for (at, early), (then, late) in itertools.combinations(lowest, 2))
    level = median(value - slope * at for at, value in lowest)
    begin, end = points[0][0], points[-1][0]
    allowance = ALLOWANCES[quantity]
    grows = slope * 3600 > allowance.per_hour and slope * (end - begin) > allowance.noise
    highest = max(value for _, value in points)
    return Trend(process, quantity, level + slope * begin, level + slope * end, highest, slope * 3600, grows)


def _lowest_points(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the lowest point of each window."""
    begin, span = points[0][0], points[-1][0] - points[0][0]
    windows = itertools.groupby(points, lambda point: min(WINDOWS - 1, int((point[0] - begin) / span * WINDOWS)))
    return [min(window, key=itemgetter(1)) for _, window in windows]


def sample(pid: int, now: float) -> Sample:
    """Return what a process uses now. Raises `OSError` if it has ended."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if "VmRSS" not in fields:
        raise ProcessLookupError(f"process {pid} has ended")
    memory = int(fields["VmRSS"].split()[0]) / 1024
    return Sample(now, memory, len(os.listdir(f"/proc/{pid}/fd")), int(fields["Threads"]))  # noqa: PTH208 - names, not paths


# --- the chain ---------------------------------------------------------------------------------------------------------------


def run_engine(pipe: Connection, endpoint: str, replay_endpoint: str) -> None:
    """Run an engine process. On a message it stops publishing and sends the number of batches and the digest of its cache."""
    with trimming_memory():
        _run_engine(pipe, endpoint, replay_endpoint)


def run_consumer(pipe: Connection, consumer: Consumer) -> None:
    """Run a consumer process."""
    with trimming_memory():
        follow_source(pipe, consumer)


def _run_engine(pipe: Connection, endpoint: str, replay_endpoint: str) -> None:
    dialect = dialect_for("vllm")
    cache = Cache(Random("soak"), DialectFeatures.of(dialect), CacheSettings(BLOCKS, 16, True, 0.00001, 3))
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
            elif ahead < -MAX_BEHIND_SECONDS:
                began -= ahead
            if number % RATE == 0 and pipe.poll():
                pipe.recv()
                reported = number + 1
                break
        pipe.send((reported, bytes.fromhex(index.digest("truth"))))
        pipe.recv()


class Chain(Stage):
    """An engine, a relay, consumers of both, and a service."""

    parent = None

    def __init__(self) -> None:
        super().__init__()
        self.pids: dict[str, int] = {}
        self.consumers: dict[str, Part] = {}

    def set_up(self) -> None:
        ports = [self.reserve_endpoint() for _ in range(5)]
        self.engine = self._measured_part("engine", run_engine, ports[0], ports[1], opens=True)
        first = self.add_leg(ports[0], ports[1])
        relayed = ("--endpoint", ports[2], "--replay", ports[3], "--journal", str(self.folder / "journal"))
        self._program("relay", "relay", f"engine={first.endpoint},{first.replay_endpoint}", *relayed, "--heartbeat", "1")
        second = self.add_leg(ports[2], ports[3])
        for name, leg, asynchronous in (("consumer", first, False), ("asyncio consumer, relayed", second, True)):
            consumer = Consumer(
                name,
                leg.endpoint,
                leg.replay_endpoint,
                str(self.folder),
                topic="",
                asynchronous=asynchronous,
                writes_claims=False,
            )
            self.consumers[name] = self._measured_part(name, run_consumer, consumer)
        self.http = ports[4].rpartition(":")[2]
        worker = f"engine={second.endpoint},{second.replay_endpoint}"
        state = ("--state-dir", str(self.folder / "state"), "--snapshot-seconds", "10")
        self._program("service, relayed", "serve", "--port", self.http, "--model", "m", "--worker", worker, *state)

    def _measured_part(self, name: str, target: Callable[..., None], *arguments: Any, opens: bool = False) -> Part:
        part = self.start_part(name, target, *arguments, opens=opens)
        self.pids[name] = part.pid
        return part

    def _program(self, name: str, *words: str | None) -> None:
        """Start a command of kvevents as operators do, with a log in the folder."""
        log = self.undo.enter_context((self.folder / f"{name}.log").open("wb"))
        command = [sys.executable, "-m", "kvevents", *(word or "" for word in words)]
        process = subprocess.Popen(command, cwd=CHECKOUT, stdout=log, stderr=log)
        self.undo.callback(process.wait)
        self.undo.callback(process.kill)
        self.pids[name] = process.pid

    def sample(self, name: str, pid: int, now: float) -> Sample:
        """Return what a process uses now. Raises `RuntimeError` with the end of its log if it has ended."""
        try:
            return sample(pid, now)
        except OSError as error:
            log = self.folder / f"{name}.log"
            output = log.read_text(errors="replace")[-2_000:] if log.exists() else ""
            raise RuntimeError(f"{name} has ended: {output}") from error

    def request_sources(self) -> int:
        """Send one request to the service and return the HTTP status, or 0 without an answer."""
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

    def request_reports(self) -> dict[str, Report]:
        return {name: part.exchange() for name, part in self.consumers.items()}


def disturb_network(legs: Sequence[Leg], draw: Random) -> Iterator[float]:
    """Disturb the network at each step, with the outages first. Yield the seconds until the next step."""
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


def soak(chain: Chain, seconds: float, every: float) -> dict[str, list[Sample]]:
    """Measure every process while the network is disturbed."""
    samples: dict[str, list[Sample]] = {name: [] for name in chain.pids}
    wait_until(lambda: chain.request_sources() == 200, START_SECONDS)
    cuts = disturb_network(chain.legs, Random("flaps"))
    began = time.monotonic()
    flap_at = sample_at = 0.0
    while (now := time.monotonic() - began) < seconds:
        if now >= flap_at:
            flap_at = now + next(cuts)
            chain.request_sources()
        if now >= sample_at:
            sample_at = now + every
            for name, pid in chain.pids.items():
                samples[name].append(chain.sample(name, pid, now))
        time.sleep(min(flap_at, sample_at) - now if min(flap_at, sample_at) > now else 0.0)
    return samples


def settle(chain: Chain) -> list[str]:
    """Stop the engine, repair the network and return the consumers that are EXACT and wrong. Print every state."""
    batches, truth = chain.engine.exchange("stop", START_SECONDS)
    for leg in chain.legs:
        leg.heal()
    wait_until(lambda: all(_is_right(each, truth) for each in chain.request_reports().values()), SETTLE_SECONDS, interval=0.1)
    print(f"{batches:,} batches")
    found = []
    for name, each in chain.request_reports().items():
        counted, state_text = each.counted, " ".join([each.trust, *each.reasons])
        print(f"{name}: {state_text}, {counted['delivered']:,} deliveries, {counted['reconnects']:,} reconnects")
        if each.is_exact and each.digest != truth:
            found.append(f"{name} is EXACT and does not hold what the engine holds")
    return found


def _is_right(report: Report, truth: bytes) -> bool:
    return report.is_exact and report.digest == truth


def tabulate(found: Sequence[Trend]) -> str:
    """Return a table with a row for each trend."""
    rows = []
    for trend in found:
        unit = ALLOWANCES[trend.quantity].unit
        figures = [f"{value:,.1f} {unit}".strip() for value in (trend.first, trend.last, trend.highest)]
        verdict = "**grows**" if trend.grows else "flat"
        rows.append([trend.process, trend.quantity, *figures, f"{trend.per_hour:+,.1f}", verdict])
    return format_table(["process", "what", "from", "to", "at most", "per hour", ""], rows)


def format_summary(found: Sequence[Trend]) -> str:
    """Return a table of memory and of everything that grows, and the number of other trends."""
    shown = [trend for trend in found if trend.quantity == "memory" or trend.grows]
    return f"{tabulate(shown)}\n\n{len(found) - len(shown)} trends of descriptors and threads are flat."


def main() -> int:
    """Return 1 if something grows, or if a consumer is EXACT and wrong at the end."""
    options = _options()
    seconds = options.minutes * 60
    with Chain() as chain:
        samples = soak(chain, seconds, options.every)
        failures = settle(chain)
    warm_up = seconds * WARM_UP
    found = [trend for name, each in samples.items() for trend in trends(name, each, warm_up)]
    print(f"\n{tabulate(found)}\n")
    failures += [f"{trend.process}: {trend.quantity} grows by {trend.per_hour:,.1f} an hour" for trend in found if trend.grows]
    watched = f"{options.minutes:g} minutes, of which {warm_up / 60:.1f} to warm up"
    print("\n".join(failures) or f"{watched}: nothing grows")
    if options.write:
        before = report.DOCUMENT.read_text(encoding="utf-8")
        report.DOCUMENT.write_text(report.with_soak(before, f"{watched}.\n\n{format_summary(found)}"), encoding="utf-8")
    return int(bool(failures))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.system.chaos.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"how long ({MINUTES:g})")
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="between two measurements (2)")
    parser.add_argument("--write", action="store_true", help="put the table into docs/developers/chaos.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
