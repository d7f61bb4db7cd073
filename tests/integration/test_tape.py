"""`TapePlayer` behaves like a real engine, and its faults do what they say, with real sockets."""

from __future__ import annotations

import errno
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

import paths
from kvevents.errors import ClosedError, ConfigError, EndpointError, UsageError
from kvevents.recording import LiveBatch, live_batches, read_recording
from kvevents.testing import Faults, TapePlayer
from kvevents.testing.playlist import Playlist, delay_timestamp
from kvevents.testing.tape import CATCH_UP_SECONDS, _Play
from kvevents.testing.tape_sockets import MAX_WAITING_REPLIES, Sent
from kvevents.wire import END_SEQ, encode_seq, live_frames, replay_batch_frames, replay_end_frames, replay_request_frames
from resource_cases import leave_nothing_open

DATA = paths.DATA
CAPTURE = DATA / "vllm-0.32-captures.jsonl.gz"
RUN = "bs32-sha256cbor-seed0"
TOPIC = b"kv-events"
END = replay_end_frames(has_topic=True)
SECONDS = 60
"""Timeout in seconds of every wait. Only a failing test reaches the timeout."""


def encode_empty_batch(ts: float) -> bytes:
    """Return an empty batch with this timestamp, as an engine encodes it."""
    return b"\x93\xcb" + struct.pack(">d", ts) + b"\x90\x00"


def batches(count: int, first: int = 0) -> list[tuple[bytes, int, bytes]]:
    return [(TOPIC, seq, encode_empty_batch(1000.0 + seq)) for seq in range(first, first + count)]


def replayed(*seqs: int) -> list[list[bytes]]:
    return [replay_batch_frames(TOPIC, seq, encode_empty_batch(1000.0 + seq)) for seq in seqs]


class Peer:
    """A plain SUB socket and a plain DEALER socket, with deadlines."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], tape: TapePlayer, topic: bytes = b"") -> None:
        self.sub = context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.RCVHWM, 0)
        self.sub.subscribe(topic)
        self.sub.connect(tape.endpoint)
        self.dealer = context.socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.RCVHWM, 0)
        if tape.replay_endpoint is not None:
            self.dealer.connect(tape.replay_endpoint)
        self.tape = tape

    def close(self) -> None:
        self.sub.close(0)
        self.dealer.close(0)

    def join(self) -> Peer:
        """Wait until the tape knows the subscription. A SUB socket that reconnects subscribes again when it is polled."""
        deadline = time.monotonic() + SECONDS
        while not self.tape.wait_for_subscriber(0.01):
            assert time.monotonic() < deadline
            self.sub.poll(10)
        return self

    def live(self, count: int = 1) -> list[list[bytes]]:
        return [receive(self.sub) for _ in range(count)]

    def seqs(self, count: int) -> list[int]:
        return [int.from_bytes(frames[1]) for frames in self.live(count)]

    def request_replay(self, start: int) -> None:
        self.dealer.send_multipart(replay_request_frames(start))

    def reply(self) -> list[list[bytes]]:
        """Receive everything up to the end marker, and the end marker."""
        reply = [receive(self.dealer)]
        while reply[-1][-1] != b"":
            reply.append(receive(self.dealer))
        return reply

    def request_and_receive(self, start: int) -> list[list[bytes]]:
        self.request_replay(start)
        return self.reply()


def receive(source: zmq.Socket[bytes]) -> list[bytes]:
    assert source.poll(1000 * SECONDS), "nothing came"
    return source.recv_multipart()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as made:
        yield made


Connect = Callable[..., Peer]


@pytest.fixture
def connect(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Connect]:
    """Return a function that connects a peer to a tape and waits until it is subscribed."""
    peers: list[Peer] = []

    def make(tape: TapePlayer, topic: bytes = b"") -> Peer:
        peers.append(Peer(context, tape, topic))
        return peers[-1].join()

    yield make
    for peer in peers:
        peer.close()


# --- behaviour of engines


def test_a_recording_is_played_unchanged(connect: Connect) -> None:
    """The PUB socket sends the recorded frames of a real engine, to the byte and in order."""
    recorded = [list(one.frames) for one in read_recording(CAPTURE) if (one.socket, one.run) == ("pub", RUN)]
    with TapePlayer(CAPTURE, run=RUN) as tape:
        peer = connect(tape)
        assert tape.play() == len(recorded)
        assert peer.live(len(recorded)) == recorded
        assert tape.batches() == [(batch.seq, batch.payload) for batch in live_batches(CAPTURE, RUN)]


def test_replies_equal_those_of_the_recorded_engine(connect: Connect) -> None:
    """Both replies in the capture are requested at the same point, and equal those of the real engine to the byte."""
    with TapePlayer(CAPTURE, run=RUN) as tape:
        peer = connect(tape)
        for start, reply in recorded_replies():
            last = int.from_bytes(reply[-2][2])
            tape.play(last + 1 - tape.counts.published)
            assert peer.request_and_receive(start) == reply


def recorded_replies() -> Iterator[tuple[int, list[list[bytes]]]]:
    """Yield the start that each recorded request names, and the frames of its reply."""
    start, reply = 0, list[list[bytes]]()
    for one in read_recording(CAPTURE):
        if one.run == RUN and one.socket == "replay-request":
            start, reply = int.from_bytes(one.frames[1]), []
        elif one.run == RUN and one.socket == "replay":
            reply.append(list(one.frames))
            if reply[-1][-1] == b"":
                yield start, reply


@pytest.mark.parametrize(("release", "shape"), [("0.24.0", "no-topic"), ("0.26.0", "topic")])
def test_reply_shapes_equal_those_of_released_engines(connect: Connect, release: str, shape: str) -> None:
    """Live frames and both reply shapes equal those of the golden file, which the classes of the releases encoded."""
    rows = [json.loads(line) for line in (DATA / "dialects.jsonl").read_text().splitlines()]
    golden = next(row for row in rows if (row["engine"], row["release"]) == ("vllm", release))
    topic, seq, payload = [bytes.fromhex(frame) for frame in golden["pub_frames_hex"]]
    with TapePlayer([(topic, int.from_bytes(seq), payload)], faults=Faults(reply_shape=shape)) as tape:  # type: ignore[arg-type]
        peer = connect(tape)
        tape.play()
        assert peer.live() == [[topic, seq, payload]]
        reply = [[bytes.fromhex(frame) for frame in golden[name]] for name in ("replay_frames_hex", "replay_end_frames_hex")]
        assert peer.request_and_receive(0) == reply


def test_the_oldest_reply_shape_ends_without_a_number(connect: Connect) -> None:
    """The first version of vLLM's publisher sends an end marker of two empty frames."""
    with TapePlayer(batches(1), faults=Faults(reply_shape="bare-end")) as tape:
        peer = connect(tape)
        tape.play()
        assert peer.request_and_receive(0) == [[b"", encode_seq(0), encode_empty_batch(1000.0)], [b"", b""]]


