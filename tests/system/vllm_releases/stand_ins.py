"""Imports of vLLM: some modules are executed out of a source distribution, all others are stand-ins."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import pickle
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final

from tools.stand_in import Anything

REAL: Final = frozenset(
    {
        *("vllm.distributed.kv_events", "vllm.config.kv_events", "vllm.utils.math_utils", "vllm.v1.request", "vllm.v1.utils"),
        *("vllm.v1.kv_cache_interface", "vllm.v1.kv_cache_spec_registry", "vllm.v1.kv_cache_layout"),
        *(f"vllm.v1.core.{name}" for name in ("kv_cache_utils", "block_pool", "single_type_kv_cache_manager")),
        *(f"vllm.v1.core.{name}" for name in ("kv_cache_coordinator", "kv_cache_manager", "specialized_manager")),
        *(f"vllm.v1.core.{name}" for name in ("kv_cache_planning", "kv_cache_config_builder")),
        *(f"vllm.v1.core.sched.{name}" for name in ("scheduler", "request_queue", "output", "utils", "interface")),
    }
)
"""Modules that run unchanged, if a release has them."""
_PACKAGES: Final = ("vllm", "torch", "uvloop", "cbor2", "xxhash", "numpy", "transformers", "psutil")
"""Packages whose other modules are stand-ins; of those after `vllm`, only the ones that are not installed."""


def hash_object(value: Any) -> bytes:
    """Return the hash of a block, as `vllm.utils.hashing.sha256` does."""
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def _divide_up(dividend: int, divisor: int) -> int:
    return -(dividend // -divisor)


def _config(cls: type | None = None, **_: Any) -> Any:
    return dataclasses.dataclass(cls) if cls is not None else dataclasses.dataclass


_ENVIRONMENT: Final[dict[str, Any]] = {
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": True,
    "VLLM_PREFIX_CACHE_RETENTION_INTERVAL": None,
}
"""Defaults of `vllm.envs`."""
_NAMES: Final[dict[str, dict[str, Any]]] = {
    "vllm": {"envs": SimpleNamespace(**_ENVIRONMENT)},
    "vllm.envs": _ENVIRONMENT,
    "vllm.config.utils": {"config": _config},
    "pydantic.dataclasses": {"dataclass": dataclasses.dataclass},
    "pydantic": {"Field": dataclasses.field},
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.utils": {
        "cdiv": _divide_up,
        "sha256": hash_object,
        "sha256_cbor": Anything,
        "length_from_prompt_token_ids_or_embeds": lambda tokens, _: len(tokens),
    },
    "vllm.v1.structured_output.request": {
        "StructuredOutputRequest": SimpleNamespace(from_sampling_params=lambda _: None),
    },
}
"""Attributes of stand-ins that must have the values of the originals."""


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything


class _Finder(MetaPathFinder, Loader):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        absent = [name for name in (*_PACKAGES[1:], "pydantic") if find_spec(name) is None]
        self._packages = {"vllm", *absent}

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        path = self._folder / (fullname.replace(".", "/") + ".py")
        if fullname in REAL and path.exists():
            return spec_from_file_location(fullname, path)
        if fullname in REAL and fullname != "vllm.distributed.kv_events":
            return None
        if fullname.partition(".")[0] in self._packages:
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _StandIn(spec.name)
        vars(module).update(_NAMES.get(spec.name, {}))
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def install(folder: Path) -> None:
    """Let this process import the `vllm` in `folder`, which is named `vllm-RELEASE`."""
    _NAMES["vllm"]["__version__"] = folder.name.removeprefix("vllm-")
    sys.meta_path.insert(0, _Finder(folder))
