"""The prefix index on captured streams of engines, and on an engine whose own answer to each request is known."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace

from index_cases import (
    Choices,
    Engine,
    Feed,
    Traffic,
    blocks_of,
    count_blocks,
    count_orphans,
    namespace,
    tokens_by_level,
    tokens_of,
)
from index_keys import Scope, Worker
from index_model import Oracle
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from kvevents.index import PrefixIndex
from kvevents.recording import RecordedEndpoint, live_batches, recorded_endpoints
from kvevents.stream import Batch, BatchReport, inspect_events
from kvevents.wire import decode_batch
from tests.system.vllm_oracle.lookups import WINDOWED, History, LookupPredictor, recorded
from wire_cases import CAPTURES, DATA, GOLDENS, Golden, batch_of, make_store

WORKER: Worker = ("vllm", 0)
STREAMS = recorded_endpoints(CAPTURES)


class IndexesAndOracle:
    """One stream, applied as events to one index, as payloads to another index, and to the oracle."""

    def __init__(self) -> None:
        self.by_event, self.by_payload, self.oracle = PrefixIndex(), PrefixIndex(), Oracle()
        self.prompts: dict[tuple[int, ...], Scope] = {}

    def take(self, seq: int, payload: bytes) -> None:
        decoded = decode_batch(payload)
        batch = Batch(*WORKER, 0, seq, decoded.batch.ts, decoded.batch.events, False, payload)
        assert self.oracle.apply(batch) == self.by_event.apply(batch).status == "applied"
        applied = self.by_payload.apply_payload(WORKER, 0, seq, payload)
        expected = inspect_events(decoded.batch.events, decoded.rejected) or BatchReport()
        estimate = None if applied.report is None else applied.report.estimate
        assert (applied.status, applied.report or BatchReport()) == ("applied", replace(expected, estimate=estimate))

    def check(self) -> None:
        expected = self.oracle.blocks(WORKER)
        assert blocks_of(self.by_event, WORKER) == blocks_of(self.by_payload, WORKER) == expected
        assert self.by_event.digest(WORKER) == self.by_payload.digest(WORKER)
        waiting = len(self.oracle.streams[WORKER].waiting)
        for index in (self.by_event, self.by_payload):
            assert index.stats().blocks == count_blocks(self.oracle, WORKER)
            assert count_orphans(index) == waiting
        for tokens, scope in list(self.prompts.items())[-6:]:
            found = self.oracle.match(tokens, scope)
            for index in (self.by_event, self.by_payload):
                assert tokens_by_level(index.match(list(tokens), namespace(scope))) == found


class PromptAssembler:
    """Assembles whole prompts from the stores of a stream."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[tuple[Any, ...], Scope]] = {}

    def assemble(self, event: KVEvent) -> tuple[tuple[Any, ...], Scope] | None:
        """Return the tokens from the root to the last block of `event`, and their scope. Return None if a parent is unknown."""
        if not isinstance(event, BlockStored) or len(event.token_ids) != event.block_size * len(event.block_hashes):
            return None
        start: tuple[Any, ...] = ()
        salts = [key for key in (event.extra_keys or [None])[0] or () if isinstance(key, str)]
        scope = Scope(salt=salts[-1] if salts and event.parent_block_hash is None else None)
        if event.parent_block_hash is not None:
            if event.parent_block_hash not in self._known:
                return None
            start, scope = self._known[event.parent_block_hash]
        for at, value in enumerate(event.block_hashes):
            self._known[value] = (start + tuple(event.token_ids[: (at + 1) * event.block_size]), scope)
        return self._known[event.block_hashes[-1]] if event.block_hashes else None


@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: stream.run)
def test_after_every_batch_of_a_captured_engine_the_index_agrees_with_the_model(stream: RecordedEndpoint) -> None:
    """In two runs of vLLM under load, with evictions, resets and salts, all blocks, copies and prompts agree with the model.

    This holds for the index that reads events and for the one that reads payloads.
    """
    subjects, prompts, hits = IndexesAndOracle(), PromptAssembler(), 0
    for live in live_batches(CAPTURES, stream.run, stream.endpoint):
        subjects.take(live.seq, live.payload)
        for event in decode_batch(live.payload).batch.events:
            found = prompts.assemble(event)
            if found is not None:
                subjects.prompts[found[0]] = found[1]
        subjects.check()
        hits += any(subjects.oracle.match(tokens, scope) for tokens, scope in list(subjects.prompts.items())[-1:])
    assert hits > 20
    assert subjects.oracle.streams[WORKER].counts.total() == 0, "a healthy engine leaves nothing unknown and nothing refused"


def test_runs_with_different_hash_seeds_and_block_sizes_are_matched_in_one_index() -> None:
    """A prompt matches each run in blocks of the run's own size, and never by the hashes of the other run."""
    index, oracle = PrefixIndex(), Oracle()
    prompts: dict[tuple[Any, ...], Scope] = {}
    for stream in STREAMS:
        known = PromptAssembler()
        for live in list(live_batches(CAPTURES, stream.run, stream.endpoint))[:30]:
            batch = decode_batch(live.payload).batch
            oracle.apply(Batch(stream.run, 0, 0, live.seq, batch.ts, batch.events, False))
            index.apply_payload((stream.run, 0), 0, live.seq, live.payload)
            prompts |= dict(found for found in map(known.assemble, batch.events) if found is not None)
    for tokens, scope in prompts.items():
        assert tokens_by_level(index.match(list(tokens), namespace(scope))) == oracle.match(tokens, scope)
        assert tokens_by_level(index.match(list(tokens))) == oracle.match(tokens, Scope())


