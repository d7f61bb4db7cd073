"""The terminal view of `kvevents top`. In a small terminal, the view omits columns and the final rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from kvevents.cli.console import TRUST_STYLES, Line, Part, Span, Style, cell_width, cut_cell, format_table
from kvevents.client.polling import PolledSource, PollResult
from kvevents.client.schemas import StatsAnswer
from kvevents.diagnosis.text_format import duration, percentage, plural, size

MAX_CELL_WIDTH: Final = 40
"""Maximum width of a cell if the table is wider than the terminal."""
MAX_FAULT_LINES: Final = 3
"""Maximum number of discovery faults that are shown; further faults are counted, but not shown."""
_COLUMN_GAP: Final = 2


@dataclass(frozen=True, slots=True)
class SourceColumn:
    """One column of the table of sources."""

    title: str
    cell: Callable[[PolledSource, float], str]
    """Returns the text for a source; the second argument is the current Unix time."""
    rank: int
    """Order of omission in a narrow view: columns with the largest rank first, columns with rank 0 never."""
    style: Callable[[PolledSource], Style] = lambda _: "plain"


def _format_count(value: int) -> str:
    return f"{value:,}" if value else "-"


def _format_rate(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}" if value < 10 else f"{value:,.0f}"


def _format_lag(source: PolledSource, _now: float) -> str:
    seconds = source.lag_seconds
    return "-" if seconds is None else f"{1000 * seconds:.0f} ms" if abs(seconds) < 1 else duration(seconds)


def _format_load(source: PolledSource, _now: float) -> str:
    if source.load is None:
        return "?" if source.load_fault is not None else ""
    return f"{source.load.running:,} / {source.load.waiting:,}"


def _count_style(count: int) -> Style:
    return "bad" if count else "dim"


ISSUES: Final = SourceColumn("why", lambda source, _: source.issues, 1)
"""The column with the problems of a source, which gets the width that the other columns leave."""
MIN_ISSUES_WIDTH: Final = 16
COLUMNS: Final = (
    SourceColumn("worker", lambda source, _: source.name, 0, lambda _: "name"),
    SourceColumn("model", lambda source, _: source.model, 9),
    SourceColumn(
        "trust",
        lambda source, _: source.trust.state + " attested" * source.trust.attested,
        0,
        lambda source: TRUST_STYLES[source.trust.state],
    ),
    SourceColumn("blocks", lambda source, _: f"{source.blocks:,}", 2),
    SourceColumn(
        "tiers", lambda source, _: " ".join(f"{tier} {blocks:,}" for tier, blocks in source.tiers.items() if blocks), 10
    ),
    SourceColumn("batches/s", lambda source, _: _format_rate(source.rate), 4),
    SourceColumn("running / waiting", _format_load, 6, lambda source: "bad" if source.load_fault is not None else "plain"),
    SourceColumn("lag", _format_lag, 6),
    SourceColumn("last", lambda one, now: "never" if one.last_event is None else duration(max(now - one.last_event, 0.0)), 5),
    SourceColumn("lost", lambda source, _: _format_count(source.lost), 3, lambda source: _count_style(source.lost)),
    SourceColumn("gaps", lambda source, _: _format_count(source.gap_count), 8, lambda source: _count_style(source.gap_count)),
    SourceColumn("restarts", lambda source, _: _format_count(source.resets), 7),
    ISSUES,
)
WIDE_COLUMNS: Final = (
    *COLUMNS,
    SourceColumn("endpoint", lambda source, _: source.endpoint, 0),
    SourceColumn("replay", lambda source, _: source.replay_endpoint or "", 0),
    SourceColumn("url", lambda source, _: source.url or "", 0),
    SourceColumn("origin", lambda source, _: source.origin, 0),
    SourceColumn("labels", lambda source, _: ",".join(f"{key}={value}" for key, value in source.labels.items()), 0),
)
_LEFT_ALIGNED: Final = frozenset({"worker", "model", "trust", "tiers", "why", "endpoint", "replay", "url", "origin", "labels"})
"""Titles of the columns with text."""
UNLIMITED_WIDTH: Final = 10_000
"""Width of a view that is written to a file or a pipe: wide enough for all columns."""


class TopView:
    """Draws frames with at most `limit` sources."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._last: PollResult | None = None

    def draw(self, frame: PollResult, width: int, height: int | None) -> list[Line]:
        """Return the lines of a frame. If the poll failed, the lines show the error and then the newest successful frame."""
        if frame.error is None:
            self._last = frame
        shown = self._last
        lines = [*_failure_lines(frame, shown), *([] if shown is None else _head_lines(shown, width))]
        if shown is not None and shown.sources:
            room = len(shown.sources) if height is None else max(height - len(lines) - 3, 1)
            rows = shown.sources[: min(room, self._limit or room)]
            omitted_count = len(shown.sources) - len(rows)
            lines += [[], *source_table(rows, shown.at, width, is_old=frame.error is not None)]
            lines += [[Span(f"and {omitted_count:,} more", "dim")]] if omitted_count else []
        return [cut_cell(line, width) for line in lines]


# --- the lines above the table


