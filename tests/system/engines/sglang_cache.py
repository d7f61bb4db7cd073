"""Runs the radix tree and the scheduler component of an SGLang wheel with the plugin, in the environment of the engine.

`sglang_runs.py` starts it. The tree decides what is cached; requests are random. Before each request, the prefix that our index
predicts is compared with the prefix that the tree finds. The GPU packages of SGLang (`sgl_kernel` and others) have no build for
CPUs. Where modules import one, they get a placeholder, which no code here calls. The memory pool is a placeholder, too.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import random
import statistics
import sys
import time
import types
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest import mock

import msgspec

from kvevents import Batch, Source, Subscriber, Trust
from kvevents.engines import sglang as plugin
from kvevents.engines.plugin import VARIABLE
from kvevents.index import Namespace, PrefixIndex

PAGE: Final = 16
CAPACITY: Final = 96 * PAGE
"""Capacity of the cache in tokens, which is so small that the cache evicts blocks all the time."""
WINDOW_CAPACITY: Final = 48 * PAGE
"""The same for the layers of a model that have sliding windows."""
VOCABULARY: Final = 256
TREES: Final = ("radix", "unified-python", "unified-rust", "swa", "swa-python", "swa-rust", "mamba-python")
"""Kinds of trees; those with a suffix are `UnifiedRadixCache` with that core. Its Rust core for Mamba needs a whole server."""
SALTS: Final = (None, None, "a", "b")
ADAPTERS: Final = (None, None, None, "adapter-0", "adapter-1")
SECONDS: Final = 20.0
"""Limit of one wait for the subscriber."""


class Result(msgspec.Struct):
    """One run."""

    release: str
    tree: str
    seed: int
    requests: int = 0
    hits: int = 0
    """Requests for which the tree had cached tokens."""
    wrong: int = 0
    """Requests for which another number of tokens was predicted while the stream was EXACT."""
    unclaimed: int = 0
    """Requests for which another number of tokens was predicted while the stream was not EXACT."""
    attested: int = 0
    """Requests that were predicted while the index was attested."""
    is_attested: bool = False
    """Whether a heartbeat after the last request attested the state of the index."""
    resets: int = 0
    batches: int = 0
    attestation_us: float = 0.0
    """Median CPU time that the attestation adds to `publish()`, in microseconds."""
    blocks: int = 0
    """Blocks in the tree when the attestation was measured."""
    examples: list[str] = []

    @property
    def is_failed(self) -> bool:
        """Return whether the run has failed. Trees must be attested, except with windows or states, which are never EXACT."""
        return self.wrong > 0 or self.is_attested == self.tree.startswith(("swa", "mamba"))


class _Placeholders(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules that SGLang imports and that are not installed. This finder must be the last one."""

    def find_spec(self, fullname: str, _path: object, _target: object = None) -> importlib.machinery.ModuleSpec | None:
        frame = inspect.currentframe()
        while frame is not None and (frame.f_globals.get("__name__") == __name__ or "importlib" in frame.f_code.co_filename):
            frame = frame.f_back
        importer = "" if frame is None else frame.f_globals.get("__name__", "")
        is_inside = isinstance(sys.modules.get(fullname.rpartition(".")[0]), mock.MagicMock)
        if fullname.startswith("sglang.") or not (importer.startswith("sglang.") or is_inside):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return mock.MagicMock(name=spec.name, __path__=[], __spec__=spec, __name__=spec.name, __version__="0.0.0")

    def exec_module(self, _module: types.ModuleType) -> None:
        """Do nothing."""


def prepare(wheel: Path, release: str) -> None:
    """Make the unpacked wheel importable, without running its package's `__init__`, which imports the whole server."""
    package = types.ModuleType("sglang")
    package.__path__ = [str(wheel / "sglang")]
    package.__dict__["__version__"] = release
    sys.modules["sglang"] = package
    sys.meta_path.append(_Placeholders())
    configurations = importlib.import_module("transformers.models.auto.configuration_auto")
    register = configurations._LazyConfigMapping.register
    # Releases before 0.5.14 register models that newer transformers have already.
    configurations._LazyConfigMapping.register = lambda mapping, key, value, **_: register(mapping, key, value, exist_ok=True)


class Scope(NamedTuple):
    """Salt and LoRA adapter of a request, which separate equal tokens."""

    salt: str | None
    lora: str | None


