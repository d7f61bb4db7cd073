"""Engines that tables name: those of the configuration, and those of a file, which is read again when it has changed."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from kvevents.backoff import SYSTEM_CLOCK, Clock, jittered
from kvevents.errors import ConfigError
from kvevents.service.discovery.engines import EngineProvider
from kvevents.service.discovery.provider import DiscoveryFault, Finding
from kvevents.service.discovery.source_config import SourceTable, parse_table


@dataclass(frozen=True, slots=True)
class StaticProvider:
    """Tables that do not change while the service runs."""

    tables: tuple[SourceTable, ...]
    name: str = "config"

    async def watch(self) -> AsyncGenerator[Finding, None]:
        """One finding, and the end."""
        yield build_finding(self.tables)


def build_finding(tables: Iterable[SourceTable]) -> Finding:
    """What tables name: registrations, and providers for those engines that are to be asked."""
    told = tuple(tables)
    return Finding(
        registrations=tuple(each for table in told for each in table.listed()),
        providers=tuple(EngineProvider(table.base_url, table, table.instance) for table in told if table.base_url is not None),
    )


__all__ = ["FileProvider", "SourceTable", "read_sources"]

LOOK_SECONDS: Final = 1.0
"""Between two looks at the file. Looking is one `stat`, which unlike inotify also sees through the symlinks of a Kubernetes
ConfigMap and over NFS."""
MAX_FILE_BYTES: Final = 8 << 20
"""Several times what 4,096 full tables need."""
MAX_FAULTS: Final = 16
"""Wrong tables of one file that are told one by one."""

_Stamp: TypeAlias = tuple[int, ...] | None
"""What changes when a file does, in place or by another one under its name; None when it cannot be looked at."""


@dataclass(frozen=True, slots=True)
class FileProvider:
    """A watched file. A bad or missing one changes nothing but the faults: all of a file counts, or nothing."""

    path: Path
    alone: bool = True
    """Whether it has tables of sources only; the service's configuration has settings beside them."""
    interval: float = LOOK_SECONDS
    clock: Clock = field(default=SYSTEM_CLOCK, compare=False, repr=False)

    @property
    def name(self) -> str:
        """As `file /etc/fleet.toml`."""
        return f"file {self.path}"

    async def watch(self) -> AsyncGenerator[Finding, None]:
        """What the file names now."""
        found = Finding()
        seen: _Stamp | str = "never"
        while True:
            stamp = await asyncio.to_thread(_stamp, self.path)
            if stamp != seen:
                read = await asyncio.to_thread(self._load, found)
                # A file that was written to meanwhile may have been read by half; it counts as it is at the next look.
                if stamp == await asyncio.to_thread(_stamp, self.path):
                    seen, found = stamp, read
                    yield found
            await self.clock.sleep(jittered(self.interval, self.clock.random))

    def _load(self, known: Finding) -> Finding:
        try:
            return build_finding(read_sources(self.path, alone=self.alone))
        except ExceptionGroup as errors:
            kept = "; the sources that it named before stay" if known.registrations or known.providers else ""
            faults = tuple(DiscoveryFault(str(self.path), f"{error}{kept}") for error in errors.exceptions[:MAX_FAULTS])
            return replace(known, faults=faults)


def _stamp(path: Path) -> _Stamp:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def read_sources(path: Path, *, alone: bool = True) -> list[SourceTable]:
    """The tables of a file. Raises an `ExceptionGroup` of `ConfigError`: one for each wrong table, or one for the file."""
    raw = _read(path, alone=alone)
    tables: list[SourceTable] = []
    errors: list[ConfigError] = []
    for number, fields in enumerate(raw, 1):
        try:
            tables.append(parse_table(number, fields))
        except ConfigError as error:
            errors.append(ConfigError(f"{path}: {error}"))
    if errors:
        raise ExceptionGroup(f"{path} is wrong", errors)
    return tables


def _read(path: Path, *, alone: bool) -> list[Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(f"it has more than {MAX_FILE_BYTES} bytes")
        found = tomllib.loads(content.decode("utf-8"))
        return _sources_of(found, alone=alone)
    except OSError as error:
        raise _alone(path, f"cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError, TOMLDecodeError (which has the line), ConfigError
        raise _alone(path, str(error)) from error


def _sources_of(found: dict[str, Any], *, alone: bool) -> list[Any]:
    unknown = sorted(found.keys() - {"sources"})
    if not alone:
        found.setdefault("sources", [])
    elif unknown:
        raise ConfigError(f"unknown key {unknown[0]!r}; a file of sources has [[sources]] tables and nothing else")
    if "sources" not in found:
        raise ConfigError("it has no [[sources]]; for none write sources = []")
    sources = found["sources"]
    if not isinstance(sources, list):
        raise ConfigError("sources is one table; write [[sources]], in double brackets")
    return sources


def _alone(path: Path, sentence: str) -> ExceptionGroup[ConfigError]:
    return ExceptionGroup(f"{path} is wrong", [ConfigError(f"{path}: {sentence}")])
