"""Options, environment variables and TOML tables of a command, derived from the fields of its settings struct.

The field `max_tokens` of the table `limits` in the settings of `kvevents serve` has three names:

- the key `max_tokens` of `[limits]` in the file of `--config`,
- the variable `KVEVENTS_SERVE_LIMITS_MAX_TOKENS`,
- the option `--limits-max-tokens`, unless the command defines a shorter name.

An option overrides a variable, a variable overrides the file, and the file overrides the default. The docstring below the
field is the help text. A list of tables has no option, because it can contain secrets; its variable is a TOML array.

In addition, `serve` and `bridge` have the options of `add_sources`, which name the engines to subscribe to.
"""

from __future__ import annotations

import argparse
import ast
import copy
import inspect
import os
import re
import sys
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, NoReturn, TypeVar, get_args, get_origin

import msgspec

from kvevents.cli.command import CommandLineError, Group
from kvevents.cli.options import CURVE_FLAGS, engine
from kvevents.cli.values import endpoint, engine_url, port, positive_int, positive_seconds, seconds, size, whole_number
from kvevents.diagnosis.text_format import size as size_text
from kvevents.errors import ConfigError, UsageError
from kvevents.settings import (
    Range,
    SettingFault,
    Unit,
    fault_of,
    parse_toml,
    parts_of,
    read_toml,
    suggestion,
    types_in,
    with_path,
)

if TYPE_CHECKING:
    from kvevents.service.settings import EngineSources


T = TypeVar("T", bound=msgspec.Struct)

_TEXT_READERS: Final[dict[Unit, Any]] = {Unit.SECONDS: seconds, Unit.BYTES: size, Unit.PORT: port, Unit.ENDPOINT: endpoint}
_SERVICE_LINK: Final = re.compile(r"SERVICE_(HOST|PORT\w*)|PORT_\d+_\w+|PORT(?==(tcp|udp|sctp)://)")
"""Matches a variable that Kubernetes sets in pods for a Service, from the end of the command's prefix on."""


class Setting:
    """One setting. `path` consists of the keys of its tables and its own key, such as `limits.max_tokens`."""

    def __init__(self, path: str, flag: str, variable: str, kind: Any, default: Any, read_text: Callable[[], str]) -> None:
        parts, self._types = list(parts_of(kind)), list(types_in(kind))
        self.kind: Final = kind
        self.path: Final = path
        self.flag = next((each for each in parts if isinstance(each, str) and each.startswith("--")), flag)
        self.variable: Final = variable
        self.is_tables: Final = any(issubclass(each, msgspec.Struct) for each in self._types)
        lists = [each for each in parts if get_origin(each) in {list, tuple}]
        self.is_list: Final = bool(lists) and self._types == [*types_in(lists[0])]
        self.is_appended: Final = self.is_list and (self.is_tables or Unit.FILE in parts)
        """Whether the values of file, variable and option are concatenated; if false, one value overrides the others."""
        self._range: Final = next((each for each in parts if isinstance(each, Range)), Range())
        self._unit: Final = next((each for each in parts if isinstance(each, Unit)), None)
        self._choices: Final = next((get_args(each) for each in parts if get_origin(each) is Literal), None)
        self._default: Final = default
        self._read_text: Final = read_text

    def read(self, text: str) -> Any:
        """Return the value of a text; if the setting is a list, the text is one item. Raises `ConfigError`."""
        if self._unit is Unit.SECONDS and self._range.is_open:
            return positive_seconds(text)
        if self._unit in _TEXT_READERS:
            return _TEXT_READERS[self._unit](text)
        if int in self._types:
            return positive_int(text) if self._range.least >= 1 else whole_number(text)
        kind: Any = Literal[self._choices] if self._choices else self._types[0]
        try:
            return msgspec.convert(text, kind, strict=False)
        except msgspec.ValidationError as error:
            reason = f"expected {', '.join(self._choices)}" if self._choices else str(error)
            raise ConfigError(f"invalid value {text!r}: {reason}") from error

    def read_variable(self, text: str) -> Any:
        """Return the value of an environment variable. Raises `ConfigError`."""
        try:
            if self.is_tables or (self.is_list and text.lstrip().startswith("[")):
                return parse_toml(f"value = {text}")["value"]
            return [self.read(each.strip()) for each in text.split(",")] if self.is_list else self.read(text)
        except ValueError as error:
            raise ConfigError(f"{self.variable}: {error}") from error

    def add_to(self, group: ArgumentParser | Group, *, shown: bool = True) -> argparse.Action:
        """Declare the option without a help text; `--help` omits the option unless `shown` is true."""
        hidden = argparse.SUPPRESS
        options: dict[str, Any] = {"dest": self.path, "default": argparse.SUPPRESS, "help": None if shown else hidden}
        if bool in self._types:
            return group.add_argument(self.flag, action=BooleanOptionalAction, **options)
        if self._choices:
            return group.add_argument(self.flag, choices=self._choices, **options)
        name = "N" if int in self._types else "X" if float in self._types else re.split(r"[._]", self.path)[-1].upper()
        options |= {"type": self._argument, "metavar": self._unit.value if self._unit else name}
        return group.add_argument(self.flag, action="append" if self.is_list else "store", **options)

    @property
    def help(self) -> str:
        """Return the help text, with the default."""
        shown: Any = self._default
        if shown is msgspec.NODEFAULT or isinstance(shown, bool) or shown in (None, "", (), []):
            default = ""
        elif self._unit is Unit.BYTES:
            default = size_text(shown)
        else:
            default = f"{shown:g}" if isinstance(shown, float) else ", ".join(shown) if self.is_list else str(shown)
        return (self._read_text() + (f" (default: {default})" if default else "")).replace("%", "%%")

    def _argument(self, text: str) -> Any:
        if self._unit is Unit.SECRET:
            hint = f"set {self.variable}, or write it in the file of --config"
            raise ConfigError(f"all users of this machine can read arguments; {hint}")
        return self.read(text)


