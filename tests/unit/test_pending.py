"""What waits, and what is remembered, is bounded in number and in bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvevents.stream import StreamLimits, payload_digest
from kvevents.stream.pending import ReorderBuffer, ReplayedDigests

LIMITS = StreamLimits(max_pending_batches=5, max_pending_bytes=40, max_replayed_digests=5)

payloads = st.binary(max_size=50)
seqs = st.integers(0, 12)


@given(st.lists(st.tuples(st.booleans(), seqs, payloads)))
def test_recent_remembers_the_newest(steps: list[tuple[bool, int, bytes]]) -> None:
    """As a list of which the oldest go until the rest is within the bound; of each the digest is known."""
    recent, model = ReplayedDigests(LIMITS), list[tuple[int, bytes]]()
    for adds, seq, payload in steps:
        known = next((each for number, each in model if number == seq), None)
        model = [each for each in model if each[0] != seq]
        if not adds:
            assert recent.take(seq) == (None if known is None else payload_digest(known))
            continue
        recent.add(seq, payload)
        model.append((seq, payload))
        del model[: -LIMITS.max_replayed_digests]
    assert {seq: digest for seq in range(13) if (digest := recent.take(seq))} == {
        seq: payload_digest(each) for seq, each in model
    }


@given(st.lists(st.tuples(st.booleans(), seqs, payloads)))
def test_what_waits_is_within_both_bounds(steps: list[tuple[bool, int, bytes]]) -> None:
    """A batch without room is refused, and comes again by replay; room that a batch leaves can be used."""
    pending, model = ReorderBuffer(LIMITS), dict[int, bytes]()
    for adds, seq, payload in steps:
        if not adds:
            taken = pending.take(seq)
            assert (None if taken is None else taken[0]) == model.pop(seq, None)
        elif seq not in model:
            fits = len(model) < 5 and sum(map(len, model.values())) + len(payload) <= 40
            assert pending.add(seq, payload, replayed=False) == fits
            model |= {seq: payload} if fits else {}
        assert len(pending) == len(model)
        assert pending.first() == min(model, default=None)


def test_a_batch_that_was_taken_out_of_turn_keeps_nothing_of_what_comes_after_it() -> None:
    """As when a snapshot takes the place of a batch that waits, and another batch of its number comes."""
    pending = ReorderBuffer(LIMITS)
    for seq in (1, 2):
        assert pending.add(seq, b"", replayed=False)
    assert pending.take(2)
    assert pending.add(2, b"", replayed=False)
    for seq in range(1, 1000):
        assert pending.take(seq)
        assert pending.add(seq + 2, b"", replayed=False)
    assert len(pending._order) == 2
    assert pending.first() == 1000
