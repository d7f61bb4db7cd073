"""Invalid settings of a plane are rejected with a message, and no secret is ever printed."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.errors import ConfigError
from kvevents_plane.settings import MAX_SECRET_BYTES, Login, PlaneSettings, without_login

URL = "nats://127.0.0.1:4222"
SEED = "SU" + "A" * 56
CREDENTIALS = (
    f"-----BEGIN NATS USER JWT-----\na.b.c\n------END NATS USER JWT------\n\nanything\n"
    f"-----BEGIN USER NKEY SEED-----\n{SEED}\n------END USER NKEY SEED------\n"
)
SECRET = "tops/ecret"  # noqa: S105 - the text that must not be shown


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


def test_only_the_servers_are_required() -> None:
    settings = PlaneSettings(servers=(URL,))
    assert (settings.name, settings.partitions, settings.copies, settings.partition_bytes) == ("default", 8, 1, 1 << 30)
    assert settings.login == Login()
    assert not settings.needs_tls


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"servers": ()}, "at least one server"),
        ({"servers": ("127.0.0.1:4222",)}, "expected nats://HOST:4222"),
        ({"servers": ("http://127.0.0.1",)}, "expected nats://HOST:4222"),
        ({"servers": ("nats://",)}, "expected nats://HOST:4222"),
        ({"servers": ("nats://host:x",)}, "expected nats://HOST:4222"),
        ({"servers": ("nats://host:70000",)}, "expected nats://HOST:4222"),
        ({"servers": ("nats://host:0",)}, "expected nats://HOST:4222"),
        ({"servers": ("nats://host/partitions",)}, "text after the port"),
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
def test_invalid_settings_are_rejected(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlaneSettings(**({"servers": (URL,)} | wrong))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"credentials": "creds", "nkey": "seed"}, "credentials and nkey exclude each other"),
        ({"credentials": "none"}, "credentials: cannot read .*none: No such file"),
        ({"credentials": "folder"}, "credentials: .* is not a regular file"),
        ({"credentials": "junk"}, "contains no user JWT and seed"),
        ({"credentials": "seed"}, "contains no user JWT and seed"),
        ({"credentials": "long"}, "is longer than 65536 bytes"),
        ({"nkey": "creds"}, "contains no user seed"),
        ({"nkey": "none"}, "nkey: cannot read"),
        ({"tls_key": "pem"}, "tls_key is set but tls_certificate is not"),
        ({"tls_certificate": "pem"}, "tls_certificate is set but tls_key is not"),
        ({"tls_ca": "none"}, "tls_ca: cannot read"),
        ({"tls_ca": "folder"}, "tls_ca: .* is not a regular file"),
    ],
    ids=str,
)
def test_invalid_files_are_rejected(files: dict[str, str], wrong: dict[str, str], message: str) -> None:
    fields: dict[str, Any] = {name: files[file] for name, file in wrong.items()}
    with pytest.raises(ConfigError, match=message):
        PlaneSettings(servers=(URL,), **fields)


def test_a_url_can_require_tls() -> None:
    assert PlaneSettings(servers=("tls://host",)).needs_tls


def test_a_certificate_authority_requires_tls(files: dict[str, str]) -> None:
    assert PlaneSettings(servers=(URL,), tls_ca=files["pem"]).needs_tls


def test_credentials_and_seed_files_are_read_in_the_format_of_the_nats_tools(files: dict[str, str]) -> None:
    assert PlaneSettings(servers=(URL,), credentials=files["creds"]).read_credentials() == ("a.b.c", SEED)
    assert PlaneSettings(servers=(URL,), nkey=files["seed"]).read_seed() == SEED


@pytest.mark.parametrize(
    ("url", "login", "address"),
    [
        ("nats://host", Login(), "nats://host:4222"),
        ("tls://u:p@host:1", Login("u", "p"), "tls://host:1"),
        ("nats://t@[::1]", Login(None, None, "t"), "nats://[::1]:4222"),
        ("nats://u:a%40b%2F%25@host", Login("u", "a@b/%"), "nats://host:4222"),
        ("tls://u:@host", Login("u", ""), "tls://host:4222"),
    ],
)
def test_a_url_is_split_into_an_address_and_a_login(url: str, login: Login, address: str) -> None:
    settings = PlaneSettings(servers=(url,))
    assert settings.login == login
    assert settings.addresses == (address,)


def test_the_login_in_one_url_is_used_for_all_servers() -> None:
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
        {"servers": ("nats://u:tops%2Fecret@host", "ws://host")},
        {"servers": ("nats://u:tops%2Fecret@host",), "token": SECRET},
        {"servers": ("nats://u:tops%2Fecret@host", "nats://u:other@host")},
        {"servers": (URL,), "token": SECRET, "partitions": 0},
        {"servers": (URL,), "token": SECRET, "nkey": "none"},
    ],
    ids=str,
)
def test_error_messages_contain_no_secret(wrong: dict[str, Any]) -> None:
    """The secret is neither in the message nor in the cause of the error."""
    with pytest.raises(ConfigError) as caught:
        PlaneSettings(**wrong)
    text = "".join(traceback.format_exception_only(caught.value)) + repr(caught.value.__cause__)
    assert not any(part in text for part in (SECRET, "tops", "ecret"))


def test_no_representation_contains_a_secret(files: dict[str, str]) -> None:
    password = PlaneSettings(servers=("nats://u:tops%2Fecret@host",))
    token = PlaneSettings(servers=(URL,), token=SECRET)
    creds = PlaneSettings(servers=(URL,), credentials=files["creds"])
    shown = [repr(password), repr(token), str(token), f"{token.login} {password.login} {creds.read_credentials()}"]
    shown += [repr(list(settings.__rich_repr__())) for settings in (password, token)]
    assert not any(part in text for text in shown for part in ("ecret", SEED, "a.b.c"))
    assert repr(password) == "<PlaneSettings 'default' at nats://host>"


def test_unknown_fields_are_rejected() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field `partition`"):
        msgspec.convert({"servers": [URL], "partition": 3}, PlaneSettings)
