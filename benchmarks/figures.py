"""The trials, and the limit of each figure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from benchmarks.trials import Figure, Trial

_DYNAMO: Final = ("ours", "dynamo")

TRIALS: Final = (
    Trial("publish-busy", "publishing.busy", (1, 20), (1, 5)),
    Trial("publish-paced", "publishing.paced", (1, 2_000, 500), (1, 500, 500)),
    Trial("flow-1", "publishing.flow", (1, 100_000), (1, 20_000)),
    Trial("flow-32", "publishing.flow", (32, 60_000), (32, 10_000)),
    Trial("replay", "publishing.replay", (32, 10_000, 500), (32, 10_000, 500)),
    Trial("subscribe-1", "subscribing.read", (1, 60_000), (1, 20_000), ("ours", "bare")),
    Trial("subscribe-32", "subscribing.read", (32, 30_000), (32, 10_000), ("ours", "bare")),
    Trial("recover", "subscribing.recover", (32, 10_000), (32, 10_000), ("vllm", "sglang")),
    Trial("relay-1", "relaying.forward", (1, 40_000), (1, 10_000), ("ours", "proxy")),
    Trial("relay-32", "relaying.forward", (32, 20_000), (32, 5_000), ("ours", "proxy")),
    Trial("bridge-1", "bridging.write", (1, 1, 1, 40_000), (1, 1, 1, 10_000), ("ours", "nats-py")),
    Trial("bridge-32", "bridging.write", (1, 1, 32, 8_000), (1, 1, 32, 2_000), ("ours", "nats-py")),
    Trial("bridge-1000", "bridging.write", (1_000, 8, 10, 40_000), (1_000, 8, 10, 10_000), ("ours", "nats-py")),
    Trial("service-start", "service.start.measure", (2,), (1,), _DYNAMO),
    Trial("service-query", "service.queries.measure", (3,), (1,), _DYNAMO),
    Trial("service-notice", "service.visibility.measure", (300,), (100,), _DYNAMO),
    Trial("service-fleet", "service.fleet.measure", (200, 50, 8, 10), (200, 50, 8, 3), _DYNAMO, (3, 1)),
)


def _streams() -> Iterator[Figure]:
    yield Figure("publish() p50, busy", "publish-busy", "p50", "ns", 1 / 4)
    yield Figure("publish() p99, busy", "publish-busy", "p99", "ns", 1.0)
    yield Figure("time to read the clock, in each of these", "publish-busy", "clock", "ns", None, context=True)
    yield Figure("publish() p50, 500/s", "publish-paced", "p50", "ns", 1 / 2)
    yield Figure("publish() p99, 500/s", "publish-paced", "p99", "ns", 1.0)
    yield Figure("CPU per batch at 500/s, 1 block", "publish-paced", "cpu", "us", None)
    yield Figure("batches/s to one process, 1 block", "flow-1", "rate", "/s", 2.0, "ratio at least")
    yield Figure("batches/s to one process, 32 blocks", "flow-32", "rate", "/s", 2.0, "ratio at least")
    yield Figure("batches lost on the way, 1 block", "flow-1", "lost", "", 0.0, "none")
    yield Figure("batches lost on the way, 32 blocks", "flow-32", "lost", "", 0.0, "none")
    yield Figure("publisher CPU per batch, 1 block", "flow-1", "cpu", "us", 1 / 3)
    yield Figure("publisher CPU per batch, 32 blocks", "flow-32", "cpu", "us", 1 / 2)
    yield Figure("replay of 10,000, lost by a fast reader", "replay", "lost_fast", "", 0.0, "none")
    yield Figure("replay of 10,000, lost by a slow reader", "replay", "lost_slow", "", 0.0, "none")
    yield Figure("replay of 10,000, lost by a late reader", "replay", "lost_late", "", 0.0, "none")
    yield Figure("longest stall of live events in replay", "replay", "stall", "ms", 5.0, "below")
    yield Figure("longest stall of live events without replay", "replay", "stall_quiet", "ms", 1.0)
    yield Figure("publish() to reader p50, 500/s, without replay", "replay", "delivery_quiet", "us", 2.0)
    yield Figure("subscriber CPU per batch, 1 block", "subscribe-1", "cpu", "us", 1.5)
    yield Figure("subscriber CPU per batch, 32 blocks", "subscribe-32", "cpu", "us", 1.5)
    yield Figure("subscriber batches/s, 1 block", "subscribe-1", "rate", "/s", None)
    yield Figure("subscriber batches/s, 32 blocks", "subscribe-32", "rate", "/s", None)
    yield Figure("recovery of 10,000 from the engine: missing", "recover", "missing", "", 0.0, "none")
    yield Figure("recovery of 10,000 from the engine: time", "recover", "seconds", "s", None)
    yield Figure("recovery of 10,000 from the engine: requests", "recover", "requests", "", None, context=True)


def _relay() -> Iterator[Figure]:
    for blocks, words in ((1, "1 block"), (32, "32 blocks")):
        trial = f"relay-{blocks}"
        yield Figure(f"relay: CPU per batch, {words}", trial, "cpu", "us", 3.0)
        yield Figure(f"relay: batches/s, {words}", trial, "rate", "/s", None)
        yield Figure(f"relay: sent to received p50, 1,000/s, {words}", trial, "p50", "ms", None)
        yield Figure(f"relay: sent to received p99, 1,000/s, {words}", trial, "p99", "ms", None)


def _bridge() -> Iterator[Figure]:
    loads = {
        "bridge-1": "1 block, 1 engine",
        "bridge-32": "32 blocks, 1 engine",
        "bridge-1000": "10 blocks, 1,000 engines, 8 partitions",
    }
    for trial, words in loads.items():
        yield Figure(f"bridge: batches/s, {words}", trial, "rate", "/s", 0.8, "ratio at least")
        yield Figure(f"bridge: CPU per batch, {words}", trial, "cpu", "us", 1.3)
        yield Figure(f"CPU of the server per batch, {words}", trial, "server", "us", None)


def _start() -> Iterator[Figure]:
    yield Figure("start to ready", "service-start", "seconds", "s", 1.0, "at most")
    yield Figure("CPU time from start to ready", "service-start", "cpu", "s", None)
    yield Figure("memory, idle", "service-start", "resident", "MB", 100.0, "at most")
    yield Figure("CPU, idle", "service-start", "idle", "%", None)


def _query() -> Iterator[Figure]:
    trial = "service-query"
    for tokens, p50, p99, rate in ((1_024, 1.0, 1.0, 0.6), (32_768, 0.7, None, 1.3)):
        words = f"/query {tokens:,} x 16"
        yield Figure(f"{words}, 1 client p50", trial, f"p50_{tokens}", "us", p50)
        yield Figure(f"{words}, 1 client p99", trial, f"p99_{tokens}", "us", p99)
        yield Figure(f"{words}, 16 clients requests/s", trial, f"rate_{tokens}", "/s", rate, "ratio at least")
        yield Figure(f"{words}, 16 clients p99", trial, f"p99_many_{tokens}", "us", None)
        yield Figure(f"{words}, CPU per request of 1 client", trial, f"cpu_one_{tokens}", "us", None)
        yield Figure(f"{words}, CPU per request of 16 clients", trial, f"cpu_{tokens}", "us", None)
    for tokens, reach in ((1_024, None), (32_768, 250.0)):
        words = f"raw match {tokens:,} x 16"
        yield Figure(f"{words}, 1 client p50", trial, f"p50_raw_{tokens}", "us", reach, "at most")
        yield Figure(f"{words}, 1 client p99", trial, f"p99_raw_{tokens}", "us", None)
        yield Figure(f"{words}, 16 clients requests/s", trial, f"rate_raw_{tokens}", "/s", None)
        yield Figure(f"{words}, CPU per request of 16 clients", trial, f"cpu_raw_{tokens}", "us", None)
    yield Figure("memory after the queries", trial, "resident", "MB", None)


def _notice() -> Iterator[Figure]:
    yield Figure("sent to visible, idle, p50", "service-notice", "p50", "ms", 1.0)
    yield Figure("sent to visible, idle, p99", "service-notice", "p99", "ms", None)
    yield Figure("of that, one question", "service-notice", "question", "ms", None, context=True)


def _fleet() -> Iterator[Figure]:
    trial = "service-fleet"
    yield Figure("200 sources x 50/s x 8 blocks: CPU", trial, "cpu", "%", None)
    yield Figure("CPU per batch", trial, "cpu_batch", "us", None)
    yield Figure("batches lost", trial, "lost", "", 0.0, "none")
    yield Figure("of those, in gaps that it reports", trial, "gaps", "", 0.0, "none")
    yield Figure("sources that are not EXACT", trial, "inexact", "", 0.0, "none")
    yield Figure("batches that only replay brought", trial, "replayed", "", None, context=True)
    yield Figure("time behind after the last one", trial, "behind", "ms", None)
    yield Figure("memory for that", trial, "grown", "MB", None)
    yield Figure("batches/s that the senders reached", trial, "rate", "/s", None, context=True)
    yield Figure("CPU of the senders", trial, "senders", "%", None, context=True)
    yield Figure("latest of the senders", trial, "late", "ms", None, context=True)


FIGURES: Final = (*_streams(), *_relay(), *_bridge(), *_start(), *_query(), *_notice(), *_fleet())
