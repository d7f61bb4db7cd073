"""`kvevents export` as a program writes tables from recordings and runs queries on them."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest

from cli_cases import run
from export_cases import RECORDING, history, payload, pub, removed, stored, table, write
from kvevents.cli import main
from kvevents.cli.console import Console
from kvevents.export import TABLES, queries


def output(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    captured = capsys.readouterr()
    return captured.out, captured.err


def small_recording(tmp_path: Path, name: str = "run.jsonl") -> Path:
    return history(tmp_path / name, {"a": [(100.0, [stored([1, 2], [1, 2])]), (130.5, [removed(2)])]})


def test_a_recording_is_exported_and_queried(tmp_path: Path) -> None:
    """The export reports on stderr what it has written; the query prints its rows on stdout in aligned columns."""
    out = tmp_path / "out"
    done = run("export", small_recording(tmp_path), out)
    assert (done.code, done.out) == (0, "")
    assert "rows: workers 1, batches 2, events 3, lifetimes 2\n" in done.err
    assert {file.name for file in out.iterdir()} == {each.file for each in TABLES}
    answer = run("export", "--query", "block-lifetime", out)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out == (
        "tier  kv_group  residencies  removed  cleared  cut_off  unsure     p10     p50     p90     p99     max\n"
        "gpu          0            2        1        0        1       0  30.500  30.500  30.500  30.500  30.500\n"
    )


def test_a_query_prints_its_rows_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(small_recording(tmp_path)), str(tmp_path / "out")]) == 0
    output(capsys)
    assert main(["export", "--query", "eviction-age", "--output=json", str(tmp_path / "out")]) == 0
    out, _ = output(capsys)
    (row,) = map(json.loads, out.splitlines())
    assert row == {
        "tier": "gpu",
        "depth_from": 2,
        "depth_to": 2,
        "removed": 1,
        "p10": 30.5,
        "p50": 30.5,
        "p90": 30.5,
        "came_back": 0,
    }


def test_a_query_without_rows_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["export", str(history(tmp_path / "run.jsonl", {"a": [(100.0, [removed(2)])]})), str(tmp_path / "out")])
    output(capsys)
    assert main(["export", "--query", "block-lifetime", str(tmp_path / "out")]) == 0
    out, err = output(capsys)
    assert out.startswith("tier  kv_group")
    assert err == "the query returned no rows\n"


def test_the_queries_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--list-queries"]) == 0
    out, _ = output(capsys)
    assert [line.split()[0] for line in out.splitlines()] == list(queries())
    assert all(line.endswith("?") for line in out.splitlines())


def test_a_query_can_be_printed_changed_and_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["export", str(small_recording(tmp_path)), "out"])
    output(capsys)
    assert main(["export", "--query", "block-lifetime", "--sql"]) == 0
    sql, _ = output(capsys)
    (tmp_path / "mine.sql").write_text(sql.replace("GROUP BY tier, kv_group", "WHERE depth = 2 GROUP BY tier, kv_group"))
    assert main(["export", "--query", "mine.sql", "--output=json", "out"]) == 0
    out, _ = output(capsys)
    assert json.loads(out)["residencies"] == 1


def test_losses_and_anomalies_are_reported_one_per_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = payload([stored([1], [1])])
    frames = [pub(0, good), pub(3, payload([removed(7, 8)])), pub(4, b"\xc1"), pub(5, good)]
    path = write(tmp_path / "run.jsonl", frames)
    path.write_bytes(path.read_bytes()[:-9])
    assert main(["export", str(path), str(tmp_path / "out")]) == 0
    _, err = output(capsys)
    assert "line 4: the last line is incomplete" in err
    assert "2 batches missing by their sequence numbers" in err
    assert "1 event not decoded (1 not-a-batch)" in err
    assert "2 removals of blocks that were not resident" in err


def test_exported_token_ids_are_reported_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(small_recording(tmp_path)), str(tmp_path / "out"), "--token-ids"]) == 0
    assert "protect it like the prompts" in output(capsys)[1]
    assert table(tmp_path / "out", "events")[0]["token_ids"] == [4, 5, 6, 7]


def test_garbage_collection_is_off_while_rows_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is on again afterwards, also after an error."""
    enabled_states: list[bool] = []
    monkeypatch.setattr(Console, "progress", lambda *_: enabled_states.append(gc.isenabled()))
    (tmp_path / "bad.jsonl").write_text("what\n")
    assert main(["export", str(small_recording(tmp_path)), str(tmp_path / "bad.jsonl"), str(tmp_path / "out")]) == 1
    assert enabled_states
    assert not any(enabled_states)
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name recordings, followed by the directory for the tables"),
        (["out"], "name recordings, followed by the directory for the tables"),
        (["--query", "what", "out"], "unknown query 'what'; expected block-lifetime, "),
        (["--query", "hit-detph", "out"], "unknown query 'hit-detph'; did you mean 'hit-depth'? expected block-lifetime, "),
        (["--sql"], "--sql needs --query: it prints the SQL of the query NAME"),
        (["--query", "hit-depth"], "--query needs one directory with tables: kvevents export --query hit-depth out"),
        (["--query", "hit-depth", "nowhere"], "nowhere does not contain an export: workers.parquet"),
        (["missing.jsonl", "out"], "cannot read missing.jsonl"),
        ([str(RECORDING), "no/out"], "does not exist"),
    ],
)
def test_wrong_usage_is_reported_in_one_sentence(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", *arguments]) == 2
    out, err = output(capsys)
    assert out == ""
    assert err.startswith("kvevents: ")
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
