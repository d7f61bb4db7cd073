"""Whether a service can start with its settings, beyond what the settings say of themselves: files, keys, names, folders.

`serve` checks this before it starts, and `serve --check` checks beyond it only whether the service could listen, so both refuse
the same with the same words. A state folder that the running service has, and engines that are away, are left out.
"""

from __future__ import annotations

import ssl
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from kvevents.errors import ConfigError
from kvevents.plane.connection import check_connection
from kvevents.service.access import Access
from kvevents.service.allowing import AllowList
from kvevents.service.config import EngineSources, ServiceConfig, Tls
from kvevents.service.discovery.files import read_sources
from kvevents.service.discovery.tables import SourceTable
from kvevents.service.errors import ConflictError
from kvevents.service.finding import providers_of
from kvevents.service.fleet import check_alike
from kvevents.service.registration import Key, Registration
from kvevents.service.shards.peers import Peers


def check_settings(config: ServiceConfig, watched: Path | None) -> None:
    """Raise `ConfigError` for settings that `kvevents serve` cannot start with, and `MissingDependencyError`."""
    Access(config.access)
    AllowList(config.allow)
    if config.tls is not None:
        _check_tls(config.tls)
    if config.plane is not None:
        check_connection(config.plane)
    if config.shard is not None:
        Peers(config.shard)
    if config.state_dir is not None:
        _check_folder(Path(config.state_dir))
    check_engines(config, watched)


def check_engines(config: EngineSources, watched: Path | None) -> None:
    """Raise `ConfigError` for engines that cannot be followed as they are named; `watched` is a file with more of them."""
    providers_of(config, watched)
    named: dict[Key, tuple[Registration, str]] = {}
    for registration, origin in _named(config, watched):
        first, where = named.setdefault(registration.key, (registration, origin))
        if first != registration:
            differing = [name for name in first.__struct_fields__ if getattr(first, name) != getattr(registration, name)]
            raise ConfigError(
                f"{registration.label} is named twice, in {where} and in {origin}, with another {', '.join(differing)}: "
                "leave one of them out, or call it something else"
            )
    _check_ranks([registration for registration, _ in named.values()])


def _named(config: EngineSources, watched: Path | None) -> Iterator[tuple[Registration, str]]:
    tables: list[tuple[Iterable[SourceTable], str]] = []
    try:
        if watched is not None:
            tables.append((read_sources(watched, alone=False), str(watched)))
        tables.append((config.sources, "the settings"))
        tables += [(read_sources(Path(path)), path) for path in config.source_files]
    except ExceptionGroup as errors:
        raise ConfigError(str(errors.exceptions[0])) from errors
    for found, origin in tables:
        for table in found:
            for registration in table.listed():
                yield registration, origin


def _check_ranks(registrations: Sequence[Registration]) -> None:
    firsts: dict[str, Registration] = {}
    sockets: dict[tuple[str, str, str], tuple[Registration, str]] = {}
    for registration in registrations:
        try:
            check_alike(registration, firsts.setdefault(registration.key[0], registration))
        except ConflictError as error:
            raise ConfigError(f"{error}; {error.hint}") from error
        for name, endpoint in (("endpoint", registration.endpoint), ("replay_endpoint", registration.replay_endpoint)):
            if endpoint is None:
                continue
            # Ranks may publish at one endpoint, each under a topic of its own.
            topic = registration.topic if name == "endpoint" else ""
            other, of_other = sockets.setdefault((registration.key[0], endpoint, topic), (registration, name))
            if (other, of_other) != (registration, name):
                raise ConfigError(
                    f"{name} {endpoint} of {registration.label} is the {of_other} of {other.label}; "
                    "each rank has endpoints of its own"
                )


def _check_tls(tls: Tls) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    file = tls.certificate
    try:
        for file in (tls.certificate, tls.key, *([tls.client_ca] if tls.client_ca is not None else [])):
            Path(file).read_bytes()
        file = tls.certificate
        context.load_cert_chain(tls.certificate, tls.key, password=lambda: "")
        if tls.client_ca is not None:
            file = tls.client_ca
            context.load_verify_locations(tls.client_ca)
    except (OSError, ValueError) as error:  # ssl's errors are both
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"tls cannot be used: {file}: {reason}; certificate, key and client_ca are PEM files, the key without password"
        ) from error


def _check_folder(folder: Path) -> None:
    """Make the folder, write there, and leave no trace."""
    made: list[Path] = []
    try:
        for each in reversed((folder, *folder.parents)):
            if not each.exists():
                each.mkdir(mode=0o700)
                made.append(each)
        with tempfile.NamedTemporaryFile(prefix=".", suffix=".tmp", dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"state_dir {folder} cannot be used: {error.strerror or error}") from error
    finally:
        for each in reversed(made):
            with suppress(OSError):
                each.rmdir()
