"""What is compared with, from its released wheels; the engines' own publishers are executed out of theirs.

A wheel is looked for in the directory that `KVEVENTS_WHEELS` names, then in `.cache/wheels` of the checkout, then downloaded
there with `pip download --no-deps` (vLLM's is 326 MB, SGLang's 39 MB). One or two modules of it are extracted, and executed as
they are; what they import of their engine is replaced by the stubs below, none of which `publish`, the publisher's
thread or its replay ever call.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

CHECKOUT: Final = Path(__file__).resolve().parent.parent
CACHE: Final = CHECKOUT / ".cache"


# Wheels of one fixed platform, whatever this machine is: only pure Python is taken out of the engines'.
_ANYWHERE: Final = (
    *("--implementation", "cp", "--python-version", "3.11", "--abi", "cp311", "--abi", "abi3"),
    *(f"--platform=manylinux_{glibc}_x86_64" for glibc in ("2_35", "2_34", "2_31", "2_28")),
)


@dataclass(frozen=True)
class Release:
    """A release to compare with."""

    package: str
    release: str
    platform: tuple[str, ...] = ()
    """Options of pip, where not this machine's wheel is wanted."""

    @property
    def title(self) -> str:
        return f"{self.package} {self.release}"

    @property
    def wheels(self) -> str:
        """The pattern of its wheels' names."""
        return f"{self.package.replace('-', '_')}-{self.release}-*.whl"


@dataclass(frozen=True, kw_only=True)
class Engine(Release):
    """One whose publisher is executed."""

    platform: tuple[str, ...] = _ANYWHERE
    module: str
    """Dotted name of the module with the publisher."""
    also: tuple[str, ...] = ()
    """Modules that it imports and that run without the engine."""


VLLM: Final = Engine(package="vllm", release="0.32.0", module="vllm.distributed.kv_events", also=("vllm.config.kv_events",))
VLLM_NEWEST: Final = Engine(
    package="vllm", release="0.33.0", module="vllm.distributed.kv_events", also=("vllm.config.kv_events",)
)
"""The newest release: benchmarks measure its publisher, `tests.system.vllm_oracle.groups` compares with its block manager."""
SGLANG: Final = Engine(package="sglang", release="0.5.23", module="sglang.srt.disaggregation.kv_events")


def load(engine: Engine) -> types.ModuleType:
    """The engine's module. Raises `SystemExit` with a sentence when its wheel cannot be had."""
    if engine.module not in sys.modules:
        _install_stubs(engine)
        for name in (*engine.also, engine.module):
            _execute(name, extracted(engine, name))
    return sys.modules[engine.module]


def extracted(engine: Engine, module: str) -> Path:
    """The source file of `module`, taken out of the wheel when it has not been before."""
    inner = module.replace(".", "/") + ".py"
    target = CACHE / "engines" / f"{engine.package}-{engine.release}" / inner
    if not target.exists():
        with zipfile.ZipFile(wheel(engine)) as archive:
            source = archive.read(inner)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source)
    return target


def wheel(release: Release) -> Path:
    """The wheel of a release, downloaded if it is not there. Raises `SystemExit` with a sentence without one."""
    return at_hand(release) or _download(release, CACHE / "wheels")


def at_hand(release: Release) -> Path | None:
    """The wheel of a release, if it was put there or downloaded before."""
    for folder in (Path(os.environ.get("KVEVENTS_WHEELS", "")), CACHE / "wheels"):
        found = sorted(folder.glob(release.wheels))
        if found:
            return found[0]
    return None


def _download(release: Release, folder: Path) -> Path:
    wanted = f"{release.package}=={release.release}"
    print(f"downloading the wheel of {release.title} once", file=sys.stderr)
    options = ("--no-deps", "--only-binary=:all:", *release.platform, "--dest", str(folder))
    command = [sys.executable, "-m", "pip", "download", *options, wanted]
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode:  # noqa: S603 - pip, with our own words
        sys.exit(f"no wheel of {release.title}: pip could not download it; put it into a folder that KVEVENTS_WHEELS names")
    return next(folder.glob(release.wheels))


def _execute(name: str, source: Path) -> None:
    spec = importlib.util.spec_from_file_location(name, source)
    if spec is None or spec.loader is None:
        raise ImportError(name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


# --- what the modules import of their engine -------------------------------------------------------------------------------


def _stub(name: str, **names: Any) -> None:
    """A module of `names`, and the packages above it."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        package = sys.modules.setdefault(".".join(parts[:depth]), types.ModuleType(".".join(parts[:depth])))
        package.__path__ = []
    module = types.ModuleType(name)
    vars(module).update(names)
    sys.modules[name] = module


def _unused(*_: Any) -> Any:
    raise NotImplementedError("a stub of the benchmarks was called")


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