class SettingsParser(Generic[T]):
    """Declares and reads the settings of one command, which are the fields of the struct `kind`.

    A field's annotation can name its option. `flags` maps paths of settings to other names of options, `defaults` to other
    default values, and `hints` to the ends of errors about missing settings. `tables` maps tables to prefixes of options. The
    command does not have the settings in `excluded_paths`. `file_table` is the table of the file that contains the settings;
    None for the top of the file.
    """

    def __init__(
        self,
        kind: type[T],
        command: str,
        *,
        flags: Mapping[str, str] | None = None,
        tables: Mapping[str, str] | None = None,
        hints: Mapping[str, str] | None = None,
        defaults: Mapping[str, Any] | None = None,
        excluded_paths: Collection[str] = (),
        file_table: str | None = None,
    ) -> None:
        self.kind: Final = kind
        self.hints: Final = hints or {}
        self.defaults: Final = defaults or {}
        self.file_table: Final = file_table
        self.alternatives: Final[list[str]] = []
        """Paths of settings that exclude each other: a new value for one of them removes the values of the others."""
        self._prefix: Final = f"KVEVENTS_{command.upper()}_"
        self._flags: Final = flags or {}
        self._tables: Final = tables or {}
        settings = (each for each in self._settings(kind, "") if each.path not in excluded_paths)
        self.settings: Final = {each.path: each for each in settings}
        self._undeclared = dict(self.settings)
        """The settings for which `add` has not declared an option."""
        self._shown: Final[list[tuple[Setting, argparse.Action]]] = []
        """Settings that `--help` shows, with their declared options."""

    def add(self, group: ArgumentParser | Group, *paths: str) -> None:
        """Declare the options of these settings."""
        for setting in map(self._undeclared.pop, paths):
            self._shown.append((setting, setting.add_to(group)))

    def add_positional(self, parser: ArgumentParser, path: str, metavar: str) -> None:
        """Declare positional arguments for a setting that is a list of texts."""
        action = parser.add_argument(path, metavar=metavar, nargs="*", default=argparse.SUPPRESS)
        self._shown.append((self._undeclared.pop(path), action))

    def add_help_texts(self) -> None:
        """Add the help texts to the declared options. Only `--help` needs this method, which reads the source code."""
        for setting, action in self._shown:
            action.help = setting.help

    def add_other_settings(self, parser: ArgumentParser, file: str = "TOML file of settings") -> None:
        """Declare `--config`, and options for all settings that have no option yet; only `--help-all` shows those options."""
        parser.add_argument("-c", "--config", type=Path, help=file)
        group = parser.add_argument_group("all other settings")
        hidden = [(each, each.add_to(group, shown=False)) for each in self._undeclared.values() if not each.is_tables]

        class HelpAll(argparse.Action):
            def __call__(self, parser: ArgumentParser, *_: Any) -> NoReturn:
                for setting, action in hidden:
                    action.help = f"{setting.help} [{setting.variable}]"
                parser.print_help()
                parser.exit()

        text = f"show the options and variables of all settings; variables begin with {self._prefix}"
        parser.add_argument("--help-all", action=HelpAll, nargs=0, default=argparse.SUPPRESS, help=text)
        parser.set_defaults(settings=self)

    def read(self, args: Namespace, environ: Mapping[str, str] = os.environ) -> SettingsValues[T]:
        """Return the values of the file, the environment and the options. Raises `ConfigError`."""
        given = SettingsValues(self, args.config)
        given.put(self._read_variables(environ))
        options = {path: GivenValue(getattr(args, path), each.flag) for path, each in self.settings.items() if path in args}
        given.put(options)
        return given

    def _read_variables(self, environ: Mapping[str, str]) -> dict[str, GivenValue]:
        known = {each.variable: each for each in self.settings.values()}
        values: dict[str, GivenValue] = {}
        for name, text in environ.items():
            if not name.startswith(self._prefix) or _SERVICE_LINK.match(f"{name.removeprefix(self._prefix)}={text}"):
                continue
            if name not in known:
                raise ConfigError(f"unknown variable {name}{suggestion(name, known).removesuffix(';')}")
            setting = known[name]
            values[setting.path] = GivenValue(setting.read_variable(text), name)
        return values

    def _settings(self, kind: type[msgspec.Struct], table: str) -> Iterator[Setting]:
        self.alternatives.extend(f"{table}.{name}".lstrip(".") for name in getattr(kind, "ALTERNATIVES", ()))
        for field in msgspec.structs.fields(kind):
            path = f"{table}.{field.name}" if table else field.name
            inner = next((each for each in types_in(field.type) if issubclass(each, msgspec.Struct)), None)
            if inner is not None and not any(get_origin(each) in {list, tuple} for each in parts_of(field.type)):
                yield from self._settings(inner, path)
                continue
            prefix = self._tables.get(table, table)
            flag = "--" + re.sub(r"[._]", "-", f"{prefix}.{field.name}" if prefix else field.name)
            variable = self._prefix + (path if prefix else field.name).upper().replace(".", "_")
            default = self.defaults.get(path, field.default)
            setting = Setting(path, flag, variable, field.type, default, partial(_help_text, kind, field.name))
            setting.flag = self._flags.get(path, setting.flag)
            yield setting


