"""`kvevents.sim.workload_generators`: conversations that share system prompts."""

from __future__ import annotations

from collections import defaultdict
from itertools import islice, pairwise

import pytest

from kvevents.errors import ConfigError
from kvevents.sim.requests import Request, Text
from kvevents.sim.workload_generators import answer_seconds
from kvevents.sim.workloads import Chat, Lengths


def conversations(chat: Chat, count: int = 2_000, seed: int = 3) -> dict[str | None, list[Request]]:
    found = defaultdict(list)
    for request in islice(chat.requests(seed), count):
        found[request.session].append(request)
    return found


def test_each_prompt_extends_the_previous_prompt_and_its_answer() -> None:
    """This is what a prefix cache can reuse; LoRA and salt stay the same within a conversation."""
    several = [
        conversation for conversation in conversations(Chat(lora_share=0.3, salted_share=0.3)).values() if len(conversation) > 1
    ]
    assert len(several) > 100
    for before, after in (pair for conversation in several for pair in pairwise(conversation)):
        context = (before.prompt + before.output).pieces
        assert after.prompt.pieces[: len(context)] == context
        assert len(after.prompt.pieces) == len(context) + 1
        assert (before.lora, before.salt) == (after.lora, after.salt)


def test_a_turn_comes_only_after_reading_and_thinking() -> None:
    """The loop is open: an answer takes an assumed time, and the think time follows it."""
    for conversation in conversations(Chat(think=Lengths(20, 0.5, 10, 60))).values():
        for before, after in pairwise(conversation):
            assert after.at - before.at >= answer_seconds(before.output) + 10


def test_conversations_share_the_system_prompt_of_their_app_and_the_preamble() -> None:
    firsts = {conversation[0].prompt.pieces[:2] for conversation in conversations(Chat(apps=3, preamble=64)).values()}
    assert len(firsts) == 3
    assert len({pieces[0] for pieces in firsts}) == 1
    assert {len(Text(pieces[:1])) for pieces in firsts} == {64}


def test_conversations_end_at_the_context_limit() -> None:
    found = conversations(
        Chat(turns=100, context=6_000, user=Lengths(800, 0.1, 1, 1_000), system=Lengths(500, 0.1, 1, 600)), 5_000
    )
    assert 4_000 < max(len(request.prompt) for conversation in found.values() for request in conversation) <= 6_000


@pytest.mark.parametrize(("name", "value"), [("apps", 0), ("turns", 0.5), ("context", 0), ("preamble", -1), ("popularity", -1)])
def test_the_error_for_an_invalid_setting_names_it(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is "):
        Chat(**{name: value})  # type: ignore[arg-type]
