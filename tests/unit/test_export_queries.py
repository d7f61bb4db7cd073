"""Every shipped query agrees with its comment, compared with plain Python on random and on hand-written histories."""

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
GROWTHS = (1.1, 1.25, 1.5, 2.0, 4.0)


@dataclass(eq=False)
class Stay:
    """A block in a tier of a worker. `name` is its tokens with those before it, equal across workers."""

    worker: str
    tier: str
    hash: int
    name: tuple[int, ...]
    stored: tuple[int, int, int]
    at: float
    ended: str = "end"
    ended_order: tuple[int, int, int] = (1 << 30, 0, 0)
    ended_at: float = 0.0
    distance: int | None = None
    copies: int = 1

    @property
    def depth(self) -> int:
        return len(self.name)


def stays_of(history: History) -> list[Stay]:
    """What was resident, from the events alone."""
    found: list[Stay] = []
    for worker, batches in history.items():
        mine: list[Stay] = []
        for seq, (ts, events) in enumerate(batches):
            for position, event in enumerate(events):
                here = [stay for stay in mine if stay.ended == "end"]
                if isinstance(event, BlockStored):
                    store(event, worker, (seq, position), ts, mine)
                for index, value in enumerate(event.block_hashes if isinstance(event, BlockRemoved) else ()):
                    for stay in here:
                        if (stay.hash, stay.tier) != (value, tier(event)):
                            continue
                        stay.copies -= 1
                        if stay.copies == 0:
                            stay.ended, stay.ended_order, stay.ended_at = "removed", (seq, position, index), ts
                for stay in here if isinstance(event, AllBlocksCleared) else ():
                    stay.ended, stay.ended_order, stay.ended_at = "cleared", (seq, position, 0), ts
        for stay in mine:
            stay.ended_at = batches[-1][0] if stay.ended == "end" else stay.ended_at
            stay.distance = distance(stay, mine)
        found += mine
    return found


def tier(event: KVEvent) -> str:
    return (getattr(event, "medium", None) or "gpu").lower()


def store(event: BlockStored, worker: str, order: tuple[int, int], ts: float, mine: list[Stay]) -> None:
    here = [stay for stay in mine if stay.ended == "end"]
    prefix = next((stay.name for stay in here if stay.hash == event.parent_block_hash), ())
    for index, value in enumerate(event.block_hashes):
        moved = next((stay.name for stay in here if stay.hash == value), ())
        prefix = (*prefix, int(event.token_ids[index * SIZE])) if event.token_ids else moved  # type: ignore[arg-type]  # no pairs
        known = next((stay for stay in here if (stay.hash, stay.tier) == (value, tier(event))), None)
        if known is None:
            mine.append(Stay(worker, tier(event), value, prefix, (*order, index), ts))
        else:
            known.copies += 1


def distance(stay: Stay, mine: list[Stay]) -> int | None:
    """Different blocks stored between the last removal of this one and its store, unless a clear is between."""
    same = [one for one in mine if (one.tier, one.name) == (stay.tier, stay.name) and one.stored < stay.stored]
    before = max(same, key=lambda one: one.stored, default=None)
    clears = [one.ended_order for one in mine if one.ended == "cleared" and one.ended_order < stay.stored]
    if before is None or before.ended != "removed" or any(clear > before.ended_order for clear in clears):
        return None
    between = {one.name for one in mine if one.tier == stay.tier and before.ended_order < one.stored < stay.stored}
    return len(between)


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


def grouped(stays: Sequence[Stay], key: Callable[[Stay], Any]) -> Iterator[tuple[Any, list[Stay]]]:
    groups: dict[Any, list[Stay]] = defaultdict(list)
    for stay in stays:
        groups[key(stay)].append(stay)
    return iter(sorted(groups.items()))


# --- what each query must answer


def block_lifetime(stays: list[Stay], _: History) -> list[Row]:
    rows: list[Row] = []
    for name, those in grouped(stays, lambda stay: stay.tier):
        counts = [sum(stay.ended == how for stay in those) for how in ("removed", "cleared", "end")]
        ages = [stay.ended_at - stay.at for stay in those if stay.ended == "removed"]
        quantiles = [quantile(ages, share) for share in (0.1, 0.5, 0.9, 0.99, 1.0)]
        rows.append((name, 0, len(those), *counts, 0, *quantiles))
    return rows


def eviction_age(stays: list[Stay], _: History) -> list[Row]:
    gone = [stay for stay in stays if stay.ended == "removed"]
    rows: list[Row] = []
    for (name, depths), those in grouped(gone, lambda stay: (stay.tier, bucket(stay.depth))):
        ages = [stay.ended_at - stay.at for stay in those]
        back = sum(comes_back(stay, stays) for stay in those)
        rows.append((name, *depths, len(those), *(quantile(ages, share) for share in (0.1, 0.5, 0.9)), back))
    return rows


