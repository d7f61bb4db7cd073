"""Source distributions of vLLM, by release."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Final

from tools.released import CACHE

SECONDS: Final = 600.0
"""Time limit for one download."""
_BACKEND: Final = '''"""A build backend that gives pip the metadata that it requests before it stores a source distribution."""
import pathlib

def get_requires_for_build_wheel(config_settings=None):
    return []

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    text = pathlib.Path("PKG-INFO").read_text(encoding="utf-8")
    version = next(line for line in text.splitlines() if line.startswith("Version: ")).removeprefix("Version: ")
    name = f"vllm-{version}.dist-info"
    (pathlib.Path(folder) / name).mkdir()
    (pathlib.Path(folder) / name / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: vllm\\nVersion: {version}\\n")
    return name
'''
"""`pip download` requests the metadata of a source distribution, for which vLLM's own backend needs torch."""


def source(release: str) -> Path:
    """Return the folder with the package `vllm` and the tests of a release; download it first if it does not exist.

    `KVEVENTS_VLLM_SOURCES` names another folder than `.cache/vllm-sources`; it has one folder `vllm-RELEASE` for each
    release. Raises `subprocess.CalledProcessError` if pip fails.
    """
    parent = Path(os.environ.get("KVEVENTS_VLLM_SOURCES") or CACHE / "vllm-sources")
    found = parent / f"vllm-{release}"
    if not (found / "vllm").is_dir():
        print(f"downloading the sources of vllm {release} to {found}, once", file=sys.stderr, flush=True)
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            _download(release, Path(folder))
            shutil.move(Path(folder) / found.name, found)
    return found


def _download(release: str, folder: Path) -> None:
    backend = folder / "backend" / "setuptools"
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    (backend / "build_meta.py").write_text(_BACKEND, encoding="utf-8")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--dest", str(folder))
    subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, f"vllm=={release}"],
        env={**os.environ, "PYTHONPATH": str(backend.parent)},
        stdout=sys.stderr,
        check=True,
        timeout=SECONDS,
    )
    with tarfile.open(folder / f"vllm-{release}.tar.gz") as archive:
        members = [each for each in archive.getmembers() if each.name.endswith(".py")]
        archive.extractall(folder, [each for each in members if each.name.split("/")[1] in {"vllm", "tests"}], filter="data")
