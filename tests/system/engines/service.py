"""Our service, which finds an engine by its URL, and a client of the service."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from tests.system.engines.observer.page import Observation
from tests.system.engines.server import MODEL, wait_until
from tests.system.engines.traffic import Prompt

START_SECONDS: Final = 60.0
SETTLE_SECONDS: Final = 10.0
"""Limit of the wait until the service has applied what the engine has published."""
POLL_SECONDS: Final = 0.002
SAME_TIME: Final = 1e-5
"""Seconds by which equal timestamps may differ, after subtractions of doubles. Two engine steps differ more."""


class Prediction(NamedTuple):
    """The prediction of the service for a prompt."""

    tokens: int
    """Tokens that the engine will not compute."""
    trust: str
    reason: str
    is_attested: bool
    """Whether the engine's digest of its cache has matched the state of the service."""


class Service:
    """`kvevents serve --engine URL`, without other options. A context manager."""

    def __init__(self, engine_url: str, folder: Path) -> None:
        self.log: Final = folder / "service.log"
        command = [sys.executable, "-m", "kvevents", "serve", "--engine", engine_url, "--port", "0"]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        self._connection = HTTPConnection(self._await_address())
        if not wait_until(lambda: self.source() is not None, START_SECONDS):
            self.close()
            raise RuntimeError(f"kvevents serve did not find the engine:\n{self.log.read_text(encoding='utf-8')}")

    def _await_address(self) -> str:
        deadline = time.monotonic() + START_SECONDS
        while True:
            text = self.log.read_text(encoding="utf-8")
            if found := re.search(r"listening at http://(\S+)", text):
                return found[1]
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                raise RuntimeError(f"kvevents serve did not start:\n{text}")
            time.sleep(0.05)

    def connect(self) -> HTTPConnection:
        """Return a further connection, for a thread of its own."""
        return HTTPConnection(self._connection.host, self._connection.port, timeout=30.0)

    def call(self, method: str, path: str, body: Any = None, connection: HTTPConnection | None = None) -> Any:
        """Return the answer to a request. Raises `RuntimeError` for an error status, HTTPException or OSError if none comes."""
        used = connection or self._connection
        try:
            status, encoded = _exchange(used, method, path, body)
        except (HTTPException, OSError):
            # The service closes idle connections, for example during a restart of the engine. A new connection must not fail.
            used.close()
            status, encoded = _exchange(used, method, path, body)
        if status != 200:
            raise RuntimeError(f"{method} {path}: {status} {encoded[:500]!r}")
        return json.loads(encoded)

    def predict(self, prompt: Prompt, connection: HTTPConnection | None = None) -> Prediction:
        """Return the prediction of `/v1/match`, which leaves out the last token of a prompt, as engines do."""
        workers = self.match(prompt, connection)
        if not workers:
            return Prediction(0, "ABSENT", "the service does not know the engine", is_attested=False)
        (worker,) = workers
        trust = worker["trust"]
        return Prediction(worker["tokens"], trust["state"], trust["reason"], bool(trust.get("attested", False)))

    def match(self, prompt: Prompt, connection: HTTPConnection | None = None) -> list[dict[str, Any]]:
        """Return the workers in the answer of `/v1/match`."""
        body: dict[str, Any] = {"model": MODEL, "tokens": prompt.tokens}
        body |= {"salt": prompt.salt} if prompt.salt else {}
        body |= {"lora": prompt.lora} if prompt.lora else {}
        workers: list[dict[str, Any]] = self.call("POST", "/v1/match", body, connection)["workers"]
        return workers

    def sources(self) -> list[dict[str, Any]]:
        """Return the entries of `/v1/sources`, one for each rank."""
        sources: list[dict[str, Any]] = self.call("GET", "/v1/sources")["sources"]
        return sources

    def source(self) -> dict[str, Any] | None:
        """Return the first entry of the engine in `/v1/sources`, or None before the service has found it."""
        return next(iter(self.sources()), None)

    def await_state(self, *states: str, seconds: float) -> bool:
        """Wait until trust is one of these states. Return False if it is not within `seconds`."""
        deadline = time.monotonic() + seconds
        while (source := self.source()) is None or source["trust"]["state"] not in states:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def settle(self, observation: Observation, seconds: float = SETTLE_SECONDS) -> bool:
        """Wait until the engine is idle and the service has applied its newest batch. Return False after `seconds`."""
        deadline = time.monotonic() + seconds
        while not self._is_settled(observation):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def _is_settled(self, observation: Observation) -> bool:
        progress = observation.progress()
        if not progress.is_idle:
            return False
        if progress.published == 0:
            return True
        source = self.source()
        if source is None or source["last_event"] is None or source["lag_seconds"] is None:
            return False
        newest: float = source["last_event"] - source["lag_seconds"]  # the timestamp of the newest live batch
        return newest > progress.last_timestamp - SAME_TIME

    def close(self) -> None:
        self._connection.close()
        self._process.terminate()
        try:
            self._process.wait(20.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _exchange(connection: HTTPConnection, method: str, path: str, body: Any) -> tuple[int, bytes]:
    connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    return response.status, response.read()
