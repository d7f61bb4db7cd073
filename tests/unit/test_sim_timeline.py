"""`kvevents.sim.simulated_fleet`."""

from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from kvevents.sim.simulated_fleet import Timeline


@given(st.lists(st.integers(0, 5)))
def test_actions_come_in_the_order_of_their_times_and_equal_ones_as_they_were_planned(times: list[int]) -> None:
    timeline = Timeline()
    done: list[tuple[float, int]] = []
    for number, time in enumerate(times):
        timeline.at(time, lambda number=number: done.append((timeline.now, number)))  # type: ignore[misc]
    while timeline.next is not None:
        timeline.step()
    assert done == sorted((time, number) for number, time in enumerate(times))


def test_time_never_goes_back() -> None:
    """What should have been done before comes next, at the present time, after what was planned for it earlier."""
    timeline = Timeline()
    done: list[tuple[str, float]] = []
    note = lambda name: done.append((name, timeline.now))  # noqa: E731 - shorter than a function with a name
    timeline.at(2.0, lambda: timeline.at(1.0, partial(note, "late")))
    timeline.at(2.0, partial(note, "planned"))
    timeline.at(3.0, partial(note, "after"))
    while timeline.next is not None:
        timeline.step()
    assert done == [("planned", 2.0), ("late", 2.0), ("after", 3.0)]


def test_after_counts_from_now() -> None:
    timeline = Timeline()
    timeline.at(5.0, lambda: timeline.after(1.5, lambda: None))
    timeline.step()
    assert (timeline.now, timeline.next) == (5.0, 6.5)


def test_nothing_is_next_when_all_is_done() -> None:
    timeline = Timeline()
    timeline.at(5.0, lambda: None)
    timeline.step()
    assert timeline.next is None
