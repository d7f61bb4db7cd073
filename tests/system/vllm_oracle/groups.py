"""Lookups of vLLM 0.33.0 with KV cache groups of several kinds and block sizes: `python -m tests.system.vllm_oracle.groups`.

The block manager of vLLM's released wheel serves random requests. Before each of its lookups, a `PrefixIndex` and the model
of vLLM's rules in `engine_cache.py` receive the events so far, as vLLM encodes them. Both predict how many tokens of the
prompt vLLM finds.

For each shape of the cache, one line has the number of requests, of requests with cached tokens, of wrong predictions of the
index, of predictions that it reported as estimates, and of wrong predictions of the model. The model has no LoRA, because
vLLM hashes the adapter's path and does not announce it. `--record FILE` writes a short history of each shape, for tests
without a wheel.
"""

from __future__ import annotations

import argparse
import gzip
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import msgspec

from kvevents.index import Namespace, PrefixIndex
from kvevents.wire import decode_batch
from tests.system.vllm_oracle.engine_cache import EngineCache
from tests.system.vllm_oracle.vllm_blocks import CORE, MAX_MODEL_LEN, modules
from tools.released import VLLM_NEWEST
from tools.stand_in import Anything

VOCABULARY: Final = 1 << 10
AT_ONCE: Final = 3
REMEMBERED: Final = 12
REQUESTS: Final = 200


class GroupShape(NamedTuple):
    """One KV cache group."""

    kind: str
    size: int
    window: int = 0
    is_draft: bool = False


class Shape(NamedTuple):
    """The cache of a model."""

    name: str
    groups: tuple[GroupShape, ...]
    unit: int
    """Tokens of a hash unit (`hash_block_size`)."""
    retention: int | None = 0
    """`prefix_cache_retention_interval`."""
    drafts: list[int] | None = None
    """Groups of a draft model, as the index is configured; None without a draft model."""
    lookahead: int = 0
    """Tokens behind a block that its hash covers (`num_hash_lookahead_tokens`)."""


FULL, WINDOW, MLA, MAMBA = "full", "window", "mla", "mamba"
SHAPES: Final = (
    Shape("full attention and Mamba states", (GroupShape(FULL, 8), GroupShape(MAMBA, 8)), 8),
    Shape("Mamba states, hashed inside of blocks", (GroupShape(FULL, 16), GroupShape(MAMBA, 16)), 4),
    Shape("the same, all states kept", (GroupShape(FULL, 16), GroupShape(MAMBA, 16)), 4, retention=None),
    Shape("small blocks and large states", (GroupShape(FULL, 4), GroupShape(MAMBA, 16), GroupShape(MAMBA, 16)), 4),
    Shape("a window with smaller blocks", (GroupShape(FULL, 16), GroupShape(WINDOW, 4, 20)), 4),
    Shape("a window with smaller blocks, all kept", (GroupShape(FULL, 16), GroupShape(WINDOW, 4, 20)), 4, retention=None),
    Shape("a window with larger blocks", (GroupShape(FULL, 4), GroupShape(WINDOW, 16, 20)), 4),
    Shape("three block sizes", (GroupShape(MLA, 16), GroupShape(WINDOW, 8, 20), GroupShape(WINDOW, 4, 9)), 4),
    Shape("full attention of two block sizes", (GroupShape(FULL, 4), GroupShape(MLA, 16)), 4),
    Shape("a window alone", (GroupShape(WINDOW, 4, 10),), 4, retention=None),
    Shape("EAGLE", (GroupShape(FULL, 4),), 4, drafts=[]),
    Shape("EAGLE and a window", (GroupShape(FULL, 4), GroupShape(WINDOW, 4, 10)), 4, drafts=[]),
    Shape("a draft group beside a window", (GroupShape(FULL, 4, 0, True), GroupShape(WINDOW, 4, 10)), 4, drafts=[0]),
    Shape("EAGLE, two block sizes", (GroupShape(FULL, 16), GroupShape(WINDOW, 4, 20)), 4, drafts=[]),
    Shape("EAGLE and Mamba states", (GroupShape(FULL, 16), GroupShape(MAMBA, 16)), 4, drafts=[]),
    Shape("hashes with lookahead", (GroupShape(FULL, 4), GroupShape(WINDOW, 4, 10)), 4, drafts=[], lookahead=1),
    Shape("hashes with lookahead of two", (GroupShape(FULL, 4),), 4, lookahead=2),
)


class Step(msgspec.Struct, omit_defaults=True):
    """A step of a history: events, or a request."""

    payload: bytes = b""
    prompt: list[int] = []
    salt: str | None = None
    lora: str | None = None
    cached: int = 0
    """Tokens of the prompt that vLLM found."""


class History(msgspec.Struct):
    """One history, as it is recorded."""

    shape: str
    drafts: list[int] | None
    steps: list[Step]


