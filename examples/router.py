"""A router in one process: `python examples/router.py ENDPOINT,REPLAY_ENDPOINT [...]`, until the end of its input or Ctrl-C.

Each line that it reads is a prompt, as token ids with commas between them. Each line that it prints is the engine for that
prompt, and why. A thread keeps the index; the routing policy asks it and the state of each stream.
"""

import argparse
import sys
import threading
from collections.abc import Sequence

from kvevents import KVEventsError, RawBatch, Source, Subscriber
from kvevents.errors import ClosedError
from kvevents.index import PrefixIndex
from kvevents.routing import Router, policy

LOCAL = "tcp://127.0.0.1:5557,tcp://127.0.0.1:5558"


def follow(subscriber: Subscriber[RawBatch]) -> None:
    """Keep the index, which is the subscriber's sink, until the subscriber is closed."""
    try:
        while True:
            subscriber.receive_many()
    except ClosedError:
        pass


def route_prompts(sources: Sequence[Source]) -> None:
    """Choose an engine for each prompt of the input."""
    index = PrefixIndex()
    with Subscriber(sources, decode=False, sink=index) as subscriber:
        router = Router(policy("prefix-aware"), index, trust=lambda worker: subscriber.trust(*worker))
        for source in sources:
            router.add((source.label, 0))
        threading.Thread(target=follow, args=(subscriber,), daemon=True).start()
        for number, line in enumerate(sys.stdin):
            try:
                prompt = [int(token) for token in line.split(",")]
                decision = router.route(number, prompt)
            except (ValueError, KVEventsError) as error:
                print(f"not a prompt: {error}", flush=True)
                continue
            print(decision.explain(), flush=True)
            # A real router sends the request to decision.worker now, and reports its first token and its end.
            router.record_first_token(number)
            router.finish(number)


def main() -> None:
    """Read the arguments, then route."""
    parser = argparse.ArgumentParser(description="Choose an engine for each prompt on stdin.")
    parser.add_argument("engines", nargs="*", default=[LOCAL], metavar="ENDPOINT,REPLAY_ENDPOINT")
    given = parser.parse_args()
    try:
        pairs = [engine.partition(",") for engine in given.engines]
        route_prompts([Source(live, replay or None, name=f"engine-{at}") for at, (live, _, replay) in enumerate(pairs)])
    except KVEventsError as error:
        sys.exit(f"router.py: {error}")
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
