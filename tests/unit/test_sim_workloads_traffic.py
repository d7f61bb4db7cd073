"""`kvevents.sim.workload_generators`: the schedule of sessions, and the distributions of lengths, turns and tenants."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.errors import ConfigError
from kvevents.sim.requests import Request, Text
from kvevents.sim.workload_generators import (
    FIRST_TOKEN_SECONDS,
    TOKEN_SECONDS,
    TrafficSession,
    Turn,
    Writer,
    answer_seconds,
    draw_turns,
    schedule,
    zipf_weights,
)
from kvevents.sim.workloads import Chat, Lengths

TEXT = Text([(1, 10)])


def session(name: str, *pauses: float | None, begins: tuple[TrafficSession, ...] = ()) -> TrafficSession:
    return TrafficSession(
        name, iter([Turn(TEXT, TEXT, pause, begins if not place else ()) for place, pause in enumerate(pauses)])
    )


def times_and_sessions(requests: Iterator[Request]) -> list[tuple[float, str | None]]:
    return [(request.at, request.session) for request in requests]


def test_the_session_that_is_due_longest_is_next_or_a_new_session_begins() -> None:
    """A session waits for its pause, then takes the next arrival; new sessions begin only when no session is due."""
    sessions = iter([session("a", 2.5, None), session("b", 1.0, None), session("c", None), session("d", None)])
    assert times_and_sessions(schedule([0, 1, 2, 3, 4], sessions)) == [(0, "a"), (1, "b"), (2, "b"), (3, "a"), (4, "c")]


def test_sessions_that_a_turn_begins_start_after_its_answer() -> None:
    helper = session("a.0", None)
    answered = answer_seconds(TEXT)
    times = [0.0, answered / 2, answered, 10.0, 11.0]
    sessions = iter([session("a", 10.0, None, begins=(helper,)), *(session(name, None) for name in "bcd")])
    assert times_and_sessions(schedule(times, sessions)) == [
        (0.0, "a"),
        (times[1], "b"),
        (answered, "a.0"),
        (10.0, "a"),
        (11.0, "c"),
    ]
    assert answered == FIRST_TOKEN_SECONDS + 10 * TOKEN_SECONDS


def test_the_number_of_waiting_sessions_is_limited() -> None:
    """At the limit, the session that is due first sends its turn early, so that no rate can fill the memory."""
    sessions = (session(str(number), 1e9, 1e9, None) for number in range(100))
    assert [name for _, name in times_and_sessions(schedule(range(5), sessions, 2))] == ["0", "1", "0", "1", "0"]


@given(st.integers(1, 50), st.floats(0, 3), st.integers(0, 1000))
def test_lengths_stay_within_their_limits(median: int, sigma: float, seed: int) -> None:
    drawn = [Lengths(median, sigma, 1, 60).draw(Random(seed)) for _ in range(20)]
    assert all(1 <= one <= 60 for one in drawn)
    assert sigma or set(drawn) == {median}


def test_half_of_all_lengths_are_below_the_median() -> None:
    random, lengths = Random(1), Lengths(500, 0.8, 1, 10**6)
    assert fmean(lengths.draw(random) < 500 for _ in range(5_000)) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("invalid", [(0, 1, 1, 5), (6, 1, 1, 5), (3, -1, 1, 5), (3, float("inf"), 1, 5), (3, 1, 0, 5)])
def test_invalid_lengths_are_refused(invalid: tuple[float, float, int, int]) -> None:
    with pytest.raises(ConfigError, match="low <= median <= high"):
        Lengths(*invalid)


@pytest.mark.parametrize("mean", [1.0, 1.5, 6.0])
def test_the_number_of_turns_has_the_configured_mean(mean: float) -> None:
    random = Random(1)
    found = [draw_turns(mean, random) for _ in range(20_000)]
    assert min(found) == 1
    assert fmean(found) == pytest.approx(mean, rel=0.03)


def test_zipf_weights_are_cumulative() -> None:
    assert zipf_weights(3, 1) == pytest.approx([1, 1.5, 1.5 + 1 / 3])
    assert zipf_weights(3, 0) == [1, 2, 3]


def test_a_writer_never_writes_the_same_text_twice() -> None:
    writer = Writer(Random(1))
    assert len({writer.write(20) for _ in range(1_000)}) == 1_000


def test_the_configured_shares_of_sessions_have_a_lora_and_a_salt() -> None:
    """LoRAs and salts are among the configured numbers of them."""
    chat, random = Chat(lora_share=0.5, loras=3, salted_share=0.25, salts=2), Random(1)
    loras, salts = zip(*(chat.draw_tenant(random) for _ in range(4_000)), strict=True)
    assert set(loras) == {None, "lora-0", "lora-1", "lora-2"}
    assert set(salts) == {None, "tenant-0", "tenant-1"}
    assert fmean(lora is not None for lora in loras) == pytest.approx(0.5, abs=0.03)
    assert fmean(salt is not None for salt in salts) == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rate", 0),
        ("rate", float("nan")),
        ("variation", -1),
        ("arrivals", "x"),
        ("lora_share", 1.1),
        ("salted_share", -0.1),
        ("loras", 0),
        ("salts", 0),
    ],
)
def test_the_error_for_an_invalid_setting_names_it(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^(unknown )?{name} "):
        Chat(**{name: value}).requests()  # type: ignore[arg-type]
