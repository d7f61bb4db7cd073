"""The OpenAI server of vLLM on loopback, a group of processes that can be killed and started again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from random import SystemRandom
from typing import Any, Final, Literal, NamedTuple, Self, TypeAlias

from tests.system.engines.installation import Environment
from tests.system.engines.models import ADAPTERS
from tests.system.engines.observer.page import Observation
from tests.system.engines.traffic import Prompt

START_SECONDS: Final = 300.0
"""Limit of a start. A start takes half a minute on an idle machine."""
STOP_SECONDS: Final = 15.0
"""Seconds from SIGTERM to SIGKILL."""
REQUEST_SECONDS: Final = 120.0
MODEL: Final = "tiny"
"""Name of the model for clients."""
_NICE: Final = "/usr/bin/nice"
_PORTS: Final = range(15_000, 32_000)
"""Ports below those of outgoing connections, so that a port is still free when a killed engine starts again."""
BLOCK_SIZE: Final = 32
MAX_LENGTH: Final = 320
"""Tokens of a prompt and its answer together."""
KillTarget: TypeAlias = Literal["group", "core"]
"""`group`: all processes are killed. `core`: EngineCore is killed, and the remaining server is stopped."""


class EngineError(Exception):
    """The engine did not start, or a request failed. The message has the end of its log."""


class Answer(NamedTuple):
    """The answer of the engine to a request."""

    cached: int
    """`usage.prompt_tokens_details.cached_tokens`: tokens of the prompt that it did not compute."""
    tokens: list[int]
    """Tokens of the answer."""


class EngineSettings(NamedTuple):
    """The settings of an engine."""

    environment: Environment
    model: Path
    blocks: int
    """GPU blocks of the KV cache, of each group."""
    folder: Path
    """Folder for logs and observations."""
    path: tuple[Path, ...]
    """Folders at the begin of its Python path, with plugins."""
    adapters: Mapping[str, Path] = {}
    variables: Mapping[str, str] = {}
    ranks: int = 1
    """Data-parallel ranks, each with ports of its own."""


class Engine:
    """One engine with fixed ports, in several incarnations. A context manager that leaves no process behind."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings: Final = settings
        self.host: Final = f"127.0.0.1:{free_port()}"
        self.starts = 0
        self.ports: Final = free_port(settings.ranks), free_port(settings.ranks)
        """Ports of the events and the replay of rank 0."""
        self._process: subprocess.Popen[bytes] | None = None
        self.observation: Observation | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    @property
    def log(self) -> Path:
        """Return the path of the log of this incarnation."""
        return self.settings.folder / f"engine-{self.starts}.log"

    def start(self, *, is_awaited: bool = True) -> None:
        """Start an incarnation. Raises `EngineError` if it ends or does not answer within `START_SECONDS`."""
        self.starts += 1
        self.observation = Observation(self.settings.folder / f"observation-{self.starts}")
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [_NICE, "-n", "5", str(self.settings.environment.command), *self._arguments()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._variables(self.observation.path),
                start_new_session=True,
            )
        if is_awaited:
            self.await_health()

    def await_health(self) -> None:
        """Wait until the HTTP server of the engine answers. Raises `EngineError` if it does not."""
        deadline = time.monotonic() + START_SECONDS
        while not self._is_healthy():
            if self._process is None or self._process.poll() is not None:
                raise EngineError(f"the engine has ended while it started:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise EngineError(f"the engine does not answer {START_SECONDS:.0f} s after its start:\n{self.log_tail()}")
            time.sleep(0.25)

    def _arguments(self) -> list[str]:
        adapters = [f"{name}={path}" for name, path in self.settings.adapters.items()]
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv-events"}
        endpoints = {name: f"tcp://*:{port}" for name, port in zip(("endpoint", "replay_endpoint"), self.ports, strict=True)}
        host, _, port = self.host.partition(":")
        return [
            *("serve", str(self.settings.model), "--served-model-name", MODEL, "--host", host, "--port", port),
            *("--load-format", "dummy", "--dtype", "bfloat16", "--enforce-eager", "--enable-prompt-tokens-details"),
            *("--max-model-len", str(MAX_LENGTH), "--max-num-seqs", "8", "--block-size", str(BLOCK_SIZE)),
            *("--enable-prefix-caching", "--num-gpu-blocks-override", str(self.settings.blocks)),
            *("--kv-events-config", json.dumps(events | endpoints)),
            *(["--data-parallel-size", str(self.settings.ranks)] if self.settings.ranks > 1 else []),
            *(["--enable-lora", "--max-loras", str(len(ADAPTERS)), "--lora-modules", *adapters] if adapters else []),
        ]

    def _variables(self, page: Path) -> dict[str, str]:
        ours = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
            "PYTHONPATH": os.pathsep.join(map(str, self.settings.path)),
            "ENGINE_OBSERVER_PAGE": str(page),
        }
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        return inherited | ours | dict(self.settings.variables)

    def _is_healthy(self) -> bool:
        try:
            return self.call("GET", "/health", seconds=5.0)[0] == 200
        except OSError:
            return False

    def log_tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])

    # --- requests

    def call(
        self, method: str, path: str, body: Any = None, seconds: float = REQUEST_SECONDS, rank: int | None = None
    ) -> tuple[int, bytes]:
        """Send a request and return status and body. With `rank`, this rank answers.

        Raises OSError if the engine cannot be reached or ends meanwhile.
        """
        connection = HTTPConnection(self.host, timeout=seconds)
        try:
            encoded = None if body is None else json.dumps(body)
            chosen = {} if rank is None else {"X-data-parallel-rank": str(rank)}
            connection.request(method, path, encoded, {"Content-Type": "application/json"} | chosen)
            response = connection.getresponse()
            return response.status, response.read()
        except HTTPException as error:
            raise ConnectionError(f"{method} {path}: {error!r}") from error
        finally:
            connection.close()

    def complete(self, prompt: Prompt, rank: int | None = None) -> Answer:
        """Return the answer of the engine or of one of its ranks. Raises `EngineError` if it refuses, and OSError as `call`."""
        body: dict[str, Any] = {"model": prompt.lora or MODEL, "prompt": prompt.tokens, "max_tokens": prompt.answer}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        if prompt.salt:
            body["cache_salt"] = prompt.salt
        if prompt.is_reported_in_full:
            body["vllm_xargs"] = {"kv_cache_report_mode": "full"}
        status, encoded = self.call("POST", "/v1/completions", body, rank=rank)
        if status != 200:
            raise EngineError(f"the engine answered {status}: {encoded[:500]!r}\n{self.log_tail()}")
        answer = json.loads(encoded)
        return Answer(answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["token_ids"])

    def reset_cache(self) -> None:
        """Empty the prefix cache with `/reset_prefix_cache`, as operators do."""
        status, body = self.call("POST", "/reset_prefix_cache")
        if status != 200:
            raise EngineError(f"/reset_prefix_cache answered {status}: {body[:500]!r}")

    # --- ends

    def kill(self, kind: KillTarget) -> None:
        """Send SIGKILL to the whole group, or to EngineCore first. Return when no process of this incarnation is left."""
        if kind == "core":
            for process in self._session_pids("EngineCore"):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            self._await_end(STOP_SECONDS)  # the server ends by itself when it notices
        self._signal(signal.SIGKILL)
        self._await_end(STOP_SECONDS)
        self._forget()

    def stop(self) -> None:
        """End this incarnation with SIGTERM, and with SIGKILL after `STOP_SECONDS`. Idempotent."""
        self._signal(signal.SIGTERM)
        if not self._await_end(STOP_SECONDS):
            self._signal(signal.SIGKILL)
            self._await_end(STOP_SECONDS)
        self._forget()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _await_end(self, seconds: float) -> bool:
        return wait_until(lambda: not self._session_pids(), seconds)

    def _forget(self) -> None:
        if self._process is not None:
            self._process.wait(STOP_SECONDS)
            self._process = None

    def _session_pids(self, word: str = "") -> list[int]:
        """Return running processes of this incarnation with this word in their title. Zombies do not count."""
        if self._process is None:
            return []
        self._process.poll()  # reaps the first process, which would else stay as a zombie
        return [pid for pid, session, title in _list_processes() if session == self._process.pid and word in title]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def free_port(count: int = 1) -> int:
    """Return the first of `count` successive ports of loopback at which nothing listens."""
    while True:
        port = SystemRandom().choice(_PORTS)
        if all(map(_is_free, range(port, port + count))):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def wait_until(test: Callable[[], bool], seconds: float, pause: float = 0.05) -> bool:
    """Wait until `test` returns true. Return False if it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not test():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


def _list_processes() -> list[tuple[int, int, str]]:
    """Return pid, session and title of all running processes."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            title = (entry / "cmdline").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # it has ended
        if fields[0] != "Z":
            found.append((int(entry.name), int(fields[3]), title))
    return found
