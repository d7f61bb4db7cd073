"""The router: who may be chosen, what is in flight where, what the index promises, and why."""

from __future__ import annotations

import re
import threading
from array import array
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from index_cases import Feed, store
from kvevents.errors import ConfigError, UnknownSourceError, UsageError
from kvevents.index import Namespace, PrefixIndex
from kvevents.routing import POLICIES, Decision, Load, NoWorkerError, Router, Worker, policy
from kvevents.routing.choice import Candidate, Choice, Prompt
from kvevents.testing import VirtualClock

A, B, C = ("a", 0), ("b", 0), ("c", 0)
PROMPT = list(range(1, 9))
"""Four blocks of two tokens."""


def router_of(*workers: Worker, index: PrefixIndex | None = None, **options: Any) -> Router:
    """Prefix-aware where there is an index, in turn where there is none."""
    found = Router(policy("prefix-aware" if index else "round-robin", 1), index, **options)
    for worker in workers:
        found.add(worker)
    return found


def hold(index: PrefixIndex, worker: Worker, gpu: int, cpu: int = 0, **fields: Any) -> None:
    """So many blocks of `PROMPT` on the GPU, and so many in host memory."""
    stores = {medium: count for medium, count in (("GPU", gpu), ("CPU", cpu)) if count}
    Feed(index, *worker)(
        *[store(range(1, count + 1), PROMPT[: 2 * count], 2, medium=medium, **fields) for medium, count in stores.items()]
    )


# --- workers ----------------------------------------------------------------------------------------------------------------


def test_without_workers_there_is_an_error_with_a_sentence() -> None:
    router = router_of()
    with pytest.raises(NoWorkerError, match="there is no worker to route to; add one first") as caught:
        router.route("r", PROMPT)
    assert isinstance(caught.value, UsageError)
    router.add(A)
    with pytest.raises(NoWorkerError, match="all 1 workers are excluded"):
        router.route("r", PROMPT, without=[A])
    assert router.in_flight == 0


def test_workers_come_and_go() -> None:
    """Twice is as good as once, and keeps the load."""
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
    """What its former life was sent ends without a trace."""
    router = router_of(A)
    router.route("old", PROMPT)
    router.remove(A)
    router.add(A)
    router.route("new", PROMPT)
    router.first_token("old")
    router.finished("old")
    assert router.load(A) == Load(1, 8)
    assert router.in_flight == 1


def test_workers_to_avoid_are_not_chosen() -> None:
    router = router_of(A, B, C)
    assert {router.route(number, PROMPT, without={A, C}).worker for number in range(5)} == {B}


# --- what is in flight ------------------------------------------------------------------------------------------------------


def test_a_request_waits_is_answered_and_ends() -> None:
    router = router_of(A)
    assert router.load(A) == Load()
    router.route("r", PROMPT)
    assert router.load(A) == Load(requests=1, waiting_tokens=8)
    router.first_token("r")
    assert router.load(A) == Load(requests=1, decoding=1, decoding_tokens=8)
    router.finished("r")
    assert (router.load(A), router.in_flight) == (Load(), 0)


def test_a_key_that_is_in_flight_is_a_retry() -> None:
    """Its former worker has it no longer, also when the choice is made."""
    router = Router(policy("least-loaded", 1))
    router.add(A)
    assert router.route("r", PROMPT).load == Load()
    assert router.route("r", PROMPT).load == Load()
    router.add(B)
    assert router.route("r", PROMPT, without=[A]).worker == B
    assert (router.load(A), router.load(B).requests, router.in_flight) == (Load(), 1, 1)


def test_the_oldest_requests_are_forgotten_above_a_bound() -> None:
    """As if they had finished, and it is counted."""
    router = router_of(A, max_in_flight=2)
    for number in range(5):
        router.route(number, [1] * (number + 1))
    assert (router.in_flight, router.forgotten, router.load(A)) == (2, 3, Load(2, 4 + 5))
    router.first_token(0)
    router.finished(2)
    assert router.load(A) == Load(2, 9)


