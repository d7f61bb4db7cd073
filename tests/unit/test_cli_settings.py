"""Every setting has the same value by option, variable and file, and an error names where the wrong value was set."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvevents.cli import relay, serve, sim_compare
from kvevents.cli.command import CommandLineError, CommandParser
from kvevents.cli.settings_parser import Setting, SettingsParser, SettingsValues, read_sources
from kvevents.errors import ConfigError
from kvevents.settings import Range, Unit, parts_of
from kvevents.sim.costs import PRESETS
from kvevents_plane.cli import bridge, status

COMMANDS: dict[str, Any] = {"serve": serve, "bridge": bridge, "relay": relay, "plane": status, "compare": sim_compare}
"""The module of each command."""
SUBJECTS = st.text("abc", min_size=1, max_size=8)


@cache
def make_parser(command: str) -> CommandParser:
    parser = CommandParser(command)
    COMMANDS[command].add_arguments(parser)
    return parser


def parse(command: str, *words: str) -> Namespace:
    return make_parser(command).parse_args(words)


def settings_parser_of(command: str) -> SettingsParser[Any]:
    found: SettingsParser[Any] = parse(command).settings
    return found


def read_tables(given: SettingsValues[Any]) -> dict[str, Any]:
    return given._tables


ALL = [(command, path) for command in COMMANDS for path in settings_parser_of(command).settings]


def values(setting: Setting) -> st.SearchStrategy[Any]:
    """Return a strategy for values that a setting can have by its type; rules between settings are not considered."""
    parts = [*parts_of(setting.kind)]
    limits = next((each for each in parts if isinstance(each, Range)), Range())
    if choices := next((get_args(each) for each in parts if get_origin(each) is Literal), ()):
        return st.sampled_from(choices)
    if setting.is_tables:
        return st.lists(st.dictionaries(SUBJECTS, st.integers(0, 9) | SUBJECTS, min_size=1), min_size=1, max_size=3)
    one: st.SearchStrategy[Any] = SUBJECTS
    if bool in parts:
        one = st.booleans()
    elif int in parts:
        one = st.integers(int(limits.least), int(min(limits.most, 1 << 40)))
    elif float in parts:
        one = st.floats(limits.least, min(limits.most, 1e9), exclude_min=limits.is_open)
    elif Unit.ENDPOINT in parts:
        one = st.integers(1, 65535).map(lambda port: f"tcp://h:{port}")
    elif setting.path == "upstreams":
        one = st.integers(1, 65535).map(lambda port: f"h:{port}")
    return st.lists(one, min_size=1, max_size=3) if setting.is_list else one


def format_value(value: Any) -> str:
    """Return a value as TOML, which is also the text for an option; floats are not rounded."""
    if isinstance(value, list):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {format_value(each)}' for key, each in value.items())}}}"
    return json.dumps(value) if isinstance(value, str | bool) else repr(value)


def format_option(setting: Setting, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [setting.flag if value else setting.flag.replace("--", "--no-", 1)]
    if setting.path == "upstreams":
        return list(value)
    return [f"{setting.flag}={each}" for each in (value if setting.is_list else [value])]


def write_file(settings_parser: SettingsParser[Any], path: str, value: Any, folder: Path) -> Path:
    *tables, name = [*([settings_parser.file_table] if settings_parser.file_table else []), *path.split(".")]
    head = f"[{'.'.join(tables)}]\n" if tables else ""
    file = folder / "settings.toml"
    file.write_text(f"{head}{name} = {format_value(value)}\n")
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("settings")


@pytest.mark.parametrize(("command", "path"), ALL, ids=str)
@given(data=st.data())
@settings(max_examples=5, deadline=None)
def test_a_setting_is_the_same_by_option_variable_and_file(command: str, path: str, data: st.DataObject, folder: Path) -> None:
    """Secrets and lists of tables have no option: all users of a machine can read arguments, and tables can hold secrets."""
    settings_parser = settings_parser_of(command)
    setting = settings_parser.settings[path]
    value = data.draw(values(setting))
    readings = [settings_parser.read(parse(command, "--config", str(write_file(settings_parser, path, value, folder))), {})]
    text = format_value(value) if setting.is_list or isinstance(value, bool) else str(value)
    readings.append(settings_parser.read(parse(command), {setting.variable: text}))
    if Unit.SECRET not in parts_of(setting.kind) and not setting.is_tables:
        readings.append(settings_parser.read(parse(command, *format_option(setting, value)), {}))
    first, *others = map(read_tables, readings)
    assert all(each == first for each in others)
    assert path in readings[0] or value in (0, False)


@pytest.mark.parametrize(("command", "path"), ALL, ids=str)
def test_a_setting_has_a_help_text(command: str, path: str) -> None:
    setting = settings_parser_of(command).settings[path]
    assert setting.is_tables or len(setting.help) > 8
    assert "\n" not in setting.help


def make_settings(**given: Any) -> Any:
    return settings_parser_of("relay").kind(**given)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "c.toml"


def test_options_override_variables_which_override_the_file_and_the_defaults(file: Path) -> None:
    file.write_text("upstreams = ['h:1']\nhwm = 2\nbuffer_steps = 2\nheartbeat = 2\n")
    variables = {"KVEVENTS_RELAY_HWM": "3", "KVEVENTS_RELAY_HEARTBEAT": "3", "KVEVENTS_SERVE_PORT": "x", "OTHER": "1"}
    args = parse("relay", "--config", str(file), "--heartbeat", "4")
    found = args.settings.read(args, variables).settings()
    assert found == make_settings(upstreams=("h:1",), buffer_steps=2, hwm=3, heartbeat=4.0)


def test_engines_of_the_variable_and_the_options_are_combined(file: Path) -> None:
    """Engines of the settings file are not returned here, because the file watcher provides them."""
    file.write_text("source_files = ['a']\n[[sources]]\nendpoint = 'tcp://h:1'\nmodel = 'm'\n")
    args = parse("serve", "--config", str(file), "--sources", "c", "--worker", "x=h:3", "--model", "m")
    variables = {"KVEVENTS_SERVE_SOURCE_FILES": "b", "KVEVENTS_SERVE_SOURCES": "[{endpoint = 'tcp://h:2', model = 'm'}]"}
    found = read_sources(args.settings.read(args, variables), args)
    assert found.source_files == ["a", "b", "c"]
    assert [each.endpoint for each in found.sources] == ["tcp://h:2", "tcp://h:3"]


def test_a_login_of_an_option_replaces_that_of_the_file(file: Path) -> None:
    file.write_text("[plane]\nservers = ['nats://h:1']\ntoken = 't'\n")
    args = parse("bridge", "--config", str(file), "--nkey", "seed")
    assert read_tables(args.settings.read(args, {}))["plane"] == {"servers": ["nats://h:1"], "nkey": "seed"}


def wrong_settings() -> Iterator[Any]:
    yield "serve", [], {}, "ready = 3", "FILE: ready: Expected `object`, got `int`"
    yield (
        "serve",
        [],
        {},
        "[limits]\nmax_token = 3",
        "FILE: limits: unknown field 'max_token'; did you mean 'max_tokens'?",
    )
    yield "serve", [], {}, "[limits]\nmax_tokens = 0", "FILE: limits.max_tokens is 0; it must be at least 1"
    yield "serve", ["--ready-quorum", "2"], {}, "", "--ready-quorum is 2.0; it must be"
    yield "serve", [], {"READY_QUORUM": "2"}, "", "KVEVENTS_SERVE_READY_QUORUM is 2.0; it must be"
    yield (
        "serve",
        [],
        {"LIMITS_MAX_TOKENS": "x"},
        "",
        "KVEVENTS_SERVE_LIMITS_MAX_TOKENS: invalid value 'x': expected a whole number above 0",
    )
    yield "serve", [], {"READY_QUORUM": "x"}, "", "KVEVENTS_SERVE_READY_QUORUM: invalid value 'x': Expected `float`"
    yield (
        "serve",
        [],
        {"LIMITS_MAX_TOKEN": "1"},
        "",
        "unknown variable KVEVENTS_SERVE_LIMITS_MAX_TOKEN; did you",
    )
    yield "serve", [], {"INSECURE": "perhaps"}, "", "KVEVENTS_SERVE_INSECURE: invalid value 'perhaps': Expected `bool`"
    yield "serve", [], {"ACCESS_ANONYMOUS": "x"}, "", "KVEVENTS_SERVE_ACCESS_ANONYMOUS: invalid value 'x': expected none, read"
    yield "serve", [], {"SOURCES": "[{"}, "", "KVEVENTS_SERVE_SOURCES: "
    yield "serve", [], {}, "a = " + "[" * 100_000, "cannot read FILE: maximum recursion depth"
    yield "serve", ["--host", "10.0.0.1"], {}, "", "--host 10.0.0.1 is reachable from other machines"
    yield "serve", ["--ready-quorum", "2"], {}, "", "--ready-quorum is 2.0; it must be from 0 to 1"
    yield "serve", ["--tls-cert", "x"], {}, "", "--tls-cert needs --nats, the URL of a NATS server; for HTTPS use --https-cert"
    yield "serve", [], {"TLS_KEY": "x"}, "", "KVEVENTS_SERVE_TLS_KEY: missing field 'certificate'"
    yield "serve", ["--dns", "h:1"], {}, "[[dns]]\ntarge = 1", "FILE: dns[0]: unknown field 'targe'; did you mean 'target'?"
    yield (
        "bridge",
        ["--nats", "nats://h:1", "--partitions", "1000"],
        {},
        "",
        "--partitions is 1000; it must be from 1 to 256",
    )
    yield "relay", ["h:1"], {}, "upstream = 1", "FILE: unknown field 'upstream'; did you mean 'upstreams'?"
    yield "relay", ["h:1", "--curve-server-key", "k"], {}, "", "--curve-server-key: curve needs key_file"
    yield "plane", [], {}, "[plane]\nserver = 1", "FILE: unknown field 'server'; did you mean 'servers'?"
    yield "plane", [], {}, "plane = 1", "FILE: plane is not a table"
    yield "compare", [], {}, "engine = 1", "FILE: unknown field 'engine'; did you mean 'engines'?"


def check(args: Namespace, environ: dict[str, str]) -> Any:
    given: SettingsValues[Any] = args.settings.read(args, environ)
    return read_sources(given, args) if "workers" in args else given.settings()


@pytest.mark.parametrize(("command", "words", "variables", "text", "message"), [*wrong_settings()])
def test_an_error_names_where_the_wrong_value_was_set(
    command: str, words: list[str], variables: dict[str, str], text: str, message: str, file: Path
) -> None:
    file.write_text(text)
    args = parse(command, *words, *(["--config", str(file)] if text else []))
    name = "SIM" if command == "compare" else command.upper()
    environ = {f"KVEVENTS_{name}_{variable}": value for variable, value in variables.items()}
    with pytest.raises((ConfigError, CommandLineError)) as caught:
        check(args, environ)
    assert str(caught.value).startswith(message.replace("FILE", str(file))), str(caught.value)


def test_a_secret_is_rejected_as_an_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("bridge", "--plane-token", "hunter2")
    message = capsys.readouterr().err
    assert (
        "all users of this machine can read arguments; set KVEVENTS_BRIDGE_PLANE_TOKEN, or write it in the file of --config"
        in message
    )
    assert "hunter2" not in message


def test_variables_that_kubernetes_sets_for_a_service_are_ignored() -> None:
    """For a Service of our name, Kubernetes sets variables in each pod that begin like ours."""
    links = {"SERVICE_HOST": "10.0.0.1", "SERVICE_PORT": "80", "SERVICE_PORT_HTTP": "80", "PORT": "tcp://10.0.0.1:80"}
    links |= {"PORT_80_TCP": "tcp://10.0.0.1:80", "PORT_80_TCP_ADDR": "10.0.0.1", "PORT_80_TCP_PROTO": "tcp"}
    args = parse("serve")
    assert read_tables(args.settings.read(args, {f"KVEVENTS_SERVE_{name}": value for name, value in links.items()})) == {}
    assert args.settings.read(args, {"KVEVENTS_SERVE_PORT": "80"}).settings().port == 80


@pytest.mark.parametrize("command", COMMANDS)
def test_help_all_has_every_setting_and_help_is_short(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` prints fewer than 110 lines, and `--help-all` every option."""
    with pytest.raises(SystemExit):
        parse(command, "--help")
    assert len(capsys.readouterr().out.splitlines()) < 110
    with pytest.raises(SystemExit) as ended:
        parse(command, "--help-all")
    assert ended.value.code == 0
    full_help = capsys.readouterr().out
    for setting in settings_parser_of(command).settings.values():
        assert setting.is_tables or setting.path == "upstreams" or f"{setting.flag} " in full_help, setting.path


def test_the_help_names_the_presets() -> None:
    help_text = settings_parser_of("compare").settings["preset"].help
    assert not [preset for preset in PRESETS if preset not in help_text]
