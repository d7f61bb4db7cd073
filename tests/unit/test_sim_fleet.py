"""`kvevents.sim.simulated_fleet`: whole runs with every policy, in every dialect, and through restarts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvevents.errors import ConfigError
from kvevents.routing import Load, policy
from kvevents.sim.requests import Request
from kvevents.sim.results import PolicyResult
from kvevents.sim.routers import POLICIES
from kvevents.sim.settings import FleetSettings
from kvevents.sim.simulated_fleet import REQUESTS_PER_PROGRESS, Progress, SimulatedFleet, simulate
from sim_cases import conversations, fleet_of, play, request

SMALL = {"engines": 3, "blocks": 70, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 64}
"""So little memory that blocks are evicted and sequences preempted frequently."""
TENANTS = {"salts": (None, "one", "two")}
ADAPTERS = {"loras": (None, "adapter-1", "adapter-2")}


def fleet_settings(**given: object) -> FleetSettings:
    return FleetSettings(**(SMALL | given))  # type: ignore[arg-type]


def check_totals(result: PolicyResult, requests: list[Request]) -> None:
    """Check what must hold for any finished run without a restart."""
    assert result.requests == len(requests) == result.finished + result.refused
    assert (result.disagreements, result.unproven, result.retried, result.examples) == (0, 0, 0, [])
    assert result.checked == result.finished + result.preemptions
    assert sum(worker.requests for worker in result.workers) == result.finished
    assert sum(worker.prompt_tokens for worker in result.workers) == result.prompt_tokens
    assert sum(worker.cached_tokens for worker in result.workers) == result.cached_tokens
    assert sum(worker.preemptions for worker in result.workers) == result.preemptions
    if not result.refused:
        assert result.prompt_tokens == sum(len(one.prompt) for one in requests)
        answered = sum(len(one.output) for one in requests)
        assert result.output_tokens_per_second * result.seconds == pytest.approx(answered)
    assert result.hit_rate == result.cached_tokens / result.prompt_tokens
    assert 1 <= result.imbalance <= len(result.workers)
    assert all(0 < worker.busy <= 1 for worker in result.workers if worker.requests)
    assert result.ttft is not None
    assert result.latency is not None
    assert 0 < result.ttft.p50 <= result.ttft.p90 <= result.ttft.p99 <= result.ttft.max <= result.latency.max


@pytest.mark.parametrize("name", POLICIES)
def test_index_and_engines_agree_with_every_policy(name: str) -> None:
    requests = list(conversations(120, rate=60))
    result = simulate(fleet_settings(), name, requests)
    check_totals(result, requests)
    assert result.policy == name
    assert result.cached_tokens > 0
    assert result.preemptions > 0


@pytest.mark.parametrize(
    ("given", "within"),
    [
        ({"dialect": "vllm-0.9.1"}, {}),
        ({"dialect": "vllm-0.10.2", "host_blocks": 60}, {}),
        ({"dialect": "vllm-0.14"}, ADAPTERS),
        ({"dialect": "vllm-0.17"}, ADAPTERS | TENANTS),
        ({"dialect": "vllm-0.24", "window": 24, "blocks": 140}, ADAPTERS | TENANTS),
        ({"window": 10, "blocks": 140, "block_size": 3}, {}),
        ({"dialect": "sglang-0.5.9", "host_blocks": 60}, {}),
        ({"dialect": "sglang-0.5.22"}, ADAPTERS | TENANTS),
        ({"host_blocks": 200}, TENANTS),
        ({"engines": 2, "ranks": 2}, {}),
        ({"block_size": 1, "blocks": 300}, {}),
        ({"event_delay": 0.0}, {}),
        ({"event_delay": 5.0}, {}),
        ({"overlay": 1.0}, TENANTS),
        ({"overlay": 1.0, "event_delay": 2.0}, {}),
        ({"preset": "llama-3.1-8b-a100", "max_num_seqs": 1, "max_num_batched_tokens": 16}, {}),
    ],
    ids=str,
)
def test_index_and_engines_agree_with_every_kind_of_engine(
    given: dict[str, object], within: dict[str, tuple[str | None, ...]]
) -> None:
    """The engines differ in dialects, adapters and tenants, ranks, host memory, windows, and the delay of events."""
    requests = list(conversations(80, seed=1, rate=60, loras=within.get("loras", (None,)), salts=within.get("salts", (None,))))
    check_totals(simulate(fleet_settings(**given), "prefix-aware", requests), requests)


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_arguments_give_the_same_result(name: str) -> None:
    runs = [simulate(fleet_settings(seed=3), name, conversations(60, seed=2)) for _ in range(2)]
    assert runs[0] == runs[1]


def test_another_seed_gives_another_run_of_a_random_policy() -> None:
    first, second = (simulate(fleet_settings(seed=seed), "random", conversations(60)) for seed in (1, 2))
    assert first.workers != second.workers


def test_another_policy_may_be_given() -> None:
    given = simulate(fleet_settings(), "mine", conversations(40), chosen=lambda seed: policy("round-robin", seed))
    named = simulate(fleet_settings(), "round-robin", conversations(40))
    assert given.policy == "mine"
    assert given.workers == named.workers


@pytest.mark.parametrize("routers", [1, 3])
@pytest.mark.parametrize("name", ["prefix-aware", "least-loaded"])
def test_a_router_knows_only_its_own_requests_and_their_answers(name: str, routers: int) -> None:
    """After every action of a run it knows its requests in flight, the tokens predicted as not yet computed, and the answers
    begun."""
    fleet = fleet_of(fleet_settings(routers=routers), name)
    fleet.feed(conversations(40, rate=60))
    most = 0
    for _ in play(fleet):
        expected = {(router, worker): Load() for router in fleet.routers for worker in fleet.workers}
        for ticket in fleet._in_flight.values():
            assert ticket.decision is not None
            known, length = (ticket.router, ticket.decision.worker), len(ticket.request.prompt)
            load, begun = expected[known], ticket.first_at is not None
            expected[known] = Load(
                load.requests + 1,
                load.waiting_tokens + (0 if begun else length - ticket.decision.tokens),
                load.decoding + begun,
                load.decoding_tokens + length * begun,
            )
        assert {(router, worker): router.load(worker) for router, worker in expected} == expected
        for worker, simulated in fleet.workers.items():
            assert len(simulated.engine.jobs()) == sum(expected[router, worker].requests for router in fleet.routers)
        most = max(most, min(sum(load.requests for (one, _), load in expected.items() if one is r) for r in fleet.routers))
    assert most > 1
    assert fleet.done


def test_a_prompt_longer_than_a_cache_is_refused_and_reported_to_the_router() -> None:
    fleet = fleet_of(fleet_settings(engines=1), "least-loaded")
    fleet.feed([request(range(8)), request(range(300)), request(range(8), at=0.5)])
    for _ in play(fleet):
        pass
    result = fleet.result("least-loaded")
    assert (result.requests, result.finished, result.refused) == (3, 2, 1)
    assert [router.in_flight for router in fleet.routers] == [0] * len(fleet.routers)


def test_a_request_that_the_dialect_cannot_announce_ends_the_run() -> None:
    with pytest.raises(ConfigError, match="salts"):
        simulate(fleet_settings(dialect="vllm-0.9.1"), "random", [request([1], salt="tenant")])


def test_a_run_without_requests_has_a_result() -> None:
    result = simulate(fleet_settings(), "prefix-aware", [])
    assert (result.requests, result.seconds, result.hit_rate, result.ttft, result.imbalance) == (0, 0.0, 0.0, None, 1.0)
    assert result.output_tokens_per_second == 0.0


def test_progress_is_reported_at_intervals() -> None:
    reported: list[Progress] = []
    requests = list(conversations(3 * REQUESTS_PER_PROGRESS))
    simulate(fleet_settings(), "random", requests, progress=reported.append)
    assert [one.arrived for one in reported] == [REQUESTS_PER_PROGRESS, 2 * REQUESTS_PER_PROGRESS, 3 * REQUESTS_PER_PROGRESS]
    assert all(before.now <= after.now and before.finished <= after.finished for before, after in pairwise(reported))


def test_requests_are_generated_when_they_are_due() -> None:
    """A trace may be endless without using more memory: at most one request is taken ahead of its time."""
    taken: list[float] = []

    def stream() -> Iterator[Request]:
        for number in range(20):
            taken.append(number)
            yield request([number] * 5, at=float(number))

    fleet = fleet_of(fleet_settings())
    fleet.feed(stream())
    for _ in play(fleet):
        assert not taken or taken[-1] <= fleet.timeline.now + 1


# --- predictions


def test_an_overprediction_because_of_late_events_is_counted() -> None:
    """Within the delay, the index does not know that the first prompt was evicted; without a delay it does."""
    requests = [request([1] * 41), request([2] * 41, at=1.0), request([1] * 41, at=2.0)]
    for delay, predicted, overpredicted in ((1.5, 40, 1), (0.0, 0, 0)):
        result = simulate(fleet_settings(engines=1, blocks=11, event_delay=delay), "prefix-aware", requests)
        assert (result.predicted_tokens, result.overpredictions, result.cached_tokens) == (predicted, overpredicted, 0)


def test_the_overlay_predicts_cached_tokens_before_any_event() -> None:
    """The second of two equal prompts comes while the first is computed: all but its last block is predicted."""
    first = request([3] * 20)  # the index learns the block size from this store
    requests = [first, request([1] * 200, at=1.0), request([1] * 200, at=1.001)]
    results = [simulate(fleet_settings(engines=1, overlay=overlay), "prefix-aware", requests) for overlay in (0.0, 2.0)]
    assert [result.predicted_tokens for result in results] == [0, 196]
    assert [result.overpredictions for result in results] == [0, 0]


# --- restarts


def check_end(fleet: SimulatedFleet, requests: int) -> PolicyResult:
    """Check a finished run with restarts, in which no request is lost and no comparison fails, and return its result."""
    assert fleet.done
    result = fleet.result("any")
    assert (result.requests, result.finished + result.refused) == (requests, requests)
    assert (result.disagreements, result.examples) == (0, [])
    assert sum(worker.prompt_tokens for worker in result.workers) == result.prompt_tokens
    assert [router.in_flight for router in fleet.routers] == [0] * len(fleet.routers)
    return result


@pytest.mark.parametrize("down", [0.0, 0.3])
def test_an_engine_may_be_restarted_at_any_moment(down: float) -> None:
    """The restart comes between two actions of a run: the engine's requests are answered by others, or later by itself."""
    retried = 0
    for moment in range(150):
        fleet = fleet_of(fleet_settings(engines=2, seed=moment), "round-robin")
        fleet.feed(conversations(12, rate=60))
        actions = 0
        for actions in play(fleet):
            if actions == moment:
                fleet.restart(("engine-0", 0), down=down)
        result = check_end(fleet, 12)
        assert [worker.restarts for worker in result.workers] == [1 if moment <= actions else 0, 0]
        retried += result.retried
    assert retried > 100


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(0, 250), st.integers(0, 2), st.floats(0, 1)), min_size=1, max_size=6),
    st.sampled_from(["prefix-aware", "session-affinity", "approximate-tree"]),
    st.sampled_from(
        [{}, {"routers": 3}, {"window": 12, "blocks": 140}, {"host_blocks": 50}, {"event_delay": 0.5}, {"overlay": 0.5}]
    ),
)
def test_any_engines_may_be_restarted_at_any_moments(
    restarts: list[tuple[int, int, float]], name: str, given: dict[str, object]
) -> None:
    """If all of them restart at once, requests wait for the first engine that is up again."""
    fleet = fleet_of(fleet_settings(**given), name)
    fleet.feed(conversations(20, rate=60))
    for number in play(fleet):
        for moment, engine, down in restarts:
            if moment == number:
                fleet.restart((f"engine-{engine}", 0), down=down)
    check_end(fleet, 20)


