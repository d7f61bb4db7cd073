"""What the service could have been built on, with the same small handler each: `python -m benchmarks.service.candidates`.

Makes a virtual environment of its own in a temporary folder. Each candidate reads a body of 1,024 token ids, decodes it with
msgspec and gives an answer for 16 workers; wrk asks with one client and with 16.
"""

from __future__ import annotations

import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Final

from benchmarks.service.wrk import Load, load

PACKAGES: Final = ("msgspec", "uvicorn", "uvloop", "httptools", "granian", "aiohttp", "starlette", "litestar", "hypercorn")
ROUNDS: Final = 3
SECONDS: Final = 2

HANDLER: Final = """
import msgspec

class Query(msgspec.Struct):
    token_ids: list[int]
    model_name: str = ""

decode = msgspec.json.Decoder(Query).decode
HELD = {"longest_matched": 1024, "gpu": 1024, "dp": {"0": 1024}, "cpu": 1024, "disk": 1024}
HOLDERS = {str(number): HELD for number in range(16)}

def work(body):
    decode(body)
    return msgspec.json.encode({"scores": {name: {"0": 1024} for name in HOLDERS}, "frequencies": [], "instances": HOLDERS})
"""

ASGI: Final = """
from handler import work

async def app(scope, receive, send):
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    answer = work(body)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})
"""

RSGI: Final = """
from handler import work

async def app(scope, protocol):
    protocol.response_bytes(200, [("content-type", "application/json")], work(await protocol()))
"""

STARLETTE: Final = """
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from handler import work

async def query(request):
    return Response(work(await request.body()), media_type="application/json")

app = Starlette(routes=[Route("/query", query, methods=["POST"])])
"""

LITESTAR: Final = """
from litestar import Litestar, Request, Response, post
from handler import work

@post("/query", status_code=200)
async def query(request: Request) -> Response[bytes]:
    return Response(work(await request.body()), media_type="application/json")

app = Litestar([query])
"""

AIOHTTP: Final = """
import sys
import uvloop
from aiohttp import web
from handler import work

async def query(request):
    return web.Response(body=work(await request.read()), content_type="application/json")

app = web.Application()
app.router.add_post("/query", query)
uvloop.install()
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), access_log=None, print=None)
"""

_UVICORN: Final = (
    "-m",
    "uvicorn",
    "--loop",
    "uvloop",
    "--http",
    "httptools",
    "--no-access-log",
    "--lifespan",
    "off",
    "--log-level",
    "error",
)
_GRANIAN: Final = ("-m", "granian", "--no-access-log", "--workers", "1", "--loop", "uvloop", "--log-level", "error")
_HYPERCORN: Final = ("-m", "hypercorn", "--worker-class", "uvloop", "--log-level", "ERROR")

CANDIDATES: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "uvicorn, plain ASGI": (ASGI, (*_UVICORN, "app:app", "--port", "PORT")),
    "uvicorn, Starlette": (STARLETTE, (*_UVICORN, "app:app", "--port", "PORT")),
    "uvicorn, Litestar": (LITESTAR, (*_UVICORN, "app:app", "--port", "PORT")),
    "granian, plain ASGI": (ASGI, (*_GRANIAN, "--interface", "asginl", "app:app", "--port", "PORT")),
    "granian, RSGI": (RSGI, (*_GRANIAN, "--interface", "rsgi", "app:app", "--port", "PORT")),
    "aiohttp": (AIOHTTP, ("app.py", "PORT")),
    "hypercorn, plain ASGI": (ASGI, (*_HYPERCORN, "app:app", "--bind", "127.0.0.1:PORT")),
}
"""Source of `app.py`, and how it is started."""


def measure(python: Path, folder: Path, name: str) -> tuple[Load, Load, float]:
    """One client, 16 clients, and resident megabytes of one candidate."""
    source, command = CANDIDATES[name]
    (folder / "app.py").write_text(source)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = [part.replace("PORT", str(port)) for part in command]
    server = subprocess.Popen([python, *arguments], cwd=folder, stdout=subprocess.DEVNULL)  # noqa: S603 - our own words
    try:
        _wait(port)
        body = json.dumps({"model_name": "m", "token_ids": random.Random(1).choices(range(128_256), k=1_024)}).encode()  # noqa: S311
        url = f"http://127.0.0.1:{port}/query"
        load(url, body, "application/json", 16, 1)
        one, many = (load(url, body, "application/json", clients, SECONDS) for clients in (1, 16))
        pages = int(Path(f"/proc/{server.pid}/statm").read_text().split()[1])
        return one, many, pages * 4096 / 1e6
    finally:
        server.terminate()
        server.wait(10)


def _wait(port: int) -> None:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    sys.exit(f"nothing listens at port {port}")


def main() -> None:
    """Measure all in turn, several times."""
    with tempfile.TemporaryDirectory(prefix="kvevents-candidates-") as temporary:
        folder = Path(temporary)
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv/bin/python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)  # noqa: S603 - our own words
        (folder / "handler.py").write_text(HANDLER)
        found: dict[str, list[tuple[Load, Load, float]]] = {name: [] for name in CANDIDATES}
        for _ in range(ROUNDS):
            for name, runs in found.items():
                runs.append(measure(python, folder, name))
    print(f"{'':24} {'p50 of 1':>10} {'p99 of 1':>10} {'16: req/s':>10} {'resident':>9}")
    for name, runs in found.items():
        p50, p99 = (statistics.median(getattr(one, field) for one, _, _ in runs) for field in ("p50", "p99"))
        rate = statistics.median(many.rate for _, many, _ in runs)
        print(f"{name:24} {p50:7.0f} us {p99:7.0f} us {rate:10,.0f} {runs[0][2]:6.0f} MB")


if __name__ == "__main__":
    main()