def _failure_lines(frame: PollResult, last: PollResult | None) -> list[Line]:
    if frame.error is None or frame.failing_since is None:
        return []
    since = datetime.fromtimestamp(frame.failing_since, UTC).astimezone().strftime("%H:%M:%S")
    text = f" cannot be reached since {since} ({duration(frame.at - frame.failing_since)}): {frame.error}"
    lines: list[Line] = [[Span(frame.service, "bold"), Span(text, "bad")]]
    return lines if last is None else [*lines, [Span("its last state:", "dim")]]


def _head_lines(frame: PollResult, width: int) -> list[Line]:
    stats, ready = frame.stats, frame.ready
    if stats is None or ready is None:
        return []
    state = Span("ready", "good") if ready.ready else Span("not ready", "warn")
    release = f"  kvevents {stats.version}, up {duration(stats.uptime_seconds)}  "
    states = sorted(stats.sources.items(), key=lambda state: list(TRUST_STYLES).index(state[0]))
    counted = [Span(f"  {count:,} {state}", TRUST_STYLES[state]) for state, count in states]
    return [
        [Span(frame.service, "bold"), release, state, f": {ready.why}"],
        [Span(plural(len(frame.sources), "source"), "bold"), *counted],
        *_wrap_facts(_list_facts(frame, stats), width),
        *fault_lines(frame.faults),
    ]


def _list_facts(frame: PollResult, stats: StatsAnswer) -> list[Part]:
    limit = "" if stats.memory_limit is None else f" of {size(stats.memory_limit)}"
    rate = "" if frame.lookups_per_second is None else f" ({_format_rate(frame.lookups_per_second)}/s)"
    facts: list[Part] = [
        f"{plural(stats.blocks, 'block')} ({stats.unique_blocks:,} unique)",
        f"{size(stats.index_bytes)}{limit}",
        f"{_format_rate(stats.batches_per_second)} batches/s",
        f"{plural(stats.lookups, 'lookup')}{rate}, {percentage(stats.hits, stats.lookups)} hit",
    ]
    if stats.tiers:
        facts.insert(1, ", ".join(f"{tier} {count:,}" for tier, count in stats.tiers.items() if count))
    if stats.evicted:
        facts.append(Span(f"{stats.evicted:,} evicted", "warn"))
    if stats.snapshot_fault is not None:
        facts.append(Span(stats.snapshot_fault, "bad"))
    return facts


def _wrap_facts(facts: Sequence[Part], width: int) -> list[Line]:
    """Return the facts on as few lines as possible, without a line break inside a fact."""
    lines: list[list[Part]] = []
    for fact in facts:
        if lines and cell_width([*lines[-1], "   ", fact]) <= width:
            lines[-1] += ["   ", fact]
        else:
            lines.append([fact])
    return [*lines]


def fault_lines(faults_by_provider: Mapping[str, Sequence[str]]) -> list[Line]:
    """Return lines with the first faults of discovery, and the number of further faults."""
    faults = [f"{name}: {sentence}" for name, sentences in faults_by_provider.items() for sentence in sentences]
    further_count = len(faults) - MAX_FAULT_LINES
    note = [f"and {plural(further_count, 'fault')} more: see `kvevents doctor`"] if further_count > 0 else []
    return [[Span(sentence, "bad")] for sentence in [*faults[:MAX_FAULT_LINES], *note]]


# --- the table


def source_table(
    sources: Sequence[PolledSource],
    now: float,
    width: int = UNLIMITED_WIDTH,
    columns: Sequence[SourceColumn] = COLUMNS,
    *,
    is_old: bool = False,
) -> list[Line]:
    """Return the table of sources at the time `now`, without columns that are empty or do not fit; dim if `is_old`."""
    cells = {
        column: [Span(column.cell(source, now), "dim" if is_old else column.style(source)) for source in sources]
        for column in columns
    }
    widest = {column: max(map(cell_width, spans)) for column, spans in cells.items()}
    widths = _select_columns({column: max(wide, len(column.title)) for column, wide in widest.items() if wide}, width)
    rows = list(zip(*(cells[column] for column in widths), strict=True))
    return format_table([column.title for column in widths], rows, _LEFT_ALIGNED, list(widths.values()))


def _select_columns(widths: dict[SourceColumn, int], width: int) -> dict[SourceColumn, int]:
    """Return the columns that fit, with their widths."""
    if sum(widths.values()) + _COLUMN_GAP * (len(widths) - 1) <= width:
        return widths
    selected = {column: min(wide, MIN_ISSUES_WIDTH if column is ISSUES else MAX_CELL_WIDTH) for column, wide in widths.items()}

    def free_width() -> int:
        return width - sum(selected.values()) - _COLUMN_GAP * (len(selected) - 1)

    while free_width() < 0 and (least := max(selected, key=lambda column: column.rank)).rank:
        del selected[least]
    if ISSUES in selected:
        selected[ISSUES] = min(widths[ISSUES], selected[ISSUES] + free_width())
    elif free_width() < 0:  # Cut the names of workers, which are in the first column, but not their states.
        selected[COLUMNS[0]] = max(selected[COLUMNS[0]] + free_width(), 1)
    return selected
