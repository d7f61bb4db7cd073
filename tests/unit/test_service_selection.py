"""Selection of a worker: its cache compared with its load, trust, ties, and a sentence with the reason."""

from __future__ import annotations

import math
from collections import Counter, deque
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvevents import routing
from kvevents.client.reasons import Reason
from kvevents.client.schemas import Candidate, ScoredCandidate, Selection, SelectRequest, TrustStatus, WorkerMatch
from kvevents.routing import Ties, Worker, policy
from kvevents.routing.weights import DISTANCE_LOST, DISTANCE_SILENT
from kvevents.stream import TrustState
from kvevents_native._native import Loads
from native_selection import Standing, select

PROMPT = list(range(100))
EQUAL = 1e-9
"""Scores and shares that differ by no more are equal, as in `native/routing/src/score.rs`."""
STATES: list[TrustState] = ["CONNECTING", "REPLAYING", "EXACT", "DEGRADED", "STALE"]
EXACT = Standing.of(TrustStatus("EXACT"))
CONNECTED: list[TrustState] = ["EXACT", "REPLAYING", "DEGRADED"]
MemberMatch = tuple[float, TrustState, tuple[int, int, int, int]]
"""Load, trust state, and how many tokens each tier adds to the one before: gpu, cpu, disk, and an unknown one."""


def make_candidates(*loads: float) -> list[Candidate]:
    return [Candidate(instance=f"w{place}", load=load) for place, load in enumerate(loads)]


def make_match(**tiers: int) -> WorkerMatch:
    tokens = max(tiers.values(), default=0)
    return WorkerMatch(instance="", rank=0, tokens=tokens, certain=tokens, tiers=tiers, trust=TrustStatus("EXACT"))


def choose(
    candidates: list[Candidate],
    held: dict[int, WorkerMatch],
    states: dict[int, TrustState] | None = None,
    ties: Ties | None = None,
    loads: Loads | None = None,
    stores_only: tuple[str, ...] = (),
    **changes: Any,
) -> Selection:
    """Select a worker. Keys of `held` and `states` are numbers of workers. A worker without a state is EXACT. All workers are
    followed."""
    request = SelectRequest(model="m", **{"tokens": PROMPT, "explain": True, "tie": "first", **changes})
    standings = {(one.instance, one.rank): EXACT._replace(source=one.instance, stores_only=stores_only) for one in candidates}
    for place, state in (states or {}).items():
        known = standings[f"w{place}", 0]
        standings[f"w{place}", 0] = Standing.of(TrustStatus(state))._replace(source=known.source, stores_only=stores_only)
    hits = {(f"w{place}", 0): hit for place, hit in held.items()}
    return select(request, candidates, hits, standings, ties or Ties(Random(1)), loads or Loads(60.0))


def scores(selected: Selection) -> dict[Worker, ScoredCandidate]:
    assert selected.considered is not None
    return {(one.instance, one.rank): one for one in selected.considered}


def score(selected: Selection, place: int) -> ScoredCandidate:
    return scores(selected)[f"w{place}", 0]


# --- scores -----------------------------------------------------------------------------------------------------------------


def test_a_score_equals_one_that_is_calculated_by_hand() -> None:
    """The worker holds 40 tokens on the GPU, 20 more in host memory, 20 more on disk, and 10 more elsewhere. The prompt has 100
    tokens, and each request counts as 256; compared with the mean, each worker has 4 more."""
    held = {0: make_match(gpu=40, cpu=60, disk=80, other=90)}
    found = choose(make_candidates(1, 3), held, wait_weight=0.25, load_weight=0.5)
    best = score(found, 0)
    assert best.uncached == pytest.approx(1 - (40 * 1.0 + 20 * 0.8 + 20 * 0.5 + 10 * 0.5) / 100)
    assert best.load == pytest.approx(0.25 * 1 * 256 / 100 + 0.5 * 5 / 6)
    assert best.score == best.uncached + best.load == found.score
    assert score(found, 1).uncached == 1.0
    assert score(found, 1).load == pytest.approx(0.25 * 3 * 256 / 100 + 0.5 * 7 / 6)
    assert (best.requests, score(found, 1).requests) == (1.0, 3.0)


