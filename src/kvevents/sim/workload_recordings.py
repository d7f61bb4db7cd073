"""Requests reconstructed from recordings of KV events, as far as the events show them.

Theory of operation. An engine announces the blocks that it computed. A chain of new blocks has a known parent or begins at the
root, so its ancestors and the chain together are the beginning of a prompt. A chain that follows a known prompt is interpreted
by its position:
- one block after the end of a prompt, at most `MAX_ANSWER_GAP_SECONDS` after the prompt's last block, is the prompt's answer;
- several blocks after the end of a prompt without an answer, within `MAX_CHUNK_GAP_SECONDS`, are the next chunk of the prompt;
- any other chain belongs to a new prompt: a prompt with the same beginning, or the next turn of a conversation.
Blocks are identified by stream, cache generation and hash. A generation begins with each incarnation that
`kvevents.stream.Stream` finds, and with each clear. The reader does not wait for missing batches, because it yields the
requests of all streams in the order of the recording.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Final, NamedTuple, TypeAlias

from kvevents.events import MEDIUM_GPU, AllBlocksCleared, BlockStored, KVEventBatch
from kvevents.recording import read_recording
from kvevents.recording.deliveries import RecordedStream, RecordingDeliveries
from kvevents.recording.files import StrPath
from kvevents.sim.requests import Drawn, Request, Text
from kvevents.sim.workload_traces import FIRST_ANSWER, Sessions
from kvevents.stream import RawBatch
from kvevents.wire import decode_batch

MAX_ANSWER_GAP_SECONDS: Final = 30.0
"""Maximum number of seconds between two blocks of one answer. This is enough for 64 tokens at two tokens per second."""
MAX_CHUNK_GAP_SECONDS: Final = 2.0
"""Maximum number of seconds between two chunks of one prompt. A step that computes 8,192 tokens takes less than a second."""
MAX_BLOCKS: Final = 500_000
"""Maximum number of blocks whose tokens are stored, about 500 bytes each. The least recently used block is evicted first."""
MAX_OPEN_REQUESTS: Final = 10_000
"""Maximum number of open requests, whose answers can continue. Above this number, the oldest request is completed."""
_FULL_ATTENTION_KINDS: Final = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of cache groups that announce every block of a prompt."""

_BlockKey: TypeAlias = tuple[int, int]
"""Number of the cache generation, and hash of the block."""


class _Block(NamedTuple):
    parent: _BlockKey | None
    depth: int
    """Number of blocks before this block. An equal hash at another depth identifies another block (SGLang before 0.5.7)."""
    tokens: array[int]
    lora: str | None
    salt: str | None


@dataclass(slots=True)
class _CacheGeneration:
    number: int
    """Number of the generation. Each clear begins a new generation."""
    incarnation: int
    """Incarnation of the stream's batches in this generation."""
    group: int | None = None


@dataclass(slots=True)
class _Draft:
    at: float
    prompt: list[array[int]]
    session: str
    scope: tuple[str | None, str | None]
    last: float
    end: _BlockKey
    answer: list[array[int]] = field(default_factory=list)


