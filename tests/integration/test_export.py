"""Exports of recordings: tables agree with the index, lose nothing silently, and are complete or absent."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq  # type: ignore[import-untyped]  # it has no types
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from kvevents.export.residency import UNKEYED, ReuseDistances
from kvevents.index import PrefixIndex, block_keys
from kvevents.recording import live_batches, recorded_endpoints
from kvevents.stream import RawBatch

DTYPES = {"int32": "int32", "int64": "int64", "uint64": "uint64", "double": "double", "string": "string", "bool": "bool"}


def one(tmp_path: Path, *batches: list[Any], tokens: bool = False, limits: ExportLimits = DEFAULT_EXPORT_LIMITS) -> Path:
    """Tables of one worker whose batches have these events, at 101 s, 102 s, and so on."""
    made = [(101.0 + number, events) for number, events in enumerate(batches)]
    path = history(tmp_path / "run.jsonl", {"a": made})
    return export([path], tmp_path / "out", tokens=tokens, limits=limits).folder


# --- what the tables say


def test_what_is_resident_in_the_end_is_what_the_index_holds(tmp_path: Path) -> None:
    """Of every run of a real engine: hashes, keys, tiers and groups."""
    index, wanted = PrefixIndex(), set()
    for run, endpoint in recorded_endpoints(RECORDING):
        for batch in live_batches(RECORDING, run, endpoint):
            index.apply(RawBatch(run, 0, 0, batch.seq, False, batch.payload))
        wanted |= {(run, block.hash, block.key, block.tier, block.group) for block in index.blocks(run)}
    folder = export([RECORDING], tmp_path / "out").folder
    names = dict(column(folder, "workers", "worker", "source"))
    stays = [row for row in table(folder, "lifetimes") if row["ended"] == "end"]
    assert {
        (names[row["worker"]], row["block_hash"], row["block_key"], row["tier"], row["kv_group"]) for row in stays
    } == wanted
    assert len(stays) == len(wanted) > 20


def test_depths_and_keys_follow_the_chain(tmp_path: Path) -> None:
    """Across events, from the root; an engine's hashes do not matter; a block without its parent has neither."""
    folder = one(tmp_path, [stored([9, 8], [1, 2])], [stored([7], [3], 8), stored([6], [4], 12345)])
    keys = block_keys(tokens_of(1, 2, 3), SIZE)
    assert column(folder, "events", "block_hash", "parent_hash", "block_key", "depth", "unkeyed") == [
        (9, None, keys[0], 1, None),
        (8, 9, keys[1], 2, None),
        (7, 8, keys[2], 3, None),
        (6, 12345, None, None, "parent-unknown"),
    ]


def test_rows_of_each_kind_of_event(tmp_path: Path) -> None:
    folder = one(tmp_path, [stored([1], [1]), stored([1], [1]), removed(1, 5), stored([], [])], [removed(1), cleared()])
    assert column(folder, "events", "seq", "position", "block", "step", "happened_at", "kind", "block_hash", "held") == [
        (0, 0, 0, 0, 101.0, "stored", 1, False),
        (0, 1, 0, 1, 101.0, "stored", 1, True),
        (0, 2, 0, 2, 101.0, "removed", 1, True),
        (0, 2, 1, 3, 101.0, "removed", 5, False),
        (0, 3, 0, 4, 101.0, "stored", None, False),
        (1, 0, 0, 5, 102.0, "removed", 1, True),
        (1, 1, 0, 6, 102.0, "cleared", None, False),
    ]
    (stay,) = table(folder, "lifetimes")
    assert (stay["copies"], stay["stored_step"], stay["ended"], stay["ended_step"]) == (2, 0, "removed", 5)
    assert column(folder, "workers", "unknown_removals") == [1]


def test_a_move_to_another_tier_is_the_same_block(tmp_path: Path) -> None:
    """Announced by its hash alone, as engines do."""
    offload = BlockStored([2], None, [], 0, medium="CPU")
    folder = one(tmp_path, [stored([1, 2], [1, 2], medium="GPU"), offload, removed(2, medium="GPU")])
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


