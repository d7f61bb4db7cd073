"""Tokens and roles: permissions, invalid configurations, and that no output ever contains a token."""

from __future__ import annotations

import hmac
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.errors import ConfigError
from kvevents.service import access
from kvevents.service.access import MAX_TOKEN_BYTES, Access, AccessSettings, Role, TokenSettings

READER, WRITER, SECOND = "reader-0123456789", "writer-0123456789", "second-0123456789"
TOKENS = (
    TokenSettings(role="read", token=READER, name="grafana"),
    TokenSettings(role="register", token=WRITER),
    TokenSettings(role="register", token=SECOND),
)


def config_of(text: str) -> AccessSettings:
    return msgspec.convert(tomllib.loads(text), AccessSettings)


def bearer(token: str) -> bytes:
    return f"Bearer {token}".encode()


def test_roles_include_those_below() -> None:
    """One comparison decides whether a role suffices."""
    assert Role.NONE < Role.READ < Role.REGISTER


def test_without_tokens_every_caller_may_register() -> None:
    """The service listens on loopback by default, and ignores the header without tokens."""
    open_to_all = Access(AccessSettings())
    assert {open_to_all.caller(header).role for header in (None, b"", bearer(READER), b"Basic eDp5")} == {Role.REGISTER}


@pytest.mark.parametrize(
    ("header", "role"),
    [
        (bearer(READER), Role.READ),
        (bearer(WRITER), Role.REGISTER),
        (bearer(SECOND), Role.REGISTER),
        (b"bearer " + SECOND.encode(), Role.REGISTER),
        (b"BEARER   " + SECOND.encode() + b" ", Role.REGISTER),
        (None, Role.NONE),
        (b"", Role.NONE),
        (b"Bearer", Role.NONE),
        (b"Bearer ", Role.NONE),
        (SECOND.encode(), Role.NONE),
        (b"Basic " + SECOND.encode(), Role.NONE),
        (bearer(SECOND[:-1]), Role.NONE),
        (bearer(SECOND + "x"), Role.NONE),
        (bearer(SECOND.upper()), Role.NONE),
        (bearer(f"{READER} {SECOND}"), Role.NONE),
        (b"Bearer\t" + SECOND.encode(), Role.NONE),
        (b"Bearer \xff\x00", Role.NONE),
    ],
)
def test_only_a_complete_bearer_token_has_a_role(header: bytes | None, role: Role) -> None:
    """The scheme `Bearer` is case-insensitive."""
    assert Access(AccessSettings(tokens=TOKENS)).caller(header).role is role


@given(st.binary(max_size=200))
def test_no_other_bytes_have_a_role(header: bytes) -> None:
    """Any other header gives no role, and never an exception."""
    assert Access(AccessSettings(tokens=TOKENS)).caller(header).role is Role.NONE


def test_anonymous_callers_have_the_configured_role() -> None:
    """Callers with a wrong token have no role even then, so that the token's owner notices."""
    public = Access(AccessSettings(tokens=TOKENS, anonymous="read"))
    assert public.caller(None).role is Role.READ
    assert public.caller(bearer("wrong-0123456789")).role is Role.NONE
    assert public.caller(bearer(SECOND)).role is Role.REGISTER
    assert Access(AccessSettings(anonymous="read")).caller(None).role is Role.READ
    assert Access(AccessSettings(anonymous="none")).caller(None).role is Role.NONE


def test_callers_have_names_for_logs() -> None:
    """A caller has the name of its token, or the token's number in the configuration."""
    known = Access(AccessSettings(tokens=TOKENS))
    headers = [bearer(READER), bearer(WRITER), bearer("wrong-0123456789"), None]
    assert [known.caller(header).name for header in headers] == ["grafana", "token 2", "unknown token", "anonymous"]


