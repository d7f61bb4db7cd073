"""The common part of generated workloads: lengths, sessions and the order of their turns.

Theory of operation. An arrival process gives the times of requests, so the rate is as configured from the first second on. At
each arrival the session that has been due for longest sends its next turn; if none is due, a new session begins. A session is
due again after an assumed answer time and a think time. The loop is open: a slower fleet receives requests at the same rate. So
sessions begin as fast as the rate requires, and think times are the drawn ones or a little longer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import accumulate, repeat
from random import Random
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from kvevents.errors import ConfigError
from kvevents.sim.requests import Drawn, Request, Text

Gap: TypeAlias = Callable[[float, float, Random], float]
"""Returns the seconds to the next arrival for a mean gap, a coefficient of variation and a random generator."""


def _constant(mean: float, _variation: float, _random: Random) -> float:
    return mean


def _poisson(mean: float, _variation: float, random: Random) -> float:
    return random.expovariate(1 / mean)


def _bursty(mean: float, variation: float, random: Random) -> float:
    shape = 1 / variation**2
    return random.gammavariate(shape, mean / shape)


ARRIVALS: Final[Mapping[str, Gap]] = MappingProxyType({"constant": _constant, "poisson": _poisson, "bursty": _bursty})
"""Arrival processes by name. `constant`: one request every `1 / rate` seconds. `poisson`: independent requests. `bursty`: gaps
of a gamma distribution; a coefficient of variation above 1 makes bursts (1 is `poisson`), like `burstiness` of
`vllm bench serve` (`1 / variation**2`)."""


def arrivals(name: str, rate: float, random: Random, variation: float = 2.0) -> Iterator[float]:
    """Yield arrival times without end, in seconds from 0, never decreasing.

    `rate` is the mean number of requests per second; `variation` is the standard deviation of the gaps divided by their mean,
    for `bursty`. Raises `ConfigError`.
    """
    if name not in ARRIVALS:
        raise ConfigError(f"unknown arrivals {name!r}: expected {', '.join(ARRIVALS)}")
    _check("rate", rate)
    _check("variation", variation)
    gap = ARRIVALS[name]
    return accumulate(gap(1 / rate, variation, random) for _ in repeat(None))


def rescaled(requests: Iterable[Request], speed: float) -> Iterator[Request]:
    """Yield the requests with their times divided by `speed`: 2 is twice as fast. Raises `ConfigError`."""
    _check("speed", speed)
    return (replace(request, at=request.at / speed) for request in requests)


def _check(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"invalid {name} {value}: expected a finite number above 0")


FIRST_TOKEN_SECONDS: Final = 0.3
TOKEN_SECONDS: Final = 0.026
"""Assumed answer time: the mean time to the first token and between tokens that llm-d reports for its precise scheduling of
Qwen3-32B (the inference-perf report whose totals https://llm-d.ai/blog/kvcache-wins-you-can-see quotes)."""
MAX_WAITING: Final = 100_000
"""Most sessions that wait for their next turn; above that the one due first sends it early. A rate of 1,000 per second with
think times of 30 s has about 30,000."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A clipped lognormal distribution of token counts or seconds. Raises `ConfigError`."""

    median: float
    sigma: float
    """Standard deviation of the logarithm; with 0 every value is the median."""
    low: int
    high: int

    def __post_init__(self) -> None:
        if not (1 <= self.low <= self.median <= self.high and 0 <= self.sigma < math.inf):
            raise ConfigError(f"invalid {self}: expected 1 <= low <= median <= high and a finite sigma of at least 0")

    def draw(self, random: Random) -> int:
        """Draw one value."""
        return min(max(round(random.lognormvariate(math.log(self.median), self.sigma)), self.low), self.high)


class Writer:
    """Writes new texts: pieces with consecutive numbers, which begin at a random one."""

    def __init__(self, random: Random) -> None:
        self._number = random.getrandbits(64)

    def write(self, length: int) -> Text:
        """Return a new text of `length` tokens."""
        self._number = (self._number + 1) % (1 << 64)
        return Text((Drawn(self._number, length),))


class Turn(NamedTuple):
    """One request of a session, and the time until the next one."""

    prompt: Text
    output: Text
    pause: float | None
    """Seconds until the session is due again; None after its last turn."""
    begins: Sequence[Session] = ()
    """Sessions that begin when this turn is answered."""


class Session(NamedTuple):
    """The turns of one conversation or agent."""

    name: str
    turns: Iterator[Turn]
    lora: str | None = None
    salt: str | None = None


@dataclass(frozen=True, kw_only=True)
class Traffic(ABC):
    """Settings of all generated workloads. Raises `ConfigError`."""

    rate: float = 10.0
    """Requests per second of the whole fleet."""
    arrivals: str = "poisson"
    """A name in `ARRIVALS`."""
    variation: float = 2.0
    """Standard deviation of the gaps divided by their mean, for `bursty` arrivals."""
    lora_share: float = 0.0
    """Share of sessions that use a LoRA adapter, 0 to 1."""
    loras: int = 4
    """Number of adapters."""
    salted_share: float = 0.0
    """Share of sessions whose tenants use a cache salt, 0 to 1."""
    salts: int = 8
    """Number of tenants with a cache salt."""

    def __post_init__(self) -> None:
        if self.arrivals not in ARRIVALS:
            raise ConfigError(f"unknown arrivals {self.arrivals!r}: expected {', '.join(ARRIVALS)}")
        for name in ("lora_share", "salted_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"invalid {name} {getattr(self, name)}: expected a share from 0 to 1")
        self._from_one("loras", "salts")
        self._above_zero("rate", "variation")

    def requests(self, seed: int = 0) -> Iterator[Request]:
        """Yield requests without end, in the order of their times. Equal seeds give equal requests."""
        random = Random(f"{type(self).__name__} {seed}")  # noqa: S311 - a simulation, not a secret
        times = arrivals(self.arrivals, self.rate, Random(f"arrivals {seed}"), self.variation)  # noqa: S311 - as above
        return schedule(times, self.sessions(random))

    @abstractmethod
    def sessions(self, random: Random) -> Iterator[Session]:
        """Yield sessions without end, in the order of their beginnings."""

    def tenant(self, random: Random) -> tuple[str | None, str | None]:
        """Draw the LoRA and the salt of a session."""
        lora, salt = random.random(), random.random()
        return (
            f"lora-{random.randrange(self.loras)}" if lora < self.lora_share else None,
            f"tenant-{random.randrange(self.salts)}" if salt < self.salted_share else None,
        )

    def _from_one(self, *names: str) -> None:
        self._need(names, lambda value: value >= 1, "at least 1")

    def _above_zero(self, *names: str) -> None:
        self._need(names, lambda value: 0 < value < math.inf, "a finite number above 0")

    def _need(self, names: Iterable[str], fits: Callable[[float], bool], what: str) -> None:
        for name in names:
            if not fits(getattr(self, name)):
                raise ConfigError(f"invalid {name} {getattr(self, name)}: expected {what}")


def schedule(times: Iterable[float], sessions: Iterator[Session], max_waiting: int = MAX_WAITING) -> Iterator[Request]:
    """Yield a request at each of `times`, from the session that has been due for longest or from a new one.

    At most `max_waiting` sessions wait for their next turn.
    """
    waiting: list[tuple[float, int, Session]] = []
    order = 0
    for now in times:
        is_due = waiting and (waiting[0][0] <= now or len(waiting) >= max_waiting)
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
    """Return the assumed seconds of an answer."""
    return FIRST_TOKEN_SECONDS + TOKEN_SECONDS * len(answer)


def turns_of(mean: float, random: Random) -> int:
    """Draw a number of turns, at least 1, with this mean: after each turn the probability of another one is the same."""
    return 1 if mean <= 1 else 1 + int(math.log(1 - random.random()) / math.log(1 - 1 / mean))


def zipf(count: int, exponent: float) -> list[float]:
    """Return cumulative weights of ranks 1 to `count` for `Random.choices`; the weight of a rank is `1 / rank**exponent`."""
    return list(accumulate(1 / place**exponent for place in range(1, count + 1)))
