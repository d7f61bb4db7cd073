"""Connections between replicas, with a server that answers when it is told to."""

from __future__ import annotations

import asyncio
import ssl

from kvevents.service.shards.lines import Answered, Lines

DEADLINE = 10.0
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def test_connections_that_are_closed_under_a_question_end_with_it() -> None:
    """Its answer still comes; the connection is not kept for a next one, which nobody will ask."""

    async def scenario() -> None:
        asked, answer, left = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            asked.set()
            await answer.wait()
            writer.write(ANSWER)
            assert await reader.read() == b""
            left.set()
            writer.close()

        async with asyncio.timeout(DEADLINE), await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            lines = Lines(f"http://127.0.0.1:{port}", {}, ssl.create_default_context())
            question = asyncio.create_task(lines.post("/", b""))
            await asked.wait()
            lines.close()
            answer.set()
            assert await question == Answered(200, b"ok")
            await left.wait()

    asyncio.run(scenario())
