"""The share of prompts that an unlimited cache would find."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from kvevents.sim.requests import Drawn, Request


def shared_prefix(requests: Iterable[Request]) -> float:
    """Return the share of all prompt tokens, 0 to 1, that an unlimited cache of the whole fleet would find.

    When a prompt arrives, the unlimited cache contains all earlier prompts and answers.
    """
    paths: set[object] = set()
    held = total = 0
    for request in requests:
        path: object = (request.lora, request.salt)
        is_known = True
        for piece in request.prompt.pieces:
            path = _extend_path(path, piece)
            is_known = is_known and path in paths
            paths.add(path)
            held += (piece.length if isinstance(piece, Drawn) else len(piece)) if is_known else 0
        total += len(request.prompt)
        for piece in request.output.pieces:
            paths.add(path := _extend_path(path, piece))
    return held / total if total else 0.0


def _extend_path(path: object, piece: Drawn | array[int]) -> object:
    return hash(path), piece if isinstance(piece, Drawn) else piece.tobytes()
