"""Recorded frames are assigned to streams, and `Stream` puts them in order."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from export_cases import cleared, column, note, payload, pub, removed, replay, stored, table, write
from kvevents.export import export
from kvevents.recording import RecordedFrame
from kvevents.recording import deliveries as recording_deliveries
from kvevents.recording.deliveries import RecordingDeliveries
from kvevents.stream import Gap, RawBatch, RawDelivery


def read(frames: Iterable[RecordedFrame], *, waits: bool = True) -> list[str]:
    """Return the deliveries of the only stream, as short texts with the time of each batch."""
    return [describe(delivery, stream.recorded_at) for stream, delivery in RecordingDeliveries(waits=waits).read(frames)]


def describe(delivery: RawDelivery, t: float | None) -> str:
    if isinstance(delivery, Gap):
        return f"{'compacted' if delivery.compacted else 'lost'} {delivery.first}-{delivery.last}"
    if isinstance(delivery, RawBatch):
        return f"{delivery.incarnation}:{delivery.seq} {'replayed' if delivery.replayed else 'live'} at {t}"
    return f"incarnation {delivery.incarnation}"


def live(*numbers: int, body: bytes = b"", since: float = 0.0) -> list[RecordedFrame]:
    return [pub(seq, body or b"%d" % seq, t=since + place) for place, seq in enumerate(numbers)]


def replies(*numbers: int, since: float = 0.0) -> list[RecordedFrame]:
    return [replay(seq, b"%d" % seq, t=since + place) for place, seq in enumerate(numbers)]


def test_batches_keep_the_time_of_their_frame_while_they_wait() -> None:
    assert read([*live(0, 2), *replies(1, 2, since=7.0)]) == ["0:0 live at 0.0", "0:1 replayed at 7.0", "0:2 live at 1.0"]


def test_replies_that_go_beyond_the_live_batches_are_delivered() -> None:
    """The answer may begin with batches that are known, or right behind them, and further batches may come live."""
    tail = ["0:2 replayed at 5.0", "0:3 replayed at 6.0"]
    begin = ["0:0 live at 0.0", "0:1 live at 1.0"]
    assert read([*live(0, 1), *replies(0, 1, 2, 3, since=3.0)]) == [*begin, *tail]
    assert read([*live(0, 1), *replies(2, 3, since=5.0), *live(3, 4, since=8.0)]) == [*begin, *tail, "0:4 live at 9.0"]


def test_a_restart_or_too_many_waiting_batches_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = ["0:0 live at 0.0", "lost 1-1", "0:2 live at 1.0", "0:3 live at 2.0"]
    restart = [*waiting, "incarnation 1", "1:0 live at 9.0"]
    assert read([*live(0, 2, 3), *live(0, body=b"new", since=9.0)]) == restart
    frames = [*live(0, 2, 3, 5), *replies(1, 4)]
    assert read(frames)[-1] == "0:5 live at 3.0"
    monkeypatch.setattr(recording_deliveries, "MAX_WAITING_BATCHES", 2)
    assert read(frames) == [*waiting, "0:4 replayed at 1.0", "0:5 live at 3.0"]
    monkeypatch.setattr(recording_deliveries, "MAX_WAITING_BATCHES", 9)
    monkeypatch.setattr(recording_deliveries, "MAX_WAITING_BYTES", 2)
    assert read(frames) == [*waiting, "0:4 replayed at 1.0", "0:5 live at 3.0"]


def test_a_live_batch_that_contradicts_a_waiting_reply_begins_an_incarnation() -> None:
    """Waiting batches are delivered before the new incarnation, although a subscriber would drop them."""
    frames = [*live(0), *replies(3), *live(2, since=1.0), *live(3, body=b"new", since=4.0)]
    old = ["0:0 live at 0.0", "lost 1-1", "0:2 live at 1.0", "0:3 replayed at 0.0"]
    assert read(frames) == [*old, "incarnation 1", "lost 0-2", "1:3 live at 4.0"]


def test_nothing_waits_if_no_reply_can_follow() -> None:
    gap = ["0:0 live at 0.0", "lost 1-1", "0:2 live at 1.0"]
    assert read(live(0, 2), waits=False) == gap
    note_first = [note("a", "pod", 0, endpoint="tcp://a:5557"), *live(0, 2)]
    assert read([*note_first, *live(3, since=9.0)])[:3] == gap


def test_a_snapshot_represents_the_batches_before_it() -> None:
    """It is recorded as a reply, or live with a note of the recorder."""
    snapshot = payload([cleared(), stored([1], [1])])
    frames = [pub(5, b"5", t=0.0), pub(6, b"6", t=1.0), replay(5, snapshot, t=2.0), replay(6, b"6", t=3.0)]
    assert read([frames[0], *frames[2:]]) == ["compacted 0-4", "0:5 replayed at 0.0", "0:6 replayed at 3.0"]
    assert read(frames[1:]) == ["compacted 0-4", "0:5 replayed at 2.0", "0:6 live at 1.0"]
    noted = [note("a", "pod", 0, endpoint="tcp://a:5557", gap=[0, 4], compacted=True), pub(5, snapshot), pub(7, b"7")]
    assert read(noted) == ["compacted 0-4", "0:5 live at 1.0", "lost 6-6", "0:7 live at 1.0"]


def test_incarnations_and_gaps_of_a_recording_by_kvevents_record(tmp_path: Path) -> None:
    """Notes name the worker and its restart."""
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
