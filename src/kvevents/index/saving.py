"""Snapshots in files; their format is in native/index/src/snapshot.rs."""

from __future__ import annotations

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

from kvevents._native import NativeIndex
from kvevents.errors import SnapshotError, UsageError

File: TypeAlias = str | os.PathLike[str] | BinaryIO
Workers: TypeAlias = list[tuple[str, int]]

_PIECE: Final = 1 << 20
"""Bytes for which a file object is asked, or which it is given, at once."""
_UNREADABLE: Final = "nothing was restored, and the index is as it was: restore another file, or start from the streams alone"
_UNABSORBED: Final = "nothing of it was absorbed, and the index is as it was: mend that, or absorb another file"
_HALF: Final = "what is in it now is no snapshot: take it again, elsewhere"
_UNWRITTEN: Final = (
    "a file that was there before is as it was: free some space or name another place, and take the snapshot again"
)


def snapshot(index: NativeIndex, file: File, workers: Workers | None) -> None:
    """See `PrefixIndex.snapshot`."""
    if isinstance(file, str | os.PathLike):
        with _told("write", os.fspath(file), _UNWRITTEN):
            _write(index, Path(os.path.realpath(file)), workers)
        return
    # A stream of the index is locked while it is written out, which must not take as long as somebody's file object likes.
    with _told("write", _name_of(file), _HALF), TemporaryDirectory(prefix="kvevents-") as folder:
        spool = Path(folder, "snapshot")
        with _told("write", f"{_name_of(file)} by way of {spool}", _UNWRITTEN):
            index._snapshot(spool, workers)  # noqa: SLF001 - this module is a part of the index
        with spool.open("rb") as saved:
            while piece := saved.read(_PIECE):
                _put(file, piece)


def restore(index: NativeIndex, file: File) -> None:
    """See `PrefixIndex.restore`."""
    with _told("read", _name_of(file), _UNREADABLE), _reading(file) as read:
        index._restore(read)  # noqa: SLF001 - as above


def absorb(index: NativeIndex, file: File) -> Workers:
    """See `PrefixIndex.absorb`."""
    with _told("absorb", _name_of(file), _UNABSORBED), _reading(file) as read:
        return index._absorb(read)  # noqa: SLF001 - as above


@contextmanager
def _reading(file: File) -> Iterator[Callable[[int], bytes]]:
    if not isinstance(file, str | os.PathLike):
        yield _reader(file)
        return
    with Path(file).open("rb", buffering=0) as opened:
        yield opened.read


@contextmanager
def _told(verb: str, name: str, advice: str) -> Iterator[None]:
    try:
        yield
    except SnapshotError:
        raise
    except (OSError, ValueError, EOFError, zlib.error) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        raise SnapshotError(f"cannot {verb} the snapshot {name}: {reason}; {advice}") from error


def _write(index: NativeIndex, path: Path, workers: Workers | None) -> None:
    """Write to a file beside `path`, which takes its place when all of it is on the disk."""
    existed = path.exists()
    if existed and not path.is_file():
        raise ValueError("it is there, and no regular file")
    fresh = path.with_name(f".kvevents-{secrets.token_hex(8)}.tmp")
    try:
        index._snapshot(fresh, workers)  # noqa: SLF001 - as above
        if existed:
            shutil.copymode(path, fresh)
        fresh.replace(path)
    except BaseException:
        with suppress(OSError):
            fresh.unlink()
        raise
    _settle(path.parent)


def _settle(folder: Path) -> None:
    """Have the disk keep the new name too, where folders can be asked to."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def _name_of(file: File) -> str:
    if isinstance(file, str | os.PathLike):
        return os.fspath(file)
    name = getattr(file, "name", None)
    return name if isinstance(name, str) else repr(file)


def _put(file: BinaryIO, piece: bytes) -> None:
    """A raw file may take less than it is given, and then says how much."""
    left = memoryview(piece)
    while left:
        try:
            count = cast("int | None", file.write(left))
        except TypeError as error:
            raise UsageError(f"a snapshot is bytes, which {_name_of(file)} does not take; open it in binary mode") from error
        if count is None and isinstance(cast("object", file), io.RawIOBase):
            raise BlockingIOError("it would have to be waited for")
        left = left[len(left) if count is None else count :]


def _reader(file: BinaryIO) -> Callable[[int], bytes]:
    def read(size: int) -> bytes:
        piece: object = file.read(size)
        if piece is None:
            raise BlockingIOError("it would have to be waited for")
        if isinstance(piece, str):
            raise UsageError(f"a snapshot is bytes, but {_name_of(file)} reads text; open it in binary mode")
        return bytes(cast("bytes", piece))

    return read
