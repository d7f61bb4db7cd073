"""Images: what they are built from is pinned, and so is each image that a manifest or a document names."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from kvevents.package_metadata import VERSION
from paths import ROOT

DOCKERFILE: Final = ROOT / "deploy" / "Dockerfile"
ENGINE: Final = ROOT / "examples" / "engine-image" / "Dockerfile"
TEXTS: Final = sorted(
    path
    for folder in ("deploy", "docs", "examples")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".md", ".yaml", ".tpl"} or path.name == "Dockerfile"
)
IMAGE: Final = re.compile(r"^\s*(?:- )?(?:image:|FROM|ARG (?:PYTHON|ENGINE)=)\s*\"?([^\s\"${]+)\"?", re.MULTILINE)


def read_instructions(dockerfile: Path, name: str) -> list[str]:
    """Return the arguments of all instructions of a kind; their lines are joined."""
    text = re.sub(r"\\\n", " ", dockerfile.read_text())
    return re.findall(rf"^{name} (.*)$", text, re.MULTILINE)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_image_has_a_release(path: Path) -> None:
    """No image is named without a tag or as `latest`, which is another image on each day; ours has our version."""
    for image in IMAGE.findall(path.read_text()):
        name, _, tag = image.partition("@")[0].rpartition(":")
        assert name, f"{image} has no tag"
        assert tag != "latest"
        if name.rpartition("/")[2] == "kvevents":
            assert tag == VERSION


def test_the_base_of_the_image_is_pinned_by_digest() -> None:
    [base] = [each.removeprefix("PYTHON=") for each in read_instructions(DOCKERFILE, "ARG") if each.startswith("PYTHON=")]
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-bookworm@sha256:[0-9a-f]{64}", base)
    assert {each.removesuffix(" AS build") for each in read_instructions(DOCKERFILE, "FROM")} == {"${PYTHON}"}


def test_the_compiler_comes_from_a_rustup_of_known_hash() -> None:
    """The script that installs it compares the hash before it runs what it has downloaded."""
    arguments = dict(each.split("=", 1) for each in read_instructions(DOCKERFILE, "ARG") if "=" in each)
    for machine in ("X86_64", "AARCH64"):
        assert re.fullmatch("[0-9a-f]{64}", arguments[f"RUSTUP_SHA256_{machine}"])
    least = tomllib.loads((ROOT / "native" / "Cargo.toml").read_text())["workspace"]["package"]["rust-version"]
    assert tuple(map(int, arguments["RUST"].split("."))) >= tuple(map(int, least.split(".")))
    [script] = [each for each in read_instructions(DOCKERFILE, "RUN") if "rustup-init" in each]
    assert script.index("sha256sum --check") < script.index("rustup-init -y")
    assert "sh.rustup.rs" not in DOCKERFILE.read_text()


def test_packages_of_python_are_those_of_the_tests() -> None:
    [environment] = [each for each in read_instructions(DOCKERFILE, "ENV") if "PIP_CONSTRAINT" in each]
    assert "PIP_CONSTRAINT=/source/tools/constraints.txt" in shlex.split(environment)
    lines = (ROOT / "tools" / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    [line] = [each for each in read_instructions(DOCKERFILE, "RUN") if each.startswith("pip install")]
    assert set(line.split()[2:]) <= pinned
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]["custom"]["extras"]
    [installed] = re.findall(r"kvevents-\*\.whl\)\[([\w,]+)\]", DOCKERFILE.read_text())
    for extra in installed.split(","):
        assert {re.split("[><=\\[]", each)[0].lower().replace("_", "-") for each in extras[extra]} <= pinned


def test_the_ignore_file_admits_what_is_copied() -> None:
    copied = [name for line in read_instructions(DOCKERFILE, "COPY") if "--from" not in line for name in line.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied)
    admitted = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert sorted(admitted) == sorted(copied)


def test_the_image_says_what_it_is_and_does_not_run_as_root() -> None:
    [labels] = read_instructions(DOCKERFILE, "LABEL")
    found = dict(each.split("=", 1) for each in shlex.split(labels))
    assert {
        f"org.opencontainers.image.{each}" for each in ("title", "licenses", "version", "revision", "source")
    } <= found.keys()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert found["org.opencontainers.image.licenses"] == project["license"]
    assert read_instructions(DOCKERFILE, "USER") == ["10001:10001"]


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "compose").glob("*.yaml")), ids=lambda path: path.name)
def test_no_service_of_a_compose_file_runs_as_root(path: Path) -> None:
    """The image has a folder for volumes that belongs to its user, so no service needs root."""
    services: dict[str, Any] = yaml.safe_load(path.read_text())["services"]
    assert not [name for name, service in services.items() if "user" in service]
    folders = {
        volume.split(":")[1]
        for each in services.values()
        if each["image"].startswith("kvevents:")
        for volume in each.get("volumes", [])
    }
    [made] = [each for each in read_instructions(DOCKERFILE, "RUN") if "useradd" in each]
    assert all(f"--owner 10001 --group 10001 --mode 0700 {folder}" in made for folder in folders)


def test_the_engine_image_installs_the_wheels_that_were_built() -> None:
    """The command names both wheels, so that no package of a registry can replace them."""
    [copied] = [each for each in read_instructions(ENGINE, "COPY") if each.startswith("dist/")]
    assert copied.split()[:2] == ["dist/kvevents-*.whl", "dist/kvevents_native-*.whl"]
    assert all("--find-links" not in each for each in read_instructions(ENGINE, "RUN"))
