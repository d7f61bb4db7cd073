"""Plays a scenario against a target: performs the steps with engines on real sockets, and judges the answers at the checks.

Every wait is bounded. Clients reach an engine through proxies if the scenario has network faults for that engine.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import singledispatchmethod
from typing import Any, Final

from kvevents.conform import scenario as steps
from kvevents.conform.scenario import Check, Cut, HalfOpen, Restart, Scenario, ScenarioEngine, Skip, Stall, Store, payloads
from kvevents.conform.target import POLL_SECONDS, Driver, EngineRegistration, RejectedError, Target, TargetError, wait_until
from kvevents.conform.verdict import Result, ScenarioOutcome, Verdict, judge, worst
from kvevents.recording import LiveBatch
from kvevents.testing import FaultProxy, Faults, TapePlayer
from kvevents.testing.ports import reserve_port
from kvevents.testing.tape import ANY_LOCAL_PORT
from kvevents.wire import live_frames

MAX_CUT_SECONDS: Final = 2.0
"""Maximum time until an engine notices that `cut` has closed its connections."""


def batches_by_incarnation(name: str, scenario: Scenario) -> list[list[LiveBatch]]:
    """Return one list for each incarnation of an engine: the batches that the scenario makes the engine publish."""
    topic, incarnations = scenario.engines[name].topic.encode(), [list[LiveBatch]()]
    for step, published in zip(scenario.steps, payloads(scenario), strict=True):
        if getattr(step, "engine", None) != name:
            continue
        if isinstance(step, Restart):
            incarnations.append([])
        for payload in [b""] if isinstance(step, Skip) else published:
            incarnations[-1].append(LiveBatch(topic, len(incarnations[-1]), payload))
    return incarnations


class ScriptedEngine:
    """Plays one engine of a scenario. Each method performs the step with its name. `stack` closes the sockets at the end."""

    def __init__(self, name: str, scenario: Scenario, stack: ExitStack) -> None:
        self.settings: Final[ScenarioEngine] = scenario.engines[name]
        self._incarnations = iter(batches_by_incarnation(name, scenario))
        self._topic = self.settings.topic.encode()
        self._stack = stack
        replay = ANY_LOCAL_PORT if self.settings.replay in {"answers", "silent"} else None
        faults = Faults(
            buffer_steps=self.settings.buffer_steps,
            reply_shape=self.settings.reply_shape,
            replay_send_limit=self.settings.replay_send_limit,
            replay_holes=self.settings.replay_holes,
            replay_junk=[[bytes.fromhex(frame) for frame in frames] for frames in self.settings.replay_junk],
            lose_end_marker=not self.settings.has_end_marker,
            replay_endless=self.settings.is_endless,
            faulty_replies=self.settings.faulty_replies,
            replay_silent=self.settings.replay == "silent",
        )
        self._batches = next(self._incarnations)
        self.tape: Final = self._stack.enter_context(TapePlayer(self._batches, faults=faults, replay_endpoint=replay))
        self.proxies: list[FaultProxy] = []
        """Proxies in front of the engine's endpoints; empty unless the scenario has network faults for the engine."""
        ends = [end for end in (self.tape.endpoint, self.tape.replay_endpoint) if end is not None]
        if any(isinstance(step, Cut | Stall | HalfOpen) and step.engine == name for step in scenario.steps):
            self.proxies = [self._stack.enter_context(FaultProxy(end)) for end in ends]
            ends = [proxy.endpoint for proxy in self.proxies]
        self.endpoint: Final = self._advertised_endpoint(ends[0])
        self.replay_endpoint: Final = self._unused_port() if self.settings.replay == "dead" else next(iter(ends[1:]), None)

    def _advertised_endpoint(self, own_endpoint: str) -> str:
        if self.settings.address == "unreachable":
            return self._unused_port()
        if self.settings.address == "unresolvable":
            return "tcp://no-such-engine.invalid:5557"
        if self.settings.address == "silent":
            listener = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            return f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        return own_endpoint

    def _unused_port(self) -> str:
        port = reserve_port(ANY_LOCAL_PORT)
        self._stack.callback(port.close)
        return port.endpoint

    def publish(self, times: int, *, lost: bool) -> None:
        """Publish the next `times` batches of this engine in the scenario. If `lost`, they are not sent live."""
        self.tape.faults = replace(self.tape.faults, drop=1.0 if lost else (), skipped=())
        self.tape.play(times)

    def skip(self) -> None:
        """Skip a sequence number: no batch is published under it."""
        self.tape.faults = replace(self.tape.faults, skipped=range(len(self._batches)))
        self.tape.play(1)

    def resend(self, seq: int) -> None:
        """Send the live message of a published batch again."""
        self.tape.send_raw(live_frames(self._topic, seq, self._batches[seq].payload))

    def restart(self) -> None:
        """Begin the next incarnation."""
        self._batches = next(self._incarnations)
        self.tape.restart(self._batches)

    def cut(self) -> None:
        """Close the connections, refuse new ones, and wait until the engine has noticed."""
        for proxy in self.proxies:
            proxy.cut(refuse=True)
        wait_until(lambda: not self.tape.subscriptions, MAX_CUT_SECONDS)


