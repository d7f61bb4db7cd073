"""Exports of recordings: tables agree with the index, report every loss, and are either complete or absent."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq  # type: ignore[import-untyped]  # pyarrow has no types
import pytest

from export_cases import (
    RECORDING,
    SIZE,
    cleared,
    column,
    history,
    note,
    payload,
    pub,
    removed,
    stored,
    table,
    tokens_of,
    write,
)
from kvevents.errors import ConfigError, RecordingError, UsageError
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvevents.export import (
    DEFAULT_EXPORT_LIMITS,
    TABLES,
    ExportLimits,
    ExportProgress,
    Query,
    QueryResult,
    export,
    find_query,
    run_query,
)
from kvevents.index import PrefixIndex, block_keys
from kvevents.recording import live_batches, recorded_endpoints
from kvevents.stream import RawBatch
from tools.docs_reference import UNKEYED_REASONS

DTYPES = {"int32": "int32", "int64": "int64", "uint64": "uint64", "double": "double", "string": "string", "bool": "bool"}


def export_one_worker(
    tmp_path: Path, *batches: list[Any], tokens: bool = False, limits: ExportLimits = DEFAULT_EXPORT_LIMITS
) -> Path:
    """Export one worker whose batches have these events, at 101 s, 102 s, and so on; return the folder of the tables."""
    timed_batches = [(101.0 + number, events) for number, events in enumerate(batches)]
    path = history(tmp_path / "run.jsonl", {"a": timed_batches})
    return export([path], tmp_path / "out", tokens=tokens, limits=limits).folder


# --- contents of the tables


def test_blocks_resident_at_the_end_equal_those_of_the_index(tmp_path: Path) -> None:
    """Hashes, keys, tiers and groups are equal for every recorded run of a real engine."""
    index, expected = PrefixIndex(), set()
    for run, endpoint in recorded_endpoints(RECORDING):
        for batch in live_batches(RECORDING, run, endpoint):
            index.apply(RawBatch(run, 0, 0, batch.seq, False, batch.payload))
        expected |= {(run, block.hash, block.key, block.tier, block.group) for block in index.blocks(run)}
    folder = export([RECORDING], tmp_path / "out").folder
    names = dict(column(folder, "workers", "worker", "source"))
    residencies = [row for row in table(folder, "lifetimes") if row["ended"] == "end"]
    assert {
        (names[row["worker"]], row["block_hash"], row["block_key"], row["tier"], row["kv_group"]) for row in residencies
    } == expected
    assert len(residencies) == len(expected) > 20


def test_depths_and_keys_follow_the_chain(tmp_path: Path) -> None:
    """They follow parents across events whatever the hashes are; a block of an unknown parent has neither."""
    folder = export_one_worker(tmp_path, [stored([9, 8], [1, 2])], [stored([7], [3], 8), stored([6], [4], 12345)])
    keys = block_keys(tokens_of(1, 2, 3), SIZE)
    assert column(folder, "events", "block_hash", "parent_hash", "block_key", "depth", "unkeyed") == [
        (9, None, keys[0], 1, None),
        (8, 9, keys[1], 2, None),
        (7, 8, keys[2], 3, None),
        (6, 12345, None, None, "parent-unknown"),
    ]


def test_a_parent_of_0_is_the_root_unless_a_block_has_that_hash(tmp_path: Path) -> None:
    folder = export_one_worker(tmp_path, [stored([9], [1], 0), stored([0], [2]), stored([8], [3], 0)])
    keys = [*block_keys(tokens_of(1), SIZE), *block_keys(tokens_of(2, 3), SIZE)]
    assert column(folder, "events", "block_key", "depth") == [(keys[0], 1), (keys[1], 1), (keys[2], 2)]


def test_each_kind_of_event_has_its_rows(tmp_path: Path) -> None:
    folder = export_one_worker(
        tmp_path,
        [stored([1], [1], group_idx=0), stored([1], [1], group_idx=0), removed(1, 5), stored([], [])],
        [removed(1), cleared()],
    )
    assert column(folder, "events", "seq", "position", "block", "step", "happened_at", "kind", "block_hash", "held") == [
        (0, 0, 0, 0, 101.0, "stored", 1, False),
        (0, 1, 0, 1, 101.0, "stored", 1, True),
        (0, 2, 0, 2, 101.0, "removed", 1, True),
        (0, 2, 1, 3, 101.0, "removed", 5, False),
        (0, 3, 0, 4, 101.0, "stored", None, False),
        (1, 0, 0, 5, 102.0, "removed", 1, True),
        (1, 1, 0, 6, 102.0, "cleared", None, False),
    ]
    (residency,) = table(folder, "lifetimes")
    assert (residency["copies"], residency["stored_step"], residency["ended"], residency["ended_step"]) == (2, 0, "removed", 5)
    assert column(folder, "workers", "unknown_removals") == [1]


def test_a_move_to_another_tier_is_the_same_block(tmp_path: Path) -> None:
    """Engines announce a copy on another tier with its hash alone."""
    offload = BlockStored([2], None, [], 0, medium="CPU")
    folder = export_one_worker(tmp_path, [stored([1, 2], [1, 2], medium="GPU"), offload, removed(2, medium="GPU")])
    keys = block_keys(tokens_of(1, 2), SIZE)
    assert column(folder, "lifetimes", "block_key", "depth", "tokens", "tier", "medium", "ended")[0] == (
        keys[1],
        2,
        4,
        "gpu",
        "GPU",
        "removed",
    )
    assert (keys[1], 2, 4, "cpu", "CPU", "end") in column(
        folder, "lifetimes", "block_key", "depth", "tokens", "tier", "medium", "ended"
    )


@pytest.mark.parametrize(("medium", "end"), [("CPU", "end"), ("ALL", "cleared")])
def test_a_clear_of_one_tier_leaves_the_others(medium: str, end: str, tmp_path: Path) -> None:
    """A clear of a tier that the stream never used clears everything."""
    clear = AllBlocksCleared(unknown_fields={"medium": medium})
    folder = export_one_worker(tmp_path, [stored([1], [1]), stored([1], [1], medium="CPU"), clear])
    assert sorted(column(folder, "lifetimes", "tier", "ended")) == [("cpu", "cleared"), ("gpu", end)]


def test_a_block_redacted_by_a_relay_has_the_key_of_its_event(tmp_path: Path) -> None:
    """The index has the same key. Parent and depth of such blocks are unknown."""
    redacted = BlockStored([9, 8], None, [], SIZE, block_keys=[91, 92])
    folder = export_one_worker(tmp_path, [redacted, stored([7], [3], 8)])
    index = PrefixIndex()
    index.apply(RawBatch("a", 0, 0, 0, False, payload([redacted, stored([7], [3], 8)])))
    assert column(folder, "events", "block_hash", "parent_hash", "block_key", "depth", "unkeyed") == [
        (9, None, 91, None, None),
        (8, None, 92, None, None),
        (7, 8, index._key_of("a", 0, None, 7), None, None),
    ]


def test_batches_without_a_timestamp_have_the_time_of_the_recorder(tmp_path: Path) -> None:
    frames = [pub(0, payload([stored([1], [1])], 0.0), t=55.0), pub(1, payload([removed(1)], 0.0), t=None)]
    folder = export([write(tmp_path / "run.jsonl", frames)], tmp_path / "out").folder
    assert column(folder, "batches", "ts", "recorded_at") == [(None, 55.0), (None, None)]
    assert column(folder, "lifetimes", "stored_at", "ended_at") == [(55.0, None)]


def test_residencies_end_with_the_recording_only_for_workers_that_were_followed_to_its_end(tmp_path: Path) -> None:
    """`kvevents record` notes the streams that it follows; for runs without notes, a residency ends with the last batch."""
    body = payload([stored([1], [1])], 5.0)
    late = payload([stored([2], [2])], 50.0)
    frames = [note("p/0/incarnation0", "p", 0), pub(0, body, "p/0/incarnation0"), pub(0, body, "b"), pub(0, late, "c")]
    folder = export([write(tmp_path / "run.jsonl", frames)], tmp_path / "out").folder
    names = dict(column(folder, "workers", "worker", "source"))
    ends = column(folder, "lifetimes", "worker", "ended_at")
    assert {names[worker]: at for worker, at in ends} == {"p": 50.0, "b": 5.0, "c": 50.0}


def test_several_recordings_are_one_data_set(tmp_path: Path) -> None:
    """Workers of equal names in different files are different workers; files of equal names are numbered."""
    (tmp_path / "other").mkdir()
    for path in (tmp_path / "run.jsonl", tmp_path / "other" / "run.jsonl"):
        history(path, {"a": [(1.0, [stored([1], [1])])]})
    done = export([tmp_path / "run.jsonl", tmp_path / "other" / "run.jsonl"], tmp_path / "out")
    assert column(done.folder, "workers", "worker", "recording", "source") == [(0, "run.jsonl", "a"), (1, "run.jsonl (2)", "a")]
    assert column(done.folder, "lifetimes", "worker", "block_hash") == [(0, 1), (1, 1)]


# --- keys


@pytest.mark.parametrize(
    ("reason", "event"),
    [
        ("other-group", stored([1], [1], kv_cache_spec_kind="mamba")),
        ("no-tokens", BlockStored([1], None, [], 0)),
        ("length-mismatch", BlockStored([1], None, [1, 2, 3], 4)),
        ("bad-token", BlockStored([1], None, [1, -2, 3, 4], 4)),
        ("parent-unknown", stored([1], [1], 5)),
        ("parent-unkeyed", stored([1], [1], 3)),
    ],
)
def test_a_block_without_a_key_has_a_reason(reason: str, event: BlockStored, tmp_path: Path) -> None:
    """Block 3, the parent in one of the cases, is a root whose tokens are unknown."""
    folder = export_one_worker(tmp_path, [BlockStored([3], None, [-1] * SIZE, SIZE), event])
    assert column(folder, "events", "block_hash", "block_key", "unkeyed")[-1] == (event.block_hashes[0], None, reason)
    assert reason in UNKEYED_REASONS


def test_an_extra_key_of_unknown_meaning_is_part_of_the_block_key(tmp_path: Path) -> None:
    """Keys equal those of the index: blocks with equal extra keys, such as the digest of an image, have equal keys."""
    events = [stored([number], [1], extra_keys=[(digest,)]) for number, digest in enumerate((b"one", b"one", b"other"))]
    index = PrefixIndex()
    index.apply(RawBatch("a", 0, 0, 0, False, payload(events)))
    found = column(export_one_worker(tmp_path, events), "events", "block_key")
    assert found == [index._key_of("a", 0, None, number) for number in range(3)]
    assert found[0] == found[1] != found[2]


def test_salts_are_exported_as_digests_that_differ_between_exports(tmp_path: Path) -> None:
    """Equal salts have equal digests, also for child blocks; the salt itself is in none of the files."""
    events = [
        stored([1, 2], [1, 2], cache_salt="tenant-7"),
        stored([3], [3], 2),
        stored([4], [4], cache_salt="x"),
        stored([5], [5]),
    ]
    path = history(tmp_path / "run.jsonl", {"a": [(1.0, events)]})
    digests = [column(export([path], tmp_path / name).folder, "events", "salt") for name in ("one", "two")]
    first, second, third, fourth, none = digests[0]
    assert first == second == third != fourth
    assert none is None
    assert not set(digests[0]) & set(digests[1]) - {None}
    assert not any(b"tenant-7" in file.read_bytes() for file in (tmp_path / "one").iterdir())


# --- optional columns, and messages -------------------------------------------------------------------------------------------


def test_the_schemas_of_the_files_equal_the_reference(tmp_path: Path) -> None:
    """The reference is generated from `TABLES`; the files have exactly these columns, in this order."""
    folder = export_one_worker(tmp_path, [stored([1], [1])])
    for each in TABLES:
        schema = pq.read_schema(folder / each.file)
        assert [(field.name, str(field.type)) for field in schema] == [(name, DTYPES[kind]) for name, kind, *_ in each.columns]
        assert all(meaning for _, _, meaning, _ in each.columns)


def test_token_ids_are_exported_only_on_request(tmp_path: Path) -> None:
    secret = 123_456_789
    event = BlockStored([1, 2], None, [1, 2, 3, secret, 5, 6, 7, 8], 4)
    path = history(tmp_path / "run.jsonl", {"a": [(1.0, [event, removed(1)])]})
    without, with_tokens = export([path], tmp_path / "out").folder, export([path], tmp_path / "with", tokens=True).folder
    assert "token_ids" not in pq.read_schema(without / "events.parquet").names
    assert not any(secret in row.values() for each in TABLES for row in table(without, each.name))
    assert column(with_tokens, "events", "token_ids") == [[1, 2, 3, secret], [5, 6, 7, 8], None]


def test_rejected_payloads_and_events_are_counted_by_reason(tmp_path: Path) -> None:
    """A payload that is not a batch is skipped; the valid events of a batch with an invalid one are exported."""
    bad = msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved", "block_hashes": [1]}, {"type": "What"}]])
    done = export([write(tmp_path / "run.jsonl", [pub(0, b"\xc1junk"), pub(1, bad)])], tmp_path / "out")
    assert column(done.folder, "batches", "events", "rejected", "reject_reasons") == [
        (0, 1, "not-a-batch"),
        (1, 1, "unknown-tag"),
    ]
    assert done.reject_reasons == {"not-a-batch": 1, "unknown-tag": 1}
    assert done.counts["rejected"] == 2


def test_numbers_outside_the_range_of_a_column_are_null(tmp_path: Path) -> None:
    event = BlockStored([1], None, tokens_of(1), SIZE, group_idx=(1 << 64) - 1)
    frames = [pub(0, payload([event]))]
    assert column(export([write(tmp_path / "run.jsonl", frames)], tmp_path / "out").folder, "events", "kv_group") == [None]


def test_a_truncated_recording_is_exported_to_its_last_complete_line_and_reported(tmp_path: Path) -> None:
    path = history(tmp_path / "run.jsonl", {"a": [(1.0, [stored([1], [1])]), (2.0, [removed(1)])]})
    path.write_bytes(path.read_bytes()[:-20])
    done = export([path], tmp_path / "out")
    assert done.rows["batches"] == 1
    assert [text for text in done.truncated if "line 2: the last line is incomplete" in text]


def test_limits_bound_row_groups_and_resident_blocks(tmp_path: Path) -> None:
    events = [[stored([number], [number])] for number in range(1, 21)]
    folder = export_one_worker(tmp_path, *events, limits=ExportLimits(rows=6, resident_blocks=15))
    file = pq.ParquetFile(folder / "events.parquet")
    assert [file.metadata.row_group(each).num_rows for each in range(file.num_row_groups)] == [6, 6, 6, 2]
    assert column(folder, "workers", "dropped") == [5]
    assert Counter(column(folder, "lifetimes", "ended")) == {"dropped": 5, "end": 15}
    assert column(folder, "lifetimes", "block_hash")[:5] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["rows", "resident_blocks"])
def test_limits_must_be_above_zero(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is 0; it must be at least 1"):
        ExportLimits(**{name: 0})


def test_progress_is_reported_after_each_batch(tmp_path: Path) -> None:
    reported: list[ExportProgress] = []
    path = history(tmp_path / "run.jsonl", {"a": [(1.0, [stored([1, 2], [1, 2])]), (2.0, [removed(1)])]})
    export([path], tmp_path / "out", progress=reported.append)
    assert reported == [ExportProgress("run.jsonl", 1, 2), ExportProgress("run.jsonl", 2, 3)]


# --- complete or absent


def test_an_existing_export_is_replaced_only_with_force(tmp_path: Path) -> None:
    folder = export_one_worker(tmp_path, [stored([1], [1])])
    with pytest.raises(UsageError, match=r"out already contains workers.parquet, .*: choose another folder, or pass --force"):
        export([RECORDING], folder)
    assert column(folder, "workers", "source") == ["a"]
    export([RECORDING], folder, force=True)
    assert len(column(folder, "workers", "source")) == 2


@pytest.mark.parametrize("has_older_export", [False, True])
def test_a_damaged_recording_leaves_no_partial_export(has_older_export: bool, tmp_path: Path) -> None:
    """An older export that was to be replaced is unchanged."""
    folder = export_one_worker(tmp_path, [stored([1], [1])]) if has_older_export else tmp_path / "out"
    (tmp_path / "bad.jsonl").write_text("what\n")
    with pytest.raises(RecordingError, match=r"bad.jsonl, line 1"):
        export([RECORDING, tmp_path / "bad.jsonl"], folder, force=True)
    if has_older_export:
        assert column(folder, "workers", "source") == ["a"]
        assert {file.name for file in folder.iterdir()} == {each.file for each in TABLES}
    else:
        assert not folder.exists()


def test_an_interrupt_leaves_no_partial_export(tmp_path: Path) -> None:
    def interrupt(_: ExportProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export([RECORDING], tmp_path / "out", progress=interrupt)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("each", [each.name for each in TABLES])
def test_a_full_disk_is_reported_and_leaves_no_partial_export(each: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / f"{each}.parquet.partial").symlink_to("/dev/full")
    with pytest.raises(RecordingError, match=r"parquet.partial: No space left on device; free some space, or choose another"):
        export([RECORDING], tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(("folder", "message"), [("no/out", "does not exist"), ("file", "cannot create .*file: File exists")])
def test_a_folder_that_cannot_be_created_is_reported(folder: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=message):
        export([RECORDING], tmp_path / folder)


# --- queries


def test_sql_of_the_user_is_run(tmp_path: Path) -> None:
    folder = export_one_worker(tmp_path, [stored([1], [1])])
    (tmp_path / "mine.sql").write_text("-- How many?\nSELECT count(*) AS events FROM events")
    query = find_query(str(tmp_path / "mine.sql"))
    assert query.question == "How many?"
    assert run_query(folder, query) == QueryResult(("events",), [(1,)])


def test_a_folder_with_special_characters_can_be_queried(tmp_path: Path) -> None:
    path = history(tmp_path / "run.jsonl", {"a": [(1.0, [stored([1], [1])])]})
    folder = export([path], tmp_path / "it's [all] *?").folder
    assert run_query(folder, Query("q", "SELECT count(*) FROM events")).rows == [(1,)]


def test_invalid_queries_and_folders_raise_an_error(tmp_path: Path) -> None:
    folder = export_one_worker(tmp_path, [stored([1], [1])])
    with pytest.raises(ConfigError, match=r"unknown query 'hits'; .*expected block-lifetime, .*, hit-depth, or a file"):
        find_query("hits")
    with pytest.raises(ConfigError, match=r"cannot read .*none.sql: No such file"):
        find_query(str(tmp_path / "none.sql"))
    with pytest.raises(ConfigError, match=r"the query q failed: .*syntax error"):
        run_query(folder, Query("q", "SELEC"))
    assert run_query(folder, Query("q", "-- nothing")) == QueryResult((), [])
    with pytest.raises(ConfigError, match=r"does not contain an export: workers.parquet"):
        run_query(tmp_path, Query("q", "SELECT 1"))
    (folder / "events.parquet").write_bytes(b"what")
    with pytest.raises(RecordingError, match=r"cannot read .*; export again"):
        run_query(folder, Query("q", "SELECT 1"))


@pytest.mark.parametrize("package", ["duckdb", "pyarrow"])
def test_a_missing_package_is_reported_with_the_extra_to_install(package: str) -> None:
    run = "from kvevents.cli import main; sys.exit(main(['export', '--list-queries']))"
    code = f"import sys; sys.modules[{package!r}] = None; {run}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "install kvevents[export]" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_removal_without_blocks_has_a_row(tmp_path: Path) -> None:
    folder = export_one_worker(tmp_path, [BlockRemoved([])])
    assert column(folder, "events", "kind", "block_hash") == [("removed", None)]