def test_a_start_beyond_the_newest_batch_gets_the_end_marker_only(connect: Connect) -> None:
    """The reply does not show whether the batches do not exist yet or have left the buffer, as in engines."""
    with TapePlayer(batches(3)) as tape:
        peer = connect(tape)
        tape.play()
        assert peer.request_and_receive(3) == [END]
        assert peer.request_and_receive((1 << 64) - 1) == [END]


def test_only_a_well_formed_request_is_answered(connect: Connect) -> None:
    """Anything but `["", 8 bytes]` gets no answer and is counted. The next valid request is answered."""
    with TapePlayer(batches(2)) as tape:
        peer = connect(tape)
        tape.play()
        bad = [[encode_seq(0)], [b"", b"\0" * 4], [b"", b""], [b"", encode_seq(0), b"more"], [b"x", encode_seq(0)]]
        for frames in bad:
            peer.dealer.send_multipart(frames)
        assert peer.request_and_receive(1) == [*replayed(1), END]
        assert tape.counts.refused == len(bad)
        assert tape.requests == [1]


def test_a_req_client_receives_one_message(context: zmq.Context[zmq.Socket[bytes]], connect: Connect) -> None:
    """A REQ socket, as in the example subscriber of the engines, receives the first message of a reply and loses the rest."""
    with TapePlayer(batches(3)) as tape:
        connect(tape)
        tape.play()
        with context.socket(zmq.REQ) as req:
            req.connect(str(tape.replay_endpoint))
            req.send(encode_seq(0))
            assert receive(req) == replayed(0)[0][1:]
            assert tape.wait_until(lambda counts: counts.replayed == 3, SECONDS)
            assert not req.poll(0)


def test_topics_filter_by_prefix(connect: Connect) -> None:
    """A subscriber of one topic receives that topic only."""
    tape_batches = [(b"kv@a", 0, b"0"), (b"kv@b", 1, b"1"), (b"kv@a", 2, b"2")]
    with TapePlayer(tape_batches) as tape:
        peer = connect(tape, topic=b"kv@a")
        tape.play()
        assert peer.seqs(2) == [0, 2]


