"""The stage of a round: its processes, the network between them, and the execution of its script."""

from __future__ import annotations

import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, Generic, Self, TypeVar

from kvevents.testing.ports import reserve_port
from tests.system.chaos_kit import engine, truth
from tests.system.chaos_kit.engine import Engine, Incarnation
from tests.system.chaos_kit.faults import Fault
from tests.system.chaos_kit.judging import Outcome, Result
from tests.system.chaos_kit.parts import BrokenStageError, Leg, Part, SilentPartError
from tests.system.chaos_kit.plan import Plan

REACH_SECONDS: Final = 90.0
"""Limit of the wait until an engine has published what it was ordered to."""
CONFIRMATIONS: Final = 20
"""Batches that the last incarnation of an engine can publish after the script: a stream that has caught up by replay is not
EXACT until a live batch has confirmed the replayed ones."""
CONFIRM_SECONDS: Final = 1.0
"""Seconds between two such batches."""
MAX_RATE: Final = 1e9
"""Rate in batches per second that makes an engine publish as fast as possible."""
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - a folder of our own in it

PlanT = TypeVar("PlanT", bound=Plan)


class Stage(ABC):
    """Processes, proxies and files. A context manager that leaves none of them behind."""

    parent: ClassVar[Path | None] = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    """Where the folder of the stage is; None for the folder of temporary files."""

    def __init__(self) -> None:
        self.undo: Final = ExitStack()
        self.legs: list[Leg] = []

    def __enter__(self) -> Self:
        try:
            temporary = tempfile.TemporaryDirectory(prefix="chaos-", dir=self.parent, ignore_cleanup_errors=True)
            self.folder = Path(self.undo.enter_context(temporary))
            self.set_up()
        except BaseException:
            self.undo.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.undo.close()

    @abstractmethod
    def set_up(self) -> None:
        """Start everything."""

    def start_part(self, name: str, target: Callable[..., None], *arguments: Any, opens: bool = False) -> Part:
        part = Part(name, target, *arguments, opens=opens)
        self.undo.callback(part.kill)
        return part

    def reserve_endpoint(self, host: str = "127.0.0.1") -> str:
        """Return an endpoint to bind, with a port that no other process gets."""
        held = reserve_port(f"tcp://{host}:0")
        if held.holder is not None:
            self.undo.callback(held.holder.close)
        return held.endpoint

    def add_leg(self, endpoint: str, replay_endpoint: str | None) -> Leg:
        leg = Leg(endpoint, replay_endpoint)
        self.undo.callback(leg.close)
        self.legs.append(leg)
        return leg


class EngineProcess:
    """An engine in all its incarnations, of which one runs at a time. Raises `SilentPartError` if it does not answer."""

    def __init__(self, stage: Stage, name: str, made: Engine, seed: str, *, first: int = 1) -> None:
        self.made: Final = made
        self.facts: Final = stage.folder / f"facts of {name}"
        self.incarnation = first - 1
        self.ordered = 0
        self.confirmations = 0
        """Batches that it has published to confirm replayed ones."""
        self._stage: Final = stage
        self._name: Final = name
        self._seed: Final = seed
        self._at = self._published_before = 0
        self._confirm_at = 0.0

    def start(self, batches: int) -> None:
        """Start the next incarnation, which can publish this many batches, and wait until it has opened its sockets."""
        self.incarnation += 1
        self._at = self.ordered = 0
        incarnation = Incarnation(self.incarnation, f"{self._seed}/life/{self.incarnation}", batches + CONFIRMATIONS)
        name = f"incarnation {self.incarnation} of {self._name}"
        self.part = self._stage.start_part(name, engine.run, self.made, incarnation, self.facts, opens=True)

    @property
    def published(self) -> int:
        """Return the batches that all incarnations are known to have published."""
        return self._published_before + self._at

    def digest(self, facts: Mapping[int, bytes]) -> bytes:
        """Return the digest of what the engine holds now."""
        return facts[truth.Key(self.incarnation, self._at - 1).packed]

    def publish(self, until: int, rate: float = MAX_RATE) -> None:
        """Order the engine to publish until it has published this many batches."""
        self.ordered = until
        self.part.send(("publish", until, rate))

    def reach(self, number: int) -> None:
        """Wait until the engine has published `number` batches, or all that it was ordered to."""
        end = time.monotonic() + REACH_SECONDS
        while self._at < min(number, self.ordered):
            _, self._at = self.part.receive(max(0.01, end - time.monotonic()))

    def publish_all(self, until: int) -> None:
        """Publish until this many batches are sent."""
        self.publish(until)
        self.reach(until)
        self._order("drain", "drained")

    def confirm(self) -> bool:
        """Publish one more batch. Return False if the last one was a moment ago or if none is left."""
        now = time.monotonic()
        if self.confirmations == CONFIRMATIONS or now < self._confirm_at:
            return False
        self.confirmations += 1
        self._confirm_at = now + CONFIRM_SECONDS
        self.publish_all(self._at + 1)
        return True

    def close(self) -> None:
        """Let the incarnation send everything and close its sockets."""
        self.part.go_on()
        self.reach(self.ordered)
        self._order("close", "closed")

    def kill(self) -> None:
        self._published_before += self._at
        self._at = 0
        self.part.kill()

    def _order(self, command: str, answer: str) -> None:
        """Send a command and receive messages up to its answer."""
        self.part.send((command,))
        end = time.monotonic() + REACH_SECONDS
        word = ""
        while word != answer:
            word, self._at = self.part.receive(max(0.01, end - time.monotonic()))


class RoundStage(Stage, Generic[PlanT]):
    """Executes one plan. The names of its commands are methods."""

    faults: ClassVar[Mapping[str, Fault[Any]]]
    engines: Sequence[EngineProcess] = ()

    def __init__(self, plan: PlanT) -> None:
        super().__init__()
        self.plan: Final = plan
        self.counted: Final[Counter[str]] = Counter()

    def play(self) -> Outcome:
        """Execute the script and return the outcome."""
        self.began = time.monotonic()
        for word, *arguments in self.plan.script:
            try:
                getattr(self, word)(*arguments)
            except (SilentPartError, OSError) as error:
                raise BrokenStageError(f"{error}, at {word} {' '.join(map(str, arguments))}") from error
        ended = time.monotonic()
        results, settled = tuple(self.settle()), time.monotonic() - ended
        batches = sum(each.published for each in self.engines)
        outcome = Outcome(self.plan.seed, self.plan.number, self.plan.faults, batches, results, settled=settled)
        return replace(self.check(outcome), counted=dict(self.counted), seconds=time.monotonic() - self.began)

    def strike(self, name: str, place: int) -> None:
        fault, draw = self.faults[name], self.plan.draw(f"{name}/{self.engines[0].incarnation}")
        for target in fault.find(self, place):
            fault.strike(target, draw)

    def heal(self, name: str, place: int) -> None:
        fault = self.faults[name]
        assert fault.heal is not None
        for target in fault.find(self, place):
            fault.heal(target)

    @abstractmethod
    def settle(self) -> list[Result]:
        """Wait until all results are final, and return them."""

    @abstractmethod
    def check(self, outcome: Outcome) -> Outcome:
        """Check the claims of the round. Return the outcome with what they and other checks have found."""
