"""Where a scenario plays: engines, one of the services, and what is compared in the end."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from enum import Enum
from http.client import HTTPException
from itertools import count
from types import TracebackType
from typing import Any, Final, Self

from tests.system.faults.engine import BLOCK, Engine, Prompt
from tests.system.faults.sides import LOOK, PATIENCE, Side, WorkerState

CALM: Final = 0.5
"""Seconds for which an outcome must have stayed what it is before it is believed."""
_PLACE: Final = re.compile(r"127\.0\.0\.1:\d+")
_NUMBER: Final = re.compile(r"(?<![\w.])\d+")
"""Hashes, worker ids, numbers of batches."""
_NAMED: Final = ("instance_id", "model_name", "tenant_id")
"""Fields of a registration by which it is ended."""


class Verdict(Enum):
    """What a client of the service learns."""

    RIGHT = "right"
    """Every answer is the truth, and nothing is said against it."""
    DOUBTED = "right, with a reported doubt"
    REPORTED = "wrong, and reported"
    """An answer is not the truth, and answers about the worker, or to its registration, say so."""
    LOGGED = "wrong, reported only in the log"
    """The log, or a counter of the whole process, says that something is amiss, and nothing that names the worker."""
    SILENT = "wrong, and silent"


@dataclass(frozen=True, slots=True)
class Question:
    """Who holds how much of a prompt? Asked again and again, and compared with what the engines hold."""

    prompt: Prompt
    fields: dict[str, Any]
    engines: dict[int, Engine]
    """The engines whose blocks may be found, by instance; blocks of others must not be."""

    def truth(self) -> dict[int, int]:
        """Tokens by instance."""
        return {instance: engine.holds(self.prompt) for instance, engine in self.engines.items()}


@dataclass(frozen=True, slots=True)
class Sight:
    """One look at a service."""

    truth: int
    """Blocks that engines hold of the prompts asked for."""
    found: int
    """Of these, how many it found."""
    false: int
    """Blocks that it found and that are not there, or not for the client that asks."""
    states: dict[int, WorkerState | None]
    """By instance."""
    right: bool

    @property
    def trusted(self) -> bool:
        """Whether it says that all is well with every worker that it knows."""
        return all(each.trusted for each in self.states.values() if each is not None)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a fault on one side."""

    verdict: Verdict
    sight: Sight
    """The last look."""
    healed: float | None
    """Seconds from the fault until every answer was right."""
    moved: float
    """Seconds from the fault until the answers last changed."""
    unnoticed: float
    """Seconds from the fault for which an answer was wrong and nothing was said against it."""
    watched: float
    """Seconds from the fault to the last look."""
    lines: int
    """What was logged since the fault."""
    alarms: Counter[str]
    """The warnings and errors among them; numbers in them are `N`."""
    counted: Counter[str]
    """What its metrics have counted since that was not as it should be."""
    notes: list[str]


class _Course:
    """What changes from look to look."""

    def __init__(self, began: float) -> None:
        self._began = self.since = began
        """When the verdict became what it is."""
        self.healed: float | None = None
        self.moved = self.unnoticed = 0.0
        self._verdict: Verdict | None = None
        self._blocks: tuple[int, int] | None = None

    def take(self, sight: Sight, verdict: Verdict, now: float) -> None:
        """One look more."""
        passed = now - self._began
        self.healed = (passed if self.healed is None else self.healed) if sight.right else None
        if not sight.right and sight.trusted:
            self.unnoticed = passed
        if verdict != self._verdict:
            self.since, self._verdict = now, verdict
        if (sight.found, sight.false) != self._blocks:
            self._blocks, self.moved = (sight.found, sight.false), passed


