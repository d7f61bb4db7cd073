"""Output of deliveries: lines for people, and records for programs; and the loop that `tail` and `record` share.

The page `reference/cli.md` of the documentation has the keys of the records; programs rely on them. The loop iterates over the
deliveries of a subscriber and prints a summary at the end.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final, Literal, TypeAlias

from kvevents.cli.command import ExitCode
from kvevents.cli.console import TRUST_STYLES, Console, Line, Part, Span, Style
from kvevents.cli.signals import StopSignal
from kvevents.diagnosis.text_format import number_range, plural
from kvevents.diagnosis.traffic import IDLE_ADVICE, is_idle
from kvevents.events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from kvevents.stream import Batch, Delivery, Gap, Reset, Source, Trust
from kvevents.subscriber import StreamStatus, Subscriber

Detail: TypeAlias = Literal["batches", "events", "tokens"]

MAX_EVENTS_INLINE: Final = 3
"""Maximum number of events that the line of a batch describes one by one; further events are counted, but not described."""
MAX_HASHES_INLINE: Final = 3
_EVENT_STYLES: Final[dict[type[KVEvent], Style]] = {BlockStored: "good", BlockRemoved: "warn", AllBlocksCleared: "loud"}


def short_hash(value: int) -> str:
    """Return the first 8 hexadecimal digits of a block hash; as in git, 8 digits are enough to recognise a hash."""
    return f"{value:x}"[:8]


class LineFormat:
    """Formats deliveries as lines; `width` is the length of the longest stream name."""

    def __init__(self, width: int = 0, detail: Detail = "batches") -> None:
        self._width = width
        self._detail = detail

    def delivery(self, delivery: Delivery) -> Sequence[Line]:
        """Return the lines of a delivery."""
        if isinstance(delivery, Batch):
            return self.batch(delivery)
        return [self.reset(delivery) if isinstance(delivery, Reset) else self.gap(delivery)]

    def batch(self, batch: Batch) -> list[list[Part]]:
        """Return the line of a batch; with the detail `events` or `tokens`, return also a line for each event."""
        has_event_lines = self._detail in {"events", "tokens"}
        body = _event_totals(batch.events) if has_event_lines else _inline_events(batch.events)
        path: Part = Span("replay ", "warn") if batch.replayed else Span("live   ", "dim")
        head = self._line_head(batch.ts, batch.source, batch.rank)
        lines = [[*head, f"{f'#{batch.seq}':>7}  ", path, body, *_format_rejected(batch)]]
        if has_event_lines:
            lines += [[" " * 14, *_event_line(event, tokens=self._detail == "tokens")] for event in batch.events]
        return lines

    def reset(self, reset: Reset) -> list[Part]:
        """Return the line of a reset."""
        text = f"RESET   incarnation {reset.incarnation} begins, all earlier blocks are void: {reset.reason}"
        return [*self._now(reset.source, reset.rank), Span(text, "loud")]

    def gap(self, gap: Gap) -> list[Part]:
        """Return the line of a gap; if a snapshot replaces the missing batches, return the line of the snapshot."""
        numbers, count = number_range(gap.first, gap.last), gap.last - gap.first + 1
        if gap.compacted:
            span = Span(f"SNAPSHOT of batches {gap.first} to {gap.last} follows: nothing is lost", "dim")
        elif gap.first == 0:  # The batches were probably published before this subscriber connected.
            span = Span(f"GAP     {numbers}: {plural(count, 'earlier batch')} not available", "warn")
        else:
            span = Span(f"GAP     {numbers}: {plural(count, 'batch')} permanently lost", "bad")
        return [*self._now(gap.source, gap.rank), span]

    def trust(self, source: str, rank: int, trust: Trust) -> list[Part]:
        """Return the line of a change of trust."""
        return [*self._now(source, rank), "trust   ", Span(str(trust), TRUST_STYLES[trust.name])]

    def _line_head(self, ts: float, source: str, rank: int) -> list[Part]:
        return [Span(f"{format_clock(ts)}  ", "dim"), Span(f"{f'{source}/{rank}':<{self._width}}  ", "name")]

    def _now(self, source: str, rank: int) -> list[Part]:
        # The spaces are as wide as the sequence number in the line of a batch.
        return [*self._line_head(time.time(), source, rank), " " * 9]


def format_clock(ts: float) -> str:
    """Return a Unix time as local time of day with milliseconds; dashes if the peer sent no time."""
    return "--:--:--.---" if ts <= 0 else datetime.fromtimestamp(ts, UTC).astimezone().strftime("%H:%M:%S.%f")[:-3]


def _inline_events(events: Sequence[KVEvent]) -> str:
    if not events:
        return "no events"
    shown = "; ".join(_short_event_text(event) for event in events[:MAX_EVENTS_INLINE])
    rest = events[MAX_EVENTS_INLINE:]
    return f"{shown}; and {_event_totals(rest)}" if rest else shown


def _event_totals(events: Sequence[KVEvent]) -> str:
    stored = sum(len(event.block_hashes) for event in events if isinstance(event, BlockStored))
    tokens = sum(len(event.token_ids) for event in events if isinstance(event, BlockStored))
    removed = sum(len(event.block_hashes) for event in events if isinstance(event, BlockRemoved))
    parts = [
        f"+{plural(stored, 'block')} with {plural(tokens, 'token')}" if stored or tokens else "",
        f"-{plural(removed, 'block')}" if removed else "",
        "ALL BLOCKS CLEARED" if any(isinstance(event, AllBlocksCleared) for event in events) else "",
    ]
    return f"{plural(len(events), 'event')}: {', '.join(part for part in parts if part) or 'nothing in them'}"


def _short_event_text(event: KVEvent) -> str:
    if isinstance(event, BlockStored):
        parent = "the root" if event.parent_block_hash is None else short_hash(event.parent_block_hash)
        blocks = f"+{plural(len(event.block_hashes), 'block')}{_hash_list(event.block_hashes)}"
        return f"{blocks} after {parent}, {plural(len(event.token_ids), 'token')}{_medium_of(event.medium, 'on')}"
    if isinstance(event, BlockRemoved):
        return f"-{plural(len(event.block_hashes), 'block')}{_hash_list(event.block_hashes)}{_medium_of(event.medium, 'from')}"
    return "ALL BLOCKS CLEARED"


def _hash_list(hashes: Sequence[int]) -> str:
    if len(hashes) <= MAX_HASHES_INLINE:
        return "".join(f" {short_hash(value)}" for value in hashes)
    return f" {short_hash(hashes[0])} {short_hash(hashes[1])} .. {short_hash(hashes[-1])}"


def _medium_of(medium: str | None, word: str) -> str:
    return "" if medium in {None, MEDIUM_GPU} else f" {word} {medium}"


def _event_line(event: KVEvent, *, tokens: bool) -> list[Part]:
    style = _EVENT_STYLES[type(event)]
    details = [f"{name} {value}" for name, value in _detail_text(event)]
    parts: list[Part] = [Span(_short_event_text(event), style), *([Span(f"  {', '.join(details)}", "dim")] if details else [])]
    if tokens and isinstance(event, BlockStored):
        parts.append(f"  tokens {list(event.token_ids)}")
    return parts


def _detail_text(event: KVEvent) -> list[tuple[str, object]]:
    """Return the names and values of rarer fields of an event. Salts and extra keys are omitted: they identify tenants."""
    names = ("lora_name", "group_idx", "kv_cache_spec_kind", "locality", "ownership", "session_id")
    fields = [(name, getattr(event, name, None)) for name in names]
    if isinstance(event, BlockStored):
        fields.append(("block_size", event.block_size))
    if event.unknown_fields:
        fields.append(("unknown_fields", " ".join(event.unknown_fields)))
    return [(name, value) for name, value in fields if value is not None]


def _format_rejected(batch: Batch) -> list[Part]:
    if not batch.rejected:
        return []
    first = batch.rejected[0]
    count = sum(rejected.count for rejected in batch.rejected)
    return [Span(f"  {count} NOT READABLE: {first.reason} ({first.detail})", "warn")]


# --- records

_STREAM_KEYS: Final = ("source", "rank", "incarnation")
BATCH_KEYS: Final = (*_STREAM_KEYS, "seq", "ts", "replayed", "events", "rejected")


def delivery_record(delivery: Delivery) -> dict[str, Any]:
    """Return the record of a delivery. As in vLLM, events are maps with a `type`, and omit fields with default values."""
    if isinstance(delivery, Batch):
        rejected = [_select_fields(item, ("reason", "detail", "index", "count")) for item in delivery.rejected]
        return {"kind": "batch", **_select_fields(delivery, BATCH_KEYS), "rejected": rejected}
    if isinstance(delivery, Reset):
        return {"kind": "reset", **_select_fields(delivery, (*_STREAM_KEYS, "reason"))}
    return {"kind": "gap", **_select_fields(delivery, (*_STREAM_KEYS, "first", "last", "compacted"))}


def _select_fields(item: object, keys: Iterable[str]) -> dict[str, Any]:
    return {key: getattr(item, key) for key in keys}


def trust_record(source: str, rank: int, trust: Trust) -> dict[str, Any]:
    """Return the record of a change of trust."""
    return {"kind": "trust", "source": source, "rank": rank, "trust": trust.name, "reason": trust.reason}


# --- the loop

POLL_SECONDS: Final = 0.1
"""If no batch arrives, seconds between two checks of the limits, of signals, and of the reader of stdout."""
BUSY_POLL_SECONDS: Final = 0.05
"""If batches arrive, seconds between two checks of the limits, of signals, and of the reader of stdout."""
MAX_SETTLE_SECONDS: Final = 1.0
"""Maximum seconds to wait at the end, even after Ctrl-C, for streams that are REPLAYING. Normally they need milliseconds."""


def _count_delivery(totals: Counter[str], delivery: Delivery) -> None:
    """Add a delivery to the counts of its stream, which `_summarize` prints."""
    if isinstance(delivery, Batch):
        totals.update(batches=1, replayed=int(delivery.replayed), unreadable=int(bool(delivery.rejected)))
    elif isinstance(delivery, Reset):
        totals["resets"] += 1
    else:
        kind = "compacted" if delivery.compacted else "earlier" if delivery.first == 0 else "lost"
        totals.update({kind: delivery.last - delivery.first + 1, "gaps": int(kind == "lost")})


@contextmanager
def subscribe(sources: Sequence[Source]) -> Iterator[Subscriber[Batch]]:
    """Yield a subscriber. Unlike its constructor, `add` logs no missing replay endpoint: the command prints a note instead."""
    with Subscriber() as subscriber:
        for source in sources:
            subscriber.add(source)
        yield subscriber


class DeliveryLoop:
    """Iterates over the deliveries of a subscriber until a signal arrives, or a limit from the command line is reached."""

    def __init__(self, subscriber: Subscriber, args: Namespace, stop: StopSignal) -> None:
        self._totals: defaultdict[tuple[str, int], Counter[str]] = defaultdict(Counter)
        self._subscriber = subscriber
        self._stop = stop
        self._idle_timeout: float | None = args.idle_timeout
        self._delivered_at = time.monotonic()
        self._until = None if args.duration is None else stop.began + args.duration

    @property
    def batches(self) -> int:
        """Number of batches of all streams that have arrived."""
        return sum(totals["batches"] for totals in self._totals.values())

    def __iter__(self) -> Iterator[Delivery | None]:
        """Yield deliveries in order. If no delivery is available, yield None, so that the caller can do other work."""
        idle_at = 0.0
        while not self._is_over(now := time.monotonic()):
            delivery = self._subscriber.receive(timeout=0)
            if delivery is None and now >= idle_at:
                idle_at = now + BUSY_POLL_SECONDS
                yield None
            delivery = delivery or self._subscriber.receive(timeout=POLL_SECONDS)
            if delivery is not None:
                self._delivered_at = time.monotonic()
                _count_delivery(self._totals[delivery.source, delivery.rank], delivery)
                yield delivery

    def _is_over(self, now: float) -> bool:
        if self._stop.requested or (self._until is not None and now >= self._until):
            return True
        return self._idle_timeout is not None and now >= self._delivered_at + self._idle_timeout

    def print_summary(self, console: Console) -> int:
        """Print a note about each stream, and return the exit code."""
        self._wait_for_replays()
        for status in self._subscriber.statuses():
            console.note(*_summarize(status, self._totals[status.source, status.rank]))
            if is_idle(status):
                console.note(f"nothing came live: {IDLE_ADVICE}")
        if any(self._totals.values()) or self._idle_timeout is None or self._stop.requested:
            return ExitCode.OK
        endpoint = self._subscriber.statuses()[0].endpoint
        text = f"nothing arrived within {self._idle_timeout:g} s; `kvevents doctor {endpoint}` finds out why"
        console.note(Span(text, "warn"))
        return ExitCode.NOTHING_ARRIVED

    def _wait_for_replays(self) -> None:
        """Wait until no stream is REPLAYING, so that the trust of all streams is known. Discard further deliveries."""
        until = time.monotonic() + MAX_SETTLE_SECONDS
        while time.monotonic() < until:  # A second signal raises KeyboardInterrupt here.
            if all(status.trust != Trust.REPLAYING for status in self._subscriber.statuses()):
                return
            self._subscriber.receive(timeout=POLL_SECONDS)


def _summarize(status: StreamStatus, totals: Counter[str]) -> list[Part]:
    counts = f"{plural(totals['batches'], 'batch')}, {totals['replayed']} replayed, "
    lost = Span(f"{plural(totals['gaps'], 'gap')}, {totals['lost']} lost", "bad" if totals["gaps"] else "plain")
    parts: list[Part] = [Span(f"{status.source}/{status.rank}: ", "name"), counts, lost]
    parts.append(f", {plural(totals['resets'], 'reset')}, ")
    if totals["earlier"]:
        parts.append(f"{plural(totals['earlier'], 'earlier batch')} not available, ")
    if totals["compacted"]:
        parts.append(f"a snapshot of {plural(totals['compacted'], 'older batch')}, ")
    if totals["unreadable"]:
        parts.append(Span(f"{totals['unreadable']} not fully readable, ", "warn"))
    return [*parts, "trust ", Span(str(status.trust), TRUST_STYLES[status.trust.name])]
