"""Where a prompt's token ids come from: arguments, a file, or text and a tokenizer."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from kvevents.cli.command import CommandLineError
from kvevents.errors import ConfigError, MissingDependencyError

STDIN: Final = "-"
MAX_PROMPT_BYTES: Final = 64 << 20
"""Of a file or of stdin: four times what a service takes unless told otherwise."""
RAW_SUFFIXES: Final = frozenset({".u32", ".bin"})
"""Of files that hold 32-bit little-endian numbers."""

_TOKENS: Final[msgspec.json.Decoder[list[int]]] = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]])


def tokens(text: str) -> list[int]:
    """Token ids: a JSON array, or numbers with spaces or commas between."""
    stripped = text.strip()
    array = stripped if stripped.startswith("[") else f"[{','.join(stripped.replace(',', ' ').split())}]"
    try:
        return _TOKENS.decode(array.encode())
    except (msgspec.MsgspecError, UnicodeError) as error:
        shown = stripped if len(stripped) <= 40 else f"{stripped[:40]}..."
        raise ArgumentTypeError(f"{shown!r} are no token ids, which are numbers from 0 to 2**32 - 1: {error}") from error


def _tokens_or_stdin(text: str) -> list[int] | str:
    return text if text == STDIN else tokens(text)


def add_prompt(parser: ArgumentParser) -> None:
    """Where the prompt is; exactly one of four."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "tokens",
        nargs="*",
        default=[],
        metavar="TOKENS",
        type=_tokens_or_stdin,
        help="token ids, or a JSON array of them; - reads them from stdin",
    )
    source.add_argument(
        "--prompt-file",
        metavar="FILE",
        type=Path,
        help="JSON array of token ids; of a name in .u32 or .bin, 32-bit little-endian numbers",
    )
    source.add_argument("--text", help="the prompt as the engine's tokenizer gets it, chat template and all; needs --tokenizer")
    source.add_argument("--text-file", metavar="FILE", type=Path, help="file with such text, taken as it is; - is stdin")
    parser.add_argument("--tokenizer", metavar="FILE", type=Path, help="tokenizer.json of the model, as Hugging Face has it")
    parser.add_argument("--no-special-tokens", action="store_true", help="add no beginning of sequence and the like to text")


def prompt_of(args: Namespace) -> list[int]:
    """The token ids that the arguments mean.

    Raises `CommandLineError`, `ConfigError` for a file, and `MissingDependencyError` without the package of a tokenizer.
    """
    if args.text is None and args.text_file is None:
        if args.tokenizer is not None:
            raise CommandLineError("--tokenizer is for --text and --text-file; token ids need none")
        return _read_tokens(args.prompt_file) if args.prompt_file is not None else _given(args.tokens)
    text = args.text if args.text is not None else _decoded(_read(args.text_file), f"--text-file {args.text_file}")
    if args.tokenizer is None:
        raise CommandLineError("text needs --tokenizer: the model's tokenizer.json")
    return _encode(text, args.tokenizer, special=not args.no_special_tokens)


def _given(arguments: list[list[int] | str]) -> list[int]:
    if STDIN in arguments:
        if len(arguments) > 1:
            raise CommandLineError("- is the whole prompt; give it alone")
        return _parsed(_decoded(_read(Path(STDIN)), "stdin"), "stdin")
    return [token for part in arguments for token in part if isinstance(token, int)]


def _read_tokens(file: Path) -> list[int]:
    content = _read(file)
    if file.suffix not in RAW_SUFFIXES:
        return _parsed(_decoded(content, str(file)), str(file))
    if len(content) % 4:
        raise ConfigError(f"{file} has {len(content)} bytes, which is no number of 32-bit token ids; write 4 bytes a token")
    return [int.from_bytes(content[at : at + 4], "little") for at in range(0, len(content), 4)]


def _parsed(text: str, origin: str) -> list[int]:
    try:
        return tokens(text)
    except ArgumentTypeError as error:
        raise ConfigError(f"{origin}: {error}") from error


def _read(file: Path) -> bytes:
    try:
        if str(file) == STDIN:
            content = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
        else:
            with file.open("rb") as opened:
                content = opened.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    if len(content) > MAX_PROMPT_BYTES:
        raise ConfigError(f"{file} has more than {MAX_PROMPT_BYTES >> 20} MiB, which is no prompt")
    return content


def _decoded(content: bytes, origin: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{origin} is not UTF-8: {error.reason} at byte {error.start}") from error


def _encode(text: str, file: Path, *, special: bool) -> list[int]:
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 - late, for all who bring token ids
    except ImportError as error:
        raise MissingDependencyError("text needs the package tokenizers: pip install 'kvevents[tokenizer]'") from error
    try:
        tokenizer: Any = Tokenizer.from_file(str(file))
        # Files say how a training batch was cut and filled up; a prompt is neither.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return list(tokenizer.encode(text, add_special_tokens=special).ids)
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"cannot use --tokenizer {file}: {error}; it is the tokenizer.json of the model") from error
