"""`kvevents tail` as a process, against recorded engines on real sockets."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from cli_cases import (
    KVEVENTS,
    RECORDING,
    RUN,
    SECONDS,
    ProcessResult,
    Program,
    environment,
    play_on_adjacent_ports,
    refuse_connections,
    run,
    tape_of,
)
from discovery_fetch_cases import Engine
from kvevents.cli.delivery_output import delivery_record, trust_record
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from kvevents.recording import live_batches
from kvevents.stream import Batch, Gap, Reset, Trust
from kvevents.testing import Faults, TapePlayer
from kvevents.wire import Rejected, encode_batch

IDLE_SECONDS: Final = (0.3, 3.0, 15.0)
"""Values of `--idle-timeout` for engines with batches. On a busy machine the first one may take longer to arrive."""


def run_until_idle(*args: object) -> ProcessResult:
    """Run a command that ends when nothing arrives for a while, with longer and longer times until it received something."""
    for seconds in IDLE_SECONDS:
        ended = run(*args, "--idle-timeout", seconds)
        if ended.code == 0:
            break
    return ended


def payload(*events: object, ts: float = 1760000000.25) -> bytes:
    return encode_batch(KVEventBatch(ts, list(events), 0))  # type: ignore[arg-type]


STORED = BlockStored([0xABCDEF0123456789, 2**63], None, [11, 12, 13, 14], 2, medium="GPU")
REMOVED = BlockRemoved([0xABCDEF0123456789], medium="CPU")
MIXED = [
    (b"kv", 0, payload(STORED)),
    (b"kv", 1, payload(REMOVED)),
    (b"kv", 2, payload(AllBlocksCleared())),
    (b"kv", 3, payload(STORED, REMOVED, REMOVED, REMOVED, STORED)),
]


def tail_arguments(tape: TapePlayer, *args: object) -> tuple[object, ...]:
    return ("tail", tape.endpoint, "--replay", tape.replay_endpoint, "--source-name", "pod", *args)


def parse_objects(out: str, kind: str = "batch") -> list[dict[str, Any]]:
    return [found for line in out.splitlines() if (found := json.loads(line))["kind"] == kind]


def test_a_late_start_shows_all_batches_in_order_and_which_were_replayed() -> None:
    with TapePlayer(RECORDING, run=RUN) as tape:
        tape.play(30)
        with Program(*tail_arguments(tape)) as program:
            program.out.wait(r"#29 ")
            assert tape.wait_for_subscriber(SECONDS)
            tape.play(1)
            program.out.wait(r"#30  live ")
            program.out.wait("trust +EXACT")
            ended = program.interrupt()
    numbers = [int(found) for found in re.findall(r"pod/0 +#(\d+) ", ended.out)]
    assert numbers == list(range(31))
    assert len(re.findall(r" replay [+-]", ended.out)) >= 25
    assert ended.code == 0
    assert re.search(r"pod/0: 31 batches, 30 replayed, 0 gaps, 0 lost, 0 resets, trust EXACT", ended.err)


def test_lines_show_hashes_counts_and_tokens() -> None:
    with tape_of(*MIXED) as tape:
        tape.play()
        lines = run(*tail_arguments(tape, "--count", 4)).out.splitlines()
        verbose = run(*tail_arguments(tape, "--count", 4, "--output=wide")).out
        tokens = run(*tail_arguments(tape, "--count", 1, "--token-ids")).out
    stored, removed = "+2 blocks abcdef01 80000000 after the root, 4 tokens", "-1 block abcdef01 from CPU"
    assert [line[14:] for line in lines if "#" in line] == [
        f"pod/0       #0  replay {stored}",
        f"pod/0       #1  replay {removed}",
        "pod/0       #2  replay ALL BLOCKS CLEARED",
        f"pod/0       #3  replay {stored}; {removed}; {removed}; and 2 events: +2 blocks with 4 tokens, -1 block",
    ]
    assert "#3  replay 5 events: +4 blocks with 8 tokens, -3 blocks\n" in verbose
    assert verbose.count("block_size 2") == 3
    assert "tokens [11, 12, 13, 14]" in tokens
    assert "[11" not in "".join(lines) + verbose


def encode(record: dict[str, Any]) -> str:
    return msgspec.json.encode(record).decode()


def test_the_format_of_json_lines_is_stable() -> None:
    stored = '{"type":"BlockStored","block_hashes":[12379813738877118345,9223372036854775808],"parent_block_hash":null,'
    stored += '"token_ids":[11,12,13,14],"block_size":2,"lora_id":null,"medium":"GPU","lora_name":null}'
    rejected = (Rejected("unknown-tag", "BlockMoved", 1, b"x"),)
    head = '"source":"pod","rank":1,"incarnation":2,'
    batch = '{"kind":"batch",' + head + f'"seq":3,"ts":1.5,"replayed":true,"events":[{stored},{{"type":"AllBlocksCleared"}}],'
    batch += '"rejected":[{"reason":"unknown-tag","detail":"BlockMoved","index":1,"count":1}]}'
    delivery = Batch("pod", 1, 2, 3, 1.5, [STORED, AllBlocksCleared()], True, b"raw", rejected=rejected)
    assert encode(delivery_record(delivery)) == batch
    gap = '{"kind":"gap",' + head + '"first":4,"last":6,"compacted":'
    assert encode(delivery_record(Gap("pod", 1, 4, 6, 2))) == f"{gap}false}}"
    assert encode(delivery_record(Gap("pod", 1, 4, 6, 2, compacted=True))) == f"{gap}true}}"
    assert encode(delivery_record(Reset("pod", 1, 2, "why"))) == '{"kind":"reset",' + head + '"reason":"why"}'
    trust = trust_record("pod", 1, Trust.STALE.with_reason("gone"))
    assert encode(trust) == '{"kind":"trust","source":"pod","rank":1,"trust":"STALE","reason":"gone"}'


def test_json_contains_every_published_batch_with_token_ids() -> None:
    published = list(live_batches(RECORDING, RUN))
    with TapePlayer(published) as tape:
        tape.play()
        ended = run(*tail_arguments(tape, "--output=json", "--count", len(published)))
    found = parse_objects(ended.out)
    assert [each["seq"] for each in found] == list(range(len(published)))
    assert {each["source"] for each in found} == {"pod"}
    stored = [event for each in found for event in each["events"] if event["type"] == "BlockStored"]
    assert all(event["token_ids"] for event in stored)
    assert ended.code == 0


def test_events_are_filtered_by_type_and_medium() -> None:
    with tape_of(*MIXED) as tape:
        tape.play()
        removed = parse_objects(run(*tail_arguments(tape, "--output=json", "--count", 2, "--type", "removed,cleared")).out)
        device = parse_objects(run(*tail_arguments(tape, "--output=json", "--count", 3, "--medium", "gpu")).out)
    assert [(each["seq"], len(each["events"])) for each in removed] == [(1, 1), (2, 1)]
    assert [(each["seq"], len(each["events"])) for each in device] == [(0, 1), (2, 1), (3, 2)]


def test_gaps_and_resets_are_printed_even_with_quiet() -> None:
    with (
        TapePlayer(RECORDING, run=RUN, faults=Faults(skipped={3, 4})) as tape,
        Program(*tail_arguments(tape, "--quiet")) as program,
    ):
        assert tape.wait_for_subscriber(SECONDS)
        tape.play(8)
        program.out.wait(r"GAP +#3 to #4: 2 batches permanently lost")
        program.out.wait(r"trust +DEGRADED \(.*lost")
        tape.restart()
        tape.play(5)
        program.out.wait(r"RESET +incarnation 1 begins, all earlier blocks are void: ")
        ended = program.interrupt()
    assert not re.search(r" (live|replay) +[+-]", ended.out)
    assert re.search(r"1 gap, 2 lost, 1 reset,", ended.err)


def test_batches_from_before_the_subscription_are_not_counted_as_lost() -> None:
    """Without a replay endpoint no earlier batch is requested."""
    with TapePlayer(RECORDING, run=RUN) as tape:
        tape.play(5)
        with Program("tail", tape.endpoint, "--no-replay", "--source-name", "pod") as program:
            assert tape.wait_for_subscriber(SECONDS)
            tape.play(1)
            program.out.wait(r"GAP +#0 to #4: 5 earlier batches not available")
            program.out.wait(r"#5  live")
            ended = program.interrupt()
    assert "pod/0: 1 batch, 0 replayed, 0 gaps, 0 lost, 0 resets, 5 earlier batches not available, trust" in ended.err


def test_a_single_replayed_batch_is_counted_as_a_number() -> None:
    with TapePlayer(RECORDING, run=RUN) as tape:
        tape.play(1)
        ended = run("tail", tape.endpoint, "--replay", tape.replay_endpoint, "--source-name", "pod", "--idle-timeout", "1")
    assert "pod/0: 1 batch, 1 replayed, 0 gaps, 0 lost, 0 resets, trust" in ended.err


def test_ports_of_ranks_that_collide_are_rejected() -> None:
    """The port of rank 1 cannot be that of replay of rank 0."""
    ended = run("tail", "127.0.0.1:1,2", "--ranks", "2")
    assert ended.code == 2
    assert "the event port 2 of rank 1 is the replay port of rank 0; put the replay endpoint at least" in ended.err


def test_ranks_count_up_from_both_ports() -> None:
    """The endpoint and the replay endpoint are those of rank 0; each further rank has the next ports."""
    with play_on_adjacent_ports(ranks=2) as tapes:
        for tape in tapes:
            tape.play(3)
        ended = run(
            "tail", tapes[0].endpoint, "--replay", tapes[0].replay_endpoint, "--ranks", 2, "--output=json", "--count", 6
        )
    found = sorted((each["rank"], each["seq"]) for each in parse_objects(ended.out))
    assert found == [(rank, seq) for rank in (0, 1) for seq in range(3)]


def test_an_engine_is_named_by_its_url(tmp_path: Path) -> None:
    """vLLM's answer has the endpoints of all ranks, and proves that both belong together. So nothing else must be given."""
    with play_on_adjacent_ports(ranks=2) as tapes:
        for tape in tapes:
            tape.play(3)
        ranks = {
            str(rank): {"publisher": "zmq", "endpoint": tape.endpoint, "replay_endpoint": tape.replay_endpoint, "topic": ""}
            for rank, tape in enumerate(tapes)
        }
        with Engine({"/kv_event_sources": ranks}) as server:
            ended = run("tail", server.url, "--output=json", "--count", 6)
            found = sorted((each["rank"], each["seq"]) for each in parse_objects(ended.out))
            assert found == [(rank, seq) for rank in (0, 1) for seq in range(3)]
            recording = tmp_path / "kept.jsonl"
            assert run("record", server.url, recording, "--count", 6).code == 0
            assert len(list(live_batches(recording))) == 6
            checked = run("doctor", server.url, "--duration", 1)
            assert tapes[0].endpoint in checked.out
        server.pages.clear()
    nothing = run("tail", server.url)
    assert nothing.code == 1
    assert re.search(f"{server.url}.* cannot be reached", nothing.err)
    assert "URL http://HOST:PORT" in run("tail", "nothing").err


