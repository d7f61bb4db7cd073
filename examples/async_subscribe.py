"""Follow engines from asyncio: `python examples/async_subscribe.py [ENDPOINT,REPLAY_ENDPOINT ...]`, until Ctrl-C."""

import argparse
import asyncio
import sys
from collections.abc import Sequence

from kvevents import AsyncSubscriber, KVEventsError, Source

LOCAL = "tcp://127.0.0.1:5557,tcp://127.0.0.1:5558"


async def follow(sources: Sequence[Source]) -> None:
    """Print what each engine announces."""
    async with AsyncSubscriber(sources) as subscriber:
        async for delivery in subscriber:
            print(delivery, subscriber.trust(delivery.source, delivery.rank), flush=True)


def main() -> None:
    """Read the arguments, then follow."""
    parser = argparse.ArgumentParser(description="Follow engines from asyncio.")
    parser.add_argument("engines", nargs="*", default=[LOCAL], metavar="ENDPOINT,REPLAY_ENDPOINT")
    given = parser.parse_args()
    try:
        pairs = [engine.partition(",") for engine in given.engines]
        asyncio.run(follow([Source(live, replay or None, name=f"pod-{at}") for at, (live, _, replay) in enumerate(pairs)]))
    except KVEventsError as error:
        sys.exit(f"async_subscribe.py: {error}")
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
