"""Choose an engine for each prompt, in one process: `python examples/router.py [ENDPOINT,REPLAY_ENDPOINT ...]`.

A prompt is a line of token ids with commas between them. The end of the input, or Ctrl-C, ends the router.
"""

import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from kvevents import KVEventsError, RawBatch, Source, Subscriber
from kvevents.errors import ClosedError, TrustTimeoutError
from kvevents.index import PrefixIndex
from kvevents.routing import Router, policy


def follow(subscriber: Subscriber[RawBatch]) -> None:
    """Fill the index, which is the sink of the subscriber, until the subscriber is closed."""
    with suppress(ClosedError):
        while True:
            subscriber.receive_many()


def route_prompts(engines: Sequence[str]) -> None:
    """Print the engine for each prompt of the input, and why."""
    pairs = [engine.partition(",") for engine in engines]
    sources = [Source(live, replay or None, name=f"engine-{at}") for at, (live, _, replay) in enumerate(pairs)]
    index = PrefixIndex()
    with Subscriber(sources, decode=False, sink=index) as subscriber:
        with suppress(TrustTimeoutError):
            subscriber.wait_for(timeout=10)  # engines that connect later count from then on
        threading.Thread(target=follow, args=(subscriber,), daemon=True).start()
        router = Router(policy("prefix-aware"), index, trust=lambda worker: subscriber.trust(*worker))
        for source in sources:
            router.add((source.label, 0))
        for line in sys.stdin:
            try:
                with router.request([int(token) for token in line.split(",")]) as decision:
                    print(decision.explain(), flush=True)  # send the request to decision.worker here
            except (ValueError, KVEventsError) as error:
                print(f"not a prompt: {error}", flush=True)


if __name__ == "__main__":
    try:
        route_prompts(sys.argv[1:] or ["tcp://127.0.0.1:5557,tcp://127.0.0.1:5558"])
    except KVEventsError as error:
        sys.exit(f"router.py: {error}")
    except KeyboardInterrupt:
        pass
