"""`kvevents.sim.simulated_engine`: limits of a step, the order of requests, the times of events, and that every run ends."""

from __future__ import annotations

from itertools import pairwise
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvevents.errors import ConfigError
from kvevents.events import AllBlocksCleared, BlockStored
from kvevents.sim.cache import CacheSize
from kvevents.sim.requests import Request
from kvevents.sim.simulated_engine import SimulatedEngine, StepLimits
from sim_cases import SECONDS, Run, request

NONE = {"host_blocks": st.just(0), "window": st.none()}
FULL = st.builds(CacheSize, st.integers(1, 12), st.integers(1, 5), **NONE)
SIZES = st.one_of(
    FULL,
    st.builds(CacheSize, st.integers(2, 20), st.integers(1, 4), **NONE | {"window": st.integers(2, 10)}),
    st.builds(CacheSize, st.integers(1, 12), st.integers(1, 4), **NONE | {"host_blocks": st.integers(1, 8)}),
)
STEP_LIMITS = st.integers(1, 4).flatmap(lambda seqs: st.builds(StepLimits, st.just(seqs), st.integers(seqs, 16)))
# Steps to wait before a request, and the request: few different tokens, so that prompts share beginnings.
ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.builds(request, st.lists(st.integers(0, 1), min_size=1, max_size=14), st.integers(1, 10)),
    ),
    min_size=3,
    max_size=12,
)


def run_to_end(size: CacheSize, step_limits: StepLimits, arrivals: list[tuple[int, Request]]) -> Run:
    """Return a run that has ended."""
    run = Run(size, step_limits)
    for wait, one in arrivals:
        for _ in range(wait):
            if not run.engine.idle:
                run.step()
        run.submit([one])
    run.finish()
    return run


@settings(max_examples=250)
@given(SIZES, STEP_LIMITS, ARRIVALS)
def test_every_request_is_answered_or_refused_with_any_pool(
    size: CacheSize, step_limits: StepLimits, arrivals: list[tuple[int, Request]]
) -> None:
    """`Run` checks limits, events and lookups in each step; this checks the totals of the whole run."""
    run = run_to_end(size, step_limits, arrivals)
    finished = [job for step in run.steps for job in step.finished]
    refused = [job for step in run.steps for job in step.refused]
    assert sorted(map(id, finished + refused)) == sorted(map(id, run.submitted)), "each exactly once"
    assert sorted(id(job) for step in run.steps for job in step.first_token_jobs) == sorted(map(id, finished))
    if not run.engine.preemptions:
        # One token of the answer comes with the prompt's last chunk, and one with each later step.
        assert sum(step[2] for step in run.costs.steps) == sum(len(job.request.output) - 1 for job in finished)
    lookups = [lookup for step in run.steps for lookup in step.lookups]
    assert len(lookups) == len(finished) + run.engine.preemptions
    # First come, first served: no request overtakes another.
    assert [lookup.job for lookup in lookups if lookup.is_first] == [job for job in run.submitted if job in finished]
    assert all(lookup.job.cached == lookup.cached for lookup in lookups if lookup.is_first)
    # What is not cached is computed; after a preemption, at most as much.
    uncached = sum(lookup.tokens - lookup.cached for lookup in lookups)
    assert run.prefilled == uncached if not run.engine.preemptions else run.prefilled <= uncached


@given(FULL, st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=6))
def test_only_requests_longer_than_the_whole_cache_are_refused(size: CacheSize, lengths: list[tuple[int, int]]) -> None:
    """The last token of an answer is never computed and needs no room."""
    run = Run(size, StepLimits(4, 16))
    jobs = run.submit(request(range(prompt), answer) for prompt, answer in lengths)
    run.finish()
    refused = {job for step in run.steps for job in step.refused}
    assert [job in refused for job in jobs] == [ceil((sum(pair) - 1) / size.block_size) > size.blocks for pair in lengths]


