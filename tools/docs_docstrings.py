"""Reads literal blocks of docstrings, which are marked as in reStructuredText, as those of Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe


class LiteralBlocks(griffe.Extension):
    """Removes the `::` before an indented block, which Markdown knows without it."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = without_markers(obj.docstring.value)


def without_markers(text: str) -> str:
    """Return a docstring without markers of literal blocks: a line `::`, or two colons at the end of a sentence."""
    return re.sub(r"^(.*\S)::$", r"\1:", re.sub(r"^::\n\n", "", text, flags=re.MULTILINE), flags=re.MULTILINE)
