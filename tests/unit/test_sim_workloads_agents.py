"""`kvevents.sim.workload_generators`: agents whose context grows with each turn, and their sub-agents."""

from __future__ import annotations

from collections import defaultdict
from itertools import islice, pairwise

import pytest

from kvevents.errors import ConfigError
from kvevents.sim.requests import Request
from kvevents.sim.workloads import Agents


def requests_by_session(settings: Agents, count: int = 3_000) -> dict[str, list[Request]]:
    found = defaultdict(list)
    for request in islice(settings.requests(3), count):
        found[request.session or ""].append(request)
    return found


def test_every_turn_appends_a_call_and_its_result() -> None:
    """The context only grows, so all of it can be found in a cache."""
    for work in requests_by_session(Agents(delegating=0)).values():
        for before, after in pairwise(work):
            context = (before.prompt + before.output).pieces
            assert after.prompt.pieces[: len(context)] == context
            assert len(after.prompt.pieces) == len(context) + 1


def test_sub_agents_branch_from_their_parents_context() -> None:
    """Their first prompt begins with all input and output of the parent until then, and comes after the parent's answer."""
    found = requests_by_session(Agents(delegating=0.3, lora_share=0.5, salted_share=0.5))
    helpers = [name for name in found if "." in name]
    assert len(helpers) > 50
    for name in helpers:
        parent, first = found[name.split(".")[0]], found[name][0]
        from_turn = [turn for turn in parent if first.prompt.pieces[:-1] == (turn.prompt + turn.output).pieces]
        assert len(from_turn) == 1
        assert from_turn[0].at < first.at
        assert (first.lora, first.salt) == (parent[0].lora, parent[0].salt)


def test_a_parent_gets_a_report_of_each_helper() -> None:
    found = requests_by_session(Agents(delegating=1, helpers=1, turns=4))
    for name, work in found.items():
        for before, after in pairwise(work if "." not in name else []):
            assert len(after.prompt.pieces) == len(before.prompt.pieces) + 2


def test_prompts_are_about_a_hundred_times_as_long_as_answers() -> None:
    """Manus reports this ratio of its agents. Agents of one kind share their schema."""
    requests = list(islice(Agents().requests(1), 3_000))
    ratio = sum(len(request.prompt) for request in requests) / sum(len(request.output) for request in requests)
    assert 70 < ratio < 150
    assert len({request.prompt.pieces[0] for request in requests}) == Agents().kinds


def test_agents_end_at_the_context_limit() -> None:
    found = requests_by_session(Agents(turns=1_000, context=40_000), 5_000)
    assert 35_000 < max(len(request.prompt) for work in found.values() for request in work) <= 40_000


@pytest.mark.parametrize(
    ("name", "value"),
    [("kinds", 0), ("turns", 0), ("delegating", 1.5), ("helpers", 0), ("helper_turns", 0), ("popularity", -1)],
)
def test_the_error_for_an_invalid_setting_names_it(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is "):
        Agents(**{name: value})  # type: ignore[arg-type]