def test_a_clear_of_one_tier_leaves_the_others(tmp_path: Path) -> None:
    clear = AllBlocksCleared(unknown_fields={"medium": "CPU"})
    folder = one(tmp_path, [stored([1], [1]), stored([1], [1], medium="CPU"), clear])
    assert column(folder, "lifetimes", "tier", "ended") == [("cpu", "cleared"), ("gpu", "end")]


def test_a_block_that_the_relay_redacted_has_the_key_that_it_announces(tmp_path: Path) -> None:
    """As the index has it. Whether such blocks follow each other, and how deep they are, is not known."""
    redacted = BlockStored([9, 8], None, [], SIZE, block_keys=[91, 92])
    folder = one(tmp_path, [redacted, stored([7], [3], 8)])
    index = PrefixIndex()
    index.apply(RawBatch("a", 0, 0, 0, False, payload([redacted, stored([7], [3], 8)])))
    assert column(folder, "events", "block_hash", "parent_hash", "block_key", "depth", "unkeyed") == [
        (9, None, 91, None, None),
        (8, None, 92, None, None),
        (7, 8, index._key_of("a", 0, 7), None, None),
    ]


def test_times_without_a_clock_of_the_publisher_are_the_recorders(tmp_path: Path) -> None:
    frames = [pub(0, payload([stored([1], [1])], 0.0), t=55.0), pub(1, payload([removed(1)], 0.0), t=None)]
    folder = export([write(tmp_path / "run.jsonl", frames)], tmp_path / "out").folder
    assert column(folder, "batches", "ts", "recorded_at") == [(None, 55.0), (None, None)]
    assert column(folder, "lifetimes", "stored_at", "ended_at") == [(55.0, None)]


def test_a_worker_that_was_followed_is_silent_until_the_end_and_another_unknown(tmp_path: Path) -> None:
    """`kvevents record` notes the streams that it subscribes to; a run without notes does not show whether it went on."""
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
def test_what_has_no_key_has_a_reason(reason: str, event: BlockStored, tmp_path: Path) -> None:
    """Block 3 is a root whose tokens are unknown."""
    folder = one(tmp_path, [BlockStored([3], None, [-1] * SIZE, SIZE), event])
    assert column(folder, "events", "block_hash", "block_key", "unkeyed")[-1] == (event.block_hashes[0], None, reason)
    assert reason in UNKEYED


def test_an_extra_key_of_no_known_meaning_is_part_of_the_key(tmp_path: Path) -> None:
    """As in the index: no prompt can show the digest of an embedding, and equal ones have equal keys."""
    events = [stored([number], [1], extra_keys=[(digest,)]) for number, digest in enumerate((b"one", b"one", b"other"))]
    index = PrefixIndex()
    index.apply(RawBatch("a", 0, 0, 0, False, payload(events)))
    found = column(one(tmp_path, events), "events", "block_key")
    assert found == [index._key_of("a", 0, number) for number in range(3)]
    assert found[0] == found[1] != found[2]


def test_salts_show_as_digests_that_no_other_export_shares(tmp_path: Path) -> None:
    """Equal for equal salts, also of blocks further down; the salt itself is nowhere in the files."""
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


# --- reuse distances


@given(st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=60), st.integers(1, 40))
def test_reuse_distances_are_counted(doings: list[tuple[int, bool]], left: int) -> None:
    """Against a plain list of what was stored, where numbers are used up and soon assigned again."""
    distances = ReuseDistances(1000)
    distances._next = len(distances._marks) - left
    hold_against_a_list(distances, doings)


def test_reuse_distances_are_counted_across_stretches() -> None:
    """Thousands of blocks, more than are marked in one stretch, and numbers assigned again several times."""
    rng = random.Random(5)
    doings = [(int(5000 * rng.random() ** 2), rng.random() < 0.6) for _ in range(12_000)]
    hold_against_a_list(ReuseDistances(10_000), doings)


