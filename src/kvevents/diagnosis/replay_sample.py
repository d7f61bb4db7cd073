"""Requests a sample of a replay endpoint's batches, and compares it with live batches."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from typing import Final, NamedTuple

import zmq

from kvevents.diagnosis.text_format import number_range
from kvevents.endpoints import needs_ipv6
from kvevents.wire import Malformed, ReplayBatch, ReplayEnd, parse_replay_reply, replay_request_frames
from kvevents.zeromq.keys import Curve
from kvevents.zeromq.sockets import connect_or_bind, destroy_context

MAX_REPLY_MESSAGES: Final = 200_000
"""Maximum number of messages to read of one answer. An engine keeps 10,000 batches by default."""
_REPLY_SHAPES: Final = {2: "bare end marker", 3: "[seq, payload]", 4: "[topic, seq, payload]"}


class Timeouts(NamedTuple):
    """Time limits for reading an answer."""

    silence: float
    """Seconds without a message after which the answer counts as complete."""
    seconds: float
    """Maximum number of seconds for the whole answer."""


@dataclass(slots=True)
class ReplaySample:
    """The answers of a replay endpoint to one or several requests."""

    batches: list[ReplayBatch] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)
    """For each malformed message, the reason why it is malformed."""
    shapes: set[str] = field(default_factory=set)
    """The layouts of the messages, as text."""
    has_end: bool = False
    """Whether the newest answer has an end marker."""
    is_cut: bool = False
    """Whether a limit ended the newest answer although further messages arrived."""

    @property
    def is_answered(self) -> bool:
        """Whether any message arrived."""
        return bool(self.batches or self.malformed or self.shapes)

    @property
    def holes(self) -> list[tuple[int, int]]:
        """Ranges of sequence numbers that are missing between batches of the answers."""
        return missing_ranges([batch.seq for batch in self.batches])

    def read(self, socket: zmq.Socket[bytes], timeouts: Timeouts, *, is_strict: bool = False) -> bool:
        """Read an answer to its end, or if `is_strict` to a malformed message. Return whether any message arrived."""
        deadline = time.monotonic() + timeouts.seconds
        self.has_end = self.is_cut = False
        for count in range(MAX_REPLY_MESSAGES):
            wait = min(timeouts.silence, deadline - time.monotonic())
            if wait <= 0 or not socket.poll(ceil(1000 * wait)):
                self.is_cut = wait <= 0
                return count > 0
            frames = socket.recv_multipart()
            reply = parse_replay_reply(frames)
            if isinstance(reply, Malformed):
                self.malformed.append(reply.reason)
                if is_strict:
                    return True
                continue
            self.shapes.add(_REPLY_SHAPES[len(frames)])
            if isinstance(reply, ReplayEnd):
                self.has_end = True
                return True
            self.batches.append(reply)
        self.is_cut = True
        return True


class LiveComparison(NamedTuple):
    """The comparison of live batches with the batches of a replay endpoint."""

    is_answered: bool
    equal_batches: int
    """Number of live batches that the endpoint has with equal bytes."""
    difference: str
    """Why the endpoint belongs to another stream; empty if any batch is equal, or if no batch could be compared."""

    @classmethod
    def compare(cls, sample: ReplaySample, live: dict[int, bytes]) -> LiveComparison:
        """Compare live payloads with the batches of a sample that have the same sequence numbers."""
        stored = {batch.seq: batch.payload for batch in sample.batches}
        absent = [seq for seq in live if seq not in stored]
        different = [seq for seq in live if seq in stored and stored[seq] != live[seq]]
        equal_batches = len(live) - len(absent) - len(different)
        difference = ""
        if different and not equal_batches:
            difference = f"its batch #{different[0]} differs from the published batch"
        elif absent and not equal_batches and sample.is_answered:
            difference = f"it does not have {number_range(absent[0], absent[-1])}, which just arrived"
        return cls(sample.is_answered, equal_batches, difference)


def missing_ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and the last number of each gap in a sequence of ascending numbers."""
    return [(number + 1, successor - 1) for number, successor in pairwise(numbers) if successor > number + 1]


def send_request(socket: zmq.Socket[bytes], start: int) -> None:
    """Request all batches whose number is at least `start`."""
    # If the peer broke the protocol, libzmq has closed the connection and cannot queue the message.
    with suppress(zmq.Again):
        socket.send_multipart(replay_request_frames(start), zmq.DONTWAIT)


@contextmanager
def open_client(kind: int, endpoint: str, curve: Curve | None) -> Iterator[zmq.Socket[bytes]]:
    """Open a socket that can connect to `endpoint`, in a ZeroMQ context of its own."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        socket = context.socket(kind)
        socket.set(zmq.IPV6, needs_ipv6(endpoint))
        if curve is not None:
            curve.apply(socket)
        yield socket
    finally:
        destroy_context(context)


def sample_replay(
    endpoint: str, numbers: Collection[int], timeouts: Timeouts, curve: Curve | None, *, requests: int = 1, any_of: bool = False
) -> ReplaySample:
    """Send requests until the batches `numbers` have arrived; if `any_of`, until one of them has arrived.

    Each request begins at the first missing number. Stop after `requests` requests, or if no answer arrives.
    """
    sample, outstanding = ReplaySample(), set(numbers)
    for _ in range(requests):
        with open_client(zmq.DEALER, endpoint, curve) as socket:
            socket.set(zmq.RCVHWM, 0)
            connect_or_bind(socket, endpoint, bind=False)
            send_request(socket, min(outstanding))
            is_answered = sample.read(socket, timeouts)
        outstanding.difference_update(batch.seq for batch in sample.batches)
        if not is_answered or not outstanding or (any_of and len(outstanding) < len(numbers)):
            break
    return sample
