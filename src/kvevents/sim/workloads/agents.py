"""Agents that use tools."""

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
    """Agents of a few kinds, each with a long schema of tools; every turn appends a call and its result to the context.

    Prompts are about a hundred times as long as answers, as Manus reports of its agents ("Context Engineering for AI Agents",
    manus.im/blog). A turn may hand work to sub-agents that branch from the whole context of their parent; it goes on when they
    are assumed to be done, with their reports appended. The other numbers are guesses; set your own.
    """

    kinds: int = 4
    popularity: float = 1.0
    """Zipf exponent of the kinds."""
    schema: Lengths = field(default=Lengths(8_000, 0.5, 1_000, 30_000))
    """Instructions and tools of a kind."""
    task: Lengths = field(default=Lengths(400, 1.0, 20, 10_000))
    call: Lengths = field(default=Lengths(160, 0.8, 10, 4_000))
    """An answer: thought and tool call."""
    result: Lengths = field(default=Lengths(500, 1.2, 20, 12_000))
    """What a tool returns; of a sub-agent, its report."""
    turns: float = 20.0
    """Mean number of turns."""
    tool: Lengths = field(default=Lengths(2, 1.0, 1, 120))
    """Seconds that a tool takes."""
    delegating: float = 0.05
    """Share of turns that begin sub-agents, 0 to 1."""
    helpers: int = 3
    """Sub-agents of such a turn, at most; at least one."""
    helper_turns: float = 6.0
    """Mean number of turns of a sub-agent; sub-agents have none of their own."""
    context: int = 128_000
    """An agent ends before a prompt would be longer than this."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._from_one("kinds", "turns", "helpers", "helper_turns", "context")
        self._need(("delegating",), lambda value: 0 <= value <= 1, "a share from 0 to 1")
        self._need(("popularity",), lambda value: value >= 0, "0 or more")

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
    """One agent at work; its session is a template for those of its helpers."""

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
        """Seconds until the next turn: that of a tool, or the mean time of the helpers, who work side by side."""
        tool, call = self.settings.tool, self.settings.call
        if not helpers:
            return tool.draw(self.random)
        return self.settings.helper_turns * (tool.median + FIRST_TOKEN_SECONDS + TOKEN_SECONDS * call.median)
