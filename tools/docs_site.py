"""Hooks of the documentation site (`mkdocs.yml`): Markdown as GitHub reads it, generated parts, links out of the site."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

CHECKOUT = Path(__file__).parents[1]
_ITEM = re.compile(r"([-*]|\d+\.) ")
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
_GENERATED = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)


def on_config(config: MkDocsConfig, **_: Any) -> None:
    """Add the generated pages of the Python API to the navigation."""
    from tools.docs_reference import api_pages  # noqa: PLC0415 - MkDocs imports hooks before it knows the checkout

    reference = next(section["Reference"] for section in config.nav or () if "Reference" in section)
    reference.append({"Python API": ["reference/api.md", *({Path(page).stem: page} for page in api_pages())]})


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> None:
    """Add the generated pages of the Python API."""
    from mkdocs.structure.files import File  # noqa: PLC0415 - tests of the other hooks need no MkDocs

    from tools.docs_reference import api_pages  # noqa: PLC0415 - as above

    for page, text in api_pages().items():
        files.append(File.generated(config, page, content=text))


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Return the text of a page for Python-Markdown."""
    source = page.file.src_uri
    return links_to_repository(separate_blocks(with_pictures(with_generated(markdown), source)), source)


def with_pictures(markdown: str, source: str) -> str:
    """Put the picture in place of each diagram."""
    from tools.docs_pictures import DIAGRAM, DOCS, picture_of  # noqa: PLC0415 - as above

    def replace(diagram: re.Match[str]) -> str:
        place = posixpath.relpath(picture_of(diagram[1]).relative_to(DOCS).as_posix(), posixpath.dirname(source) or ".")
        return f"![Diagram]({place})"

    return DIAGRAM.sub(replace, markdown)


def with_generated(markdown: str) -> str:
    """Put generated text in place of each line `<!-- generated: name -->`. Raise `KeyError` for an unknown name."""
    if _GENERATED.search(markdown) is None:
        return markdown
    from tools.docs_reference import GENERATED  # noqa: PLC0415 - imports all of kvevents

    return _GENERATED.sub(lambda match: GENERATED[match[1]](), markdown)


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
