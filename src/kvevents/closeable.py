"""The end of a `with` block, for everything that has a method `close`."""

from __future__ import annotations

from typing import Self


class Closeable:
    """A context manager that calls its `close` at the end."""

    def close(self) -> None:
        """Release what is open."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncCloseable:
    """An asynchronous context manager that calls its `close` at the end."""

    async def close(self) -> None:
        """Release what is open."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
