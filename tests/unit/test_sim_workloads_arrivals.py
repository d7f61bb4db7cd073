"""`kvevents.sim.workload_generators`: the times at which requests arrive."""

from __future__ import annotations

from itertools import islice, pairwise
from random import Random
from statistics import fmean, pstdev

import pytest

from kvevents.errors import ConfigError
from kvevents.sim.requests import Request, Text
from kvevents.sim.workloads import ARRIVALS, arrivals, rescaled


def gaps(name: str, variation: float = 2.0, seed: int = 1) -> list[float]:
    times = [0.0, *islice(arrivals(name, 50.0, Random(seed), variation), 20_000)]
    return [after - before for before, after in pairwise(times)]


@pytest.mark.parametrize(
    ("name", "variation", "expected"), [("constant", 2, 0), ("poisson", 2, 1), ("bursty", 1, 1), ("bursty", 3, 3)]
)
def test_arrivals_have_the_requested_rate_and_variation(name: str, variation: float, expected: float) -> None:
    """The mean gap is one over the rate; the coefficient of variation distinguishes the processes."""
    found = gaps(name, variation)
    assert min(found) >= 0
    assert fmean(found) == pytest.approx(1 / 50, rel=0.06)
    assert pstdev(found) / fmean(found) == pytest.approx(expected, rel=0.1, abs=1e-6)


@pytest.mark.parametrize("name", ARRIVALS)
def test_a_seed_gives_the_same_times(name: str) -> None:
    assert gaps(name) == gaps(name)
    assert (gaps(name) == gaps(name, seed=2)) == (name == "constant")


@pytest.mark.parametrize(
    ("name", "rate", "variation", "message"),
    [
        ("fast", 1.0, 1.0, "expected constant, poisson, bursty"),
        ("poisson", 0.0, 1.0, "invalid rate 0.0"),
        ("poisson", float("inf"), 1.0, "invalid rate inf"),
        ("bursty", 1.0, 0.0, "invalid variation 0.0"),
    ],
)
def test_invalid_settings_raise(name: str, rate: float, variation: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arrivals(name, rate, Random(0), variation)


def test_another_speed_of_a_trace_changes_only_its_times() -> None:
    requests = [Request(at, Text([(1, 5)]), Text([(2, 1)]), "s", "l", "t") for at in (0.0, 1.0, 4.0)]
    faster = list(rescaled(requests, 2.0))
    assert [request.at for request in faster] == [0.0, 0.5, 2.0]
    assert [(one.prompt, one.output, one.session, one.lora, one.salt) for one in faster] == [
        (requests[0].prompt, requests[0].output, "s", "l", "t")
    ] * 3
    with pytest.raises(ConfigError, match="invalid speed 0"):
        rescaled(requests, 0)
