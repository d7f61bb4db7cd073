"""The release of a payload is detected from its form."""

from __future__ import annotations

from typing import Any

import pytest

from kvevents.events import BlockStored, KVEventBatch
from kvevents.wire import dialect_for, dialects, encode_batch
from kvevents.wire.dialects import detect_dialect
from wire_cases import GOLDENS, Golden, batch_of, make_store, pack

EVENT_SGLANG = {name: value for name, value in make_store().items() if name != "lora_name"}


@pytest.mark.parametrize("golden", GOLDENS, ids=str)
def test_the_detected_row_is_not_newer_than_the_release(golden: Golden) -> None:
    found, sent = detect_dialect(golden.payload), dialect_for(golden.engine, golden.release)
    assert found is not None
    assert (found.batch_form, found.event_form) == (sent.batch_form, sent.event_form)
    if found.engine == sent.engine:
        assert dialects().index(found) <= dialects().index(sent)


@pytest.mark.parametrize(
    ("event", "name"),
    [
        (make_store(), "vllm-0.24.0"),
        (make_store(group_idx=0), "vllm-0.24.0"),
        (make_store(locality="LOCAL"), "vllm-0.26.0"),
        (make_store(ownership="t"), "vllm-0.29.0"),
        (make_store(session_id="s"), "vllm-0.30.0"),
        (make_store(lookahead_token_ids=[[1]]), "vllm-0.33.0"),
        (EVENT_SGLANG | {"cache_salt": "s"}, "sglang-0.5.20"),
        (EVENT_SGLANG | {"session_id": "s", "lora_name": "l"}, "sglang-0.5.22"),
        (EVENT_SGLANG | {"lora_name": "l", "session_id": "s"}, "vllm-0.30.0"),
        (["BlockStored", [1], None, [1], 1, None], "vllm-0.9.1"),
        (["BlockStored", [1], None, [1], 1, None, "GPU"], "vllm-0.10.2"),
        (["BlockStored", [-1], None, [1], 1, None, "GPU"], "sglang-0.5.9"),
        (["BlockStored", [1], 2**63, [1], 1, None, "GPU"], "vllm-0.10.2"),
        (["BlockRemoved", [1], "GPU", 0], "vllm-0.20.0"),
        (["BlockRemoved", [b"d" * 32], "GPU"], "vllm-0.10.2"),
    ],
)
def test_one_event_is_enough_to_detect_its_release(event: Any, name: str) -> None:
    assert str(detect_dialect(batch_of(event))) == name


def test_vllm_0_33_is_recognised_by_its_map_header() -> None:
    """Its BlockStored declares 16 fields with the tag, and msgspec chooses the map header by that number."""
    batch = KVEventBatch(1.0, [BlockStored([1], None, [1], 1)], 0)
    newest = dialect_for("vllm", "0.33.0")
    assert detect_dialect(encode_batch(batch, newest)) is newest
    assert detect_dialect(encode_batch(batch, dialect_for("vllm", "0.32.0"))) is dialect_for("vllm", "0.24.0")


def test_the_release_must_fit_all_events_of_a_batch() -> None:
    assert detect_dialect(batch_of(make_store(locality="LOCAL"), make_store(session_id="s"))) is dialect_for("vllm", "0.30.0")
    assert detect_dialect(batch_of(make_store(), ["AllBlocksCleared"])) is None
    assert detect_dialect(batch_of(make_store(lookahead_token_ids=[[1]]), EVENT_SGLANG | {"cache_salt": "s"})) is None
    assert detect_dialect(batch_of(make_store(cache_salt="s"))) is None  # in no release's order


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        pack(None),
        pack([1.0]),
        pack({"events": []}),
        pack([1.0, [], 0, "four"]),
        batch_of(make_store(tier="L5")),
        batch_of({"type": "New"}),
        batch_of({"type": 5}),
        batch_of(None),
        batch_of([]),
        batch_of(b""),
        batch_of(make_store(block_hashes="x")),
        batch_of(make_store()) + b"\0",
    ],
)
def test_a_payload_that_matches_no_row_has_no_dialect(payload: bytes) -> None:
    assert detect_dialect(payload) is None
