"""Generated workloads: chats, agents that call tools, and users that share long system prompts.

Theory of operation. An arrival process gives the times of requests, so the rate is as configured from the first second on. At
each arrival the session that has been due for longest sends its next turn. If no session is due, a new one begins. After a
turn, the session is due again when an assumed answer time and a think time have passed. The load is open-loop: the rate does
not depend on how fast the fleet answers. A session's turn can be sent slightly after the think time, because it waits for the
next arrival.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import accumulate, count, cycle, repeat
from random import Random
from types import MappingProxyType
from typing import Annotated, Final, NamedTuple, TypeAlias

from kvevents.errors import ConfigError
from kvevents.settings import Positive, Range, Settings
from kvevents.sim.requests import Drawn, Request, Text

ARRIVALS: Final[Mapping[str, Callable[[float, float, Random], float]]] = MappingProxyType(
    {
        "constant": lambda mean, _variation, _random: mean,
        "poisson": lambda mean, _variation, random: random.expovariate(1 / mean),
        "bursty": lambda mean, variation, random: random.gammavariate(1 / variation**2, mean / (1 / variation**2)),
    }
)
"""Maps each arrival process to a function that draws the seconds to the next arrival from the mean, the coefficient of
variation and a random generator. `constant`: one request every `1 / rate` seconds. `poisson`: independent requests. `bursty`:
gaps with a gamma distribution, like vLLM's `--burstiness` (`1 / variation**2`); a coefficient above 1 makes bursts, 1 equals
`poisson`."""


def arrivals(name: str, rate: float, random: Random, variation: float = 2.0) -> Iterator[float]:
    """Yield an endless series of arrival times in seconds, which begin at 0 and never decrease.

    `rate` is the mean number of requests per second; `variation` is the standard deviation of the gaps divided by their mean,
    for `bursty`. Raises `ConfigError`.
    """
    if name not in ARRIVALS:
        raise ConfigError(f"unknown arrivals {name!r}: expected {', '.join(ARRIVALS)}")
    _check_positive("rate", rate)
    _check_positive("variation", variation)
    gap = ARRIVALS[name]
    return accumulate(gap(1 / rate, variation, random) for _ in repeat(None))


def rescaled(requests: Iterable[Request], speed: float) -> Iterator[Request]:
    """Yield the requests with their times divided by `speed`; 2 makes the series twice as fast. Raises `ConfigError`."""
    _check_positive("speed", speed)
    return (replace(request, at=request.at / speed) for request in requests)


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"invalid {name} {value}: expected a finite number above 0")


FIRST_TOKEN_SECONDS: Final = 0.3
"""Assumed time to the first token of an answer: the mean that llm-d reports for precise scheduling of Qwen3-32B (the
inference-perf report whose totals https://llm-d.ai/blog/kvcache-wins-you-can-see quotes)."""
TOKEN_SECONDS: Final = 0.026
"""Assumed time between two tokens of an answer: the mean in the same report of llm-d."""
MAX_SESSIONS: Final = 100_000
"""Maximum number of sessions that wait for their next turn. At this limit, the session that is due first sends its turn early.
At a rate of 1,000 requests per second with think times of 30 s, about 30,000 sessions wait."""


Share: TypeAlias = Annotated[float, Range(0, 1)]
AboveZero: TypeAlias = Annotated[float, Range(is_open=True)]
MeanTurns: TypeAlias = Annotated[float, Range(1)]
ZipfExponent: TypeAlias = Annotated[float, Range()]


class Lengths(Settings, frozen=True):
    """A clipped lognormal distribution of token counts or seconds. Raises `ConfigError`."""

    median: float
    sigma: float
    """Standard deviation of the logarithm. If it is 0, every value is the median."""
    low: int
    high: int

    def __post_init__(self) -> None:
        if not (1 <= self.low <= self.median <= self.high and 0 <= self.sigma < math.inf):
            raise ConfigError(f"invalid {self}: expected 1 <= low <= median <= high and a finite sigma of at least 0")

    def draw(self, random: Random) -> int:
        """Draw one value."""
        return min(max(round(random.lognormvariate(math.log(self.median), self.sigma)), self.low), self.high)


class Writer:
    """Writes new texts, which are pieces with consecutive numbers. The first number is random."""

    def __init__(self, random: Random) -> None:
        self._number = random.getrandbits(64)

    def write(self, length: int) -> Text:
        """Return a new text of `length` tokens."""
        self._number = (self._number + 1) % (1 << 64)
        return Text((Drawn(self._number, length),))


class Turn(NamedTuple):
    """One request of a session, and the time until the session's next request."""

    prompt: Text
    output: Text
    pause: float | None
    """Seconds until the session is due again, or None after its last turn."""
    begins: Sequence[TrafficSession] = ()
    """Sessions that begin when this turn is answered."""


class TrafficSession(NamedTuple):
    """The turns of one conversation or agent."""

    name: str
    turns: Iterator[Turn]
    lora: str | None = None
    salt: str | None = None


class Traffic(Settings, frozen=True, kw_only=True):
    """Settings of all generated workloads. Raises `ConfigError`."""

    rate: AboveZero = 10.0
    """Requests per second of the whole fleet."""
    arrivals: str = "poisson"
    """Name of the arrival process, a key of `ARRIVALS`."""
    variation: AboveZero = 2.0
    """Standard deviation of the gaps divided by their mean, for `bursty` arrivals."""
    lora_share: Share = 0.0
    """Share of sessions that use a LoRA adapter, 0 to 1."""
    loras: Positive = 4
    """Number of adapters."""
    salted_share: Share = 0.0
    """Share of sessions whose tenants use a cache salt, 0 to 1."""
    salts: Positive = 8
    """Number of tenants with a cache salt."""

    def requests(self, seed: int = 0) -> Iterator[Request]:
        """Yield an endless series of requests, in the order of their times. Equal seeds give equal requests."""
        random = Random(f"{type(self).__name__} {seed}")  # noqa: S311 - random numbers that need not be secret
        times = arrivals(self.arrivals, self.rate, Random(f"arrivals {seed}"), self.variation)  # noqa: S311 - numbers that need not be secret
        return schedule(times, self.sessions(random))

    def sessions(self, random: Random) -> Iterator[TrafficSession]:
        """Yield an endless series of sessions, in the order in which they begin."""
        raise NotImplementedError

    def draw_tenant(self, random: Random) -> tuple[str | None, str | None]:
        """Draw the LoRA and the salt of a session."""
        lora, salt = random.random(), random.random()
        return (
            f"lora-{random.randrange(self.loras)}" if lora < self.lora_share else None,
            f"tenant-{random.randrange(self.salts)}" if salt < self.salted_share else None,
        )


def schedule(times: Iterable[float], sessions: Iterator[TrafficSession], max_waiting: int = MAX_SESSIONS) -> Iterator[Request]:
    """Yield a request at each of `times`, from the session that has been due for longest or, if none is, from a new session.

    At most `max_waiting` sessions wait for their next turn.
    """
    waiting: list[tuple[float, int, TrafficSession]] = []
    order = count()
    for now in times:
        is_due = waiting and (waiting[0][0] <= now or len(waiting) >= max_waiting)
        session = heappop(waiting)[2] if is_due else next(sessions)
        turn = next(session.turns)
        yield Request(now, turn.prompt, turn.output, session.name, session.lora, session.salt)
        answered = now + answer_seconds(turn.output)
        for one in turn.begins:
            heappush(waiting, (answered, next(order), one))
        if turn.pause is not None:
            heappush(waiting, (now + turn.pause, next(order), session))


def answer_seconds(answer: Text) -> float:
    """Return the assumed number of seconds until an answer is complete."""
    return FIRST_TOKEN_SECONDS + TOKEN_SECONDS * len(answer)


def draw_turns(mean: float, random: Random) -> int:
    """Draw a number of turns, at least 1, from a geometric distribution with this mean."""
    return 1 if mean <= 1 else 1 + int(math.log(1 - random.random()) / math.log(1 - 1 / mean))


def zipf_weights(count: int, exponent: float) -> list[float]:
    """Return the cumulative weights of the ranks 1 to `count` for `Random.choices`. A rank's weight is `1 / rank**exponent`."""
    return list(accumulate(1 / place**exponent for place in range(1, count + 1)))


class SharedPrompts(Traffic, frozen=True, kw_only=True):
    """Single questions of many users, each after one of a few long system prompts whose popularity follows Zipf's law.

    Answers are as long as those of Mooncake's conversation trace. All other defaults are guesses.
    """

    prompts: Positive = 32
    """Number of system prompts."""
    popularity: ZipfExponent = 1.0
    """Zipf exponent of the system prompts: 0 makes all equally popular."""
    users: Positive = 1_000
    """Number of users. Each user has one system prompt. All users ask equally often."""
    system: Lengths = Lengths(3_000, 0.6, 500, 16_000)
    question: Lengths = Lengths(150, 1.0, 4, 4_000)
    answer: Lengths = Lengths(350, 0.6, 1, 2_000)

    def sessions(self, random: Random) -> Iterator[TrafficSession]:
        """Yield sessions of one question each (see `Traffic`). A session has the name of its user."""
        writer = Writer(random)
        systems = [(writer.write(self.system.draw(random)), *self.draw_tenant(random)) for _ in range(self.prompts)]
        users = random.choices(systems, cum_weights=zipf_weights(self.prompts, self.popularity), k=self.users)
        while True:
            user = random.randrange(self.users)
            system, lora, salt = users[user]
            prompt = system + writer.write(self.question.draw(random))
            turn = Turn(prompt, writer.write(self.answer.draw(random)), None)
            yield TrafficSession(f"user-{user}", iter((turn,)), lora, salt)


class LlmD(Traffic, frozen=True, kw_only=True):
    """The shape of llm-d's published benchmark: 150 groups, each with its own system prompt and five users.

    Source: "KV-Cache Wins You Can See" (https://llm-d.ai/blog/kvcache-wins-you-can-see) and its report. Eight pods of
    Qwen3-32B with 307,328 tokens of cache each; `shared_prefix` load of inference-perf with `num_groups: 150`,
    `num_prompts_per_group: 5`, `system_prompt_len: 6000`, `question_len: 1200`, `output_len: 1000`; Poisson arrivals, warmed up
    with 750 requests at 15 a second, then in stages from 3 to 60 a second. All prompts together are 1.8 million tokens, 73 % of
    the caches. Like inference-perf, the workload repeats its 750 prompts in one shuffled order.
    """

    rate: AboveZero = 20.0
    groups: Positive = 150
    users: Positive = 5
    """Number of users in each group; each user has one prompt."""
    system: Positive = 6_000
    question: Positive = 1_200
    """Number of tokens in a question. A user always asks the same question."""
    output: Positive = 1_000

    def sessions(self, random: Random) -> Iterator[TrafficSession]:
        """Yield sessions of one question each (see `Traffic`). A session has the name of its user."""
        writer = Writer(random)
        requests: list[tuple[str, Text, str | None, str | None]] = []
        for group in range(self.groups):
            system, (lora, salt) = writer.write(self.system), self.draw_tenant(random)
            names = [f"user-{group}.{user}" for user in range(self.users)]
            requests += [(name, system + writer.write(self.question), lora, salt) for name in names]
        random.shuffle(requests)
        for name, prompt, lora, salt in cycle(requests):
            yield TrafficSession(name, iter((Turn(prompt, writer.write(self.output), None),)), lora, salt)


class Agents(Traffic, frozen=True, kw_only=True):
    """Agents of several kinds, each with a long prompt of tool schemas. Each turn appends a call and its result.

    Prompts are about a hundred times as long as answers, as Manus reports of its agents ("Context Engineering for AI Agents",
    manus.im/blog). A turn can start sub-agents that branch from the whole context of their parent. The parent continues when
    its sub-agents are assumed to be done. The sub-agents' reports are then appended. All other defaults are guesses.
    """

    kinds: Positive = 4
    popularity: ZipfExponent = 1.0
    """Zipf exponent of the kinds: 0 makes all equally popular."""
    schema: Lengths = Lengths(8_000, 0.5, 1_000, 30_000)
    """Number of tokens in the instructions and tool schemas of a kind."""
    task: Lengths = Lengths(400, 1.0, 20, 10_000)
    call: Lengths = Lengths(160, 0.8, 10, 4_000)
    """Number of tokens in an answer: reasoning and tool call."""
    result: Lengths = Lengths(500, 1.2, 20, 12_000)
    """Number of tokens in a tool's result or a sub-agent's report."""
    turns: MeanTurns = 20.0
    """Mean number of turns."""
    tool: Lengths = Lengths(2, 1.0, 1, 120)
    """Seconds that a tool call takes."""
    delegating: Share = 0.05
    """Share of turns that start sub-agents, 0 to 1."""
    helpers: Positive = 3
    """Maximum number of sub-agents that one turn starts; the minimum is 1."""
    helper_turns: MeanTurns = 6.0
    """Mean number of turns of a sub-agent. Sub-agents start no sub-agents."""
    context: Positive = 128_000
    """Maximum length of a prompt in tokens; an agent ends if its next prompt would be longer."""

    def sessions(self, random: Random) -> Iterator[TrafficSession]:
        """Yield the sessions of agents (see `Traffic`)."""
        writer = Writer(random)
        schemas = [writer.write(self.schema.draw(random)) for _ in range(self.kinds)]
        weights = zipf_weights(self.kinds, self.popularity)
        for number in count():
            (schema,) = random.choices(schemas, cum_weights=weights)
            lora, salt = self.draw_tenant(random)
            agent = _Agent(self, TrafficSession(f"agent-{number}", iter(()), lora, salt), writer, random)
            yield agent.new_session(schema, self.turns, self.delegating)


@dataclass(frozen=True, slots=True)
class _Agent:
    """Creates the sessions of one agent and its sub-agents. The agent's session is the template of all these sessions."""

    settings: Agents
    session: TrafficSession
    writer: Writer
    random: Random

    def new_session(self, context: Text, turns: float, delegating: float) -> TrafficSession:
        return self.session._replace(turns=self._generate_turns(context, turns, delegating))

    def _generate_turns(self, context: Text, turns: float, delegating: float) -> Iterator[Turn]:
        settings, random, tool = self.settings, self.random, self.settings.tool
        prompt = context + self._write_text(settings.task)
        helped = 0
        for _ in range(draw_turns(turns, random) - 1):
            call = self._write_text(settings.call)
            helpers = random.randint(1, settings.helpers) if random.random() < delegating else 0
            results = (piece for _ in range(max(helpers, 1)) for piece in self._write_text(settings.result).pieces)
            following = prompt + call + Text(results)
            if len(following) > settings.context:
                break
            names = [f"{self.session.name}.{helped + place}" for place in range(helpers)]
            agents = [replace(self, session=self.session._replace(name=name)) for name in names]
            begins = [agent.new_session(prompt + call, settings.helper_turns, 0) for agent in agents]
            helped += helpers
            if helpers:  # the pause is the mean duration of the sub-agents, which run concurrently
                pause = settings.helper_turns * (tool.median + FIRST_TOKEN_SECONDS + TOKEN_SECONDS * settings.call.median)
            else:
                pause = tool.draw(random)
            yield Turn(prompt, call, answer_seconds(call) + pause, begins)
            prompt = following
        yield Turn(prompt, self._write_text(settings.call), None)

    def _write_text(self, lengths: Lengths) -> Text:
        return self.writer.write(lengths.draw(self.random))


class Chat(Traffic, frozen=True, kw_only=True):
    """Conversations with several apps, each with its system prompt. A prompt is the previous prompt, its answer and new text.

    The mean number of turns is between WildChat's 2.5 (arXiv:2405.01470) and ShareChat's 4.6 (arXiv:2512.17843: 660,000 in
    142,808 conversations); answers are as long as those of Mooncake's conversation trace (median 350, 90 % below 600). Think
    times, system prompts and lengths of user messages are guesses.
    """

    apps: Positive = 8
    popularity: ZipfExponent = 1.0
    """Zipf exponent of the apps: 0 makes all equally popular."""
    preamble: Annotated[int, Range()] = 0
    """Number of tokens with which all system prompts begin, for example an operator's rules."""
    system: Lengths = Lengths(1_200, 0.7, 100, 8_000)
    user: Lengths = Lengths(120, 1.2, 4, 8_000)
    answer: Lengths = Lengths(350, 0.6, 1, 2_000)
    turns: MeanTurns = 4.0
    """Mean number of turns."""
    think: Lengths = Lengths(20, 1.0, 1, 600)
    """Think time: seconds from the end of an answer to the next turn."""
    context: Positive = 32_768
    """Maximum length of a prompt in tokens; a conversation ends if its next prompt would be longer."""

    def sessions(self, random: Random) -> Iterator[TrafficSession]:
        """Yield conversations (see `Traffic`)."""
        writer = Writer(random)
        preamble = writer.write(self.preamble) if self.preamble else Text()
        systems = [preamble + writer.write(self.system.draw(random)) for _ in range(self.apps)]
        weights = zipf_weights(self.apps, self.popularity)
        for number in count():
            (system,) = random.choices(systems, cum_weights=weights)
            yield TrafficSession(f"chat-{number}", self._generate_turns(system, writer, random), *self.draw_tenant(random))

    def _generate_turns(self, context: Text, writer: Writer, random: Random) -> Iterator[Turn]:
        prompt = context + writer.write(self.user.draw(random))
        for _ in range(draw_turns(self.turns, random) - 1):
            answer = writer.write(self.answer.draw(random))
            following = prompt + answer + writer.write(self.user.draw(random))
            if len(following) > self.context:
                break
            yield Turn(prompt, answer, answer_seconds(answer) + self.think.draw(random))
            prompt = following
        yield Turn(prompt, writer.write(self.answer.draw(random)), None)
