"""What is measured of the service, and what each figure has to reach."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from benchmarks.trials import Figure, Trial

_BOTH: Final = ("ours", "service")

TRIALS: Final = (
    Trial("service-start", "service.starting", "start", (2,), (1,), _BOTH),
    Trial("service-query", "service.asking", "ask", (3,), (1,), _BOTH),
    Trial("service-notice", "service.noticing", "notice", (300,), (100,), _BOTH),
    Trial("service-fleet", "service.following", "follow", (200, 50, 8, 10), (200, 50, 8, 3), _BOTH, (3, 1)),
)


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


FIGURES: Final = (*_start(), *_query(), *_notice(), *_fleet())
