"""A client of a Prometheus server that scrapes the service."""

from __future__ import annotations

import json
import shutil
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from cli_cases import SECONDS

PROMETHEUS, PROMTOOL = shutil.which("prometheus") or "", shutil.which("promtool") or ""


needs_prometheus = pytest.mark.skipif(
    not PROMETHEUS or not PROMTOOL,
    reason="no Prometheus is installed; `tools/setup tests` installs Debian's",
)


class Prometheus:
    """The API of a Prometheus server."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str, **parameters: str) -> Any:
        """Return the `data` of an answer of the API."""
        with urlopen(f"{self._url}/api/v1/{path}?{urlencode(parameters)}", timeout=SECONDS) as answer:  # noqa: S310 - ours
            answered = json.load(answer)
        assert answered["status"] == "success", answered
        return answered["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return found

    def firing(self) -> list[dict[str, str]]:
        """Return the labels of all alerts that are firing."""
        return [alert["labels"] for alert in self.ask("alerts")["alerts"] if alert["state"] == "firing"]


def count_scrapes(prometheus: Prometheus) -> int:
    found = prometheus.query("count_over_time(up[1m]) and up == 1")
    return int(found[0]["value"][1]) if found else 0
