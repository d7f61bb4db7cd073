"""`kvevents.sim.workload_recordings`: requests that are inferred from recorded events."""

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
from kvevents.sim.workload_recordings import MAX_ANSWER_GAP_SECONDS, MAX_CHUNK_GAP_SECONDS, MAX_OPEN_REQUESTS
from kvevents.sim.workloads import RecordedRequests, from_recording
from kvevents.wire import Dialect, dialect_for, encode_batch, live_frames

CAPTURE = paths.DATA / "vllm-0.32-captures.jsonl.gz"
VLLM = dialect_for("vllm", "0.33.0")
SIZE = 4


def make_tokens(*blocks: int) -> list[int]:
    return [block * 10 + place for block in blocks for place in range(SIZE)]


def make_store(*blocks: int, parent: int | None = None, **fields: Any) -> BlockStored:
    """Return a store of blocks whose hashes determine their tokens."""
    return BlockStored(list(blocks), parent, make_tokens(*blocks), SIZE, **{"medium": "GPU", **fields})


class RecordingBuilder:
    """A recording that a test writes one batch at a time."""

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

    def requests(self, max_open: int = MAX_OPEN_REQUESTS) -> RecordedRequests:
        self._writer.close()
        return RecordedRequests(self.path, max_open=max_open)

    def read(self, max_open: int = MAX_OPEN_REQUESTS) -> list[tuple[float, list[int], list[int]]]:
        """Return the time, the blocks of the prompt and the blocks of the answer, which is empty for an answer without a
        store."""
        return [
            (one.at, blocks(one.prompt.tokens()), blocks(one.output.tokens()) if len(one.output) >= SIZE else [])
            for one in self.requests(max_open)
        ]


