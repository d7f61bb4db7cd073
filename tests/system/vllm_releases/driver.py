"""One release of vLLM with the plugin, in a process of its own: random requests, and what a consumer receives.

`python -m tests.system.vllm_releases.driver FOLDER SEED` prints a `Findings` as JSON.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import random
import sys
import time
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Self
from unittest import mock

import msgspec
import zmq

from kvevents import Source, Subscriber
from kvevents.engines import vllm as plugin
from kvevents.engines.plugin import VARIABLE
from kvevents.events import ATTESTATION_MASK, attestation_term
from kvevents.index import PrefixIndex
from kvevents.publisher.event_server import EventSocket
from tests.system.vllm_releases import stand_ins
from tools.stand_in import Anything

BLOCK_SIZE: Final = 16
BLOCKS: Final = 40
REQUESTS: Final = 300
WINDOW: Final = 64
SECONDS: Final = 20.0
"""Time limit for a message."""
_MAX_LENGTH: Final = 4096
_HEARTBEAT: Final = b"digest"
"""Text that only payloads of heartbeats contain: a name that all their layouts have."""


@dataclass(kw_only=True)
class Findings:
    """The findings about a release. Each field except the counts is "yes", or a phrase that says what was different."""

    events: int = 0
    blocks: int = 0
    """Number of blocks that the engine caches at the end of the random requests."""
    publisher: str = ""
    """Whether the factory returned the publisher of kvevents."""
    payloads: str = ""
    """Whether the batches sent are those of vLLM's own encoder, byte for byte."""
    readable: str = ""
    """Whether vLLM's own types decode all batches, heartbeats included, and a replay has the frames of vLLM's own publisher."""
    attestation: str = ""
    """Whether the heartbeat carries the digest that a new computation over the engine's map yields, and the index agrees."""
    announced_again: str = ""
    """Whether hits of requests in report mode "full" are left out."""
    reset: str = ""
    """Whether a reset of the idle engine is published without a further step."""
    takeover: str = ""
    """Whether vLLM's own publisher continues the stream when sending fails: every batch in its replay, without a gap."""


class Engine:
    """The parts of vLLM's scheduler that deal with blocks and events, called in its order."""

    def __init__(self, *, is_hybrid: bool, blocks: int = BLOCKS) -> None:
        events = import_module("vllm.distributed.kv_events")
        utils = import_module("vllm.v1.core.kv_cache_utils")
        utils.init_none_hash(stand_ins.hash_object)
        self._batch: Final = events.KVEventBatch
        self._hasher: Final = utils.get_request_block_hasher(BLOCK_SIZE, stand_ins.hash_object)
        config = import_module("vllm.config.kv_events").KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*"
        )
        self.publisher: Final = events.EventPublisherFactory.create(config, 0)
        registry = sys.modules.get("vllm.v1.kv_cache_spec_registry")
        if registry is not None:
            register = registry.KVCacheSpecRegistry._ensure_registered
            register(**({"vllm_config": Anything()} if inspect.signature(register).parameters else {}))
        self.manager: Final = _call(
            import_module("vllm.v1.core.kv_cache_manager").KVCacheManager,
            kv_cache_config=_cache_config(blocks, is_hybrid=is_hybrid),
            max_model_len=_MAX_LENGTH,
            max_in_flight_tokens=_MAX_LENGTH,
            max_num_batched_tokens=_MAX_LENGTH,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            enable_caching=True,
            use_eagle=False,
            log_stats=False,
            enable_kv_cache_events=True,
            dcp_world_size=1,
            pcp_world_size=1,
        )
        self.scheduler: Final = object.__new__(_concrete(import_module("vllm.v1.core.sched.scheduler").Scheduler))
        vars(self.scheduler).update(
            kv_cache_manager=self.manager,
            kv_event_publisher=self.publisher,
            running=[],
            connector=None,
            aux_output_connector=None,
        )
        self.sent: Final[list[bytes]] = []
        """The batches as vLLM's own encoder writes them."""
        self.events = 0

    def request(self, number: int, tokens: list[int], *, mode: str = "incremental") -> Any:
        parameters = SimpleNamespace(
            max_tokens=1, min_tokens=0, eos_token_id=None, stop_token_ids=None, repetition_detection=None, num_logprobs=None,
            extra_args={"kv_cache_report_mode": mode}, skip_reading_prefix_cache=None, prompt_logprobs=None,
            guided_decoding=None, structured_outputs=None, all_stop_token_ids=set(),
        )  # fmt: skip
        return _call(
            import_module("vllm.v1.request").Request,
            request_id=str(number),
            prompt_token_ids=tokens,
            sampling_params=parameters,
            pooling_params=None,
            eos_token_id=None,
            arrival_time=0.0,
            block_hasher=self._hasher,
        )

    def run(self, request: Any) -> None:
        """Compute a prompt, publish its events, and free its blocks."""
        hit, cached = self.manager.get_computed_blocks(request)[:2]
        count = request.num_tokens - cached
        allocated = self.manager.allocate_slots(request, count, num_new_computed_tokens=cached, new_computed_blocks=hit)
        if allocated is None:
            raise RuntimeError("too few blocks for a request")
        request.num_computed_tokens = request.num_tokens
        self.publish()
        self.manager.free(request)

    def publish(self) -> None:
        """Publish the events, as the scheduler does at the end of `update_from_output`."""
        events = self.manager.take_events()
        if events:
            batch = self._batch(ts=time.time(), events=events)
            self.publisher.publish(batch)
            batch.data_parallel_rank = 0
            self.sent.append(msgspec.msgpack.encode(batch))
            self.events += len(events)

    def cached_keys(self) -> list[bytes]:
        """The keys of vLLM's map, one for each physical block, read from the map itself."""
        found = self.manager.block_pool.cached_block_hash_to_block
        entries = getattr(found, "_cache", found)
        return [key for key, blocks in entries.items() for _ in range(len(blocks) if isinstance(blocks, dict) else 1)]


