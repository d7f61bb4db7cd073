"""Events of kinds that do not change which blocks are resident are skipped, and do not degrade trust. Unknown events do."""

from __future__ import annotations

from typing import Any

import pytest

from kvevents import BlockStored, Source, Subscriber, Trust
from kvevents.index import PrefixIndex
from kvevents.publisher.compaction import Compactor
from kvevents.stream import RawBatch
from kvevents.testing import FakeTransport
from kvevents.wire import decode_batch
from kvevents.wire.dialects import detect_dialect
from wire_cases import batch_of, make_store, pack

AS_MAP = {"type": "BlockInactive", "block_hashes": [1, 2**64 - 1], "medium": "GPU"}
FORMS: dict[str, Any] = {
    "map": AS_MAP,
    "map without fields": {"type": "BlockInactive"},
    "map with any fields": AS_MAP | {"block_hashes": "all", "age": {"steps": [3]}},
    "array": ["BlockInactive", [1], "GPU", 3],
    "array without elements": ["BlockInactive"],
    "array with any elements": ["BlockInactive", {"hash": b"x"}, 1.5],
}
STORE = make_store(block_hashes=[1, 2], token_ids=[1, 2, 3, 4], block_size=2)


@pytest.mark.parametrize("wire", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_neutral_event_is_skipped_in_every_form(wire: Any, is_wrapped: bool) -> None:
    """All other events are read, but an event of an unknown kind is rejected."""
    event = pack(wire) if is_wrapped else wire
    for others in ([], [{"type": "Tomorrow"}]):
        decoded = decode_batch(batch_of(event, STORE, event, *others))
        assert decoded.batch.events == decode_batch(batch_of(STORE)).batch.events
        assert [each.reason for each in decoded.rejected] == ["unknown-tag"] * len(others)


@pytest.mark.parametrize("wire", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("raw", [True, False])
def test_the_index_keeps_the_blocks_of_a_neutral_event(wire: Any, raw: bool) -> None:
    index, expected = PrefixIndex(), PrefixIndex()
    expected.apply(RawBatch("a", 0, 0, 0, False, batch_of(STORE)))
    for seq, payload in enumerate((batch_of(STORE), batch_of(wire))):
        batch = RawBatch("a", 0, 0, seq, False, payload)
        assert index.apply(batch if raw else batch.decode()).report is None
    assert index.worker("a").blocks == 2
    assert index.digest("a") == expected.digest("a")
    assert index.stats().wire_rejected == {}


@pytest.mark.parametrize("wire", FORMS.values(), ids=FORMS)
def test_compacted_history_has_the_blocks_of_a_neutral_event(wire: Any) -> None:
    compactor, expected = Compactor.create(), Compactor.create()
    assert compactor is not None
    assert expected is not None
    expected.append(batch_of(STORE))
    for payload in (batch_of(STORE), batch_of(wire)):
        compactor.append(payload)
    assert compactor.unavailable_reason is None
    assert compactor.payloads(1 << 20, 1.0) == expected.payloads(1 << 20, 1.0)


def test_a_stream_with_neutral_events_stays_exact_and_an_unknown_event_degrades_it() -> None:
    transport = FakeTransport()
    engine = transport.engine("tcp://e:1", "tcp://e:2")
    with Subscriber(
        Source(engine.endpoint, engine.replay_endpoint, name="e"), transport=transport, clock=transport.clock
    ) as sub:
        store = BlockStored([1], None, [1, 2], 2)
        engine.publish(store)
        engine.publish_payload(batch_of(AS_MAP))
        delivered = [sub.receive(timeout=1) for _ in range(2)]
        assert [batch.events for batch in delivered] == [[store], []]  # type: ignore[union-attr]
        assert sub.receive(timeout=1) is None  # replay has answered meanwhile
        assert sub.trust("e") is Trust.EXACT
        engine.publish_payload(batch_of({"type": "BlockPinned", "block_hashes": [1]}))
        sub.receive(timeout=1)
        assert sub.trust("e").name == "DEGRADED"


def test_a_neutral_event_does_not_prevent_dialect_detection() -> None:
    for event in (AS_MAP, {"type": "BlockInactive"}):
        assert detect_dialect(batch_of(make_store(), event)) == detect_dialect(batch_of(make_store()))
        assert detect_dialect(batch_of(event)) is not None
