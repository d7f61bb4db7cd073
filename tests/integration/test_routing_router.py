"""Tests of the router: which workers it chooses, requests in flight, use of the index, and explanations."""

from __future__ import annotations

import re
import threading
from array import array
from collections import Counter
from collections.abc import Hashable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import paths
from index_cases import Feed, removal, store
from kvevents.errors import ConfigError, UnknownSourceError, UsageError
from kvevents.index import Namespace, PrefixIndex
from kvevents.routing import POLICIES, Decision, EngineLoad, Load, NoWorkerError, Router, Worker, policy
from kvevents.routing.policy_types import Candidate, Choice, Prompt
from kvevents.routing.router import HALF_LIFE_SECONDS
from kvevents.stream import Trust
from kvevents.testing import VirtualClock

A, B, C = ("a", 0), ("b", 0), ("c", 0)
PROMPT = list(range(1, 9))
"""The tokens of four blocks of two."""


def router_of(*workers: Worker, index: PrefixIndex | None = None, **options: Any) -> Router:
    """Return a router with these workers: prefix-aware if there is an index, otherwise round-robin."""
    found = Router(policy("prefix-aware" if index else "round-robin", 1), index, **options)
    for worker in workers:
        found.add(worker)
    return found


def store_blocks(index: PrefixIndex, worker: Worker, gpu: int, cpu: int = 0, **fields: Any) -> None:
    """Store `gpu` blocks of `PROMPT` on the worker's GPU, and `cpu` blocks in its host memory."""
    stores = {medium: count for medium, count in (("GPU", gpu), ("CPU", cpu)) if count}
    Feed(index, *worker)(
        *[store(range(1, count + 1), PROMPT[: 2 * count], 2, medium=medium, **fields) for medium, count in stores.items()]
    )


# --- workers


def test_routing_without_workers_raises() -> None:
    router = router_of()
    with pytest.raises(NoWorkerError, match="the router has no workers: add one first") as caught:
        router.route("r", PROMPT)
    assert isinstance(caught.value, UsageError)
    router.add(A)
    with pytest.raises(NoWorkerError, match="all 1 workers are excluded"):
        router.route("r", PROMPT, without=[A])
    assert router.in_flight == 0


def test_workers_can_be_added_and_removed() -> None:
    """Adding a worker again changes nothing, and its load stays."""
    router = router_of(A, B)
    router.route("r", PROMPT, without=[B])
    router.add(A)
    assert (router.workers, router.load(A)) == ((A, B), Load(1, 8))
    router.remove(A)
    router.remove(A)
    assert router.workers == (B,)
    assert {router.route(number, PROMPT).worker for number in range(3)} == {B}
    with pytest.raises(UnknownSourceError, match="the router has no worker 'a' with rank 0"):
        router.load(A)


def test_a_worker_that_returns_has_no_load() -> None:
    """Requests of its former incarnation do not count."""
    router = router_of(A)
    router.route("old", PROMPT)
    router.remove(A)
    router.add(A)
    router.route("new", PROMPT)
    router.record_first_token("old")
    router.finish("old")
    assert router.load(A) == Load(1, 8)
    assert router.in_flight == 1


def test_excluded_workers_are_not_chosen() -> None:
    router = router_of(A, B, C)
    assert {router.route(number, PROMPT, without={A, C}).worker for number in range(5)} == {B}


# --- requests in flight


def test_the_load_follows_a_request_to_its_end() -> None:
    router = router_of(A)
    assert router.load(A) == Load()
    router.route("r", PROMPT)
    assert router.load(A) == Load(requests=1, waiting_tokens=8)
    router.record_first_token("r")
    assert router.load(A) == Load(requests=1, decoding=1, decoding_tokens=8)
    router.finish("r")
    assert (router.load(A), router.in_flight) == (Load(), 0)


def test_routing_a_key_that_is_in_flight_is_a_retry() -> None:
    """The former worker no longer has the request, and its load excludes the request already when the choice is made."""
    router = Router(policy("least-loaded", 1))
    router.add(A)
    assert router.route("r", PROMPT).load == Load()
    assert router.route("r", PROMPT).load == Load()
    router.add(B)
    assert router.route("r", PROMPT, without=[A]).worker == B
    assert (router.load(A), router.load(B).requests, router.in_flight) == (Load(), 1, 1)


