"""`kvevents.sim.workload_traces`."""

from __future__ import annotations

from kvevents.sim.workload_traces import SHARED_AFTER, Sessions


def test_a_prompt_that_goes_on_belongs_to_the_session() -> None:
    """Ids 1, 2 are whole; the third was a rest, which the next prompt has whole under another id."""
    sessions = Sessions()
    assert sessions.of([1, 2, 30], 2) == "session-1"
    assert sessions.of([1, 2, 3, 4, 50], 4) == "session-1"
    assert sessions.of([1, 2, 3, 4, 5, 6], 6) == "session-1"
    assert sessions.of([1, 7, 8], 3) == "session-2"


def test_an_edit_of_an_earlier_turn_is_the_same_session() -> None:
    sessions = Sessions()
    assert sessions.of([1, 2, 3], 2) == sessions.of([1, 2, 4, 5, 6], 4) == sessions.of([1, 2, 7, 8, 9], 4)


def test_the_same_prompt_again_is_the_same_session() -> None:
    sessions = Sessions()
    assert sessions.of([1, 2, 3], 3) == sessions.of([1, 2, 3], 3) == "session-1"


def test_the_first_piece_is_no_evidence() -> None:
    """It is a system prompt more often than not."""
    sessions = Sessions()
    assert sessions.of([1], 1) == "session-1"
    assert sessions.of([1, 2], 1) == "session-2"
    assert sessions.of([1, 3, 4], 3) == "session-3"


def test_what_many_prompts_go_on_from_is_no_evidence() -> None:
    """Up to the limit they are taken for one conversation, then each is its own."""
    sessions = Sessions()
    first = sessions.of([1, 2], 2)
    found = [sessions.of([1, 2, 100 + user], 2) for user in range(SHARED_AFTER + 3)]
    assert found[:SHARED_AFTER] == [first] * SHARED_AFTER
    assert len({first, *found[SHARED_AFTER:]}) == 4


def test_what_came_first_is_forgotten_first() -> None:
    sessions = Sessions(max_ends=2)
    assert [sessions.of([0, user], 2) for user in (1, 2, 3)] == ["session-1", "session-2", "session-3"]
    assert sessions.of([0, 3, 4], 2) == "session-3"
    assert sessions.of([0, 1, 4], 2) == "session-4"
