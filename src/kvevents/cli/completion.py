"""`kvevents completion`: print the shell code that completes commands, options and their values."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Final

from argcomplete.shell_integration import shellcode

from kvevents.cli.command import ExitCode
from kvevents.cli.console import Console

DESCRIPTION: Final = "Print the code by which a shell completes commands, options and their values."
EXAMPLES: Final = """\
  kvevents completion bash      in ~/.bashrc: eval "$(kvevents completion bash)"
  kvevents completion zsh       in ~/.zshrc: eval "$(kvevents completion zsh)"
  kvevents completion fish      into ~/.config/fish/completions/kvevents.fish
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")


def run(args: Namespace) -> int:
    """Print the completion code for the shell."""
    code: str = shellcode(["kvevents"], shell=args.shell)
    Console().data(code.encode())
    return ExitCode.OK