def test_the_oldest_requests_are_evicted_above_the_limit() -> None:
    """They no longer add load, and are counted as evicted."""
    router = router_of(A, max_in_flight=2)
    for number in range(5):
        router.route(number, [1] * (number + 1))
    assert (router.in_flight, router.evicted, router.load(A)) == (2, 3, Load(2, 4 + 5))
    router.record_first_token(0)
    router.finish(2)
    assert router.load(A) == Load(2, 9)


def test_a_request_without_an_end_expires() -> None:
    """Clients hang up, and callers forget `finish`."""
    now = [0.0]
    router = router_of(A, expiry_seconds=60.0, clock=lambda: now[0])
    router.route(None, PROMPT)
    router.record_first_token(None)
    now[0] = 30.0
    router.route("later", PROMPT)
    now[0] = 61.0
    assert router.route("new", PROMPT).load == Load(1, 8)
    assert (router.expired, router.evicted, router.in_flight) == (1, 0, 2)
    router.finish(None)
    assert router.load(A) == Load(2, 16)


def test_a_request_ends_with_its_block() -> None:
    router = router_of(A)
    with router.request(PROMPT) as decision, router.request(PROMPT, without=()) as other:
        assert (decision.worker, router.in_flight, decision.key != other.key) == (A, 2, True)
        router.record_first_token(decision.key)
        assert router.load(A) == Load(2, 8, 1, 8)
    with pytest.raises(OSError, match="gone"), router.request(PROMPT):
        raise OSError("gone")
    assert (router.load(A), router.in_flight) == (Load(), 0)


def leak(router: Router, requests: int) -> None:
    """Route requests whose end the router is not given."""
    for number in range(requests):
        router.route(("leaked", number), PROMPT)
        router.record_first_token(("leaked", number))


def spread(router: Router, requests: int = 90) -> Counter[Worker]:
    """Return the number of prompts that each worker gets, if every request ends at once."""
    chosen: Counter[Worker] = Counter()
    for number in range(requests):
        with router.request([number] * 100) as decision:
            chosen[decision.worker] += 1
    return chosen


def test_a_new_worker_does_not_draw_every_prompt() -> None:
    """It begins with the mean load of the others, half of which is left after ten seconds."""
    now = [0.0]
    router = Router(policy("least-loaded", 1), clock=lambda: now[0])
    for worker in (A, B, C):
        router.add(worker)
    leak(router, 300)
    router.remove(C)
    router.add(C)
    assert router.load(C) == Load()
    assert spread(router) == {A: 30, B: 30, C: 30}
    now[0] = HALF_LIFE_SECONDS
    assert spread(router) == {C: 90}
    router = router_of(A, B, C)
    assert len(spread(router)) == 3, "workers that are added together begin without load"


def test_a_report_corrects_the_count_of_the_router() -> None:
    """The report does not count requests whose end the router has not noticed."""
    reading = {worker: EngineLoad(0, 0, 0, 0) for worker in (A, B)}
    router = Router(policy("least-loaded", 1), engine_load=lambda worker: reading[worker])
    router.add(A)
    router.add(B)
    router.route("b", PROMPT, without=[A])
    for number in range(50):
        router.route(number, PROMPT, without=[B])
    assert router.route("next", PROMPT).worker == B, "what was sent since the report is added to it"
    reading = {A: EngineLoad(0, 0, 0, 0), B: EngineLoad(3, 1, 0, 0)}
    assert router.route("corrected", PROMPT).worker == A


