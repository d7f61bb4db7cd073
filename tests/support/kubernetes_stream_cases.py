"""An HTTP server that answers as a recorded API server of Kubernetes did (`tests/data/kubernetes.json`)."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from aiohttp import web

from discovery_cases import await_in_time
from paths import ROOT
from tools.ports import reserve_port

RECORDED: Final = ROOT / "tests" / "data" / "kubernetes.json"


def recorded(name: str) -> Any:
    """Return a part of the recording: a list, or lines of a watch."""
    return json.loads(RECORDED.read_text(encoding="utf-8"))[name]


class StreamServer:
    """Answers list requests with `lists`, by the plural of the kind, and each watch with what is pushed until it is ended."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.lists: dict[str, Any] = {}
        self.refusal: dict[str, Any] | None = None
        """A `Status` to answer all requests with; None to answer them."""
        self.is_frozen = False
        """Whether requests are accepted and not answered, as by a stopped process."""
        self.requests: asyncio.Queue[dict[str, str]] = asyncio.Queue()
        """The parameters of each request, with the plural as `kind`."""
        self.bearer: str | None = None
        """The token without which each request is refused; None if any is answered."""
        self.url = ""
        self._lines: dict[str, asyncio.Queue[bytes | None]] = {}
        self._runner: web.AppRunner | None = None
        self._port = reserve_port()

    async def start(self) -> None:
        """Listen, always at the same port."""
        application = web.Application()
        application.router.add_get("/{path:.*}/namespaces/{namespace}/{kind}", self._answer)
        self._runner = web.AppRunner(application, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True, ssl_context=self._tls)
        await site.start()
        self.url = f"{'https' if self._tls else 'http'}://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        """Close all connections, and stop to listen."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        kind = request.match_info["kind"]
        self.requests.put_nowait({"kind": kind, **request.match_info, **request.query})
        while self.is_frozen:  # noqa: ASYNC110 - a test changes it
            await asyncio.sleep(0.02)
        if self.bearer is not None and request.headers["Authorization"] != f"Bearer {self.bearer}":
            return web.json_response(recorded("unauthorized"), status=401)
        if self.refusal is not None:
            return web.json_response(self.refusal, status=self.refusal["code"])
        if "watch" not in request.query:
            found = self.lists.get(kind, {"metadata": {"resourceVersion": "1"}, "items": []})
            return web.json_response(found, status=found.get("code", 200))
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        lines = self._lines.setdefault(kind, asyncio.Queue())
        while (line := await lines.get()) is not None:
            with suppress(ConnectionResetError):
                await response.write(line)
        return response

    def push(self, lines: Iterable[str], kind: str = "pods") -> None:
        """Send lines on the watch of a kind."""
        for line in lines:
            self._lines.setdefault(kind, asyncio.Queue()).put_nowait(f"{line}\n".encode())

    def end_watch(self, kind: str = "pods") -> None:
        """End the watch of a kind, as the server does after some minutes."""
        self._lines.setdefault(kind, asyncio.Queue()).put_nowait(None)

    async def next_request(self, **fields: str) -> dict[str, str]:
        """Return the parameters of the next request that has these."""
        while True:
            found = await await_in_time(self.requests.get())
            if fields.items() <= found.items():
                return found


@asynccontextmanager
async def run_stream_server(tls: ssl.SSLContext | None = None) -> AsyncGenerator[StreamServer, None]:
    """Yield a server that listens."""
    server = StreamServer(tls)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
