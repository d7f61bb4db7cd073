"""vLLM's own block manager, executed out of its released wheel.

`REAL` names the modules that run unchanged: the block pool, the free queue, the hashing, the cache's groups, the manager in
front of them, and the scheduler. Every other module that they import, from vLLM, torch or another library, is a stand-in
whose every attribute is `Anything`: names for annotations, for features that are off here, and for logging. No stand-in
remains in `sys.modules`, so that no other part of the process imports one.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType, SimpleNamespace
from typing import Any, Final

from tools.released import VLLM, Engine, extracted
from tools.stand_in import Anything

CORE: Final = "vllm.v1.core."
REAL: Final = (
    *(CORE + name for name in ("kv_cache_utils", "block_pool", "single_type_kv_cache_manager")),
    *(CORE + name for name in ("kv_cache_coordinator", "kv_cache_manager")),
    *("vllm.v1.kv_cache_interface", "vllm.v1.kv_cache_spec_registry", "vllm.v1.kv_cache_layout"),
    *("vllm.v1.request", "vllm.v1.utils", "vllm.utils", "vllm.utils.hashing", "vllm.utils.math_utils"),
    "vllm.distributed.kv_events",
    *(CORE + "sched." + name for name in ("scheduler", "async_scheduler", "request_queue", "output", "utils", "interface")),
)
PACKAGES: Final = ("vllm.utils",)
"""Modules of `REAL` whose source is an `__init__.py`."""
FOREIGN: Final = ("vllm", "torch", "uvloop", "cbor2")
"""Packages whose other modules are stand-ins."""


NAMES: Final[dict[str, dict[str, Any]]] = {
    # The default, 64-bit hashes in events.
    "vllm": {"envs": SimpleNamespace(VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=True)},
    # A request without a grammar; a request with one would wait for it.
    "vllm.v1.structured_output.request": {
        "StructuredOutputRequest": SimpleNamespace(from_sampling_params=lambda _: None),
    },
}
"""Attributes of stand-ins that must have real values."""


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything


class _Finder(MetaPathFinder, Loader):
    """Finds modules of `REAL` in the wheel, and a stand-in for every other module of `FOREIGN`."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Final = engine

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        if fullname in PACKAGES:
            return spec_from_file_location(
                fullname, extracted(self._engine, fullname + ".__init__"), submodule_search_locations=[]
            )
        if fullname in REAL:
            return spec_from_file_location(fullname, extracted(self._engine, fullname))
        if fullname.partition(".")[0] in FOREIGN:
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _StandIn(spec.name)
        vars(module).update(NAMES.get(spec.name, {}))
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


@cache
def modules(engine: Engine = VLLM) -> dict[str, ModuleType]:
    """Return the modules of `REAL` of one release by name. Raises `SystemExit` with a message if there is no wheel."""
    with _isolated_imports(engine):
        found = {name: importlib.import_module(name) for name in REAL}
        # Managers are registered on first use, with further imports.
        found["vllm.v1.kv_cache_spec_registry"].KVCacheSpecRegistry._ensure_registered(vllm_config=Anything())
        utils = found[CORE + "kv_cache_utils"]
        utils.init_none_hash(found["vllm.utils.hashing"].sha256)
    return found


@contextlib.contextmanager
def _isolated_imports(engine: Engine) -> Iterator[None]:
    """Hide modules of `FOREIGN` from imports inside, and remove those that were imported."""

    def find_foreign() -> dict[str, ModuleType]:
        return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in FOREIGN}

    before, finder = find_foreign(), _Finder(engine)
    for name in before:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in find_foreign():
            del sys.modules[name]
        sys.modules.update(before)


def core(name: str) -> Any:
    """Return a module of `vllm.v1.core`."""
    return modules()[CORE + name]


# --- parts of the manager, configured like an engine without options-----------------------------------------------------------


MAX_MODEL_LEN: Final = 1 << 20
"""A length above every request."""


