"""`kvevents.recording` writes, reads, continues and repairs recordings."""

from __future__ import annotations

import gc
import gzip
import json
from pathlib import Path

import pytest

import paths
from kvevents.errors import ClosedError, RecordingError
from kvevents.recording import (
    LiveBatch,
    RecordedEndpoint,
    RecordedFrame,
    RecordingWriter,
    live_batches,
    read_recording,
    recorded_endpoints,
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


def truncate(path: Path, cut: int) -> None:
    path.write_bytes(path.read_bytes()[:-cut])


def test_a_capture_is_read_and_written_again_byte_for_byte(tmp_path: Path) -> None:
    """A capture of a real engine is read completely and written again as the same lines."""
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


def test_an_existing_recording_is_not_written_to(tmp_path: Path) -> None:
    """A second recorder of one file raises and leaves the file unchanged."""
    path = tmp_path / "run.jsonl"
    record(path, 0)
    with pytest.raises(RecordingError, match="the file exists"):
        record(path, 1)
    assert list(read_recording(path)) == [frame(0)]


@pytest.mark.parametrize("name", ENDINGS)
def test_flush_makes_frames_readable(tmp_path: Path, name: str) -> None:
    """Flushed frames can be read while the recorder still runs."""
    path = tmp_path / name
    with RecordingWriter(path) as writer:
        writer.write(frame(0))
        writer.flush()
        writer.write(frame(1))
        assert (writer.written, writer.flushed) == (2, 1)
        assert list(read_recording(path)) == [frame(0)]


@pytest.mark.parametrize("name", ENDINGS)
def test_an_incomplete_last_line_is_ignored_and_reported(tmp_path: Path, name: str) -> None:
    """A recorder that is killed loses only its last line, and the reader reports it."""
    path = tmp_path / name
    record(path, *range(50))
    truncate(path, 12)
    reader = read_recording(path)
    frames = list(reader)
    assert frames == [frame(seq) for seq in range(len(frames))]
    assert 0 < len(frames) < 51
    assert reader.truncation is not None
    assert str(path) in reader.truncation
    assert "incomplete" in reader.truncation


@pytest.mark.parametrize("name", ENDINGS)
def test_a_recording_that_is_cut_off_anywhere_can_be_read(tmp_path: Path, name: str) -> None:
    """Reading never fails, wherever the file ends, also in a file of two gzip members."""
    path = tmp_path / name
    record(path, 0)
    whole = path.read_bytes()
    path.unlink()
    record(path, 1)
    whole += path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        frames = list(read_recording(path))
        assert frames == [frame(seq) for seq in range(len(frames))]


def test_damage_names_file_and_line(tmp_path: Path) -> None:
    """Damage before the end raises an error with file and line, after the preceding frames were returned."""
    path = tmp_path / "run.jsonl"
    record(path, 0, 1, 2)
    damaged = lines(path)
    damaged[1] = damaged[1][:-9] + b"\n"
    path.write_bytes(b"".join(damaged))
    reader = read_recording(path)
    assert next(reader) == frame(0)
    with pytest.raises(RecordingError, match=r"run\.jsonl, line 2: "):
        next(reader)


def test_damaged_compression_is_an_error(tmp_path: Path) -> None:
    """Bytes that cannot be decompressed raise an error and do not count as an incomplete end."""
    path = tmp_path / "run.jsonl.gz"
    record(path, *range(200))
    data = bytearray(path.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    path.write_bytes(data)
    with pytest.raises(RecordingError, match=r"run\.jsonl\.gz"):
        list(read_recording(path))


@pytest.mark.parametrize(("tail", "is_truncated"), [(b"\x1f", True), (b"\x1f\x8b", True), (b"\x1f\x1f", False), (b"x", False)])
def test_bytes_after_a_complete_gzip_member_begin_another_one_or_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tail: bytes, is_truncated: bool
) -> None:
    """The bytes decide this, and not the message of Python's gzip module."""
    error = gzip.BadGzipFile
    monkeypatch.setattr(error, "__str__", lambda _: "worded in another way", raising=False)
    path = tmp_path / "run.jsonl.gz"
    record(path, *range(1, 3_000))
    record(tmp_path / "first.jsonl.gz", 0)
    path.write_bytes((tmp_path / "first.jsonl.gz").read_bytes() + path.read_bytes() + tail)
    reader = read_recording(path)
    if is_truncated:
        assert len(list(reader)) == 3_000
        assert reader.truncation is not None
    else:
        with pytest.raises(RecordingError, match=r"cannot read .*run\.jsonl\.gz"):
            list(reader)


@pytest.mark.parametrize(
    "text",
    [
        "hello\n",
        '{"socket":"meta","run":"r","frames":[],"meta":{"a":' + "[" * 100_000 + "\n",
        '{"socket":"sub","run":"r","frames":[]}\n',
        '{"socket":"pub","run":"r","frames":["*"]}\n',
    ],
    ids=["text", "nested", "socket", "base64"],
)
def test_other_files_are_rejected(tmp_path: Path, text: str) -> None:
    """Other files, deeply nested lists, unknown sockets and broken base64 are errors, not frames."""
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(RecordingError, match=r"notes\.txt, line 1: not a frame of a recording: "):
        list(read_recording(path))


def test_a_file_that_is_not_a_recording_is_never_written_to(tmp_path: Path) -> None:
    """A mistyped file name must not change another file."""
    path = tmp_path / "notes.txt"
    path.write_text("precious, without a newline")
    with pytest.raises(RecordingError, match="the file exists"):
        RecordingWriter(path)
    assert path.read_text() == "precious, without a newline"


def test_missing_and_unwritable_files_raise_a_recording_error(tmp_path: Path) -> None:
    """An error of the operating system is raised as `RecordingError` with the name of the file."""
    with pytest.raises(RecordingError, match=r"cannot read .*none\.jsonl"):
        list(read_recording(tmp_path / "none.jsonl"))
    with pytest.raises(RecordingError, match="cannot write"):
        RecordingWriter(tmp_path / "no" / "such" / "directory.jsonl")


def test_a_full_disk_is_reported() -> None:
    """A frame that does not fit raises at the latest on close, with the number of frames that might be missing. Later frames
    raise too."""
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
    """Closing twice is harmless; writing after it raises."""
    writer = RecordingWriter(tmp_path / "run.jsonl")
    writer.write(frame(0))
    writer.close()
    writer.close()
    writer.flush()
    with pytest.raises(ClosedError):
        writer.write(frame(1))
    assert repr(writer) == f"<RecordingWriter {tmp_path / 'run.jsonl'} closed, 1 frames, 1 flushed>"


def test_a_line_without_end_is_not_read_into_memory(tmp_path: Path) -> None:
    """The length of a line is limited, so that a file that is not a recording cannot exhaust memory."""
    path = tmp_path / "run.jsonl"
    path.write_bytes(b'{"socket":"pub"' + b" " * 5000)
    with pytest.raises(RecordingError, match="longer than 1000 bytes"):
        list(read_recording(path, max_line_bytes=1000))


def test_a_reader_left_half_way_closes_its_file(tmp_path: Path) -> None:
    """A reader that is dropped after its first frame closes its file (a ResourceWarning would fail this test)."""
    path = tmp_path / "run.jsonl"
    record(path, 0, 1)
    assert next(read_recording(path)) == frame(0)
    gc.collect()


def test_live_batches_are_selected_by_run_and_endpoint(tmp_path: Path) -> None:
    """Runs and endpoints are distinguished; messages that are not batches, and other sockets, are left out."""
    path = tmp_path / "run.jsonl"
    with RecordingWriter(path) as writer:
        writer.write(frame(0))
        writer.write(frame(0, endpoint="tcp://e:2"))
        writer.write(frame(5, socket="replay"))
        writer.write(frame(0, run="s"))
        writer.write(RecordedFrame(socket="pub", run="r", endpoint="tcp://e:1", t=0.1, frames=(b"junk",)))
        writer.write(frame(1))
    assert recorded_endpoints(path) == [
        RecordedEndpoint("r", "tcp://e:1"),
        RecordedEndpoint("r", "tcp://e:2"),
        RecordedEndpoint("s", "tcp://e:1"),
    ]
    batches = [LiveBatch(b"kv", 0, b"payload 0", 0.0), LiveBatch(b"kv", 1, b"payload 1", 0.125)]
    assert list(live_batches(path, "r", "tcp://e:1")) == batches
    assert [batch.seq for batch in live_batches(path)] == [0, 0, 0, 1]


def test_the_capture_is_as_complete_as_its_readme_says() -> None:
    """Both runs have all numbers from 0 without a gap, and every replayed payload equals the live one."""
    for stream, count in zip(recorded_endpoints(CAPTURE), (35, 79), strict=True):
        live = {batch.seq: batch.payload for batch in live_batches(CAPTURE, stream.run)}
        assert list(live) == list(range(count))
        replayed = [one.frames for one in read_recording(CAPTURE) if (one.socket, one.run) == ("replay", stream.run)]
        assert all(live[int.from_bytes(seq)] == payload for _, _, seq, payload in replayed if payload)
