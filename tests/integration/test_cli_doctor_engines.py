"""`kvevents doctor` with each kind of engine: every verdict, and its advice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from cli_cases import RECORDING, RUN, adjacent, run
from cli_doctor_cases import findings
from kvevents.events import AllBlocksCleared, BlockStored, KVEventBatch
from kvevents.recording import live_batches
from kvevents.testing import Faults, TapePlayer
from kvevents.wire import encode_batch

HISTORY = [(batch.topic, batch.seq, batch.payload) for batch in live_batches(RECORDING, RUN)]


def stores(count: int) -> list[tuple[bytes, int, bytes]]:
    """Batches that only store: no clear among them makes earlier losses irrelevant. No recorded engine published these."""
    stored = [KVEventBatch(1.0 + seq, [BlockStored([seq], None, [1, 2], 2)], 0) for seq in range(count)]
    return [(b"kv-events", seq, encode_batch(batch)) for seq, batch in enumerate(stored)]


def compacted(count: int) -> list[tuple[bytes, int, bytes]]:
    """What a publisher holds that has collapsed its history: a snapshot, then what came after it."""
    snapshot = encode_batch(KVEventBatch(1.0, [AllBlocksCleared(), BlockStored([1], None, [1, 2], 2)], 0))
    return [(b"kv-events", count, snapshot), *((topic, seq, payload) for topic, seq, payload in HISTORY if seq > count)]


@contextmanager
def engine(*, idle: bool = False, rate: float = 100.0, tape: Any = RECORDING, **faults: Any) -> Iterator[TapePlayer]:
    """A recorded engine under load, unless it is idle, with its replay port behind its event port."""
    source = None if tape is RECORDING else tape
    with adjacent(source, faults=Faults(**faults)) as (player,):
        player.play(20)
        if not idle:
            player.start_playing(rate=rate, times=1_000)
        yield player


@dataclass(frozen=True)
class Case:
    """An engine, the options beside its endpoint, and what is said of it."""

    engine: Callable[[], AbstractContextManager[TapePlayer]]
    named: bool = True
    """Whether its replay endpoint is named with `--replay`."""
    seconds: str = "0.8"
    verdicts: dict[str, str] = field(default_factory=dict)
    """Of the checks that are not ok."""
    said: tuple[str, ...] = ()
    never_said: tuple[str, ...] = ()


CASES: dict[str, Case] = {
    "healthy": Case(
        engine,
        said=("complete since the engine started", "as published: it belongs to this stream", "no sequence number missing"),
    ),
    "healthy, replay not named": Case(
        engine,
        named=False,
        said=("has the live batches as published, and is used here", "with other commands"),
    ),
    "lossy": Case(
        lambda: engine(drop=0.3),
        verdicts={"losses": "warn"},
        said=("live batches did not arrive (#", "kvevents repairs this by replay, other consumers do not"),
        never_said=("replay holds 0 of",),
    ),
    "lossy, and no replay": Case(
        lambda: engine(drop=0.3, replay_silent=True),
        named=False,
        verdicts={"losses": "warn", "replay": "warn", "trust": "warn"},
        said=("live batches did not arrive (#",),
    ),
    "burnt numbers": Case(
        lambda: engine(tape=stores(300), skipped=range(3, 10_000, 7)),
        verdicts={"losses": "warn", "replay": "warn", "trust": "warn"},
        said=("replay has 0 of these", "these batches are lost"),
    ),
    "replay with random holes": Case(
        lambda: engine(rate=20.0, replay_holes=0.2),
        seconds="5",
        verdicts={"replay": "warn"},
        said=("missing inside the response (#",),
        never_said=("nothing can bring them back", "complete since", "these batches are lost"),
    ),
    "mute replay": Case(
        lambda: engine(replay_silent=True),
        verdicts={"replay": "fail", "trust": "warn"},
        said=("does not answer within", "the engine may hang"),
    ),
    "mute replay, not named": Case(
        lambda: engine(replay_silent=True),
        named=False,
        verdicts={"replay": "warn", "trust": "warn"},
        said=("is open and does not answer replay requests", "which may hang or be busy"),
        never_said=("start it with",),
    ),
    "idle, replay not named": Case(
        lambda: engine(idle=True),
        named=False,
        verdicts={"traffic": "warn", "replay": "warn", "trust": "warn"},
        said=("may be one, but no live batch arrived",),
    ),
    "replay of another engine that is ahead": Case(
        lambda: engine(replay_foreign=stores(2_000)),
        verdicts={"replay": "fail", "trust": "warn"},
        said=("belongs to another stream: its batch #", "use this engine's own replay endpoint with --replay"),
    ),
    "replay of another engine that is behind": Case(
        lambda: engine(replay_foreign=stores(5)),
        verdicts={"replay": "fail", "trust": "warn"},
        said=("belongs to another stream: it does not have #", "use this engine's own replay endpoint with --replay"),
    ),
    "replay of another engine, not named": Case(
        lambda: engine(replay_foreign=stores(2_000)),
        named=False,
        verdicts={"replay": "warn", "trust": "warn"},
        said=("belongs to another stream: its batch #", "use the engine's replay endpoint with --replay"),
    ),
    "history that is gone": Case(
        lambda: engine(tape=stores(300), buffer_steps=10),
        verdicts={"replay": "warn", "trust": "warn"},
        said=("are gone", "raise buffer_steps"),
    ),
    "compacted history": Case(
        lambda: engine(tape=compacted(15)),
        said=("the first is a snapshot of batches 0 to 15, so a late subscriber is complete",),
        never_said=("are gone",),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_verdicts_on_an_engine(name: str) -> None:
    """Each check that is not ok, and the words of it, are those of the table; nothing else is warned of."""
    case = CASES[name]
    with case.engine() as tape:
        named = ("--replay", tape.replay_endpoint) if case.named else ()
        ended = run("doctor", tape.endpoint, *named, "--output=json", "--duration", case.seconds)
    found = findings(ended)
    bad = {check: finding["verdict"] for check, finding in found.items() if finding["verdict"] != "ok"}
    assert bad == case.verdicts, ended.out
    for said in case.said:
        assert said in ended.out, ended.out
    for never in case.never_said:
        assert never not in ended.out, ended.out
