"""Every shipped query agrees with a model of it in plain Python, on random and on hand-written histories."""

from __future__ import annotations

import math
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from export_cases import RECORDING, SIZE, cleared, history, removed, stored
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from kvevents.export import export, find_query, queries, run_query
from kvevents.recording import RecordedFrame, RecordingWriter

History = dict[str, Sequence[tuple[float, Sequence[KVEvent]]]]
Row = tuple[Any, ...]


@dataclass(eq=False)
class Residency:
    """The time that one block spends in one tier of one worker.

    `name` is the tokens of the block and of the blocks before it, which are equal across workers.
    """

    worker: str
    tier: str
    hash: int
    name: tuple[int, ...]
    stored: tuple[int, int, int]
    at: float
    ended: str = "end"
    ended_order: tuple[int, int, int] = (1 << 30, 0, 0)
    ended_at: float = 0.0
    returned: bool = False
    copies: int = 1

    @property
    def depth(self) -> int:
        return len(self.name)


def residencies_of(history: History) -> list[Residency]:
    """Return every residency of a block, derived from the events alone."""
    found: list[Residency] = []
    for worker, batches in history.items():
        own: list[Residency] = []
        for seq, (ts, events) in enumerate(batches):
            for position, event in enumerate(events):
                here = [residency for residency in own if residency.ended == "end"]
                if isinstance(event, BlockStored):
                    store(event, worker, (seq, position), ts, own)
                for index, value in enumerate(event.block_hashes if isinstance(event, BlockRemoved) else ()):
                    for residency in here:
                        if (residency.hash, residency.tier) != (value, tier(event)):
                            continue
                        residency.copies -= 1
                        if residency.copies == 0:
                            residency.ended, residency.ended_order, residency.ended_at = "removed", (seq, position, index), ts
                for residency in here if isinstance(event, AllBlocksCleared) else ():
                    residency.ended, residency.ended_order, residency.ended_at = "cleared", (seq, position, 0), ts
        for residency in own:
            residency.ended_at = batches[-1][0] if residency.ended == "end" else residency.ended_at
            residency.returned = is_return(residency, own)
        found += own
    return found


def tier(event: KVEvent) -> str:
    return (getattr(event, "medium", None) or "gpu").lower()


def store(event: BlockStored, worker: str, order: tuple[int, int], ts: float, own: list[Residency]) -> None:
    here = [residency for residency in own if residency.ended == "end"]
    prefix = next((residency.name for residency in here if residency.hash == event.parent_block_hash), ())
    for index, value in enumerate(event.block_hashes):
        moved = next((residency.name for residency in here if residency.hash == value), ())
        prefix = (*prefix, int(event.token_ids[index * SIZE])) if event.token_ids else moved  # type: ignore[arg-type]  # no pairs
        known = next((residency for residency in here if (residency.hash, residency.tier) == (value, tier(event))), None)
        if known is None:
            own.append(Residency(worker, tier(event), value, prefix, (*order, index), ts))
        else:
            known.copies += 1


def is_return(residency: Residency, own: list[Residency]) -> bool:
    """Return whether the block was removed before it was stored, without a clear in between."""
    same = [one for one in own if (one.tier, one.name) == (residency.tier, residency.name) and one.stored < residency.stored]
    before = max(same, key=lambda one: one.stored, default=None)
    clears = [one.ended_order for one in own if one.ended == "cleared" and one.ended_order < residency.stored]
    return before is not None and before.ended == "removed" and not any(clear > before.ended_order for clear in clears)


