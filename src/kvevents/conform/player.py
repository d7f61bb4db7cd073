"""Plays a scenario against a target: does its steps, and judges at its checks. Every wait is bounded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import singledispatchmethod
from typing import Any, Final

from kvevents.conform import scenario as steps
from kvevents.conform.scenario import CheckQuery, Scenario
from kvevents.conform.scripted_engine import POLL_SECONDS, ScriptedEngine
from kvevents.conform.target import Driver, EngineRegistration, RejectedError, Target, TargetError
from kvevents.conform.verdict import Result, ScenarioOutcome, Verdict, judge, worst

SUBSCRIBE_SECONDS: Final = 15.0
"""Time of a target to subscribe, or to subscribe again."""
HOLD_SECONDS: Final = 0.3
"""Time for which answers must stay right before they count."""


class Player:
    """One scenario on one target."""

    def __init__(self, scenario: Scenario, target: Target, engines: dict[str, ScriptedEngine]) -> None:
        self.outcomes: Final[list[ScenarioOutcome]] = []
        """One for each check so far."""
        self.silent_seconds = 0.0
        self._scenario = scenario
        self._target = target
        self._engines = engines
        self._registered: dict[str, EngineRegistration] = {}
        self._rejected: dict[str, str] = {}
        self._notes: list[str] = []

    def play(self) -> ScenarioOutcome:
        """Do the steps until an answer is silently wrong, and return the worst outcome. Raise `TargetError`."""
        for step in self._scenario.steps:
            self._do(step)
            if self.outcomes and self.outcomes[-1].verdict is Verdict.SILENT:
                break
        verdict, detail = worst(self.outcomes)
        return ScenarioOutcome(verdict, "; ".join(filter(None, [detail, *self._notes])))

    @singledispatchmethod
    def _do(self, step: Any) -> None:
        """Do a step of an engine by calling its method of the same name."""
        getattr(self._engines[step.engine], type(step).__name__.lower())()

    @_do.register
    def _register(self, step: steps.Register) -> None:
        registration = registration_of(step, self._scenario, self._engines)
        try:
            self._target.register(registration)
        except RejectedError as error:
            self._rejected[registration.address.worker] = f"registration rejected: {error}"
            return
        self._registered[step.engine] = registration
        if self._engines[step.engine].settings.address == "engine":
            self._wait_for_subscriber(step.engine)

    @_do.register
    def _unregister(self, step: steps.Unregister) -> None:
        self._target.unregister(self._registered.pop(step.engine))

    @_do.register
    def _publish(self, step: steps.Publish) -> None:
        self._engines[step.engine].publish(step.times, lost=step.lost)

    @_do.register
    def _resend(self, step: steps.Resend) -> None:
        self._engines[step.engine].resend(step.seq)

    @_do.register
    def _send(self, step: steps.Send) -> None:
        self._engines[step.engine].send([bytes.fromhex(frame) for frame in step.frames])

    @_do.register
    def _await(self, step: steps.AwaitSubscriber) -> None:
        self._wait_for_subscriber(step.engine)

    def _wait_for_subscriber(self, engine: str) -> None:
        if not self._engines[engine].wait_for_subscriber(SUBSCRIBE_SECONDS):
            self._notes.append(f"no subscription to {engine} within {SUBSCRIBE_SECONDS:g} s")

    @_do.register
    def _half_open(self, step: steps.HalfOpen) -> None:
        self._engines[step.engine].half_open()

    @_do.register
    def _stop(self, step: steps.Stop) -> None:
        self._engines[step.engine].stop()
        self._target.engine_stopped(self._scenario.worker(step.engine))

    @_do.register
    def _kill(self, _: steps.Kill) -> None:
        self._target.kill()

    @_do.register
    def _start(self, _: steps.Start) -> None:
        self._target.start(list(self._registered.values()))

    @_do.register
    def _pause(self, step: steps.Pause) -> None:
        time.sleep(step.seconds)

    @_do.register
    def _settle(self, step: steps.Settle) -> None:
        self._query_until_stable(step.queries, [], step.within)

    @_do.register
    def _check(self, step: steps.Check) -> None:
        self.outcomes.append(self._query_until_stable(step.queries, step.reports, step.within))

    def _query_until_stable(self, queries: Sequence[CheckQuery], required: Sequence[str], seconds: float) -> ScenarioOutcome:
        """Ask until the answers have been right for a moment, or until time is up."""
        began = right_since = time.monotonic()
        while True:
            differences = self._target.differences(queries)
            outcome = judge(differences, {**self._target.reports(), **self._rejected}, required)
            now = time.monotonic()
            if outcome.verdict in {Verdict.SILENT, Verdict.REPORTED} and not (required and outcome.verdict is Verdict.REPORTED):
                right_since = now
            if outcome.verdict is Verdict.SILENT:
                self.silent_seconds = max(self.silent_seconds, now - began)
            if now - right_since >= HOLD_SECONDS or now - began >= seconds:
                return outcome
            time.sleep(POLL_SECONDS)


def registration_of(step: steps.Register, scenario: Scenario, engines: Mapping[str, ScriptedEngine]) -> EngineRegistration:
    """Return what a step registers."""
    engine = engines[step.engine]
    other = engine.settings.replay_of
    address = engine.address(engine.replay_endpoint if other is None else engines[other].replay_endpoint)
    return EngineRegistration(address, scenario.block_size if step.block_size is None else step.block_size, step.tenant)


def play(scenario: Scenario, driver: Driver) -> Result:
    """Play a scenario against a fresh target of a driver. Whatever the target does is a result."""
    began = time.monotonic()

    def result(verdict: Verdict, detail: str, silent_seconds: float = 0.0) -> Result:
        seconds = round(time.monotonic() - began, 1)
        return Result(scenario.name, scenario.group, scenario.title, verdict, detail, seconds, round(silent_seconds, 1))

    missing = sorted(set(scenario.needs) - driver.abilities)
    if missing:
        return result(Verdict.NOT_APPLICABLE, f"the target has no interface for: {', '.join(missing)}")
    player: Player | None = None
    try:
        with ExitStack() as stack:
            engines = {name: stack.enter_context(ScriptedEngine(name, scenario)) for name in scenario.engines}
            registering = [step for step in scenario.steps if isinstance(step, steps.Register)]
            registrations = [registration_of(step, scenario, engines) for step in registering]
            target = stack.enter_context(driver.target(scenario, registrations))
            player = Player(scenario, target, engines)
            return result(*player.play(), player.silent_seconds)
    except TargetError as error:
        return result(Verdict.UNANSWERED, str(error), player.silent_seconds if player else 0.0)


def play_all(
    plays: Iterable[Callable[[], Result]], jobs: int, on_result: Callable[[Result], None] = lambda _: None
) -> Iterator[Result]:
    """Play scenarios, `jobs` at a time, and yield the results in their order."""
    with ThreadPoolExecutor(jobs, "kvevents-conform") as pool:
        played = [pool.submit(each) for each in plays]
        for future in played:
            future.add_done_callback(lambda done: None if done.cancelled() or done.exception() else on_result(done.result()))
        try:
            for future in played:
                yield future.result()
        finally:
            for future in played:
                future.cancel()
