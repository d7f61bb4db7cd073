"""Publish KV cache events as an engine does: `python examples/publish.py [ENDPOINT REPLAY_ENDPOINT]`."""

import itertools
import sys
import time

from kvevents import BlockStored, KVEventBatch, ZmqEventPublisher

endpoint, replay_endpoint = sys.argv[1:] or ("tcp://*:5557", "tcp://*:5558")
publisher = ZmqEventPublisher(endpoint=endpoint, replay_endpoint=replay_endpoint, topic="kv@pod-7@my-model")
print(publisher.endpoint, publisher.replay_endpoint, flush=True)
parent = None
for block in itertools.count(1):
    stored = BlockStored(block_hashes=[block], parent_block_hash=parent, token_ids=[block] * 16, block_size=16)
    publisher.publish(KVEventBatch(ts=time.time(), events=[stored]))  # never blocks; what is missed can be replayed
    parent = block
    time.sleep(0.2)
