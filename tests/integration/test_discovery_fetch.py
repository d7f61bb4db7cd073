"""One HTTP GET, against real servers; and `Engine`, the HTTP server of an engine that the tests of discovery share."""

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

from discovery_cases import DEADLINE, within
from discovery_fetch_cases import Engine
from kvevents.errors import ConfigError
from kvevents.service.discovery.engines import EngineHttpClient
from kvevents.service.discovery.provider import BaseUrl, EngineQueryError
from ports import quiet_port


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as found:
        yield found


def to(location: str) -> Any:
    def page(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(307)
        handler.send_header("Location", location)
        handler.end_headers()

    return page


async def get(engine: Engine, path: str, client: EngineHttpClient | None = None) -> tuple[int, bytes]:
    answer = await within((client or EngineHttpClient()).get(BaseUrl.parse(engine.url).join(path)))
    return answer.status, answer.body


async def refused(engine: Engine, path: str, client: EngineHttpClient | None = None) -> str:
    with pytest.raises(EngineQueryError) as caught:
        await get(engine, path, client)
    return str(caught.value)


async def test_it_gets_what_is_there(engine: Engine) -> None:
    """Status and body, below the path of the base URL."""
    engine.pages["/prefix/x"] = {"a": 1}
    assert await get(engine, "/prefix/x") == (200, b'{"a": 1}')
    assert BaseUrl.parse("http://h/prefix/").join("/x") == BaseUrl("http", "h", 80, "/prefix/x")
    assert (await get(engine, "/y"))[0] == 404


async def test_a_chunked_answer_is_put_together(engine: Engine) -> None:
    """Proxies send those."""
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
    """Something else listens there, or the engine died in the middle of a sentence."""
    engine.pages["/x"] = page
    assert "does not answer in HTTP" in await refused(engine, "/x")


async def test_a_large_answer_is_given_up(engine: Engine) -> None:
    """Neither a body above the limit, nor one that never ends, is kept in memory."""
    client = EngineHttpClient(max_bytes=1_000)
    engine.pages["/x"] = "x" * 2_000
    assert "more than 1000 bytes" in await refused(engine, "/x", client)

    def endless(handler: BaseHTTPRequestHandler) -> None:
        while True:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 65536)

    engine.pages["/y"] = endless
    assert "more than 1000 bytes" in await refused(engine, "/y", client)


async def test_a_slow_answer_is_given_up_however_many_bytes_come(engine: Engine) -> None:
    """The time is that of the whole answer: a byte now and then does not prolong it."""
    engine.pages["/x"] = lambda handler: (handler.wfile.write(b"HTTP/1.1 200"), engine.hold.wait(DEADLINE))
    assert "in time" in await refused(engine, "/x", EngineHttpClient(read_seconds=0.05))


async def test_no_listener() -> None:
    """Refused, and a name that cannot be: sentences, not tracebacks."""
    for host in (f"127.0.0.1:{quiet_port()}", "a" * 64 + ":80"):
        with pytest.raises(EngineQueryError, match="cannot be reached"):
            await within(EngineHttpClient().get(BaseUrl.parse(f"http://{host}")))


async def test_redirects_stay_on_the_host(engine: Engine) -> None:
    """A moved path is followed, a few times; a redirect to another host would make the service send requests for its peer."""
    engine.pages |= {"/a": to("/b"), "/b": to(engine.url + "/c?d=e"), "/c?d=e": 7, "/round": to("/round")}
    assert await get(engine, "/a") == (200, b"7")
    engine.pages |= {"/x": to("http://169.254.169.254/"), "/y": to("file:///etc/passwd"), "/z": to("//[bad")}
    for path in ("/x", "/y"):
        assert "another server" in await refused(engine, path)
    assert "not a valid URL" in await refused(engine, "/z")
    assert "more than 3 times" in await refused(engine, "/round")


async def test_connections_at_one_time_are_bounded(engine: Engine) -> None:
    """A fleet needs fewer file descriptors than it has engines, and a query that waits for a connection does not time out."""
    client = EngineHttpClient(max_connections=2)
    lock, now, most = threading.Lock(), 0, 0

    def page(handler: BaseHTTPRequestHandler) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        engine.hold.wait(0.001)
        with lock:
            now -= 1
        handler.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n1")

    engine.pages["/x"] = page
    found = await asyncio.gather(*(get(engine, "/x", client) for _ in range(50)))
    assert found == [(200, b"1")] * 50
    assert most <= 2


async def test_cancelling_hangs_up_at_once(engine: Engine) -> None:
    """Nothing is left behind that waits for a silent peer."""
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
        await within(task)
    assert await asyncio.to_thread(gone.wait, DEADLINE)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of `engines.test` and of no address; and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    found = folder / "certificate.pem", folder / "key.pem"
    words = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=x -addext subjectAltName=DNS:engines.test"
    subprocess.run(
        [openssl, *words.split(), "-out", found[0], "-keyout", found[1]], capture_output=True, check=True, timeout=60
    )
    return found


async def test_https_verifies_its_peer(certificate: tuple[Path, Path]) -> None:
    """By the configured name, which can differ from the host that it connects to; no other certificate will do."""
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(*certificate)
    ours = ssl.create_default_context(cafile=str(certificate[0]))
    with Engine({"/x": 1}, theirs) as engine:
        assert await get(engine, "/x", EngineHttpClient(tls=ours, server_name="engines.test")) == (200, b"1")
        assert engine.hosts == [f"engines.test:{engine.port}"]
        assert "certificate" in await refused(engine, "/x", EngineHttpClient(tls=ours))
        assert "certificate" in await refused(engine, "/x", EngineHttpClient(server_name="engines.test"))


@pytest.mark.parametrize(
    "text", ["", "h", "ftp://h", "http://", "http://h?q", "http://h#f", "http://u@h", "http://[h", "http://h/ä"]
)
def test_an_invalid_base_url(text: str) -> None:
    """The sentence names the field."""
    with pytest.raises(ConfigError, match=r"base_url|URL"):
        BaseUrl.parse(text)


def test_ipv6_hosts_are_written_in_brackets() -> None:
    """And kept without."""
    url = BaseUrl.parse("http://[fd00::1]:8000")
    assert (url.host, url.address, str(url)) == ("fd00::1", "[fd00::1]:8000", "http://[fd00::1]:8000")
