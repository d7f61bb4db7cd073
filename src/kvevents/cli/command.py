"""Commands, their exit codes, and the argument parser of all commands."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from argparse import SUPPRESS, Action, ArgumentError, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Generator, Iterable, Sequence
from difflib import get_close_matches
from enum import IntEnum
from importlib import import_module
from itertools import takewhile
from typing import Any, NoReturn, TypeAlias

from msgspec import Struct

from kvevents.cli.console import convert_output_errors
from kvevents.cli.values import PLACEHOLDERS
from kvevents.errors import MissingDependencyError, UsageError
from kvevents.settings import suggestion

Group: TypeAlias = argparse._ArgumentGroup  # noqa: SLF001 - the type of add_argument_group has no public name


class ExitCode(IntEnum):
    OK = 0
    FAILED = 1
    WRONG_USAGE = 2
    """For arguments that argparse rejects, and for options that exclude each other."""
    NOTHING_ARRIVED = 3
    """If no batch arrived before `--idle-timeout` ended the command."""
    CHECK_NOT_POSSIBLE = 4
    """If a check of the command could not be done, so that its result is unknown."""
    INTERRUPTED = 130
    """If SIGINT or SIGTERM ended the command before the end of its work; shells use the same exit code."""


class CommandLineError(UsageError):
    """Raised for arguments that exclude each other or need further arguments. The message names the arguments."""


class Command(Struct, frozen=True):
    """One command of the program.

    The program imports only the module of the chosen command. So the other commands need neither the time nor the optional
    packages of this import. The module has `DESCRIPTION`, `EXAMPLES`, `add_arguments(parser)` and `run(args) -> exit code`.
    """

    name: str
    summary: str
    """One line about this command in the list of commands."""
    module: str
    """Module of the command, or `MODULE:NAME` for an object in it. A name without a dot means a module of `kvevents.cli`."""
    on_error: int = ExitCode.FAILED
    """Exit code if an error ends the command."""
    extra: str = ""
    """Extra of the distribution, such as `service`, that installs the packages for the module; empty if it needs no extra."""

    def load(self, program: str) -> Any:
        """Import the module. Raises `MissingDependencyError`, which names the `program`, such as `kvevents plane status`."""
        try:
            module, _, name = self.module.partition(":")
            loaded = import_module(module if "." in module else f"kvevents.cli.{module}")
            return getattr(loaded, name) if name else loaded
        except MissingDependencyError as error:
            # An imported module names only its own extra. The command's extra installs the packages of all imported modules.
            raise (MissingDependencyError(error.text, self.extra) if self.extra else error) from error
        except ImportError as error:
            if not self.extra or str(error.name).partition(".")[0] == "kvevents":
                raise
            raise MissingDependencyError(f"{program} needs the package {error.name}", self.extra) from error


class CommandGroup(Struct, frozen=True):
    """A command that consists of subcommands, such as `kvevents sim`."""

    name: str
    summary: str
    description: str
    examples: str
    commands: tuple[Command, ...]


class HelpFormatter(RawDescriptionHelpFormatter):
    """Wraps descriptions at the width of the terminal, except indented lines, such as examples.

    The help of an option shows a placeholder for the type of its value, and the default unless the text mentions the default.
    The list of commands has no line for the placeholder `COMMAND`.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = text.splitlines()
        return "\n".join(indent + (line if line.startswith(" ") else textwrap.fill(line, width)) for line in lines)

    def _get_default_metavar_for_optional(self, action: Action) -> str:
        return PLACEHOLDERS.get(action.type, action.dest.upper())

    def _get_help_string(self, action: Action) -> str:
        text, default = action.help or "", action.default
        if action.nargs == 0 or default in (None, SUPPRESS, "", []) or "(default:" in text:
            return text
        return f"{text} (default: {f'{default:g}' if isinstance(default, float) else default})"

    def _format_action(self, action: Action) -> str:
        commands = [*self._iter_indented_subactions(action)]
        return "".join(map(super()._format_action, commands)) if commands else super()._format_action(action)

    def _iter_indented_subactions(self, action: Action) -> Generator[Action, None, None]:
        yield from getattr(action, "_choices_actions", ())