@dataclass
class Stage:
    """One scenario on one side. Names are of its own, so that several stages can share a service."""

    side: Side
    model: str = "m"
    first: int = 1
    """The first instance's."""
    engines: dict[int, Engine] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    calm: float = CALM
    answers_expected: bool = True
    """False where nothing can be right but to say that a worker is not there."""

    def __post_init__(self) -> None:
        self._stack = ExitStack()
        self._numbers = count(self.first)
        self._registered: dict[int, dict[str, Any]] = {}
        self._questions: list[Question] = []
        self.begin()

    # For scenarios

    def engine(self, **options: Any) -> Engine:
        """An engine that ends with the stage."""
        return self._stack.enter_context(Engine(**options))

    def holding(self, thing: Any) -> Any:
        """A context that ends with the stage."""
        return self._stack.enter_context(thing)

    def follow(self, engine: Engine, **more: Any) -> None:
        """Register an engine as a worker of its own, and wait until it has a subscriber, or the registration was refused."""
        fields = {"endpoint": engine.endpoint, "replay_endpoint": engine.replay_endpoint, **more}
        instance, accepted = self.register(**fields)
        self.engines[instance] = engine
        if accepted:
            engine.wait_for_subscriber()

    def register(self, **fields: Any) -> tuple[int, bool]:
        """Register an endpoint: its instance, and whether it was accepted. Refusals are noted."""
        instance = next(self._numbers)
        body = {"instance_id": instance, "model_name": self.model, "block_size": BLOCK, **fields}
        answer = self.side.ask("POST", "/register", body)
        accepted = answer.status == 201
        if accepted:
            self._registered[instance] = body
        else:
            self.notes.append(f"registration of worker {instance - self.first + 1} answered {answer.summary}")
        return instance, accepted

    def unregister(self, instance: int) -> None:
        """Follow it no more."""
        body = self._registered.pop(instance)
        self.side.ask("POST", "/unregister", {name: body[name] for name in _NAMED if name in body})
        del self.engines[instance]

    def ask(self, *prompts: Prompt, **fields: Any) -> None:
        """Compare what is found of these prompts with what the engines of this stage hold; now and from now on."""
        self._questions += [Question(prompt, fields, self.engines) for prompt in prompts]

    def ask_as_another(self, *prompts: Prompt, **fields: Any) -> None:
        """Ask the same as a client that must find nothing of them."""
        self._questions += [Question(prompt, fields, {}) for prompt in prompts]

    def arrive(self) -> None:
        """Wait until all is well and known, or known and doubted for a while: before something goes wrong."""
        self._began = time.monotonic()
        outcome = self.watch(PATIENCE)
        if not outcome.sight.right:
            raise TimeoutError(f"{self.side.title} has not got what was sent without any fault: {outcome.sight}")

    def wait(self, seconds: float, until: Callable[[], bool] | None = None) -> None:
        """Until all is right, or `until` is, or so many seconds have passed; what is timed is the part that follows."""
        end, done = time.monotonic() + seconds, until or (lambda: self.look().right)
        while not done() and time.monotonic() < end:
            time.sleep(LOOK)
        self._began = time.monotonic()

    def begin(self) -> None:
        """Here the fault begins: time and log lines count from now on."""
        self._mark = len(self.side.lines())
        self._before = self.side.counted()
        self._began = time.monotonic()

    def die_and_come_back(self, meanwhile: Iterator[None]) -> None:
        """Kill the service, let `meanwhile` happen, and start it again."""
        self.side.settle()
        self.begin()
        self.side.kill()
        for _ in meanwhile:
            pass
        self.side.come_back(self._registered.values())
        for engine in self.engines.values():
            engine.wait_for_subscriber()

    # What comes of it

    def look(self) -> Sight:
        """Ask everything once."""
        truth = found = false = 0
        for question in self._questions:
            wanted = question.truth()
            body = {"token_ids": question.prompt.tokens, "model_name": self.model, **question.fields}
            held = self.side.held(body)
            truth += sum(wanted.values())
            found += sum(min(held.get(instance, 0), tokens) for instance, tokens in wanted.items())
            false += sum(max(0, tokens - wanted.get(instance, 0)) for instance, tokens in held.items())
        states = {instance: self.side.state_of(instance) for instance in self._registered}
        right = self.answers_expected and found == truth and not false
        return Sight(truth // BLOCK, found // BLOCK, false // BLOCK, states, right)

    def watch(self, patience: float, until: Verdict | None = None) -> Outcome:
        """Look until every answer is right, or it is as `until` says, and stays so for a while, or patience has ended."""
        course, ends = _Course(self._began), {Verdict.RIGHT, Verdict.DOUBTED} if until is None else {until}
        while True:
            sight, now = self.look(), time.monotonic()
            verdict = self._verdict(sight)
            course.take(sight, verdict, now)
            calm = now - course.since >= self.calm and verdict in ends
            if calm or now - self._began > patience:
                return self._outcome(verdict, sight, course, now - self._began)
            time.sleep(LOOK)

    def _outcome(self, verdict: Verdict, sight: Sight, course: _Course, watched: float) -> Outcome:
        lines, alarms = len(self._logged()), self._alarms()
        return Outcome(
            verdict, sight, course.healed, course.moved, course.unnoticed, watched, lines, alarms, self._counted(), self.notes
        )

    def _verdict(self, sight: Sight) -> Verdict:
        if sight.right:
            return Verdict.RIGHT if sight.trusted else Verdict.DOUBTED
        if not sight.trusted or self.notes:
            return Verdict.REPORTED
        return Verdict.LOGGED if self._alarms() or self._counted() else Verdict.SILENT

    def _counted(self) -> Counter[str]:
        return self.side.counted() - self._before

    def _logged(self) -> list[str]:
        return self.side.lines()[self._mark :]

    def _alarms(self) -> Counter[str]:
        side = self.side
        alarms = [line for line in self._logged() if side.alarm.search(line)]
        return Counter(_NUMBER.sub("N", _PLACE.sub("HOST:PORT", side.clutter.sub("", line))) for line in alarms)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for body in self._registered.values():
            with suppress(OSError, HTTPException):  # it may be dead
                self.side.ask("POST", "/unregister", {name: body[name] for name in _NAMED if name in body})
        self._stack.close()
