"""Parts of pages that are generated while the site is built: options, settings, HTTP, dialects, reasons, Python API.

`tools.docs_site` puts the text of `GENERATED[name]` in place of the line `<!-- generated: name -->` of a page.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from kvevents.cli.command import Command, CommandGroup, CommandParser
from kvevents.cli.program import COMMANDS, make_parser
from kvevents.cli.settings_parser import Setting, SettingsParser, field_docstring
from kvevents.client.reasons import Reason
from kvevents.export import TABLES
from kvevents.service.http.routes import ENDPOINTS, Route, openapi_document
from kvevents.settings import Range, parts_of, types_in
from kvevents.wire.dialects import Dialect, dialects
from tools.docs_extensions import extension_points, internal_extension_points, moved_from

WIDTH: Final = 110
"""Columns of help texts."""

API: Final = {
    "kvevents": "Events, publishers and subscribers: all that routers and engines import first",
    "kvevents.events": "Types of events and batches",
    "kvevents.errors": "Exceptions; all derive from `KVEventsError`",
    "kvevents.publisher": "Publishers with a replay buffer",
    "kvevents.subscriber": "Subscribers for threads and for asyncio, and their options",
    "kvevents.stream": "One stream as a state machine without I/O",
    "kvevents.wire": "Decode and encode payloads of every engine release",
    "kvevents.index": "The prefix index",
    "kvevents.routing": "Routing policies, and readings of engines' loads",
    "kvevents.compat.vllm": "The names of `vllm.distributed.kv_events` of vLLM 0.33",
    "kvevents.compat.sglang": "The names of `sglang.srt.disaggregation.kv_events` of SGLang 0.5.23",
    "kvevents.client": "Clients of a service, blocking and asyncio",
    "kvevents.client.schemas": "Types of a service's requests and answers",
    "kvevents.relay": "The relay as a library",
    "kvevents.zeromq.keys": "CURVE keys",
    "kvevents.recording": "Recordings of streams",
    "kvevents.export": "Recordings as Parquet tables",
    "kvevents.sim": "Simulated engines and fleets",
    "kvevents.sim.workloads": "Requests for simulated fleets",
    "kvevents.testing": "Tape player, fault proxy, in-memory transport, virtual clock",
}
"""Public modules, and what each is for."""


def api_pages() -> dict[str, str]:
    """Return a page for each public module, by its path in the site."""
    pages = {
        f"reference/api/{module}.md": f"# {module}\n\n{text}.\n\n::: {module}\n    options:\n      show_root_heading: false\n"
        for module, text in API.items()
    }
    for module in API:
        if moved := moved_from(module):
            pages[f"reference/api/{module}.md"] += f'      filters: ["!^_", "!^({"|".join(moved)})$"]\n'
    pages["reference/api/kvevents.subscriber.md"] += "\n::: kvevents.subscriber.front_end.Options\n"
    return pages


def api() -> str:
    """Return a table of the public modules."""
    return table(("module", "what it is for"), ((f"[{module}](api/{module}.md)", text) for module, text in API.items()))


def readme() -> str:
    """Return the README's description of kvevents for the home page of the site, which has its own list of first steps."""
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    parts = {part.partition("\n")[0]: part for part in text.split("\n## ")}
    chosen = (parts[title] for title in ("# kvevents", "Install", "Try it", "When not to use it"))
    return "\n## ".join(chosen).removeprefix("# kvevents\n").replace("](docs/", "](")


def table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(_cell(text) for text in line)} |" for line in lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


# --- commands ----------------------------------------------------------------------------------------------------------------


def all_commands() -> Iterator[tuple[tuple[str, ...], Command]]:
    """Yield each command that runs something, with its words."""
    for command in COMMANDS:
        if isinstance(command, CommandGroup):
            yield from (((command.name, subcommand.name), subcommand) for subcommand in command.commands)
        else:
            yield (command.name,), command


def commands() -> str:
    """Return the help text of each command."""
    return "\n".join(
        f"### kvevents {' '.join(words)}\n\n```text\n{help_of(*words).strip()}\n```\n" for words, _ in all_commands()
    )


def help_of(*words: str) -> str:
    """Return what `kvevents WORDS --help` prints on a terminal of `WIDTH` columns."""
    printed, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(WIDTH)
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            make_parser().parse_args([*words, "--help"])
    finally:
        if columns is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = columns
    return printed.getvalue()