def hold_against_a_list(distances: ReuseDistances, doings: list[tuple[int, bool]]) -> None:
    log: list[int] = []
    known: set[int] = set()
    gone: dict[int, int] = {}
    for key, stores in doings:
        if not stores and key in known:
            distances.record_removal(key)
            gone[key] = len(log)
        elif stores:
            wanted = len(set(log[gone.pop(key) :])) if key in gone else None
            assert distances.record_store(key) == wanted
            log.append(key)
            known.add(key)


def test_what_is_remembered_for_reuse_is_bounded() -> None:
    distances, rng = ReuseDistances(500), random.Random(3)
    for _ in range(20_000):
        key = rng.randrange(1 << 40)
        distances.record_store(key)
        distances.record_removal(key)
        assert len(distances._last) <= max(1024, 2 * 500 + 1024)
    assert distances.forgotten > 15_000
    assert distances.record_store(key) == 0


# --- optional columns, and messages -------------------------------------------------------------------------------------------


def test_schemas_are_those_of_the_reference(tmp_path: Path) -> None:
    """The reference is generated from `TABLES`; the files have just these columns, in order."""
    folder = one(tmp_path, [stored([1], [1])])
    for each in TABLES:
        schema = pq.read_schema(folder / each.file)
        assert [(field.name, str(field.type)) for field in schema] == [(name, DTYPES[kind]) for name, kind, *_ in each.columns]
        assert all(meaning for _, _, meaning, _ in each.columns)


def test_token_ids_are_there_only_when_asked_for(tmp_path: Path) -> None:
    secret = 123_456_789
    event = BlockStored([1, 2], None, [1, 2, 3, secret, 5, 6, 7, 8], 4)
    path = history(tmp_path / "run.jsonl", {"a": [(1.0, [event, removed(1)])]})
    without, asked = export([path], tmp_path / "out").folder, export([path], tmp_path / "with", tokens=True).folder
    assert "token_ids" not in pq.read_schema(without / "events.parquet").names
    assert not any(secret in row.values() for each in TABLES for row in table(without, each.name))
    assert column(asked, "events", "token_ids") == [[1, 2, 3, secret], [5, 6, 7, 8], None]


def test_what_cannot_be_read_is_counted_by_reason(tmp_path: Path) -> None:
    """A payload that is not a batch is skipped; of two events, one of them invalid, the valid one stays."""
    bad = msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved", "block_hashes": [1]}, {"type": "What"}]])
    done = export([write(tmp_path / "run.jsonl", [pub(0, b"\xc1junk"), pub(1, bad)])], tmp_path / "out")
    assert column(done.folder, "batches", "events", "rejected", "reject_reasons") == [
        (0, 1, "not-a-batch"),
        (1, 1, "unknown-tag"),
    ]
    assert done.reject_reasons == {"not-a-batch": 1, "unknown-tag": 1}
    assert done.counts["rejected"] == 2


def test_numbers_outside_of_a_column_are_null(tmp_path: Path) -> None:
    event = BlockStored([1], None, tokens_of(1), SIZE, group_idx=(1 << 64) - 1)
    frames = [pub(0, payload([event]))]
    assert column(export([write(tmp_path / "run.jsonl", frames)], tmp_path / "out").folder, "events", "kv_group") == [None]


def test_a_torn_recording_is_exported_up_to_there_and_reported(tmp_path: Path) -> None:
    path = history(tmp_path / "run.jsonl", {"a": [(1.0, [stored([1], [1])]), (2.0, [removed(1)])]})
    path.write_bytes(path.read_bytes()[:-20])
    done = export([path], tmp_path / "out")
    assert done.rows["batches"] == 1
    assert [text for text in done.truncated if "line 2: the last line is incomplete" in text]


def test_limits_bound_row_groups_and_blocks_and_are_reported(tmp_path: Path) -> None:
    events = [[stored([number], [number])] for number in range(1, 21)]
    folder = one(tmp_path, *events, limits=ExportLimits(rows=6, resident_blocks=15))
    file = pq.ParquetFile(folder / "events.parquet")
    assert [file.metadata.row_group(each).num_rows for each in range(file.num_row_groups)] == [6, 6, 6, 2]
    assert column(folder, "workers", "dropped") == [5]
    assert Counter(column(folder, "lifetimes", "ended")) == {"dropped": 5, "end": 15}
    assert column(folder, "lifetimes", "block_hash")[:5] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["rows", "resident_blocks"])
