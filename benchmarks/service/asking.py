"""Queries about prompts that 16 workers hold: `python -m benchmarks.service.asking ask WHO SECONDS`."""

from __future__ import annotations

import json
import sys
from array import array
from typing import Any, Final

from benchmarks.indexing.workload import BLOCK_SIZE, Chain
from benchmarks.processes import send_line
from benchmarks.service.running import HOST, JSON, MODEL, Running, query
from benchmarks.service.workers import Workers, prompt, stores
from benchmarks.service.wrk import Load, load

WORKERS: Final = 16
CLIENTS: Final = 16
LENGTHS: Final = (1_024, 32_768)
RAW: Final = "application/octet-stream"
RAW_PATH: Final = f"/v1/match?model={MODEL}&whole_prompt=true"
_PER_EVENT: Final = 512


def ask(contender: str, seconds: int) -> dict[str, float]:
    """p50 and p99 of one client, requests per second of 16, and the server's CPU time of each request."""
    whole = prompt(max(LENGTHS))
    with Running(contender) as service, Workers(WORKERS) as workers:
        _fill(service, workers, whole)
        found: dict[str, float] = {}
        for tokens in LENGTHS:
            asked = whole.tokens[:tokens]
            _check(service, asked)
            body = json.dumps(query(asked.tolist())).encode()
            found |= _named(f"{tokens}", _measured(service, "/query", body, JSON, seconds))
            if contender == "ours":
                _check_raw(service, asked)
                found |= _named(f"raw_{tokens}", _measured(service, RAW_PATH, raw(asked), RAW, seconds))
        return found | {"resident": service.resident / 1e6}


def _fill(service: Running, workers: Workers, whole: Chain) -> None:
    service.register(workers.endpoints)
    workers.wait_for_subscribers()
    for number in range(WORKERS):
        for payload in stores(whole, _PER_EVENT):
            workers.send(number, payload)
    service.wait_for(whole.tokens.tolist(), WORKERS)


def _measured(service: Running, path: str, body: bytes, content_type: str, seconds: int) -> dict[str, float]:
    url = f"http://{HOST}:{service.port}{path}"

    def once(clients: int, seconds: int) -> tuple[Load, float]:
        before = service.cpu
        done = load(url, body, content_type, clients, seconds)
        return done, (service.cpu - before) / done.requests * 1e6

    once(CLIENTS, 1)  # warms up
    one, cpu_one = once(1, seconds)
    many, cpu_many = once(CLIENTS, seconds)
    alone = {"p50": one.p50, "p99": one.p99, "cpu_one": cpu_one}
    return alone | {"rate": many.rate, "cpu": cpu_many, "p50_many": many.p50, "p99_many": many.p99}


def _named(what: str, values: dict[str, float]) -> dict[str, float]:
    return {f"{name}_{what}": value for name, value in values.items()}


def _check(service: Running, asked: array[int]) -> None:
    instances = json.loads(service.ask("POST", "/query", query(asked.tolist())))["instances"]
    assert len(instances) == WORKERS, "not all workers are named"
    assert all(each["longest_matched"] == len(asked) for each in instances.values())


def _check_raw(service: Running, asked: array[int]) -> None:
    held: list[dict[str, Any]] = json.loads(service.send("POST", RAW_PATH, raw(asked), RAW))["workers"]
    assert len(held) == WORKERS, "not all workers are named"
    assert all(each["tokens"] == len(asked) // BLOCK_SIZE * BLOCK_SIZE for each in held)


def raw(asked: array[int]) -> bytes:
    """Tokens as they are sent without JSON."""
    assert asked.itemsize == 4
    little = asked if sys.byteorder == "little" else array("I", asked)
    if little is not asked:
        little.byteswap()
    return little.tobytes()


if __name__ == "__main__":
    _, _, name, duration = sys.argv
    send_line(ask(name, int(duration)))