class Ledger(RuleBasedStateMachine):
    """A router's loads are what a list of its requests adds up to, whatever is told twice, out of order, or of nobody."""

    keys = st.integers(0, 6)
    workers = st.sampled_from([A, B, C])

    @initialize(bound=st.integers(1, 6))
    def start(self, bound: int) -> None:
        self.bound = bound
        self.router = Router(policy("random", 1), max_in_flight=bound)
        self.open: dict[Worker, int] = {}
        """The life of each worker that is there."""
        self.lives = 0
        self.sent: dict[Hashable, tuple[Worker, int, int, bool]] = {}
        """By key: worker, its life, length, whether it is being answered; the oldest first."""

    @rule(worker=workers)
    def add(self, worker: Worker) -> None:
        self.router.add(worker)
        self.lives += 1
        self.open.setdefault(worker, self.lives)

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
        self.router.first_token(key)
        if key in self.sent:
            self.sent[key] = (*self.sent[key][:3], True)

    @rule(key=keys)
    def finished(self, key: int) -> None:
        self.router.finished(key)
        self.sent.pop(key, None)

    @invariant()
    def loads_add_up(self) -> None:
        if not hasattr(self, "router"):
            return
        for worker, life in self.open.items():
            mine = [(length, answering) for *who, length, answering in self.sent.values() if who == [worker, life]]
            answered = [length for length, answering in mine if answering]
            waiting = sum(length for length, answering in mine if not answering)
            assert self.router.load(worker) == Load(len(mine), waiting, len(answered), sum(answered))
        assert self.router.in_flight == len(self.sent)
        assert set(self.router.workers) == self.open.keys()


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_threads_leave_a_ledger_that_adds_up() -> None:
    """Requests of several threads at once all end."""
    router = Router(policy("least-loaded", 1))
    router.add(A)
    router.add(B)

    def work(name: int) -> None:
        for number in range(200):
            router.route((name, number), PROMPT)
            router.first_token((name, number))
            router.finished((name, number))

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (router.load(A), router.load(B), router.in_flight) == (Load(), Load(), 0)


# --- what the index promises ------------------------------------------------------------------------------------------------


def test_the_longest_holder_is_chosen_and_only_the_rest_waits() -> None:
    index = PrefixIndex()
    hold(index, A, 1)
    hold(index, B, 3)
    router = router_of(A, B, C, index=index)
    decision = router.route("r", PROMPT)
    assert (decision.worker, decision.tokens, dict(decision.tiers)) == (B, 6, {"gpu": 6, "cpu": 6, "disk": 6})
    assert router.load(B) == Load(requests=1, waiting_tokens=2)
    assert {entry.worker: entry.uncached for entry in decision.considered} == pytest.approx({A: 0.75, B: 0.25, C: 1.0})
    assert decision.considered[0].worker == B


def test_a_policy_that_does_not_ask_is_promised_nothing() -> None:
    """The index is not even looked at."""
    index = PrefixIndex()
    hold(index, A, 4)
    router = Router(policy("least-loaded", 1), index, overlay_seconds=2)
    router.add(A)
    decision = router.route("r", PROMPT)
    assert (decision.tokens, decision.tiers, router.load(A).waiting_tokens) == (0, {}, 8)
    assert index.stats().speculated == 0


def test_not_all_of_a_prompt_is_promised() -> None:
    """Engines recompute the last token and with it its block, on whatever tier it is; of an empty prompt nothing is held."""
    index = PrefixIndex()
    hold(index, A, 2, 4)
    router = router_of(A, index=index)
    for prompt in (PROMPT, array("I", PROMPT), tuple(PROMPT)):
        decision = router.route("r", prompt)
        assert (decision.tokens, dict(decision.tiers)) == (6, {"gpu": 4, "cpu": 6, "disk": 6})
        assert router.load(A).waiting_tokens == 2
    assert router.route("r", [*PROMPT, 9]).tokens == 8
    assert router.route("empty", []).tokens == 0
    assert router_of(A, index=index, whole_prompt=True).route("r", PROMPT).tokens == 8