@pytest.mark.parametrize(
    ("tiers", "weights", "saved"),
    [
        ({"gpu": 50}, {}, 50.0),
        ({"gpu": 0, "cpu": 50}, {}, 40.0),
        ({"gpu": 50, "cpu": 50, "disk": 50}, {}, 50.0),
        ({"gpu": 50, "cpu": 50, "disk": 50}, {"gpu": 0.2, "cpu": 0.1, "disk": 0.0}, 10.0),
        ({"NVFS9": 50}, {}, 25.0),
        ({"NVFS9": 50}, {"cpu": 0.1}, 5.0),
        ({"gpu": 20, "NVFS9": 50}, {"other": 0.1}, 23.0),
        ({"gpu": 10, "cpu": 50}, {"gpu": 0.1, "cpu": 0.9}, 45.0),
        ({"gpu": 500}, {}, 100.0),
        ({}, {}, 0.0),
    ],
)
def test_cached_tokens_save_in_proportion_to_the_weight_of_their_tier(
    tiers: dict[str, int], weights: dict[str, float], saved: float
) -> None:
    """Lengths are cumulative, missing weights have their defaults, and an unknown tier has the lowest weight.

    A token counts for the best tier that holds it, and no more than the prompt is saved.
    """
    found = choose(make_candidates(0), {0: make_match(**tiers)}, tiers=weights)
    assert score(found, 0).uncached == pytest.approx(1 - saved / 100)


def test_tokens_without_a_tier_have_the_lowest_weight() -> None:
    """A caller that queries the index without tiers gets some credit, not 0."""
    hit = WorkerMatch(instance="", rank=0, tokens=50, certain=50, tiers={}, trust=TrustStatus("EXACT"))
    assert score(choose(make_candidates(0), {0: hit}), 0).uncached == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("state", "saved"), [("EXACT", 60 + 0.5 * 20), ("REPLAYING", 0.8 * 60 + 0.5 * 20), ("DEGRADED", 0.5 * 80), ("STALE", 0.0)]
)
def test_uncertain_tokens_reduce_only_their_own_credit(state: TrustState, saved: float) -> None:
    """They count as those of a DEGRADED worker, and the trust of the answer does not lower the credit of the others."""
    uncertain_trust = TrustStatus("DEGRADED" if state == "EXACT" else state, "might be gone", (Reason.UNCERTAIN_COPIES,))
    hit = WorkerMatch(instance="", rank=0, tokens=80, certain=60, tiers={"gpu": 80}, trust=uncertain_trust)
    standing = Standing.of(TrustStatus(state))._replace(match_trust=uncertain_trust)
    request = SelectRequest(model="m", tokens=PROMPT, explain=True)
    found = select(request, make_candidates(0), {("w0", 0): hit}, {("w0", 0): standing}, Ties(Random(1)), Loads(60.0))
    assert score(found, 0).uncached == pytest.approx(1 - saved / 100)
    assert found.trust == uncertain_trust
    router_candidate = routing.Candidate(("w0", 0), tokens=80, tiers={"gpu": 80}, trust=state, uncertain=20)
    choice = policy("prefix-aware", 1).choose(routing.Prompt(100), [router_candidate])
    assert choice.scored[0].uncached == score(found, 0).uncached


def test_an_exact_worker_with_everything_and_mean_load_wins() -> None:
    """It also wins against an idle worker without anything, whose score is equal: saved computation helps all requests."""
    found = choose(make_candidates(0, 1), {1: make_match(gpu=100)}, wait_weight=100 / 256, load_weight=0.0)
    assert found.instance == "w1"
    assert found.score == pytest.approx(1.0) == score(found, 0).score


@pytest.mark.parametrize(
    ("state", "trusted_share"), [("EXACT", 1), ("REPLAYING", 0.8), ("DEGRADED", 0.5), ("CONNECTING", 0), ("STALE", 0)]
)
def test_trust_scales_the_credit_of_cached_tokens(state: TrustState, trusted_share: float) -> None:
    """The blocks of a STALE worker count for nothing."""
    found = choose(make_candidates(0), {0: make_match(gpu=100)}, {0: state})
    assert score(found, 0).uncached == pytest.approx(1 - trusted_share)
    assert score(found, 0).trust.state == state


def test_the_trust_weights_of_a_request_replace_the_defaults() -> None:
    """Each state has its own weight; states without one in the request have the default."""
    found = choose(
        make_candidates(0, 0),
        dict.fromkeys((0, 1), make_match(gpu=100)),
        {0: "REPLAYING", 1: "DEGRADED"},
        trust={"REPLAYING": 0.9},
    )
    assert [score(found, place).uncached for place in (0, 1)] == pytest.approx([0.1, 0.5])


def test_a_worker_without_a_subscriber_gets_no_credit() -> None:
    """The trust in the answer says so too."""
    request = SelectRequest(model="m", tokens=PROMPT, explain=True)
    found = select(request, make_candidates(0), {("w0", 0): make_match(gpu=100)}, {}, Ties(Random()), Loads(60.0))
    assert score(found, 0).uncached == 1.0
    assert score(found, 0).trust == TrustStatus("STALE", "this service does not follow the worker", (Reason.NOT_FOLLOWED,))


