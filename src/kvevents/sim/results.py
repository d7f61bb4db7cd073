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
    """A lookup in which index and engine differ: a defect of the simulation or the index, not a result."""

    source: str
    rank: int
    incarnation: int
    """Of the engine, from 0."""
    seq: int
    """Sequence number of the batch of the step with the lookup."""
    position: int
    """Events of that batch before the lookup."""
    prompt: int
    """Tokens."""
    cached: int
    """Tokens that the engine found."""
    indexed: int
    """Tokens according to the index."""


class PolicyResult(Struct, frozen=True, kw_only=True):
    """A fleet under one policy."""

    policy: str
    requests: int
    finished: int
    refused: int
    """Requests longer than the cache."""
    retried: int
    """Requests that were routed again because their engine was restarted."""
    seconds: float
    """From the first arrival to the last answer, in the fleet's time."""
    prompt_tokens: int
    cached_tokens: int
    hit_rate: float
    """Cached tokens divided by all prompt tokens, 0 to 1, as the engines found them."""
    ttft: Distribution | None
    """Seconds from arrival to the first token."""
    latency: Distribution | None
    """Seconds from arrival to the last token."""
    tpot: Distribution | None
    """Seconds per token of the answer after the first."""
    output_tokens_per_second: float
    imbalance: float
    """Computed tokens of the busiest worker divided by the mean; 1 is even."""
    preemptions: int
    checked: int
    """Lookups of engines that were compared with the index after everything before them was delivered."""
    disagreements: int
    """Compared lookups in which index and engine differ."""
    unproven: int
    """Lookups that could not be compared, because batches before them were lost or in doubt."""
    predicted_tokens: int
    """Cached tokens that the index predicted when requests were routed; 0 for policies that do not use it."""
    overpredictions: int
    """Requests that found fewer cached tokens than predicted: blocks were evicted in between, or before it was announced."""
    batches: int
    events: int
    workers: list[WorkerResult]
    series: list[Sample]
    examples: list[Difference] = []
    """The first disagreements."""


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
    """Trust at the end, with the reason."""
    batches: int
    """Batches delivered, of all incarnations."""
    replayed: int
    """Batches delivered by replay."""
    healed: int
    """Gaps that replay filled."""
    lost: int
    """Batches that replay did not deliver."""
    resets: int
    """Incarnations after the first."""
    reconnects: int


class LiveResult(Struct, frozen=True, kw_only=True):
    """A fleet that ran in real time."""

    settings: dict[str, str | int | float | bool | None]
    policies: list[PolicyResult]
    """One."""
    streams: list[StreamResult]
    faults: dict[str, int]
    """Number of times that each recurring fault was injected."""
    seconds: float
    """Duration in real time."""
    behind: float
    """Largest delay of the fleet behind real time, in seconds."""
