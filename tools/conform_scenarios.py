"""`python -m tools.conform_scenarios`: writes the scenarios and their JSON Schema to `src/kvevents/conform/`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from kvevents.conform import scenario as steps
from kvevents.conform.scenario import AnyScenario, PublisherScenario, Query, Tokens, json_schema
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, Heartbeat
from kvevents.wire import dialects, encode_batch, live_frames
from tools.conform_script import ARRIVE_SECONDS, BLOCK, Engine, Prompt, Script, to_json, unsalted
from tools.released import CHECKOUT

FOLDER: Final = CHECKOUT / "src" / "kvevents" / "conform"
A: Final = Prompt(1, 10)
B: Final = Prompt(2, 10)
C: Final = Prompt(3, 5)
D: Final = Prompt(4, 5)
LOST: Final = 4
"""The block of A whose batch is lost."""
SLOW: Final = 12.0
"""Seconds in which a target that waits for replies that do not come has given up."""
FOREIGN_BATCHES: Final = 300
"""More batches than kvevents compares with live ones without asking for them again."""

Play = Callable[[Script], None]


# --- losses


def _lose_one(script: Script, **settings: Any) -> Engine:
    """One batch of a chain of ten blocks is lost. Later, when a replay has happened if it does, comes another prompt."""
    engine = script.warm(A, LOST, **settings)
    engine.store(A, [LOST], lost=True)
    engine.store(A, range(LOST + 1, A.blocks))
    script.settle(1.0)
    script.ask(B)
    engine.store(B)
    return engine


def _gap(within: float = 8.0, **settings: Any) -> Play:
    def play(script: Script) -> None:
        _lose_one(script, **settings)
        script.check(within)

    return play


def _gap_restored(script: Script) -> None:
    _lose_one(script, replay="none").store(A, [LOST])
    script.check()


def _gap_beyond(script: Script) -> None:
    engine = script.warm(A, 2, buffer_steps=4)
    engine.store(A, range(2, 9), lost=True)
    engine.store(A, [9])
    script.settle(1.0)
    script.ask(B)
    engine.store(B)
    script.check()


def _lossy(**settings: Any) -> Play:
    """Thirty batches are lost, and replies have a fault."""

    def play(script: Script) -> None:
        engine = script.warm(A, 1, **settings)
        for prompt in (A, B, C, D):
            engine.store(prompt, range(1 if prompt is A else 0, prompt.blocks), lost=True)
        script.ask(B, C, D)
        engine.heartbeat()
        script.settle(1.0)
        engine.heartbeat()
        script.check(SLOW)

    return play


def _tail(play_on: bool = False, **settings: Any) -> Play:
    def play(script: Script) -> None:
        engine = script.warm(A, 8, **settings)
        engine.store(A, range(8, 10), lost=True)
        if play_on:
            script.settle()
            engine.heartbeat()
        script.check()

    return play


def _tail_removal(script: Script) -> None:
    engine = script.warm(A)
    engine.remove(A, range(5, 10), lost=True)
    script.check()


def _lost_removal(script: Script) -> None:
    engine = script.warm(A, replay="none")
    engine.remove(A, range(5, 10), lost=True)
    script.ask(B)
    engine.store(B)
    script.check()


def _late(play_on: bool = False) -> Play:
    def play(script: Script) -> None:
        engine = script.engine()
        engine.store(A, lost=True)
        script.ask(A)
        script.follow(engine)
        if play_on:
            script.settle()
            engine.heartbeat()
        script.check()

    return play


def _late_alone(script: Script) -> None:
    engine = script.engine(replay="none")
    engine.store(A, range(6), lost=True)
    script.ask(A, B)
    script.follow(engine)
    engine.store(A, range(6, 10))
    engine.store(B)
    script.check()


def _compacted(script: Script) -> None:
    """A publisher that compacts its replay buffer: one batch with the last number of many, which clears and stores again."""
    engine = script.engine()
    for _ in range(11):
        engine.skip()
    engine.publish([AllBlocksCleared(), *(engine.stored(A, place) for place in range(8))], lost=True)
    script.ask(A, B)
    script.follow(engine)
    script.settle()
    engine.store(B)
    script.check()


def _cut(play_on: bool = False) -> Play:
    def play(script: Script) -> None:
        engine = script.warm(A)
        script.add(steps.Cut("a"))
        script.ask(B)
        engine.store(B)
        script.add(steps.Heal("a"))
        engine.await_subscriber()
        if play_on:
            script.settle()
            engine.heartbeat()
        script.check()

    return play


def _flapping(script: Script) -> None:
    engine = script.warm(A, 1)
    for place in range(1, 4):
        script.add(steps.Cut("a"))
        engine.store(A, [place])
        script.add(steps.Heal("a"))
        engine.await_subscriber()
    script.settle()
    engine.store(A, range(4, 10))
    script.check()


def _stalled(script: Script) -> None:
    engine = script.warm(A)
    script.add(steps.Stall("a"))
    script.ask(B)
    engine.store(B)
    script.check(SLOW)


def _slow(script: Script) -> None:
    """The network delivers nothing for two seconds, and then everything."""
    engine = script.warm(A, 2)
    script.add(steps.Stall("a"))
    engine.store(A, range(2, 10))
    script.pause(2.0)
    script.add(steps.Heal("a"))
    engine.await_subscriber()
    script.settle()
    script.ask(B)
    engine.store(B)
    script.check()


def _reordered(script: Script) -> None:
    """Two live messages change places: a removal comes before the store of another block, and after its own."""
    engine = script.warm(A, 4)
    first = engine.next
    engine.store(A, [4, 5, 6], lost=True)
    for place in (2, 0, 1):
        engine.resend(first + place)
    engine.store(A, [7])
    script.settle(1.0)
    engine.remove(A, [6, 7], lost=True)
    engine.store(A, [6], lost=True)
    engine.resend(engine.next - 1)
    engine.resend(engine.next - 2)
    engine.heartbeat()
    script.check()


def _duplicates(script: Script) -> None:
    """Live messages come twice, some after what undoes them."""
    engine = script.warm(A)
    for seq in range(3):
        engine.resend(seq)
    engine.remove(A, range(6, 10))
    script.check()
    for seq in (8, 9):
        engine.resend(seq)
    script.ask(B)
    engine.store(B)
    script.check()


def _skipped(script: Script) -> None:
    engine = script.warm(A, 5)
    engine.skip()
    engine.store(A, range(5, 10))
    script.settle(1.0)
    script.ask(B)
    engine.store(B)
    script.check()


# --- lives


def _restart(**settings: Any) -> Play:
    def play(script: Script) -> None:
        engine = script.warm(A, **settings)
        engine.restart()
        engine.await_subscriber()
        script.ask(B, C)
        engine.store(B)
        # What arrives together with the connection may be of the one before: only a later batch confirms what was replayed.
        script.settle(1.0)
        engine.store(C)
        script.check()

    return play


def _restart_idle(script: Script) -> None:
    engine = script.warm(A)
    engine.restart()
    engine.await_subscriber()
    script.check()


def _restart_ahead(script: Script) -> None:
    engine = script.warm(A)
    engine.restart()
    script.ask(B, C, D)
    engine.store(B, lost=True)
    engine.store(C, lost=True)
    engine.await_subscriber()
    engine.store(D, range(1))
    script.settle(1.0)
    engine.store(D, range(1, D.blocks))
    script.check()


def _restart_same_number(script: Script) -> None:
    """The new life has published exactly as many batches as the old one when the connection is back, and is idle."""
    engine = script.warm(A)
    engine.restart()
    script.ask(B)
    engine.store(B, lost=True)
    engine.await_subscriber()
    script.check()


def _restarts(script: Script) -> None:
    """Three lives in a row, each with another prompt."""
    engine = script.warm(A)
    for prompt in (B, C, D):
        engine.restart()
        engine.await_subscriber()
        script.ask(prompt)
        engine.store(prompt, range(2))
        script.settle(1.0)
        engine.store(prompt, range(2, prompt.blocks))
        script.settle(2.0)
    script.check()


def _gone(script: Script) -> None:
    engine = script.warm(A)
    engine.stop()
    script.check()


def _registered_again(script: Script) -> None:
    engine = script.warm(A)
    script.add(steps.Unregister("a"))
    engine.restart()
    script.ask(B)
    engine.store(B, range(5), lost=True)
    script.follow(engine)
    engine.store(B, range(5, 10))
    script.check()


def _killed(*, both: bool = False, play_on: bool = False) -> Play:
    """The target dies while its engine goes on, or is restarted as well; the engine stores less than the target knew."""

    def play(script: Script) -> None:
        engine = script.warm(A, **({} if both else {"buffer_steps": 5}))
        script.ask(B, *([C] if both else []))
        script.add(steps.Kill())
        if both:
            engine.restart()
            engine.store(B)
            engine.store(C)
        else:
            engine.store(B, range(2))
        script.add(steps.Start())
        engine.await_subscriber()
        if play_on:
            script.settle()
            engine.heartbeat()
        script.check()

    return play


# --- bytes


def _bytes(send: Callable[[Engine], None], settings: dict[str, Any] | None = None) -> Play:
    """Something that is no batch, between good ones."""

    def play(script: Script) -> None:
        engine = script.warm(A, 5, **(settings or {}))
        send(engine)
        engine.store(A, range(5, 10))
        script.check()

    return play


def _payload(payload: bytes) -> Play:
    return _bytes(lambda engine: engine.publish_bytes(payload))


def _whole() -> bytes:
    event = BlockStored([D.name_of(0, 1)], None, D.part(0), BLOCK, medium="GPU")
    return encode_batch(EventBatch(1.0, [event], 0))


def _odd_event(make: Callable[[Engine], Any]) -> Play:
    """A batch of three: a block, an event that cannot be read, and the next block."""

    def play(script: Script) -> None:
        engine = script.warm(A, 4)
        engine.publish([engine.stored(A, 4), make(engine), engine.stored(A, 5)])
        engine.store(A, range(6, 10))
        script.check()

    return play


def _odd_stored(**fields: Any) -> Callable[[Engine], Any]:
    """A store of a block of D with a field that is out of range."""
    event = {"type": "BlockStored", "block_hashes": [7], "parent_block_hash": None, "token_ids": D.part(0), "block_size": BLOCK}
    return lambda _: {**event, "lora_id": None, "medium": "GPU", **fields}


def _jump(seq: int, **settings: Any) -> Play:
    """A batch with a number that is not its turn, and what comes a moment later."""

    def play(script: Script) -> None:
        engine = script.warm(A, 5, **settings)
        engine.send(live_frames(b"", seq, encode_batch(EventBatch(1.0, [], 0))))
        script.pause(1.0)
        script.ask(B)
        engine.store(A, range(5, 10))
        engine.store(B)
        script.check()

    return play


# --- blocks


def _dialect(script: Script) -> None:
    """Stores, removals, a gap that replay fills, and a clear, as one release sends them."""
    engine = script.warm(A, 6)
    engine.remove(A, [4, 5])
    engine.store(A, [4])
    script.check()
    engine.store(A, [5], lost=True)
    engine.store(A, range(6, 10))
    script.settle(1.0)
    script.ask(B)
    engine.store(B, range(5))
    script.check()
    engine.clear()
    engine.store(B, range(3))
    script.check()


def _odd_dialect(change: Callable[[list[Any]], Any]) -> Play:
    """Batches of the newest vLLM as another producer sends them: `change` makes them out of `[ts, events, rank]`."""

    def play(script: Script) -> None:
        engine = script.engine()
        script.follow(engine)
        script.ask(A)
        for events in (
            [engine.stored(A, place) for place in range(10)],
            [engine.removed(A, [8, 9])],
            [engine.stored(A, 8)],
        ):
            payload = encode_batch(EventBatch(script.now(), list(events), 0), script.dialect)
            engine.publish_json(to_json(change(msgspec.msgpack.decode(payload))))
        script.check()

    return play


def _mooncake(batch: list[Any]) -> Any:
    """Mooncake's RFC #1527: both `type` and `event_type`, `seq_hashes`, timestamps in milliseconds."""
    ts, events, rank = batch
    kinds = {"BlockStored": "stored", "BlockRemoved": "removed"}
    changed = []
    for event in events:
        event["event_type"] = kinds[event["type"]]
        event["seq_hashes"] = event.pop("block_hashes")
        if "parent_block_hash" in event:
            event["parent_hash"] = event.pop("parent_block_hash")
        del event["type"]
        changed.append(event)
    return [int(ts * 1000), changed, rank]


