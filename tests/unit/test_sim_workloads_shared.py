"""`kvevents.sim.workload_generators`: shared system prompts, and the benchmark of llm-d."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from kvevents.errors import ConfigError
from kvevents.sim.requests import Text, shared_prefix
from kvevents.sim.workloads import LlmD, SharedPrompts


def test_few_system_prompts_serve_many_users() -> None:
    """The most popular prompt has its Zipf share, every question is new, and a user keeps the same system prompt."""
    requests = list(islice(SharedPrompts(prompts=10, users=2_000, popularity=1.0).requests(1), 5_000))
    uses = Counter(request.prompt.pieces[0] for request in requests)
    assert len(uses) == 10
    assert uses.most_common(1)[0][1] / 5_000 == pytest.approx(1 / sum(1 / place for place in range(1, 11)), rel=0.15)
    assert len({request.prompt.pieces[1] for request in requests}) == 5_000
    assert len({(request.session, request.prompt.pieces[0]) for request in requests}) == len(
        {request.session for request in requests}
    )


def test_all_requests_of_a_system_prompt_have_its_lora_and_salt() -> None:
    requests = list(islice(SharedPrompts(lora_share=0.5, salted_share=0.5).requests(1), 500))
    assert len({(one.prompt.pieces[0], one.lora, one.salt) for one in requests}) == len(
        {one.prompt.pieces[0] for one in requests}
    )
    assert len({(one.lora, one.salt) for one in requests}) > 4


def test_the_llm_d_workload_has_the_shape_of_its_benchmark() -> None:
    """It has 150 groups of 6,000 tokens and five questions of 1,200 tokens each, repeated in one shuffled order."""
    requests = list(islice(LlmD().requests(1), 1_500))
    assert {(len(one.prompt), len(one.output)) for one in requests} == {(7_200, 1_000)}
    assert set(Counter(one.prompt.pieces[0] for one in requests[:750]).values()) == {5}
    assert [one.prompt for one in requests[:750]] == [one.prompt for one in requests[750:]]
    resident = {piece for one in requests for piece in one.prompt.pieces}
    assert sum(len(Text([piece])) for piece in resident) == 1_800_000
    assert shared_prefix(requests[:750]) == pytest.approx(6_000 / 7_200 * 600 / 750)


def test_each_user_of_the_llm_d_workload_is_a_session() -> None:
    requests = list(islice(LlmD(groups=3, users=2).requests(1), 60))
    assert len({one.session for one in requests}) == len({one.prompt for one in requests}) == 6
    assert len({one.output for one in requests}) == 60


@pytest.mark.parametrize("name", ["groups", "users", "system", "question", "output"])
def test_the_error_for_an_invalid_setting_names_it(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is 0"):
        LlmD(**{name: 0})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^prompts is 0"):
        SharedPrompts(prompts=0)
