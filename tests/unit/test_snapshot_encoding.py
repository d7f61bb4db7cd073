"""`encode_snapshot`: each part respects the limit, and all parts together are the state."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.events import BlockStored, KVEvent, KVEventBatch
from kvevents.index import PrefixIndex
from kvevents.publisher.compaction import MAX_SNAPSHOT_PARTS, Compactor, Encode, encode_snapshot
from kvevents.wire import decode_batch, dialects, encode_batch
from publisher_engine import WORKER, Engine

Digest = Callable[[list[bytes]], str]


def digest(payloads: list[bytes]) -> str:
    index = PrefixIndex()
    for seq, payload in enumerate(payloads):
        index.apply_payload(WORKER, 0, seq, payload)
    return index.digest(WORKER)


def encode_parts(payloads: list[bytes], limit: int, encode: Encode = encode_batch) -> list[bytes] | None:
    """Return the parts of the snapshot of these payloads."""
    history = Compactor.create()
    assert history is not None
    history.extend(list(enumerate(payloads)))
    pieces = history.snapshot_pieces(limit)
    assert pieces is not None
    return encode_snapshot(pieces, 1.0, 0, encode, limit, incarnation=7)


def encode_batches(seed: int, count: int) -> list[bytes]:
    engine = Engine(seed, room=40)
    return [encode_batch(KVEventBatch(1.0, engine.events(), 0)) for _ in range(count)]


@pytest.mark.parametrize("dialect", [dialects()[0], dialects()[-1], None], ids=str)
@given(st.integers(0, 2**16), st.integers(0, 80), st.integers(700, 4_000))
def test_every_part_respects_the_limit_and_all_parts_together_give_the_state(
    dialect: object, seed: int, count: int, limit: int
) -> None:
    """In every dialect, the heartbeat of each part has the right digest, and only the heartbeat of the last part is EXACT."""

    def encode(batch: KVEventBatch) -> bytes:
        return encode_batch(batch, dialect)  # type: ignore[arg-type]

    payloads = encode_batches(seed, count)
    parts = encode_parts(payloads, limit, encode)
    if parts is None:
        return
    assert len(parts) <= MAX_SNAPSHOT_PARTS
    assert max(map(len, parts)) <= limit
    if payloads:
        assert digest(parts) == digest(payloads)
    heartbeats = [decode_batch(part).batch.events[-1] for part in parts] if len(parts) > 1 else []
    for number, event in enumerate(heartbeats, 1):
        part_heartbeat = getattr(event, "heartbeat", None)
        assert part_heartbeat is not None
        assert (part_heartbeat.digest, part_heartbeat.incarnation) == (digest(parts[:number]), 7)
        assert part_heartbeat.trust == ("EXACT" if number == len(parts) else "DEGRADED")


def long_chain(blocks: int, *, pairs: bool, extra: bool) -> list[KVEvent]:
    numbers = random.Random(0)
    tokens: list[int | tuple[int, int]] = [numbers.randrange(2**32) for _ in range(4 * blocks)]
    if pairs:
        tokens = [(numbers.randrange(2**32), numbers.randrange(2**32)) for _ in range(4 * blocks)]
        tokens = [(one[0], other[0]) for one, other in zip(tokens, [*tokens[1:], (0, 0)], strict=True)]  # type: ignore[index]
    keys: list[tuple[str, ...] | None] | None = [(f"salt {block}",) for block in range(blocks)] if extra else None
    return [BlockStored(list(range(1, blocks + 1)), None, tokens, 4, medium="GPU", extra_keys=keys)]


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("extra", [False, True])
def test_a_long_chain_is_split_between_blocks(pairs: bool, extra: bool) -> None:
    """Blocks keep their tokens, parents, pairs and extra keys, so an index computes the same keys."""
    payload = encode_batch(KVEventBatch(1.0, long_chain(100, pairs=pairs, extra=extra), 0))
    parts = encode_parts([payload], 2_000)
    assert parts is not None
    assert len(parts) > 1
    assert max(map(len, parts)) <= 2_000
    assert digest(parts) == digest([payload])


def test_a_chain_of_keyed_blocks_is_split_too() -> None:
    keyed = BlockStored(list(range(1, 1001)), None, [], 16, block_keys=list(range(2**63, 2**63 + 1000)))
    payloads = [encode_batch(KVEventBatch(1.0, [keyed], 0))]
    parts = encode_parts(payloads, 5_000)
    assert parts is not None
    assert len(parts) > 1
    assert digest(parts) == digest(payloads)


def test_the_number_of_parts_is_limited() -> None:
    """A state that needs more parts has no snapshot, and neither has a block that exceeds the size limit by itself."""
    payload = encode_batch(KVEventBatch(1.0, long_chain(400, pairs=False, extra=False), 0))
    assert encode_parts([payload], 700) is None
    assert encode_parts([payload], 20) is None