def bucket(value: int) -> tuple[int, int]:
    high = 1 << (value - 1).bit_length() if value > 1 else value
    return (high // 2 + 1 if value > 1 else value), high


def quantile(values: list[float], share: float) -> float | None:
    if not values:
        return None
    values = sorted(values)
    place = share * (len(values) - 1)
    low = math.floor(place)
    return values[low] + (values[min(low + 1, len(values) - 1)] - values[low]) * (place - low)


def group_by(residencies: Sequence[Residency], key: Callable[[Residency], Any]) -> Iterator[tuple[Any, list[Residency]]]:
    groups: dict[Any, list[Residency]] = defaultdict(list)
    for residency in residencies:
        groups[key(residency)].append(residency)
    return iter(sorted(groups.items()))


# --- models of the queries


def block_lifetime(residencies: list[Residency], _: History) -> list[Row]:
    rows: list[Row] = []
    for name, members in group_by(residencies, lambda residency: residency.tier):
        counts = [sum(residency.ended == how for residency in members) for how in ("removed", "cleared", "end")]
        ages = [residency.ended_at - residency.at for residency in members if residency.ended == "removed"]
        quantiles = [quantile(ages, share) for share in (0.1, 0.5, 0.9, 0.99, 1.0)]
        rows.append((name, 0, len(members), *counts, 0, *quantiles))
    return rows


def eviction_age(residencies: list[Residency], _: History) -> list[Row]:
    evicted = [residency for residency in residencies if residency.ended == "removed"]
    rows: list[Row] = []
    for (name, depths), members in group_by(evicted, lambda residency: (residency.tier, bucket(residency.depth))):
        ages = [residency.ended_at - residency.at for residency in members]
        returned = sum(returns_later(residency, residencies) for residency in members)
        rows.append((name, *depths, len(members), *(quantile(ages, share) for share in (0.1, 0.5, 0.9)), returned))
    return rows


def returns_later(evicted: Residency, residencies: list[Residency]) -> bool:
    """Return whether the next store of the same block is a return."""
    same = [one for one in residencies if (one.worker, one.tier, one.name) == (evicted.worker, evicted.tier, evicted.name)]
    later = [one for one in same if one.stored > evicted.ended_order]
    return bool(later) and min(later, key=lambda one: one.stored).returned


def duplicated_prefixes(residencies: list[Residency], _: History) -> list[Row]:
    rows: list[Row] = []
    for name, members in group_by(residencies, lambda residency: residency.tier):
        held: dict[int, float] = defaultdict(float)
        blocks: dict[int, set[Any]] = defaultdict(set)
        times = sorted({time for residency in members for time in (residency.at, residency.ended_at)})
        for block in {residency.name for residency in members}:
            for start, end in pairwise(times):
                workers = len(
                    {
                        residency.worker
                        for residency in members
                        if residency.name == block and residency.at <= start and residency.ended_at >= end
                    }
                )
                if workers:
                    held[workers] += workers * (end - start)
                    blocks[workers].add(block)
        total = sum(held.values())
        rows += [
            (name, count, len(blocks[count]), held[count], held[count] / total, held[count] / total * (count - 1) / count)
            for count in sorted(held)
        ]
    return rows


def hit_depth(residencies: list[Residency], history: History) -> list[Row]:
    found: dict[tuple[int, int], list[tuple[str, int]]] = defaultdict(list)
    gpu = [residency for residency in residencies if residency.tier == "gpu"]
    for worker, batches in history.items():
        own = [residency for residency in gpu if residency.worker == worker]
        for seq, (_, events) in enumerate(batches):
            for position in range(len(events)):
                new = [residency for residency in own if residency.stored[:2] == (seq, position)]
                if new:
                    first = min(new, key=lambda residency: residency.stored)
                    found[bucket(first.depth - 1)].append((classify_store(first, own), first.depth - 1))
    rows: list[Row] = []
    for ends, results in sorted(found.items()):
        counts = [sum(result == wanted for result, _ in results) for wanted in ("certain", "likely", "continued")]
        hit = sum(depth for result, depth in results if result in {"certain", "likely"})
        rows.append((*ends, len(results), *counts, hit * SIZE))
    return rows


def classify_store(first: Residency, own: list[Residency]) -> str:
    if first.depth == 1:
        return "miss"
    if first.stored[2] > 0:
        return "certain"  # the blocks before it in the same event were resident
    parent = max(
        (residency for residency in own if residency.name == first.name[:-1] and residency.stored < first.stored),
        key=lambda residency: residency.stored,
    )
    children = [
        residency for residency in own if residency.name[:-1] == parent.name and parent.stored < residency.stored < first.stored
    ]
    return "certain" if children else "likely" if first.at - parent.at > 5 else "continued"


MODELS: dict[str, Callable[[list[Residency], History], list[Row]]] = {
    "block-lifetime": block_lifetime,
    "duplicated-prefixes": duplicated_prefixes,
    "eviction-age": eviction_age,
    "hit-depth": hit_depth,
}


# --- histories


def random_history(seed: int) -> History:
    """Return histories of workers that serve prompts of a small tree, with caches that are too small for it.

    Prompts are stored whole or in pieces. Resident prefixes are announced again or not, some blocks move to host
    memory, and now and then the cache is cleared.
    """
    rng = random.Random(seed)
    return {f"w{number}": worker_history(rng, 10 * number + seed) for number in range(rng.randint(1, 3))}


def worker_history(rng: random.Random, salt: int) -> list[tuple[float, list[KVEvent]]]:
    batches: list[tuple[float, list[KVEvent]]] = []
    cached: list[tuple[int, ...]] = []
    host: list[tuple[int, ...]] = []
    ts = 100.0 + rng.random()
    for _ in range(rng.randint(5, 40)):
        ts += rng.choice([0.25, 2.0, 6.0])
        prompt = tuple(rng.randint(1, 3) for _ in range(rng.randint(1, 6)))
        prefixes = [prompt[: end + 1] for end in range(len(prompt))]
        events: list[KVEvent] = []
        if rng.random() < 0.05:
            events.append(cleared())
            cached, host = [], []
        start = sum(prefix in cached for prefix in prefixes)
        room = [prefix for prefix in cached if prefix not in prefixes and not any(is_child_of(one, prefix) for one in cached)]
        while len(cached) + len(prefixes) - start > 12 and room:
            evicted = room.pop(0)
            cached.remove(evicted)
            events.append(removed(hash_of(evicted, salt)))
            room += [evicted[:-1]] if is_evictable(evicted[:-1], cached, prefixes) else []
        begin = rng.choice([start, 0]) if start < len(prompt) else start
        pieces = (
            [(begin, len(prompt))]
            if rng.random() < 0.5 or begin == len(prompt)
            else [(begin, begin + 1), (begin + 1, len(prompt))]
        )
        for low, high in pieces:
            if low < high:
                hashes = [hash_of(prefix, salt) for prefix in prefixes[low:high]]
                parent = hash_of(prefixes[low - 1], salt) if low else None
                events.append(stored(hashes, prompt[low:high], parent, group_idx=0))
        # A block that is announced again counts as a copy. Remove the copy at once: an eviction removes each block once.
        events += [removed(hash_of(prefix, salt)) for prefix in prefixes[begin:start]]
        cached += prefixes[start:]
        if rng.random() < 0.2 and prompt not in host:
            host.append(prompt)
            events.append(BlockStored([hash_of(prompt, salt)], None, [], 0, medium="CPU"))
        batches.append((ts, events))
    return batches


def is_child_of(prefix: tuple[int, ...], parent: tuple[int, ...]) -> bool:
    return prefix[:-1] == parent


def is_evictable(prefix: tuple[int, ...], cached: list[tuple[int, ...]], needed: list[tuple[int, ...]]) -> bool:
    return prefix in cached and prefix not in needed and not any(is_child_of(one, prefix) for one in cached)


def hash_of(prefix: tuple[int, ...], salt: int) -> int:
    """Return a hash that differs between workers, as in engines with random seeds."""
    return hash((prefix, salt)) & ((1 << 64) - 1)


def approximate(row: Row) -> list[Any]:
    return [pytest.approx(value, abs=1e-6) if isinstance(value, float) else value for value in row]


@pytest.mark.parametrize("seed", range(8))
def test_every_query_agrees_with_its_python_model(seed: int, tmp_path: Path) -> None:
    batches_by_worker = random_history(seed)
    export([history(tmp_path / "run.jsonl", batches_by_worker)], tmp_path / "out")
    residencies = residencies_of(batches_by_worker)
    assert len(residencies) > 10
    for name, model in MODELS.items():
        wanted = model(residencies, batches_by_worker)
        assert [list(row) for row in run_query(tmp_path / "out", find_query(name)).rows] == [
            approximate(row) for row in wanted
        ], name


def test_the_random_histories_cover_every_case_that_the_queries_distinguish() -> None:
    """The histories contain removals, clears, returns, hits of each kind and blocks of several workers."""
    residencies = [residency for seed in range(8) for residency in residencies_of(random_history(seed))]
    assert {residency.ended for residency in residencies} == {"removed", "cleared", "end"}
    assert sum(residency.returned for residency in residencies) > 8
    hits = [row for seed in range(8) for row in hit_depth(residencies_of(random_history(seed)), random_history(seed))]
    assert all(sum(row[column] for row in hits) > 5 for column in (3, 4, 5))
    assert any(row[1] == 3 for seed in range(8) for row in duplicated_prefixes(residencies_of(random_history(seed)), {}))


def test_every_shipped_query_has_a_python_model() -> None:
    assert queries().keys() == MODELS.keys()


def test_removed_blocks_that_are_stored_again_are_counted_unless_a_clear_is_between(tmp_path: Path) -> None:
    """A clear counts also if it removes no block, and not if it is for another tier."""
    of_another_tier = AllBlocksCleared(unknown_fields={"medium": "CPU"})
    clears = {1: [], 2: [cleared()], 3: [of_another_tier], 4: [AllBlocksCleared(unknown_fields={"medium": "GPU"})]}
    batches_by_worker: History = {
        f"w{block}": [
            (100.0, [stored([block], [block])]),
            (103.0, [removed(block), *between]),
            (105.0, [stored([block], [block])]),
        ]
        for block, between in clears.items()
    }
    export([history(tmp_path / "run.jsonl", batches_by_worker)], tmp_path / "out")
    assert run_query(tmp_path / "out", find_query("eviction-age")).rows == [("gpu", 1, 1, 4, 3.0, 3.0, 3.0, 2)]


def test_duplicated_prefixes_are_weighted_by_the_time_that_two_workers_hold_them(tmp_path: Path) -> None:
    """Two workers hold block 1 under different hashes for 10 s, and one more each: a quarter of the memory is redundant."""
    batches_by_worker: History = {
        "a": [(100.0, [stored([1, 2], [1, 2])]), (110.0, [removed(2), removed(1)])],
        "b": [(100.0, [stored([77, 78], [1, 9])]), (110.0, [removed(78), removed(77)])],
    }
    export([history(tmp_path / "run.jsonl", batches_by_worker)], tmp_path / "out")
    assert run_query(tmp_path / "out", find_query("duplicated-prefixes")).rows == [
        ("gpu", 1, 2, 20.0, 0.5, 0.0),
        ("gpu", 2, 1, 20.0, 0.5, 0.25),
    ]


def test_hits_are_distinguished_from_requests_that_continue(tmp_path: Path) -> None:
    """The stores: two blocks, one more block of the same request, another branch (a hit), and one block after a long pause."""
    batches_by_worker: History = {
        "a": [
            (100.0, [stored([1, 2], [1, 2])]),
            (100.5, [stored([3], [3], 2)]),
            (101.0, [stored([4], [4], 2)]),
            (120.0, [stored([5], [5], 4)]),
        ]
    }
    export([history(tmp_path / "run.jsonl", batches_by_worker)], tmp_path / "out")
    assert run_query(tmp_path / "out", find_query("hit-depth")).rows == [
        (0, 0, 1, 0, 0, 0, 0),
        (2, 2, 2, 1, 0, 1, 8),
        (3, 4, 1, 0, 1, 0, 12),
    ]


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_query_runs_on_a_recorded_engine_and_on_an_empty_recording(name: str, tmp_path: Path) -> None:
    """The comment of each query explains all columns of its result and no others; it can name percentiles as a range."""
    export([RECORDING], tmp_path / "real")
    with RecordingWriter(tmp_path / "empty.jsonl") as writer:
        writer.write(RecordedFrame(socket="meta", run="none", frames=(), meta={}))
    export([tmp_path / "empty.jsonl"], tmp_path / "none")
    answer = run_query(tmp_path / "real", find_query(name))
    assert answer.rows
    assert run_query(tmp_path / "none", find_query(name)).rows == []
    comment = "\n".join(line for line in find_query(name).sql.splitlines() if line.startswith("--"))
    explained = re.findall(r"^--   (\w+(?:(?:, | \.\.\. )\w+)*)  ", comment, re.MULTILINE)
    named = {word for words in explained for word in re.split(r", | \.\.\. ", words)}
    assert named <= set(answer.columns)
    assert set(answer.columns) - named <= {"p50", "p90", "p99"}


def test_the_first_line_of_every_query_is_a_question() -> None:
    assert all(query.question.endswith("?") for query in queries().values())
