"""Which plane, at which NATS servers, and how to log in there: options of every command that has to do with one."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from typing import Any, Final

from kvevents.cli.options import Group

_LOGIN: Final = (
    ("--creds", "credentials", "a user's JWT and seed, as `nsc` makes it"),
    ("--nkey", "nkey", "a user's NKey seed"),
    ("--tls-ca", "tls_ca", "PEM file of the servers' authorities; wants TLS"),
    ("--tls-cert", "tls_certificate", "PEM file of the own certificate"),
    ("--tls-key", "tls_key", "PEM file of its key"),
)
_INBOX: Final = "--inbox-prefix"
_FIELDS: Final = ("servers", "name", "inbox_prefix", *(field for _, field, _ in _LOGIN))


def add_servers(group: ArgumentParser | Group, flag: str, text: str) -> None:
    """Where the servers are; `text` says what for."""
    help_ = f"{text}: nats://HOST:4222, or tls://, ws://, wss://; one of a cluster is enough"
    group.add_argument(flag, dest="plane_servers", action="append", metavar="URL", help=help_)


def add_name(group: ArgumentParser | Group) -> None:
    """Which plane it is."""
    help_ = "planes of different names share servers and nothing else (default: default)"
    group.add_argument("--plane", dest="plane_name", metavar="NAME", help=help_)


def add_login(group: ArgumentParser | Group) -> None:
    """Who one is there."""
    for flag, field, help_ in _LOGIN:
        group.add_argument(flag, dest=f"plane_{field}", metavar="FILE", help=help_)
    help_ = "what subjects for answers begin with, where this user may subscribe to no others (default: _INBOX)"
    group.add_argument(_INBOX, dest="plane_inbox_prefix", metavar="SUBJECT", help=help_)


def flags_of(table: Iterable[str]) -> list[str]:
    """The options by which settings were given, by the settings' names in `PlaneSettings`."""
    flags = {"name": "--plane", "inbox_prefix": _INBOX} | {field: flag for flag, field, _ in _LOGIN}
    return [flags[field] for field in table]


def table_of(args: Namespace) -> dict[str, Any]:
    """What was told, by the settings' names in `PlaneSettings`."""
    return {field: value for field in _FIELDS if (value := getattr(args, f"plane_{field}")) is not None}
