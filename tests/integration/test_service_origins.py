"""The service refuses requests that another web page makes a browser send, and answers its own page and programs."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cli_cases import run
from kvevents.errors import ConfigError
from kvevents.service.access import AccessSettings, TokenSettings, parse_hosts
from kvevents.service.settings import ServiceSettings, Tls
from service_cases import Answer, Service, exchange, registration, serving, write

TOKEN = "a-token-of-the-test"  # noqa: S105
EVIL = "https://evil.example"


@pytest.fixture(scope="module", name="service")
def one_service() -> Iterator[Service]:
    with serving() as service:
        yield service


# --- allowed_hosts


def test_hosts_are_names_ends_of_names_and_networks() -> None:
    """Case does not matter."""
    hosts = parse_hosts(["KV.example.com", "*.Svc.cluster.local", "10.9.0.0/16", "10.0.0.5", "FD00:1::/112"])
    assert (hosts.names, hosts.suffixes) == (["kv.example.com"], [".svc.cluster.local"])
    assert hosts.networks == [("10.9.0.0", "10.9.255.255"), ("10.0.0.5", "10.0.0.5"), ("fd00:1::", "fd00:1::ffff")]


@pytest.mark.parametrize("name", ["*", "a:80", "http://a", "a b", "", "*.", "a*"])
def test_invalid_host_names_are_rejected(name: str) -> None:
    """Settings with this name cannot be created, and the error names the setting."""
    with pytest.raises(ConfigError, match="invalid allowed_hosts entry"):
        parse_hosts([name])
    with pytest.raises(ConfigError, match="invalid allowed_hosts entry"):
        ServiceSettings(allowed_hosts=[name])


# --- a service on real sockets


def send_as_browser(service: Service, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
    """Send a request as a browser does, with a given `Host`."""
    sent = {"host": f"{service.host}:{service.port}", **headers}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in sent.items())
    head = f"{method} {path} HTTP/1.1\r\n{lines}content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    received = exchange(service, head.encode() + body)
    first, _, content = received.partition(b"\r\n\r\n")
    lines_back = [line.partition(": ") for line in first.decode().split("\r\n")[1:]]
    return Answer(int(first.split()[1]), {name.lower(): value for name, _, value in lines_back}, content)


def send_on_open_connection(service: Service, path: str, body: bytes, **headers: str) -> Answer:
    """Send a request as a browser does, on a connection that stays open."""
    with socket.create_connection((service.host, service.port), 20) as connection:
        sent = {"host": f"{service.host}:{service.port}", "content-length": str(len(body)), **headers}
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in sent.items())
        connection.sendall(f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + body)
        received = b""
        while b"\r\n\r\n" not in received:
            received += connection.recv(65_536)
        head, _, content = received.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        while len(content) < length:
            content += connection.recv(65_536)
    kind = head.lower().partition(b"content-type: ")[2].partition(b"\r\n")[0].decode()
    return Answer(int(head.split()[1]), {"content-type": kind}, content)


REGISTRATION = msgspec.json.encode(registration("forged", "tcp://127.0.0.1:9"))
QUERY = msgspec.json.encode({"model": "m", "tokens": [1]})


@pytest.mark.parametrize(
    ("headers", "status", "reason"),
    [
        ({"host": "evil.example", "content_type": "application/json"}, 421, "unknown-host"),
        ({"origin": EVIL, "content_type": "application/json"}, 403, "foreign-origin"),
        ({"sec_fetch_site": "cross-site", "content_type": "application/json"}, 403, "foreign-origin"),
        ({"content_type": "text/plain"}, 415, "unsupported-media-type"),
        ({"content_type": "application/x-www-form-urlencoded"}, 415, "unsupported-media-type"),
        ({}, 415, "unsupported-media-type"),
    ],
    ids=["host", "origin", "site", "text", "form", "no type"],
)
def test_pages_of_other_sites_cannot_register_or_query(
    service: Service, headers: dict[str, str], status: int, reason: str
) -> None:
    """This holds for every request that a browser sends without a preflight request, in both planes."""
    for answer in (
        send_as_browser(service, "POST", "/register", REGISTRATION, **headers),
        send_on_open_connection(service, "/register", REGISTRATION, **headers),
        send_as_browser(service, "POST", "/unregister", b'{"instance_id": 1}', **headers),
        send_as_browser(service, "POST", "/v1/match", QUERY, **headers),
        send_on_open_connection(service, "/v1/match", QUERY, **headers),
    ):
        assert (answer.status, answer.reason) == (status, reason)
    assert service.sources() == {}


def test_pages_of_other_sites_cannot_read(service: Service) -> None:
    """Neither DNS rebinding nor another port of this machine works. Probes are answered for any host name."""
    for path in ("/dump", "/v1/sources", "/metrics", "/", "/v1/events", "/openapi.json"):
        assert send_as_browser(service, "GET", path, host="evil.example").reason == "unknown-host"
        assert send_as_browser(service, "GET", path, origin="http://localhost:3000").reason == "foreign-origin"
    for path in ("/livez", "/health", "/readyz"):
        assert send_as_browser(service, "GET", path, host="evil.example", origin=EVIL).status == 200


def test_programs_and_the_service_page_are_answered(service: Service) -> None:
    """A client without these headers and a browser on the service's own page get responses."""
    own = f"http://{service.host}:{service.port}"
    for headers in ({}, {"origin": own, "sec_fetch_site": "same-origin"}, {"host": f"localhost:{service.port}"}):
        answer = send_on_open_connection(service, "/v1/match", QUERY, content_type="application/json", **headers)
        assert answer.reason == "unknown-model"


