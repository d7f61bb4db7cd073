"""`kvevents.sim.workload_traces.Sessions` infers sessions from shared prefixes."""

from __future__ import annotations

from kvevents.sim.workload_traces import MAX_CONTINUATIONS, Sessions


def test_a_prompt_that_extends_another_one_is_of_the_same_session() -> None:
    """Ids 1 and 2 are whole; the third was a rest, which the next prompt has whole under another id."""
    sessions = Sessions()
    assert sessions.find([1, 2, 30], 2) == "session-1"
    assert sessions.find([1, 2, 3, 4, 50], 4) == "session-1"
    assert sessions.find([1, 2, 3, 4, 5, 6], 6) == "session-1"
    assert sessions.find([1, 7, 8], 3) == "session-2"


def test_a_prompt_with_an_edited_earlier_turn_is_of_the_same_session() -> None:
    sessions = Sessions()
    assert sessions.find([1, 2, 3], 2) == sessions.find([1, 2, 4, 5, 6], 4) == sessions.find([1, 2, 7, 8, 9], 4)


def test_a_repeated_prompt_is_of_the_same_session() -> None:
    sessions = Sessions()
    assert sessions.find([1, 2, 3], 3) == sessions.find([1, 2, 3], 3) == "session-1"


def test_a_shared_first_piece_does_not_make_a_session() -> None:
    """In most cases it is a system prompt."""
    sessions = Sessions()
    assert sessions.find([1], 1) == "session-1"
    assert sessions.find([1, 2], 1) == "session-2"
    assert sessions.find([1, 3, 4], 3) == "session-3"


def test_a_prefix_that_many_prompts_extend_does_not_make_a_session() -> None:
    """Up to the limit these prompts count as one session; after that, each is a separate one."""
    sessions = Sessions()
    first = sessions.find([1, 2], 2)
    found = [sessions.find([1, 2, 100 + user], 2) for user in range(MAX_CONTINUATIONS + 3)]
    assert found[:MAX_CONTINUATIONS] == [first] * MAX_CONTINUATIONS
    assert len({first, *found[MAX_CONTINUATIONS:]}) == 4


def test_the_oldest_sessions_are_evicted_first() -> None:
    sessions = Sessions(max_ends=2)
    assert [sessions.find([0, user], 2) for user in (1, 2, 3)] == ["session-1", "session-2", "session-3"]
    assert sessions.find([0, 3, 4], 2) == "session-3"
    assert sessions.find([0, 1, 4], 2) == "session-4"
