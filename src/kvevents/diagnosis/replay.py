"""Checks of a replay endpoint: whether it answers, what it holds, and whether it belongs to the stream."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import ceil
from typing import Final

import zmq

from kvevents.diagnosis.address import check_replay_address, next_ranks
from kvevents.diagnosis.findings import CheckResult, fail, ok, warn
from kvevents.diagnosis.traffic import DecodedContents, SequenceNumbers
from kvevents.endpoints import MAX_PORT, needs_ipv6, split_tcp
from kvevents.errors import EndpointError
from kvevents.events import AllBlocksCleared
from kvevents.text_format import number_range, number_ranges, plural
from kvevents.wire import ReplayBatch, ReplayEnd, decode_batch, parse_replay_reply, replay_request_frames
from kvevents.zeromq.handshake import perform_handshake
from kvevents.zeromq.keys import Curve
from kvevents.zeromq.sockets import destroy_context

MAX_REPLY_MESSAGES: Final = 200_000
"""Most messages of one response that are read. An engine keeps 10,000 batches, so a longer response never ends."""

Dealer = zmq.Socket[bytes]


@dataclass(slots=True)
class ReplayResponse:
    """The messages that answered one replay request."""

    start: int
    batches: list[ReplayBatch] = field(default_factory=list)
    malformed: int = 0
    shapes: set[str] = field(default_factory=set)
    """The layouts of the messages, as text."""
    end: bool = False
    """Whether an end marker arrived."""
    cut: bool = False
    """Whether reading ended while messages still arrived."""

    @property
    def answered(self) -> bool:
        """Whether any message arrived."""
        return self.end or bool(self.batches) or bool(self.malformed)

    @property
    def holes(self) -> list[tuple[int, int]]:
        """Ranges of sequence numbers that are missing between the first and the last."""
        pairs = zip(self.batches, self.batches[1:], strict=False)
        return [(one.seq + 1, other.seq - 1) for one, other in pairs if other.seq > one.seq + 1]


@contextmanager
def dealers(endpoints: Sequence[str], curve: Curve | None = None) -> Iterator[list[Dealer]]:
    """Yield a DEALER socket for each endpoint. Raises `EndpointError` if one cannot connect."""
    context: zmq.Context[Dealer] = zmq.Context()
    try:
        yield [_dealer(context, endpoint, curve) for endpoint in endpoints]
    finally:
        destroy_context(context)


def _dealer(context: zmq.Context[Dealer], endpoint: str, curve: Curve | None) -> Dealer:
    socket: Dealer = context.socket(zmq.DEALER)
    socket.set(zmq.RCVHWM, 0)
    if needs_ipv6(endpoint):
        socket.set(zmq.IPV6, 1)
    if curve is not None:
        curve.apply(socket)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise EndpointError(f"cannot connect to {endpoint}: {error}; expected tcp://HOST:PORT or ipc:///PATH") from error
    return socket


def _request(socket: Dealer, start: int) -> None:
    # libzmq has closed the connection to a peer that broke the protocol, so the message cannot be queued.
    with suppress(zmq.Again):
        socket.send_multipart(replay_request_frames(start), zmq.DONTWAIT)


def request_replay(endpoint: str, start: int, *, silence: float, seconds: float, curve: Curve | None = None) -> ReplayResponse:
    """Send one replay request, and read until the end marker, `silence` seconds without a message, or `seconds`."""
    response = ReplayResponse(start)
    with dealers([endpoint], curve) as (socket,):
        _request(socket, start)
        until = time.monotonic() + seconds
        for _ in range(MAX_REPLY_MESSAGES):
            wait = min(silence, until - time.monotonic())
            if wait <= 0 or not socket.poll(ceil(1000 * wait)):
                response.cut = wait <= 0
                return response
            _add_reply(response, socket.recv_multipart())
            if response.end:
                return response
    response.cut = True
    return response


def _add_reply(response: ReplayResponse, frames: list[bytes]) -> None:
    message = parse_replay_reply(frames)
    if isinstance(message, ReplayBatch):
        response.batches.append(message)
    elif isinstance(message, ReplayEnd):
        response.end = True
    else:
        response.malformed += 1
        return
    response.shapes.add({2: "bare end marker", 3: "[seq, payload]", 4: "[topic, seq, payload]"}[len(frames)])


SILENCE_SECONDS: Final = 2.0
"""Time without a message after which a response has ended. Engines pause for 0.2 s at most."""
RESPONSE_SECONDS: Final = 10.0
"""Time of a whole response."""
_RETRIES: Final = 4
"""Further requests for batches that are missing in a response. A subscriber retries as long as it receives new ones."""

USE_REPLAY: Final = (
    'use the engine\'s replay endpoint with --replay; if it has none, start it with "replay_endpoint": "tcp://*:5558" in its'
    " KV events configuration"
)


def check_replay(endpoint: str, curve: Curve | None = None) -> tuple[list[CheckResult], ReplayResponse | None]:
    """Request all batches, and again those that are missing. Return findings and the response."""
    if not endpoint.startswith("inproc://") and (wrong := check_replay_address(endpoint, curve)) is not None:
        return [wrong], None
    response = request_replay(endpoint, 0, silence=SILENCE_SECONDS, seconds=RESPONSE_SECONDS, curve=curve)
    if not response.answered:
        text = f"{endpoint} does not answer within {SILENCE_SECONDS:g} s"
        advice = (
            "the engine may hang or be overloaded, or this is the port of another service; try again, then restart the engine"
        )
        return [fail("replay", text, advice)], response
    return [_report_reply(endpoint, response), *_losses(endpoint, response, curve)], response


def decode_response(response: ReplayResponse) -> DecodedContents:
    """Return the decoded contents of the replayed batches."""
    contents = DecodedContents()
    for batch in response.batches:
        contents.add(batch.payload)
    return contents


def count_topics(response: ReplayResponse) -> Counter[bytes]:
    """Count the topics of the replayed batches. Older engines send none."""
    return Counter(batch.topic for batch in response.batches if batch.topic is not None)


def _report_reply(endpoint: str, response: ReplayResponse) -> CheckResult:
    if not response.batches:
        if response.malformed:
            return fail("replay", f"{endpoint} answers, but not with batches", "check the port; this may be another service")
        return ok("replay", f"{endpoint} answers and has no batches yet ({', '.join(response.shapes)})")
    oldest, last = response.batches[0], response.batches[-1].seq
    first = oldest.seq
    shapes = " and ".join(sorted(response.shapes))
    held = f"{endpoint} has #{first} to #{last}, {plural(len(response.batches), 'batch')}, as {shapes}"
    if _is_snapshot(oldest) and first:
        text = f"{held}; the first is a snapshot of batches 0 to {first}, so a late subscriber is complete"
        return ok("replay", text)
    if first == 0:
        return ok("replay", held if response.holes else f"{held}: complete since the engine started")
    text = f"{held}; batches before #{first} are gone"
    return warn(
        "replay",
        text,
        "subscribe before traffic starts, or raise buffer_steps; a late subscriber lacks the batches that are gone",
    )


def _is_snapshot(batch: ReplayBatch) -> bool:
    """Whether a batch begins with a clear, so that subscribers need no earlier batch."""
    events = decode_batch(batch.payload).batch.events
    return bool(events) and isinstance(events[0], AllBlocksCleared)


def _losses(endpoint: str, response: ReplayResponse, curve: Curve | None) -> list[CheckResult]:
    found: list[CheckResult] = []
    if response.cut:
        text = f"the response was cut off after {plural(len(response.batches), 'batch')}, since it does not end"
        found.append(warn("replay", text, "subscribers cut it off as well; check what listens there"))
    elif not response.end:
        text = "the end marker is missing: engines lose it when their send queue is full"
        found.append(
            warn("replay", text, "kvevents detects the end by a timeout; a client that waits for the marker would hang")
        )
    if response.holes:
        found.append(_holes(endpoint, response, curve))
    return found


def _holes(endpoint: str, response: ReplayResponse, curve: Curve | None) -> CheckResult:
    missing = {seq for first, last in response.holes for seq in range(first, last + 1)}
    text = f"{plural(len(missing), 'batch')} missing inside the response ({number_ranges(response.holes)})"
    left = set(missing)
    for _ in range(_RETRIES):
        again = request_replay(endpoint, min(left), silence=SILENCE_SECONDS, seconds=RESPONSE_SECONDS, curve=curve)
        left -= {batch.seq for batch in again.batches}
        if not left or not again.answered:
            break
    if not left:
        advice = "kvevents requests them again; other clients lose them. vLLM 0.33 has a larger send queue"
        return warn("replay", f"{text}; a second request returned them: the engine's send queue overflows", advice)
    if len(left) < len(missing):
        advice = "kvevents requests them again as long as it receives new ones, and reports the rest as a gap: see trust below"
        return warn("replay", f"{text}; after {_RETRIES} more requests {len(left):,} of them are missing", advice)
    advice = "the engine could not encode these batches, or its buffer lost them: see its log"
    return warn("replay", f"{text}, also in further responses: these batches are lost", advice)


# --- whether the endpoint belongs to the stream


COMPARE_SILENCE_SECONDS: Final = 1.0
"""Like `SILENCE_SECONDS`, for a response that is compared with live batches."""
COMPARE_RESPONSE_SECONDS: Final = 5.0
"""Like `RESPONSE_SECONDS`."""
COMPARE_REQUESTS: Final = 3
"""Requests until a response contains a compared batch. Responses can have holes, and engines publish before they store."""

_OWN: Final = "use this engine's own replay endpoint with --replay"
_LOSSY: Final = (
    "kvevents repairs this by replay, other consumers do not; check for a slow network or proxy, and whether the engine's send"
    " queue (hwm) is too short"
)
_UNREPAIRED: Final = (
    "if a proxy or a slow network lost them, a replay endpoint repairs this; a batch that replay does not have either was never"
    " published: see the engine's log"
)


@dataclass(frozen=True, slots=True)
class ReplayComparison:
    """The comparison of live batches with those of a replay endpoint."""

    responses: tuple[ReplayResponse, ...]
    agreeing: int = 0
    different: tuple[int, ...] = ()
    """Sequence numbers under which the endpoint holds other contents."""
    absent: tuple[int, ...] = ()
    """Sequence numbers that no response contained."""

    @property
    def answered(self) -> bool:
        """Whether any message arrived."""
        return any(response.answered for response in self.responses)

    @property
    def same_stream(self) -> bool | None:
        """Whether the endpoint belongs to the stream; None if nothing could be compared."""
        if self.agreeing:
            return True
        return False if self.different or (self.absent and self.answered) else None

    @property
    def difference(self) -> str:
        """Return why the endpoint belongs to another stream."""
        if self.different:
            return f"its batch #{self.different[0]} differs from the published one"
        return f"it does not have {number_range(self.absent[0], self.absent[-1])}, which just arrived"


def compare(endpoint: str, numbers: SequenceNumbers, curve: Curve | None = None) -> ReplayComparison:
    """Request the newest live batches from `endpoint`, and compare them."""
    live = dict(numbers.newest)
    responses: list[ReplayResponse] = []
    held: dict[int, bytes] = {}
    while live and len(responses) < COMPARE_REQUESTS and not held.keys() & live.keys():
        responses.append(
            request_replay(endpoint, min(live), silence=COMPARE_SILENCE_SECONDS, seconds=COMPARE_RESPONSE_SECONDS, curve=curve)
        )
        held |= {batch.seq: batch.payload for batch in responses[-1].batches}
        if not responses[-1].answered:
            break
    agreeing = sum(held.get(seq) == payload for seq, payload in live.items())
    different = tuple(seq for seq, payload in live.items() if held.get(seq, payload) != payload)
    return ReplayComparison(tuple(responses), agreeing, different, tuple(seq for seq in live if seq not in held))


def check_stream(endpoint: str, comparison: ReplayComparison) -> CheckResult | None:
    """Check whether `endpoint` belongs to the published stream; None if that is unknown."""
    if comparison.same_stream is None:
        return None
    if comparison.same_stream:
        text = f"{endpoint} has {plural(comparison.agreeing, 'live batch')} as published: it belongs to this stream"
        return ok("replay", text)
    return fail("replay", f"{endpoint} belongs to another stream: {comparison.difference}", _OWN)


def check_losses(numbers: SequenceNumbers, endpoint: str | None, curve: Curve | None = None) -> CheckResult | None:
    """Check whether live batches were lost on the way; None without a live batch.

    `endpoint` is a replay endpoint that belongs to the stream. A batch that it does not have was never published.
    """
    if not numbers.received:
        return None
    if not numbers.missing:
        return ok("losses", f"{plural(numbers.received, 'live batch')}, no sequence number missing")
    text = f"{numbers.missing:,} of {numbers.missing + numbers.received:,} live batches did not arrive ({numbers.shown})"
    if endpoint is None or not numbers.gaps:
        return warn("losses", text, _UNREPAIRED)
    first = numbers.gaps[0][0]
    missing = {seq for first, last in numbers.gaps for seq in range(first, last + 1)}
    held: set[int] = set()
    for _ in range(COMPARE_REQUESTS):
        response = request_replay(
            endpoint, first, silence=COMPARE_SILENCE_SECONDS, seconds=COMPARE_RESPONSE_SECONDS, curve=curve
        )
        held |= missing & {batch.seq for batch in response.batches}
        if held == missing or not response.answered:
            break
    return warn("losses", f"{text}; replay has {len(held):,} of these {len(missing):,}", _LOSSY if held else _UNREPAIRED)


@dataclass(frozen=True, slots=True)
class ReplayCandidate:
    """A replay endpoint that was found at the usual port."""

    finding: CheckResult
    endpoint: str | None = None
    """The endpoint; None unless it provably belongs to the stream."""


def _candidate_endpoint(endpoint: str) -> str | None:
    """Return the endpoint at the port after those of the engine's ranks; None for endpoints that are not TCP."""
    found = split_tcp(endpoint)
    if found is None:
        return None
    port = found[1] + 1 + next_ranks(endpoint)
    return f"tcp://{found[0]}:{port}" if port <= MAX_PORT else None


