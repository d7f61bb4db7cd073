"""Dynamo's index, from its released wheel, in an interpreter of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from types import TracebackType
from typing import Any, Final, Self

from benchmarks.processes import free_ports
from tools.released import CACHE, Release, wheel

DYNAMO: Final = Release("ai-dynamo-runtime", "1.6.1")
PATIENCE: Final = 60.0
"""Seconds until the service must answer, or have applied what it was sent."""
PAUSE: Final = 0.005
"""Between two questions whether a block is visible: their cost counts among the service's."""
_MODEL: Final = "m"


def interpreter() -> str:
    """A virtual environment with Dynamo's wheel and its dependencies; created if it does not exist."""
    home = CACHE / f"{DYNAMO.package}-{DYNAMO.release}"
    python, ready = home / "bin" / "python", home / ".ready"
    if not ready.exists():
        archive = wheel(DYNAMO)
        print(f"installing {DYNAMO.title} once", file=sys.stderr)
        make = (sys.executable, "-m", "venv", "--clear", home)
        fill = (python, "-m", "pip", "install", "--quiet", archive)
        for command in (make, fill):
            if subprocess.run(command, stdout=sys.stderr, check=False).returncode:  # noqa: S603 - with our own words
                sys.exit(f"{DYNAMO.title} could not be installed into {home}")
        ready.touch()
    return str(python)


class Service:
    """`python -m dynamo.indexer`, with its default of 4 threads, that follows one worker."""

    def __init__(self, worker_port: int) -> None:
        (self._port,) = free_ports(1)
        options = ("--port", self._port, "--block-size", 16, "--threads", 4, "--model-name", _MODEL)
        command = [interpreter(), "-m", "dynamo.indexer", *options, "--workers", f"1=tcp://127.0.0.1:{worker_port}"]
        self._process = subprocess.Popen(  # noqa: S603 - its interpreter, with our own words
            list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._http = HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)
        self._wait_for_health()

    @property
    def pid(self) -> int:
        return self._process.pid

    def matched(self, tokens: list[int]) -> int:
        """How many of the tokens it answers with."""
        answer = self.ask("POST", "/query", {"token_ids": tokens, "model_name": _MODEL})
        return int(json.loads(answer)["instances"].get("1", {}).get("longest_matched", 0))

    def wait_for(self, tokens: list[int]) -> float:
        """The time at which all of them were answered with."""
        end = time.monotonic() + PATIENCE
        while self.matched(tokens) < len(tokens):
            if time.monotonic() > end:
                raise TimeoutError(f"{DYNAMO.title} has not indexed what it was sent {PATIENCE:.0f} s ago")
            time.sleep(PAUSE)
        return time.monotonic()

    def ask(self, method: str, path: str, body: Any = None) -> bytes:
        """Its answer to one request."""
        text = None if body is None else json.dumps(body)
        self._http.request(method, path, text, {"Content-Type": "application/json"})
        response = self._http.getresponse()
        answer = response.read()
        if response.status >= 300:
            raise RuntimeError(f"{DYNAMO.title} answered {path} with {response.status}: {answer[:200]!r}")
        return answer

    def _wait_for_health(self) -> None:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            with suppress(OSError, HTTPException):
                self.ask("GET", "/health")
                return
            self._http.close()
            time.sleep(0.05)
        raise TimeoutError(f"{DYNAMO.title} does not answer")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.close()
        self._process.kill()
        self._process.wait()
