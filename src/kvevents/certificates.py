"""CURVE keys in files: ZeroMQ's certificates, as czmq and pyzmq write them.

A key pair is two files: `NAME.key` with the public key, to be given away, and `NAME.key_secret` with both, to be kept. Keys are
written in Z85: 40 characters for 32 bytes. The alphabet has `#` in it, so a key stands in quotes behind its name. This module
imports no zmq.
"""

from __future__ import annotations

import os
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from kvevents.errors import ConfigError

PUBLIC_SUFFIX: Final = ".key"
SECRET_SUFFIX: Final = ".key_secret"  # noqa: S105 - the end of a file name
KEY_CHARACTERS: Final = 40
MAX_FILE_BYTES: Final = 1 << 20
"""A certificate has some hundred bytes; a list of them in one file may be as long as ten thousand."""
MAX_ALLOWED_KEYS: Final = 4_096
"""Keys of one allow-list. Each newcomer causes a look at all files of a folder, some 10 us for each; one file may hold all."""
UNSETTLED_SECONDS: Final = 1.0
"""A file that changed so lately may change again within the same tick of the file system's clock, unseen."""

_Z85: Final = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_VALUE_OF: Final = {character: value for value, character in enumerate(_Z85)}
_FOREIGN_SECRET: Final = stat.S_IROTH | stat.S_IWOTH
_OWN_SECRET: Final = _FOREIGN_SECRET | stat.S_IRGRP | stat.S_IWGRP


class KeyPair(NamedTuple):
    """A public key and the secret one that belongs to it, in Z85."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"<KeyPair {self.public!r}>"


def key_bytes(text: str) -> bytes | None:
    """The 32 bytes of a key in Z85; None when it is none."""
    if len(text) != KEY_CHARACTERS or not _VALUE_OF.keys() >= set(text):
        return None
    words: list[int] = []
    for start in range(0, KEY_CHARACTERS, 5):
        word = 0
        for character in text[start : start + 5]:
            word = word * 85 + _VALUE_OF[character]
        words.append(word)
    return struct.pack(">8I", *words) if max(words) < 1 << 32 else None


def key_text(key: bytes) -> str:
    """32 bytes of a key in Z85."""
    characters: list[str] = []
    for word in struct.unpack(">8I", key):
        characters += [_Z85[word // 85**place % 85] for place in (4, 3, 2, 1, 0)]
    return "".join(characters)


# --- one file --------------------------------------------------------------------------------------------------------------


def read_pair(path: Path) -> KeyPair:
    """The keys of a `.key_secret` file.

    Raises `ConfigError` when it cannot be read, holds no pair, or can be read by others. Its owner must be alone with it; of a
    file that belongs to somebody else, such as a mounted secret, the group may be how this process is let in.
    """
    text, found = _read(path)
    public, secret = (next(_named(text, name), "") for name in ("public-key", "secret-key"))
    if key_bytes(public) is None or key_bytes(secret) is None:
        raise ConfigError(f"{path} holds no pair of CURVE keys; `kvevents keys NAME` makes NAME{SECRET_SUFFIX}")
    _refuse_readable(path, found)
    return KeyPair(public, secret)


def read_public_keys(path: Path) -> list[str]:
    """The public keys of a file: of one certificate, or of several written one after the other.

    Raises `ConfigError` when it cannot be read or holds none.
    """
    keys = list(_named(_read(path)[0], "public-key"))
    if not keys:
        raise ConfigError(f'{path} holds no public key; it should have a line such as public-key = "..."')
    for key in keys:
        if key_bytes(key) is None:
            raise ConfigError(f"{path}: {key!r} is not a public key, which has {KEY_CHARACTERS} characters of Z85")
    return keys


def write_pair(base: Path, pair: KeyPair, comment: str, *, replace: bool) -> tuple[Path, Path]:
    """Write `BASE.key` and `BASE.key_secret`; returns both paths, the public one first.

    `comment` is one line for people. Raises `ConfigError` when either exists, unless `replace`, and when it cannot be written.
    """
    public, secret = (base.with_name(base.name + suffix) for suffix in (PUBLIC_SUFFIX, SECRET_SUFFIX))
    for path in (public, secret):
        if path.exists() and not replace:
            raise ConfigError(f"{path} exists; a key that is replaced is gone. Name another, or give --force to replace it")
    # The secret first: a public key without it would let in nobody.
    _write(secret, _PAIR.format(comment=comment, name=base.name, pair=pair), 0o600, replace=replace)
    _write(public, _PUBLIC.format(comment=comment, name=base.name, pair=pair), 0o644, replace=replace)
    return public, secret


_PUBLIC: Final = """\
#   CURVE public key of {name}. {comment}
#   To be given to those who let {name} in, or who connect to it, by a way on which nobody can exchange it.

