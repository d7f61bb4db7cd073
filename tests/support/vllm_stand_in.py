"""A stand-in for the parts of vLLM 0.33 that the plugin uses. The real ones need vLLM's wheel, and `make engines` tests them.

Names, signatures and the order of calls are those of vLLM: the scheduler creates its publisher and then its KVCacheManager, and
takes all events of the block pool just before it publishes them.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

from kvevents.compat import vllm as compat
from own_publisher import OwnPublisher

ENDPOINTS: Final = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0"}
"""Endpoints as in vLLM's configuration, at any free ports."""


class BlockHashToBlockMap:
    """Copies of blocks by hash with group."""

    def __init__(self) -> None:
        self.copies: dict[bytes, set[int]] = {}

    def insert(self, key: bytes, block: int) -> None:
        self.copies.setdefault(key, set()).add(block)

    def pop(self, key: bytes, block_id: int) -> int | None:
        copies = self.copies.get(key, set())
        if block_id not in copies:
            return None
        copies.remove(block_id)
        return block_id


class BlockPool:
    medium = "GPU"
    is_in_use = False
    """Whether running requests use blocks."""

    def __init__(self) -> None:
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        self.queue: list[Any] = []

    def store(self, block_hash: int, block: int, group: int = 0) -> None:
        self.cached_block_hash_to_block.insert(key_of(block_hash, group), block)
        self.queue.append(make_store(block_hash, group))

    def evict(self, block_hash: int, block: int, group: int = 0) -> None:
        assert self.cached_block_hash_to_block.pop(key_of(block_hash, group), block) is not None
        self.queue.append(compat.BlockRemoved([block_hash], "GPU", group))

    def emit_cached_block_events(self, block_hash: int) -> None:
        self.queue.append(make_store(block_hash, 0))

    def reset_prefix_cache(self) -> bool:
        if self.is_in_use:
            return False
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        self.queue.append(compat.AllBlocksCleared())
        return True

    def take_events(self) -> list[Any]:
        events, self.queue = self.queue, []
        return events


class KVCacheManager:
    """Of a model with a sliding window in its first group."""

    kv_cache_event_metadata = (("sliding_window", 8), ("full_attention", None))

    def __init__(self) -> None:
        self.link(BlockPool())

    def link(self, pool: Any) -> None:
        groups = [types.SimpleNamespace(kv_cache_group_id=group, block_size=4, block_pool=pool) for group in range(2)]
        self.block_pool: BlockPool = pool
        self.coordinator = types.SimpleNamespace(single_type_managers=groups)

    def take_events(self) -> list[Any]:
        return self.block_pool.take_events()


def make_store(block_hash: int, group: int) -> compat.BlockStored:
    """Return the event of one block at the start of a prompt, with tokens that depend on its hash."""
    tokens = [block_hash & 0xFFFF_FFFF, block_hash >> 32, 3, 4]
    return compat.BlockStored([block_hash], None, tokens, 4, None, "GPU", None, group_idx=group)


def key_of(block_hash: int, group: int) -> bytes:
    """Return `make_block_hash_with_group_id` of a hash of 32 bytes whose low 64 bits are `block_hash`."""
    return bytes(24) + block_hash.to_bytes(8, "big") + group.to_bytes(4, "big")


class Vllm:
    """The modules that are imported under vLLM's names."""

    def __init__(self) -> None:
        self.events = types.ModuleType("vllm.distributed.kv_events")
        self.pool = types.ModuleType("vllm.v1.core.block_pool")
        manager = types.ModuleType("vllm.v1.core.kv_cache_manager")
        scheduler = types.ModuleType("vllm.v1.core.sched.scheduler")
        core = types.ModuleType("vllm.v1.engine.core")

        own_publishers: list[OwnPublisher] = []

        class RecordedPublisher(OwnPublisher):
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options)
                own_publishers.append(self)

        own_publisher: Any = RecordedPublisher

        class Factory(compat.EventPublisherFactory):
            _registry = {"null": compat.NullEventPublisher, "zmq": own_publisher}  # noqa: RUF012 - as vLLM's class has it

        # New classes for each test, since the hooks of the plugin are never removed.
        map_class = type("BlockHashToBlockMap", (BlockHashToBlockMap,), {})
        pool_class = type("BlockPool", (BlockPool,), {})
        manager_class = type("KVCacheManager", (KVCacheManager,), {})

        class Scheduler:
            def __init__(self, rank: int = 0, **options: Any) -> None:
                config = compat.KVEventsConfig(enable_kv_cache_events=True, **options)
                self.kv_event_publisher: Any = Factory.create(config, rank)
                self.kv_cache_manager: Any = manager_class()
                self.pool: Any = pool_class()
                self.kv_cache_manager.link(self.pool)
                self.pool.cached_block_hash_to_block = map_class()
                self.connector: Any = None

            def step(self) -> None:
                events = self.kv_cache_manager.take_events()
                if events:
                    self.kv_event_publisher.publish(compat.KVEventBatch(ts=0.0, events=events))

            def reset_prefix_cache(self, reset_running_requests: bool = False, *, reset_connector: bool = False) -> bool:  # noqa: ARG002 - as vLLM has it
                done: bool = self.pool.reset_prefix_cache()
                if done:
                    self.pool.cached_block_hash_to_block = map_class()
                if reset_connector and self.connector is not None:
                    done = self.connector.reset_cache() is not False and done
                return done

        class EngineCore:
            def __init__(self, scheduler: Any) -> None:
                self.scheduler = scheduler

            def add_lora(self, lora_request: Any) -> bool:  # noqa: ARG002 - as vLLM has it
                return True

        self.own_publisher = own_publisher
        self.own_publishers = own_publishers
        """All of vLLM's own publishers that were created."""
        self.factory: Any = Factory
        self.scheduler: Any = Scheduler
        self.core: Any = EngineCore
        for module, names in (
            (
                self.events,
                {
                    "EventPublisherFactory": Factory,
                    "NullEventPublisher": compat.NullEventPublisher,
                    "ZmqEventPublisher": own_publisher,
                    "KVEventsConfig": compat.KVEventsConfig,
                    "KVEventBatch": compat.KVEventBatch,
                    "BlockStored": compat.BlockStored,
                },
            ),
            (self.pool, {"BlockPool": pool_class, "BlockHashToBlockMap": map_class}),
            (manager, {"KVCacheManager": manager_class}),
            (scheduler, {"Scheduler": Scheduler}),
            (core, {"EngineCore": EngineCore}),
        ):
            vars(module).update(names)
        self.modules = {each.__name__: each for each in (self.events, self.pool, manager, scheduler, core)}


@contextmanager
def install_stand_in() -> Iterator[Vllm]:
    """Make the stand-in importable under vLLM's names."""
    vllm = Vllm()
    before = {name: sys.modules.get(name) for name in vllm.modules}
    sys.modules.update(vllm.modules)
    try:
        yield vllm
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


@pytest.fixture(name="engine")
def installed_engine() -> Iterator[Vllm]:
    """Yield the stand-in, which is importable during the test."""
    with install_stand_in() as found:
        yield found


@pytest.fixture(name="schedule")
def schedulers_of_a_test(engine: Vllm) -> Iterator[Callable[..., Any]]:
    """Yield a function that starts a scheduler with options; its publisher listens at any free ports of this machine."""
    schedulers: list[Any] = []

    def begin(**options: Any) -> Any:
        schedulers.append(engine.scheduler(**{**ENDPOINTS, **options}))
        return schedulers[-1]

    yield begin
    for each in schedulers:
        each.kv_event_publisher.shutdown()
