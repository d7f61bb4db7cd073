"""The workload of agents that call tools."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random

from kvevents.sim.requests import Text
from kvevents.sim.workloads.traffic import (
    FIRST_TOKEN_SECONDS,
    TOKEN_SECONDS,
    Lengths,
    Session,
    Traffic,
    Turn,
    Writer,
    answer_seconds,
    turns_of,
    zipf,
)


@dataclass(frozen=True, kw_only=True)
class Agents(Traffic):
    """Agents of several kinds, each with a long prompt of tool schemas. Each turn appends a call and its result.

    Prompts are about a hundred times as long as answers, as Manus reports of its agents ("Context Engineering for AI Agents",
    manus.im/blog). A turn can start sub-agents that branch from the whole context of their parent. The parent continues when
    they are assumed to be done, with their reports appended. The other defaults are guesses.
    """

    kinds: int = 4
    popularity: float = 1.0
    """Zipf exponent of the kinds: 0 makes all equally popular."""
    schema: Lengths = field(default=Lengths(8_000, 0.5, 1_000, 30_000))
    """Tokens of the instructions and tool schemas of a kind."""
    task: Lengths = field(default=Lengths(400, 1.0, 20, 10_000))
    call: Lengths = field(default=Lengths(160, 0.8, 10, 4_000))
    """Tokens of an answer: reasoning and tool call."""
    result: Lengths = field(default=Lengths(500, 1.2, 20, 12_000))
    """Tokens of a tool's result or a sub-agent's report."""
    turns: float = 20.0
    """Mean number of turns."""
    tool: Lengths = field(default=Lengths(2, 1.0, 1, 120))
    """Seconds that a tool takes."""
    delegating: float = 0.05
    """Share of turns that start sub-agents, 0 to 1."""
    helpers: int = 3
    """Largest number of sub-agents of one turn; the smallest is 1."""
    helper_turns: float = 6.0
    """Mean number of turns of a sub-agent. Sub-agents start no sub-agents."""
    context: int = 128_000
    """Largest prompt in tokens; an agent ends before a longer one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._from_one("kinds", "turns", "helpers", "helper_turns", "context")
        self._need(("delegating",), lambda value: 0 <= value <= 1, "a share from 0 to 1")
        self._need(("popularity",), lambda value: value >= 0, "at least 0")

    def sessions(self, random: Random) -> Iterator[Session]:
        """See `Traffic`."""
        writer = Writer(random)
        schemas = [writer.write(self.schema.draw(random)) for _ in range(self.kinds)]
        weights = zipf(self.kinds, self.popularity)
        for number in count():
            (schema,) = random.choices(schemas, cum_weights=weights)
            lora, salt = self.tenant(random)
            agent = _Agent(self, Session(f"agent-{number}", iter(()), lora, salt), writer, random)
            yield agent.begun(schema, self.turns, self.delegating)


@dataclass(frozen=True, slots=True)
class _Agent:
    """One agent. Its session is the template of its sub-agents' sessions."""

    settings: Agents
    session: Session
    writer: Writer
    random: Random

    def begun(self, context: Text, turns: float, delegating: float) -> Session:
        return self.session._replace(turns=self._work(context, turns, delegating))

    def _work(self, context: Text, turns: float, delegating: float) -> Iterator[Turn]:
        settings, random = self.settings, self.random
        prompt = context + self._text(settings.task)
        helped = 0
        for _ in range(turns_of(turns, random) - 1):
            call = self._text(settings.call)
            helpers = random.randint(1, settings.helpers) if random.random() < delegating else 0
            following = (
                prompt + call + Text(piece for _ in range(max(helpers, 1)) for piece in self._text(settings.result).pieces)
            )
            if len(following) > settings.context:
                break
            begins = [self._helper(helped + place).begun(prompt + call, settings.helper_turns, 0) for place in range(helpers)]
            helped += helpers
            yield Turn(prompt, call, answer_seconds(call) + self._away(helpers), begins)
            prompt = following
        yield Turn(prompt, self._text(settings.call), None)

    def _text(self, lengths: Lengths) -> Text:
        return self.writer.write(lengths.draw(self.random))

    def _helper(self, number: int) -> _Agent:
        session = self.session._replace(name=f"{self.session.name}.{number}")
        return _Agent(self.settings, session, self.writer, self.random)

    def _away(self, helpers: int) -> float:
        """Return the seconds until the next turn: the duration of a tool, or the mean duration of concurrent sub-agents."""
        tool, call = self.settings.tool, self.settings.call
        if not helpers:
            return tool.draw(self.random)
        return self.settings.helper_turns * (tool.median + FIRST_TOKEN_SECONDS + TOKEN_SECONDS * call.median)