@given(st.integers(1, 5), st.integers(1, 30), st.integers(1, 30), st.integers(1, 12))
def test_a_block_is_announced_in_the_step_that_computes_its_last_token(
    block_size: int, prompt: int, answer: int, budget: int
) -> None:
    """A single request is computed in chunks of the budget, then a token per step; the last token of the answer is never
    computed."""
    run = Run(CacheSize(100, block_size), StepLimits(1, budget))
    (job,) = run.submit([request(range(prompt), answer)])
    run.finish()
    chunks = [min(budget, prompt - start) for start in range(0, prompt, budget)]
    computed, announced = 0, 0
    for number, tokens in enumerate([*chunks, *[1] * (answer - 1)]):
        computed += tokens
        step = run.steps[number]
        announced += sum(len(event.block_hashes) for event in step.events if isinstance(event, BlockStored))
        assert announced == computed // block_size
        assert (job in step.first_token_jobs) == (number == len(chunks) - 1)
        assert (job in step.finished) == (number == len(chunks) + answer - 2)
    assert len(run.steps) == len(chunks) + answer - 1
    assert [step[0] for step in run.costs.steps] == [*chunks, *[0] * (answer - 1)]


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 15)), min_size=1, max_size=8), st.integers(1, 4), st.integers(4, 20)
)
def test_a_step_costs_what_its_tokens_attend_to(lengths: list[tuple[int, int]], seqs: int, budget: int) -> None:
    """Pairs and context are counted here token by token, without cached prompts and with room for all."""
    run = Run(CacheSize(1000, 4), StepLimits(seqs, budget))
    run.submit(request([100 * number + 1, *range(2, prompt + 1)], answer) for number, (prompt, answer) in enumerate(lengths))
    run.finish()
    pairs = sum(place for prompt, _ in lengths for place in range(1, prompt + 1))
    # `_chunk` counts that each of n tokens after c others attends to c + (n + 1) / 2, without the half.
    assert pairs - sum(prompt for prompt, _ in lengths) <= sum(step[1] for step in run.costs.steps) <= pairs
    assert sum(step[0] for step in run.costs.steps) == sum(prompt for prompt, _ in lengths)
    assert sum(step[2] for step in run.costs.steps) == sum(answer - 1 for _, answer in lengths)
    assert sum(step[3] for step in run.costs.steps) == sum(
        prompt + place for prompt, answer in lengths for place in range(answer - 1)
    )
    assert run.seconds == [SECONDS.seconds(*step) for step in run.costs.steps]


def test_sequences_run_concurrently_up_to_the_limit_and_others_wait() -> None:
    run = Run(CacheSize(100, 4), StepLimits(2, 64))
    jobs = run.submit(request([number] * 4, 3) for number in range(3))
    first = run.step()
    assert [lookup.job for lookup in first.lookups] == jobs[:2]
    assert (run.engine.running, run.engine.waiting) == (2, 1)
    run.finish()
    assert [lookup.job for lookup in run.steps[3].lookups] == jobs[2:]


def test_requests_in_the_middle_of_a_step_are_returned() -> None:
    """`jobs` between `begin` and `end` returns all requests that are not finished."""
    run = Run(CacheSize(4, 4), StepLimits(3, 64))
    jobs = run.submit([request(range(4), 2), request(range(4), 2), request(range(99), 1), request(range(8), 8)])
    for _ in range(3):
        run.engine.begin()
        left = run.engine.jobs()
        assert {*left} >= {
            job for job in jobs if job not in {one for step in run.steps for one in step.finished + step.refused}
        }
        assert not run.engine.idle
        run.steps.append(run.engine.end())
    assert all(
        job in {*run.engine.jobs(), *(one for step in run.steps for one in step.finished + step.refused)} for job in jobs
    )


def test_a_prompt_finds_the_blocks_of_an_equal_one_in_the_same_step() -> None:
    """The second of two equal prompts finds the blocks that the first one is about to compute."""
    run = Run(CacheSize(100, 4), StepLimits(2, 64))
    jobs = run.submit([request(range(9)), request(range(9))])
    step = run.step()
    assert [(lookup.job, lookup.cached, lookup.position) for lookup in step.lookups] == [(jobs[0], 0, 0), (jobs[1], 8, 1)]


def test_a_waiting_prompt_is_admitted_when_another_one_has_computed_its_beginning() -> None:
    """The prompt fits although no block is freed, because it shares the blocks that a running sequence has filled."""
    run = Run(CacheSize(6, 4), StepLimits(3, 64))
    run.submit([request(range(8), 12)])
    run.step()
    run.step()
    run.submit([request([*range(8), *[9] * 4, *range(100, 111)], 1)])
    steps = [run.step() for _ in range(3)]
    assert [[lookup.cached for lookup in step.lookups] for step in steps] == [[], [], [12]]


