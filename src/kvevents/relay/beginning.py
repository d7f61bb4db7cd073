"""How a relay begins: with what its journal holds, where that is the same stream, or anew."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, Final, NamedTuple

import msgspec

from kvevents.events import AllBlocksCleared, KVEventBatch
from kvevents.index import Applied
from kvevents.publisher.buffer import Collapsed, ReplayBuffer
from kvevents.relay.journal import Journal, Origin, Recovered, Relayed
from kvevents.relay.merging import Residents
from kvevents.relay.mirror import Mirror
from kvevents.relay.output import BACK, OWN
from kvevents.relay.rewriting import places
from kvevents.relay.settings import RelaySettings
from kvevents.relay.spelling import Spelling, payloads_of
from kvevents.relay.upstreams import Position, agreeing
from kvevents.stream import Checkpoint, Fingerprint
from kvevents.structs import prepared
from kvevents.wire import decode_batch

CHUNK: Final = 1_000
"""Batches of a journal that are read before they are taken in."""
_ASIDE: Final = b"\xc1aside"
"""How the part of a snapshot begins that is not of its state; no payload begins like this."""


class Beginning(NamedTuple):
    """Where a relay stands when it begins."""

    incarnation: int
    number: int = 0
    checkpoints: tuple[Checkpoint, ...] = ()
    known: Mapping[int, Position] = {}
    residents: Mapping[int, Residents] = {}
    resumed: bool = False
    told: str = "began anew"
    """For an operator."""
    seconds: float = 0.0


@prepared
class Mark(msgspec.Struct, frozen=True):
    """What the relay writes into its journal, again and again."""

    fingerprint: str
    checkpoints: list[Checkpoint]
    """By ordinal of the upstream."""
    form: str = ""
    """See `Spelling.form`."""
    salted: bool = False
    """Whether a prompt with a salt was told by its keys: what follows it cannot be keyed by who knows those only."""


class _Newest:
    """The newest batch of each upstream that was sent on after the checkpoints were written.

    What was sent on is passed over, so the upstream has to prove that it has told that. A batch with a heartbeat was not
    written down as it came: one of nothing else proves nothing, and a part of a snapshot, which the upstream cannot repeat, has
    it followed anew.
    """

    def __init__(self, checkpoints: Sequence[Checkpoint]) -> None:
        self._checkpoints = checkpoints
        self._found: dict[int, Relayed] = {}

    def look(self, records: Iterable[Relayed]) -> None:
        """Take note of records, in their order."""
        for record in records:
            if record.upstream >= len(self._checkpoints):
                continue
            checkpoint = self._checkpoints[record.upstream]
            if record.incarnation == checkpoint.incarnation and record.seq > checkpoint.last_seq and _tells(record.payload):
                self._found[record.upstream] = record

    def required_by(self, ordinal: int) -> Checkpoint:
        """The checkpoint of an upstream, with that batch."""
        checkpoint, newest = self._checkpoints[ordinal], self._found.get(ordinal)
        return checkpoint if newest is None else checkpoint.requiring(newest.seq, newest.payload)


def _required(checkpoint: Checkpoint, origin: Origin | None) -> Checkpoint:
    """A checkpoint of an upstream whose batches were written anew: it must hold the newest one as it came, too."""
    if origin is None or origin.incarnation != checkpoint.incarnation or not checkpoint.anchors:
        return checkpoint
    proof = checkpoint.proof()
    proof.needs(Fingerprint(origin.seq, origin.digest, live=False).anchor())
    return msgspec.structs.replace(checkpoint, anchors=tuple(map(Fingerprint.of, proof.anchors)), proof_lost=proof.is_lost)


def _tells(payload: bytes) -> bool:
    """Whether a batch has something besides a heartbeat."""
    return any(isinstance(each, AllBlocksCleared) or each.block_hashes for each in decode_batch(payload).batch.events)


class _Found(NamedTuple):
    """What a journal holds, where the relay can go on with it."""

    recovered: Recovered
    mark: Mark
    parts: list[bytes]
    aside: Aside


def begin(
    settings: RelaySettings,
    journal: Journal | None,
    buffer: ReplayBuffer,
    mirror: Mirror,
    plain: Mapping[int, Mirror],
    spelling: Spelling,
) -> Beginning:
    """Fill `buffer` and the mirrors from the journal, or begin anew. The journal is ready to be appended to afterwards.

    `mirror` is of what consumers have, `plain` of what upstreams have told, by ordinal. Raises `JournalError` where the journal
    was found to be whole, and cannot be read a second time.
    """
    if journal is None:
        return Beginning(_incarnation_after(None))
    began = time.monotonic()
    recovered = journal.recover()
    found = _usable(settings, recovered)
    if isinstance(found, str):
        incarnation = _incarnation_after(recovered.incarnation)
        journal.begin(incarnation)
        return Beginning(incarnation, told=f"began anew: {found}", seconds=time.monotonic() - began)
    spelling.assume(found.mark.form)
    newest = _Newest(found.mark.checkpoints)
    residents = _restore(settings, found, buffer, mirror, plain, newest)
    journal.resume(recovered)
    told = f"went on with number {recovered.next_number} of incarnation {recovered.incarnation}"
    known = {at: place for at, place in recovered.positions.items() if at < len(settings.upstreams)}
    return Beginning(
        recovered.incarnation or 0,
        recovered.next_number,
        tuple(
            agreeing(_required(each, recovered.origins.get(at)) if settings.rewrites else newest.required_by(at), known.get(at))
            for at, each in enumerate(found.mark.checkpoints)
        ),
        known,
        residents,
        True,
        told,
        time.monotonic() - began,
    )


def _incarnation_after(before: int | None) -> int:
    """Higher than any before, and told apart in a log: milliseconds since the epoch, unless the clock went back."""
    return max(int(time.time() * 1000), 0 if before is None else before + 1)


def _usable(settings: RelaySettings, recovered: Recovered) -> _Found | str:
    """What there is to go on with, or why there is nothing."""
    if recovered.doubt or recovered.incarnation is None:
        return recovered.doubt or "the journal is new"
    try:
        mark = msgspec.msgpack.decode(recovered.mark or b"", type=Mark)
    except msgspec.MsgspecError:
        return "the journal says nothing of its upstreams"
    try:
        return _unfit(settings, mark) or _Found(recovered, mark, *_parts(recovered))
    except msgspec.MsgspecError as error:
        return f"the journal's snapshot is not one of this release: {error}"


def _unfit(settings: RelaySettings, mark: Mark) -> str | None:
    if mark.fingerprint != settings.fingerprint():
        return "the journal is of other upstreams, or of another dialect or treatment of tokens"
    if mark.salted and settings.tokens == "hash":
        return "prompts had salts, which the journal has in no form, so what continues them could not be keyed"
    return None


def _restore(
    settings: RelaySettings,
    found: _Found,
    buffer: ReplayBuffer,
    mirror: Mirror,
    plain: Mapping[int, Mirror],
    newest: _Newest,
) -> dict[int, Residents]:
    """Native code takes in the same payloads for the buffer and for each mirror, which goes on side by side."""
    recovered, parts = found.recovered, found.parts
    mirrors = [mirror, *plain.values()]
    with ThreadPoolExecutor(max(1, len(mirrors))) as pool:
        doing = [pool.submit(mirror.apply, parts) for mirror in mirrors]
        buffer.resume(recovered.snapshot_number, parts, recovered.partial, rank=settings.upstreams[0].rank)
        batches = recovered.batches()
        while chunk := list(islice(batches, CHUNK)):
            _finish(doing)
            payloads = [each.payload for each in chunk]
            doing = [pool.submit(mirror.apply, payloads) for mirror in mirrors]
            buffer.extend([(each.number, each.payload) for each in chunk])
            newest.look(chunk)
        _finish(doing)
    if len(settings.upstreams) == 1:
        return {}
    residents = _residents(settings, recovered, found.aside)
    _part(plain, residents)
    return residents


def _finish(doing: list[Future[dict[int, Applied]]]) -> None:
    for each in doing:
        each.result()


def _residents(settings: RelaySettings, recovered: Recovered, aside: Aside) -> dict[int, Residents]:
    """Whose blocks are whose: what a reset takes back was written down as the upstream's own, too."""
    fields = places(settings.spelling)
    found = {at: Residents(fields) for at in range(len(settings.upstreams))}
    for at, piece in aside.residents:
        found[at].restore(piece)
    for record in recovered.batches():
        if record.number > aside.number and record.upstream != OWN:
            found[record.upstream % BACK].settle(decode_batch(record.payload).batch.events)
    return found


