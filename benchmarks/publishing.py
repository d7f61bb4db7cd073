"""Trials of one publisher. The same code constructs and feeds all contenders, and the same process reads from them."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Thread
from typing import Any, Final

from benchmarks.contenders import CONTENDERS, Contender, Publisher
from benchmarks.measures import percentile
from benchmarks.processes import Peer
from tools.ports import reserve_port

POOL: Final = 500
"""Number of distinct batches, which are published in turn."""
WINDOW: Final = 2_000
"""Maximum number of batches in a publisher's queue of 100,000: never full, never empty while the harness feeds it."""
QUIET: Final = 5.0
"""Seconds of live batches without replay: as long as the three replays take, since the longest stall grows with the time."""
BURST: Final = 1_000
"""Number of batches of a burst, which are published without a pause."""


def feed(contender: Contender, publisher: Publisher, batches: list[Any], count: int) -> None:
    """Publish `count` batches as fast as the publisher sends them: wait 1 ms whenever more than `WINDOW` are in its queue."""
    publish, waiting = publisher.publish, contender.waiting
    for count_fed in range(0, count, POOL):
        while waiting(publisher) > WINDOW:
            time.sleep(0.001)
        for batch in batches[: count - count_fed]:
            publish(batch)


def _connect(contender: Contender, publisher: Publisher, peer: Peer) -> int:
    """Publish until the peer has received a batch, and return the number of published batches."""
    thread = Thread(target=peer.receive)
    thread.start()
    probe, count = contender.batches(1, 1)[0], 0
    while thread.is_alive():
        publisher.publish(probe)
        count += 1
        time.sleep(0.02)
    while contender.waiting(publisher):
        time.sleep(0.01)
    time.sleep(0.1)
    return count


def _time_each(publish: Callable[[Any], None], batches: list[Any], into: list[int]) -> None:
    clock = time.perf_counter_ns
    for batch in batches:
        start = clock()
        publish(batch)
        into.append(clock() - start)


def busy(name: str, blocks: int, bursts: int) -> dict[str, float]:
    """Measure each `publish` in bursts of `BURST` calls, from an empty queue with room for a hundred bursts."""
    contender, port, replay_port = CONTENDERS[name], reserve_port(), reserve_port()
    publisher, batches = contender.publisher(port, replay_port), contender.batches(BURST, blocks)
    times: list[int] = []
    with Peer("peers.count", port) as peer:
        _connect(contender, publisher, peer)
        for _ in range(bursts):
            _time_each(publisher.publish, batches, times)
            while contender.waiting(publisher):
                time.sleep(0.005)
            time.sleep(0.02)
        clock_times: list[int] = []
        _time_each(lambda _: None, batches, clock_times)
    publisher.shutdown()
    return {"p50": percentile(times, 50), "p99": percentile(times, 99), "clock": percentile(clock_times, 50)}


def paced(name: str, blocks: int, batches: int, per_second: int) -> dict[str, float]:
    """Measure each `publish` at a steady pace. The thread sleeps between two calls, as a scheduler waits for its step."""
    contender, port, replay_port = CONTENDERS[name], reserve_port(), reserve_port()
    publisher, pool = contender.publisher(port, replay_port), contender.batches(POOL, blocks)
    times: list[int] = []
    with Peer("peers.count", port) as peer:
        _connect(contender, publisher, peer)
        cpu, due = time.process_time(), time.monotonic()
        for number in range(batches):
            due += 1 / per_second
            time.sleep(max(0.0, due - time.monotonic()))
            _time_each(publisher.publish, [pool[number % POOL]], times)
        cpu = time.process_time() - cpu
    publisher.shutdown()
    return {"p50": percentile(times, 50), "p99": percentile(times, 99), "cpu": cpu / batches * 1e6}


def flow(name: str, blocks: int, count: int) -> dict[str, float]:
    """Return the batches per second to a process that only receives, and the CPU time of this process for each batch."""
    contender, port, replay_port = CONTENDERS[name], reserve_port(), reserve_port()
    publisher, batches = contender.publisher(port, replay_port), contender.batches(POOL, blocks)
    with Peer("peers.count", port) as peer:
        probes = _connect(contender, publisher, peer)
        peer.send(probes + count - 1)
        start, cpu = time.monotonic(), time.process_time()
        feed(contender, publisher, batches, count)
        outcome = peer.receive()
        cpu = time.process_time() - cpu
    publisher.shutdown()
    return {"rate": count / (outcome["end"] - start), "cpu": cpu / count * 1e6, "lost": outcome["lost"]}


def replay(name: str, blocks: int, count: int, per_second: int) -> dict[str, float]:
    """Measure one request for a full buffer by readers with three paces, while a second process receives live batches."""
    contender, port, replay_port = CONTENDERS[name], reserve_port(), reserve_port()
    publisher, pool = contender.publisher(port, replay_port), contender.batches(POOL, blocks)
    feed(contender, publisher, pool, count)
    while contender.waiting(publisher):
        time.sleep(0.01)
    result: dict[str, float] = {}
    with Peer("peers.live", port) as peer:
        _connect(contender, publisher, peer)
        for pace in ("quiet", "fast", "slow", "late"):
            if pace == "quiet":
                _forget(peer)
                _publish_for(publisher, pool, per_second, lambda elapsed: elapsed > QUIET)
            else:
                # Starting a process stops this process for milliseconds, so the reader is started before the measurement.
                with Peer("peers.replay", replay_port, pace, count) as reader:
                    reader.receive()
                    _forget(peer)
                    outcome = _publish_until(publisher, pool, per_second, reader)
                result[f"lost_{pace}"] = outcome["lost"]
                result[f"seconds_{pace}"] = outcome["seconds"]
            peer.send("report")
            report = peer.receive()
            result[f"stall_{pace}"] = report["longest"] * 1e3
            result[f"delivery_{pace}"] = report["median"] * 1e6
    publisher.shutdown()
    return result | {"stall": max(result["stall_fast"], result["stall_slow"], result["stall_late"])}


def _forget(peer: Peer) -> None:
    peer.send("forget")
    peer.receive()


def _publish_for(publisher: Publisher, pool: list[Any], per_second: int, is_over: Callable[[float], bool]) -> None:
    """Publish at a fixed pace. The timestamp of each batch is the time of its `publish`."""
    began = due = time.monotonic()
    number = 0
    while not is_over(due - began):
        due += 1 / per_second
        time.sleep(max(0.0, due - time.monotonic()))
        batch = pool[number % POOL]
        batch.ts = time.monotonic()
        publisher.publish(batch)
        number += 1
    time.sleep(0.05)


def _publish_until(publisher: Publisher, pool: list[Any], per_second: int, reader: Peer) -> dict[str, Any]:
    outcome: dict[str, Any] = {}
    thread = Thread(target=lambda: outcome.update(reader.receive()))
    thread.start()
    reader.send("ask")
    _publish_for(publisher, pool, per_second, lambda _: not thread.is_alive())
    thread.join()
    return outcome
