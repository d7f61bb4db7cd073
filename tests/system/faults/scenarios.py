"""The faults: what is done, and what has to come of it with our service."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from kvevents.events import EventBatch
from kvevents.testing import FaultProxy, Faults
from kvevents.testing.ports import reserve_port
from kvevents.wire import encode_batch, live_frames
from tests.system.faults.engine import BLOCK, Engine, Prompt
from tests.system.faults.stage import Stage, Verdict

RIGHT, DOUBTED, REPORTED = Verdict.RIGHT, Verdict.DOUBTED, Verdict.REPORTED
A: Final = Prompt(1, 10)
B: Final = Prompt(2, 10)
C: Final = Prompt(3, 5)
D: Final = Prompt(4, 5)
LONG: Final = Prompt(5, 300)
"""More batches than a stream compares with live ones without asking for them again."""
LOST: Final = 4
"""The block of A whose batch is lost."""
MOMENT: Final = 1.0
"""Seconds in which a replay has happened, where one does: what comes then is not part of it."""
CATCH_UP: Final = 5.0
"""Seconds in which an idle engine's batches have come by replay, where they do."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One fault."""

    name: str
    fault: str
    """For people."""
    play: Callable[[Stage], None]
    """Does it: engines, registration, traffic. Ends when the last thing was done."""
    wanted: Verdict
    """From our service."""
    patience: float = 8.0
    """Seconds after which what is not right is not going to be."""
    suite: Literal["shared", "alone", "slow"] = "shared"
    """Whether the tests play it on the service that all share, or on one of its own, or leave it to `make faults`."""


def _warm(stage: Stage, blocks: int = A.blocks, **options: Any) -> Engine:
    """An engine that holds the beginning of A, which is known, and with which something is about to happen."""
    engine = stage.engine(**options)
    stage.follow(engine)
    stage.ask(A)
    engine.store(A, range(blocks))
    stage.arrive()
    stage.begin()
    return engine


# --- losses ----------------------------------------------------------------------------------------------------------------


def _lose_one(stage: Stage, **options: Any) -> Engine:
    """Of ten blocks behind each other, the batch of one is lost; a moment later comes another prompt."""
    engine = _warm(stage, LOST, **options)
    engine.store(A, [LOST], lost=True)
    engine.store(A, range(LOST + 1, A.blocks))
    stage.wait(MOMENT)
    stage.ask(B)
    engine.store(B)
    return engine


def _gap(**options: Any) -> Callable[[Stage], None]:
    def play(stage: Stage) -> None:
        _lose_one(stage, **options)

    return play


def _gap_restored(stage: Stage) -> None:
    _lose_one(stage, replay="none").store(A, [LOST])


def _long_gap(stage: Stage) -> None:
    """More is lost than is kept."""
    engine = _warm(stage, 2, faults=Faults(buffer_steps=4))
    engine.store(A, range(2, 9), lost=True)
    engine.store(A, [9])
    stage.wait(MOMENT)
    stage.ask(B)
    engine.store(B)


def _tail(**options: Any) -> Callable[[Stage], None]:
    return lambda stage: _warm(stage, 8, **options).store(A, range(8, 10), lost=True)


def _late(stage: Stage) -> None:
    engine = stage.engine()
    engine.store(A, lost=True)
    stage.ask(A)
    stage.begin()
    stage.follow(engine)


def _late_without_replay(stage: Stage) -> None:
    engine = stage.engine(replay="none")
    engine.store(A, range(6), lost=True)
    stage.ask(A, B)
    stage.begin()
    stage.follow(engine)
    engine.store(A, range(6, 10))
    engine.store(B)


def _cut(stage: Stage) -> None:
    engine = stage.engine()
    network: FaultProxy = stage.holding(FaultProxy(engine.endpoint))
    stage.follow(engine, endpoint=network.endpoint)
    stage.ask(A, B)
    engine.store(A)
    stage.arrive()
    stage.begin()
    network.cut(refuse=True)
    engine.store(B)
    network.heal()
    engine.wait_for_subscriber()


def _then_live(play: Callable[[Stage], None]) -> Callable[[Stage], None]:
    """After a fault with an idle engine, when replay has brought everything: one live batch, which is empty."""

    def play_on(stage: Stage) -> None:
        play(stage)
        stage.wait(CATCH_UP)
        for engine in stage.engines.values():
            engine.publish([])

    return play_on


def _stalled(stage: Stage) -> None:
    """The network takes everything and brings nothing, with every connection open."""
    engine = stage.engine()
    assert engine.replay_endpoint is not None
    events, replay = [stage.holding(FaultProxy(where)) for where in (engine.endpoint, engine.replay_endpoint)]
    stage.follow(engine, endpoint=events.endpoint, replay_endpoint=replay.endpoint)
    stage.ask(A, B)
    engine.store(A)
    stage.arrive()
    stage.begin()
    events.stall()
    replay.stall()
    engine.store(B)


