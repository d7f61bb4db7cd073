"""CURVE keys: their Z85 text, their files, and the `Curve` setting that sets them on a socket.

A key pair has two files in ZeroMQ's certificate format, which czmq and pyzmq also read and write: `NAME.key` has the public
key, for other hosts; `NAME.key_secret` has both keys and stays secret. Keys are written in Z85: 40 characters for 32 bytes. The
alphabet contains `#`, so a key is quoted in a file. `kvevents.zeromq.zap` has the lists of keys that may connect. This module
imports zmq only to decode a key.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from kvevents.errors import ConfigError
from kvevents.settings import FilePath, PublicKey, Secret

__all__ = ["Curve", "KeyPair"]

PUBLIC_SUFFIX: Final = ".key"
SECRET_SUFFIX: Final = ".key_secret"  # noqa: S105 - the suffix of a file name, not a secret
KEY_CHARACTERS: Final = 40
MAX_FILE_BYTES: Final = 1 << 20
"""Maximum size of a file of keys: ten thousand certificates of about a hundred bytes each."""

_OTHERS_MODE: Final = stat.S_IROTH | stat.S_IWOTH
_GROUP_OR_OTHERS_MODE: Final = _OTHERS_MODE | stat.S_IRGRP | stat.S_IWGRP


class KeyPair(NamedTuple):
    """A public key and its secret key, in Z85."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"<KeyPair {self.public!r}>"


def z85_decode(text: str) -> bytes | None:
    """Return the 32 bytes of a key in Z85; None if the text is not a key."""
    from zmq.utils import z85  # noqa: PLC0415 - settings are read in processes without zmq

    if len(text) != KEY_CHARACTERS or not text.isascii():
        return None
    try:
        return z85.decode(text.encode())
    except (KeyError, struct.error):  # the text has a character outside Z85, or a group above 32 bits
        return None


# --- key files ---------------------------------------------------------------------------------------------------------------


def read_pair(path: Path) -> KeyPair:
    """Return the keys of a `.key_secret` file.

    Raises `ConfigError` if the file cannot be read, holds no pair, or can be read or changed by others. If the file belongs to
    this user, only this user may have access; if not, as for a mounted secret, its group may also have access.
    """
    text, status = _read_file(path)
    public, secret = (next(_values_of(text, name), "") for name in ("public-key", "secret-key"))
    if z85_decode(public) is None or z85_decode(secret) is None:
        raise ConfigError(f"{path} holds no pair of CURVE keys; `kvevents keys NAME` creates NAME{SECRET_SUFFIX}")
    forbidden_mode = _GROUP_OR_OTHERS_MODE if status.st_uid == os.geteuid() else _OTHERS_MODE
    if status.st_mode & forbidden_mode:
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(f"{path} holds a secret key and others may read or change it (mode {mode:04o}): chmod 600 {path}")
    return KeyPair(public, secret)


def read_public_keys(path: Path) -> list[str]:
    """Return the public keys of a file with one or more certificates.

    Raises `ConfigError` if the file cannot be read or holds no public key.
    """
    keys = list(_values_of(_read_file(path)[0], "public-key"))
    if not keys:
        raise ConfigError(f'{path} holds no public key; expected a line such as public-key = "..."')
    for key in keys:
        if z85_decode(key) is None:
            raise ConfigError(f"{path}: {key!r} is not a public key; expected {KEY_CHARACTERS} characters of Z85")
    return keys


def write_pair(base: Path, pair: KeyPair, comment: str, *, replace: bool) -> tuple[Path, Path]:
    """Write `BASE.key` and `BASE.key_secret`; return both paths, the public one first.

    `comment` is a line of both files. Raises `ConfigError` if a file exists and `replace` is False, or if writing fails.
    """
    public, secret = (base.with_name(base.name + suffix) for suffix in (PUBLIC_SUFFIX, SECRET_SUFFIX))
    for path in (public, secret):
        if path.exists() and not replace:
            raise ConfigError(f"{path} exists, and a replaced key is lost; choose another name, or give --force to replace it")
    # The secret key is written first, because a public key is useless without it.
    _write_file(secret, _PAIR_FILE_TEXT.format(comment=comment, name=base.name, pair=pair), 0o600, replace=replace)
    _write_file(public, _PUBLIC_FILE_TEXT.format(comment=comment, name=base.name, pair=pair), 0o644, replace=replace)
    return public, secret


_PUBLIC_FILE_TEXT: Final = """\
#   CURVE public key of {name}. {comment}
#   Give it to the operators of peers of {name}, in a way that protects it from being exchanged.

metadata
    name = "{name}"
curve
    public-key = "{pair.public}"
"""
_PAIR_FILE_TEXT: Final = """\
#   CURVE secret key of {name}. {comment}
#   Every user that can read this file can impersonate {name}: keep it where it is used, and readable by its owner only.

metadata
    name = "{name}"
curve
    public-key = "{pair.public}"
    secret-key = "{pair.secret}"
"""


