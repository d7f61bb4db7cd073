"""Whether anything flows, under the right topic, and can be read."""

from __future__ import annotations

from collections import Counter
from typing import Final

from kvevents.cli.checkup.findings import Finding, fail, ok, warn
from kvevents.cli.checkup.sample import Contents, Sample
from kvevents.cli.lines import plural

_TOPICS_SHOWN: Final = 5


def check_traffic(sample: Sample, *, connected: bool) -> Finding:
    """Whether bytes flow."""
    seconds = max(round(sample.seconds, 1), 0.1)
    if sample.messages:
        amount = f"{plural(sample.messages, 'message')}, {sample.bytes:,} bytes in {seconds:g} s"
        return ok("traffic", f"{amount} ({sample.messages / seconds:.1f} a second)")
    if not connected:
        advice = "with --bind, give the engine this host's address as its endpoint; without, see address above"
        return fail("traffic", f"nothing arrived in {seconds:g} s, and no connection came about", advice)
    return warn(
        "traffic",
        f"nothing arrived in {seconds:g} s: an idle engine announces nothing",
        "send it a request while this runs (prompts shorter than a block store nothing), or look longer with --duration",
    )


def check_topic(topics: Counter[bytes], wanted: str) -> Finding | None:
    """Whether the wanted prefix matches what is sent; None when no topic was seen."""
    if not topics:
        return None
    seen = ", ".join(f"{_name(topic)} ({count:,})" for topic, count in topics.most_common(_TOPICS_SHOWN))
    missed = sum(count for topic, count in topics.items() if not topic.startswith(wanted.encode()))
    if not missed:
        every = "everything is received" if not wanted else f"all begin with {wanted!r}"
        return ok("topic", f"{every}; seen: {seen}")
    prefix = _common_prefix(topics)
    advice = (
        f"use --topic-prefix {prefix!r}, or none to receive everything"
        if prefix
        else "leave --topic-prefix out to receive everything"
    )
    if missed == topics.total():
        return fail("topic", f"no topic begins with {wanted!r}, so a subscriber hears nothing; seen: {seen}", advice)
    return warn("topic", f"{plural(missed, 'message')} do not begin with {wanted!r}; seen: {seen}", advice)


def _common_prefix(topics: Counter[bytes]) -> str:
    # Of sorted strings the first and the last differ earliest.
    first, last = min(topics), max(topics)
    same = next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
    return first[:same].decode("utf-8", "ignore")


def _name(topic: bytes) -> str:
    return repr(topic.decode("utf-8", "backslashreplace"))


def check_frames(sample: Sample) -> Finding | None:
    """Whether messages have the frames of live batches; None when all have."""
    broken = sample.malformed.total()
    if not broken:
        return None
    reasons = ", ".join(f"{reason} ({count:,})" for reason, count in sample.malformed.most_common())
    text = f"{broken:,} of {plural(sample.messages, 'message')} are not [topic, number, payload]: {reasons}"
    if broken == sample.messages:
        return fail("decoding", text, "these are no KV events; is this another service's ZeroMQ port?")
    return warn("decoding", text, "something else publishes at this address too; give KV events a port of their own")


def check_decoding(contents: Contents, where: str) -> Finding | None:
    """Whether payloads can be read, and who writes like that; None when there were none."""
    if not contents.batches:
        return None
    dialects = (
        ", ".join(f"{name} ({count:,})" for name, count in contents.dialects.most_common()) or "not told by empty batches"
    )
    events = ", ".join(f"{count:,} {name}" for name, count in sorted(contents.events.items())) or "no events"
    if not contents.rejects:
        return ok(
            "decoding", f"{plural(contents.batches, 'batch')} {where}: {events}; oldest release that writes so: {dialects}"
        )
    reasons = ", ".join(f"{reason} ({count:,})" for reason, count in contents.rejects.most_common())
    if contents.refused == contents.batches:
        text = f"none of {plural(contents.batches, 'batch')} {where} can be read: {reasons}; {contents.example}"
        return fail(
            "decoding", text, "is this another service's ZeroMQ port, or an engine that encrypts or compresses its events?"
        )
    text = f"{plural(contents.batches, 'batch')} {where}, not all readable: {reasons}; {contents.example}; dialects: {dialects}"
    return warn(
        "decoding", text, "the rest is delivered; report the release of the engine, which this release may not know yet"
    )


def check_ranks(ranks: set[int], neighbours: int) -> Finding | None:
    """Which data-parallel ranks are here and on the next ports; None when nothing is known of any."""
    here = ", ".join(map(str, sorted(ranks)))
    if len(ranks) > 1:
        text = f"ranks {here} share this endpoint, so their numbers cannot be told apart"
        return fail("ranks", text, "give each rank an endpoint of its own, as the engines do: port + rank")
    seen = f"batches say rank {here}" if ranks else "no rank seen"
    if neighbours:
        text = f"{seen}; the next {plural(neighbours, 'port')} publish too"
        return ok("ranks", text, f"if they are ranks of the same engine: kvevents tail ... --ranks {neighbours + 1}")
    return ok("ranks", f"{seen}; no further publisher on the next port") if ranks else None
