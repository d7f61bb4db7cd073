"""`kvevents.recording`."""

from __future__ import annotations

import gc
import gzip
import json
from pathlib import Path

import pytest

import kvevents.recording
import paths
from kvevents.errors import ClosedError, RecordingError
from kvevents.recording import (
    LiveBatch,
    RecordedFrame,
    RecordingWriter,
    Stream,
    live_batches,
    read_recording,
    recorded_streams,
)
from kvevents.wire import live_frames

CAPTURE = paths.DATA / "vllm-0.32-captures.jsonl.gz"
ENDINGS = ["run.jsonl", "run.jsonl.gz"]


def frame(seq: int, socket: str = "pub", run: str = "r", endpoint: str = "tcp://e:1") -> RecordedFrame:
    frames = tuple(live_frames(b"kv", seq, b"payload %d" % seq))
    return RecordedFrame(socket=socket, run=run, endpoint=endpoint, t=seq / 8, frames=frames)  # type: ignore[arg-type]


def record(path: Path, *seqs: int) -> None:
    with RecordingWriter(path) as writer:
        for seq in seqs:
            writer.write(frame(seq))


def lines(path: Path) -> list[bytes]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return data.splitlines(keepends=True)


def tear(path: Path, cut: int) -> None:
    path.write_bytes(path.read_bytes()[:-cut])


def test_reads_and_writes_the_capture_to_the_byte(tmp_path: Path) -> None:
    """What was captured from a real engine is read completely, and written again as the same lines."""
    frames = list(read_recording(CAPTURE))
    assert {one.socket for one in frames} == {"pub", "replay", "replay-request", "meta"}
    with RecordingWriter(tmp_path / "copy.jsonl") as writer:
        for one in frames:
            writer.write(one)
    assert lines(tmp_path / "copy.jsonl") == lines(CAPTURE)


def test_a_line_is_plain_json(tmp_path: Path) -> None:
    """Other tools read a recording with nothing but JSON and base64; a meta line has no endpoint and no time."""
    path = tmp_path / "run.jsonl"
    with RecordingWriter(path) as writer:
        writer.write(RecordedFrame(socket="meta", run="r", frames=(), meta={"engine": "vllm"}))
        writer.write(RecordedFrame(socket="replay-request", run="r", endpoint="tcp://e:2", t=1.5, frames=(b"", b"\x00" * 8)))
    assert [json.loads(line) for line in lines(path)] == [
        {"socket": "meta", "run": "r", "frames": [], "meta": {"engine": "vllm"}},
        {"socket": "replay-request", "run": "r", "endpoint": "tcp://e:2", "t": 1.5, "frames": ["", "AAAAAAAAAAA="]},
    ]


@pytest.mark.parametrize("name", ENDINGS)
def test_writing_goes_on_where_it_stopped(tmp_path: Path, name: str) -> None:
    """A recording that is opened again is appended to, compressed or not, and reads as one."""
    path = tmp_path / name
    record(path, 0, 1)
    record(path)
    record(path, 2)
    assert list(read_recording(path)) == [frame(0), frame(1), frame(2)]


@pytest.mark.parametrize("name", ENDINGS)
def test_flush_makes_frames_readable(tmp_path: Path, name: str) -> None:
    """What was flushed can be read while the recorder still runs, and survives it."""
    path = tmp_path / name
    with RecordingWriter(path) as writer:
        writer.write(frame(0))
        writer.flush()
        writer.write(frame(1))
        assert (writer.written, writer.flushed) == (2, 1)
        assert list(read_recording(path)) == [frame(0)]


@pytest.mark.parametrize("name", ENDINGS)
def test_a_torn_last_line_is_tolerated_and_told(tmp_path: Path, name: str) -> None:
    """A killed recorder costs its last line only; the reader says that there was one."""
    path = tmp_path / name
    record(path, *range(50))
    tear(path, 12)
    reader = read_recording(path)
    frames = list(reader)
    assert frames == [frame(seq) for seq in range(len(frames))]
    assert 0 < len(frames) < 51
    assert reader.torn is not None
    assert str(path) in reader.torn
    assert "incomplete" in reader.torn


