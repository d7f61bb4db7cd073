"""What a journal asks of the operating system: one locked folder, and files in it.

`Disk` is the seam at which tests have the disk refuse, or end the process. What it cannot do it raises as `OSError`.
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

SICK: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS})
"""Errors of a disk that may recover. Any other error when the folder is opened needs an operator."""
UNKNOWN_BOOT: Final = bytes(16)
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
TEMPORARY: Final = ".tmp"
"""How the name of a file ends that is not finished."""
_LOCK: Final = "lock"
_PRIVATE: Final = 0o600
"""Payloads are prompts."""


def boot_id() -> bytes:
    """Identify this run of the machine, in 16 bytes; `UNKNOWN_BOOT` where the system does not say."""
    try:
        return bytes.fromhex(_BOOT_ID.read_text().strip().replace("-", ""))[:16].ljust(16, b"\0")
    except (OSError, ValueError):
        return UNKNOWN_BOOT


class Disk:
    """Files by name, in an open folder."""

    def create(self, name: str, folder: int) -> int:
        """Open a new, empty file for writing. A file of that name is emptied."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, _PRIVATE, dir_fd=folder)

    def open(self, name: str, folder: int) -> int:
        """Open an existing file for writing."""
        return os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)

    def write(self, file: int, parts: Sequence[bytes]) -> None:
        """Append all parts."""
        left = sum(map(len, parts)) - os.writev(file, parts)
        if left:  # a disk that fills up takes a part; asked for the rest, it says why
            rest = memoryview(b"".join(parts))[-left:]
            while rest:
                rest = rest[os.write(file, rest) :]

    def overwrite(self, file: int, at: int, data: bytes) -> None:
        """Replace a few bytes that are in the file."""
        if os.pwrite(file, data, at) != len(data):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def sync(self, file: int) -> None:
        """Return when the disk has the file."""
        os.fsync(file)

    def rename(self, name: str, to: str, folder: int) -> None:
        """Rename a file, atomically."""
        os.rename(name, to, src_dir_fd=folder, dst_dir_fd=folder)

    def remove(self, name: str, folder: int) -> None:
        """Remove a file; nothing if it is not there."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)


class Folder:
    """The folder of a journal, locked and open.

    Raises `OSError` for what the disk refuses, `JournalError` where another process has the folder.
    """

    def __init__(self, path: Path, *, parents: bool = True) -> None:
        self.path: Final = path
        path.mkdir(parents=parents, exist_ok=True, mode=0o700)
        self.fd: Final = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._lock = self._take_lock()
        except BaseException:
            os.close(self.fd)
            raise

    def names(self) -> list[str]:
        """Names of all files."""
        return os.listdir(self.fd)  # noqa: PTH208 - of an open folder, which Path cannot

    def read(self, name: str) -> BinaryIO:
        """Open a file for reading."""
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        return open(name, "rb", opener=lambda name, mode: os.open(name, mode | flags, dir_fd=self.fd))

    def is_gone(self) -> bool:
        """Whether the path leads to another folder by now, or to none."""
        try:
            there, here = self.path.stat(), os.fstat(self.fd)
        except OSError:
            return True
        return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino)

    def close(self) -> None:
        """Let another process have it."""
        for fd in (self._lock, self.fd):
            os.close(fd)

    def _take_lock(self) -> int:
        fd = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _PRIVATE, dir_fd=self.fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(OSError):  # on a full disk: the number is for the message below
                os.ftruncate(fd, 0)
                os.write(fd, str(os.getpid()).encode())
        except BlockingIOError as error:
            pid = os.read(fd, 20).decode(errors="replace")
            os.close(fd)
            raise JournalError(
                f"no journal can be kept in {self.path}: another process uses it{f', {pid}' if pid else ''}; "
                "name another folder, or end that one first"
            ) from error
        except BaseException:
            os.close(fd)
            raise
        return fd


def open_folder(path: Path) -> Folder | OSError:
    """The folder, or why the disk does not give it now. Raises `JournalError` for what an operator must change."""
    try:
        return Folder(path)
    except JournalError:
        raise
    except OSError as error:
        if error.errno in SICK:
            return error
        raise JournalError(f"no journal can be kept in {path}: {error.strerror}; name a folder that can be written") from error