def cache_config(blocks: int, block_size: int, windows: Sequence[int | None], retention: int | None) -> Any:
    """Return vLLM's `KVCacheConfig` with one group for each of `windows`; None is full attention.

    `blocks` counts without the null block that vLLM adds; `retention` is `prefix_cache_retention_interval`, 0 by default.
    """
    kinds = modules()["vllm.v1.kv_cache_interface"]
    shape = {"block_size": block_size, "num_kv_heads": 1, "head_size": 1, "dtype": Anything}
    groups = [
        kinds.KVCacheGroupSpec(
            [f"layer.{number}"],
            kinds.FullAttentionSpec(**shape) if window is None else kinds.SlidingWindowSpec(**shape, sliding_window=window),
        )
        for number, window in enumerate(windows)
    ]
    return kinds.KVCacheConfig(
        num_blocks=blocks + 1, kv_cache_tensors=[], kv_cache_groups=groups, prefix_cache_retention_interval=retention
    )


def request(
    name: str, tokens: Sequence[int], block_size: int, *, output: int = 1, lora: str | None = None, salt: str | None = None
) -> Any:
    """Return vLLM's `Request` for a prompt, with an answer of `output` tokens."""
    hashing = modules()["vllm.utils.hashing"].sha256
    params = SimpleNamespace(
        max_tokens=output, min_tokens=0, eos_token_id=None, stop_token_ids=None, repetition_detection=None, num_logprobs=None,
        extra_args=None, skip_reading_prefix_cache=None,
    )  # fmt: skip
    adapter = SimpleNamespace(adapter_id=1, lora_int_id=1, name=lora, lora_name=lora, lora_path=f"/{lora}") if lora else None
    return modules()["vllm.v1.request"].Request(
        name, list(tokens), params, None, arrival_time=0.0, lora_request=adapter, cache_salt=salt,
        block_hasher=core("kv_cache_utils").get_request_block_hasher(block_size, hashing),
    )  # fmt: skip


class RealCache:
    """vLLM's `KVCacheManager`, called as its scheduler calls it."""

    def __init__(
        self,
        blocks: int,
        block_size: int,
        windows: Sequence[int | None] = (None,),
        *,
        retention: int | None = 0,
        max_step_tokens: int = MAX_MODEL_LEN,
    ) -> None:
        self.manager: Final = core("kv_cache_manager").KVCacheManager(
            cache_config(blocks, block_size, windows, retention),
            max_model_len=MAX_MODEL_LEN,
            max_in_flight_tokens=max_step_tokens,
            scheduler_block_size=block_size,
            hash_block_size=block_size,
            enable_kv_cache_events=True,
        )
        self._found: dict[str, Any] = {}

    @property
    def free(self) -> int:
        """Return the number of blocks that no request uses."""
        return int(self.manager.block_pool.get_num_free_blocks())

    def lookup(self, request: Any) -> int:
        """Return the number of cached tokens of a request that holds no blocks."""
        blocks, tokens, request.shared_prefix_boundary = self.manager.get_computed_blocks(request)
        self._found[request.request_id] = (blocks, tokens)
        return int(tokens)

    def admit(self, request: Any, tokens: int) -> bool:
        """Give a request the blocks of its last lookup, and blocks for `tokens` more. Returns False if there are too few."""
        blocks, found = self._found.pop(request.request_id)
        allocated = self.manager.allocate_slots(
            request, tokens, num_new_computed_tokens=found, new_computed_blocks=blocks, full_sequence_must_fit=True
        )
        if allocated is None:
            return False
        request.num_computed_tokens = found + tokens
        return True

    def extend(self, request: Any, tokens: int) -> bool:
        """Give an admitted request blocks for `tokens` more. Returns False if there are too few blocks."""
        if self.manager.allocate_slots(request, tokens) is None:
            return False
        request.num_computed_tokens += tokens
        return True

    def release(self, request: Any) -> None:
        """Take all blocks from a request."""
        self.manager.free(request)
        request.num_computed_tokens = 0

    def reset(self) -> bool:
        """Clear the cache. Returns False while a block is in use."""
        return bool(self.manager.reset_prefix_cache())

    def take_events(self) -> list[Any]:
        """Return vLLM's events since the last call."""
        return list(self.manager.take_events())