def test_load_counts_in_proportion() -> None:
    """All loads are equal in a fleet without load, and nothing overflows."""
    found = choose(make_candidates(2, 4), {}, wait_weight=0.25, load_weight=0.0)
    assert [score(found, place).load for place in range(2)] == pytest.approx([1.28, 2.56])
    assert all(one.load == pytest.approx(0.05) for one in scores(choose(make_candidates(0, 0, 0), {})).values())
    for load in (1e300, 1.7e308):
        found = choose(make_candidates(load, load, 0), {}, wait_weight=1000.0, load_weight=1000.0)
        assert found.instance == "w2"
        assert all(math.isfinite(one.score) for one in scores(found).values())


@pytest.mark.parametrize("engines", [2, 4, 8, 16])
@pytest.mark.parametrize("share", [0.12, 0.25, 0.5, 0.75])
@pytest.mark.parametrize("length", [512, 8192])
@pytest.mark.parametrize("source", ["request", "engines", "selections"])
@pytest.mark.parametrize("running_each", [1, 2, 4, 10])
def test_a_shared_system_prompt_spreads(engines: int, share: float, length: int, source: str, running_each: int) -> None:
    """All prompts begin with the same tokens. `running_each` requests run per engine; each engine holds the prompts that it was
    sent."""
    shared, loads, ties, tokens = int(length * share), Loads(60.0), Ties(Random(1)), list(range(length))
    holders, counts, hits = set[int](), [0] * engines, 0
    in_flight: deque[int] = deque()
    for _ in range(40 * engines):
        if len(in_flight) == running_each * engines:
            in_flight.popleft()
        running = Counter(in_flight)
        if source == "engines":
            for place in range(engines):
                loads.report(f"w{place}", 0, running[place])
        given = make_candidates(*(running[place] for place in range(engines))) if source == "request" else make_fleet(engines)
        held = {place: make_match(gpu=shared) for place in holders}
        selected = choose(given, held, tokens=tokens, loads=loads, ties=ties, explain=False, tie="rotate")
        place = int(selected.instance[1:])
        hits += place in holders
        holders.add(place)
        counts[place] += 1
        in_flight.append(place)
    assert max(counts) <= 1.5 * 40
    assert hits >= 0.95 * (40 * engines - engines), "each engine computes it once"


def test_an_empty_prompt_is_decided_by_load() -> None:
    assert choose(make_candidates(2, 1), {0: make_match(gpu=16)}, tokens=[]).instance == "w1"


def test_each_rank_is_a_separate_worker() -> None:
    """Another rank of the same instance holds other blocks."""
    candidates = [Candidate(instance="w", rank=rank) for rank in (0, 1)]
    request = SelectRequest(model="m", tokens=PROMPT)
    found = select(request, candidates, {("w", 1): make_match(gpu=50)}, {("w", 1): EXACT}, Ties(Random()), Loads(60.0))
    assert (found.instance, found.rank, found.considered) == ("w", 1, None)


# --- properties -------------------------------------------------------------------------------------------------------------

lengths = st.integers(0, 40)
tiers_held = st.tuples(lengths, lengths, lengths, lengths)
rows = st.tuples(st.floats(0, 1e6), st.sampled_from(CONNECTED), tiers_held)
fleets = st.lists(rows, min_size=1, max_size=6)
any_fleets = st.lists(st.tuples(st.floats(0, 1e6), st.sampled_from(STATES), tiers_held), min_size=1, max_size=6)
shares = st.floats(0, 1)
weights = st.fixed_dictionaries({}, optional={"gpu": shares, "cpu": shares, "disk": shares, "other": shares})


def choose_from_fleet(fleet: list[MemberMatch], order: list[int] | None = None, **changes: Any) -> Selection:
    names = range(len(fleet)) if order is None else order
    candidates = [Candidate(instance=f"w{place}", load=fleet[place][0]) for place in names]
    held = {}
    for place, (_, _, (gpu, cpu, disk, other)) in enumerate(fleet):
        held[place] = make_match(gpu=gpu, cpu=gpu + cpu, disk=gpu + cpu + disk, other=gpu + cpu + disk + other)
    return choose(candidates, held, {place: row[1] for place, row in enumerate(fleet)}, **changes)