class CommandParser(ArgumentParser):
    """A parser that reports unknown options and commands before all other errors, with a suggestion.

    argparse reports an unknown option too late: first, it rejects the value of the option as a positional argument. This
    parser also rejects abbreviated options, because a later release can add an option with the same beginning.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        settings.setdefault("allow_abbrev", False)
        settings.setdefault("formatter_class", HelpFormatter)
        super().__init__(*args, **settings)
        self._commands: Any = None
        self._command: Command | None = None

    def add_commands(self, commands: Iterable[Command | CommandGroup]) -> None:
        """Require one of `commands`. The parsed arguments have the command's name as `command`, and `run` as `execute`."""
        self._commands = self.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=CommandParser)
        for command in commands:
            parser: CommandParser = self._commands.add_parser(command.name, help=command.summary)
            if isinstance(command, CommandGroup):
                parser.description, parser.epilog = command.description, f"examples:\n{command.examples}"
                parser.add_commands(command.commands)
            else:
                parser._command = command

    def declare_options(self, words: Sequence[str]) -> None:
        """Declare the options of the command that `words` choose, without parsing `words`."""
        if self._commands is not None:
            for word in words:
                if word in self._commands.choices:
                    self._commands.choices[word].declare_options(words)
        elif self._command is not None:
            self._declare(self._command)
            self._add_help_texts()
            self._command = None

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override] # overloads
        """Parse arguments. First, declare the options of the chosen command."""
        # Accept `--replay-endpoint` for `--replay`: files, variables and HTTP requests use that name.
        words = [re.sub("^--replay-endpoint(?=$|=)", "--replay", word) for word in (sys.argv[1:] if args is None else args)]
        command, self._command = self._command, None
        if command is not None:
            self._declare(command)
        if self._commands is None:
            self._check_options(takewhile(lambda word: word != "--", words))
        else:
            options = [*takewhile(lambda word: word.startswith("-"), words)]
            self._check_options(options)
            names = list(self._commands.choices)
            if (further_words := words[len(options) :]) and further_words[0] not in names:
                self._reject("command", further_words[0], [*names, *self._option_string_actions])
        parsed, unknown = super().parse_known_args(words, namespace)
        if self._commands is None and unknown:
            if unknown[0].startswith("-"):
                self._reject("option", unknown[0], [*self._option_string_actions])
            self.error(f"unexpected argument {unknown[0]!r}")
        return parsed, unknown

    def format_help(self) -> str:
        """Return the help text, including the texts of the command's settings."""
        self._add_help_texts()
        return super().format_help()

    def _add_help_texts(self) -> None:
        if (settings := self.get_default("settings")) is not None:
            settings.add_help_texts()

    def error(self, message: str) -> NoReturn:
        """Print a line of usage and a line with the error, and exit."""
        names = ((str(each.metavar or each.dest), each.nargs in {"?", "*"}) for each in self._get_positional_actions())
        words = [self.prog, "[OPTIONS]", *(f"[{name}]" if is_optional else name for name, is_optional in names)]
        self.exit(ExitCode.WRONG_USAGE, f"usage: {' '.join(words)} (--help explains it)\n{self.prog}: error: {message}\n")

    def _get_value(self, action: Action, arg_string: str) -> Any:
        """Return the value of an argument. After a `UsageError`, keep its text, which argparse would replace."""
        try:
            return super()._get_value(action, arg_string)
        except ArgumentError as error:
            if isinstance(error.__context__, UsageError):
                raise ArgumentError(action, str(error.__context__)) from error
            raise

    def _check_value(self, action: Action, value: Any) -> None:
        choices = [str(each) for each in action.choices or ()]
        if choices and value not in choices:
            text = f"invalid value {value!r}{suggestion(str(value), choices)} expected {', '.join(choices)}"
            raise ArgumentError(action, text)

    def _declare(self, command: Command) -> None:
        module = command.load(self.prog)
        module.add_arguments(self)
        self.description, self.epilog = module.DESCRIPTION, f"examples:\n{module.EXAMPLES}"
        self.set_defaults(command=command, execute=module.run)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print a message. Raise `ExternalError` if stdout cannot be written; argparse would ignore a full disk."""
        if file is not sys.stdout:
            super()._print_message(message, file)
            return
        with convert_output_errors():
            file.write(message)
            file.flush()

    def _check_options(self, words: Iterable[str]) -> None:
        known = list(self._option_string_actions)
        for word in words:
            option = re.match(r"--[^=]*|-[A-Za-z]", word)
            if option is not None and option[0] not in known:
                self._reject("option", option[0], known)

    def _reject(self, kind: str, word: str, known: Sequence[str]) -> NoReturn:
        similar = get_close_matches(word, known, 1)
        self.error(f"unknown {kind} {word}" + "".join(f"; did you mean {each}?" for each in similar))
