"""`chaos`: that rounds can be repeated, that truth and judge are right, and a few rounds of each fault.

`make chaos` plays thousands of rounds; here each fault is felt once, by real processes over real sockets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from kvevents.events import KVEventBatch
from kvevents.index import PrefixIndex
from kvevents.stream import Batch
from kvevents.wire import Dialect, dialects, encode_batch
from tests.system.chaos import report, truth
from tests.system.chaos.cache import Cache, Habits, Speech
from tests.system.chaos.consumer import Report, leaping
from tests.system.chaos.engine import RELEASES, Make
from tests.system.chaos.faults import ENDS, FAULTS
from tests.system.chaos.jobs import Run, outcomes
from tests.system.chaos.judging import Example, Outcome, Verdict, check_claims, judge
from tests.system.chaos.plan import LOST_TAIL, Plan, draw_plan, known
from tests.system.chaos.settling import SettleLimits
from tests.system.chaos.stage import play
from tests.system.chaos.traits import TRAITS, WAYS
from tools import released

MAKES: list[Make] = ["ours", "tape", "vllm", "sglang"]
AT_HAND: list[Make] = [make for make in MAKES if make not in RELEASES or released.at_hand(RELEASES[make]) is not None]
DIGEST = b"\1" * 16
OTHER = b"\2" * 16


SETTLING = SettleLimits(lasting=0.3, passing=1.0)
"""A doubt counts as final earlier than in `make chaos`."""


def reported(trust: str = "EXACT", digest: bytes = DIGEST, doubts: tuple[str, ...] = ()) -> Report:
    return Report(trust, doubts, truth.Key(1, 7).packed, digest, 7, {})


# --- rounds that are felt --------------------------------------------------------------------------------------------------

RELAYS = [name for name in WAYS if "relay" in name]
TOGETHER = [
    ["live messages dropped", "stop engine", "restart"],
    ["a run of live messages dropped", "kill consumer", LOST_TAIL],
    ["replies dropped", "live messages delayed", "kill engine"],
    ["requests dropped", "replies delayed"],
    ["live messages out of order", "replies out of order"],
    ["connection cut", "connection refused", "unseen restart"],
    ["connection flaps", "strangers connect"],
    ["half-open", "half-open replay"],
    ["network swallows all", "clock jumps of the engine"],
    ["replay dead", "replay silent"],
    ["malformed messages injected", "malformed replies and requests", "end markers out of place"],
    ["HWM overflow", "stop consumer"],
    ["live messages never sent", "replay with holes", "numbers burnt"],
    ["batches of garbage", "malformed messages", "replay with junk"],
    ["replay of 1,000 at most", "replay without end marker", "short replay buffer, tape"],
    ["replay mute at first", "replay of what the socket takes", "clock leaps of the consumer"],
    ["short replay buffer", "queue full", "batches that cannot be encoded"],
    ["replay of another engine"],
]
"""Each fault once, in as few rounds as that takes. The rest is `REST`."""
REST = {
    "no replay endpoint": "is played with the tape's own tests",
    "replay mute": "a consumer is never exact then",
    "unknown events": "as batches of garbage",
    "full disk": "takes root",
    **dict.fromkeys(("engine compacts", "engine with heartbeats"), "drawn anywhere"),
    **dict.fromkeys(RELAYS, "the relay has tests of its own, and stands in the rounds of `test_relays`"),
    **dict.fromkeys(("stop relay", "kill relay", "restart relay"), "in `test_relays`"),
}


@pytest.mark.parametrize("faults", TOGETHER, ids=", ".join)
def test_no_consumer_is_exact_and_wrong(faults: list[str]) -> None:
    """Under each fault: a consumer that is EXACT at any time holds what the engine held then, and the stage stays up."""
    tedious = ["no replay endpoint", "batches of garbage", "queue full", "half-open", "HWM overflow"]
    without = [*RELAYS, *(name for name in tedious if name not in faults)]
    perform(draw_plan("suite", 1, 400, ["ours", "tape"], faults, without))


@pytest.mark.parametrize("faults", [["one relay", "kill relay", "stop relay"], ["two relays", "restart relay"]], ids=", ".join)
def test_relays(faults: list[str]) -> None:
    """A hop more, which is killed, stopped and started again."""
    without = ["no replay endpoint", "batches of garbage", "relay hashes tokens", "relay without journal"]
    perform(draw_plan("suite", 0, 400, ["ours", "tape"], faults, without))


def perform(plan: Plan) -> None:
    outcome = play(plan, SETTLING)
    assert not outcome.error, plan.schedule()
    assert not outcome.wrong, f"{outcome.verdicts}\n{plan.schedule()}"
    assert {verdict.consumer for verdict in outcome.verdicts} == {consumer.name for consumer in plan.consumers}


def test_every_fault_is_felt_or_excused() -> None:
    felt = {name for together in TOGETHER for name in together}
    assert felt | set(REST) == set(known())
    assert not felt & set(REST)


def test_a_calm_round_is_exact() -> None:
    """Without faults every consumer is exact, and has claimed so before the end."""
    plan = calm()
    (verdict,) = play(plan, SETTLING).verdicts
    assert verdict.kind == "right", plan.schedule()
    assert verdict.claims > 0


def test_the_checker_can_fail() -> None:
    """A consumer that silently passes over one removal is found: by what it holds in the end, or by what it claimed before."""
    plan = calm()
    plan = replace(plan, consumers=tuple(replace(consumer, sabotage=True) for consumer in plan.consumers))
    outcome = play(plan, replace(SETTLING, settle=1.0))
    assert outcome.wrong, outcome.verdicts
    assert "EXACT at batch" in outcome.verdicts[0].detail


@pytest.mark.parametrize("make", [make for make in MAKES if make in RELEASES])
def test_released_publishers_beside_their_own_example(make: Make) -> None:
    """The released class out of its wheel; and its example subscriber, whose losses are counted."""
    if make not in AT_HAND:
        pytest.skip("its wheel is not at hand: `make bench` downloads it")
    plan = draw_plan("suite", 0, 400, [make], ["live messages dropped"], [*RELAYS, "no replay endpoint", *ENDS])
    outcome = play(plan, SETTLING)
    assert (outcome.error, outcome.wrong) == ("", False), plan.schedule()
    assert [example.name for example in outcome.examples] == ["example", "example, corrected"]
    assert all(0 <= example.lost < example.published == outcome.batches for example in outcome.examples)


def calm() -> Plan:
    """Ours, with removals, without any fault; and without heartbeats, which find sabotage by themselves."""
    calm_one = [*RELAYS, "engine with heartbeats", *ENDS, *FAULTS, *TRAITS, LOST_TAIL]
    plan = draw_plan("calm", 0, 400, ["ours"], (), calm_one)
    engine = replace(plan.setting.engine, habits=Habits(50, 4, ragged=False, clears=0.0, events=2))
    consumers = tuple(each for each in plan.consumers if each.name == "steady")
    script = tuple(command for command in plan.script if command[0] != "join" or command[1] == "steady")
    return replace(plan, setting=replace(plan.setting, engine=engine), consumers=consumers, script=script)


# --- plans -----------------------------------------------------------------------------------------------------------------


def test_a_round_can_be_repeated() -> None:
    """The same seed and number give the same round; another number gives another one."""
    assert draw_plan("s", 3, 1_000, MAKES) == draw_plan("s", 3, 1_000, MAKES)
    assert draw_plan("s", 3, 1_000, MAKES).schedule() != draw_plan("s", 4, 1_000, MAKES).schedule()


def test_faults_can_be_asked_for_and_left_out() -> None:
    plan = draw_plan("s", 0, 1_000, MAKES, ["connection flaps"], ["connection cut"])
    assert "connection flaps" in plan.faults
    assert "connection cut" not in plan.faults
    with pytest.raises(LookupError, match="queue full"):
        draw_plan("s", 0, 1_000, ["vllm"], ["queue full"])


@pytest.mark.parametrize("number", range(40))
def test_scripts_make_sense(number: int) -> None:
    """Every fault that is in the script is in the list; numbers to reach rise within a life; the last batches come last."""
    plan = draw_plan("sense", number, 1_000, MAKES, can_mount=True)
    reached = -1
    for word, *details in plan.script:
        if word == "strike":
            assert details[0] in plan.faults
        if word == "life":
            assert details[0] in plan.faults
            reached = -1
        if word == "reach" and details[0] > reached:
            reached = details[0]
    tail = next(command for command in plan.script if command[0] == "tail")
    assert tail[1] == plan.lives[-1] >= reached
    assert sum(command[0] == "life" for command in plan.script) == len(plan.lives) - 1
    assert sum(plan.lives) <= 1_000 + 120 * len(plan.lives)


# --- the cache -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("row", dialects(), ids=str)
def test_the_cache_is_valid_and_its_dialect_says_all_of_it(row: Dialect, ragged: bool) -> None:
    """Nothing is removed that is not held, nothing waits for its parent; encoded and decoded it is the same cache."""
    cache = Cache(Random(1), Speech.of(row), Habits(60, 2, ragged, 0.01, 3))
    direct, decoded = PrefixIndex(), PrefixIndex()
    for number in range(400):
        events = cache.step()
        direct.apply(Batch("a", 0, 0, number, 1.0, events, False))
        decoded.apply_payload(("a", 0), 0, number, encode_batch(KVEventBatch(1.0, events, 0), row))
    stats = direct.stats()
    assert (stats.orphans, stats.unknown_removals, stats.rejected) == (0, 0, {})
    assert direct.digest("a") == decoded.digest("a")
    assert sum(block.copies for block in direct.blocks("a")) == sum(cache.held().values())


# --- truth -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", [0, 1, 1_000_000_007, truth.LAST_SECOND])
@pytest.mark.parametrize("key", [truth.Key(1, 0), truth.Key(1, truth.MAX_BATCHES), truth.Key(truth.MAX_LIVES, 12_345)])
def test_a_timestamp_names_its_batch(key: truth.Key, second: int) -> None:
    """Whatever second the engine's clock believes in."""
    assert truth.Key.unpack(truth.key_of(truth.stamp(key, second))) == key