def cool(fleet: list[MemberMatch]) -> list[MemberMatch]:
    """Return the fleet with so few requests that each cache counts."""
    return [(min(load, 8.0), *rest) for load, *rest in fleet]  # type: ignore[misc]


def replace_row(fleet: list[MemberMatch], place: int, row: MemberMatch) -> list[MemberMatch]:
    return [*fleet[:place], row, *fleet[place + 1 :]]


@given(fleets, weights, st.data())
def test_more_cached_tokens_never_worsen_a_score(
    fleet: list[MemberMatch], tiers: dict[str, float], data: st.DataObject
) -> None:
    """This holds for any tier and any weights; the scores of other workers do not change."""
    place = data.draw(st.integers(0, len(fleet) - 1))
    load, state, old = fleet[place]
    tier = data.draw(st.integers(0, 3))
    more = list(old)
    more[tier] += data.draw(lengths)
    # Either the slower tiers hold more tokens too, or the added tokens were on the next slower tier before.
    if tier < 3 and data.draw(st.booleans()):
        more[tier + 1] = max(0, more[tier + 1] - (more[tier] - old[tier]))
    before = choose_from_fleet(fleet, tiers=tiers)
    after = choose_from_fleet(replace_row(fleet, place, (load, state, (more[0], more[1], more[2], more[3]))), tiers=tiers)
    assert score(after, place).score <= score(before, place).score + EQUAL
    assert all(score(after, other).score == score(before, other).score for other in range(len(fleet)) if other != place)


@given(fleets, st.floats(0, 1e6), st.data())
def test_more_load_never_improves_a_score(fleet: list[MemberMatch], more: float, data: st.DataObject) -> None:
    """It never worsens the scores of other workers, so a worker that is not chosen is not chosen with more load."""
    place = data.draw(st.integers(0, len(fleet) - 1))
    load, state, tiers = fleet[place]
    before, after = choose_from_fleet(fleet), choose_from_fleet(replace_row(fleet, place, (load + more, state, tiers)))
    rest = [other for other in range(len(fleet)) if other != place]
    assert score(after, place).score >= score(before, place).score - EQUAL
    if any(fleet[other][0] for other in rest) or load:
        assert all(score(after, other).score <= score(before, other).score + EQUAL for other in rest)


@given(fleets, st.randoms(use_true_random=False))
def test_the_order_of_candidates_does_not_matter(fleet: list[MemberMatch], random: Random) -> None:
    """All scores are equal, and so is the choice if there is one best candidate."""
    order = list(range(len(fleet)))
    random.shuffle(order)
    one, other = choose_from_fleet(fleet), choose_from_fleet(fleet, order)
    assert scores(one) == scores(other)
    ranked = sorted((entry.score, entry.uncached) for entry in scores(one).values())
    assume(len(ranked) == 1 or ranked[1][0] - ranked[0][0] > 2 * EQUAL)
    assert one.instance == other.instance
    assert one.considered == other.considered


@given(fleets, fleets)
def test_weights_of_zero_remove_the_influence(fleet: list[MemberMatch], other: list[MemberMatch]) -> None:
    """Without a weight of load, only caches count; without weights of tiers or of trust, only load counts."""
    count = min(len(fleet), len(other))
    mixed: list[MemberMatch] = [(other[place][0], *fleet[place][1:]) for place in range(count)]
    without_load = (choose_from_fleet(rows, wait_weight=0, load_weight=0) for rows in (cool(fleet[:count]), cool(mixed)))
    first, second = map(scores, without_load)
    assert {worker: one.score for worker, one in first.items()} == {worker: one.score for worker, one in second.items()}
    mixed = [(fleet[place][0], other[place][1], other[place][2]) for place in range(count)]
    nothings: list[dict[str, Any]] = [
        {"tiers": dict.fromkeys(("gpu", "cpu", "disk"), 0.0)},
        {"trust": dict.fromkeys(STATES, 0.0)},
    ]
    for nothing in nothings:
        both_selections = choose_from_fleet(fleet[:count], **nothing), choose_from_fleet(mixed, **nothing)
        assert [score(both_selections[0], place).score for place in range(count)] == [
            score(both_selections[1], place).score for place in range(count)
        ]


@given(fleets, weights, st.floats(0, 1000))
def test_scores_are_in_their_range_and_the_best_comes_first(
    fleet: list[MemberMatch], tiers: dict[str, float], load_weight: float
) -> None:
    """The uncached share is from 0 to 1, and without waiting work loads add up to the load weight for each candidate."""
    found = choose_from_fleet(fleet, tiers=tiers, wait_weight=0.0, load_weight=load_weight)
    all_scores = list(scores(found).values())
    assert all(-EQUAL <= one.uncached <= 1 + EQUAL and one.load >= 0 and math.isfinite(one.score) for one in all_scores)
    assert math.fsum(one.load for one in all_scores) == pytest.approx(load_weight * len(fleet))
    assert (all_scores[0].instance, all_scores[0].score) == (found.instance, found.score)
    assert found.score <= min(one.score for one in all_scores) + EQUAL
    assert [one.score for one in all_scores[1:]] == sorted(one.score for one in all_scores[1:])


