"""Stores that cannot be keyed whole, and the multimodal items of TensorRT-LLM.

A prompt with an item finds the blocks that an engine announced for the same prompt, in whichever form, and no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.events import BlockStored
from kvevents.index import MultiModal, Namespace, PrefixIndex
from kvevents.publisher.compaction import Compactor
from kvevents.wire import decode_batch
from wire_cases import batch_of, make_store

SIZE = 4
VOCABULARY = 1_000
PLACEHOLDER = 999
"""The token that a client has in its prompt for each token of an item."""
ENGINE_PLACEHOLDER = 1_001
"""The token that the engine's V1 cache has for each token of an item."""


def digest(item: int) -> str:
    return bytes([item] * 32).hex()


@dataclass(frozen=True)
class Span:
    """An item, or a part of one behind `before` of its tokens."""

    item: int
    start: int
    length: int
    before: int = 0


def prompt_of(length: int, spans: Iterable[Span]) -> list[int]:
    tokens = list(range(1, length + 1))
    for span in spans:
        tokens[span.start : span.start + span.length] = [PLACEHOLDER] * span.length
    return tokens


def parts_of(spans: Sequence[Span], start: int, uuid: bool = False) -> list[dict[str, Any]]:
    """Return `mm_keys` of the block that begins at `start`."""
    inside = [span for span in spans if span.start < start + SIZE and span.start + span.length > start]
    known = [(span.item, span.before + max(0, start - span.start)) for span in inside]
    extra = {"uuid": f"name {inside[0].item}"} if uuid and inside else {}
    return [{"type": "mm_key", "hash": digest(item), "start_offset": offset, **extra} for item, offset in known]


