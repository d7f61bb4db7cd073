"""Publish KV cache events as an engine does: `python examples/publish.py [ENDPOINT REPLAY_ENDPOINT]`, until Ctrl-C."""

import argparse
import itertools
import sys
import time

from kvevents import BlockStored, KVEventBatch, KVEventsError, ZmqEventPublisher


def publish(publisher: ZmqEventPublisher) -> None:
    """Yield blocks one by one; each block is the child of the previous block."""
    parent = None
    for block in itertools.count(1):
        stored = BlockStored(block_hashes=[block], parent_block_hash=parent, token_ids=[block] * 16, block_size=16)
        publisher.publish(KVEventBatch(ts=time.time(), events=[stored]))  # never blocks; missed batches can be replayed
        parent = block
        time.sleep(0.2)


def main() -> None:
    """Read the arguments, publish, and shut down."""
    parser = argparse.ArgumentParser(description="Publish KV cache events as an engine does.")
    # Only this machine can connect. An engine in a cluster has tcp://*:5557.
    parser.add_argument("endpoint", nargs="?", default="tcp://127.0.0.1:5557")
    parser.add_argument("replay_endpoint", nargs="?", default="tcp://127.0.0.1:5558")
    given = parser.parse_args()
    try:
        publisher = ZmqEventPublisher(
            endpoint=given.endpoint, replay_endpoint=given.replay_endpoint, topic="kv@pod-7@my-model", bind=True
        )
        print(publisher.endpoint, publisher.replay_endpoint, flush=True)
        try:
            publish(publisher)
        finally:
            publisher.shutdown()
    except KVEventsError as error:
        sys.exit(f"publish.py: {error}")
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
