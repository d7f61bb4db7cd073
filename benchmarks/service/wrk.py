"""Requests by wrk, which takes less CPU time than a client in Python."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

_SCRIPT: Final = """
local file = io.open("{body}", "rb")
wrk.method, wrk.body = "POST", file:read("*a")
wrk.headers["Content-Type"] = "{content_type}"
file:close()
function done(summary, latency)
  local e = summary.errors
  io.stderr:write(string.format(
    '{{"p50": %.3f, "p99": %.3f, "requests": %d, "rate": %.3f, "errors": %d, "late": %d}}',
    latency:percentile(50), latency:percentile(99), summary.requests, summary.requests / summary.duration * 1e6,
    e.connect + e.read + e.write + e.status, e.timeout))
end
"""


class Load(NamedTuple):
    """The result of a run; times in microseconds."""

    p50: float
    p99: float
    requests: int
    rate: float
    """Requests per second."""
    errors: int
    late: int
    """Number of answers that took longer than `patience`."""


def program() -> str:
    """Return the path of wrk. Raises `SystemExit` with a message if wrk is not installed."""
    path = shutil.which("wrk")
    return path or sys.exit(
        "the trials of the service need wrk: `tools/setup bench` installs it on Debian; or --only with other names"
    )


def load(url: str, body: bytes, content_type: str, clients: int, seconds: int, patience: int = 2) -> Load:
    """Send one request repeatedly. Each client has its own connection, and sends the request again when the answer has arrived.

    An answer that takes longer than `patience` seconds is a failure, as is an invalid one.
    """
    with tempfile.TemporaryDirectory() as folder:
        file, script = Path(folder, "body"), Path(folder, "post.lua")
        file.write_bytes(body)
        script.write_text(_SCRIPT.format(body=file, content_type=content_type))
        options = ("--threads", 1, "--connections", clients, "--duration", f"{seconds}s", "--script", script)
        command = [program(), *map(str, options), "--timeout", f"{patience}s", url]
        process = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - fixed arguments
    run = Load(**json.loads(process.stderr))
    if run.errors or run.late:
        raise RuntimeError(f"{run.errors} of {run.requests} requests to {url} failed, {run.late} took over {patience} s")
    return run
