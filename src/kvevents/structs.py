"""Structs that any thread may read."""

from __future__ import annotations

from typing import TypeVar

import msgspec

Kind = TypeVar("Kind", bound=type[msgspec.Struct])


def prepared(kind: Kind) -> Kind:
    """Have msgspec look at a struct now, when its module is imported, rather than when somebody first decodes it.

    To be a decorator of each struct that is named to `decode` or `convert`. msgspec (0.22 and before) keeps what it finds out
    about a struct where other threads see it before it is complete: two that decode a struct for the first time at the same
    time can end the process.
    """
    msgspec.json.Decoder(kind)
    return kind
