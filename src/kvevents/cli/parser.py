"""Arguments of commands, as argparse has them, with a suggestion for misspelled options and commands."""

from __future__ import annotations

import sys
import textwrap
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from itertools import takewhile
from typing import Any, NoReturn

from kvevents.cli.command import Command
from kvevents.cli.console import writing
from kvevents.errors import KVEventsError


class HelpFormatter(RawDescriptionHelpFormatter):
    """Wraps the lines of a description at the width of the terminal; indented lines, such as examples, stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = text.splitlines()
        return "\n".join(indent + (line if line.startswith(" ") else textwrap.fill(line, width)) for line in lines)


class CommandParser(ArgumentParser):
    """A parser that looks for unknown options and commands before anything else.

    argparse does that last: it takes the value of a misspelled option for a positional argument, and complains about that one.
    Abbreviated options are unknown too: `--replay` of one command would be `--replay-endpoint` of another.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        settings.setdefault("allow_abbrev", False)
        settings.setdefault("formatter_class", HelpFormatter)
        super().__init__(*args, **settings)
        self._commands: Any = None
        self._fill: Callable[[ArgumentParser], None] | None = None

    def add_commands(self, commands: Iterable[Command], dest: str) -> None:
        """Have one of these commands chosen, and left at `dest`.

        A command declares its options when it was chosen. It may import its settings for that: other commands, and platforms
        without the native module, do without.
        """
        self._commands = self.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=CommandParser)
        for command in commands:
            about = {"help": command.summary, "description": command.description, "epilog": f"examples:\n{command.examples}"}
            parser: CommandParser = self._commands.add_parser(command.name, **about)
            parser._fill = command.add_arguments
            parser.set_defaults(**{dest: command})

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override] # overloads
        """As of any parser."""
        given = sys.argv[1:] if args is None else args
        fill, self._fill = self._fill, None
        if fill is not None:
            try:
                fill(self)
            except KVEventsError as error:
                self.error(str(error))
        if self._commands is None:
            self._check_options(takewhile(lambda word: word != "--", given))
        else:
            options = [*takewhile(lambda word: word.startswith("-"), given)]
            self._check_options(options)
            self._check_command(given[len(options) :])
        return super().parse_known_args(args, namespace)

    def _print_message(self, message: str, file: Any = None) -> None:
        """As of any parser, which however ignores that stdout cannot be written: a full disk would look like success."""
        if file is not sys.stdout:
            super()._print_message(message, file)
            return
        with writing():
            file.write(message)
            file.flush()

    def _check_options(self, words: Iterable[str]) -> None:
        known = list(self._option_string_actions)
        for word in words:
            option = word.partition("=")[0]
            if option.startswith("--") and option not in known:
                self._unknown("option", option, known)

    def _check_command(self, rest: Sequence[str]) -> None:
        known = list(self._commands.choices)
        if rest and rest[0] not in known:
            self._unknown("command", rest[0], [*known, *self._option_string_actions])

    def _unknown(self, what: str, word: str, known: Sequence[str]) -> NoReturn:
        meant = get_close_matches(word, known, 1)
        self.error(f"there is no {what} {word}" + "".join(f"; did you mean {each}?" for each in meant))