@pytest.mark.parametrize("command", [["tail"], ["record", "kept.jsonl"]], ids=" ".join)
def test_no_replay_endpoint_is_guessed(command: list[str], tmp_path: Path) -> None:
    """Batches that the next port replays for another engine are not delivered, and stderr advises which option to add."""
    other = [(b"other", seq, payload(AllBlocksCleared())) for seq in range(40)]
    file = [tmp_path / each for each in command[1:]]
    with play_on_adjacent_ports(tape=MIXED, faults=Faults(replay_foreign=other)) as (tape,):
        tape.play(2)
        with Program(command[0], tape.endpoint, *file, "--count", 2) as program:
            assert tape.wait_for_subscriber(SECONDS)
            tape.play(2)
            ended = program.end()
    assert f"add --replay tcp://HOST:PORT (`kvevents doctor {tape.endpoint}` looks for it), or --no-replay" in ended.err
    assert "2 batches, 0 replayed" in ended.err
    assert "DEGRADED (no replay endpoint" in ended.err + ended.out


@pytest.mark.parametrize("command", [["tail"], ["record", "kept.jsonl"]], ids=" ".join)
def test_replayed_history_of_an_idle_engine_is_reported_as_unconfirmed_with_advice(command: list[str], tmp_path: Path) -> None:
    file = [tmp_path / each for each in command[1:]]
    with tape_of(*MIXED) as tape:
        tape.play()
        ended = run_until_idle(command[0], *tail_arguments(tape, *file, *(["--force"] if file else []))[1:])
    assert ended.code == 0
    assert "4 batches, 4 replayed, 0 gaps, 0 lost, 0 resets, trust DEGRADED (no live batch has confirmed yet" in ended.err
    assert "send the engine a request; the next batch confirms the replay endpoint" in ended.err


