"""Packages: a pure and a native wheel, their source distributions, and a run without native code."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
import zmq

import paths

BUILD_SECONDS = 1_200.0
"""Longest time of a build: of the native package it takes minutes on a busy machine if nothing is compiled yet."""
pytestmark = pytest.mark.timeout(2 * BUILD_SECONDS)
ROOT = paths.ROOT
NATIVE = ROOT / "native" / "python"
PLANE = ROOT / "plane"
WITHOUT_NATIVE = """
import importlib, pkgutil, sys
sys.modules["kvevents_native._native"] = None  # as if it had not been built
import kvevents
from kvevents.testing import FakeTransport

PARTS = (
    "index",
    "export",
    "relay",
    "routing",
    "service",
    "sim",
    "cli.demo",
    "cli.export",
    "cli.relay",
    "cli.serve",
    "cli.sim_",
)
USERS = tuple(f"kvevents.{part}" for part in PARTS)
for module in pkgutil.walk_packages(kvevents.__path__, "kvevents."):
    if not module.name.startswith(USERS) and not module.name.endswith("__main__"):
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


def run(*arguments: str | Path, cwd: Path = ROOT) -> str:
    environment = {**os.environ, "VIRTUAL_ENV": sys.prefix}
    environment.pop("CONDA_PREFIX", None)  # maturin accepts either
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=environment,
        timeout=BUILD_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of `kvevents` from its source distribution, as pip would."""
    folder = tmp_path_factory.mktemp("wheel")
    run("-m", "hatchling", "build", "-t", "sdist", "-d", folder)
    (archive,) = folder.iterdir()
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    run("-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=folder / archive.name.removesuffix(".tar.gz"))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def native_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the native wheel with the features of the module installed here, so that Cargo has nothing left to compile."""
    folder = tmp_path_factory.mktemp("native")
    options = ("--release", "--offline", "--auditwheel=skip", f"--interpreter={sys.executable}", "--features=python,testing")
    run("-m", "maturin", "build", *options, "--out", folder, cwd=NATIVE)
    (built,) = folder.iterdir()
    return built


def read_wheel(wheel: Path) -> tuple[set[str], Message]:
    """Return the names of the files and the metadata."""
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        assert f"{Path(about).parent}/licenses/LICENSE" in names
        return set(names), Parser().parsestr(files.read(about).decode())


def without_metadata(names: set[str]) -> set[str]:
    return {name for name in names if not name.split("/")[0].endswith(".dist-info")}


def find_sources(folder: Path) -> set[str]:
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in files if "__pycache__" not in path.parts}