def test_caches_of_other_namespaces_do_not_count() -> None:
    """Neither of another salt nor of another LoRA, nor of another model."""
    index = PrefixIndex()
    hold(index, A, 4)
    hold(index, B, 2, extra_keys=[["tenant-1"], None])
    index.label("a", "llama")
    router = router_of(A, B, C, index=index)
    scopes: dict[Namespace | None, int] = {
        Namespace(salt="tenant-1"): 4,
        Namespace(salt="tenant-2"): 0,
        Namespace(lora="l"): 0,
        Namespace(model="qwen"): 0,
        Namespace(model="llama"): 6,
    }
    for scope, tokens in scopes.items():
        assert max(entry.candidate.tokens for entry in router.route("r", PROMPT, namespace=scope).considered) == tokens


def test_workers_that_were_not_added_are_not_chosen_for_their_cache() -> None:
    index = PrefixIndex()
    hold(index, A, 4)
    hold(index, ("b", 1), 4)
    assert router_of(B, index=index).route("r", PROMPT).tokens == 0


def test_trust_is_asked_for_each_candidate() -> None:
    index = PrefixIndex()
    hold(index, A, 4)
    hold(index, B, 2)
    states = {A: "DEGRADED", B: "EXACT"}
    decision = router_of(A, B, index=index, trust=states.__getitem__).route("r", PROMPT)
    assert (decision.worker, [entry.candidate.trust for entry in decision.considered]) == (B, ["EXACT", "DEGRADED"])


# --- workers without a connection -------------------------------------------------------------------------------------------

STATES = st.sampled_from(["EXACT", "REPLAYING", "DEGRADED", "CONNECTING", "STALE"])


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(POLICIES)),
    st.lists(STATES, min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(1, 40), st.none() | st.sampled_from("stuv"), st.booleans()), min_size=1, max_size=20),
    st.integers(0, 9),
    st.data(),
)
def test_a_worker_without_a_connection_is_never_chosen_before_one_with(
    name: str, states: list[str], requests: list[tuple[int, str | None, bool]], seed: int, data: st.DataObject
) -> None:
    """With every policy, whatever caches, loads, sessions, retries and exclusions there are, and while states change."""
    index = PrefixIndex()
    workers = [(f"w{place}", 0) for place in range(len(states))]
    for worker in workers:
        if data.draw(st.booleans()):
            hold(index, worker, data.draw(st.integers(1, 4)))
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
        assert ("no worker is connected" in decision.why()) == (not connected and decision.unreachable == 0)
        if finishes:
            router.finished(number)
        changed = data.draw(st.sampled_from(workers))
        trust[changed] = data.draw(STATES)


def test_a_dead_worker_is_no_black_hole() -> None:
    """Its requests fail at once, so it has no load; still all go to the living one, which has some."""
    index = PrefixIndex()
    trust = {A: "EXACT", B: "STALE"}
    for name in POLICIES:
        router = Router(policy(name, 1), index, trust=trust.__getitem__)
        router.add(A)
        router.add(B)
        router.route("long", [5] * 4000)
        assert {router.route(number, PROMPT, session=f"s{number}").worker for number in range(50)} == {A}
        why = router.route("r", PROMPT).why()
        assert why.endswith("; 1 without a connection were left out.")
        trust[A] = "STALE"
        assert B in {router.route(number, PROMPT, session=f"s{number}").worker for number in range(50, 100)}
        assert router.route("r", PROMPT).why().endswith("; no worker is connected, and it is STALE.")
        trust[A] = "EXACT"


def test_a_burst_follows_its_first_request() -> None:
    """With the overlay, siblings that come before any event go where the first one went, for a while; without, they spread."""
    clock = VirtualClock()
    index = PrefixIndex(clock=clock)
    for worker in (A, B, C):
        hold(index, worker, 1)
    for seconds, workers in ((0.0, 3), (2.0, 1)):
        router = router_of(A, B, C, index=index, overlay_seconds=seconds)
        found: set[Worker] = set()
        for number in range(3):
            found.add(router.route(number, PROMPT).worker)
            router.finished(number)
        assert len(found) == workers
    assert router.route("r", PROMPT).tokens == 6
    clock.advance(2.1)
    assert router.route("r", PROMPT).tokens == 2