metadata
    name = "{name}"
curve
    public-key = "{pair.public}"
"""
_PAIR: Final = """\
#   CURVE secret key of {name}. {comment}
#   Whoever can read this file can pretend to be {name}: keep it where it is used, and readable for nobody else.

metadata
    name = "{name}"
curve
    public-key = "{pair.public}"
    secret-key = "{pair.secret}"
"""


def _named(text: str, name: str) -> Iterator[str]:
    for line in text.splitlines():
        found, separator, value = line.strip().partition("=")
        if separator and found.rstrip() == name:
            yield value.strip(" \t'\"")


def _read(path: Path) -> tuple[str, os.stat_result]:
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read keys from {path}: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is longer than {MAX_FILE_BYTES} bytes; it is no file of keys")
    return content.decode(errors="replace"), found


def _refuse_readable(path: Path, found: os.stat_result) -> None:
    others = _OWN_SECRET if found.st_uid == os.geteuid() else _FOREIGN_SECRET
    if found.st_mode & others:
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(f"{path} holds a secret key and others may read or change it (mode {mode:04o}): chmod 600 {path}")


def _write(path: Path, text: str, mode: int, *, replace: bool) -> None:
    """Whole or not at all, and never open to others, not even while it is written."""
    target = path.with_name(path.name + ".new") if replace else path
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | (os.O_TRUNC if replace else os.O_EXCL)
    try:
        with os.fdopen(os.open(target, flags, 0o600), "w") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
        if replace:
            target.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


# --- who may connect -------------------------------------------------------------------------------------------------------


class AllowList:
    """The public keys that may connect: given ones, or those of a file, or of all `*.key` files of a folder.

    Files are looked at again whenever `refresh` is called, and read again when they have changed.
    """

    def __init__(self, allowed: tuple[str, ...] | str) -> None:
        self.keys: frozenset[bytes] = frozenset()
        self.faults: list[str] = []
        """What of the files cannot be used, as of the last look; their keys do not count."""
        self._path: Path | None = Path(allowed) if isinstance(allowed, str) else None
        self._seen: object = None
        if isinstance(allowed, tuple):
            self.keys = frozenset(found for key in allowed if (found := key_bytes(key)) is not None)

    def refresh(self) -> None:
        """Look at the files, if there are any. Does not raise: what cannot be read lets nobody in, and is in `faults`."""
        if self._path is None:
            return
        try:
            paths = _key_files(self._path)
            seen, settled = _signature(paths)
        except (OSError, ConfigError) as error:
            text = f"{self._path}: {error.strerror}" if isinstance(error, OSError) else str(error)
            self.keys, self.faults, self._seen = frozenset(), [text], None
            return
        if seen != self._seen:
            self._load(paths)
            self._seen = seen if settled else None

    def _load(self, paths: list[Path]) -> None:
        keys: set[bytes] = set()
        self.faults = []
        for path in paths:
            try:
                keys |= {found for key in read_public_keys(path) if (found := key_bytes(key)) is not None}
            except ConfigError as error:
                self.faults.append(str(error))
        if len(keys) > MAX_ALLOWED_KEYS:
            self.faults.append(f"{self._path} holds {len(keys)} keys, more than {MAX_ALLOWED_KEYS}; nobody is let in")
            keys.clear()
        self.keys = frozenset(keys)


def _key_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    with os.scandir(path) as entries:
        names = sorted(entry.name for entry in entries if _is_certificate(entry.name))
    if len(names) > MAX_ALLOWED_KEYS:
        raise ConfigError(f"{path} holds {len(names)} files of keys, more than {MAX_ALLOWED_KEYS}; nobody is let in")
    return [path / name for name in names]


def _is_certificate(name: str) -> bool:
    return name.endswith(PUBLIC_SUFFIX) and not name.startswith(".")


def _signature(paths: list[Path]) -> tuple[list[tuple[str, int, int, int, int]], bool]:
    """What changes when a file does, and whether all of them have been as they are for a while."""
    found = [(path.name, path.stat()) for path in paths]
    newest = max((max(each.st_mtime, each.st_ctime) for _, each in found), default=0.0)
    parts = [(name, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for name, each in found]
    return parts, time.time() - newest > UNSETTLED_SECONDS
