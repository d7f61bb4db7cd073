"""`kvevents.sim.workload_recordings`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paths
from kvevents.errors import RecordingError
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from kvevents.recording import RecordedFrame, RecordingWriter
from kvevents.sim.workload_recordings import ANSWER_GAP, CHUNK_GAP, MAX_OPEN
from kvevents.sim.workloads import RecordedRequests, from_recording
from kvevents.wire import Dialect, dialect_for, encode_batch, live_frames

CAPTURE = paths.DATA / "vllm-0.32-captures.jsonl.gz"
VLLM = dialect_for("vllm", "0.33.0")
SIZE = 4


def tokens_of(*blocks: int) -> list[int]:
    return [block * 10 + place for block in blocks for place in range(SIZE)]


def stored(*blocks: int, parent: int | None = None, **fields: Any) -> BlockStored:
    """Blocks whose hash says their tokens."""
    return BlockStored(list(blocks), parent, tokens_of(*blocks), SIZE, **{"medium": "GPU", **fields})


class Tape:
    """A recording made by hand, one batch at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._next: dict[tuple[str, str], int] = {}
        self._writer = RecordingWriter(path)

    def batch(
        self,
        t: float,
        *events: Any,
        endpoint: str = "tcp://e:1",
        run: str = "r",
        rank: int | None = None,
        engine: Dialect = VLLM,
    ) -> None:
        seq = self._next.get((run, endpoint), 0)
        self._next[run, endpoint] = seq + 1
        frames = live_frames(b"kv", seq, encode_batch(KVEventBatch(t, list(events), rank), engine))
        self._writer.write(RecordedFrame(socket="pub", run=run, endpoint=endpoint, t=t, frames=tuple(frames)))

    def restart(self) -> None:
        self._next.clear()

    def requests(self, max_open: int = MAX_OPEN) -> RecordedRequests:
        self._writer.close()
        return RecordedRequests(self.path, max_open=max_open)

    def read(self, max_open: int = MAX_OPEN) -> list[tuple[float, list[int], list[int]]]:
        """Return time, blocks of the prompt and blocks of the answer; none for an answer that was not seen."""
        return [
            (one.at, blocks(one.prompt.tokens()), blocks(one.output.tokens()) if len(one.output) >= SIZE else [])
            for one in self.requests(max_open)
        ]