def _wide_hashes(batch: list[Any]) -> Any:
    """Hashes as 32 bytes, of which the last 8 are what integers are: vLLM's `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`."""

    def widen(value: int | None) -> bytes | None:
        return None if value is None else bytes(24) + value.to_bytes(8, "big")

    for event in batch[1]:
        event["block_hashes"] = [widen(each) for each in event["block_hashes"]]
        if "parent_block_hash" in event:
            event["parent_block_hash"] = widen(event["parent_block_hash"])
    return batch


def _wrapped(batch: list[Any]) -> Any:
    """Events in a msgpack bin each: llm-d's storage connector."""
    return [batch[0], [msgspec.msgpack.encode(event) for event in batch[1]]]


def _more_keys(batch: list[Any]) -> Any:
    """Keys that no release has yet."""
    for event in batch[1]:
        event |= {"component_types": [1], "later": {"nested": [None, 1.5]}}
    return batch


def _other_hashes(script: Script) -> None:
    second = script.engine("b", seed=2)
    script.follow(second)
    script.warm(A)
    second.store(A)
    second.remove(A, [8, 9])
    script.check()


def _middle(script: Script) -> None:
    engine = script.warm(A, 6)
    engine.remove(A, [2])
    script.check()
    engine.store(A, [2])
    engine.store(A, range(6, 10))
    script.check()


