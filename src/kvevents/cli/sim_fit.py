"""`kvevents sim fit`: fit a cost model to measurements of an engine."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Final

import msgspec

from kvevents.cli.command import OK
from kvevents.cli.console import Console
from kvevents.cli.options import positive_int, positive_seconds
from kvevents.sim.costs import fit, read_measurements

DESCRIPTION: Final = (
    "Fit a cost model for --preset to measurements of an engine: the time to the first token of single prompts of several "
    "lengths, and the time between tokens with several concurrent sequences. The model is printed as JSON."
)
EXAMPLES: Final = """\
  kvevents sim fit measured.csv --cache-tokens 276184 | tee mine.json
  kvevents sim compare --preset mine.json
"""


def run(args: Namespace) -> int:
    """Fit the model, and print it with its error."""
    found = fit(
        read_measurements(args.file),
        cache_tokens=args.cache_tokens,
        reload=args.reload,
        source=args.source or f"fitted to {args.file.name}",
    )
    console = Console()
    console.data(msgspec.json.format(msgspec.json.encode(found.model)))
    console.note(
        f"mean error: {found.prefill_error:.1%} for prompts, {found.decode_error:.1%} for output tokens; save the model as "
        "a .json file and use that as --preset"
    )
    return OK


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument("file", type=Path, metavar="FILE", help="CSV file with the header kind,tokens,sequences,seconds")
    parser.add_argument(
        "--cache-tokens",
        type=positive_int,
        required=True,
        metavar="N",
        help="capacity of the cache in tokens, which vLLM logs at its start as 'GPU KV cache size'",
    )
    parser.add_argument(
        "--reload",
        type=positive_seconds,
        default=0.0,
        metavar="S",
        help="seconds to load a token from host memory (default: 0)",
    )
    parser.add_argument("--source", metavar="TEXT", help="origin of the measurements, for reports (default: the name of FILE)")
