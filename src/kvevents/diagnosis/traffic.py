"""Checks of received messages: a sample, topics, decoding, ranks, and the trust that a subscriber reached."""

from __future__ import annotations

import time
from collections import Counter, deque
from math import ceil
from os.path import commonprefix
from typing import Final

import zmq

from kvevents.diagnosis.findings import CheckResult, fail, ok, warn
from kvevents.diagnosis.text_format import plural
from kvevents.endpoints import needs_ipv6
from kvevents.errors import EndpointError
from kvevents.stream import DegradedReason, Source, Trust
from kvevents.subscriber import StreamStatus
from kvevents.wire import Dialect, Live, decode_batch, dialects, parse_live
from kvevents.zeromq.sockets import connect_or_bind
from kvevents.zeromq.zap import secure_sockets


class SequenceNumbers:
    """The live batches of one incarnation of a publisher. If batches have several topics, no batch is stored."""

    def __init__(self, topic: str) -> None:
        self.received: list[int] = []
        self.newest: deque[tuple[int, bytes]] = deque(maxlen=32)
        self._prefix = topic.encode()
        self._topics: set[bytes] = set()

    def add(self, topic: bytes, seq: int, payload: bytes) -> None:
        """Add a live batch. If its number is not above the previous number, another incarnation of the publisher begins."""
        if not topic.startswith(self._prefix):
            return
        self._topics.add(topic)
        if len(self._topics) > 1 or (self.received and seq <= self.received[-1]):
            self.received.clear()
            self.newest.clear()
        if len(self._topics) == 1:
            self.received.append(seq)
            self.newest.append((seq, payload))


MAX_DECODED_BATCHES: Final = 20_000
"""Maximum number of batches to decode; further batches are not decoded. For each batch, detecting the dialect takes 50 us."""
MAX_MESSAGES_PER_TURN: Final = 1_000
MAX_TOPICS: Final = 1_000


class DecodedContents:
    """Numbers of batches, events and faults in the decoded payloads."""

    def __init__(self) -> None:
        self.batches = 0
        self.events: Counter[str] = Counter()
        self.dialect: Dialect | None = None
        """The oldest release that can have written all batches; None if no batch has shown a release."""
        self.rejected: Counter[str] = Counter()
        """Number of rejected events for each reason."""
        self.undecodable_batches = 0
        """Number of batches with rejected events, but without a decodable event."""
        self.example = ""
        """Details of the first rejected event, as an example; empty if no event was rejected."""
        self.ranks: set[int] = set()

    def add(self, payload: bytes) -> None:
        """Decode and count one payload."""
        if self.batches >= MAX_DECODED_BATCHES:
            return
        decoding = decode_batch(payload)
        self.batches += 1
        self.events.update(type(event).__name__ for event in decoding.batch.events)
        for rejection in decoding.rejected:
            self.rejected[rejection.reason] += rejection.count
            self.example = self.example or rejection.detail
        self.undecodable_batches += bool(decoding.rejected) and not decoding.batch.events
        if decoding.batch.data_parallel_rank is not None:
            self.ranks.add(decoding.batch.data_parallel_rank)
        if decoding.batch.events and decoding.dialect is not None:  # A batch without events shows no release.
            # `decoding.dialect` is the oldest release that could have written this batch. Older releases precede newer ones.
            self.dialect = max(self.dialect or decoding.dialect, decoding.dialect, key=dialects().index)


