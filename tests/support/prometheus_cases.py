"""A Prometheus server that scrapes metrics of kvevents, and a client of its API."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml

from cli_cases import SECONDS, Program
from service_cases import wait_for
from tools.ports import reserve_port

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


@contextmanager
def run_prometheus(home: Path, rules: Path, *targets: str) -> Iterator[Prometheus]:
    """Yield a server after some scrapes of the targets. Alerts of the rules fire at once."""
    (home / "rules.yaml").write_text(re.sub(r"for: \d+m", "for: 0s", rules.read_text()))
    settings = {
        "global": {"scrape_interval": "250ms", "scrape_timeout": "250ms", "evaluation_interval": "250ms"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": "kvevents", "static_configs": [{"targets": list(targets)}]}],
    }
    (home / "prometheus.yml").write_text(yaml.safe_dump(settings))
    address = f"127.0.0.1:{reserve_port()}"
    command = (PROMETHEUS, f"--config.file={home}/prometheus.yml", f"--storage.tsdb.path={home}/data")
    with Program(command=(*command, f"--web.listen-address={address}")) as program:
        program.err.wait("Server is ready to receive web requests")
        prometheus = Prometheus(f"http://{address}")
        wait_for("enough scrapes for a rate", lambda: _count_scrapes(prometheus) >= 3)
        yield prometheus


def _count_scrapes(prometheus: Prometheus) -> int:
    found = prometheus.query("count_over_time(up[1m]) and up == 1")
    return int(found[0]["value"][1]) if found else 0