def test_the_newest_request_is_preempted_waits_first_and_finds_its_own_blocks() -> None:
    run = Run(CacheSize(6, 2), StepLimits(3, 64))
    first, last, waiting = run.submit([request([1, 1, 1, 1], 8), request([2, 2, 2, 2], 4), request([3] * 8, 1)])
    run.finish()
    assert run.engine.preemptions == 1
    order = [(lookup.job, lookup.is_first) for step in run.steps for lookup in step.lookups]
    assert order == [(first, True), (last, True), (last, False), (waiting, True)]
    again = next(lookup for step in run.steps for lookup in step.lookups if not lookup.is_first)
    assert again.tokens > 4, "tokens of the answer before the preemption are part of the lookup"


def test_a_preempted_answer_reports_its_first_token_once() -> None:
    run = Run(CacheSize(6, 2), StepLimits(3, 64))
    jobs = run.submit([request([1, 1, 1, 1], 8), request([2, 2, 2, 2], 4)])
    run.finish()
    assert run.engine.preemptions
    assert [job for step in run.steps for job in step.first_token_jobs] == jobs


def test_no_request_is_admitted_in_a_step_that_preempts() -> None:
    run = Run(CacheSize(6, 2), StepLimits(3, 64))
    run.submit([request([1, 1, 1, 1], 8), request([2, 2, 2, 2], 4), request([3], 1)])
    while not run.engine.preemptions:
        run.step()
    assert not run.steps[-1].lookups


def test_a_follow_up_prompt_finds_the_prompt_and_the_answer() -> None:
    """The exception is the answer's last token, which was never computed."""
    run = Run(CacheSize(50, 4), StepLimits())
    run.submit([request(range(10), 8)])
    run.finish()
    (again,) = run.submit([request([*range(10), *[9] * 8, 1, 2], 1)])
    run.finish()
    assert again.cached == 16
    (other,) = run.submit([request([*range(10), *[9] * 5, 3, 3, 3], 1)])
    run.finish()
    assert other.cached == 12


def test_a_reset_waits_until_no_sequence_holds_a_block() -> None:
    run = Run(CacheSize(50, 4), StepLimits())
    run.submit([request(range(8), 3)])
    run.step()
    run.engine.reset()
    events = []
    while not run.engine.idle:
        assert AllBlocksCleared() not in events
        events = run.step().events
    assert events == [AllBlocksCleared()]


def test_a_reset_of_an_idle_engine_is_sent_with_its_next_step() -> None:
    """It comes before the stores of that step and before its lookup, which finds nothing."""
    run = Run(CacheSize(50, 4), StepLimits())
    run.submit([request(range(8))])
    run.finish()
    run.engine.reset()
    run.submit([request(range(9))])
    step = run.step()
    assert isinstance(step.events[0], AllBlocksCleared)
    assert [(lookup.cached, lookup.position) for lookup in step.lookups] == [(0, 1)]


def test_loading_blocks_from_the_host_takes_time() -> None:
    run = Run(CacheSize(4, 4, host_blocks=20), StepLimits())
    for prompt in ([1] * 12, [2] * 15, [1] * 12):
        run.submit([request(prompt)])
        run.finish()
    loaded = 8  # of the third prompt; its last block is computed
    assert run.seconds[-1] == pytest.approx(SECONDS.seconds(*run.costs.steps[-1]) + SECONDS.reload * loaded)
    assert run.costs.steps[-1][0] == 4


def test_a_sliding_window_frees_memory_as_the_answer_grows() -> None:
    """After each decoding step, the sliding group holds at most its window and the block that is being filled."""
    run = Run(CacheSize(100, 2, window=6), StepLimits(1, 8))
    (job,) = run.submit([request(range(20), 30)])
    held = []
    while not run.engine.idle:
        run.step()
        if job.sequence.tables:
            held.append(sum(block > 0 for block in job.sequence.tables[0]))
    assert max(held) <= (6 - 1 + 8) // 2 + 1
    assert all(count <= 4 for count in held[4:])


@pytest.mark.parametrize(
    ("seqs", "tokens", "name"),
    [(0, 8, "max_num_seqs"), (1, 0, "max_num_batched_tokens"), (9, 8, "at least max_num_seqs, which is 9")],
)
def test_invalid_limits_are_refused(seqs: int, tokens: int, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        StepLimits(seqs, tokens)


def test_engines_with_different_seeds_announce_different_hashes() -> None:
    hashes = []
    for seed in ("life 0", "life 1"):
        engine = SimulatedEngine(CacheSize(10, 4), SECONDS, StepLimits(), seed=seed)
        engine.submit(request(range(8)))
        engine.begin()
        hashes.append({name for event in engine.end().events if isinstance(event, BlockStored) for name in event.block_hashes})
    assert all(not one & other for one, other in pairwise(hashes))