class Manager:
    """vLLM's block manager, and the requests that it serves."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self._shape: Final = shape
        self._random: Final = Random(f"{shape.name} {seed}")
        self._multiple: Final = math.lcm(*(group.size for group in shape.groups))
        self._longest: Final = 10 * self._multiple
        blocks = self._random.randint(3, 6) * sum(self._longest // group.size for group in shape.groups)
        real = modules(VLLM_NEWEST)
        self.manager: Final = real[CORE + "kv_cache_manager"].KVCacheManager(
            self._config(blocks),
            max_model_len=MAX_MODEL_LEN,
            max_in_flight_tokens=MAX_MODEL_LEN,
            scheduler_block_size=self._multiple,
            hash_block_size=shape.unit,
            enable_kv_cache_events=True,
            use_eagle=shape.drafts is not None and not shape.lookahead,
            num_hash_lookahead_tokens=shape.lookahead,
        )
        self._request: Final = real["vllm.v1.request"].Request
        self._hasher: Final = real[CORE + "kv_cache_utils"].get_request_block_hasher(
            shape.unit, real["vllm.utils.hashing"].sha256, shape.lookahead
        )
        self._encode: Final = msgspec.msgpack.Encoder().encode
        self._batch: Final = real["vllm.distributed.kv_events"].KVEventBatch
        self._texts = [self._make_words(self._longest)]
        self._running: list[tuple[Any, list[int]]] = []

    def _config(self, blocks: int) -> Any:
        kinds = modules(VLLM_NEWEST)["vllm.v1.kv_cache_interface"]
        groups = []
        for number, group in enumerate(self._shape.groups):
            heads = {"block_size": group.size, "num_kv_heads": 1, "head_size": 1, "dtype": Anything}
            match group.kind:
                case "full":
                    spec = kinds.FullAttentionSpec(**heads)
                case "mla":
                    spec = kinds.MLAAttentionSpec(**heads)
                case "window":
                    spec = kinds.SlidingWindowSpec(**heads, sliding_window=group.window)
                case _:
                    spec = kinds.MambaSpec(block_size=group.size, shapes=((1,),), dtypes=(Anything,), mamba_cache_mode="align")
            groups.append(kinds.KVCacheGroupSpec([f"layer.{number}"], spec, is_eagle_group=group.is_draft))
        return kinds.KVCacheConfig(
            num_blocks=blocks + 1,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=self._shape.retention,
        )

    def serve(self, count: int = REQUESTS) -> Iterator[Step]:
        """Yield `count` requests, each after the events of all earlier ones; the first request fills a block of every group."""
        for number in range(count):
            while self._running and (len(self._running) >= AT_ONCE or self._random.random() < 0.8):
                self._answer()
            if number % 90 == 89:
                self._reset()
            prompt = self._make_words(2 * self._multiple + 1) if number == 0 else self._make_prompt()
            answer = self._make_words(self._random.randint(1, 12))
            salt = "tenant" if number and self._random.random() < 0.1 else None
            lora = "adapter" if number and self._random.random() < 0.1 else None
            request = self._make_request(f"r{number}", prompt, len(answer), salt, lora)
            if events := self.manager.take_events():
                yield Step(payload=self._encode(self._batch(ts=float(number), events=list(events))))
            self.manager.coordinator.new_step_starts()
            found = self.manager.get_computed_blocks(request)
            yield Step(prompt=prompt, salt=salt, lora=lora, cached=int(found[1]))
            self._admit(request, answer, found)

    def _make_request(self, name: str, prompt: Sequence[int], output: int, salt: str | None, lora: str | None) -> Any:
        class Params:
            max_tokens, min_tokens = output, 0
            eos_token_id = stop_token_ids = repetition_detection = num_logprobs = extra_args = skip_reading_prefix_cache = None

        adapter = (
            SimpleNamespace(adapter_id=1, lora_int_id=1, name=lora, lora_name=lora, lora_path=f"/{lora}") if lora else None
        )
        return self._request(
            name,
            list(prompt),
            Params(),
            None,
            arrival_time=0.0,
            lora_request=adapter,
            cache_salt=salt,
            block_hasher=self._hasher,
        )

    def _make_prompt(self) -> list[int]:
        text = self._random.choice(self._texts)
        fresh = self._make_words(self._random.randint(1, 3 * self._multiple))
        prompt = (text[: self._random.randint(0, len(text))] + fresh)[: self._longest]
        if self._random.random() < 0.2:
            prompt = text  # an earlier prompt again
        self._texts = [*self._texts, prompt][-REMEMBERED:]
        return prompt

    def _make_words(self, count: int) -> list[int]:
        return [self._random.randrange(VOCABULARY) for _ in range(count)]

    def _chunk_ends(self, start: int, prompt: int) -> list[int]:
        """Return where chunks end: vLLM stores states at the ends of blocks, and at the last hash unit that a resend uses."""
        if not any(group.kind == MAMBA for group in self._shape.groups):
            return [prompt]
        unit, size = self._shape.unit, max(group.size for group in self._shape.groups)
        drop = self._shape.drafts is not None
        tail = (prompt - (not drop)) // unit * unit - unit * drop
        stops = {*range(start // size * size + size, prompt, size), tail, prompt}
        return sorted(stop for stop in stops if stop > start)

    def _admit(self, request: Any, answer: list[int], found: Any) -> None:
        while True:
            blocks, cached, request.shared_prefix_boundary = found
            stops = self._chunk_ends(int(cached), request.num_prompt_tokens)
            admitted = self.manager.allocate_slots(
                request,
                stops[0] - cached,
                num_new_computed_tokens=cached,
                new_computed_blocks=blocks,
                full_sequence_must_fit=True,
            )
            if admitted is not None:
                request.num_computed_tokens = stops[0]
                if all(self._extend(request, stop - request.num_computed_tokens) for stop in stops[1:]):
                    self._running.append((request, answer))
                    return
                self._release(request)
            if not self._running:
                return
            self._finish(self._running[-1])
            self.manager.coordinator.new_step_starts()
            found = self.manager.get_computed_blocks(request)

    def _extend(self, request: Any, tokens: int) -> bool:
        self.manager.coordinator.new_step_starts()
        if self.manager.allocate_slots(request, tokens) is None:
            return False
        request.num_computed_tokens += tokens
        return True

    def _answer(self) -> None:
        entry = self._random.choice(self._running)
        request, left = entry
        request.append_output_token_ids(left.pop())
        if not self._extend(request, 1) or not left:
            self._finish(entry)

    def _reset(self) -> None:
        for entry in list(self._running):
            self._finish(entry)
        self.manager.reset_prefix_cache()

    def _release(self, request: Any) -> None:
        self.manager.free(request)
        request.num_computed_tokens = 0

    def _finish(self, entry: tuple[Any, list[int]]) -> None:
        self._running.remove(entry)
        self._release(entry[0])


class GroupPredictor:
    """Predicts each request of a history with a `PrefixIndex` and with the model, and counts wrong predictions."""

    def __init__(self, drafts: Sequence[int] | None) -> None:
        self.cache: Final = EngineCache(drafts)
        self.index: Final = PrefixIndex()
        self.index.set_drafts("vllm", drafts)
        self.requests = self.hits = self.wrong = self.estimates = self.wrong_in_model = 0
        self._batches = 0

    def take(self, step: Step) -> None:
        """Apply the events of the next step, or predict its request."""
        if step.payload:
            for event in decode_batch(step.payload).batch.events:
                self.cache.apply(event)
            self.index.apply_payload("vllm", 0, self._batches, step.payload)
            self._batches += 1
            return
        self.requests += 1
        self.hits += step.cached > 0
        longest = len(step.prompt) - 1
        if step.lora is None:
            self.wrong_in_model += self.cache.tokens(step.prompt, longest, step.salt) != step.cached
        found = self.index.match(step.prompt, Namespace(lora=step.lora, salt=step.salt), max_tokens=longest)
        tokens = sum(worker.tokens for worker in found)
        if any(worker.estimate for worker in self.index.workers()):
            self.estimates += 1
        elif step.lora is None or all(worker.is_certain for worker in found):
            self.wrong += tokens != step.cached  # vLLM announces no block twice, so no block is uncertain
        else:
            self.estimates += 1
            self.wrong += 0 < tokens < step.cached  # the most that vLLM can find; 0 if even that is unknown


def recorded(path: Path) -> list[History]:
    """Return the histories that `--record` wrote."""
    with gzip.open(path) as file:
        return [msgspec.json.decode(line, type=History) for line in file]


def record(path: Path, requests: int = 50) -> None:
    """Write the first history of each shape, always the same bytes."""
    with path.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
        for shape in SHAPES:
            steps = list(Manager(shape, 0).serve(requests))
            packed.write(msgspec.json.encode(History(shape.name, shape.drafts, steps)) + b"\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict the requests. Returns 0 if every prediction was right, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.vllm_oracle.groups", description=__doc__)
    parser.add_argument("--histories", type=int, default=15, help="histories of each shape; 15 are 51,000 requests")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first history; the next has the next number")
    parser.add_argument("--only", default="", help="shapes with this word in their name")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write histories to a file, and do nothing else")
    options = parser.parse_args(arguments)
    if options.record is not None:
        record(options.record)
        return 0
    wrong = 0
    for shape in (shape for shape in SHAPES if options.only in shape.name):
        began, sums = time.monotonic(), [0] * 5
        for seed in range(options.seed, options.seed + options.histories):
            predictor = GroupPredictor(shape.drafts)
            for step in Manager(shape, seed).serve():
                predictor.take(step)
            if predictor.wrong:
                print(f"{shape.name}, seed {seed}: {predictor.wrong} of {predictor.requests} predicted wrongly")
            counts = (predictor.requests, predictor.hits, predictor.wrong, predictor.estimates, predictor.wrong_in_model)
            sums = [entry + other for entry, other in zip(sums, counts, strict=True)]
        seconds = time.monotonic() - began
        print(
            f"{shape.name}: {sums[0]:,} requests, {sums[1]:,} with a hit; "
            f"{sums[2]:,} predicted wrongly, {sums[3]:,} estimated; "
            f"{sums[4]:,} predicted wrongly by the model; {seconds:.1f} s"
        )
        wrong += sums[2] + sums[4]
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