def test_every_consumer_receives_everything(connect: Connect) -> None:
    """Every subscriber receives everything, and concurrent replies do not mix."""
    with TapePlayer(batches(500)) as tape:
        peers = [connect(tape) for _ in range(5)]
        assert tape.wait_for_subscriber(SECONDS, count=5)
        tape.play()
        for start, peer in enumerate(peers):
            peer.request_replay(start)
        for start, peer in enumerate(peers):
            assert peer.seqs(500) == list(range(500))
            assert peer.reply() == [*replayed(*range(start, 500)), END]


def test_a_reply_waits_for_its_consumer(connect: Connect) -> None:
    """Without a fault a reply is complete, however late the consumer reads and however long the reply is."""
    with TapePlayer([(b"", seq, bytes(2000)) for seq in range(8000)]) as tape:
        peer = connect(tape)
        tape.play()
        peer.dealer.setsockopt(zmq.RCVHWM, 1)
        peer.request_replay(0)
        assert tape.wait_until(lambda counts: counts.requests == 1, SECONDS)
        assert peer.live(8000)
        assert [int.from_bytes(frames[2]) for frames in peer.reply()[:-1]] == list(range(8000))


def test_a_tape_works_without_a_replay_endpoint(connect: Connect) -> None:
    """Without a replay endpoint, the tape publishes on its PUB socket."""
    with TapePlayer(batches(1), replay_endpoint=None) as tape:
        assert tape.replay_endpoint is None
        peer = connect(tape)
        tape.play()
        assert peer.seqs(1) == [0]


def test_a_tape_works_with_ipc_endpoints(connect: Connect, tmp_path: Path) -> None:
    """A tape publishes, replies and restarts at `ipc://` endpoints."""
    with TapePlayer(batches(1), endpoint=f"ipc://{tmp_path}/pub", replay_endpoint=f"ipc://{tmp_path}/replay") as tape:
        peer = connect(tape)
        tape.play()
        assert peer.seqs(1) == [0]
        assert peer.request_and_receive(0) == [*replayed(0), END]
        tape.restart()
        peer.join()
        assert peer.request_and_receive(0) == [END]


def test_a_tape_does_not_take_the_ipc_path_of_another_socket(tmp_path: Path) -> None:
    path = f"ipc://{tmp_path}/both"
    with pytest.raises(EndpointError, match="Address already in use"):
        TapePlayer(batches(1), endpoint=path, replay_endpoint=path)


def test_a_tape_waits_out_a_gap_that_is_too_long_for_zeromq(connect: Connect) -> None:
    """Such a gap is recorded if the clock is set. The tape answers meanwhile."""
    first, second = (LiveBatch(*batch) for batch in batches(2))
    with TapePlayer([first._replace(t=0.0), second._replace(t=1e300)]) as tape:
        peer = connect(tape)
        tape.start_playing(rate="recorded")
        assert peer.seqs(1) == [0]
        assert peer.request_and_receive(0) == [*replayed(0), END]


# Faults


@pytest.mark.parametrize("drop", [{1, 3}, lambda seq: seq in (1, 3)])
def test_dropped_batches_are_replayed(connect: Connect, drop: set[int] | Callable[[int], bool]) -> None:
    """A dropped batch counts as published and is in the replay buffer."""
    with TapePlayer(batches(5), faults=Faults(drop=drop)) as tape:
        peer = connect(tape)
        assert tape.play() == 5
        assert peer.seqs(3) == [0, 2, 4]
        assert peer.request_and_receive(1) == [*replayed(1, 2, 3, 4), END]
        counts = tape.counts
        assert (counts.published, counts.live, counts.dropped) == (5, 3, 2)
        assert tape.log[1] == Sent(0, LiveBatch(*batches(5)[1]), "dropped")
        assert repr(tape) == f"<TapePlayer {tape.endpoint} open, incarnation 0, 5 published, 2 dropped, 1 requests>"


def test_a_share_is_dropped_the_same_way_each_time(connect: Connect) -> None:
    """The draws depend on the seed only, so that a failing run can be repeated."""
    runs = []
    for seed in (1, 1, 2):
        with TapePlayer(batches(400), faults=Faults(drop=0.25, seed=seed)) as tape:
            peer = connect(tape)
            tape.play()
            runs.append(peer.seqs(tape.counts.live))
    assert runs[0] == runs[1] != runs[2]
    assert 200 < len(runs[0]) < 400


