"""`python -m tests.system.faults.heartbeats`: how released decoders and Dynamo's indexer treat a heartbeat.

The engines' own decoders read a batch with a heartbeat between two others, in each of our dialects; Dynamo's indexer follows a
stream with one. If one of them does not ignore it, the exit code is 1.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from kvevents.events import BlockRemoved, BlockStored, Heartbeat, KVEvent, KVEventBatch
from kvevents.wire import encode_batch
from kvevents.wire.dialects import Dialect, dialect_for, dialects
from tests.system.faults.engine import BLOCK, Prompt
from tests.system.faults.engine import Engine as FakeEngine
from tests.system.faults.sides import LOOK, Dynamo
from tools import released
from tools.dynamo import DYNAMO
from tools.released import SGLANG, VLLM, Engine, at_hand

BEAT: Final = BlockRemoved([], heartbeat=Heartbeat("0123456789abcdef" * 2, 5.0, "DEGRADED", "its engine is gone", 7))
STORED: Final = BlockStored([1], None, list(range(BLOCK)), BLOCK, medium="GPU")
PATIENCE: Final = 10.0
MODEL: Final = "tiny"
TO_DYNAMO: Final = (("vllm", "0.9.1"), ("vllm", "0.22.0"), ("vllm", "0.24.0"), ("vllm", "0.33.0"), ("sglang", "0.5.22"))
"""Dialects that its indexer reads: of arrays and of maps the oldest that it reads, and the newest. It reads no batch of vLLM
0.9.0, which is a pair."""


def read_by(engine: Engine, dialect: Dialect) -> str:
    """What an engine's own `KVEventBatch` decoder makes of heartbeats, alone and beside other events."""
    decoder = msgspec.msgpack.Decoder(released.load(engine).KVEventBatch)
    cases: list[list[KVEvent]] = [[BEAT], [STORED, BEAT], [BEAT, STORED], [BEAT, STORED, BEAT]]
    for events in cases:
        try:
            found = decoder.decode(encode_batch(KVEventBatch(1.0, events, 0), dialect)).events
        except msgspec.MsgspecError as error:
            return f"refused: {error}"
        kinds = [type(event).__name__ for event in found]
        if kinds != [type(event).__name__ for event in events]:
            return f"read as {kinds}"
        if any(event.block_hashes for event in found if type(event).__name__ == "BlockRemoved"):
            return "read as a removal of blocks"
    return "read as a removal of no blocks"


def by_decoders() -> Iterator[tuple[str, str, str]]:
    """Engine, dialect, outcome."""
    for engine in (VLLM, SGLANG):
        if at_hand(engine) is None:
            yield engine.title, "", "no wheel is at hand"
            continue
        for dialect in dialects():
            if dialect.engine == engine.package and (dialect.batch_form, dialect.event_form) == ("array", form_of(engine)):
                yield engine.title, str(dialect), read_by(engine, dialect)


def form_of(engine: Engine) -> str:
    """Whether its events are maps or arrays: no release reads both."""
    config: Any = released.load(engine).KVCacheEvent.__struct_config__
    return "array" if config.array_like else "map"


def by_dynamo(dialect: Dialect) -> str:
    """Whether its indexer goes on after a heartbeat, and what it counted."""
    if at_hand(DYNAMO) is None:
        return "no wheel is at hand"

    def publish(*events: KVEvent) -> None:
        engine.publish_payload(encode_batch(KVEventBatch(time.time(), list(events), 0), dialect))

    with Dynamo() as side, FakeEngine() as engine:
        registration = {
            "instance_id": 1,
            "endpoint": engine.endpoint,
            "replay_endpoint": engine.replay_endpoint,
            "model_name": MODEL,
            "block_size": BLOCK,
        }
        side.ask("POST", "/register", registration)
        engine.wait_for_subscriber()
        prompt = Prompt(1, 6)
        question = {"token_ids": prompt.tokens, "model_name": MODEL}
        for place in range(3):
            publish(engine.stored(prompt, place))
            publish(BEAT)
        publish(BEAT, engine.stored(prompt, 3), BEAT)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and side.held(question).get(1) != 4 * BLOCK:
            time.sleep(LOOK)
        held, state = side.held(question).get(1, 0), side.state_of(1)
        counted, asked = +side.counted(), Counter(engine.requests)
        logged = [line for line in side.lines() if side.alarm.search(line)]
        if held != 4 * BLOCK:
            return f"lost {4 * BLOCK - held} of {4 * BLOCK} tokens; {state}, {counted}, {logged[:1]}"
        amiss = f"counted amiss: {dict(counted)}; replay asked from: {dict(asked)}; log: {logged}"
        return f"all {held} tokens are held; {state}; {amiss}"


def main() -> int:
    """Print what each makes of it."""
    wrong = False
    for title, dialect, outcome in by_decoders():
        wrong |= "removal of no blocks" not in outcome and "at hand" not in outcome
        print(f"{title:<14} {dialect:<24} {outcome}")
    for release in TO_DYNAMO:
        outcome = by_dynamo(dialect_for(*release))
        wrong |= outcome.startswith("lost")
        print(f"{DYNAMO.title:<24} {'-'.join(release):<14} {outcome}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
