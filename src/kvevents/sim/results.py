"""What a run of a fleet came to."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class Distribution(Struct, frozen=True):
    """Of some figure over all requests, in seconds; percentiles are values that occurred (nearest rank)."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution | None:
        """None of nothing."""
        if not values:
            return None
        ordered = sorted(values)
        p50, p90, p99 = (ordered[max(0, -(-len(ordered) * share // 100) - 1)] for share in (50, 90, 99))
        return cls(sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


class WorkerResult(Struct, frozen=True, kw_only=True):
    """What one engine, or one rank of it, did."""

    source: str
    rank: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    """Of those prompts, found in its cache."""
    busy: float
    """Share of the time in which it computed, 0 to 1."""
    preemptions: int
    restarts: int


class Sample(Struct, frozen=True):
    """The fleet at one moment."""

    at: float
    """Seconds from the beginning."""
    running: int
    waiting: int
    """Requests in engines, admitted and not."""
    blocks: int
    """Blocks that the index knows of, once for each worker."""
    unique: int
    """The same, once for all workers."""
    prompt_tokens: int
    """Of requests admitted since the sample before."""
    cached_tokens: int
    """Of those, found in caches."""


class Difference(Struct, frozen=True):
    """A lookup of an engine that the index answers in another way: a fault of ours, not a result."""

    source: str
    rank: int
    life: int
    """Of the engine, from 0."""
    seq: int
    """Number of the batch in whose step it was looked up."""
    position: int
    """Events of that batch that had happened before."""
    prompt: int
    """Tokens."""
    cached: int
    """Tokens that the engine found."""
    indexed: int
    """Tokens that the index said."""


class PolicyResult(Struct, frozen=True, kw_only=True):
    """A fleet under one policy."""

    policy: str
    requests: int
    finished: int
    refused: int
    """Longer than a whole cache."""
    retried: int
    """Sent again, because the engine that had them was restarted."""
    seconds: float
    """From the first arrival to the last answer, in the fleet's time."""
    prompt_tokens: int
    cached_tokens: int
    hit_rate: float
    """Cached tokens of all prompt tokens, 0 to 1, as the engines found them."""
    ttft: Distribution | None
    """Seconds from arrival to the first token."""
    latency: Distribution | None
    """Seconds from arrival to the last token."""
    tpot: Distribution | None
    """Seconds per token of the answer after the first."""
    output_tokens_per_second: float
    imbalance: float
    """The most that a worker had to compute, over the mean; 1 is even."""
    preemptions: int
    checked: int
    """Lookups of engines that were compared with the index, all that came before them having been delivered."""
    disagreements: int
    """Of those, the ones in which index and engine differ."""
    unproven: int
    """Lookups that could not be compared, because something before them was lost, or in doubt."""
    promised_tokens: int
    """Cached tokens that the index promised when requests were routed; 0 for policies that do not ask it."""
    broken_promises: int
    """Requests that found fewer cached tokens than promised: something was evicted in between, or not yet announced as gone."""
    batches: int
    events: int
    workers: list[WorkerResult]
    series: list[Sample]
    examples: list[Difference] = []
    """The first of the disagreements."""


class Comparison(Struct, frozen=True, kw_only=True):
    """Several policies with the same requests."""

    settings: dict[str, str | int | float | bool | None]
    policies: list[PolicyResult]


class StreamResult(Struct, frozen=True, kw_only=True):
    """What a subscriber saw of one worker's stream."""

    source: str
    rank: int
    endpoint: str
    trust: str
    """At the end, with the reason."""
    batches: int
    """Delivered, of all lives."""
    replayed: int
    """Of those, the ones that came by replay."""
    healed: int
    """Holes that replay filled."""
    lost: int
    """Batches lost for good."""
    resets: int
    """Lives that began, beyond the first."""
    reconnects: int


class LiveResult(Struct, frozen=True, kw_only=True):
    """A fleet that ran along the clock."""

    settings: dict[str, str | int | float | bool | None]
    policies: list[PolicyResult]
    """One."""
    streams: list[StreamResult]
    faults: dict[str, int]
    """How often each recurring fault struck."""
    seconds: float
    """Of the clock."""
    behind: float
    """Seconds of the clock by which the fleet was late, at most."""
