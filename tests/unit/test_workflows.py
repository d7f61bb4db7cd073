"""GitHub's workflows have minimal permissions, pinned actions, and only existing make targets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import paths

WORKFLOWS = sorted((paths.ROOT / ".github" / "workflows").glob("*.yml"))
PINNED = re.compile(r"uses: [\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")
MAKE = re.compile(r"\bmake ((?:[\w./-]+ ?)+)")


def jobs(workflow: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(workflow.read_text())["jobs"]
    return found


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (paths.ROOT / "Makefile").read_text(), re.MULTILINE)) | {".venv/.ready"}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_every_action_is_pinned_to_a_commit_and_names_its_release(workflow: Path) -> None:
    used = [line.strip().removeprefix("- ") for line in workflow.read_text().splitlines() if "uses:" in line]
    assert used
    assert [line for line in used if not PINNED.match(line)] == []


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_every_job_is_bounded_in_time_and_in_permissions(workflow: Path) -> None:
    """Only jobs that publish or attest may write, and no checkout persists its token."""
    assert yaml.safe_load(workflow.read_text())["permissions"] == {}
    for name, job in jobs(workflow).items():
        assert job["timeout-minutes"] <= 240, name
        writes = {scope for scope, access in job.get("permissions", {}).items() if access == "write"}
        assert not writes or (workflow.name == "release.yml" and name in {"publish", "site", "image"})
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False, name


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_every_make_command_names_an_existing_target(workflow: Path) -> None:
    """Targets from a matrix are included."""
    targets = make_targets()
    for name, job in jobs(workflow).items():
        named = set(job.get("strategy", {}).get("matrix", {}).get("target", []))
        for step in job["steps"]:
            for words in MAKE.findall(step.get("run", "")) if "apt-get" not in step.get("run", "") else []:
                named |= {word for word in words.split() if not word.startswith("--")}
        assert {word for word in named if word != "PYTHON"} <= targets, name


def test_the_required_check_needs_every_other_job() -> None:
    found = jobs(paths.ROOT / ".github" / "workflows" / "ci.yml")
    assert set(found.pop("required")["needs"]) == set(found)