def test_waiting_requests_of_a_report_count_as_the_mean_of_the_routers_own() -> None:
    reading = {A: EngineLoad(0, 2, 0, 0), B: EngineLoad(0, 2, 0, 0)}
    router = Router(policy("least-loaded", 1), engine_load=lambda worker: reading[worker])
    router.add(A)
    router.add(B)
    assert router.route("long", [1] * 1000, without=[B]).load == Load(2, 512)
    reading = {A: EngineLoad(0, 2, 0, 0), B: EngineLoad(0, 2, 0, 0)}
    assert router.route("next", PROMPT, without=[B]).load == Load(2, 2000)
    assert router.route("other", PROMPT, without=[A]).load == Load(2, 512)


class InFlightMachine(RuleBasedStateMachine):
    """Checks that a router's loads are the sums over its requests, if events are reported twice, out of order or for unknown
    keys."""

    keys = st.integers(0, 6)
    workers = st.sampled_from([A, B, C])

    @initialize(bound=st.integers(1, 6))
    def start(self, bound: int) -> None:
        self.bound = bound
        self.router = Router(policy("random", 1), max_in_flight=bound)
        self.open: dict[Worker, int] = {}
        """The number of its incarnation, for each worker."""
        self.incarnations = 0
        self.sent: dict[Hashable, tuple[Worker, int, int, bool]] = {}
        """Worker, its incarnation, length, and whether the first token has arrived, for each key; the oldest first."""

    @rule(worker=workers)
    def add(self, worker: Worker) -> None:
        self.router.add(worker)
        self.incarnations += 1
        self.open.setdefault(worker, self.incarnations)

    @rule(worker=workers)
    def remove(self, worker: Worker) -> None:
        self.router.remove(worker)
        self.open.pop(worker, None)

    @rule(key=keys, length=st.integers(0, 20), without=st.sets(workers))
    def route(self, key: int, length: int, without: set[Worker]) -> None:
        self.sent.pop(key, None)
        if not self.open.keys() - without:
            with pytest.raises(NoWorkerError):
                self.router.route(key, [0] * length, without=without)
            return
        worker = self.router.route(key, [0] * length, without=without).worker
        assert worker in self.open.keys() - without
        self.sent[key] = (worker, self.open[worker], length, False)
        if len(self.sent) > self.bound:
            del self.sent[next(iter(self.sent))]

    @rule(key=keys)
    def first_token(self, key: int) -> None:
        self.router.record_first_token(key)
        if key in self.sent:
            self.sent[key] = (*self.sent[key][:3], True)

    @rule(key=keys)
    def finish_request(self, key: int) -> None:
        self.router.finish(key)
        self.sent.pop(key, None)

    @invariant()
    def check_loads(self) -> None:
        if not hasattr(self, "router"):
            return
        for worker, incarnation in self.open.items():
            requests_of_worker = [
                (length, answering) for *key, length, answering in self.sent.values() if key == [worker, incarnation]
            ]
            answered = [length for length, answering in requests_of_worker if answering]
            waiting = sum(length for length, answering in requests_of_worker if not answering)
            assert self.router.load(worker) == Load(len(requests_of_worker), waiting, len(answered), sum(answered))
        assert self.router.in_flight == len(self.sent)
        assert set(self.router.workers) == self.open.keys()


TestInFlight = InFlightMachine.TestCase
TestInFlight.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_loads_are_zero_after_concurrent_requests() -> None:
    """All requests of several threads finish."""
    router = Router(policy("least-loaded", 1))
    router.add(A)
    router.add(B)

    def work(name: int) -> None:
        for number in range(200):
            router.route((name, number), PROMPT)
            router.record_first_token((name, number))
            router.finish((name, number))

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (router.load(A), router.load(B), router.in_flight) == (Load(), Load(), 0)


# --- use of the index


def test_the_worker_with_the_longest_prefix_is_chosen_and_only_the_other_tokens_wait() -> None:
    index = PrefixIndex()
    store_blocks(index, A, 1)
    store_blocks(index, B, 3)
    router = router_of(A, B, C, index=index)
    decision = router.route("r", PROMPT)
    assert (decision.worker, decision.tokens, dict(decision.tiers)) == (B, 6, {"gpu": 6, "cpu": 6, "disk": 6})
    assert router.load(B) == Load(requests=1, waiting_tokens=2)
    assert {entry.worker: entry.uncached for entry in decision.scored} == pytest.approx({A: 0.75, B: 0.25, C: 1.0})
    assert decision.scored[0].worker == B