def _cleared(script: Script) -> None:
    engine = script.warm(A)
    engine.clear()
    script.ask(B)
    engine.store(B)
    script.check()


def _medium(name: str | None) -> Play:
    def play(script: Script) -> None:
        engine = script.engine()
        script.follow(engine)
        script.ask(A)
        engine.publish([engine.stored(A, place, medium=name) for place in range(10)])  # type: ignore[arg-type]
        script.check()

    return play


def _tiers(script: Script) -> None:
    """Blocks go to host memory, leave the device, and come back in part."""
    engine = script.warm(A)
    engine.store(A, medium="CPU")
    engine.remove(A, range(3, 10))
    script.check()
    engine.remove(A, range(8, 10), medium="CPU")
    script.check()
    engine.store(A, range(8, 9))
    script.check()


def _reannounced(script: Script) -> None:
    """vLLM's `kv_cache_report_mode=full`: a request that hits announces its blocks again. Then each is evicted, once."""
    engine = script.warm(A, 4)
    engine.store(A, range(4))
    script.settle(1.0)
    engine.remove(A, [3, 2, 1, 0])
    script.ask(B)
    engine.store(B)
    script.check()


def _two_copies(script: Script) -> None:
    """Two requests compute the same blocks at a time. One copy of each is evicted."""
    engine = script.warm(A, 4)
    engine.publish([engine.stored(A, place) for place in range(4)])
    script.settle(1.0)
    event = engine.removed(A, [3, 2, 1, 0])
    for place in range(4):
        engine.stored(A, place)  # the other copy
    engine.publish([event])
    script.ask(B)
    engine.store(B)
    script.check()


