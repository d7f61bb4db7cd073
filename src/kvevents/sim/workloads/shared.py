"""Workloads of many users that share few long system prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle
from random import Random

from kvevents.sim.requests import Text
from kvevents.sim.workloads.traffic import Lengths, Session, Traffic, Turn, Writer, zipf


@dataclass(frozen=True, kw_only=True)
class SharedPrompts(Traffic):
    """Single questions of many users, each after one of a few long system prompts with Zipf popularity."""

    prompts: int = 32
    """Number of system prompts."""
    popularity: float = 1.0
    """Zipf exponent of the system prompts: 0 makes all equally popular."""
    users: int = 1_000
    """Number of users. Each has one system prompt, and all ask equally often."""
    system: Lengths = field(default=Lengths(3_000, 0.6, 500, 16_000))
    question: Lengths = field(default=Lengths(150, 1.0, 4, 4_000))
    answer: Lengths = field(default=Lengths(350, 0.6, 1, 2_000))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._from_one("prompts", "users")
        self._need(("popularity",), lambda value: value >= 0, "at least 0")

    def sessions(self, random: Random) -> Iterator[Session]:
        """See `Traffic`. A session is one question, named after the user."""
        writer = Writer(random)
        systems = [(writer.write(self.system.draw(random)), *self.tenant(random)) for _ in range(self.prompts)]
        users = random.choices(systems, cum_weights=zipf(self.prompts, self.popularity), k=self.users)
        while True:
            user = random.randrange(self.users)
            system, lora, salt = users[user]
            prompt = system + writer.write(self.question.draw(random))
            turn = Turn(prompt, writer.write(self.answer.draw(random)), None)
            yield Session(f"user-{user}", iter((turn,)), lora, salt)


@dataclass(frozen=True, kw_only=True)
class LlmD(Traffic):
    """The shape of llm-d's published benchmark: 150 groups, each with a system prompt of its own and five users.

    "KV-Cache Wins You Can See" (https://llm-d.ai/blog/kvcache-wins-you-can-see) and the report behind it: eight pods of
    Qwen3-32B with 307,328 tokens of cache each; `shared_prefix` load of inference-perf with `num_groups: 150`,
    `num_prompts_per_group: 5`, `system_prompt_len: 6000`, `question_len: 1200`, `output_len: 1000`; Poisson arrivals, warmed up
    with 750 requests at 15 a second, then in stages from 3 to 60 a second. All prompts together are 1.8 million tokens, 73 % of
    the caches. Like inference-perf, it repeats its 750 prompts in one shuffled order.
    """

    rate: float = 20.0
    groups: int = 150
    users: int = 5
    """Number of prompts of each group."""
    system: int = 6_000
    question: int = 1_200
    """Tokens of a question; a user always asks the same one."""
    output: int = 1_000

    def __post_init__(self) -> None:
        super().__post_init__()
        self._from_one("groups", "users", "system", "question", "output")

    def sessions(self, random: Random) -> Iterator[Session]:
        """See `Traffic`. A session is one question, named after the user."""
        writer = Writer(random)
        asked: list[tuple[str, Text, str | None, str | None]] = []
        for group in range(self.groups):
            system, (lora, salt) = writer.write(self.system), self.tenant(random)
            asked += [(f"user-{group}.{user}", system + writer.write(self.question), lora, salt) for user in range(self.users)]
        random.shuffle(asked)
        for name, prompt, lora, salt in cycle(asked):
            yield Session(name, iter((Turn(prompt, writer.write(self.output), None),)), lora, salt)
