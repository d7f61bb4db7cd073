"""The plugin for vLLM: `vllm serve --kv-events-config` with the publisher `zmq` publishes through kvevents.

vLLM loads the entry points of the group `vllm.general_plugins` in every process, and in EngineCore before the scheduler is
created. `register` replaces the entry `zmq` of `EventPublisherFactory`, since vLLM's configuration allows no other name. The
hooks into the block pool are installed when vLLM creates a publisher, so processes without a publisher have no hooks.

If kvevents fails, vLLM still publishes its events, except when keys are configured. If creating the publisher fails, vLLM uses
its own publisher. If publishing fails later, vLLM's publisher takes over. A fault in a hook ends the attestation. Each fault is
logged once. The page `guides/vllm.md` of the documentation lists the releases with which this module was run.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from kvevents.compat import vllm as compat
from kvevents.engines.engine_publisher import EnginePublisher, OwnPublisher
from kvevents.engines.plugin import PUBLISHER_NAME, EngineSettings, attach_publisher, engine_logger, hook, replace_publisher
from kvevents.errors import UnknownDialectError
from kvevents.events import (
    ATTESTATION_MASK,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventBatch,
    attestation_term,
)
from kvevents.wire.dialects import Dialect, dialect_for

_ENGINE: Final = "vLLM"
logger = engine_logger(_ENGINE)
_EVENTS_MODULE: Final = "vllm.distributed.kv_events"
_REPEAT_METHOD_NAME: Final = "emit_cached_block_events"
_GPU_MEDIA: Final = (None, "GPU")
_FULL_ATTENTION_KINDS: Final = (None, "full_attention", "mla_attention", "sink_full_attention")
"""Kinds of KV cache groups that need all blocks of a prompt. None is the kind in releases before 0.26, which send no kind."""
_KNOWN_OPTIONS: Final = frozenset({"endpoint", "replay_endpoint", "buffer_steps", "hwm", "max_queue_size", "topic"})


def register() -> None:
    """Replace vLLM's publisher `zmq` if the plugin is turned on. vLLM calls this function as a plugin, possibly repeatedly.

    An exception is raised only if keys are configured and vLLM would publish unencrypted.
    """
    replace_publisher(_ENGINE, "data_parallel_rank", _EVENTS_MODULE, _create_publisher, os.environ)


class VllmEventPublisher(EnginePublisher):
    """The publisher inside EngineCore, with vLLM's parameters and the settings of the plugin."""

    logger = logger
    _may_collide = True

    def __init__(
        self, settings: EngineSettings, data_parallel_rank: int, options: dict[str, Any], fallback: OwnPublisher | None = None
    ) -> None:
        self.hand_over_to(fallback, settings.max_failures)
        self._options = options
        self.lora_paths: Final[dict[str, str]] = {}
        """Path from which a LoRA was last loaded, by the name of the LoRA."""
        base_options = {name: value for name, value in options.items() if name in _KNOWN_OPTIONS}
        for name in {"endpoint", "replay_endpoint"} & {name for name, value in base_options.items() if value is not None}:
            base_options[name] = compat.resolve_node_endpoint(base_options[name])
        super().__init__(data_parallel_rank, **base_options, dialect=_dialect_of_release(), **settings.publisher_options())

    def get_publisher_config(self) -> Any:
        """Return vLLM's `KVEventsConfig` with the bound endpoints. Its publisher is `zmq`: vLLM can decode no other name."""
        config = super().get_publisher_config()
        endpoints = {"endpoint": config.endpoint, "replay_endpoint": config.replay_endpoint}
        config_class = importlib.import_module(_EVENTS_MODULE).KVEventsConfig
        return config_class(enable_kv_cache_events=True, publisher=PUBLISHER_NAME, **{**self._options, **endpoints})


def _dialect_of_release() -> Dialect:
    """Return the dialect of the running release; a build without a version counts as the newest release.

    The dialect is for heartbeats, full history and replies, so that consumers written for the release can read them. vLLM's own
    events are always sent as vLLM declares them.
    """
    try:
        return dialect_for("vllm", importlib.import_module("vllm").__version__)
    except (ImportError, AttributeError, UnknownDialectError):
        return dialect_for("vllm")


def _create_publisher(
    settings: EngineSettings, rank: int, options: dict[str, Any], fallback: OwnPublisher | None
) -> VllmEventPublisher:
    publisher = VllmEventPublisher(settings, rank, options, fallback)
    attach_publisher(_ENGINE, publisher, rank, settings, options.keys() - _KNOWN_OPTIONS, _install_hooks)
    _new_publisher.publisher = publisher
    return publisher


# --- hooks -------------------------------------------------------------------------------------------------------------------

_new_publisher = threading.local()
"""`publisher` is the thread's newest publisher. The same thread then creates the scheduler's KVCacheManager."""