def _inactive(script: Script) -> None:
    engine = script.warm(A, 5)
    dead = {"type": "BlockInactive", "block_hashes": [A.name_of(place, 1) for place in range(5)], "medium": "GPU"}
    engine.publish([dead])
    engine.store(A, range(5, 10))
    script.check()


def _heartbeats(script: Script) -> None:
    """Batches with the publisher's own digest, as a removal of no blocks with one more field (kvevents)."""
    engine = script.warm(A, 3)
    for place in range(3, 10):
        engine.publish([BlockRemoved([], heartbeat=Heartbeat("0123456789abcdef" * 2, 5.0))])
        engine.store(A, [place])
    script.check()


def _partial_tail(script: Script) -> None:
    """vLLM from 0.33 caches prompt tails inside a block of a hybrid model: a block of 8 tokens behind one of 16."""
    engine = script.engine()
    script.follow(engine)
    engine.publish([BlockStored([1], None, A.part(0), 16, medium="GPU")])
    engine.publish([BlockStored([2], 1, A.part(1)[:8], 8, medium="GPU")])
    script.check(queries=[Query(Tokens((A.first, 24)), {"a": 24})])


def _mixed_sizes(script: Script) -> None:
    """A block of 64 tokens behind one of 16."""
    engine = script.engine()
    script.follow(engine)
    engine.publish([BlockStored([1], None, A.part(0), 16, medium="GPU")])
    engine.publish([BlockStored([2], 1, list(range(A.first + 16, A.first + 80)), 64, medium="GPU")])
    script.check(queries=[Query(Tokens((A.first, 80)), {"a": 80})])


def _null_window(script: Script) -> None:
    """A report of hits names blocks of a sliding-window group that were evicted before: vLLM announces its null blocks."""
    engine = script.engine()
    script.follow(engine)
    full = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 32}
    hashes = [A.name_of(place, 1) for place in range(4)]
    stores = [
        BlockStored(hashes, None, list(range(A.first, A.first + 64)), 16, medium="GPU", **group)  # type: ignore[arg-type]
        for group in (full, window)
    ]
    engine.publish(stores)
    engine.publish([BlockRemoved(hashes[:2], medium="GPU", group_idx=1)])
    short, whole = Tokens((A.first, 32)), Tokens((A.first, 64))
    script.check(ARRIVE_SECONDS, queries=[Query(short, {}), Query(whole, {"a": 64})])
    engine.publish(stores)
    script.check(queries=[Query(short, {}), Query(whole, {"a": 64})])


