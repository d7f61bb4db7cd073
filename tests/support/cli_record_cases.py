"""Endpoints of the publishers whose events are recorded."""

from __future__ import annotations

import re

from cli_cases import Program

ANY_PORT = "tcp://127.0.0.1:*"


def serving(program: Program) -> tuple[str, str]:
    """Return the live and the replay endpoint of a `play` or `publish` process."""
    found = re.search(r"(tcp://\S+), replay (tcp://\S+)", program.err.wait("replay tcp://"))
    assert found
    return found[1], found[2]
