"""Requests of vLLM's own block manager, predicted from its events: `python -m tests.system.vllm_oracle.lookups`.

The manager of vLLM's released wheel serves random requests, mostly of models with sliding windows. Before each of its lookups
the index receives the events so far, as vLLM encodes them, and matches the prompt. The output counts how often the index's
number of cached tokens differs from vLLM's, and how often that of an index with full attention only does. `--record FILE`
writes the first history of each shape with a window, for tests that have no wheel.
"""

from __future__ import annotations

import argparse
import gzip
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import msgspec

from kvevents.events import KVEvent
from kvevents.index import Namespace, PrefixIndex
from kvevents.wire import decode_batch, encode_batch
from tests.system.vllm_oracle.vllm_blocks import RealCache, modules, request

VOCABULARY: Final = 1 << 10
AT_ONCE: Final = 3
"""Requests that hold blocks at the same time, at most."""
REMEMBERED: Final = 12
"""Earlier texts that the beginning of a prompt may be taken from."""
REQUESTS: Final = 200
"""Requests of a history."""


class Shape(NamedTuple):
    """The cache of a model."""

    name: str
    windows: tuple[float | None, ...]
    """Blocks that the window of each group reaches over, about; None for full attention."""
    retention: int | None = 0
    """`prefix_cache_retention_interval`: with 0, vLLM's default, few of a window's blocks stay; with None all stay."""


SHAPES: Final = (
    Shape("full attention", (None,)),
    Shape("one window", (2.5, None)),
    Shape("one window, all blocks kept", (2.5, None), retention=None),
    Shape("two windows", (None, 2.5, 4)),
    Shape("a window, full attention twice", (None, 3, None)),
)
WINDOWED: Final = tuple(shape for shape in SHAPES if shape.windows != (None,))


class Step(msgspec.Struct, omit_defaults=True):
    """A step of a history: events, or a request."""

    payload: bytes = b""
    """The batch that vLLM published."""
    prompt: list[int] = []
    lora: str | None = None
    salt: str | None = None
    cached: int = 0
    """Tokens of the prompt that vLLM found."""


class History(msgspec.Struct):
    """One history, as it is recorded."""

    shape: str
    steps: list[Step]


class Manager:
    """vLLM's block manager, called as by a scheduler."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self._random = draw = Random(f"{shape.name} {seed}")
        self._size = size = draw.choice((2, 4, 8))
        blocks = draw.randint(60, 100) * len(shape.windows)
        windows = [None if each is None else int(each * size) for each in shape.windows]
        self._cache: Final = RealCache(blocks, size, windows, retention=shape.retention)
        self._longest: Final = 20 * size
        self._texts = [self._make_words(self._longest)]
        self._running: list[tuple[Any, list[int]]] = []
        """Requests, with the remaining tokens of their answers."""
        self._encode: Final = msgspec.msgpack.Encoder().encode
        self._batch: Final = modules()["vllm.distributed.kv_events"].KVEventBatch

    def serve(self, count: int = REQUESTS) -> Iterator[Step]:
        """Yield `count` requests, each after the events of all earlier ones."""
        for number in range(count):
            while self._running and (len(self._running) >= AT_ONCE or self._random.random() < 0.8):
                self._answer()
            if number % 90 == 89:
                self._reset()
            prompt, answer = self._make_prompt(), self._make_words(self._random.randint(1, 3 * self._size))
            lora, salt = self._draw_rarely("sql"), self._draw_rarely("tenant")
            theirs = request(f"r{number}", prompt, self._size, output=len(answer), lora=lora, salt=salt)
            if events := self._cache.take_events():
                yield Step(payload=self._encode(self._batch(ts=float(number), events=events)))
            cached = self._cache.lookup(theirs)
            yield Step(prompt=prompt, lora=lora, salt=salt, cached=cached)
            self._admit(theirs, answer, len(prompt) - cached)

    def _make_prompt(self) -> list[int]:
        """Return a prompt that begins like an earlier text and has new tokens behind it."""
        text = self._random.choice(self._texts)
        fresh = self._make_words(self._random.randint(1, 4 * self._size))
        prompt = (text[: self._random.randint(0, len(text))] + fresh)[: self._longest]
        self._texts = [*self._texts, prompt][-REMEMBERED:]
        return prompt

    def _make_words(self, count: int) -> list[int]:
        return [self._random.randrange(VOCABULARY) for _ in range(count)]

    def _draw_rarely(self, rare: str) -> str | None:
        return rare if self._random.random() < 0.1 else None

    def _admit(self, theirs: Any, answer: list[int], left: int) -> None:
        """Compute the rest of a prompt; preempt the newest requests if there are too few free blocks."""
        while not self._cache.admit(theirs, left):
            self._cache.release(self._running.pop()[0])
            left = theirs.num_prompt_tokens - self._cache.lookup(theirs)
        self._running.append((theirs, answer))

    def _answer(self) -> None:
        """Append one token to a request's answer; a request that is complete, or gets no block, is finished."""
        entry = self._random.choice(self._running)
        theirs, left = entry
        theirs.append_output_token_ids(left.pop())
        if not self._cache.extend(theirs, 1) or not left:
            self._finish(entry)

    def _reset(self) -> None:
        for entry in list(self._running):
            self._finish(entry)
        self._cache.reset()

    def _finish(self, entry: tuple[Any, list[int]]) -> None:
        self._running.remove(entry)
        self._cache.release(entry[0])