def test_the_next_incarnation_announces_other_hashes_and_the_index_drops_the_old_ones() -> None:
    fleet = fleet_of(fleet_settings(engines=1), "random")
    worker = ("engine-0", 0)
    fleet.feed([request(range(20)), request(range(21), at=2.0)])
    hashes: list[set[int]] = []
    for _ in play(fleet):
        if fleet.timeline.now >= 1.0 and not hashes:
            hashes.append({block.hash for block in fleet.audit.index.blocks(worker)})
            fleet.restart(worker)
    hashes.append({block.hash for block in fleet.audit.index.blocks(worker)})
    assert [len(each_incarnation) for each_incarnation in hashes] == [5, 5]
    assert not hashes[0] & hashes[1]
    result = check_end(fleet, 2)
    assert (result.cached_tokens, result.checked, result.unproven) == (0, 2, 0)


def test_requests_while_no_engine_is_up_wait_for_the_first_that_is_up_again() -> None:
    fleet = fleet_of(fleet_settings(engines=2), "round-robin")
    fleet.feed([request([number] * 8, at=at) for number, at in enumerate((1.5, 1.6))])
    fleet.timeline.schedule_at(1.0, lambda: fleet.restart(("engine-0", 0), down=1.0))
    fleet.timeline.schedule_at(1.4, lambda: fleet.restart(("engine-1", 0), down=9.0))
    for _ in play(fleet):
        pass
    result = check_end(fleet, 2)
    assert [worker.requests for worker in result.workers] == [2, 0]
    assert 2.0 < result.seconds < 3.0
    assert result.ttft is not None
    assert result.ttft.max == pytest.approx(0.5, abs=0.1)


