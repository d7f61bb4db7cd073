"""Test a consumer of KV cache events under the faults of engines, without an engine: `pytest examples/test_my_router.py`.

`TapePlayer` plays an engine's bytes from real sockets, and loses batches as the faults of a test require. `MyRouter` is the
consumer: put yours in its place.
"""

import time
from types import TracebackType
from typing import Self

import pytest

from kvevents import BlockStored, KVEventBatch, Source, Subscriber, Trust, encode_batch
from kvevents.index import PrefixIndex
from kvevents.testing import Faults, TapePlayer

BLOCKS = 40
BLOCK_SIZE = 16
DEADLINE = 60.0


class MyRouter:
    """A router that knows how much of a prompt an engine holds."""

    def __init__(self, engine: TapePlayer) -> None:
        self.index = PrefixIndex()
        source = Source(engine.endpoint, engine.replay_endpoint, name="engine")
        self.subscriber = Subscriber(source, decode=False, sink=self.index)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.subscriber.close()

    def cached_tokens(self, prompt: list[int]) -> int:
        """Number of tokens of the prompt that the router believes to be cached."""
        match = self.index.match(prompt).get("engine")
        return match.tokens if match else 0

    def read(self) -> bool:
        """Apply the batches that have arrived. Returns whether the router can trust its data."""
        self.subscriber.receive_many(timeout=0.05)
        return self.subscriber.trust("engine") == Trust.EXACT


def read_until(router: MyRouter, engine: TapePlayer, cached: int) -> None:
    """Let the router read until it trusts this answer, while the engine goes on: a loss shows when a later batch arrives."""
    end = time.monotonic() + DEADLINE
    while not (router.read() and router.cached_tokens(prompt(BLOCKS)) == cached):
        if time.monotonic() > end:
            pytest.fail(f"{router.cached_tokens(prompt(BLOCKS))} of {cached} tokens, {router.subscriber.trust('engine')}")
        engine.play(1)


def prompt(blocks: int) -> list[int]:
    """Return a prompt with this number of blocks."""
    return [block for block in range(1, blocks + 1) for _ in range(BLOCK_SIZE)]


def stores(blocks: int) -> list[tuple[bytes, int, bytes]]:
    """Return batches that store the blocks one by one: topic, sequence number and payload of each batch."""
    events = [BlockStored([block], block - 1 or None, [block] * BLOCK_SIZE, BLOCK_SIZE) for block in range(1, blocks + 1)]
    return [(b"", seq, encode_batch(KVEventBatch(float(seq), [event]))) for seq, event in enumerate(events)]


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(Faults(), id="no faults"),
        pytest.param(Faults(drop={3, 4, 17}), id="lost batches"),
        pytest.param(Faults(drop={5}, replay_send_limit=25), id="lost batches, and replays that end early"),
        pytest.param(Faults(drop=0.3, seed=7), id="a third is lost"),
    ],
)
def test_it_knows_each_block_whatever_is_lost(faults: Faults) -> None:
    with TapePlayer(stores(BLOCKS), faults=faults) as engine, MyRouter(engine) as router:
        engine.play()
        read_until(router, engine, BLOCKS * BLOCK_SIZE)


def test_it_forgets_the_cache_of_an_engine_that_has_restarted() -> None:
    """The engine numbers from 0 again, so that the new batches look like some that the router has seen."""
    with TapePlayer(stores(BLOCKS)) as engine, MyRouter(engine) as router:
        engine.play()
        read_until(router, engine, BLOCKS * BLOCK_SIZE)
        engine.restart(stores(3))
        engine.play()
        read_until(router, engine, 3 * BLOCK_SIZE)
