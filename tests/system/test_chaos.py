"""`make chaos`: rounds can be repeated, the checks of a round find errors, and no consumer is wrong in a round of each fault.

`make chaos` plays thousands of rounds. Here each fault happens once, to real processes over real sockets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from kvevents.events import KVEventBatch
from kvevents.index import PrefixIndex
from kvevents.stream import Batch
from kvevents.wire import Dialect, dialects, encode_batch
from tests.system.chaos import report
from tests.system.chaos.consumer import Report, make_leaping_clock
from tests.system.chaos.faults import ENDS, FAULTS
from tests.system.chaos.judging import check_claims
from tests.system.chaos.plan import LOST_TAIL, Plan, draw_plan, known_names
from tests.system.chaos.settling import SettleLimits
from tests.system.chaos.stage import Stage
from tests.system.chaos.traits import TRAITS, VARIANTS
from tests.system.chaos_kit import truth
from tests.system.chaos_kit.cache import Cache, CacheSettings, DialectFeatures
from tests.system.chaos_kit.engine import RELEASES, Make
from tests.system.chaos_kit.jobs import Run, play, play_rounds
from tests.system.chaos_kit.judging import Example, Outcome, Result, judge
from tools import released

MAKES: list[Make] = ["ours", "tape", "vllm", "sglang"]
AVAILABLE: list[Make] = [make for make in MAKES if make not in RELEASES or released.at_hand(RELEASES[make]) is not None]
DIGEST = b"\1" * 16
OTHER = b"\2" * 16


SHORT_LIMITS = SettleLimits(lasting=0.3, passing=1.0)
"""A state that is not EXACT counts as final earlier than in `make chaos`."""


PATIENT_LIMITS = SettleLimits(settle=60.0, lasting=60.0, passing=60.0)
"""For consumers that must be EXACT, however late on a busy machine."""


def make_report(trust: str = "EXACT", digest: bytes = DIGEST, reason_names: tuple[str, ...] = ()) -> Report:
    return Report(trust, reason_names, truth.Key(1, 7).packed, digest, 7, {})


# --- rounds with processes -------------------------------------------------------------------------------------------------

RELAY_FEATURES = [name for name in VARIANTS if "relay" in name]
COMBINATIONS = [
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
    ["live messages never sent", "replay with gaps", "numbers skipped"],
    ["batches of garbage", "malformed messages", "replay with junk"],
    ["replay of 1,000 at most", "replay without end marker", "short replay buffer, tape"],
    ["replay does not answer at first", "replay of what the socket takes", "clock leaps of the consumer"],
    ["short replay buffer", "queue full", "batches that cannot be encoded"],
    ["replay of another engine"],
    ["ports of another engine", "sink that raises"],
    ["slow names", "connection cut", "replies dropped"],
]
"""Every fault and trait once, in few rounds, except those of `EXCUSED`."""
EXCUSED = {
    "no replay endpoint": "in the tests of the tape",
    "replay never answers": "a consumer is never EXACT with it",
    "unknown events": "like batches of garbage",
    "full disk": "needs root",
    **dict.fromkeys(("engine compacts", "engine with heartbeats"), "drawn in any round"),
    **dict.fromkeys(RELAY_FEATURES, "in the tests of relays"),
    **dict.fromkeys(("stop relay", "kill relay", "restart relay"), "in the test of relays"),
}


@pytest.mark.parametrize("faults", COMBINATIONS, ids=", ".join)
def test_no_consumer_is_exact_and_wrong(faults: list[str]) -> None:
    """Under each fault, a consumer that is EXACT at any time holds what the engine held then."""
    slow = ["no replay endpoint", "batches of garbage", "queue full", "half-open", "HWM overflow"]
    without = [*RELAY_FEATURES, *(name for name in slow if name not in faults)]
    play_and_check(draw_plan("suite", 1, 400, ["ours", "tape"], faults, without))


@pytest.mark.parametrize("faults", [["one relay", "kill relay", "stop relay"], ["two relays", "restart relay"]], ids=", ".join)
def test_no_consumer_behind_relays_is_exact_and_wrong(faults: list[str]) -> None:
    """A consumer behind relays is never EXACT and wrong when relays are killed, stopped and started again."""
    without = ["no replay endpoint", "batches of garbage", "relay hashes tokens", "relay without journal"]
    play_and_check(draw_plan("suite", 0, 400, ["ours", "tape"], faults, without))


def play_and_check(plan: Plan) -> None:
    outcome = play(Stage(plan, SHORT_LIMITS))
    assert not outcome.error, plan.schedule()
    assert not outcome.wrong, f"{outcome.results}\n{plan.schedule()}"
    assert {result.holder for result in outcome.results} == {consumer.name for consumer in plan.consumers}


def test_every_fault_is_played_or_excused() -> None:
    covered = {name for combination in COMBINATIONS for name in combination}
    assert covered | set(EXCUSED) == set(known_names())
    assert not covered & set(EXCUSED)


def test_a_calm_round_is_exact() -> None:
    """Without faults the consumer is EXACT and right, and has recorded claims."""
    plan = make_calm_plan()
    (result,) = play_until_followed(plan, PATIENT_LIMITS).results
    assert result.kind == "right", plan.schedule()
    assert result.claims > 0


def test_a_consumer_that_ignores_a_removal_is_found() -> None:
    """A consumer that silently ignores one removal is found by its final state or by its claims."""
    plan = make_calm_plan()
    plan = replace(plan, consumers=tuple(replace(consumer, ignores_a_removal=True) for consumer in plan.consumers))
    outcome = play_until_followed(plan, replace(SHORT_LIMITS, settle=1.0))
    assert outcome.wrong, outcome.results
    assert "EXACT at batch" in outcome.results[0].detail


@pytest.mark.parametrize("make", [make for make in MAKES if make in RELEASES])
def test_released_publishers_are_played_with_their_example_subscriber(make: Make) -> None:
    """A round runs the class from the wheel of a release, and counts the losses of its example subscriber."""
    if make not in AVAILABLE:
        pytest.skip("its wheel is not there: `make bench` downloads it")
    plan = draw_plan("suite", 0, 400, [make], ["live messages dropped"], [*RELAY_FEATURES, "no replay endpoint", *ENDS])
    outcome = play(Stage(plan, SHORT_LIMITS))
    assert (outcome.error, outcome.wrong) == ("", False), plan.schedule()
    assert [example.name for example in outcome.examples] == ["example", "example, corrected"]
    assert all(0 <= example.lost < example.published == outcome.batches for example in outcome.examples)


def play_until_followed(plan: Plan, limits: SettleLimits) -> Outcome:
    """Play a plan again if its consumers have started after the last live batch: these claim nothing that could be judged, or
    have received a snapshot alone."""
    for _ in range(5):
        outcome = play(Stage(plan, limits))
        if outcome.error or outcome.wrong or all(result.claims and result.received for result in outcome.results):
            break
    return outcome


def make_calm_plan() -> Plan:
    """Return a plan of our publisher with removals, without faults, and without heartbeats, which detect ignored removals."""
    excluded = [*RELAY_FEATURES, "engine with heartbeats", *ENDS, *FAULTS, *TRAITS, LOST_TAIL]
    plan = draw_plan("calm", 0, 400, ["ours"], (), excluded)
    engine = replace(plan.setting.engine, cache_settings=CacheSettings(50, 4, removes_parents=False, clear_share=0.0, events=2))
    consumers = tuple(each for each in plan.consumers if each.name == "steady")
    script = tuple(command for command in plan.script if command[0] != "join" or command[1] == "steady")
    return replace(plan, setting=replace(plan.setting, engine=engine), consumers=consumers, script=script)


# --- plans -----------------------------------------------------------------------------------------------------------------


def test_a_round_can_be_repeated() -> None:
    """The same seed and number give the same plan. Another number gives another plan."""
    assert draw_plan("s", 3, 1_000, MAKES) == draw_plan("s", 3, 1_000, MAKES)
    assert draw_plan("s", 3, 1_000, MAKES).schedule() != draw_plan("s", 4, 1_000, MAKES).schedule()


def test_faults_can_be_requested_and_excluded() -> None:
    plan = draw_plan("s", 0, 1_000, MAKES, ["connection flaps"], ["connection cut"])
    assert "connection flaps" in plan.faults
    assert "connection cut" not in plan.faults
    with pytest.raises(LookupError, match="queue full"):
        draw_plan("s", 0, 1_000, ["vllm"], ["queue full"])


@pytest.mark.parametrize("number", range(40))
def test_scripts_are_consistent(number: int) -> None:
    """Every fault of the script is in the list, numbers to reach rise within an incarnation, and the last batches come last."""
    plan = draw_plan("sense", number, 1_000, MAKES, can_mount=True)
    reached = -1
    for word, *details in plan.script:
        if word == "strike":
            assert details[0] in plan.faults
        if word == "end_incarnation":
            assert details[0] in plan.faults
            reached = -1
        if word == "reach" and details[0] > reached:
            reached = details[0]
    tail = next(command for command in plan.script if command[0] == "tail")
    assert tail[1] == plan.incarnations[-1] >= reached
    assert sum(command[0] == "end_incarnation" for command in plan.script) == len(plan.incarnations) - 1
    assert sum(plan.incarnations) <= 1_000 + 120 * len(plan.incarnations)


# --- the cache -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("removes_parents", [False, True])
@pytest.mark.parametrize("row", dialects(), ids=str)
def test_events_of_the_cache_are_valid_and_survive_encoding(row: Dialect, removes_parents: bool) -> None:
    """No event removes an unknown block or lacks a parent. Encoded and decoded events give the same digest."""
    cache = Cache(Random(1), DialectFeatures.of(row), CacheSettings(60, 2, removes_parents, 0.01, 3))
    direct, decoded = PrefixIndex(), PrefixIndex()
    for number in range(400):
        events = cache.step()
        direct.apply(Batch("a", 0, 0, number, 1.0, events, False))
        decoded.apply_payload(("a", 0), 0, number, encode_batch(KVEventBatch(1.0, events, 0), row))
    stats = direct.stats()
    assert (stats.orphans, stats.unknown_removals, stats.rejected) == (0, 0, {})
    assert direct.digest("a") == decoded.digest("a")
    assert sum(block.copies for block in direct.blocks("a")) == sum(cache.copies_held().values())


# --- truth -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", [0, 1, 1_000_000_007, truth.LAST_SECOND])
@pytest.mark.parametrize("key", [truth.Key(1, 0), truth.Key(1, truth.MAX_BATCHES), truth.Key(truth.MAX_INCARNATIONS, 12_345)])
def test_a_timestamp_identifies_its_batch(key: truth.Key, second: int) -> None:
    """The key is recovered from the timestamp, whatever the second of the engine's clock is."""
    assert truth.Key.unpack(truth.key_of(truth.stamp(key, second))) == key