def _window(script: Script) -> None:
    """A hybrid model: what a sliding-window group has evicted ends a prefix that is too short to do without it."""
    engine = script.engine()
    script.follow(engine)
    full = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 32}
    hashes = [A.name_of(place, 1) for place in range(6)]
    for group in (full, window):
        event = BlockStored(hashes, None, list(range(A.first, A.first + 96)), 16, medium="GPU", **group)  # type: ignore[arg-type]
        engine.publish([event])
    engine.publish([BlockRemoved(hashes[:3], medium="GPU", group_idx=1)])
    queries = [Query(Tokens((A.first, 96)), {"a": 96}), Query(Tokens((A.first, 64)), {})]
    script.check(queries=queries)


def _salt(script: Script) -> None:
    salted = Prompt(1, 10, salt="s1")
    engine = script.engine()
    script.follow(engine)
    script.ask(salted)
    script.ask(unsalted(salted), nothing=True)
    engine.store(salted)
    script.check()


def _lora(script: Script) -> None:
    adapted = Prompt(1, 10, lora="adapter-1")
    engine = script.engine()
    script.follow(engine)
    script.ask(adapted)
    script.ask(unsalted(adapted), nothing=True)
    script.ask(unsalted(adapted), nothing=True, lora="adapter-2")
    engine.store(adapted)
    script.check()


def _tenants(script: Script) -> None:
    engine = script.engine()
    script.follow(engine, tenant="a")
    script.ask(A, tenant="a")
    script.ask(A, nothing=True, tenant="b")
    engine.store(A)
    script.check()


def _ranks(script: Script) -> None:
    """Two data-parallel ranks of one worker, each with numbers of its own; one restarts."""
    first, second = script.engine("a0", worker="a"), script.engine("a1", worker="a", rank=1)
    for engine in (first, second):
        script.follow(engine)
    script.ask(A)
    for place in range(10):
        first.publish([first.stored(A, place)], rank=0)
        if place < 5:
            second.publish([second.stored(A, place)], rank=1)
    script.check()
    first.restart()
    first.await_subscriber()
    first.publish([first.stored(A, 0)], rank=0)
    script.settle(1.0)
    first.publish([first.stored(A, 1)], rank=0)
    script.check()


def _other_blocks(script: Script) -> None:
    prompt = Prompt(1, 5, block_size=2 * BLOCK)
    engine = script.engine()
    script.follow(engine)
    script.ask(prompt)
    engine.store(prompt)
    script.check()


# --- registration


def _no_block_size(script: Script) -> None:
    wrong, right = script.engine("wrong"), script.engine("right")
    script.follow(wrong, block_size=0)
    script.ask(A)
    script.follow(right)
    right.store(A)
    script.check()


def _unfollowable(address: str) -> Play:
    def play(script: Script) -> None:
        script.follow(script.engine(address=address))
        script.check(4.0, reports=["a"])

    return play


def _foreign_replay(play_on: bool) -> Play:
    """The replay endpoint is that of another engine, which has published more."""

    def play(script: Script) -> None:
        other = script.engine("b", seed=2)
        engine = script.engine(replay_of="b")
        other.store(B, lost=True)
        other.publish_json([1.0, [], 0], lost=True, times=FOREIGN_BATCHES)
        script.follow(engine)
        script.pause(2.0)
        if play_on:
            engine.store(A)
        held = {"a": engine.holds(A)}
        script.check(queries=[A.query(held), B.query({})])

    return play


def _catalogue() -> Iterator[tuple[Script, Play]]:
    for each in dialects():
        release = each.since.replace("@", "-")
        title = f"{each.engine} {each.since}: stores, removals, a gap with replay, a clear"
        yield Script(f"dialect-{each.engine}-{release}", title, "dialects", dialect=each.name), _dialect
    for name, title, change in (
        ("dialect-mooncake", "Mooncake's RFC #1527", _mooncake),
        ("dialect-wide-hashes", "hashes of 32 bytes", _wide_hashes),
        ("dialect-wrapped", "events in a bin each, and batches without a rank (llm-d's storage connector)", _wrapped),
        ("dialect-no-rank", "a rank of nil", lambda batch: [*batch[:2], None]),
        ("dialect-more-keys", "events with unknown keys", _more_keys),
        ("dialect-longer-batch", "batches with a fourth element", lambda batch: [*batch, {"later": 1}]),
    ):
        yield Script(name, title, "dialects"), _odd_dialect(change)
    yield from _losses()
    yield from _lives()
    yield from _hostile_bytes()
    yield from _meanings()
    yield from _registrations()