def test_every_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digests of all tokens are compared, in constant time, even after a match."""
    compared: list[tuple[int, int]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return hmac.compare_digest(one, other)

    known = Access(AccessSettings(tokens=TOKENS))
    monkeypatch.setattr(access, "hmac", type("hmac", (), {"compare_digest": staticmethod(compare)}))
    for header in (bearer(READER), bearer(SECOND), b"Bearer x", b"Basic x", b""):
        compared.clear()
        known.caller(header)
        assert compared == [(32, 32)] * 3


# --- configuration ----------------------------------------------------------------------------------------------------------


def test_tokens_are_read_from_toml_files_and_the_environment(tmp_path: Path) -> None:
    """A token comes from the configuration, from a file with a final newline, or from the environment."""
    (tmp_path / "token").write_text(f"{WRITER}\n")
    config = config_of(f"""
        anonymous = "read"
        [[tokens]]
        role = "read"
        token = "{READER}"
        [[tokens]]
        role = "register"
        token_file = "{tmp_path / "token"}"
        [[tokens]]
        role = "register"
        token_env = "KV_TOKEN"
        name = "operator"
    """)
    known = Access(config, {"KV_TOKEN": SECOND})
    assert [known.caller(bearer(token)).role for token in (READER, WRITER, SECOND)] == [Role.READ, Role.REGISTER, Role.REGISTER]
    (tmp_path / "token").write_text("another-0123456789")
    assert known.caller(bearer(WRITER)).role is Role.REGISTER


@pytest.mark.parametrize(
    "text",
    [
        '[[tokens]]\nrole = "root"\ntoken = "0123456789abcdef"',
        '[[tokens]]\nrole = "read"\ntoken = 123',
        '[[tokens]]\ntoken = "0123456789abcdef"',
        '[[tokens]]\nrole = "read"\ntoken = "0123456789abcdef"\nexpires = 1',
        'anonymous = "register"',
        '[[tokens]]\nrole = "admin"\ntoken = "0123456789abcdef"',
        'token = "0123456789abcdef"',
        '[[tokens]]\nrole = "read"',
        '[[tokens]]\nrole = "read"\ntoken = "0123456789abcdef"\ntoken_env = "X"',
    ],
)
def test_invalid_configuration_is_rejected(text: str) -> None:
    """The error is raised when the configuration is read, and does not contain the token."""
    with pytest.raises(msgspec.ValidationError) as caught:
        config_of(text)
    assert "0123456789abcdef" not in str(caught.value)


def test_a_token_has_exactly_one_source() -> None:
    """The error names the sources that were given."""
    with pytest.raises(ConfigError, match=r"expected exactly one of token, token_file, token_env, got none"):
        TokenSettings(role="read")
    with pytest.raises(ConfigError, match=r"got token and token_env"):
        TokenSettings(role="read", token=READER, token_env="X")  # noqa: S106 - the name of a variable


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"token": "too-short-01234"}, r"token 1 has 15 bytes: expected 16 to 4096; create one with `openssl rand"),
        ({"token": "", "name": "ci"}, r"ci has 0 bytes"),
        ({"token": "x" * (MAX_TOKEN_BYTES + 1)}, r"has 4097 bytes"),
        ({"token": "0123456789 abcdef"}, r"invalid characters: expected printable ASCII"),
        ({"token": "0123456789äbcdef"}, r"invalid characters: expected printable ASCII"),
        ({"token_env": "KV_NOT_THERE"}, r"token 1: environment variable KV_NOT_THERE is not set"),
        ({"token_env": "KV_EMPTY"}, r"token 1 has 0 bytes"),
        ({"token_file": "/nonexistent/token"}, r"token 1: cannot read token_file /nonexistent/token: No such file"),
        ({"token_file": "/"}, r"cannot read token_file /: Is a directory"),
        ({"token_file": "a\0b"}, r"cannot read token_file a\0b: embedded null byte"),
        ({"token_file": "/dev/zero"}, r"token 1 has 8192 bytes"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_tokens_are_rejected(settings: dict[str, Any], sentence: str) -> None:
    """The error contains the name or the number of the token and a hint."""
    with pytest.raises(ConfigError, match=sentence):
        Access(AccessSettings(tokens=(TokenSettings(role="read", **settings),)), {"KV_EMPTY": ""})


def test_a_token_must_not_occur_twice() -> None:
    """A token with two roles is an error."""
    with pytest.raises(ConfigError, match="grafana and token 2 are the same token"):
        Access(AccessSettings(tokens=(TOKENS[0], TokenSettings(role="register", token=READER))))


def test_no_representation_contains_a_token() -> None:
    """This applies to repr, str, rich and exceptions."""
    config = AccessSettings(tokens=TOKENS)
    known = Access(config)
    shown = [
        repr(config),
        str(config),
        repr(TOKENS),
        repr(known),
        repr(vars(known)),
        repr([one.__rich_repr__() for one in TOKENS]),
    ]
    with pytest.raises(ConfigError) as caught:
        Access(AccessSettings(tokens=(*TOKENS, TOKENS[0])))
    shown.append(str(caught.value))
    for token in (READER, WRITER, SECOND):
        assert not any(token in text for text in shown)
    assert repr(TOKENS[0]) == "<TokenSettings role 'read', name 'grafana'>"
