"""Scenarios of batches that are lost, late, doubled or out of order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from kvevents.conform import scenario as steps
from kvevents.events import AllBlocksCleared, EventBatch
from kvevents.wire import encode_batch
from tools.conform.script import A, B, C, D, Engine, Play, Script, to_json

LOST: Final = 4
"""The block of A whose batch is lost."""
SLOW: Final = 12.0
"""Seconds in which a target that waits for replies that do not come has given up."""


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


def _half_open(script: Script) -> None:
    """Open connections deliver nothing any more, new ones work."""
    engine = script.warm(A)
    script.add(steps.HalfOpen("a"))
    script.ask(B)
    engine.store(B)
    script.check(SLOW)


def _clock(script: Script) -> None:
    """The engine's clock goes back by years, and forth by centuries."""
    engine = script.warm(A, 4)
    for place, ts in zip(range(4, 10), (0.0, -1.0, 1e12, 1.0, 1e300, 2.0), strict=True):
        payload = encode_batch(EventBatch(ts, [engine.stored(A, place)], 0), script.dialect)
        engine.publish_json(to_json(msgspec.msgpack.decode(payload)), lost=place == 6)
    script.check()


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


def losses() -> Iterator[tuple[Script, Play]]:
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
        ("half-open", "open connections deliver nothing any more, new ones work", _half_open),
        ("clock", "timestamps that go back and forth by centuries", _clock),
        (
            "gap-silent-at-first",
            "one batch lost, the first two requests get no reply",
            _gap(SLOW, replay="silent", faulty_replies=2),
        ),
        ("slow", "the network delivers nothing for two seconds, then everything", _slow),
        ("reordered", "live messages out of order", _reordered),
        ("duplicates", "live messages twice, also after what undoes them", _duplicates),
        ("topic", "a topic as llm-d names it, replay works", _gap(topic="kv@pod-1@model")),
        ("skipped-number", "a number without a batch, which the engine could not encode", _skipped),
    )
    yield from ((Script(name, title, "losses"), play) for name, title, play in quick)