def test_caches_do_not_count_for_a_request_that_reads_none() -> None:
    index = PrefixIndex()
    store_blocks(index, A, 3)
    router = router_of(A, B, index=index)
    router.route("busy", PROMPT, without=[B])
    with router.request(PROMPT, ignores_cache=True) as decision:
        assert (decision.worker, decision.tokens, router.load(B)) == (B, 0, Load(1, 8))


def test_an_uncertain_block_counts_less_and_the_blocks_before_it_count_in_full() -> None:
    """The worker with three blocks, of which the last is uncertain, is chosen before the worker with two certain blocks."""
    index = PrefixIndex()
    store_blocks(index, A, 2)
    feed, blocks = Feed(index, *B), store(range(1, 4), PROMPT[:6], 2, group_idx=0)
    feed(blocks, blocks, removal(3))
    decision = router_of(A, B, index=index).route("r", PROMPT)
    assert (decision.worker, decision.tokens, decision.choice.chosen.uncertain, decision.trust) == (B, 6, 2, "EXACT")
    assert {entry.worker: entry.uncached for entry in decision.scored} == pytest.approx({A: 0.5, B: 1 - (4 + 0.5 * 2) / 8})
    assert "is EXACT, holds 6 of 8 tokens (6 on gpu), of which 2 might be gone, has 0 in flight" in decision.explain()


def test_a_policy_that_does_not_use_the_index_gets_no_tokens() -> None:
    """The index is not queried."""
    index = PrefixIndex()
    store_blocks(index, A, 4)
    router = Router(policy("least-loaded", 1), index, overlay_seconds=2)
    router.add(A)
    decision = router.route("r", PROMPT)
    assert (decision.tokens, decision.tiers, router.load(A).waiting_tokens) == (0, {}, 8)
    assert index.stats().speculated == 0


def test_the_last_token_of_a_prompt_is_not_looked_up() -> None:
    """Engines compute the last token and its block again, whatever its tier; an empty prompt matches nothing."""
    index = PrefixIndex()
    store_blocks(index, A, 2, 4)
    router = router_of(A, index=index)
    for prompt in (PROMPT, array("I", PROMPT), tuple(PROMPT)):
        decision = router.route("r", prompt)
        assert (decision.tokens, dict(decision.tiers)) == (6, {"gpu": 4, "cpu": 6, "disk": 6})
        assert router.load(A).waiting_tokens == 2
    assert router.route("r", [*PROMPT, 9]).tokens == 8
    assert router.route("empty", []).tokens == 0
    assert router_of(A, index=index, whole_prompt=True).route("r", PROMPT).tokens == 8


def test_caches_of_other_namespaces_do_not_count() -> None:
    """Blocks with another salt, LoRA adapter or model do not match."""
    index = PrefixIndex()
    store_blocks(index, A, 4)
    store_blocks(index, B, 2, extra_keys=[["tenant-1"], None])
    index.set_model("a", "llama")
    router = router_of(A, B, C, index=index)
    scopes: dict[Namespace | None, int] = {
        Namespace(salt="tenant-1"): 4,
        Namespace(salt="tenant-2"): 0,
        Namespace(lora="l"): 0,
        Namespace(model="qwen"): 0,
        Namespace(model="llama"): 6,
    }
    for scope, tokens in scopes.items():
        assert max(entry.candidate.tokens for entry in router.route("r", PROMPT, namespace=scope).scored) == tokens


def test_the_caches_of_workers_that_were_not_added_are_ignored() -> None:
    index = PrefixIndex()
    store_blocks(index, A, 4)
    store_blocks(index, ("b", 1), 4)
    assert router_of(B, index=index).route("r", PROMPT).tokens == 0


def test_trust_is_looked_up_for_each_candidate() -> None:
    index = PrefixIndex()
    store_blocks(index, A, 4)
    store_blocks(index, B, 2)
    states = {A: "DEGRADED", B: "EXACT"}
    decision = router_of(A, B, index=index, trust=states.__getitem__).route("r", PROMPT)
    assert (decision.worker, [entry.candidate.trust for entry in decision.scored]) == (B, ["EXACT", "DEGRADED"])


