"""Snapshots: a restored index behaves like the original, with any content and any concurrent events."""

from __future__ import annotations

import errno
import io
import os
import struct
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from index_cases import (
    Adversary,
    Choices,
    Feed,
    namespace,
    removal,
    store,
    tokens_by_level,
    tokens_of,
)
from kvevents.errors import SnapshotError, UsageError
from kvevents.index import IndexLimits, PrefixIndex
from snapshot_cases import add_frames, apply_step, make_full_snapshot, remove_frames, restore_snapshot, state, take_snapshot

# --- content ------------------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(st.binary(min_size=200, max_size=1500), st.integers(0, 60))
def test_after_any_history_a_restored_index_behaves_like_the_original(data: bytes, moment: int) -> None:
    choices = Choices(data)
    adversary = Adversary(choices)
    index, twin = PrefixIndex(limits=IndexLimits(max_orphans=6)), PrefixIndex(limits=IndexLimits(max_orphans=6))
    for at, step in enumerate(adversary.steps()):
        if at == moment:
            restore_snapshot(take_snapshot(index), twin)
            assert state(twin) == state(index)
        apply_step(index, step)
        if at >= moment:
            apply_step(twin, step)
            assert state(twin) == state(index)
            tokens, scope = adversary.prompt()
            assert tokens_by_level(twin.match(tokens, namespace(scope))) == tokens_by_level(
                index.match(tokens, namespace(scope))
            )


def test_many_blocks_under_one_hash_keep_their_order() -> None:
    """A removal removes the oldest block, and a store after the hash continues the newest one, before and after a restore."""
    index = PrefixIndex()
    feed = Feed(index)
    for at in range(300):
        feed(store([at + 1], [at, at], 2), store([999], [7, 7], 2, at + 1))
    feed(store([999], [7, 7], 2, 17))  # it becomes the newest, with two copies
    twin = restore_snapshot(take_snapshot(index))
    for each_index in (index, twin):
        other = Feed(each_index)
        other.seq = feed.seq
        other(store([1000], [8, 8], 2, 999))
        assert tokens_of(each_index, [16, 16, 7, 7, 8, 8]) == 6
        other(*[removal(999) for _ in range(298)])
        assert [tokens_of(each_index, [at, at, 7, 7]) for at in (0, 15, 16, 297, 298, 299)] == [2, 2, 4, 2, 2, 4]
    assert state(index) == state(twin)


