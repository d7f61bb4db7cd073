"""`python -m tools.heartbeats`: how decoders of released engines treat a heartbeat.

They read a batch with a heartbeat between two others, in each of our dialects. If one of them does not ignore it, the exit code
is 1. `kvevents conform dynamo --only heartbeats --dialect vllm-0.22.0` does the same to an indexer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from kvevents.events import BlockRemoved, BlockStored, Heartbeat, KVEvent, KVEventBatch
from kvevents.wire import encode_batch
from kvevents.wire.dialects import Dialect, dialects
from tools import released
from tools.released import SGLANG, VLLM, Engine, at_hand

BLOCK: Final = 16
BEAT: Final = BlockRemoved([], heartbeat=Heartbeat("0123456789abcdef" * 2, 5.0, "DEGRADED", "its engine is gone", 7))
STORED: Final = BlockStored([1], None, list(range(BLOCK)), BLOCK, medium="GPU")


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


def main() -> int:
    """Print what each makes of it."""
    wrong = False
    for title, dialect, outcome in by_decoders():
        wrong |= "removal of no blocks" not in outcome and "at hand" not in outcome
        print(f"{title:<14} {dialect:<24} {outcome}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