def find_replay_endpoint(
    endpoint: str, numbers: SequenceNumbers, wait_for_live: Callable[[], None], curve: Curve | None = None
) -> ReplayCandidate:
    """Look for the replay endpoint of the engine at `endpoint`. `wait_for_live` waits until `numbers` has a batch."""
    candidate = _candidate_endpoint(endpoint)
    nothing = "no replay endpoint given, so lost batches stay lost"
    if candidate is None:
        return ReplayCandidate(warn("replay", nothing, USE_REPLAY))
    handshake = perform_handshake(candidate)
    if handshake.outcome not in {"socket", "curve"} or (handshake.outcome == "socket" and handshake.detail != "ROUTER"):
        found = f"nothing listens at {candidate}" if handshake.outcome == "refused" else f"{candidate} is not a replay endpoint"
        return ReplayCandidate(warn("replay", f"{nothing}; {found}", USE_REPLAY))
    wait_for_live()
    if not numbers.newest:
        text = f"{nothing}; {candidate} may be one, but no live batch arrived to compare with it"
        return ReplayCandidate(warn("replay", text, f"if it belongs to this engine, use --replay {candidate}"))
    comparison = compare(candidate, numbers, curve)
    if not comparison.answered:
        text = f"{nothing}; {candidate} is open and does not answer replay requests"
        advice = (
            f"if it belongs to this engine, which may hang or be busy, try again with --replay {candidate}, then restart it"
        )
        return ReplayCandidate(warn("replay", text, advice))
    if not comparison.same_stream:
        return ReplayCandidate(
            warn("replay", f"{nothing}; {candidate} belongs to another stream: {comparison.difference}", USE_REPLAY)
        )
    text = f"no replay endpoint given; {candidate} has the live batches as published, and is used here"
    return ReplayCandidate(ok("replay", text, f"use --replay {candidate} with other commands"), candidate)
