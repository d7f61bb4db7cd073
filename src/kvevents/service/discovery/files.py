"""Discovery of engines that `[[sources]]` tables name, in the configuration and in watched files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Iterable
from pathlib import Path
from typing import Any, Final, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from kvevents.backoff import SYSTEM_CLOCK, Clock, apply_jitter
from kvevents.errors import ConfigError
from kvevents.service.discovery.engines import EngineProvider
from kvevents.service.discovery.provider import Finding, SourceTable, parse_table
from kvevents.settings import parse_toml, suggestion

CHECK_SECONDS: Final = 1.0
"""Pause between two checks of a file for changes. A check is one `stat`, which, unlike inotify, also works over NFS and through
the symlinks of a Kubernetes ConfigMap."""
MAX_FILE_BYTES: Final = 8 << 20
"""Maximum size of a file in bytes: several times the size of 4,096 tables that have all fields."""
SOURCES_ONLY: Final = ("sources",)
"""The key of a file of sources."""
MAX_FAULTS: Final = 16
"""Maximum number of invalid tables of one file that are reported one by one."""

_FileStamp: TypeAlias = tuple[int, ...] | None
"""Values of `stat` for a file, which change when the file is changed or replaced. None if `stat` fails."""


def build_finding(tables: Iterable[SourceTable]) -> Finding:
    """Return the registrations in `tables`, and a provider for each engine that must be queried."""
    found = tuple(tables)
    return Finding(
        registrations=tuple(each for table in found for each in table.static_registrations()),
        providers=tuple(EngineProvider(table.base_url, table, table.instance) for table in found if table.base_url is not None),
    )


class StaticProvider(Struct, frozen=True):
    """Finds the engines of tables that do not change after the start of the service."""

    tables: tuple[SourceTable, ...]
    name: str = "config"

    async def watch(self) -> AsyncGenerator[Finding, None]:
        """Yield one finding."""
        yield build_finding(self.tables)


class FileProvider(Struct, frozen=True):
    """Finds the engines of a watched file. If the file cannot be used, the finding has a fault and the former engines."""

    path: Path
    keys: tuple[str, ...] = SOURCES_ONLY
    """Keys that the file may contain. The configuration file has all settings, of which only `[[sources]]` are read here."""
    interval: float = CHECK_SECONDS
    max_bytes: int = MAX_FILE_BYTES
    clock: Clock = SYSTEM_CLOCK

    @property
    def name(self) -> str:
        """The name in logs, such as `file /etc/fleet.toml`."""
        return f"file {self.path}"

    async def watch(self) -> AsyncGenerator[Finding, None]:
        """Yield the engines in the file at the start, and then after each change."""
        finding = Finding()
        read_stamp: _FileStamp | str = "never"
        while True:
            stamp = await asyncio.to_thread(file_stamp, self.path)
            if stamp != read_stamp:
                newest = await asyncio.to_thread(self._load, finding, is_empty=stamp is not None and not stamp[2])
                # If the file was written during the read, the content might be incomplete: the next check reads the file again.
                if stamp == await asyncio.to_thread(file_stamp, self.path):
                    read_stamp, finding = stamp, newest
                    yield finding
            await self.clock.sleep(apply_jitter(self.interval, self.clock.random))

    def _load(self, known: Finding, *, is_empty: bool) -> Finding:
        has_sources = bool(known.registrations or known.providers)
        keys = SOURCES_ONLY if has_sources and is_empty else self.keys  # A file is often truncated before it is written again.
        try:
            return build_finding(read_sources(self.path, keys=keys, max_bytes=self.max_bytes))
        except ExceptionGroup as errors:
            note = "; the sources that it named before stay" if has_sources else ""
            return replace(known, faults=tuple(f"{error}{note}" for error in errors.exceptions[:MAX_FAULTS]))


def file_stamp(path: Path) -> _FileStamp:
    """Return a value that changes when the file is changed or replaced."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def read_sources(path: Path, *, keys: Collection[str] = SOURCES_ONLY, max_bytes: int = MAX_FILE_BYTES) -> list[SourceTable]:
    """Return the tables of a file.

    Raises an `ExceptionGroup` with one `ConfigError` for each invalid table, or with one for the whole file.
    """
    try:
        raw = _read_tables(path, keys=keys, max_bytes=max_bytes)
    except (OSError, ValueError, RecursionError) as error:  # ValueError is a base class of `ConfigError`.
        reason = f"cannot be read: {error.strerror or error}" if isinstance(error, OSError) else str(error)
        raise ExceptionGroup(f"{path} is invalid", [ConfigError(f"{path}: {reason}")]) from error
    tables: list[SourceTable] = []
    errors: list[ConfigError] = []
    for number, fields in enumerate(raw, 1):
        try:
            tables.append(parse_table(number, fields))
        except ConfigError as error:
            errors.append(ConfigError(f"{path}: {error}"))
    if errors:
        raise ExceptionGroup(f"{path} is invalid", errors)
    return tables


def _read_tables(path: Path, *, keys: Collection[str], max_bytes: int) -> list[Any]:
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ConfigError(f"the file has more than {max_bytes} bytes")
    fields = parse_toml(content.decode("utf-8"))
    if unknown := sorted(fields.keys() - {*keys}):
        if keys == SOURCES_ONLY:
            raise ConfigError(f"unknown key {unknown[0]!r}: a file of sources has [[sources]] tables and nothing else")
        raise ConfigError(f"unknown key {unknown[0]!r}{suggestion(unknown[0], keys)} correct it")
    if keys != SOURCES_ONLY:
        fields.setdefault("sources", [])
    if "sources" not in fields:
        raise ConfigError("the file has no [[sources]]: write sources = [] for an empty list")
    if not isinstance(fields["sources"], list):
        raise ConfigError("sources is one table: write [[sources]], in double brackets")
    return fields["sources"]
