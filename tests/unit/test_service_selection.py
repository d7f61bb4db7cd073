"""Selection of a worker: its cache against its load, trust, ties that spread, and a sentence with the reason."""

from __future__ import annotations

import math
from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvevents import routing
from kvevents.errors import UsageError
from kvevents.routing import Ties, Worker, policy
from kvevents.routing.policies import EQUAL
from kvevents.service.reasons import Reason
from kvevents.service.schemas import Candidate, ScoredCandidate, Selection, SelectRequest, TrustStatus, WorkerMatch
from kvevents.service.selection import SelectError, Standing, select
from kvevents.weights import DISTANCE_LOST, TrustState
from kvevents_native._native import EngineLoads

PROMPT = list(range(100))
STATES: list[TrustState] = ["CONNECTING", "REPLAYING", "EXACT", "DEGRADED", "STALE"]
EXACT = Standing.of(TrustStatus("EXACT"))
CONNECTED: list[TrustState] = ["EXACT", "REPLAYING", "DEGRADED"]
MemberMatch = tuple[float, TrustState, tuple[int, int, int, int]]
"""Load, state, and how much longer each tier reaches than the one before: gpu, cpu, disk, and an unknown one."""


def candidates_of(*loads: float) -> list[Candidate]:
    return [Candidate(instance=f"w{place}", load=load) for place, load in enumerate(loads)]


def held_of(**tiers: int) -> WorkerMatch:
    tokens = max(tiers.values(), default=0)
    return WorkerMatch(instance="", rank=0, tokens=tokens, certain=tokens, tiers=tiers, trust=TrustStatus("EXACT"))


def choose(
    candidates: list[Candidate],
    held: dict[int, WorkerMatch],
    states: dict[int, TrustState] | None = None,
    ties: Ties | None = None,
    loads: EngineLoads | None = None,
    stores_only: tuple[str, ...] = (),
    **changes: Any,
) -> Selection:
    """`held` and `states` are keyed by the number of the worker; a worker without a state is EXACT. All are followed."""
    request = SelectRequest(model="m", **{"tokens": PROMPT, "explain": True, "tie": "first", **changes})
    standings = {(one.instance, one.rank): EXACT._replace(source=one.instance, stores_only=stores_only) for one in candidates}
    for place, state in (states or {}).items():
        known = standings[f"w{place}", 0]
        standings[f"w{place}", 0] = Standing.of(TrustStatus(state))._replace(source=known.source, stores_only=stores_only)
    hits = {(f"w{place}", 0): hit for place, hit in held.items()}
    return select(request, candidates, hits, standings, ties or Ties(Random(1)), loads or EngineLoads(60.0))


def scores(selected: Selection) -> dict[Worker, ScoredCandidate]:
    assert selected.considered is not None
    return {(one.instance, one.rank): one for one in selected.considered}


def score(selected: Selection, place: int) -> ScoredCandidate:
    return scores(selected)[f"w{place}", 0]


# --- the score --------------------------------------------------------------------------------------------------------------


def test_a_score_by_hand() -> None:
    """40 tokens on the GPU, 20 more in host memory, 20 more on disk, 10 more elsewhere; of loads 1 and 3 the mean is 2."""
    found = choose(candidates_of(1, 3), {0: held_of(gpu=40, cpu=60, disk=80, other=90)}, load_weight=0.5)
    best = score(found, 0)
    assert best.uncached == pytest.approx(1 - (40 * 1.0 + 20 * 0.8 + 20 * 0.5 + 10 * 0.5) / 100)
    assert best.load == pytest.approx(0.5 * 1 / 2)
    assert best.score == best.uncached + best.load == found.score
    assert (score(found, 1).uncached, score(found, 1).load, score(found, 1).score) == (1.0, 0.75, 1.75)


