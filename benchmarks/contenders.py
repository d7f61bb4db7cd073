"""The publishers that are compared: ours and those of engines, constructed and driven in the same way."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from tools import released

BLOCK_SIZE: Final = 16
VOCABULARY: Final = 128_000
BUFFER_STEPS: Final = 10_000
HWM: Final = 100_000
MAX_QUEUE_SIZE: Final = 100_000


class Publisher(Protocol):
    """The methods of a publisher that the harness uses."""

    def publish(self, events: Any) -> None: ...

    def shutdown(self) -> Any: ...


@dataclass(frozen=True)
class Contender:
    """One publisher class with its event types."""

    name: str
    types: Callable[[], Any]
    """A namespace with `ZmqEventPublisher`, `KVEventBatch` and `BlockStored`."""
    waiting: Callable[[Any], int]
    """Number of batches in the queue: given to `publish`, but not sent."""
    named: bool
    """Whether BlockStored has `lora_name` after `medium`."""

    def publisher(self, port: int, replay_port: int) -> Publisher:
        """Return a publisher that binds two TCP ports, with explicit limits that equal the engines' defaults."""
        instance: Publisher = self.types().ZmqEventPublisher(
            0, f"tcp://*:{port}", f"tcp://*:{replay_port}", BUFFER_STEPS, HWM, MAX_QUEUE_SIZE, "kv-events"
        )
        return instance

    def batches(self, count: int, blocks: int, seed: int = 1) -> list[Any]:
        """Return `count` batches that store `blocks` blocks each, with random 64-bit hashes, and token ids below 128,000.

        All contenders get equal values. Rank and timestamp are set, as an engine's scheduler sets them.
        """
        types, draw = self.types(), random.Random(seed)  # noqa: S311 - test data
        tail = ("GPU", None) if self.named else ("GPU",)
        result = []
        for _ in range(count):
            hashes = [draw.getrandbits(63) for _ in range(blocks)]
            tokens = [draw.randrange(VOCABULARY) for _ in range(blocks * BLOCK_SIZE)]
            event = types.BlockStored(hashes, draw.getrandbits(63), tokens, BLOCK_SIZE, None, *tail)
            result.append(types.KVEventBatch(1.7e9, [event]))
        return result


def _load_ours() -> Any:
    from kvevents import events, publisher  # noqa: PLC0415 - the engines' processes must not load us

    return type("kvevents", (), vars(events) | {"ZmqEventPublisher": publisher.ZmqEventPublisher})


# The harness reads this number every millisecond, so it reads only the queue: the engines have no other counter, and our
# `stats` would take longer.
def _queue_length(publisher: Any) -> int:
    return len(publisher._queue)  # noqa: SLF001


def _queue_size(publisher: Any) -> int:
    return int(publisher._event_queue.qsize())  # noqa: SLF001


OURS: Final = Contender("ours", _load_ours, _queue_length, named=True)
VLLM: Final = Contender("vllm", lambda: released.load(released.VLLM_NEWEST), _queue_size, named=True)
SGLANG: Final = Contender("sglang", lambda: released.load(released.SGLANG), _queue_size, named=False)
CONTENDERS: Final = {contender.name: contender for contender in (OURS, VLLM, SGLANG)}