class Player:
    """Plays one scenario against one target."""

    def __init__(self, scenario: Scenario, target: Target, engines: dict[str, ScriptedEngine]) -> None:
        self.outcomes: Final[list[ScenarioOutcome]] = []
        """The outcomes of the checks that were performed, in their order."""
        self.silent_seconds = 0.0
        self._scenario = scenario
        self._target = target
        self._engines = engines
        self._registered: dict[str, EngineRegistration] = {}
        self._rejected: dict[str, str] = {}
        self._notes: list[str] = []

    def play(self) -> ScenarioOutcome:
        """Perform the steps until an answer is silently wrong, and return the worst outcome. Raise `TargetError`."""
        for step in self._scenario.steps:
            self._perform(step)
            if self.outcomes and self.outcomes[-1].verdict is Verdict.SILENT:
                break
        verdict, detail = worst(self.outcomes)
        return ScenarioOutcome(verdict, "; ".join(filter(None, [detail, *self._notes])))

    @singledispatchmethod
    def _perform(self, step: Any) -> None:
        """Perform a step of an engine by calling the engine's method of the same name."""
        getattr(self._engines[step.engine], type(step).__name__.lower())()

    @_perform.register
    def _register_engine(self, step: steps.Register) -> None:
        registration = registration_of(step, self._scenario, self._engines)
        try:
            self._target.register(registration)
        except RejectedError as error:
            self._rejected[registration.worker] = f"registration rejected: {error}"
            return
        self._registered[step.engine] = registration
        if self._engines[step.engine].settings.address == "engine":
            self._await_subscriber(steps.AwaitSubscriber(step.engine))

    @_perform.register
    def _restart_engine(self, step: Restart) -> None:
        with self._target.engine_restarting(self._scenario.worker(step.engine)):
            self._engines[step.engine].restart()

    @_perform.register
    def _unregister_engine(self, step: steps.Unregister) -> None:
        self._target.unregister(self._registered.pop(step.engine))

    @_perform.register
    def _publish_batches(self, step: steps.Publish) -> None:
        self._engines[step.engine].publish(step.times, lost=step.lost)

    @_perform.register
    def _store_blocks(self, step: Store) -> None:
        self._engines[step.engine].publish(step.blocks[1], lost=step.lost)

    @_perform.register
    def _resend_batch(self, step: steps.Resend) -> None:
        self._engines[step.engine].resend(step.seq)

    @_perform.register
    def _send_frames(self, step: steps.Send) -> None:
        self._engines[step.engine].tape.send_raw([bytes.fromhex(frame) for frame in step.frames])

    @_perform.register
    def _await_subscriber(self, step: steps.AwaitSubscriber) -> None:
        if not self._engines[step.engine].tape.wait_for_subscriber(self._scenario.subscribe):
            self._notes.append(f"no subscription to {step.engine} within {self._scenario.subscribe:g} s")

    @_perform.register
    def _disturb_network(self, step: Stall | HalfOpen | steps.Heal) -> None:
        for proxy in self._engines[step.engine].proxies:
            {Stall: proxy.stall, HalfOpen: proxy.half_open, steps.Heal: proxy.heal}[type(step)]()

    @_perform.register
    def _stop_engine(self, step: steps.Stop) -> None:
        self._engines[step.engine].tape.stop()
        self._target.engine_stopped(self._scenario.worker(step.engine))

    @_perform.register
    def _kill_target(self, _: steps.Kill) -> None:
        self._target.kill()

    @_perform.register
    def _start_target(self, _: steps.Start) -> None:
        self._target.start(list(self._registered.values()))

    @_perform.register
    def _pause(self, step: steps.Pause) -> None:
        time.sleep(step.seconds)

    @_perform.register
    def _await_right_answers(self, step: steps.Settle) -> None:
        workers = [self._scenario.worker(name) for name in self._engines]
        self._query_until_stable(Check(step.within, step.queries, may_report=workers))

    @_perform.register
    def _check_answers(self, step: steps.Check) -> None:
        self.outcomes.append(self._query_until_stable(step))

    def _query_until_stable(self, check: Check) -> ScenarioOutcome:
        """Query until all answers have been right for the scenario's `hold` seconds, or `within` seconds have passed."""
        began = right_since = time.monotonic()
        while True:
            differences = self._target.find_wrong_answers(check.queries)
            outcome = judge(check, differences, {**self._target.read_reports(), **self._rejected})
            now = time.monotonic()
            if outcome.verdict is not (Verdict.REPORTED if check.must_report else Verdict.CORRECT):
                right_since = now
            if outcome.verdict is Verdict.SILENT:
                self.silent_seconds = max(self.silent_seconds, now - began)
            if now - right_since >= self._scenario.hold or now - began >= check.within:
                return outcome
            time.sleep(POLL_SECONDS)


