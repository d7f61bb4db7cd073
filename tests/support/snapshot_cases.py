"""Functions that write, read and change snapshots of an index."""

from __future__ import annotations

import io
import random
import struct
from typing import Any

from xxhash import xxh3_64_intdigest as xxh3

from index_cases import (
    Admit,
    Adversary,
    Choices,
    Label,
    Remove,
    Step,
    blocks_of,
)
from kvevents.index import PrefixIndex

FRAME = 1 << 20


def apply_step(index: PrefixIndex, step: Step) -> None:
    if isinstance(step, Remove):
        index.remove_worker(step.worker)
    elif isinstance(step, Admit):
        index.readmit(step.worker)
    elif isinstance(step, Label):
        index.set_model(step.source, step.model)
    else:
        index.apply(step)


def take_snapshot(index: PrefixIndex) -> bytes:
    file = io.BytesIO()
    index.snapshot(file)
    return file.getvalue()


def restore_snapshot(content: bytes, index: PrefixIndex | None = None) -> PrefixIndex:
    index = index or PrefixIndex()
    index.restore(io.BytesIO(content))
    return index


def state(index: PrefixIndex) -> list[Any]:
    infos = sorted(
        (info.source, info.rank, info.model, info.incarnation, info.last_seq, info.orphans) for info in index.workers()
    )
    return [(info, blocks_of(index, info[:2]), index.digest(info[:2])) for info in infos]


def remove_frames(content: bytes) -> bytes:
    at, payloads = 12, []
    while length := struct.unpack_from("<I", content, at)[0]:
        payloads.append(content[at + 12 : at + 12 + length])
        at += 12 + length
    return b"".join(payloads)


def add_frames(content: bytes, head: bytes) -> bytes:
    total, found = xxh3(head), [head]
    for piece in [content[at : at + FRAME] for at in range(0, len(content), FRAME)] + [b""]:
        total = xxh3(piece, (total + len(piece)) & (1 << 64) - 1)
        found.append(struct.pack("<IQ", len(piece), total) + piece)
    return b"".join(found)


def make_full_snapshot() -> bytes:
    """Return the longest of some snapshots, so that it has every kind of item."""
    found = []
    for seed in range(40):
        index = PrefixIndex()
        for step in Adversary(Choices(random.Random(seed).randbytes(800))).steps():
            apply_step(index, step)
        if index.stats().orphans and index.stats().copies:
            found.append(take_snapshot(index))
    return max(found, key=len)