def test_a_skipped_number_has_no_batch(connect: Connect) -> None:
    """The engine used a number and could not encode its batch. It is neither live nor replayed nor counted as published."""
    with TapePlayer(batches(4), faults=Faults(skipped={2})) as tape:
        peer = connect(tape)
        tape.play()
        assert peer.seqs(3) == [0, 1, 3]
        assert peer.request_and_receive(0) == [*replayed(0, 1, 3), END]
        assert [seq for seq, _ in tape.batches()] == [0, 1, 3]
        assert (tape.counts.published, tape.counts.skipped) == (3, 1)


def test_the_send_limit_truncates_replies_silently(connect: Connect) -> None:
    """A reply loses the messages above the limit, but has its end marker. A request from the first lost number makes
    progress."""
    with TapePlayer(batches(10), faults=Faults(replay_send_limit=4)) as tape:
        peer = connect(tape)
        tape.play()
        assert peer.request_and_receive(0) == [*replayed(0, 1, 2, 3), END]
        assert peer.request_and_receive(4) == [*replayed(4, 5, 6, 7), END]
        assert peer.request_and_receive(8) == [*replayed(8, 9), END]
        assert tape.counts.withheld == 6 + 2


def test_a_reply_can_lose_its_end_marker(connect: Connect) -> None:
    """The reply ends without a marker, and the next reply follows."""
    with TapePlayer(batches(5), faults=Faults(replay_send_limit=2, lose_end_marker=True)) as tape:
        peer = connect(tape)
        tape.play()
        peer.request_replay(0)
        assert [receive(peer.dealer) for _ in range(2)] == replayed(0, 1)
        peer.request_replay(4)
        assert receive(peer.dealer) == replayed(4)[0]
        assert tape.wait_until(lambda counts: counts.replayed == 3, SECONDS)


def test_the_real_send_limit_drops_batches_of_a_late_consumer(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """With the limit on the real ROUTER socket a late reader misses batches, as with released engines."""
    count = 12_000
    faults = Faults(replay_sndhwm=1_000, buffer_steps=count)
    with TapePlayer([(b"", seq, bytes(2000)) for seq in range(count)], faults=faults) as tape:
        tape.play()
        with context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.RCVHWM, 1)
            dealer.connect(str(tape.replay_endpoint))
            dealer.send_multipart(replay_request_frames(0))
            assert tape.wait_until(lambda counts: counts.replayed == count, SECONDS)
            received_seqs: list[int] = []
            while (seq := receive(dealer)[2]) != END_SEQ:
                received_seqs.append(int.from_bytes(seq))
                if not dealer.poll(200):  # an end marker that is sent into a full pipe is lost, too
                    dealer.send_multipart(replay_request_frames(count))
        assert received_seqs == sorted(set(received_seqs))
        assert 1_000 <= len(received_seqs) < count


def test_numbers_can_be_missing_in_replies(connect: Connect) -> None:
    """A set of numbers is missing in every reply, but the end marker is sent."""
    with TapePlayer(batches(4), faults=Faults(replay_holes={1, 2})) as tape:
        peer = connect(tape)
        tape.play()
        assert peer.request_and_receive(0) == peer.request_and_receive(0) == [*replayed(0, 3), END]
        assert tape.counts.withheld == 4


def test_the_missing_numbers_are_drawn_for_each_reply(connect: Connect) -> None:
    """A repeated request makes progress, since each reply misses other numbers."""
    with TapePlayer(batches(100), faults=Faults(replay_holes=0.5, seed=5)) as tape:
        peer = connect(tape)
        tape.play()
        first, second = peer.request_and_receive(0), peer.request_and_receive(0)
        assert first != second
        assert 1 < len(first) < 101


def test_the_first_batch_of_a_reply_is_never_missing(connect: Connect) -> None:
    """A socket always has room for the first batch, and subscribers rely on that."""
    with TapePlayer(batches(4), faults=Faults(replay_holes=1.0)) as tape:
        peer = connect(tape)
        tape.play()
        assert peer.request_and_receive(0) == [*replayed(0), END]
        assert peer.request_and_receive(2) == [*replayed(2), END]


def test_a_truncated_buffer_replies_from_its_oldest_batch(connect: Connect) -> None:
    """The reply does not show that the requested start was older."""
    with TapePlayer(batches(10), faults=Faults(buffer_steps=3)) as tape:
        peer = connect(tape)
        tape.play()
        assert peer.request_and_receive(0) == [*replayed(7, 8, 9), END]


