"""State that outlives the process: a snapshot of the index, the checkpoint of each stream, and clients' registrations.

A state folder contains `current`, which names one generation, and the two files of that generation. A generation is written
completely before `current` names it, so a crash at any moment leaves the previous generation. Only the owner can read the
files: a snapshot can contain token ids, and registrations contain salts.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from kvevents.errors import ConfigError, SnapshotError, reason_of
from kvevents.index import PrefixIndex
from kvevents.index.snapshot_file import replacing
from kvevents.service.fleet.member import HTTP_ORIGIN
from kvevents.service.fleet.registration import Registration, StreamKey
from kvevents.stream import Checkpoint

log = logging.getLogger(__name__)

_CURRENT_FILE: Final = "current"
_REGISTRATIONS_FILE: Final = "registered.json"
_INDEX_FILE: Final = "index-{}.snapshot"
_STREAMS_FILE: Final = "streams-{}.msgpack"
_UNREADABLE_GENERATION: Final = "unreadable"
_CHECKPOINTS_DECODER: Final = msgspec.msgpack.Decoder(list[Checkpoint])


class SavedRegistration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The registration of an engine that a client has registered or drained, with the lease and the draining."""

    registration: Registration
    lease_seconds: int | None = None
    """Length of the registration's lease, which begins again when the service starts; None without a lease."""
    is_draining: bool = False
    origin: str = HTTP_ORIGIN


_REGISTRATIONS_DECODER: Final = msgspec.json.Decoder(list[SavedRegistration])


class StateStore:
    """The state folder of a service, locked by this process. Only one process at a time can open the folder.

    Any thread may call any method. Only one thread at a time writes a snapshot, and only one writes registrations. Methods
    raise `SnapshotError` if a file cannot be read or written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._descriptor = _lock_folder(folder / "lock")
        except OSError as error:
            raise ConfigError(f"state_dir {folder} cannot be used: {error.strerror or error}") from error
        self._save_lock = threading.Lock()
        self._registrations_lock = threading.Lock()
        for path in folder.glob(".*.tmp"):  # Incomplete files of a killed process.
            with suppress(OSError):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    def save(self, index: PrefixIndex, read_checkpoints: Callable[[], list[Checkpoint]]) -> float:
        """Write a generation of the index and of the streams' checkpoints. If another thread is writing one, wait for it.

        Return the Unix time at which the write began. The generation contains all blocks that the index had at that time.
        """
        generation = secrets.token_hex(8)
        streams = self.folder / _STREAMS_FILE.format(generation)
        with self._save_lock:
            began = time.time()
            try:
                former = {(checkpoint.source, checkpoint.rank): checkpoint for checkpoint in read_checkpoints()}
                _write_index(index, self.folder / _INDEX_FILE.format(generation))
                # The streams have advanced during the write of the snapshot. After a restart, the checkpoints deliver batches
                # again that the snapshot already contains. The index recognises these batches by their sequence numbers.
                points = {(point.source, point.rank): point for point in read_checkpoints()}
                checkpoints = [former[key].merge_later(point) for key, point in points.items() if key in former]
                _write_file(streams, msgspec.msgpack.encode(checkpoints))
                _write_file(self.folder / _CURRENT_FILE, generation.encode())
            except TimeoutError:
                raise
            except OSError as error:
                raise SnapshotError(f"cannot write to {self.folder}: {error.strerror or error}") from error
            finally:
                self._remove_old_generations()
            return began

    def restore(self, index: PrefixIndex) -> dict[StreamKey, Checkpoint]:
        """Load the current generation into the index and return its checkpoints; empty if no generation exists.

        Raises `SnapshotError` if the generation cannot be read.
        """
        generation = self._read_generation()
        if generation is None:
            return {}
        try:
            checkpoints = _CHECKPOINTS_DECODER.decode((self.folder / _STREAMS_FILE.format(generation)).read_bytes())
            index.restore(self.folder / _INDEX_FILE.format(generation))
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            self._rename_unreadable(generation)
            raise SnapshotError(f"snapshot {generation} in {self.folder} cannot be used: {reason_of(error)}") from error
        return {(checkpoint.source, checkpoint.rank): checkpoint for checkpoint in checkpoints}

    def save_registrations(self, registrations: Callable[[], list[SavedRegistration]]) -> None:
        """Write the registrations of clients. `registrations` is called just before the write, and returns them."""
        try:
            with self._registrations_lock:
                _write_file(self.folder / _REGISTRATIONS_FILE, msgspec.json.encode(registrations()))
        except OSError as error:
            raise SnapshotError(f"cannot write to {self.folder}: {error.strerror or error}") from error

    def load_registrations(self) -> list[SavedRegistration]:
        """Read the registrations of clients. Raises `SnapshotError` if the file cannot be read."""
        path = self.folder / _REGISTRATIONS_FILE
        if not path.exists():
            return []
        try:
            return _REGISTRATIONS_DECODER.decode(path.read_bytes())
        except (OSError, msgspec.MsgspecError, ConfigError) as error:
            with suppress(OSError):
                path.rename(path.with_suffix(".bad"))
            raise SnapshotError(f"{path} cannot be read and was renamed to {path.stem}.bad: {error}") from error

    def close(self) -> None:
        """Finish the writes in progress, and release the folder for another process."""
        with self._save_lock, self._registrations_lock:
            os.close(self._descriptor)

    def _read_generation(self) -> str | None:
        try:
            text = (self.folder / _CURRENT_FILE).read_text(encoding="ascii").strip()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError):
            return _UNREADABLE_GENERATION
        return text if text.isalnum() else _UNREADABLE_GENERATION

    def _rename_unreadable(self, generation: str) -> None:
        for pattern in (_INDEX_FILE, _STREAMS_FILE):
            path = self.folder / pattern.format(generation)
            with suppress(OSError):
                path.rename(path.with_name(f"bad-{path.name}"))
        with suppress(OSError):
            (self.folder / _CURRENT_FILE).unlink()

    def _remove_old_generations(self) -> None:
        current = self._read_generation()
        if current == _UNREADABLE_GENERATION:  # Remove nothing, because each generation might be the current one.
            return
        for pattern in (_INDEX_FILE, _STREAMS_FILE):
            for path in self.folder.glob(pattern.format("*")):
                if path.name != pattern.format(current):
                    with suppress(OSError):
                        path.unlink()


def _write_index(index: PrefixIndex, path: Path) -> None:
    """Write a snapshot that only its owner can read. The file is in a private folder until its mode is set."""
    with tempfile.TemporaryDirectory(prefix=".", suffix=".tmp", dir=path.parent) as private:
        temporary = Path(private) / path.name
        index.snapshot(temporary)
        temporary.chmod(0o600)
        temporary.replace(path)


def _write_file(path: Path, content: bytes) -> None:
    """Replace a file atomically, and flush it to the disk."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _lock_folder(path: Path) -> int:
    import fcntl  # noqa: PLC0415 - exists only on Unix, and only services with state need it

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(f"state_dir {path.parent} is in use by another process") from error
    return descriptor
