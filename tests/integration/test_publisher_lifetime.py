"""Tests of the end of a publisher: shutdown in all its variants, forks, and interpreter exit. No thread, file or socket is
left."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import zmq
from msgspec.structs import replace

from kvevents.errors import ClosedError, EndpointError
from kvevents.events import BlockStored, EventBatch
from kvevents.publisher import ShutdownReport, ZmqEventPublisher
from kvevents.wire import encode_batch
from publisher_cases import (  # noqa: F401 - fixtures must be imported
    ANY,
    DEADLINE,
    QUICK,
    Socket,
    batch,
    connect_dealer,
    consumers_context,
    find_faults_in_fork,
    hold_publisher,
    last_endpoint,
    open_consumer,
    receive,
    request_replay,
    run_publisher,
    subscribe,
    wait_until,
)
from resource_cases import count_resources, leave_nothing_open, settle

Context = zmq.Context[Socket]
SLACK = 30.0
"""Seconds beyond its timeout that `shutdown` may take on a busy machine; waiting for a stalled reader would take for ever."""


def publisher_threads() -> list[str]:
    """Return the names of the threads of all publishers in this process."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("zmq-"))


def test_shutdown_sends_all_queued_batches(context: Context) -> None:
    """It sends all queued batches, and the report says so."""
    publisher = ZmqEventPublisher(0, ANY)
    subscriber = subscribe(context, publisher)
    for number in range(3_000):
        publisher.publish(batch(number))
    report = publisher.shutdown(timeout=DEADLINE)
    assert report == ShutdownReport(sent=3_000, flushed=True)
    assert report.complete
    assert [receive(subscriber)[0] for _ in range(3_000)] == list(range(3_000))


def test_shutdown_can_be_repeated() -> None:
    """Every call returns the same report, also from concurrent threads; `publish` then raises."""
    publisher = ZmqEventPublisher(0, ANY, ANY)
    reports: list[ShutdownReport] = []
    barrier = threading.Barrier(4)

    def shut_down() -> None:
        barrier.wait(DEADLINE)
        reports.append(publisher.shutdown())

    threads = [threading.Thread(target=shut_down) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert reports == [publisher.shutdown()] * 4
    with pytest.raises(ClosedError, match=r"Publisher is closed: shutdown\(\) was called"):
        publisher.publish(batch())
    assert publisher.stats().accepted == 0


class Interrupted(BaseException):
    """Raised by a signal, as `KeyboardInterrupt` is, which would end the session of the tests if it came too late."""


def interrupt_shutdown(publisher: ZmqEventPublisher) -> None:
    """Call `shutdown`, which something delays, and interrupt it by a signal while it waits."""

    def interrupt() -> None:
        wait_until(lambda: "closed" in repr(publisher), "the shutdown to begin")
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGUSR1)

    def fail(*_: Any) -> None:
        raise Interrupted

    handler = signal.signal(signal.SIGUSR1, fail)
    interrupting = threading.Timer(0.05, interrupt)
    interrupting.start()
    try:
        with pytest.raises(Interrupted):
            publisher.shutdown(DEADLINE)
    finally:
        interrupting.join()
        signal.signal(signal.SIGUSR1, handler)


def test_an_interrupted_shutdown_is_completed_by_the_next_one(context: Context) -> None:
    """After Ctrl-C during `shutdown`, a second call ends the threads and closes all sockets. Interpreter exit makes such a
    call."""
    stalled = open_consumer(context, zmq.DEALER)
    stalled.rcvhwm, stalled.rcvbuf = 1, 4096
    files, _ = settle()
    publisher = ZmqEventPublisher(0, ANY, ANY, settings=QUICK)
    assert publisher.replay_endpoint is not None
    for number in range(1_000):  # in frames for which pyzmq opens no files of its own
        publisher.publish(EventBatch(float(number), [BlockStored([number], None, [70_000] * 3_000, 3_000)]))
    wait_until(lambda: publisher.stats().queued == 0, "all to be published")
    stalled.connect(publisher.replay_endpoint)
    request_replay(stalled, 0)
    wait_until(lambda: publisher.stats().replay.active, "the reply to begin")
    with hold_publisher(publisher):
        interrupt_shutdown(publisher)  # while it waits for the publisher thread
    wait_until(lambda: "zmq-publisher" not in publisher_threads(), "the publisher thread to end")
    interrupt_shutdown(publisher)  # while it waits for the reply
    assert publisher_threads() == ["zmq-replay"]
    report = publisher.shutdown(0.0)
    assert (report.sent, report.replays_unfinished) == (1_000, 1)
    stalled.close()
    wait_until(lambda: not publisher_threads() and count_resources()[0] < files, "threads and sockets to end")