class GivenValue(NamedTuple):
    """The value of a setting from an option or a variable."""

    value: Any
    origin: str
    """Name of the option or variable."""


class SettingsValues(Generic[T]):
    """The values of a command's settings before they are checked, as nested tables, and the origin of each value."""

    def __init__(self, parser: SettingsParser[T], file: Path | None) -> None:
        table = {} if file is None else read_toml(file)
        if parser.file_table is not None:
            table = table.get(parser.file_table, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{file}: {parser.file_table} is not a table")
        self.in_file: Final[dict[str, Any]] = table
        self._tables: Final = {**parser.defaults, **copy.deepcopy(self.in_file)}
        self._parser: Final = parser
        self._file: Final = file
        self._origins: dict[str, str] = {}

    def put(self, values: Mapping[str, GivenValue]) -> None:
        """Store values; the keys of `values` are the paths of settings."""
        if not values.keys().isdisjoint(self._parser.alternatives):
            for path in self._parser.alternatives:
                table, name = self._find_table(path)
                table.pop(name, None)
                self._origins.pop(path, None)
        for path, (value, origin) in values.items():
            table, name = self._find_table(path, make=True)
            known = table.get(name, [])
            if not self._parser.settings[path].is_appended:
                table[name] = value
            elif isinstance(known, list):  # If the file's value is no list, `settings` raises the error.
                table[name] = [*known, *value]
            self._origins[path] = origin

    def __contains__(self, path: str) -> bool:
        """Whether a setting or a table has a value that is not its default."""
        table, name = self._find_table(path)
        return bool(table.get(name))

    def origin(self, path: str) -> str | None:
        """Return the option, the variable or the file of a value that is not the default; both if both add to the value."""
        file = None if self._file is None else str(self._file)
        given = [each for each in (self._origins.get(path), file) if each is not None]
        return " or ".join(given[: 2 if self._parser.settings[path].is_appended else 1]) or None

    def settings(self) -> T:
        """Return the checked settings. Raises `ConfigError`, which names the origin of the value, and `CommandLineError`."""
        try:
            return msgspec.convert(self._tables, self._parser.kind)
        except msgspec.ValidationError as error:
            raise self._error(fault_of(error, self._parser.kind)) from error

    def _find_table(self, path: str, *, make: bool = False) -> tuple[dict[str, Any], str]:
        """Return the table and the key of a setting. Keep a value that is not a table, so that an error reports the value."""
        table = self._tables
        *tables, name = path.split(".")
        for each in tables:
            inner = table.setdefault(each, {}) if make else table.get(each, {})
            table = inner if isinstance(inner, dict) else {}
        return table, name

    def _error(self, fault: SettingFault) -> UsageError:
        """Return the error for an invalid value, with the origin of the value if the origin is known."""
        origins = [origin for path, origin in self._origins.items() if path.startswith(f"{fault.place}.")]
        flags = [origin for origin in origins if origin.startswith("--")]
        if fault.missing is not None and flags:
            path = f"{fault.place}.{fault.missing}"
            needed = f"{self._parser.settings[path].flag}{self._parser.hints.get(path, '')}"
            return CommandLineError(f"{', '.join(flags)} needs {needed}")
        first = re.match(r"[\w.]*", fault.sentence)
        name = first[0].rpartition(".")[2] if first is not None else ""
        path, _, rest = fault.place.partition("[")
        index = rest.partition("]")[0]
        is_of_file = index.isdecimal() and int(index) < len(self.in_file.get(path, ()))
        origin = self._origins.get(path) or self._origins.get(f"{path}.{name}" if path else name)
        if origin is not None and not is_of_file:
            begins_with_name = fault.sentence.startswith(f"{name} ")
            return ConfigError(f"{origin}{fault.sentence.removeprefix(name) if begins_with_name else f': {fault.sentence}'}")
        if self._file is not None:
            return ConfigError(f"{self._file}: {with_path(fault, self._parser.kind)}")
        return ConfigError(f"{', '.join(origins)}: {fault.sentence}" if origins else fault.sentence)


def field_docstring(kind: type, name: str) -> str:
    """Return, on one line, the docstring below a field of a class or its base classes; empty without a docstring."""
    found = next((text for base in kind.__mro__ if (text := _docstrings_of(base.__module__).get((base.__name__, name)))), "")
    return " ".join(found.split())


def _help_text(kind: type, name: str) -> str:
    """Return the first sentence of a field's docstring, without the full stop, and with a small first letter."""
    sentence = re.split(r"\.(?:\s|$)", field_docstring(kind, name), maxsplit=1)[0]
    return sentence[:1].lower() + sentence[1:] if not sentence[1:2].isupper() else sentence


@cache
def _docstrings_of(module: str) -> dict[tuple[str, str], str]:
    """Map class and field to the docstring below the field; empty if the source file does not exist."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):
        return {}
    return {
        (each.name, field.target.id): after.value.value
        for each in tree.body
        if isinstance(each, ast.ClassDef)
        for field, after in pairwise(each.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
    }


# --- engines and the plane

Sources = TypeVar("Sources", bound="EngineSources")

LOGIN_SETTINGS: Final = tuple(
    f"plane.{name}" for name in ("credentials", "nkey", "tls_ca", "tls_certificate", "tls_key", "inbox_prefix")
)
"""Paths of the settings for the login at a plane's NATS servers."""
SHARED_FLAGS: Final = CURVE_FLAGS | {"plane.servers": "--nats"}
"""Maps paths of settings to their options, for the options that have the same name in all commands."""


def worker_source(text: str) -> dict[str, Any]:
    """Return the registration that `INSTANCE[:RANK]=ENDPOINT[,REPLAY_ENDPOINT]` describes."""
    if "=" not in text:
        raise ConfigError(f"invalid worker {text!r}: expected NAME=tcp://HOST:PORT")
    source = engine(text)
    replay = {} if source.replay_endpoint in {None, source.endpoint} else {"replay_endpoint": source.replay_endpoint}
    return {"instance": source.name, "rank": source.rank, "endpoint": source.endpoint, **replay}


def dns_source(text: str) -> dict[str, Any]:
    """Return the settings of `TARGET[,REPLAY_PORT]`. Each engine answers replay requests at its own host."""
    target, comma, replay = text.partition(",")
    return {"target": target} | ({"replay_endpoint": f"tcp://*:{port(replay)}"} if comma else {})


def add_sources(parser: ArgumentParser | Group, settings: SettingsParser[Any]) -> None:
    """Declare the options for the engines to subscribe to; `read_sources` reads them."""
    text = "subscribe to this engine, whose model and block size are --model and --block-size; can be repeated"
    form = "NAME[:RANK]=ENDPOINT[,REPLAY]"
    parser.add_argument("--worker", dest="workers", action="append", default=[], type=worker_source, metavar=form, help=text)
    text = "subscribe to the engine whose HTTP server at http://HOST:PORT returns the endpoints; can be repeated"
    parser.add_argument("--engine", dest="engines", action="append", default=[], type=engine_url, help=text)
    text = (
        "subscribe to the engines that a DNS name resolves to: HOST:PORT or _service._tcp.NAME; with REPLAY_PORT, as in "
        "HOST:5557,5558, lost batches are repaired, without it no stream is EXACT; can be repeated"
    )
    form = "NAME[,REPLAY_PORT]"
    parser.add_argument("--dns", dest="names", action="append", default=[], type=dns_source, metavar=form, help=text)
    settings.add(parser, "kubernetes.selector", "kubernetes.namespaces", "kubernetes.pools", "source_files")
    parser.add_argument("--model", metavar="NAME", help="model of --worker, --engine and --dns")
    parser.add_argument("--block-size", type=positive_int, help="tokens per block of --worker and --dns (default: as received)")


def read_sources(given: SettingsValues[Sources], args: Namespace) -> Sources:
    """Return the settings with the engines of `add_sources`, but without the engines in the file of `--config`.

    The service watches that file, and reads its engines itself. This function only checks these engines, so that the start
    fails if an engine is invalid. Raises `ConfigError` and `CommandLineError`.
    """
    model = {} if args.model is None else {"model": args.model}
    common = model | ({} if args.block_size is None else {"block_size": args.block_size})
    if common and not (args.workers or args.engines or args.names):
        raise CommandLineError("--model and --block-size need --worker, --engine or --dns: files state them themselves")
    if args.workers and not model:
        raise CommandLineError("--worker needs --model: clients ask for the workers of a model")
    sources = [{**each, **common} for each in args.workers] + [{"base_url": each, **model} for each in args.engines]
    options = "--worker" if args.workers else "--engine"
    named = {"sources": GivenValue(sources, options), "dns": GivenValue([{**each, **common} for each in args.names], "--dns")}
    given.put({path: value for path, value in named.items() if value.value})
    settings = given.settings()
    return msgspec.structs.replace(settings, sources=settings.sources[len(given.in_file.get("sources", ())) :])


def add_check(parser: ArgumentParser) -> None:
    """Declare `--check`, which makes a command check its settings and exit."""
    parser.add_argument("--check", action="store_true", help="check the settings, and exit")