@pytest.mark.parametrize("ts", [0.0, -1.0, 1.1, 1_790_000_000.25, float("inf"), float("nan")])
def test_timestamps_of_other_origin_have_no_batch(ts: float) -> None:
    assert truth.key_of(ts) == truth.UNKNOWN_BATCH


def test_a_truncated_last_record_is_not_read(tmp_path: Path) -> None:
    """The part of a record that a killed process has written is not read."""
    path = tmp_path / "facts"
    truth.write_facts(path, [(1, DIGEST), (2, OTHER)])
    with path.open("ab") as file:
        file.write(b"torn")
    assert truth.read_facts(path) == {1: DIGEST, 2: OTHER}
    assert truth.read_facts(tmp_path / "none") == {}
    claim_writer = truth.ClaimWriter(tmp_path / "diary")
    claim_writer.write(truth.Claim(5, DIGEST, 7))
    assert list(truth.read_claims(tmp_path / "diary")) == [truth.Claim(5, DIGEST, 7)]


# --- results --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("report", "kind", "lasting"),
    [
        (make_report(), "right", False),
        (make_report(digest=OTHER), "wrong", False),
        (make_report("DEGRADED", OTHER, ("LOST",)), "inexact", True),
        (make_report("DEGRADED", DIGEST, ("REPLAY_SILENT",)), "inexact", False),
        (make_report("STALE", OTHER), "inexact", False),
    ],
)
def test_only_an_exact_consumer_can_be_wrong(report: Report, kind: str, lasting: bool) -> None:
    """A consumer that is EXACT is right only with the digest of the engine. One that is not EXACT is not wrong."""
    assert judge("c", report.state, DIGEST).kind == kind
    assert bool(report.lasting_reasons) is lasting