def test_without_replay_a_warning_says_that_losses_cannot_be_repaired(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/kv"
    with TapePlayer(MIXED, endpoint=endpoint, replay_endpoint=None) as tape, Program("tail", endpoint, "--count", 2) as program:
        assert tape.wait_for_subscriber(SECONDS)
        tape.play(2)
        ended = program.end()
    assert "no replay endpoint given: lost batches stay lost; add --replay" in ended.err
    assert ended.err.count("no replay endpoint") == 2, "the note, and the trust at the end"
    assert "DEGRADED (no replay endpoint" in ended.err


def test_tail_waits_for_an_engine_that_starts_later_and_misses_no_batch() -> None:
    """Batches that the engine published before the connection was made are replayed."""
    with play_on_adjacent_ports() as (tape,):
        tape.stop()
        with Program("tail", tape.endpoint, "--replay", tape.replay_endpoint, "--count", 10) as program:
            program.err.wait("no connection: nothing listens there, or it cannot be reached; retrying")
            tape.restart()
            tape.play(10)
            ended = program.end()
    assert ended.code == 0
    assert [int(found) for found in re.findall(r" #(\d+) ", ended.out)] == list(range(10))


def test_the_exit_code_is_3_if_no_batch_arrives() -> None:
    """It is 3 for an idle engine and for an engine that is not running."""
    with tape_of(*MIXED) as tape, refuse_connections() as unused_endpoint:
        idle = run(*tail_arguments(tape, "--idle-timeout", 0.3))
        absent = run("tail", unused_endpoint, "--no-replay", "--idle-timeout", 0.3)
        tape.play()
        ended = run_until_idle(*tail_arguments(tape))
    assert idle.code == absent.code == 3
    assert re.search(r"\nnothing arrived within 0.3 s; `kvevents doctor tcp://\S+` finds out why", idle.err)
    assert "nothing listens there" in absent.err
    assert ended.code == 0


@pytest.mark.parametrize("command", [["tail"], ["record", "kept.jsonl"]], ids=" ".join)
def test_duration_and_idle_timeout_end_the_wait_for_an_engine(command: list[str], tmp_path: Path) -> None:
    """The limit that is reached first ends the wait and determines the exit code."""
    file = [tmp_path / each for each in command[1:]]
    with refuse_connections() as unused_endpoint:
        alone = run(command[0], unused_endpoint, *file, "--duration", 0.3)
        idle = run(command[0], unused_endpoint, *file, "--duration", 60, "--idle-timeout", 0.3, *(["--force"] if file else []))
    assert [ended.code for ended in (alone, idle)] == [0, 3]
    assert "0 batches, 0 replayed, 0 gaps, 0 lost, 0 resets, trust CONNECTING" in alone.err
    assert "nothing arrived within 0.3 s" in idle.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_tail_cleanly(number: signal.Signals) -> None:
    with tape_of(*MIXED) as tape, Program(*tail_arguments(tape)) as program:
        tape.play()
        program.out.wait("#3 ")
        ended = program.interrupt(number)
    assert ended.code == 0
    assert "Traceback" not in ended.err
    assert "pod/0: 4 batches" in ended.err


def test_a_closed_pipe_ends_tail_without_an_error_even_if_no_more_batches_arrive() -> None:
    with tape_of(*MIXED) as tape:
        tape.play()
        command = [*KVEVENTS, *map(str, tail_arguments(tape))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
        with process:
            assert process.stdout
            assert process.stdout.readline()
            process.stdout.close()
            assert process.wait(SECONDS) == 0
            assert process.stderr
            assert process.stderr.read() == b""


def read_output_on_a_terminal(tape: TapePlayer, **env: str) -> bytes:
    master, slave = pty.openpty()
    try:
        command = [*KVEVENTS, *map(str, tail_arguments(tape, "--count", 4))]
        subprocess.run(command, stdout=slave, timeout=SECONDS, env=environment(TERM="xterm", **env), check=True, stderr=-3)
        return os.read(master, 1 << 16)
    finally:
        os.close(slave)
        os.close(master)


def test_output_is_colored_only_on_a_terminal() -> None:
    with tape_of(*MIXED) as tape:
        tape.play()
        assert b"\x1b[" in read_output_on_a_terminal(tape)
        assert b"\x1b[" not in read_output_on_a_terminal(tape, NO_COLOR="1")
        assert "\x1b[" not in run(*tail_arguments(tape, "--count", 4)).out


def test_control_characters_from_engines_are_escaped() -> None:
    hostile_event = BlockRemoved([1], medium="\x1b[2J\nfake line")
    with tape_of((b"kv", 0, payload(hostile_event)), (b"kv", 1, b"garbage")) as tape:
        tape.play()
        out = run(*tail_arguments(tape, "--count", 2)).out
    assert r"from \x1b[2J\nfake line" in out
    assert re.search(r"#1 .* 1 NOT READABLE: ", out)
    assert "\x1b" not in out
    assert not any(line.startswith("fake line") for line in out.splitlines())