def test_with_tokens_a_page_still_needs_its_own_origin(tmp_path: Path) -> None:
    """Any host name is accepted; a configured name is an own origin even if the proxy sends another `Host`."""
    text = f'allowed_hosts = ["kv.example.com"]\naccess = {{ tokens = [{{ role = "read", token = "{TOKEN}" }}] }}\n'
    with serving("--config", write(tmp_path / "service.toml", text)) as service:
        sent = {"host": "kv.internal:8090", "authorization": f"Bearer {TOKEN}"}
        assert send_as_browser(service, "GET", "/v1/sources", b"", **sent).status == 200
        for origin, status in (("http://kv.internal:8090", 200), ("https://kv.example.com", 200), (EVIL, 403)):
            assert send_as_browser(service, "GET", "/v1/sources", b"", **sent, origin=origin).status == status


# --- addresses that other machines reach


def make_settings(**more: Any) -> ServiceSettings:
    return ServiceSettings(host="0.0.0.0", **more)  # noqa: S104 - a setting, nothing listens


def test_without_any_access_control_only_loopback_is_served() -> None:
    """Other hosts need tokens, a role for anonymous callers, client certificates, or `insecure`."""
    with pytest.raises(ConfigError, match=r"host 0\.0\.0\.0 is reachable from other machines and requests need no token"):
        make_settings()
    tokens = (TokenSettings(role="read", token=TOKEN),)
    for more in (
        {"access": AccessSettings(tokens=tokens)},
        {"access": AccessSettings(anonymous="read")},
        {"tls": Tls(certificate="c", key="k", client_ca="ca")},
    ):
        assert not make_settings(**more).is_open
    with pytest.raises(ConfigError, match="--insecure"):
        make_settings(tls=Tls(certificate="c", key="k"))
    assert make_settings(insecure=True).is_open


def test_flags_and_file_are_checked_together(tmp_path: Path) -> None:
    """The host can be in the file, and `insecure` can be a flag."""
    file = write(tmp_path / "service.toml", 'host = "0.0.0.0"\n')
    for args, code in (
        (("--config", file), 2),
        (("--config", file, "--insecure"), 0),
        (("--config", file, "--host", "127.0.0.1"), 0),
        (("--host", "0.0.0.0"), 2),  # noqa: S104 - the settings are checked, nothing listens
        (("--host", "0.0.0.0", "--insecure", "--allowed-host", "indexer"), 0),  # noqa: S104
    ):
        done = run("serve", "--check", "--port", 0, *args)
        assert done.code == code, (args, done.err)
        assert ("--insecure" in done.err) == bool(code)
