"""An OpenAI endpoint in front of vLLM servers that sends each request to the engine with most of its prompt in the cache.

    python examples/fastapi_router.py http://10.0.0.7:8000,tcp://10.0.0.7:5557,tcp://10.0.0.7:5558 [...] --port 9000

An engine is its HTTP address, its events and its replay endpoint. Needs fastapi, uvicorn and httpx beside `kvevents[native]`.
"""

import argparse
import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse

from kvevents import AsyncSubscriber, KVEventsError, Source
from kvevents.index import PrefixIndex
from kvevents.routing import Router, policy

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 600.0


def application(urls: Sequence[str], sources: Sequence[Source]) -> FastAPI:
    """Return the endpoint for engines at `urls`, whose events come from `sources`."""
    index = PrefixIndex()
    subscriber = AsyncSubscriber(sources, decode=False, sink=index)
    router = Router(
        policy("prefix-aware"),
        index,
        trust=lambda worker: subscriber.trust(*worker),
        overlay_seconds=2.0,  # similar prompts in a burst go to the engine of the first prompt before events confirm it
    )
    url_of = {source.label: url for source, url in zip(sources, urls, strict=True)}
    for name in url_of:
        router.add((name, 0))
    numbers = itertools.count()
    client = httpx.AsyncClient(timeout=httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS))

    async def follow() -> None:
        while True:
            await subscriber.receive_many()  # into the index, which is the sink

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with subscriber, client:
            following = asyncio.create_task(follow())
            yield
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following

    app = FastAPI(lifespan=lifespan)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {name: subscriber.trust(name).name for name in url_of}

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> StreamingResponse:
        body = await request.json()
        key = next(numbers)
        try:
            decision = router.route(key, await tokens_of(body))
            url = url_of[decision.worker[0]]
            answer = await client.send(client.build_request("POST", url + request.url.path, json=body), stream=True)
        except httpx.HTTPError as error:
            router.finish(key)
            raise HTTPException(502, f"no answer from the engine: {error}") from error
        headers = {"x-kvevents-engine": decision.worker[0], "x-kvevents-cached-tokens": str(decision.tokens)}
        media_type = answer.headers.get("content-type")
        return StreamingResponse(relay(key, answer), answer.status_code, headers, media_type)

    async def tokens_of(body: dict[str, Any]) -> list[int]:
        """Return the prompt's token ids from the engine, which applies the chat template. A local tokenizer is faster."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            return prompt
        asked = {name: body[name] for name in ("model", "prompt", "messages", "tools") if name in body}
        answer = await client.post(f"{urls[next(numbers) % len(urls)]}/tokenize", json=asked)
        answer.raise_for_status()
        found: list[int] = answer.json()["tokens"]
        return found

    async def relay(key: int, answer: httpx.Response) -> AsyncIterator[bytes]:
        """Yield the engine's answer while it arrives. Report its first bytes and its end to the router, even after an error."""
        try:
            async for chunk in answer.aiter_raw():
                router.record_first_token(key)
                yield chunk
        finally:
            router.finish(key)
            await answer.aclose()

    return app


def main() -> None:
    """Read the arguments, then serve."""
    parser = argparse.ArgumentParser(description="Route OpenAI requests by KV cache events.")
    parser.add_argument("engines", nargs="+", metavar="URL,ENDPOINT,REPLAY_ENDPOINT")
    parser.add_argument("--port", type=int, default=9000)
    given = parser.parse_args()
    parts = [engine.split(",") for engine in given.engines]
    if any(len(part) != 3 for part in parts):
        parser.error("each engine is URL,ENDPOINT,REPLAY_ENDPOINT")
    try:
        sources = [Source(live, replay, name=f"engine-{at}") for at, (_, live, replay) in enumerate(parts)]
    except KVEventsError as error:
        parser.error(str(error))
    uvicorn.run(application([url for url, _, _ in parts], sources), port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
