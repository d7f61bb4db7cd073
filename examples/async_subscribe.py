"""Follow engines from asyncio: `python examples/async_subscribe.py [ENDPOINT,REPLAY_ENDPOINT ...]`."""

import asyncio
import sys

from kvevents import AsyncSubscriber, Source


async def main() -> None:
    pairs = [pair.split(",") for pair in sys.argv[1:] or ["tcp://127.0.0.1:5557,tcp://127.0.0.1:5558"]]
    sources = [Source(endpoint, replay, name=f"pod-{number}") for number, (endpoint, replay) in enumerate(pairs)]
    async with AsyncSubscriber(sources) as subscriber:
        async for delivery in subscriber:
            print(delivery, subscriber.trust(delivery.source, delivery.rank), flush=True)


asyncio.run(main())
