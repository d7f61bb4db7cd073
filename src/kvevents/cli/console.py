"""Output of commands: results go to stdout, notes and progress to stderr."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal, NamedTuple, TextIO, TypeAlias

from kvevents.errors import ExternalError

Style: TypeAlias = Literal["plain", "dim", "bold", "name", "good", "warn", "bad", "loud"]

_SGR: Final[dict[Style, str]] = {
    "plain": "",
    "dim": "2",
    "bold": "1",
    "name": "36",
    "good": "32",
    "warn": "33",
    "bad": "1;31",
    "loud": "1;35",
}
_ERASE_LINE: Final = "\r\x1b[K"
_PROGRESS_SECONDS: Final = 0.1
"""Time between two updates of the progress at least."""


class Span(NamedTuple):
    """Text in one style."""

    text: str
    style: Style = "plain"


Part: TypeAlias = Span | str


class OutputError(ExternalError):
    """Stdout cannot be written, for example to a full disk."""


@contextmanager
def convert_output_errors() -> Iterator[None]:
    """Raise `OutputError` for errors of stdout, except BrokenPipeError."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write the output: {error.strerror or error}") from error


class Console:
    """Writes lines and flushes each; with color on a terminal unless `NO_COLOR` is set."""

    def __init__(self, out: TextIO | None = None, notes: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._notes = notes or sys.stderr
        self._out_color = _wants_color(self._out)
        self._notes_color = _wants_color(self._notes)
        self._progress = _is_terminal(self._notes)
        self._in_progress = False
        self._progress_at = 0.0

    def line(self, *parts: Part) -> None:
        """Write a line of results. Raises BrokenPipeError if the reader has ended, and `OutputError`."""
        with convert_output_errors():
            self._out.write(_paint(parts, self._out_color) + "\n")
            self._out.flush()

    def data(self, line: bytes) -> None:
        """Write a line of results in UTF-8, regardless of the terminal's encoding. Raises as `line` does."""
        with convert_output_errors():
            self._out.buffer.write(line + b"\n")
            self._out.buffer.flush()

    def note(self, *parts: Part) -> None:
        """Write a line to stderr."""
        erase = _ERASE_LINE if self._in_progress else ""
        self._in_progress = False
        self._notes.write(f"{erase}{_paint(parts, self._notes_color)}\n")
        self._notes.flush()

    def progress(self, text: str) -> None:
        """Write a line to a terminal that the next one replaces."""
        now = time.monotonic()
        if self._progress and now - self._progress_at >= _PROGRESS_SECONDS:
            self._progress_at = now
            self._in_progress = True
            self._notes.write(f"{_ERASE_LINE}{text}")
            self._notes.flush()

    def check_reader(self) -> None:
        """Raise BrokenPipeError if the reader of stdout has ended, which otherwise only the next line would detect."""
        try:
            descriptor = self._out.fileno()
        except (OSError, ValueError):
            return
        poll = select.poll()
        poll.register(descriptor, 0)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            raise BrokenPipeError


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _wants_color(stream: TextIO) -> bool:
    return _is_terminal(stream) and not os.environ.get("NO_COLOR")


def _paint(parts: tuple[Part, ...], color: bool) -> str:
    spans = [part if isinstance(part, Span) else Span(part) for part in parts]
    return "".join(_paint_span(span, color) for span in spans)


def _paint_span(span: Span, color: bool) -> str:
    text = printable(span.text)
    code = _SGR[span.style] if color else ""
    return f"\x1b[{code}m{text}\x1b[0m" if code and text else text


def printable(text: str) -> str:
    """Return the text with control characters escaped. Names and reasons of peers must not control the terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
