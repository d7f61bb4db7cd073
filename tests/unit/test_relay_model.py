"""The consumers of a relay are compared with its upstreams: no consumer is ever EXACT and wrong."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvevents.relay.transform import clear_of_all_tiers
from kvevents.stream import RawBatch
from relay_cases import FOREIGN, LONG_TURN, MANY_TURNS, Consumer, Held, Upstream, World, block, kill_before, world
from relay_journal_cases import Killed

EXAMPLES: Final = 20
"""Number of examples for each configuration. An example has about 170 turns of the relay."""
UPSTREAM = st.integers(0, 1)
NUMBER = st.integers(1, 6)
MEDIUM = st.sampled_from(["GPU", "GPU", "CPU"])
LOST = st.sampled_from([False, False, False, True])

STEPS: Final = st.sampled_from(["write", "create", "rename", "remove", "keep", "send"])
HARMLESS = st.one_of(
    st.tuples(st.just("store"), UPSTREAM, NUMBER, MEDIUM, LOST),
    st.tuples(st.just("store"), UPSTREAM, NUMBER, MEDIUM, LOST),
    st.tuples(st.just("remove"), UPSTREAM, NUMBER, MEDIUM, LOST),
    st.tuples(st.just("clear"), UPSTREAM),
    st.tuples(st.just("clear scope"), UPSTREAM, MEDIUM),
    st.tuples(st.just("restart"), UPSTREAM, st.lists(NUMBER, max_size=2)),
    st.tuples(st.just("turn"), st.integers(1, 12)),
    st.tuples(st.just("turn"), st.integers(1, 12)),
    st.tuples(st.just("kill"), STEPS, st.integers(0, 6)),
    st.tuples(st.just("kill now")),
    st.tuples(st.just("end")),
    st.tuples(st.just("join"), st.booleans()),
)
HARMFUL = st.one_of(
    st.tuples(st.just("skip number"), UPSTREAM),
    st.tuples(st.just("forget"), UPSTREAM),
    st.tuples(st.just("ignore replay"), UPSTREAM),
    st.tuples(st.just("answer replay"), UPSTREAM),
    st.tuples(st.just("settle")),
)
MISSING = st.tuples(st.just("fail to publish"), UPSTREAM, NUMBER, st.sampled_from([None, b"\xc1"]))
FORGED = st.tuples(st.just("forge"), UPSTREAM)
MANY_STORES = st.tuples(st.just("many stores"), UPSTREAM, st.integers(4, 12))
"""More than half of the batches that the buffer holds, in one turn."""
HISTORIES = st.lists(HARMLESS, max_size=40)
HARMFUL_HISTORIES = st.lists(st.one_of(HARMLESS, HARMLESS, HARMFUL), max_size=40)


def chain(number: int, medium: str = "GPU") -> list[BlockStored]:
    """Return a store of the block, after a store of its parent if it has one. Each hash has one prefix."""
    parent = number - 1 if number % 2 == 0 else None
    found = [block(number, parent=parent, medium=medium)]
    return found if parent is None else [block(parent, medium=medium), *found]


class HistoryRunner:
    """Runs one history of operations."""

    def __init__(self, world: World, options: dict[str, Any]) -> None:
        self.world, self._options = world, options
        self.world.begin(**options)
        self.consumers = [world.consumer(), world.consumer(reads_heartbeats=False)]

    def run(self, history: list[tuple[Any, ...]]) -> None:
        for name, *rest in history:
            OPERATIONS[name](self, *rest)
        for each in self.world.upstreams:
            each.engine.answers_replay = True
        self.settle()
        self.join(reads_heartbeats=True)
        self.join(reads_heartbeats=False)
        self.settle()
        # Without further kills, the second batches confirm everything that was replayed, including the first batches.
        self.world.before = lambda _: None
        self.settle()
        self.settle()

    def upstream(self, which: int) -> Upstream:
        return self.world.upstreams[which % len(self.world.upstreams)]

    def store(self, which: int, number: int, medium: str, lost: bool) -> None:
        self.upstream(which).publish_events(*chain(number, medium), lost=lost)

    def remove(self, which: int, number: int, medium: str, lost: bool) -> None:
        upstream = self.upstream(which)
        # Without tiers, a removal from the wrong tier would remove the block.
        if "dialect" not in self._options or (number, medium) in upstream.held:
            upstream.remove(number, medium=medium, lost=lost)

    def clear_scope(self, which: int, medium: str) -> None:
        self.upstream(which).publish_events(AllBlocksCleared({"medium": medium}))

    def restart(self, which: int, unseen: list[int]) -> None:
        self.upstream(which).restart(*(event for number in unseen for event in chain(number)))

    def turn(self, count: int, seconds: float = 0.1) -> None:
        for _ in range(count):
            try:
                self.world.turn(seconds=seconds)
            except Killed:
                self.kill()

    def settle(self) -> None:
        """Let all consumers catch up. Each upstream stores a block first, since a restart without batches is not visible."""
        for each in self.world.upstreams:
            each.store(7)
        self.turn(MANY_TURNS, LONG_TURN)
        for consumer in self.consumers:
            # A consumer without heartbeats does not learn the relay's trust, only skipped numbers.
            if consumer.trust.name == "EXACT" and (consumer.reads_heartbeats or self.world.relay.trust().name == "EXACT"):
                self.assert_agrees(consumer)

    def assert_agrees(self, consumer: Consumer) -> None:
        ranks, upstreams = self.world.ranks, self.world.upstreams
        if len(set(ranks)) > 1:
            truth = {rank: each.held for rank, each in zip(ranks, upstreams, strict=True) if each.held}
            assert consumer.held_by_rank == truth, consumer.trust
        assert self.view(consumer.held) == self.view(self.world.truth), consumer.trust

    def view(self, held: Held) -> Counter[Any]:
        """Reduce placements to what the dialect can express."""
        if self._options.get("dialect") != "vllm-0.9":
            return held
        merged: Counter[Any] = Counter()
        for (number, _), count in held.items():
            merged[number] += count
        return merged

    def kill(self) -> None:
        self.world.before = lambda _: None
        self.world.kill()
        self.world.begin(**self._options)

    def end(self) -> None:
        self.world.before = lambda _: None
        self.world.end()
        self.world.begin(**self._options)

    def join(self, reads_heartbeats: bool) -> None:
        self.consumers.append(self.world.consumer(reads_heartbeats=reads_heartbeats))


IMPOSSIBLE: Final[Held] = Counter({(-1, "GPU"): 1})
"""A placement that no engine ever holds."""


class ExactnessChecker:
    """Checks a consumer after every message: if it is EXACT, it holds what its engine held then."""

    def __init__(self, world: World, consumer: Consumer) -> None:
        self._world, self._consumer = world, consumer
        self._seen = 0
        self._expected: Held | None = Counter()
        """What the engine held after the newest batch; None if the engine did not send that batch."""

    def check(self) -> None:
        self._consumer.turn()
        for delivery in self._consumer.seen[self._seen :]:
            self._expected = self._expected_after(delivery)
        self._seen = len(self._consumer.seen)
        if self._expected is not None and self._consumer.trust.name == "EXACT":
            assert self._consumer.held == self._expected

    def _expected_after(self, delivery: Any) -> Held | None:
        if not isinstance(delivery, RawBatch):
            return None
        batch = delivery.decode()
        if batch.ts == FOREIGN:
            return IMPOSSIBLE
        if batch.ts in self._world.upstream.held_at:
            return self._world.upstream.held_at[batch.ts]
        if batch.events == [AllBlocksCleared()]:
            return Counter()
        changes_nothing = all(isinstance(event, BlockRemoved) and not event.block_hashes for event in batch.events)
        return self._expected if changes_nothing else None


OPERATIONS: Final[dict[str, Callable[..., Any]]] = {
    "store": HistoryRunner.store,
    "remove": HistoryRunner.remove,
    "clear": lambda runner, which: runner.upstream(which).publish_events(*clear_of_all_tiers()),
    "clear scope": HistoryRunner.clear_scope,
    "restart": HistoryRunner.restart,
    "turn": HistoryRunner.turn,
    "kill": lambda runner, step, after: kill_before(runner.world, step, after),
    "kill now": HistoryRunner.kill,
    "end": HistoryRunner.end,
    "join": HistoryRunner.join,
    "skip number": lambda runner, which: runner.upstream(which).engine.skip_number(),
    "forget": lambda runner, which: runner.upstream(which).clear_replay_buffer(),
    "ignore replay": lambda runner, which: setattr(runner.upstream(which).engine, "answers_replay", False),
    "answer replay": lambda runner, which: setattr(runner.upstream(which).engine, "answers_replay", True),
    "settle": HistoryRunner.settle,
    "many stores": lambda runner, which, count: [
        runner.upstream(which).publish_events(*chain(each % 6 + 1)) for each in range(count)
    ],
    "forge": lambda runner, which: runner.upstream(which).forge(),
    "fail to publish": lambda runner, which, number, payload: runner.upstream(which).fail_to_publish(
        *chain(number), payload=payload
    ),
}

CONFIGURATIONS: Final[dict[str, tuple[list[int], dict[str, Any]]]] = {
    "unchanged": ([0], {}),
    "hashed": ([0], {"tokens": "hash"}),
    "merged": ([0, 0], {}),
    "merged and hashed": ([0, 0], {"tokens": "hash"}),
    "merged, in a dialect without tiers": ([0, 0], {"dialect": "vllm-0.9"}),
    "ranks": ([0, 1], {}),
    "ranks and hashed": ([5, 3], {"tokens": "hash"}),
}
"""The ranks of the upstreams, and settings of the relay."""


SMALL_BUFFER: Final = 12
"""Batches of a replay buffer that is often too small for the history, and never for what a relay sends in one turn.

