"""Settings of a plane: impossible ones are refused with a message, and no secret is ever printed."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.errors import ConfigError
from kvevents.plane.settings import MAX_SECRET_BYTES, Login, PlaneSettings, without_login

URL = "nats://127.0.0.1:4222"
SEED = "SU" + "A" * 56
CREDENTIALS = (
    f"-----BEGIN NATS USER JWT-----\na.b.c\n------END NATS USER JWT------\n\nanything\n"
    f"-----BEGIN USER NKEY SEED-----\n{SEED}\n------END USER NKEY SEED------\n"
)
SECRET = "tops/ecret"  # noqa: S105 - what must not be shown


@pytest.fixture(name="files")
def written_files(tmp_path: Path) -> dict[str, str]:
    texts = {
        "creds": CREDENTIALS,
        "seed": SEED + "\n",
        "pem": "-----BEGIN",
        "junk": "junk",
        "long": "x" * (MAX_SECRET_BYTES + 1),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return {name: str(tmp_path / name) for name in [*texts, "none"]} | {"folder": str(tmp_path)}


def test_one_server_is_enough() -> None:
    settings = PlaneSettings(servers=(URL,))
    assert (settings.name, settings.partitions, settings.copies, settings.partition_bytes) == ("default", 8, 1, 1 << 30)
    assert settings.login == Login()
    assert not settings.needs_tls


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"servers": ()}, "at least one server"),
        ({"servers": ("127.0.0.1:4222",)}, "expected nats://HOST:4222"),
        ({"servers": ("http://127.0.0.1",)}, "expected nats://HOST:4222"),
        ({"servers": ("nats://",)}, "expected nats://HOST:4222"),
        ({"servers": ("nats://host:x",)}, "expected nats://HOST:4222"),
        ({"servers": ("nats://host:70000",)}, "expected nats://HOST:4222"),
        ({"servers": ("nats://host:0",)}, "expected nats://HOST:4222"),
        ({"servers": ("nats://host/partitions",)}, "text after the port"),
        ({"servers": (URL, "wss://host")}, "servers mix WebSocket and TCP"),
        ({"servers": ("nats://a:b@x", "nats://c:d@y")}, "the URLs have different logins"),
        ({"servers": ("nats://a:b@x",), "token": "t"}, "token and the login in the URL exclude each other"),
        ({"name": ""}, "1 to 32 letters"),
        ({"name": "a.b"}, "1 to 32 letters"),
        ({"name": "a" * 33}, "1 to 32 letters"),
        ({"name": "a\n"}, "1 to 32 letters"),
        ({"partitions": 0}, "from 1 to 256"),
        ({"partitions": 257}, "from 1 to 256"),
        ({"copies": 2}, "1, 3 or 5"),
        ({"inbox_prefix": "_INBOX.>"}, "beginning of a subject"),
        ({"inbox_prefix": ""}, "beginning of a subject"),
        ({"inbox_prefix": "x" * 65}, "at most 64"),
        ({"partition_bytes": 1000}, "at least 1048576"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        PlaneSettings(**({"servers": (URL,)} | wrong))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"credentials": "creds", "nkey": "seed"}, "credentials and nkey exclude each other"),
        ({"credentials": "none"}, "credentials: cannot read .*none: No such file"),
        ({"credentials": "folder"}, "credentials: .* is not a regular file"),
        ({"credentials": "junk"}, "contains no user JWT and seed"),
        ({"credentials": "seed"}, "contains no user JWT and seed"),
        ({"credentials": "long"}, "is longer than 65536 bytes"),
        ({"nkey": "creds"}, "contains no user seed"),
        ({"nkey": "none"}, "nkey: cannot read"),
        ({"tls_key": "pem"}, "tls_key is set without tls_certificate"),
        ({"tls_certificate": "pem"}, "tls_certificate is set without tls_key"),
        ({"tls_ca": "none"}, "tls_ca: cannot read"),
        ({"tls_ca": "folder"}, "tls_ca: .* is not a regular file"),
    ],
    ids=str,
)
def test_files_that_cannot_be_what_they_should_are_refused(files: dict[str, str], wrong: dict[str, str], said: str) -> None:
    fields: dict[str, Any] = {name: files[file] for name, file in wrong.items()}
    with pytest.raises(ConfigError, match=said):
        PlaneSettings(servers=(URL,), **fields)


def test_there_is_no_tls_where_it_cannot_be(files: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="ws:// has no TLS"):
        PlaneSettings(servers=("ws://host",), tls_ca=files["pem"])


@pytest.mark.parametrize("url", ["tls://host", "wss://host"])
def test_a_url_can_ask_for_tls(url: str) -> None:
    assert PlaneSettings(servers=(url,)).needs_tls


def test_an_authority_requires_tls(files: dict[str, str]) -> None:
    assert PlaneSettings(servers=(URL,), tls_ca=files["pem"]).needs_tls


def test_files_are_read_as_their_tools_write_them(files: dict[str, str]) -> None:
    assert PlaneSettings(servers=(URL,), credentials=files["creds"]).read_credentials() == ("a.b.c", SEED)
    assert PlaneSettings(servers=(URL,), nkey=files["seed"]).read_seed() == SEED


@pytest.mark.parametrize(
    ("url", "login", "address"),
    [
        ("nats://host", Login(), "nats://host:4222"),
        ("tls://u:p@host:1", Login("u", "p"), "tls://host:1"),
        ("nats://t@[::1]", Login(None, None, "t"), "nats://[::1]:4222"),
        ("nats://u:a%40b%2F%25@host", Login("u", "a@b/%"), "nats://host:4222"),
        ("ws://host/nats", Login(), "ws://host:80/nats"),
        ("wss://u:@host", Login("u", ""), "wss://host:443"),
    ],
)
def test_a_url_is_an_address_and_a_login(url: str, login: Login, address: str) -> None:
    settings = PlaneSettings(servers=(url,))
    assert settings.login == login
    assert settings.addresses == (address,)


def test_servers_without_a_login_take_that_of_the_others() -> None:
    assert PlaneSettings(servers=("nats://a", "nats://u:p@b")).login == Login("u", "p")


@given(st.text(), st.text(), st.sampled_from(["nats", "tls", "ws", "x"]))
def test_text_before_the_host_never_appears_in_errors(user: str, password: str, scheme: str) -> None:
    assert without_login(f"{scheme}://{user}:{password}@host:4222") == f"{scheme}://host:4222"


@pytest.mark.parametrize(
    "wrong",
    [
        {"servers": (f"nats://u:{SECRET}@host",)},
        {"servers": (f"nats://u:1{SECRET}@host",)},
        {"servers": (f"nats://{SECRET}@host:x",)},
        {"servers": (f"http://u:{SECRET}@host",)},
        {"servers": ("nats://u:tops%2Fecret@host", "wss://host")},
        {"servers": ("nats://u:tops%2Fecret@host",), "token": SECRET},
        {"servers": ("nats://u:tops%2Fecret@host", "nats://u:other@host")},
        {"servers": (URL,), "token": SECRET, "partitions": 0},
        {"servers": (URL,), "token": SECRET, "nkey": "none"},
    ],
    ids=str,
)
def test_what_is_refused_is_refused_without_its_secret(wrong: dict[str, Any]) -> None:
    """Neither in the sentence nor in the errors behind it."""
    with pytest.raises(ConfigError) as caught:
        PlaneSettings(**wrong)
    text = "".join(traceback.format_exception_only(caught.value)) + repr(caught.value.__cause__)
    assert not any(part in text for part in (SECRET, "tops", "ecret"))


def test_no_secret_is_shown(files: dict[str, str]) -> None:
    password = PlaneSettings(servers=("nats://u:tops%2Fecret@host",))
    token = PlaneSettings(servers=(URL,), token=SECRET)
    creds = PlaneSettings(servers=(URL,), credentials=files["creds"])
    shown = [repr(password), repr(token), str(token), f"{token.login} {password.login} {creds.read_credentials()}"]
    shown += [repr(list(settings.__rich_repr__())) for settings in (password, token)]
    assert not any(part in text for text in shown for part in ("ecret", SEED, "a.b.c"))
    assert repr(password) == "<PlaneSettings 'default' at nats://host>"


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field `partition`"):
        msgspec.convert({"servers": [URL], "partition": 3}, PlaneSettings)
