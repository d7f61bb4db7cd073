"""Events that do not change which blocks are resident are delivered and do not degrade trust. Unknown events do."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from index_cases import scanned
from kvevents import BlockInactive, BlockStored, Source, Subscriber, Trust
from kvevents.cli.delivery_output import LineFormat
from kvevents.events import BlockRemoved, EventBatch, KVEventBatch
from kvevents.index import PrefixIndex
from kvevents.stream import RawBatch
from kvevents.testing import FakeTransport
from kvevents.wire import decode_batch, dialect_for, dialects, encode_batch
from kvevents.wire.dialects import NEUTRAL_FIELDS, detect_dialect
from wire_cases import batch_of, make_store, pack

AS_MAP = {"type": "BlockInactive", "block_hashes": [1, 2**64 - 1], "medium": "GPU"}
FORMS: dict[str, tuple[Any, BlockInactive]] = {
    "map": (AS_MAP, BlockInactive([1, 2**64 - 1], "GPU")),
    "map with a group": (AS_MAP | {"group_idx": 2}, BlockInactive([1, 2**64 - 1], "GPU", 2)),
    "map without a medium": ({"type": "BlockInactive", "block_hashes": [-1]}, BlockInactive([2**64 - 1])),
    "array": (["BlockInactive", [1], "GPU"], BlockInactive([1], "GPU")),
    "array with a group": (["BlockInactive", [-1], None, 3], BlockInactive([2**64 - 1], None, 3)),
    "digests": (
        AS_MAP | {"block_hashes": [b"x" * 24 + bytes(7) + b"\5"]},
        BlockInactive([5], "GPU", block_digests=[b"x" * 24 + bytes(7) + b"\5"]),
    ),
    "a new field": (AS_MAP | {"age": 3}, BlockInactive([1, 2**64 - 1], "GPU", unknown_fields={"age": 3})),
    "a new element": (["BlockInactive", [1], "GPU", None, 7], BlockInactive([1], "GPU", unknown_fields={"4": 7})),
}


@pytest.mark.parametrize(("wire", "event"), FORMS.values(), ids=FORMS)
def test_a_neutral_event_is_read_in_every_form(wire: Any, event: BlockInactive) -> None:
    """The fast decoder reads it, the tolerant one (needed if another event is unreadable) too, also inside a bin."""
    for others in ([], [{"type": "Tomorrow"}]):
        decoded = decode_batch(batch_of(wire, *others))
        assert decoded.batch.events == [event]
        assert [each.reason for each in decoded.rejected] == ["unknown-tag"] * len(others)
    assert decode_batch(batch_of(pack(wire))).batch.events == [event]


@pytest.mark.parametrize(("wire", "event"), FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("raw", [True, False])
def test_the_index_counts_a_neutral_event_and_keeps_its_blocks(wire: Any, event: BlockInactive, raw: bool) -> None:
    del event
    index = PrefixIndex()
    for seq, payload in enumerate(
        (batch_of(make_store(block_hashes=[1, 2], token_ids=[1, 2, 3, 4], block_size=2)), batch_of(wire))
    ):
        batch = RawBatch("a", 0, 0, seq, False, payload)
        applied = index.apply(batch if raw else batch.decode())
        assert applied.report is None
    assert index.worker("a").blocks == 2
    assert index.worker("a").neutral_events == index.stats().neutral_events == 1
    assert index.stats().wire_rejected == {}
    index.remove_worker("a")
    assert index.stats().neutral_events == 1


def test_a_stream_with_neutral_events_stays_exact_and_an_unknown_event_degrades_it() -> None:
    transport = FakeTransport()
    engine = transport.engine("tcp://e:1", "tcp://e:2")
    with Subscriber(
        Source(engine.endpoint, engine.replay_endpoint, name="e"), transport=transport, clock=transport.clock
    ) as sub:
        engine.publish(BlockStored([1], None, [1, 2], 2))
        engine.publish(BlockInactive([1], "GPU"))
        delivered = [sub.receive(timeout=1) for _ in range(2)]
        assert [event for batch in delivered for event in batch.events] == [  # type: ignore[union-attr]
            BlockStored([1], None, [1, 2], 2),
            BlockInactive([1], "GPU"),
        ]
        assert sub.receive(timeout=1) is None  # replay has answered meanwhile
        assert sub.trust("e") is Trust.EXACT
        engine.publish_payload(batch_of({"type": "BlockPinned", "block_hashes": [1]}))
        sub.receive(timeout=1)
        assert sub.trust("e").name == "DEGRADED"


def test_the_table_of_neutral_fields_agrees_with_the_types_and_the_native_scanner() -> None:
    own = {"block_digests", "unknown_fields"}
    assert {"BlockInactive": tuple(name for name in BlockInactive.__struct_fields__ if name not in own)} == NEUTRAL_FIELDS
    for tag, names in NEUTRAL_FIELDS.items():
        values = {"block_hashes": [1], "medium": None, "group_idx": None}
        for event in ({"type": tag} | {name: values[name] for name in names}, [tag, *(values[name] for name in names)]):
            found = scanned(batch_of(event))
            assert found is not None
            assert [each["type"] for each in found] == [tag]


events = st.builds(
    BlockInactive,
    st.lists(st.integers(0, 2**64 - 1), max_size=3),
    st.none() | st.sampled_from(["GPU", "CPU"]),
    st.none() | st.integers(0, 3),
)


@given(st.lists(events, max_size=3))
def test_neutral_events_survive_a_round_trip(found: list[BlockInactive]) -> None:
    assert decode_batch(encode_batch(KVEventBatch(1.0, list(found)))).batch.events == found
    relayed = [msgspec.structs.replace(event, unknown_fields={"age": 1}) for event in found]
    assert decode_batch(encode_batch(KVEventBatch(1.0, list(relayed)))).batch.events == relayed


@pytest.mark.parametrize("dialect", dialects(), ids=str)
def test_a_release_without_a_neutral_kind_gets_a_batch_without_it(dialect: Any) -> None:
    """Consumers of that release would reject the whole batch."""
    batch = KVEventBatch(1.0, [BlockInactive([1], "GPU"), BlockRemoved([2])])
    assert decode_batch(encode_batch(batch, dialect)).batch.events == [BlockRemoved([2])]


def test_a_neutral_event_does_not_prevent_dialect_detection() -> None:
    newest = dialect_for("vllm")
    assert detect_dialect(batch_of(make_store(), AS_MAP)) == detect_dialect(batch_of(make_store()))
    assert detect_dialect(encode_batch(EventBatch(1.0, [BlockInactive([1])]))) is not None
    assert newest.neutral_kinds == frozenset()


def test_lines_name_inactive_blocks() -> None:
    payload = batch_of(*[AS_MAP] * 5)
    batch = RawBatch("a", 0, 0, 0, False, payload).decode()
    (line,) = LineFormat().batch(batch)
    text = "".join(str(part) for part in line)
    assert "2 blocks inactive 1 ffffffff" in text
    assert "2 events: 4 blocks inactive" in text
