"""The documentation site builds, and has no broken links."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import paths

CONFIG = paths.ROOT / "mkdocs.yml"
pytestmark = pytest.mark.timeout(900)
"""A build takes half a minute of one CPU."""


def build(site: Path, config: Path = CONFIG) -> subprocess.CompletedProcess[str]:
    """Build the site as `make docs` does, into another directory."""
    command = [sys.executable, "-m", "mkdocs", "build", "--config-file", str(config), "--site-dir", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=paths.ROOT, env=environment, capture_output=True, text=True, check=False, timeout=800)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Every link, anchor and name of the API is found, every page is in the navigation, and none needs another host."""
    built = build(tmp_path)
    assert (built.returncode, "WARNING" in built.stderr) == (0, False), built.stderr
    pages = {str(page.relative_to(tmp_path).parent) for page in tmp_path.rglob("index.html")}
    assert {".", "install", "concepts/stream", "reference/api", "reference/api/kvevents.index", "reference/cli"} <= pages
    subscriber = (tmp_path / "reference/api/kvevents.subscriber/index.html").read_text()
    names = [
        "Subscriber.trust",
        "Subscriber.status",
        "Subscriber.add",
        "AsyncSubscriber.wait_for",
        "Options.sink",
        "Options.limits",
    ]
    assert [name for name in names if f'{name}"' not in subscriber] == []
    extensions = (tmp_path / "reference/extension-points/index.html").read_text()
    names = ["Policy.choose", "Transport.open", "Provider.watch", "Driver.target"]
    assert [name for name in names if f'{name}"' not in extensions] == []
    assert 'id="kvevents.subscriber.Sink"' not in subscriber
    others = re.compile(r'<(?:script|img|link)[^>]+(?:src|href)="(https?://[^"]+)"')
    assert {address for page in tmp_path.rglob("index.html") for address in others.findall(page.read_text())} == set()


def test_broken_links_fail_the_build(tmp_path: Path) -> None:
    """The test builds its own pages with the settings of the site."""
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("[a page](none.md), [a heading](#none), [a heading of another page](other.md#none)")
    (docs / "other.md").write_text("# Other\n")
    (docs / "lost.md").write_text("# A page that the navigation does not name\n")
    config = tmp_path / "mkdocs.yml"
    config.write_text(f"INHERIT: {CONFIG}\ndocs_dir: docs\nhooks: []\nplugins: []\nnav: [index.md, other.md]\n")
    built = build(tmp_path / "site", config)
    assert built.returncode == 1
    for warning in (
        "lost.md",
        "'none.md', but the target",
        "'#none', but there is no such anchor",
        "contain an anchor '#none'",
    ):
        assert warning in built.stderr