def test_wrong_settings_of_a_router() -> None:
    with pytest.raises(ConfigError, match="the policy prefix-aware needs an index; give the router a PrefixIndex"):
        Router(policy("prefix-aware"))
    with pytest.raises(ConfigError, match="overlay_seconds is -1"):
        router_of(overlay_seconds=-1)
    with pytest.raises(ConfigError, match="max_in_flight is 0"):
        router_of(max_in_flight=0)


# --- words ------------------------------------------------------------------------------------------------------------------


def test_why_names_worker_tokens_load_and_score() -> None:
    index = PrefixIndex()
    hold(index, A, 2, 3)
    router = router_of(A, B, index=index)
    router.route("first", PROMPT, without=[B])
    router.first_token("first")
    router.route("second", [9] * 1200, without=[B])
    router.policy = policy("prefix-aware", 1, wait_weight=0.0, load_weight=0.0)
    assert router.route("third", PROMPT).why() == (
        "prefix-aware chose a rank 0, the best of 2: it is EXACT, holds 6 of 8 tokens (4 on gpu, 6 including cpu), "
        "has 2 in flight (1,200 prompt tokens waiting, 1 being answered), must compute 30%, and its load "
        "counts 0.000: score 0.300."
    )


def test_why_tells_of_hot_workers() -> None:
    index = PrefixIndex()
    hold(index, A, 4)
    router = Router(policy("prefix-aware", 1, guard_requests=1), index)
    router.add(A)
    for number in range(2):
        router.route(number, PROMPT)
    router.add(B)
    decision = router.route("r", PROMPT)
    assert decision.worker == B
    assert decision.why().endswith("; 1 with too many requests got no credit for what they hold.")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "random",
            r"random chose \w rank 0, by chance from 2: it has 0 in flight \(0 prompt tokens waiting, 0 being answered\)\.",
        ),
        ("round-robin", r"round-robin chose \w rank 0, whose turn it was among 2: it has 0 in flight .*"),
        ("least-loaded", r"least-loaded chose \w rank 0, the least loaded of 2: it has 0 in flight .*"),
        ("session-affinity", r"session-affinity chose \w rank 0, where its session belongs among 2: it has 0 in flight .*"),
    ],
)
def test_why_of_policies_that_do_not_ask_the_index(name: str, sentence: str) -> None:
    """No word of caches."""
    router = Router(policy(name, 1))
    router.add(A)
    router.add(B)
    assert re.fullmatch(sentence, router.route("r", PROMPT, session="s").why())


def test_a_policy_of_ones_own() -> None:
    """What a policy needs is two names and `choose`; it need not weigh anything."""

    class Last:
        name = "last"
        asks_index = True

        def choose(self, prompt: Prompt, candidates: Any) -> Choice:
            found: list[Candidate] = list(candidates)
            return Choice(found[-1], f"the last for {prompt.length} tokens")

    router = Router(Last(), PrefixIndex())
    router.add(A)
    router.add(B)
    decision: Decision = router.route("r", PROMPT)
    assert (decision.worker, decision.considered) == (B, [])
    assert decision.why().startswith(
        "last chose b rank 0, the last for 8 tokens: it is EXACT, holds 0 of 8 tokens, has 0 in flight"
    )


def test_a_router_shows_itself() -> None:
    router = router_of(A, B)
    router.route("r", PROMPT)
    assert repr(router) == "<Router round-robin, 2 workers, 1 requests in flight>"


def test_the_examples_of_the_guide_run() -> None:
    """Every block of docs/routing.md, one after the other."""
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", (Path(__file__).parent.parent / "docs" / "routing.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, names)  # noqa: S102 - our own document
