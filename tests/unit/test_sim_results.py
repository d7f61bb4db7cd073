"""`kvevents.sim.results`: distributions, metrics and counters that can be calculated by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.sim.results import Distribution, RequestMetrics, SimulatedWorker
from kvevents.sim.settings import FleetSettings
from kvevents.sim.simulated_engine import Job, Lookup
from sim_cases import request

# --- distributions


def test_without_values_there_is_no_distribution() -> None:
    assert Distribution.from_values([]) is None


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=300))
def test_a_percentile_is_the_least_value_with_that_share_of_values_at_or_below_it(values: list[int]) -> None:
    found = Distribution.from_values(values)
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
    found = Distribution.from_values(range(1, count + 1))
    assert found is not None
    assert (found.p50, found.p90, found.p99, found.max) == expected


# --- metrics


@given(st.integers(1, 60), st.integers(0, 60), st.integers(0, 60), st.integers(1, 8))
def test_an_overprediction_is_counted_if_fewer_tokens_are_cached_than_predicted(
    prompt: int, cached: int, predicted: int, size: int
) -> None:
    """The last token of a prompt, and so its block, cannot be cached."""
    metrics = RequestMetrics()
    cached = min(cached, prompt - 1) // size * size
    metrics.record_lookup(Lookup(Job(request([1]), size, ""), prompt, cached, 0, True), predicted, size)
    assert (metrics.prompt_tokens, metrics.cached_tokens, metrics.predicted_tokens) == (prompt, cached, predicted)
    best = max(tokens for tokens in range(0, prompt, size))
    assert metrics.overpredictions == (cached < min(predicted, best))


def test_latency_and_time_per_token_are_recorded_for_each_answer() -> None:
    """Latency begins at the arrival; the time per token begins at the first token, and an answer of one token has none."""
    metrics = RequestMetrics()
    metrics.record_answer(10.0, 4.0, 6.0, 5)
    metrics.record_answer(11.0, 4.0, 11.0, 1)
    assert list(metrics.latency) == [6.0, 7.0]
    assert list(metrics.tpot) == [1.0]
    assert (metrics.output_tokens, metrics.last) == (6, 11.0)


# --- workers


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
