"""A fleet that sends at a pace: `python -m benchmarks.service.following follow WHO SOURCES RATE BLOCKS SECONDS`."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.processes import Peer, send_line
from benchmarks.service.running import Running, wait_until
from benchmarks.service.workers import Endpoints

SENDERS: Final = 2
"""Processes that the fleet is spread over."""
AHEAD: Final = 0.5
"""Seconds until they begin: all at the same time."""
CATCHING_UP: Final = 5.0
"""Seconds after the last batch until what has not come is lost."""
_STORED: Final = re.compile(rb'^dynamo_kvrouter_kv_cache_events_applied\{event_type="stored",status="ok"\} (\d+)', re.MULTILINE)


def follow(contender: str, sources: int, rate: int, blocks: int, seconds: int) -> dict[str, float]:
    """CPU time of the service and of the senders in per cent of one CPU, and what the service lost."""
    ask = QUESTIONS[contender]
    with Running(contender) as service, ExitStack() as stack:
        shape = (sources // SENDERS, SENDERS, rate, blocks, seconds)
        senders = [stack.enter_context(Peer("service.workers", shape[0], first, *shape[1:])) for first in range(SENDERS)]
        service.register([Endpoints(*pair) for sender in senders for pair in sender.receive()])
        for sender in senders:
            sender.receive()
        ask.settle(service, sources)
        resident, cpu, began = service.resident, service.cpu, time.monotonic() + AHEAD
        for sender in senders:
            sender.send(began)
        reports = [sender.receive() for sender in senders]
        ended, spent = time.monotonic(), service.cpu - cpu
        batches, taken = sources * rate * seconds, ended - began
        with suppress(TimeoutError):
            wait_until(lambda: ask.batches(service) >= batches, "every batch", patience=CATCHING_UP)
        return {
            "cpu": spent / taken * 100,
            "cpu_batch": spent / batches * 1e6,
            "senders": sum(each["cpu"] for each in reports) / taken * 100,
            "rate": batches / max(each["seconds"] for each in reports),
            "late": max(each["late"] for each in reports) * 1e3,
            "behind": (time.monotonic() - ended) * 1e3,
            "grown": (service.resident - resident) / 1e6,
            "lost": batches - ask.batches(service),
            **ask.reported(service),
        }


def _sources(service: Running) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(service.ask("GET", "/v1/sources"))["sources"]
    return found


def _inexact(service: Running) -> int:
    return sum(each["trust"]["state"] != "EXACT" for each in _sources(service))


def _all_caught_up(service: Running, sources: int) -> None:
    """Wait until nothing is missing but the first live batch, before which no source is EXACT."""
    wait_until(lambda: sum(map(_has_caught_up, _sources(service))) == sources, "every source to be caught up")


def _has_caught_up(source: dict[str, Any]) -> bool:
    trust: dict[str, Any] = source["trust"]
    return (trust["state"], trust["reason_codes"]) in (("EXACT", []), ("DEGRADED", ["replay-unproven"]))


def _all_active(service: Running, sources: int) -> None:
    found = json.loads(service.ask("GET", "/workers"))
    assert sum(each["status"] == "active" for each in found) == sources


def _ours_batches(service: Running) -> int:
    return int(json.loads(service.ask("GET", "/v1/stats"))["batches"])


def _dynamo_batches(service: Running) -> int:
    found = _STORED.search(service.ask("GET", "/metrics"))
    return int(found[1]) if found else 0


def _ours_reported(service: Running) -> dict[str, float]:
    found = _sources(service)
    return {
        "gaps": sum(each["lost"] for each in found),
        "inexact": _inexact(service),
        "replayed": sum(each["replayed"] for each in found),
    }


def _dynamo_reported(_: Running) -> dict[str, float]:
    return {}


@dataclass(frozen=True)
class Questions:
    """What is asked of a service about its fleet."""

    settle: Callable[[Running, int], None]
    """Wait until so many sources are followed."""
    batches: Callable[[Running], int]
    """How many it has taken in."""
    reported: Callable[[Running], dict[str, float]]
    """What else it says."""


QUESTIONS: Final = {
    "ours": Questions(_all_caught_up, _ours_batches, _ours_reported),
    "service": Questions(_all_active, _dynamo_batches, _dynamo_reported),
}


if __name__ == "__main__":
    _, _, name, *numbers = sys.argv
    send_line(follow(name, *map(int, numbers)))
