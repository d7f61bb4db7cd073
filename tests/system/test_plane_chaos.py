"""The chaos test of a plane: its audit finds errors, and a round ends without one."""

from __future__ import annotations

import pytest

from kvevents.events import KVEventBatch
from kvevents.wire import encode_batch
from kvevents_plane.records import VERSION, BatchRecord, GapRecord, IncarnationRecord, Page, Record
from nats_cases import needs_nats
from tests.system.chaos_kit.jobs import play
from tests.system.chaos_kit.judging import judge
from tests.system.chaos_kit.truth import EMPTY, Claim, Key, stamp
from tests.system.plane_chaos.audit import Audit
from tests.system.plane_chaos.faults import FAULTS
from tests.system.plane_chaos.judging import check_claims, oldest_claim
from tests.system.plane_chaos.plan import TRAITS, draw_plan
from tests.system.plane_chaos.roles import Held, TrustReport
from tests.system.plane_chaos.stage import Stage

DIGEST = bytes(range(16))


def batch_record(seq: int, incarnation_key: int = 1, incarnation: int = 0) -> BatchRecord:
    payload = encode_batch(KVEventBatch(stamp(Key(incarnation_key, seq), 1_000), []))
    return BatchRecord("engine", 0, incarnation, seq, False, payload)


def audit_pages(*pages: tuple[int, Record]) -> Audit:
    audit = Audit()
    for position, record in pages:
        audit.take(position, Page(VERSION, "bridge", [record]))
    return audit


def test_an_audit_finds_batches_that_are_repeated_missing_or_of_another_incarnation() -> None:
    assert (
        audit_pages(
            (1, batch_record(0)), (2, batch_record(1)), (3, IncarnationRecord("engine", 0, 1, "")), (4, batch_record(0, 2, 1))
        ).flaws
        == []
    )
    assert "again" in audit_pages((1, batch_record(0)), (2, batch_record(0))).flaws[0]
    assert "too soon" in audit_pages((1, batch_record(0)), (2, batch_record(2))).flaws[0]
    assert "engine incarnation 2" in audit_pages((1, batch_record(0)), (2, batch_record(1, incarnation_key=2))).flaws[0]
    assert "begins again" in audit_pages((1, batch_record(0)), (2, IncarnationRecord("engine", 0, 0, ""))).flaws[0]
    assert audit_pages((1, batch_record(0)), (2, GapRecord("engine", 0, 0, 1, 3)), (3, batch_record(4))).lost == 3


def test_an_audit_begins_again_after_purged_pages() -> None:
    assert audit_pages((1, batch_record(0)), (5, batch_record(7)), (6, batch_record(8))).flaws == []


def test_a_replica_is_wrong_if_it_is_exact_and_its_blocks_differ() -> None:
    def kind_of(trust: str, digest: bytes) -> str:
        report = TrustReport({"engine": Held(trust, "why", digest, 1, 0)}, {}, "", "the log alone")
        return judge("r0", report.state_of("engine"), DIGEST).kind

    assert [kind_of("EXACT", DIGEST), kind_of("EXACT", EMPTY), kind_of("STALE", EMPTY)] == ["right", "wrong", "inexact"]
    assert judge("r0", TrustReport({}, {}, "the log is being read").state_of("engine"), DIGEST).kind == "inexact"


def test_claims_are_compared_with_the_truth_at_their_sequence_number() -> None:
    facts = [{Key(1, 0).packed: DIGEST, Key(2, 1).packed: bytes(reversed(DIGEST))}]
    claims = [Claim(0, DIGEST, 0), Claim(0, DIGEST, 1), Claim(0, EMPTY, -1)]
    found = check_claims(claims, facts, [True])
    assert found.claims == 3
    assert found.wrong[-1] == "1 wrong claims of 3"
    assert not check_claims(claims[:2], facts, [False]).wrong


def test_a_claim_is_as_old_as_the_next_batch_of_the_engine() -> None:
    """The content may be equal after several batches of one number, in different incarnations."""
    facts = [{Key(1, 0).packed: DIGEST, Key(1, 1).packed: EMPTY, Key(2, 0).packed: DIGEST}]
    times = [dict(zip(facts[0], (10.0, 11.0, 20.0), strict=True))]
    ages = [oldest_claim([Claim(0, DIGEST, 0, at)], facts, times) for at in (10.5, 11.5, 19.0, 30.0)]
    assert ages == [0.0, 0.5, 8.0, 0.0]
    assert oldest_claim([Claim(0, EMPTY, 7, 30.0)], facts, times) == 0.0, "the content is not known"


def test_a_seed_gives_one_plan_with_the_requested_faults() -> None:
    assert draw_plan("s", 3) == draw_plan("s", 3)
    assert draw_plan("s", 3) != draw_plan("s", 4)
    everything = draw_plan("s", 1, only=tuple(FAULTS), without=tuple(TRAITS))
    assert set(FAULTS) <= set(everything.faults)
    assert not set(TRAITS) & set(everything.traits)


@needs_nats
@pytest.mark.parametrize(
    "faults",
    [
        ("kill bridge", "kill replica", "kill server"),
        ("servers lose pages", "bridge misses an incarnation", "replica with a clock ahead"),
        ("flip byte", "delete newest page", "delete page in the middle", "cut file"),
    ],
    ids=["killed", "inconsistent", "damaged"],
)
def test_a_round_ends_without_an_error(faults: tuple[str, ...]) -> None:
    plan = draw_plan("tests", 1, only=faults, without=("cluster", "no snapshots"))
    outcome = play(Stage(plan))
    assert outcome.error == ""
    assert outcome.right, (outcome.results, outcome.flaws, outcome.reported, outcome.counted)
    assert outcome.batches > 0
