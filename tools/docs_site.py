"""Hooks of the documentation site (`mkdocs.yml`): Markdown as GitHub reads it, and links to files of the repository."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.pages import Page

CHECKOUT = Path(__file__).parents[1]
_ITEM = re.compile(r"([-*]|\d+\.) ")
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Return the text of a page with blank lines where its lists and tables begin, and without links that leave `docs/`."""
    return links_to_repository(separate_blocks(markdown), page.file.src_uri)


def separate_blocks(markdown: str) -> str:
    """Insert a blank line between a paragraph and the list or the table below it, as Python-Markdown needs it."""
    lines: list[str] = []
    fenced, before = False, ""
    for line in markdown.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        inside_list = _ITEM.match(before) or before.startswith("  ")
        starts = (_ITEM.match(line) and not inside_list) or (line.startswith("|") and not before.startswith("|"))
        if starts and before.strip() and not fenced:
            lines.append("")
        lines.append(line)
        before = line
    return "\n".join(lines) + "\n"


def links_to_repository(markdown: str, source: str) -> str:
    """Lead links to files outside `docs/` to the repository of `KVEVENTS_REPOSITORY`; without it, leave their paths as text."""
    repository = os.environ.get("KVEVENTS_REPOSITORY")

    def replace(link: re.Match[str]) -> str:
        text, place, anchor = link[1], link[2], link[3] or ""
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(source), place))
        if target.startswith("docs/"):
            return link[0]
        if not (CHECKOUT / target).exists():
            raise FileNotFoundError(f"docs/{source} links to {target}, which does not exist")
        if repository:
            return f"[{text}]({repository}/blob/main/{target}{anchor})"
        return f"{text} (`{target}`)"

    return _LINK.sub(replace, markdown)
