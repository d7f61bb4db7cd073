"""Golden payloads, and strategies for events and msgpack, for the wire tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import msgspec
from hypothesis import strategies as st

import paths
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVEventBatch
from kvevents.wire import Dialect, Rejected

DATA = paths.DATA
CAPTURES = DATA / "vllm-0.32-captures.jsonl.gz"

# Repeated here, so that tests do not compare the table of dialects with itself.
ARRAY_FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
KINDS: dict[str, Any] = {"BlockStored": BlockStored, "BlockRemoved": BlockRemoved, "AllBlocksCleared": AllBlocksCleared}


@dataclass(frozen=True)
class Golden:
    """One row of `dialects.jsonl`."""

    engine: str
    release: str
    case: str
    payload: bytes
    decoded: Any
    pub_frames: list[bytes]
    replay_frames: list[bytes]
    replay_end_frames: list[bytes]

    def __str__(self) -> str:
        return f"{self.engine}-{self.release.split(' ')[0]}-{self.case}"

    def batch(self) -> KVEventBatch:
        """Return the batch that is built from `decoded_json`, without our decoder."""
        if isinstance(self.decoded, dict):
            ts, events, rank = (self.decoded[name] for name in ("ts", "events", "data_parallel_rank"))
        else:
            ts, events, rank = [*self.decoded, None][:3]
        return KVEventBatch(ts, [canonicalize_event(event) for event in events], rank)


def _frames(row: dict[str, Any], name: str) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in row[name]]


def _with_bytes(value: dict[str, Any]) -> Any:
    return bytes.fromhex(value["$hex"]) if "$hex" in value else value


def load_goldens() -> list[Golden]:
    goldens = []
    for line in (DATA / "dialects.jsonl").read_text().splitlines():
        row = json.loads(line, object_hook=_with_bytes)
        frames = [_frames(row, name) for name in ("pub_frames_hex", "replay_frames_hex", "replay_end_frames_hex")]
        payload = bytes.fromhex(row["payload_hex"])
        goldens.append(Golden(row["engine"], row["release"], row["case"], payload, row["decoded_json"], *frames))
    return goldens


GOLDENS = load_goldens()
RELEASES = list({(golden.engine, golden.release): golden for golden in GOLDENS}.values())
"""One golden of each release, for tests that depend on the release only."""


def canonicalize_event(event: Any) -> KVEvent:
    """Return an event of `decoded_json` in our form.

    It has unsigned hashes, shortened byte hashes together with their bytes, and extra keys as tuples.
    """
    if isinstance(event, list):
        tag, fields = event[0], dict(zip(ARRAY_FIELDS[event[0]], event[1:], strict=False))
    else:
        tag, fields = event["type"], {name: value for name, value in event.items() if name != "type"}
    hashes = fields.get("block_hashes")
    if hashes is not None:
        fields["block_hashes"] = [make_unsigned(value) for value in hashes]
        if hashes and all(isinstance(value, bytes) for value in hashes):
            fields["block_digests"] = hashes
    if tag == "BlockStored":
        parent = fields["parent_block_hash"]
        fields["parent_block_hash"] = None if parent is None else make_unsigned(parent)
        fields["parent_block_digest"] = parent if isinstance(parent, bytes) else None
        fields["token_ids"] = [tuple(token) if isinstance(token, list) else token for token in fields["token_ids"]]
        fields["lora_id"] = fields.get("lora_id")
        if fields.get("extra_keys") is not None:
            fields["extra_keys"] = [None if keys is None else tuple(keys) for keys in fields["extra_keys"]]
    built: KVEvent = KINDS[tag](**fields)
    return built


def make_unsigned(value: int | bytes) -> int:
    return int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else value % 2**64


def pack(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def batch_of(*events: Any, rank: int | None = 0) -> bytes:
    """Return a payload of events that are given as Python values."""
    return pack([1700000000.25, list(events), rank])


def make_store(**fields: Any) -> dict[str, Any]:
    """Return a small BlockStored as vLLM sends it, with additional `fields`."""
    default = {"type": "BlockStored", "block_hashes": [11], "parent_block_hash": None, "token_ids": [1, 2], "block_size": 2}
    return {**default, "lora_id": None, "medium": "GPU", "lora_name": None} | fields


GOOD = BlockStored([11], None, [1, 2], 2, None, "GPU", None)
"""The event that `make_store()` is decoded to."""

# --- generators ------------------------------------------------------------------------------------------------------------

u64 = st.integers(0, 2**64 - 1)
i64 = st.integers(-(2**63), 2**63 - 1)
short_text = st.text(max_size=8)
scalars = st.none() | st.booleans() | i64 | u64 | st.floats() | short_text | st.binary(max_size=40)
msgpack_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(short_text | i64 | st.binary(max_size=4), inner, max_size=4),
    max_leaves=12,
)
extra_keys = st.lists(
    st.none() | st.lists(short_text | st.tuples(short_text, st.integers(-50, 50)).map(list), max_size=3).map(tuple), max_size=3
)
_FIELD_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "block_hashes": st.lists(u64, max_size=4),
    "parent_block_hash": st.none() | u64,
    "token_ids": st.lists(st.integers(0, 2**32 - 1), max_size=8)
    | st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), max_size=4),
    "block_size": st.integers(0, 512),
    "lora_id": st.none() | st.integers(0, 100),
    "medium": st.none() | st.sampled_from(["GPU", "CPU", "STORAGE", "CPU_PINNED", "DISK", "EXTERNAL"]),
    "lora_name": st.none() | short_text,
    "extra_keys": st.none() | extra_keys,
    "group_idx": st.none() | st.integers(0, 8),
    "kv_cache_spec_kind": st.none() | st.sampled_from(["full_attention", "sliding_window"]),
    "kv_cache_spec_sliding_window": st.none() | st.integers(0, 4096),
    "locality": st.none() | st.sampled_from(["LOCAL", "REMOTE"]),
    "ownership": st.none() | short_text,
    "session_id": st.none() | short_text,
    "lookahead_token_ids": st.none() | st.lists(st.lists(st.integers(0, 1000), max_size=3), max_size=3),
    "cache_salt": st.none() | short_text,
}


def events_of(row: Dialect) -> st.SearchStrategy[KVEvent]:
    """Return a strategy for events with exactly the fields of `row`."""

    def build(kind: Any, names: tuple[str, ...]) -> st.SearchStrategy[KVEvent]:
        found: st.SearchStrategy[KVEvent] = st.builds(kind, **{name: _FIELD_VALUES[name] for name in names})
        return found

    return build(BlockStored, row.stored_fields) | build(BlockRemoved, row.removed_fields) | st.just(AllBlocksCleared())


def batches_of(row: Dialect) -> st.SearchStrategy[KVEventBatch]:
    rank = st.none() | st.integers(0, 64) if row.has_rank else st.none()
    return st.builds(KVEventBatch, st.floats(0, 1e11), st.lists(events_of(row), max_size=4), rank)


def adopt_details(native: Sequence[Rejected], python: Sequence[Rejected]) -> tuple[Rejected, ...]:
    """Return Python's rejections, with the native decoder's details where those of Python quote msgspec or the peer."""
    found = []
    for ours, theirs in zip_longest(native, python):
        if ours is None or theirs is None:
            return tuple(python)
        subject, is_foreign, _ = theirs.detail.partition(": ")
        if theirs.detail.startswith("event type "):
            subject, is_foreign = "event type", ": "
        is_same = is_foreign and ours.detail.startswith(f"{subject} ") and len(ours.detail) <= 256
        found.append(msgspec.structs.replace(theirs, detail=ours.detail) if is_same else theirs)
    return tuple(found)
