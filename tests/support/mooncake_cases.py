"""Requests in Mooncake's format of traces."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path

import msgspec

from kvevents.sim.requests import Request
from kvevents.sim.workload_traces import PIECE_TOKENS, MooncakeRow


def mooncake_rows(requests: Iterable[Request]) -> Iterator[MooncakeRow]:
    """Yield these requests in Mooncake's format: pieces of 512 tokens become numbers, without their text.

    Sessions, LoRA and salts are not part of the format: prompts of different LoRAs or salts share no ids. Times are rounded
    down to milliseconds.
    """
    ids: dict[tuple[object, bytes], int] = {}
    for request in requests:
        text = memoryview(request.prompt.tokens())
        parent: object = (request.lora, request.salt)
        path: list[int] = []
        for start in range(0, len(text), PIECE_TOKENS):
            parent = ids.setdefault((parent, _digest(text[start : start + PIECE_TOKENS])), len(ids))
            path.append(parent)
        yield MooncakeRow(int(request.at * 1000), len(text), len(request.output), path)


def _digest(piece: memoryview) -> bytes:
    return blake2b(piece, digest_size=16).digest()


def write_rows(path: Path, rows: Iterable[MooncakeRow]) -> None:
    """Write rows, compressed if the name ends in `.gz`."""
    with gzip.open(path, "wb") if path.suffix == ".gz" else path.open("wb") as file:
        file.writelines(msgspec.json.encode(row) + b"\n" for row in rows)