@pytest.mark.parametrize("name", ENDINGS)
def test_every_place_a_recorder_can_be_killed(tmp_path: Path, name: str) -> None:
    """Wherever the file ends, reading never fails, and appending to it loses none of the complete lines."""
    path = tmp_path / name
    record(path, 0)
    record(path, 1)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        before = list(read_recording(path))
        record(path, 9)
        reader = read_recording(path)
        assert list(reader) == [*before, frame(9)]
        assert reader.torn is None


def test_a_writer_tells_what_it_cut_off(tmp_path: Path) -> None:
    """Half a line cannot be kept; nothing is removed in silence."""
    path = tmp_path / "run.jsonl"
    record(path, 0, 1)
    tear(path, 12)
    torn = len(lines(path)[-1])
    with RecordingWriter(path) as writer:
        assert writer.mended is not None
        assert f"{torn} bytes were cut off" in writer.mended
    with RecordingWriter(path) as writer:
        assert writer.mended is None


def test_damage_names_file_and_line(tmp_path: Path) -> None:
    """Damage anywhere but at the end is an error that says where, after the frames before it."""
    path = tmp_path / "run.jsonl"
    record(path, 0, 1, 2)
    damaged = lines(path)
    damaged[1] = damaged[1][:-9] + b"\n"
    path.write_bytes(b"".join(damaged))
    reader = read_recording(path)
    assert next(reader) == frame(0)
    with pytest.raises(RecordingError, match=r"run\.jsonl, line 2: "):
        next(reader)


def test_damaged_compression_is_damage(tmp_path: Path) -> None:
    """Bytes that cannot be decompressed are no torn end."""
    path = tmp_path / "run.jsonl.gz"
    record(path, *range(200))
    data = bytearray(path.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    path.write_bytes(data)
    with pytest.raises(RecordingError, match=r"run\.jsonl\.gz"):
        list(read_recording(path))


@pytest.mark.parametrize(("tail", "is_torn"), [(b"\x1f", True), (b"\x1f\x8b", True), (b"\x1f\x1f", False), (b"x", False)])
def test_bytes_behind_a_whole_member_are_its_successor_or_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tail: bytes, is_torn: bool
) -> None:
    """The bytes decide, not the words in which Python's gzip complains."""
    error = gzip.BadGzipFile
    monkeypatch.setattr(error, "__str__", lambda _: "worded in another way", raising=False)
    path = tmp_path / "run.jsonl.gz"
    record(path, 0)
    record(path, *range(1, 3_000))
    path.write_bytes(path.read_bytes() + tail)
    reader = read_recording(path)
    if is_torn:
        assert len(list(reader)) == 3_000
        assert reader.torn is not None
    else:
        with pytest.raises(RecordingError, match=r"cannot read .*run\.jsonl\.gz"):
            list(reader)


@pytest.mark.parametrize(
    "text", ["hello\n", '{"socket":"sub","run":"r","frames":[]}\n', '{"socket":"pub","run":"r","frames":["*"]}\n']
)
def test_what_is_no_recording_is_refused(tmp_path: Path, text: str) -> None:
    """Other files, unknown sockets and broken base64 are errors, not frames."""
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(RecordingError, match=r"notes\.txt, line 1"):
        list(read_recording(path))


def test_never_appends_to_a_foreign_file(tmp_path: Path) -> None:
    """A mistyped file name must not cost a user's file its last line."""
    path = tmp_path / "notes.txt"
    path.write_text("precious, without a newline")
    with pytest.raises(RecordingError, match="not a recording"):
        RecordingWriter(path)
    assert path.read_text() == "precious, without a newline"


