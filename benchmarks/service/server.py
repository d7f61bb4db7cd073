"""Our service and Dynamo's, as processes that receive the same requests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from benchmarks import measures
from benchmarks.service.workers import Endpoints
from benchmarks.workload import BLOCK_SIZE
from tools.ports import reserve_port
from tools.released import CHECKOUT, dynamo

MODEL: Final = "m"
HOST: Final = "127.0.0.1"
JSON: Final = "application/json"
PATIENCE: Final = 60.0
"""Maximum number of seconds for one answer, and for each condition that is awaited."""
POLL_SECONDS: Final = 0.002
_LOG_TAIL: Final = 1_000
"""Number of characters of a failed service's log that are printed."""


def _command(contender: str, port: int) -> list[str]:
    if contender == "ours":
        return [sys.executable, "-m", "kvevents", "serve", "--host", HOST, "--port", str(port)]
    return [dynamo(), "-m", "dynamo.indexer", "--port", str(port), "--threads", "4"]


class Server:
    """A service without configuration on a port of its own, which has answered `/health`; a context manager."""

    def __init__(self, contender: str) -> None:
        self.port = reserve_port()
        command = _command(contender, self.port)
        began = time.monotonic()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(  # noqa: S603 - an interpreter, with fixed arguments
            command, cwd=CHECKOUT, stdout=self._log, stderr=self._log
        )
        self._http = HTTPConnection(HOST, self.port, timeout=PATIENCE)
        try:
            wait_until(self._is_healthy, "an answer to /health")
        except BaseException:
            self._end()
            raise
        self.seconds = time.monotonic() - began
        """Time from its start to the first answer."""

    @property
    def cpu(self) -> float:
        """Seconds of CPU time of all processes and threads of the service."""
        return sum(map(measures.cpu_seconds, _family(self._process.pid)))

    @property
    def resident(self) -> int:
        """Resident bytes of all processes of the service."""
        return sum(map(measures.resident_bytes, _family(self._process.pid)))

    def ask(self, method: str, path: str, body: Any = None) -> bytes:
        """Return the answer to a request with a body in JSON."""
        return self.send(method, path, None if body is None else json.dumps(body), JSON)

    def send(self, method: str, path: str, body: str | bytes | None, content_type: str) -> bytes:
        """Return the answer to a request. Raise `RuntimeError` if it is not successful."""
        self._http.request(method, path, body, {"Content-Type": content_type})
        response = self._http.getresponse()
        answer = response.read()
        if response.status >= 300:
            raise RuntimeError(f"{path} was answered with {response.status}: {answer[:200]!r}; log: {self._log_tail()}")
        return answer

    def register(self, workers: list[Endpoints]) -> None:
        """Register instances 1, 2, ... of one model."""
        for instance, (endpoint, replay_endpoint) in enumerate(workers, 1):
            names = {"instance_id": instance, "endpoint": endpoint, "replay_endpoint": replay_endpoint}
            self.ask("POST", "/register", {**names, "model_name": MODEL, "block_size": BLOCK_SIZE})

    def wait_for(self, tokens: list[int], workers: int) -> None:
        """Wait until the service answers that this number of workers hold all of these tokens."""

        def is_held() -> bool:
            instances = json.loads(self.ask("POST", "/query", query(tokens)))["instances"]
            return sum(int(instance["longest_matched"]) == len(tokens) for instance in instances.values()) >= workers

        wait_until(is_held, f"{workers} workers with {len(tokens)} tokens")

    def _is_healthy(self) -> bool:
        if self._process.poll() is not None:
            raise RuntimeError(f"{self._process.args!r} ended with {self._process.returncode}: {self._log_tail()}")
        with suppress(OSError, HTTPException):
            self.ask("GET", "/health")
            return True
        self._http.close()
        return False

    def _log_tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-_LOG_TAIL:].decode(errors="replace")

    def _end(self) -> None:
        self._http.close()
        for pid in _family(self._process.pid)[1:]:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()


def query(tokens: list[int]) -> dict[str, Any]:
    """Return the body of a `/query` that includes the last token; services other than ours ignore `whole_prompt`."""
    return {"token_ids": tokens, "model_name": MODEL, "whole_prompt": True}


def wait_until(is_done: Callable[[], bool], subject: str, *, pause: float = POLL_SECONDS, patience: float = PATIENCE) -> None:
    """Poll a condition every `pause` seconds. Raise `TimeoutError`, which names the condition."""
    end = time.monotonic() + patience
    while not is_done():
        if time.monotonic() > end:
            raise TimeoutError(f"{subject}: not within {patience:.0f} s")
        if pause:
            time.sleep(pause)


def _family(pid: int) -> list[int]:
    """Return a process and all of its descendants."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return [pid, *(descendant for child in children for descendant in _family(child))]