def _concrete(scheduler: Any) -> Any:
    scheduler.__abstractmethods__ = frozenset()
    return scheduler


def _call(function: Any, **values: Any) -> Any:
    """Call the function with those of `values` that this release has a parameter for."""
    known = inspect.signature(function).parameters
    return function(**{name: value for name, value in values.items() if name in known})


def _cache_config(blocks: int, *, is_hybrid: bool) -> Any:
    kinds = import_module("vllm.v1.kv_cache_interface")
    shape = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 1, "dtype": Anything, "use_mla": False}
    specs = [_call(kinds.FullAttentionSpec, **shape)]
    if is_hybrid:
        specs.append(_call(kinds.SlidingWindowSpec, **shape, sliding_window=WINDOW))
    groups = [
        _call(kinds.KVCacheGroupSpec, layer_names=[f"layer.{offset}"], kv_cache_spec=spec) for offset, spec in enumerate(specs)
    ]
    return _call(
        kinds.KVCacheConfig, num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups, prefix_cache_retention_interval=0
    )


class Consumer:
    """A plain ZeroMQ socket that receives the bytes, and an index behind a `Subscriber`."""

    def __init__(self, publisher: Any) -> None:
        self.index: Final = PrefixIndex()
        self._subscriber: Final = Subscriber(Source(publisher.endpoint, replay_endpoint=publisher.replay_endpoint))
        self._socket: Final[zmq.Socket[bytes]] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.connect(publisher.replay_endpoint)

    def __enter__(self) -> Self:
        self._subscriber.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._subscriber.close()
        self._socket.close(0)

    def attestation(self, attested_digest: int | None) -> str:
        """Follow the stream to a heartbeat that attests `attested_digest`, and return whether the index agrees with it."""
        attestations: list[int | None] = []
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            delivery = self._subscriber.receive(timeout=SECONDS)
            if delivery is None:
                break
            report = self.index.apply(delivery).report
            if report is None or report.heartbeat is None:
                continue
            attestations.append(report.heartbeat.attestation)
            if attestations[-1] == attested_digest:
                return "yes" if all(each.attested for each in self.index.workers()) else "the index differs"
        return f"no heartbeat attests {attested_digest}; the last ones attest {attestations[-3:]}"

    def payloads(self, count: int) -> list[bytes]:
        """Return all batches that the replay endpoint has, except heartbeats, once they are `count` or the time is over."""
        deadline = time.monotonic() + SECONDS
        while True:
            found = [frames[-1] for frames in replay(self._socket) if _HEARTBEAT not in frames[-1]]
            if len(found) >= count or time.monotonic() > deadline:
                return found

    def readable(self) -> str:
        """Return whether consumers that know only this release can read what the replay endpoint has."""
        events = import_module("vllm.distributed.kv_events")
        decoder = msgspec.msgpack.Decoder(type=events.KVEventBatch)
        messages = replay(self._socket)
        expected = _count_frames_of_own_replay(events)
        if {len(frames) for frames in messages} != {expected}:
            return f"replies have {len(messages[0])} frames, and vLLM's own {expected}"
        try:
            for frames in messages:
                decoder.decode(frames[-1])
        except msgspec.DecodeError as error:
            return str(error)
        return "yes" if any(_HEARTBEAT in frames[-1] for frames in messages) else "no heartbeat was received"


def replay(socket: zmq.Socket[bytes]) -> list[list[bytes]]:
    """Return the messages of a replay from the start, without its end marker."""
    socket.send_multipart([b"", (0).to_bytes(8, "big")])
    found: list[list[bytes]] = []
    while socket.poll(int(SECONDS * 1000)):
        frames = socket.recv_multipart()
        if not frames[-1]:
            break
        found.append(frames)
    return found