@given(fleets, weights, st.floats(0, 1000), st.sampled_from([50, 100]))
def test_a_router_calculates_the_same_scores(
    fleet: list[MemberMatch], tiers: dict[str, float], wait_weight: float, length: int
) -> None:
    """The scores are bit-identical and the choice is the same if the router has the same settings."""
    fleet = [(float(round(load)), *rest) for load, *rest in fleet]  # type: ignore[misc]  # a router counts whole requests
    tokens = list(range(length))
    found = choose_from_fleet(fleet, tiers=tiers, wait_weight=wait_weight, load_weight=0.0, tokens=tokens)
    uncached = min(one.uncached for one in scores(choose_from_fleet(cool(fleet), tiers=tiers, tokens=tokens)).values())
    guard = min(2.0, max(1.25, 1 + (0.125 / uncached) ** 2)) if uncached > 0 else 2.0
    settings: dict[str, Any] = {"load_weight": 0.0, "wait_weight": wait_weight, "guard": guard, "guard_requests": 8}
    router = policy("prefix-aware", 1, **settings, tie="first", tiers=tiers)
    candidates = []
    for place, (load, state, (gpu, cpu, disk, other)) in enumerate(fleet):
        reach = {"gpu": gpu, "cpu": gpu + cpu, "disk": gpu + cpu + disk}
        work = routing.Load(requests=int(load), decoding=int(load))
        candidates.append(routing.Candidate((f"w{place}", 0), work, gpu + cpu + disk + other, reach, state))
    choice = router.choose(routing.Prompt(length), candidates)
    assert choice.chosen.worker == (found.instance, found.rank)
    assert [(one.score, one.uncached, one.load) for one in choice.scored] == [
        (one.score, one.uncached, one.load) for one in (score(found, place) for place in range(len(fleet)))
    ]


# --- workers without a connection ---------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(any_fleets, st.sampled_from(["rotate", "random", "first"]), st.integers(0, 99), st.data())
def test_a_worker_without_a_connection_is_never_chosen_before_one_with(
    fleet: list[MemberMatch], tie: str, seed: int, data: st.DataObject
) -> None:
    """With any loads, caches, weights and ties the order is: connected, not yet known, lost."""
    trust = {state: data.draw(shares) for state in STATES}
    found = choose_from_fleet(fleet, tie=tie, ties=Ties(Random(seed)), trust=trust, load_weight=data.draw(st.floats(0, 1000)))
    states = [row[1] for row in fleet]
    groups: list[list[TrustState]] = [CONNECTED, ["CONNECTING"], ["STALE"]]
    first = next(group for group in groups if any(state in group for state in states))
    assert found.trust.state in first
    assert found.trust.state == states[int(found.instance[1:])]
    assert found.considered is not None
    assert {one.trust.state for one in found.considered} == {state for state in states if state in first}
    assert found.unreachable is not None
    assert sorted(one.trust.state for one in found.unreachable) == sorted(state for state in states if state not in first)
    assert ("no candidate takes requests" in found.why) == (first is not CONNECTED)


def test_the_reason_counts_the_candidates_by_what_keeps_requests_from_them() -> None:
    """A drained candidate has a connection, so the sentence must not say that its connection is missing."""
    drained = Standing(TrustStatus("EXACT"), DISTANCE_SILENT, obstacle="drained")
    unready = Standing(TrustStatus("DEGRADED", "no replay"), DISTANCE_SILENT, obstacle="not ready")
    lost = Standing.of(TrustStatus("STALE", "connection lost"))
    for standings, end in (
        ([drained], "no candidate takes requests: 1 drained"),
        ([drained, lost], "no candidate takes requests: 1 STALE, 1 drained"),
        ([drained, unready, lost, lost], "no candidate takes requests: 2 STALE, 1 drained, 1 not ready"),
        ([EXACT, drained], "the best of 1; 1 left out: 1 drained"),
        ([EXACT, drained, drained, lost, EXACT], "chosen as the first; 3 left out: 1 STALE, 2 drained"),
    ):
        request = SelectRequest(model="m", tokens=PROMPT, tie="first")
        fleet = make_candidates(*(0 for _ in standings))
        workers = {(one.instance, 0): standing for one, standing in zip(fleet, standings, strict=True)}
        found = select(request, fleet, {}, workers, Ties(Random()), Loads(60.0))
        assert found.why.endswith(f"{end}.")
        assert found.usable == (EXACT in standings)


