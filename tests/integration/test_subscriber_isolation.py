"""A failure of one stream affects neither other streams nor a later subscription to its source, with every transport."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator

import pytest

from kvevents.errors import EndpointError
from kvevents.events import AllBlocksCleared, BlockRemoved, EventBatch
from kvevents.publisher import ZmqEventPublisher
from kvevents.stream import (
    Batch,
    BatchReport,
    DegradedReason,
    FetchRequest,
    RawBatch,
    Reset,
    Source,
    Stream,
    StreamLimits,
    Trust,
)
from kvevents.subscriber import Connection, SocketOptions, Subscriber, Transport, ZmqTransport
from kvevents.testing import FakeEngine, FakeTransport
from kvevents.testing.fake_transport import VirtualClock

DEADLINE = 60.0
LIMITS = StreamLimits(replay_timeout=2.0)
OUT_OF_DESCRIPTORS = EndpointError("cannot open a socket for it: Too many open files", endpoint="it", errno=24)


class FaultyTransport:
    """A transport around another one, which fails for one source on demand."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.victim = ""
        """Label of the source that fails."""
        self.failing: set[str] = set()
        """Operations that fail for this source: `"open"`, `"read"`, `"request"`."""
        self.raises: Exception = OUT_OF_DESCRIPTORS
        self.opened = 0
        self._connections: dict[Connection, FaultyConnection] = {}
        self.max_wait = inner.max_wait

    def raise_if_failing(self, operation: str, label: str) -> None:
        if operation in self.failing and label == self.victim:
            raise self.raises

    def open(self, source: Source) -> Connection:
        self.opened += 1
        self.raise_if_failing("open", source.label)
        connection = self._inner.open(source)
        self._connections[connection] = FaultyConnection(self, connection, source.label)
        return self._connections[connection]

    def wait(self, timeout: float | None) -> Collection[Connection]:
        return [self._connections[connection] for connection in self._inner.wait(timeout)]

    def fileno(self) -> int:
        return self._inner.fileno()

    def take_found(self) -> list[Source]:
        return self._inner.take_found()

    def ignore_found(self, source: Source) -> None:
        self._inner.ignore_found(source)

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        self._inner.close()


class FaultyConnection:
    """A connection of `FaultyTransport`, which fails as its transport says."""

    def __init__(self, transport: FaultyTransport, inner: Connection, label: str) -> None:
        self._transport = transport
        self._inner = inner
        self._label = label

    def feed_stream(self, stream: Stream, now: float, limit: int) -> bool:
        self._transport.raise_if_failing("read", self._label)
        return self._inner.feed_stream(stream, now, limit)

    @property
    def fault(self) -> str:
        return self._inner.fault

    def deadline(self) -> float | None:
        return self._inner.deadline()

    def request_replay(self, request: FetchRequest) -> None:
        self._transport.raise_if_failing("request", self._label)
        self._inner.request_replay(request)

    def end_replay(self) -> None:
        self._inner.end_replay()

    def close(self) -> None:
        self._inner.close()


