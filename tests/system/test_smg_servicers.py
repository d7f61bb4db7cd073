"""Streams of SMG's released servicers in front of a publisher, and what a subscriber concludes from them.

It needs the wheels that `python -m tools.conform.smg` installs in the folder of `kvevents conform`.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest

from kvevents import BlockRemoved, BlockStored, KVEventBatch, Source, Subscriber, Trust, ZmqEventPublisher
from kvevents.cli.conform import FOLDER_VARIABLE
from kvevents.conform.target import is_open
from kvevents.index import PrefixIndex
from kvevents.testing.ports import reserve_port
from kvevents.testing.tape import ANY_LOCAL_PORT
from service_cases import wait_for
from tools.conform import smg_workers
from tools.conform.smg import SMG, write_tokenizer

FOLDER: Final = Path(os.environ.get(FOLDER_VARIABLE) or "~/.cache/kvevents/conform").expanduser()
PYTHON: Final = FOLDER / "-".join(SMG) / "bin" / "python"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="SMG is not installed: `make conform` installs it")
BLOCK: Final = 16


@contextmanager
def servicer(kind: str, engine: ZmqEventPublisher, folder: Path) -> Iterator[tuple[str, Callable[[str], None]]]:
    """Run a servicer in front of an engine. Return its endpoint, and what stops and starts it."""
    port = reserve_port(ANY_LOCAL_PORT)
    if port.holder is not None:
        port.holder.close()
    write_tokenizer(folder, ["w"])
    row: dict[str, Any] = {"name": "w", "port": int(port.endpoint.rpartition(":")[2]), "topic": "", "answer": 1}
    row |= {"sources": [[0, engine.endpoint, engine.replay_endpoint]], "block_size": BLOCK, "model": "m"}
    (folder / "workers.json").write_text(json.dumps([row]))
    words: list[str | Path] = [PYTHON, "-P", smg_workers.__file__, kind, folder]
    with subprocess.Popen(words, stdin=subprocess.PIPE, text=True) as process:

        def command(word: str) -> None:
            assert process.stdin is not None
            process.stdin.write(f"{word} w\n")
            process.stdin.flush()
            wait_for(f"the servicer to {word}", lambda: is_open(port.endpoint) == (word == "start"))

        wait_for("the servicer", lambda: is_open(port.endpoint))
        yield port.endpoint.replace("tcp://", "grpc://"), command
        process.kill()


@pytest.mark.parametrize("kind", ["python", "rust"])
def test_a_subscriber_follows_a_servicer_and_notices_that_it_restarts(kind: str, tmp_path: Path) -> None:
    """The servicer in Rust brings everything again, and the one in Python what comes next, of which the rest is missing."""
    index = PrefixIndex()
    engine = ZmqEventPublisher(0, endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")

    def store(block: int, parent: int | None = None) -> None:
        event = BlockStored([block], parent, [block] * BLOCK, BLOCK, medium="GPU")
        engine.publish(KVEventBatch(float(block), [event]))

    def matched(*blocks: int) -> int:
        best = index.match([block for block in blocks for _ in range(BLOCK)]).best
        return 0 if best is None else best.tokens // BLOCK

    with (
        servicer(kind, engine, tmp_path) as (endpoint, command),
        Subscriber(Source(endpoint, name="w"), decode=False, sink=index) as subscriber,
    ):

        def receive_until(condition: Callable[[], object]) -> None:
            def holds() -> bool:
                subscriber.receive_many(timeout=0.05)
                return bool(condition())

            wait_for(f"the condition; {subscriber.trust('w')!r}", holds)

        receive_until(lambda: subscriber.trust("w") == Trust.DEGRADED)  # connected, and nothing has come
        store(1)
        receive_until(lambda: matched(1) == 1)
        store(2, parent=1)
        store(3, parent=2)
        engine.publish(KVEventBatch(0.0, [BlockRemoved([3], medium="GPU")]))
        receive_until(lambda: matched(1, 2, 3) == 2 and subscriber.trust("w") == Trust.EXACT)
        command("stop")
        receive_until(lambda: subscriber.trust("w") == Trust.STALE)
        command("start")
        receive_until(lambda: subscriber.trust("w") != Trust.STALE)
        numbers = count(10)

        def has_caught_up() -> bool:
            """Publish one more block: the servicer in Python sends nothing that came before it has connected to the engine."""
            store(number := next(numbers))
            subscriber.receive_many(timeout=0.05)
            assert subscriber.trust("w") != Trust.EXACT or matched(1, 2, 3) == 2
            is_known = matched(number) == 1
            return is_known and subscriber.trust("w") == (Trust.EXACT if kind == "rust" else Trust.DEGRADED)

        wait_for("what the servicer sends", has_caught_up)
        assert matched(1, 2, 3) == (2 if kind == "rust" else 0)
    engine.shutdown()