def test_streams_with_different_hashes_share_their_blocks_after_a_restore() -> None:
    index = PrefixIndex()
    for worker in range(8):
        tokens = [token for at in range(2000) for token in (at, worker // 4)]
        Feed(index, f"w{worker}")(store([worker * 10_000 + at for at in range(2000)], tokens, 2))
    twin = restore_snapshot(take_snapshot(index))
    assert state(twin) == state(index)
    assert twin.stats().unique_blocks == index.stats().unique_blocks == 4000


def test_a_snapshot_takes_about_16_bytes_for_a_block() -> None:
    index = PrefixIndex()
    Feed(index)(store(range(5000), range(10_000), 2))
    assert len(take_snapshot(index)) < 5000 * 16 + 500


def test_the_memory_limit_holds_after_restoring() -> None:
    index = PrefixIndex()
    for worker in range(4):
        Feed(index, f"w{worker}")(store(range(20_000), [worker, *range(39_999)], 2))
    limit = index.stats().bytes // 2
    small = restore_snapshot(take_snapshot(index), PrefixIndex(memory_limit=limit))
    stats = small.stats()
    assert stats.bytes <= limit
    assert 0 < stats.blocks == 80_000 - stats.evicted < 80_000


# --- corrupt snapshots --------------------------------------------------------------------------------------------------------


def test_a_corrupt_snapshot_with_valid_checksums_is_refused_or_gives_a_working_index() -> None:
    """Each byte of the items is changed, removed, and made the last one in turn."""
    whole = make_full_snapshot()
    content, head = remove_frames(whole), whole[:12]
    assert add_frames(content, head) == whole
    refused = 0
    for at in range(len(content)):
        before, after = content[:at], content[at + 1 :]
        others = {content[at] ^ 1, content[at] ^ 0x80, 0, 255} - {content[at]}
        for changed in [before, before + after, *(before + bytes([other]) + after for other in others)]:
            try:
                used = restore_snapshot(add_frames(changed, head), PrefixIndex(memory_limit=1 << 20))
            except SnapshotError:
                refused += 1
                continue
            used.match([1, 2, 3])
            for info in used.workers():
                used.remove_worker(info.source, info.rank)
            assert used.stats().unique_blocks == 0
    assert refused > 2 * len(content)


@pytest.mark.parametrize("size", [2**32, 2**40, 2**63])
def test_a_length_beyond_the_content_is_refused_without_allocating_it(size: int) -> None:
    head = make_full_snapshot()[:12]
    count = bytearray()
    while size:
        count.append(size & 0x7F | (0x80 if size > 0x7F else 0))
        size >>= 7
    with pytest.raises(SnapshotError):
        restore_snapshot(add_frames(b"\x02" + bytes(count) + b"abc", head))
    with pytest.raises(SnapshotError):
        restore_snapshot(head + struct.pack("<IQ", 0xFFFF_FFFF, 0))


# --- files --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def index() -> PrefixIndex:
    index = PrefixIndex()
    Feed(index)(store([1, 2], [1, 1, 2, 2], 2))
    return index


def test_a_snapshot_that_fails_leaves_the_old_file_and_nothing_else(index: PrefixIndex, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "pipe").touch()
    (tmp_path / "pipe").unlink()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe", "missing/file", "pipe/file", "\0", "x" * 300):
        with pytest.raises(SnapshotError, match="cannot write the snapshot"):
            index.snapshot(tmp_path / name)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder", "pipe"]


@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL, errno.EBADF, errno.ENOTSUP])
def test_a_folder_that_cannot_be_synced_is_an_error_where_folders_can_be(
    index: PrefixIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The snapshot exists, but might be lost if the machine fails. Some file systems cannot sync folders."""
    fault = pytest.raises(SnapshotError, match=f"{tmp_path} cannot be synced: Input/output error")

    def fail(_descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with fault if number == errno.EIO else nullcontext():
        index.snapshot(tmp_path / "snapshot")
    assert [path.name for path in tmp_path.iterdir()] == ["snapshot"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
def test_a_full_disk_raises(index: PrefixIndex) -> None:
    with Path("/dev/full").open("wb", buffering=0) as full, pytest.raises(SnapshotError, match=r"/dev/full: No space left"):
        index.snapshot(full)


def test_a_rewritten_file_keeps_its_mode_and_a_symbolic_link_stays_a_link(index: PrefixIndex, tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    index.snapshot(file)
    file.chmod(0o640)
    link.symlink_to(file)
    Feed(index, "b")(store([1], [1, 1], 2))
    index.snapshot(str(link))
    assert link.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o640
    twin = PrefixIndex()
    twin.restore(file)
    assert len(twin.workers()) == 2


class ShortTransferFile(io.RawIOBase):
    """A raw file that writes and reads a few bytes at a time."""

    def __init__(self) -> None:
        self.content = bytearray()

    def write(self, piece: Any) -> int:
        self.content += bytes(piece[:7])
        return min(len(piece), 7)

    def read(self, size: int = -1) -> bytes:
        piece = bytes(self.content[: min(size, 5)])
        del self.content[:5]
        return piece


def test_file_objects_may_write_and_read_less_than_requested(index: PrefixIndex) -> None:
    file = cast("BinaryIO", ShortTransferFile())
    index.snapshot(file)
    twin = PrefixIndex()
    twin.restore(file)
    assert state(twin) == state(index)


def test_a_text_file_raises_a_usage_error(index: PrefixIndex) -> None:
    with pytest.raises(UsageError, match="binary"):
        index.snapshot(cast("BinaryIO", io.StringIO()))
    with pytest.raises(UsageError, match="binary"):
        index.restore(cast("BinaryIO", io.StringIO("text")))


def test_a_closed_file_raises(index: PrefixIndex, tmp_path: Path) -> None:
    file = (tmp_path / "file").open("w+b")
    file.close()
    with pytest.raises(SnapshotError, match="file"):
        index.snapshot(file)
    with pytest.raises(SnapshotError, match="file"):
        index.restore(file)


# --- concurrency --------------------------------------------------------------------------------------------------------------


def test_each_stream_of_a_concurrent_snapshot_has_the_state_of_its_last_number(tmp_path: Path) -> None:
    """Threads write four streams and query the index during twenty snapshots."""
    index, path, stop = PrefixIndex(), tmp_path / "file", threading.Event()
    digests: list[list[str]] = [[] for _ in range(4)]
    failures: list[BaseException] = []

    def write(at: int) -> None:
        feed = Feed(index, f"w{at}")
        try:
            while not stop.is_set() and feed.seq < 2000:
                seq, base = feed.seq, feed.seq % 50 * 20
                gone = [removal(*range(base, base + 20))] if seq >= 50 else []
                feed(*gone, store(range(base, base + 20), [at // 2, *range(seq, seq + 39)], 2))
                digests[at].append(index.digest(feed.worker))
                index.match([at // 2, *range(seq, seq + 39)])
        except BaseException as error:  # noqa: BLE001 - the thread of the test raises it
            failures.append(error)

    threads = [threading.Thread(target=write, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    while not all(digests):
        assert not failures
    snapshots = []
    for _ in range(20):
        index.snapshot(path)
        snapshots.append(path.read_bytes())
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    for content in snapshots:
        twin = restore_snapshot(content)
        for info in twin.workers():
            assert twin.digest((info.source, info.rank)) == digests[int(info.source[1:])][info.last_seq]


def test_an_index_may_be_restored_during_writes_and_queries() -> None:
    index, stop = PrefixIndex(), threading.Event()
    for at in range(4):
        Feed(index, f"w{at}")(store(range(500), [at, *range(999)], 2))
    content, failures = take_snapshot(index), []

    def work(at: int) -> None:
        feed = Feed(index, f"w{at}", incarnation=at % 2)
        feed.seq = 1
        try:
            while not stop.is_set():
                feed(store([1000 + feed.seq % 7], [5, 5], 2), removal(1000 + (feed.seq + 3) % 7))
                assert index.match([at, *range(999)]).get(f"w{at}") is not None or at % 2, (
                    "all blocks of the worker are found, or none"
                )
                list(index.blocks(f"w{at}"))
                index.stats()
        except BaseException as error:  # noqa: BLE001 - the thread of the test raises it
            failures.append(error)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        restore_snapshot(content, index)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    restore_snapshot(content, index)
    assert state(index) == state(restore_snapshot(content))
