"""How long one client makes another one wait: `python -m benchmarks.service.stalls`, a table on stdout.

A client asks `/query` about 1,024 tokens, `RATE` times a second. Beside it another one sends one kind of large request over and
over, as fast as it is answered. The 99th percentile beside it may be `REACH` milliseconds above that of the client alone.
"""

from __future__ import annotations

import json
import random
import sys
import time
from http.client import HTTPConnection
from typing import Final, NamedTuple

from benchmarks.indexing.payloads import in_maps
from benchmarks.indexing.workload import chain, percentile, pieces
from benchmarks.processes import Peer, heed, say
from benchmarks.service.noticing import Line, request
from benchmarks.service.running import HOST, JSON, MODEL, Running, query
from benchmarks.service.workers import Workers, prompt, stores

REACH: Final = 5.0
RATE: Final = 500
SECONDS: Final = 6.0
BLOCKS: Final = 100_000
"""That the worker holds beside those of the prompt."""
TOKENS: Final = 1_024
_PER_EVENT: Final = 256


class Asked(NamedTuple):
    """A large request."""

    method: str
    path: str
    body: str | None


def large_requests() -> dict[str, Asked]:
    """What others may wait for, by its name in the table."""
    tokens = list(range(2_000))
    hashes = {"model_name": MODEL, "seq_hashes": list(range(60_000))}
    candidates = [{"instance": f"w{number}"} for number in range(4_000)]
    return {
        "`/query`, 1,000,000 tokens": Asked("POST", "/query", json.dumps(query(list(range(1_000_000))))),
        "`/query_by_hash`, 60,000 hashes": Asked("POST", "/query_by_hash", json.dumps(hashes)),
        "`/v1/match_many`, 64 prompts": Asked("POST", "/v1/match_many", json.dumps({"model": MODEL, "prompts": [tokens] * 64})),
        "`/v1/select`, 4,000 candidates": Asked(
            "POST", "/v1/select", json.dumps({"model": MODEL, "tokens": tokens, "candidates": candidates})
        ),
        "`/v1/blocks`, 100,000 blocks": Asked("GET", "/v1/blocks?instance=1&limit=10000", None),
        "`/dump`, 100,000 blocks": Asked("GET", "/dump", None),
        "`/v1/sources`": Asked("GET", "/v1/sources", None),
        "`/metrics`": Asked("GET", "/metrics", None),
    }


def disturb(port: int, kind: str) -> None:
    """Send large requests, and say of the first one that it was answered; until it is killed."""
    asked = large_requests()[kind]
    connection = HTTPConnection(HOST, port)
    while True:
        connection.request(asked.method, asked.path, asked.body, {"Content-Type": JSON})
        response = connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise RuntimeError(f"{asked.path} was answered with {response.status}: {answer[:200]!r}")
        say(len(answer))


def ask(port: int) -> None:
    """Told for how many seconds, ask so long, and say how long the answers took, in nanoseconds."""
    line, text = Line(port), request(prompt(TOKENS).tokens.tolist())
    while (seconds := heed()) is not None:
        due = time.monotonic()
        end, taken = due + seconds, list[int]()
        while due < end:
            due = max(due + 1 / RATE, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
            began = time.perf_counter_ns()
            line.ask(text)
            taken.append(time.perf_counter_ns() - began)
        say(taken)


def measured(port: int, peer: Peer, kind: str | None) -> list[float]:
    """Of the client's answers beside such requests, or alone: p50, p99 and the longest, in milliseconds."""
    if kind is None:
        return _times(peer)
    with Peer("service.stalls", "disturb", port, kind) as other:
        other.hear()
        found = _times(peer)
        other.kill()
    return found


def _times(peer: Peer) -> list[float]:
    peer.tell(SECONDS)
    taken: list[int] = peer.hear()
    return [percentile(taken, share) / 1e3 for share in (50, 99, 100)]


def main() -> int:
    """Returns 0 when no kind of request makes others wait for longer than they may, else 1."""
    draw = random.Random(17)  # noqa: S311 - test data
    with Running("ours") as service, Workers(1) as workers:
        service.register(workers.endpoints)
        workers.wait_for_subscribers()
        whole = prompt(TOKENS)
        others = [in_maps(piece) for _ in range(BLOCKS // 1_000) for piece in pieces(chain(draw, 1_000), _PER_EVENT)]
        for payload in [*stores(whole, _PER_EVENT), *others]:
            workers.send(0, payload)
            time.sleep(0.001)
        service.wait_for(whole.tokens.tolist())
        time.sleep(1.0)
        with Peer("service.stalls", "ask", service.port) as peer:
            _, alone, _ = measured(service.port, peer, None)
            print("| beside | p50, ms | p99 | longest | p99 above alone | |\n| --- | --- | --- | --- | --- | --- |")
            missed = 0
            for kind in (None, *large_requests()):
                p50, p99, longest = measured(service.port, peer, kind)
                met = p99 - alone <= REACH
                missed += not met
                figures = f"{p50:.2f} | {p99:.2f} | {longest:.2f} | {p99 - alone:.2f}"
                print(f"| {kind or 'nobody'} | {figures} | {'met' if met else 'missed'} |", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["disturb", port, kind]:
            disturb(int(port), kind)
        case ["ask", port]:
            ask(int(port))
        case _:
            sys.exit(main())