class Fleet:
    """Three engines and one subscriber, whose transport fails for the first engine on demand."""

    def __init__(self, kind: str, history: int = 0, failing: Collection[str] = ()) -> None:
        self.engines: list[ZmqEventPublisher | FakeEngine]
        if kind == "fake":
            fake = FakeTransport()
            clock: Callable[[], float] = fake.clock
            self.engines = [fake.engine(f"tcp://e:{number}", f"tcp://r:{number}") for number in range(3)]
            self.transport = FaultyTransport(fake)
        else:
            clock = time.monotonic
            sockets = SocketOptions(reconnect_ms=10, reconnect_max_ms=40)
            self.engines = [ZmqEventPublisher(0, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*") for _ in range(3)]
            self.transport = FaultyTransport(ZmqTransport(options=sockets))
        self.transport.victim = "e0"
        self.transport.failing = set(failing)
        self.received_seqs: dict[str, list[int]] = {"e0": [], "e1": [], "e2": []}
        self._published = 0
        for _ in range(history):
            self.publish()
        sources = [Source(each.endpoint, each.replay_endpoint, name=f"e{at}") for at, each in enumerate(self.engines)]
        self.subscriber = Subscriber(sources, transport=self.transport, clock=clock, limits=LIMITS)
        real = [each for each in self.engines if isinstance(each, ZmqEventPublisher)]
        self.receive_until(lambda: all(each.stats().subscribers for each in real))

    def publish(self) -> None:
        """Publish one batch on each engine."""
        self._published += 1
        for engine in self.engines:
            self._publish_on(engine)

    def _publish_on(self, engine: ZmqEventPublisher | FakeEngine) -> None:
        if isinstance(engine, FakeEngine):
            engine.publish(BlockRemoved([self._published]))
        else:
            engine.publish(EventBatch(0.0, [BlockRemoved([self._published])]))

    def receive_until(self, is_reached: Callable[[], bool]) -> None:
        end = time.monotonic() + DEADLINE
        while not is_reached():
            assert time.monotonic() < end, f"{self.received_seqs}, {self.subscriber.statuses()}"
            for delivery in self.subscriber.receive_many(timeout=0.02):
                assert isinstance(delivery, Batch), delivery
                self.received_seqs[delivery.source].append(delivery.seq)

    def receive_until_all_have(self, count: int, *names: str) -> None:
        self.receive_until(lambda: all(len(self.received_seqs[name]) >= count for name in names or self.received_seqs))

    def receive_until_exact(self) -> None:
        """Receive until all streams are EXACT. An engine publishes another batch if a live batch must confirm its replay."""

        def are_exact() -> bool:
            statuses = self.subscriber.statuses()
            for status in statuses:
                if status.trust == Trust.DEGRADED and status.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}:
                    self._publish_on(self.engines[int(status.source[1:])])
            return all(each.trust == Trust.EXACT for each in statuses)

        self.receive_until(are_exact)

    def close(self) -> None:
        self.subscriber.close()
        for engine in self.engines:
            if isinstance(engine, ZmqEventPublisher):
                engine.shutdown()


KINDS = ["libzmq", "fake"]


@pytest.fixture(params=KINDS)
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    made = Fleet(request.param)
    yield made
    made.close()


def test_a_failed_connection_affects_only_its_own_stream(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    """`receive` does not raise. Trust, status and log name the failure, and the stream becomes EXACT again afterwards."""
    fleet.publish()
    fleet.receive_until_all_have(1)
    fleet.receive_until_exact()
    fleet.transport.failing = {"read", "open"}
    fleet.publish()
    fleet.receive_until_all_have(2, "e1", "e2")
    fleet.receive_until(lambda: fleet.subscriber.trust("e0") == Trust.STALE)
    fleet.publish()
    fleet.receive_until_all_have(3, "e1", "e2")
    assert fleet.received_seqs["e0"] == [0]
    assert "Too many open files" in fleet.subscriber.trust("e0").reason
    assert "Too many open files" in fleet.subscriber.status("e0").error
    assert fleet.subscriber.status("e1").error == ""
    fleet.transport.failing = set()
    fleet.receive_until_all_have(3)
    fleet.receive_until_exact()
    assert fleet.subscriber.status("e0").error == ""
    assert fleet.received_seqs == {name: list(range(len(numbers))) for name, numbers in fleet.received_seqs.items()}
    messages = [each.message for each in caplog.records if each.name == "kvevents.subscriber.multiplexer"]
    assert len([each for each in messages if "e0 rank 0: no connection: cannot open a socket" in each]) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_request_that_cannot_be_sent_is_repeated(kind: str) -> None:
    """The live connection stays. The request counts as one without an answer, and the stream is not EXACT until it succeeds."""
    fleet = Fleet(kind, history=1, failing={"request"})
    fleet.receive_until_all_have(1, "e1", "e2")
    fleet.receive_until(lambda: "Too many open files" in fleet.subscriber.status("e0").error)
    assert fleet.subscriber.trust("e0") != Trust.EXACT
    assert "replay cannot be requested" in fleet.subscriber.trust("e0").reason
    fleet.transport.failing = set()
    fleet.publish()
    fleet.receive_until_all_have(2)
    fleet.receive_until_exact()
    assert fleet.received_seqs == {name: list(range(len(numbers))) for name, numbers in fleet.received_seqs.items()}
    assert fleet.subscriber.status("e0").error == ""
    fleet.close()


def test_a_connection_that_never_opens_is_retried_with_backoff() -> None:
    """In ten minutes of virtual time there are a few attempts in the first seconds, then about two per minute."""
    fleet = Fleet("fake")
    fleet.publish()
    fleet.receive_until_all_have(1)
    fleet.transport.failing = {"read", "open"}
    fleet.publish()
    before = fleet.transport.opened
    fleet.receive_until(lambda: fleet.subscriber.trust("e0") == Trust.STALE)
    clock = fleet.subscriber._clock
    assert isinstance(clock, VirtualClock)
    end = clock() + 600
    while clock() < end:
        fleet.subscriber.receive_many(timeout=1)
    assert 20 <= fleet.transport.opened - before <= 60
    fleet.close()


def test_an_unexpected_exception_does_not_affect_other_streams() -> None:
    """`receive` raises the exception. Later calls deliver the batches of other streams, each of which was signalled once."""
    fleet = Fleet("libzmq")
    fleet.publish()
    fleet.receive_until_all_have(1)
    fleet.receive_until_exact()
    fleet.transport.failing, fleet.transport.raises = {"read"}, RuntimeError("a defect")
    fleet.publish()
    with pytest.raises(RuntimeError, match="a defect"):
        fleet.receive_until(lambda: False)
    fleet.transport.failing = set()
    fleet.receive_until_all_have(2, "e1", "e2")
    fleet.close()


# --- successive subscriptions to one source ----------------------------------------------------------------------------------


def test_a_report_about_an_earlier_subscription_is_ignored() -> None:
    """A report on a batch from before `remove` does not clear a gap from after `add`."""
    fake = FakeTransport()
    engine = fake.engine("tcp://e:1", "tcp://e:2", buffer_steps=10)
    source = Source(engine.endpoint, engine.replay_endpoint, name="pod")

    def receive_newest() -> RawBatch:
        newest = None
        while (delivery := subscriber.receive(timeout=1)) is not None:
            newest = delivery
        assert isinstance(newest, RawBatch)
        return newest

    with Subscriber(source, transport=fake, clock=fake.clock, decode=False) as subscriber:
        for number in range(95):
            engine.publish(BlockRemoved([number]), lost=True)
        old = receive_newest()
        subscriber.remove("pod")
        engine.restart()
        for number in range(100):
            engine.publish(BlockRemoved([number]), lost=True)
        subscriber.add(source)
        receive_newest()
        engine.publish(BlockRemoved([100]))
        new = receive_newest()
        assert new.incarnation > old.incarnation
        assert subscriber.trust("pod") == Trust.DEGRADED
        subscriber.report(old, BatchReport(cleared=True))
        assert subscriber.trust("pod") == Trust.DEGRADED
        subscriber.report(new, BatchReport(cleared=True))
        assert subscriber.trust("pod") == Trust.EXACT


def test_incarnations_never_repeat_in_a_subscriber() -> None:
    """Numbers are new and ascend when a source is removed, added, restarted, and resumed from an older checkpoint."""
    fake = FakeTransport()
    engine = fake.engine("tcp://e:1", "tcp://e:2")
    source = Source(engine.endpoint, engine.replay_endpoint, name="pod")
    seen: list[int] = []

    def receive_incarnations() -> list[int]:
        found: list[int] = []
        while (delivery := subscriber.receive(timeout=1)) is not None:
            if not found or found[-1] != delivery.incarnation:
                found.append(delivery.incarnation)
        return found

    with Subscriber(transport=fake, clock=fake.clock) as subscriber:
        for turn in range(4):
            engine.restart([BlockRemoved([turn])])
            subscriber.add(source)
            seen += receive_incarnations()
            checkpoint = subscriber.checkpoint("pod")
            engine.restart([BlockRemoved([100 + turn])])
            seen += receive_incarnations()
            subscriber.remove("pod")
            subscriber.add(source, resume=checkpoint)
            engine.restart([AllBlocksCleared()])
            seen += receive_incarnations()
            subscriber.remove("pod")
    assert len(seen) == len(set(seen)) == 12
    assert seen == sorted(seen)


def test_a_resumed_stream_continues_its_incarnation() -> None:
    """A stream that is resumed in another process has the incarnation of its checkpoint; a restart begins the next one."""
    fake = FakeTransport()
    engine = fake.engine("tcp://e:1", "tcp://e:2")
    source = Source(engine.endpoint, engine.replay_endpoint, name="pod")
    engine.publish(BlockRemoved([1]))
    with Subscriber(source, transport=fake, clock=fake.clock) as subscriber:
        assert isinstance(subscriber.receive(1), Batch)
        checkpoint = subscriber.checkpoint()
    engine.publish(BlockRemoved([2]))
    with Subscriber(transport=fake, clock=fake.clock) as subscriber:
        subscriber.add(source, resume=checkpoint)
        batch = subscriber.receive(1)
        assert isinstance(batch, Batch)
        assert (batch.incarnation, batch.seq) == (0, 1)
        engine.restart([BlockRemoved([3])])
        reset = subscriber.receive(1)
        assert isinstance(reset, Reset)
        assert reset.incarnation == 1


PROGRAM_AT_THE_LIMIT = """
import os, resource, time
from kvevents import BlockRemoved, EventBatch, Source, StreamLimits, Subscriber, Trust, ZmqEventPublisher

resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
publisher = ZmqEventPublisher(0, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
publisher.publish(EventBatch(0.0, [BlockRemoved([1])]))
end = time.monotonic() + 50
while publisher.stats().queued:  # until it is sent: the subscriber must not receive it live
    assert time.monotonic() < end
    time.sleep(0.01)
with Subscriber(Source(publisher.endpoint, publisher.replay_endpoint), limits=StreamLimits(replay_timeout=0.5)) as subscriber:
    while publisher.stats().subscribers == 0:
        assert time.monotonic() < end
        time.sleep(0.01)
    descriptors = []
    while True:
        try:
            descriptors.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            break
    while "Too many open files" not in subscriber.status().error:
        assert time.monotonic() < end, subscriber.status()
        assert subscriber.receive(0.05) is None
        assert subscriber.trust() != Trust.EXACT
    print(subscriber.trust())
    for each in descriptors:
        os.close(each)
    while (delivery := subscriber.receive(0.05)) is None:
        assert time.monotonic() < end, subscriber.status()
    publisher.publish(EventBatch(1.0, []))  # a live batch, which confirms the replayed one
    while subscriber.trust() != Trust.EXACT:
        assert time.monotonic() < end, subscriber.status()
        subscriber.receive(0.05)
    assert subscriber.status().error == ""
publisher.shutdown()
print("recovered")
"""


def test_at_the_descriptor_limit_a_stream_reports_it_and_recovers() -> None:
    """A process that cannot open descriptors cannot request replay. It continues, and requests replay when it can again."""
    done = subprocess.run([sys.executable, "-c", PROGRAM_AT_THE_LIMIT], capture_output=True, text=True, timeout=99, check=False)
    assert done.returncode == 0, done.stderr
    reason_line, last_line = done.stdout.splitlines()
    assert last_line == "recovered"
    assert "cannot open a socket" in reason_line
    assert "ulimit -n" in reason_line
