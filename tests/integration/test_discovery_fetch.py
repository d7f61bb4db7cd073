"""`EngineHttpClient` against real HTTP servers."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from discovery_cases import DEADLINE, await_in_time
from discovery_fetch_cases import Engine
from kvevents.errors import ConfigError
from kvevents.service.discovery.engines import EngineHttpClient
from kvevents.service.discovery.provider import BaseUrl, EngineQueryError
from tools.ports import reserve_port


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as found:
        yield found


def redirect_to(location: str) -> Any:
    def page(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(307)
        handler.send_header("Location", location)
        handler.end_headers()

    return page


async def get(engine: Engine, path: str, client: EngineHttpClient | None = None) -> tuple[int, bytes]:
    answer = await await_in_time((client or EngineHttpClient()).get(BaseUrl.parse(engine.url).join(path)))
    return answer.status, answer.body


async def get_error(engine: Engine, path: str, client: EngineHttpClient | None = None) -> str:
    with pytest.raises(EngineQueryError) as caught:
        await get(engine, path, client)
    return str(caught.value)


async def test_status_and_body_are_returned(engine: Engine) -> None:
    """The path of the request is appended to the path of the base URL."""
    engine.pages["/prefix/x"] = {"a": 1}
    assert await get(engine, "/prefix/x") == (200, b'{"a": 1}')
    assert BaseUrl.parse("http://h/prefix/").join("/x") == BaseUrl("http", "h", 80, "/prefix/x")
    assert (await get(engine, "/y"))[0] == 404


async def test_a_chunked_answer_is_decoded(engine: Engine) -> None:
    """Proxies send chunked answers."""
    engine.pages["/x"] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n[1,\r\n2\r\n2]\r\n0\r\n\r\n"
    assert await get(engine, "/x") == (200, b"[1,2]")


@pytest.mark.parametrize(
    "page",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n",
    ],
)
async def test_an_incomplete_answer_is_reported(engine: Engine, page: bytes) -> None:
    """Another program listens at the port, or the engine ended while it answered."""
    engine.pages["/x"] = page
    assert "does not answer in HTTP" in await get_error(engine, "/x")


async def test_a_large_answer_is_rejected(engine: Engine) -> None:
    """Neither a body above the limit nor one without an end is stored in memory."""
    client = EngineHttpClient(max_bytes=1_000)
    engine.pages["/x"] = "x" * 2_000
    assert "more than 1000 bytes" in await get_error(engine, "/x", client)

    def endless(handler: BaseHTTPRequestHandler) -> None:
        while True:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 65536)

    engine.pages["/y"] = endless
    assert "more than 1000 bytes" in await get_error(engine, "/y", client)


async def test_a_slow_answer_times_out_however_many_bytes_arrive(engine: Engine) -> None:
    """The timeout is for the whole answer, so single bytes do not extend it."""
    engine.pages["/x"] = lambda handler: (handler.wfile.write(b"HTTP/1.1 200"), engine.hold.wait(DEADLINE))
    assert "in time" in await get_error(engine, "/x", EngineHttpClient(read_seconds=0.05))


async def test_a_host_that_cannot_be_reached_is_reported() -> None:
    """A refused connection and an invalid host name give the same kind of error."""
    for host in (f"127.0.0.1:{reserve_port()}", "a" * 64 + ":80"):
        with pytest.raises(EngineQueryError, match="cannot be reached"):
            await await_in_time(EngineHttpClient().get(BaseUrl.parse(f"http://{host}")))


async def test_redirects_stay_on_the_host(engine: Engine) -> None:
    """At most three redirects on the same host are followed; others would let an engine direct requests to any host."""
    engine.pages |= {
        "/a": redirect_to("/b"),
        "/b": redirect_to(engine.url + "/c?d=e"),
        "/c?d=e": 7,
        "/round": redirect_to("/round"),
        "/folder": redirect_to("/folder/"),
        "/folder/": 8,
    }
    assert await get(engine, "/a") == (200, b"7")
    assert await get(engine, "/folder") == (200, b"8")
    engine.pages |= {
        "/x": redirect_to("http://169.254.169.254/"),
        "/port": redirect_to(f"http://127.0.0.1:{engine.port + 1}/"),
        "/y": redirect_to("file:///etc/passwd"),
        "/z": redirect_to("//[bad"),
    }
    for path in ("/x", "/y", "/port"):
        assert "another server" in await get_error(engine, path)
    assert "not a valid URL" in await get_error(engine, "/z")
    assert "more than 3 times" in await get_error(engine, "/round")
    assert BaseUrl.parse("http://h/x").follow_redirect("https://h/x") == BaseUrl.parse("https://h/x")


async def test_redirects_to_another_server_need_a_setting(engine: Engine) -> None:
    """It never makes a connection unencrypted."""
    with Engine({"/there": 7}) as other:
        engine.pages["/here"] = redirect_to(f"{other.url}/there")
        answer = await await_in_time(EngineHttpClient().get(BaseUrl.parse(engine.url).join("/here"), other_hosts=True))
        assert answer.body == b"7"
        with pytest.raises(EngineQueryError, match="another server"):
            BaseUrl.parse("https://h").follow_redirect("http://h", other_hosts=True)


async def test_the_number_of_connections_is_bounded(engine: Engine) -> None:
    """A fleet needs fewer file descriptors than it has engines, and a query that waits for a connection does not time out."""
    client = EngineHttpClient(max_connections=2)
    lock, active, maximum = threading.Lock(), 0, 0

    def page(handler: BaseHTTPRequestHandler) -> None:
        nonlocal active, maximum
        with lock:
            active += 1
            maximum = max(maximum, active)
        engine.hold.wait(0.001)
        with lock:
            active -= 1
        handler.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n1")

    engine.pages["/x"] = page
    found = await asyncio.gather(*(get(engine, "/x", client) for _ in range(50)))
    assert found == [(200, b"1")] * 50
    assert maximum <= 2


async def test_cancelling_closes_the_connection_at_once(engine: Engine) -> None:
    """No task or connection remains that waits for a peer that does not answer."""
    gone = threading.Event()

    def silent(handler: BaseHTTPRequestHandler) -> None:
        engine.reached.set()
        handler.connection.settimeout(DEADLINE)
        if handler.connection.recv(1) == b"":
            gone.set()

    engine.pages["/x"] = silent
    task = asyncio.create_task(EngineHttpClient(read_seconds=DEADLINE).get(BaseUrl.parse(engine.url).join("/x")))
    assert await asyncio.to_thread(engine.reached.wait, DEADLINE)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await await_in_time(task)
    assert await asyncio.to_thread(gone.wait, DEADLINE)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for `engines.test`, not for an address, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is needed to create a certificate")
    folder = tmp_path_factory.mktemp("tls")
    found = folder / "certificate.pem", folder / "key.pem"
    arguments = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=x -addext subjectAltName=DNS:engines.test"
    subprocess.run(
        [openssl, *arguments.split(), "-out", found[0], "-keyout", found[1]], capture_output=True, check=True, timeout=60
    )
    return found


async def test_https_verifies_its_peer(certificate: tuple[Path, Path]) -> None:
    """The certificate must be for the configured name, which can differ from the host of the URL."""
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(*certificate)
    client_context = ssl.create_default_context(cafile=str(certificate[0]))
    with Engine({"/x": 1}, server_context) as engine:
        assert await get(engine, "/x", EngineHttpClient(tls=client_context, server_name="engines.test")) == (200, b"1")
        assert engine.hosts == [f"engines.test:{engine.port}"]
        assert "certificate" in await get_error(engine, "/x", EngineHttpClient(tls=client_context))
        assert "certificate" in await get_error(engine, "/x", EngineHttpClient(server_name="engines.test"))


@pytest.mark.parametrize(
    "text", ["", "h", "ftp://h", "http://", "http://h?q", "http://h#f", "http://u@h", "http://[h", "http://h/ä"]
)
def test_an_invalid_base_url_is_rejected(text: str) -> None:
    """The error names the field."""
    with pytest.raises(ConfigError, match=r"base_url|URL"):
        BaseUrl.parse(text)


def test_ipv6_hosts_are_written_in_brackets() -> None:
    """`host` is stored without brackets."""
    url = BaseUrl.parse("http://[fd00::1]:8000")
    assert (url.host, url.address, str(url)) == ("fd00::1", "[fd00::1]:8000", "http://[fd00::1]:8000")