class TrafficSample:
    """A SUB socket that receives and counts all messages. A subscriber would hide invalid messages."""

    def __init__(self, source: Source) -> None:
        self.messages = 0
        self.bytes = 0
        self.seconds = 0.0
        """Seconds from the start to the newest call of `receive`."""
        self._began: Final = time.monotonic()
        self.topics: Counter[bytes] = Counter()
        self.malformed: Counter[str] = Counter()
        self.contents = DecodedContents()
        self.numbers = SequenceNumbers(source.topic)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._security = secure_sockets(self._context, source.curve, source.endpoint)
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set(zmq.RCVHWM, 100_000)
        self._socket.set(zmq.IPV6, needs_ipv6(source.endpoint))
        self._socket.subscribe(b"")
        if self._security is not None:
            self._security.apply(self._socket)
        try:
            connect_or_bind(self._socket, source.endpoint, bind=source.bind)
        except EndpointError:
            self.close()
            raise

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(linger=0)
        if self._security is not None:
            self._security.close()
        self._context.term()

    def receive(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for a message, and count all messages that have arrived."""
        is_readable = self._socket.poll(ceil(1000 * timeout))
        self.seconds = time.monotonic() - self._began
        if not is_readable:
            return
        for _ in range(MAX_MESSAGES_PER_TURN):
            try:
                self.add(self._socket.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                return

    def add(self, frames: list[bytes]) -> None:
        """Count one message."""
        self.messages += 1
        self.bytes += sum(map(len, frames))
        if len(self.topics) < MAX_TOPICS or frames[0] in self.topics:
            self.topics[frames[0]] += 1
        live = parse_live(frames)
        if isinstance(live, Live):
            self.contents.add(live.payload)
            self.numbers.add(live.topic, live.seq, live.payload)
        else:
            self.malformed[live.reason] += 1


# --- checks of the sample


def check_traffic(sample: TrafficSample, *, is_connected: bool) -> CheckResult:
    """Check whether messages arrive."""
    seconds = max(round(sample.seconds, 1), 0.1)
    if sample.messages:
        amount = f"{plural(sample.messages, 'message')}, {sample.bytes:,} bytes in {seconds:g} s"
        return ok("traffic", f"{amount} ({sample.messages / seconds:.1f} a second)")
    if not is_connected:
        advice = "with --bind, configure this host's address as the engine's endpoint; else see the check `address` above"
        return fail("traffic", f"nothing arrived in {seconds:g} s, and there was no connection", advice)
    advice = "send it a request during the check (a prompt shorter than a block stores nothing), or raise --duration"
    return warn("traffic", f"nothing arrived in {seconds:g} s: an idle engine publishes nothing", advice)


def check_topic(topics: Counter[bytes], prefix: str) -> CheckResult | None:
    """Check whether the topics begin with `prefix`; None if no topic is known."""
    if not topics:
        return None
    most_common = [(topic.decode("utf-8", "backslashreplace"), count) for topic, count in topics.most_common(5)]
    topics_text = ", ".join(f"{topic!r} ({count:,})" for topic, count in most_common)
    mismatch_count = sum(count for topic, count in topics.items() if not topic.startswith(prefix.encode()))
    if not mismatch_count:
        every = "all topics are received" if not prefix else f"all begin with {prefix!r}"
        return ok("topic", f"{every}; seen: {topics_text}")
    common = commonprefix([topic.decode("utf-8", "ignore") for topic in topics])  # noqa: RUF071 - topics are not paths
    advice = f"use --topic-prefix {common!r}" if common else "omit --topic-prefix to receive all topics"
    if mismatch_count == topics.total():
        return fail("topic", f"no topic begins with {prefix!r}, so a subscriber receives nothing; seen: {topics_text}", advice)
    return warn("topic", f"{plural(mismatch_count, 'message')} do not begin with {prefix!r}; seen: {topics_text}", advice)


def check_frames(sample: TrafficSample) -> CheckResult | None:
    """Check whether messages have the frames of live batches; None if all messages have these frames."""
    malformed_count = sample.malformed.total()
    if not malformed_count:
        return None
    reasons = ", ".join(f"{reason} ({count:,})" for reason, count in sample.malformed.most_common())
    text = f"{malformed_count:,} of {plural(sample.messages, 'message')} are not [topic, number, payload]: {reasons}"
    if malformed_count == sample.messages:
        return fail("decoding", text, "these are not KV events; check the port, which may be that of another service")
    return warn("decoding", text, "something else publishes at this address too; use a separate port for KV events")


def check_decoding(contents: DecodedContents, origin: str) -> CheckResult | None:
    """Check whether batches can be decoded, and which release can have written them; None without a batch."""
    if not contents.batches:
        return None
    release = f"{contents.dialect} ({contents.batches:,})" if contents.dialect else "unknown"
    batches = f"{plural(contents.batches, 'batch')} {origin}"
    events = ", ".join(f"{count:,} {name}" for name, count in sorted(contents.events.items())) or "no events"
    if not contents.rejected:
        return ok("decoding", f"{batches}: {events}; oldest release with this format: {release}")
    reasons = ", ".join(f"{reason} ({count:,})" for reason, count in contents.rejected.most_common())
    if contents.undecodable_batches == contents.batches:
        text = f"none of {batches} can be decoded: {reasons}; {contents.example}"
        return fail("decoding", text, "check the port, and that the engine neither encrypts nor compresses its events")
    text = f"{batches}, not all decodable: {reasons}; {contents.example}; oldest release with this format: {release}"
    return warn("decoding", text, "the rest is delivered; report the engine's release, which may be newer than this kvevents")


def check_ranks(ranks: set[int], neighbours: int) -> CheckResult | None:
    """Check which data-parallel ranks publish at the endpoint and the next ports (`neighbours`); None if no rank is known."""
    numbers = ", ".join(map(str, sorted(ranks)))
    if len(ranks) > 1:
        text = f"ranks {numbers} share this endpoint, as behind a relay, which numbers their batches as one stream"
        return ok("ranks", text, "engines that number their own batches need one endpoint per rank: port + rank")
    summary = f"batches have rank {numbers}" if ranks else "batches have no rank"
    if neighbours:
        text = f"{summary}; the next {plural(neighbours, 'port')} publish too"
        return ok("ranks", text, f"if they are ranks of the same engine: kvevents tail ... --ranks {neighbours + 1}")
    return ok("ranks", f"{summary}; no further publisher on the next port") if ranks else None


_WAIT_ADVICE: Final = "raise --duration; if this stays, the replay endpoint belongs to another engine"
_REASON_ADVICE: Final[dict[DegradedReason, str]] = {
    DegradedReason.NO_REPLAY: "use a replay endpoint with --replay",
    DegradedReason.REPLAY_SILENT: "see replay above",
    DegradedReason.REPLAY_FOREIGN: "use this engine's replay endpoint with --replay; the current one belongs to another stream",
    DegradedReason.REPLAY_UNCONFIRMED: _WAIT_ADVICE,
    DegradedReason.REPLAY_UNPROVEN: _WAIT_ADVICE,
    DegradedReason.IDENTITY: "the connection was lost meanwhile; a larger buffer_steps lets a subscriber verify the stream",
    DegradedReason.LOST: "exact again after the next AllBlocksCleared or restart; subscribe earlier, or raise buffer_steps",
    DegradedReason.REJECTED: "exact again after the next AllBlocksCleared; see decoding above",
    DegradedReason.DIVERGED: "exact again after a matching digest; check the releases of relay and doctor, and report this",
    DegradedReason.ESTIMATED_MATCHES: "see the reason; if the engine's events contradict each other, use a newer release of it",
    DegradedReason.SENDER: "see the reason: the upstream of a relay is not exact, or the engine does not announce everything",
    DegradedReason.RANK: "compare the ports with those of the engine's ranks",
    DegradedReason.SHARED: "give each publisher its own topic, or its own endpoint",
    DegradedReason.SILENT: "check that the relay runs: its heartbeats have stopped",
}

_STALE_WHILE_CONNECTED: Final = frozenset({DegradedReason.SENDER, DegradedReason.SILENT})
IDLE_ADVICE: Final = "send the engine a request; the next batch confirms the replay endpoint"


def is_idle(status: StreamStatus) -> bool:
    """Return whether a stream would be EXACT if a live batch confirmed the replay endpoint, but no live batch has arrived."""
    is_unproven = status.trust == Trust.DEGRADED and status.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}
    return is_unproven and not status.counters.live


def check_trust(status: StreamStatus, seconds: float, unavailable_batches: int) -> CheckResult:
    """Check the trust that a subscriber reached; `unavailable_batches`: number of older batches that replay cannot return."""
    counters, lost = status.counters, status.counters.lost - unavailable_batches
    progress = f"after {seconds:g} s: {counters.delivered:,} delivered, {counters.replayed:,} by replay, {lost:,} lost"
    if unavailable_batches:
        progress += f"; {plural(unavailable_batches, 'earlier batch')} not available"
    if counters.compacted:
        progress += f"; a snapshot represents {counters.compacted:,} older batches"
    text = f"{status.trust}, {progress}"
    if status.trust == Trust.EXACT:
        return ok("trust", text)
    if is_idle(status):
        return ok("trust", text, IDLE_ADVICE)
    hints = [_REASON_ADVICE.get(reason, reason.value) for reason in DegradedReason if reason in status.degraded_reasons]
    advice = "; ".join(dict.fromkeys(hints))
    if status.trust == Trust.DEGRADED:
        return warn("trust", text, advice)
    if status.trust == Trust.REPLAYING:
        return warn("trust", text, "raise --duration")
    return fail("trust", text, advice if status.degraded_reasons & _STALE_WHILE_CONNECTED else "see what failed above")
