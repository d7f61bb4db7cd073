"""`kvevents.sim.routers`: the rule of gateways without events, and what each of several routers knows."""

from __future__ import annotations

import pytest

from kvevents.events import BlockStored, KVEventBatch
from kvevents.index import PrefixIndex
from kvevents.routing import Candidate, Load, Prompt, RandomChoice
from kvevents.sim.audit import Audit
from kvevents.sim.routers import ESTIMATING_POLICIES, POLICIES, ApproximateTree, make_routers, needs_events
from kvevents.sim.settings import FleetSettings
from kvevents.stream import RawBatch
from kvevents.wire.encode import batch_encoder

PROMPT = Prompt(1_000)


def choose(*known: tuple[int, int]) -> int:
    """Return the number of the chosen candidate; each has tokens that were sent there, and requests in flight."""
    candidates = [
        Candidate((str(number), 0), Load(requests, 100 * requests), tokens) for number, (tokens, requests) in enumerate(known)
    ]
    return int(ApproximateTree(0).choose(PROMPT, candidates).chosen.worker[0])


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ([(600, 3), (900, 5), (0, 0)], 1),  # the longest prefix
        ([(900, 5), (900, 3), (0, 0)], 1),  # of two the least loaded
        ([(300, 3), (0, 1), (0, 2)], 1),  # 0.3 of the prompt is too little
        ([(301, 3), (0, 1), (0, 2)], 0),
        ([(900, 6), (0, 0), (0, 0)], 0),  # four more than the mean of two: at the margin, but not above it
        ([(900, 7), (0, 0), (0, 1)], 1),  # above the margin, and above 1.5 times the mean
        ([(900, 50), (0, 40), (0, 45)], 0),  # within 1.5 times the mean
        ([(900, 90), (0, 30), (500, 31)], 1),  # the spill goes to the least loaded, not to the next prefix
        ([(900, 300), (900, 299), (0, 0), (0, 1)], 2),  # all holders spill
    ],
)
def test_the_rule_of_gateways(known: list[tuple[int, int]], expected: int) -> None:
    assert choose(*known) == expected


def test_only_one_policy_needs_events() -> None:
    assert [name for name in POLICIES if needs_events(name)] == ["prefix-aware"]


@pytest.mark.parametrize("name", ESTIMATING_POLICIES)
def test_an_estimating_router_knows_its_own_decisions_and_no_others(name: str) -> None:
    settings = FleetSettings(engines=4, routers=2, block_size=4)
    first, second = make_routers(settings, name, Audit(PrefixIndex()), clock=lambda: 0.0)
    for worker in settings.workers:
        first.add(worker)
        second.add(worker)
    prompt = list(range(41))
    sent = first.route(1, prompt)
    again, other = first.route(2, prompt), second.route(3, prompt)
    assert (again.worker, again.tokens) == (sent.worker, 40)
    assert (sent.tokens, other.tokens) == (0, 0)


def test_routers_see_the_events_of_all_engines_and_only_their_own_overlay() -> None:
    settings = FleetSettings(engines=2, routers=2, block_size=4)
    audit = Audit(PrefixIndex())
    first, second = make_routers(settings, "prefix-aware", audit, clock=lambda: 0.0)
    for worker in settings.workers:
        audit.add(worker)
        first.add(worker)
        second.add(worker)
    stored = BlockStored([1, 2], None, list(range(8)), 4)
    audit.apply(RawBatch("engine-1", 0, 0, 0, False, batch_encoder()(KVEventBatch(0.0, [stored]))), 0)
    prompt = list(range(41))
    assert [router.route(0, prompt).tokens for router in (first, second)] == [8, 8]
    assert [router.route(1, prompt).tokens for router in (first, second)] == [40, 40]
    other = [*prompt[:40], 99, 98, 97, 96, 95]
    assert [first.route(2, other).tokens, first.route(3, other).tokens] == [40, 44]
    assert second.route(2, other).tokens == 40


def test_the_settings_of_a_router_are_passed_on() -> None:
    settings = FleetSettings(engines=1, routers=3, seed=5)
    routers = make_routers(settings, "mine", Audit(PrefixIndex()), chosen=lambda seed=0: RandomChoice(seed), clock=lambda: 0.0)
    assert [type(router.policy).__name__ for router in routers] == ["RandomChoice"] * 3
    assert len({id(router.policy) for router in routers}) == 3
