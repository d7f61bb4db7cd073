"""What long-running commands tell on stderr."""

from __future__ import annotations

import logging
import sys
from argparse import ArgumentParser, Namespace
from typing import Final

_LEVELS: Final = ("debug", "info", "warning", "error")


def add_arguments(parser: ArgumentParser) -> None:
    """How much, and in which form; `to_stderr` reads them."""
    parser.add_argument(
        "--log-level", choices=_LEVELS, default="info", help="lowest level that is logged on stderr (default: info)"
    )
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="lines for people, or one JSON object per line (default: text)",
    )


def to_stderr(args: Namespace) -> None:
    """Have the loggers of this package heard."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _JsonLines() if args.log_format == "json" else logging.Formatter("%(asctime)s %(levelname)-7s %(message)s")
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("kvevents").setLevel(args.log_level.upper())


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        import msgspec  # noqa: PLC0415 - for this one form of logs

        told = {"at": record.created, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(told).decode()
