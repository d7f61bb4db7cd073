"""`kvevents query`: look up which workers hold a prompt."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from kvevents.cli.command import CommandLineError, ExitCode
from kvevents.cli.console import TRUST_STYLES, Console, Line, Part, Span, format_table
from kvevents.cli.output import add_output, write_record
from kvevents.cli.service_options import add_scope, add_service, make_client
from kvevents.client import Client, schemas
from kvevents.diagnosis.text_format import first_names, percentage, plural
from kvevents.errors import ConfigError, ExternalError, MissingDependencyError
from kvevents.routing.weights import tokens_by_tier

DESCRIPTION: Final = (
    "Ask a service which workers hold how much of a prompt, on which tiers, and whether that can be trusted.\n"
    "The prompt is given as token ids, or as text with the tokenizer of the model."
)
EXAMPLES: Final = """\
  kvevents query 791 6864 315 9822 374
  kvevents query --text-file prompt.txt --tokenizer tokenizer.json --model llama
  kvevents query --prompt-file prompt.u32 --select   which worker should get it, and why
  kvevents query - -o json --service https://indexer:8090 --tls-ca ca.pem
"""

STDIN: Final = "-"
MAX_PROMPT_BYTES: Final = 64 << 20
"""Maximum size of a prompt file in bytes: four times the default of the service's `limits.max_body_bytes`."""

_TOKENS: Final[msgspec.json.Decoder[list[int]]] = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]])


def parse_tokens(text: str) -> list[int]:
    """Return the token ids of a JSON array, or of numbers separated by spaces or commas. Raises `ConfigError`."""
    stripped = text.strip()
    array = stripped if stripped.startswith("[") else f"[{','.join(stripped.replace(',', ' ').split())}]"
    try:
        return _TOKENS.decode(array.encode())
    except (msgspec.MsgspecError, UnicodeError) as error:
        shown = stripped if len(stripped) <= 40 else f"{stripped[:40]}..."
        detail = f": {error}" if array is stripped else ""
        raise ConfigError(f"invalid token ids {shown!r}: expected numbers from 0 to 2**32 - 1{detail}") from error


def _tokens_or_stdin(text: str) -> list[int] | str:
    return text if text == STDIN else parse_tokens(text)


def add_prompt(parser: ArgumentParser) -> None:
    """Declare the arguments for the prompt: token ids or text, as arguments or in a file."""
    source = parser.add_mutually_exclusive_group(required=True)
    text = "token ids, or a JSON array of them, or - for stdin"
    source.add_argument("tokens", nargs="*", default=[], metavar="TOKENS", type=_tokens_or_stdin, help=text)
    text = "file with token ids: 32-bit little-endian numbers if its name ends in .u32 or .bin, else a JSON array"
    source.add_argument("--prompt-file", type=Path, help=text)
    source.add_argument("--text", help="text of the prompt, to which the chat template is already applied; needs --tokenizer")
    source.add_argument("--text-file", type=Path, help="file with that text, or - for stdin")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json of the model, as published on Hugging Face")
    parser.add_argument("--no-special-tokens", action="store_true", help="do not add special tokens to the text")


def read_prompt(args: Namespace) -> list[int]:
    """Return the token ids of the prompt.

    Raises `CommandLineError`, `ConfigError` for an unusable file, and `MissingDependencyError` if text needs a missing package.
    """
    if args.text is None and args.text_file is None:
        if args.tokenizer is not None or args.no_special_tokens:
            raise CommandLineError("--tokenizer and --no-special-tokens need a text: token ids need no tokenizer")
        return _read_tokens(args.prompt_file) if args.prompt_file is not None else _token_ids_of(args.tokens)
    text = args.text if args.text is not None else _read_text(args.text_file)
    if args.tokenizer is None:
        raise CommandLineError("--text and --text-file need --tokenizer: the tokenizer.json of the model")
    return _tokenize(text, args.tokenizer, special=not args.no_special_tokens)


