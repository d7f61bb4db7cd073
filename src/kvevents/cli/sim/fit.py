"""`kvevents sim fit`: a cost model from measurements of one's own."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Final

import msgspec

from kvevents.cli import options
from kvevents.cli.command import OK, Command
from kvevents.cli.console import Console


def run(args: Namespace) -> int:
    """Fit, print the model, and say how near it is."""
    from kvevents.sim.fitting import fit, read_measurements  # noqa: PLC0415 - late, as the other commands of the group

    found = fit(
        read_measurements(args.file),
        cache_tokens=args.cache_tokens,
        reload=args.reload,
        source=args.source or f"fitted to {args.file.name}",
    )
    console = Console()
    console.data(msgspec.json.format(msgspec.json.encode(found.model)))
    console.note(
        f"it is {found.prefill_error:.1%} off on average for prompts, {found.decode_error:.1%} for tokens of answers; save it"
        " as a .json file and give that as --preset"
    )
    return OK


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument("file", type=Path, metavar="FILE", help="CSV with the header kind,tokens,sequences,seconds")
    parser.add_argument(
        "--cache-tokens",
        type=options.count,
        required=True,
        metavar="N",
        help="tokens that the cache has room for; vLLM logs it at its start as 'GPU KV cache size'",
    )
    parser.add_argument(
        "--reload", type=options.seconds, default=0.0, metavar="S", help="seconds to bring one token back from host memory"
    )
    parser.add_argument("--source", metavar="TEXT", help="what to say of where the figures come from")


COMMAND: Final = Command(
    "fit",
    "a cost model from what you measured on an engine",
    "Make a cost model for --preset from measurements of an engine of your own: the time to the first token of single prompts\n"
    "of several lengths, and the time between tokens with several sequences side by side. The model goes to stdout as JSON.",
    """\
  kvevents sim fit measured.csv --cache-tokens 276184 | tee mine.json
  kvevents sim compare --preset mine.json
""",
    add_arguments,
    run,
)
