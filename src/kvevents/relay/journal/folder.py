"""The folder of a journal: its lock, its files, and the note that they tell everything.

`lock` is held by the process that uses the folder. `whole` is there while the files hold everything that was sent. It is made
in advance and taken away when the disk refuses, since taking away works on a disk that is full. `end` tells where the newest
segment ends (see `frames`). Segments that wait to be written over are called as what a killed process leaves.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from kvevents.errors import JournalError
from kvevents.relay.journal.disk import SICK, Disk
from kvevents.relay.journal.frames import KINDS, NOTHING, Acknowledged

_LOCK: Final = "lock"
_WHOLE: Final = "whole"
END: Final = "end"
_CONTENT: Final = b"the files beside this one tell everything that was sent\n"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_NAME: Final = re.compile(rf"(\d{{16}})\.({'|'.join(KINDS.values())})")
_LEFT: Final = re.compile(r"\d{16}\.[a-z]+\.tmp|probe\.tmp")
_KINDS: Final = {name: kind for kind, name in KINDS.items()}
_TAKEN: Final = "another process uses it{}; name another folder, or end that one first"


class Kept(NamedTuple):
    """A file of a journal, by its name."""

    ordinal: int
    kind: int
    name: str
    size: int


def name_of(ordinal: int, kind: int) -> str:
    """How a file is called; names sort as ordinals do."""
    return f"{ordinal:016}.{KINDS[kind]}"


def spare_of(name: str) -> str:
    """How a file of that name is called while it waits to be written over."""
    return f"{name.partition('.')[0]}.spare.tmp"


def boot_id() -> bytes:
    """Of this run of the machine, 16 bytes; zeros where that is not known."""
    try:
        return bytes.fromhex(_BOOT_ID.read_text().strip().replace("-", ""))[:16].ljust(16, b"\0")
    except (OSError, ValueError):
        return bytes(16)


def opened(path: Path, disk: Disk) -> Folder | OSError:
    """The folder, or why the disk does not give it now. Raises `JournalError` for what an operator must mend."""
    try:
        return Folder(path, disk)
    except JournalError:
        raise
    except OSError as error:
        if error.errno in SICK:
            return error
        raise JournalError(f"no journal can be kept in {path}: {error.strerror}; name a folder that can be written") from error


class Folder:
    """One folder, locked and open: what happens to its path does not matter to what is done here.

    Raises `OSError` for what the disk refuses, `JournalError` where another process has it.
    """

    def __init__(self, path: Path, disk: Disk, *, parents: bool = True) -> None:
        self.path: Final = path
        self._disk = disk
        path.mkdir(parents=parents, exist_ok=True, mode=0o700)
        self.fd: Final = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._lock = self._locked()
        except BaseException:
            os.close(self.fd)
            raise

    def files(self) -> list[Kept]:
        """Segments and snapshots, in the order in which they were begun."""
        found = [(match[1], match[2], name) for name in self._names() if (match := _NAME.fullmatch(name))]
        kept = (Kept(int(ordinal), _KINDS[kind], name, self._size(name)) for ordinal, kind, name in found)
        return sorted(kept)

    def leftovers(self) -> list[str]:
        """Names of files that a killed process had not finished, or was to write over."""
        return [name for name in self._names() if _LEFT.fullmatch(name)]

    def read(self, name: str) -> BinaryIO:
        """Open one of the files."""
        return open(name, "rb", opener=self._opener())

    def remove(self, names: Iterable[str]) -> list[str]:
        """Remove files; those that are still there are returned."""
        left: list[str] = []
        for name in names:
            try:
                self._disk.remove(name, self.fd)
            except FileNotFoundError:
                continue
            except OSError:
                left.append(name)
        return left

    def replaced(self) -> bool:
        """Whether the path leads elsewhere by now, or nowhere."""
        try:
            there, here = self.path.stat(), os.fstat(self.fd)
        except OSError:
            return True
        return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino)

    def is_whole(self) -> bool:
        """Whether the files tell everything that was sent."""
        try:
            with self.read(_WHOLE) as file:
                return file.read() == _CONTENT
        except OSError:
            return False

    def acknowledged(self) -> Acknowledged:
        """Where the newest segment ends, as far as that is known."""
        try:
            with self.read(END) as file:
                return Acknowledged.unpack(file.read())
        except OSError:
            return NOTHING

    def make_whole(self) -> None:
        """Note that they do."""
        self._remove_whole()
        file = self._disk.create(_WHOLE, self.fd)
        try:
            self._disk.write(file, (_CONTENT,))
        finally:
            os.close(file)

    def break_off(self) -> bool:
        """Note that they do not, in whichever way the disk allows; whether it did."""
        done = self._tried(self._remove_whole) or self._tried(lambda: self._disk.cut(_WHOLE, 0, self.fd))
        self._tried(lambda: self._disk.sync_folder(self.fd))
        return done

    def close(self) -> None:
        """Let another process have it."""
        for fd in (self._lock, self.fd):
            os.close(fd)

    def _locked(self) -> int:
        fd = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(OSError):  # on a full disk: it is for the message below
                os.ftruncate(fd, 0)
                os.write(fd, str(os.getpid()).encode())
        except BlockingIOError as error:
            pid = os.read(fd, 20).decode(errors="replace")
            os.close(fd)
            raise JournalError(f"no journal can be kept in {self.path}: {_TAKEN.format(f', {pid}' if pid else '')}") from error
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _remove_whole(self) -> None:
        with suppress(FileNotFoundError):
            self._disk.remove(_WHOLE, self.fd)

    def _tried(self, attempt: Callable[[], None]) -> bool:
        try:
            attempt()
        except OSError:
            return False
        return True

    def _names(self) -> list[str]:
        return os.listdir(self.fd)  # noqa: PTH208 - of an open folder, which Path cannot

    def _size(self, name: str) -> int:
        try:
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_size
        except OSError:
            return 0

    def _opener(self) -> Callable[[str, int], int]:
        return lambda name, flags: os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self.fd)
