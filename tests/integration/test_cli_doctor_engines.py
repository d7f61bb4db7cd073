"""`kvevents doctor` reports the expected verdicts and advice for each kind of engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from cli_cases import RECORDING, RUN, play_on_adjacent_ports, run
from cli_doctor_cases import findings
from kvevents.events import AllBlocksCleared, BlockStored, KVEventBatch
from kvevents.recording import live_batches
from kvevents.testing import Faults, TapePlayer
from kvevents.wire import encode_batch

HISTORY = [(batch.topic, batch.seq, batch.payload) for batch in live_batches(RECORDING, RUN)]


def make_batches(count: int) -> list[tuple[bytes, int, bytes]]:
    """Return `count` batches that only store blocks: without a clear among them, each lost batch matters."""
    stored = [KVEventBatch(1.0 + seq, [BlockStored([seq], None, [1, 2], 2)], 0) for seq in range(count)]
    return [(b"kv-events", seq, encode_batch(batch)) for seq, batch in enumerate(stored)]


def make_compacted_history(count: int) -> list[tuple[bytes, int, bytes]]:
    """Return the replay buffer of a publisher with compaction: a snapshot of `count` batches and the batches after it."""
    snapshot = encode_batch(KVEventBatch(1.0, [AllBlocksCleared(), BlockStored([1], None, [1] * 32, 32)], 0))
    return [(b"kv-events", count, snapshot), *((topic, seq, payload) for topic, seq, payload in HISTORY if seq > count)]


@contextmanager
def engine(*, idle: bool = False, rate: float = 100.0, tape: Any = RECORDING, **faults: Any) -> Iterator[TapePlayer]:
    """Play a recorded engine, under load unless it is idle, whose replay port is the one after its event port."""
    source = None if tape is RECORDING else tape
    with play_on_adjacent_ports(source, faults=Faults(**faults)) as (player,):
        player.play(20)
        if not idle:
            player.start_playing(rate=rate, times=1_000)
        yield player


@dataclass(frozen=True)
class Case:
    """An engine, the options of the command, and the expected findings."""

    engine: Callable[[], AbstractContextManager[TapePlayer]]
    replay_option: bool = True
    """Whether the command names its replay endpoint with `--replay`."""
    seconds: float = 0.8
    """Shortest time in which the case can be seen; it is seen for longer if this was not enough on a busy machine."""
    verdicts: dict[str, str] = field(default_factory=dict)
    """The verdict of each check that is not ok, by name of the check."""
    expected: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def make_misfits(count: int) -> list[tuple[bytes, int, bytes]]:
    """Return batches of stores with one token for a block of two."""
    stored = [KVEventBatch(1.0 + seq, [BlockStored([seq], None, [1], 2)], 0) for seq in range(count)]
    return [(b"kv-events", seq, encode_batch(batch)) for seq, batch in enumerate(stored)]


def make_orphans(count: int) -> list[tuple[bytes, int, bytes]]:
    """Return batches of blocks whose parents are never announced."""
    stored = [KVEventBatch(1.0 + seq, [BlockStored([seq], seq + 1_000, [seq, 2], 2)], 0) for seq in range(count)]
    return [(b"kv-events", seq, encode_batch(batch)) for seq, batch in enumerate(stored)]


CASES: dict[str, Case] = {
    "blocks without parents": Case(
        lambda: engine(tape=make_orphans(40)),
        verdicts={"trust": "warn"},
        expected=("of its blocks have parents or tokens that were never announced", "use a newer release"),
    ),
    "stores that cannot be used": Case(
        lambda: engine(tape=make_misfits(40)),
        verdicts={"trust": "warn"},
        expected=("of its stores could not be used",),
    ),
    "healthy": Case(
        engine,
        expected=(
            "complete since the engine started",
            "as published: it belongs to this stream",
            "no sequence number missing",
        ),
    ),
    "healthy, replay not named": Case(
        engine,
        replay_option=False,
        expected=("has the live batches as published, and is used here", "with other commands"),
    ),
    "lossy": Case(
        lambda: engine(drop=0.3),
        verdicts={"losses": "warn"},
        expected=("live batches did not arrive (#", "kvevents repairs this by replay, other consumers do not"),
        unexpected=("replay holds 0 of",),
    ),
    "lossy, and no replay": Case(
        lambda: engine(drop=0.3, replay_silent=True),
        replay_option=False,
        verdicts={"losses": "warn", "replay": "warn", "trust": "warn"},
        expected=("live batches did not arrive (#",),
    ),
    "skipped sequence numbers": Case(
        lambda: engine(tape=make_batches(300), skipped=range(3, 10_000, 7)),
        verdicts={"losses": "warn", "replay": "warn", "trust": "warn"},
        expected=("replay has 0 of these", "these batches are lost"),
    ),
    "replay with random gaps": Case(
        lambda: engine(rate=20.0, replay_holes=0.2),
        seconds=5.0,
        verdicts={"replay": "warn"},
        expected=("missing inside the response (#",),
        unexpected=("nothing can bring them back", "complete since", "these batches are lost"),
    ),
    "replay does not answer": Case(
        lambda: engine(replay_silent=True),
        verdicts={"replay": "fail", "trust": "warn"},
        expected=("does not answer within", "the engine may hang"),
    ),
    "replay does not answer, not named": Case(
        lambda: engine(replay_silent=True),
        replay_option=False,
        verdicts={"replay": "warn", "trust": "warn"},
        expected=("accepts connections, but does not answer replay requests", "which may hang or be busy"),
        unexpected=("start it with",),
    ),
    "idle, replay not named": Case(
        lambda: engine(idle=True),
        replay_option=False,
        verdicts={"traffic": "warn", "replay": "warn", "trust": "warn"},
        expected=("may be a replay endpoint, but no live batch arrived",),
    ),
    "replay of another engine that is ahead": Case(
        lambda: engine(replay_foreign=make_batches(2_000)),
        verdicts={"replay": "fail", "trust": "warn"},
        expected=("belongs to another stream: its batch #", "use this engine's own replay endpoint with --replay"),
    ),
    "replay of another engine that is behind": Case(
        lambda: engine(replay_foreign=make_batches(5)),
        verdicts={"replay": "fail", "trust": "warn"},
        expected=("belongs to another stream: it does not have #", "use this engine's own replay endpoint with --replay"),
    ),
    "replay of another engine, not named": Case(
        lambda: engine(replay_foreign=make_batches(2_000)),
        replay_option=False,
        verdicts={"replay": "warn", "trust": "warn"},
        expected=("belongs to another stream: its batch #", "use the engine's replay endpoint with --replay"),
    ),
    "evicted history": Case(
        lambda: engine(tape=make_batches(300), buffer_steps=10),
        verdicts={"replay": "warn", "trust": "warn"},
        expected=("are gone", "raise buffer_steps", " 0 lost; ", "not available"),
    ),
    "compacted history": Case(
        lambda: engine(tape=make_compacted_history(15)),
        expected=("the first is a snapshot of batches 0 to 15, so a late subscriber is complete",),
        unexpected=("are gone",),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_doctor_reports_the_expected_verdicts_on_an_engine(name: str) -> None:
    """The checks that are not ok and their texts are those of the case; all other checks are ok."""
    case = CASES[name]
    for seconds in (case.seconds, 4 * case.seconds, 16.0):
        with case.engine() as tape:
            replay_option = ("--replay", tape.replay_endpoint) if case.replay_option else ()
            ended = run("doctor", tape.endpoint, *replay_option, "--output=json", "--duration", seconds)
        not_ok = {check: finding["verdict"] for check, finding in findings(ended).items() if finding["verdict"] != "ok"}
        if not_ok == case.verdicts and all(expected in ended.out for expected in case.expected):
            break
    assert not_ok == case.verdicts, ended.out
    for expected in case.expected:
        assert expected in ended.out, ended.out
    for unexpected_text in case.unexpected:
        assert unexpected_text not in ended.out, ended.out