def test_shutdown_reports_unsent_batches(context: Context, caplog: pytest.LogCaptureFixture) -> None:
    """If the thread hangs, shutdown still returns, counts the queued batches, and logs one warning."""
    publisher = ZmqEventPublisher(0, ANY, context=context)  # which would not end if a socket stayed open
    with hold_publisher(publisher), caplog.at_level(logging.WARNING):
        for number in range(5):
            publisher.publish(batch(number))
        began = time.monotonic()
        report = publisher.shutdown(timeout=0.01)
        assert time.monotonic() - began < 0.01 + SLACK
        assert report.unsent == 6  # the batch that is being encoded is not sent either
        assert not report.complete
        assert publisher.shutdown() is report
    assert len([record for record in caplog.records if "unsent=6" in record.message]) == 1
    wait_until(lambda: not publisher_threads(), "the thread to end")


def test_the_context_ends_after_a_thread_that_outlasts_the_shutdown() -> None:
    """A context that stays open is left to the garbage collector, which warns anywhere in the program."""
    publisher = ZmqEventPublisher(0, ANY, ANY)
    own = publisher._server._context
    with hold_publisher(publisher):
        assert not publisher.shutdown(0.0).complete
        assert not own.closed
    wait_until(lambda: own.closed, "the context to end")


