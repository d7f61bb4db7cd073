"""Checks of a replay endpoint: whether it answers, which batches it has, and whether it belongs to the stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvevents.diagnosis.address import check_replay_address, count_next_ranks, endpoint_of_rank
from kvevents.diagnosis.findings import CheckResult, fail, ok, warn
from kvevents.diagnosis.handshake import Handshake, perform_handshake
from kvevents.diagnosis.replay_sample import LiveComparison, ReplaySample, Timeouts, missing_ranges, sample_replay
from kvevents.diagnosis.text_format import number_ranges, plural
from kvevents.diagnosis.traffic import SequenceNumbers
from kvevents.wire.decode import begins_with_clear
from kvevents.zeromq.keys import Curve

REPLY_TIMEOUTS: Final = Timeouts(silence=2.0, seconds=10.0)
"""Time limits for reading an answer with all batches. Within an answer, engines are silent for at most 0.2 s."""
COMPARE_TIMEOUTS: Final = Timeouts(silence=1.0, seconds=5.0)
"""Time limits for reading an answer that is compared with live batches."""
COMPARE_REQUESTS: Final = 3
"""Maximum number of requests for a batch to compare. A request can fail: batches can be missing in an answer, and an engine
publishes a batch before it stores the batch."""
MAX_MISSING_BATCHES: Final = 1_000_000
"""Maximum number of missing batches to request again: a hundred times the number that an engine keeps by default."""
_MAX_REQUESTS: Final = 4
"""Maximum number of requests for missing batches. A subscriber goes on as long as answers have new batches."""

NO_REPLAY: Final = "no replay endpoint given, so lost batches stay lost"
REPLAY_HINT: Final = (
    'use the engine\'s replay endpoint with --replay; if it has none, start it with "replay_endpoint": "tcp://*:5558" in its'
    " KV events configuration"
)


def check_replay(endpoint: str, curve: Curve | None = None) -> tuple[list[CheckResult], ReplaySample | None]:
    """Request all batches, and request missing batches again. Return findings and the answers; None if no request was sent."""
    if not endpoint.startswith("inproc://") and (fault := check_replay_address(endpoint, curve)) is not None:
        return [fault], None
    sample = sample_replay(endpoint, (0,), REPLY_TIMEOUTS, curve)
    if not sample.is_answered:
        text = f"{endpoint} does not answer within {REPLY_TIMEOUTS.silence:g} s"
        advice = (
            "the engine may hang or be overloaded, or this is the port of another service; try again, then restart the engine"
        )
        return [fail("replay", text, advice)], sample
    return [_report_reply(endpoint, sample), *_report_losses(endpoint, sample, curve)], sample


def _report_reply(endpoint: str, sample: ReplaySample) -> CheckResult:
    if not sample.batches:
        if sample.malformed:
            return fail("replay", f"{endpoint} answers, but not with batches", "check the port; this may be another service")
        return ok("replay", f"{endpoint} answers and has no batches yet ({', '.join(sample.shapes)})")
    first, last = sample.batches[0].seq, sample.batches[-1].seq
    shapes = " and ".join(sorted(sample.shapes))
    contents = f"{endpoint} has #{first} to #{last}, {plural(len(sample.batches), 'batch')}, as {shapes}"
    if first == 0:
        return ok("replay", contents if sample.holes else f"{contents}: complete since the engine started")
    if begins_with_clear(sample.batches[0].payload):
        return ok("replay", f"{contents}; the first is a snapshot of batches 0 to {first}, so a late subscriber is complete")
    advice = "subscribe before traffic starts, or raise buffer_steps; a late subscriber lacks the batches that are gone"
    return warn("replay", f"{contents}; batches before #{first} are gone", advice)


def _report_losses(endpoint: str, sample: ReplaySample, curve: Curve | None) -> list[CheckResult]:
    findings: list[CheckResult] = []
    if sample.is_cut:
        text = f"reading stopped after {plural(len(sample.batches), 'batch')}, since the response does not end"
        findings.append(warn("replay", text, f"subscribers stop reading too; check what listens at {endpoint}"))
    elif not sample.has_end:
        text = "the end marker is missing: engines lose it when their send queue is full"
        advice = "kvevents detects the end by a timeout; a client that waits for the marker would hang"
        findings.append(warn("replay", text, advice))
    if sample.holes:
        findings.append(_report_holes(endpoint, sample, curve))
    return findings


def _report_holes(endpoint: str, sample: ReplaySample, curve: Curve | None) -> CheckResult:
    count = sum(last - first + 1 for first, last in sample.holes)
    text = f"{plural(count, 'batch')} missing inside the response ({number_ranges(sample.holes)})"
    if count > MAX_MISSING_BATCHES:
        advice = "no engine keeps so many batches: check the port, since this may be another service"
        return warn("replay", text, advice)
    numbers = {seq for first, last in sample.holes for seq in range(first, last + 1)}
    retry = sample_replay(endpoint, numbers, REPLY_TIMEOUTS, curve, requests=_MAX_REQUESTS)
    lost_numbers = numbers - {batch.seq for batch in retry.batches}
    if not lost_numbers:
        advice = "kvevents requests missing batches again; other clients lose these. vLLM 0.33 has a larger send queue"
        return warn("replay", f"{text}; a second request returned them: the engine's send queue overflows", advice)
    if len(lost_numbers) < len(numbers):
        advice = "kvevents requests missing batches again while some arrive, then reports a gap: see the check `trust` below"
        return warn("replay", f"{text}; after {_MAX_REQUESTS} more requests {len(lost_numbers):,} of them are missing", advice)
    advice = "the engine could not encode these batches, or its buffer lost them: see the log of the engine"
    return warn("replay", f"{text}, also in further responses: these batches are lost", advice)


# --- check that the endpoint belongs to the stream


_LOSSY_ADVICE: Final = (
    "kvevents repairs this by replay, other consumers do not; check for a slow network or proxy, and whether the engine's send"
    " queue (hwm) is too short"
)
_UNREPAIRED_ADVICE: Final = (
    "if a proxy or a slow network lost them, a replay endpoint repairs this; a batch that replay does not have either was never"
    " published: see the engine's log"
)


def compare(endpoint: str, numbers: SequenceNumbers, curve: Curve | None = None) -> LiveComparison:
    """Request the newest live batches from `endpoint`, and compare the answers with the live batches."""
    live = dict(numbers.newest)
    requests = COMPARE_REQUESTS if live else 0
    sample = sample_replay(endpoint, live, COMPARE_TIMEOUTS, curve, requests=requests, any_of=True)
    return LiveComparison.compare(sample, live)


def check_stream(endpoint: str, comparison: LiveComparison) -> CheckResult | None:
    """Check whether `endpoint` belongs to the published stream; None if the answer is unknown."""
    if comparison.equal_batches:
        text = f"{endpoint} has {plural(comparison.equal_batches, 'live batch')} as published: it belongs to this stream"
        return ok("replay", text)
    if not comparison.difference:
        return None
    text = f"{endpoint} belongs to another stream: {comparison.difference}"
    return fail("replay", text, "use this engine's own replay endpoint with --replay")


def check_losses(numbers: SequenceNumbers, endpoint: str | None, curve: Curve | None = None) -> CheckResult | None:
    """Check whether live batches were lost between publisher and subscriber; None if no live batch arrived.

    `endpoint` is a replay endpoint that belongs to the stream. A batch that this endpoint does not have was never published.
    """
    gaps = missing_ranges(numbers.received)
    if not numbers.received:
        return None
    if not gaps:
        return ok("losses", f"{plural(len(numbers.received), 'live batch')}, no sequence number missing")
    missing = sum(last - first + 1 for first, last in gaps)
    text = f"{missing:,} of {missing + len(numbers.received):,} live batches did not arrive ({number_ranges(gaps)})"
    if endpoint is None or missing > MAX_MISSING_BATCHES:
        return warn("losses", text, _UNREPAIRED_ADVICE)
    lost_numbers = {seq for first, last in gaps for seq in range(first, last + 1)}
    sample = sample_replay(endpoint, lost_numbers, COMPARE_TIMEOUTS, curve, requests=COMPARE_REQUESTS)
    stored = lost_numbers & {batch.seq for batch in sample.batches}
    text += f"; replay has {len(stored):,} of these {len(lost_numbers):,}"
    return warn("losses", text, _LOSSY_ADVICE if stored else _UNREPAIRED_ADVICE)


def find_replay_endpoint(
    endpoint: str, numbers: SequenceNumbers, wait_for_live: Callable[[], None], curve: Curve | None = None
) -> tuple[CheckResult, str | None]:
    """Look for the replay endpoint of the engine at `endpoint`, at the port after the ports of the engine's ranks.

    Return a finding, and the replay endpoint if live batches prove that it is the engine's. `wait_for_live` waits for a batch.
    """
    candidate = endpoint_of_rank(endpoint, 1 + count_next_ranks(endpoint))
    if candidate is None:
        return warn("replay", NO_REPLAY, REPLAY_HINT), None
    handshake = perform_handshake(candidate)
    if handshake.outcome != "curve" and handshake != Handshake("socket", "ROUTER"):
        return warn("replay", f"{NO_REPLAY}; {candidate} is not a replay endpoint", REPLAY_HINT), None
    wait_for_live()
    if not numbers.newest:
        text = f"{NO_REPLAY}; {candidate} may be a replay endpoint, but no live batch arrived to compare with it"
        return warn("replay", text, f"if it belongs to this engine, use --replay {candidate}"), None
    comparison = compare(candidate, numbers, curve)
    if not comparison.is_answered:
        text = f"{NO_REPLAY}; {candidate} accepts connections, but does not answer replay requests"
        condition = "if it belongs to this engine, which may hang or be busy"
        return warn("replay", text, f"{condition}, try again with --replay {candidate}, then restart the engine"), None
    if not comparison.equal_batches:
        return warn("replay", f"{NO_REPLAY}; {candidate} belongs to another stream: {comparison.difference}", REPLAY_HINT), None
    text = f"no replay endpoint given; {candidate} has the live batches as published, and is used here"
    return ok("replay", text, f"use --replay {candidate} with other commands"), candidate
