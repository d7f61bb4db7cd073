"""Events that only holders of a key can read: `python examples/curve.py`.

A publisher and two subscribers in one process, one with a key that the publisher does not allow. In a fleet `kvevents keys`
writes keys to files, and each secret key stays on its machine.
"""

import time
from contextlib import suppress

import zmq

from kvevents import Batch, BlockStored, Curve, KVEventBatch, Source, Subscriber, ZmqEventPublisher

SECONDS = 30.0


def key_pair() -> dict[str, str]:
    """Return new keys, as `Curve` takes them."""
    public, secret = zmq.curve_keypair()
    return {"public_key": public.decode(), "secret_key": secret.decode()}


def first_batch(source: Source, publisher: ZmqEventPublisher) -> str:
    """Return the state of a stream after its first batch, or when the publisher has refused a connection."""
    with Subscriber(source) as subscriber:
        end = time.monotonic() + SECONDS
        while not publisher.connections_refused and time.monotonic() < end:
            if isinstance(subscriber.receive(timeout=0.1), Batch):
                return "receives events"
        return str(subscriber.trust(source.label))


def main() -> None:
    """Publish a block, and read it with either key."""
    engine, router, stranger = key_pair(), key_pair(), key_pair()
    server = Curve(**engine, allowed=(router["public_key"],))
    publisher = ZmqEventPublisher(endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", curve=server)
    try:
        publisher.publish(KVEventBatch(time.time(), [BlockStored([1], None, list(range(16)), 16)]))
        for name, keys in (("router", router), ("stranger", stranger)):
            client = Curve(**keys, server_key=engine["public_key"])
            source = Source(publisher.endpoint, publisher.replay_endpoint, name=name, curve=client)
            print(f"{name}: {first_batch(source, publisher)}")
        print(f"connections refused: {publisher.connections_refused}")
    finally:
        publisher.shutdown()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