def _token_ids_of(arguments: list[list[int] | str]) -> list[int]:
    if STDIN in arguments:
        if len(arguments) > 1:
            raise CommandLineError("the argument - reads the whole prompt from stdin; remove the other tokens")
        return _read_tokens(Path(STDIN))
    return [token for part in arguments for token in part if isinstance(token, int)]


def _read_tokens(file: Path) -> list[int]:
    if file.suffix in {".u32", ".bin"}:  # The file consists of 32-bit little-endian token ids.
        content = _read_bytes(file)
        if len(content) % 4:
            raise ConfigError(f"{file} has {len(content)} bytes, which is not a multiple of 4; expected 32-bit token ids")
        return [int.from_bytes(content[at : at + 4], "little") for at in range(0, len(content), 4)]
    text = _read_text(file)
    try:
        return parse_tokens(text)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def _read_bytes(file: Path) -> bytes:
    try:
        if str(file) == STDIN:
            content = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
        else:
            with file.open("rb") as opened:
                content = opened.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    if len(content) > MAX_PROMPT_BYTES:
        raise ConfigError(f"{file} is too large for a prompt: expected at most {MAX_PROMPT_BYTES >> 20} MiB")
    return content


def _read_text(file: Path) -> str:
    try:
        return _read_bytes(file).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8: {error.reason} at byte {error.start}") from error


def _tokenize(text: str, file: Path, *, special: bool) -> list[int]:
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 - only prompts that are text need it
    except ImportError as error:
        raise MissingDependencyError("a prompt that is text needs the package tokenizers", "service") from error
    try:
        tokenizer: Any = Tokenizer.from_file(str(file))
        # A tokenizer file can enable truncation and padding, as in training. A prompt must be neither truncated nor padded.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return list(tokenizer.encode(text, add_special_tokens=special).ids)
    except Exception as error:  # The library raises `Exception` itself, without a subclass.
        raise ConfigError(f"cannot use --tokenizer {file}: {error}; expected the tokenizer.json of the model") from error


def run(args: Namespace) -> int:
    """Send the query, and print the response."""
    tokens = read_prompt(args)
    client, console = make_client(args), Console()
    scope = {name: getattr(args, name) or schemas.DEFAULT_GROUP for name in ("tenant", "group")}
    model = args.model or _find_only_model(client, scope)
    prompt = {"tokens": tokens, "lora": args.lora, "salt": args.salt, "whole_prompt": args.whole_prompt}
    body: Any = {"model": model, **scope, **prompt}
    answer = (
        client.select(schemas.SelectRequest(**body, explain=True))
        if args.select
        else client.match(schemas.MatchRequest(**body))
    )
    if write_record(_make_record(answer), args.output, console):
        return ExitCode.OK
    is_wide = args.output == "wide"
    if isinstance(answer, schemas.Selection):
        _print_selection(answer, console, wide=is_wide)
        return ExitCode.OK
    head: list[Part] = [Span(plural(answer.prompt_tokens, "token"), "bold"), " of model ", Span(model, "name"), ": "]
    if holding := sum(held.tokens > 0 for held in answer.workers):
        console.line(*head, f"{plural(holding, 'worker')} {'holds' if holding == 1 else 'hold'} a prefix of them")
    else:
        console.line(*head, "no worker is known to hold a prefix of them")
        sources = client.sources(deadline=None, **scope, model=model).sources
        console.note(_explain_no_match(sources, answer.prompt_tokens))
    # A worker that is not EXACT can hold more than the index knows, so it is listed even if it has no match.
    shown = [held for held in answer.workers if held.tokens or held.trust.state != "EXACT"]
    if shown:
        shown.sort(key=lambda held: (-held.tokens, held.instance, held.rank))
        figures = [(f"{held.tokens:,}", percentage(held.tokens, answer.prompt_tokens)) for held in shown]
        _print_workers(shown, ("tokens", "share"), figures, console, wide=is_wide)
    return ExitCode.OK


