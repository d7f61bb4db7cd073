"""Recorded batches are ordered by incarnation and sequence number, each batch once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from export_cases import column, note, payload, pub, removed, replay, stored, table, write
from kvevents.export import export
from kvevents.recording import RecordedFrame
from kvevents.recording_streams import OrderedBatch, Ordering, OrderingLimits, RecordedBatch

LIMITS = OrderingLimits(held_batches=3)


def batch(seq: int, body: bytes = b"", *, replayed: bool = False) -> RecordedBatch:
    return RecordedBatch(b"kv", seq, body or b"%d" % seq, None, replayed)


def receive_all(ordering: Ordering, *batches: RecordedBatch) -> list[tuple[int, int, int]]:
    """Return incarnation, number and preceding gap of each batch that the ordering returns."""
    return summarize([each for one in batches for each in ordering.receive(one)])


def summarize(found: list[OrderedBatch]) -> list[tuple[int, int, int]]:
    return [(each.incarnation, each.batch.seq, each.gap_before) for each in found]


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_replayed_batches_in_any_order_are_put_in_their_place(live: list[bool], random: object) -> None:
    """All batches are replayed twice in random order, and some arrive live first. The result has all numbers once, in order."""
    ordering = Ordering(OrderingLimits())
    arrived = [batch(seq) for seq, here in enumerate(live) if here]
    late = [batch(seq, replayed=True) for seq in range(len(live))] * 2
    random.shuffle(late)  # type: ignore[attr-defined]
    found = receive_all(ordering, *arrived, *late) + summarize(ordering.finish())
    assert found == [(0, seq, 0) for seq in range(len(live))]
    assert ordering.duplicates == len(live) + sum(live)


def test_a_lower_number_begins_an_incarnation_unless_it_is_the_same_batch() -> None:
    ordering = Ordering(LIMITS)
    assert receive_all(ordering, batch(0), batch(1), batch(1), batch(0, b"other"), batch(1, b"more")) == [
        (0, 0, 0),
        (0, 1, 0),
        (1, 0, 0),
        (1, 1, 0),
    ]
    assert ordering.duplicates == 1


def test_when_too_many_batches_wait_the_missing_ones_become_a_gap() -> None:
    ordering = Ordering(LIMITS)
    assert receive_all(ordering, batch(5), batch(6), batch(7)) == []
    assert receive_all(ordering, batch(9)) == [(0, 5, 5), (0, 6, 0), (0, 7, 0)]
    assert summarize(ordering.finish()) == [(0, 9, 1)]


def test_a_restart_ends_the_wait_for_missing_batches() -> None:
    ordering = Ordering(LIMITS)
    assert receive_all(ordering, batch(0), batch(2), batch(0, b"new")) == [(0, 0, 0), (0, 2, 1), (1, 0, 0)]


def test_late_and_conflicting_replays_are_counted() -> None:
    ordering = Ordering(LIMITS)
    ordering.receive(batch(0))
    ordering.receive(batch(2))
    assert summarize(ordering.skip_lost(1, 1)) == [(0, 2, 1)]
    assert receive_all(ordering, batch(1, replayed=True), batch(0, b"other", replayed=True)) == []
    assert (ordering.late, ordering.conflicting) == (1, 1)


def test_a_live_batch_that_contradicts_a_replay_begins_an_incarnation() -> None:
    ordering = Ordering(LIMITS)
    assert receive_all(ordering, batch(0, replayed=True), batch(1, replayed=True), batch(0, b"new")) == [
        (0, 0, 0),
        (0, 1, 0),
        (1, 0, 0),
    ]


# --- whole recordings


def test_incarnations_and_gaps_of_a_recording_by_kvevents_record(tmp_path: Path) -> None:
    """Notes name the worker, its restart and lost batches. A note of a loss ends the wait at once."""
    one, two = payload([stored([1], [1])], 5.0), payload([stored([2], [2])], 6.0)
    frames = [
        note("pod/3/incarnation0", "pod", 3, endpoint="tcp://a:5557"),
        pub(0, one, "pod/3/incarnation0"),
        note("pod/3/incarnation0", "pod", 3, endpoint="tcp://a:5557", gap=[1, 4]),
        pub(5, two, "pod/3/incarnation0"),
        note("pod/3/incarnation1", "pod", 3, endpoint="tcp://a:5557", reset="publisher restarted"),
        pub(0, payload([stored([1], [1])], 7.0), "pod/3/incarnation1"),
    ]
    done = export([write(tmp_path / "run.jsonl", frames)], tmp_path / "out")
    (worker,) = table(done.folder, "workers")
    assert {name: worker[name] for name in ("source", "rank", "incarnations", "batches", "lost", "endpoint")} == {
        "source": "pod",
        "rank": 3,
        "incarnations": 2,
        "batches": 3,
        "lost": 4,
        "endpoint": "tcp://a:5557",
    }
    assert column(done.folder, "batches", "incarnation", "seq", "gap_before") == [(0, 0, 0), (0, 5, 4), (1, 0, 0)]
    assert column(done.folder, "lifetimes", "incarnation", "block_hash", "ended", "ended_at", "across_gap") == [
        (0, 1, "restart", 6.0, True),
        (0, 2, "restart", 6.0, False),
        (1, 1, "end", 7.0, False),
    ]


def test_replayed_frames_of_a_run_belong_to_its_only_stream(tmp_path: Path) -> None:
    """Replayed batches fill the gaps of live frames, also before the first live frame, and each batch counts once."""
    bodies = [payload([stored([seq + 1], [seq])], float(seq + 1)) for seq in range(4)]
    frames = [replay(0, bodies[0]), pub(1, bodies[1]), pub(3, bodies[3]), *(replay(seq, bodies[seq]) for seq in range(4))]
    done = export([write(tmp_path / "run.jsonl", frames)], tmp_path / "out")
    assert column(done.folder, "batches", "seq", "replayed", "gap_before") == [
        (0, True, 0),
        (1, False, 0),
        (2, True, 0),
        (3, False, 0),
    ]
    assert done.counts["duplicates"] == 3
    assert done.rows["workers"] == 1


def test_replays_of_a_run_with_several_endpoints_are_counted(tmp_path: Path) -> None:
    body = payload([stored([1], [1])], rank=None)
    frames = [pub(0, body, endpoint="tcp://a:1"), pub(0, body, endpoint="tcp://a:2"), replay(1, body)]
    done = export([write(tmp_path / "run.jsonl", frames)], tmp_path / "out")
    assert done.counts["unplaced"] == 1
    assert column(done.folder, "workers", "endpoint") == ["tcp://a:1", "tcp://a:2"]


@pytest.mark.parametrize(
    "frame",
    [
        RecordedFrame(socket="pub", run="a", endpoint="tcp://a:5557", t=1.0, frames=(b"kv",)),
        RecordedFrame(socket="replay", run="a", endpoint="tcp://a:5558", t=1.0, frames=(b"what",)),
    ],
    ids=["pub", "replay"],
)
def test_malformed_messages_are_counted(tmp_path: Path, frame: RecordedFrame) -> None:
    done = export([write(tmp_path / "run.jsonl", [pub(0, payload([removed(1)])), frame])], tmp_path / "out")
    assert done.counts["malformed"] == 1
    assert done.rows["batches"] == 1
