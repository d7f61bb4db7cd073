"""Arguments of commands, as argparse has them, with a word for who misspells an option."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import takewhile
from typing import Any


class CommandParser(ArgumentParser):
    """A parser that looks for options that it does not know first of all.

    argparse does that last: it takes the value of a misspelled option for what may stand alone, and finds fault with that.
    Nor is a beginning of an option's name taken for it: `--replay` of one command would be `--replay-endpoint` of another.
    """

    _has_commands = False

    def __init__(self, *args: Any, **settings: Any) -> None:
        settings.setdefault("allow_abbrev", False)
        super().__init__(*args, **settings)

    def add_subparsers(self, **settings: Any) -> Any:
        """As of any parser, whose commands look for themselves."""
        self._has_commands = True
        return super().add_subparsers(**settings)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override] # overloads
        """As of any parser."""
        if args is not None and not self._has_commands:
            self._check(args)
        return super().parse_known_args(args, namespace)

    def _check(self, args: Sequence[str]) -> None:
        known = list(self._option_string_actions)
        for word in takewhile(lambda word: word != "--", args):
            option = word.partition("=")[0]
            if option.startswith("--") and option not in known:
                meant = get_close_matches(option, known, 1)
                self.error(f"there is no option {option}" + "".join(f"; did you mean {each}?" for each in meant))