def test_an_unreachable_worker_comes_last_even_before_its_first_event() -> None:
    """Nothing listens at its port, so a worker that is not followed precedes it, and a connected one precedes both."""
    refused = Standing(TrustStatus("CONNECTING", "nothing listens at tcp://127.0.0.1:1"), DISTANCE_LOST)
    request = SelectRequest(model="m", tokens=PROMPT, explain=True)
    fleet = make_candidates(0, 9, 9)
    found = select(request, fleet[:2], {}, {("w0", 0): refused}, Ties(Random()), Loads(60.0))
    assert (found.instance, found.trust.reason) == ("w1", "this service does not follow the worker")
    found = select(request, fleet, {}, {("w0", 0): refused, ("w2", 0): EXACT}, Ties(Random()), Loads(60.0))
    assert found.instance == "w2"
    assert found.why.endswith("the best of 1; 2 left out: 1 CONNECTING, 1 STALE.")


# --- ties -------------------------------------------------------------------------------------------------------------------


def pick_workers(ties: Ties, count: int, fleet: list[Candidate], **changes: Any) -> list[str]:
    return [choose(fleet, {}, ties=ties, **changes).instance for _ in range(count)]


def test_equal_workers_take_turns() -> None:
    """Each worker is chosen once before any is chosen again."""
    fleet = make_candidates(1, 1, 1, 1)
    chosen_workers = pick_workers(Ties(Random(3)), 12, fleet, tie="rotate")
    assert set(chosen_workers[:4]) == {"w0", "w1", "w2", "w3"}
    assert chosen_workers == chosen_workers[:4] * 3


def test_routers_begin_with_different_workers() -> None:
    """Each of many processes begins with another worker, so that one burst does not go to one worker."""
    fleet = make_candidates(*[0.0] * 8)
    first_workers = Counter(pick_workers(Ties(Random(seed)), 1, fleet, tie="rotate")[0] for seed in range(400))
    assert len(first_workers) == 8
    assert max(first_workers.values()) < 100


def test_turns_are_even_although_other_ties_come_between() -> None:
    """Prompts of two kinds alternate, each with a separate tie; each kind still goes to all of its workers."""
    fleet, ties = make_candidates(0, 0, 0, 0), Ties(Random(5))
    chosen_workers = [choose(fleet[:2] if step % 2 else fleet[2:], {}, ties=ties, tie="rotate").instance for step in range(40)]
    assert Counter(chosen_workers) == {"w0": 10, "w1": 10, "w2": 10, "w3": 10}


def test_a_worker_that_was_chosen_for_its_cache_loses_its_turn() -> None:
    """The turn after a cache hit goes to another worker."""
    fleet, ties = make_candidates(0, 0), Ties(Random(1))
    for place in (0, 1, 1, 0):
        choose(fleet, {place: make_match(gpu=10)}, ties=ties, tie="rotate")
        assert choose(fleet, {}, ties=ties, tie="rotate").instance == f"w{1 - place}"
        choose(fleet, {}, ties=ties, tie="rotate")


def test_each_scope_has_separate_turns() -> None:
    """The same name in another tenant or group is another worker."""
    fleet, ties = make_candidates(0, 0), Ties(Random(1))
    scopes: list[dict[str, str]] = [{}, {"tenant": "t"}, {"group": "g"}]
    for scope in scopes:
        assert Counter(pick_workers(ties, 4, fleet, tie="rotate", **scope)) == {"w0": 2, "w1": 2}


def test_ties_may_be_resolved_by_order_or_at_random() -> None:
    """`first` takes the first candidate given, `random` any of the equal ones."""
    fleet, ties = make_candidates(0, 0, 0), Ties(Random(7))
    assert set(pick_workers(ties, 5, fleet, tie="first")) == {"w0"}
    assert set(pick_workers(ties, 5, fleet[::-1], tie="first")) == {"w2"}
    counts = Counter(pick_workers(ties, 300, fleet, tie="random"))
    assert min(counts.values()) > 60


def test_rounding_errors_do_not_break_a_tie() -> None:
    """If scores differ only by floating-point rounding, the first worker does not win every time."""
    fleet = make_candidates(0.1 + 0.2, 0.3)
    assert set(pick_workers(Ties(Random(1)), 2, fleet, tie="rotate")) == {"w0", "w1"}