def test_claims_are_compared_with_the_truth_after_their_batch() -> None:
    facts = {truth.Key(1, 0).packed: DIGEST, truth.Key(1, 1).packed: OTHER}
    right = [truth.Claim(truth.NO_BATCH, truth.EMPTY, -1), *(truth.Claim(key, digest, 0) for key, digest in facts.items())]
    assert check_claims(right, facts, foreign=False) == check_claims(right, facts, foreign=True)
    assert check_claims(right, facts, foreign=False).wrong == ()
    for claim in (
        truth.Claim(truth.Key(1, 1).packed, DIGEST, 1),
        truth.Claim(truth.NO_BATCH, DIGEST, -1),
        truth.Claim(truth.Key(2, 0).packed, DIGEST, 0),
    ):
        assert check_claims([claim], facts, foreign=True).wrong, claim
    stranger = truth.Claim(truth.UNKNOWN_BATCH, DIGEST, 4)
    assert check_claims([stranger], facts, foreign=False).wrong
    assert not check_claims([stranger], facts, foreign=True).wrong


def test_a_consumer_that_was_wrong_once_is_wrong() -> None:
    checked_claims = check_claims([truth.Claim(truth.NO_BATCH, DIGEST, -1)], {}, foreign=False)
    result = judge("c", make_report().state, DIGEST).with_claims(checked_claims)
    assert (result.kind, result.claims) == ("wrong", 1)