class RecordedRequests(Iterator[Request]):
    """The requests of one recording, in the order of their times."""

    def __init__(
        self,
        path: StrPath,
        run: str | None = None,
        endpoint: str | None = None,
        max_blocks: int = MAX_BLOCKS,
        max_open: int = MAX_OPEN_REQUESTS,
    ) -> None:
        self.skipped = 0
        """Number of events that were ignored because their parent is unknown or their tokens are not token ids."""
        self._reader = read_recording(path)
        self._requests = self._read_requests(run, endpoint)
        self._max_blocks = max_blocks
        self._max_open = max_open
        self._blocks: dict[_BlockKey, _Block] = {}
        self._streams: dict[tuple[RecordedStream, int | None], _CacheGeneration] = {}
        self._generations = count()
        self._open: deque[_Draft] = deque()
        self._ends: dict[_BlockKey, list[_Draft]] = {}
        self._sessions = Sessions()
        self._clock: float | None = None
        self._now = 0.0
        self._number = 0

    def __next__(self) -> Request:
        return next(self._requests)

    @property
    def truncation(self) -> str | None:
        """Why the recording ends in an incomplete record, as in `RecordingReader.truncation`, or None if it is complete."""
        return self._reader.truncation

    def _read_requests(self, run: str | None, endpoint: str | None) -> Iterator[Request]:
        frames = (
            frame
            for frame in self._reader
            if run in (None, frame.run)
            and (frame.socket == "meta" or (frame.socket == "pub" and endpoint in (None, frame.endpoint)))
        )
        for stream, delivery in RecordingDeliveries(waits=False).read(frames):
            if isinstance(delivery, RawBatch):
                self._feed(stream, delivery)
            yield from self._take_completed()
        yield from self._take_completed(at_end=True)

    def _feed(self, stream: RecordedStream, raw: RawBatch) -> None:
        batch = decode_batch(raw.payload).batch
        clock = batch.ts if stream.recorded_at is None else stream.recorded_at
        if self._clock is not None:
            self._now += max(clock - self._clock, 0.0)
        self._clock = clock
        generation = self._streams.get((stream, batch.data_parallel_rank))
        if generation is None or generation.incarnation != raw.incarnation:
            generation = _CacheGeneration(next(self._generations), raw.incarnation)
            self._streams[stream, batch.data_parallel_rank] = generation
        for chain in self._chains(generation, batch):
            self._place_chain(chain)

    def _take_completed(self, *, at_end: bool = False) -> Iterator[Request]:
        """Yield completed requests in order. Stop before the first open request that can continue."""
        while self._open:
            first = self._open[0]
            if not (at_end or self._now - first.last > MAX_ANSWER_GAP_SECONDS or len(self._open) > self._max_open):
                return
            self._open.popleft()
            self._remove_end(first)
            self._number += 1
            unseen = Drawn(FIRST_ANSWER + self._number, max(len(first.prompt[-1]) // 2, 1))
            yield Request(first.at, Text(first.prompt), Text(first.answer or (unseen,)), first.session, *first.scope)

    # --- chains of new blocks

    def _chains(self, generation: _CacheGeneration, batch: KVEventBatch) -> list[list[_BlockKey]]:
        """Return the new blocks of a batch as chains. An event that continues the previous event's chain extends it."""
        chains: list[list[_BlockKey]] = []
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                generation.number = next(self._generations)
            elif isinstance(event, BlockStored) and self._has_new_tokens(generation, event):
                self._store_blocks(generation.number, event, chains)
        return chains

    def _has_new_tokens(self, generation: _CacheGeneration, event: BlockStored) -> bool:
        """Return whether an event has the tokens of computed blocks. The events of all cache groups except one are ignored."""
        if event.medium not in (None, MEDIUM_GPU) or event.kv_cache_spec_kind not in _FULL_ATTENTION_KINDS:
            return False
        if not event.token_ids or len(event.token_ids) != event.block_size * len(event.block_hashes):
            return False
        generation.group = event.group_idx if generation.group is None else generation.group
        return event.group_idx == generation.group

    def _store_blocks(self, generation: int, event: BlockStored, chains: list[list[_BlockKey]]) -> None:
        parent = None if event.parent_block_hash is None else (generation, event.parent_block_hash)
        above = None if parent is None else self._blocks.get(parent)
        tokens = _tokens_of(event)
        if tokens is None or (parent is not None and above is None):
            self.skipped += 1
            return
        lora = event.lora_name if event.lora_id is None or event.lora_name is not None else str(event.lora_id)
        salt = above.salt if above else _salt_of(event)
        chain = chains[-1] if chains and chains[-1][-1] == parent else []
        if not chain:
            chains.append(chain)
        depth = above.depth + 1 if above else 0
        for place, block_hash in enumerate(event.block_hashes):
            key = (generation, block_hash)
            part = tokens[place * event.block_size : (place + 1) * event.block_size]
            self._blocks.pop(key, None)
            self._blocks[key] = _Block(parent, depth + place, part, lora, salt)
            if len(self._blocks) > self._max_blocks:
                del self._blocks[next(iter(self._blocks))]
            chain.append(key)
            parent = key

    # --- requests of chains

    def _place_chain(self, chain: list[_BlockKey]) -> None:
        path = self._find_path(chain)
        if path is None:
            self.skipped += 1
            return
        before = len(path) - len(chain)
        above = self._ends.get(path[before - 1]) if before else None
        request = above[0] if above else None
        part = None if request is None else self._continued_part(request, len(chain))
        if request is None or part is None:
            request = self._begin(path)
        else:
            part += (self._blocks[key].tokens for key in chain)
            self._remove_end(request)
        request.last, request.end = self._now, path[-1]
        self._ends.setdefault(request.end, []).append(request)

    def _remove_end(self, request: _Draft) -> None:
        """Remove a request from the list of requests that end at its last block. Equal prompts end at the same block."""
        here = [other for other in self._ends.pop(request.end) if other is not request]
        if here:
            self._ends[request.end] = here

    def _continued_part(self, request: _Draft, blocks: int) -> list[array[int]] | None:
        """Return the part of a request (prompt or answer) that the next chain continues; None if it begins a new request."""
        idle = self._now - request.last
        if blocks == 1:
            return request.answer if idle <= MAX_ANSWER_GAP_SECONDS else None
        return request.prompt if idle <= MAX_CHUNK_GAP_SECONDS and not request.answer else None

    def _begin(self, path: list[_BlockKey]) -> _Draft:
        last = self._blocks[path[-1]]
        prompt = [self._blocks[key].tokens for key in path]
        request = _Draft(self._now, prompt, self._sessions.find(path, len(path)), (last.lora, last.salt), self._now, path[-1])
        self._open.append(request)
        return request

    def _find_path(self, chain: list[_BlockKey]) -> list[_BlockKey] | None:
        """Return a prompt's blocks from the root on, or None if any is unknown. The blocks become the most recently used."""
        path: list[_BlockKey] = []
        key: _BlockKey | None = chain[-1]
        while key is not None:
            block = self._blocks.pop(key, None)
            if block is None:
                return None
            self._blocks[key] = block
            if path and block.depth != self._blocks[path[-1]].depth - 1:
                return None
            path.append(key)
            key = block.parent
        path.reverse()
        return path if path[-len(chain) :] == chain else None


def from_recording(path: StrPath, run: str | None = None, endpoint: str | None = None) -> RecordedRequests:
    """Reconstruct the requests of a recording. If `run` or `endpoint` is not None, other runs or endpoints are ignored.

    Times are seconds from the first batch. If the recorder's clock goes back, for example between runs, times continue from the
    previous request's time. Prompts and answers consist of whole blocks; the guide to workloads lists what events do not show.
    Sessions are inferred as for traces. Iterating raises `RecordingError` as `read_recording` does.
    """
    return RecordedRequests(path, run, endpoint)


def _tokens_of(event: BlockStored) -> array[int] | None:
    """Return the token ids of a store (under EAGLE, the first of each pair); None if one is not an unsigned 32-bit integer."""
    try:
        return array("I", (int(one[0] if isinstance(one, tuple) else one) for one in event.token_ids))
    except (OverflowError, ValueError):  # ValueError: a token is the digest of a multimodal item
        return None


def _salt_of(event: BlockStored) -> str | None:
    """Return the salt of a chain that begins at the root: a field in SGLang, an extra key of the first block in vLLM."""
    if event.cache_salt is not None or not event.extra_keys:
        return event.cache_salt
    bare = [extra for extra in event.extra_keys[0] or () if isinstance(extra, str)]
    if bare and bare[0] == event.lora_name:
        del bare[0]
    return bare[0] if bare else None
