"""`kvevents.sim.results`, `sampling` and `metrics`: figures that can be counted by hand."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvevents.index import PrefixIndex
from kvevents.sim.results import FIRST_INTERVAL, MAX_SAMPLES, Distribution, RequestMetrics, Sampler, SimulatedWorker
from kvevents.sim.settings import FleetSettings
from kvevents.sim.simulated_engine import Job, Lookup
from sim_cases import request

# --- distributions


def test_of_nothing_there_is_no_distribution() -> None:
    assert Distribution.of([]) is None


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=300))
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(values: list[int]) -> None:
    found = Distribution.of(values)
    assert found is not None
    for share, value in ((50, found.p50), (90, found.p90), (99, found.p99)):
        reaching = [
            one for one in values if Fraction(sum(other <= one for other in values), len(values)) >= Fraction(share, 100)
        ]
        assert value == min(reaching)
    assert found.max == max(values)
    assert found.mean == pytest.approx(sum(values) / len(values))


@pytest.mark.parametrize(
    ("count", "expected"), [(1, (1, 1, 1, 1)), (2, (1, 2, 2, 2)), (100, (50, 90, 99, 100)), (200, (100, 180, 198, 200))]
)
def test_percentiles_of_the_first_numbers(count: int, expected: tuple[int, ...]) -> None:
    found = Distribution.of(range(1, count + 1))
    assert found is not None
    assert (found.p50, found.p90, found.p99, found.max) == expected


# --- metrics


@given(st.integers(1, 60), st.integers(0, 60), st.integers(0, 60), st.integers(1, 8))
def test_a_promise_is_broken_where_less_is_found_than_could_have_been(
    prompt: int, cached: int, promised: int, size: int
) -> None:
    """The last token of a prompt, and so its block, is not predicted as cached."""
    metrics = RequestMetrics()
    cached = min(cached, prompt - 1) // size * size
    metrics.record_lookup(Lookup(Job(request([1])), prompt, cached, 0, True), promised, size)
    assert (metrics.prompt_tokens, metrics.cached_tokens, metrics.predicted_tokens) == (prompt, cached, promised)
    best = max(tokens for tokens in range(0, prompt, size))
    assert metrics.overpredictions == (cached < min(promised, best))


def test_times_of_an_answer() -> None:
    """Latency from arrival; a token's time from the first one on, which an answer of one token does not have."""
    metrics = RequestMetrics()
    metrics.record_answer(10.0, 4.0, 6.0, 5)
    metrics.record_answer(11.0, 4.0, 11.0, 1)
    assert list(metrics.latency) == [6.0, 7.0]
    assert list(metrics.tpot) == [1.0]
    assert (metrics.output_tokens, metrics.last) == (6, 11.0)


# --- samples


@settings(max_examples=20)
@given(st.integers(1, 4 * MAX_SAMPLES), st.integers(0, 50))
def test_samples_are_bounded_and_lose_no_token(count: int, each: int) -> None:
    """However long a run is: fewer than the limit, in order, at ever greater intervals, and their tokens add up."""
    metrics = RequestMetrics()
    samples = Sampler(PrefixIndex(), [])
    now, times, intervals = 0.0, [], [FIRST_INTERVAL]
    for _ in range(count):
        metrics.prompt_tokens += each
        metrics.cached_tokens += each // 2
        samples.take(now, metrics)
        times.append(now)
        intervals.append(samples.interval)
        now += samples.interval
        assert len(samples.taken) < MAX_SAMPLES
    assert {sample.at for sample in samples.taken} <= {*times}
    assert all(before.at < after.at for before, after in pairwise(samples.taken))
    assert samples.taken[-1].at == times[-1]
    assert sum(sample.prompt_tokens for sample in samples.taken) == metrics.prompt_tokens
    assert sum(sample.cached_tokens for sample in samples.taken) == metrics.cached_tokens
    assert all(after in (before, 2 * before) for before, after in pairwise(intervals))


def test_a_sample_counts_what_engines_have_to_do() -> None:
    worker = SimulatedWorker(("engine", 0), FleetSettings(engines=1, blocks=50, block_size=4, max_num_seqs=2))
    worker.start()
    for _ in range(3):
        worker.engine.submit(request(range(8), 3))
    worker.engine.begin()
    worker.engine.end()
    samples = Sampler(PrefixIndex(), [worker])
    samples.take(0.0, RequestMetrics())
    assert [(sample.running, sample.waiting, sample.blocks) for sample in samples.taken] == [(2, 1, 0)]


def test_a_worker_counts_through_all_incarnations() -> None:
    worker = SimulatedWorker(("engine", 0), FleetSettings(engines=1, blocks=50, block_size=4))
    for expected in (8, 16):
        worker.start()
        worker.engine.submit(request(range(8)))
        worker.engine.begin()
        worker.engine.end()
        worker.record_lookup(8, 0)
        assert worker.computed == expected
        worker.stop()
    worker.seconds = 3.0
    result = worker.result(12.0)
    assert (result.requests, result.prompt_tokens, result.busy, result.restarts) == (2, 16, 0.25, 1)
    assert worker.result(0.0).busy == 0.0
    assert worker.result(2.0).busy == 1.0
