"""`kvevents.sim.workload_generators`."""

from __future__ import annotations

from collections import defaultdict
from itertools import islice, pairwise

import pytest

from kvevents.errors import ConfigError
from kvevents.sim.requests import Request, Text
from kvevents.sim.workload_generators import answer_seconds
from kvevents.sim.workloads import Chat, Lengths


def talks(chat: Chat, count: int = 2_000, seed: int = 3) -> dict[str | None, list[Request]]:
    found = defaultdict(list)
    for request in islice(chat.requests(seed), count):
        found[request.session].append(request)
    return found


def test_each_prompt_is_the_one_before_its_answer_and_something_new() -> None:
    """That is what a prefix cache lives of; LoRA and salt stay with a conversation."""
    several = [talk for talk in talks(Chat(lora_share=0.3, salted_share=0.3)).values() if len(talk) > 1]
    assert len(several) > 100
    for before, after in (pair for talk in several for pair in pairwise(talk)):
        context = (before.prompt + before.output).pieces
        assert after.prompt.pieces[: len(context)] == context
        assert len(after.prompt.pieces) == len(context) + 1
        assert (before.lora, before.salt) == (after.lora, after.salt)


def test_a_turn_comes_only_after_reading_and_thinking() -> None:
    """The loop is open: answers are assumed to take their time, then comes the think time."""
    for talk in talks(Chat(think=Lengths(20, 0.5, 10, 60))).values():
        for before, after in pairwise(talk):
            assert after.at - before.at >= answer_seconds(before.output) + 10


def test_apps_share_their_system_prompts_and_all_share_the_preamble() -> None:
    firsts = {talk[0].prompt.pieces[:2] for talk in talks(Chat(apps=3, preamble=64)).values()}
    assert len(firsts) == 3
    assert len({pieces[0] for pieces in firsts}) == 1
    assert {len(Text(pieces[:1])) for pieces in firsts} == {64}


def test_conversations_end_at_the_context_limit() -> None:
    found = talks(Chat(turns=100, context=6_000, user=Lengths(800, 0.1, 1, 1_000), system=Lengths(500, 0.1, 1, 600)), 5_000)
    assert 4_000 < max(len(request.prompt) for talk in found.values() for request in talk) <= 6_000


@pytest.mark.parametrize(("name", "value"), [("apps", 0), ("turns", 0.5), ("context", 0), ("preamble", -1), ("popularity", -1)])
def test_wrong_settings_are_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"^invalid {name} "):
        Chat(**{name: value})  # type: ignore[arg-type]