def test_limits_are_above_zero(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"invalid {name} 0: expected at least 1"):
        ExportLimits(**{name: 0})  # type: ignore[arg-type]


def test_progress_shows_how_far_it_is(tmp_path: Path) -> None:
    seen: list[ExportProgress] = []
    path = history(tmp_path / "run.jsonl", {"a": [(1.0, [stored([1, 2], [1, 2])]), (2.0, [removed(1)])]})
    export([path], tmp_path / "out", progress=seen.append)
    assert seen == [ExportProgress("run.jsonl", 1, 2), ExportProgress("run.jsonl", 2, 3)]


# --- whole or not there


def test_what_is_there_is_replaced_only_by_force(tmp_path: Path) -> None:
    folder = one(tmp_path, [stored([1], [1])])
    with pytest.raises(UsageError, match=r"out already contains workers.parquet, .*: choose another folder, or pass --force"):
        export([RECORDING], folder)
    assert column(folder, "workers", "source") == ["a"]
    export([RECORDING], folder, force=True)
    assert len(column(folder, "workers", "source")) == 2


@pytest.mark.parametrize("there", [False, True])
def test_a_recording_that_is_damaged_leaves_nothing(there: bool, tmp_path: Path) -> None:
    """Nor does it cost an older export that it was to replace."""
    folder = one(tmp_path, [stored([1], [1])]) if there else tmp_path / "out"
    (tmp_path / "bad.jsonl").write_text("what\n")
    with pytest.raises(RecordingError, match=r"bad.jsonl, line 1"):
        export([RECORDING, tmp_path / "bad.jsonl"], folder, force=True)
    if there:
        assert column(folder, "workers", "source") == ["a"]
        assert {file.name for file in folder.iterdir()} == {each.file for each in TABLES}
    else:
        assert not folder.exists()


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(_: ExportProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export([RECORDING], tmp_path / "out", progress=interrupt)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("each", [each.name for each in TABLES])
def test_a_full_disk_is_reported_and_leaves_nothing(each: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / f"{each}.parquet.partial").symlink_to("/dev/full")
    with pytest.raises(RecordingError, match=r"parquet.partial: No space left on device; free some space, or choose another"):
        export([RECORDING], tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(("folder", "message"), [("no/out", "does not exist"), ("file", "cannot create .*file: File exists")])
def test_an_impossible_folder_is_reported(folder: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=message):
        export([RECORDING], tmp_path / folder)


# --- asking


def test_sql_of_ones_own_is_answered(tmp_path: Path) -> None:
    folder = one(tmp_path, [stored([1], [1])])
    (tmp_path / "mine.sql").write_text("-- How many?\nSELECT count(*) AS events FROM events")
    query = find_query(str(tmp_path / "mine.sql"))
    assert query.question == "How many?"
    assert run_query(folder, query) == QueryResult(("events",), [(1,)])


def test_a_folder_with_odd_characters_is_one(tmp_path: Path) -> None:
    path = history(tmp_path / "run.jsonl", {"a": [(1.0, [stored([1], [1])])]})
    folder = export([path], tmp_path / "it's [all] *?").folder
    assert run_query(folder, Query("q", "SELECT count(*) FROM events")).rows == [(1,)]


def test_wrong_arguments_of_queries_raise(tmp_path: Path) -> None:
    folder = one(tmp_path, [stored([1], [1])])
    with pytest.raises(
        ConfigError, match=r"invalid query 'hits': expected one of block-lifetime, .*, reuse-distance, or a file"
    ):
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
def test_the_extra_that_is_missing_is_named(package: str) -> None:
    run = "from kvevents.cli import main; sys.exit(main(['export', '--list-queries']))"
    code = f"import sys; sys.modules[{package!r}] = None; {run}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "pip install 'kvevents[export]'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_removals_of_nothing_are_rows_as_well(tmp_path: Path) -> None:
    folder = one(tmp_path, [BlockRemoved([])])
    assert column(folder, "events", "kind", "block_hash") == [("removed", None)]
