"""What is shipped: one wheel for every Python, a source distribution that builds it, and what runs without native code."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import paths

ROOT = paths.ROOT
WITHOUT_NATIVE = """
import importlib, pkgutil, sys
sys.modules["kvevents._native"] = None  # as if it had not been built
import kvevents
from kvevents.testing import FakeTransport

PARTS = (
    "_native",
    "index",
    "export",
    "plane",
    "relay",
    "routing",
    "service",
    "sim",
    "cli.bridge",
    "cli.export",
    "cli.plane",
    "cli.relay",
    "cli.serve",
    "cli.sim.",
)
NATIVE = tuple(f"kvevents.{part}" for part in PARTS)
for module in pkgutil.walk_packages(kvevents.__path__, "kvevents."):
    if not module.name.startswith(NATIVE) and not module.name.endswith("__main__"):
        importlib.import_module(module.name)

transport = FakeTransport()
engine = transport.engine("tcp://engine:5557", "tcp://engine:5558")
source = kvevents.Source(engine.endpoint, replay_endpoint=engine.replay_endpoint)
with kvevents.Subscriber(source, transport=transport, clock=transport.clock) as subscriber:
    engine.publish(kvevents.BlockRemoved([1]))
    delivery = subscriber.receive(timeout=1)
assert isinstance(delivery, kvevents.Batch), delivery
assert delivery.events[0].block_hashes == [1], delivery
print("works")
"""


def run(*arguments: str | Path) -> str:
    environment = {**os.environ, "VIRTUAL_ENV": sys.prefix}
    environment.pop("CONDA_PREFIX", None)  # maturin takes either
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=ROOT, env=environment, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built like the one that is installed here, features of tests included, so Cargo has nothing left to compile."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--release", "--offline", "--auditwheel=skip", f"--interpreter={sys.executable}", "--features=python,testing")
    run("-m", "maturin", "build", *options, "--out", folder)
    (built,) = folder.iterdir()
    return built


def test_one_wheel_serves_every_python_from_3_11(wheel: Path) -> None:
    assert "-cp311-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(files.read(about).decode())
    assert "kvevents/_native.abi3.so" in names
    assert "kvevents/py.typed" in names
    assert f"{Path(about).parent}/licenses/LICENSE" in names
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"


def test_a_wheel_holds_both_packages_whole_and_nothing_else(wheel: Path) -> None:
    """The library, and the entry point of its program."""
    with zipfile.ZipFile(wheel) as files:
        shipped = {name for name in files.namelist() if not name.split("/")[0].endswith(".dist-info")}
    files_here = (path.relative_to(ROOT / "src") for path in (ROOT / "src").rglob("*") if path.is_file())
    assert shipped == {path.as_posix() for path in files_here if "__pycache__" not in path.parts}


def test_a_source_distribution_can_build_the_native_module(tmp_path: Path) -> None:
    run("-m", "maturin", "sdist", "--out", tmp_path)
    (archive,) = tmp_path.iterdir()
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    native = {path.relative_to(ROOT).as_posix() for path in (ROOT / "native").rglob("src/**/*.rs")}
    wanted = {"LICENSE", "README.md", "pyproject.toml", "native/Cargo.toml", "native/Cargo.lock", "src/kvevents/py.typed"}
    assert native | wanted <= names
    assert not [name for name in names if name.endswith(".so") or "target/" in name]


def test_everything_but_the_index_and_what_needs_it_works_without_the_native_module() -> None:
    assert run("-c", WITHOUT_NATIVE).strip() == "works"
