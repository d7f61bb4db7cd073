"""The plugin for SGLang: a server started with `--kv-events-config` publishes through kvevents.

SGLang from 0.5.11 loads the entry points of the group `sglang.srt.plugins` in every process, and before it creates the
scheduler. `register` adds the entry `kvevents` to `EventPublisherFactory` (`srt/disaggregation/kv_events.py`), and replaces
`zmq` if `KVEVENTS_PUBLISHER` is set. The hook into the scheduler is installed when SGLang creates a publisher, so processes
without a publisher have no hook.

The attestation. SGLang's radix trees have no table of hashes, and the tree of the newest releases is native code. So the digest
is computed from the events in the order in which the tree queued them. The digest is sent only while the tree's own number of
cached tokens on the GPU (evictable and protected) equals the number of tokens in the digest's blocks. If the tree did not
announce a change, or announced it twice, the numbers differ. Reading both numbers takes constant time.

If kvevents fails, SGLang still publishes its events, except when keys are configured. If creating the publisher fails, SGLang
uses its own publisher. If publishing fails later, SGLang's publisher takes over. A fault in a hook ends the attestation. Each
fault is logged once. The page `guides/sglang.md` of the documentation lists the releases with which this module was run.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from kvevents import publisher
from kvevents.compat import sglang as compat
from kvevents.engines.engine_publisher import EnginePublisher, OwnPublisher
from kvevents.engines.plugin import EngineSettings, attach_publisher, engine_logger, hook, replace_publisher
from kvevents.errors import UnknownDialectError
from kvevents.events import ATTESTATION_MASK
from kvevents.wire.dialects import Dialect, dialect_for

_ENGINE: Final = "SGLang"
logger = engine_logger(_ENGINE)
REGISTERED_NAME: Final = "kvevents"
"""Name that selects the publisher of kvevents in `--kv-events-config`, as `zmq` does if the plugin is turned on."""
_EVENTS_MODULE: Final = "sglang.srt.disaggregation.kv_events"
_GPU_MEDIA: Final = (None, "GPU")
_FIRST_RELEASE: Final = "0.5.10"
"""The first release that the plugin supports."""
_KNOWN_OPTIONS: Final = frozenset({"endpoint", "bind", "replay_endpoint", "buffer_steps", "hwm", "max_queue_size", "topic"})
_EMITTERS: Final = (
    ("sglang.srt.managers.scheduler_components.kv_events_publisher", "SchedulerKvEventsPublisher", "publish_kv_events"),
    ("sglang.srt.observability.scheduler_metrics_mixin", "SchedulerMetricsMixin", "_publish_kv_events"),
)
"""Module, class and name of the method that publishes the events of `self.tree_cache`. The first row is for SGLang from 0.5.13
on, the second for older releases."""
_UNANNOUNCED_KINDS: Final = (("swa", "sliding windows"), ("mamba", "states of Mamba layers"))
"""Kinds of data that a prefix needs besides blocks of full attention; releases up to 0.5.23 send no events about them. The
first string of each pair completes the name of a tree's method `supports_...`; the second describes the kind."""
_MAX_UNEQUAL_BATCHES: Final = 1000
"""Number of batches after which a lasting difference between the tree and its events is logged. A difference for a few batches
is normal: the hierarchical cache counts the blocks that it loads before it announces them."""


def register() -> None:
    """Replace SGLang's publisher `zmq` if the plugin is turned on, and add `kvevents`. SGLang calls this as a plugin.

    Repeated calls do nothing. An exception is raised only if keys are configured and SGLang would publish unencrypted.
    """
    replace_publisher(_ENGINE, "attn_dp_rank", _EVENTS_MODULE, _create_publisher, os.environ, REGISTERED_NAME)


class SglangEventPublisher(EnginePublisher, compat.ZmqEventPublisher):
    """The publisher inside SGLang's scheduler, with SGLang's parameters and the settings of the plugin."""

    logger = logger
    is_linked = False
    """Whether the publisher has been linked with a scheduler's cache."""

    def __init__(
        self, settings: EngineSettings, attn_dp_rank: int, options: dict[str, Any], fallback: OwnPublisher | None = None
    ) -> None:
        self.hand_over_to(fallback, settings.max_failures)
        self._attests = settings.attestation
        self._cache_digest: _CacheDigest | None = None
        publisher.ZmqEventPublisher.__init__(
            self,
            attn_dp_rank,
            **{name: value for name, value in options.items() if name in _KNOWN_OPTIONS},
            dialect=_dialect_of_release(),
            # SGLang's own consumers expect a topic in replies from 0.5.22 on, the first release with this function.
            replay_topic=hasattr(importlib.import_module(_EVENTS_MODULE), "namespaced_block_hash"),
            **settings.publisher_options(),
        )
        self._set_local_endpoints()

    def link(self, cache: Any) -> None:
        """Send the digest of `cache`, SGLang's `tree_cache`, in heartbeats; call it before the first batch of the cache.

        A tree with sliding windows or Mamba states is not attested: a match also needs data that SGLang does not announce.
        """
        self.is_linked, self.expects_attestation = True, False
        kinds = [name for kind, name in _UNANNOUNCED_KINDS if _match_needs_kind(getattr(cache, "inner", cache), kind)]
        if kinds:
            parts = " and ".join(kinds)
            self.report_incomplete_events(
                f"SGLang does not announce which {parts} its cache holds, so it may find less of a prompt"
            )
        elif self._attests:
            self._cache_digest = _CacheDigest(cache, importlib.import_module(_EVENTS_MODULE))

    def publish(self, events: Any) -> None:
        """Accept one batch, which contains all queued events of the tree."""
        super().publish(events)
        digest = self._cache_digest
        if digest is None or self._is_attestation_stopped:
            return
        with self.ending_attestation():
            if digest.add(events.events):
                self.record_cache(digest.digest, is_batch_pending=False)


