"""Names and prose use no word that the glossary of the project avoids.

The list has only words without a legitimate use here. `WORDS` says what to write instead.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from paths import ROOT

WORDS: Final = {
    "told tell tells telling foretold foretell foretells": "report, send, return or show",
    "mend mends mended mending": "repair or correct",
    "heed heeds heeded heeding": "respect or read",
    "hear hears heard hearing unheard": "receive",
    "spell spells spelled": "encode or write",
    "anew": "again",
    "nobody somebody everybody anybody whoever whom": "name the process, client or user",
    "whereof thereof whence therein lately": "use a plain clause",
    "clerk clerks desk desks opinion opinions": "use the technical term",
    "lies": "is",
}
"""Words to avoid, and what to write instead."""
PHRASES: Final = {
    "may not": "must not, might not or cannot",
    "for good": "permanently",
    "is none": "without, or if it does not exist",
    "are none": "without, or if they do not exist",
    "was none": "without, or if it did not exist",
}
"""Phrases to avoid, and what to write instead. In names an underscore counts as a space."""
ALLOWED: Final = {
    ".tell()": "the position of a file object",
    "def tell(self)": "the same method of a class that replaces a file object",
    "is_none": "a method of Rust's Option",
}
"""Uses that are not our own words, each with the reason."""
PLACES: Final = ("src", "plane", "native", "docs", "tests", "benchmarks", "tools", "examples", "deploy", "observability")
DOCUMENTS: Final = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
SUFFIXES: Final = frozenset({".py", ".pyi", ".rs", ".md", ".toml", ".yaml", ".yml", ".html", ".proto", ".tpl", ".conf", ".sh"})
EXEMPT: Final = frozenset({"target", "__pycache__", "data", Path(__file__).name})
"""Parts of paths that are generated or recorded, or that hold this list."""
_ADVICE: Final = {word: advice for words, advice in WORDS.items() for word in words.split()} | PHRASES
_TOKEN: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_PHRASE: Final = re.compile(rf"(?<![a-zA-Z])(?:{'|'.join(PHRASES)})(?![a-zA-Z])")


def test_names_and_prose_use_no_word_that_the_glossary_avoids() -> None:
    files = [path for place in PLACES for path in (ROOT / place).rglob("*") if path.suffix in SUFFIXES]
    files += [ROOT / name for name in DOCUMENTS]
    found = [offence for path in files if EXEMPT.isdisjoint(path.parts) for offence in find_offences(path)]
    assert not found, "\n".join(found)


def find_offences(path: Path) -> list[str]:
    """Return the lines of a file with words to avoid, each with its place and with what to write instead."""
    text = path.read_text(encoding="utf-8")
    if not find_avoided_words(text):
        return []
    place = path.relative_to(ROOT)
    return [
        f"{place}:{number}: {word!r}: {_ADVICE[word]}"
        for number, line in enumerate(text.splitlines(), 1)
        for word in sorted(find_avoided_words(line))
    ]


def find_avoided_words(text: str) -> set[str]:
    """Return the words and phrases to avoid in a text, also as parts of names with underscores or capitals."""
    for allowed in ALLOWED:
        text = text.replace(allowed, "")
    words = {token.lower() for token in _TOKEN.findall(text)}
    return words.intersection(_ADVICE).union(_PHRASE.findall(text.replace("_", " ")))


def test_avoided_words_are_found_in_names_and_prose() -> None:
    assert find_avoided_words("def test_what_was_told") == {"told"}
    assert find_avoided_words("class StoryTold: NOBODY; a_may_not_b") == {"told", "nobody", "may not"}
    assert not find_avoided_words("heartbeat misspelled x is None file.tell() maybe not, hearth")