def _losses() -> Iterator[tuple[Script, Play]]:
    quick: tuple[tuple[str, str, Play], ...] = (
        ("gap", "one batch lost, replay works", _gap()),
        ("gap-no-replay", "one batch lost, no replay endpoint", _gap(replay="none")),
        ("gap-restored", "one batch lost, no replay endpoint, and the engine computes the block again", _gap_restored),
        ("gap-no-topic", "one batch lost, replies without topic (before vLLM 0.26)", _gap(reply_shape="no-topic")),
        ("gap-bare-end", "one batch lost, replies end without a number (the first release)", _gap(reply_shape="bare-end")),
        ("gap-beyond-buffer", "seven batches lost, the engine stores four for replay", _gap_beyond),
        ("gap-dead-replay", "one batch lost, nothing listens at the replay endpoint", _gap(SLOW, replay="dead")),
        ("gap-silent-replay", "one batch lost, the replay endpoint never answers", _gap(SLOW, replay="silent")),
        ("gap-no-end-marker", "one batch lost, replies have no end marker", _gap(SLOW, has_end_marker=False)),
        ("gap-endless-replay", "one batch lost, replies never end", _gap(SLOW, is_endless=True)),
        ("lossy-replay", "28 batches lost, each reply brings ten and its end marker", _lossy(replay_send_limit=10)),
        ("replay-holes", "28 batches lost, the first reply has holes", _lossy(replay_holes=[5, 6, 20], faulty_replies=1)),
        ("replay-hole-stays", "28 batches lost, all replies have a hole", _lossy(replay_holes=[14])),
        (
            "replay-junk",
            "28 batches lost, replies begin with invalid messages",
            _lossy(replay_junk=[[""], ["", "78", "79"], ["", "0000000000000000"]]),
        ),
        ("tail", "the last two batches lost, the engine idle, replay works", _tail()),
        ("tail-then-live", "the last two batches lost, replay works, then one live batch", _tail(play_on=True)),
        ("tail-no-replay", "the last two batches lost, the engine idle, no replay endpoint", _tail(replay="none")),
        ("tail-removal", "the last removal lost, the engine idle, replay works", _tail_removal),
        ("removal-no-replay", "a removal lost, no replay endpoint", _lost_removal),
        ("late", "registered late, the engine idle, replay works", _late()),
        ("late-then-live", "registered late, replay works, then one live batch", _late(play_on=True)),
        ("late-no-replay", "registered late, no replay endpoint", _late_alone),
        ("late-compacted", "registered late, the replay buffer is compacted", _compacted),
        ("cut", "connection cut, ten batches meanwhile, back, the engine idle", _cut()),
        ("cut-then-live", "connection cut, ten batches meanwhile, back, then one live batch", _cut(play_on=True)),
        ("flapping", "connection cut three times, one batch meanwhile each time", _flapping),
        ("stalled", "the network delivers nothing, connections stay open", _stalled),
        ("slow", "the network delivers nothing for two seconds, then everything", _slow),
        ("reordered", "live messages out of order", _reordered),
        ("duplicates", "live messages twice, also after what undoes them", _duplicates),
        ("topic", "a topic as llm-d names it, replay works", _gap(topic="kv@pod-1@model")),
        ("skipped-number", "a number without a batch, which the engine could not encode", _skipped),
    )
    yield from ((Script(name, title, "losses"), play) for name, title, play in quick)


def _lives() -> Iterator[tuple[Script, Play]]:
    for name, title, play in (
        ("restart", "engine restarted (numbers from 0), replay works", _restart()),
        ("restart-no-replay", "engine restarted, no replay endpoint", _restart(replay="none")),
        ("restart-idle", "engine restarted, idle since: it holds nothing", _restart_idle),
        ("restart-ahead", "engine restarted, its numbers past the old ones when the connection is back", _restart_ahead),
        (
            "restart-same-number",
            "engine restarted, as far as before when the connection is back, idle",
            _restart_same_number,
        ),
        ("restarts", "engine restarted three times", _restarts),
        ("gone", "the engine is gone", _gone),
    ):
        yield Script(name, title, "lives"), play
    again = Script(
        "register-again",
        "engine restarted, unregistered and registered again",
        "lives",
        needs=["register", "unregister"],
    )
    yield again, _registered_again
    for name, title, play in (
        ("killed", "target killed and started again, two batches meanwhile, the engine idle", _killed()),
        ("killed-then-live", "target killed and started again, two batches meanwhile, then a live one", _killed(play_on=True)),
        ("killed-both", "target and engine restarted, the engine's numbers past the old ones, idle", _killed(both=True)),
        (
            "killed-both-then-live",
            "target and engine restarted, the engine's numbers past the old ones, then a live batch",
            _killed(both=True, play_on=True),
        ),
    ):
        yield Script(name, title, "lives", needs=["kill"]), play