def _foreign_replay(stage: Stage) -> Engine:
    """A replay endpoint of another engine, which has published more; its history has come, and nothing live."""
    other, engine = stage.engine(seed=2), stage.engine()
    other.store(B, lost=True)
    other.store(LONG, lost=True)
    stage.ask(A, B)
    stage.begin()
    stage.follow(engine, replay_endpoint=other.replay_endpoint)
    stage.wait(CATCH_UP, lambda: bool(stage.look().false))
    return engine


def _foreign_replay_idle(stage: Stage) -> None:
    _foreign_replay(stage)


def _foreign_replay_live(stage: Stage) -> None:
    _foreign_replay(stage).store(A)
    stage.wait(MOMENT)


# --- lives -----------------------------------------------------------------------------------------------------------------


def _restart(**options: Any) -> Callable[[Stage], None]:
    def play(stage: Stage) -> None:
        engine = _warm(stage, **options)
        engine.restart()
        engine.wait_for_subscriber()
        stage.ask(B, C)
        engine.store(B)
        # What arrives together with the connection may be of the connection before it: only a later batch confirms replay.
        stage.wait(MOMENT)
        engine.store(C)

    return play


def _restart_idle(stage: Stage) -> None:
    engine = _warm(stage)
    engine.restart()
    engine.wait_for_subscriber()


def _restart_ahead(stage: Stage) -> None:
    """The new life is further than the old one was when the connection is back."""
    engine = _warm(stage)
    engine.restart()
    stage.ask(B, C, D)
    engine.store(B, lost=True)
    engine.store(C, lost=True)
    engine.wait_for_subscriber()
    engine.store(D, range(1))
    stage.wait(MOMENT)  # as in `_restart`
    engine.store(D, range(1, D.blocks))


def _gone(stage: Stage) -> None:
    engine = _warm(stage)
    stage.answers_expected = False
    engine.die()


def _registered_again(stage: Stage) -> None:
    """What operators do after a restart."""
    engine = _warm(stage)
    stage.unregister(next(iter(stage.engines)))
    engine.restart()
    stage.ask(B)
    engine.store(B, range(5), lost=True)
    stage.follow(engine)
    engine.store(B, range(5, 10))


def _killed(stage: Stage) -> None:
    """The service dies while engines go on; they keep less than the service knew."""
    engine = _warm(stage, faults=Faults(buffer_steps=5))
    stage.ask(B)

    def meanwhile() -> Iterator[None]:
        engine.store(B, range(2))
        yield

    stage.die_and_come_back(meanwhile())


def _killed_both(stage: Stage) -> None:
    """The engine that comes back is further than the one that the service knew."""
    engine = _warm(stage)
    stage.ask(B, C)

    def meanwhile() -> Iterator[None]:
        engine.restart()
        engine.store(B)
        engine.store(C)
        yield

    stage.die_and_come_back(meanwhile())


# --- bytes -----------------------------------------------------------------------------------------------------------------


def _bytes(send: Callable[[Engine], None]) -> Callable[[Stage], None]:
    """Something that is no batch, between good ones."""

    def play(stage: Stage) -> None:
        engine = _warm(stage, 5)
        send(engine)
        engine.store(A, range(5, 10))

    return play


def _whole(engine: Engine) -> bytes:
    return encode_batch(EventBatch(1.0, [engine.stored(D, 0)], 0))


def _bad_event(stage: Stage) -> None:
    """A batch of three: a block, an event that no release knows, and the next block."""
    engine = _warm(stage, 4)
    engine.publish([engine.stored(A, 4), {"type": "BlockPinned", "block_hashes": [1]}, engine.stored(A, 5)])
    engine.store(A, range(6, 10))


def _jump(seq: int, **options: Any) -> Callable[[Stage], None]:
    """One number that is not its turn, and what comes a moment later."""

    def play(stage: Stage) -> None:
        engine = _warm(stage, 5, **options)
        asked = len(engine.requests)
        engine.send_numbered(seq)
        stage.wait(MOMENT, lambda: len(engine.requests) > asked)
        stage.ask(B)
        engine.store(A, range(5, 10))
        engine.store(B)

    return play


# --- blocks ----------------------------------------------------------------------------------------------------------------


def _other_hashes(stage: Stage) -> None:
    second = stage.engine(seed=2)
    stage.follow(second)
    _warm(stage)
    second.store(A)
    second.remove(A, [8, 9])