def test_a_silent_engine_never_answers(connect: Connect) -> None:
    """A silent tape reads requests. After the fault ends, it answers later requests only."""
    with TapePlayer(batches(2), faults=Faults(replay_silent=True)) as tape:
        peer = connect(tape)
        tape.play()
        peer.request_replay(0)
        assert tape.wait_until(lambda counts: counts.requests == 1, SECONDS)
        tape.faults = Faults()
        assert peer.request_and_receive(1) == [*replayed(1), END]
        assert tape.counts.withheld == 2


def test_faults_can_be_limited_to_the_first_replies(connect: Connect) -> None:
    """`faulty_replies=1` spoils one reply. The tape recovers without a call at the right moment."""
    faults = Faults(replay_holes={1}, replay_junk=[[b"junk"]], lose_end_marker=True, faulty_replies=1)
    with TapePlayer(batches(2), faults=faults) as tape:
        peer = connect(tape)
        tape.play()
        peer.request_replay(0)
        assert [receive(peer.dealer) for _ in range(2)] == [[b"junk"], *replayed(0)]
        assert peer.request_and_receive(0) == [*replayed(0, 1), END]


def test_an_endless_reply_does_not_stop_the_tape(connect: Connect) -> None:
    """The reply repeats its batches while the tape continues to publish and serves other consumers."""
    with TapePlayer(batches(3), faults=Faults(replay_endless=True)) as tape:
        peer = connect(tape)
        tape.play()
        peer.request_replay(1)
        for _ in range(2_000):
            assert [receive(peer.dealer) for _ in range(2)] == replayed(1, 2)
        tape.play(1)
        assert peer.seqs(4) == [0, 1, 2, 3]
        peer.dealer.close(0)
        other = connect(tape)
        other.request_replay(9)
        assert other.reply() == [END]


def test_replies_can_hold_another_stream_and_malformed_messages(connect: Connect) -> None:
    """A reply may hold another stream's batches, whatever was requested, and malformed messages."""
    faults = Faults(replay_foreign=[(b"other", 7, b"foreign")], replay_junk=[[b""], [b"a", b"b", b"c", b"d"]])
    with TapePlayer(batches(2), faults=faults) as tape:
        peer = connect(tape)
        tape.play()
        junk = [[b""], [b"a", b"b", b"c", b"d"]]
        peer.request_replay(0)
        assert [receive(peer.dealer) for _ in range(4)] == [*junk, replay_batch_frames(b"other", 7, b"foreign"), END]


@pytest.mark.parametrize("frames", [[b"kv"], [b"", b"\0" * 4, b"x"], [b"kv", END_SEQ, b""], [b"a"] * 9])
def test_raw_frames_are_sent_unchanged(connect: Connect, frames: list[bytes]) -> None:
    """The PUB socket sends any frames, and does not count them as a batch."""
    with TapePlayer([]) as tape:
        peer = connect(tape)
        tape.send_raw(frames)
        assert peer.live() == [frames]
        assert tape.counts.published == 0


def test_a_flood_of_requests_is_bounded(connect: Connect) -> None:
    """A consumer that requests without reading has a limited number of waiting replies. Other consumers are served."""
    flood = 3 * MAX_WAITING_REPLIES
    with TapePlayer(batches(1), faults=Faults(replay_endless=True, faulty_replies=1)) as tape:
        peer = connect(tape)
        tape.play()
        for _ in range(flood):
            peer.request_replay(0)
        assert tape.wait_until(lambda counts: counts.requests + counts.refused == flood, SECONDS)
        assert tape.counts.refused == flood - MAX_WAITING_REPLIES - 1
        assert connect(tape).request_and_receive(0) == [*replayed(0), END]


def raise_lookup_error(seq: int) -> bool:
    raise LookupError(f"number {seq}")


def test_a_rule_that_raises_ends_the_tape() -> None:
    """Plays in progress and `close` raise the exception, which would otherwise be lost in the thread."""
    tape = TapePlayer(batches(2), faults=Faults(drop=raise_lookup_error))
    with pytest.raises(LookupError, match="number 0"):
        tape.play()
    with pytest.raises(ClosedError) as failure:
        tape.play()
    assert isinstance(failure.value.__cause__, LookupError)
    with pytest.raises(LookupError, match="number 0"):
        tape.close()
    tape.close()