def _install_hooks() -> bool:
    """Hook into vLLM's scheduler. Return whether the cache can be attested in this release."""
    pool = importlib.import_module("vllm.v1.core.block_pool")
    managers = importlib.import_module("vllm.v1.core.kv_cache_manager")
    schedulers = importlib.import_module("vllm.v1.core.sched.scheduler")
    hook(schedulers.Scheduler, "reset_prefix_cache", _publish_after_reset)
    core = sys.modules.get("vllm.v1.engine.core")  # EngineCore creates the scheduler
    if core is not None:
        hook(core.EngineCore, "add_lora", _publish_lora_change)
    if hasattr(pool.BlockPool, _REPEAT_METHOD_NAME):
        hook(pool.BlockPool, _REPEAT_METHOD_NAME, _suppress_announcements)
    elif "kv_cache_report_mode" in inspect.getsource(importlib.import_module("vllm.v1.request")):
        # From vLLM 0.26 on, a request can ask vLLM to announce blocks that were already cached.
        logger.warning("kvevents: no attestation: this release of vLLM announces cached blocks again in an unknown way")
        return False
    block_map = getattr(pool, "BlockHashToBlockMap", None)
    if block_map is None or not all(hasattr(block_map, name) for name in ("insert", "pop")):
        logger.info("kvevents: no attestation: this release of vLLM stores its cache in an unknown form")
        return False
    has_groups = _has_groups()
    for name, sign in (("insert", 1), ("pop", -1)):
        hook(block_map, name, functools.partial(_count_changes, sign=sign, has_groups=has_groups))
    hook(managers.KVCacheManager, "__init__", _link_when_created)
    hook(managers.KVCacheManager, "take_events", _record_before_publish)
    return True


def _has_groups() -> bool:
    """Return whether events name KV cache groups (vLLM from 0.20)."""
    return "group_idx" in importlib.import_module(_EVENTS_MODULE).BlockStored.__struct_fields__


def _suppress_announcements(_original: Callable[..., Any]) -> Callable[..., Any]:
    """Suppress announcements of blocks that were already cached, and of positions in a sliding window that hold no block.

    Consumers would count each announcement as a further copy that no event removes. Consumers joining late get full history.
    """

    def emit_cached_block_events(*_arguments: Any, **_options: Any) -> None:
        return None

    return emit_cached_block_events


def _count_changes(original: Callable[..., Any], *, sign: int, has_groups: bool) -> Callable[..., Any]:
    """Wrap a method so that it adds the term of its key to the digest or, if `sign` is -1, subtracts the term.

    A key is the block hash and four bytes of the KV cache group (`make_block_hash_with_group_id`).
    """

    def count(block_map: Any, *arguments: Any, **options: Any) -> Any:
        result = original(block_map, *arguments, **options)
        if sign > 0 or result is not None:
            try:
                key = arguments[0] if arguments else options["key"]
                group = int.from_bytes(key[-4:], "big") if has_groups else 0
                change = sign * attestation_term(key[-12:-4], group)
                block_map.kvevents_digest = block_map.__dict__.get("kvevents_digest", 0) + change & ATTESTATION_MASK
            except Exception as error:  # noqa: BLE001 - faults of kvevents must not reach the engine
                with suppress(Exception):
                    block_map.kvevents_digest = error  # `_digest_of` raises the error, which ends the attestation
        return result

    return count


def _link_when_created(original: Callable[..., Any]) -> Callable[..., Any]:
    """Link a new KVCacheManager with the publisher that its scheduler has just created."""

    def init(manager: Any, *arguments: Any, **options: Any) -> None:
        original(manager, *arguments, **options)
        publisher = getattr(_new_publisher, "publisher", None)
        _new_publisher.publisher = None
        if publisher is not None and publisher.expects_attestation:
            with publisher.ending_attestation():
                manager.kvevents_publisher = publisher

    return init


def _record_before_publish(original: Callable[..., Any]) -> Callable[..., Any]:
    """Record the digest of the cache when the scheduler takes all events in order to publish them."""

    def take_events(manager: Any, *arguments: Any, **options: Any) -> Any:
        events = original(manager, *arguments, **options)
        publisher = manager.__dict__.get("kvevents_publisher")
        if publisher is not None:
            try:
                publisher.record_cache(_digest_of(manager), is_batch_pending=bool(events))
            except Exception as error:  # noqa: BLE001 - faults of kvevents must not reach the engine
                manager.kvevents_publisher = None
                publisher.end_attestation(error)
        return events

    return take_events


