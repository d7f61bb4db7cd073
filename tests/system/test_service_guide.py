"""docs/guides/service.md agrees with the code: it names all settings, its files are valid, and its requests work."""

from __future__ import annotations

import json
import re
import subprocess
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import paths
from certificate_cases import make_certificates
from cli_cases import run
from doc_blocks import blocks_of, commands_of
from kvevents.client import AsyncClient
from kvevents.service.discovery.provider import SourceTable
from kvevents.service.settings import DnsTable
from service_cases import engine, serving

GUIDE = paths.ROOT / "docs" / "guides" / "service.md"
CURL_TIMED_OUT = 28
"""Exit code of `curl --max-time` for a response without an end."""


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", GUIDE.read_text(), re.DOTALL)


def test_the_guide_names_every_field_of_an_engine() -> None:
    """The fields of `[[sources]]` and `[[dns]]` are in the example or in the table below it."""
    text = GUIDE.read_text().split("## Engines")[1].split("\n## ")[0]
    for field in {*SourceTable.__struct_fields__, *DnsTable.__struct_fields__}:
        assert f"`{field}`" in text or f"\n{field} = " in text, field
    assert re.search(r'\[\[dns\]\].*\n(.+\n)*replay_endpoint = "tcp://\*:\d+"', text), (
        "without a replay endpoint no stream becomes EXACT"
    )


def test_the_settings_of_the_guide_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve --check` accepts each file as it is, with the files that it names."""
    folder = make_certificates(tmp_path)
    (tmp_path / "read").write_text("a" * 20)
    monkeypatch.setenv("KVEVENTS_REGISTER", "b" * 20)
    files = {
        "/run/secrets/read": tmp_path / "read",
        "server.pem": folder / "server.pem",
        "server.key": folder / "server.key",
        "clients.pem": folder / "ca.pem",
        "/var/lib/kvevents": tmp_path / "state",
    }
    for number, text in enumerate(blocks("toml")):
        path = tmp_path / f"{number}.toml"
        for name, file in files.items():
            assert name in GUIDE.read_text()
            text = text.replace(name, str(file))  # noqa: PLW2901 - one replacement after the other
        path.write_text(text)
        ended = run("serve", "--config", path, "--port", 0, "--check")
        assert (ended.code, ended.err.strip()) == (0, "these settings can be used")


def test_the_requests_of_the_guide_work(tmp_path: Path) -> None:
    tokens = list(range(16))
    with engine(seed=1) as made, serving() as service:
        made.store(tokens)
        answers = []
        for command in (each for block in blocks_of(GUIDE) if block.language == "sh" for each in commands_of(block)):
            if command.program == "kvevents":
                continue
            script = command.text.replace("http://127.0.0.1:8090", service.url)
            script = script.replace("tcp://127.0.0.1:5557", made.endpoint)
            script = script.replace("tcp://127.0.0.1:5558", made.replay_endpoint or "")
            follows = "/v1/events" in script
            script = script.replace("curl ", "curl -w '\\n%{http_code}' ")
            done = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, timeout=60, check=False)  # noqa: S607 - our own document
            assert done.returncode == (CURL_TIMED_OUT if follows else 0), (command, done.stderr)
            if command.program == "curl":
                body, _, status = done.stdout.decode().rpartition("\n")
                assert status in {"200", "201"}, (command, body)
                answers.append(body)
            if "/register" in script:
                service.wait_for_prefix(7, tokens, model_name="llama")
                service.exact(7, blocks=1)
        shown = [json.loads(text) for text in blocks("json")[:2]]
        assert [json.loads(answer) for answer in answers[1:3]] == shown


async def test_the_router_of_the_guide_works() -> None:
    """It sends the request to the URL of the reserved engine, reports the first token, and ends the reservation."""
    [text] = [block for block in blocks("python") if "client.reserve" in block]
    names: dict[str, Any] = {}
    exec(text, names)  # noqa: S102 - our own document
    tokens = list(range(17))

    async def complete(request: web.Request) -> web.Response:
        assert (await request.json())["prompt"] == tokens
        return web.Response(text="one\ntwo\n")

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    async with TestServer(app) as server, AsyncExitStack() as stack:
        one = stack.enter_context(engine())
        service = stack.enter_context(serving())
        registered = service.register("e", one.publisher, model_name="llama", url=f"http://127.0.0.1:{server.port}")
        assert registered.status == 201
        one.store(tokens[:16])
        service.exact("e", blocks=1)
        client = await stack.enter_async_context(AsyncClient(service.url))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        lines = [line async for line in names["answer"](client, http, tokens)]
        assert lines == [b"one\n", b"two\n"]
        assert service.get("/v1/reservations").json["open"] == 0
        assert 'kvevents_reservations_total{outcome="finished"} 1' in service.get("/metrics").body.decode()