@pytest.mark.parametrize("ts", [0.0, -1.0, 1.1, 1_790_000_000.25, float("inf"), float("nan")])
def test_timestamps_of_other_origin_name_nothing(ts: float) -> None:
    assert truth.key_of(ts) == truth.UNPLACED


def test_records_survive_a_torn_end(tmp_path: Path) -> None:
    """A process that is killed while it writes leaves a part of a record, which is not read."""
    path = tmp_path / "facts"
    truth.write_facts(path, [(1, DIGEST), (2, OTHER)])
    with path.open("ab") as file:
        file.write(b"torn")
    assert truth.read_facts(path) == {1: DIGEST, 2: OTHER}
    assert truth.read_facts(tmp_path / "none") == {}
    diary = truth.Diary(tmp_path / "diary")
    diary.write(truth.Claim(5, DIGEST, 7))
    assert list(truth.read_claims(tmp_path / "diary")) == [truth.Claim(5, DIGEST, 7)]


# --- the judge -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("report", "kind", "lasting"),
    [
        (reported(), "right", False),
        (reported(digest=OTHER), "wrong", False),
        (reported("DEGRADED", OTHER, ("LOST",)), "doubted", True),
        (reported("DEGRADED", DIGEST, ("REPLAY_SILENT",)), "doubted", False),
        (reported("STALE", OTHER), "doubted", False),
    ],
)
def test_the_judge(report: Report, kind: str, lasting: bool) -> None:
    """Exact must be equal; whatever else says so of itself is honest."""
    verdict = judge("c", report, DIGEST)
    assert (verdict.kind, verdict.lasting) == (kind, lasting)


