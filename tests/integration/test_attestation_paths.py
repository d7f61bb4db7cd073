"""Attestations of an engine reach consumers that are connected directly or through relays, on real sockets.

Each test runs for every path, because a consumer must behave in the same way on all of them.
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


class EventPath:
    """One engine, or two that share a stream, with the proxies and relays between them and their consumers."""

    def __init__(self, path: str, folder: Path, stack: ExitStack, buffer_steps: int = 20) -> None:
        self.stack = stack
        self.path = path
        self.engines = [AttestingEngine(buffer_steps=buffer_steps) for _ in range(2 if path == "shared" else 1)]
        for engine in self.engines:
            stack.callback(engine.close)
        self.proxy = stack.enter_context(FaultProxy(self.engine.publisher.endpoint))
        """Forwards the live batches of the first engine."""
        assert self.engine.publisher.replay_endpoint is not None
        self.replay_proxy = stack.enter_context(FaultProxy(self.engine.publisher.replay_endpoint))
        """Forwards the replay responses of the first engine."""
        self.relays: list[Relay] = []
        self.consumers: list[AttestedConsumer] = []
        sources = [Source(self.proxy.endpoint, self.replay_proxy.endpoint, name="e0")]
        sources += [each.source for each in self.engines[1:]]
        for at in range({"direct": 0, "relay of a relay": 2}.get(path, 1)):
            journal = str(folder / "journal") if path == "relay with a journal" else None
            relay_settings = RelaySettings(
                upstreams=tuple(sources),
                endpoint=ANY,
                replay_endpoint=ANY,
                heartbeat=2.0,
                buffer_steps=buffer_steps,
                journal=journal,
                **SETTINGS.get(path, {}),
            )
            relay = Relay(relay_settings)
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
        return self.hashes | {hash_ for engine in self.engines for hash_ in engine.other_tiers}

    @property
    def hashes_in_the_index(self) -> set[int]:
        """The blocks on all tiers except those of a kind that the index does not support."""
        return {each for each in self.hashes_on_all_tiers if not FIRST_UNKNOWN <= each < 2 * FIRST_UNKNOWN}

    def consumer(self) -> AttestedConsumer:
        new_consumer = self.stack.enter_context(closing(AttestedConsumer(self.source)))
        self.consumers.append(new_consumer)
        return new_consumer

    def wait_until(self, is_reached: Callable[[], object]) -> None:
        deadline = monotonic() + DEADLINE
        while not is_reached():
            trusts = [*(each.trust for each in self.consumers), *(each.trust() for each in self.relays)]
            assert monotonic() < deadline, list(map(str, trusts))
            for relay in self.relays:
                relay.turn(0.002)
            for consumer in self.consumers:
                consumer.take(0.0 if self.relays else 0.005)

    def restart_relay(self, publish_meanwhile: Callable[[], None]) -> None:
        """Close the relay, call `publish_meanwhile`, and start the relay again at the same endpoints."""
        (relay,) = self.relays
        relay.close()
        publish_meanwhile()
        fixed = {"endpoint": relay.endpoint, "replay_endpoint": relay.replay_endpoint}
        self.relays = [Relay(msgspec.structs.replace(relay.settings, **fixed))]

    def close_relays(self) -> None:
        for relay in self.relays:
            relay.close()


@pytest.fixture(params=PATHS)
def event_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EventPath]:
    with ExitStack() as stack:
        yield EventPath(request.param, tmp_path, stack)


def unknown_kind_block(number: int) -> BlockStored:
    """Return a block of a group of a kind that the index does not support."""
    return block(FIRST_UNKNOWN + number, group_idx=1, kv_cache_spec_kind="chunked_local_attention")


def fill(event_path: EventPath, first: int = 0, count: int = 30) -> None:
    """Store blocks on two tiers, store some of them twice, and remove some from both tiers."""
    for at, engine in enumerate(event_path.engines):
        for number in range(first + 1_000 * at, first + 1_000 * at + count):
            engine.publish(block(number), block(number, medium="CPU"))
            if number % 3 == 0:
                engine.publish(block(number))
            if number % 4 == 0:
                engine.publish(BlockRemoved([number], "GPU"), BlockRemoved([number], "CPU"))


def test_a_consumer_sees_that_its_state_is_attested(event_path: EventPath) -> None:
    """An early consumer and a late one with compacted history are attested; so are the upstreams of relays."""
    early = event_path.consumer()
    event_path.wait_until(lambda: early.is_attested)
    fill(event_path)
    event_path.wait_until(lambda: early.is_attested and early.hashes == event_path.hashes_on_all_tiers)
    late = event_path.consumer()
    event_path.wait_until(lambda: late.is_attested and late.hashes == early.hashes)
    assert late.attested
    assert all(late.attested)
    assert all(early.attested)
    # At once or later: after a pause of three heartbeats a stream is STALE until the next one.
    event_path.wait_until(lambda: all(relay.trust().attested for relay in event_path.relays))
    event_path.wait_until(lambda: str(early.trust) == "EXACT (attested)")


@pytest.mark.parametrize("event_path", PATHS[:-1], indirect=True)
def test_attestations_match_after_clears_and_removals(event_path: EventPath) -> None:
    """Events as arrays have no field for the tier of a clear, so after one a consumer cannot know what host memory holds."""
    consumer = event_path.consumer()
    fill(event_path)
    event_path.wait_until(lambda: consumer.is_attested)
    for engine in event_path.engines:
        engine.publish(AllBlocksCleared(), AllBlocksCleared({"medium": "CPU"}))
    fill(event_path, first=500)
    count = len(consumer.attested)
    event_path.wait_until(
        lambda: consumer.is_attested and len(consumer.attested) > count + 3 and consumer.hashes >= event_path.hashes
    )
    assert all(consumer.attested)


def test_a_mismatch_at_the_engine_degrades_the_stream_and_resets_it(event_path: EventPath) -> None:
    """The first receiver detects the mismatch: the consumer itself, or a relay, which sends the reason and then a clear.

    The consumer is attested again as soon as the digests agree.
    """
    consumer = event_path.consumer()
    fill(event_path)
    event_path.wait_until(lambda: consumer.is_attested and consumer.hashes == event_path.hashes_on_all_tiers)
    event_path.engine.falsify_attestation(77)
    event_path.wait_until(
        lambda: consumer.trust.name == "DEGRADED" and DegradedReason.UNATTESTED.value in consumer.trust.reason
    )
    if not event_path.relays:
        event_path.wait_until(lambda: consumer.resets > 0)
    else:
        event_path.wait_until(lambda: event_path.relays[0].status().upstreams[0].counters.resets > 0)
    event_path.engine.falsify_attestation(0)
    event_path.wait_until(lambda: consumer.is_attested and consumer.hashes >= event_path.hashes)


def test_a_mismatch_at_the_consumer_resets_its_stream(event_path: EventPath) -> None:
    """A consumer whose index has lost all blocks detects it at the next attestation and replays the history again."""
    consumer = event_path.consumer()
    fill(event_path)
    event_path.wait_until(lambda: consumer.is_attested and consumer.hashes == event_path.hashes_on_all_tiers)
    resets = consumer.resets
    consumer.index.remove_worker("it", 0)
    consumer.index.readmit("it", 0)
    event_path.wait_until(lambda: consumer.resets > resets)
    assert consumer.subscriber.status().counters.attestations_mismatched > 0
    event_path.wait_until(lambda: consumer.is_attested and consumer.hashes == event_path.hashes_on_all_tiers)


def test_an_attestation_waits_for_the_batches_before_it(event_path: EventPath) -> None:
    """If live batches are lost, the next attestation is compared only after the gap is repaired by replay."""
    consumer = event_path.consumer()
    fill(event_path)
    event_path.wait_until(lambda: consumer.is_attested and consumer.hashes == event_path.hashes_on_all_tiers)
    event_path.proxy.cut()
    fill(event_path, first=200)
    event_path.proxy.heal()
    event_path.wait_until(lambda: consumer.is_attested and consumer.hashes >= event_path.hashes)
    assert all(consumer.attested)


def test_a_burst_that_evicts_the_unconfirmed_replayed_batch_is_recovered_from(event_path: EventPath) -> None:
    """A stream begins with one replayed batch, which the engine evicts before a live batch has confirmed it.

    The consumer requests the whole history again, and confirms it before the small replay buffer evicts that too.
    """
    consumer = event_path.consumer()

    def upstream() -> StreamStatus:
        return event_path.relays[0].status().upstreams[0] if event_path.relays else consumer.subscriber.status()

    event_path.proxy.delay()
    event_path.wait_until(lambda: upstream().counters.delivered > 0)
    event_path.replay_proxy.delay()
    fill(event_path)
    event_path.proxy.heal()
    event_path.wait_until(lambda: upstream().counters.live >= len(event_path.hashes))
    event_path.replay_proxy.heal()
    event_path.wait_until(lambda: consumer.is_attested and consumer.hashes == event_path.hashes_on_all_tiers)


def test_compacted_history_contains_blocks_of_unknown_kinds(event_path: EventPath) -> None:
    """Blocks of an unknown kind match no prompt, but the digest of the engine counts them, so a late consumer needs them."""
    for engine in event_path.engines:
        for number in range(40):
            engine.publish(block(number), unknown_kind_block(number))
            if number % 2:
                engine.publish(BlockRemoved([FIRST_UNKNOWN + number], "GPU", group_idx=1))
    early = event_path.consumer()
    fill(event_path, first=100)
    event_path.wait_until(lambda: early.is_attested and early.hashes == event_path.hashes_in_the_index)
    late = event_path.consumer()
    event_path.wait_until(lambda: late.is_attested and late.hashes == early.hashes)
    assert all(late.attested)


def test_a_restarted_relay_continues_to_attest(tmp_path: Path) -> None:
    """Its consumers see no reset, and its attestations include the batches that the engine published meanwhile.

    The replay buffers hold what is published during the restart, heartbeats included, and not all that was published before.
    """
    with ExitStack() as stack:
        event_path = EventPath("relay with a journal", tmp_path, stack, buffer_steps=200)
        consumer = event_path.consumer()
        for number in range(40):
            event_path.engine.publish(block(number), unknown_kind_block(number))
        fill(event_path, first=100, count=200)
        event_path.wait_until(lambda: consumer.is_attested and consumer.hashes == event_path.hashes_in_the_index)
        event_path.restart_relay(lambda: fill(event_path, first=400, count=5))
        event_path.wait_until(lambda: consumer.is_attested and consumer.hashes == event_path.hashes_in_the_index)
        late = event_path.consumer()
        event_path.wait_until(lambda: late.is_attested)
        assert event_path.relays[0].status().was_resumed
        assert event_path.relays[0].status().upstreams[0].counters.resets == consumer.resets == 0


@pytest.mark.parametrize("event_path", ["another dialect"], indirect=True)
def test_a_relay_that_omits_blocks_attests_nothing_until_a_clear(event_path: EventPath) -> None:
    """The dialect cannot encode salts, so consumers lack salted blocks; the relay stops attesting, and nothing is reset."""
    consumer = event_path.consumer()
    event_path.wait_until(lambda: consumer.is_attested)
    event_path.engine.publish(block(1), block(2, cache_salt="tenant"))
    event_path.wait_until(lambda: consumer.hashes == {1})

    def upstream() -> StreamStatus:
        return event_path.relays[0].status().upstreams[0]

    heartbeats, count = upstream().counters.heartbeats, len(consumer.attested)
    event_path.wait_until(lambda: upstream().counters.heartbeats > heartbeats + 3)
    assert len(consumer.attested) == count
    assert upstream().counters.attestations_mismatched == consumer.resets == 0
    event_path.engine.publish(AllBlocksCleared(), block(3))
    event_path.wait_until(lambda: consumer.is_attested and consumer.hashes == {3} and len(consumer.attested) > count)


@pytest.mark.parametrize("event_path", ["shared"], indirect=True)
def test_a_shared_stream_is_exact_and_never_attested(event_path: EventPath) -> None:
    """The relay verifies each engine, but its own stream does not represent the cache of a single engine."""
    consumer = event_path.consumer()
    fill(event_path)
    event_path.wait_until(lambda: consumer.trust == Trust.EXACT and consumer.hashes == event_path.hashes_on_all_tiers)
    upstreams = event_path.relays[0].status().upstreams
    event_path.wait_until(lambda: all(each.trust.attested for each in event_path.relays[0].status().upstreams))
    assert len(upstreams) == 2
    assert (consumer.attested, consumer.is_attested) == ([], False)