def comes_back(gone: Stay, stays: list[Stay]) -> bool:
    """Whether the next store of the same block is a return."""
    same = [one for one in stays if (one.worker, one.tier, one.name) == (gone.worker, gone.tier, gone.name)]
    later = [one for one in same if one.stored > gone.ended_order]
    return bool(later) and min(later, key=lambda one: one.stored).distance is not None


def reuse_distance(stays: list[Stay], _: History) -> list[Row]:
    returns = [stay for stay in stays if stay.distance is not None]
    rows: list[Row] = []
    for name, those in grouped(returns, lambda stay: stay.tier):
        so_far = 0
        for ends, some in grouped(those, lambda stay: bucket(stay.distance or 0)):
            so_far += len(some)
            rows.append((name, *ends, len(some), SIZE * len(some), len(some) / len(those), so_far / len(those)))
    return rows


def larger_cache(stays: list[Stay], _: History) -> list[Row]:
    rows: list[Row] = []
    for name, those in grouped(stays, lambda stay: stay.tier):
        peaks = {worker: peak(mine) for worker, mine in grouped(those, lambda stay: stay.worker)}
        for growth in GROWTHS:
            extra = {worker: math.ceil(most * (growth - 1) - 1e-9) for worker, most in peaks.items()}
            saved = [stay for stay in those if all(stays_in(one, extra[stay.worker]) for one in up_to(stay, those))]
            rows.append((name, growth, sum(extra.values()), len(saved), SIZE * len(saved), len(saved) / len(those)))
    return rows


def peak(stays: list[Stay]) -> int:
    return max(sum(one.stored <= stay.stored < one.ended_order for one in stays) for stay in stays)


def up_to(stay: Stay, stays: list[Stay]) -> list[Stay]:
    """The blocks of its store up to this one."""
    return [
        one
        for one in stays
        if one.worker == stay.worker and one.stored[:2] == stay.stored[:2] and one.stored[2] <= stay.stored[2]
    ]


def stays_in(stay: Stay, extra: int) -> bool:
    return stay.distance is not None and stay.distance <= extra


