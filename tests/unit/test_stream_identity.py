"""Fingerprints, the cross-check of replay with live batches, and quarantine, each against a model that holds every payload."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvevents.stream import PendingBytes, StreamLimits
from kvevents.stream.identity import MAX_FINGERPRINTS, CrossCheck, Fingerprint, FingerprintChain, NewestBatch, Quarantine
from kvevents.wire import Live

LIMITS = StreamLimits(max_pending_batches=12, max_pending_bytes=60)

numbers = st.integers(0, 60)


def batch(seq: int, incarnation: int = 0) -> NewestBatch:
    return NewestBatch(seq, b"%d of %d" % (seq, incarnation), True)


@given(st.binary(max_size=20), st.binary(max_size=20), st.booleans())
def test_a_fingerprint_matches_only_its_own_payload(payload: bytes, other: bytes, live: bool) -> None:
    newest = NewestBatch(3, payload, live)
    assert newest.fingerprint() == Fingerprint.of_batch(3, payload, live=live)
    for known in (newest, newest.fingerprint()):
        assert known.matches(payload)
        assert known.matches(other) == (payload == other)


@given(st.lists(numbers))
def test_a_chain_rises_and_is_bounded(seqs: list[int]) -> None:
    """Batches that are not newer are ignored. Beyond the limit the newest one is replaced, and the chain is incomplete."""
    chain, rising = FingerprintChain(), list[int]()
    for seq in seqs:
        chain.add(batch(seq))
        if not rising or seq > rising[-1]:
            rising.append(seq)
    expected = rising if len(rising) <= MAX_FINGERPRINTS else [*rising[: MAX_FINGERPRINTS - 1], rising[-1]]
    assert [each.seq for each in chain.fingerprints] == expected
    assert chain.is_incomplete == (len(rising) > MAX_FINGERPRINTS)
    for seq in range(61):
        following = chain.first_after(seq)
        assert (None if following is None else following.seq) == next((each for each in expected if each > seq), None)
        assert [each.seq for each in chain.up_to(seq).fingerprints] == [each for each in expected if each <= seq]


@given(st.sets(numbers, max_size=30), st.sets(numbers, max_size=30))
def test_merged_chains_require_what_both_require(one: set[int], other: set[int]) -> None:
    first, second = FingerprintChain(), FingerprintChain()
    first.add(*map(batch, sorted(one)))
    second.add(*map(batch, sorted(other)))
    required = sorted({each.seq for each in (*first.fingerprints, *second.fingerprints)})
    merged = first.merge(second)
    expected = required if len(required) <= MAX_FINGERPRINTS else [*required[: MAX_FINGERPRINTS - 1], required[-1]]
    assert [each.seq for each in merged.fingerprints] == expected
    assert merged.is_incomplete >= (first.is_incomplete or second.is_incomplete)


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30))
def test_a_peer_that_changes_its_incarnation_at_any_number_is_detected(switch: int, delivered: int, reconnected: int) -> None:
    """A peer that repeats the first and the newest batch of each connection is of the incarnation of those batches."""
    chain = FingerprintChain()
    chain.add(batch(delivered))
    chain.wants_first_of_connection = True
    for seq in range(delivered + 1, delivered + 2 + reconnected):
        if chain.wants_first_of_connection:
            chain.add_first_of_connection(batch(seq))
    chain.add(batch(delivered + 1 + reconnected))
    repeated = all(each.matches(batch(each.seq, incarnation=int(each.seq >= switch)).payload) for each in chain.fingerprints)
    assert repeated == all(each.seq < switch for each in chain.fingerprints)


@given(st.lists(st.tuples(st.sampled_from(("replayed", "matched", "separate", "cleared")), numbers)))
def test_replayed_batches_are_confirmed_only_by_later_live_ones(steps: list[tuple[str, int]]) -> None:
    """A match at a number confirms the newest answer if no batch of it is above that number, and confirms no other answer."""
    check, newest, earlier = CrossCheck(), None, list[int]()
    check.first_live_seq = 0
    for step, seq in steps:
        if step == "replayed":
            check.add_replayed(Fingerprint.of_batch(seq, b"", live=False), None)
            newest = seq
        elif step == "separate" and newest is not None and len(earlier) < MAX_FINGERPRINTS:
            check.separate_next_answer()
            earlier.append(newest)
            newest = None
        elif step == "matched":
            check.confirm(seq)
            newest = None if newest is not None and newest <= seq else newest
        elif step == "cleared":
            check.clear()
            newest, earlier = None, []
        assert check.is_incomplete == (newest is not None or bool(earlier) or not check.has_matched)
        assert [each.seq for each in check.all_unconfirmed] == [*earlier, *([] if newest is None else [newest])]


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=40), numbers)
def test_quarantine_separates_connections(steps: list[tuple[int, bool]], seq: int) -> None:
    """Frames of the current connection are those after the last reconnect that followed a frame."""
    quarantine, old, new = Quarantine(LIMITS, PendingBytes()), list[Live](), list[Live]()
    number = 0
    for step, is_reconnect in steps:
        if is_reconnect:
            quarantine.reconnect()
            old, new = [*old, *new], []
            continue
        number += 1 + step
        live = Live(b"k", number, b"x" * step)
        fits = len(old) + len(new) < 12 and sum(len(each.payload) for each in (*old, *new)) + step <= 60
        assert quarantine.add(live) == fits
        new += [live] if fits else []
    assert len(quarantine) == len(old) + len(new)
    assert quarantine.has_current_frames == bool(new)
    assert quarantine.newest == next(reversed([*old, *new]), None)
    following = next((each for each in old if each.seq > seq), None)
    result = quarantine.old_fingerprint_after(seq)
    assert (None if result is None else result.seq) == (None if following is None else following.seq)
    assert quarantine.remove_and_split_frames() == (len(old), new)
    assert len(quarantine) == 0


def test_quarantine_is_bounded_in_bytes() -> None:
    """Few frames can be large. Room is free again once the frames were taken."""
    quarantine = Quarantine(LIMITS, PendingBytes())
    size = LIMITS.max_pending_bytes // 3
    frames = [Live(b"", seq, bytes(size)) for seq in range(5)]
    assert [quarantine.add(frame) for frame in frames] == [True, True, True, False, False]
    assert quarantine.add(Live(b"", 9, b"")), "it has room for another frame without bytes"
    assert quarantine.remove_frames() == [*frames[:3], Live(b"", 9, b"")]
    assert quarantine.add(frames[3])
    quarantine.reconnect()
    assert quarantine.remove_and_split_frames() == (1, [])
    assert quarantine.add(Live(b"", 10, bytes(LIMITS.max_pending_bytes)))
    assert not quarantine.add(Live(b"", 11, b"x"))
