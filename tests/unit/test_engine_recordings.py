"""Recordings of real engines: each request is predicted from the batches before it, and compared with the engine's result.

`make engines` with `--record` makes the recordings (`tests/data/README.md`). Here a subscriber and an index in memory receive
their batches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvevents import Source, Subscriber, Trust
from kvevents.index import Namespace, PrefixIndex
from kvevents.recording import read_recording
from kvevents.testing import FakeTransport
from kvevents.wire import Live, parse_live
from wire_cases import DATA

RECORDINGS = sorted((DATA / "engines").glob("*.jsonl.gz"))
TICK = 0.01
"""Virtual seconds after each batch."""


class Outcome(NamedTuple):
    """Requests of one recording, by the result of their prediction."""

    right: int
    wrong: list[str]
    not_exact: int
    hits: int
    restarts: int
    attested: int
    """Requests before which the newest attestation of the engine's cache agreed with the index."""


class Replay:
    """One recording, which a subscriber receives as its engine's frames."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        transport = FakeTransport()
        self.engine = transport.engine("tcp://engine:5557", "tcp://engine:5558")
        source = Source(self.engine.endpoint, self.engine.replay_endpoint, name="engine")
        self.subscriber = Subscriber(source, decode=False, sink=self.index, transport=transport, clock=transport.clock)
        self.right = self.not_exact = self.hits = self.restarts = self.attested = 0
        self.wrong: list[str] = []

    def play(self, path: Path) -> Outcome:
        with self.subscriber:
            for frame in read_recording(path):
                live = parse_live(frame.frames) if frame.socket == "pub" else None
                if isinstance(live, Live):
                    assert self.engine.publish_payload(live.payload) == live.seq, "the recording begins with sequence number 0"
                elif frame.meta and "restart" in frame.meta:
                    self.engine.restart()
                    self.restarts += 1
                elif frame.meta and "request" in frame.meta:
                    self._predict(frame.meta["request"])
                while self.subscriber.receive_many(timeout=TICK):
                    pass
        return Outcome(self.right, self.wrong, self.not_exact, self.hits, self.restarts, self.attested)

    def _predict(self, request: dict[str, Any]) -> None:
        namespace = Namespace(lora=request.get("lora"), salt=request.get("salt"))
        matches = self.index.match(request["tokens"][:-1], namespace)  # an engine always computes the last token
        predicted = next((worker.tokens for worker in matches), 0)
        cached = request["cached"]
        self.hits += cached > 0
        trust = self.subscriber.trust("engine")
        self.attested += trust.attested
        if trust != Trust.EXACT:
            self.not_exact += 1
        elif predicted == cached:
            self.right += 1
        else:
            self.wrong.append(f"{len(request['tokens'])} tokens {namespace}: {predicted}, and the engine found {cached}")


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name.partition(".")[0])
def test_cached_tokens_of_a_real_engine_are_predicted_while_its_stream_is_exact(path: Path) -> None:
    """Each prediction equals the number that the engine reported, through evictions, resets and a kill of the engine."""
    outcome = Replay().play(path)
    assert outcome.wrong == []
    assert outcome.hits > 10
    assert outcome.restarts > 0
    if path.name.startswith("plugin"):
        assert outcome.attested > outcome.right // 2
        assert outcome.right > 100
