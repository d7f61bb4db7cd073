"""Tokens and roles: permissions, invalid configurations, and that no output ever contains a token."""

from __future__ import annotations

import tomllib
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvevents.errors import ConfigError
from kvevents.service.access import MAX_TOKEN_BYTES, AccessSettings, Token, TokenSettings, read_tokens

READER, WRITER, SECOND = "reader-0123456789", "writer-0123456789", "second-0123456789"
TOKENS = (
    TokenSettings(role="read", token=READER, name="grafana"),
    TokenSettings(role="register", token=WRITER),
    TokenSettings(role="register", token=SECOND),
)


def config_of(text: str) -> AccessSettings:
    return msgspec.convert(tomllib.loads(text), AccessSettings)


def digest_of(token: str) -> tuple[int, ...]:
    return tuple(sha256(token.encode()).digest())


def test_tokens_have_names_for_logs() -> None:
    """A token has its configured name, or its number in the configuration. Its text is not kept."""
    assert read_tokens(AccessSettings(tokens=TOKENS)) == (
        Token(digest_of(READER), "read", "grafana"),
        Token(digest_of(WRITER), "register", "token 2"),
        Token(digest_of(SECOND), "register", "token 3"),
    )


def test_anonymous_callers_have_all_permissions_only_without_tokens() -> None:
    """The service listens on loopback by default."""
    assert AccessSettings().anonymous_role == "register"
    assert AccessSettings(tokens=TOKENS).anonymous_role == "none"
    assert AccessSettings(tokens=TOKENS, anonymous="read").anonymous_role == "read"
    assert AccessSettings(anonymous="none").anonymous_role == "none"


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
    assert read_tokens(config, {"KV_TOKEN": SECOND}) == (
        Token(digest_of(READER), "read", "token 1"),
        Token(digest_of(WRITER), "register", "token 2"),
        Token(digest_of(SECOND), "register", "operator"),
    )


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
        read_tokens(AccessSettings(tokens=(TokenSettings(role="read", **settings),)), {"KV_EMPTY": ""})


def test_a_token_must_not_occur_twice() -> None:
    """A token with two roles is an error."""
    with pytest.raises(ConfigError, match="grafana and token 2 are the same token"):
        read_tokens(AccessSettings(tokens=(TOKENS[0], TokenSettings(role="register", token=READER))))


def test_no_representation_contains_a_token() -> None:
    """This applies to repr, str, rich and exceptions."""
    config = AccessSettings(tokens=TOKENS)
    known = read_tokens(config)
    shown = [
        repr(config),
        str(config),
        repr(TOKENS),
        repr(known),
        repr([one.__rich_repr__() for one in TOKENS]),
    ]
    with pytest.raises(ConfigError) as caught:
        read_tokens(AccessSettings(tokens=(*TOKENS, TOKENS[0])))
    shown.append(str(caught.value))
    for token in (READER, WRITER, SECOND):
        assert not any(token in text for text in shown)
    assert repr(TOKENS[0]) == "<TokenSettings role 'read', name 'grafana'>"
