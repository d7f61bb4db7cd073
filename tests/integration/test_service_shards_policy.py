"""`kvevents.service.peers`: which announced replicas are queried."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import msgspec
import pytest

from certificate_cases import make_certificates
from kvevents.errors import ConfigError
from kvevents.service.peers import PeerPolicy, Peers, PeerUnavailableError
from kvevents.service.settings import ServiceSettings, ShardSettings
from kvevents.service.shard_server import ExpectationAnswer, PartitionQuery
from kvevents.settings import convert

POD = "http://kv-0.kv-peers.ns.svc:8090"


def is_allowed(own: str, url: str, *allow: str) -> bool:
    return not PeerPolicy(ShardSettings(url=own, allow=list(allow))).refusal(url)


@pytest.mark.parametrize(
    ("own", "url", "allowed"),
    [
        (POD, "http://kv-1.kv-peers.ns.svc:8090", True),
        (POD, "http://KV-1.KV-PEERS.ns.svc", True),
        (POD, "https://kv-1.kv-peers.ns.svc", True),
        (POD, "http://kv-peers.ns.svc", False),
        (POD, "http://evil.example:8090", False),
        (POD, "http://kv-1.kv-peers.ns.svc.evil.example", False),
        (POD, "http://10.0.0.9:8090", False),
        ("https://kv-0.kv-peers.ns.svc", "https://kv-1.kv-peers.ns.svc", True),
        ("https://kv-0.kv-peers.ns.svc", "http://kv-1.kv-peers.ns.svc", False),
        ("http://example.com", "http://other.com", False),
        ("http://example.com", "http://example.com:9", True),
        ("http://replica", "http://other", False),
        ("http://10.0.0.5:8090", "http://10.0.0.5:8091", True),
        ("http://10.0.0.5:8090", "http://10.0.0.6:8090", False),
        ("http://127.0.0.1:1", "http://127.0.0.1:2", True),
        ("http://127.0.0.1:1", "http://[::1]:2", True),
        ("http://localhost:1", "http://127.0.0.2:2", True),
        ("http://127.0.0.1:1", "http://10.0.0.6", False),
        ("http://[fd00::1]:1", "http://[fd00::1]:2", True),
        ("http://[fd00::1]:1", "http://[fd00::2]:2", False),
    ],
)
def test_without_patterns_the_own_domain_is_allowed(own: str, url: str, allowed: bool) -> None:
    assert is_allowed(own, url) is allowed


@pytest.mark.parametrize(
    ("pattern", "url", "allowed"),
    [
        ("10.0.0.0/24", "http://10.0.0.6", True),
        ("10.0.0.0/24", "http://10.0.1.6", False),
        ("10.0.0.6", "http://10.0.0.6", True),
        ("fd00::/64", "http://[fd00::2]", True),
        ("fd00::/64", "http://[fd00:1::2]", False),
        ("other", "http://other:1", True),
        ("other", "http://kv-1.kv-peers.ns.svc", False),
        ("*.example.com", "http://a.b.example.com", True),
        ("*.example.com", "http://example.com", False),
    ],
)
def test_patterns_replace_the_own_domain(pattern: str, url: str, allowed: bool) -> None:
    assert is_allowed(POD, url, pattern) is allowed


@pytest.mark.parametrize("pattern", ["http://a", "a:80", "10.0.0.0/33", "10.0.0.1/24", "*", ""])
def test_invalid_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"invalid shard\.allow entry"):
        ShardSettings(url=POD, allow=[pattern])


def test_requiring_client_certificates_requires_an_own_certificate() -> None:
    """Otherwise no replica could query another one."""
    tables = {"plane": {"servers": ["nats://n1"]}, "replica": "a", "shard": {"url": POD}}
    tls = {"certificate": "server.pem", "key": "server.key", "client_ca": "ca.pem"}
    with pytest.raises(ConfigError, match=r"set shard\.tls_certificate"):
        convert({**tables, "tls": tls}, ServiceSettings, "test")
    with pytest.raises(ConfigError, match="set both or neither"):
        ShardSettings(url=POD, tls_certificate="client.pem")


async def test_replicas_authenticate_to_each_other(tmp_path: Path) -> None:
    """A replica that requires certificates is queried with one. A replica with an untrusted certificate is not queried."""
    folder = make_certificates(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=folder / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        body = msgspec.msgpack.encode(ExpectationAnswer(known=True))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        await reader.read()
        writer.close()

    async def ask(**more: Any) -> bool:
        peers = Peers(ShardSettings(url=url, ask_seconds=10.0, **more))
        try:
            return (await peers.ask("other", url, "/v1/shard/expect", PartitionQuery(partitions=[]), ExpectationAnswer)).known
        except PeerUnavailableError:
            return False
        finally:
            await peers.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        certificate = {"tls_certificate": str(folder / "client.pem"), "tls_key": str(folder / "client.key")}
        assert await ask(tls_ca=str(folder / "ca.pem"), **certificate)
        assert len(requests) == 1
        assert not await ask(tls_ca=str(folder / "ca.pem"))
        assert not await ask(**certificate)
        assert len(requests) == 1
