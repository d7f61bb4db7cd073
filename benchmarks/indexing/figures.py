"""What is measured of the index, and what each figure has to reach."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from benchmarks.trials import Figure, Trial

_PINNED: Final = ("ours", "dynamo-pinned")
_SERVICE: Final = ("ours", "service")
_M: Final = 1_000_000

TRIALS: Final = (
    Trial("index-ingest-1", "indexing.ingesting", "ingest", (300_000, 1), (30_000, 1), _SERVICE, (4, 1)),
    Trial("index-ingest-32", "indexing.ingesting", "ingest", (_M, 32), (200_000, 32), _SERVICE, (3, 1)),
    Trial("index-ingest-512", "indexing.ingesting", "ingest", (2 * _M, 512), (200_000, 512), _SERVICE, (3, 1)),
    Trial("index-match", "indexing.matching", "match", (500,), (100,), _PINNED, (3, 1)),
    Trial("index-churn", "indexing.footprint", "churn", (200_000, 30), (20_000, 10), _SERVICE, (1, 1)),
    Trial("index-snapshot", "indexing.saving", "save", (4 * _M,), (400_000,), ("ours",), (1, 1)),
)


def _ingest() -> Iterator[Figure]:
    for per_event, rate, cpu in ((1, 1.5, 1 / 2), (32, 4.0, 1 / 4), (512, 4.0, 1 / 4)):
        trial, words = f"index-ingest-{per_event}", f"{per_event} per message"
        yield Figure(f"socket to visible, blocks/s, {words}", trial, "rate", "/s", rate, "ratio at least")
        yield Figure(f"socket to visible, CPU per block, {words}", trial, "cpu", "us", cpu)


def _match() -> Iterator[Figure]:
    named = {
        **{f"{tokens}_{workers}": f"{tokens:,} tokens x {workers}" for tokens in (1_024, 32_768) for workers in (1, 16, 256)},
        "staggered": "32,768 x 256 staggered",
        "turns": "32,768 x 1, another each time",
        "long_16": "240,000 x 96",
        "long_64": "240,000 x 96, blocks of 64",
    }
    for shape, words in named.items():
        reach = 0.6 if words.startswith("32,768") else None
        yield Figure(f"match of a list p50, {words}", "index-match", f"list_{shape}_p50", "us", reach)
        yield Figure(f"the same, answer read, {words}", "index-match", f"list_read_{shape}_p50", "us", None)
        yield Figure(f"match of an array p50, {words}", "index-match", f"array_{shape}_p50", "us", None)


def _churn() -> Iterator[Figure]:
    yield Figure("growth by storing and removing 206,000 blocks 30 times", "index-churn", "growth", "MB", 10.0, "below")


def _snapshot() -> Iterator[Figure]:
    yield Figure("snapshot of 4 M blocks", "index-snapshot", "seconds", "s", 3.0, "below")
    yield Figure("memory on top meanwhile", "index-snapshot", "extra", "%", 10.0, "below")
    yield Figure("bytes per block in it", "index-snapshot", "size", "B", None)
    yield Figure("restore of 4 M blocks", "index-snapshot", "restore_seconds", "s", 3.0, "below")
    yield Figure("memory on top meanwhile", "index-snapshot", "restore_extra", "%", 10.0, "below")
    yield Figure("merge of 4 M blocks", "index-snapshot", "merge_seconds", "s", 3.0, "below")
    yield Figure("memory on top meanwhile", "index-snapshot", "merge_extra", "%", 10.0, "below")
    yield Figure("match p99 meanwhile, 8,192 tokens", "index-snapshot", "merge_match", "us", None)


FIGURES: Final = (*_ingest(), *_match(), *_churn(), *_snapshot())
