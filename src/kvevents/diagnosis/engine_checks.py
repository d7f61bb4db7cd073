"""All checks of one engine, in order: address, replay, received messages, and the trust that a subscriber reaches."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from functools import partial
from typing import Final, Protocol

from msgspec.structs import replace

from kvevents.diagnosis import traffic
from kvevents.diagnosis.address import check_address, count_next_ranks
from kvevents.diagnosis.findings import CheckResult, Severity, warn
from kvevents.diagnosis.replay import REPLAY_HINT, check_losses, check_replay, check_stream, compare, find_replay_endpoint
from kvevents.diagnosis.replay_sample import ReplaySample
from kvevents.native_module import find_native
from kvevents.stream import Batch, Gap, RawBatch, Source, Trust
from kvevents.subscriber import StreamStatus, Subscriber

POLL_SECONDS: Final = 0.02


class Stop(Protocol):
    """A request to end the checks."""

    def check(self) -> None:
        """Raise an exception, such as KeyboardInterrupt, if the checks must end."""
        ...


class EngineChecks:
    """The checks of one engine."""

    def __init__(self, source: Source, stop: AbstractContextManager[Stop], seconds: float, *, searches: bool = True) -> None:
        """`searches` says whether to look for a replay endpoint at the next port if the source has no replay endpoint.

        Messages are received within the context `stop`, for `seconds`, or for twice as long if a replay is not complete then.
        """
        self.source = source
        """The engine to check. If the checks find a replay endpoint, they add it here."""
        self._stop = stop
        self._seconds = seconds
        self._searches = searches and not source.bind
        self._unavailable_batches = 0  # Number of batches from before the first received one that replay cannot return.

    def findings(self) -> Iterator[CheckResult]:
        """Run every check whose preconditions hold, and yield the findings, the address first."""
        if not self.source.bind:
            yield (finding := check_address(self.source.endpoint, self.source.curve))
            if finding.verdict is Severity.FAIL:
                return
        replay: list[CheckResult] = []
        response: ReplaySample | None = None
        with self._stop as stop, closing(traffic.TrafficSample(self.source)) as sample:
            if self.source.replay_endpoint is None:
                replay.append(self._find_replay(sample, stop))
            if self.source.replay_endpoint is not None:
                findings, response = check_replay(self.source.replay_endpoint, self.source.curve)
                replay += findings
            status = self._watch(sample, stop)
        yield from self._check_sample(sample, response, status.trust != Trust.CONNECTING)
        yield from replay
        yield from self._check_comparisons(sample, response)
        yield traffic.check_trust(status, self._seconds, self._unavailable_batches)

    def _find_replay(self, sample: traffic.TrafficSample, stop: Stop) -> CheckResult:
        """Look for a replay endpoint, and use the endpoint if live batches prove that it belongs to the stream."""
        if not self._searches:
            return warn("replay", "no replay endpoint given, so lost batches stay lost", REPLAY_HINT)

        def wait_for_live() -> None:
            self._repeat(stop, lambda: sample.receive(POLL_SECONDS), lambda: bool(sample.numbers.received))

        source = self.source
        finding, found = find_replay_endpoint(source.endpoint, sample.numbers, wait_for_live, source.curve)
        self.source = replace(source, replay_endpoint=found)
        return finding

    def _check_comparisons(self, sample: traffic.TrafficSample, response: ReplaySample | None) -> Iterator[CheckResult]:
        """Check whether the replay endpoint belongs to the stream, and whether live batches were lost."""
        endpoint, replay = None, self.source.replay_endpoint
        if replay is not None and response is not None and response.is_answered:
            comparison = compare(replay, sample.numbers, self.source.curve)
            if (finding := check_stream(replay, comparison)) is not None:
                yield finding
            endpoint = replay if comparison.equal_batches else None
        if (losses := check_losses(sample.numbers, endpoint, self.source.curve)) is not None:
            yield losses

    def _watch(self, sample: traffic.TrafficSample, stop: Stop) -> StreamStatus:
        """Take the sample and subscribe at the same time; if the socket must listen, take the sample first."""
        if self.source.bind:
            self._repeat(stop, lambda: sample.receive(POLL_SECONDS))
            # Only one socket can listen at an address. After this close, the engine connects to the subscriber.
            sample.close()
        with self._make_subscriber() as subscriber:
            subscriber.add(self.source)  # The constructor would log a missing replay endpoint, which the findings report.
            turn = partial(self._turn, subscriber, sample)
            self._repeat(stop, turn)
            # Wait for an incomplete replay for as long again, because trust is unknown until the replay ends.
            self._repeat(stop, turn, lambda: subscriber.statuses()[0].trust != Trust.REPLAYING)
            return subscriber.statuses()[0]

    def _make_subscriber(self) -> Subscriber[Batch] | Subscriber[RawBatch]:
        """Return a subscriber. With the native module, the subscriber fills an index, which detects contradictory events."""
        if find_native() is None:
            return Subscriber()
        from kvevents.index import PrefixIndex  # noqa: PLC0415 - needs the native module

        return Subscriber(decode=False, sink=PrefixIndex(memory_limit=1 << 30))

    def _repeat(self, stop: Stop, turn: Callable[[], None], is_done: Callable[[], bool] = lambda: False) -> None:
        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline and not is_done():
            stop.check()
            turn()

    def _turn(self, subscriber: Subscriber[Batch] | Subscriber[RawBatch], sample: traffic.TrafficSample) -> None:
        if not self.source.bind:
            sample.receive(POLL_SECONDS)
        for number in range(traffic.MAX_MESSAGES_PER_TURN):
            delivery = subscriber.receive(timeout=POLL_SECONDS if self.source.bind and not number else 0)
            if delivery is None:
                return
            if isinstance(delivery, Gap) and delivery.first == 0 and not delivery.compacted:
                self._unavailable_batches += delivery.last + 1

    def _check_sample(
        self, sample: traffic.TrafficSample, response: ReplaySample | None, is_connected: bool
    ) -> Iterator[CheckResult]:
        """Check the received messages. If no message arrived, check the topics and the dialect of replayed batches instead."""
        yield traffic.check_traffic(sample, is_connected=is_connected)
        contents, topics, origin = sample.contents, sample.topics, "live"
        if response is not None and not sample.messages:
            contents, origin = traffic.DecodedContents(), "replayed"
            topics = Counter(batch.topic for batch in response.batches if batch.topic is not None)  # Old engines send none.
            for batch in response.batches:
                contents.add(batch.payload)
        neighbours = 0 if self.source.bind else count_next_ranks(self.source.endpoint)
        checks = (
            traffic.check_topic(topics, self.source.topic),
            traffic.check_frames(sample),
            traffic.check_decoding(contents, origin),
            traffic.check_ranks(contents.ranks, neighbours),
        )
        yield from (finding for finding in checks if finding is not None)