def registration_of(step: steps.Register, scenario: Scenario, engines: Mapping[str, ScriptedEngine]) -> EngineRegistration:
    """Return the registration that a step makes."""
    engine = engines[step.engine]
    replay = engine if engine.settings.replay_of is None else engines[engine.settings.replay_of]
    size = scenario.block_size if step.block_size is None else step.block_size
    names = (scenario.worker(step.engine), engine.settings.rank)
    return EngineRegistration(*names, engine.endpoint, replay.replay_endpoint, size, step.tenant)


def play(scenario: Scenario, driver: Driver) -> Result:
    """Play a scenario against a new target of a driver. A `TargetError` becomes the verdict `UNANSWERED`."""
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
            engines = {name: ScriptedEngine(name, scenario, stack) for name in scenario.engines}
            registering = [step for step in scenario.steps if isinstance(step, steps.Register)]
            registrations = [registration_of(step, scenario, engines) for step in registering]
            player = Player(scenario, stack.enter_context(driver.target(scenario, registrations)), engines)
            return result(*player.play(), player.silent_seconds)
    except TargetError as error:
        return result(Verdict.UNANSWERED, str(error), player.silent_seconds if player else 0.0)


def play_all(
    plays: Iterable[Callable[[], Result]], jobs: int, on_result: Callable[[Result], None] = lambda _: None
) -> Iterator[Result]:
    """Call the functions in `plays`, each of which plays a scenario, `jobs` at a time, and yield the results in their order."""
    with ThreadPoolExecutor(jobs, "kvevents-conform") as pool:
        played = [pool.submit(scenario_play) for scenario_play in plays]
        for future in played:
            future.add_done_callback(lambda done: None if done.cancelled() or done.exception() else on_result(done.result()))
        try:
            for future in played:
                yield future.result()
        finally:
            for future in played:
                future.cancel()