A consumer confirms replayed batches by a reply that contains both them and a live batch. If each turn replaces the whole
buffer, no reply contains both, and the consumer stays DEGRADED.
"""


@pytest.mark.parametrize("kind", CONFIGURATIONS)
@example(history=[("store", 0, 1, "CPU", False), ("turn", 5), ("restart", 0, [])], steps=SMALL_BUFFER)
@given(history=HISTORIES, steps=st.sampled_from([SMALL_BUFFER, 10_000]))
@settings(max_examples=EXAMPLES)
def test_nothing_is_lost_by_kills_and_restarts_of_a_relay(kind: str, history: list[tuple[Any, ...]], steps: int) -> None:
    """If engines answer replay, all early and late consumers are EXACT in the end."""
    ranks, options = CONFIGURATIONS[kind]
    if "dialect" in options:
        history = [each for each in history if each[0] != "clear scope"]
    with tempfile.TemporaryDirectory() as folder, world(Path(folder) / "journal", ranks=ranks) as scenario:
        runner = HistoryRunner(scenario, {"buffer_steps": steps, **options})
        runner.run(history)
        for consumer in runner.consumers:
            assert consumer.trust.name == "EXACT", consumer.trust
            runner.assert_agrees(consumer)


@pytest.mark.parametrize("kind", CONFIGURATIONS)
@given(history=HARMFUL_HISTORIES, steps=st.sampled_from([3, 10_000]))
@settings(max_examples=EXAMPLES)
def test_no_consumer_is_exact_and_wrong(kind: str, history: list[tuple[Any, ...]], steps: int) -> None:
    """Engines lose batches, drop their history and do not answer replay. A consumer with wrong blocks must not be EXACT."""
    ranks, options = CONFIGURATIONS[kind]
    with tempfile.TemporaryDirectory() as folder, world(Path(folder) / "journal", ranks=ranks) as scenario:
        HistoryRunner(scenario, {"buffer_steps": steps, **options}).run(history)


@example(
    history=[
        ("many stores", 0, 12),
        ("turn", 9),
        ("remove", 0, 4, "GPU", False),
        ("fail to publish", 0, 5, b"\xc1"),
        ("many stores", 0, 12),
    ],
    steps=8,
)
@example(history=[("forge", 0), ("store", 0, 1, "GPU", True), ("turn", 3)], steps=10_000)
@given(
    history=st.lists(st.one_of(HARMLESS, MISSING, FORGED, MANY_STORES, MANY_STORES), max_size=40),
    steps=st.sampled_from([3, 8, 10_000]),
)
def test_no_consumer_is_exact_and_wrong_between_two_messages_of_a_turn(history: list[tuple[Any, ...]], steps: int) -> None:
    """A consumer is right at every batch at which it is EXACT, and never EXACT after a replayed batch of another engine."""
    with tempfile.TemporaryDirectory() as folder, world(Path(folder) / "journal") as scenario:
        runner = HistoryRunner(scenario, {"buffer_steps": steps})
        checker = ExactnessChecker(scenario, runner.consumers[0])
        scenario.sent = checker.check
        runner.run(history)