@pytest.mark.parametrize("golden", GOLDENS, ids=str)
def test_a_golden_payload_has_the_same_effect_as_events_as_bytes_and_in_the_model(golden: Golden) -> None:
    """The payload is applied alone, where children of unknown parents wait, and after a batch that stores those parents."""
    for first in (None, b"root"):
        subjects = IndexesAndOracle()
        if first is not None:
            parents = [getattr(event, "parent_block_hash", None) for event in golden.batch().events]
            known = [make_store(block_hashes=[value], token_ids=[1, value % 5]) for value in parents if value is not None]
            subjects.take(0, batch_of(*known, rank=golden.batch().data_parallel_rank))
        subjects.take(1, golden.payload)
        subjects.prompts = {tuple(range(100, 112)): Scope(), tuple(range(100, 108)): Scope(salt="tenant-1", lora="adapter-1")}
        subjects.check()


# --- a hybrid model ---------------------------------------------------------------------------------------------------------


class Run:
    """Runs 200 requests at an engine, two at a time. Each is predicted from the events that precede it."""

    def __init__(self, windows: tuple[int | None, ...]) -> None:
        self.engine = Engine(7, 4, 60 * len(windows), windows)
        self.index, self.oracle = PrefixIndex(), Oracle()
        self.all, self.dense = Feed(self.index), Feed(PrefixIndex())
        traffic = Traffic(self.engine, Choices(random.Random(11).randbytes(4000)), salts=(None, None, "t"), longest=56)
        self.hits = self.wrong = self.wrong_if_dense = 0
        for number in range(200):
            if number % 70 == 69:
                traffic.drain()
                self.engine.reset()
            while len(traffic.running) >= 2:
                traffic.step()
            tokens, salt = traffic.arrive()
            self.predict(tokens, Scope(salt=salt))
            traffic.admit(tokens, salt)

    def predict(self, tokens: list[int], scope: Scope) -> None:
        batch = self.all.batch(*self.engine.take_events())
        self.index.apply(batch)
        self.oracle.apply(batch)
        self.dense(*(event for event in batch.events if getattr(event, "group_idx", 0) == 0))
        cached = self.engine.cached(tokens, scope.salt) * 4
        self.hits += cached > 0
        self.wrong += tokens_of(self.index, tokens[:-1], scope) != cached
        self.wrong_if_dense += tokens_of(self.dense.index, tokens[:-1], scope) != cached


@pytest.mark.parametrize("windows", [(None, 9), (None, 6, 17), (None, None, 9)], ids=repr)
def test_every_request_of_a_hybrid_model_is_predicted(windows: tuple[int | None, ...]) -> None:
    """An engine with full attention and sliding windows frees blocks as windows pass them and evicts in LRU order.

    Each of 200 requests is predicted to the block. The dense group alone would predict too much for many of them.
    """
    run = Run(windows)
    assert run.hits > 80
    assert run.wrong == 0
    assert run.wrong_if_dense > 10
    assert blocks_of(run.index, ("a", 0)) == run.oracle.blocks(("a", 0))
    assert {group for *_, group, _ in run.oracle.blocks(("a", 0))} == set(range(len(windows)))


def test_every_request_of_a_dense_model_is_predicted() -> None:
    run = Run((None,))
    assert run.hits > 100
    assert run.wrong == run.wrong_if_dense == 0


# --- vLLM's own block manager with sliding windows --------------------------------------------------------------------------


HISTORIES = recorded(DATA / "vllm-0.32-hybrid.jsonl.gz")


@pytest.mark.parametrize("history", HISTORIES, ids=lambda history: history.shape)
def test_every_request_at_vllm_with_sliding_windows_is_predicted(history: History) -> None:
    """vLLM 0.32.0's block manager published events and looked up 200 prompts, with evictions and resets.

    Each lookup is predicted to the token. Full attention alone predicts too much for some of them.
    """
    predictor, oracle = LookupPredictor(), Oracle()
    removed = cleared = 0
    for seq, step in enumerate(history.steps):
        predictor.take(step)
        if step.payload:
            batch = decode_batch(step.payload).batch
            oracle.apply(Batch(*WORKER, 0, seq, batch.ts, batch.events, False))
            removed += sum(isinstance(event, BlockRemoved) for event in batch.events)
            cleared += sum(isinstance(event, AllBlocksCleared) for event in batch.events)
    assert (predictor.requests, predictor.wrong) == (200, 0)
    assert predictor.hits > 80
    assert predictor.wrong_if_dense > 0
    assert removed > 100
    assert cleared > 0
    assert blocks_of(predictor.index, WORKER) == oracle.blocks(WORKER) != []


def test_all_shapes_with_windows_are_recorded() -> None:
    assert [history.shape for history in HISTORIES] == [shape.name for shape in WINDOWED]
