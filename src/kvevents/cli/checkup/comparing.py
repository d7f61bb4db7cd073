"""Whether a replay endpoint belongs to the stream that is published: live batches are compared with what it holds of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvevents.cli.asking import Reply, ask
from kvevents.cli.checkup.findings import Finding, fail, ok, warn
from kvevents.cli.checkup.numbers import Numbers
from kvevents.cli.lines import number_range, plural
from kvevents.security import Curve

SILENCE: Final = 1.0
"""Seconds without a message after which an answer has ended. Engines pause 0.2 s at most."""
SECONDS: Final = 5.0
"""Seconds for a whole answer."""
TRIES: Final = 3
"""Requests until some compared number was in an answer: answers may have holes, and engines publish before they store."""

_OWN: Final = "name this engine's own replay endpoint with --replay"
_LOSSY: Final = (
    "kvevents repairs this by replay, other consumers do not: is there a slow network or a proxy between, or does the engine"
    " send more than its send queue (hwm) holds?"
)
_UNREPAIRED: Final = (
    "if a proxy or a slow network lost them, a replay endpoint repairs it; a number that replay does not hold either was never"
    " published: see the engine's log"
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Live batches beside what a replay endpoint holds of them."""

    replies: tuple[Reply, ...]
    agreeing: int = 0
    different: tuple[int, ...] = ()
    """Numbers of which it holds other contents."""
    absent: tuple[int, ...] = ()
    """Numbers that were in no answer."""

    @property
    def answered(self) -> bool:
        """Whether anything came back."""
        return any(reply.answered for reply in self.replies)

    @property
    def same_stream(self) -> bool | None:
        """Whether the endpoint belongs to the stream; None if nothing could be compared."""
        if self.agreeing:
            return True
        return False if self.different or (self.absent and self.answered) else None

    @property
    def difference(self) -> str:
        """In words how it is known that the endpoint belongs to another stream."""
        if self.different:
            return f"of #{self.different[0]} it holds other contents than were published"
        return f"it does not hold {number_range(self.absent[0], self.absent[-1])}, which arrived just now"


def compare(endpoint: str, numbers: Numbers, curve: Curve | None = None) -> Comparison:
    """Ask `endpoint` for the newest live batches and compare them with what came live."""
    live = dict(numbers.newest)
    replies: list[Reply] = []
    held: dict[int, bytes] = {}
    while live and len(replies) < TRIES and not held.keys() & live.keys():
        replies.append(ask(endpoint, min(live), silence=SILENCE, seconds=SECONDS, curve=curve))
        held |= {batch.seq: batch.payload for batch in replies[-1].batches}
        if not replies[-1].answered:
            break
    agreeing = sum(held.get(seq) == payload for seq, payload in live.items())
    different = tuple(seq for seq, payload in live.items() if held.get(seq, payload) != payload)
    return Comparison(tuple(replies), agreeing, different, tuple(seq for seq in live if seq not in held))


def check_stream(endpoint: str, comparison: Comparison) -> Finding | None:
    """Whether `endpoint` belongs to the published stream; None if nothing can be said."""
    if comparison.same_stream is None:
        return None
    if comparison.same_stream:
        text = f"{endpoint} holds {plural(comparison.agreeing, 'live batch')} as published: it belongs to this stream"
        return ok("replay", text)
    return fail("replay", f"{endpoint} belongs to another stream: {comparison.difference}", _OWN)


def check_losses(numbers: Numbers, endpoint: str | None, curve: Curve | None = None) -> Finding | None:
    """Whether live batches were lost on the way; None if no numbers were seen.

    `endpoint` is a replay endpoint that belongs to the stream: a number that it does not hold either was never published.
    """
    if not numbers.received:
        return None
    if not numbers.missing:
        return ok("losses", f"{plural(numbers.received, 'live batch')}, no number missing between them")
    text = f"{numbers.missing:,} of {numbers.missing + numbers.received:,} live batches did not arrive ({numbers.shown})"
    if endpoint is None or not numbers.gaps:
        return warn("losses", text, _UNREPAIRED)
    first = numbers.gaps[0][0]
    missing = {seq for first, last in numbers.gaps for seq in range(first, last + 1)}
    held: set[int] = set()
    for _ in range(TRIES):
        reply = ask(endpoint, first, silence=SILENCE, seconds=SECONDS, curve=curve)
        held |= missing & {batch.seq for batch in reply.batches}
        if held == missing or not reply.answered:
            break
    return warn("losses", f"{text}; replay holds {len(held):,} of these {len(missing):,}", _LOSSY if held else _UNREPAIRED)
