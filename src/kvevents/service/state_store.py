"""What outlives the process: a snapshot of the index, where each stream stood, and what clients have registered.

A state folder holds `current`, which names one generation, and that generation's two files. A generation is written completely
before `current` names it, so a crash at any moment leaves the one before. Its files are for their owner only: a snapshot can
hold token ids, and registrations hold salts.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from kvevents.errors import ConfigError, SnapshotError
from kvevents.index import PrefixIndex
from kvevents.service.registration import Key, Registration
from kvevents.stream import Checkpoint

log = logging.getLogger(__name__)

_CURRENT: Final = "current"
_REGISTERED: Final = "registered.json"
_INDEX: Final = "index-{}.snapshot"
_STREAMS: Final = "streams-{}.msgpack"
_UNREADABLE: Final = "unreadable"


_KEPT: Final = msgspec.msgpack.Decoder(list[Checkpoint])
_REGISTRATIONS: Final = msgspec.json.Decoder(list[Registration])


class StateStore:
    """One state folder, which one process at a time may use.

    Any thread may call any method: snapshots are written one after the other, and so are registrations. Methods raise
    `SnapshotError` for what the disk refuses.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._descriptor = _locked(folder / "lock")
        except OSError as error:
            raise ConfigError(f"state_dir {folder} cannot be used: {error.strerror or error}") from error
        self._saving = threading.Lock()
        self._remembering = threading.Lock()
        self._sweep()

    def save(self, index: PrefixIndex, standing: Callable[[], list[Checkpoint]]) -> None:
        """Write a generation; `standing` returns where the streams stand. Waits for a save that another thread has begun."""
        with self._saving:
            self._save(index, standing)

    def _save(self, index: PrefixIndex, standing: Callable[[], list[Checkpoint]]) -> None:
        generation = secrets.token_hex(8)
        streams = self.folder / _STREAMS.format(generation)
        try:
            before = {(each.source, each.rank): each for each in standing()}
            _write_index(index, self.folder / _INDEX.format(generation))
            # The streams went on meanwhile. What was new to the snapshot comes again, and the index knows it by its number.
            kept = [before[key].merge_later(each) for each in standing() if (key := (each.source, each.rank)) in before]
            _write(streams, msgspec.msgpack.encode(kept))
            _write(self.folder / _CURRENT, generation.encode())
        except TimeoutError:
            raise
        except OSError as error:
            raise SnapshotError(f"cannot write to {self.folder}: {error.strerror or error}") from error
        finally:
            self._tidy()

    def restore(self, index: PrefixIndex) -> dict[Key, Checkpoint]:
        """Bring back the current generation; empty where there is none. Raises `SnapshotError` for one that cannot be read."""
        generation = self._generation()
        if generation is None:
            return {}
        try:
            kept = _KEPT.decode((self.folder / _STREAMS.format(generation)).read_bytes())
            index.restore(self.folder / _INDEX.format(generation))
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            self._set_aside(generation)
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise SnapshotError(f"snapshot {generation} in {self.folder} cannot be used: {reason}") from error
        return {(each.source, each.rank): each for each in kept}

    def save_registrations(self, registrations: Callable[[], list[Registration]]) -> None:
        """Keep what clients have registered. `registrations` is called when the writer's turn comes: the newest list wins."""
        try:
            with self._remembering:
                _write(self.folder / _REGISTERED, msgspec.json.format(msgspec.json.encode(registrations())))
        except OSError as error:
            raise SnapshotError(f"cannot write to {self.folder}: {error.strerror or error}") from error

    def load_registrations(self) -> list[Registration]:
        """What clients had registered."""
        path = self.folder / _REGISTERED
        if not path.exists():
            return []
        try:
            return _REGISTRATIONS.decode(path.read_bytes())
        except (OSError, msgspec.MsgspecError, ConfigError) as error:
            with suppress(OSError):
                path.rename(path.with_suffix(".bad"))
            raise SnapshotError(f"{path} cannot be read, and is set aside as {path.stem}.bad: {error}") from error

    def close(self) -> None:
        """Let another process use the folder, once everything that was begun is written."""
        with self._saving, self._remembering:
            os.close(self._descriptor)

    def _generation(self) -> str | None:
        try:
            text = (self.folder / _CURRENT).read_text(encoding="ascii").strip()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError):
            return _UNREADABLE
        return text if text.isalnum() else _UNREADABLE

    def _set_aside(self, generation: str) -> None:
        for pattern in (_INDEX, _STREAMS):
            path = self.folder / pattern.format(generation)
            with suppress(OSError):
                path.rename(path.with_name(f"bad-{path.name}"))
        with suppress(OSError):
            (self.folder / _CURRENT).unlink()

    def _sweep(self) -> None:
        """Remove what a process that was killed had begun to write."""
        for path in self.folder.glob(".*.tmp"):
            with suppress(OSError):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    def _tidy(self) -> None:
        current = self._generation()
        if current == _UNREADABLE:  # whichever it names, it is not to be lost
            return
        keep = {pattern.format(current) for pattern in (_INDEX, _STREAMS)}
        for pattern in (_INDEX, _STREAMS):
            for path in self.folder.glob(pattern.format("*")):
                if path.name not in keep:
                    with suppress(OSError):
                        path.unlink()


def _write_index(index: PrefixIndex, path: Path) -> None:
    """Write a snapshot that only its owner can read: until it has its mode, it is in a folder of which that is true."""
    with tempfile.TemporaryDirectory(prefix=".", suffix=".tmp", dir=path.parent) as private:
        fresh = Path(private) / path.name
        index.snapshot(fresh)
        fresh.chmod(0o600)
        fresh.replace(path)


def _write(path: Path, content: bytes) -> None:
    """Replace a file by one that is on the disk."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with fresh.open("wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        with suppress(OSError):
            fresh.unlink()
        raise
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _locked(path: Path) -> int:
    import fcntl  # noqa: PLC0415 - Unix only, as is everything that keeps state

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(f"state_dir {path.parent} is in use by another process") from error
    return descriptor