def _digest_of(manager: Any) -> int:
    """Return the sum of the digests of all pools on the GPU. Hybrid models can have several pools."""
    pools = manager.__dict__.get("kvevents_pools")
    if pools is None:
        groups = getattr(getattr(manager, "coordinator", None), "single_type_managers", ())
        candidates = dict.fromkeys([manager.block_pool, *(group.block_pool for group in groups)])
        pools = manager.kvevents_pools = [pool for pool in candidates if getattr(pool, "medium", None) in _GPU_MEDIA]
    digests: list[int | Exception] = [pool.cached_block_hash_to_block.__dict__.get("kvevents_digest", 0) for pool in pools]
    total = 0
    for digest in digests:
        if isinstance(digest, Exception):
            raise digest
        total += digest
    return total & ATTESTATION_MASK


def _record_connector_reset(original: Callable[..., Any]) -> Callable[..., Any]:
    """Record whether a connector has emptied its cache. Some connectors never can, and none can while the cache is in use."""

    def reset_cache(connector: Any, *arguments: Any, **options: Any) -> Any:
        result = original(connector, *arguments, **options)
        connector.kvevents_is_emptied = result is True
        return result

    return reset_cache


def _take_connector_events(scheduler: Any) -> list[Any]:
    """Take the events that wait in a connector, and return all except clears."""
    take_events = getattr(scheduler.connector, "take_events", None)
    return [] if take_events is None else [event for event in take_events() if type(event).__name__ != "AllBlocksCleared"]


def _publish_after_reset(original: Callable[..., Any]) -> Callable[..., Any]:
    """Publish a reset of the cache at once. vLLM would publish it with the next step, which an idle engine does not take.

    A reset that includes the connector also empties host memory, but vLLM's event does not say so. Host memory is emptied even
    if blocks on the GPU stay because running requests use them.
    """

    def reset_prefix_cache(scheduler: Any, *arguments: Any, **options: Any) -> Any:
        publisher = getattr(scheduler, "kv_event_publisher", None)
        if not isinstance(publisher, VllmEventPublisher):
            return original(scheduler, *arguments, **options)
        connector = getattr(scheduler, "connector", None)
        with publisher.ending_attestation():
            if hasattr(connector, "reset_cache"):
                hook(type(connector), "reset_cache", _record_connector_reset)
        result = original(scheduler, *arguments, **options)
        with publisher.ending_attestation():
            is_emptied = connector is not None and vars(connector).pop("kvevents_is_emptied", False)
            # The connector's waiting events are published now: later they would remove blocks of the next step.
            _publish_pending(scheduler, publisher, _take_connector_events(scheduler) if is_emptied else [])
            if is_emptied:
                publisher.publish(KVEventBatch(time.time(), [AllBlocksCleared({"medium": "CPU"})]))
        return result

    return reset_prefix_cache


def _publish_pending(scheduler: Any, publisher: VllmEventPublisher, further: list[Any]) -> None:
    """Publish the events that the block pool has for the next step, followed by the `further` events of vLLM."""
    events = [*scheduler.kv_cache_manager.take_events(), *further]
    if events:
        publisher.publish(importlib.import_module(_EVENTS_MODULE).KVEventBatch(ts=time.time(), events=events))


def _publish_lora_change(original: Callable[..., Any]) -> Callable[..., Any]:
    """Publish at once that a LoRA is now loaded from another path. Requests no longer match blocks of the former path.

    vLLM hashes the path but announces the name. Consumers infer the change from one block that is stored under two hashes.
    """

    def add_lora(core: Any, *arguments: Any, **options: Any) -> Any:
        result = original(core, *arguments, **options)
        scheduler: Any = getattr(core, "scheduler", None)
        publisher = getattr(scheduler, "kv_event_publisher", None)
        if isinstance(publisher, VllmEventPublisher):
            with publisher.ending_attestation():
                lora = arguments[0] if arguments else options["lora_request"]
                former = publisher.lora_paths.get(lora.lora_name)
                publisher.lora_paths[lora.lora_name] = lora.lora_path
                if former not in {None, lora.lora_path}:
                    _publish_pending(scheduler, publisher, [])
                    publisher.publish(KVEventBatch(time.time(), _lora_change_events(scheduler.kv_cache_manager, lora)))
        return result

    return add_lora


def _lora_change_events(manager: Any, lora: Any) -> list[KVEvent]:
    """Return stores of one block under two hashes, and their removal, in the first group that needs all blocks of a prompt."""
    kinds = getattr(manager, "kv_cache_event_metadata", None)
    for group in manager.coordinator.single_type_managers:
        kind = kinds[group.kv_cache_group_id][0] if kinds else None
        if kind in _FULL_ATTENTION_KINDS:
            number, size = group.kv_cache_group_id if _has_groups() else None, group.block_size
            hashes: list[BlockHash] = [secrets.randbits(64), secrets.randbits(64)]
            stores = (
                BlockStored([value], None, [0] * size, size, lora.lora_int_id, "GPU", lora.lora_name, None, number, kind)
                for value in hashes
            )
            return [*stores, BlockRemoved(hashes, "GPU", number)]
    return []
