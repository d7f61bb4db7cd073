"""A substitute for modules that an engine's module imports and does not need here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self


class _Open(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __or__(cls, _: Any) -> Any:
        return cls

    __ror__ = __or__


class Anything(metaclass=_Open):
    """Can be called, subclassed, asked for any attribute, and used with `[]` and `|` in an annotation."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __class_getitem__(cls, _: Any) -> type[Anything]:
        return cls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *_: Any, **__: Any) -> Any:
        return Anything()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass
