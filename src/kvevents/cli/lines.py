"""Deliveries as lines for people."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final, Literal, TypeAlias

from kvevents.cli.console import Part, Span, Style
from kvevents.events import MEDIUM_GPU, BlockRemoved, BlockStored, KVEvent
from kvevents.stream import Batch, Gap, Reset, Trust

Detail: TypeAlias = Literal["quiet", "batches", "events", "tokens"]

MAX_EVENTS_INLINE: Final = 3
"""Events spelled out on a batch's own line; of more, the rest is summed up."""
MAX_HASHES_INLINE: Final = 3
_MAX_RANGES: Final = 3
_HASH_DIGITS: Final = 8
"""Of the 16 that a hash has: as with git, enough for a person to recognise it."""
_TRUST_STYLES: Final[dict[str, Style]] = {"EXACT": "good", "DEGRADED": "warn", "STALE": "bad"}
_INDENT: Final = " " * 14


def plural(count: int, noun: str) -> str:
    """`1 block`, `2 blocks`, `3 batches`."""
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{ending}"


def number_range(first: int, last: int) -> str:
    """`#3`, `#3 to #5`."""
    return f"#{first}" if first == last else f"#{first} to #{last}"


def number_ranges(ranges: Sequence[tuple[int, int]]) -> str:
    """`#3, #5 to #7, ...`."""
    shown = ", ".join(number_range(first, last) for first, last in ranges[:_MAX_RANGES])
    return f"{shown}, ..." if len(ranges) > _MAX_RANGES else shown


def trust_style(trust: Trust) -> Style:
    """How a state of trust is shown."""
    return _TRUST_STYLES.get(trust.name, "dim")


def short_hash(value: int) -> str:
    """The first digits of a block hash in hexadecimal."""
    return f"{value:x}"[:_HASH_DIGITS]


class LineFormat:
    """Lines of one command: `width` is what the longest stream name needs, `detail` how much is said of a batch."""

    def __init__(self, width: int = 0, detail: Detail = "batches") -> None:
        self._width = width
        self._detail = detail

    def batch(self, batch: Batch) -> list[list[Part]]:
        """One line, with `events` and `tokens` followed by one for each event."""
        spelled = self._detail in {"events", "tokens"}
        body = _totals(batch.events) if spelled else _inline(batch.events)
        way: Part = Span("replay ", "warn") if batch.replayed else Span("live   ", "dim")
        head = self._head(batch.ts, batch.source, batch.rank)
        lines = [[*head, f"{f'#{batch.seq}':>7}  ", way, body, *_rejected(batch)]]
        if spelled:
            lines += [[_INDENT, *_described(event, tokens=self._detail == "tokens")] for event in batch.events]
        return lines

    def reset(self, reset: Reset) -> list[Part]:
        """A line that stands out."""
        text = f"RESET   life {reset.incarnation} begins, forget what came before: {reset.reason}"
        return [*self._now(reset.source, reset.rank), Span(text, "loud")]

    def gap(self, gap: Gap) -> list[Part]:
        """A line that stands out, unless a snapshot represents the missing batches."""
        if gap.compacted:
            text = f"SNAPSHOT of batches {gap.first} to {gap.last} follows: nothing is lost"
            return [*self._now(gap.source, gap.rank), Span(text, "dim")]
        text = f"GAP     {number_range(gap.first, gap.last)}: {plural(gap.last - gap.first + 1, 'batch')} lost for good"
        return [*self._now(gap.source, gap.rank), Span(text, "bad")]

    def trust(self, source: str, rank: int, trust: Trust) -> list[Part]:
        """A line that stands out, once something is known."""
        return [*self._now(source, rank), "trust   ", Span(str(trust), trust_style(trust))]

    def _head(self, ts: float, source: str, rank: int) -> list[Part]:
        return [Span(f"{clock(ts)}  ", "dim"), Span(f"{f'{source}/{rank}':<{self._width}}  ", "name")]

    def _now(self, source: str, rank: int) -> list[Part]:
        # Aligned with batches, whose number and way take this much.
        return [*self._head(time.time(), source, rank), " " * 9]


def clock(ts: float) -> str:
    """Local time of day to the millisecond; dashes where a peer sent no time."""
    if ts <= 0:
        return "--:--:--.---"
    return datetime.fromtimestamp(ts, UTC).astimezone().strftime("%H:%M:%S.%f")[:-3]


def _inline(events: Sequence[KVEvent]) -> str:
    if not events:
        return "no events"
    shown = "; ".join(_brief(event) for event in events[:MAX_EVENTS_INLINE])
    rest = events[MAX_EVENTS_INLINE:]
    return f"{shown}; and {_totals(rest)}" if rest else shown


def _totals(events: Sequence[KVEvent]) -> str:
    stored = sum(len(event.block_hashes) for event in events if isinstance(event, BlockStored))
    tokens = sum(len(event.token_ids) for event in events if isinstance(event, BlockStored))
    removed = sum(len(event.block_hashes) for event in events if isinstance(event, BlockRemoved))
    cleared = any(not isinstance(event, BlockStored | BlockRemoved) for event in events)
    parts = [
        f"+{plural(stored, 'block')} with {plural(tokens, 'token')}" if stored or tokens else "",
        f"-{plural(removed, 'block')}" if removed else "",
        "ALL BLOCKS CLEARED" if cleared else "",
    ]
    return f"{plural(len(events), 'event')}: {', '.join(part for part in parts if part) or 'nothing in them'}"


def _brief(event: KVEvent) -> str:
    if isinstance(event, BlockStored):
        parent = "the root" if event.parent_block_hash is None else short_hash(event.parent_block_hash)
        blocks = f"+{plural(len(event.block_hashes), 'block')}{_hashes(event.block_hashes)}"
        return f"{blocks} after {parent}, {plural(len(event.token_ids), 'token')}{_medium(event.medium, 'on')}"
    if isinstance(event, BlockRemoved):
        return f"-{plural(len(event.block_hashes), 'block')}{_hashes(event.block_hashes)}{_medium(event.medium, 'from')}"
    return "ALL BLOCKS CLEARED"


def _hashes(hashes: Sequence[int]) -> str:
    if len(hashes) <= MAX_HASHES_INLINE:
        return "".join(f" {short_hash(value)}" for value in hashes)
    return f" {short_hash(hashes[0])} {short_hash(hashes[1])} .. {short_hash(hashes[-1])}"


def _medium(medium: str | None, word: str) -> str:
    return "" if medium in {None, MEDIUM_GPU} else f" {word} {medium}"


def _described(event: KVEvent, *, tokens: bool) -> list[Part]:
    style: Style = "good" if isinstance(event, BlockStored) else "warn" if isinstance(event, BlockRemoved) else "loud"
    said = [f"{name} {value}" for name, value in _extras(event)]
    parts: list[Part] = [Span(_brief(event), style), *([Span(f"  {', '.join(said)}", "dim")] if said else [])]
    if tokens and isinstance(event, BlockStored):
        parts.append(f"  tokens {list(event.token_ids)}")
    return parts


def _extras(event: KVEvent) -> list[tuple[str, object]]:
    """What an event carries beyond blocks and tokens. Salts and keys stay out: they tell tenants apart, and logs are shared."""
    names = ("lora_name", "group_idx", "kv_cache_spec_kind", "locality", "ownership", "session_id")
    found = [(name, getattr(event, name, None)) for name in names]
    if isinstance(event, BlockStored):
        found.append(("block_size", event.block_size))
    if event.unrecognised:
        found.append(("unrecognised", " ".join(event.unrecognised)))
    return [(name, value) for name, value in found if value is not None]


def _rejected(batch: Batch) -> list[Part]:
    if not batch.rejected:
        return []
    first = batch.rejected[0]
    count = sum(rejected.count for rejected in batch.rejected)
    return [Span(f"  {count} NOT READABLE: {first.reason} ({first.detail})", "warn")]
