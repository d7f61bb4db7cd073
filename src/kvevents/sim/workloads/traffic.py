"""What generated workloads have in common: lengths, sessions and who comes next.

Theory of operation. An arrival process says when requests come, and so the rate is what was asked for from the first second on.
At each arrival the session that has been due for longest speaks; when nobody is due, a new session begins. A session is due
again at a think time after an assumed answer time: the loop is open, and a fleet that answers more slowly is not asked more
slowly. What it means: sessions are begun as fast as the rate wants, and think times are drawn ones or a little longer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from random import Random
from typing import Final, NamedTuple

from kvevents.errors import ConfigError
from kvevents.sim.requests import Drawn, Request, Text
from kvevents.sim.workloads.arrivals import ARRIVALS, arrivals

FIRST_TOKEN_SECONDS: Final = 0.3
TOKEN_SECONDS: Final = 0.026
"""Assumed answer time: the mean time to the first token and between tokens that llm-d reports for its precise scheduling of
Qwen3-32B (the inference-perf report whose totals https://llm-d.ai/blog/kvcache-wins-you-can-see quotes)."""
MAX_WAITING: Final = 100_000
"""Sessions that wait for their next turn; at more of them the one due first speaks early. A rate of 1,000 a second with
think times of 30 s has about 30,000."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lognormal numbers, clipped; of tokens, or of seconds. Raises `ConfigError`."""

    median: float
    sigma: float
    """Standard deviation of the logarithm; 0 gives the median always."""
    low: int
    high: int

    def __post_init__(self) -> None:
        if not (1 <= self.low <= self.median <= self.high and 0 <= self.sigma < math.inf):
            raise ConfigError(f"{self} makes no lengths; it needs 1 <= low <= median <= high and a finite sigma from 0")

    def draw(self, random: Random) -> int:
        """One of them."""
        return min(max(round(random.lognormvariate(math.log(self.median), self.sigma)), self.low), self.high)


class Writer:
    """Writes texts that nobody wrote before: pieces of numbers that follow one another from a random one on."""

    def __init__(self, random: Random) -> None:
        self._number = random.getrandbits(64)

    def write(self, length: int) -> Text:
        """New text of so many tokens."""
        self._number = (self._number + 1) % (1 << 64)
        return Text((Drawn(self._number, length),))


class Turn(NamedTuple):
    """One request of a session, and what comes after it."""

    prompt: Text
    output: Text
    pause: float | None
    """Seconds until the session is due again; None after its last turn."""
    begins: Sequence[Session] = ()
    """Sessions that begin when this one is answered."""


class Session(NamedTuple):
    """A conversation or an agent."""

    name: str
    turns: Iterator[Turn]
    lora: str | None = None
    salt: str | None = None


@dataclass(frozen=True, kw_only=True)
class Traffic(ABC):
    """Settings that all generated workloads share. Raises `ConfigError`."""

    rate: float = 10.0
    """Requests a second, of the whole fleet."""
    arrivals: str = "poisson"
    """A name in `ARRIVALS`."""
    variation: float = 2.0
    """Of `bursty` arrivals: standard deviation of the gaps over their mean."""
    lora_share: float = 0.0
    """Share of sessions that use a LoRA adapter, 0 to 1."""
    loras: int = 4
    """Adapters there are."""
    salted_share: float = 0.0
    """Share of sessions of tenants that salt their cache, 0 to 1."""
    salts: int = 8
    """Such tenants there are."""

    def __post_init__(self) -> None:
        if self.arrivals not in ARRIVALS:
            raise ConfigError(f"arrivals is {self.arrivals!r}; it is one of {', '.join(ARRIVALS)}")
        for name in ("lora_share", "salted_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it is a share from 0 to 1")
        self._from_one("loras", "salts")
        self._above_zero("rate", "variation")

    def requests(self, seed: int = 0) -> Iterator[Request]:
        """Requests without end, in the order of their times; the same ones for the same seed."""
        random = Random(f"{type(self).__name__} {seed}")  # noqa: S311 - a simulation, not a secret
        times = arrivals(self.arrivals, self.rate, Random(f"arrivals {seed}"), self.variation)  # noqa: S311 - as above
        return schedule(times, self.sessions(random))

    @abstractmethod
    def sessions(self, random: Random) -> Iterator[Session]:
        """Sessions without end, in the order in which they begin."""

    def tenant(self, random: Random) -> tuple[str | None, str | None]:
        """LoRA and salt of a session, by chance."""
        lora, salt = random.random(), random.random()
        return (
            f"lora-{random.randrange(self.loras)}" if lora < self.lora_share else None,
            f"tenant-{random.randrange(self.salts)}" if salt < self.salted_share else None,
        )

    def _from_one(self, *names: str) -> None:
        self._need(names, lambda value: value >= 1, "from 1 on")

    def _above_zero(self, *names: str) -> None:
        self._need(names, lambda value: 0 < value < math.inf, "finite and above 0")

    def _need(self, names: Iterable[str], fits: Callable[[float], bool], what: str) -> None:
        for name in names:
            if not fits(getattr(self, name)):
                raise ConfigError(f"{name} is {getattr(self, name)}; it is {what}")


def schedule(times: Iterable[float], sessions: Iterator[Session]) -> Iterator[Request]:
    """One request at each of `times`, of the session that is due longest or of a new one."""
    waiting: list[tuple[float, int, Session]] = []
    order = 0
    for now in times:
        is_due = waiting and (waiting[0][0] <= now or len(waiting) >= MAX_WAITING)
        session = heappop(waiting)[2] if is_due else next(sessions)
        turn = next(session.turns)
        yield Request(now, turn.prompt, turn.output, session.name, session.lora, session.salt)
        answered = now + answer_seconds(turn.output)
        later = [(answered, one) for one in turn.begins]
        if turn.pause is not None:
            later.append((now + turn.pause, session))
        for due, one in later:
            order += 1
            heappush(waiting, (due, order, one))


def answer_seconds(answer: Text) -> float:
    """How long an answer is assumed to take."""
    return FIRST_TOKEN_SECONDS + TOKEN_SECONDS * len(answer)


def turns_of(mean: float, random: Random) -> int:
    """A number of turns, at least 1, with this mean: after each turn the chance of another one is the same."""
    return 1 if mean <= 1 else 1 + int(math.log(1 - random.random()) / math.log(1 - 1 / mean))


def zipf(count: int, exponent: float) -> list[float]:
    """Cumulative weights of places 1 to `count`, for `Random.choices`: each weighs `1 / place**exponent`."""
    return list(accumulate(1 / place**exponent for place in range(1, count + 1)))
