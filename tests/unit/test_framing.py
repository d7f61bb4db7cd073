"""Frames of live batches, replay requests and replay replies, encoded and parsed, valid and invalid."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.wire import (
    END_SEQ,
    MAX_SEQ,
    Live,
    Malformed,
    ReplayBatch,
    ReplayEnd,
    ReplayRequest,
    dialect_for,
    encode_seq,
    live_frames,
    parse_live,
    parse_replay_reply,
    parse_replay_request,
    replay_batch_frames,
    replay_end_frames,
    replay_request_frames,
)
from wire_cases import RELEASES, Golden

frame_sets = st.lists(st.binary(max_size=12) | st.just(b"") | st.just(END_SEQ), max_size=9)


@pytest.mark.parametrize("golden", RELEASES, ids=str)
def test_live_frames_are_those_of_the_release(golden: Golden) -> None:
    assert live_frames(b"kv-events", 7, golden.payload) == golden.pub_frames
    assert parse_live(golden.pub_frames) == Live(b"kv-events", 7, golden.payload)


@pytest.mark.parametrize("golden", RELEASES, ids=str)
def test_replay_frames_are_those_of_the_release(golden: Golden) -> None:
    topic = b"kv-events" if dialect_for(golden.engine, golden.release).has_replay_topic else None
    assert replay_batch_frames(topic, 7, golden.payload) == golden.replay_frames
    assert replay_end_frames(topic is not None) == golden.replay_end_frames
    assert parse_replay_reply(golden.replay_frames) == ReplayBatch(topic, 7, golden.payload)
    assert parse_replay_reply(golden.replay_end_frames) == ReplayEnd()


def test_two_empty_frames_of_the_first_release_end_a_replay() -> None:
    assert parse_replay_reply([b"", b""]) == ReplayEnd()


@pytest.mark.parametrize("topic", [None, b"t"])
def test_an_empty_payload_with_a_valid_number_is_a_batch(topic: bytes | None) -> None:
    """The publisher sent an empty payload, and more batches might follow."""
    assert parse_replay_reply(replay_batch_frames(topic, 7, b"")) == ReplayBatch(topic, 7, b"")


def test_a_request_has_the_form_that_engines_require() -> None:
    assert replay_request_frames(258) == [b"", b"\0\0\0\0\0\0\1\2"]
    assert parse_replay_request([b"id", *replay_request_frames(258)]) == ReplayRequest(b"id", 258)


@pytest.mark.parametrize("frames", [[b"t"], [b"t", encode_seq(0)], [b"t", encode_seq(0), b"p", b"x"], [b""] * 9, []])
def test_another_count_of_live_frames_is_malformed(frames: list[bytes]) -> None:
    assert parse_live(frames) == Malformed("not 3 frames")


@pytest.mark.parametrize("seq", [b"", b"\0" * 4, b"\0" * 16])
def test_a_sequence_number_of_another_size_is_malformed(seq: bytes) -> None:
    fault = Malformed("sequence number is not 8 bytes")
    assert parse_live([b"t", seq, b"p"]) == fault
    assert parse_replay_reply([b"", seq, b"p"]) == fault
    assert parse_replay_reply([b"", b"t", seq, b"p"]) == fault
    assert parse_replay_request([b"id", b"", seq]) == fault


@pytest.mark.parametrize("seq", [MAX_SEQ, 2**63, 2**64 - 1])
def test_a_sequence_number_out_of_range_is_malformed(seq: int) -> None:
    """One corrupt frame with 2**63 would make every later number of the stream look old."""
    fault = Malformed("sequence number out of range")
    assert parse_live([b"t", encode_seq(seq), b"p"]) == fault
    assert parse_replay_reply([b"", encode_seq(seq), b"p"]) == fault


def test_the_largest_sequence_number_is_valid() -> None:
    assert parse_live(live_frames(b"", MAX_SEQ - 1, b"p")) == Live(b"", MAX_SEQ - 1, b"p")


@pytest.mark.parametrize("frames", [[], [b""], [b"x", b""], [b"", b"p"], [b"", b"t", encode_seq(1), b"p", b"more"], [b""] * 9])
def test_a_reply_of_another_form_is_malformed(frames: list[bytes]) -> None:
    assert parse_replay_reply(frames) == Malformed("not a replay reply")


@pytest.mark.parametrize("frames", [[], [b"id"], [b"id", encode_seq(0)], [b"id", b"x", encode_seq(0)], [b"id", b"", b"", b""]])
def test_a_request_of_another_form_is_malformed(frames: list[bytes]) -> None:
    assert parse_replay_request(frames) == Malformed("not [identity, empty, start]")


def reencode(parsed: object) -> list[bytes] | None:
    """Return the frames that encode what a parser has read; None for malformed frames."""
    match parsed:
        case Live(topic, seq, payload):
            return live_frames(topic, seq, payload)
        case ReplayRequest(identity, start):
            return [identity, *replay_request_frames(start)]
        case ReplayBatch(topic, seq, payload):
            return replay_batch_frames(topic, seq, payload)
        case _:
            return None


@given(frame_sets)
def test_any_frames_are_parsed_as_sent_or_malformed(frames: list[bytes]) -> None:
    """No parser raises, and each returns only what the frames contain."""
    for parse in (parse_live, parse_replay_request, parse_replay_reply):
        parsed = parse(frames)
        if isinstance(parsed, Malformed):
            assert parsed.reason
        elif isinstance(parsed, ReplayEnd):
            assert frames[0] == frames[-1] == b"", "an end has a delimiter and no payload"
        else:
            assert reencode(parsed) == frames


@given(st.none() | st.binary(max_size=20), st.integers(0, MAX_SEQ - 1), st.binary(min_size=1, max_size=20))
def test_encoded_frames_are_parsed_back(topic: bytes | None, seq: int, payload: bytes) -> None:
    assert parse_live(live_frames(topic or b"", seq, payload)) == Live(topic or b"", seq, payload)
    assert parse_replay_reply(replay_batch_frames(topic, seq, payload)) == ReplayBatch(topic, seq, payload)
    assert parse_replay_request([b"id", *replay_request_frames(seq)]) == ReplayRequest(b"id", seq)