def _make_record(answer: schemas.MatchAnswer | schemas.Selection) -> dict[str, Any]:
    """Return an answer as a record. Instead of cumulative counts, the record has the number of tokens that each tier adds."""
    record: dict[str, Any] = msgspec.to_builtins(answer)
    for worker in record.get("workers") or record.get("considered") or []:
        worker["tokens_by_tier"] = tokens_by_tier(worker.pop("tiers"))
    return record


def _find_only_model(client: Client, scope: dict[str, str]) -> str:
    """Return the model of the fleet. Raises `ExternalError` without an engine, and `ConfigError` for several models."""
    models = sorted({source.model for source in client.sources(deadline=None, **scope).sources})
    place = " ".join(f"{name} {value}" for name, value in scope.items())
    if not models:
        raise ExternalError(f"no engine of {place} is registered at {client.url}; see `kvevents sources`")
    if len(models) > 1:
        raise ConfigError(f"{place} has several models: {first_names(models)}; name one with --model")
    return models[0]


def _explain_no_match(sources: Sequence[schemas.SourceView], prompt: int) -> str:
    """Return a likely reason why no engine of a model holds a prefix of a prompt, as a sentence."""
    if not any(source.blocks for source in sources):
        return "no engine of this model has published a block yet; `kvevents top` lists the engines"
    smallest = min((size for source in sources for size in source.block_sizes), default=0)
    if prompt <= smallest:
        return f"the prompt is not longer than a block of {smallest} tokens, and engines recompute the block of its last token"
    return "if an engine should hold it, compare tokens, LoRA and salt with those of `kvevents tail ENDPOINT --token-ids`"


# --- the answers


def _print_selection(selected: schemas.Selection, console: Console, *, wide: bool) -> None:
    console.line(Span(schemas.worker_name(selected.instance, selected.rank), "name"), " should get the prompt")
    console.line(selected.why)
    if selected.unreachable:
        left_out = [f"{schemas.worker_name(item.instance, item.rank)} is {item.trust.state}" for item in selected.unreachable]
        console.note(f"left out: {first_names(left_out)}")
    workers = selected.considered or []
    figures = [(f"{item.score:.3f}", percentage(item.uncached, 1), f"{item.load:.2f}", f"{item.tokens:,}") for item in workers]
    _print_workers(workers, ("score", "to compute", "load", "tokens"), figures, console, wide=wide)


def _print_workers(
    workers: Sequence[schemas.WorkerMatch | schemas.ScoredCandidate],
    figure_titles: Sequence[str],
    figures: Sequence[Sequence[str]],
    console: Console,
    *,
    wide: bool,
) -> None:
    """Print a row for each worker: name, figures, the tokens that each tier adds, trust, and if `wide` the URL."""
    titles = ["worker", *figure_titles, "tiers", "trust", *(["url"] if wide else [])]
    rows: list[list[Part | Line]] = []
    for item, texts in zip(workers, figures, strict=True):
        tiers = " + ".join(f"{tier} {tokens:,}" for tier, tokens in tokens_by_tier(item.tiers).items())
        reason = f" ({item.trust.reason})" if item.trust.reason else " (attested)" if item.trust.attested else ""
        trust: Line = [Span(item.trust.state, TRUST_STYLES[item.trust.state]), reason]
        name = Span(schemas.worker_name(item.instance, item.rank), "name")
        rows.append([name, *texts, tiers, trust, item.url or "-"][: len(titles)])
    console.lines(format_table(titles, rows, {"worker", "tiers", "trust", "url"}))


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    add_prompt(parser)
    add_service(parser)
    add_scope(parser, model="model of the tokens; required if the service has several models")
    parser.add_argument("--lora", metavar="NAME", help="LoRA adapter of the prompt (default: none)")
    parser.add_argument("--salt", help="cache salt of the prompt (default: none)")
    parser.add_argument("--whole-prompt", action="store_true", help="count the block of the last token, which is recomputed")
    parser.add_argument("--select", action="store_true", help="ask which worker should get the prompt, and why")
    add_output(parser, "the service's response")
