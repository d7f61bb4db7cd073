"""A sketch of a KV-aware router: which worker holds the longest prefix, and whether we can believe it.

Run it as `python examples/router.py ENDPOINT,REPLAY_ENDPOINT [ENDPOINT,REPLAY_ENDPOINT ...]`; it prints what each worker holds
whenever that changes. A real index also tells groups of hybrid models, media and LoRAs apart.
"""

import argparse
import sys
from collections.abc import Sequence

from kvevents import (
    Batch,
    BlockRemoved,
    BlockStored,
    Delivery,
    Gap,
    KVCacheEvent,
    KVEventsError,
    Reset,
    Source,
    Subscriber,
    Trust,
)

LOCAL = "tcp://127.0.0.1:5557,tcp://127.0.0.1:5558"


class Router:
    """A set of block hashes for each worker, kept by what a subscriber delivers."""

    def __init__(self, subscriber: Subscriber) -> None:
        self.blocks: dict[str, set[int]] = {}
        self.subscriber = subscriber

    def take(self, delivery: Delivery) -> None:
        """Bring a worker's set up to date."""
        blocks = self.blocks.setdefault(delivery.source, set())
        match delivery:
            case Batch(events=events):
                for event in events:
                    apply(event, blocks)
            case Reset():
                blocks.clear()  # another life: its cache is empty
            case Gap():
                pass  # compacted: a snapshot follows. Lost: what was removed stays in the set, and trust says so

    def choose(self, prefix: Sequence[int]) -> str | None:
        """The worker with most of these blocks from the front; one that may be out of date counts half."""
        return max(self.blocks, key=lambda worker: self.weight(worker) * held(prefix, self.blocks[worker]), default=None)

    def weight(self, worker: str) -> float:
        """How much of its claims a worker is believed."""
        trust = self.subscriber.trust(worker)
        return 1.0 if trust == Trust.EXACT else 0.5 if trust == Trust.DEGRADED else 0.0


def apply(event: KVCacheEvent, blocks: set[int]) -> None:
    """Do to a worker's set what an event says."""
    if isinstance(event, BlockStored):
        blocks.update(event.block_hashes)
    elif isinstance(event, BlockRemoved):
        blocks.difference_update(event.block_hashes)
    else:
        blocks.clear()


def held(prefix: Sequence[int], blocks: set[int]) -> int:
    """Blocks of `prefix` that are there, up to the first that is not."""
    return next((count for count, block in enumerate(prefix) if block not in blocks), len(prefix))


def follow(sources: Sequence[Source]) -> None:
    """Follow all workers, and report when something has changed and nothing waits."""
    changed = False
    with Subscriber(sources) as subscriber:
        router = Router(subscriber)
        while True:
            delivery = subscriber.receive(timeout=0.2)
            if delivery is not None:
                router.take(delivery)
            elif changed:
                held_by = {worker: len(blocks) for worker, blocks in sorted(router.blocks.items())}
                print({worker: f"{count} blocks, {subscriber.trust(worker)}" for worker, count in held_by.items()}, flush=True)
            changed = delivery is not None


def main() -> None:
    """Read the arguments, then follow."""
    parser = argparse.ArgumentParser(description="Which worker holds what.")
    parser.add_argument("engines", nargs="*", default=[LOCAL], metavar="ENDPOINT,REPLAY_ENDPOINT")
    given = parser.parse_args()
    try:
        pairs = [engine.partition(",") for engine in given.engines]
        follow([Source(live, replay or None, name=f"worker-{at}") for at, (live, _, replay) in enumerate(pairs)])
    except KVEventsError as error:
        sys.exit(f"router.py: {error}")
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
