"""Ask the probes of a server of metrics."""

from __future__ import annotations

from urllib.error import HTTPError
from urllib.request import urlopen

SECONDS = 60.0


def ask_probe(port: int, path: str) -> tuple[int, str]:
    """Return the status and the text of an answer."""
    try:
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=SECONDS) as answer:
            return answer.status, answer.read().decode().strip()
    except HTTPError as error:
        return error.code, error.read().decode().strip()
