"""What is measured of the index, and what each figure has to reach."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from benchmarks.trials import Figure, Trial

_INSIDE: Final = ("ours", "dynamo", "dynamo-pinned")
_PINNED: Final = ("ours", "dynamo-pinned")
_SERVICE: Final = ("ours", "service")
_M: Final = 1_000_000

TRIALS: Final = (
    Trial("index-apply", "indexing.applying", "apply", (1 << 20, 102_400, 0), (1 << 17, 20_480, 0), _INSIDE, (4, 1)),
    Trial("index-apply-zipf", "indexing.applying", "apply", (1 << 20, 102_400, 1), (1 << 17, 20_480, 1), _PINNED, (1, 1)),
    Trial("index-ingest-1", "indexing.ingesting", "ingest", (300_000, 1), (30_000, 1), _SERVICE, (4, 1)),
    Trial("index-ingest-32", "indexing.ingesting", "ingest", (_M, 32), (200_000, 32), _SERVICE, (3, 1)),
    Trial("index-ingest-512", "indexing.ingesting", "ingest", (2 * _M, 512), (200_000, 512), _SERVICE, (3, 1)),
    Trial("index-match", "indexing.matching", "match", (500,), (100,), _PINNED, (3, 1)),
    Trial("index-memory-long", "indexing.footprint", "grow", (4 * _M, 2_048, 512), (400_000, 2_048, 512), _SERVICE, (1, 1)),
    Trial("index-memory-short", "indexing.footprint", "grow", (4 * _M, 8, 1), (200_000, 8, 1), _SERVICE, (1, 1)),
    Trial("index-memory-roots", "indexing.footprint", "grow", (2 * _M, 1, 1), (200_000, 1, 1), _SERVICE, (1, 1)),
    Trial("index-memory-shared", "indexing.footprint", "share", (250_000, 16), (50_000, 16), ("ours", "dynamo"), (2, 1)),
    Trial("index-churn", "indexing.footprint", "churn", (200_000, 30), (20_000, 10), _SERVICE, (1, 1)),
    Trial("index-readers", "indexing.reading", "read", (2_000,), (500,), ("ours", "idle"), (3, 1)),
    Trial("index-snapshot", "indexing.saving", "save", (4 * _M,), (400_000,), _SERVICE, (1, 1)),
)


def _apply() -> Iterator[Figure]:
    for per_event, reach in ((1, 10.0), (32, 3.0), (512, 2.0)):
        yield Figure(
            f"apply blocks/s, {per_event} per event", "index-apply", f"rate_{per_event}", "/s", reach, "ratio at least"
        )
    for per_event in (1, 32, 512):
        yield Figure(f"the same, tokens by Zipf, {per_event}", "index-apply-zipf", f"rate_{per_event}", "/s", None)


def _ingest() -> Iterator[Figure]:
    for per_event, rate, cpu in ((1, 1.5, 1 / 2), (32, 4.0, 1 / 4), (512, 4.0, 1 / 4)):
        trial, words = f"index-ingest-{per_event}", f"{per_event} per message"
        yield Figure(f"socket to visible, blocks/s, {words}", trial, "rate", "/s", rate, "ratio at least")
        yield Figure(f"socket to visible, CPU per block, {words}", trial, "cpu", "us", cpu)


def _match() -> Iterator[Figure]:
    reaches = {"1024_1": 2.5, "1024_16": 2.5, "1024_256": None, "32768_1": 30.0, "32768_16": 35.0, "32768_256": 50.0}
    named = {
        **{f"{tokens}_{workers}": f"{tokens:,} tokens x {workers}" for tokens in (1_024, 32_768) for workers in (1, 16, 256)},
        "staggered": "32,768 x 256 staggered",
        "turns": "32,768 x 1, another each time",
        "long_16": "240,000 x 96",
        "long_64": "240,000 x 96, blocks of 64",
    }
    others: dict[str, float | None] = {"staggered": 50.0, "turns": None, "long_16": 500.0, "long_64": 500.0}
    for shape, reach in {**reaches, **others}.items():
        yield Figure(f"match p50, {named[shape]}", "index-match", f"match_{shape}_p50", "us", reach, "at most")
        yield Figure(f"match p99, {named[shape]}", "index-match", f"match_{shape}_p99", "us", None)
    for shape in ("1024_16", "32768_16", "32768_256"):
        yield Figure(f"match and read all p50, {named[shape]}", "index-match", f"all_{shape}_p50", "us", None)
        yield Figure(f"match of a list p50, {named[shape]}", "index-match", f"list_{shape}_p50", "us", None)


def _memory() -> Iterator[Figure]:
    for name, words, reach in (
        ("long", "chains of 2,048", 48.0),
        ("short", "chains of 8", 60.0),
        ("roots", "lone roots", 80.0),
    ):
        yield Figure(f"bytes per block, {words}, worst size", f"index-memory-{name}", "worst", "B", reach, "at most")
        yield Figure(f"bytes per block, {words}, best size", f"index-memory-{name}", "best", "B", None)
    yield Figure("bytes per block and worker, 16 workers, worst", "index-memory-shared", "worst", "B", 12.0, "at most")
    yield Figure("bytes per block and worker, 16 workers, best", "index-memory-shared", "best", "B", None)
    yield Figure("growth by storing and removing 206,000 blocks 30 times", "index-churn", "growth", "MB", 10.0, "below")


def _readers() -> Iterator[Figure]:
    for per_event in (32, 512):
        for tokens in (1_024, 32_768):
            words = f"{tokens:,} tokens, {per_event} per event"
            yield Figure(f"match p99 beside 1 M blocks/s, {words}", "index-readers", f"p99_{tokens}_{per_event}", "us", 3.0)
        yield Figure(f"blocks/s written meanwhile, {per_event}", "index-readers", f"rate_32768_{per_event}", "/s", None)


def _snapshot() -> Iterator[Figure]:
    yield Figure("snapshot of 4 M blocks (its dump: of 1 M)", "index-snapshot", "seconds", "s", 3.0, "below")
    yield Figure("memory on top meanwhile", "index-snapshot", "extra", "%", 10.0, "below")
    yield Figure("bytes per block in it", "index-snapshot", "size", "B", None)
    yield Figure("restore of 4 M blocks", "index-snapshot", "restore_seconds", "s", 3.0, "below")
    yield Figure("memory on top meanwhile", "index-snapshot", "restore_extra", "%", 10.0, "below")
    yield Figure("absorb of 4 M blocks", "index-snapshot", "absorb_seconds", "s", 3.0, "below")
    yield Figure("memory on top meanwhile", "index-snapshot", "absorb_extra", "%", 10.0, "below")
    yield Figure("match p99 meanwhile, 8,192 tokens", "index-snapshot", "absorb_match", "us", None)


FIGURES: Final = (*_apply(), *_ingest(), *_match(), *_memory(), *_readers(), *_snapshot())
