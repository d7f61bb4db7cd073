"""Checks of what arrives: messages, topics, decoding, ranks, and the trust that a subscriber reached."""

from __future__ import annotations

from collections import Counter
from typing import Final

from kvevents.cli.console import plural
from kvevents.cli.doctor.findings import Finding, fail, ok, warn
from kvevents.cli.doctor.sample import DecodedContents, Sample
from kvevents.stream import DegradedReason, Trust
from kvevents.subscriber import StreamStatus

_TOPICS_SHOWN: Final = 5


def check_traffic(sample: Sample, *, connected: bool) -> Finding:
    """Check whether messages arrive."""
    seconds = max(round(sample.seconds, 1), 0.1)
    if sample.messages:
        amount = f"{plural(sample.messages, 'message')}, {sample.bytes:,} bytes in {seconds:g} s"
        return ok("traffic", f"{amount} ({sample.messages / seconds:.1f} a second)")
    if not connected:
        advice = "with --bind, configure this host's address as the engine's endpoint; without, see address above"
        return fail("traffic", f"nothing arrived in {seconds:g} s, and there was no connection", advice)
    return warn(
        "traffic",
        f"nothing arrived in {seconds:g} s: an idle engine publishes nothing",
        "send it a request meanwhile (a prompt shorter than a block stores nothing), or raise --duration",
    )


def check_topic(topics: Counter[bytes], prefix: str) -> Finding | None:
    """Check whether `prefix` matches the topics; None without a topic."""
    if not topics:
        return None
    seen = ", ".join(f"{_name(topic)} ({count:,})" for topic, count in topics.most_common(_TOPICS_SHOWN))
    missed = sum(count for topic, count in topics.items() if not topic.startswith(prefix.encode()))
    if not missed:
        every = "all topics are received" if not prefix else f"all begin with {prefix!r}"
        return ok("topic", f"{every}; seen: {seen}")
    common = _common_prefix(topics)
    advice = f"use --topic-prefix {common!r}" if common else "omit --topic-prefix to receive all topics"
    if missed == topics.total():
        return fail("topic", f"no topic begins with {prefix!r}, so a subscriber receives nothing; seen: {seen}", advice)
    return warn("topic", f"{plural(missed, 'message')} do not begin with {prefix!r}; seen: {seen}", advice)


def _common_prefix(topics: Counter[bytes]) -> str:
    # The first and the last of sorted strings differ earliest.
    first, last = min(topics), max(topics)
    same = next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
    return first[:same].decode("utf-8", "ignore")


def _name(topic: bytes) -> str:
    return repr(topic.decode("utf-8", "backslashreplace"))


def check_frames(sample: Sample) -> Finding | None:
    """Check whether messages have the frames of live batches; None if all have."""
    broken = sample.malformed.total()
    if not broken:
        return None
    reasons = ", ".join(f"{reason} ({count:,})" for reason, count in sample.malformed.most_common())
    text = f"{broken:,} of {plural(sample.messages, 'message')} are not [topic, number, payload]: {reasons}"
    if broken == sample.messages:
        return fail("decoding", text, "these are not KV events; check the port, which may be that of another service")
    return warn("decoding", text, "something else publishes at this address too; use a separate port for KV events")


def check_decoding(contents: DecodedContents, where: str) -> Finding | None:
    """Check whether payloads can be decoded, and which release has written them; None without a batch."""
    if not contents.batches:
        return None
    dialects = (
        ", ".join(f"{name} ({count:,})" for name, count in contents.dialects.most_common())
        or "unknown, since all batches are empty"
    )
    events = ", ".join(f"{count:,} {name}" for name, count in sorted(contents.events.items())) or "no events"
    if not contents.rejects:
        return ok(
            "decoding", f"{plural(contents.batches, 'batch')} {where}: {events}; oldest release with this format: {dialects}"
        )
    reasons = ", ".join(f"{reason} ({count:,})" for reason, count in contents.rejects.most_common())
    if contents.undecodable == contents.batches:
        text = f"none of {plural(contents.batches, 'batch')} {where} can be decoded: {reasons}; {contents.example}"
        return fail("decoding", text, "check the port, and that the engine neither encrypts nor compresses its events")
    text = (
        f"{plural(contents.batches, 'batch')} {where}, not all decodable: {reasons}; {contents.example}; dialects: {dialects}"
    )
    return warn("decoding", text, "the rest is delivered; report the engine's release, which may be newer than this kvevents")


def check_ranks(ranks: set[int], neighbours: int) -> Finding | None:
    """Check the data-parallel ranks here and on the next ports; None if there are none."""
    here = ", ".join(map(str, sorted(ranks)))
    if len(ranks) > 1:
        text = f"ranks {here} share this endpoint, so their sequence numbers cannot be distinguished"
        return fail("ranks", text, "configure one endpoint per rank, as the engines do: port + rank")
    seen = f"batches have rank {here}" if ranks else "batches have no rank"
    if neighbours:
        text = f"{seen}; the next {plural(neighbours, 'port')} publish too"
        return ok("ranks", text, f"if they are ranks of the same engine: kvevents tail ... --ranks {neighbours + 1}")
    return ok("ranks", f"{seen}; no further publisher on the next port") if ranks else None


_ADVICE: Final[dict[DegradedReason, str]] = {
    DegradedReason.NO_REPLAY: "use a replay endpoint with --replay",
    DegradedReason.REPLAY_SILENT: "see replay above",
    DegradedReason.REPLAY_FOREIGN: "use this engine's replay endpoint with --replay; the current one belongs to another stream",
    DegradedReason.REPLAY_UNCONFIRMED: "raise --duration; if this stays, the replay endpoint belongs to another engine",
    DegradedReason.REPLAY_UNPROVEN: "raise --duration; if this stays, the replay endpoint belongs to another engine",
    DegradedReason.IDENTITY: "the connection was lost meanwhile; a larger buffer_steps lets a subscriber verify the stream",
    DegradedReason.LOST: "exact again after the next AllBlocksCleared or restart; subscribe earlier, or raise buffer_steps",
    DegradedReason.REJECTED: "exact again after the next AllBlocksCleared; see decoding above",
    DegradedReason.DIVERGED: "exact again after a matching digest; check the releases of relay and doctor, and report this",
    DegradedReason.SENDER: "check the relay: its own upstream is not exact",
    DegradedReason.SILENT: "check that the relay runs: its heartbeats have stopped",
}

_STALE_WHILE_CONNECTED: Final = frozenset({DegradedReason.SENDER, DegradedReason.SILENT})
_IDLE: Final = "send the engine a request; the next batch confirms the replay endpoint"


def check_trust(status: StreamStatus, seconds: float) -> Finding:
    """Check the trust that a subscriber reached."""
    counters = status.counters
    so_far = f"after {seconds:g} s: {counters.delivered:,} delivered, {counters.replayed:,} by replay, {counters.lost:,} lost"
    if counters.compacted:
        so_far += f"; a snapshot represents {counters.compacted:,} older ones"
    text = f"{status.trust}, {so_far}"
    if status.trust == Trust.EXACT:
        return ok("trust", text)
    if status.trust == Trust.DEGRADED and status.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN} and not counters.live:
        return ok("trust", text, _IDLE)
    advice = "; ".join(_ADVICE.get(doubt, doubt.value) for doubt in DegradedReason if doubt in status.degraded_reasons)
    if status.trust == Trust.DEGRADED:
        return warn("trust", text, advice)
    if status.trust == Trust.REPLAYING:
        return warn("trust", text, "raise --duration")
    return fail("trust", text, advice if status.degraded_reasons & _STALE_WHILE_CONNECTED else "see what failed above")
