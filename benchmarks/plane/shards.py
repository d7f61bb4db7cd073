"""`python -m benchmarks.plane shards`: a replica that holds all of a plane, beside three that hold a share of it each.

A plane's snapshots have all its blocks; 16 engines hold the prompts that are asked for. One `kvevents serve` begins with all of
them, three with a share each, every partition held by one of them. wrk asks them in turns, the same raw prompt again and again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.indexing.workload import Chain, pieces
from benchmarks.plane.bootstrap import ENGINES, NAME, Former, make
from benchmarks.report import machine
from benchmarks.service.asking import LENGTHS, RAW, RAW_PATH, raw
from benchmarks.service.running import HOST, Running, wait_until
from benchmarks.service.workers import prompt
from benchmarks.service.wrk import load
from tools.nats_process import Server, one_server

BLOCKS: Final = 2_000_000
PARTITIONS: Final = 64
SHARES: Final = 3
CLIENTS: Final = 16
SECONDS: Final = 3
RUNS: Final = 3
PATIENCE: Final = 10
"""Seconds for one answer: on a machine that is busy with other things a share asks others in vain, and then once more."""
LOOK: Final = 0.05
_PER_EVENT: Final = 512


class Prompted(Former):
    """One whose engines hold a prompt besides."""

    def __init__(self, blocks: int, whole: Chain) -> None:
        super().__init__(blocks, 0, PARTITIONS)
        self._whole = whole

    def fill(self) -> Iterator[tuple[int, list[Any]]]:
        """By partition what is said until all caches are full, and hold the prompt."""
        from kvevents.events import BlockStored, KVEventBatch  # noqa: PLC0415 - as in bootstrap
        from kvevents.plane.records import BatchRecord  # noqa: PLC0415 - as above
        from kvevents.wire import encode_batch  # noqa: PLC0415 - as above

        yield from super().fill()
        stores = [
            BlockStored(each.hashes, each.parent, each.tokens, each.block_size, medium="GPU", group_idx=0)
            for each in pieces(self._whole, _PER_EVENT)
        ]
        for number in range(ENGINES):
            key = self.card(number).key
            batch = encode_batch(KVEventBatch(0.0, [*stores]))
            yield self.layout.partition_of(key[0]), [BatchRecord(key[0], key[1], 0, self._numbers[number], False, batch)]
            self._numbers[number] += 1


def command(server: Server, name: str, *, is_share: bool) -> Callable[[int], list[str]]:
    """Of a replica, by its port."""

    def made(port: int) -> list[str]:
        plane = ("--nats", server.url, "--plane", NAME, "--replica-name", name, "--snapshot-seconds", "1000000")
        share = ("--shard-url", f"http://{HOST}:{port}", "--replication-factor", "1") if is_share else ()
        return [sys.executable, "-m", "kvevents", "serve", "--host", HOST, "--port", str(port), *plane, *share]

    return made


def held(replica: Running, tokens: Any) -> list[tuple[str, int]]:
    """By engine how much of a prompt it holds; nothing where the answer is not whole."""
    answer = json.loads(replica.send("POST", RAW_PATH, raw(tokens), RAW))
    return [] if answer["missing"] else sorted((each["instance"], each["tokens"]) for each in answer["workers"])


def blocks_in(replica: Running) -> int:
    """Of its own index."""
    return int(json.loads(replica.ask("GET", "/v1/stats"))["blocks"])


def incomplete(replica: Running) -> int:
    """Answers that were not whole so far."""
    found = re.search(rb"^kvevents_shard_incomplete_answers_total (\d+)", replica.ask("GET", "/metrics"), re.MULTILINE)
    return int(found[1]) if found else 0


# --- what is measured -------------------------------------------------------------------------------------------------------


class Loaded(NamedTuple):
    """What came of one load; times in milliseconds, of CPU in microseconds a request, by all replicas together."""

    p50: float
    p99: float
    rate: float
    cpu: float


def ask(fleet: list[Running], asked: list[Running], body: bytes, clients: int, seconds: int) -> Loaded:
    """Have clients ask some of the replicas of a fleet, as many of each as of any other."""
    before = sum(each.cpu for each in fleet)
    shares = [clients // len(asked) + (at < clients % len(asked)) for at in range(len(asked))]
    with ThreadPoolExecutor(len(asked)) as pool:
        urls = [f"http://{HOST}:{each.port}{RAW_PATH}" for each in asked]
        done = list(pool.map(lambda url, count: load(url, body, RAW, count, seconds, PATIENCE), urls, shares))
    if not all(each.requests for each in done):
        raise RuntimeError(f"not one request was answered in {seconds} s")
    cpu = (sum(each.cpu for each in fleet) - before) / sum(each.requests for each in done) * 1e6
    # Of several askers the one that was served worst.
    return Loaded(
        max(each.p50 for each in done) / 1e3, max(each.p99 for each in done) / 1e3, sum(each.rate for each in done), cpu
    )


def figures(fleet: list[Running], body: bytes, seconds: int) -> dict[str, float]:
    """One client and many, of one replica and of all."""
    ask(fleet, fleet, body, CLIENTS, seconds)  # warms up
    one = ask(fleet, fleet[:1], body, 1, seconds)
    many = ask(fleet, fleet[:1], body, CLIENTS, seconds)
    spread = ask(fleet, fleet, body, CLIENTS, seconds) if len(fleet) > 1 else many
    return {
        "one client: p50, ms": one.p50,
        "one client: p99, ms": one.p99,
        "one client: CPU of a request, us": one.cpu,
        f"{CLIENTS} clients of one replica: requests/s": many.rate,
        f"{CLIENTS} clients of one replica: p50, ms": many.p50,
        f"{CLIENTS} clients of one replica: p99, ms": many.p99,
        f"{CLIENTS} clients of all replicas: requests/s": spread.rate,
        f"{CLIENTS} clients of all replicas: CPU of a request, us": spread.cpu,
    }


class Found(NamedTuple):
    """Of one fleet."""

    blocks: list[int]
    resident: list[int]
    incomplete: list[int]
    """Answers that were not whole while it was measured."""
    runs: dict[int, list[dict[str, float]]]
    """By length of the prompt."""


def measure(server: Server, whole: Chain, runs: int, seconds: int) -> tuple[Found, Found]:
    """The replica that holds everything, and those that hold a share each."""
    with ExitStack() as stack:
        alone = [stack.enter_context(Running(command(server, "whole", is_share=False)))]
        names = [f"share-{number}" for number in range(SHARES)]
        shares = [stack.enter_context(Running(command(server, name, is_share=True))) for name in names]
        wanted = sorted((Former.card(number).instance, len(whole.tokens)) for number in range(ENGINES))
        fleets = (alone, shares)
        for replica in (*alone, *shares):
            _wait_for(replica, whole.tokens, wanted)
        # Those that came first may hold more than their share for a while.
        whole_index = blocks_in(alone[0])
        wait_until(lambda: sum(map(blocks_in, shares)) == whole_index, "each block in one share", pause=LOOK)
        found = tuple(
            Found([blocks_in(each) for each in fleet], [], [sum(map(incomplete, fleet))], {tokens: [] for tokens in LENGTHS})
            for fleet in fleets
        )
        for run in range(runs):
            for tokens in LENGTHS:
                body = raw(whole.tokens[:tokens])
                for fleet, kept in zip(fleets, found, strict=True):
                    kept.runs[tokens].append(figures(fleet, body, seconds))
            print(f"   run {run + 1} of {runs}", flush=True)
        for fleet, kept in zip(fleets, found, strict=True):
            kept.resident.extend(replica.resident for replica in fleet)
            for replica in fleet:
                replica.hang_up()
            kept.incomplete.append(sum(map(incomplete, fleet)) - kept.incomplete.pop())
        if any(held(each, whole.tokens) != wanted for each in (*alone, *shares)):
            sys.exit("an answer was not whole at the end")
        return found[0], found[1]


def _wait_for(replica: Running, tokens: Any, wanted: list[tuple[str, int]]) -> None:
    """Until its answers are whole."""

    def is_whole() -> bool:
        # Before any engine is known no worker serves the model, which is an error.
        return bool(json.loads(replica.ask("GET", "/v1/sources"))["sources"]) and held(replica, tokens) == wanted

    # Before any engine is known no worker serves the model, which is an error.
    wait_until(is_whole, "a whole answer", pause=LOOK)


# --- output -----------------------------------------------------------------------------------------------------------------


# --- output -----------------------------------------------------------------------------------------------------------------
def table(alone: Found, shares: Found) -> str:
    """Medians of all runs."""
    lines = [
        f"| | one that holds everything | {SHARES} that hold a share each |",
        "|---|---|---|",
        f"| blocks in the index of each | {_listed(alone.blocks)} | {_listed(shares.blocks)} |",
        f"| memory of each, MB | {_listed(alone.resident, 1e6)} | {_listed(shares.resident, 1e6)} |",
    ]
    lines.append(f"| answers that were not whole | {_listed(alone.incomplete)} | {_listed(shares.incomplete)} |")
    for tokens in LENGTHS:
        for name in alone.runs[tokens][0]:
            values = [statistics.median(run[name] for run in each.runs[tokens]) for each in (alone, shares)]
            lines.append(f"| {tokens:,} tokens, {name} | {' | '.join(map(_number, values))} |")
    return "\n".join(lines)


def _listed(values: list[int], unit: float = 1) -> str:
    return ", ".join(f"{value / unit:,.0f}" for value in values)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main(arguments: list[str] | None = None) -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plane shards", description=__doc__)
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="of all snapshots (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=RUNS, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="of each load (default: %(default)s)")
    options = parser.parse_args(arguments)
    print(machine(), flush=True)
    whole = prompt(max(LENGTHS))
    with tempfile.TemporaryDirectory() as folder, one_server(Path(folder)) as server:
        asyncio.run(make(server, Prompted(options.blocks, whole)))
        alone, shares = measure(server, whole, options.runs, options.seconds)
    print(table(alone, shares))
    return 0


if __name__ == "__main__":
    sys.exit(main())
