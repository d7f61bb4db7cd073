"""The workload of conversations between users and assistants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random

from kvevents.sim.requests import Text
from kvevents.sim.workloads.traffic import Lengths, Session, Traffic, Turn, Writer, answer_seconds, turns_of, zipf


@dataclass(frozen=True, kw_only=True)
class Chat(Traffic):
    """Conversations with several apps, each with its system prompt. A prompt is the one before, its answer and new text.

    The mean number of turns is between WildChat's 2.5 (arXiv:2405.01470) and ShareChat's 4.6 (arXiv:2512.17843: 660,000 in
    142,808 conversations); answers are as long as those of Mooncake's conversation trace (median 350, 90 % below 600). Think
    times, system prompts and lengths of user messages are guesses.
    """

    apps: int = 8
    popularity: float = 1.0
    """Zipf exponent of the apps: 0 makes all equally popular."""
    preamble: int = 0
    """Tokens of a common beginning of all system prompts, for example an operator's rules."""
    system: Lengths = field(default=Lengths(1_200, 0.7, 100, 8_000))
    user: Lengths = field(default=Lengths(120, 1.2, 4, 8_000))
    answer: Lengths = field(default=Lengths(350, 0.6, 1, 2_000))
    turns: float = 4.0
    """Mean number of turns."""
    think: Lengths = field(default=Lengths(20, 1.0, 1, 600))
    """Think time: seconds from the end of an answer to the next turn."""
    context: int = 32_768
    """Largest prompt in tokens; a conversation ends before a longer one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._from_one("apps", "turns", "context")
        self._need(("preamble", "popularity"), lambda value: value >= 0, "at least 0")

    def sessions(self, random: Random) -> Iterator[Session]:
        """See `Traffic`."""
        writer = Writer(random)
        preamble = writer.write(self.preamble) if self.preamble else Text()
        systems = [preamble + writer.write(self.system.draw(random)) for _ in range(self.apps)]
        weights = zipf(self.apps, self.popularity)
        for number in count():
            (system,) = random.choices(systems, cum_weights=weights)
            yield Session(f"chat-{number}", self._talk(system, writer, random), *self.tenant(random))

    def _talk(self, context: Text, writer: Writer, random: Random) -> Iterator[Turn]:
        prompt = context + writer.write(self.user.draw(random))
        for _ in range(turns_of(self.turns, random) - 1):
            answer = writer.write(self.answer.draw(random))
            following = prompt + answer + writer.write(self.user.draw(random))
            if len(following) > self.context:
                break
            yield Turn(prompt, answer, answer_seconds(answer) + self.think.draw(random))
            prompt = following
        yield Turn(prompt, writer.write(self.answer.draw(random)), None)