@pytest.mark.parametrize(
    ("tiers", "weights", "saved"),
    [
        ({"gpu": 50}, {}, 50.0),
        ({"gpu": 0, "cpu": 50}, {}, 40.0),
        ({"gpu": 50, "cpu": 50, "disk": 50}, {}, 50.0),
        ({"gpu": 50, "cpu": 50, "disk": 50}, {"gpu": 0.2, "cpu": 0.1, "disk": 0.0}, 10.0),
        ({"NVFS9": 50}, {}, 25.0),
        ({"NVFS9": 50}, {"cpu": 0.1}, 5.0),
        ({"gpu": 10, "cpu": 50}, {"gpu": 0.1, "cpu": 0.9}, 45.0),
        ({"gpu": 500}, {}, 100.0),
        ({}, {}, 0.0),
    ],
)
def test_what_tiers_save(tiers: dict[str, int], weights: dict[str, float], saved: float) -> None:
    """Lengths are cumulative; weights that are not given stay; an unknown tier is worth as little as the lowest weight.

    A token counts for the best tier that reaches it, and no more than the prompt is saved.
    """
    found = choose(candidates_of(0), {0: held_of(**tiers)}, tiers=weights)
    assert score(found, 0).uncached == pytest.approx(1 - saved / 100)


def test_tokens_that_no_tier_names_count_as_the_lowest() -> None:
    """A caller that asks the index without tiers gets some credit, not 0."""
    hit = WorkerMatch(instance="", rank=0, tokens=50, certain=50, tiers={}, trust=TrustStatus("EXACT"))
    assert score(choose(candidates_of(0), {0: hit}), 0).uncached == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("state", "saved"), [("EXACT", 60 + 0.5 * 20), ("REPLAYING", 0.8 * 60 + 0.5 * 20), ("DEGRADED", 0.5 * 80), ("STALE", 0.0)]
)
def test_tokens_that_might_be_gone_cost_only_their_own_credit(state: TrustState, saved: float) -> None:
    """They count as those of a DEGRADED worker, and the answer's trust does not lower the credit of the others."""
    doubted = TrustStatus("DEGRADED" if state == "EXACT" else state, "might be gone", (Reason.UNCERTAIN_COPIES,))
    hit = WorkerMatch(instance="", rank=0, tokens=80, certain=60, tiers={"gpu": 80}, trust=doubted)
    standing = Standing.of(TrustStatus(state))._replace(match_trust=doubted)
    request = SelectRequest(model="m", tokens=PROMPT, explain=True)
    found = select(request, candidates_of(0), {("w0", 0): hit}, {("w0", 0): standing}, Ties(Random(1)), EngineLoads(60.0))
    assert score(found, 0).uncached == pytest.approx(1 - saved / 100)
    assert found.trust == doubted
    of_router = routing.Candidate(("w0", 0), tokens=80, tiers={"gpu": 80}, trust=state, uncertain=20)
    choice = policy("prefix-aware", 1).choose(routing.Prompt(100), [of_router])
    assert choice.scored[0].uncached == score(found, 0).uncached


def test_an_exact_worker_with_everything_and_mean_load_wins() -> None:
    """Even against an idle one without anything, whose score is the same: saved computation helps all requests."""
    found = choose(candidates_of(0, 1, 2), {1: held_of(gpu=100)}, load_weight=1.0)
    assert found.instance == "w1"
    assert found.score == pytest.approx(1.0) == score(found, 0).score


@pytest.mark.parametrize(
    ("state", "believed"), [("EXACT", 1), ("REPLAYING", 0.8), ("DEGRADED", 0.5), ("CONNECTING", 0), ("STALE", 0)]
)
def test_trust_scales_what_is_believed(state: TrustState, believed: float) -> None:
    """What a stale worker is said to hold counts for nothing."""
    found = choose(candidates_of(0), {0: held_of(gpu=100)}, {0: state})
    assert score(found, 0).uncached == pytest.approx(1 - believed)
    assert score(found, 0).trust.state == state


def test_trust_that_the_request_weighs() -> None:
    """Its weights go before ours, state by state."""
    found = choose(
        candidates_of(0, 0), dict.fromkeys((0, 1), held_of(gpu=100)), {0: "REPLAYING", 1: "DEGRADED"}, trust={"REPLAYING": 0.9}
    )
    assert [score(found, place).uncached for place in (0, 1)] == pytest.approx([0.1, 0.5])


def test_a_worker_without_a_subscriber_gets_no_credit() -> None:
    """Its trust says so too."""
    request = SelectRequest(model="m", tokens=PROMPT, explain=True)
    found = select(request, candidates_of(0), {("w0", 0): held_of(gpu=100)}, {}, Ties(Random()), EngineLoads(60.0))
    assert score(found, 0).uncached == 1.0
    assert score(found, 0).trust == TrustStatus("STALE", "this service does not follow it", (Reason.NOT_FOLLOWED,))