class Tree:
    """A tree of one kind, and the component of the scheduler that publishes its events."""

    def __init__(self, kind: str) -> None:
        radix = importlib.import_module("sglang.srt.mem_cache.radix_cache")
        base = importlib.import_module("sglang.srt.mem_cache.base_prefix_cache")
        params = importlib.import_module("sglang.srt.mem_cache.cache_init_params")
        self._key: Any = radix.RadixKey
        named = inspect.signature(radix.RadixKey.__init__).parameters
        self.has_salts = "cache_salt" in named
        self._tokens: Any = (lambda found: array("q", found)) if "array" in str(named["token_ids"].annotation) else list
        self._base = base
        self.has_windows, self.has_states = kind.startswith("swa"), kind.startswith("mamba")
        options: dict[str, Any] = {
            "disable": False,
            "req_to_token_pool": None,
            "token_to_kv_pool_allocator": _make_pool(),
            "page_size": PAGE,
            "enable_kv_cache_events": True,
        }
        events: Any = sys.modules.get("sglang.srt.mem_cache.events")
        self.has_adapters = hasattr(events, "KvEventLoraNames")
        if self.has_adapters:
            names = events.KvEventLoraNames()
            for name in filter(None, ADAPTERS):
                names.register(types.SimpleNamespace(lora_id=name, extra_key=_extra_key(name)), name)
            options["kv_event_lora_names"] = names
        if kind == "radix":
            self.cache: Any = radix.RadixCache(params.CacheInitParams(**options))
        elif kind == "swa":
            windowed = importlib.import_module("sglang.srt.mem_cache.swa_radix_cache")
            self.cache = windowed.SWARadixCache(params.CacheInitParams(**options | _window_options()))
        else:
            unified = importlib.import_module("sglang.srt.mem_cache.unified_radix_cache")
            components = importlib.import_module("sglang.srt.mem_cache.unified_cache.components")
            os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = kind.rpartition("-")[2]
            types_of = components.ComponentType
            others = (types_of.SWA,) * self.has_windows + (types_of.MAMBA,) * self.has_states
            options["tree_components"] = (types_of.FULL, *others)
            options |= _window_options() if self.has_windows else _state_options() if self.has_states else {}
            self.cache = unified.UnifiedRadixCache(params.CacheInitParams(**options))

    def draw_scope(self, drawn: random.Random) -> Scope:
        """Return a random scope that the events of this release can express."""
        salt, lora = drawn.choice(SALTS), drawn.choice(ADAPTERS)
        return Scope(salt if self.has_salts else None, lora if self.has_adapters else None)

    def key(self, tokens: list[int], scope: Scope) -> Any:
        salted = {"cache_salt": scope.salt} if self.has_salts else {}
        return self._key(self._tokens(tokens), _extra_key(scope.lora), **salted)

    def match(self, tokens: list[int], scope: Scope) -> tuple[int, Any]:
        """Return the tokens that the tree finds on the GPU, and the node."""
        found = self.cache.match_prefix(self._base.MatchPrefixParams(key=self.key(tokens, scope)))
        length = getattr(found, "device_prefix_len", None)
        return len(found.device_indices) if length is None else length, found.last_device_node

    def insert(self, tokens: list[int], scope: Scope) -> None:
        torch = importlib.import_module("torch")  # only the environment of the engine has it
        tokens = tokens[: len(tokens) // PAGE * PAGE]  # as the scheduler of SGLang and newer trees do
        value = torch.arange(len(tokens), dtype=torch.int64)
        state = {"mamba_value": torch.zeros(1, dtype=torch.int64)} if self.has_states else {}
        self.cache.insert(self._base.InsertParams(key=self.key(tokens, scope), value=value, **state))

    def evict(self, tokens: int) -> None:
        self.cache.evict(self._base.EvictParams(num_tokens=tokens))

    def evict_windows(self, tokens: int) -> None:
        """Free memory of sliding windows. This shortens matches, but SGLang announces nothing."""
        self.cache.evict(self._base.EvictParams(num_tokens=0, swa_num_tokens=tokens))

    def window_size(self) -> int:
        return int(self.cache.swa_evictable_size() + self.cache.swa_protected_size())

    def size(self) -> int:
        kind = "full_" if self.has_windows else ""
        return int(getattr(self.cache, f"{kind}evictable_size")() + getattr(self.cache, f"{kind}protected_size")())


def _extra_key(lora: str | None) -> str | None:
    """Return the key under which the scheduler caches requests of an adapter: its identifier of 32 characters."""
    return None if lora is None else lora.rjust(32, "0")


def _make_pool() -> Any:
    """Return a memory pool that accepts what the tree frees."""
    return mock.MagicMock(name="token_to_kv_pool_allocator", device="cpu", page_size=PAGE)


def _window_options() -> dict[str, Any]:
    """Return options for a model with sliding windows, whose pool has one place for both kinds of layers."""
    allocator = importlib.import_module("sglang.srt.mem_cache.allocator.swa").SWATokenToKVPoolAllocator
    pool = mock.MagicMock(spec=allocator, device="cpu", page_size=PAGE)
    for name in ("translate_swa_indices_for_transfer", "translate_loc_from_full_to_swa"):
        setattr(pool, name, lambda indices: indices)
    pool.full_attn_allocator = pool.swa_attn_allocator = mock.MagicMock(name="allocator")
    return {"token_to_kv_pool_allocator": pool, "sliding_window_size": 2 * PAGE}


def _state_options() -> dict[str, Any]:
    """Return options for a model with Mamba layers. Patch settings that the tree would read from a whole server."""
    component: Any = importlib.import_module("sglang.srt.mem_cache.unified_cache.components.mamba")
    component.mamba_cache_chunk_size = lambda: PAGE
    component.mamba_checkpoint_grid = lambda _: PAGE
    unlimited = types.SimpleNamespace(mamba_max_states_per_path=-1)
    component.get_exec = lambda: types.SimpleNamespace(mamba=unlimited)
    kind = importlib.import_module("sglang.srt.mem_cache.memory_pool").HybridReqToTokenPool
    pool = mock.MagicMock(spec=kind, device="cpu")
    pool.mamba_allocator = mock.MagicMock(name="mamba_allocator")
    return {"req_to_token_pool": pool, "enable_mamba_extra_buffer": True}


def create_emitter(tree: Tree) -> Any:
    """Return the component that publishes events, with a publisher from the factory of SGLang."""
    owner = None
    for module, name, _ in plugin._EMITTERS:
        if not _is_in_release(module):
            continue
        if not module.endswith("kv_events_publisher"):
            importlib.import_module("sglang.srt.managers.scheduler")  # the two import each other, and this one must be first
        owner = getattr(importlib.import_module(module), name)
        break
    assert owner is not None
    factory = importlib.import_module("sglang.srt.disaggregation.kv_events").EventPublisherFactory
    plugin.register()
    config = '{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0", "bind": true}'
    emitter: Any = object.__new__(type("Emitter", (owner,), {}))
    emitter.enable_kv_cache_events = True
    emitter.kv_event_publisher = factory.create(config, 0)
    emitter.tree_cache = tree.cache
    assert isinstance(emitter.kv_event_publisher, plugin.SglangEventPublisher)
    emitter.publish = getattr(emitter, "publish_kv_events", None) or emitter._publish_kv_events
    return emitter


def _is_in_release(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package does not exist either
        return False


class Requests:
    """Random prompts. Most continue a prefix of an earlier prompt."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._seen: list[list[int]] = [[]]

    def next(self) -> list[int]:
        drawn = self.random
        parent = drawn.choice(self._seen[-60:])
        prefix = parent[: drawn.randrange(len(parent) + 1)]
        tokens = prefix + [drawn.randrange(VOCABULARY) for _ in range(drawn.randrange(1, 10 * PAGE))]
        self._seen.append(tokens[: 40 * PAGE])
        return self._seen[-1]


class Recorder:
    """Records the steps of a run: each batch as SGLang encodes it, with the digest after it, and the matches of the tree."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def watch(self, publisher: Any) -> None:
        original = publisher.publish

        def publish(batch: Any) -> None:
            original(batch)
            payload = base64.b64encode(msgspec.msgpack.encode(batch)).decode()
            digest = publisher._cache_digest
            self.steps.append({"payload": payload, "attestation": None if digest is None else digest.digest})

        publisher.publish = publish

    def write(self, file: Path) -> None:
        lines = b"".join(msgspec.json.encode(step) + b"\n" for step in self.steps)
        file.write_bytes(gzip.compress(lines, 9, mtime=0))


def run(release: str, kind: str, seed: int, requests: int, recorder: Recorder) -> Result:
    """Compare the predictions of `requests` requests with the tree."""
    result, tree, prompts = Result(release, kind, seed), Tree(kind), Requests(seed)
    emitter, index = create_emitter(tree), PrefixIndex()
    publisher = emitter.kv_event_publisher
    recorder.watch(publisher)
    applied = 0
    with Subscriber(Source(publisher.endpoint, replay_endpoint=publisher.replay_endpoint)) as subscriber:
        while result.requests < requests:
            emitter.publish()
            deadline = time.monotonic() + SECONDS
            while applied < publisher.stats().accepted:
                delivery = subscriber.receive(timeout=1.0)
                if delivery is not None:
                    applied += isinstance(delivery, Batch) and not _is_heartbeat(index.apply(delivery))
                assert time.monotonic() < deadline, "the subscriber does not receive all batches"
            while (delivery := subscriber.receive(timeout=0)) is not None:
                index.apply(delivery)
            tokens, scope = prompts.next(), tree.draw_scope(prompts.random)
            cached = _compare(result, index, tree, tokens, scope, is_exact=subscriber.trust() is Trust.EXACT)
            recorder.steps.append({"prompt": tokens, "salt": scope.salt, "lora": scope.lora, "cached": cached})
            _serve(tree, prompts.random, tokens, scope)
            if prompts.random.random() < 0.01:
                tree.cache.reset()
                result.resets += 1
        emitter.publish()
        deadline = time.monotonic() + SECONDS
        while not (tree.has_windows or tree.has_states) and not result.is_attested and time.monotonic() < deadline:
            delivery = subscriber.receive(timeout=1.0)
            is_heartbeat = delivery is not None and _is_heartbeat(index.apply(delivery))
            result.is_attested = is_heartbeat and all(worker.attested is True for worker in index.workers())
    result.batches = publisher.stats().accepted
    publisher.shutdown()
    return result


def _is_heartbeat(applied: Any) -> bool:
    return applied.report is not None and applied.report.heartbeat is not None


def _compare(result: Result, index: PrefixIndex, tree: Tree, tokens: list[int], scope: Scope, *, is_exact: bool) -> int:
    """Compare one prediction with the tree, count it in `result`, and return the tokens that the tree finds."""
    found = index.match(tokens, Namespace(lora=scope.lora, salt=scope.salt))
    predicted = max((each.tokens for each in found), default=0)
    cached, _ = tree.match(tokens, scope)
    result.requests += 1
    result.hits += cached > 0
    result.attested += all(worker.attested is True for worker in index.workers()) and bool(index.workers())
    result.unclaimed += predicted != cached and not is_exact
    if predicted != cached and is_exact:
        result.wrong += 1
        result.examples.append(f"request {result.requests}: predicted {predicted}, cached {cached}, {scope}")
    return cached


def _serve(tree: Tree, drawn: random.Random, tokens: list[int], scope: Scope) -> None:
    """Make room for a request and insert its prompt and a part of its answer, as the scheduler does."""
    extended = tokens + [drawn.randrange(VOCABULARY) for _ in range(drawn.randrange(2 * PAGE))]
    excess = tree.size() + len(extended) - CAPACITY
    if excess > 0:
        tree.evict(excess)
    if tree.has_windows and (excess := tree.window_size() + len(extended) - WINDOW_CAPACITY) > 0:
        tree.evict_windows(excess)
    tree.insert(tokens, scope)
    tree.insert(extended, scope)


def measure(result: Result, kind: str, blocks: int) -> None:
    """Fill a tree with blocks, and measure what the attestation adds to a batch of one block."""
    tree, prompts = Tree(kind), random.Random(1)
    emitter = create_emitter(tree)
    publisher = emitter.kv_event_publisher
    while tree.size() < blocks * PAGE:
        tree.insert([prompts.randrange(VOCABULARY) for _ in range(1000 * PAGE)], Scope(None, None))
        emitter.publish()
    digest = publisher._cache_digest
    assert digest is not None
    costs = []
    for _ in range(500):
        tree.insert([prompts.randrange(VOCABULARY) for _ in range(PAGE)], Scope(None, None))
        events = tree.cache.take_events()
        begin = time.thread_time_ns()
        is_equal = digest.add(events)
        publisher.record_cache(digest.digest, is_batch_pending=False)
        costs.append((time.thread_time_ns() - begin) / 1000)
        assert is_equal
    result.attestation_us, result.blocks = statistics.median(costs), tree.size() // PAGE
    publisher.shutdown(0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path, help="folder of the unpacked wheel")
    parser.add_argument("release")
    parser.add_argument("tree", choices=TREES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--blocks", type=int, default=0, help="blocks of the tree in which the attestation is measured")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the steps of the run to a file")
    options = parser.parse_args(arguments)
    os.environ.setdefault(VARIABLE, '{"heartbeat": 0.05}')
    prepare(options.wheel, options.release)
    recorder = Recorder()
    result = run(options.release, options.tree, options.seed, options.requests, recorder)
    if options.record is not None:
        recorder.write(options.record)
    if options.blocks:
        measure(result, options.tree, options.blocks)
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    return 1 if result.is_failed else 0


if __name__ == "__main__":
    sys.exit(main())
