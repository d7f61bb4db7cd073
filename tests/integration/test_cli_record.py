"""`kvevents record` and `kvevents play` as processes: a played recording equals the recorded stream, byte for byte."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from cli_cases import RECORDING, RUN, SECONDS, Program, refuse_connections, run
from cli_record_cases import ANY_PORT, serving
from kvevents.cli.options import check_writable
from kvevents.errors import UsageError
from kvevents.recording import LiveBatch, live_batches, read_recording, recorded_endpoints
from kvevents.testing import Faults, TapePlayer


def record_arguments(path: Path, tape: TapePlayer, *args: object) -> tuple[object, ...]:
    return ("record", tape.endpoint, path, "--replay", tape.replay_endpoint, "--source-name", "pod", *args)


def frames_of(path: Path) -> list[tuple[bytes, int, bytes]]:
    return [batch[:3] for batch in live_batches(path)]


def test_a_recording_of_losses_and_a_restart_is_equal_after_it_is_played_and_recorded_again(tmp_path: Path) -> None:
    one, other = tmp_path / "one.jsonl.gz", tmp_path / "other.jsonl"
    with TapePlayer(RECORDING, run=RUN, faults=Faults(drop=0.2)) as tape:
        tape.play(20)
        with Program(*record_arguments(one, tape)) as program:
            assert tape.wait_for_subscriber(SECONDS)
            tape.play()
            wait_until_written(one, 79)
            tape.restart(list(live_batches(RECORDING, "bs64-emptytopic")), unseen_until=5)
            tape.play()
            wait_until_written(one, 114)
            ended = program.interrupt()
        published = [(sent.batch.topic, sent.batch.seq, sent.batch.payload) for sent in tape.log]
    assert ended.code == 0
    assert "recorded 114 batches" in ended.err
    assert [(seq, payload) for _, seq, payload in frames_of(one)] == [(seq, payload) for _, seq, payload in published]
    assert {topic for topic, *_ in frames_of(one)[:79]} == {b"kv-events"}

    with TapePlayer(list(live_batches(one))) as tape, Program(*record_arguments(other, tape, "--count", 114)) as program:
        assert tape.wait_for_subscriber(SECONDS)
        # A replay that is answered after the restart would have batches of the second incarnation before the first one.
        assert tape.wait_until(lambda counts: counts.requests > 0, SECONDS)
        tape.play()  # without pauses: an incarnation ends while many of its batches are not yet received
        assert program.end().code == 0
    options = ("--endpoint", ANY_PORT, "--replay", ANY_PORT, "--speed", "max", "--linger")
    with Program("play", one, *options) as player:
        live, replay = serving(player)
        player.err.wait("answering replay requests")
        tailed = run("tail", live, "--replay", replay, "--output=json", "--count", 35)
        assert player.interrupt().code == 0
    assert frames_of(other) == frames_of(one)
    # A late tail receives only the last incarnation, as from any engine.
    assert [json.loads(line)["seq"] for line in tailed.out.splitlines() if '"batch"' in line] == list(range(35))


def wait_until_written(path: Path, count: int) -> None:
    """Wait until the file has `count` batches; the recorder flushes every second, and only its file shows its progress."""
    import time  # noqa: PLC0415

    until = time.monotonic() + SECONDS
    while not path.exists() or len(frames_of(path)) < count:
        assert time.monotonic() < until, f"{len(frames_of(path))} batches of {count}"
        time.sleep(0.02)


def test_each_incarnation_is_a_run_and_gaps_and_resets_are_recorded(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with TapePlayer(RECORDING, run=RUN, faults=Faults(skipped={2})) as tape, Program(*record_arguments(path, tape)) as program:
        assert tape.wait_for_subscriber(SECONDS)
        tape.play(5)
        wait_until_written(path, 4)
        tape.restart()
        tape.play(2)
        wait_until_written(path, 6)
        assert program.interrupt().code == 0
    assert [stream.run for stream in recorded_endpoints(path)] == ["pod/0/incarnation0", "pod/0/incarnation1"]
    metas = [frame for frame in read_recording(path) if frame.socket == "meta"]
    assert [(frame.run, sorted(set(frame.meta or ()) & {"gap", "reset", "topic"})) for frame in metas] == [
        ("pod/0/incarnation0", ["topic"]),
        ("pod/0/incarnation0", ["gap"]),
        ("pod/0/incarnation1", ["reset"]),
    ]
    assert (metas[1].meta or {})["gap"] == [2, 2]


def test_an_existing_recording_is_replaced_only_with_force(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("precious")
    with TapePlayer(RECORDING, run=RUN) as tape:
        tape.play(3)
        refused = run(*record_arguments(path, tape, "--count", 3))
        assert path.read_text() == "precious"
        forced = run(*record_arguments(path, tape, "--count", 3, "--force"))
    assert refused.code == 2
    assert re.fullmatch(r"kvevents: \S+ exists; name another file, or use --force to replace it\n", refused.err)
    assert forced.code == 0
    assert len(frames_of(path)) == 3


def test_a_missing_folder_is_reported_before_record_waits_for_an_engine(tmp_path: Path) -> None:
    """There is no engine and no limit to the wait, so only a check beforehand can end the command."""
    with refuse_connections() as nowhere:
        refused = run("record", nowhere, tmp_path / "no" / "run.jsonl")
    assert refused.code == 2
    assert "does not exist" in refused.err


def test_a_folder_in_place_of_a_file_is_reported_before_record_waits_for_an_engine(tmp_path: Path) -> None:
    with refuse_connections() as nowhere:
        refused = run("record", nowhere, tmp_path, "--force")
    assert refused.code == 2
    assert f"cannot write {tmp_path}: it is a directory; name a file" in refused.err


def test_a_file_without_permission_is_reported_before_a_long_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Root has every permission, so the answer of the system is replaced."""
    monkeypatch.setattr(os, "access", lambda path, _mode: path != tmp_path)
    with pytest.raises(UsageError, match="no permission; name a file that this process can write"):
        check_writable(tmp_path / "run.jsonl")
    (tmp_path / "run.jsonl").touch()
    check_writable(tmp_path / "run.jsonl")