def test_load_counts_in_proportion() -> None:
    """The unit does not matter, a fleet without load is even, and nothing overflows."""
    for unit in (1.0, 1e-300, 1e300, 5e307):
        found = choose(candidates_of(1 * unit, 2 * unit, 3 * unit), {}, load_weight=1.0)
        assert [score(found, place).load for place in range(3)] == pytest.approx([0.5, 1.0, 1.5])
    assert all(one.load == 0 for one in scores(choose(candidates_of(0, 0, 0), {})).values())


def test_an_empty_prompt_is_decided_by_load() -> None:
    """Nothing is cached of it."""
    assert choose(candidates_of(2, 1), {0: held_of(gpu=16)}, tokens=[]).instance == "w1"


def test_ranks_are_workers_of_their_own() -> None:
    """The same instance with another rank holds something else."""
    candidates = [Candidate(instance="w", rank=rank) for rank in (0, 1)]
    request = SelectRequest(model="m", tokens=PROMPT)
    found = select(request, candidates, {("w", 1): held_of(gpu=50)}, {("w", 1): EXACT}, Ties(Random()), EngineLoads(60.0))
    assert (found.instance, found.rank, found.considered) == ("w", 1, None)


# --- properties -------------------------------------------------------------------------------------------------------------

lengths = st.integers(0, 40)
tiers_held = st.tuples(lengths, lengths, lengths, lengths)
rows = st.tuples(st.floats(0, 1e6), st.sampled_from(CONNECTED), tiers_held)
fleets = st.lists(rows, min_size=1, max_size=6)
any_fleets = st.lists(st.tuples(st.floats(0, 1e6), st.sampled_from(STATES), tiers_held), min_size=1, max_size=6)
shares = st.floats(0, 1)
weights = st.fixed_dictionaries({}, optional={"gpu": shares, "cpu": shares, "disk": shares, "other": shares})


def ask(fleet: list[MemberMatch], order: list[int] | None = None, **changes: Any) -> Selection:
    names = range(len(fleet)) if order is None else order
    candidates = [Candidate(instance=f"w{place}", load=fleet[place][0]) for place in names]
    held = {}
    for place, (_, _, (gpu, cpu, disk, other)) in enumerate(fleet):
        held[place] = held_of(gpu=gpu, cpu=gpu + cpu, disk=gpu + cpu + disk, other=gpu + cpu + disk + other)
    return choose(candidates, held, {place: row[1] for place, row in enumerate(fleet)}, **changes)


def replaced(fleet: list[MemberMatch], place: int, row: MemberMatch) -> list[MemberMatch]:
    return [*fleet[:place], row, *fleet[place + 1 :]]


@given(fleets, weights, st.data())
def test_more_cached_tokens_never_worsen_a_score(
    fleet: list[MemberMatch], tiers: dict[str, float], data: st.DataObject
) -> None:
    """On any tier and with any weights; the scores of other workers do not change."""
    place = data.draw(st.integers(0, len(fleet) - 1))
    load, state, old = fleet[place]
    tier = data.draw(st.integers(0, 3))
    more = list(old)
    more[tier] += data.draw(lengths)
    # Either the slower tiers reach further too, or the token was on the next slower tier before.
    if tier < 3 and data.draw(st.booleans()):
        more[tier + 1] = max(0, more[tier + 1] - (more[tier] - old[tier]))
    before = ask(fleet, tiers=tiers)
    after = ask(replaced(fleet, place, (load, state, (more[0], more[1], more[2], more[3]))), tiers=tiers)
    assert score(after, place).score <= score(before, place).score + EQUAL
    assert all(score(after, other).score == score(before, other).score for other in range(len(fleet)) if other != place)


