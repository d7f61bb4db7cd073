"""Queries about prompts that 16 workers hold."""

from __future__ import annotations

import json
import sys
from array import array
from random import Random
from typing import Any, Final

from benchmarks.service.server import HOST, JSON, MODEL, Server, query
from benchmarks.service.workers import Workers
from benchmarks.service.wrk import Load, load
from benchmarks.workload import BLOCK_SIZE, Chain, chain, stores

WORKERS: Final = 16
CLIENTS: Final = 16
LENGTHS: Final = (1_024, 32_768)
RAW: Final = "application/octet-stream"
RAW_PATH: Final = f"/v1/match?model={MODEL}&whole_prompt=true"
_PER_EVENT: Final = 512


def measure(contender: str, seconds: int) -> dict[str, float]:
    """Return p50 and p99 for one client, requests per second for 16 clients, and the server's CPU time per request."""
    prompt = chain(Random(11), max(LENGTHS) // BLOCK_SIZE)  # noqa: S311 - test data
    with Server(contender) as server, Workers(WORKERS) as workers:
        _fill(server, workers, prompt)
        figures: dict[str, float] = {}
        for length in LENGTHS:
            tokens = prompt.tokens[:length]
            _check(server, tokens)
            body = json.dumps(query(tokens.tolist())).encode()
            figures |= _with_suffix(f"{length}", _measure(server, "/query", body, JSON, seconds))
            if contender == "ours":
                _check_raw(server, tokens)
                figures |= _with_suffix(f"raw_{length}", _measure(server, RAW_PATH, _raw(tokens), RAW, seconds))
        return figures | {"resident": server.resident / 1e6}


def _fill(server: Server, workers: Workers, prompt: Chain) -> None:
    server.register(workers.endpoints)
    workers.wait_for_subscribers()
    for number in range(WORKERS):
        for payload in stores(prompt, _PER_EVENT):
            workers.send(number, payload)
    server.wait_for(prompt.tokens.tolist(), WORKERS)


def _measure(server: Server, path: str, body: bytes, content_type: str, seconds: int) -> dict[str, float]:
    url = f"http://{HOST}:{server.port}{path}"

    def ask(clients: int, seconds: int) -> tuple[Load, float]:
        """Return the result of wrk, and the microseconds of CPU per request."""
        cpu_before = server.cpu
        result = load(url, body, content_type, clients, seconds)
        return result, (server.cpu - cpu_before) / result.requests * 1e6

    ask(CLIENTS, 1)  # warms up
    single, cpu_one = ask(1, seconds)
    concurrent, cpu_many = ask(CLIENTS, seconds)
    alone = {"p50": single.p50, "p99": single.p99, "cpu_one": cpu_one}
    return alone | {"rate": concurrent.rate, "cpu": cpu_many, "p99_many": concurrent.p99}


def _with_suffix(suffix: str, values: dict[str, float]) -> dict[str, float]:
    return {f"{name}_{suffix}": value for name, value in values.items()}


def _check(server: Server, tokens: array[int]) -> None:
    instances = json.loads(server.ask("POST", "/query", query(tokens.tolist())))["instances"]
    assert len(instances) == WORKERS, "not all workers are named"
    assert all(instance["longest_matched"] == len(tokens) for instance in instances.values())


def _check_raw(server: Server, tokens: array[int]) -> None:
    matches: list[dict[str, Any]] = json.loads(server.send("POST", RAW_PATH, _raw(tokens), RAW))["workers"]
    assert len(matches) == WORKERS, "not all workers are named"
    assert all(match["tokens"] == len(tokens) for match in matches)


def _raw(tokens: array[int]) -> bytes:
    """Return tokens as they are sent without JSON: 32 bits, little-endian."""
    words = array("I", tokens)
    assert words.itemsize == 4
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()
