"""Sequential requests, each predicted when the service has applied everything that the engine has published."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from tests.system.engines.judging import Example, Tally
from tests.system.engines.models import FIRST_TOKEN, VOCABULARY, Model
from tests.system.engines.recorder import Recorder
from tests.system.engines.server import BLOCK_SIZE, MAX_LENGTH, Engine, EngineError, KillTarget, wait_until
from tests.system.engines.service import Service
from tests.system.engines.traffic import Habits, Prompt, Traffic

DISTRUST_SECONDS: Final = 10.0
"""Limit of the wait until the service is not EXACT any more after a kill."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """The requests, kills and resets of one engine."""

    name: str
    model: Model
    requests: int
    habits: Habits
    kills: Mapping[int, KillTarget]
    """Numbers of the requests before which the engine is killed and started again."""
    reset_every: int
    """Requests from one `/reset_prefix_cache` to the next."""
    blocks: int
    """GPU blocks. There are few, so that most requests evict some."""


class Restart(msgspec.Struct):
    """One kill of an engine's processes, and the time for which the service stayed EXACT afterwards."""

    kind: KillTarget
    distrust_seconds: float | None
    """Seconds from the kill until the service was not EXACT any more; None if it was still EXACT after `DISTRUST_SECONDS`."""


class SequentialResult(msgspec.Struct):
    """Result of one scenario."""

    scenario: str
    seed: int
    requests: Tally
    after_reset: Tally
    """Requests right after a `/reset_prefix_cache` of an idle engine, which vLLM does not announce until its next step."""
    restarts: list[Restart]
    seconds: float


def scenarios(requests: int, full_reports: float) -> list[Scenario]:
    """Return one scenario for each model, each with half of the requests.

    `full_reports` is the share of requests after which vLLM announces blocks again that it has found in its cache.
    """
    half = requests // 2
    common = {"requests": half, "reset_every": max(20, half // 8)}
    return [
        Scenario(
            name="full attention, LoRA, salts",
            model="llama",
            habits=Habits(adapters=(None, None, "adapter-0", "adapter-1"), full_reports=full_reports),
            kills={half // 3 + 5: "group", 2 * half // 3 + 5: "core"},
            blocks=48,
            **common,
        ),
        Scenario(
            name="sliding windows, salts",
            model="hybrid",
            habits=Habits(full_reports=full_reports),
            kills={half // 2 + 5: "group"},
            blocks=96,
            **common,
        ),
    ]


class SequentialRun:
    """One scenario with one seed."""

    def __init__(self, scenario: Scenario, seed: int, engine: Engine, service: Service) -> None:
        self._scenario: Final = scenario
        self._engine: Final = engine
        self._service: Final = service
        self._traffic: Final = Traffic(f"{scenario.model} {seed}", scenario.habits, BLOCK_SIZE)
        self._random: Final = Random(seed)
        self._recorder: Recorder | None = None
        self.result: Final = SequentialResult(scenario.name, seed, Tally(), Tally(), [], 0.0)

    def play(self, recording: Path | None = None) -> SequentialResult:
        """Send all requests to the started engine. With `recording`, record them and the stream to this file."""
        began = time.monotonic()
        with ExitStack() as stack:
            if recording is not None:
                self._recorder = stack.enter_context(self._record(recording))
            for number in range(self._scenario.requests):
                if number in self._scenario.kills:
                    self._kill(self._scenario.kills[number])
                is_after_reset = number > 0 and number % self._scenario.reset_every == 0
                if is_after_reset:
                    self._engine.reset_cache()
                self._compare_request(
                    number, self._traffic.next(), self.result.after_reset if is_after_reset else self.result.requests
                )
        self.result.seconds = round(time.monotonic() - began, 1)
        return self.result

    def _record(self, path: Path) -> Recorder:
        source = self._service.source()
        assert source is not None
        return Recorder(path, source["endpoint"], source["replay_endpoint"])

    def _compare_request(self, number: int, prompt: Prompt, tally: Tally) -> None:
        observation = self._engine.observation
        assert observation is not None
        is_settled = self._service.settle(observation)
        if self._recorder is not None:
            is_settled = self._recorder.settle(observation.progress().last_timestamp) and is_settled
            self._recorder.hold()
        prediction = self._service.predict(prompt)
        answer = self._engine.complete(prompt)
        if self._recorder is not None:
            self._recorder.add_request(prompt, prediction, answer.cached)
        tally.unsettled += not is_settled
        tally.salted += prompt.salt is not None
        tally.adapted += prompt.lora is not None
        tally.reported_in_full += prompt.is_reported_in_full
        length = len(prompt.tokens)
        example = Example(number, prediction.tokens, answer.cached, length, prompt.salt, prompt.lora, prediction.trust)
        if not tally.add(prediction, answer.cached, example):
            print(f"  WRONG{' after a reset' if tally is self.result.after_reset else ''}: {example}", flush=True)
        self._traffic.answered(prompt, answer.tokens)

    def _kill(self, kind: KillTarget) -> None:
        """Kill the engine in the middle of a request, and start it again."""
        observation = self._engine.observation
        assert observation is not None
        steps = observation.progress().steps
        request = threading.Thread(target=self._send_unanswered_request, name="unanswered request", daemon=True)
        request.start()
        if not wait_until(lambda: observation.progress().steps > steps + 2, 30.0, pause=0.001):
            raise EngineError(f"the engine makes no steps:\n{self._engine.log_tail()}")
        killed = time.monotonic()
        self._engine.kill(kind)
        if self._recorder is not None:
            self._recorder.add_restart()
        states_below_exact = ("CONNECTING", "REPLAYING", "DEGRADED", "STALE")
        has_left_exact = self._service.await_state(*states_below_exact, seconds=DISTRUST_SECONDS)
        self.result.restarts.append(Restart(kind, round(time.monotonic() - killed, 2) if has_left_exact else None))
        request.join(30.0)
        self._engine.start()

    def _send_unanswered_request(self) -> None:
        tokens = [self._random.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(3 * BLOCK_SIZE)]
        with suppress(OSError, EngineError):
            self._engine.complete(Prompt(tokens, MAX_LENGTH - len(tokens) - 1))