def blocks(tokens: Iterable[int]) -> list[int]:
    return [token // 10 for token in tokens if token % 10 == 0]


@pytest.fixture
def builder(tmp_path: Path) -> RecordingBuilder:
    return RecordingBuilder(tmp_path / "run.jsonl")


def test_a_prompt_consists_of_the_parents_and_the_stored_blocks(builder: RecordingBuilder) -> None:
    """The second prompt shares the first block of the first one; the answers follow block by block, interleaved."""
    builder.batch(100.0, make_store(1, 2, 3))
    builder.batch(100.5, make_store(4, 5, parent=1))
    builder.batch(101.0, make_store(6, parent=3), make_store(7, parent=5))
    builder.batch(102.0, make_store(8, parent=6))
    assert builder.read() == [(0.0, [1, 2, 3], [6, 8]), (0.5, [1, 4, 5], [7])]


def test_the_next_turn_is_a_request_of_the_same_session(builder: RecordingBuilder) -> None:
    """Several blocks after an answer are a prompt, not an answer."""
    builder.batch(0.0, make_store(1, 2))
    builder.batch(1.0, make_store(3, parent=2))
    builder.batch(9.0, make_store(4, 5, parent=3))
    first, second = builder.requests()
    assert blocks(second.prompt.tokens()) == [1, 2, 3, 4, 5]
    assert first.session == second.session is not None


def test_a_prompt_that_is_computed_in_chunks_is_one_request(builder: RecordingBuilder) -> None:
    """Chunks follow each other at once; blocks that come later are another prompt."""
    builder.batch(0.0, make_store(1, 2))
    builder.batch(0.5, make_store(3, 4, parent=2))
    builder.batch(1.0, make_store(5, parent=4))
    builder.batch(2.0, make_store(11, 12))
    builder.batch(2.1 + MAX_CHUNK_GAP_SECONDS, make_store(13, 14, parent=12))
    assert [request[1:] for request in builder.read()] == [([1, 2, 3, 4], [5]), ([11, 12], []), ([11, 12, 13, 14], [])]


def test_stores_of_one_batch_that_extend_each_other_are_one_prompt(builder: RecordingBuilder) -> None:
    """SGLang announces each page separately."""
    builder.batch(0.0, make_store(1), make_store(2, parent=1), make_store(3, parent=2))
    assert builder.read() == [(0.0, [1, 2, 3], [])]


def test_a_block_long_after_the_last_one_is_a_new_prompt(builder: RecordingBuilder) -> None:
    builder.batch(0.0, make_store(1, 2))
    builder.batch(MAX_ANSWER_GAP_SECONDS, make_store(3, parent=2))
    builder.batch(2 * MAX_ANSWER_GAP_SECONDS + 1, make_store(4, parent=3))
    assert [request[1:] for request in builder.read()] == [([1, 2], [3]), ([1, 2, 3, 4], [])]


def test_equal_prompts_in_one_step_are_separate_requests(builder: RecordingBuilder) -> None:
    """Engines compute and announce both of them, and each has its own answer."""
    builder.batch(0.0, make_store(1, 2), make_store(1, 2))
    builder.batch(1.0, make_store(3, parent=2), make_store(4, parent=2))
    builder.batch(2.0, make_store(5, parent=4), make_store(6, parent=3))
    assert [request[1:] for request in builder.read()] == [([1, 2], [3, 6]), ([1, 2], [4, 5])]


def test_a_longer_prompt_does_not_end_the_answer_of_a_shorter_one(builder: RecordingBuilder) -> None:
    builder.batch(0.0, make_store(1, 2))
    builder.batch(MAX_CHUNK_GAP_SECONDS + 1, make_store(3, 4, parent=2))
    builder.batch(MAX_CHUNK_GAP_SECONDS + 2, make_store(5, parent=2), make_store(6, parent=4))
    assert [request[1:] for request in builder.read()] == [([1, 2], [5]), ([1, 2, 3, 4], [6])]


def test_an_answer_without_a_store_has_a_unique_text(builder: RecordingBuilder) -> None:
    """It is shorter than a block, so half a block is assumed; no two of them are equal."""
    builder.batch(0.0, make_store(1, 2), make_store(3, 4))
    one, other = builder.requests()
    assert len(one.output) == len(other.output) == SIZE // 2
    assert one.output != other.output


def test_lora_and_salt_are_read_from_the_events(builder: RecordingBuilder) -> None:
    """Only the root block has the salt, after the LoRA; blocks below it have the same salt."""
    builder.batch(0.0, make_store(1, 2, lora_name="a", extra_keys=[("a", "t"), ("a",)]))
    builder.batch(0.0, make_store(3, 4, parent=1, lora_name="a", extra_keys=[("a",), ("a",)]))
    builder.batch(0.0, make_store(5, 6, extra_keys=[("t",), None]))
    builder.batch(0.0, make_store(7, 8, cache_salt="u"), engine=dialect_for("sglang", "0.5.22"))
    builder.batch(0.0, make_store(9, 10, lora_id=3))
    builder.batch(0.0, make_store(11, 12, extra_keys=[(("image", 0), "t"), None]))
    assert [(one.lora, one.salt) for one in builder.requests()] == [
        ("a", "t"),
        ("a", "t"),
        (None, "t"),
        (None, "u"),
        ("3", None),
        (None, "t"),
    ]


def test_events_without_computed_tokens_are_ignored(builder: RecordingBuilder) -> None:
    """These are copies on other tiers, moves without tokens, groups that store only some blocks, and further groups."""
    builder.batch(
        0.0,
        make_store(1, 2, group_idx=0, kv_cache_spec_kind="full_attention"),
        make_store(1, 2, group_idx=1, kv_cache_spec_kind="full_attention"),
    )
    builder.batch(
        0.1, make_store(5, 6, group_idx=2, kv_cache_spec_kind="sliding_window"), make_store(7, 8, medium="CPU", group_idx=0)
    )
    builder.batch(0.2, BlockStored([9], None, [], 0, medium="GPU", group_idx=0), BlockRemoved([1], medium="GPU"))
    requests = builder.requests()
    assert [blocks(one.prompt.tokens()) for one in requests] == [[1, 2]]
    assert requests.skipped == 0


@pytest.mark.parametrize("how", ["clear", "restart"])
def test_blocks_of_an_earlier_incarnation_are_unknown(builder: RecordingBuilder, how: str) -> None:
    """The same hash may stand for other tokens; a store below an unknown block is skipped and counted."""
    builder.batch(0.0, make_store(1, 2))
    if how == "restart":
        builder.restart()
    builder.batch(1.0, *([AllBlocksCleared()] if how == "clear" else []), make_store(3, parent=2), make_store(4, 5))
    requests = builder.requests()
    assert [blocks(one.prompt.tokens()) for one in requests] == [[1, 2], [4, 5]]
    assert requests.skipped == 1


def test_a_batch_that_was_recorded_twice_does_not_begin_an_incarnation(builder: RecordingBuilder) -> None:
    """Number and bytes are equal: its blocks are still known, and it does not count as another request."""
    builder.batch(0.0, make_store(1, 2))
    builder.restart()
    builder.batch(0.0, make_store(1, 2))
    builder.batch(1.0, make_store(3, parent=2))
    assert builder.read() == [(0.0, [1, 2], [3])]


def test_tokens_of_pairs_are_the_first_ones_and_invalid_tokens_are_skipped(builder: RecordingBuilder) -> None:
    """EAGLE sends pairs. Stores with numbers that are not token ids are counted, and do not stop the reader."""
    builder.batch(0.0, BlockStored([1], None, [(10, 11), (11, 12)], 2), BlockStored([2], None, [-1, 2**32], 2))
    requests = builder.requests()
    assert [one.prompt.tokens().tolist() for one in requests] == [[10, 11]]
    assert requests.skipped == 1


def test_a_removed_block_is_still_known(builder: RecordingBuilder) -> None:
    """Its removal from the cache does not change its content; if it is stored again, it is part of a prompt again."""
    builder.batch(0.0, make_store(1, 2))
    builder.batch(50.0, BlockRemoved([2], medium="GPU"), make_store(3, parent=1))
    builder.batch(51.0, make_store(2, parent=1))
    assert [request[1] for request in builder.read()] == [[1, 2], [1, 3], [1, 2]]


def test_streams_are_separate_and_their_requests_are_in_one_order(builder: RecordingBuilder) -> None:
    """Each engine and rank has its own hashes; their requests are merged by time."""
    builder.batch(0.0, make_store(1, 2), endpoint="tcp://e:1")
    builder.batch(0.5, make_store(3, 4), endpoint="tcp://e:2")
    builder.batch(0.7, make_store(5, parent=2), endpoint="tcp://e:2", rank=1)
    builder.batch(0.9, make_store(5, parent=2), endpoint="tcp://e:1")
    requests = builder.requests()
    assert [(one.at, blocks(one.prompt.tokens())) for one in requests] == [(0.0, [1, 2]), (0.5, [3, 4])]
    assert requests.skipped == 1
    assert [len(one.prompt) for one in from_recording(builder.path, endpoint="tcp://e:2")] == [8]
    assert list(from_recording(builder.path, run="other")) == []


def test_time_never_goes_back(builder: RecordingBuilder) -> None:
    """Runs in one file need not be in the order of their clocks; the next run continues at the end of the last one."""
    builder.batch(1000.0, make_store(1, 2))
    builder.batch(1002.0, make_store(3, 4))
    builder.batch(10.0, make_store(5, 6), run="s")
    builder.batch(11.0, make_store(7, 8), run="s")
    assert [request[0] for request in builder.read()] == [0.0, 2.0, 2.0, 3.0]


def test_known_blocks_are_bounded_and_prompts_with_evicted_ones_are_skipped(builder: RecordingBuilder) -> None:
    """Blocks with which prompts still begin are evicted last."""
    builder.batch(0.0, make_store(1))
    for number in range(20):
        builder.batch(5.0 + number, make_store(100 + number, 200 + number, parent=1))
    builder.batch(30.0, make_store(3, 4, parent=100))
    builder.requests()
    requests = RecordedRequests(builder.path, max_blocks=5)
    assert len(list(requests)) == 21
    assert requests.skipped == 1


def test_a_hash_that_is_stored_under_another_parent_makes_no_cycle(builder: RecordingBuilder) -> None:
    """The parent of a block may have been replaced since; then the beginning of its prompt is unknown."""
    builder.batch(0.0, make_store(1, 2))
    builder.batch(5.0, make_store(3, 1, parent=2))
    builder.batch(10.0, make_store(4, 5, parent=2), make_store(6, 6))
    requests = builder.requests()
    assert [blocks(one.prompt.tokens()) for one in requests] == [[1, 2]]
    assert requests.skipped == 3


HASHES = st.integers(0, 6)
EVENTS = st.one_of(
    st.builds(
        lambda hashes, parent: make_store(*hashes, parent=parent), st.lists(HASHES, min_size=1, max_size=4), st.none() | HASHES
    ),
    st.builds(AllBlocksCleared),
)


@given(st.lists(st.tuples(st.floats(-5, 50), st.lists(EVENTS, max_size=4)), max_size=12))
def test_any_events_are_read(tmp_path_factory: pytest.TempPathFactory, batches: list[tuple[float, list[Any]]]) -> None:
    """They include cycles, repetitions and unknown parents: every store is part of a request or is counted, and time never
    goes back."""
    builder = RecordingBuilder(tmp_path_factory.mktemp("tape") / "run.jsonl")
    clock = 1000.0
    for gap, events in batches:
        clock += gap
        builder.batch(clock, *events)
    requests = builder.requests()
    found = list(requests)
    stores = sum(isinstance(event, BlockStored) for _, events in batches for event in events)
    assert len(found) + requests.skipped <= stores
    assert bool(found or requests.skipped) == bool(stores)
    assert all(before.at <= after.at for before, after in pairwise(found))
    assert all(request.prompt and request.output for request in found)


def test_open_requests_are_limited(builder: RecordingBuilder) -> None:
    """Beyond the limit the oldest request is completed, and later blocks of its answer begin a prompt."""
    builder.batch(0.0, make_store(1, 2), make_store(3, 4))
    builder.batch(1.0, make_store(5, parent=2), make_store(6, parent=4))
    assert [request[1:] for request in builder.read(max_open=1)] == [([1, 2], []), ([3, 4], [6]), ([1, 2, 5], [])]


def test_an_unreadable_recording_raises_and_a_truncated_one_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="cannot read"):
        next(from_recording(tmp_path / "none.jsonl"))
    (tmp_path / "torn.jsonl").write_text('{"socket":"pub"')
    requests = from_recording(tmp_path / "torn.jsonl")
    assert list(requests) == []
    assert requests.truncation is not None


def test_messages_that_are_not_batches_are_ignored(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "run.jsonl") as writer:
        for frames in ((b"junk",), tuple(live_frames(b"", 0, b"junk"))):
            writer.write(RecordedFrame(socket="pub", run="r", endpoint="tcp://e:1", t=0.0, frames=frames))
    assert list(from_recording(tmp_path / "run.jsonl")) == []


@pytest.mark.parametrize(("run", "count", "size"), [("bs64-emptytopic", 30, 64), ("bs32-sha256cbor-seed0", 39, 32)])
def test_a_recording_of_a_real_engine_is_read_completely(run: str, count: int, size: int) -> None:
    """All stores are part of a request, prompts and answers are whole blocks, and the salts are those of its tenants."""
    requests = from_recording(CAPTURE, run)
    found: Sequence[Any] = list(requests)
    assert len(found) == count
    assert requests.skipped == 0
    assert all(len(one.prompt) % size == 0 and len(one.output) % size in {0, size // 2} for one in found)
    assert all(before.at <= after.at for before, after in pairwise(found))
    assert {one.salt for one in found} <= {None, "tenant-0", "tenant-1", "tenant-2"}
