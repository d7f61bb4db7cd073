"""Context managers that call their method `close` at the end of a `with` block."""

from __future__ import annotations

from typing import Self


class Closeable:
    """A base class of context managers: the end of the `with` block calls the method `close`."""

    def close(self) -> None:
        """Release all open resources."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncCloseable:
    """A base class of asynchronous context managers: the end of the `async with` block calls the method `close`."""

    async def close(self) -> None:
        """Release all open resources."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
