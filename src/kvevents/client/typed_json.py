"""Decodes JSON as a type, in any thread.

msgspec 0.22 prepares a struct type when it is first decoded. If several threads do that at once, one can use the type before it
is complete, which ends the process with a segmentation fault. So a decoder of each type is made by one thread at a time.
"""

from __future__ import annotations

import threading
from typing import Any, Final, TypeVar

import msgspec

T = TypeVar("T")

_lock: Final = threading.Lock()
_decoders: Final[dict[Any, msgspec.json.Decoder[Any]]] = {}


def decode_json(data: bytes, kind: type[T]) -> T:
    """Return JSON as a value of `kind`. Raise `msgspec.MsgspecError` and `RecursionError`."""
    decoder = _decoders.get(kind)
    if decoder is None:
        with _lock:
            decoder = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    value: T = decoder.decode(data)
    return value
