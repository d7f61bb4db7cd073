"""Each routing policy chooses one of the candidates by its documented rule."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import FrozenInstanceError
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.client.schemas import SelectRequest
from kvevents.errors import ConfigError
from kvevents.routing import (
    POLICIES,
    Candidate,
    Choice,
    Load,
    Policy,
    PrefixAwareSettings,
    Prompt,
    SessionAffinity,
    SessionAffinitySettings,
    Worker,
    policy,
)
from kvevents.routing.policies import Scorer
from kvevents.routing.weights import TIER_WEIGHTS, TRUST_WEIGHTS

PROMPT = Prompt(1000)


def candidate(place: int, load: Load | None = None, trust: str = "EXACT", uncertain: int = 0, **tiers: int) -> Candidate:
    return Candidate((f"w{place}", 0), load or Load(), max(tiers.values(), default=0), tiers, trust, (), uncertain)


def waiting(tokens: int, requests: int = 1) -> Load:
    return Load(requests, tokens)


def decoding(requests: int) -> Load:
    return Load(requests, 0, requests, 1000 * requests)


def chosen(one: Policy, *candidates: Candidate, prompt: Prompt = PROMPT) -> str:
    return one.choose(prompt, candidates).chosen.worker[0]


def sessions_of(one: Policy, fleet: Sequence[Candidate], count: int = 1000) -> dict[str, Worker]:
    names = [f"session-{number}" for number in range(count)]
    return {name: one.choose(Prompt(100, name), fleet).chosen.worker for name in names}


loads = st.builds(Load, st.integers(0, 50), st.integers(0, 100_000), st.integers(0, 50), st.integers(0, 100_000))
lengths = st.integers(0, 1500)
states = st.sampled_from([*TRUST_WEIGHTS, "UNKNOWN"])


@st.composite
def fleets(draw: st.DrawFn, min_size: int = 1) -> list[Candidate]:
    rows = draw(st.lists(st.tuples(loads, states, lengths, lengths, lengths), min_size=min_size, max_size=8))
    return [
        candidate(place, load, trust, gpu=gpu, cpu=gpu + cpu, disk=gpu + cpu + disk)
        for place, (load, trust, gpu, cpu, disk) in enumerate(rows)
    ]


# --- all policies


@given(st.sampled_from(sorted(POLICIES)), fleets(), st.integers(0, 2000), st.none() | st.text(), st.integers(0, 9))
def test_every_policy_chooses_a_candidate(
    name: str, fleet: list[Candidate], length: int, session: str | None, seed: int
) -> None:
    """It makes the same choice again with the same seed."""
    choices = [policy(name, seed).choose(Prompt(length, session), fleet) for _ in range(2)]
    assert choices[0].chosen in fleet
    assert choices[0] == choices[1]


@pytest.mark.parametrize("name", ["random", "round-robin", "least-loaded", "session-affinity", "prefix-aware"])
def test_routers_that_start_together_choose_different_workers(name: str) -> None:
    """Many routers that start at once without any state begin with different workers, unless they share a seed."""
    fleet = [candidate(place) for place in range(8)]
    first_choices = Counter(chosen(policy(name, seed), *fleet) for seed in range(400))
    assert len(first_choices) == 8
    assert max(first_choices.values()) < 100
    assert len({chosen(policy(name), *fleet) for _ in range(100)}) > 1


def test_the_table_maps_each_name_to_its_policy() -> None:
    assert {name: (created.name, created.uses_index) for name, create in POLICIES.items() for created in [create(1)]} == {
        name: (name, name == "prefix-aware")
        for name in ("random", "round-robin", "least-loaded", "session-affinity", "prefix-aware")
    }


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        (
            "fastest",
            {},
            "invalid policy 'fastest': expected one of random, round-robin, least-loaded, session-affinity, prefix-aware",
        ),
        ("random", {"speed": 1}, "invalid setting 'speed' of random: expected one of (none)"),
        ("least-loaded", {"speed": 1}, "invalid setting 'speed' of least-loaded: expected one of by, sample"),
        ("least-loaded", {"by": "age"}, "invalid by 'age': expected one of requests, tokens"),
        ("least-loaded", {"sample": -1}, "invalid sample -1: expected an integer of at least 0"),
        ("session-affinity", {"factor": 0.9}, "invalid factor 0.9: expected a number of at least 1"),
        ("session-affinity", {"spare": 1.5}, "invalid spare 1.5: expected an integer of at least 0"),
        ("prefix-aware", {"wait_weight": -1.0}, "invalid wait_weight -1.0: expected a finite number of at least 0"),
        ("prefix-aware", {"load_weight": math.inf}, "invalid load_weight inf: expected a finite number of at least 0"),
        ("prefix-aware", {"decoding_weight": -1}, "invalid decoding_weight -1: expected a finite number of at least 0"),
        ("prefix-aware", {"context_weight": math.nan}, "invalid context_weight nan: expected a finite number of at least 0"),
        ("prefix-aware", {"tiers": {"gpu": 2}}, "invalid tiers['gpu'] 2: expected a number from 0 to 1"),
        ("prefix-aware", {"trust": {"EXACT": -1}}, "invalid trust['EXACT'] -1: expected a number from 0 to 1"),
        (
            "prefix-aware",
            {"trust": {"exact": 1}},
            "invalid key of trust 'exact': expected one of CONNECTING, REPLAYING, EXACT, DEGRADED",
        ),
        ("prefix-aware", {"guard": 0.5}, "invalid guard 0.5: expected a number of at least 1"),
        ("prefix-aware", {"guard_requests": -1}, "invalid guard_requests -1: expected an integer of at least 0"),
        ("prefix-aware", {"tie": "last"}, "invalid tie 'last': expected one of rotate, random, first"),
        ("prefix-aware", {"sample": True}, "invalid sample True: expected an integer of at least 0"),
    ],
)
def test_an_error_names_the_invalid_setting(name: str, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        policy(name, **settings)
    assert str(caught.value).startswith(sentence)


def test_settings_cannot_change() -> None:
    with pytest.raises(FrozenInstanceError):
        PrefixAwareSettings().guard = 3.0  # type: ignore[misc]


def test_weights_are_those_of_the_service() -> None:
    """Both use one table."""
    request = SelectRequest(model="m", tokens=[])
    assert (request.tiers, request.trust) == (TIER_WEIGHTS, TRUST_WEIGHTS)


# --- basic policies


def test_random_chooses_all_workers_equally_often() -> None:
    one, fleet = policy("random", 1), [candidate(place) for place in range(4)]
    counts = Counter(chosen(one, *fleet) for _ in range(4000))
    assert all(900 < counts[f"w{place}"] < 1100 for place in range(4))


@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 99))
def test_round_robin_is_fair(workers: int, requests: int, seed: int) -> None:
    """At any time no worker is more than one request ahead, whatever the loads."""
    one, counts = policy("round-robin", seed), Counter[str]()
    for number in range(requests):
        counts[chosen(one, *[candidate(place, waiting(number * place)) for place in range(workers)])] += 1
        assert max(counts.values()) - min(counts[f"w{place}"] for place in range(workers)) <= 1


def test_round_robin_continues_when_workers_come_and_go() -> None:
    """An absent worker misses its turns, and no other worker is chosen twice in a row."""
    one, fleet = policy("round-robin", 2), [candidate(place) for place in range(4)]
    taken = [chosen(one, *(fleet[1:] if step % 2 else fleet)) for step in range(40)]
    assert all(first != second for first, second in pairwise(taken))
    assert min(Counter(taken).values()) >= 8


@given(fleets())
def test_least_loaded_has_the_fewest_requests(fleet: list[Candidate]) -> None:
    choice = policy("least-loaded", 1, by="requests").choose(PROMPT, fleet)
    assert choice.chosen.load.requests == min(one.load.requests for one in fleet)


def test_least_loaded_by_tokens() -> None:
    """One long prompt is more work than two short prompts. A request after its first token counts as 256 tokens."""
    fleet = [candidate(0, waiting(5000)), candidate(1, waiting(600, 2)), candidate(2, decoding(3))]
    assert chosen(policy("least-loaded", 1, by="requests"), *fleet) == "w0"
    assert chosen(policy("least-loaded", 1), *fleet) == "w1"


def test_two_choices_take_the_less_loaded_of_two() -> None:
    """The policy never takes the most loaded worker, and not always the least loaded worker, to which all routers would
    send."""
    one, fleet = policy("least-loaded", 1, sample=2), [candidate(place, waiting(place, place)) for place in range(5)]
    counts = Counter(chosen(one, *fleet) for _ in range(1000))
    assert counts["w4"] == 0
    assert 300 < counts["w0"] < 500
    assert chosen(one, fleet[0]) == "w0"


# --- sessions


def test_a_session_has_the_same_worker_everywhere() -> None:
    """The order of the candidates and the seed do not matter, so routers agree without communication."""
    fleet = [candidate(place) for place in range(8)]
    assert sessions_of(policy("session-affinity", 1), fleet) == sessions_of(policy("session-affinity", 2), fleet[::-1])


@pytest.mark.parametrize("workers", [2, 8, 32])
def test_sessions_are_spread_and_only_a_fair_share_moves(workers: int) -> None:
    """A worker that joins takes about its share of the sessions, and one that leaves gives up only its own."""
    one, fleet = policy("session-affinity"), [candidate(place) for place in range(workers + 1)]
    before, after = sessions_of(one, fleet[:-1]), sessions_of(one, fleet)
    moved = {session for session in before if before[session] != after[session]}
    assert {after[session] for session in moved} <= {fleet[-1].worker}
    expected = 1000 / (workers + 1)
    assert len(moved) == pytest.approx(expected, abs=4 * math.sqrt(expected))
    for count in Counter(after.values()).values():
        assert count == pytest.approx(expected, abs=5 * math.sqrt(expected))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=200), st.integers(1, 8), st.floats(1, 3), st.integers(0, 4))
def test_no_worker_exceeds_the_bound_of_session_affinity(sessions: list[int], workers: int, factor: float, spare: int) -> None:
    """Even with few sessions, no worker has more than `factor` times the mean, or `spare`."""
    one = SessionAffinity(1, SessionAffinitySettings(factor, spare))
    requests = [0] * workers
    for session in sessions:
        fleet = [candidate(place, Load(requests=count)) for place, count in enumerate(requests)]
        most = max(spare, math.ceil(factor * (sum(requests) + 1) / workers))
        place = int(chosen(one, *fleet, prompt=Prompt(1, str(session)))[1:])
        requests[place] += 1
        assert requests[place] <= most


def test_the_session_of_a_full_worker_moves_and_returns() -> None:
    """It always moves to the same other worker, until its own worker has room again. Without a bound it does not move."""
    one, fleet = policy("session-affinity"), [candidate(place) for place in range(4)]
    own = one.choose(Prompt(1, "s"), fleet)
    full = [candidate(place, Load(requests=50 * (each is own.chosen))) for place, each in enumerate(fleet)]
    fallback = one.choose(Prompt(1, "s"), full)
    assert fallback.chosen.worker != own.chosen.worker
    assert "too many requests" in fallback.reason
    assert fallback == one.choose(Prompt(1, "s"), full)
    assert one.choose(Prompt(1, "s"), fleet) == own
    assert policy("session-affinity", factor=math.inf).choose(Prompt(1, "s"), full).chosen.worker == own.chosen.worker


def test_without_a_session_the_fewest_requests_count() -> None:
    """Equal workers are chosen in rotation."""
    one, fleet = policy("session-affinity", 1), [candidate(0, waiting(1)), candidate(1), candidate(2)]
    assert sorted(chosen(one, *fleet) for _ in range(4)) == ["w1", "w1", "w2", "w2"]


# --- caches


weights = st.sampled_from([0.0, 0.15, 1.0])


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8), loads, weights, weights)
def test_at_equal_load_the_longest_holder_is_chosen(
    matched_tokens: list[int], load: Load, wait_weight: float, load_weight: float
) -> None:
    fleet = [candidate(place, load, gpu=tokens) for place, tokens in enumerate(matched_tokens)]
    one = policy("prefix-aware", 1, wait_weight=wait_weight, load_weight=load_weight)
    assert one.choose(PROMPT, fleet).chosen.tokens == max(matched_tokens)


def test_a_cache_is_worth_waiting_for_longer_than_computing_takes() -> None:
    """A worker with waiting requests holds 600 of 1,000 tokens; the other worker is idle.

    The waiting work is twice the mean. So 0.1, and 0.15 for each 1,000 tokens, outweigh 0.6 of a prompt from 3,334 tokens on.
    """
    one = policy("prefix-aware", 1)
    assert chosen(one, candidate(0, waiting(3333), gpu=600), candidate(1)) == "w0"
    assert chosen(one, candidate(0, waiting(3334), gpu=600), candidate(1)) == "w1"


def test_an_idle_worker_is_preferred_to_one_that_holds_little() -> None:
    """This holds even if the fleet has little work. Otherwise all prompts with a short common prefix would go to one worker."""
    fleet = [candidate(0, decoding(1), gpu=100), candidate(1)]
    assert chosen(policy("prefix-aware", 1), *fleet) == "w1"
    assert chosen(policy("prefix-aware", 1, load_weight=0.0), *fleet) == "w0"


def test_with_a_weight_of_1_a_cache_is_worth_waiting_for_as_long_as_computing_takes() -> None:
    """The computing time is that of this request alone. A request after its first token counts 256 tokens."""
    one = policy("prefix-aware", 1, wait_weight=1.0, load_weight=0.0)
    assert chosen(one, candidate(0, waiting(599), gpu=600), candidate(1)) == "w0"
    assert chosen(one, candidate(0, waiting(601), gpu=600), candidate(1)) == "w1"
    assert chosen(one, candidate(0, decoding(2), gpu=600), candidate(1)) == "w0"
    assert chosen(one, candidate(0, decoding(3), gpu=600), candidate(1)) == "w1"


def test_one_small_request_in_an_idle_fleet_does_not_cost_the_cache() -> None:
    """The cache would be given up if loads were only divided by the mean, since one request is many times the mean."""
    fleet = [candidate(0, waiting(20), gpu=900), *[candidate(place) for place in range(1, 8)]]
    assert chosen(policy("prefix-aware", 1), *fleet) == "w0"
    assert chosen(policy("prefix-aware", 1, wait_weight=0.0, load_weight=0.25), *fleet) != "w0"


def test_a_score_follows_the_documented_formula() -> None:
    """The load is work by length: 100 waiting + 2 decoding at 50 + 2,000 of context at 0.1 = 400 of 1,000, with weight 0.5."""
    options: dict[str, Any] = {"wait_weight": 0.5, "load_weight": 0.0, "decoding_weight": 50, "context_weight": 0.1}
    one = policy("prefix-aware", 1, **options, tiers={"cpu": 0.6})
    fleet = [candidate(0, Load(3, 100, 2, 2000), "DEGRADED", gpu=400, cpu=600, disk=600), candidate(1)]
    scored = one.choose(PROMPT, fleet).scored
    assert scored[0].uncached == pytest.approx(1 - 0.5 * (400 + 0.6 * 200) / 1000)
    assert scored[0].load == pytest.approx(0.5 * 400 / 1000)
    assert [entry.score for entry in scored] == pytest.approx([0.74 + 0.2, 1.0])
    assert scored[0].worker == ("w0", 0)


def test_relative_loads_follow_the_documented_formula() -> None:
    """The load is the work divided by the mean, as in `/v1/select`."""
    one = policy("prefix-aware", 1, wait_weight=0.0, load_weight=0.5)
    scored = one.choose(PROMPT, [candidate(0, waiting(100)), candidate(1, waiting(300))]).scored
    assert [entry.load for entry in scored] == pytest.approx([0.25, 0.75])


def test_both_parts_of_the_load_are_added() -> None:
    one = policy("prefix-aware", 1, wait_weight=0.1, load_weight=0.5)
    scored = one.choose(PROMPT, [candidate(0, waiting(100)), candidate(1, waiting(300))]).scored
    assert [entry.load for entry in scored] == pytest.approx([0.25 + 0.01, 0.75 + 0.03])


def test_tiers_have_their_weights() -> None:
    """300 tokens on the GPU count more than 350 in host memory and less than 400; weights can reverse that."""
    one = policy("prefix-aware", 1)
    assert chosen(one, candidate(0, gpu=300), candidate(1, gpu=0, cpu=350)) == "w0"
    assert chosen(one, candidate(0, gpu=300), candidate(1, gpu=0, cpu=400)) == "w1"
    assert chosen(one, candidate(0, gpu=300), candidate(1, disk=550)) == "w0"
    assert chosen(policy("prefix-aware", 1, tiers={"cpu": 0.7}), candidate(0, gpu=300), candidate(1, gpu=0, cpu=400)) == "w0"
    assert chosen(policy("prefix-aware", 1, tiers={"disk": 0.9}), candidate(0, gpu=300), candidate(1, disk=550)) == "w1"
    assert chosen(policy("prefix-aware", 1, tiers={"NVFS9": 0.9}), candidate(0, gpu=300), candidate(1, NVFS9=350)) == "w1"


@given(st.dictionaries(st.sampled_from(["gpu", "cpu", "disk", "other"]), st.integers(0, 30)), st.integers(0, 20), st.randoms())
def test_each_token_counts_with_the_best_tier_that_holds_it(tiers: dict[str, int], whole: int, random: Any) -> None:
    """The score equals a count token by token, for any weights."""
    weights = {tier: random.random() for tier in ("gpu", "cpu", "disk")}
    tokens = max(tiers.values(), default=0) + random.randrange(5)
    worth = 0.0
    for place in range(min(tokens, whole)):
        worth += max([weights.get(tier, 0) for tier, reached in tiers.items() if place < reached] + [min(weights.values())])
    scorer = Scorer(weights, 0.0, 0.0, math.inf, 0, 0.0)
    ((score, uncached, load, hot),), best = scorer.weigh(whole, [tokens], [tokens], [tiers], [1.0], [0.0], [0])
    assert 1 - uncached == pytest.approx(worth / max(whole, 1))
    assert (score, load, hot, best) == (uncached, 0.0, False, [0])


@pytest.mark.parametrize(
    ("trust", "worker"), [("EXACT", "w0"), ("REPLAYING", "w0"), ("DEGRADED", "w1"), ("STALE", "w1"), ("?", "w1")]
)
def test_trust_scales_what_a_worker_holds(trust: str, worker: str) -> None:
    """800 tokens of a worker with this trust compete with 500 tokens of an EXACT one. An unknown state counts as 0."""
    assert chosen(policy("prefix-aware", 1), candidate(0, trust=trust, gpu=800), candidate(1, gpu=500)) == worker


@pytest.mark.parametrize(
    ("trust", "uncertain", "saved"),
    [
        ("EXACT", 0, 800.0),
        ("EXACT", 100, 700 + 0.5 * 100),
        ("EXACT", 800, 0.5 * 800),
        ("REPLAYING", 100, 0.8 * 700 + 0.5 * 100),
        ("DEGRADED", 100, 0.5 * 800),
        ("STALE", 100, 0.0),
    ],
)
def test_tokens_that_might_be_gone_cost_only_their_own_credit(trust: str, uncertain: int, saved: float) -> None:
    """Uncertain tokens count as tokens of a DEGRADED worker. Certain tokens have the weight of the stream."""
    one = candidate(0, trust=trust, uncertain=uncertain, gpu=800)
    assert policy("prefix-aware", 1).choose(PROMPT, [one]).scored[0].uncached == pytest.approx(1 - saved / 1000)


def test_the_weight_of_tokens_that_might_be_gone_is_that_of_degraded_streams() -> None:
    one = candidate(0, uncertain=100, gpu=800)
    scored = policy("prefix-aware", 1, trust={"DEGRADED": 0.9}).choose(PROMPT, [one]).scored
    assert scored[0].uncached == pytest.approx(1 - (700 + 0.9 * 100) / 1000)


def test_weights_of_trust_are_settings() -> None:
    fleet = [candidate(0, trust="STALE", gpu=800), candidate(1, gpu=500)]
    assert chosen(policy("prefix-aware", 1, trust={"STALE": 0.9}), *fleet) == "w0"


@given(fleets(min_size=2), st.floats(1, 5), st.integers(0, 20))
def test_the_guard_takes_credit_from_hot_workers_only(fleet: list[Candidate], guard: float, guard_requests: int) -> None:
    """A worker is hot if it has more than `guard` times the mean of the others, and more than `guard_requests`."""
    choice = policy("prefix-aware", 1, guard=guard, guard_requests=guard_requests).choose(PROMPT, fleet)
    total = sum(one.load.requests for one in fleet)
    for entry in choice.scored:
        requests = entry.candidate.load.requests
        others = (total - requests) / (len(fleet) - 1)
        if requests != pytest.approx(guard * others):
            assert entry.hot == (requests > guard * others and requests > guard_requests)
        assert entry.uncached == 1.0 or not entry.hot


@pytest.mark.parametrize(("guard", "workers", "most"), [(2.0, 3, 20), (1.0, 4, 12), (math.inf, 1, 40)])
def test_a_popular_prefix_spreads(guard: float, workers: int, most: int) -> None:
    """With a guard, many of 40 requests that never end go to other workers once the holder has more than its share."""
    one = policy("prefix-aware", 1, decoding_weight=0, guard=guard, guard_requests=4)
    holding, spread = {"w0"}, Counter[str]()
    for _ in range(40):
        fleet = [candidate(place, decoding(spread[f"w{place}"]), gpu=900 * (f"w{place}" in holding)) for place in range(4)]
        worker = chosen(one, *fleet)
        spread[worker] += 1
        holding.add(worker)
    assert len(holding) == workers
    assert max(spread.values()) <= most


def test_one_worker_alone_is_never_hot() -> None:
    assert not policy("prefix-aware", 1, guard_requests=0).choose(PROMPT, [candidate(0, decoding(99), gpu=9)]).scored[0].hot


def test_ties_rotate() -> None:
    """Workers with equally long matches are chosen in rotation. The other rules for ties are settings."""
    one, holders = policy("prefix-aware", 3), [candidate(place, gpu=500 * (place < 3)) for place in range(5)]
    taken = [chosen(one, *holders) for _ in range(9)]
    assert set(taken[:3]) == {"w0", "w1", "w2"}
    assert taken == taken[:3] * 3
    assert {chosen(policy("prefix-aware", seed, tie="first"), *holders) for seed in range(9)} == {"w0"}
    assert len({chosen(policy("prefix-aware", seed, tie="random"), *holders) for seed in range(30)}) == 3


def test_among_equal_scores_the_worker_that_computes_less_is_chosen() -> None:
    fleet = [candidate(0), candidate(1, waiting(500), gpu=500)]
    assert {chosen(policy("prefix-aware", seed), *fleet) for seed in range(9)} == {"w1"}


def test_a_sample_contains_the_longest_holder_and_random_others() -> None:
    """Otherwise many routers would send prompts that no worker holds to the single least loaded worker."""
    one = policy("prefix-aware", 1, sample=2)
    fleet = [candidate(place, waiting(100 * place), gpu=900 * (place == 9)) for place in range(10)]
    for _ in range(50):
        sampled = one.choose(PROMPT, fleet).scored
        assert len({entry.worker for entry in sampled}) == 3
        assert ("w9", 0) in {entry.worker for entry in sampled}
    unheld = [candidate(place, waiting(100 * place)) for place in range(10)]
    assert len({chosen(one, *unheld) for _ in range(200)}) > 4
    assert len(one.choose(PROMPT, fleet[:3]).scored) == 3


def test_an_empty_prompt_is_routed_by_load() -> None:
    assert (
        chosen(policy("prefix-aware", 1), candidate(0, waiting(2), gpu=9), candidate(1, waiting(1)), prompt=Prompt(0)) == "w1"
    )


def test_a_choice_has_the_number_of_equal_candidates() -> None:
    choice: Choice = policy("prefix-aware", 1).choose(PROMPT, [candidate(0), candidate(1), candidate(2, waiting(5))])
    assert (choice.equal, choice.reason) == (2, "the next in rotation of {equal} equally good ones of {candidates}")