# --- settings ----------------------------------------------------------------------------------------------------------------


def settings() -> str:
    """Return a table of settings for each command that has any."""
    sections = []
    for words, command in all_commands():
        parser = CommandParser(" ".join(words))
        command.load(parser.prog).add_arguments(parser)
        of_command: SettingsParser[Any] | None = parser.get_default("settings")
        if of_command is not None:
            options = frozenset(parser._option_string_actions)  # noqa: SLF001 - argparse has no public list of them
            rows = (row for setting in of_command.settings.values() for row in _setting_rows(setting, options))
            sections.append(f"## kvevents {' '.join(words)}\n\n{table(('key', 'option', 'variable', 'meaning'), rows)}")
    return "\n".join(sections)


def _setting_rows(setting: Setting, options: frozenset[str]) -> Iterator[tuple[str, ...]]:
    text = setting.help.replace("%%", "%")
    limits = next((str(part) for part in parts_of(setting.kind) if isinstance(part, Range)), "")
    meaning = f"{text}; {limits}" if limits and limits != "at least 0" else text
    option = f"`{setting.flag}`" if setting.flag in options else ""
    yield f"`{setting.path}`", option, f"`{setting.variable}`", meaning
    if setting.is_tables:
        yield from _table_rows(f"{setting.path}[]", setting.kind)


def _table_rows(path: str, kind: Any) -> Iterator[tuple[str, ...]]:
    """Yield the fields of a table in a list of tables, and of the tables in it."""
    for struct in {type_: None for type_ in types_in(kind) if issubclass(type_, msgspec.Struct)}:
        for field in msgspec.structs.fields(struct):
            default = field.default
            suffix = "" if default in (msgspec.NODEFAULT, None, "", (), False) else f" (default: {default})"
            yield f"`{path}.{field.name}`", "", "", field_docstring(struct, field.name).rstrip(".") + suffix
            yield from _table_rows(f"{path}.{field.name}", field.type)


# --- HTTP --------------------------------------------------------------------------------------------------------------------


def http() -> str:
    """Return each endpoint with its parameters, then each type of a body with its fields."""
    document = openapi_document()
    operations = "\n".join(_operation(endpoint, document) for endpoint in ENDPOINTS)
    kinds = _structs(*(kind for endpoint in ENDPOINTS for kind in (endpoint.body, endpoint.answer)))
    schemas = document["components"]["schemas"]
    types = "\n".join(_schema(name, schema, kinds.get(name)) for name, schema in sorted(schemas.items()))
    return f"## Endpoints\n\n{operations}\n## Types\n\n{types}"


def _operation(endpoint: Route, document: dict[str, Any]) -> str:
    operation = document["paths"][endpoint.path][endpoint.method.lower()]
    role = "It needs no token." if endpoint.role is None else f"It needs the role `{endpoint.role}`."
    body = operation.get("requestBody", {}).get("content", {})
    takes = [_type(body["application/json"]["schema"])] if body else []
    takes += ["token ids as unsigned 32-bit little-endian numbers"] if "application/octet-stream" in body else []
    answer = operation["responses"][str(endpoint.status)]["content"]
    gives = [f"{_type(content['schema'])} as `{media}`".removeprefix(" as ") for media, content in answer.items()]
    lines = [f"### {endpoint.method} {endpoint.path}", "", f"{operation['summary']} {role}", ""]
    lines += [f"Body: {' or '.join(takes)}.", ""] if takes else []
    lines += [f"Answer: {endpoint.status}, {', '.join(gives)}.", ""]
    if operation["parameters"]:
        rows = (
            (f"`{field['name']}`", _type(field["schema"]), field["description"] + (" (required)" if field["required"] else ""))
            for field in operation["parameters"]
        )
        lines.append(table(("parameter", "type", "meaning"), rows))
    return "\n".join(lines) + "\n"


def _structs(*kinds: Any) -> dict[str, type[msgspec.Struct]]:
    """Return these structs and all in their fields, by name."""
    structs: dict[str, type[msgspec.Struct]] = {}
    waiting = list(kinds)
    while waiting:
        for type_ in types_in(waiting.pop()):
            if issubclass(type_, msgspec.Struct) and type_.__name__ not in structs:
                structs[type_.__name__] = type_
                waiting += [field.type for field in msgspec.structs.fields(type_)]
    return structs


