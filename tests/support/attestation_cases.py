"""An engine that attests its cache, and a consumer that compares its index with attestations, for tests of both."""

from __future__ import annotations

from collections import Counter
from typing import Any

from msgspec.structs import replace

from kvevents.engines.engine_publisher import EnginePublisher
from kvevents.events import ATTESTATION_MASK, AllBlocksCleared, BlockStored, EventBatch, KVEvent, attestation_term
from kvevents.index import PrefixIndex, tier_of
from kvevents.stream import Source, Trust
from kvevents.subscriber import Subscriber
from publisher_cases import ANY, QUICK


class AttestingEngine:
    """An engine on real sockets with a cache that its heartbeats attest."""

    def __init__(self, heartbeat: float = 0.05, **options: Any) -> None:
        given = {"endpoint": ANY, "replay_endpoint": ANY, "settings": QUICK, "heartbeat": heartbeat, **options}
        self.publisher = EnginePublisher(0, **given)
        self.cache: Counter[tuple[int, int]] = Counter()
        """Copies on the device, by hash and group."""
        self.other_tiers: Counter[int] = Counter()
        """Copies on other tiers, by hash."""
        self.digest_offset = 0
        """A number added to the attested digest, as if the cache held a block that was not announced."""
        self._record()

    def publish(self, *events: KVEvent) -> None:
        """Publish a batch and apply its events to the cache."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                (self.other_tiers if event.unknown_fields else self.cache).clear()
                continue
            change = Counter.update if isinstance(event, BlockStored) else Counter.subtract
            if tier_of(event.medium) == "gpu":
                change(self.cache, [(each, event.group_idx or 0) for each in event.block_hashes])
            else:
                change(self.other_tiers, event.block_hashes)
        self.cache, self.other_tiers = +self.cache, +self.other_tiers
        self.publisher.publish(EventBatch(1.0, list(events)))
        self._record()

    def _record(self) -> None:
        digest = sum(count * attestation_term(*block) for block, count in self.cache.items()) + self.digest_offset
        self.publisher.record_cache(digest & ATTESTATION_MASK, is_batch_pending=False)

    def falsify_attestation(self, number: int) -> None:
        """Attest a digest that is `number` higher than that of the announced blocks; 0 attests the correct digest."""
        self.digest_offset = number
        self._record()

    @property
    def source(self) -> Source:
        return Source(self.publisher.endpoint, self.publisher.replay_endpoint)

    def close(self) -> None:
        self.publisher.shutdown(5.0)


class AttestedConsumer:
    """A subscriber with an index."""

    def __init__(self, source: Source) -> None:
        self.index = PrefixIndex()
        self.attested: list[bool] = []
        """The results of all comparisons with attestations."""
        self.subscriber = Subscriber(replace(source, name="it"), decode=False)

    def take(self, timeout: float = 0.0) -> None:
        for delivery in self.subscriber.receive_many(timeout=timeout):
            report = self.index.apply(delivery).report
            self.subscriber.report(delivery, report)
            if report is not None and report.attestation_matches is not None:
                self.attested.append(report.attestation_matches)

    @property
    def trust(self) -> Trust:
        return self.subscriber.trust()

    @property
    def is_attested(self) -> bool:
        return self.trust == Trust.EXACT and self.trust.attested

    @property
    def hashes(self) -> set[int]:
        return {each.hash for each in self.index.blocks("it")} if self.index.workers() else set()

    @property
    def resets(self) -> int:
        return self.subscriber.status().counters.resets

    def close(self) -> None:
        self.subscriber.close()
