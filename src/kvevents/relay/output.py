"""What a relay says: batches under its own numbers, written down before they are sent."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Final

from kvevents.events import BlockRemoved, Heartbeat, KVEvent, KVEventBatch
from kvevents.index import Applied
from kvevents.publisher.broadcast import Broadcast
from kvevents.publisher.kept import Numbered
from kvevents.relay.journal import Batches, Journal, Origin
from kvevents.relay.mirror import Mirror
from kvevents.relay.rewriting import without_heartbeats
from kvevents.relay.spelling import MAX_PAYLOAD, Spelling
from kvevents.stream import Findings, RawBatch, Trust
from kvevents.wire import decode_batch

OWN: Final = 65_535
"""In the journal the upstream of what the relay says of its own: heartbeats, and what makes a hole visible."""
BACK: Final = 32_768
"""Added to the ordinal of an upstream: of what takes back what it told, which is no batch of it."""
_MAX_REASON: Final = 1_000
"""Characters of a heartbeat's reason."""


class Output:
    """One numbered stream: each batch into the mirror, the journal and the replay buffer, and then to whoever listens.

    `mirror` has what consumers have. The journal is None where nothing outlives the process. `number` is the first to give;
    where it is not 0, the one before may be of a hole, or was written down and never sent.
    """

    def __init__(
        self,
        broadcast: Broadcast,
        mirror: Mirror,
        journal: Journal | None,
        spelling: Spelling,
        number: int,
        every: float,
    ) -> None:
        self.number = number
        """The next one to give."""
        self.holes = 0
        """Numbers that no batch has, in this process."""
        self.heartbeats = 0
        self.since_beat = 0
        """Batches behind the last heartbeat."""
        self._broadcast: Final = broadcast
        self._mirror: Final = mirror
        self._journal: Final = journal
        self._spelling: Final = spelling
        self._every: Final = every
        self._unseen = number > 0
        """Whether the newest number is one that consumers cannot have seen."""

    def carry(self, ordinal: int, origins: Sequence[RawBatch], payloads: Sequence[bytes]) -> dict[int, Applied]:
        """Send on batches of one upstream as `payloads`; by their place, what those have shown that were not simply applied.

        A number is left out before each that cannot be read by all, and one that nobody reads is not sent.
        """
        self._spelling.note(payloads)
        applied = self._mirror.apply(payloads)
        first = 0
        for at, outcome in applied.items():
            findings = outcome.findings
            if findings is None or not (findings.heartbeat or costs_events(findings)):
                continue
            self._send(ordinal, origins[first:at], payloads[first:at])
            self._send_odd(ordinal, origins[at], payloads[at], findings)
            first = at + 1
        self._send(ordinal, origins[first:], payloads[first:])
        return applied

    def note_origin(self, ordinal: int, batches: Sequence[RawBatch]) -> None:
        """Before what is made of batches of one upstream is sent: have it prove after a kill that it has told them."""
        newest = batches[-1]
        if self._journal is not None:
            digest = sha256(newest.payload).digest()
            self._journal.note_origin(ordinal, Origin(newest.incarnation, newest.seq, digest))

    def say(self, events: Iterable[KVEvent], rank: int | None = 0, upstream: int = OWN) -> None:
        """Send events of the relay's own."""
        self._spelling.look()
        self.tell([self._spelling.encode(KVEventBatch(time.time(), list(events), rank))], upstream)

    def tell(self, payloads: Sequence[bytes], upstream: int = OWN) -> None:
        """Send payloads of the relay's own; a relay that is killed has said all of them, or none."""
        self._mirror.apply(payloads)
        none = [0] * len(payloads)
        self._write_and_send([upstream] * len(payloads), none, none, payloads)

    def beat(self, trust: Trust, rank: int | None = 0) -> None:
        """Send a heartbeat."""
        self.heartbeats += 1
        reason = trust.reason[:_MAX_REASON]
        told = Heartbeat(self._mirror.digest(), self._every, trust.name, reason, self._broadcast.incarnation)
        self.say([BlockRemoved([], heartbeat=told)], rank)
        self.since_beat = 0

    def cut(self, rank: int | None = 0) -> None:
        """Send a batch of nothing as the barrier of a placement snapshot."""
        payload = self._spelling.encode(KVEventBatch(time.time(), [], rank))
        self._write(Batches(self.number, [OWN], [0], [0], [payload]))
        self._broadcast.cut(self.number, payload)
        self.number += 1
        self.since_beat += 1
        self._unseen = False

    def lose(self) -> None:
        """Leave a number out: every consumer sees that something is missing, once another number follows."""
        if self._journal is not None:
            self._journal.skip(self.number)
        self.number += 1
        self.holes += 1
        self._unseen = True

    def show(self, rank: int | None = 0) -> None:
        """Have the newest number be one that consumers see."""
        if self._unseen:
            self.say([], rank)

    def _send(self, ordinal: int, origins: Sequence[RawBatch], payloads: Sequence[bytes]) -> None:
        lives, seqs = [origin.incarnation for origin in origins], [origin.seq for origin in origins]
        self._write_and_send([ordinal] * len(payloads), lives, seqs, payloads)

    def _send_odd(self, ordinal: int, origin: RawBatch, payload: bytes, findings: Findings) -> None:
        if costs_events(findings):
            # Before the batch: a relay that is killed in between says it again.
            self.lose()
        own = [payload]
        if findings.heartbeat is not None:
            batch = decode_batch(payload).batch
            kept = KVEventBatch(batch.ts, without_heartbeats(batch.events), batch.data_parallel_rank)
            own = self._spelling.payloads(kept)
        for each in own:
            if len(each) <= MAX_PAYLOAD:
                self._send(ordinal, [origin], [each])
            elif each is not payload:
                self.lose()

    def _write_and_send(self, upstreams: list[int], lives: list[int], seqs: list[int], payloads: Sequence[bytes]) -> None:
        """Columns of the journal, rather than an object for each batch."""
        if not payloads:
            return
        self._write(Batches(self.number, upstreams, lives, seqs, list(payloads)))
        numbered: list[Numbered] = list(enumerate(payloads, self.number))
        self._broadcast.send(numbered)
        self.number += len(payloads)
        self.since_beat += len(payloads)
        self._unseen = False

    def _write(self, batches: Batches) -> None:
        if self._journal is not None:
            self._journal.append(batches)


def costs_events(findings: Findings) -> bool:
    """Whether events are missing of what was read."""
    return any(each.costs_events for each in findings.rejected)
