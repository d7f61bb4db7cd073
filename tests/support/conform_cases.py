"""Indexers with known faults, which `kvevents conform` must find."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Literal

import msgspec
import zmq

Habit = Literal[
    "ignores",
    "reports",
    "hangs",
    "babbles",
    "empty",
    "pending",
    "pending-empty",
    "full",
    "keeps-resets",
    "keeps-clears",
    "one-rank",
]
"""`ignores`: does not report lost batches. `reports`: does. `hangs`: answers no query. `babbles`: sends invalid answers.

Cheats: `empty`: nothing is ever held. `pending`: all workers are always reported. `pending-empty`: both. `full`: every worker
holds every prompt. `keeps-resets`, `keeps-clears`: blocks stay after a restart, or after a clear. `one-rank`: all ranks of a
worker hold what any of them does."""
CHEATS: Final[dict[Habit, str]] = {
    "empty": "healthy",
    "pending": "healthy",
    "pending-empty": "healthy",
    "full": "healthy-workers",
    "keeps-resets": "restart",
    "keeps-clears": "healthy-busy",
    "one-rank": "ranks",
}
"""A scenario for each cheat, which finds it."""


class NaiveIndexer:
    """An indexer that follows live messages only and reads events encoded as maps, each with one block."""

    def __init__(self, habit: Habit) -> None:
        self._habit = habit
        self._ranks: dict[tuple[int, int], dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._threads: list[threading.Thread] = []

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """Return the status and the JSON body of an answer."""
        route = (method, path.partition("?")[0])
        if route == ("POST", "/register"):
            self._ranks[body["instance_id"], body.get("dp_rank", 0)] = {"blocks": {}, "lost": False}
            thread = threading.Thread(target=self._follow, args=(body,), daemon=True)
            self._threads.append(thread)
            thread.start()
            return 201, {"status": "ok"}
        if route == ("POST", "/unregister"):
            self._ranks = {key: each for key, each in self._ranks.items() if key[0] != body["instance_id"]}
            return 200, {"status": "ok"}
        if route == ("GET", "/workers"):
            return 200, [self._describe_worker(number) for number in self._instances()]
        if self._habit == "babbles":
            return 200, {"instances": {"1": "all of it"}}
        if self._habit == "hangs":
            self._stop.wait()
        found = {str(number): self._match_instance(number, body["token_ids"]) for number in self._instances()}
        return 200, {"instances": {number: match for number, match in found.items() if match["longest_matched"]}}

    def _instances(self) -> list[int]:
        return list(dict.fromkeys(number for number, _ in list(self._ranks)))

    def _describe_worker(self, number: int) -> dict[str, Any]:
        is_lost = any(each["lost"] for key, each in self._ranks.items() if key[0] == number)
        listener = {"last_error": "batches were lost"} if is_lost and self._habit == "reports" else {}
        status = "pending" if self._habit.startswith("pending") else "active"
        return {"instance_id": number, "status": status, "listeners": {"0": listener}}

    def _match_instance(self, number: int, tokens: list[int]) -> dict[str, Any]:
        held = {rank: self._match(each["blocks"], tokens) for (own, rank), each in self._ranks.items() if own == number}
        if self._habit in {"empty", "pending-empty"}:
            held = {}
        if self._habit == "full":
            held = dict.fromkeys(held, len(tokens))
        most = max(held.values(), default=0)
        if self._habit == "one-rank":
            held = dict.fromkeys(held, most)
        return {"longest_matched": most, "dp": {str(rank): each for rank, each in held.items()}}

    def _match(self, blocks: dict[Any, int], tokens: list[int]) -> int:
        parent, matched = None, 0
        with self._lock:
            while found := blocks.get((parent, tuple(tokens[matched : matched + 16]))):
                parent, matched = found, matched + 16
        return matched

    def _follow(self, body: dict[str, Any]) -> None:
        worker, next_seq = self._ranks[body["instance_id"], body.get("dp_rank", 0)], 0
        with self._context.socket(zmq.SUB) as socket:
            socket.connect(body["endpoint"])
            socket.subscribe(b"")
            while not self._stop.is_set():
                if not socket.poll(20):
                    continue
                _, number, payload = socket.recv_multipart()
                seq = int.from_bytes(number, "big")
                worker["lost"] |= seq > next_seq
                with self._lock:
                    if seq < next_seq and self._habit != "keeps-resets":
                        worker["blocks"].clear()
                    self._apply(worker["blocks"], msgspec.msgpack.decode(payload)[1])
                next_seq = seq + 1

    def _apply(self, blocks: dict[Any, int], events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["type"] == "BlockStored":
                blocks[event["parent_block_hash"], tuple(event["token_ids"])] = event["block_hashes"][0]
            elif event["type"] == "BlockRemoved":
                for key in [key for key, value in blocks.items() if value in event["block_hashes"]]:
                    del blocks[key]
            elif self._habit != "keeps-clears":
                blocks.clear()

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._context.term()


def serve(answer: Callable[[str, str, Any], tuple[int, Any]], port: int = 0) -> ThreadingHTTPServer:
    """Return an HTTP server that answers with JSON; the caller starts it."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body = answer(self.command, self.path, json.loads(text) if text else None)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        do_GET = do_POST = _answer  # noqa: N815 - names of the library

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    return server


@contextmanager
def naive_indexer(habit: Habit) -> Iterator[str]:
    """Yield the URL of a running `NaiveIndexer`."""
    indexer = NaiveIndexer(habit)
    server = serve(indexer.answer)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        indexer.close()
        server.shutdown()
        server.server_close()
        thread.join()
