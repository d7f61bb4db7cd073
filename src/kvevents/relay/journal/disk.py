"""What a journal asks of the operating system: a seam, so that tests can have it refuse, or end the process, anywhere."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Final

SICK: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS})
"""Of a disk that may recover; anything else that keeps a journal from being opened is for an operator to mend."""

_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_KEPT: Final = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_PRIVATE: Final = 0o600
"""Payloads are prompts."""
_sync_data: Final = getattr(os, "fdatasync", os.fsync)


class Disk:
    """Files by name, inside of an open folder. Every method raises `OSError` when it cannot do all of what it says."""

    def create(self, name: str, folder: int) -> int:
        """A new file, to be written from its beginning on."""
        return os.open(name, _NEW, _PRIVATE, dir_fd=folder)

    def open(self, name: str, folder: int) -> int:
        """A file that is written over from its beginning on, and keeps what it holds behind that; a new one if it is gone."""
        return os.open(name, _KEPT, _PRIVATE, dir_fd=folder)

    def write(self, file: int, parts: Sequence[bytes]) -> int:
        """Write all of it behind what was written before; how many bytes that are."""
        size = sum(map(len, parts))
        left = size - os.writev(file, parts)
        if left:  # a disk that fills up takes a part; what is asked then is told why
            self._finish(file, memoryview(b"".join(parts))[-left:])
        return size

    def note(self, file: int, data: bytes) -> None:
        """Have a file begin with so few bytes that one call writes them."""
        if os.pwrite(file, data, 0) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def shorten(self, file: int, size: int) -> None:
        """Have a file that is written end at `size`."""
        os.ftruncate(file, size)

    def sync(self, file: int) -> None:
        """Return when the disk has what was written, and how long the file is."""
        _sync_data(file)

    def sync_folder(self, folder: int) -> None:
        """Return when the disk has the folder's names."""
        os.fsync(folder)

    def rename(self, name: str, to: str, folder: int) -> None:
        """Give a file another name, at once."""
        os.rename(name, to, src_dir_fd=folder, dst_dir_fd=folder)

    def remove(self, name: str, folder: int) -> None:
        """Remove a file."""
        os.unlink(name, dir_fd=folder)

    def cut(self, name: str, size: int, folder: int) -> None:
        """Have a file end at `size`, on the disk."""
        file = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=folder)
        try:
            os.ftruncate(file, size)
            os.fsync(file)
        finally:
            os.close(file)

    def reserve(self, file: int, size: int) -> None:
        """Take so much room, to see whether it is there."""
        os.posix_fallocate(file, 0, size)

    def _finish(self, file: int, left: memoryview) -> None:
        while left:
            left = left[os.write(file, left) :]