@given(fleets, st.floats(0, 1e6), st.data())
def test_more_load_never_improves_a_score(fleet: list[MemberMatch], more: float, data: st.DataObject) -> None:
    """It never worsens the scores of others either, so a worker that is not chosen is not chosen with more load."""
    place = data.draw(st.integers(0, len(fleet) - 1))
    load, state, tiers = fleet[place]
    before, after = ask(fleet), ask(replaced(fleet, place, (load + more, state, tiers)))
    rest = [other for other in range(len(fleet)) if other != place]
    assert score(after, place).score >= score(before, place).score - EQUAL
    if any(fleet[other][0] for other in rest) or load:
        assert all(score(after, other).score <= score(before, other).score + EQUAL for other in rest)


@given(fleets, st.randoms(use_true_random=False))
def test_the_order_of_candidates_does_not_matter(fleet: list[MemberMatch], random: Random) -> None:
    """Every score is the same, and so is the choice where there is one best."""
    order = list(range(len(fleet)))
    random.shuffle(order)
    one, other = ask(fleet), ask(fleet, order)
    assert scores(one) == scores(other)
    ranked = sorted((entry.score, entry.uncached) for entry in scores(one).values())
    assume(len(ranked) == 1 or ranked[1][0] - ranked[0][0] > 2 * EQUAL)
    assert one.instance == other.instance
    assert one.considered == other.considered


@given(fleets, fleets)
def test_weights_of_zero_remove_the_influence(fleet: list[MemberMatch], other: list[MemberMatch]) -> None:
    """Without a weight of load only caches count; without weights of tiers, or without trust, only load does."""
    count = min(len(fleet), len(other))
    mixed: list[MemberMatch] = [(other[place][0], *fleet[place][1:]) for place in range(count)]
    idle = ask(fleet[:count], load_weight=0), ask(mixed, load_weight=0)
    assert scores(idle[0]) == scores(idle[1])
    mixed = [(fleet[place][0], other[place][1], other[place][2]) for place in range(count)]
    nothings: list[dict[str, Any]] = [
        {"tiers": dict.fromkeys(("gpu", "cpu", "disk"), 0.0)},
        {"trust": dict.fromkeys(STATES, 0.0)},
    ]
    for nothing in nothings:
        blind = ask(fleet[:count], **nothing), ask(mixed, **nothing)
        assert [score(blind[0], place).score for place in range(count)] == [
            score(blind[1], place).score for place in range(count)
        ]


@given(fleets, weights, st.floats(0, 1000))
def test_scores_have_their_range(fleet: list[MemberMatch], tiers: dict[str, float], load_weight: float) -> None:
    """The uncached share is from 0 to 1, loads add up to their weight for each candidate, and the best comes first."""
    found = ask(fleet, tiers=tiers, load_weight=load_weight)
    all_of = list(scores(found).values())
    assert all(-EQUAL <= one.uncached <= 1 + EQUAL and one.load >= 0 and math.isfinite(one.score) for one in all_of)
    wanted = load_weight * len(fleet) if any(load for load, _, _ in fleet) else 0
    assert math.fsum(one.load for one in all_of) == pytest.approx(wanted)
    assert (all_of[0].instance, all_of[0].score) == (found.instance, found.score)
    assert found.score <= min(one.score for one in all_of) + EQUAL
    assert [one.score for one in all_of[1:]] == sorted(one.score for one in all_of[1:])


@given(fleets, weights, st.floats(0, 1000), st.sampled_from([50, 100]))
def test_a_router_has_the_same_scores(
    fleet: list[MemberMatch], tiers: dict[str, float], load_weight: float, length: int
) -> None:
    """To the last bit, and the same choice, if it weighs loads alike: work over the mean, without a guard."""
    found = ask(fleet, tiers=tiers, load_weight=load_weight, tokens=list(range(length)))
    settings: dict[str, Any] = {"load_weight": load_weight, "wait_weight": 0.0, "guard": math.inf, "tie": "first"}
    router = policy("prefix-aware", 1, **settings, decoding_weight=0.0, tiers=tiers)
    candidates = []
    for place, (load, state, (gpu, cpu, disk, other)) in enumerate(fleet):
        reach = {"gpu": gpu, "cpu": gpu + cpu, "disk": gpu + cpu + disk}
        work = routing.Load(waiting_tokens=load)  # type: ignore[arg-type]  # any number will do
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
    """Whatever loads, caches, weights and ties are: the order is connected, not yet known, lost."""
    trust = {state: data.draw(shares) for state in STATES}
    found = ask(fleet, tie=tie, ties=Ties(Random(seed)), trust=trust, load_weight=data.draw(st.floats(0, 1000)))
    states = [row[1] for row in fleet]
    groups: list[list[TrustState]] = [CONNECTED, ["CONNECTING"], ["STALE"]]
    first = next(group for group in groups if any(state in group for state in states))
    assert found.trust.state in first
    assert found.trust.state == states[int(found.instance[1:])]
    assert found.considered is not None
    assert {one.trust.state for one in found.considered} == {state for state in states if state in first}
    assert found.unreachable is not None
    assert sorted(one.trust.state for one in found.unreachable) == sorted(state for state in states if state not in first)
    assert ("no candidate is connected" in found.why) == (first is not CONNECTED and not found.unreachable)