def test_a_rule_for_replies_that_raises_ends_the_tape(connect: Connect) -> None:
    """Without a play in progress, `close` raises the exception."""
    tape = TapePlayer(batches(2), faults=Faults(replay_holes=raise_lookup_error))
    tape.play()
    connect(tape).request_replay(0)
    tape._thread.join(SECONDS)
    with pytest.raises(LookupError, match="number 1"):
        tape.close()


@pytest.mark.parametrize("batch", [("kv", 0, b""), (b"", -1, b""), (b"", 1 << 64, b""), (b"", "0", b""), (b"", 0, "payload")])
def test_batches_that_cannot_be_sent_are_refused(batch: tuple[bytes, int, bytes]) -> None:
    """A batch of the wrong types or with an impossible number raises `ConfigError` when the tape is loaded."""
    with pytest.raises(ConfigError, match="invalid batch"):
        TapePlayer([batch])
    with TapePlayer(batches(1)) as tape, pytest.raises(ConfigError, match="invalid batch"):
        tape.restart([batch])


def test_a_raw_message_without_frames_is_refused() -> None:
    """ZeroMQ has no message without frames."""
    with TapePlayer([]) as tape, pytest.raises(ConfigError, match="without frames"):
        tape.send_raw([])


@pytest.mark.parametrize(
    "settings", [{"drop": 1.5}, {"replay_holes": -0.1}, {"buffer_steps": -1}, {"replay_send_limit": -1}, {"faulty_replies": -2}]
)
def test_invalid_faults_are_refused(settings: dict[str, float]) -> None:
    """A share outside 0 to 1 and a negative limit raise `ConfigError`."""
    with pytest.raises(ConfigError):
        Faults(**settings)  # type: ignore[arg-type]


# Incarnations


def test_a_restart_is_a_new_incarnation_on_the_same_ports(connect: Connect) -> None:
    """Peers reconnect by themselves to numbers from 0, other payloads, and an empty replay buffer."""
    with TapePlayer(batches(3)) as tape:
        peer = connect(tape)
        endpoints = tape.endpoint, tape.replay_endpoint
        tape.play()
        assert peer.seqs(3) == [0, 1, 2]
        tape.restart()
        assert (tape.endpoint, tape.replay_endpoint) == endpoints
        peer.join()
        assert peer.request_and_receive(0) == [END]
        tape.play()
        again = peer.live(3)
        assert [int.from_bytes(frames[1]) for frames in again] == [0, 1, 2]
        assert again != [live_frames(*batch) for batch in batches(3)]
        assert tape.batches(1) == [(int.from_bytes(frames[1]), frames[2]) for frames in again]
        assert tape.counts.incarnations == 2


def test_a_new_incarnation_can_pass_the_old_number_unseen(connect: Connect) -> None:
    """Batches published before the sockets open are not sent live, but are numbered, stored and counted."""
    with TapePlayer(batches(50)) as tape:
        peer = connect(tape)
        tape.play(5)
        assert peer.seqs(5) == [0, 1, 2, 3, 4]
        tape.restart(batches(50, first=100), unseen_until=9)
        peer.join()
        tape.play(1)
        assert peer.seqs(1) == [10]
        assert [frames[2] for frames in peer.request_and_receive(0)[:-1]] == [encode_seq(seq) for seq in range(11)]
        assert [seq for seq, _ in tape.batches(1)] == list(range(11))
        assert (tape.counts.unseen, tape.counts.published) == (10, 16)


def test_a_restart_with_other_batches_plays_them_unchanged(connect: Connect) -> None:
    """The payloads are those of the caller. The numbers begin at 0."""
    with TapePlayer(batches(1)) as tape:
        peer = connect(tape)
        tape.play()
        tape.restart([(b"new", 7, b"first"), (b"new", 9, b"second")])
        peer.join()
        tape.play()
        assert peer.live(3)[1:] == [[b"new", encode_seq(0), b"first"], [b"new", encode_seq(2), b"second"]]


def test_an_orderly_restart_delivers_what_was_sent(connect: Connect) -> None:
    """A connected subscriber receives everything that the old incarnation sent, whatever is queued."""
    with TapePlayer([(b"", seq, bytes(1000)) for seq in range(5000)]) as tape:
        peer = connect(tape)
        tape.play()
        tape.restart()
        assert peer.seqs(5000) == list(range(5000))


def test_abrupt_restarts_in_quick_succession(connect: Connect) -> None:
    """The tape keeps its ports through all restarts, and its last incarnation can be received."""
    with TapePlayer(batches(3)) as tape:
        peer = connect(tape)
        for _ in range(30):
            tape.restart(abrupt=True)
        peer.join()
        tape.play()
        assert peer.seqs(3) == [0, 1, 2]
        assert tape.counts.incarnations == 31