def test_shutdown_does_not_wait_for_a_socket_that_stays_open(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """ZeroMQ does not terminate a context that has an open socket, and has no timeout for it."""
    contexts: list[Context] = []

    class RecordedContext(zmq.Context[Socket]):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            contexts.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(zmq, "Context", RecordedContext)
        publisher = ZmqEventPublisher(0, ANY, ANY, settings=replace(QUICK, term_timeout=0.05))
    (own,) = contexts
    open_socket = own.socket(zmq.PUB)
    report = publisher.shutdown(0.1)
    assert report.flushed is False
    assert "did not end the publisher's context" in caplog.text
    open_socket.close(linger=0)
    wait_until(lambda: own.closed, "the context to end")


def test_shutdown_does_not_wait_for_a_subscriber_that_does_not_read(context: Context) -> None:
    """ZeroMQ flushes only for the remaining time, and the report says that this was not enough."""
    publisher = ZmqEventPublisher(0, ANY)
    stalled = open_consumer(context, zmq.SUB)
    stalled.rcvhwm, stalled.rcvbuf = 1, 4096
    stalled.connect(publisher.endpoint)
    stalled.subscribe(b"")
    wait_until(lambda: publisher.stats().subscribers, "a subscription")
    for number in range(5_000):
        publisher.publish(batch(number, blocks=64))
    began = time.monotonic()
    report = publisher.shutdown(timeout=0.5)
    assert time.monotonic() - began < 0.5 + SLACK
    assert report.flushed is False
    assert not report.complete


def test_shutdown_ends_replies_at_the_deadline(context: Context) -> None:
    """A consumer that does not read delays shutdown until the deadline, and its reply is counted."""
    publisher = ZmqEventPublisher(0, ANY, ANY)
    for number in range(5_000):
        publisher.publish(batch(number, blocks=64))
    wait_until(lambda: publisher.stats().queued == 0, "all to be published")
    stalled = open_consumer(context, zmq.DEALER)
    stalled.rcvhwm, stalled.rcvbuf = 1, 4096
    assert publisher.replay_endpoint is not None
    stalled.connect(publisher.replay_endpoint)
    request_replay(stalled, 0)
    wait_until(lambda: publisher.stats().replay.active, "the reply to begin")
    began = time.monotonic()
    report = publisher.shutdown(timeout=0.05)
    assert time.monotonic() - began < 0.05 + SLACK
    assert report.replays_unfinished == 1
    assert publisher.stats().replay.abandoned == 1


def test_an_inproc_name_is_free_after_shutdown() -> None:
    """The next publisher can bind the same name at once, as with other transports."""
    for _ in range(200):
        ZmqEventPublisher(0, "inproc://lifetime-test", "inproc://lifetime-test-replay").shutdown()


def test_the_path_of_another_publisher_is_not_taken(tmp_path: Path) -> None:
    """libzmq would replace the file, and nothing could connect to the other publisher again."""
    endpoint, free = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/free"
    with closing(ZmqEventPublisher(0, endpoint, f"{endpoint}-replay")):
        for taken in ((endpoint, None), (free, f"{endpoint}-replay")):
            with pytest.raises(EndpointError, match="Address already in use"):
                ZmqEventPublisher(0, *taken)
    for _ in range(2):
        ZmqEventPublisher(0, endpoint, f"{endpoint}-replay").shutdown()


def test_a_terminated_context_ends_the_publisher_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    """There is no traceback and no spinning thread. Batches are dropped and counted, and the log has the reason once."""
    own: Context = zmq.Context()
    publisher = ZmqEventPublisher(0, ANY, ANY, context=own)
    own.term()
    wait_until(lambda: not publisher_threads(), "the thread to end")
    for _ in range(3):
        publisher.publish(batch())
    assert publisher.stats().dropped["ended"] == 3
    assert caplog.text.count("the publisher has ended and drops all further batches: its ZeroMQ context was terminated") == 1
    report = publisher.shutdown()
    assert (report.sent, report.dropped) == (0, 3)
    with pytest.raises(ClosedError):
        publisher.publish(batch())


def test_a_shared_context_stays_open(context: Context) -> None:
    """Its owner terminates it, which still flushes the sent batches."""
    with run_publisher(context=context) as publisher:
        subscriber = subscribe(context, publisher)
        publisher.publish(batch(0))
        report = publisher.shutdown()
    assert not context.closed
    assert report.flushed is None
    assert report.complete
    assert receive(subscriber)[0] == 0


def test_no_thread_or_file_is_left_open(context: Context) -> None:
    """The numbers of threads and file descriptors are as before, after use and after a failed start."""
    with run_publisher(replay_endpoint=ANY) as blocker, leave_nothing_open():
        for _ in range(5):
            with run_publisher(replay_endpoint=ANY) as publisher:
                publisher.publish(batch())
            with pytest.raises(EndpointError):
                ZmqEventPublisher(0, ANY, blocker.replay_endpoint)


def _pauses(call: Callable[[], object]) -> Generator[None, None, None]:
    """Call a function in a thread, which pauses before each line of Python, with the locks that it holds there."""
    reached, resume = threading.Semaphore(0), threading.Semaphore(0)
    is_over = False

    def trace(_frame: FrameType, event: str, _argument: object) -> Any:
        if event == "line" and not is_over:
            reached.release()
            resume.acquire()
        return trace

    def run() -> None:
        nonlocal is_over
        sys.settrace(trace)
        try:
            call()
        finally:
            sys.settrace(None)
            is_over = True
            reached.release()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        while reached.acquire(timeout=DEADLINE) and not is_over:
            yield
            resume.release()
    finally:
        is_over = True
        resume.release()
        thread.join()


def _find_faults_in_child(publisher: ZmqEventPublisher, caplog: pytest.LogCaptureFixture) -> list[str]:
    faults = []
    publisher.publish(batch())
    if publisher.stats().dropped["ended"] != 1:
        faults.append("publish did not count the dropped batch")
    if f"it belongs to process {os.getppid()}" not in caplog.text:
        faults.append(f"publish gave another reason: {caplog.text}")
    if publisher.shutdown() != publisher.shutdown():
        faults.append("two calls of shutdown returned different reports")
    if "closed" not in repr(publisher):
        faults.append(repr(publisher))
    return faults


def _find_faults_of_child(caplog: pytest.LogCaptureFixture) -> list[str]:
    with run_publisher() as own:
        own.publish(batch())
    return [] if own.shutdown().sent == 1 else [f"a publisher created in the child did not work: {caplog.text}"]


def test_a_publisher_is_ended_in_a_forked_child(context: Context, caplog: pytest.LogCaptureFixture) -> None:
    """In the child `publish` drops and counts, and `shutdown` does nothing. A new publisher works, and the parent's
    continues."""
    with run_publisher(replay_endpoint=ANY) as publisher:
        subscriber = subscribe(context, publisher)
        publisher.publish(batch(0))
        forks = 0
        # No thread of the child releases the locks that a thread of the parent holds at the fork.
        with closing(_pauses(publisher.stats)) as pauses:
            for _ in pauses:
                assert find_faults_in_fork(lambda: _find_faults_in_child(publisher, caplog)) == ""
                forks += 1
        assert forks > 10
        assert find_faults_in_fork(lambda: _find_faults_of_child(caplog)) == ""
        publisher.publish(batch(1))
        assert [receive(subscriber)[0] for _ in range(2)] == [0, 1]


def test_interpreter_exit_sends_all_queued_batches(context: Context) -> None:
    """A program without `shutdown` exits cleanly and loses nothing: a binding subscriber receives everything."""
    subscriber = open_consumer(context, zmq.SUB)
    subscriber.bind(ANY)
    subscriber.subscribe(b"")
    endpoint = last_endpoint(subscriber)
    program = f"""
import threading
from kvevents.events import EventBatch
from kvevents.publisher import ZmqEventPublisher
publisher = ZmqEventPublisher(0, {endpoint!r})
pause = threading.Event()
while not publisher.stats().subscribers:
    pause.wait(0.001)
for number in range(2000):
    publisher.publish(EventBatch(float(number), []))
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        # A bound socket accepts a peer only while it is being read.
        assert [receive(subscriber)[0] for _ in range(2_000)] == list(range(2_000))
        assert child.communicate(timeout=DEADLINE)[0] == ""
    assert child.returncode == 0


@pytest.mark.parametrize("threads_before", range(4))
def test_an_interrupted_constructor_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch, threads_before: int) -> None:
    """A socket or thread that remains would block the termination of a shared context for ever."""
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def interrupt(thread: threading.Thread) -> None:
        if thread.name.startswith("zmq-"):
            if len(started) == threads_before:
                raise KeyboardInterrupt
            started.append(thread)
        start(thread)

    context: zmq.Context[Any] = zmq.Context()
    monkeypatch.setattr(threading.Thread, "start", interrupt)
    with suppress(KeyboardInterrupt):
        ZmqEventPublisher(0, ANY, ANY, context=context, compact=True).shutdown()
    monkeypatch.undo()
    assert len(started) == min(threads_before, 3), "the threads are those of replay, of compaction, and of the publisher"
    ending = threading.Thread(target=context.term, daemon=True)
    ending.start()
    ending.join(DEADLINE)
    assert not ending.is_alive()
    assert not any(thread.is_alive() for thread in started)


@pytest.mark.parametrize("shared", [False, True], ids=["own context", "shared context"])
def test_batches_are_complete_if_the_interpreter_exits_during_a_large_reply(context: Context, shared: bool) -> None:
    """Large batches are sent from the publisher's memory, which stays until they have left, so each batch arrives complete.
    Either all arrive, or the report counts the reply as unfinished because a slow machine did not read it in time. What libzmq
    has taken and not sent before the report is reported as not flushed."""
    program = f"""
import sys, time, zmq
from kvevents.events import BlockStored, EventBatch
from kvevents.publisher import ZmqEventPublisher
context = zmq.Context() if {shared} else None
publisher = ZmqEventPublisher(0, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", context=context)
for number in range(40):
    publisher.publish(EventBatch(float(number), [BlockStored([number], None, [70_000 + number] * 300_000, 300_000)], 0))
while publisher.stats().queued:  # an earlier reply would have only some of the batches
    time.sleep(0.001)
print(publisher.replay_endpoint, flush=True)
until = time.monotonic() + {DEADLINE}
while not publisher.stats().replay.deferred:
    if time.monotonic() > until:
        sys.exit("no answer was too large for what has not left")
    time.sleep(0.001)
print("leaving", flush=True)
"""
    command = [sys.executable, "-c", program]
    with ExitStack() as undo:
        child = undo.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        assert child.stdout is not None
        reader = open_consumer(context, zmq.DEALER)
        reader.rcvhwm, reader.rcvbuf = 1, 4096
        monitor = reader.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        undo.callback(monitor.close)
        undo.callback(reader.disable_monitor)
        reader.connect(child.stdout.readline().strip())
        request_replay(reader, 0)
        assert child.stdout.readline() == "leaving\n"
        poller = zmq.Poller()
        poller.register(reader, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        found = []
        while reader in (ready := dict(poller.poll(int(DEADLINE * 1000)))):
            *_, seq, payload = reader.recv_multipart()
            found += [(int.from_bytes(seq, "big"), payload)] if payload else []
        assert monitor in ready, "neither a batch nor the end of the connection"
        for number, payload in found:
            expected = EventBatch(float(number), [BlockStored([number], None, [70_000 + number] * 300_000, 300_000)], 0)
            assert payload == encode_batch(expected)
        assert [number for number, _ in found] == list(range(len(found)))
        output = child.stdout.read()
        # The report may be made before libzmq has sent the last bytes; libzmq sends until the process ends.
        wanted = {"", "flushed=False"} if len(found) == 40 else {"replays_unfinished=1", "flushed=False"}
        assert any(each == output or (each and each in output) for each in wanted), (len(found), output)
    assert child.returncode == 0
