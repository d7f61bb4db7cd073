"""The terminal view of `kvevents top`. In a narrow terminal it omits columns, and then the last rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvevents.cli.console import printable
from kvevents.client.polling import PolledSource, PollResult
from kvevents.client.schemas import StatsAnswer
from kvevents.client.service_client import source_issues, worker_name
from kvevents.text_format import duration, percentage, plural, size

MAX_NAME: Final = 40
"""Characters of a name; the rest is cut."""
UNLIMITED: Final = 1_000
"""Width of a frame that is written to a file or a pipe, which fits everything."""
MAX_FAULTS: Final = 3
"""Faults of discovery that are shown; the rest is counted."""
_GAP: Final = 2
_TRUST_STYLES: Final = {
    "EXACT": "green",
    "REPLAYING": "cyan",
    "DEGRADED": "yellow",
    "CONNECTING": "magenta",
    "STALE": "bold red",
}


@dataclass(frozen=True, slots=True)
class SourceColumn:
    """One column of the table."""

    title: str
    cell: Callable[[PolledSource, float], str]
    """Returns the text for a source at a time."""
    rank: int
    """A narrow view omits the columns with the largest ranks first, and never those with 0."""
    justify: Literal["left", "right"] = "right"
    style: Callable[[PolledSource], str] = lambda _: ""


def _count(value: int) -> str:
    return f"{value:,}" if value else "-"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}" if value < 10 else f"{value:,.0f}"


def _lag(source: PolledSource, _now: float) -> str:
    return "-" if source.lag_seconds is None else _short_duration(source.lag_seconds)


def _age(source: PolledSource, now: float) -> str:
    return "never" if source.last_event is None else duration(max(now - source.last_event, 0.0))


def _load(source: PolledSource, _now: float) -> str:
    if source.load is None:
        return "?" if source.load_fault is not None else ""
    return f"{source.load.running:,} / {source.load.waiting:,}"


def _short_duration(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if abs(seconds) < 1 else duration(seconds)


def _trust(source: PolledSource, _now: float) -> str:
    return f"{source.trust.state} attested" if source.trust.attested else source.trust.state


def _tiers(source: PolledSource, _now: float) -> str:
    return " ".join(f"{tier} {blocks:,}" for tier, blocks in source.tiers.items() if blocks)


def _count_style(count: int) -> str:
    return "red" if count else "dim"


ISSUES: Final = SourceColumn("why", lambda source, _: source_issues(source), 1, "left")
"""The column with the problems of a source; it gets the remaining width."""
MIN_ISSUES: Final = 16
COLUMNS: Final = (
    SourceColumn(
        "worker",
        lambda source, _: worker_name(source.instance, source.rank, source.tenant, source.group),
        0,
        "left",
        lambda _: "cyan",
    ),
    SourceColumn("model", lambda source, _: source.model, 9, "left"),
    SourceColumn("trust", _trust, 0, "left", lambda source: _TRUST_STYLES.get(source.trust.state, "")),
    SourceColumn("blocks", lambda source, _: f"{source.blocks:,}", 2),
    SourceColumn("tiers", _tiers, 10, "left"),
    SourceColumn("batches/s", lambda source, _: _rate(source.rate), 4),
    SourceColumn("running / waiting", _load, 6, style=lambda source: "red" if source.load_fault is not None else ""),
    SourceColumn("lag", _lag, 6),
    SourceColumn("last", _age, 5),
    SourceColumn("lost", lambda source, _: _count(source.lost), 3, style=lambda source: _count_style(source.lost)),
    SourceColumn("gaps", lambda source, _: _count(source.gap_count), 8, style=lambda source: _count_style(source.gap_count)),
    SourceColumn("restarts", lambda source, _: _count(source.resets), 7),
    ISSUES,
)


class TopView:
    """Draws frames with at most `limit` sources."""

    def __init__(self, limit: int | None, console: Console | None = None) -> None:
        self._limit = limit
        self._console = console or _console()
        self._last: PollResult | None = None

    @property
    def is_terminal(self) -> bool:
        """Whether a live view is possible."""
        return self._console.is_terminal and not self._console.is_dumb_terminal

    def show(self, frame: PollResult) -> None:
        """Print a frame with all sources."""
        self._console.print(self.draw(frame, self._console.width, None))

    @contextmanager
    def live(self) -> Iterator[Callable[[PollResult], None]]:
        """Use the whole terminal. The yielded function shows the next frame."""
        with Live(console=self._console, screen=True, auto_refresh=False) as live:
            yield lambda frame: live.update(self.draw(frame, self._console.width, self._console.height), refresh=True)

    def draw(self, frame: PollResult, width: int, height: int | None) -> RenderableType:
        """Return a frame. A frame with an error is followed by the last one without."""
        if frame.error is None:
            self._last = frame
        shown = self._last
        lines = [*_failure_lines(frame, shown), *([] if shown is None else _head(shown, width))]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        if shown is None or not shown.sources:
            return Group(*lines)
        room = len(shown.sources) if height is None else max(height - len(lines) - 3, 1)
        rows = shown.sources[: min(room, self._limit or room)]
        more = len(shown.sources) - len(rows)
        table = _table(rows, shown.at, width, dim=frame.error is not None)
        return Group(*lines, Text(), table, *([Text(f"and {more:,} more", "dim", no_wrap=True)] if more else []))


def _console() -> Console:
    """Return the console of stdout, of unlimited width if that is not a terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=UNLIMITED)


