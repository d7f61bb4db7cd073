"""A fleet that sends at a steady pace."""

from __future__ import annotations

import json
import re
import time
from contextlib import ExitStack, suppress
from typing import Any, Final

from benchmarks.processes import Peer
from benchmarks.service.server import Server, wait_until
from benchmarks.service.workers import Endpoints

SENDERS: Final = 2
"""Number of processes over which the fleet is distributed."""
START_SECONDS: Final = 0.5
"""Seconds until the processes begin to send, all at the same moment."""
CATCH_UP_SECONDS: Final = 5.0
"""Seconds after the last batch; a batch that has not arrived by then counts as lost."""
_STORED: Final = re.compile(rb'^dynamo_kvrouter_kv_cache_events_applied\{event_type="stored",status="ok"\} (\d+)', re.MULTILINE)


def measure(contender: str, sources: int, rate: int, blocks: int, seconds: int) -> dict[str, float]:
    """Return the CPU time of the service and of the senders in percent of one CPU, and the number of lost batches."""
    fleet = {"ours": OurFleet, "dynamo": Fleet}[contender]
    with Server(contender) as server, ExitStack() as stack:
        shape = (SENDERS, rate, blocks, seconds)
        count = sources // SENDERS
        senders = [stack.enter_context(Peer("service.workers.serve", count, first, *shape)) for first in range(SENDERS)]
        server.register([Endpoints(*pair) for sender in senders for pair in sender.receive()])
        for sender in senders:
            sender.receive()
        fleet.settle(server, sources)
        resident, cpu, began = server.resident, server.cpu, time.monotonic() + START_SECONDS
        for sender in senders:
            sender.send(began)
        reports = [sender.receive() for sender in senders]
        end, cpu_seconds = time.monotonic(), server.cpu - cpu
        batches, duration = sources * rate * seconds, end - began
        with suppress(TimeoutError):
            wait_until(lambda: fleet.batches(server) >= batches, "every batch", patience=CATCH_UP_SECONDS)
        return {
            "cpu": cpu_seconds / duration * 100,
            "cpu_batch": cpu_seconds / batches * 1e6,
            "senders": sum(report["cpu"] for report in reports) / duration * 100,
            "rate": batches / max(report["seconds"] for report in reports),
            "late": max(report["late"] for report in reports) * 1e3,
            "behind": (time.monotonic() - end) * 1e3,
            "grown": (server.resident - resident) / 1e6,
            "lost": batches - fleet.batches(server),
            **fleet.figures(server),
        }


class Fleet:
    """The fleet as Dynamo's service reports it."""

    @staticmethod
    def settle(server: Server, sources: int) -> None:
        """Wait until all sources are followed."""
        workers = json.loads(server.ask("GET", "/workers"))
        assert sum(worker["status"] == "active" for worker in workers) == sources

    @staticmethod
    def batches(server: Server) -> int:
        """Return how many batches the service has applied."""
        match = _STORED.search(server.ask("GET", "/metrics"))
        return int(match[1]) if match else 0

    @staticmethod
    def figures(_: Server) -> dict[str, float]:
        """Return the figures that only this service has."""
        return {}


class OurFleet(Fleet):
    """The fleet as our service reports it."""

    @staticmethod
    def settle(server: Server, sources: int) -> None:
        """Wait until each source lacks only the first live batch, which it needs to become EXACT."""
        wait_until(lambda: sum(map(_has_caught_up, _sources(server))) == sources, "every source to be caught up")

    @staticmethod
    def batches(server: Server) -> int:
        return int(json.loads(server.ask("GET", "/v1/stats"))["batches"])

    @staticmethod
    def figures(server: Server) -> dict[str, float]:
        sources = _sources(server)
        return {
            "gaps": sum(source["lost"] for source in sources),
            "inexact": sum(source["trust"]["state"] != "EXACT" for source in sources),
            "replayed": sum(source["replayed"] for source in sources),
        }


def _sources(server: Server) -> list[dict[str, Any]]:
    sources: list[dict[str, Any]] = json.loads(server.ask("GET", "/v1/sources"))["sources"]
    return sources


def _has_caught_up(source: dict[str, Any]) -> bool:
    trust: dict[str, Any] = source["trust"]
    return (trust["state"], trust["reason_codes"]) in (("EXACT", []), ("DEGRADED", ["replay-unproven"]))
