"""`kvevents publish` as a process publishes JSON lines as batches."""

from __future__ import annotations

import json
import re

import pytest

from cli_cases import RECORDING, RUN, SECONDS, Program, run
from cli_record_cases import ANY_PORT, serving
from kvevents.cli.program import make_parser
from kvevents.cli.publish import batch_of
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvevents.stream import Batch, Source
from kvevents.subscriber import Subscriber
from kvevents.testing import TapePlayer
from kvevents.wire import decode_batch
from tools.ports import reserve_port

ENDPOINTS = ("--endpoint", ANY_PORT, "--replay", ANY_PORT)
STORED = '{"type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": null, "token_ids": [7, 8], "block_size": 1}'


def receive(live: str, replay: str, count: int) -> list[Batch]:
    batches: list[Batch] = []
    with Subscriber(Source(live, replay)) as subscriber:
        while len(batches) < count:
            delivery = subscriber.receive(timeout=SECONDS)
            assert isinstance(delivery, Batch)
            batches.append(delivery)
    return batches


def test_lines_of_every_form_are_published_in_order() -> None:
    with Program("publish", *ENDPOINTS, "--topic", "kv@pod", "--linger") as program:
        live, replay = serving(program)
        program.write(STORED.encode())
        program.write(b'[{"type": "BlockRemoved", "block_hashes": [1]}, {"type": "AllBlocksCleared"}]')
        program.write(b"")
        program.write(b'{"ts": 12.5, "data_parallel_rank": 3, "events": []}')
        batches = receive(live, replay, 3)
        assert program.process.stdin
        program.process.stdin.close()
        program.err.wait("answering replay requests")
        ended = program.interrupt()
    assert [batch.events for batch in batches] == [
        [BlockStored([1, 2], None, [7, 8], 1)],
        [BlockRemoved([1]), AllBlocksCleared()],
        [],
    ]
    assert batches[2].ts == 12.5
    assert decode_batch(batches[2].payload).batch.data_parallel_rank == 3
    assert ended.code == 0
    assert ended.err.endswith("3 accepted, 0 dropped, 0 unsent")


def test_an_invalid_line_is_reported_and_the_others_are_published() -> None:
    lines = [STORED, "nonsense", '{"type": "BlockMoved"}', '{"block_hashes": [1]}', '{"type": "BlockRemoved"}', "7", STORED]
    lines.append(STORED.replace("[7, 8]", "[7, 99999999999999999999999]"))
    lines.append("[" * 100_000)
    ended = run("publish", "-", *ENDPOINTS, stdin="\n".join(lines).encode())
    assert ended.code == 1
    assert re.findall(r"^line (\d+): \S+", ended.err, re.MULTILINE) == ["2", "3", "4", "5", "6", "8", "9"]
    assert ended.err.endswith("2 accepted, 0 dropped, 0 unsent, 7 invalid lines\n")


@pytest.mark.parametrize("options", [(), ("--connect",)])
def test_a_publisher_listens_at_an_address_without_a_wildcard_unless_it_is_to_connect(options: tuple[str, ...]) -> None:
    """Engines would connect to such an address. The consumer is at the other end of what the publisher does."""
    port = reserve_port()
    source = Source(f"tcp://127.0.0.1:{port}", bind=bool(options))
    arguments = ("publish", "-", "--endpoint", f"127.0.0.1:{port}", "--replay", ANY_PORT, "--wait-for-subscriber", *options)
    with Program(*arguments) as program, Subscriber(source) as subscriber:
        program.write(STORED.encode())
        assert isinstance(subscriber.receive(timeout=SECONDS), Batch)


@pytest.mark.parametrize("command", ["play", "publish"])
def test_a_publisher_listens_for_its_own_machine_by_default(command: str) -> None:
    """A recording has the tokens of prompts."""
    defaults = make_parser().parse_args([command, "file"])
    assert (defaults.endpoint, defaults.replay_endpoint) == ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")


def test_batches_are_encoded_in_the_dialect() -> None:
    with Program("publish", *ENDPOINTS, "--dialect", "sglang-0.5.17", "--linger") as program:
        live, replay = serving(program)
        program.write(STORED.replace("[1, 2]", f"[{2**64 - 1}]").encode())
        (batch,) = receive(live, replay, 1)
    dialect = decode_batch(batch.payload).dialect
    assert dialect is not None
    assert dialect.name == "sglang-0.5.9"
    assert batch.events[0].block_hashes == [2**64 - 1]  # type: ignore[union-attr]


def test_the_json_output_of_tail_can_be_published() -> None:
    with TapePlayer(RECORDING, run=RUN) as tape:
        tape.play()
        written = run("tail", tape.endpoint, "--replay", tape.replay_endpoint, "--output=json", "--count", 79).out
    with Program("publish", *ENDPOINTS, "--linger") as program:
        live, replay = serving(program)
        for line in written.splitlines():
            program.write(line.encode())
        batches = receive(live, replay, 79)
    assert [batch.events for batch in batches] == [decode_batch(payload).batch.events for _, payload in tape.batches()]


def test_lines_that_are_not_batches_are_skipped_or_rejected() -> None:
    assert batch_of(b"  \n") is None
    assert batch_of(json.dumps({"kind": "gap", "first": 1}).encode()) is None
    with pytest.raises(ValueError, match="missing required field `block_hashes`"):
        batch_of(b'{"type": "BlockRemoved"}')
    with pytest.raises(ValueError, match="unknown field `tokens`"):
        batch_of(b'{"events": [], "tokens": []}')


def test_publish_ends_if_no_subscriber_connects() -> None:
    ended = run("publish", *ENDPOINTS, "--wait-for-subscriber", 0.1, stdin=STORED.encode())
    assert ended.code == 1
    assert "within 0.1 s" in ended.err
    assert "0 accepted, 0 dropped, 0 unsent" in ended.err


def test_a_missing_file_is_reported() -> None:
    ended = run("publish", "/no/such/file.jsonl", *ENDPOINTS)
    assert (ended.code, ended.err) == (2, "kvevents: cannot use /no/such/file.jsonl: No such file or directory\n")