def _hostile_bytes() -> Iterator[tuple[Script, Play]]:
    for name, title, play in (
        ("garbage", "a payload of garbage", _payload(b"\xc1garbage")),
        ("truncated", "a payload that ends in the middle", _payload(_whole()[:40])),
        ("empty", "an empty payload", _payload(b"")),
        ("json", "a payload of JSON", _payload(b'{"ts": 1, "events": []}')),
        ("huge-array", "a payload that claims 4 billion events", _payload(b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff")),
        ("nested", "a payload of 3,000 nested arrays", _payload(b"\x91" * 3_000 + b"\x90")),
        ("two-frames", "a message of two frames", _bytes(lambda engine: engine.send(live_frames(b"", engine.next, b"")[:2]))),
        (
            "four-frames",
            "a message of four frames",
            _bytes(lambda engine: engine.send([*live_frames(b"", engine.next, b"x"), b""])),
        ),
        (
            "short-number",
            "a sequence number of four bytes",
            _bytes(lambda engine: engine.send([b"", b"\0\0\0\5", _whole()])),
        ),
        ("jump", "one batch with number 2^40, then on as before", _jump(1 << 40)),
        ("jump-signed", "one batch with number 2^63, then on as before", _jump(1 << 63)),
        ("jump-no-replay", "one batch with number 2^40, then on as before, no replay endpoint", _jump(1 << 40, replay="none")),
        (
            "unknown-event",
            "an unknown event between two good ones of a batch",
            _odd_event(lambda _: {"type": "BlockPinned", "block_hashes": [1]}),
        ),
        ("no-event", "a number in place of an event, between two good ones", _odd_event(lambda _: 7)),
        ("token-range", "a token id of 2^32, between two good events", _odd_event(_odd_stored(token_ids=[1 << 32] * BLOCK))),
        ("token-negative", "a negative token id, between two good events", _odd_event(_odd_stored(token_ids=[-1] * BLOCK))),
        ("hash-type", "a block hash of 1.5, between two good events", _odd_event(_odd_stored(block_hashes=[1.5]))),
    ):
        yield Script(name, title, "bytes"), play


def _meanings() -> Iterator[tuple[Script, Play]]:
    for name, title, play, needs in (
        ("other-hashes", "two engines with different hashes for equal tokens; one evicts", _other_hashes, []),
        ("middle", "a block in the middle evicted, then stored again", _middle, []),
        ("cleared", "AllBlocksCleared, then another prompt", _cleared, []),
        ("medium-lower-case", "media in lower case (`gpu`)", _medium("gpu"), []),
        ("medium-none", "events without a medium", _medium(None), []),
        ("tiers", "blocks in host memory as well, evicted from either", _tiers, []),
        ("reannounced", "hits announced again (`kv_cache_report_mode=full`), then evicted once", _reannounced, []),
        ("two-copies", "blocks computed twice at a time, one copy of each evicted", _two_copies, []),
        ("inactive", "`BlockInactive`: no request uses the blocks, which stay", _inactive, []),
        ("heartbeats", "removals of no blocks with an unknown field", _heartbeats, []),
        ("partial-tail", "a block of 8 tokens behind one of 16 (vLLM 0.33, hybrid models)", _partial_tail, []),
        ("mixed-sizes", "a block of 64 tokens behind one of 16", _mixed_sizes, []),
        ("window", "a hybrid model whose sliding-window group has evicted", _window, []),
        ("window-null-blocks", "a report of hits that names evicted blocks of a window group", _null_window, []),
        ("other-block-size", "registered with blocks of 16 tokens, sends blocks of 32", _other_blocks, []),
        ("salt", "vLLM's cache salt; asked for with and without it", _salt, ["salt"]),
        ("lora", "an adapter's blocks; asked for with it, with another one, and without", _lora, ["lora"]),
        ("tenants", "tenant b asks for what tenant a holds", _tenants, ["tenants"]),
        ("ranks", "two ranks of one worker, one restarts", _ranks, ["ranks"]),
    ):
        yield Script(name, title, "blocks", needs=needs), play


def _registrations() -> Iterator[tuple[Script, Play]]:
    for name, title, play in (
        ("no-block-size", "a registration with block_size 0, then a right one", _no_block_size),
        ("unreachable", "an endpoint where nothing listens", _unfollowable("unreachable")),
        ("unresolvable", "a name that does not resolve", _unfollowable("unresolvable")),
        ("silent-port", "a port that accepts connections and sends nothing", _unfollowable("silent")),
        ("foreign-replay", "the replay endpoint of another engine; the registered one is idle", _foreign_replay(False)),
        ("foreign-replay-live", "the replay endpoint of another engine; the registered one goes on", _foreign_replay(True)),
    ):
        needs = {"no-block-size": ["register"], "foreign-replay": [], "foreign-replay-live": []}.get(name, ["reports"])
        yield Script(name, title, "registration", needs=needs), play


def _publishing() -> Iterator[PublisherScenario]:
    """Scenarios of publishers. A witness reads live batches where the publisher must have sent all of them first."""
    witness = steps.Subscribe("witness")

    def fed(count: int) -> list[steps.PublisherStep]:
        return [witness, steps.Feed(count), steps.CheckLive("witness", 0, count - 1, 20.0)]

    stalled = [steps.Subscribe("stalled", stalls=True), *fed(3_000)]
    restarted = [*fed(10), steps.RestartPublisher(), steps.Subscribe("later"), steps.Feed(5), steps.CheckLive("later", 0, 4)]
    hostile = [
        steps.SendRequest(frames) for frames in (["", "00"], ["00" * 8], [""], ["", "ff" * 8, "00"], ["78"] * 20, ["", ""])
    ]
    plays: list[tuple[str, str, list[Any]]] = [
        ("live", "twenty batches, live", fed(20)),
        ("replay", "replay of everything", [*fed(20), steps.CheckReplay(0)]),
        ("replay-middle", "replay from the middle", [*fed(20), steps.CheckReplay(10)]),
        ("replay-nothing", "replay from beyond the newest batch", [*fed(20), steps.CheckReplay(20)]),
        ("replay-long", "replay of 5,000 batches", [*fed(5_000), steps.CheckReplay(0, within=30.0)]),
        (
            "replay-slow",
            "replay of 5,000 batches to a consumer that is late",
            [*fed(5_000), steps.CheckReplay(0, delay=2.0, within=30.0)],
        ),
        (
            "replay-many",
            "replay of 2,000 batches to ten consumers at a time",
            [*fed(2_000), steps.CheckReplay(0, 10, within=30.0)],
        ),
        (
            "late-subscriber",
            "a subscriber that comes after ten batches",
            [*fed(10), steps.Subscribe("late"), steps.Feed(10), steps.CheckLive("late", 10, 19), steps.CheckReplay(0)],
        ),
        ("hostile-requests", "invalid requests, then a valid one", [*fed(20), *hostile, steps.CheckReplay(0)]),
        ("stalled-subscriber", "a subscriber that reads nothing beside one that does", stalled),
        ("restarted", "killed and started again", [*restarted, steps.CheckReplay(0)]),
        (
            "ended",
            "an orderly end right after 200 batches",
            [witness, steps.Feed(200), steps.EndPublisher(), steps.CheckLive("witness", 0, 199)],
        ),
    ]
    for name, title, parts in plays:
        yield PublisherScenario(1, f"publisher-{name}", title, parts, needs=["feed"])
    beyond = [*fed(300), steps.CheckReplay(0)]
    yield PublisherScenario(
        1,
        "publisher-replay-beyond-buffer",
        "replay of everything, the buffer has 100 of 300",
        beyond,
        buffer_steps=100,
        needs=["feed"],
    )
    yield PublisherScenario(
        1, "publisher-watched", "what is published for three seconds, and its replay", [steps.CheckWatched(3.0)]
    )


def scenarios() -> Iterator[AnyScenario]:
    """Every scenario, recorded again."""
    for script, play in _catalogue():
        play(script)
        yield script.scenario()
    yield from _publishing()


def text_of(scenario: AnyScenario) -> str:
    """A scenario as JSON, with one line for each step."""
    fields = msgspec.to_builtins(scenario)
    lines = []
    for name, value in fields.items():
        if name in {"steps", "engines"}:
            items = value if name == "steps" else [f'"{key}": {_line(each)}' for key, each in value.items()]
            body = ",\n".join(f"    {each if isinstance(each, str) else _line(each)}" for each in items)
            ends = "[]" if name == "steps" else "{}"
            lines.append(f'  "{name}": {ends[0]}\n{body}\n  {ends[1]}')
        else:
            lines.append(f'  "{name}": {_line(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def files() -> dict[Path, str]:
    """The text of every file."""
    found = {FOLDER / "scenarios" / f"{each.name}.json": text_of(each) for each in scenarios()}
    return found | {FOLDER / "schema.json": json.dumps(json_schema(), indent=1) + "\n"}


def main() -> int:
    """Write every file, and remove those of scenarios that are gone."""
    texts = files()
    for path in (FOLDER / "scenarios").glob("*.json"):
        if path not in texts:
            path.unlink()
    (FOLDER / "scenarios").mkdir(exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    print(f"{len(texts) - 1} scenarios written to {FOLDER.relative_to(CHECKOUT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