def test_an_idle_engine_that_nothing_contradicts_counts_fully() -> None:
    """Its stream is DEGRADED only because no live batch has confirmed replay yet."""
    index = PrefixIndex()
    store_blocks(index, A, 4)
    store_blocks(index, B, 3)
    for trust, chosen in ((Trust("DEGRADED", "idle", unproven=True), A), (Trust.DEGRADED, B)):
        states = {A: trust, B: Trust.EXACT}
        assert router_of(A, B, index=index, trust=states.__getitem__).route("r", PROMPT).worker == chosen


# --- workers without a connection

STATES = st.sampled_from(["EXACT", "REPLAYING", "DEGRADED", "CONNECTING", "STALE"])


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(POLICIES)),
    st.lists(STATES, min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(1, 40), st.none() | st.sampled_from("stuv"), st.booleans()), min_size=1, max_size=20),
    st.integers(0, 9),
    st.data(),
)
def test_connected_workers_are_always_preferred(
    name: str, states: list[str], requests: list[tuple[int, str | None, bool]], seed: int, data: st.DataObject
) -> None:
    """This holds for every policy, with any caches, loads, sessions, retries and exclusions, while states change."""
    index = PrefixIndex()
    workers = [(f"w{place}", 0) for place in range(len(states))]
    for worker in workers:
        if data.draw(st.booleans()):
            store_blocks(index, worker, data.draw(st.integers(1, 4)))
    trust = dict(zip(workers, states, strict=True))
    router = Router(policy(name, seed), index, trust=trust.__getitem__, overlay_seconds=60)
    for worker in workers:
        router.add(worker)
    for number, (length, session, finishes) in enumerate(requests):
        without = data.draw(st.sets(st.sampled_from(workers), max_size=len(workers) - 1))
        decision = router.route(number, list(range(1, length + 1)), session=session, without=without)
        left = [trust[worker] for worker in workers if worker not in without]
        connected = [state for state in left if state not in {"CONNECTING", "STALE"}]
        allowed = connected or [state for state in left if state == "CONNECTING"] or left
        assert decision.trust == trust[decision.worker]
        assert decision.trust in allowed
        assert (decision.candidates, decision.unreachable) == (len(allowed), len(left) - len(allowed))
        assert ("no worker is connected" in decision.explain()) == (not connected and decision.unreachable == 0)
        if finishes:
            router.finish(number)
        changed = data.draw(st.sampled_from(workers))
        trust[changed] = data.draw(STATES)


def test_a_dead_worker_does_not_attract_requests() -> None:
    """Its requests fail at once, so it has no load; still all requests go to the connected worker, which has some."""
    index = PrefixIndex()
    trust = {A: "EXACT", B: "STALE"}
    for name in POLICIES:
        router = Router(policy(name, 1), index, trust=trust.__getitem__)
        router.add(A)
        router.add(B)
        router.route("long", [5] * 4000)
        assert {router.route(number, PROMPT, session=f"s{number}").worker for number in range(50)} == {A}
        explanation = router.route("r", PROMPT).explain()
        assert explanation.endswith("; 1 without a connection were excluded.")
        trust[A] = "STALE"
        assert B in {router.route(number, PROMPT, session=f"s{number}").worker for number in range(50, 100)}
        assert router.route("r", PROMPT).explain().endswith("; no worker is connected, and it is STALE.")
        trust[A] = "EXACT"


def test_a_burst_follows_its_first_request() -> None:
    """With the overlay, equal prompts that arrive before any event follow the first one for a while; otherwise they spread."""
    clock = VirtualClock()
    index = PrefixIndex(clock=clock)
    for worker in (A, B, C):
        store_blocks(index, worker, 1)
    for seconds, workers in ((0.0, 3), (2.0, 1)):
        router = router_of(A, B, C, index=index, overlay_seconds=seconds)
        found: set[Worker] = set()
        for number in range(3):
            found.add(router.route(number, PROMPT).worker)
            router.finish(number)
        assert len(found) == workers
    assert router.route("r", PROMPT).tokens == 6
    clock.advance(2.1)
    assert router.route("r", PROMPT).tokens == 2