def test_play_explains_an_address_that_it_cannot_bind() -> None:
    refused = run("play", RECORDING, "--endpoint", "tcp://192.0.2.1:9")
    assert refused.code == 1
    assert "cannot bind tcp://192.0.2.1:9: Cannot assign requested address; this host has no such address;" in refused.err
    assert "addr=" not in refused.err


def test_an_existing_recording_is_not_lost_if_no_engine_connects(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("precious")
    with refuse_connections() as nowhere:
        assert run("record", nowhere, path, "--force", "--idle-timeout", 0.2).code == 3
    assert path.read_text() == "precious"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_full_disk_is_reported_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "full.jsonl"
    path.symlink_to("/dev/full")
    with TapePlayer(RECORDING, run=RUN) as tape:
        tape.play()
        ended = run(*record_arguments(path, tape, "--duration", 10))
    assert ended.code == 1
    assert re.search(r"^kvevents: cannot write \S+full.jsonl: No space left on device; ", ended.err, re.MULTILINE)
    assert "Traceback" not in ended.err


def test_play_lists_the_runs_of_a_recording_and_rejects_an_unknown_run() -> None:
    listed = run("play", RECORDING, "--list")
    titles, first, *_ = (line.split() for line in listed.out.splitlines())
    assert titles == ["run", "endpoint", "batches", "first", "last", "seconds"]
    assert first == ["bs64-emptytopic", "tcp://127.0.0.1:5557", "35", "0", "34", "1.1"]
    unknown = run("play", RECORDING, "--run", "nonsense")
    assert unknown.code == 2
    assert unknown.err.startswith("kvevents: the recording has no run 'nonsense'; its runs are bs64-emptytopic, ")


def test_play_ends_if_no_subscriber_connects() -> None:
    ended = run("play", RECORDING, "--endpoint", ANY_PORT, "--replay", ANY_PORT, "--wait-for-subscriber", 0.1)
    assert ended.code == 1
    assert re.search(r"kvevents: no subscriber connected to tcp://127.0.0.1:\d+ within 0.1 s", ended.err)


def test_play_continues_the_numbers_in_each_repetition_and_ends_on_a_signal() -> None:
    args = ("--endpoint", ANY_PORT, "--replay", ANY_PORT, "--speed", "max", "--repeat", 3, "--linger", "--run", RUN)
    with Program("play", RECORDING, *args) as player:
        live, replay = serving(player)
        tailed = run("tail", live, "--replay", replay, "--output=json", "--count", 3 * 79)
        ended = player.interrupt()
    assert [json.loads(line)["seq"] for line in tailed.out.splitlines() if '"batch"' in line] == list(range(3 * 79))
    assert ended.code == 0
    assert "played 237 batches, " in ended.err


def test_an_interrupted_play_reports_how_many_batches_were_played() -> None:
    with Program("play", RECORDING, "--endpoint", ANY_PORT, "--replay", ANY_PORT, "--speed", "0.001") as player:
        serving(player)
        ended = player.interrupt()
    assert ended.code == 130
    assert "Traceback" not in ended.err
    assert re.search(r"played \d+ batch", ended.err)


def test_an_incomplete_last_line_loses_only_that_line(tmp_path: Path) -> None:
    path = tmp_path / "torn.jsonl"
    with TapePlayer([LiveBatch(b"kv", seq, b"\x93\xcb\x40\x59\x00\x00\x00\x00\x00\x00\x90\x00") for seq in range(3)]) as tape:
        tape.play()
        assert run(*record_arguments(path, tape, "--count", 3)).code == 0
    path.write_bytes(path.read_bytes()[:-20])
    listed = run("play", path, "--list", "--output=json")
    assert json.loads(listed.out)["batches"] == 2
    assert "the last line is incomplete" in listed.err