def test_a_stopped_engine_refuses_connections(connect: Connect) -> None:
    """The ports of a stopped tape stay reserved and refuse connections. `play` raises until `restart` opens sockets again."""
    with TapePlayer(batches(2)) as tape:
        peer = connect(tape)
        tape.stop()
        assert "stopped" in repr(tape)
        assert refuses_connections(tape.endpoint)
        for attempt in (tape.play, lambda: tape.send_raw([b"x"])):
            with pytest.raises(UsageError, match="restart"):
                attempt()
        tape.restart()
        peer.join()
        tape.play()
        assert peer.seqs(2) == [0, 1]


def refuses_connections(endpoint: str) -> bool:
    """Return whether connections are refused, now or soon: libzmq closes a listener a moment after its socket."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            # The kernel drops connection attempts at a listener that is closing, and would retry after 1 s.
            probe.settimeout(0.1)
            if probe.connect_ex(("127.0.0.1", int(endpoint.rpartition(":")[2]))) == errno.ECONNREFUSED:
                return True
    return False


# Playing


def test_rounds_continue_the_numbers(connect: Connect) -> None:
    """A round begins with the recorded first number. Each further round continues the numbers and the timestamps."""
    with TapePlayer(batches(2, first=5)) as tape:
        peer = connect(tape)
        assert tape.play(times=3) == 6
        assert tape.play(3) == 3
        assert tape.play() == 1
        messages = peer.live(10)
        assert [int.from_bytes(frames[1]) for frames in messages] == list(range(5, 15))
        stamps = [struct.unpack_from(">d", frames[2], 2)[0] for frames in messages]
        assert stamps == [1005.0 + n // 2 + n % 2 for n in range(10)]


def test_a_recorded_restart_is_played(connect: Connect) -> None:
    """A lower number on the tape begins a new incarnation with an empty buffer."""
    with TapePlayer([*batches(3), *batches(2)]) as tape:
        peer = connect(tape)
        tape.play()
        assert peer.seqs(5) == [0, 1, 2, 0, 1]
        assert peer.request_and_receive(0) == [*replayed(0, 1), END]
        assert tape.counts.incarnations == 2


def test_recorded_gaps_in_numbers_are_played(connect: Connect) -> None:
    """A number that is missing on the tape is not played."""
    with TapePlayer([batches(3)[0], batches(3)[2]]) as tape:
        peer = connect(tape)
        tape.play()
        assert peer.seqs(2) == [0, 2]


def test_paced_plays_run_one_after_the_other(connect: Connect) -> None:
    """Everything arrives in order, at a rate and at recorded times."""
    timed = [LiveBatch(topic, seq, payload, t=seq / 500) for topic, seq, payload in batches(20)]
    with TapePlayer(timed) as tape:
        peer = connect(tape)
        first, second = tape.start_playing(rate="recorded"), tape.start_playing(10, rate=500.0)
        assert (first.result(SECONDS), second.result(SECONDS)) == (20, 10)
        assert peer.seqs(30) == list(range(30))


def test_paced_batches_are_due_at_regular_times() -> None:
    """Each batch is due one period, or one recorded gap, after the previous batch was due, even if that batch was sent late.

    A tape that is far behind continues from the current time.
    """
    even, recorded, fast = _Play(9, 4.0, 1), _Play(9, "recorded", 1), _Play(9, None, 1)
    for play in (even, recorded, fast):
        play.begin(Playlist([]), 100.0)
        play.step(gap=0.125, now=100.01)
    assert (even.due, recorded.due, fast.due) == (100.25, 100.125, 100.0)
    even.step(gap=0.0, now=100.26)
    assert even.due == 100.5
    even.step(gap=0.0, now=101.0 + CATCH_UP_SECONDS)
    assert even.due == 101.0 + CATCH_UP_SECONDS


def test_gaps_are_the_recorded_times_between_batches() -> None:
    """Gaps are the recorded times between batches: 0 at both ends, where clocks went back, and where times are unknown."""
    playlist = Playlist([LiveBatch(b"", n, b"", t) for n, t in enumerate([5.0, 7.5, 6.0, None, 8.0])])
    gaps = []
    for _ in range(6):
        gaps.append(playlist.next_gap())
        playlist.next_batch()
    assert gaps == [0.0, 2.5, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("payload", [b"", b"\x93", b"payload of a test", b"\x93\xc0\x90\x00......", b"\x83\xcb12345678"])
def test_a_payload_without_a_timestamp_is_unchanged(payload: bytes) -> None:
    """A payload that does not begin with an array and a float is unchanged in every round."""
    assert delay_timestamp(payload, 5.0) == payload


def test_the_timestamp_of_a_payload_is_moved() -> None:
    """The timestamp moves by the given seconds. Nothing else in the payload changes."""
    assert delay_timestamp(encode_empty_batch(1.5), 2.0) == encode_empty_batch(3.5)


def test_stopping_ends_a_play(connect: Connect) -> None:
    """An interrupted play returns how many batches it published."""
    with TapePlayer(batches(1000)) as tape:
        connect(tape)
        playing, waiting = tape.start_playing(rate=0.001), tape.start_playing()
        assert tape.wait_until(lambda counts: counts.published == 1, SECONDS)
        tape.stop()
        assert (playing.result(SECONDS), waiting.result(SECONDS)) == (1, 0)


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    """Invalid arguments, empty tapes and recordings without the requested run raise at once."""
    with TapePlayer([]) as tape:
        assert tape.play() == 0
        for arguments in ({"n": -1}, {"times": 0}, {"rate": 0.0}, {"n": 1}):
            with pytest.raises(ConfigError):
                tape.play(**arguments)
    with pytest.raises(ConfigError, match="no run 'other'"):
        TapePlayer(CAPTURE, run="other")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ConfigError, match="no live batches"):
        TapePlayer(tmp_path / "empty.jsonl")


# Waiting and ending


def test_requests_are_logged_in_order(connect: Connect) -> None:
    """The log has every request, oldest first."""
    with TapePlayer(batches(1)) as tape:
        peer = connect(tape)
        for start in (4, 2, 4):
            peer.request_and_receive(start)
        assert tape.requests == [4, 2, 4]


def test_a_wait_without_a_peer_ends() -> None:
    """A wait without a peer returns that nothing arrived."""
    with TapePlayer(batches(1)) as tape:
        assert not tape.wait_for_subscriber(0)
        assert not tape.wait_until(lambda counts: counts.published > 0, 0)


def test_a_subscriber_that_leaves_is_no_longer_counted(connect: Connect) -> None:
    """Only current subscriptions are counted."""
    with TapePlayer(batches(1)) as tape:
        connect(tape).sub.unsubscribe(b"")
        deadline = time.monotonic() + SECONDS
        while tape.wait_for_subscriber(0):
            assert time.monotonic() < deadline


def test_the_log_is_bounded() -> None:
    """A tape that plays for days has the newest entries in its log."""
    with TapePlayer(batches(10), log=4) as tape:
        tape.play()
        assert [sent.batch.seq for sent in tape.log] == [6, 7, 8, 9]
        assert tape.counts.published == 10


def test_closing_is_idempotent_and_ends_everything(connect: Connect) -> None:
    """Two threads close a tape during a play and an endless reply with unread messages. Later calls raise `ClosedError`."""
    tape = TapePlayer(batches(1000), faults=Faults(replay_endless=True))
    peer = connect(tape)
    tape.play()
    peer.request_replay(0)
    playing = tape.start_playing(rate=0.001)
    assert tape.wait_until(lambda counts: counts.replayed > 0, SECONDS)
    closers = [threading.Thread(target=tape.close) for _ in range(2)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(SECONDS)
    tape.close()
    assert playing.result(0) <= 1
    assert "closed" in repr(tape)
    with pytest.raises(ClosedError):
        tape.play()
    assert len(tape.batches()) >= 1000


def test_no_thread_or_descriptor_is_left() -> None:
    """A tape with restarts leaves none when it is closed, and a tape that cannot bind leaves none either."""
    with leave_nothing_open():
        for _ in range(3):
            with TapePlayer(batches(10)) as tape:
                tape.play()
                tape.restart()
                with pytest.raises(EndpointError, match="cannot bind"):
                    TapePlayer(batches(1), endpoint=tape.endpoint)
                with pytest.raises(EndpointError, match="cannot bind"):
                    TapePlayer(batches(1), replay_endpoint=tape.endpoint)


def test_an_invalid_endpoint_is_an_error() -> None:
    """The constructor raises `EndpointError`, which names the endpoint."""
    with pytest.raises(EndpointError, match="cannot bind nonsense"):
        TapePlayer(batches(1), endpoint="nonsense")