def _middle(stage: Stage) -> None:
    engine = _warm(stage, 6)
    engine.remove(A, [2])
    engine.store(A, [2])
    engine.store(A, range(6, 10))


def _cleared(stage: Stage) -> None:
    engine = _warm(stage)
    engine.clear()
    stage.ask(B)
    engine.store(B)


def _medium(stage: Stage) -> None:
    engine = stage.engine()
    stage.follow(engine)
    stage.ask(A)
    stage.begin()
    engine.store(A, medium="gpu")


def _salt(stage: Stage) -> None:
    engine = stage.engine()
    stage.follow(engine)
    salted = Prompt(1, 10, salt="s1")
    stage.ask(salted, cache_salt="s1")
    stage.ask(salted.unsalted())
    stage.begin()
    engine.store(salted)


def _tenants(stage: Stage) -> None:
    engine = stage.engine()
    stage.begin()
    stage.follow(engine, tenant_id="a")
    stage.ask(A, tenant_id="a")
    stage.ask_as_another(A, tenant_id="b")
    engine.store(A)


def _other_blocks(stage: Stage) -> None:
    engine = stage.engine()
    stage.follow(engine)
    prompt = Prompt(1, 5, block_size=2 * BLOCK)
    stage.ask(prompt)
    stage.begin()
    engine.store(prompt)


# --- registration ----------------------------------------------------------------------------------------------------------


def _no_blocks(stage: Stage) -> None:
    """A wrong registration, and then the right one of another engine."""
    stage.begin()
    wrong, right = stage.engine(), stage.engine()
    stage.register(endpoint=wrong.endpoint, block_size=0)
    stage.ask(A)
    stage.follow(right)
    right.store(A)


def _unreachable(stage: Stage) -> None:
    port = reserve_port("tcp://127.0.0.1:*")
    stage.answers_expected = False
    stage.begin()
    stage.register(endpoint=port.endpoint)
    if port.holder is not None:
        stage.holding(port.holder)


def _unresolvable(stage: Stage) -> None:
    stage.answers_expected = False
    stage.begin()
    stage.register(endpoint="tcp://no-such-engine.invalid:5557")


def _silent_port(stage: Stage) -> None:
    """Something listens, and it is no engine."""
    listener = stage.holding(socket.create_server(("127.0.0.1", 0)))
    stage.answers_expected = False
    stage.begin()
    stage.register(endpoint=f"tcp://127.0.0.1:{listener.getsockname()[1]}")


_NO_END: Final = Faults(lose_end_marker=True)
_MUTE: Final = Faults(replay_silent=True)

