"""Messages refer to pages of the documentation by addresses that a reader without a checkout can open."""

from __future__ import annotations

import ast
import importlib.metadata
import re
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest

import paths
from kvevents.package_metadata import documentation, page_link

SOURCES = (paths.ROOT / "src", paths.ROOT / "plane" / "src")


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every string in a module, including docstrings."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


@pytest.fixture
def built_by_a_release(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    metadata = Message()
    metadata["Project-URL"] = "Source, https://forge.example/kv"
    metadata["Project-URL"] = "Documentation, https://kv.example/kvevents"
    monkeypatch.setattr(importlib.metadata, "metadata", lambda _: metadata)
    documentation.cache_clear()
    yield
    documentation.cache_clear()


@pytest.mark.usefixtures("built_by_a_release")
def test_a_page_has_the_documentation_address_in_the_metadata() -> None:
    assert page_link("install") == "https://kv.example/kvevents/install/"
    assert page_link("operations/runbook#kveventslost") == "https://kv.example/kvevents/operations/runbook/#kveventslost"


def test_without_an_address_a_page_is_named_as_part_of_the_documentation() -> None:
    assert documentation() is None
    assert page_link("install#extras") == "install#extras in the documentation of kvevents"


def test_no_text_of_the_package_names_a_file_of_the_checkout() -> None:
    """Installed packages have no folder `docs`."""
    found = [
        f"{path.relative_to(paths.ROOT)}:{line}"
        for source in SOURCES
        for path in sorted(source.rglob("*.py"))
        for line, text in strings(path)
        if re.search(r"\bdocs/\w", text)
    ]
    assert found == []


def test_the_pages_that_messages_name_exist() -> None:
    """Their headings exist too, with the anchors that GitHub derives from headings."""
    references = {
        place
        for source in SOURCES
        for path in source.rglob("*.py")
        for place in re.findall(r"page_link\(['\"]([^'\"]+)['\"]\)", path.read_text())
    }
    assert references
    for place in references:
        page, _, anchor = place.partition("#")
        titles = re.findall(r"^#+ (.*)$", (paths.ROOT / "docs" / f"{page}.md").read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
        assert not anchor or anchor in anchors, place
