"""Whose batches they are: frames whose life is not certain yet, and whether replay and live stream are of one life."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from kvevents.stream.limits import StreamLimits
from kvevents.stream.state import Anchor
from kvevents.wire import Live

MAX_ANCHORS: Final = 16
"""Each connection of which nothing could be proven needs two; if there are more of them in a row, a doubt stays."""


class Quarantine:
    """Live frames that wait until it is known whether their publisher is the one from before, in the order they came in."""

    def __init__(self, limits: StreamLimits) -> None:
        self._limits = limits
        self._frames: list[Live] = []
        self._bytes = 0
        self._seams = [0]
        """How many waited at each reconnect, behind 0: what was delivered may be of another connection."""

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def newest(self) -> Live | None:
        """The one that came last."""
        return self._frames[-1] if self._frames else None

    def add(self, live: Live) -> bool:
        """Let one more wait; False when there is no room."""
        size = self._bytes + len(live.payload)
        if len(self._frames) >= self._limits.max_pending_batches or size > self._limits.max_pending_bytes:
            return False
        self._frames.append(live)
        self._bytes = size
        return True

    def reconnected(self) -> None:
        """Those that wait are of the connection before."""
        if self._old < len(self._frames):
            self._seams.append(len(self._frames))

    @property
    def _old(self) -> int:
        return self._seams[-1]

    @property
    def has_new(self) -> bool:
        """Whether any came over the connection at hand."""
        return len(self._frames) > self._old

    def around_seams(self) -> list[Anchor]:
        """The last one of each connection and the first one of the next, in order."""
        found = [live for at in self._seams for live in self._frames[max(0, at - 1) : at + 1]]
        return [Anchor(live.seq, live.payload, live=True) for live in found]

    def old_behind(self, seq: int) -> Live | None:
        """Of those that came before the reconnect the first one behind this number."""
        at = bisect_right(self._frames, seq, hi=self._old, key=_number)
        return self._frames[at] if at < self._old else None

    def take(self) -> list[Live]:
        """All of them; none waits any more."""
        frames, self._frames = self._frames, []
        self._bytes = 0
        self._seams = [0]
        return frames

    def take_new(self) -> tuple[int, list[Live]]:
        """How many were of the connection before, which are dropped, and the others."""
        old = self._old
        return old, self.take()[old:]


def _number(live: Live) -> int:
    return live.seq


class FingerprintChain:
    """What replay must repeat, so that all that was delivered is known to be of one life: the *anchors*.

    A life may be like another one up to some number only, or from one number to another. So of each connection since replay and
    stream agreed last, the first batch counts and the newest one.
    """

    __slots__ = ("anchors", "is_lost", "wants_next")

    def __init__(self, anchors: Sequence[Anchor] = (), *, is_lost: bool = False) -> None:
        self.anchors = list(anchors)
        """By their numbers."""
        self.is_lost = is_lost
        """Whether there were more than `MAX_ANCHORS`: those that are left do not prove all."""
        self.wants_next = False
        """Whether the next batch is the first one of a connection of which nothing is proven."""

    def needs(self, *anchors: Anchor | None) -> None:
        """These as well, of which those count that are newer than all others; of the ones after `MAX_ANCHORS` the newest."""
        for anchor in anchors:
            if anchor is None or (self.anchors and anchor.seq <= self.anchors[-1].seq):
                continue
            if len(self.anchors) >= MAX_ANCHORS:
                self.is_lost = True
                self.anchors.pop()
            self.anchors.append(anchor)

    def drop_payloads(self) -> None:
        """Keep digests only."""
        for anchor in self.anchors:
            _ = anchor.digest

    def goes_on(self, first: Anchor) -> None:
        """The first batch behind all anchors, where one is wanted."""
        if not self.anchors or first.seq > self.anchors[-1].seq:
            self.wants_next = False
            self.needs(first)

    @property
    def first(self) -> Anchor | None:
        """By which an answer is recognised."""
        return self.anchors[0] if self.anchors else None

    @property
    def last(self) -> Anchor | None:
        """The newest."""
        return self.anchors[-1] if self.anchors else None

    def behind(self, seq: int) -> Anchor | None:
        """The next one."""
        return next((anchor for anchor in self.anchors if anchor.seq > seq), None)

    def joined(self, other: FingerprintChain) -> FingerprintChain:
        """What both need, of one stream."""
        of_both = {anchor.seq: anchor for anchor in (*other.anchors, *self.anchors)}
        anchors = [of_both[seq] for seq in sorted(of_both)]
        found = FingerprintChain(anchors[:MAX_ANCHORS], is_lost=self.is_lost or other.is_lost)
        found.needs(*anchors[MAX_ANCHORS:])
        return found

    def until(self, seq: int) -> FingerprintChain:
        """The same for what was delivered up to this number."""
        return FingerprintChain([anchor for anchor in self.anchors if anchor.seq <= seq], is_lost=self.is_lost)


class CrossCheck:
    """Whether what was replayed and what came live are of one publisher and of one life.

    A replay endpoint may belong to another engine, for one answer or for all of them, or be answered by the next life while the
    last frames of the one before still wait. One answer comes of one process. So what an answer brings is trusted once the same
    answer repeats a live batch of this connection whose number is not below it, or once another answer does that behind the
    newest batch which the first one brought. That one is *unproven* until then, and later answers begin with it.
    """

    __slots__ = ("agreed_once", "apart", "before", "first_live", "joint", "unproven")

    def __init__(self) -> None:
        self.first_live: int | None = None
        """Number of the first live batch of this connection."""
        self.agreed_once = False
        """Whether replay and a live batch of this connection agree on any number."""
        self.unproven: Anchor | None = None
        """The newest batch that the newest answer has brought or repeated, while nothing shows whose it is."""
        self.apart: list[Anchor] = []
        """The same of answers before it, by their numbers, if the newest one did not begin with them."""
        self.before: Anchor | None = None
        """The live batch before all of those, unless the answer that brought them began with a live one."""
        self.joint: Anchor | None = None
        """The newest live batch that has to be compared."""

    def connected(self) -> None:
        """A new connection begins: what the one before has shown says nothing about its publisher."""
        self.first_live = None
        self.agreed_once = False

    @property
    def anchors(self) -> list[Anchor]:
        """What one answer has to repeat before a live batch, by their numbers."""
        return self.apart if self.unproven is None else [*self.apart, self.unproven]

    def behind(self, seq: int) -> Anchor | None:
        """The next one of the anchors."""
        return next((anchor for anchor in self.anchors if anchor.seq > seq), None)

    def brought(self, replayed: Anchor, last_live: Anchor | None) -> None:
        """The newest answer has brought this batch behind a live one, or not."""
        if not self.anchors and last_live is not None:
            self.before = last_live
            _ = last_live.digest
        self.unproven = replayed

    def repeated(self, anchor: Anchor) -> None:
        """An answer has repeated this one, and all anchors before it."""
        if self.is_missing and all(each.seq <= anchor.seq for each in self.anchors):
            self.apart.clear()
            self.unproven = anchor

    def begin_apart(self) -> None:
        """The next answer will not begin with what is unproven: there is one more of them, if there are not too many."""
        if self.unproven is not None and len(self.apart) < MAX_ANCHORS:
            self.apart.append(self.unproven)
            self.unproven = None

    def agreed(self, seq: int) -> None:
        """The newest answer and the live stream have the same batch `seq`."""
        if self.first_live is None or seq < self.first_live:
            return
        self.agreed_once = True
        if self.unproven is not None and self.unproven.seq <= seq:
            self.unproven = None
        if not self.anchors:
            self.before = None
        if not self.anchors or (self.joint is not None and self.joint.seq <= seq):
            self.joint = None

    def cleared(self) -> None:
        """A live batch has voided all that replay has brought."""
        self.unproven = self.before = None
        self.apart.clear()

    def vouched_for(self, seq: int) -> None:
        """The state after batch `seq` is that of the live publisher, wherever it came from."""
        if self.first_live is not None and seq >= self.first_live:
            self.apart.clear()
            self.agreed(seq)

    @property
    def is_missing(self) -> bool:
        """Whether something delivered may be of another publisher, or of another life, than what comes live."""
        return not self.agreed_once or self.unproven is not None or bool(self.apart)