CHAPTERS: Final = {
    "Batches are lost": (
        Scenario("gap-alone", "one batch lost, no replay endpoint", _gap(replay="none"), REPORTED),
        Scenario("gap-restored", "the same, and the engine computes the lost block again", _gap_restored, DOUBTED),
        Scenario("gap-replay", "one batch lost, replay works", _gap(), RIGHT),
        Scenario(
            "gap-old-replay",
            "the same, replies without topic (before vLLM 0.26)",
            _gap(faults=Faults(reply_shape="no-topic")),
            RIGHT,
        ),
        Scenario("gap-beyond", "seven batches lost, the engine keeps too few for replay", _long_gap, REPORTED),
        Scenario(
            "gap-dead", "one batch lost, nothing listens at the replay endpoint", _gap(replay="dead"), REPORTED, patience=12.0
        ),
        Scenario("gap-mute", "one batch lost, the replay endpoint never answers", _gap(faults=_MUTE), REPORTED, patience=12.0),
        Scenario("gap-endless", "one batch lost, replies have no end marker", _gap(faults=_NO_END), RIGHT, patience=12.0),
        Scenario("tail", "the last two batches lost, the engine idle, replay works", _tail(), DOUBTED),
        Scenario("tail-live", "the same, and one live batch when they have come by replay", _then_live(_tail()), RIGHT),
        Scenario("tail-alone", "the same, no replay endpoint", _tail(replay="none"), REPORTED),
        Scenario("late", "registered late, replay works, the engine idle", _late, DOUBTED),
        Scenario("late-live", "the same, and one live batch when all have come by replay", _then_live(_late), RIGHT),
        Scenario("late-alone", "registered late, no replay endpoint", _late_without_replay, REPORTED),
        Scenario("cut", "connection cut, ten batches meanwhile, back, the engine idle", _cut, DOUBTED),
        Scenario("cut-live", "the same, and one live batch when all have come by replay", _then_live(_cut), RIGHT),
        Scenario(
            "stalled", "the network swallows everything, connections stay open", _stalled, REPORTED, patience=12.0, suite="slow"
        ),
    ),
    "Processes end and come back": (
        Scenario("restart", "engine restarted (numbers from 0), replay works", _restart(), RIGHT),
        Scenario("restart-alone", "engine restarted, no replay endpoint", _restart(replay="none"), DOUBTED),
        Scenario("restart-idle", "engine restarted, idle since: it holds nothing", _restart_idle, DOUBTED),
        Scenario(
            "restart-ahead",
            "engine restarted, its numbers past the old ones when the connection is back",
            _restart_ahead,
            RIGHT,
        ),
        Scenario("register-again", "engine restarted, unregistered and registered again", _registered_again, RIGHT),
        Scenario("gone", "the engine is gone", _gone, REPORTED),
        Scenario(
            "killed",
            "the service killed (-9) and started again, two batches meanwhile, engine idle",
            _killed,
            DOUBTED,
            suite="alone",
        ),
        Scenario(
            "killed-both",
            "the same, and the engine restarted meanwhile, its numbers past the old ones",
            _killed_both,
            DOUBTED,
            suite="alone",
        ),
        Scenario(
            "killed-live",
            "the service killed (-9) and started again, two batches meanwhile, then one live batch",
            _then_live(_killed),
            RIGHT,
            suite="alone",
        ),
        Scenario(
            "killed-both-live",
            "the same, and the engine restarted meanwhile, its numbers past the old ones",
            _then_live(_killed_both),
            RIGHT,
            suite="alone",
        ),
    ),
    "Bytes that mean nothing": (
        Scenario("garbage", "a payload of garbage", _bytes(lambda engine: engine.publish_payload(b"\xc1garbage")), DOUBTED),
        Scenario(
            "truncated",
            "a payload that ends in the middle",
            _bytes(lambda engine: engine.publish_payload(_whole(engine)[:40])),
            DOUBTED,
        ),
        Scenario("empty", "an empty payload", _bytes(lambda engine: engine.publish_payload(b"")), DOUBTED),
        Scenario(
            "two-frames",
            "a message of two frames",
            _bytes(lambda engine: engine.send(live_frames(b"", engine.next, b"")[:2])),
            RIGHT,
        ),
        Scenario(
            "four-frames",
            "a message of four frames",
            _bytes(lambda engine: engine.send([*live_frames(b"", engine.next, b"x"), b""])),
            RIGHT,
        ),
        Scenario(
            "short-number",
            "a number of four bytes",
            _bytes(lambda engine: engine.send([b"", b"\0\0\0\5", _whole(engine)])),
            RIGHT,
        ),
        Scenario("jump", "one batch with number 2^40, then on as before", _jump(1 << 40), RIGHT),
        Scenario("jump-out", "one batch with number 2^63, then on as before", _jump(1 << 63), RIGHT),
        Scenario("jump-alone", "the same with 2^40, no replay endpoint", _jump(1 << 40, replay="none"), REPORTED),
        Scenario("bad-event", "an unknown event between two good ones of a batch", _bad_event, DOUBTED),
    ),
    "What engines send": (
        Scenario(
            "other-hashes",
            "two engines with different hashes for the same tokens; one removes two blocks",
            _other_hashes,
            RIGHT,
        ),
        Scenario("middle", "a block in the middle removed and stored again", _middle, RIGHT),
        Scenario("cleared", "AllBlocksCleared, then another prompt", _cleared, RIGHT),
        Scenario("medium", "media in lower case (`gpu`)", _medium, RIGHT),
        Scenario("other-blocks", "registered with blocks of 16 tokens, sends blocks of 32", _other_blocks, DOUBTED),
        Scenario("salt", "vLLM's own cache salt; asked for with and without it", _salt, RIGHT),
        Scenario("tenants", "tenant b asks for what tenant a holds", _tenants, RIGHT),
    ),
    "What is registered": (
        Scenario("no-block-size", "registration with block_size 0, then a right one of the model", _no_blocks, RIGHT),
        Scenario("unreachable", "registration of an endpoint where nothing listens", _unreachable, REPORTED, patience=4.0),
        Scenario("unresolvable", "registration of a name that does not resolve", _unresolvable, REPORTED, patience=4.0),
        Scenario(
            "foreign-replay",
            "the replay endpoint of another engine, which has published more; the registered engine idle",
            _foreign_replay_idle,
            REPORTED,
        ),
        Scenario("foreign-replay-live", "the same, and the registered engine goes on", _foreign_replay_live, REPORTED),
        Scenario("no-engine", "registration of a port that accepts and says nothing", _silent_port, REPORTED, patience=4.0),
    ),
}
SCENARIOS: Final = tuple(scenario for scenarios in CHAPTERS.values() for scenario in scenarios)
