"""An HTTP server in place of an engine's."""

from __future__ import annotations

import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from discovery_cases import DEADLINE


class Engine:
    """Serves `pages` by path: JSON with `status`, raw bytes without HTTP, or what a function writes; 404 for other paths."""

    def __init__(self, pages: dict[str, Any] | None = None, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> None:
        self.pages = pages if pages is not None else {}
        self.status = 200
        self.requested_paths: list[str] = []
        self.hosts: list[str | None] = []
        self.hold = threading.Event()
        self.reached = threading.Event()
        self._server = ThreadingHTTPServer((host, 0), self._handler())
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self.url = f"{'https' if tls else 'http'}://{host}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                engine.requested_paths.append(self.path)
                engine.hosts.append(self.headers["Host"])
                engine.serve(self)

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        page = self.pages.get(handler.path)
        if callable(page):
            page(handler)
        elif page is None and handler.path not in self.pages:
            handler.send_error(404)
        elif isinstance(page, bytes):
            handler.wfile.write(page)
        else:
            handler.send_response(self.status)
            handler.end_headers()
            handler.wfile.write(json.dumps(page).encode())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.hold.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(DEADLINE)
