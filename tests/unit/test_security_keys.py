"""Key files in ZeroMQ's format, their permissions, and allow-lists that follow their files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zmq.auth import create_certificates, load_certificate
from zmq.utils import z85

from certificate_pairs import make_pair, write_new_pair
from kvevents.errors import ConfigError
from kvevents.zeromq import zap
from kvevents.zeromq.keys import (
    MAX_FILE_BYTES,
    Curve,
    KeyPair,
    read_pair,
    read_public_keys,
    write_pair,
    z85_decode,
)
from kvevents.zeromq.zap import KeyAllowList, SecuritySettings

ALWAYS = SecuritySettings(reread_interval=0.0)
"""Reads the files at each connection."""


@given(st.binary(min_size=32, max_size=32))
def test_z85_is_decoded_as_by_zeromq(key: bytes) -> None:
    assert z85_decode(z85.encode(key).decode()) == key


@pytest.mark.parametrize("text", ["", "x" * 39, "x" * 41, "x" * 39 + '"', "x" * 39 + "é", "#" * 40])
def test_text_that_is_not_a_key_is_not_decoded(text: str) -> None:
    """The text is too short, too long, has other characters, or exceeds 32 bytes."""
    assert z85_decode(text) is None


def test_files_are_compatible_with_pyzmq(tmp_path: Path) -> None:
    """pyzmq reads our files, and we read its files if their mode is secret."""
    pair = make_pair()
    public, secret = write_pair(tmp_path / "ours", pair, "A test's.", replace=False)
    assert load_certificate(public) == (pair.public.encode(), None)
    assert load_certificate(secret) == (pair.public.encode(), pair.secret.encode())
    assert (read_public_keys(public), read_pair(secret)) == ([pair.public], pair)
    theirs, hidden = map(Path, create_certificates(tmp_path, "theirs"))
    hidden.chmod(0o600)
    known, secret_key = (key.decode() for key in load_certificate(hidden) if key)
    assert (read_public_keys(theirs), read_pair(hidden)) == ([known], KeyPair(known, secret_key))
    assert pair.secret not in f"{pair!r} {pair}"


@pytest.mark.parametrize("replace", [False, True])
def test_a_write_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replace: bool) -> None:
    """The next attempt writes it."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fchmod", fail)
        with pytest.raises(ConfigError, match="No space left"):
            write_pair(tmp_path / "e", make_pair(), "A test's.", replace=replace)
    assert not list(tmp_path.iterdir())
    write_pair(tmp_path / "e", make_pair(), "A test's.", replace=replace)


def test_file_modes_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    """All users may read the public file, and only its owner the secret one, even if it replaces a readable file."""
    (tmp_path / "e.key_secret").touch(0o666)
    before = os.umask(0)
    try:
        public, secret = write_pair(tmp_path / "e", make_pair(), "", replace=True)
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (public, secret)] == [0o644, 0o600]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e.key", "e.key_secret"]


@pytest.mark.parametrize("existing", ["e.key", "e.key_secret"])
def test_existing_files_are_not_replaced_by_default(tmp_path: Path, existing: str) -> None:
    (tmp_path / existing).write_text("precious")
    with pytest.raises(ConfigError, match=r"exists.*--force"):
        write_pair(tmp_path / "e", make_pair(), "", replace=False)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]


def test_a_folder_that_cannot_be_written_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*No such file"):
        write_pair(tmp_path / "no" / "e", make_pair(), "", replace=False)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644])
def test_a_secret_that_others_can_read_is_rejected(tmp_path: Path, mode: int) -> None:
    """The error says what to do, in every place where the file is named."""
    write_new_pair(tmp_path, "e")
    path = tmp_path / "e.key_secret"
    path.chmod(mode)
    for read in (read_pair, lambda each: Curve(key_file=str(each))):
        with pytest.raises(ConfigError, match=f"mode {mode:04o}.*chmod 600 {path}"):
            read(path)


def test_keys_of_two_pairs_are_rejected() -> None:
    """With them every handshake fails, and neither end can say why."""
    with pytest.raises(ConfigError, match=r"curve\.public_key does not belong to curve\.secret_key"):
        Curve(public_key=make_pair().public, secret_key=make_pair().secret)


