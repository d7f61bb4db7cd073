"""Whether replay works, and how far it reaches back."""

from __future__ import annotations

from collections import Counter
from typing import Final

from kvevents.cli.asking import Reply, ask
from kvevents.cli.checkup.address import check_replay_address
from kvevents.cli.checkup.findings import Finding, fail, ok, warn
from kvevents.cli.checkup.sample import Contents
from kvevents.cli.lines import number_ranges, plural
from kvevents.events import AllBlocksCleared
from kvevents.security import Curve
from kvevents.wire import ReplayBatch, decode_batch

SILENCE: Final = 2.0
"""Seconds without a message after which an answer has ended. Engines pause 0.2 s at most."""
PATIENCE: Final = 10.0
"""Seconds for a whole answer."""
_TRIES: Final = 4
"""Further requests for what was missing in an answer. A subscriber asks as long as it gets anything."""

NAME_IT: Final = (
    'name the engine\'s replay endpoint with --replay; if it has none, start it with "replay_endpoint": "tcp://*:5558" in its'
    " KV events configuration"
)


def check_replay(endpoint: str, curve: Curve | None = None) -> tuple[list[Finding], Reply | None]:
    """Ask for everything once, and again for what is missing; findings and the answer."""
    if not endpoint.startswith("inproc://") and (wrong := check_replay_address(endpoint, curve)) is not None:
        return [wrong], None
    reply = ask(endpoint, 0, silence=SILENCE, seconds=PATIENCE, curve=curve)
    if not reply.answered:
        text = f"{endpoint} does not answer within {SILENCE:g} s"
        advice = "the engine may hang or be under load, or this is another service's port; try again, then restart it"
        return [fail("replay", text, advice)], reply
    return [_reach(endpoint, reply), *_losses(endpoint, reply, curve)], reply


def contents_of(reply: Reply) -> Contents:
    """What the replayed batches hold."""
    contents = Contents()
    for batch in reply.batches:
        contents.add(batch.payload)
    return contents


def topics_of(reply: Reply) -> Counter[bytes]:
    """The topics that replies named; older engines do not."""
    return Counter(batch.topic for batch in reply.batches if batch.topic is not None)


def _reach(endpoint: str, reply: Reply) -> Finding:
    if not reply.batches:
        if reply.malformed:
            return fail("replay", f"{endpoint} answers, but not with batches", "is this another service's port?")
        return ok("replay", f"{endpoint} answers and holds nothing yet ({', '.join(reply.shapes)})")
    oldest, last = reply.batches[0], reply.batches[-1].seq
    first = oldest.seq
    held = (
        f"{endpoint} holds #{first} to #{last}, {plural(len(reply.batches), 'batch')}, as {' and '.join(sorted(reply.shapes))}"
    )
    if _is_snapshot(oldest) and first:
        text = f"{held}; the first is a snapshot of batches 0 to {first}: a late subscriber learns everything"
        return ok("replay", text)
    if first == 0:
        return ok("replay", held if reply.holes else f"{held}: complete since the engine started")
    text = f"{held}; what came before #{first} is gone"
    return warn(
        "replay", text, "subscribe before traffic starts, or raise buffer_steps; a late subscriber cannot learn what is gone"
    )


def _is_snapshot(batch: ReplayBatch) -> bool:
    """Whether a batch begins with a clear: what was before it does not matter to any subscriber."""
    events = decode_batch(batch.payload).batch.events
    return bool(events) and isinstance(events[0], AllBlocksCleared)


def _losses(endpoint: str, reply: Reply, curve: Curve | None) -> list[Finding]:
    found: list[Finding] = []
    if reply.cut:
        text = f"the answer was cut off after {PATIENCE:g} s or {plural(len(reply.batches), 'batch')}: it does not end"
        found.append(warn("replay", text, "subscribers cut it off as well; check what answers there"))
    elif not reply.end:
        text = "the end marker is missing: engines lose it when their send queue is full"
        found.append(warn("replay", text, "kvevents notices by the silence; a client that waits for the marker would hang"))
    if reply.holes:
        found.append(_holes(endpoint, reply, curve))
    return found


def _holes(endpoint: str, reply: Reply, curve: Curve | None) -> Finding:
    missing = {seq for first, last in reply.holes for seq in range(first, last + 1)}
    text = f"{plural(len(missing), 'batch')} missing inside the answer ({number_ranges(reply.holes)})"
    left = set(missing)
    for _ in range(_TRIES):
        again = ask(endpoint, min(left), silence=SILENCE, seconds=PATIENCE, curve=curve)
        left -= {batch.seq for batch in again.batches}
        if not left or not again.answered:
            break
    if not left:
        advice = "kvevents asks again until it has them; other clients lose them. vLLM 0.33 has a larger send queue"
        return warn("replay", f"{text}; asked again, the engine has them: its send queue overflows", advice)
    if len(left) < len(missing):
        advice = "kvevents asks again while answers bring something new, and reports the rest as a gap: see trust below"
        return warn("replay", f"{text}; after {_TRIES} more requests {len(left):,} of them are missing", advice)
    advice = "the engine could not encode these batches, or its buffer lost them: see its log"
    return warn("replay", f"{text}, also when asked again: these numbers are lost", advice)
