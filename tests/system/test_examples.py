"""The examples, as processes."""

from __future__ import annotations

import re
import sys

import pytest

import paths
from cli_cases import RECORDING, RUN, Program, tape_of
from kvevents.events import BlockRemoved, BlockStored, KVEventBatch
from kvevents.testing import TapePlayer
from kvevents.wire import decode_batch, encode_batch
from ports import quiet_port

EXAMPLES = paths.ROOT / "examples"


def logged(err: str) -> set[str]:
    """What the log says of endpoints, each once; a line of another shape comes out as it is."""
    return {(re.match(r"tcp://[\w.:]+: ([\w ]+): ", line) or [line, line])[1] for line in err.splitlines()}


def example(name: str, *args: object) -> Program:
    return Program(EXAMPLES / name, *args, command=[sys.executable])


def test_the_recorded_run_delivers_what_was_published() -> None:
    with example("recorded_run.py") as demo:
        ended = demo.end()
    assert ended.code == 0, ended.out + ended.err
    assert logged(ended.err) <= {"no connection"}  # while the engine restarts
    counts = re.findall(r"life (\d): +(\d+) published, +(\d+) delivered, .*: equal, in order, byte for byte", ended.out)
    assert counts == [("0", "79", "79"), ("1", "35", "35")]
    assert "RESET   incarnation 1 begins" in ended.out
    assert "Try next:" in ended.out
    assert "\x1b[" not in ended.out


def test_one_end_publishes_and_the_other_reads() -> None:
    with example("publish.py", "tcp://127.0.0.1:*", "tcp://127.0.0.1:*") as publisher:
        endpoints = publisher.out.wait("tcp://").split()
        with example("subscribe.py", *endpoints) as subscriber:
            subscriber.out.wait(r"^0 \[BlockStored\(block_hashes=\[1\], parent_block_hash=None")
            subscriber.out.wait(r"^\d+ \[BlockStored.* EXACT")
        with example("async_subscribe.py", ",".join(endpoints)) as subscriber:
            subscriber.out.wait(r"Batch\(source='pod-0', rank=0, incarnation=0, seq=\d+,.* EXACT")


def test_the_router_knows_what_each_worker_holds() -> None:
    """By replay and live: what was published before it came, and one more batch of each."""
    with TapePlayer(RECORDING, run=RUN) as one, TapePlayer(RECORDING, run="bs64-emptytopic") as other:
        tapes = (one, other)
        for tape in tapes:
            tape.play(30)
        with example(
            "router.py", f"{one.endpoint},{one.replay_endpoint}", f"{other.endpoint},{other.replay_endpoint}"
        ) as router:
            router.out.wait("'worker-0': .*'worker-1': ")
            for tape in tapes:
                tape.play(1)
            expected = [resident(tape) for tape in tapes]
            router.out.wait(f"'worker-0': '{expected[0]} blocks, EXACT', 'worker-1': '{expected[1]} blocks, EXACT'")


def test_the_index_tells_who_holds_how_much_of_a_prompt() -> None:
    """An engine that publishes the prompt beside one that is not there; Ctrl-C ends it without a word."""
    prompt = ",".join(["1"] * 16 + ["2"] * 16 + ["1"])
    with example("publish.py", "tcp://127.0.0.1:*", "tcp://127.0.0.1:*") as publisher:
        endpoints = ",".join(publisher.out.wait("tcp://").split())
        with example("prefix_index.py", "--prompt", prompt, endpoints, f"tcp://127.0.0.1:{quiet_port()}") as index:
            index.out.wait(r"^engine-0: 32 of 33 tokens, by tier \{'gpu': 32.*, EXACT$")
            ended = index.interrupt()
    assert ended.code == 0
    assert logged(ended.err) <= {"no connection"}
    assert re.search("^engine-1: 0 of 33 tokens, CONNECTING", ended.out, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--prompt", "1,x"], 2, "argument --prompt: invalid tokens value: '1,x'"),
        (["--prompt", "4294967296"], 2, "argument --prompt: token ids are from 0 to 2**32 - 1"),
        (["127.0.0.1:5557"], 1, "invalid endpoint '127.0.0.1:5557': it has no transport; expected tcp://HOST:PORT"),
        (["tcp://127.0.0.1"], 1, "invalid endpoint 'tcp://127.0.0.1': expected tcp://HOST:PORT"),
    ],
)
def test_the_index_says_what_is_wrong_with_its_arguments(arguments: list[str], code: int, told: str) -> None:
    with example("prefix_index.py", *arguments) as index:
        ended = index.end()
    assert (ended.code, ended.out) == (code, "")
    assert f"prefix_index.py: {'error: ' if code == 2 else ''}{told}" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("name", "ready"),
    [
        ("publish.py", "^tcp://"),
        ("subscribe.py", r"^0 \["),
        ("async_subscribe.py", "^Batch"),
        ("router.py", "worker-0"),
        ("recorded_run.py", "#"),
    ],
)
def test_ctrl_c_ends_an_example_without_a_traceback(name: str, ready: str) -> None:
    """What follows or publishes until then ends with 0, what had more to do with 130."""
    with tape_of((b"", 0, encode_batch(KVEventBatch(1.0, [BlockStored([1], None, [1, 2], 2)], 0)))) as tape:
        tape.play()
        arguments = {
            "publish.py": ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"),
            "subscribe.py": (tape.endpoint, tape.replay_endpoint),
            "async_subscribe.py": (f"{tape.endpoint},{tape.replay_endpoint}",),
            "router.py": (f"{tape.endpoint},{tape.replay_endpoint}",),
        }.get(name, ())
        with example(name, *arguments) as program:
            program.out.wait(ready)
            ended = program.interrupt()
    assert ended.code == (130 if name == "recorded_run.py" else 0), ended
    assert "Traceback" not in ended.out + ended.err


@pytest.mark.parametrize("name", ["publish.py", "subscribe.py", "async_subscribe.py", "router.py"])
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [(("--nonsense",), 2, "unrecognized arguments: --nonsense"), (("127.0.0.1:5557",), 1, "127.0.0.1:5557")],
)
def test_an_example_reports_wrong_arguments_in_a_sentence(name: str, arguments: tuple[str, ...], code: int, said: str) -> None:
    """The last line of stderr says what is wrong, and nothing is a traceback."""
    with example(name, *arguments) as program:
        ended = program.end()
    assert (ended.code, ended.out) == (code, "")
    assert said in ended.err.splitlines()[-1]
    assert "Traceback" not in ended.err


def resident(tape: TapePlayer) -> int:
    blocks: set[int] = set()
    for _, payload in tape.batches():
        for event in decode_batch(payload).batch.events:
            if isinstance(event, BlockStored):
                blocks.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                blocks.difference_update(event.block_hashes)
            else:
                blocks.clear()
    return len(blocks)
