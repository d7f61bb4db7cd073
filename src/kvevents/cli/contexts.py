"""Contexts: named services with their tokens and certificate authorities, in a file for all commands."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from kvevents.errors import ConfigError
from kvevents.settings import convert, read_toml, suggestion


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
