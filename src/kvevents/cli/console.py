"""Output of commands: results on stdout, notes and progress on stderr, tables, and views that fill the terminal."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Literal, NamedTuple, TextIO, TypeAlias
from unicodedata import combining, east_asian_width

from kvevents.errors import ExternalError

Style: TypeAlias = Literal["plain", "dim", "bold", "name", "good", "warn", "bad", "loud"]

_SGR_CODES: Final = {"dim": "2", "bold": "1", "name": "36", "good": "32", "warn": "33", "bad": "1;31", "loud": "1;35"}
TRUST_STYLES: Final[dict[str, Style]] = {
    "EXACT": "good",
    "REPLAYING": "name",
    "DEGRADED": "warn",
    "CONNECTING": "loud",
    "STALE": "bad",
}
"""The style of each trust state."""
_ERASE_LINE: Final = "\r\x1b[K"


class Span(NamedTuple):
    """A piece of text with one style."""

    text: str
    style: Style = "plain"


Part: TypeAlias = Span | str
Line: TypeAlias = Sequence[Part]


@contextmanager
def convert_output_errors() -> Iterator[None]:
    """Context that converts errors of stdout to `ExternalError`, except BrokenPipeError."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ExternalError(f"cannot write the output: {error.strerror or error}") from error


class Console:
    """Writes lines, and flushes the stream after each line. Lines are colored on a terminal unless `NO_COLOR` is set."""

    def __init__(self, out: TextIO | None = None, notes: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._notes = notes or sys.stderr
        self._out_color = _wants_color(self._out)
        self._notes_color = _wants_color(self._notes)
        self._progress = is_terminal(self._notes)
        self._in_progress = False
        self._progress_at = 0.0

    def line(self, *parts: Part) -> None:
        """Write a line of results. Raises BrokenPipeError if the reader of stdout has ended, else `ExternalError`."""
        with convert_output_errors():
            self._end_progress()
            self._out.write(_paint(parts, self._out_color) + "\n")
            self._out.flush()

    def lines(self, lines: Iterable[Line]) -> None:
        """Write lines of results. Raises the errors of `line`."""
        for line in lines:
            self.line(*line)

    def data(self, line: bytes) -> None:
        """Write a line of results in UTF-8, whatever the terminal's encoding is. Raises the errors of `line`."""
        with convert_output_errors():
            self._end_progress()
            self._out.buffer.write(line + b"\n")
            self._out.buffer.flush()

    def note(self, *parts: Part) -> None:
        """Write a line to stderr."""
        self._end_progress()
        self._notes.write(_paint(parts, self._notes_color) + "\n")
        self._notes.flush()

    def progress(self, text: str) -> None:
        """Show a text in the current line of a terminal until the next output. The text changes at most every 0.1 s."""
        now = time.monotonic()
        if self._progress and now - self._progress_at >= 0.1:
            self._progress_at = now
            self._in_progress = True
            self._notes.write(_ERASE_LINE + _paint(cut_cell([text], terminal_size(self._notes)[0] - 1), color=False))
            self._notes.flush()

    def _end_progress(self) -> None:
        if self._in_progress:
            self._in_progress = False
            self._notes.write(_ERASE_LINE)
            self._notes.flush()

    def check_reader(self) -> None:
        """Raise BrokenPipeError if the reader of stdout has ended. Without this check, only the next write would raise it."""
        try:
            descriptor = self._out.fileno()
        except (OSError, ValueError):
            return
        poll = select.poll()
        poll.register(descriptor, 0)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            raise BrokenPipeError


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can erase lines."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _wants_color(stream: TextIO) -> bool:
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def terminal_size(stream: TextIO) -> tuple[int, int]:
    """Return the numbers of columns and lines of a terminal."""
    try:
        columns, lines = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        columns = lines = 0
    return columns or 80, lines or 24


@contextmanager
def open_screen(stream: TextIO) -> Iterator[Callable[[Sequence[Line]], None]]:
    """Return a context that uses the whole terminal. The yielded function replaces all lines, and cuts long lines."""

    def show(lines: Sequence[Line]) -> None:
        columns, rows = terminal_size(stream)
        shown = [_paint(cut_cell(line, columns), _wants_color(stream)) for line in lines[: rows - 1]]
        stream.write("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in shown) + "\x1b[J")
        stream.flush()

    stream.write("\x1b[?1049h\x1b[?25l")  # Switches to the alternate screen of the terminal, and hides the cursor.
    try:
        yield show
    finally:
        stream.write("\x1b[?25h\x1b[?1049l")
        stream.flush()


# --- lines and tables


def format_table(
    titles: Sequence[str], rows: Sequence[Sequence[Part | Line]], left: Container[str], widths: Sequence[int] | None = None
) -> list[Line]:
    """Return the lines of a table, the titles first. Columns in `left` are aligned to the left, others to the right.

    Each column has the width in `widths`, by default the width of its longest cell. Longer cells are cut.
    """
    cells = [[Span(title, "dim") for title in titles], *rows]
    widths = widths or [max(map(cell_width, column)) for column in zip(*cells, strict=True)]
    lines: list[Line] = []
    for row in cells:
        line: list[Part] = []
        for title, cell, wide in zip(titles, row, widths, strict=True):
            shown, blank = cut_cell(cell, wide), " " * (wide - cell_width(cell))
            line += [*shown, blank, "  "] if title in left else [blank, *shown, "  "]
        while line and not (line[-1].text if isinstance(line[-1], Span) else line[-1]).strip():
            line.pop()
        lines.append(line)
    return lines


def cut_cell(cell: Part | Line, max_width: int) -> list[Part]:
    """Return a cell; if it takes more than `max_width` columns of the terminal, return its beginning and an ellipsis."""
    if cell_width(cell) <= max_width:
        return list(_spans(cell))
    parts: list[Part] = []
    for text, style in _spans(cell):
        end = len(text)
        while end and cell_width([*parts, text[:end]]) > max_width - 1:
            end -= 1
        parts.append(Span(text[:end], style))
        if end < len(text):
            break
    return [*parts, "…"] if max_width > 0 else []


def cell_width(cell: Part | Line) -> int:
    """Return the number of columns of the terminal that a cell takes."""
    text = "".join(span.text for span in _spans(cell))
    if text.isascii():
        return len(text)
    return sum(0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text)


def _spans(cell: Part | Line) -> list[Span]:
    parts = [cell] if isinstance(cell, Span | str) else cell
    spans = [part if isinstance(part, Span) else Span(part) for part in parts]
    return [Span(escape_controls(span.text), span.style) for span in spans]


def _paint(parts: Line, color: bool) -> str:
    painted = ""
    for text, style in _spans(parts):
        code = _SGR_CODES.get(style) if color else None
        painted += f"\x1b[{code}m{text}\x1b[0m" if code and text else text
    return painted


def escape_controls(text: str) -> str:
    """Return the text with control characters escaped. Names and reasons of peers must not control the terminal."""
    return text if text.isprintable() else "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
