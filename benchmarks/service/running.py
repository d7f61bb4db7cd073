"""Who is compared: our service and Dynamo's, as processes, driven alike."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from benchmarks.indexing import procfs
from benchmarks.indexing.workload import BLOCK_SIZE
from benchmarks.processes import free_ports
from benchmarks.service.workers import Endpoints
from tools.dynamo import PATIENCE, interpreter
from tools.released import CHECKOUT

MODEL: Final = "m"
HOST: Final = "127.0.0.1"
JSON: Final = "application/json"
LOOK: Final = 0.002
"""Seconds between two looks whether a service answers, or knows something yet."""
_LOG_TAIL: Final = 1_000
"""Characters of a failed service's log that are printed."""


def _ours(port: int) -> list[str]:
    return [sys.executable, "-m", "kvevents", "serve", "--host", HOST, "--port", str(port)]


def _dynamo(port: int) -> list[str]:
    return [interpreter(), "-m", "dynamo.indexer", "--port", str(port), "--threads", "4"]


COMMANDS: Final[dict[str, Callable[[int], list[str]]]] = {"ours": _ours, "service": _dynamo}


class Running:
    """A service on a port of its own, that has answered `/health`; without configuration unless given a command line."""

    def __init__(self, contender: str | Callable[[int], list[str]]) -> None:
        (self.port,) = free_ports(1)
        command = (COMMANDS[contender] if isinstance(contender, str) else contender)(self.port)
        began = time.monotonic()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(  # noqa: S603 - an interpreter, with our own words
            command, cwd=CHECKOUT, stdout=self._log, stderr=self._log
        )
        self._http = HTTPConnection(HOST, self.port, timeout=PATIENCE)
        try:
            self._wait_for_health()
        except BaseException:
            self._end()
            raise
        self.seconds = time.monotonic() - began
        """From its start to the first answer."""

    @property
    def cpu(self) -> float:
        """Seconds of CPU time, of all its processes and threads."""
        return sum(procfs.cpu(pid) for pid in _family(self._process.pid))

    @property
    def resident(self) -> int:
        """Bytes in memory, of all its processes."""
        return sum(procfs.resident(pid) for pid in _family(self._process.pid))

    def ask(self, method: str, path: str, body: Any = None) -> bytes:
        """Its answer to one request."""
        text = None if body is None else json.dumps(body)
        return self.send(method, path, text, JSON)

    def send(self, method: str, path: str, body: str | bytes | None, content_type: str) -> bytes:
        """Its answer to one request with this very body. Raises `RuntimeError` for an unsuccessful one."""
        self._http.request(method, path, body, {"Content-Type": content_type})
        response = self._http.getresponse()
        answer = response.read()
        if response.status >= 300:
            raise RuntimeError(f"{path} was answered with {response.status}: {answer[:200]!r}; it had said {self._said()}")
        return answer

    def hang_up(self) -> None:
        """Close the connection, as the service does when nothing is asked for long; what is asked next opens another one."""
        self._http.close()

    def register(self, workers: list[Endpoints]) -> None:
        """Instances 1, 2, ... of one model."""
        for instance, (endpoint, replay_endpoint) in enumerate(workers, 1):
            names = {"instance_id": instance, "endpoint": endpoint, "replay_endpoint": replay_endpoint}
            self.ask("POST", "/register", {**names, "model_name": MODEL, "block_size": BLOCK_SIZE})

    def wait_for(self, tokens: list[int], workers: int = 1) -> None:
        """Until it answers that so many workers hold all of these tokens."""

        def held() -> bool:
            instances = json.loads(self.ask("POST", "/query", query(tokens)))["instances"]
            return sum(int(each["longest_matched"]) == len(tokens) for each in instances.values()) >= workers

        wait_until(held, f"{workers} workers with {len(tokens)} tokens")

    def _wait_for_health(self) -> None:
        def answers() -> bool:
            if self._process.poll() is not None:
                raise RuntimeError(f"{self._process.args!r} ended with {self._process.returncode}: {self._said()}")
            with suppress(OSError, HTTPException):
                self.ask("GET", "/health")
                return True
            self._http.close()
            return False

        wait_until(answers, "an answer to /health")

    def _said(self) -> str:
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
    """Body of `/query`, about all that caches hold; others than ours do not know, and ignore, `whole_prompt`."""
    return {"token_ids": tokens, "model_name": MODEL, "whole_prompt": True}


def wait_until(done: Callable[[], bool], what: str, *, pause: float = LOOK, patience: float = PATIENCE) -> None:
    """Look again and again, `pause` seconds apart. Raises `TimeoutError`, which says what did not come."""
    end = time.monotonic() + patience
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {patience:.0f} s")
        if pause:
            time.sleep(pause)


def _family(pid: int) -> list[int]:
    return [pid, *(each for child in _children(pid) for each in _family(child))]


def _children(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        yield from map(int, (task / "children").read_text().split())