def test_invalid_settings_of_a_router_raise() -> None:
    with pytest.raises(ConfigError, match="the policy prefix-aware needs an index: pass a PrefixIndex to the router"):
        Router(policy("prefix-aware"))
    with pytest.raises(ConfigError, match="invalid overlay_seconds -1"):
        router_of(overlay_seconds=-1)
    with pytest.raises(ConfigError, match="invalid max_in_flight 0"):
        router_of(max_in_flight=0)
    with pytest.raises(ConfigError, match="invalid expiry_seconds 0"):
        router_of(expiry_seconds=0)


# --- explanations


def test_an_explanation_names_worker_tokens_load_and_score() -> None:
    index = PrefixIndex()
    store_blocks(index, A, 2, 3)
    router = router_of(A, B, index=index)
    router.route("first", PROMPT, without=[B])
    router.record_first_token("first")
    router.route("second", [9] * 1200, without=[B])
    router.policy = policy("prefix-aware", 1, wait_weight=0.0, load_weight=0.0)
    assert router.route("third", PROMPT).explain() == (
        "prefix-aware chose a rank 0, the best of 2: it is EXACT, holds 6 of 8 tokens (4 on gpu, 6 including cpu), "
        "has 2 in flight (1,200 prompt tokens waiting, 1 being answered), must compute 30%, and its load "
        "adds 0.000: score 0.300."
    )


def test_an_explanation_counts_hot_workers() -> None:
    index = PrefixIndex()
    store_blocks(index, A, 4)
    router = Router(policy("prefix-aware", 1, guard_requests=1), index)
    router.add(A)
    router.add(B)
    for number in range(2):
        router.route(number, PROMPT, without=[B])
    decision = router.route("r", PROMPT)
    assert decision.worker == B
    assert decision.explain().endswith("; 1 with too many requests got no credit for their caches.")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "random",
            r"random chose \w rank 0, at random from 2: it has 0 in flight \(0 prompt tokens waiting, 0 being answered\)\.",
        ),
        ("round-robin", r"round-robin chose \w rank 0, the next in rotation of 2: it has 0 in flight .*"),
        ("least-loaded", r"least-loaded chose \w rank 0, the least loaded of 2: it has 0 in flight .*"),
        ("session-affinity", r"session-affinity chose \w rank 0, the session's own among 2: it has 0 in flight .*"),
    ],
)
def test_an_explanation_without_the_index_does_not_mention_caches(name: str, sentence: str) -> None:
    router = Router(policy(name, 1))
    router.add(A)
    router.add(B)
    assert re.fullmatch(sentence, router.route("r", PROMPT, session="s").explain())


def test_a_router_accepts_a_custom_policy() -> None:
    """A policy needs `name`, `uses_index` and `choose`; scores are optional."""

    class Last:
        name = "last"
        uses_index = True

        def choose(self, prompt: Prompt, candidates: Any) -> Choice:
            found: list[Candidate] = list(candidates)
            return Choice(found[-1], f"the last for {prompt.length} tokens")

    router = Router(Last(), PrefixIndex())
    router.add(A)
    router.add(B)
    decision: Decision = router.route("r", PROMPT)
    assert (decision.worker, decision.scored) == (B, [])
    assert decision.explain().startswith(
        "last chose b rank 0, the last for 8 tokens: it is EXACT, holds 0 of 8 tokens, has 0 in flight"
    )


def test_the_repr_of_a_router_counts_workers_and_requests() -> None:
    router = router_of(A, B)
    router.route("r", PROMPT)
    assert repr(router) == "<Router round-robin, 2 workers, 1 requests in flight>"


def test_the_examples_of_the_guide_run() -> None:
    """The test runs every block of docs/guides/routing.md in order."""
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", (paths.ROOT / "docs" / "guides" / "routing.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, names)  # noqa: S102 - a document of this repository
