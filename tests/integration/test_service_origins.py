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
from kvevents.service.access import AccessSettings, HostPatterns, TokenSettings, host_of
from kvevents.service.errors import ServiceError
from kvevents.service.http.app import OriginPolicy
from kvevents.service.http.messages import Headers
from kvevents.service.settings import ServiceSettings, Tls
from service_cases import Answer, Service, exchange, registration, serving, write

TOKEN = "a-token-of-the-test"  # noqa: S105
EVIL = "https://evil.example"


@pytest.fixture(scope="module", name="service")
def one_service() -> Iterator[Service]:
    with serving() as service:
        yield service


def refusal_status(policy: OriginPolicy, *, is_read: bool = False, **headers: str) -> int:
    """Return the status of the error for a request with these headers; 0 if it is accepted."""
    request_headers = Headers([(name.replace("_", "-"), value.encode()) for name, value in headers.items()])
    try:
        policy.check(request_headers, is_read=is_read)
    except ServiceError as error:
        return error.code
    return 0


# --- the policy


@pytest.mark.parametrize(
    ("listens", "host", "status"),
    [
        ("127.0.0.1", "127.0.0.1:8090", 0),
        ("127.0.0.1", "localhost:8090", 0),
        ("127.0.0.1", "LOCALHOST", 0),
        ("127.0.0.1", "[::1]:8090", 0),
        ("127.0.0.1", "kv.localhost:8090", 0),
        ("127.0.0.1", "evil.example:8090", 421),
        ("127.0.0.1", "localhost.evil.example", 421),
        ("127.0.0.1", "127.0.0.1.evil.example", 421),
        ("127.0.0.1", "10.0.0.5:8090", 421),
        ("127.0.0.1", "", 421),
        ("0.0.0.0", "10.0.0.5:8090", 0),  # noqa: S104 - a setting, nothing listens
        ("0.0.0.0", "[fd00::5]:8090", 0),  # noqa: S104
        ("0.0.0.0", "evil.example", 421),  # noqa: S104
        ("indexer.lan", "indexer.lan:8090", 0),
        ("127.0.0.1", "kv.example.com", 0),
        ("127.0.0.1", "a.svc.cluster.local:8090", 0),
        ("127.0.0.1", "svc.cluster.local", 421),
        ("127.0.0.1", "other.example.com", 421),
    ],
)
def test_a_host_name_of_another_site_is_refused(listens: str, host: str, status: int) -> None:
    """Addresses are accepted, because DNS rebinding needs a name. A service on loopback accepts only loopback addresses."""
    policy = OriginPolicy(listens, ["kv.example.com", "*.svc.cluster.local"], checks_host=True)
    assert refusal_status(policy, host=host) == status


def test_any_host_is_accepted_if_every_request_needs_a_token() -> None:
    """A request without the header is always accepted, as in HTTP 1.0."""
    assert refusal_status(OriginPolicy("0.0.0.0", [], checks_host=False), host="any.example") == 0  # noqa: S104
    assert refusal_status(OriginPolicy("127.0.0.1", [], checks_host=True)) == 0


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://127.0.0.1:8090", 0),
        ("https://127.0.0.1:8090", 0),
        ("https://kv.example.com", 0),
        ("https://KV.example.com:8443", 0),
        (EVIL, 403),
        ("http://127.0.0.1:3000", 403),
        ("http://localhost:8090", 403),
        ("null", 403),
        ("", 403),
        ("file://127.0.0.1:8090", 403),
        ("http://kv.example.com.evil.example", 403),
    ],
)
def test_only_own_origins_are_accepted(origin: str, status: int) -> None:
    """The origin of `Host` is accepted with any scheme, because a proxy can end TLS. Origins of configured names are accepted,
    too."""
    policy = OriginPolicy("127.0.0.1", ["kv.example.com"], checks_host=True)
    assert refusal_status(policy, host="127.0.0.1:8090", origin=origin) == status
    assert refusal_status(policy, host="127.0.0.1:8090", origin=origin, is_read=True) == status


def test_cross_site_requests_without_an_origin_are_refused() -> None:
    """Images, scripts and frames of another page send no `Origin`. A link to the page works, and a form does not."""
    policy = OriginPolicy("127.0.0.1", [], checks_host=True)
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 0), ("none", 0)):
        assert refusal_status(policy, sec_fetch_site=site, is_read=True) == status
        assert refusal_status(policy, sec_fetch_site=site, sec_fetch_mode="no-cors", is_read=True) == status
        assert refusal_status(policy, sec_fetch_site=site, sec_fetch_mode="navigate") == status
    assert refusal_status(policy, sec_fetch_site="cross-site", sec_fetch_mode="navigate", is_read=True) == 0


@pytest.mark.parametrize(
    ("place", "host"),
    [("a", "a"), ("A.b:80", "a.b"), ("a.:1", "a"), ("[::1]:1", "::1"), ("[::1]", "::1"), ("", ""), (":80", "")],
)
def test_host_of_removes_port_and_brackets(place: str, host: str) -> None:
    """The host is returned without port, brackets and final dot."""
    assert host_of(place) == host


@pytest.mark.parametrize("name", ["*", "a:80", "http://a", "a b", "", "*.", "a*"])
def test_invalid_host_names_are_rejected(name: str) -> None:
    """Settings with this name cannot be created, and the error names the setting."""
    with pytest.raises(ConfigError, match="invalid allowed_hosts entry"):
        HostPatterns([name], "allowed_hosts")
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