def test_missing_and_unwritable_files(tmp_path: Path) -> None:
    """The operating system's refusal comes as our error, with the name of the file."""
    with pytest.raises(RecordingError, match=r"cannot read .*none\.jsonl"):
        list(read_recording(tmp_path / "none.jsonl"))
    with pytest.raises(RecordingError, match="cannot write"):
        RecordingWriter(tmp_path / "no" / "such" / "directory.jsonl")


def test_a_full_disk_is_told() -> None:
    """A frame that does not fit raises, at the latest when closing, and says how many may be missing; later ones raise too."""
    writer = RecordingWriter("/dev/full")
    writer.write(frame(0))
    with pytest.raises(RecordingError, match="No space left on device; 0 frames are in the file, up to 1 more are not"):
        writer.flush()
    with pytest.raises(RecordingError, match="No space left"):
        writer.write(frame(1))
    assert "failed" in repr(writer)
    writer.close()
    with pytest.raises(RecordingError, match="No space left"), RecordingWriter("/dev/full") as other:
        other.write(frame(0))


def test_a_closed_writer_writes_no_more(tmp_path: Path) -> None:
    """Closing twice is harmless; writing after it is the caller's mistake."""
    writer = RecordingWriter(tmp_path / "run.jsonl")
    writer.write(frame(0))
    writer.close()
    writer.close()
    writer.flush()
    with pytest.raises(ClosedError):
        writer.write(frame(1))
    assert repr(writer) == f"<RecordingWriter {tmp_path / 'run.jsonl'} closed, 1 frames, 1 flushed>"


def test_a_line_without_end_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The length of a line is limited, so that a file that is something else cannot exhaust memory."""
    monkeypatch.setattr(kvevents.recording, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "run.jsonl"
    path.write_bytes(b'{"socket":"pub"' + b" " * 5000)
    with pytest.raises(RecordingError, match="longer than 1000 bytes"):
        list(read_recording(path))


def test_a_reader_left_half_way_closes_its_file(tmp_path: Path) -> None:
    """Taking only the first frame leaves no open file behind (a warning would fail this test)."""
    path = tmp_path / "run.jsonl"
    record(path, 0, 1)
    assert next(read_recording(path)) == frame(0)
    gc.collect()


def test_live_batches_of_one_stream(tmp_path: Path) -> None:
    """Runs and endpoints are told apart; messages that are not batches, and other sockets, are left out."""
    path = tmp_path / "run.jsonl"
    with RecordingWriter(path) as writer:
        writer.write(frame(0))
        writer.write(frame(0, endpoint="tcp://e:2"))
        writer.write(frame(5, socket="replay"))
        writer.write(frame(0, run="s"))
        writer.write(RecordedFrame(socket="pub", run="r", endpoint="tcp://e:1", t=0.1, frames=(b"junk",)))
        writer.write(frame(1))
    assert recorded_streams(path) == [Stream("r", "tcp://e:1"), Stream("r", "tcp://e:2"), Stream("s", "tcp://e:1")]
    batches = [LiveBatch(b"kv", 0, b"payload 0", 0.0), LiveBatch(b"kv", 1, b"payload 1", 0.125)]
    assert list(live_batches(path, "r", "tcp://e:1")) == batches
    assert [batch.seq for batch in live_batches(path)] == [0, 0, 0, 1]


def test_the_capture_holds_what_its_readme_says() -> None:
    """Both runs are whole: numbers from 0 without a hole, and every replayed payload is the live one."""
    for stream, count in zip(recorded_streams(CAPTURE), (35, 79), strict=True):
        live = {batch.seq: batch.payload for batch in live_batches(CAPTURE, stream.run)}
        assert list(live) == list(range(count))
        replayed = [one.frames for one in read_recording(CAPTURE) if (one.socket, one.run) == ("replay", stream.run)]
        assert all(live[int.from_bytes(seq)] == payload for _, _, seq, payload in replayed if payload)