def test_a_secret_of_another_owner_may_be_readable_by_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret that is mounted into a container belongs to root, and is readable through its group."""
    pair = write_new_pair(tmp_path, "e")
    path = tmp_path / "e.key_secret"
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    path.chmod(0o440)
    assert read_pair(path) == pair
    path.chmod(0o444)
    with pytest.raises(ConfigError, match="mode 0444"):
        read_pair(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no pair"),
        ('public-key = "short"\nsecret-key = "short"\n', "no pair"),
        (f'public-key = "{"k" * 40}"\n', "no pair"),
        ("x" * (MAX_FILE_BYTES + 1), "longer than"),
    ],
)
def test_files_without_a_key_pair_are_rejected(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "e.key_secret"
    path.touch(0o600)
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_pair(path)
    with pytest.raises(ConfigError, match=r"cannot read keys from .*No such file"):
        read_pair(tmp_path / "none")


def test_files_without_a_public_key_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "e.key"
    path.write_text("# public-key = 'x'\n")
    with pytest.raises(ConfigError, match="holds no public key"):
        read_public_keys(path)
    path.write_text("public-key = 'x'\n")
    with pytest.raises(ConfigError, match="'x' is not a public key"):
        read_public_keys(path)


def test_an_allow_list_may_be_given_in_code() -> None:
    pair = make_pair()
    allowed = KeyAllowList((pair.public,))
    allowed.refresh()
    assert allowed.keys == {z85_decode(pair.public)}
    assert not allowed.errors


def test_changes_of_a_folder_are_detected(tmp_path: Path) -> None:
    """Files are added, changed and removed; hidden files, secret files and other files are ignored."""
    one, other = write_new_pair(tmp_path, "one"), make_pair()
    write_new_pair(tmp_path, ".hidden")
    (tmp_path / "README").write_text("public-key = nothing")
    allowed = KeyAllowList(str(tmp_path), ALWAYS)
    allowed.refresh()
    assert allowed.keys == {z85_decode(one.public)}
    path = tmp_path / "one.key"
    path.write_text(path.read_text().replace(one.public, other.public))
    allowed.refresh()
    assert allowed.keys == {z85_decode(other.public)}
    two = write_new_pair(tmp_path, "two")
    allowed.refresh()
    assert allowed.keys == {z85_decode(other.public), z85_decode(two.public)}
    path.unlink()
    allowed.refresh()
    assert allowed.keys == {z85_decode(two.public)}
    assert not allowed.errors


def test_a_file_may_have_several_keys(tmp_path: Path) -> None:
    pairs = [write_new_pair(tmp_path, name) for name in ("a", "b")]
    path = tmp_path / "all"
    path.write_text("".join((tmp_path / f"{name}.key").read_text() for name in ("a", "b")))
    allowed = KeyAllowList(str(path))
    allowed.refresh()
    assert allowed.keys == {z85_decode(pair.public) for pair in pairs}


def test_a_folder_is_read_at_most_once_per_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So unknown clients cannot cause a read per connection."""
    write_new_pair(tmp_path, "one")
    reads: list[Path] = []

    def read(path: Path) -> list[str]:
        reads.append(path)
        return []

    monkeypatch.setattr(zap, "read_public_keys", read)
    for settings, count in ((SecuritySettings(reread_interval=60.0), 1), (ALWAYS, 3)):
        allowed = KeyAllowList(str(tmp_path), settings)
        for _ in range(3):
            allowed.refresh()
        assert reads == [tmp_path / "one.key"] * count
        reads.clear()


def test_unreadable_files_allow_no_key(tmp_path: Path) -> None:
    """An invalid file loses only its own key; a folder that is missing or has too many files loses all keys."""
    folder = tmp_path / "clients"
    folder.mkdir()
    one = write_new_pair(folder, "one")
    (folder / "torn.key").write_text("public-key")
    allowed = KeyAllowList(str(folder), ALWAYS)
    allowed.refresh()
    assert allowed.keys == {z85_decode(one.public)}
    assert len(allowed.errors) == 1
    assert "torn.key" in allowed.errors[0]
    full = KeyAllowList(str(folder), SecuritySettings(max_allowed_keys=1))
    full.refresh()
    assert (full.keys, "2 files of keys, more than 1" in full.errors[0]) == (frozenset(), True)
    (folder / "torn.key").unlink()
    allowed.refresh()
    assert allowed.keys == {z85_decode(one.public)}
    assert not allowed.errors
    folder.rename(tmp_path / "away")
    allowed.refresh()
    assert (allowed.keys, "No such file" in allowed.errors[0]) == (frozenset(), True)


def test_the_server_key_may_be_in_a_file(tmp_path: Path) -> None:
    """Settings and the command line accept the key itself or the path of `NAME.key`."""
    own, other = make_pair(), make_pair()
    for name, pair in (("own", own), ("other", other)):
        write_pair(tmp_path / name, pair, "A test's.", replace=True)
    own_file = str(tmp_path / "own.key_secret")
    for given_key in (str(tmp_path / "other.key"), other.public):
        assert Curve(key_file=own_file, server_key=given_key).server_key == other.public
    (tmp_path / "two.key").write_text((tmp_path / "own.key").read_text() + (tmp_path / "other.key").read_text())
    for wrong, words in (("two.key", "holds 2 keys"), ("own.key_secret/x", "40 characters"), ("x\0" * 200, "40 characters")):
        with pytest.raises(ConfigError, match=words):
            Curve(key_file=own_file, server_key=str(tmp_path / wrong))
