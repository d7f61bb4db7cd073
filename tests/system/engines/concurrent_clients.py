"""Concurrent clients, each of which sends its next request right after the answer of the engine.

So that each prediction can be checked although other requests run, clients have nothing in common: prompts of one client
share no block with those of another (each has a cache salt of its own), and the cache is so large that nothing is evicted.
What a prompt finds in the cache then depends only on earlier requests of its own client, all of which have been answered. A
prediction that differs was made before the events of these requests had arrived.
"""

from __future__ import annotations

import threading
import time
from statistics import quantiles
from typing import Final

import msgspec

from tests.system.engines.judging import Example, Tally
from tests.system.engines.server import BLOCK_SIZE, MAX_LENGTH, Engine
from tests.system.engines.service import Service
from tests.system.engines.traffic import Habits, Prompt, Traffic

CLIENTS: Final = 8
WARM_UP: Final = 20
"""Requests at most before those that count."""


class ConcurrentResult(msgspec.Struct):
    """Result of one run."""

    seed: int
    clients: int
    requests: Tally
    more: int
    """Wrong predictions of more tokens than the engine had."""
    fewer: int
    """Wrong predictions of fewer tokens than the engine had."""
    match_ms_p50: float
    match_ms_p99: float
    seconds: float


def blocks_for(requests: int) -> int:
    """Return a number of blocks with which nothing is evicted: each request adds at most `MAX_LENGTH` tokens."""
    return (requests + WARM_UP + CLIENTS + 1) * (MAX_LENGTH // BLOCK_SIZE + 1)


class ConcurrentRun:
    """One run with one seed."""

    def __init__(self, requests: int, seed: int, engine: Engine, service: Service) -> None:
        self._requests_per_client: Final = requests // CLIENTS
        self._seed: Final = seed
        self._engine: Final = engine
        self._service: Final = service
        self._lock: Final = threading.Lock()
        self._tally: Final = Tally()
        self._more = self._fewer = 0
        self._seconds: list[float] = []
        """Durations of requests to `/v1/match`."""
        self._errors: list[BaseException] = []

    def play(self) -> ConcurrentResult:
        """Send all requests. Raises the exception of a client."""
        self._warm_up()
        clients = [threading.Thread(target=self._run_client, args=(number,), daemon=True) for number in range(CLIENTS)]
        began = time.monotonic()
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        if self._errors:
            raise self._errors[0]
        cuts = quantiles(self._seconds, n=100)
        return ConcurrentResult(
            seed=self._seed,
            clients=CLIENTS,
            requests=self._tally,
            more=self._more,
            fewer=self._fewer,
            match_ms_p50=round(cuts[49] * 1e3, 2),
            match_ms_p99=round(cuts[98] * 1e3, 2),
            seconds=round(time.monotonic() - began, 1),
        )

    def _warm_up(self) -> None:
        """Send requests that do not count until the stream is EXACT: its first live batch has to confirm its replay."""
        traffic = Traffic("warm-up", Habits(salts=("warm-up",)), BLOCK_SIZE)
        for _ in range(WARM_UP):
            self._engine.complete(traffic.unrelated())
            if self._service.await_state("EXACT", seconds=1.0):
                return

    def _run_client(self, number: int) -> None:
        try:
            self._send_requests(number)
        except BaseException as error:  # noqa: BLE001 - `play` raises it in the main thread
            self._errors.append(error)

    def _send_requests(self, client: int) -> None:
        traffic = Traffic(f"client {client} {self._seed}", Habits(salts=(f"client-{client}",)), BLOCK_SIZE)
        connection = self._service.connect()
        for number in range(self._requests_per_client):
            prompt = traffic.next()
            began = time.perf_counter()
            prediction = self._service.predict(prompt, connection)
            duration = time.perf_counter() - began
            answer = self._engine.complete(prompt)
            traffic.answered(prompt, answer.tokens)
            example = _example(number, prompt, prediction.tokens, answer.cached, prediction.trust)
            with self._lock:
                self._seconds.append(duration)
                self._tally.add(prediction, answer.cached, example)
                self._tally.salted += 1
                if prediction.trust == "EXACT":
                    self._more += prediction.tokens > answer.cached
                    self._fewer += prediction.tokens < answer.cached


def _example(number: int, prompt: Prompt, predicted: int, cached: int, trust: str) -> Example:
    return Example(number, predicted, cached, len(prompt.tokens), prompt.salt, prompt.lora, trust)