def test_remembered_turns_are_bounded() -> None:
    """Clients may send any names."""
    ties = Ties(Random(1), max_workers=3)
    for number in range(10):
        ties.took((f"w{number}", 0))
    assert ties.remembered == 3
    assert ties.pick("rotate", [("w9", 0), ("w7", 0), ("w8", 0)]) == 1


# --- explanations -----------------------------------------------------------------------------------------------------------


def test_the_reason_of_a_selection_is_a_sentence() -> None:
    """The sentence contains the cached tokens, the trust, the load, and whether a tie occurred."""
    held = {0: make_match(gpu=20, cpu=50)}
    found = choose(make_candidates(1, 1), held, {0: "DEGRADED"})
    assert found.why == (
        "w0 rank 0 is DEGRADED, holds 50 of 100 tokens (20 on gpu, 50 including cpu), must compute 78%, and its load "
        "(1 request) counts 0.43: score 1.214, the best of 2."
    )
    request = SelectRequest(model="m", tokens=PROMPT, tie="rotate")
    lost = Standing.of(TrustStatus("STALE", "connection lost"))
    why = select(request, make_candidates(0, 0), {}, {("w0", 0): lost, ("w1", 0): lost}, Ties(Random(1)), Loads(60.0)).why
    assert why.endswith("score 1.050, one of 2 equally good candidates, chosen in turn; no candidate takes requests: 2 STALE.")
    assert "is STALE (connection lost), holds 0 of 100 tokens, must compute 100%" in why


# --- tiers without removals and loads of engines ------------------------------------------------------------------------------


def test_a_tier_without_removals_of_an_exact_worker_counts_as_degraded() -> None:
    """40 tokens on the GPU count fully, and 60 more in host memory count half, times the weight of that tier."""
    held = {0: make_match(gpu=40, cpu=100)}
    found = score(choose(make_candidates(0), held, stores_only=("cpu",)), 0)
    assert found.uncached == pytest.approx(1 - (40 * 1.0 + 60 * 0.8 * 0.5) / 100)
    assert found.inexact_tiers == ["cpu"]
    assert found.trust.state == "EXACT"
    trusting = choose(make_candidates(0), held, stores_only=("cpu",), trust={"DEGRADED": 1.0})
    assert score(trusting, 0).uncached == pytest.approx(1 - (40 * 1.0 + 60 * 0.8) / 100)


def test_tokens_count_for_their_own_tier_although_a_slower_one_would_count_more() -> None:
    """The prefix of the disk includes that of host memory, so it does not show that the disk has these tokens too."""
    found = score(choose(make_candidates(0), {0: make_match(cpu=50, disk=70)}, stores_only=("cpu",)), 0)
    assert found.uncached == pytest.approx(1 - (50 * 0.8 * 0.5 + 20 * 0.5) / 100)


def test_another_medium_without_removals_counts_as_degraded() -> None:
    for stores_only, trusted_share in (((), 1.0), (("NVME",), 0.5)):
        found = score(choose(make_candidates(0), {0: make_match(gpu=20, NVME=60)}, stores_only=stores_only), 0)
        assert found.uncached == pytest.approx(1 - (20 * 1.0 + 40 * 0.5 * trusted_share) / 100)


@pytest.mark.parametrize("state", ["REPLAYING", "DEGRADED", "STALE"])
def test_the_credit_of_an_inexact_worker_is_not_reduced_twice(state: TrustState) -> None:
    held = {0: make_match(gpu=40, cpu=100)}
    found = choose(make_candidates(0), held, {0: state}, stores_only=("cpu",))
    assert score(found, 0).uncached == score(choose(make_candidates(0), held, {0: state}), 0).uncached
    assert score(found, 0).inexact_tiers == []


def make_fleet(count: int) -> list[Candidate]:
    return [Candidate(instance=f"w{place}") for place in range(count)]


def test_the_loads_of_engines_count_if_the_request_gives_none() -> None:
    """A worker without a report has the mean of the others."""
    loads = Loads(60.0)
    loads.report("w0", 0, 6.0)
    loads.report("w1", 0, 2.0)
    found = choose(make_fleet(3), {}, loads=loads, wait_weight=0.0, load_weight=1.0)
    assert (found.instance, found.load_from) == ("w1", "engines")
    assert [score(found, place).load for place in range(3)] == pytest.approx([10 / 8, 6 / 8, 8 / 8])
    assert [score(found, place).requests for place in range(3)] == [6.0, 2.0, None]
    assert "and its load (2 requests) counts 0.75" in found.why
    loads.report("w1", 0, 20.0)
    loads.report("w0", 0, 20.0)
    found = choose(make_fleet(3), {2: make_match(gpu=1)}, loads=loads, wait_weight=0.0)
    assert "and its load (unknown, so the mean of the other candidates) counts 0.05" in found.why