def test_the_wheel_is_pure_and_needs_two_packages(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    names, metadata = read_wheel(wheel)
    assert without_metadata(names) == find_sources(ROOT / "src")
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    required = {line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert {line.partition(">")[0] for line in required} == {"msgspec", "pyzmq"}
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_all("Project-URL") is None


def test_a_release_has_the_addresses_of_its_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links of the README point to the repository as well. A build outside of a release has no addresses."""
    monkeypatch.setenv("KVEVENTS_REPOSITORY", "https://forge.example/kv/kvevents")
    monkeypatch.setenv("KVEVENTS_SITE", "https://kv.example/kvevents")
    run("-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path)
    (built,) = tmp_path.glob("*.whl")
    _, metadata = read_wheel(built)
    tree = f"https://forge.example/kv/kvevents/blob/v{metadata['Version']}"
    addresses = metadata.get_all("Project-URL", [])
    assert {"Source, https://forge.example/kv/kvevents", "Documentation, https://kv.example/kvevents"} <= set(addresses)
    assert f"]({tree}/docs/quickstart/routers.md)" in metadata.get_payload()
    assert "](docs/" not in metadata.get_payload()


def test_the_native_wheel_works_with_every_python_from_3_11(native_wheel: Path) -> None:
    assert "-cp311-abi3-" in native_wheel.name
    names, metadata = read_wheel(native_wheel)
    assert without_metadata(names) == {f"kvevents_native/{name}" for name in find_sources(NATIVE / "kvevents_native")}
    assert "kvevents_native/_native.abi3.so" in names
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("Requires-Dist") is None


def test_extras_require_the_native_wheel_of_the_same_version(wheel: Path, native_wheel: Path) -> None:
    (_, metadata), (_, native) = read_wheel(wheel), read_wheel(native_wheel)
    assert metadata["Version"] == native["Version"]
    pinned = [line for line in metadata.get_all("Requires-Dist", []) if line.startswith("kvevents-native")]
    assert pinned
    assert all(line.startswith(f"kvevents-native=={native['Version']};") for line in pinned)
    assert {line.split("'")[1] for line in pinned} == {"all", "export", "native", "service", "sim"}


def test_the_wheel_of_the_plane_requires_the_same_version(wheel: Path, tmp_path: Path) -> None:
    """It is pure, and the extra of `kvevents` with its name requires it in turn."""
    run("-m", "hatchling", "build", "-d", tmp_path, cwd=PLANE)
    (built,) = tmp_path.glob("*.whl")
    (_, metadata), (names, plane) = read_wheel(wheel), read_wheel(built)
    assert built.name.endswith("-py3-none-any.whl")
    assert without_metadata(names) == find_sources(PLANE / "src")
    assert plane["Version"] == metadata["Version"]
    assert f"kvevents[service]=={metadata['Version']}" in plane.get_all("Requires-Dist", [])
    needed = {line.split("'")[1] for line in metadata.get_all("Requires-Dist", []) if line.startswith(f"{plane['Name']}==")}
    assert needed == {"all", "plane"}


def test_files_that_repeat_the_version_have_the_right_one() -> None:
    """The chart and the examples for clusters repeat it, because they cannot read it; the package does for a quick start."""
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "native" / "Cargo.toml").read_text(), re.MULTILINE)
    files = [path for path in (ROOT / "deploy").rglob("*") if path.suffix in {".yaml", ".md"} or path.name == "Chart.yaml"]
    files.append(ROOT / "src" / "kvevents" / "package_metadata.py")
    pattern = r'(?:^version: |^appVersion: "|^VERSION: Final = "|\bkvevents:)(\d+\.\d+\.\d+)'
    versions = {(path.name, found) for path in files for found in re.findall(pattern, path.read_text(), re.MULTILINE)}
    assert {name for name, _ in versions} >= {"Chart.yaml", "serve.yaml", "README.md", "package_metadata.py"}
    assert {found for _, found in versions} == {version}


def test_the_source_distribution_of_the_native_package_is_complete(tmp_path: Path) -> None:
    run("-m", "maturin", "sdist", "--out", tmp_path, cwd=NATIVE)
    (archive,) = tmp_path.iterdir()
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    expected = {path.relative_to(ROOT / "native").as_posix() for path in (ROOT / "native").rglob("src/**/*.rs")}
    assert {name for name in expected if not any(each.endswith(name) for each in names)} == set()
    assert any(name.endswith("Cargo.lock") for name in names)
    assert not [name for name in names if name.endswith(".so") or "target/" in name]


PUBLISH_AND_SUBSCRIBE = """
import importlib.util, sys, time
assert importlib.util.find_spec("kvevents_native") is None
import kvevents
publisher = kvevents.ZmqEventPublisher(endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")
publisher.publish(kvevents.KVEventBatch(0.0, [kvevents.BlockRemoved([1])]))
while not publisher.stats().published:  # else the batch could come live
    time.sleep(0.01)
source = kvevents.Source(publisher.endpoint, replay_endpoint=publisher.replay_endpoint)
with kvevents.Subscriber(source) as subscriber:
    batch = subscriber.receive(timeout=20)
publisher.shutdown()
assert batch.events[0].block_hashes == [1] and batch.replayed, batch
print(kvevents.__file__)
"""


def test_the_pure_wheel_alone_publishes_replays_and_subscribes(wheel: Path, tmp_path: Path) -> None:
    """The wheel is unpacked beside its two dependencies, isolated from the checkout, without Rust and the native package."""
    packages = tmp_path / "packages"
    packages.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)  # noqa: S202 - our own wheel; ruff mistakes it for a tar archive
    for name in ("msgspec", "zmq"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        (packages / name).symlink_to(Path(spec.origin).parent)
    for libraries in Path(zmq.__file__).parent.parent.glob("pyzmq.libs"):
        (packages / libraries.name).symlink_to(libraries)
    script = tmp_path / "publish_and_subscribe.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(packages)!r})\n{PUBLISH_AND_SUBSCRIBE}")
    done = subprocess.run(
        [sys.executable, "-I", "-S", script], capture_output=True, text=True, check=False, cwd=tmp_path, env={}, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(packages)


def test_everything_except_the_index_and_its_users_works_without_the_native_module() -> None:
    assert run("-c", WITHOUT_NATIVE).strip() == "works"