def _match_needs_kind(tree: Any, kind: str) -> bool:
    """Return whether a match in the tree ends where data of this kind is missing."""
    components = {str(key): component for key, component in getattr(tree, "components", {}).items()}
    # A sliding window that only a draft model reads does not limit the prefix (SGLang from 0.5.23).
    is_decisive = getattr(components.get(kind), "gates_prefix_match", True)
    return bool(getattr(tree, f"supports_{kind}", bool)()) and is_decisive


def _dialect_of_release() -> Dialect:
    """Return the dialect of the running release. A build without a version gets a dialect with the build's form of events.

    The dialect is for heartbeats and full history, so that consumers written for the release can read them. SGLang's own events
    are always sent as SGLang declares them.
    """
    is_array = importlib.import_module(_EVENTS_MODULE).BlockStored.__struct_config__.array_like
    with suppress(ImportError, AttributeError, UnknownDialectError):
        dialect = dialect_for("sglang", importlib.import_module("sglang.version").__version__)
        if (dialect.event_form == "array") == is_array:
            return dialect
    return dialect_for("sglang", _FIRST_RELEASE if is_array else "latest")


def _create_publisher(
    settings: EngineSettings, rank: int, options: dict[str, Any], fallback: OwnPublisher | None
) -> SglangEventPublisher:
    event_publisher = SglangEventPublisher(settings, rank, options, fallback)
    ignored_options = [name for name, value in options.items() if name not in _KNOWN_OPTIONS and value is not None]
    attach_publisher(_ENGINE, event_publisher, rank, settings, ignored_options, _install_hooks)
    return event_publisher


# --- attestation -------------------------------------------------------------------------------------------------------------


class _CacheDigest:
    """The digest of one radix tree, as `kvevents.events` defines it; all blocks are in group 0."""

    def __init__(self, cache: Any, module: Any) -> None:
        self._cache = getattr(cache, "inner", cache)  # a StreamingSession wraps the tree
        self._page_size: int = self._cache.page_size
        self._signs = {module.BlockStored: 1, module.BlockRemoved: -1}
        self._cleared_type = module.AllBlocksCleared
        self._unequal = 0
        self.digest = 0
        self.blocks = 0
        """Number of blocks in the digest."""
        self._count_tokens()  # the constructor raises if the cache does not count its tokens

    def add(self, events: list[Any]) -> bool:
        """Add the events of a batch. Return whether the tree holds as many tokens as the blocks in the digest.

        Raises TypeError for an event of an unknown kind.
        """
        digest, blocks = self.digest, self.blocks
        for event in events:
            sign = self._signs.get(type(event))
            if sign is not None:
                if event.medium in _GPU_MEDIA:
                    digest += sign * sum(event.block_hashes)
                    blocks += sign * len(event.block_hashes)
            elif type(event) is self._cleared_type:
                digest = blocks = 0
            else:
                raise TypeError(f"unknown event {type(event).__name__}")
        self.digest, self.blocks = digest & ATTESTATION_MASK, blocks
        tokens = self._count_tokens()
        if tokens == blocks * self._page_size:
            self._unequal = 0
            return True
        self._unequal += 1
        if self._unequal == _MAX_UNEQUAL_BATCHES:
            logger.warning(
                "kvevents: heartbeats carry no attestation: SGLang's %s holds %d tokens on the GPU, and has announced %d",
                type(self._cache).__name__,
                tokens,
                blocks * self._page_size,
            )
        return False

    def _count_tokens(self) -> int:
        """Return the number of tokens that the tree holds on the GPU, as the tree counts them."""
        cache = self._cache
        try:
            tokens: int = cache.evictable_size() + cache.protected_size()
        except NotImplementedError:  # SWARadixCache has a count for each kind of layer
            tokens = cache.full_evictable_size() + cache.full_protected_size()
        return tokens


def _install_hooks() -> bool:
    """Hook into SGLang's scheduler. Return whether the plugin can attest the cache of this release."""
    for module_name, owner_name, method_name in _EMITTERS:
        owner = getattr(sys.modules.get(module_name), owner_name, None)
        if owner is not None and hasattr(owner, method_name):
            hook(owner, method_name, _link_when_created)
            return True
    logger.info("kvevents: no attestation: this release of SGLang publishes its events from an unknown method")
    return False


def _link_when_created(original: Callable[..., Any]) -> Callable[..., Any]:
    """Link the publisher of a scheduler with its cache when the scheduler publishes for the first time."""

    def publish_kv_events(emitter: Any, *arguments: Any, **options: Any) -> Any:
        event_publisher = getattr(emitter, "kv_event_publisher", None)
        if isinstance(event_publisher, SglangEventPublisher) and not event_publisher.is_linked:
            with event_publisher.ending_attestation():
                event_publisher.link(emitter.tree_cache)
        return original(emitter, *arguments, **options)

    return publish_kv_events