# --- the rest --------------------------------------------------------------------------------------------------------------


def test_a_clock_that_leaps_never_goes_back() -> None:
    ticks: Iterator[float] = iter(range(1_000))
    clock = make_leaping_clock(lambda: next(ticks) / 100, 5, Random(1))
    times = [clock() for _ in range(999)]
    assert all(later >= earlier for earlier, later in pairwise(times))
    assert times[-1] > 100


def test_the_report_counts_each_round_in_every_row_of_its_faults() -> None:
    """A round counts in the row of each of its faults. Example subscribers have rows beside ours."""
    right = Result("steady", "right", (), "", claims=3, received=90)
    inexact = Result("late", "inexact", ("LOST",), "")
    example = Example("example", 100, 40, right=False)
    rounds = [
        Outcome("s", 0, ("restart", "half-open"), 100, (right, inexact), {"claims": 3}, make="vllm", examples=(example,)),
        Outcome("s", 1, (), 50, (right,), make="ours"),
    ]
    by_fault = report.by_fault(rounds)
    for row in ("| nothing | 1 | 0 |", "| restart | 1 | 1 |", "| half-open | 1 | 1 |"):
        assert row in by_fault
    assert "| **all** | 2 | 150 | 2 | 1: 1 LOST | 0 |" in report.by_make(rounds)
    assert "| vllm 0.32.0 | example | 1 | 40 (40.0%) | 1 (100.0%) |" in report.losses(rounds)
    assert "**0 wrong**" in report.totals(rounds)
    document = report.document(rounds, "Seed `s`")
    assert report.totals(rounds) in document
    with_soak = report.with_soak(document, "an hour")
    assert "an hour" in with_soak
    assert report.document(rounds, "Seed `s`", with_soak) == with_soak


def test_each_round_is_played_once_by_concurrent_jobs() -> None:
    """Concurrent jobs play each number once."""
    without = [*RELAY_FEATURES, *ENDS, *FAULTS, *TRAITS]
    draw = partial(draw_plan, "jobs", batches=150, makes=["ours"], without=without)
    run = Run("jobs", draw, partial(Stage, limits=SHORT_LIMITS))
    assert sorted(outcome.number for outcome in play_rounds(run, iter(range(4)), 2, lambda: True)) == [0, 1, 2, 3]
