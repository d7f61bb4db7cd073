"""Unit tests start no process and open no socket: tests that do so belong in `tests/integration`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

import pytest
import zmq

_FORBIDDEN: Final = frozenset({"socket.bind", "socket.connect", "subprocess.Popen", "os.fork", "os.posix_spawn"})
_running: str | None = None


def _reject(event: str, _arguments: tuple[Any, ...]) -> None:
    if _running is not None and event in _FORBIDDEN:
        raise AssertionError(f"{_running} is a unit test and causes {event}: move its file to tests/integration")


sys.addaudithook(_reject)


@pytest.fixture(autouse=True)
def _no_socket_and_no_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that opens a socket, one of ZeroMQ included, or starts a process."""
    global _running  # noqa: PLW0603 - an audit hook has no other state

    def reject(*_arguments: Any, **_options: Any) -> Any:
        _reject("socket.bind", ())

    monkeypatch.setattr(zmq.Context, "socket", reject)
    _running = request.node.nodeid
    try:
        yield
    finally:
        _running = None
