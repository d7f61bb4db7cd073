"""The model of lookups by KV cache groups of several kinds and block sizes, on recorded histories of vLLM 0.33.0."""

from __future__ import annotations

import pytest

from kvevents.events import BlockStored
from kvevents.publisher.compaction import Compactor, encode_snapshot
from kvevents.wire import decode_batch, encode_batch
from tests.system.vllm_oracle.groups import SHAPES, GroupPredictor, History, Step, recorded
from wire_cases import DATA

HISTORIES = recorded(DATA / "vllm-0.33-groups.jsonl.gz")


def test_all_shapes_are_recorded() -> None:
    assert [history.shape for history in HISTORIES] == [shape.name for shape in SHAPES]


@pytest.mark.parametrize("history", HISTORIES, ids=lambda history: history.shape)
def test_every_request_at_vllm_is_predicted(history: History) -> None:
    """Before each of 50 requests, the events so far predict to the token what vLLM's own coordinator then finds."""
    predictor = GroupPredictor(history.drafts)
    for step in history.steps:
        predictor.take(step)
    assert (predictor.requests, predictor.wrong) == (50, 0)
    assert predictor.hits > 0


def test_some_announced_blocks_name_a_parent_that_was_not_announced() -> None:
    """Entries inside a block name a parent that no earlier event has announced, so tokens alone cannot give their keys."""
    (history,) = (history for history in HISTORIES if history.shape == "Mamba states, hashed inside of blocks")
    known: set[int] = set()
    orphans = 0
    for step in history.steps:
        for event in decode_batch(step.payload).batch.events if step.payload else ():
            if isinstance(event, BlockStored):
                parent = event.parent_block_hash
                orphans += parent is not None and parent not in known
                known.update(event.block_hashes)
    assert orphans > 0


@pytest.mark.parametrize("name", ["EAGLE", "EAGLE, two block sizes", "a draft group beside a window"])
def test_without_the_draft_groups_setting_too_much_is_predicted(name: str) -> None:
    """Events do not show that an engine with a draft model drops the last block of a hit, so the groups are a setting."""
    (history,) = (history for history in HISTORIES if history.shape == name)
    predictor = GroupPredictor(None)
    for step in history.steps:
        predictor.take(step)
    assert predictor.wrong > 0


@pytest.mark.parametrize("history", HISTORIES, ids=lambda history: history.shape)
def test_a_consumer_that_begins_with_compacted_history_predicts_every_request(history: History) -> None:
    """A consumer that begins with the compacted first half predicts every request of the second half."""
    compactor = Compactor.create()
    assert compactor is not None
    half = len(history.steps) // 2
    for step in history.steps[:half]:
        if step.payload:
            compactor.append(step.payload)
    predictor = GroupPredictor(history.drafts)
    pieces = compactor.snapshot_pieces(1 << 30)
    assert pieces is not None
    for payload in encode_snapshot(pieces, 0.0, None, encode_batch, 1 << 30) or ():
        predictor.take(Step(payload=payload))
    for step in history.steps[half:]:
        predictor.take(step)
    assert (predictor.requests >= 20, predictor.wrong) == (True, 0)