def _schema(name: str, schema: dict[str, Any], kind: type[msgspec.Struct] | None) -> str:
    required = schema.get("required", ())
    rows = (
        (
            f"`{field}`",
            _type(value) + (", required" if field in required else ""),
            value.get("description") or (field_docstring(kind, field) if kind is not None else ""),
        )
        for field, value in schema.get("properties", {}).items()
    )
    body = table(("field", "type", "meaning"), rows) if schema.get("properties") else f"{_type(schema)}\n"
    return f"### {name}\n\n{schema.get('description', '').partition(chr(10))[0]}\n\n{body}"


def _type(schema: dict[str, Any]) -> str:
    """Return a JSON Schema as a phrase."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(option) for option in schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = schema.get("type", "")
    if kind == "array":
        items = schema.get("items") or {}
        return f"list of {_type(items)}" if items else "list"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"map to {_type(schema['additionalProperties'])}"
    return str(kind)


# --- dialects ----------------------------------------------------------------------------------------------------------------


def dialect_rows() -> str:
    """Return the dialects: one row for each change on the wire."""
    newest: dict[str, Dialect] = {}
    rows = []
    for dialect in dialects():
        older = newest.get(dialect.engine)
        fields = [f"`{name}`" for name in dialect.stored_fields if older is None or name not in older.stored_fields]
        form = f"{dialect.batch_form} of {'maps' if dialect.event_form == 'map' else 'arrays'}"
        topic = "with the topic" if dialect.has_replay_topic else "without the topic"
        hashes = "signed" if dialect.has_signed_hashes else "unsigned or bytes"
        rows.append((dialect.engine, dialect.since, form, hashes, topic, ", ".join(fields)))
        newest[dialect.engine] = dialect
    return table(("engine", "from release", "batch", "hashes", "replay replies", "new fields of stores"), iter(rows))


# --- tables of an export -----------------------------------------------------------------------------------------------------


UNKEYED_REASONS: Final = {
    "other-group": "in a group that skips blocks, such as a sliding window, and no resident block with a key has its hash",
    "no-tokens": "stored without tokens, and no resident block with a key has its hash",
    "length-mismatch": "the numbers of hashes and tokens do not match",
    "bad-token": "an invalid token id",
    "parent-unknown": "its parent is not resident, according to the recording",
    "parent-unkeyed": "its parent has no key",
}
"""Reasons why a block has no key, with an explanation of each."""


def tables() -> str:
    """Return the columns of each table, and the reasons for blocks without keys."""
    heads = [f"## `{table_.name}`\n\n{table_.meaning[0].upper()}{table_.meaning[1:]}.\n\n" for table_ in TABLES]
    rows = [
        [(f"`{name}`", kind + ", or null" * null, meaning) for name, kind, meaning, null in table_.columns] for table_ in TABLES
    ]
    sections = [head + table(("column", "type", "meaning"), iter(lines)) for head, lines in zip(heads, rows, strict=True)]
    reasons = table(("`unkeyed`", "meaning"), ((f"`{reason}`", meaning) for reason, meaning in UNKEYED_REASONS.items()))
    return "\n".join([*sections, f"## Blocks without a key\n\n{reasons}"])


# --- reasons -----------------------------------------------------------------------------------------------------------------


def reasons() -> str:
    """Return the reasons why a source is not EXACT, with what to do, for a page of the folder `operations`."""
    codes: dict[str, list[str]] = {}
    for reason in Reason:
        codes.setdefault(reason.advice.format(endpoint="ENDPOINT"), []).append(f"`{reason}`")
    rows = ((", ".join(names), _PAGE.sub(r"[\1](../\1.md\2)", advice)) for advice, names in codes.items())
    return table(("reason", "what to do"), rows)


_PAGE: Final = re.compile(r"([\w/-]+)(#[\w-]+)? in the documentation of kvevents")


# --- results of `make engines` -----------------------------------------------------------------------------------------------


def engines() -> str:
    """Return the tables of the committed report of `make engines`, without durations."""
    from tests.system.engines import report  # noqa: PLC0415 - a program of tests

    return f"{report.text(report.read(report.RESULTS), timings=False)}\n"


GENERATED: Final[dict[str, Callable[[], str]]] = {
    "api": api,
    "extension_points": extension_points,
    "internal_extension_points": internal_extension_points,
    "readme": readme,
    "commands": commands,
    "settings": settings,
    "http": http,
    "dialects": dialect_rows,
    "tables": tables,
    "reasons": reasons,
    "engines": engines,
}
