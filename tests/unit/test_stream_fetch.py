"""Replay fetches are bounded in attempts and in time, and requests are paced, for any answers of a peer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvevents.stream import StreamLimits
from kvevents.stream.identity import Fingerprint
from kvevents.stream.replay_fetch import CheckSchedule, Purpose, ReplayFetch, RequestPacer, Stage

LIMITS = StreamLimits(max_unanswered_requests=3, max_incomplete_answers=2, max_request_burst=4, request_interval=0.5)
FINGERPRINT = Fingerprint.of_batch(3, b"payload", live=True)

pauses = st.floats(0.0, 3.0, allow_nan=False)


@given(st.lists(pauses, max_size=80))
def test_requests_are_paced(pauses: list[float]) -> None:
    """In any period, at most a burst and one request per interval are sent."""
    pacer, now, sent = RequestPacer(LIMITS), 0.0, list[float]()
    for pause in pauses:
        now += pause
        if pacer.try_request(now):
            sent.append(now)
            assert not pacer.is_waiting
        else:
            assert pacer.is_waiting
            assert pacer.next_at > now
    for first, begin in enumerate(sent):
        for count, end in enumerate(sent[first:], 1):
            assert count <= LIMITS.max_request_burst + (end - begin) / LIMITS.request_interval + 1e-6


@given(st.integers(1, 20))
def test_a_reset_pacer_allows_a_burst(count: int) -> None:
    """Requests that led to a live batch do not count."""
    pacer = RequestPacer(LIMITS)
    for _ in range(count):
        pacer.try_request(100.0)
    pacer.reset()
    assert all(pacer.try_request(100.0) for _ in range(LIMITS.max_request_burst))
    assert not pacer.try_request(100.0)


@given(st.lists(st.sampled_from(("silent", "incomplete", "progress")), min_size=20, max_size=60), st.sampled_from(Purpose))
def test_attempts_without_progress_are_bounded(answers: list[str], purpose: Purpose) -> None:
    """A fetch without progress ends after a bounded number of attempts, in whatever order silent and incomplete answers
    alternate."""
    fetch, next_seq, attempts, gave_up = ReplayFetch(purpose, 0, None), 0, 0, False
    for answer in answers:
        fetch.send(0.0, next_seq)
        if answer == "progress":
            next_seq += 1
            fetch.progress(0.0)
            attempts = 0
        attempts += 1
        gave_up = fetch.end_unanswered(LIMITS) if answer == "silent" else fetch.end_incomplete(next_seq, LIMITS)
        if gave_up:
            break
        assert attempts <= LIMITS.max_unanswered_requests + LIMITS.max_incomplete_answers
        fetch = fetch.retry(ReplayFetch(purpose, next_seq, None), needs_new_connection=answer == "silent")
        assert fetch.needs_new_connection == (answer == "silent")
    assert gave_up or "progress" in answers


@given(st.integers(1, 10))
def test_answers_without_the_fingerprint_are_bounded(tries: int) -> None:
    """Each attempt takes over the count of the one before it."""
    fetch = ReplayFetch(Purpose.VERIFY, 3, FINGERPRINT)
    given_up = []
    for _ in range(tries):
        given_up.append(fetch.end_without_fingerprint(LIMITS))
        fetch = fetch.retry(ReplayFetch(Purpose.VERIFY, 3, FINGERPRINT), needs_new_connection=False)
    assert given_up == [attempt >= LIMITS.max_incomplete_answers for attempt in range(1, tries + 1)]


@given(st.lists(st.tuples(pauses, st.booleans()), max_size=30))
def test_a_fetch_times_out_after_its_last_message(messages: list[tuple[float, bool]]) -> None:
    """`replay_timeout` applies before the first message, and `reply_idle_timeout` after it. Only new batches extend the
    deadline."""
    fetch, now, active_at = ReplayFetch(Purpose.FILL, 0, None), 10.0, 10.0
    fetch.send(now, 0)
    assert fetch.deadline(LIMITS) == now + LIMITS.replay_timeout
    for count, (pause, is_new) in enumerate(messages, 1):
        now += pause
        assert fetch.begin_message(count) == (count == 1)
        if is_new:
            fetch.progress(now)
            active_at = now
        assert fetch.deadline(LIMITS) == active_at + LIMITS.reply_idle_timeout
        assert fetch.duplicates == 0 if is_new else fetch.duplicates > 0
        assert fetch.highest_seq == count


def test_a_fetch_collects_only_after_its_fingerprints_were_repeated() -> None:
    """Nothing in the answer is history before that. Only a fetch that fills a gap keeps its count of incomplete answers."""
    for purpose in Purpose:
        fetch = ReplayFetch(purpose, 3, FINGERPRINT, incomplete=1, has_more=True)
        assert fetch.stage is Stage.MATCHING
        fetch.collect(7)
        assert (fetch.stage, fetch.fingerprint, fetch.next_seq_before, fetch.has_more) == (Stage.COLLECTING, None, 7, False)
        assert fetch.incomplete == (purpose is Purpose.FILL)


@given(st.integers(1, 40))
def test_the_pause_between_checks_grows_while_they_find_nothing(count: int) -> None:
    """Pauses double up to `max_probe_interval`; a live batch or a match resets them to the shortest one."""
    schedule = CheckSchedule(LIMITS)
    pauses = []
    for _ in range(count):
        schedule.probe(100.0, 0)
        schedule.fail_comparison(100.0)
        pauses.append((schedule.probe_at - 100.0, schedule.compare_at - 100.0))
    assert pauses == sorted(pauses)
    assert all(pause <= LIMITS.max_probe_interval for pair in pauses for pause in pair)
    schedule.probes = 0
    schedule.probe(100.0, 0)
    schedule.reset_comparisons()
    assert (schedule.probe_at - 100.0, schedule.compare_at) == (pauses[0][0], float("-inf"))