class LookupPredictor:
    """Predictions of an index before each request of a history, and of an index with full attention only."""

    def __init__(self) -> None:
        self.index: Final = PrefixIndex()
        self.requests = self.hits = self.wrong = self.wrong_if_dense = 0
        self._dense: Final = PrefixIndex()
        self._windowed: set[int | None] = set()
        """Groups with a sliding window."""
        self._seq = 0

    def take(self, step: Step) -> None:
        """Apply the events of the next step, or predict its request."""
        if step.payload:
            self._apply(step.payload)
            return
        namespace = Namespace(lora=step.lora, salt=step.salt)
        prompt = step.prompt[:-1]  # vLLM always recomputes the last token
        self.requests += 1
        self.hits += step.cached > 0
        self.wrong += _tokens(self.index, prompt, namespace) != step.cached
        self.wrong_if_dense += _tokens(self._dense, prompt, namespace) != step.cached

    def _apply(self, payload: bytes) -> None:
        self.index.apply_payload("vllm", 0, self._seq, payload)
        batch = decode_batch(payload).batch
        batch.events = [event for event in batch.events if not self._is_windowed(event)]
        self._dense.apply_payload("vllm", 0, self._seq, encode_batch(batch))
        self._seq += 1

    def _is_windowed(self, event: KVEvent) -> bool:
        group: int | None = getattr(event, "group_idx", None)
        if getattr(event, "kv_cache_spec_kind", None) == "sliding_window":
            self._windowed.add(group)
        return group in self._windowed


def _tokens(index: PrefixIndex, prompt: Sequence[int], namespace: Namespace) -> int:
    return next((worker.tokens for worker in index.match(prompt, namespace)), 0)


def recorded(path: Path) -> list[History]:
    """Return the histories that `--record` wrote."""
    with gzip.open(path) as file:
        return [msgspec.json.decode(line, type=History) for line in file]


def record(path: Path) -> None:
    """Write the first history of each shape with a window, always the same bytes."""
    with path.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
        for shape in WINDOWED:
            packed.write(msgspec.json.encode(History(shape.name, list(Manager(shape, 0).serve()))) + b"\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict the requests. Returns 0 if every prediction was right, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.vllm_oracle.lookups", description=__doc__)
    parser.add_argument("--histories", type=int, default=50, help="histories of each shape")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first history; the next has the next number")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write histories to a file, and do nothing else")
    options = parser.parse_args(arguments)
    if options.record is not None:
        record(options.record)
        return 0
    wrong = 0
    for shape in SHAPES:
        began, sums = time.monotonic(), [0, 0, 0, 0]
        for seed in range(options.seed, options.seed + options.histories):
            predictor = LookupPredictor()
            for step in Manager(shape, seed).serve():
                predictor.take(step)
            if predictor.wrong:
                print(f"{shape.name}, seed {seed}: {predictor.wrong} of {predictor.requests} predicted wrongly")
            counts = (predictor.requests, predictor.hits, predictor.wrong, predictor.wrong_if_dense)
            sums = [sum(pair) for pair in zip(sums, counts, strict=True)]
        print(
            f"{shape.name}: {sums[0]:,} requests, {sums[1]:,} with cached tokens, {sums[2]:,} predicted wrongly; "
            f"{sums[3]:,} by full attention alone; {time.monotonic() - began:.1f} s"
        )
        wrong += sums[2]
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