def test_a_worker_that_cannot_be_reached_is_lost_before_its_first_event() -> None:
    """Nothing listens at its port: one that is not followed at all goes first, and a connected one before both."""
    refused = Standing(TrustStatus("CONNECTING", "nothing listens at tcp://127.0.0.1:1"), DISTANCE_LOST)
    request = SelectRequest(model="m", tokens=PROMPT, explain=True)
    fleet = candidates_of(0, 9, 9)
    found = select(request, fleet[:2], {}, {("w0", 0): refused}, Ties(Random()), EngineLoads(60.0))
    assert (found.instance, found.trust.reason) == ("w1", "this service does not follow it")
    found = select(request, fleet, {}, {("w0", 0): refused, ("w2", 0): EXACT}, Ties(Random()), EngineLoads(60.0))
    assert found.instance == "w2"
    assert found.why.endswith("the best of 1; 2 without a connection were left out.")


# --- ties -------------------------------------------------------------------------------------------------------------------


def picks(ties: Ties, count: int, fleet: list[Candidate], **changes: Any) -> list[str]:
    return [choose(fleet, {}, ties=ties, **changes).instance for _ in range(count)]


def test_equal_workers_take_turns() -> None:
    """Each comes once before any comes again."""
    fleet = candidates_of(1, 1, 1, 1)
    taken = picks(Ties(Random(3)), 12, fleet, tie="rotate")
    assert set(taken[:4]) == {"w0", "w1", "w2", "w3"}
    assert taken == taken[:4] * 3


def test_routers_do_not_herd() -> None:
    """Of many processes each begins elsewhere, so that one burst does not go to one worker."""
    fleet = candidates_of(*[0.0] * 8)
    begun = Counter(picks(Ties(Random(seed)), 1, fleet, tie="rotate")[0] for seed in range(400))
    assert len(begun) == 8
    assert max(begun.values()) < 100


def test_turns_are_even_whatever_comes_between() -> None:
    """Prompts of two kinds that alternate, each with a tie of its own, do not send each kind to one worker for ever."""
    fleet, ties = candidates_of(0, 0, 0, 0), Ties(Random(5))
    taken = [choose(fleet[:2] if step % 2 else fleet[2:], {}, ties=ties, tie="rotate").instance for step in range(40)]
    assert Counter(taken) == {"w0": 10, "w1": 10, "w2": 10, "w3": 10}


def test_a_worker_that_was_taken_for_its_cache_waits() -> None:
    """The turn after a hit goes to another worker."""
    fleet, ties = candidates_of(0, 0), Ties(Random(1))
    for place in (0, 1, 1, 0):
        choose(fleet, {place: held_of(gpu=10)}, ties=ties, tie="rotate")
        assert choose(fleet, {}, ties=ties, tie="rotate").instance == f"w{1 - place}"
        choose(fleet, {}, ties=ties, tie="rotate")


def test_models_take_turns_apart() -> None:
    """The same name under another model, tenant or group is another worker."""
    fleet, ties = candidates_of(0, 0), Ties(Random(1))
    scopes: list[dict[str, str]] = [{}, {"tenant": "t"}, {"group": "g"}]
    for scope in scopes:
        assert Counter(picks(ties, 4, fleet, tie="rotate", **scope)) == {"w0": 2, "w1": 2}


