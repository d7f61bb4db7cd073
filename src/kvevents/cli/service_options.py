"""Options of the commands that send requests to a service: contexts in a file, and the client that follows from the options."""

from __future__ import annotations

import argparse
import os
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from kvevents.cli.command import Group
from kvevents.cli.values import positive_seconds, service_url
from kvevents.client import Client
from kvevents.client.protocol import TOKEN_VARIABLE
from kvevents.errors import ConfigError
from kvevents.settings import convert, read_toml, suggestion

SERVICE_VARIABLE: Final = "KVEVENTS_SERVICE"
DEFAULT_SERVICE: Final = "http://127.0.0.1:8090"
MAX_TOKEN_BYTES: Final = 4096
"""Maximum length of a bearer token; the service has the same limit."""


class Context(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A service, and the files with which clients authenticate to it and verify it."""

    service: str
    """URL of the service."""
    token_file: str | None = None
    tls_ca: str | None = None
    """PEM file of the certificate authority that signed the service's certificate."""


class _ContextFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `contexts.toml`: the name of the current context, and a table `[contexts.NAME]` for each context."""

    contexts: dict[str, Context] = {}
    current: str | None = None


def context_file() -> Path:
    """Return the path of the file of contexts."""
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(os.environ.get("KVEVENTS_CONTEXTS") or f"{home}/kvevents/contexts.toml").expanduser()


def find_context(name: str | None) -> Context | None:
    """Return the context `name`, else the context that KVEVENTS_CONTEXT or the file names, else None. Raises `ConfigError`."""
    path = context_file()
    contexts = convert(read_toml(path), _ContextFile, str(path)) if path.exists() else _ContextFile()
    wanted = name or os.environ.get("KVEVENTS_CONTEXT") or contexts.current
    if wanted is not None and wanted not in contexts.contexts:
        raise ConfigError(f"unknown context {wanted!r}{suggestion(wanted, contexts.contexts)} {path} has no such context")
    return None if wanted is None else contexts.contexts[wanted]


def _reject_token(_text: str) -> NoReturn:
    raise ConfigError("all users of this machine can read arguments; set KVEVENTS_TOKEN, or use --token-file")


def add_service(parser: ArgumentParser | Group) -> None:
    """Declare the options for the service, the token, the certificate authority and the timeout."""
    named = parser.add_mutually_exclusive_group()
    text = f"URL of the service (default: {SERVICE_VARIABLE}, else the current context, else {DEFAULT_SERVICE})"
    named.add_argument("-s", "--service", type=service_url, help=text)
    named.add_argument("--context", metavar="NAME", help=f"service of this name in {context_file()}")
    parser.add_argument("--token-file", type=Path, help=f"file with the bearer token (default: the variable {TOKEN_VARIABLE})")
    # Without this hidden option the error about an unknown `--token SECRET` would print the secret.
    parser.add_argument("--token", type=_reject_token, help=argparse.SUPPRESS)
    parser.add_argument("--tls-ca", type=Path, help="PEM file of the authority of its certificate (default: the system's)")
    parser.add_argument("--timeout", type=positive_seconds, default=5.0, help="seconds to wait for a response")


def add_scope(parser: ArgumentParser, *, model: str = "model", default: str = "default", required: bool = False) -> None:
    """Declare the options for model, tenant and group; `scope_of` returns their values."""
    parser.add_argument("--model", metavar="NAME", required=required, help=model)
    parser.add_argument("--tenant", metavar="NAME", help=f"tenant (default: {default})")
    parser.add_argument("--group", metavar="NAME", help=f"routing group (default: {default})")


def scope_of(args: Namespace) -> dict[str, Any]:
    """Return the values of the given options among those that `add_scope` declares."""
    return {name: value for name in ("model", "tenant", "group") if (value := getattr(args, name)) is not None}


def make_client(args: Namespace) -> Client:
    """Return the client for the options of `add_service`, and store the client's URL in `args.service`. Raises `ConfigError`.

    If `--service` or the variable names a service, ignore the context: its token is only for the context's service.
    """
    variable = None if args.context else os.environ.get(SERVICE_VARIABLE)
    context = None if args.service or variable else find_context(args.context)
    token_file, ca = (None, None) if context is None else (_parse_path(context.token_file), _parse_path(context.tls_ca))
    args.service = args.service or service_url(variable or (context.service if context else DEFAULT_SERVICE))
    file = args.token_file or (None if os.environ.get(TOKEN_VARIABLE) else token_file)
    token = _read_token(file, "--token-file" if args.token_file else "the context's token_file")
    return Client(args.service, token=token, ca_file=args.tls_ca or ca, deadline=args.timeout, retries=0)


def _parse_path(text: str | None) -> Path | None:
    return None if text is None else Path(text).expanduser()


def _read_token(file: Path | None, option: str) -> str | None:
    if file is None:
        given, origin = os.environ.get(TOKEN_VARIABLE, "").strip(), TOKEN_VARIABLE
        if not given:
            return None
    else:
        origin = f"{option} {file}"
        try:
            given = file.read_text("latin-1").strip()
        except OSError as error:
            raise ConfigError(f"cannot read {origin}: {error.strerror or error}") from error
    # JSON is rejected, because a prompt file given by mistake as token file would be sent in a header, which proxies log.
    if not 0 < len(given) <= MAX_TOKEN_BYTES or given[0] in '[{"' or not all("!" <= char <= "~" for char in given):
        raise ConfigError(f"{origin} has no valid token: expected 1 to {MAX_TOKEN_BYTES} printable ASCII characters, no JSON")
    return given
