"""The documentation site can be built, and nothing in it is broken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import paths


def build(site: Path) -> subprocess.CompletedProcess[str]:
    """`make docs`, into another directory."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=paths.ROOT, env=environment, capture_output=True, text=True, check=False, timeout=100)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Every link, anchor and name of the API is found, and every page is in the navigation."""
    built = build(tmp_path)
    assert (built.returncode, built.stdout + built.stderr) == (0, "")
    pages = {str(page.relative_to(tmp_path).parent) for page in tmp_path.rglob("index.html")}
    assert {".", "concepts/stream", "reference/api", "reference/cli"} <= pages