def test_the_other_ways_to_end_a_tie() -> None:
    """`first` goes by the order given, `random` by chance."""
    fleet, ties = candidates_of(0, 0, 0), Ties(Random(7))
    assert set(picks(ties, 5, fleet, tie="first")) == {"w0"}
    assert set(picks(ties, 5, fleet[::-1], tie="first")) == {"w2"}
    counts = Counter(picks(ties, 300, fleet, tie="random"))
    assert min(counts.values()) > 60


def test_rounding_breaks_no_tie() -> None:
    """A difference that is only one of floating point does not let the first one win every time."""
    fleet = candidates_of(0.1 + 0.2, 0.3)
    assert set(picks(Ties(Random(1)), 2, fleet, tie="rotate")) == {"w0", "w1"}


def test_turns_are_forgotten_above_a_bound() -> None:
    """Names are whatever clients send."""
    ties = Ties(Random(1), max_workers=3)
    for number in range(10):
        ties.took((f"w{number}", 0))
    assert ties.remembered == 3
    assert ties.pick("rotate", [("w9", 0), ("w7", 0), ("w8", 0)]) == 1


# --- words ------------------------------------------------------------------------------------------------------------------


def test_why_is_a_sentence() -> None:
    """With what it holds, how far that is trusted, its load, and whether it was a tie."""
    held = {0: held_of(gpu=20, cpu=50)}
    found = choose(candidates_of(1, 1), held, {0: "DEGRADED"})
    assert found.why == (
        "w0 rank 0 is DEGRADED, holds 50 of 100 tokens (20 on gpu, 50 including cpu), must compute 78%, and its load counts "
        "0.10: score 0.880, the best of 2."
    )
    request = SelectRequest(model="m", tokens=PROMPT, tie="rotate")
    lost = Standing.of(TrustStatus("STALE", "connection lost"))
    why = select(request, candidates_of(0, 0), {}, {("w0", 0): lost, ("w1", 0): lost}, Ties(Random(1)), EngineLoads(60.0)).why
    assert why.endswith("score 1.000, one of 2 equally good candidates, chosen in turn; no candidate is connected.")
    assert "is STALE (connection lost), holds 0 of 100 tokens, must compute 100%" in why


@pytest.mark.parametrize(
    ("candidates", "reason", "sentence"),
    [
        ([], "no-candidates", "no candidate for model 'm'"),
        ([Candidate(instance="a"), Candidate(instance="a")], "duplicate-candidate", "'a' rank 0 is named twice"),
        ([Candidate(instance="a", load=math.inf)], "bad-load", "the load of 'a' rank 0 is inf"),
    ],
    ids=["none", "twice", "infinite"],
)
def test_candidates_that_cannot_be_chosen_from(candidates: list[Candidate], reason: str, sentence: str) -> None:
    """A usage error with a sentence, a reason and a hint, whatever was in them."""
    with pytest.raises(SelectError) as caught:
        choose(candidates, {})
    assert isinstance(caught.value, UsageError)
    assert (caught.value.reason, str(caught.value)) == (reason, sentence)
    assert caught.value.hint


# --- tiers without removals and loads of engines ------------------------------------------------------------------------------


def test_what_an_exact_worker_holds_on_a_tier_without_removals_counts_as_degraded() -> None:
    """40 tokens on the GPU are believed, and 60 more in host memory half, times what that tier is worth."""
    held = {0: held_of(gpu=40, cpu=100)}
    found = score(choose(candidates_of(0), held, stores_only=("cpu",)), 0)
    assert found.uncached == pytest.approx(1 - (40 * 1.0 + 60 * 0.8 * 0.5) / 100)
    assert found.inexact_tiers == ["cpu"]
    assert found.trust.state == "EXACT"
    believing = choose(candidates_of(0), held, stores_only=("cpu",), trust={"DEGRADED": 1.0})
    assert score(believing, 0).uncached == pytest.approx(1 - (40 * 1.0 + 60 * 0.8) / 100)


def test_tokens_stay_with_their_tier_though_a_slower_one_would_count_more() -> None:
    """The prefix of the disk includes that of host memory, so it does not say that the disk has these tokens too."""
    found = score(choose(candidates_of(0), {0: held_of(cpu=50, disk=70)}, stores_only=("cpu",)), 0)
    assert found.uncached == pytest.approx(1 - (50 * 0.8 * 0.5 + 20 * 0.5) / 100)