def test_a_retried_answer_reports_its_first_token_once() -> None:
    """The time to the first token is that of the first attempt; the latency is up to the end of the second one."""
    fleet = fleet_of(fleet_settings(engines=1), "random")
    fleet.feed([request(range(8), 30)])
    fleet.timeline.schedule_at(0.2, lambda: fleet.restart(("engine-0", 0), down=1.0))
    for _ in play(fleet):
        pass
    result = check_end(fleet, 1)
    assert result.retried == 1
    assert result.ttft is not None
    assert result.latency is not None
    assert result.ttft.max < 0.2
    assert result.latency.max > 1.2


def test_a_step_interrupted_by_a_restart_does_not_end_a_step_of_the_next_incarnation() -> None:
    """A request of one step takes a whole step again after a restart near its end."""
    whole = simulate(fleet_settings(engines=1), "random", [request(range(8))]).seconds
    fleet = fleet_of(fleet_settings(engines=1), "random")
    fleet.feed([request(range(8))])
    fleet.timeline.schedule_at(0.9 * whole, lambda: fleet.restart(("engine-0", 0)))
    for _ in play(fleet):
        pass
    assert check_end(fleet, 1).seconds == pytest.approx(1.9 * whole)


def test_an_engine_that_is_down_cannot_be_restarted_again() -> None:
    fleet = fleet_of(fleet_settings(engines=2), "random")
    fleet.feed(conversations(5))
    for _ in range(2):
        fleet.restart(("engine-0", 0), down=0.5)
    for _ in play(fleet):
        pass
    assert [worker.restarts for worker in check_end(fleet, 5).workers] == [1, 0]
