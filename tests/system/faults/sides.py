"""Both services as processes, asked alike: what they find, what they say of their workers, what they log."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, NamedTuple, Self

from kvevents.testing.ports import reserve_port
from tools.dynamo import DYNAMO, interpreter
from tools.released import CHECKOUT

HOST: Final = "127.0.0.1"
PATIENCE: Final = 20.0
"""Seconds until a service must have started, or have answered one request."""
LOOK: Final = 0.02
"""Seconds between two looks at a service."""
SNAPSHOT_SECONDS: Final = 0.5


class Answer(NamedTuple):
    """To one request."""

    status: int
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def summary(self) -> str:
        """In short."""
        found = json.loads(self.text) if self.text.startswith("{") else {}
        return f"{self.status} {found.get('error', '')}".strip()


class WorkerState(NamedTuple):
    """What a service says of a worker without being asked for its blocks."""

    trusted: bool
    """Whether it says that all is well."""
    words: str


class Side(ABC):
    """A service on a port of its own, with an empty folder for its state."""

    title: ClassVar[str]
    alarm: ClassVar[re.Pattern[str]]
    """A line of its log that is a warning or worse."""
    clutter: ClassVar[re.Pattern[str]]
    """Of such a line, what another run has otherwise, or what stands in every one."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="kvevents-faults-")
        self._log = Path(self.folder.name, "log")
        self._process: subprocess.Popen[bytes] | None = None
        # Held, since several run at a time, and another one that takes the port would answer in its place.
        self._held = reserve_port(f"tcp://{HOST}:*")
        self._port = int(self._held.endpoint.rpartition(":")[2])
        try:
            self.start()
        except BaseException:
            self._end()
            raise

    # Its process

    @abstractmethod
    def command(self, port: int) -> list[str]: ...

    def start(self) -> None:
        """Start it, and wait until it answers. Raises `RuntimeError` when it ends instead."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(self._port), cwd=CHECKOUT, stdout=log, stderr=log, start_new_session=True
            )
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.title} ended with {self._process.returncode}: {self.lines()[-5:]}")
            with suppress(OSError, HTTPException):
                if self.ask("GET", "/health").status == 200:
                    return
            time.sleep(LOOK)
        raise TimeoutError(f"{self.title} does not answer")

    def kill(self) -> None:
        """End it as a machine without power does."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    @abstractmethod
    def come_back(self, registrations: Iterable[dict[str, Any]]) -> None:
        """Start again after `kill`, with what an operator then has to do."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until it has kept on the disk what it knows now, if it does that at all."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        self.kill()
        if self._held.holder is not None:
            self._held.holder.close()
        self.folder.cleanup()

    # What it answers

    def ask(self, method: str, path: str, body: Any = None) -> Answer:
        """One request."""
        connection = HTTPConnection(HOST, self._port, timeout=PATIENCE)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return Answer(response.status, response.read().decode())
        finally:
            connection.close()

    def held(self, question: dict[str, Any]) -> dict[int, int]:
        """Tokens of the longest prefix by instance; of a model that no worker serves, nothing."""
        answer = self.ask("POST", "/query", {**question, "whole_prompt": True})  # Dynamo ignores what it does not know
        if answer.status == 404:
            return {}
        if answer.status != 200:
            raise RuntimeError(f"{self.title} answered a query with {answer}")
        found = {int(name): each["longest_matched"] for name, each in answer.json["instances"].items()}
        return {name: tokens for name, tokens in found.items() if tokens}

    @abstractmethod
    def state_of(self, instance: int) -> WorkerState | None:
        """What it says of one worker; nothing of one that it does not know."""

    def counted(self) -> Counter[str]:
        """What metrics of the whole process have counted that was not as it should be."""
        found = (_COUNTER.match(line) for line in self.ask("GET", "/metrics").text.splitlines())
        return Counter({f"{each[1]}": int(float(each[2])) for each in found if each and each[1] != "ok"})

    def lines(self) -> list[str]:
        """What it has logged so far."""
        return self._log.read_text(errors="replace").splitlines()


class Ours(Side):
    """`kvevents serve`."""

    title = "`kvevents serve`"
    alarm = re.compile(r" (WARNING|ERROR|CRITICAL) |Traceback")
    clutter = re.compile(r"^\S+ \S+ \w+ +")

    def command(self, port: int) -> list[str]:
        state = ("--state-dir", str(Path(self.folder.name, "state")), "--snapshot-seconds", str(SNAPSHOT_SECONDS))
        return [sys.executable, "-m", "kvevents", "serve", "--host", HOST, "--port", str(port), *state]

    def come_back(self, registrations: Iterable[dict[str, Any]]) -> None:
        del registrations  # it remembers them
        self.start()

    def settle(self) -> None:
        now, end = time.time(), time.monotonic() + PATIENCE
        while (self.ask("GET", "/v1/stats").json["snapshot_at"] or 0.0) < now:
            if time.monotonic() > end:
                raise TimeoutError("no snapshot was written")
            time.sleep(LOOK)

    def state_of(self, instance: int) -> WorkerState | None:
        sources = self.ask("GET", "/v1/sources").json["sources"]
        found = next((each for each in sources if each["instance"] == str(instance)), None)
        if found is None:
            return None
        trust = found["trust"]
        words = f"{trust['state']} ({trust['reason']})" if trust["reason"] else trust["state"]
        counts = {"batches lost": found["lost"], "restarts seen": found["resets"], "orphans": found["orphans"]}
        counts |= found["rejected"]
        extra = ", ".join(f"{what}: {count}" for what, count in counts.items() if count)
        return WorkerState(trust["state"] == "EXACT", f"{words}; {extra}" if extra else words)


class Dynamo(Side):
    """`python -m dynamo.indexer`."""

    title = f"{DYNAMO.title}"
    alarm = re.compile(r"^\S+\s+(WARN|ERROR) |panicked")
    clutter = re.compile(r"^\S+\s+\w+ [\w:]+: ")

    def command(self, port: int) -> list[str]:
        return [interpreter(), "-m", "dynamo.indexer", "--port", str(port), "--threads", "4"]

    def come_back(self, registrations: Iterable[dict[str, Any]]) -> None:
        self.start()
        for each in registrations:
            self.ask("POST", "/register", each)

    def settle(self) -> None:
        """It keeps nothing."""

    def state_of(self, instance: int) -> WorkerState | None:
        workers = self.ask("GET", "/workers").json
        found = next((each for each in workers if each["instance_id"] == instance), None)
        if found is None:
            return None
        errors = [each["last_error"] for each in found["listeners"].values() if each.get("last_error")]
        return WorkerState(found["status"] == "active" and not errors, "; ".join([found["status"], *errors]))

    def lines(self) -> list[str]:
        return [_COLOUR.sub("", line) for line in super().lines()]


_COUNTER: Final = re.compile(
    r'dynamo_kvrouter_kv_cache_event(?:s_applied|_warnings)\{.*(?:status|warning_kind)="(\w+)"\} (\S+)$'
)
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