def _count_frames_of_own_replay(events: Any) -> int:
    """Return how many frames a reply of vLLM's own publisher has."""
    own = events.ZmqEventPublisher(0, endpoint="inproc://own", replay_endpoint="inproc://own-replay")
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    try:
        own.publish(events.KVEventBatch(ts=0.0, events=[]))
        socket.connect("inproc://own-replay")
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            messages = replay(socket)
            if messages:
                return len(messages[0])
    finally:
        socket.close(0)
        own.shutdown()
    raise TimeoutError("vLLM's own publisher replayed nothing")


def drive(seed: int, *, is_hybrid: bool) -> Findings:
    """Run one engine, and check it."""
    rng = random.Random(seed)
    engine = Engine(is_hybrid=is_hybrid)
    found = Findings(publisher="yes" if isinstance(engine.publisher, plugin.VllmEventPublisher) else "vLLM's own")
    if found.publisher != "yes":
        return found
    try:
        with Consumer(engine.publisher) as consumer:
            for number in range(REQUESTS):
                # A prompt of one of six families, cut at a random place: this gives shared prefixes, hits, copies and
                # evictions.
                family, length = rng.randrange(6), rng.randrange(1, 12 * BLOCK_SIZE)
                engine.run(engine.request(number, [family * 1000 + offset for offset in range(length)]))
            keys = engine.cached_keys()
            found.events, found.blocks = engine.events, len(keys)
            found.attestation = consumer.attestation(_digest(keys))
            found.readable = consumer.readable()
            found.announced_again = _announce_again(engine)
            sent, received = engine.sent, consumer.payloads(len(engine.sent))
            found.payloads = "yes" if sent == received else f"different: {len(received)} received, {len(sent)} sent"
            found.reset = _reset(engine, consumer)
            found.takeover = _take_over(engine)
    finally:
        engine.publisher.shutdown()
    return found


def _digest(keys: list[bytes]) -> int:
    """Return the digest of all blocks of the map, as `kvevents.events.Heartbeat.attestation` defines it."""
    has_groups = "group_idx" in import_module("vllm.distributed.kv_events").BlockStored.__struct_fields__
    return (
        sum(attestation_term(key[:-4], int.from_bytes(key[-4:], "big") if has_groups else None) for key in keys)
        & ATTESTATION_MASK
    )


def _announce_again(engine: Engine) -> str:
    """Repeat a request in report mode "full": its prefix is cached, so that no block is new."""
    tokens = [77_000 + offset for offset in range(4 * BLOCK_SIZE + 1)]
    engine.run(engine.request(REQUESTS, tokens))
    before = engine.events
    again = engine.request(REQUESTS + 1, tokens, mode="full")
    if not hasattr(again, "kv_cache_report_mode"):
        return "not in this release"
    engine.run(again)
    stored = engine.events - before
    return "yes" if not stored else f"{stored} events for a prompt that is cached"


def _reset(engine: Engine, consumer: Consumer) -> str:
    if not engine.scheduler.reset_prefix_cache():
        return "vLLM refused to reset"
    if len(consumer.payloads(len(engine.sent) + 1)) > len(engine.sent):
        return "yes"
    return "not published"


def _take_over(engine: Engine) -> str:
    """Break the sockets of the publisher, and read the replay of the one that takes over."""
    with mock.patch.object(EventSocket, "send", side_effect=RuntimeError("broken on purpose")):
        engine.run(engine.request(REQUESTS + 2, [88_000 + offset for offset in range(4 * BLOCK_SIZE)]))
        deadline = time.monotonic() + SECONDS
        while engine.publisher._successor is None:
            if time.monotonic() > deadline:
                return "vLLM's own publisher does not take over"
            time.sleep(0.01)
    own = engine.publisher._successor
    engine.run(engine.request(REQUESTS + 3, [99_000 + offset for offset in range(4 * BLOCK_SIZE)]))
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    try:
        socket.connect(own._replay.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode())
        while True:
            messages = replay(socket)
            if messages and messages[-1][-1] == engine.sent[-1]:
                break
            if time.monotonic() > deadline:
                return f"its replay has {len(messages)} batches, and not the newest one"
    finally:
        socket.close(0)
    numbers = [int.from_bytes(frames[-2], "big") for frames in messages]
    if numbers != list(range(numbers[0], numbers[-1] + 1)):
        return f"numbers are missing from {numbers[0]} to {numbers[-1]}"
    missing = {*engine.sent} - {frames[-1] for frames in messages}
    return f"{len(missing)} batches are missing" if missing else "yes"


def main() -> None:
    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    logging.basicConfig(level=logging.WARNING)
    os.environ[VARIABLE] = '{"heartbeat": 0.1}'
    stand_ins.install(folder)
    plugin.register()
    print(json.dumps({kind: asdict(drive(seed, is_hybrid=kind == "hybrid")) for kind in ("plain", "hybrid")}))


if __name__ == "__main__":
    main()
