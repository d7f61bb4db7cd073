"""Attestations of an engine on the way to consumers: beside the engine, and behind relays, on real sockets.

Each test runs for every path, because a consumer must not be able to see which one it is behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import pytest

from attestation_cases import AttestedConsumer, AttestingEngine
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvevents.relay import Relay, RelaySettings
from kvevents.stream import DegradedReason, Source, Trust
from kvevents.subscriber import StreamStatus
from kvevents.testing import FaultProxy
from publisher_cases import ANY, DEADLINE
from relay_cases import block

PATHS = ("direct", "relay", "relay of a relay", "relay with a journal", "hashed tokens", "another dialect")
FIRST_UNKNOWN = 100_000
SETTINGS: dict[str, dict[str, Any]] = {"hashed tokens": {"tokens": "hash"}, "another dialect": {"dialect": "vllm-0.22"}}


class Way:
    """One engine, or two that share a stream, and what is between them and their consumers."""

    def __init__(self, path: str, folder: Path, stack: ExitStack) -> None:
        self.stack = stack
        self.path = path
        self.engines = [AttestingEngine(buffer_steps=20) for _ in range(2 if path == "shared" else 1)]
        for engine in self.engines:
            stack.callback(engine.close)
        self.proxy = stack.enter_context(FaultProxy(self.engine.publisher.endpoint))
        """On the way of live batches of the first engine."""
        assert self.engine.publisher.replay_endpoint is not None
        self.replay_proxy = stack.enter_context(FaultProxy(self.engine.publisher.replay_endpoint))
        """On the way of its replay answers."""
        self.relays: list[Relay] = []
        self.consumers: list[AttestedConsumer] = []
        sources = [Source(self.proxy.endpoint, self.replay_proxy.endpoint, name="e0")]
        sources += [each.source for each in self.engines[1:]]
        for at in range({"direct": 0, "relay of a relay": 2}.get(path, 1)):
            journal = str(folder / "journal") if path == "relay with a journal" else None
            given = RelaySettings(
                upstreams=tuple(sources),
                endpoint=ANY,
                replay_endpoint=ANY,
                heartbeat=2.0,
                buffer_steps=20,
                journal=journal,
                **SETTINGS.get(path, {}),
            )
            relay = Relay(given)
            self.relays.append(relay)
            sources = [Source(relay.endpoint, relay.replay_endpoint, name=f"r{at}")]
        (self.source,) = sources
        stack.callback(self.close_relays)

    @property
    def engine(self) -> AttestingEngine:
        return self.engines[0]

    @property
    def hashes(self) -> set[int]:
        return {hash_ for engine in self.engines for hash_, _ in engine.cache}

    @property
    def hashes_on_all_tiers(self) -> set[int]:
        return self.hashes | {hash_ for engine in self.engines for hash_ in engine.elsewhere}

    @property
    def hashes_in_the_index(self) -> set[int]:
        """Without blocks of a kind that the index does not know; see `states`."""
        return {each for each in self.hashes_on_all_tiers if not FIRST_UNKNOWN <= each < 2 * FIRST_UNKNOWN}

    def consumer(self) -> AttestedConsumer:
        made = self.stack.enter_context(closing(AttestedConsumer(self.source)))
        self.consumers.append(made)
        return made

    def until(self, is_reached: Callable[[], object]) -> None:
        end = monotonic() + DEADLINE
        while not is_reached():
            trusts = [*(each.trust for each in self.consumers), *(each.trust() for each in self.relays)]
            assert monotonic() < end, list(map(str, trusts))
            for relay in self.relays:
                relay.turn(0.002)
            for consumer in self.consumers:
                consumer.take(0.0 if self.relays else 0.005)

    def restart_relay(self, meanwhile: Callable[[], None]) -> None:
        """Close the relay, and open it again at the same endpoints; the engine publishes in between."""
        (relay,) = self.relays
        relay.close()
        meanwhile()
        fixed = {"endpoint": relay.endpoint, "replay_endpoint": relay.replay_endpoint}
        self.relays = [Relay(msgspec.structs.replace(relay.settings, **fixed))]

    def close_relays(self) -> None:
        for relay in self.relays:
            relay.close()


@pytest.fixture(params=PATHS)
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Way]:
    with ExitStack() as stack:
        yield Way(request.param, tmp_path, stack)


def unknown(number: int) -> BlockStored:
    """A block of a group of a kind that the index does not know."""
    return block(FIRST_UNKNOWN + number, group_idx=1, kv_cache_spec_kind="chunked_local_attention")


def fill(way: Way, first: int = 0, count: int = 30) -> None:
    """Store chains in two groups and tiers, store copies, and remove some of all."""
    for at, engine in enumerate(way.engines):
        for number in range(first + 1_000 * at, first + 1_000 * at + count):
            engine.publish(block(number), block(number, medium="CPU"))
            if number % 3 == 0:
                engine.publish(block(number))
            if number % 4 == 0:
                engine.publish(BlockRemoved([number], "GPU"), BlockRemoved([number], "CPU"))


def test_a_consumer_sees_that_its_state_is_attested(way: Way) -> None:
    """An early consumer and a late one, whose history is compacted; the relay says it of its upstreams too."""
    early = way.consumer()
    way.until(lambda: early.is_attested)
    fill(way)
    way.until(lambda: early.is_attested and early.hashes == way.hashes_on_all_tiers)
    late = way.consumer()
    way.until(lambda: late.is_attested and late.hashes == early.hashes)
    assert late.attested
    assert all(late.attested)
    assert all(early.attested)
    assert all(relay.trust().attested for relay in way.relays)
    assert str(early.trust) == "EXACT (attested)"


def test_attestations_hold_through_clears_and_removals(way: Way) -> None:
    consumer = way.consumer()
    fill(way)
    way.until(lambda: consumer.is_attested)
    for engine in way.engines:
        engine.publish(AllBlocksCleared())
    fill(way, first=500)
    count = len(consumer.attested)
    way.until(lambda: consumer.is_attested and len(consumer.attested) > count + 3 and consumer.hashes >= way.hashes)
    assert all(consumer.attested)


def test_an_engine_with_other_blocks_is_said_and_everything_starts_over(way: Way) -> None:
    """Beside the engine the consumer finds out; behind a relay the relay does, which sends the reason, and then a clear.

    They are attested again once the engine agrees.
    """
    consumer = way.consumer()
    fill(way)
    way.until(lambda: consumer.is_attested and consumer.hashes == way.hashes_on_all_tiers)
    way.engine.keep_a_secret(77)
    way.until(lambda: consumer.trust.name == "DEGRADED" and DegradedReason.UNATTESTED.value in consumer.trust.reason)
    if not way.relays:
        way.until(lambda: consumer.resets > 0)
    else:
        way.until(lambda: way.relays[0].status().upstreams[0].counters.resets > 0)
    way.engine.keep_a_secret(0)
    way.until(lambda: consumer.is_attested and consumer.hashes >= way.hashes)


def test_a_consumer_with_other_blocks_says_so_and_starts_over(way: Way) -> None:
    """A consumer whose index has lost everything finds out by the next attestation, and fetches it again."""
    consumer = way.consumer()
    fill(way)
    way.until(lambda: consumer.is_attested and consumer.hashes == way.hashes_on_all_tiers)
    resets = consumer.resets
    consumer.index.remove_worker("it", 0)
    consumer.index.readmit("it", 0)
    way.until(lambda: consumer.resets > resets)
    assert consumer.subscriber.status().counters.attestations_mismatched > 0
    way.until(lambda: consumer.is_attested and consumer.hashes == way.hashes_on_all_tiers)


def test_an_attestation_waits_for_the_batches_before_it(way: Way) -> None:
    """The live batches of an engine are cut off while it changes: what it attests then is compared with the repaired stream."""
    consumer = way.consumer()
    fill(way)
    way.until(lambda: consumer.is_attested and consumer.hashes == way.hashes_on_all_tiers)
    way.proxy.cut()
    fill(way, first=200)
    way.proxy.heal()
    way.until(lambda: consumer.is_attested and consumer.hashes >= way.hashes)
    assert all(consumer.attested)


def test_a_burst_that_evicts_the_first_answer_leaves_nothing_in_doubt(way: Way) -> None:
    """A stream begins with one replayed batch, and the engine evicts it before a live batch has confirmed it.

    Everything is requested again, and is confirmed before the small replay buffer has evicted that too.
    """
    consumer = way.consumer()

    def upstream() -> StreamStatus:
        return way.relays[0].status().upstreams[0] if way.relays else consumer.subscriber.status()

    way.proxy.delay()
    way.until(lambda: upstream().counters.delivered > 0)
    way.replay_proxy.delay()
    fill(way)
    way.proxy.heal()
    way.until(lambda: upstream().counters.live >= len(way.hashes))
    way.replay_proxy.heal()
    way.until(lambda: consumer.is_attested and consumer.hashes == way.hashes_on_all_tiers)


def test_blocks_that_only_the_attestation_counts_are_in_compacted_history(way: Way) -> None:
    """Blocks of a group of an unknown kind match no prompt, and a late consumer must know of them to agree with the engine."""
    for engine in way.engines:
        for number in range(40):
            engine.publish(block(number), unknown(number))
            if number % 2:
                engine.publish(BlockRemoved([FIRST_UNKNOWN + number], "GPU", group_idx=1))
    early = way.consumer()
    fill(way, first=100)
    way.until(lambda: early.is_attested and early.hashes == way.hashes_in_the_index)
    late = way.consumer()
    way.until(lambda: late.is_attested and late.hashes == early.hashes)
    assert all(late.attested)


@pytest.mark.parametrize("way", ["relay with a journal"], indirect=True)
def test_a_relay_that_restarts_goes_on_with_attestations(way: Way) -> None:
    """Its consumers notice nothing; batches that the engine sent meanwhile are in what it attests."""
    consumer = way.consumer()
    for number in range(40):
        way.engine.publish(block(number), unknown(number))
    fill(way, first=100)
    way.until(lambda: consumer.is_attested and consumer.hashes == way.hashes_in_the_index)
    way.restart_relay(lambda: fill(way, first=200, count=5))
    way.until(lambda: consumer.is_attested and consumer.hashes == way.hashes_in_the_index)
    late = way.consumer()
    way.until(lambda: late.is_attested)
    assert way.relays[0].status().was_resumed
    assert way.relays[0].status().upstreams[0].counters.resets == consumer.resets == 0


@pytest.mark.parametrize("way", ["another dialect"], indirect=True)
def test_a_relay_that_leaves_blocks_out_attests_nothing_until_a_clear(way: Way) -> None:
    """The dialect has no salts: consumers cannot hold what the engine does, and nothing starts over because of it."""
    consumer = way.consumer()
    way.until(lambda: consumer.is_attested)
    way.engine.publish(block(1), block(2, cache_salt="tenant"))
    way.until(lambda: consumer.hashes == {1})

    def upstream() -> StreamStatus:
        return way.relays[0].status().upstreams[0]

    heartbeats, count = upstream().counters.heartbeats, len(consumer.attested)
    way.until(lambda: upstream().counters.heartbeats > heartbeats + 3)
    assert len(consumer.attested) == count
    assert upstream().counters.attestations_mismatched == consumer.resets == 0
    way.engine.publish(AllBlocksCleared(), block(3))
    way.until(lambda: consumer.is_attested and consumer.hashes == {3} and len(consumer.attested) > count)


@pytest.mark.parametrize("way", ["shared"], indirect=True)
def test_a_shared_stream_is_exact_and_never_attested(way: Way) -> None:
    """The relay compares each engine; the stream that it sends is not the cache of a single engine."""
    consumer = way.consumer()
    fill(way)
    way.until(lambda: consumer.trust == Trust.EXACT and consumer.hashes == way.hashes_on_all_tiers)
    upstreams = way.relays[0].status().upstreams
    way.until(lambda: all(each.trust.attested for each in way.relays[0].status().upstreams))
    assert len(upstreams) == 2
    assert (consumer.attested, consumer.is_attested) == ([], False)