def announce(length: int, spans: Sequence[Span], form: str, first: int = 0, with_keys: bool = True, uuid: bool = False) -> Any:
    """Return the store of a prompt's blocks from the block `first` on, as a cache manager of TensorRT-LLM announces it."""
    tokens: list[Any] = list(range(1, length + 1))
    for span in spans:
        for at in range(span.length):
            position = span.before + at
            v2 = digest(span.item) if position == 0 else VOCABULARY + position
            tokens[span.start + at] = v2 if form == "v2" else ENGINE_PLACEHOLDER
    blocks = range(first, length // SIZE)
    keys = {"mm_keys": [parts_of(spans, block * SIZE, uuid) for block in blocks]} if with_keys else {}
    return make_store(
        block_hashes=[block + 1 for block in blocks],
        parent_block_hash=first or None,
        token_ids=tokens[first * SIZE : length // SIZE * SIZE],
        block_size=SIZE,
        **keys,
    )


def held(index: PrefixIndex, length: int, spans: Sequence[Span], names: Any = digest) -> int:
    items = [MultiModal(names(span.item), span.start, span.length) for span in spans]
    best = index.match(prompt_of(length, spans), Namespace(mm=items)).best
    return 0 if best is None else best.tokens


def index_of(*events: Any) -> PrefixIndex:
    index = PrefixIndex()
    for seq, event in enumerate(events):
        report = index.apply_payload("e", 0, seq, batch_of(event)).report
        assert report is None or not report.rejected
    return index


LAYOUTS = {
    "inside a block": [Span(7, 5, 2)],
    "a whole block": [Span(7, 4, 4)],
    "over a border": [Span(7, 5, 4)],
    "long": [Span(7, 2, 13)],
    "from the first token": [Span(7, 0, 6)],
    "to the last token": [Span(7, 9, 11)],
    "two items": [Span(7, 1, 4), Span(8, 10, 7)],
    "two in a block": [Span(7, 4, 2), Span(8, 7, 3)],
}


@pytest.mark.parametrize("form", ["v1", "v2"])
@pytest.mark.parametrize("spans", LAYOUTS.values(), ids=LAYOUTS)
def test_a_prompt_with_an_item_finds_its_blocks_in_either_form(spans: list[Span], form: str) -> None:
    index = index_of(announce(20, spans, form))
    assert held(index, 20, spans) == 20
    other = [Span(span.item + 20, span.start, span.length) for span in spans]
    assert held(index, 20, other) == spans[0].start // SIZE * SIZE
    moved = [Span(span.item, span.start + 1, span.length - 1) for span in spans]
    assert held(index, 20, moved) < 20
    plain = index.match(prompt_of(20, spans)).best
    assert (plain.tokens if plain else 0) == spans[0].start // SIZE * SIZE


@pytest.mark.parametrize("spans", LAYOUTS.values(), ids=LAYOUTS)
def test_a_digest_is_enough(spans: list[Span]) -> None:
    """Early releases of V2 announce no `mm_keys`."""
    index = index_of(announce(20, spans, "v2", with_keys=False))
    assert held(index, 20, spans) == 20
    assert held(index, 20, [Span(9, span.start, span.length) for span in spans]) == spans[0].start // SIZE * SIZE


def test_the_uuid_of_an_item_takes_precedence() -> None:
    spans = [Span(7, 5, 9)]
    index = index_of(announce(20, spans, "v2", uuid=True))
    assert held(index, 20, spans, lambda item: f"name {item}") == 20
    assert held(index, 20, spans) == held(index, 20, spans, lambda item: f"name {item + 1}") == 4


@pytest.mark.parametrize("form", ["v1", "v2"])
def test_an_item_continues_in_the_next_event(form: str) -> None:
    spans = [Span(7, 5, 9)]
    first, rest = announce(8, [Span(7, 5, 3)], form), announce(20, spans, form, first=2)
    assert held(index_of(first, rest), 20, spans) == 20


def test_an_item_that_text_interrupts_has_an_entry_for_each_part() -> None:
    spans = [Span(7, 1, 4), Span(7, 9, 6, before=4)]
    index = index_of(announce(20, spans, "v2"))
    assert held(index, 20, spans) == 20
    assert held(index, 20, [spans[0], Span(8, 9, 6)]) == 8


BROKEN = {
    "no item": [[], [{"start_offset": 0}], [{"start_offset": 3}], [], []],
    "not per block": [[{"hash": digest(7), "start_offset": 0}]],
    "a map": {"hash": digest(7), "start_offset": 0},
    "another offset": [[], [{"hash": digest(7), "start_offset": 2}], [], [], []],
    "negative": [[], [{"hash": digest(7), "start_offset": -1}], [], [], []],
    "too many": [[], [{"hash": digest(7), "start_offset": 0}] * 3, [], [], []],
}


@pytest.mark.parametrize("form", ["v1", "v2"])
@pytest.mark.parametrize("keys", BROKEN.values(), ids=BROKEN)
def test_an_unknown_item_never_matches(keys: Any, form: str) -> None:
    """A digest among the tokens identifies an item, unless `mm_keys` contradict it."""
    spans = [Span(7, 5, 2)]
    index = index_of(announce(20, spans, form) | {"mm_keys": keys})
    if form == "v1":
        assert held(index, 20, spans) <= 4
    assert held(index, 20, [Span(8, 5, 2)]) <= 4
    assert index.worker("e").blocks == 5


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=3),
    st.integers(1, 8),
    st.sampled_from(["v1", "v2"]),
    st.integers(0, 7),
)
def test_prompts_of_any_layout_find_their_blocks(gaps: list[tuple[int, int]], blocks: int, form: str, split: int) -> None:
    """Items of at least two tokens, in one event or in two."""
    spans, at = [], 0
    for item, (gap, length) in enumerate(gaps):
        spans.append(Span(item, at + gap, length + 1))
        at += gap + length + 1
    length = max(blocks * SIZE, -(-at // SIZE) * SIZE)
    index = index_of(announce(length, spans, form))
    assert held(index, length, spans) == length
    first = split % (length // SIZE)
    if first and not any(first * SIZE - 1 <= span.start + span.length - 1 <= first * SIZE for span in spans):
        # An item with one token in an event does not show whether that token is one of text.
        cut = [replace(span, length=min(span.length, first * SIZE - span.start)) for span in spans if span.start < first * SIZE]
        index = index_of(announce(first * SIZE, cut, form), announce(length, spans, form, first=first))
        assert held(index, length, spans) == length


# --- tokens without a key


@pytest.mark.parametrize("bad", [-1, 2**32, "x", None, 2.5])
@pytest.mark.parametrize("at", range(0, 16, 3))
def test_a_block_that_cannot_be_keyed_costs_itself_and_those_behind_it(bad: Any, at: int) -> None:
    tokens: list[Any] = list(range(1, 17))
    tokens[at] = bad
    event = make_store(block_hashes=[1, 2, 3, 4], token_ids=tokens, block_size=SIZE)
    index = index_of(event)
    best = index.match([token if token != bad else 7 for token in tokens]).best
    assert (best.tokens if best else 0) == at // SIZE * SIZE
    assert index.stats().rejected == {("none", "bad-token"): 1}
    index.apply_payload("e", 0, 1, batch_of({"type": "BlockRemoved", "block_hashes": [1, 2, 3, 4], "medium": "GPU"}))
    assert (index.stats().blocks, index.stats().orphans) == (0, 0)


def test_pairs_before_a_bad_one_are_keyed() -> None:
    pairs: list[Any] = [(at, at + 1) for at in range(8)]
    for bad in ((-1, 7), 6, "x"):
        index = index_of(make_store(block_hashes=[1, 2], token_ids=[*pairs[:6], bad, pairs[7]], block_size=SIZE))
        best = index.match(list(range(9))).best
        assert best is not None
        assert best.tokens == SIZE


def test_a_snapshot_has_the_blocks_that_were_keyed() -> None:
    compactor = Compactor.create()
    assert compactor is not None
    compactor.append(batch_of(make_store(block_hashes=[1, 2, 3], token_ids=[*range(8), "x", 1, 2, 3], block_size=SIZE)))
    _, payload = compactor.payloads(1 << 20, 1.0) or []
    event, sign = decode_batch(payload).batch.events
    assert isinstance(event, BlockStored)
    assert isinstance(sign, BlockStored)
    assert event.block_hashes == [1, 2]
    # The sign lets consumers of the snapshot notice that the third block could not be used.
    index = index_of(event, sign)
    assert [each.estimate for each in index.workers()] == ["set-aside"]
