"""The program around the commands: help, version, errors."""

from __future__ import annotations

import re
from argparse import SUPPRESS
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from cli_cases import run
from kvevents.cli.command import Command, CommandGroup, CommandParser, HelpFormatter
from kvevents.cli.console import escape_controls
from kvevents.cli.output import FORMATS
from kvevents.cli.program import COMMANDS, make_parser


def test_help_lists_every_command() -> None:
    ended = run("--help")
    assert ended.code == 0
    for command in COMMANDS:
        assert re.search(rf"^ +{command.name}\s+{re.escape(command.summary)}", ended.out, re.MULTILINE)
    assert "kvevents doctor tcp://127.0.0.1:5557" in ended.out


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_help_of_a_command_has_examples_that_parse(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args([command, "--help"])
    assert ended.value.code == 0
    examples = capsys.readouterr().out.partition("examples:\n")[2].splitlines()
    assert len(examples) >= 3
    for example in examples:
        parts = [part.split("   ")[0].replace("'", "").split() for part in example.strip().split(" | ")]
        commands = [words for words in parts if words[0] == "kvevents"]
        for words in commands:
            make_parser().parse_args(words[1:])
        assert command in [words[1] for words in commands]


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        ("sources --x", "kvevents sources [OPTIONS] [NAME]"),
        ("record --x", "kvevents record [OPTIONS] ENDPOINT|URL FILE"),
        ("sim run --x", "kvevents sim run [OPTIONS]"),
    ],
)
def test_the_usage_of_a_wrong_command_is_one_line(words: str, usage: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(words.split())
    line, error = capsys.readouterr().err.splitlines()
    assert line == f"usage: {usage} (--help explains it)"
    assert error.endswith("error: unknown option --x")


def test_the_version_is_printed() -> None:
    assert re.fullmatch(r"kvevents \d+\.\d+\.\d+\S*\n", run("--version").out)


@pytest.mark.parametrize(
    "args",
    [
        ["nonsense"],
        ["tail"],
        ["tail", "5557"],
        ["tail", "tcp://127.0.0.1"],
        ["tail", "tcp://127.0.0.1:70000"],
        ["tail", "http://127.0.0.1:0"],
        ["tail", "127.0.0.1:5557", "--type", "stored,moved"],
        ["tail", "127.0.0.1:5557", "--ranks", "0"],
        ["tail", "127.0.0.1:5557", "--ranks", "5000"],
        ["tail", "127.0.0.1:5557", "--quiet", "--token-ids"],
        ["tail", "127.0.0.1:5557", "--replay", "127.0.0.1:5558", "--no-replay"],
        ["tail", "127.0.0.1:5557", "--idle-timeout", "nan"],
        ["tail", "127.0.0.1:5557", "--duration", "-1"],
        ["play", "run.jsonl", "--speed", "fast"],
        ["publish", "--dialect", "llama-1.0"],
        ["publish", "--rate", "0"],
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_code_2_and_a_reason(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from kvevents.cli import main  # noqa: PLC0415

    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2
    assert "usage: kvevents" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ("relay --endpiont x 127.0.0.1:5557", "kvevents relay: error: unknown option --endpiont; did you mean --endpoint?"),
        ("relay --replay-endpoint 0 127.0.0.1:5557", "kvevents relay: error: argument --replay: invalid endpoint '0'"),
        ("tail --replay-endpoint=0 127.0.0.1:5557", "kvevents tail: error: argument --replay: invalid endpoint '0'"),
        ("relay --endpiont=x 127.0.0.1:5557", "kvevents relay: error: unknown option --endpiont; did you mean --endpoint?"),
        ("tail --zzz x 127.0.0.1:5557", "kvevents tail: error: unknown option --zzz"),
        ("tail -z 127.0.0.1:5557", "kvevents tail: error: unknown option -z"),
        ("plane status --ouptut", "kvevents plane status: error: unknown option --ouptut; did you mean --output?"),
        ("sim compare --polcy x", "kvevents sim compare: error: unknown option --polcy; did you mean --policy?"),
        ("sources engine-0 engine-1", "kvevents sources: error: unexpected argument 'engine-1'"),
        ("tail 5557 -- --zzz", "kvevents tail: error: argument ENDPOINT|URL: invalid endpoint '5557'"),
    ],
)
def test_a_misspelled_option_is_reported_rather_than_its_value(
    args: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvevents.cli import main  # noqa: PLC0415

    with pytest.raises(SystemExit) as ended:
        main(args.split())
    assert ended.value.code == 2
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line == expected or last_line.startswith((f"{expected};", f"{expected}:"))


@pytest.mark.parametrize("words", ["play", "publish", "query --prompt-file", "sim compare --trace", "conform ours --scenarios"])
def test_a_file_that_does_not_exist_is_reported_in_one_sentence_with_code_2(words: str, tmp_path: Path) -> None:
    ended = run(*words.split(), tmp_path / "none.jsonl")
    assert (ended.code, ended.out) == (2, "")
    assert re.fullmatch(r"kvevents: cannot (read|use) \S+none\.jsonl: .*No such file.*\n", ended.err)


def test_a_file_with_other_contents_is_an_error_with_code_1(tmp_path: Path) -> None:
    """The command line is right, and the work fails."""
    file = tmp_path / "run.jsonl"
    file.write_text("no recording\n")
    ended = run("play", file)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith(f"kvevents: {file}, line 1: ")


def _parsers() -> Iterator[tuple[str, CommandParser]]:
    """Yield each command, with the parser that has its options."""

    def walk(parser: CommandParser, commands: Iterable[Command | CommandGroup]) -> Iterator[tuple[str, CommandParser]]:
        for command in commands:
            inner = parser._commands.choices[command.name]
            if isinstance(command, CommandGroup):
                yield from walk(inner, command.commands)
            else:
                inner.declare_options([])
                yield command.name, inner

    yield from walk(make_parser(), COMMANDS)


def test_an_option_is_the_same_in_all_commands() -> None:
    """Options of the same name have the same placeholder and the same short form."""
    forms: dict[str, dict[tuple[str, ...], list[str]]] = defaultdict(lambda: defaultdict(list))
    for command, parser in _parsers():
        for action in parser._option_string_actions.values():
            if action.help != SUPPRESS:
                metavar = action.metavar or HelpFormatter("kvevents")._get_default_metavar_for_optional(action)
                placeholder = "" if action.nargs == 0 else str(metavar)
                forms[action.option_strings[-1]][placeholder, *action.option_strings].append(command)
    assert {name: dict(found) for name, found in forms.items() if len(found) > 1} == {}


def test_every_command_with_results_has_the_same_formats() -> None:
    """The others print no tables or records: they run until they are interrupted, or write files."""
    outputs = {name: parser._option_string_actions.get("--output") for name, parser in _parsers()}
    assert {name for name, action in outputs.items() if action is None} == {
        *("record", "publish", "relay", "bridge", "serve", "demo", "completion", "convert")
    }
    for name, action in outputs.items():
        assert action is None or [*(action.choices or ())] == [*FORMATS, *(["junit"] if name == "conform" else [])]


def test_an_endpoint_that_cannot_be_bound_is_reported_in_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    from kvevents.cli import main  # noqa: PLC0415

    assert main(["tail", "ipc:///no/such/directory/kv", "--bind", "--idle-timeout", "0.1"]) == 1
    assert re.search(r"^kvevents: cannot bind ipc:///no/such/directory/kv: .*$", capfd.readouterr().err, re.MULTILINE)


def test_control_characters_from_peers_are_escaped() -> None:
    assert escape_controls("GPU") == "GPU"
    assert escape_controls("a\x1b[2Jb\nc\x07") == r"a\x1b[2Jb\nc\x07"
    assert escape_controls("Gerät 机") == "Gerät 机"
