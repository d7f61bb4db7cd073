"""Whether replay works, and how far it reaches back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from kvevents.cli.asking import Reply, ask
from kvevents.cli.checkup.address import check_replay_address
from kvevents.cli.checkup.findings import Finding, fail, ok, warn
from kvevents.cli.checkup.sample import Contents
from kvevents.cli.lines import plural
from kvevents.config import Curve

SILENCE: Final = 2.0
"""Seconds without a message after which an answer has ended. Engines pause 0.2 s at most."""
PATIENCE: Final = 10.0
"""Seconds for a whole answer."""
_HOLES_SHOWN: Final = 3

_ENABLE: Final = (
    'start the engine with "replay_endpoint": "tcp://*:5558" in its KV events configuration, then name it with --replay'
)


def check_replay(endpoint: str | None, tried: Sequence[str], curve: Curve | None = None) -> tuple[list[Finding], Reply | None]:
    """Ask for everything once, and again for the first hole; findings and the answer."""
    if endpoint is None:
        where = f" ({' and '.join(tried)}: no answer)" if tried else ""
        return [warn("replay", f"no replay endpoint{where}: what is missed cannot be had again", _ENABLE)], None
    if not endpoint.startswith("inproc://") and (wrong := check_replay_address(endpoint, curve)) is not None:
        return [wrong], None
    reply = ask(endpoint, 0, silence=SILENCE, seconds=PATIENCE, curve=curve)
    if not reply.answered:
        text = f"{endpoint} does not answer within {SILENCE:g} s"
        return [
            fail(
                "replay",
                text,
                "the engine may hang or be under load, or this is another service's port; try again, then restart it",
            )
        ], reply
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
    first, last = reply.batches[0].seq, reply.batches[-1].seq
    held = (
        f"{endpoint} holds #{first} to #{last}, {plural(len(reply.batches), 'batch')}, as {' and '.join(sorted(reply.shapes))}"
    )
    if first == 0:
        return ok("replay", f"{held}: complete since the engine started")
    text = f"{held}; what came before #{first} is gone"
    return warn(
        "replay", text, "subscribe before traffic starts, or raise buffer_steps; a late subscriber cannot learn what is gone"
    )


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
    holes = reply.holes
    missing = sum(last - first + 1 for first, last in holes)
    shown = ", ".join(f"#{first}" if first == last else f"#{first}-#{last}" for first, last in holes[:_HOLES_SHOWN])
    text = f"{plural(missing, 'batch')} missing inside the answer ({shown}{', ...' if len(holes) > _HOLES_SHOWN else ''})"
    again = ask(endpoint, holes[0][0], silence=SILENCE, seconds=PATIENCE, curve=curve)
    if any(batch.seq == holes[0][0] for batch in again.batches):
        advice = "kvevents asks again until it has them; other clients lose them. vLLM 0.33 has a larger send queue"
        return warn("replay", f"{text}; asked again, the engine has them: its send queue overflows", advice)
    advice = "nothing can bring them back: the engine could not encode these batches, or its buffer lost them; see its log"
    return warn("replay", f"{text}, also when asked again", advice)
