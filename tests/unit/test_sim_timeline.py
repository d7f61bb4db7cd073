"""`kvevents.sim.simulated_fleet.Timeline` runs actions in the order of their times."""

from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from kvevents.sim.simulated_fleet import Timeline


@given(st.lists(st.integers(0, 5)))
def test_actions_run_in_the_order_of_their_times_and_equal_times_in_the_order_of_planning(times: list[int]) -> None:
    timeline = Timeline()
    done: list[tuple[float, int]] = []
    for number, time in enumerate(times):
        timeline.schedule_at(time, lambda number=number: done.append((timeline.now, number)))  # type: ignore[misc]
    while timeline.next is not None:
        timeline.step()
    assert done == sorted((time, number) for number, time in enumerate(times))


def test_time_never_goes_back() -> None:
    """An action that is planned for the past runs next, at the present time, after those that were planned for it earlier."""
    timeline = Timeline()
    done: list[tuple[str, float]] = []
    record = lambda name: done.append((name, timeline.now))  # noqa: E731 - shorter than a named function
    timeline.schedule_at(2.0, lambda: timeline.schedule_at(1.0, partial(record, "late")))
    timeline.schedule_at(2.0, partial(record, "planned"))
    timeline.schedule_at(3.0, partial(record, "after"))
    while timeline.next is not None:
        timeline.step()
    assert done == [("planned", 2.0), ("late", 2.0), ("after", 3.0)]


def test_after_counts_from_now() -> None:
    timeline = Timeline()
    timeline.schedule_at(5.0, lambda: timeline.schedule_after(1.5, lambda: None))
    timeline.step()
    assert (timeline.now, timeline.next) == (5.0, 6.5)


def test_there_is_no_next_time_after_the_last_action() -> None:
    timeline = Timeline()
    timeline.schedule_at(5.0, lambda: None)
    timeline.step()
    assert timeline.next is None