def blocks(tokens: Iterable[int]) -> list[int]:
    return [token // 10 for token in tokens if token % 10 == 0]


@pytest.fixture
def tape(tmp_path: Path) -> Tape:
    return Tape(tmp_path / "run.jsonl")


def test_a_prompt_is_its_ancestors_and_what_is_new(tape: Tape) -> None:
    """The second prompt shares the first block of the first; the answers follow block by block, in turns."""
    tape.batch(100.0, stored(1, 2, 3))
    tape.batch(100.5, stored(4, 5, parent=1))
    tape.batch(101.0, stored(6, parent=3), stored(7, parent=5))
    tape.batch(102.0, stored(8, parent=6))
    assert tape.read() == [(0.0, [1, 2, 3], [6, 8]), (0.5, [1, 4, 5], [7])]


def test_the_next_turn_is_a_request_of_the_same_session(tape: Tape) -> None:
    """Several blocks after an answer are not an answer."""
    tape.batch(0.0, stored(1, 2))
    tape.batch(1.0, stored(3, parent=2))
    tape.batch(9.0, stored(4, 5, parent=3))
    first, second = tape.requests()
    assert blocks(second.prompt.tokens()) == [1, 2, 3, 4, 5]
    assert first.session == second.session is not None


def test_a_prompt_computed_in_chunks_is_one(tape: Tape) -> None:
    """They follow each other at once; blocks that come later are another prompt."""
    tape.batch(0.0, stored(1, 2))
    tape.batch(0.5, stored(3, 4, parent=2))
    tape.batch(1.0, stored(5, parent=4))
    tape.batch(2.0, stored(11, 12))
    tape.batch(2.1 + CHUNK_GAP, stored(13, 14, parent=12))
    assert [request[1:] for request in tape.read()] == [([1, 2, 3, 4], [5]), ([11, 12], []), ([11, 12, 13, 14], [])]


def test_events_of_one_batch_that_go_on_are_one_chain(tape: Tape) -> None:
    """SGLang announces a page at a time."""
    tape.batch(0.0, stored(1), stored(2, parent=1), stored(3, parent=2))
    assert tape.read() == [(0.0, [1, 2, 3], [])]


def test_a_block_long_after_the_last_is_a_new_prompt(tape: Tape) -> None:
    tape.batch(0.0, stored(1, 2))
    tape.batch(ANSWER_GAP, stored(3, parent=2))
    tape.batch(2 * ANSWER_GAP + 1, stored(4, parent=3))
    assert [request[1:] for request in tape.read()] == [([1, 2], [3]), ([1, 2, 3, 4], [])]


def test_equal_prompts_of_one_step_are_as_many_requests(tape: Tape) -> None:
    """Engines compute them both and announce them both; each gets an answer of its own."""
    tape.batch(0.0, stored(1, 2), stored(1, 2))
    tape.batch(1.0, stored(3, parent=2), stored(4, parent=2))
    tape.batch(2.0, stored(5, parent=4), stored(6, parent=3))
    assert [request[1:] for request in tape.read()] == [([1, 2], [3, 6]), ([1, 2], [4, 5])]


def test_a_longer_prompt_does_not_end_the_answer_of_a_shorter_one(tape: Tape) -> None:
    tape.batch(0.0, stored(1, 2))
    tape.batch(CHUNK_GAP + 1, stored(3, 4, parent=2))
    tape.batch(CHUNK_GAP + 2, stored(5, parent=2), stored(6, parent=4))
    assert [request[1:] for request in tape.read()] == [([1, 2], [5]), ([1, 2, 3, 4], [6])]


def test_an_unseen_answer_is_text_of_its_own(tape: Tape) -> None:
    """Shorter than a block, so half a block is assumed; no two are the same."""
    tape.batch(0.0, stored(1, 2), stored(3, 4))
    one, other = tape.requests()
    assert len(one.output) == len(other.output) == SIZE // 2
    assert one.output != other.output


def test_lora_and_salt_are_kept(tape: Tape) -> None:
    """The salt stands at the root only, behind the LoRA; those below have it too."""
    tape.batch(0.0, stored(1, 2, lora_name="a", extra_keys=[("a", "t"), ("a",)]))
    tape.batch(0.0, stored(3, 4, parent=1, lora_name="a", extra_keys=[("a",), ("a",)]))
    tape.batch(0.0, stored(5, 6, extra_keys=[("t",), None]))
    tape.batch(0.0, stored(7, 8, cache_salt="u"), engine=dialect_for("sglang", "0.5.22"))
    tape.batch(0.0, stored(9, 10, lora_id=3))
    tape.batch(0.0, stored(11, 12, extra_keys=[(("image", 0), "t"), None]))
    assert [(one.lora, one.salt) for one in tape.requests()] == [
        ("a", "t"),
        ("a", "t"),
        (None, "t"),
        (None, "u"),
        ("3", None),
        (None, "t"),
    ]


def test_events_without_computed_tokens_are_left_out(tape: Tape) -> None:
    """Copies on other tiers, moves without tokens, groups that keep only some blocks, and further groups."""
    tape.batch(
        0.0,
        stored(1, 2, group_idx=0, kv_cache_spec_kind="full_attention"),
        stored(1, 2, group_idx=1, kv_cache_spec_kind="full_attention"),
    )
    tape.batch(0.1, stored(5, 6, group_idx=2, kv_cache_spec_kind="sliding_window"), stored(7, 8, medium="CPU", group_idx=0))
    tape.batch(0.2, BlockStored([9], None, [], 0, medium="GPU", group_idx=0), BlockRemoved([1], medium="GPU"))
    requests = tape.requests()
    assert [blocks(one.prompt.tokens()) for one in requests] == [[1, 2]]
    assert requests.skipped == 0


@pytest.mark.parametrize("how", ["clear", "restart"])
def test_another_life_knows_nothing_of_the_one_before(tape: Tape, how: str) -> None:
    """The same hash may stand for other tokens; what hangs below a lost block cannot be placed, and is counted."""
    tape.batch(0.0, stored(1, 2))
    if how == "restart":
        tape.restart()
    tape.batch(1.0, *([AllBlocksCleared()] if how == "clear" else []), stored(3, parent=2), stored(4, 5))
    requests = tape.requests()
    assert [blocks(one.prompt.tokens()) for one in requests] == [[1, 2], [4, 5]]
    assert requests.skipped == 1


def test_a_batch_that_was_recorded_twice_begins_no_life(tape: Tape) -> None:
    """The same number and the same bytes: its descendants are still known, and it is not counted as another request."""
    tape.batch(0.0, stored(1, 2))
    tape.restart()
    tape.batch(0.0, stored(1, 2))
    tape.batch(1.0, stored(3, parent=2))
    assert tape.read() == [(0.0, [1, 2], [3])]


def test_tokens_are_those_of_the_text(tape: Tape) -> None:
    """Of EAGLE's pairs it is the first; numbers that are not token ids are counted, and do not stop the reader."""
    tape.batch(0.0, BlockStored([1], None, [(10, 11), (11, 12)], 2), BlockStored([2], None, [-1, 2**32], 2))
    requests = tape.requests()
    assert [one.prompt.tokens().tolist() for one in requests] == [[10, 11]]
    assert requests.skipped == 1


def test_a_removed_block_is_still_known(tape: Tape) -> None:
    """That it is gone from the cache does not change what it was; stored again it is part of a prompt again."""
    tape.batch(0.0, stored(1, 2))
    tape.batch(50.0, BlockRemoved([2], medium="GPU"), stored(3, parent=1))
    tape.batch(51.0, stored(2, parent=1))
    assert [request[1] for request in tape.read()] == [[1, 2], [1, 3], [1, 2]]


def test_streams_are_kept_apart_and_come_in_one_order(tape: Tape) -> None:
    """Engines and ranks have hashes of their own; their requests are one traffic."""
    tape.batch(0.0, stored(1, 2), endpoint="tcp://e:1")
    tape.batch(0.5, stored(3, 4), endpoint="tcp://e:2")
    tape.batch(0.7, stored(5, parent=2), endpoint="tcp://e:2", rank=1)
    tape.batch(0.9, stored(5, parent=2), endpoint="tcp://e:1")
    requests = tape.requests()
    assert [(one.at, blocks(one.prompt.tokens())) for one in requests] == [(0.0, [1, 2]), (0.5, [3, 4])]
    assert requests.skipped == 1
    assert [len(one.prompt) for one in from_recording(tape.path, endpoint="tcp://e:2")] == [8]
    assert list(from_recording(tape.path, run="other")) == []


def test_time_never_goes_back(tape: Tape) -> None:
    """Runs in one file need not be in the order of their clocks; the next one goes on where the last ended."""
    tape.batch(1000.0, stored(1, 2))
    tape.batch(1002.0, stored(3, 4))
    tape.batch(10.0, stored(5, 6), run="s")
    tape.batch(11.0, stored(7, 8), run="s")
    assert [request[0] for request in tape.read()] == [0.0, 2.0, 2.0, 3.0]


def test_forgotten_blocks_cost_a_request_not_memory(tape: Tape) -> None:
    """Those that prompts still begin with are forgotten last."""
    tape.batch(0.0, stored(1))
    for number in range(20):
        tape.batch(5.0 + number, stored(100 + number, 200 + number, parent=1))
    tape.batch(30.0, stored(3, 4, parent=100))
    tape.requests()
    requests = RecordedRequests(tape.path, max_blocks=5)
    assert len(list(requests)) == 21
    assert requests.skipped == 1


def test_a_hash_that_comes_again_elsewhere_makes_no_circle(tape: Tape) -> None:
    """What a block hangs below may have been replaced since; then its beginning is not known."""
    tape.batch(0.0, stored(1, 2))
    tape.batch(5.0, stored(3, 1, parent=2))
    tape.batch(10.0, stored(4, 5, parent=2), stored(6, 6))
    requests = tape.requests()
    assert [blocks(one.prompt.tokens()) for one in requests] == [[1, 2]]
    assert requests.skipped == 3


HASHES = st.integers(0, 6)
EVENTS = st.one_of(
    st.builds(
        lambda hashes, parent: stored(*hashes, parent=parent), st.lists(HASHES, min_size=1, max_size=4), st.none() | HASHES
    ),
    st.builds(AllBlocksCleared),
)


@given(st.lists(st.tuples(st.floats(-5, 50), st.lists(EVENTS, max_size=4)), max_size=12))
def test_whatever_engines_announce_is_read(
    tmp_path_factory: pytest.TempPathFactory, batches: list[tuple[float, list[Any]]]
) -> None:
    """Circles, repetitions and strange parents too: every store has a place or is counted, and time goes on."""
    tape = Tape(tmp_path_factory.mktemp("tape") / "run.jsonl")
    clock = 1000.0
    for gap, events in batches:
        clock += gap
        tape.batch(clock, *events)
    requests = tape.requests()
    found = list(requests)
    stores = sum(isinstance(event, BlockStored) for _, events in batches for event in events)
    assert len(found) + requests.skipped <= stores
    assert bool(found or requests.skipped) == bool(stores)
    assert all(before.at <= after.at for before, after in pairwise(found))
    assert all(request.prompt and request.output for request in found)


def test_open_requests_are_limited(tape: Tape) -> None:
    """Above the limit the oldest request is completed; later blocks of its answer begin a prompt."""
    tape.batch(0.0, stored(1, 2), stored(3, 4))
    tape.batch(1.0, stored(5, parent=2), stored(6, parent=4))
    assert [request[1:] for request in tape.read(max_open=1)] == [([1, 2], []), ([3, 4], [6]), ([1, 2, 5], [])]


def test_an_invalid_recording(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="cannot read"):
        next(from_recording(tmp_path / "none.jsonl"))
    (tmp_path / "torn.jsonl").write_text('{"socket":"pub"')
    requests = from_recording(tmp_path / "torn.jsonl")
    assert list(requests) == []
    assert requests.torn is not None


def test_what_is_no_batch_is_left_out(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "run.jsonl") as writer:
        for frames in ((b"junk",), tuple(live_frames(b"", 0, b"junk"))):
            writer.write(RecordedFrame(socket="pub", run="r", endpoint="tcp://e:1", t=0.0, frames=frames))
    assert list(from_recording(tmp_path / "run.jsonl")) == []


@pytest.mark.parametrize(("run", "count", "size"), [("bs64-emptytopic", 30, 64), ("bs32-sha256cbor-seed0", 39, 32)])
def test_a_real_engines_recording(run: str, count: int, size: int) -> None:
    """All of its stores have a place; prompts and answers are whole blocks; salts are those of its tenants."""
    requests = from_recording(CAPTURE, run)
    found: Sequence[Any] = list(requests)
    assert len(found) == count
    assert requests.skipped == 0
    assert all(len(one.prompt) % size == 0 and len(one.output) % size in {0, size // 2} for one in found)
    assert all(before.at <= after.at for before, after in pairwise(found))
    assert {one.salt for one in found} <= {None, "tenant-0", "tenant-1", "tenant-2"}
