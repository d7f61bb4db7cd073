"""The operating system's part of a journal: one locked folder, and the files in it.

Tests replace `Disk` to make the disk fail, or to kill the process. Failures are raised as `OSError`.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

from kvevents.errors import JournalError

UNKNOWN_BOOT_ID: Final = bytes(16)
TEMPORARY_SUFFIX: Final = ".tmp"
"""Suffix of an incomplete file."""
_PRIVATE_FILE_MODE: Final = 0o600
"""Mode of the files: only the owner can read payloads, because they contain prompts."""


class Disk:
    """Operations on the files of an open folder, each given the file's name."""

    boot_id_file = Path("/proc/sys/kernel/random/boot_id")

    def boot_id(self) -> bytes:
        """Return 16 bytes that identify this boot of the machine; `UNKNOWN_BOOT_ID` if the system has no boot id."""
        try:
            return bytes.fromhex(self.boot_id_file.read_text().strip().replace("-", ""))[:16].ljust(16, b"\0")
        except (OSError, ValueError):
            return UNKNOWN_BOOT_ID

    def create(self, name: str, folder: int) -> int:
        """Open an empty file for writing. An existing file of that name is emptied."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, _PRIVATE_FILE_MODE, dir_fd=folder)

    def open(self, name: str, folder: int) -> int:
        """Open an existing file for writing."""
        return os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)

    def write(self, file: int, parts: Sequence[bytes]) -> None:
        """Append all parts to the file."""
        left = sum(map(len, parts)) - os.writev(file, parts)
        if left:  # a nearly full disk writes a part of the data, and fails at the next call
            rest = memoryview(b"".join(parts))[-left:]
            while rest:
                rest = rest[os.write(file, rest) :]

    def overwrite(self, file: int, offset: int, data: bytes) -> None:
        """Replace a few bytes in the middle of the file."""
        if os.pwrite(file, data, offset) != len(data):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def sync(self, file: int) -> None:
        """Wait until the file is on the disk."""
        os.fsync(file)

    def rename(self, name: str, new_name: str, folder: int) -> None:
        """Rename a file atomically."""
        os.rename(name, new_name, src_dir_fd=folder, dst_dir_fd=folder)

    def remove(self, name: str, folder: int) -> None:
        """Remove a file if it exists."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)


class Folder:
    """The folder of a journal, locked and open.

    Raises `OSError` if the disk fails, and `JournalError` if another process uses the folder.
    """

    def __init__(self, path: Path, *, parents: bool = True) -> None:
        self.path: Final = path
        path.mkdir(parents=parents, exist_ok=True, mode=0o700)
        self.fd: Final = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._lock = self._acquire_lock()
        except BaseException:
            os.close(self.fd)
            raise

    def names(self) -> list[str]:
        """Return the names of all files."""
        return os.listdir(self.fd)  # noqa: PTH208 - Path cannot list an open folder

    def read(self, name: str) -> BinaryIO:
        """Open a file for reading."""
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        return open(name, "rb", opener=lambda name, mode: os.open(name, mode | flags, dir_fd=self.fd))

    def is_gone(self) -> bool:
        """Return whether the path no longer leads to this folder."""
        try:
            there, here = self.path.stat(), os.fstat(self.fd)
        except OSError:
            return True
        return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino)

    def close(self) -> None:
        """Close and unlock the folder."""
        for fd in (self._lock, self.fd):
            os.close(fd)

    def _acquire_lock(self) -> int:
        fd = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _PRIVATE_FILE_MODE, dir_fd=self.fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(OSError):  # a full disk cannot store the id, which only the message below needs
                os.ftruncate(fd, 0)
                os.write(fd, str(os.getpid()).encode())
        except BlockingIOError as error:
            pid = os.read(fd, 20).decode(errors="replace")
            os.close(fd)
            raise JournalError(
                f"cannot open the journal folder {self.path}: another process uses it{f' (pid {pid})' if pid else ''}; "
                "choose another folder, or stop that process first"
            ) from error
        except BaseException:
            os.close(fd)
            raise
        return fd
