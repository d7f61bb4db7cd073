"""An HTTP server in place of that of an engine, which reports its load."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

import paths

RECORDED: Final = (paths.ROOT / "tests" / "data" / "vllm_metrics.txt").read_bytes()
DEADLINE: Final = 60.0


class LoadServer:
    """An HTTP server of an engine, whose answers a test sets."""

    def __init__(self) -> None:
        self.status, self.body = 200, RECORDED
        self.release = threading.Event()
        self.release.set()
        self.requests: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.requests.append(self.path)
                outer.release.wait(DEADLINE)
                self.send_response(outer.status)
                self.send_header("Content-Length", str(len(outer.body)))
                self.end_headers()
                self.wfile.write(outer.body)

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def metrics_of(running: int, waiting: int) -> bytes:
    """Return the load of one rank as in vLLM's `/metrics`."""
    return b"vllm:num_requests_running %d\nvllm:num_requests_waiting %d\n" % (running, waiting)


@contextmanager
def load_server(running: int, waiting: int) -> Iterator[LoadServer]:
    """Yield a server that reports these numbers of requests."""
    found = LoadServer()
    found.body = metrics_of(running, waiting)
    try:
        yield found
    finally:
        found.close()