def _values_of(text: str, name: str) -> Iterator[str]:
    for line in text.splitlines():
        key, separator, value = line.strip().partition("=")
        if separator and key.rstrip() == name:
            yield value.strip(" \t'\"")


def _read_file(path: Path) -> tuple[str, os.stat_result]:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read keys from {path}: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is not a key file: it is longer than {MAX_FILE_BYTES} bytes")
    return content.decode(errors="replace"), status


def _write_file(path: Path, text: str, mode: int, *, replace: bool) -> None:
    """Write the file completely or not at all. The file's mode never allows more than `mode`, not even during the write."""
    target = path.with_name(path.name + ".new") if replace else path
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | (os.O_TRUNC if replace else os.O_EXCL)
    try:
        descriptor = os.open(target, flags, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                os.fchmod(file.fileno(), mode)
                file.write(text)
            if replace:
                target.replace(path)
        except BaseException:
            target.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


# --- the setting -------------------------------------------------------------------------------------------------------------


class Curve(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """CURVE keys of one end, each 40 characters of Z85 (`zmq.curve_keypair`).

    If `server_key` is None, this end is the CURVE server, whose public key the peers must know. If it is set, this end is a
    client of the server that owns that key. Either end can bind.

    Raises `ConfigError` if a key is invalid, or if `key_file` cannot be read or can be read by others.
    """

    public_key: str = ""
    """Public key of this end, if `key_file` is not set."""
    secret_key: Secret = ""
    """Secret key of this end, if `key_file` is not set."""
    server_key: PublicKey | None = None
    """Public key of the other end, or a file with it (NAME.key), if the other end is the CURVE server, as engines are."""
    key_file: FilePath | None = None
    """File with both CURVE keys of this end: a NAME.key_secret of `kvevents keys`."""
    allowed: tuple[str, ...] | FilePath | None = None
    """Public keys that may connect, or a file or folder with them, if this end is the CURVE server. The files are read again
    for new connections, at most once a second. None allows every client that knows this end's public key."""

    def __post_init__(self) -> None:
        if self.key_file is not None:
            path = Path(self.key_file)
            pair = read_pair(path)
            for name, value in (("public_key", pair.public), ("secret_key", pair.secret)):
                if getattr(self, name) not in {"", value}:
                    raise ConfigError(f"curve.{name} differs from that in curve.key_file ({path}); remove curve.{name}")
                msgspec.structs.force_setattr(self, name, value)
        elif not self.public_key and not self.secret_key:
            raise ConfigError("curve needs key_file, a file made by `kvevents keys NAME`, or public_key and secret_key")
        file = self.server_key if self.server_key is not None and z85_decode(self.server_key) is None else ""
        if file and os.path.isfile(file):  # noqa: PTH113 - `Path.is_file` can raise an error
            if len(server_keys := read_public_keys(Path(file))) > 1:
                sentence = f"{file} holds {len(server_keys)} keys; expected the one key of the other end"
                raise ConfigError(f"curve.server_key: {sentence}")
            msgspec.structs.force_setattr(self, "server_key", server_keys[0])
        keys = [("public_key", self.public_key), ("secret_key", self.secret_key), ("server_key", self.server_key)]
        if isinstance(self.allowed, tuple):
            keys += [("allowed", key) for key in self.allowed]
        for name, key in keys:
            if key is not None and z85_decode(key) is None:
                sentence = f"must be {KEY_CHARACTERS} characters of Z85, as `kvevents keys` or zmq.curve_keypair() makes"
                raise ConfigError(f"curve.{name} {sentence}{', or a file that exists' if name == 'server_key' else ''}")
        from zmq import curve_public  # noqa: PLC0415 - settings are read in processes without zmq

        if curve_public(self.secret_key.encode()).decode() != self.public_key:
            raise ConfigError("curve.public_key does not belong to curve.secret_key; `kvevents keys NAME` creates a pair")
        if self.allowed is not None and self.server_key is not None:
            raise ConfigError("curve.allowed is for a CURVE server; with curve.server_key this end is a client; remove one")

    def apply(self, socket: Any) -> None:
        """Set the keys on a ZeroMQ socket; call this before the socket binds or connects.

        If `allowed` is set, clients can connect only while a handler of `kvevents.zeromq.zap.secure_sockets` answers for them.
        """
        if self.server_key is None:
            socket.curve_server = True
        else:
            socket.curve_serverkey = self.server_key.encode()
        socket.curve_publickey = self.public_key.encode()
        socket.curve_secretkey = self.secret_key.encode()
        if self.allowed is not None:
            socket.zap_domain = b"kvevents"
            socket.zap_enforce_domain = True

    def __repr__(self) -> str:
        role = "server" if self.server_key is None else f"client of {self.server_key!r}"
        return f"<Curve {role}, public key {self.public_key!r}>"

    def __rich_repr__(self) -> Any:
        """Yield the fields to show, which exclude the secret key."""
        yield "public_key", self.public_key
        yield "server_key", self.server_key
        yield "allowed", self.allowed
