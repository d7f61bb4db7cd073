"""Snapshots of an index in files. native/index/src/snapshot.rs has the format."""

from __future__ import annotations

import errno
import io
import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, Final, TypeAlias, cast

from kvevents.errors import SnapshotError, UsageError, reason_of
from kvevents_native._native import NativeIndex

File: TypeAlias = str | os.PathLike[str] | BinaryIO
Workers: TypeAlias = list[tuple[str, int]]

_NO_SYNC_ERRNOS: Final = frozenset({errno.EACCES, errno.EBADF, errno.EINVAL, errno.ENOTSUP})
"""Error numbers for a folder that the process cannot read, or whose file system cannot sync folders."""
_PIECE_BYTES: Final = 1 << 20
"""Number of bytes that one call reads from or writes to a file object."""
_RESTORE_HINT: Final = "the index was not changed: restore another file, or start without a snapshot"
_MERGE_HINT: Final = "the index was not changed: check the file, or merge another one"
_RETRY_HINT: Final = "its content is not a valid snapshot: write the snapshot again to another place"
_WRITE_HINT: Final = "an existing file was not changed: free some space or choose another place, and write the snapshot again"


def write_snapshot(index: NativeIndex, file: File, workers: Workers | None) -> None:
    """See `PrefixIndex.snapshot`."""
    if isinstance(file, str | os.PathLike):
        with _as_snapshot_error("write", os.fspath(file), _WRITE_HINT):
            _write_file(index, Path(os.path.realpath(file)), workers)
        return
    # The index locks each stream during its writing, so the index must not wait for a slow file object.
    with _as_snapshot_error("write", _name_of(file), _RETRY_HINT), TemporaryDirectory(prefix="kvevents-") as folder:
        spool = Path(folder, "snapshot")
        with _as_snapshot_error("write", f"{_name_of(file)} by way of {spool}", _WRITE_HINT):
            index._snapshot(spool, workers)  # noqa: SLF001 - this module is part of the index
        with spool.open("rb") as spool_file:
            while piece := spool_file.read(_PIECE_BYTES):
                _write_all(file, piece)


def read_snapshot(index: NativeIndex, file: File) -> None:
    """See `PrefixIndex.restore`."""
    with _as_snapshot_error("read", _name_of(file), _RESTORE_HINT), _open_reader(file) as read_piece:
        index._restore(read_piece)  # noqa: SLF001 - this module is part of the index


def merge_snapshot(index: NativeIndex, file: File) -> Workers:
    """See `PrefixIndex.merge`."""
    with _as_snapshot_error("merge", _name_of(file), _MERGE_HINT), _open_reader(file) as read_piece:
        return index._absorb(read_piece)  # noqa: SLF001 - this module is part of the index


@contextmanager
def _open_reader(file: File) -> Iterator[Callable[[int], bytes]]:
    if isinstance(file, str | os.PathLike):
        with Path(file).open("rb", buffering=0) as opened_file:
            yield opened_file.read
        return

    def read(size: int) -> bytes:
        piece: object = file.read(size)
        if piece is None:
            raise BlockingIOError("the file object is in non-blocking mode")
        if isinstance(piece, str):
            raise UsageError(f"cannot read {_name_of(file)}: it returns text; open it in binary mode")
        return bytes(cast("bytes", piece))

    yield read


@contextmanager
def _as_snapshot_error(verb: str, name: str, advice: str) -> Iterator[None]:
    try:
        yield
    except SnapshotError:
        raise
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise SnapshotError(f"cannot {verb} the snapshot {name}: {reason_of(error)}; {advice}") from error


def _write_file(index: NativeIndex, path: Path, workers: Workers | None) -> None:
    """Write to a temporary file beside `path`, and rename the file when its content is on the disk."""
    is_replacement = path.exists()
    if is_replacement and not path.is_file():
        raise ValueError("the path exists and is not a regular file")
    with replacing(path) as temporary:
        index._snapshot(temporary, workers)  # noqa: SLF001 - this module is part of the index
        if is_replacement:
            shutil.copymode(path, temporary)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file, which replaces the file at `path` unless an exception is raised."""
    temporary = path.with_name(f".kvevents-{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Wait until the folder's entries are on the disk, if the platform can sync this folder. Raises `SnapshotError`."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC_ERRNOS:
            hint = "the new file exists, but it might be lost if the machine stops: check the disk"
            raise SnapshotError(f"the folder {folder} cannot be synced: {reason_of(error)}; {hint}") from error


def _name_of(file: File) -> str:
    if isinstance(file, str | os.PathLike):
        return os.fspath(file)
    name = getattr(file, "name", None)
    return name if isinstance(name, str) else repr(file)


def _write_all(file: BinaryIO, piece: bytes) -> None:
    """Write a whole piece. An unbuffered file can accept a part of the piece, and returns the size of that part."""
    remainder = memoryview(piece)
    while remainder:
        try:
            count = cast("int | None", file.write(remainder))
        except TypeError as error:
            raise UsageError(f"cannot write to {_name_of(file)}: it does not accept bytes; open it in binary mode") from error
        if count is None and isinstance(cast("object", file), io.RawIOBase):
            raise BlockingIOError("the file object is in non-blocking mode")
        remainder = remainder[len(remainder) if count is None else count :]