def test_another_medium_without_removals_counts_as_degraded() -> None:
    for stores_only, believed in (((), 1.0), (("NVME",), 0.5)):
        found = score(choose(candidates_of(0), {0: held_of(gpu=20, NVME=60)}, stores_only=stores_only), 0)
        assert found.uncached == pytest.approx(1 - (20 * 1.0 + 40 * 0.5 * believed) / 100)


@pytest.mark.parametrize("state", ["REPLAYING", "DEGRADED", "STALE"])
def test_nothing_of_a_worker_that_is_not_exact_is_believed_less_again(state: TrustState) -> None:
    held = {0: held_of(gpu=40, cpu=100)}
    found = choose(candidates_of(0), held, {0: state}, stores_only=("cpu",))
    assert score(found, 0).uncached == score(choose(candidates_of(0), held, {0: state}), 0).uncached
    assert score(found, 0).inexact_tiers == []


def fleet_of(count: int) -> list[Candidate]:
    return [Candidate(instance=f"w{place}") for place in range(count)]


def test_the_loads_of_engines_count_if_the_request_gives_none() -> None:
    """Requests and 4 more, over their mean. A worker without a report has the mean of the others."""
    loads = EngineLoads(60.0)
    loads.report("w0", 0, 6.0)
    loads.report("w1", 0, 2.0)
    found = choose(fleet_of(3), {}, loads=loads, load_weight=1.0)
    assert (found.instance, found.load_from) == ("w1", "engines")
    assert [score(found, place).load for place in range(3)] == pytest.approx([10 / 8, 6 / 8, 8 / 8])
    assert [score(found, place).requests for place in range(3)] == [6.0, 2.0, None]
    assert "and its load (2 requests) counts 0.75" in found.why
    loads.report("w1", 0, 20.0)
    loads.report("w0", 0, 20.0)
    found = choose(fleet_of(3), {2: held_of(gpu=1)}, loads=loads)
    assert "and its load (unknown, so the mean of the others) counts 0.10" in found.why


def test_one_request_in_an_idle_fleet_does_not_outweigh_a_cached_prefix() -> None:
    loads = EngineLoads(60.0)
    loads.report("w0", 0, 1.0)
    for place in range(1, 8):
        loads.report(f"w{place}", 0, 0.0)
    found = choose(fleet_of(8), {0: held_of(gpu=5)}, loads=loads)
    assert found.instance == "w0", "its load is 1.2 times the mean, and not 8 times"


def test_the_loads_of_a_request_count_alone() -> None:
    loads = EngineLoads(60.0)
    loads.report("w0", 0, 100.0)
    found = choose([*candidates_of(0.0), Candidate(instance="w1")], {}, loads=loads)
    assert (found.load_from, found.instance) == ("request", "w0")
    assert [one.requests for one in scores(found).values()] == [None, None]
    assert choose(fleet_of(2), {}).load_from == "none"


def test_selections_since_a_report_count_as_requests() -> None:
    """Otherwise every prompt until the next report would go to the worker that was the least loaded at the last one."""
    loads, ties = EngineLoads(60.0), Ties(Random(1))
    for place in range(3):
        loads.report(f"w{place}", 0, 0.0)
    chosen = Counter(choose(fleet_of(3), {}, loads=loads, ties=ties, tie="rotate").instance for _ in range(30))
    assert chosen == {"w0": 10, "w1": 10, "w2": 10}
    assert [loads.requests(f"w{place}", 0) for place in range(3)] == [10.0] * 3
    loads.report("w0", 0, 4.0)
    assert loads.requests("w0", 0) == 4.0, "the report has the requests of those selections"
    loads.remove("w0", 0)
    assert loads.requests("w0", 0) is None


def test_a_report_that_is_too_old_does_not_count() -> None:
    loads = EngineLoads(5.0)
    loads.report("w0", 0, 50.0, age=6.0)
    assert choose(fleet_of(2), {}, loads=loads).load_from == "none"
    loads.report("w0", 0, 50.0, age=1.0)
    loads.report("w0", 0, 1.0, age=2.0)
    assert loads.requests("w0", 0) == 50.0, "the newest report counts, not the one that came last"
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="Duration"):
            loads.report("w0", 0, 1.0, age=wrong)
