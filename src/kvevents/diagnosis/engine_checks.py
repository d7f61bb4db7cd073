"""All checks of one engine, in order: address, replay, received messages, and the trust that a subscriber reaches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Protocol

from kvevents.diagnosis.address import check_address, next_ranks
from kvevents.diagnosis.findings import CheckResult, warn
from kvevents.diagnosis.replay import (
    USE_REPLAY,
    check_losses,
    check_replay,
    check_stream,
    compare,
    count_topics,
    decode_sample,
    find_replay_endpoint,
)
from kvevents.diagnosis.replay_sample import ReplaySample
from kvevents.diagnosis.traffic import (
    MAX_PER_TURN,
    TrafficSample,
    check_decoding,
    check_frames,
    check_ranks,
    check_topic,
    check_traffic,
    check_trust,
)
from kvevents.native_module import find_native
from kvevents.stream import Batch, RawBatch, Source, Trust
from kvevents.subscriber import StreamStatus, Subscriber
from kvevents.zeromq.keys import Curve

POLL_SECONDS: Final = 0.02
MEMORY_LIMIT: Final = 1 << 30
"""Maximum size of the index that is filled during the checks."""


class Stop(Protocol):
    """A request to end the checks."""

    def check(self) -> None:
        """Raise an exception, such as KeyboardInterrupt, if the checks must end."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The engine to check."""

    endpoint: str
    """Endpoint of its events, `tcp://HOST:PORT`."""
    replay: str | None = None
    """The engine's replay endpoint; None means that the next port is checked for one."""
    no_replay: bool = False
    """Whether the search for a replay endpoint is left out."""
    topic_prefix: str = ""
    bind: bool = False
    """Listen at the endpoint, for an engine that connects."""
    curve: Curve | None = None
    seconds: float = 5.0
    """Time to receive events, and at most the same again until a replay is complete."""


class EngineChecks:
    """The checks of one engine."""

    def __init__(self, engine: Engine, stop: AbstractContextManager[Stop]) -> None:
        """`stop` is entered when messages are received, which takes `engine.seconds`."""
        self.replay = engine.replay
        """The replay endpoint, from the settings or from the search; None without one."""
        self._engine = engine
        self._stop = stop

    def findings(self) -> Iterator[CheckResult]:
        """Run every check whose preconditions hold, from the address to trust, and yield the findings."""
        if not self._engine.bind:
            findings, publishes = check_address(self._engine.endpoint, self._engine.curve)
            yield from findings
            if not publishes:
                return
        replay: list[CheckResult] = []
        response: ReplaySample | None = None
        with self._stop as stop, self._sample() as sample:
            if self.replay is None:
                replay.append(self._find_replay(sample, stop))
            if self.replay is not None:
                findings, response = check_replay(self.replay, self._engine.curve)
                replay += findings
            status = self._watch(sample, stop)
        yield from self._traffic(sample, response, status.trust != Trust.CONNECTING)
        yield from replay
        yield from self._comparisons(sample, response)
        yield check_trust(status, self._engine.seconds)

    def _sample(self) -> TrafficSample:
        return TrafficSample(self._engine.endpoint, self._engine.topic_prefix, bind=self._engine.bind, curve=self._engine.curve)

    def _find_replay(self, sample: TrafficSample, stop: Stop) -> CheckResult:
        """Look for a replay endpoint, and use it if it is verified to belong to the stream."""
        if self._engine.no_replay or self._engine.bind:
            return warn("replay", "no replay endpoint given, so lost batches stay lost", USE_REPLAY)

        def wait_for_live() -> None:
            self._repeat(stop, lambda: sample.take(POLL_SECONDS), lambda: bool(sample.numbers.received))

        curve = self._engine.curve
        finding, self.replay = find_replay_endpoint(self._engine.endpoint, sample.numbers, wait_for_live, curve)
        return finding

    def _comparisons(self, sample: TrafficSample, response: ReplaySample | None) -> Iterator[CheckResult]:
        """Check whether the replay endpoint belongs to the stream, and whether live batches were lost."""
        endpoint: str | None = None
        if self.replay is not None and response is not None and response.is_answered:
            comparison = compare(self.replay, sample.numbers, self._engine.curve)
            if (finding := check_stream(self.replay, comparison)) is not None:
                yield finding
            endpoint = self.replay if comparison.is_same_stream else None
        if (losses := check_losses(sample.numbers, endpoint, self._engine.curve)) is not None:
            yield losses

    def _watch(self, sample: TrafficSample, stop: Stop) -> StreamStatus:
        """Take the sample and subscribe to the stream, at the same time if both can connect."""
        if self._engine.bind:
            self._repeat(stop, lambda: sample.take(POLL_SECONDS))
            # Only one socket can listen at an address. The engine reconnects to the next one.
            sample.close()
        with self._subscriber() as subscriber:
            self._repeat(stop, lambda: self._turn(subscriber, sample))
            # A replay that is not complete gets the same time again, since trust is unknown before its end.
            self._repeat(stop, lambda: self._turn(subscriber, sample), lambda: _trust(subscriber) != Trust.REPLAYING)
            return subscriber.statuses()[0]

    def _subscriber(self) -> Subscriber[Batch] | Subscriber[RawBatch]:
        """Return a subscriber that fills an index, which finds contradictions. That needs the native module."""
        if find_native() is None:
            return Subscriber(self._source())
        from kvevents.index import PrefixIndex  # noqa: PLC0415 - needs the native module

        return Subscriber(self._source(), decode=False, sink=PrefixIndex(memory_limit=MEMORY_LIMIT))

    def _repeat(self, stop: Stop, turn: Callable[[], None], is_done: Callable[[], bool] = lambda: False) -> None:
        deadline = time.monotonic() + self._engine.seconds
        while time.monotonic() < deadline and not is_done():
            stop.check()
            turn()

    def _turn(self, subscriber: Subscriber[Batch] | Subscriber[RawBatch], sample: TrafficSample) -> None:
        if self._engine.bind:
            subscriber.receive(timeout=POLL_SECONDS)
        else:
            sample.take(POLL_SECONDS)
        for _ in range(MAX_PER_TURN):
            if subscriber.receive(timeout=0) is None:
                return

    def _source(self) -> Source:
        return Source(
            self._engine.endpoint,
            self.replay,
            topic=self._engine.topic_prefix,
            bind=self._engine.bind,
            curve=self._engine.curve,
        )

    def _traffic(self, sample: TrafficSample, response: ReplaySample | None, is_connected: bool) -> Iterator[CheckResult]:
        """Check the received messages. If nothing does, check topic and dialect of the replayed batches."""
        engine = self._engine
        yield check_traffic(sample, is_connected=is_connected)
        is_replay = response is not None and not sample.messages
        contents = decode_sample(response) if response is not None and is_replay else sample.contents
        topics = count_topics(response) if response is not None and is_replay else sample.topics
        neighbours = 0 if engine.bind else next_ranks(engine.endpoint)
        checks = (
            check_topic(topics, engine.topic_prefix),
            check_frames(sample),
            check_decoding(contents, "replayed" if is_replay else "live"),
            check_ranks(contents.ranks, neighbours),
        )
        yield from (finding for finding in checks if finding is not None)


def _trust(subscriber: Subscriber[Batch] | Subscriber[RawBatch]) -> Trust:
    return subscriber.statuses()[0].trust