def _part(plain: Mapping[int, Mirror], residents: Mapping[int, Residents]) -> None:
    """Of mirrors that have taken in everybody's blocks, each is left with those of its upstream."""
    for at, mirror in plain.items():
        others = [event for other, each in residents.items() if other != at for event in each.removals()]
        mirror.apply(payloads_of(KVEventBatch(0.0, others), None))


# --- snapshots ---------------------------------------------------------------------------------------------------------------


@prepared
class Aside(msgspec.Struct, frozen=True):
    """What a journal's snapshot holds besides its state."""

    number: int = -1
    """As of which number it is known whose blocks are whose."""
    residents: list[tuple[int, Any]] = []
    """Ordinals of upstreams, and pieces of what `Residents.kept` told."""


def parts_of(collapsed: Collapsed | None, number: int, residents: Mapping[int, Residents]) -> list[bytes]:
    """A snapshot as the journal keeps it: of what has left the buffer, and whose blocks are whose as of `number`."""
    asides = [Aside(number), *(Aside(number, [(at, piece)]) for at, each in residents.items() for piece in each.kept())]
    payloads = [] if collapsed is None else collapsed.payloads
    return [*payloads, *(_ASIDE + msgspec.msgpack.encode(aside) for aside in asides)]


def _parts(recovered: Recovered) -> tuple[list[bytes], Aside]:
    parts = list(recovered.parts())
    asides = [msgspec.msgpack.decode(part.removeprefix(_ASIDE), type=Aside) for part in parts if part.startswith(_ASIDE)]
    number = asides[0].number if asides else -1
    whole = Aside(number, [piece for aside in asides for piece in aside.residents])
    return [part for part in parts if not part.startswith(_ASIDE)], whole
