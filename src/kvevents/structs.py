"""Makes msgspec structs safe to decode from several threads."""

from __future__ import annotations

from typing import TypeVar

import msgspec

StructType = TypeVar("StructType", bound=type[msgspec.Struct])


def build_decoder_now(kind: StructType) -> StructType:
    """Build msgspec's type information of a struct when its module is imported, not at its first use.

    Decorate each struct that is passed to `decode` or `convert`. msgspec (up to 0.22) stores the type information where other
    threads see it before it is complete: two threads that decode a struct for the first time can crash the process.
    """
    msgspec.json.Decoder(kind)
    return kind