def test_one_request_in_an_idle_fleet_does_not_outweigh_a_cached_prefix() -> None:
    loads = Loads(60.0)
    loads.report("w0", 0, 1.0)
    for place in range(1, 8):
        loads.report(f"w{place}", 0, 0.0)
    found = choose(make_fleet(8), {0: make_match(gpu=50)}, loads=loads)
    assert found.instance == "w0", "its load counts as 1.2 times the mean, not 8 times"


def test_if_a_request_has_loads_only_these_count() -> None:
    loads = Loads(60.0)
    loads.report("w0", 0, 100.0)
    found = choose([*make_candidates(0.0), Candidate(instance="w1")], {}, loads=loads)
    assert (found.load_from, found.instance) == ("request", "w0")
    assert [one.requests for one in scores(found).values()] == [0.0, 0.0]
    assert choose(make_fleet(2), {}).load_from == "none"


def test_without_loads_the_recent_selections_count() -> None:
    """The cache of the worker counts until the guard: then the prompt goes to the others too."""
    loads = Loads(60.0)
    held = {0: make_match(gpu=100)}
    first = choose(make_fleet(3), held, tokens=list(range(10_000)), loads=loads)
    assert (first.instance, first.load_from) == ("w0", "none")
    chosen = [choose(make_fleet(3), held, tokens=list(range(10_000)), loads=loads) for _ in range(60)]
    assert {found.load_from for found in chosen} == {"selections"}
    counts = Counter(found.instance for found in chosen)
    assert min(counts.values()) >= 15, "100 tokens of 10,000 are not worth a queue"


def test_caches_do_not_count_for_a_request_that_reads_none() -> None:
    held = {0: make_match(gpu=100)}
    assert choose(make_candidates(1, 0), held, wait_weight=0.0).instance == "w0"
    found = choose(make_candidates(1, 0), held, wait_weight=0.0, ignores_cache=True)
    assert found.instance == "w1"
    assert (score(found, 0).tokens, score(found, 0).uncached) == (100, 1.0)


@pytest.mark.parametrize(("tokens", "most"), [(50, 39), (75, 39), (80, 41), (85, 45), (90, 47), (100, 47)])
def test_a_worker_with_too_many_requests_gets_no_credit(tokens: int, most: int) -> None:
    """The more tokens a cache saves, the more requests its worker may have: 1.25 to 2 times the mean of the other workers."""
    held = {0: make_match(gpu=tokens)}
    found = choose(make_candidates(8, 0), held, wait_weight=0.0, load_weight=0.0)
    assert (found.instance, score(found, 0).hot) == ("w0", False), "up to 8 requests a cache always counts"
    for requests in range(8, 60):
        found = choose(make_candidates(requests, 70 - requests), held, wait_weight=0.0, load_weight=0.0)
        assert score(found, 0).hot == (requests >= most), requests
        assert score(found, 0).uncached == pytest.approx(1.0 if requests >= most else 1 - tokens / 100)


def test_selections_since_a_report_count_as_requests() -> None:
    """Otherwise every prompt until the next report would go to the worker that was the least loaded in the last one."""
    loads, ties = Loads(60.0), Ties(Random(1))
    for place in range(3):
        loads.report(f"w{place}", 0, 0.0)
    chosen = Counter(choose(make_fleet(3), {}, loads=loads, ties=ties, tie="rotate").instance for _ in range(30))
    assert chosen == {"w0": 10, "w1": 10, "w2": 10}
    assert [loads.requests(f"w{place}", 0) for place in range(3)] == [10.0] * 3
    loads.report("w0", 0, 4.0)
    assert loads.requests("w0", 0) == 4.0, "the report includes the requests of those selections"
    loads.remove("w0", 0)
    assert loads.requests("w0", 0) is None


def test_a_report_that_is_too_old_does_not_count() -> None:
    loads = Loads(5.0)
    loads.report("w0", 0, 50.0, age=6.0)
    assert choose(make_fleet(2), {}, loads=loads).load_from == "none"
    loads.report("w0", 0, 50.0, age=1.0)
    loads.report("w0", 0, 1.0, age=2.0)
    assert loads.requests("w0", 0) == 50.0, "the newest report counts, not the one that arrived last"
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="Duration"):
            loads.report("w0", 0, 1.0, age=wrong)