def test_claims_are_checked_against_the_batch_that_they_are_of() -> None:
    facts = {truth.Key(1, 0).packed: DIGEST, truth.Key(1, 1).packed: OTHER}
    right = [truth.Claim(truth.NOTHING, truth.EMPTY, -1), *(truth.Claim(key, digest, 0) for key, digest in facts.items())]
    assert check_claims(right, facts, foreign=False) == check_claims(right, facts, foreign=True)
    assert check_claims(right, facts, foreign=False).wrong == ()
    for claim in (
        truth.Claim(truth.Key(1, 1).packed, DIGEST, 1),
        truth.Claim(truth.NOTHING, DIGEST, -1),
        truth.Claim(truth.Key(2, 0).packed, DIGEST, 0),
    ):
        assert check_claims([claim], facts, foreign=True).wrong, claim
    stranger = truth.Claim(truth.UNPLACED, DIGEST, 4)
    assert check_claims([stranger], facts, foreign=False).wrong
    assert not check_claims([stranger], facts, foreign=True).wrong


def test_a_consumer_that_was_wrong_once_is_wrong() -> None:
    checked = check_claims([truth.Claim(truth.NOTHING, DIGEST, -1)], {}, foreign=False)
    verdict = judge("c", reported(), DIGEST).with_claims(checked)
    assert (verdict.kind, verdict.claims) == ("wrong", 1)


# --- the rest --------------------------------------------------------------------------------------------------------------


def test_a_clock_that_leaps_never_goes_back() -> None:
    ticks: Iterator[float] = iter(range(1_000))
    clock = leaping(lambda: next(ticks) / 100, 5, Random(1))
    read = [clock() for _ in range(999)]
    assert all(later >= earlier for earlier, later in pairwise(read))
    assert read[-1] > 100


def test_tables() -> None:
    """A round stands in the row of each of its faults; examples beside ours."""
    right = Verdict("steady", "right", (), "", claims=3, got=90)
    doubted = Verdict("late", "doubted", ("LOST",), "")
    example = Example("example", 100, 40, right=False, missed=0, errors=1)
    rounds = [
        Outcome("s", 0, ("restart", "half-open"), "vllm", 0, 100, (right, doubted), (example,), {"claims": 3}),
        Outcome("s", 1, (), "ours", 0, 50, (right,)),
    ]
    by_fault = report.by_fault(rounds)
    for row in ("| nothing | 1 | 1 | 0 | 0 |", "| restart | 1 | 1 | 1 | 0 |", "| half-open | 1 | 1 | 1 | 0 |"):
        assert row in by_fault
    assert "| **all** | 2 | 150 | 2 | 1: 1 LOST | 0 |" in report.by_make(rounds)
    assert "| vllm 0.32.0 | example | 1 | 100 | 40 (40.0%) | 1 (100.0%) |" in report.losses(rounds)
    assert "**0 wrong**" in report.totals(rounds)
    document = report.document(rounds, "Seed `s`")
    assert report.totals(rounds) in document
    with_soak = report.with_soak(document, "an hour")
    assert "an hour" in with_soak
    assert report.document(rounds, "Seed `s`", with_soak) == with_soak


def test_rounds_are_played_side_by_side() -> None:
    """Each number once, in whichever job."""
    run = Run("jobs", 150, ["ours"], (), [*RELAYS, *ENDS, *FAULTS, *TRAITS], limits=SETTLING)
    assert sorted(outcome.number for outcome in outcomes(run, iter(range(4)), 2, lambda: True)) == [0, 1, 2, 3]
