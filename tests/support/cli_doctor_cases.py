"""Findings of `kvevents doctor`, and a server that sends given bytes."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, TypeAlias

from cli_cases import SECONDS, ProcessResult, run
from kvevents.diagnosis.findings import CheckResult

Findings: TypeAlias = dict[str, dict[str, str]]
"""The worst finding of each check, by name of the check."""
DURATIONS: Final = (0.6, 3.0, 15.0)
"""Values of `--duration`. On a busy machine too little arrives in a short time."""


def examine(*args: object, is_enough: Callable[[Findings], object]) -> Findings:
    """Run `doctor` for longer and longer times until its findings are enough, and return the newest ones."""
    found: Findings = {}
    for seconds in DURATIONS:
        found = findings(run("doctor", *args, "--output=json", "--duration", seconds))
        if is_enough(found):
            break
    return found


def has_traffic(found: Findings) -> bool:
    """Return whether live messages have arrived."""
    return "traffic" in found and found["traffic"]["verdict"] == "ok"


def is_followed(found: Findings) -> bool:
    """Return whether the stream was connected, and its replay was complete, before the end."""
    return "trust" in found and not found["trust"]["text"].startswith(("CONNECTING", "REPLAYING"))


def findings(ended: ProcessResult) -> Findings:
    """Return the worst finding of each check, after verifying that the exit code agrees with the findings."""
    assert ended.out, ended
    report = json.loads(ended.out)
    order = ["ok", "warn", "fail"]
    found: Findings = {}
    for finding in report["findings"]:
        if finding["check"] not in found or order.index(finding["verdict"]) > order.index(found[finding["check"]]["verdict"]):
            found[finding["check"]] = finding
        assert finding["verdict"] == "ok" or finding["advice"], finding
    assert report["verdict"] == max((finding["verdict"] for finding in report["findings"]), key=order.index)
    assert ended.code == (1 if report["verdict"] == "fail" else 0)
    return found


@contextmanager
def serve_reply(reply: bytes | None) -> Iterator[str]:
    """Yield the endpoint of a server that answers each connection with `reply` and closes it; without one, it sends nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        accepted: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    connection = listener.accept()[0]
                except OSError:
                    return
                accepted.append(connection)
                if reply is not None:
                    with suppress(ConnectionError):  # the client closes after it has read enough
                        connection.recv(1 << 16)
                        connection.sendall(reply)
                    connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(SECONDS)
        for connection in accepted:
            connection.close()


def one(finding: CheckResult | None) -> tuple[str, str]:
    assert finding is not None
    return finding.verdict.value, finding.text