# --- the lines above the table


def _failure_lines(frame: PollResult, last: PollResult | None) -> list[Text]:
    if frame.error is None or frame.failing_since is None:
        return []
    since = datetime.fromtimestamp(frame.failing_since, UTC).astimezone().strftime("%H:%M:%S")
    text = f" cannot be reached since {since} ({duration(frame.at - frame.failing_since)}): {frame.error}"
    lines = [Text.assemble((frame.service, "bold"), (printable(text), "bold red"))]
    return [*lines, Text("its last state:", "dim")] if last is not None else lines


def _head(frame: PollResult, width: int) -> list[Text]:
    stats, ready = frame.stats, frame.ready
    if stats is None or ready is None:
        return []
    state = ("ready", "green") if ready.ready else ("not ready", "bold yellow")
    release = f"  kvevents {printable(stats.version)}, up {duration(stats.uptime_seconds)}  "
    first = Text.assemble((frame.service, "bold"), release, state, f": {printable(ready.why)}")
    counted = [(f"{count:,} {name}", style) for name, style in _TRUST_STYLES.items() if (count := _count_in_state(stats, name))]
    second = Text(plural(len(frame.sources), "source"), "bold")
    for text, style in counted:
        second.append("  ").append(text, style)
    facts = _facts(frame, stats)
    return [first, second, *_wrap_facts(facts, width), *_faults(frame)]


def _count_in_state(stats: StatsAnswer, name: str) -> int:
    return next((count for state, count in stats.sources.items() if state == name), 0)


def _facts(frame: PollResult, stats: StatsAnswer) -> list[Text]:
    limit = "" if stats.memory_limit is None else f" of {size(stats.memory_limit)}"
    rate = "" if frame.lookups_per_second is None else f" ({_rate(frame.lookups_per_second)}/s)"
    facts = [
        Text(f"{plural(stats.blocks, 'block')} ({stats.unique_blocks:,} unique)"),
        Text(f"{size(stats.index_bytes)}{limit}"),
        Text(f"{_rate(stats.batches_per_second)} batches/s"),
        Text(f"{plural(stats.lookups, 'lookup')}{rate}, {percentage(stats.hits, stats.lookups)} hit"),
    ]
    if stats.tiers:
        facts.insert(1, Text(printable(", ".join(f"{tier} {count:,}" for tier, count in stats.tiers.items() if count))))
    if stats.evicted:
        facts.append(Text(f"{stats.evicted:,} evicted", "yellow"))
    if stats.snapshot_fault is not None:
        facts.append(Text(printable(stats.snapshot_fault), "red"))
    return facts


def _wrap_facts(facts: Sequence[Text], width: int) -> list[Text]:
    """Return the facts on as few lines as possible, without breaking one."""
    lines: list[Text] = []
    for fact in facts:
        if lines and lines[-1].cell_len + 3 + fact.cell_len <= width:
            lines[-1].append("   ").append(fact)
        else:
            lines.append(fact)
    return lines


def _faults(frame: PollResult) -> list[Text]:
    faults = [f"{name}: {sentence}" for name, sentences in frame.faults.items() for sentence in sentences]
    lines = [Text(printable(sentence), "red") for sentence in faults[:MAX_FAULTS]]
    rest = len(faults) - MAX_FAULTS
    return [*lines, Text(f"and {plural(rest, 'fault')} more: see `kvevents doctor --service`", "red")] if rest > 0 else lines


# --- the table


def _table(sources: Sequence[PolledSource], now: float, width: int, *, dim: bool) -> Table:
    cells = {column: [_text(column, source, now) for source in sources] for column in COLUMNS}
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, style="dim" if dim else "", header_style="dim")
    widths = _select_columns({column: _column_width(column, texts) for column, texts in cells.items()}, width)
    for column, wide in widths.items():
        table.add_column(column.title, justify=column.justify, no_wrap=True, overflow="ellipsis", width=wide)
    for row in range(len(sources)):
        table.add_row(*(cells[column][row] for column in widths))
    return table


def _text(column: SourceColumn, source: PolledSource, now: float) -> Text:
    return Text(printable(column.cell(source, now)), column.style(source))


def _column_width(column: SourceColumn, cells: Sequence[Text]) -> int:
    """Return the width that a column needs; 0 if all its cells are empty."""
    widest = max(cell.cell_len for cell in cells)
    return max(widest, len(column.title)) if widest else 0


def _select_columns(widths: dict[SourceColumn, int], width: int) -> dict[SourceColumn, int]:
    """Return the columns that fit, with their widths."""
    selected = {column: min(wide, MIN_ISSUES if column is ISSUES else MAX_NAME) for column, wide in widths.items() if wide}

    def left() -> int:
        return width - sum(selected.values()) - _GAP * (len(selected) - 1)

    while left() < 0 and (least := max(selected, key=lambda column: column.rank)).rank:
        del selected[least]
    if ISSUES in selected:
        selected[ISSUES] = min(widths[ISSUES], selected[ISSUES] + left())
    elif left() < 0:  # cut the name, not the state
        selected[COLUMNS[0]] = max(selected[COLUMNS[0]] + left(), 1)
    return selected
