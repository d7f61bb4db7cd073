"""Follow one engine: `python examples/subscribe.py [ENDPOINT REPLAY_ENDPOINT]`, until Ctrl-C."""

import argparse
import sys

from kvevents import Batch, Gap, KVEventsError, Source, Subscriber


def follow(source: Source) -> None:
    """Print every batch once, in order, through drops, restarts and late starts."""
    with Subscriber(source) as subscriber:
        for delivery in subscriber:
            match delivery:
                case Batch(seq=seq, events=events):
                    print(seq, events, subscriber.trust(source.label), flush=True)
                case Gap(compacted=True):
                    print(f"a snapshot of batches {delivery.first} to {delivery.last} follows", flush=True)
                case _:
                    print(delivery, flush=True)  # Reset: forget this engine. Gap: these batches are lost.


def main() -> None:
    """Read the arguments, then follow."""
    parser = argparse.ArgumentParser(description="Follow one engine.")
    parser.add_argument("endpoint", nargs="?", default="tcp://127.0.0.1:5557")
    parser.add_argument("replay_endpoint", nargs="?", default="tcp://127.0.0.1:5558")
    given = parser.parse_args()
    try:
        follow(Source(given.endpoint, given.replay_endpoint, name="pod-7"))
    except KVEventsError as error:
        sys.exit(f"subscribe.py: {error}")
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
