"""Follow one engine: `python examples/subscribe.py [ENDPOINT REPLAY_ENDPOINT]`."""

import sys

from kvevents import Batch, Source, Subscriber

endpoint, replay_endpoint = sys.argv[1:] or ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")
with Subscriber(Source(endpoint, replay_endpoint, name="pod-7")) as subscriber:
    for delivery in subscriber:  # every batch once, in order, through drops, restarts and late starts
        if isinstance(delivery, Batch):
            print(delivery.seq, delivery.events, subscriber.trust("pod-7"), flush=True)
        else:
            print(delivery, flush=True)  # Reset: forget this engine. Gap: these batches are lost for good.