def duplicated_prefixes(stays: list[Stay], _: History) -> list[Row]:
    rows: list[Row] = []
    for name, those in grouped(stays, lambda stay: stay.tier):
        held: dict[int, float] = defaultdict(float)
        blocks: dict[int, set[Any]] = defaultdict(set)
        times = sorted({time for stay in those for time in (stay.at, stay.ended_at)})
        for block in {stay.name for stay in those}:
            for start, end in pairwise(times):
                workers = len(
                    {stay.worker for stay in those if stay.name == block and stay.at <= start and stay.ended_at >= end}
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


def hit_depth(stays: list[Stay], history: History) -> list[Row]:
    found: dict[tuple[int, int], list[tuple[str, int]]] = defaultdict(list)
    gpu = [stay for stay in stays if stay.tier == "gpu"]
    for worker, batches in history.items():
        mine = [stay for stay in gpu if stay.worker == worker]
        for seq, (_, events) in enumerate(batches):
            for position in range(len(events)):
                new = [stay for stay in mine if stay.stored[:2] == (seq, position)]
                if new:
                    first = min(new, key=lambda stay: stay.stored)
                    found[bucket(first.depth - 1)].append((judged(first, mine), first.depth - 1))
    rows: list[Row] = []
    for ends, verdicts in sorted(found.items()):
        counts = [sum(verdict == wanted for verdict, _ in verdicts) for wanted in ("certain", "likely", "continued")]
        hit = sum(depth for verdict, depth in verdicts if verdict in {"certain", "likely"})
        rows.append((*ends, len(verdicts), *counts, hit * SIZE))
    return rows


def judged(first: Stay, mine: list[Stay]) -> str:
    if first.depth == 1:
        return "miss"
    if first.stored[2] > 0:
        return "certain"  # the blocks before it in its own event were there
    parent = max(
        (stay for stay in mine if stay.name == first.name[:-1] and stay.stored < first.stored), key=lambda stay: stay.stored
    )
    children = [stay for stay in mine if stay.name[:-1] == parent.name and parent.stored < stay.stored < first.stored]
    return "certain" if children else "likely" if first.at - parent.at > 5 else "continued"


MODELS: dict[str, Callable[[list[Stay], History], list[Row]]] = {
    "block-lifetime": block_lifetime,
    "duplicated-prefixes": duplicated_prefixes,
    "eviction-age": eviction_age,
    "hit-depth": hit_depth,
    "larger-cache": larger_cache,
    "reuse-distance": reuse_distance,
}


# --- histories


def random_history(seed: int) -> History:
    """Workers that serve prompts of a small tree, with caches too small for it, and now and then a clear; prompts are stored
    whole or in pieces, held beginnings announced again or not, some moved to the host."""
    rng = random.Random(seed)
    return {f"w{number}": worker_history(rng, 10 * number + seed) for number in range(rng.randint(1, 3))}


def worker_history(rng: random.Random, salt: int) -> list[tuple[float, list[KVEvent]]]:
    batches: list[tuple[float, list[KVEvent]]] = []
    there: list[tuple[int, ...]] = []
    host: list[tuple[int, ...]] = []
    ts = 100.0 + rng.random()
    for _ in range(rng.randint(5, 40)):
        ts += rng.choice([0.25, 2.0, 6.0])
        prompt = tuple(rng.randint(1, 3) for _ in range(rng.randint(1, 6)))
        prefixes = [prompt[: end + 1] for end in range(len(prompt))]
        events: list[KVEvent] = []
        if rng.random() < 0.05:
            events.append(cleared())
            there, host = [], []
        start = sum(prefix in there for prefix in prefixes)
        room = [prefix for prefix in there if prefix not in prefixes and not any(has_parent(one, prefix) for one in there)]
        while len(there) + len(prefixes) - start > 12 and room:
            gone = room.pop(0)
            there.remove(gone)
            events.append(removed(hash_of(gone, salt)))
            room += [gone[:-1]] if can_go(gone[:-1], there, prefixes) else []
        begin = rng.choice([start, 0]) if start < len(prompt) else start
        pieces = (
            [(begin, len(prompt))]
            if rng.random() < 0.5 or begin == len(prompt)
            else [(begin, begin + 1), (begin + 1, len(prompt))]
        )
        for low, high in pieces:
            if low < high:
                hashes = [hash_of(prefix, salt) for prefix in prefixes[low:high]]
                events.append(stored(hashes, prompt[low:high], hash_of(prefixes[low - 1], salt) if low else None))
        # A block announced again is a copy; it leaves with the first removal here, so take it back at once.
        events += [removed(hash_of(prefix, salt)) for prefix in prefixes[begin:start]]
        there += prefixes[start:]
        if rng.random() < 0.2 and prompt not in host:
            host.append(prompt)
            events.append(BlockStored([hash_of(prompt, salt)], None, [], 0, medium="CPU"))
        batches.append((ts, events))
    return batches


def has_parent(prefix: tuple[int, ...], parent: tuple[int, ...]) -> bool:
    return prefix[:-1] == parent


def can_go(prefix: tuple[int, ...], there: list[tuple[int, ...]], needed: list[tuple[int, ...]]) -> bool:
    return prefix in there and prefix not in needed and not any(has_parent(one, prefix) for one in there)


def hash_of(prefix: tuple[int, ...], salt: int) -> int:
    """Each worker has hashes of its own, as engines with random seeds do."""
    return hash((prefix, salt)) & ((1 << 64) - 1)


def about(row: Row) -> list[Any]:
    return [pytest.approx(value, abs=1e-6) if isinstance(value, float) else value for value in row]


@pytest.mark.parametrize("seed", range(8))
def test_every_query_answers_what_plain_python_does(seed: int, tmp_path: Path) -> None:
    made = random_history(seed)
    export([history(tmp_path / "run.jsonl", made)], tmp_path / "out")
    stays = stays_of(made)
    assert len(stays) > 10
    for name, model in MODELS.items():
        wanted = model(stays, made)
        assert [list(row) for row in run_query(tmp_path / "out", find_query(name)).rows] == [about(row) for row in wanted], name


def test_the_random_histories_cover_all_that_the_queries_distinguish() -> None:
    """Removals, clears, returns, hits of each kind, blocks of several workers: else the test above would show little."""
    stays = [stay for seed in range(8) for stay in stays_of(random_history(seed))]
    assert {stay.ended for stay in stays} == {"removed", "cleared", "end"}
    assert len({stay.distance for stay in stays}) > 8
    hits = [row for seed in range(8) for row in hit_depth(stays_of(random_history(seed)), random_history(seed))]
    assert all(sum(row[column] for row in hits) > 5 for column in (3, 4, 5))
    assert any(row[1] == 3 for seed in range(8) for row in duplicated_prefixes(stays_of(random_history(seed)), {}))


def test_every_query_that_is_shipped_has_a_model_here() -> None:
    assert queries().keys() == MODELS.keys()


def test_a_cache_of_three_blocks_that_needed_four(tmp_path: Path) -> None:
    """Blocks 1 to 4 in turn in a cache of three that drops the oldest: each return misses by one block, so that with one more
    every store but the first four would have been saved."""
    batches: list[tuple[float, list[KVEvent]]] = []
    for turn in range(12):
        gone = [removed((turn - 3) % 4 + 1)] if turn >= 3 else []
        batches.append((float(turn + 1), [*gone, stored([turn % 4 + 1], [turn % 4])]))
    export([history(tmp_path / "run.jsonl", {"a": batches})], tmp_path / "out")
    assert run_query(tmp_path / "out", find_query("reuse-distance")).rows == [("gpu", 1, 1, 8, 32, 1.0, 1.0)]
    larger = run_query(tmp_path / "out", find_query("larger-cache")).rows
    assert [row[1:5] for row in larger] == [
        (1.1, 1, 8, 32),
        (1.25, 1, 8, 32),
        (1.5, 2, 8, 32),
        (2.0, 3, 8, 32),
        (4.0, 9, 8, 32),
    ]
    (lifetimes,) = run_query(tmp_path / "out", find_query("block-lifetime")).rows
    assert lifetimes == ("gpu", 0, 12, 9, 0, 3, 0, 3.0, 3.0, 3.0, 3.0, 3.0)


def test_two_workers_that_share_one_block_of_three(tmp_path: Path) -> None:
    """Both hold block 1 under hashes of their own for 10 s, and each one more: a quarter of the memory is spare."""
    made: History = {
        "a": [(100.0, [stored([1, 2], [1, 2])]), (110.0, [removed(2), removed(1)])],
        "b": [(100.0, [stored([77, 78], [1, 9])]), (110.0, [removed(78), removed(77)])],
    }
    export([history(tmp_path / "run.jsonl", made)], tmp_path / "out")
    assert run_query(tmp_path / "out", find_query("duplicated-prefixes")).rows == [
        ("gpu", 1, 2, 20.0, 0.5, 0.0),
        ("gpu", 2, 1, 20.0, 0.5, 0.25),
    ]


def test_hits_are_distinguished_from_requests_that_go_on(tmp_path: Path) -> None:
    """Two blocks stored; one more by the same request; another branch, which is a hit; and one after a long silence."""
    made: History = {
        "a": [
            (100.0, [stored([1, 2], [1, 2])]),
            (100.5, [stored([3], [3], 2)]),
            (101.0, [stored([4], [4], 2)]),
            (120.0, [stored([5], [5], 4)]),
        ]
    }
    export([history(tmp_path / "run.jsonl", made)], tmp_path / "out")
    assert run_query(tmp_path / "out", find_query("hit-depth")).rows == [
        (0, 0, 1, 0, 0, 0, 0),
        (2, 2, 2, 1, 0, 1, 8),
        (3, 4, 1, 0, 1, 0, 12),
    ]


def lru(blocks: int) -> tuple[int, list[tuple[float, list[KVEvent]]]]:
    """An engine whose cache of so many blocks drops the least recently used, hits included: stored blocks, and batches."""
    rng, cache, batches, count = random.Random(1), dict[int, None](), list[tuple[float, list[KVEvent]]](), 0
    for number in range(1500):
        user = min(int(rng.expovariate(1 / 60)), 400)
        names = [user % 7, *range(1000 * (user + 1), 1000 * (user + 1) + 2 + user % 9)]
        hashes = [hash_of(tuple(names[: end + 1]), 0) for end in range(len(names))]
        hit = next((index for index, value in enumerate(hashes) if value not in cache), len(hashes))
        for value in reversed(hashes[:hit]):
            cache[value] = cache.pop(value)
        gone = list(cache)[: max(len(cache) + len(hashes) - hit - blocks, 0)]
        for value in gone:
            del cache[value]
        cache |= dict.fromkeys(reversed(hashes[hit:]))
        for value in reversed(hashes):
            cache[value] = cache.pop(value)
        count += len(hashes) - hit
        store = [stored(hashes[hit:], names[hit:], hashes[hit - 1] if hit else None)] if hit < len(hashes) else []
        batches.append((100 + number / 100, [*map(removed, gone), *store]))
    return count, batches


def test_savings_of_a_larger_cache_are_underestimated(tmp_path: Path) -> None:
    """Compared with engines that really have the larger caches: between 75 % and 100 % of the true savings."""
    stores, batches = lru(300)
    export([history(tmp_path / "run.jsonl", {"a": batches})], tmp_path / "out")
    for _, growth, extra, saved, *_ in run_query(tmp_path / "out", find_query("larger-cache")).rows:
        truth = stores - lru(300 + extra)[0]
        assert truth > 100
        assert 0.75 * truth <= saved <= truth, growth


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_queries_answer_of_a_real_engine_and_of_an_empty_recording(name: str, tmp_path: Path) -> None:
    """And every column that comes out is explained in the query's comment."""
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


def test_a_query_says_in_its_first_line_what_it_answers() -> None:
    assert all(query.question.endswith("?") for query in queries().values())
