"""Scenarios of publishers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvevents.conform import scenario as steps
from kvevents.conform.scenario import PublisherScenario


def publishing() -> Iterator[PublisherScenario]:
    """Scenarios of publishers. A witness reads live batches where the publisher must have sent all of them first."""
    witness = steps.Subscribe("witness")

    def fed(count: int) -> list[steps.PublisherStep]:
        return [witness, steps.FeedBatches(count), steps.CheckLive("witness", 0, count - 1, 20.0)]

    stalled = [steps.Subscribe("stalled", stalls=True), *fed(3_000)]
    restarted = [
        *fed(10),
        steps.RestartPublisher(),
        steps.Subscribe("later"),
        steps.FeedBatches(5),
        steps.CheckLive("later", 0, 4),
    ]
    hostile = [
        steps.SendRequest(frames) for frames in (["", "00"], ["00" * 8], [""], ["", "ff" * 8, "00"], ["78"] * 20, ["", ""])
    ]
    plays: list[tuple[str, str, list[Any]]] = [
        ("live", "twenty batches, live", fed(20)),
        ("replay", "replay of everything", [*fed(20), steps.CheckReplay(0)]),
        ("replay-middle", "replay from the middle", [*fed(20), steps.CheckReplay(10)]),
        ("replay-nothing", "replay from beyond the newest batch", [*fed(20), steps.CheckReplay(20)]),
        ("replay-long", "replay of 5,000 batches", [*fed(5_000), steps.CheckReplay(0, within=30.0)]),
        (
            "replay-slow",
            "replay of 5,000 batches to a consumer that is late",
            [*fed(5_000), steps.CheckReplay(0, delay=2.0, within=30.0)],
        ),
        (
            "replay-many",
            "replay of 2,000 batches to ten consumers at a time",
            [*fed(2_000), steps.CheckReplay(0, 10, within=30.0)],
        ),
        (
            "late-subscriber",
            "a subscriber that comes after ten batches",
            [*fed(10), steps.Subscribe("late"), steps.FeedBatches(10), steps.CheckLive("late", 10, 19), steps.CheckReplay(0)],
        ),
        ("hostile-requests", "invalid requests, then a valid one", [*fed(20), *hostile, steps.CheckReplay(0)]),
        ("stalled-subscriber", "a subscriber that reads nothing beside one that does", stalled),
        ("restarted", "killed and started again", [*restarted, steps.CheckReplay(0)]),
        (
            "ended",
            "an orderly end right after 200 batches",
            [witness, steps.FeedBatches(200), steps.EndPublisher(), steps.CheckLive("witness", 0, 199)],
        ),
    ]
    for name, title, parts in plays:
        yield PublisherScenario(1, f"publisher-{name}", title, parts, needs=["feed"])
    beyond = [*fed(300), steps.CheckReplay(0)]
    yield PublisherScenario(
        1,
        "publisher-replay-beyond-buffer",
        "replay of everything, the buffer has 100 of 300",
        beyond,
        buffer_steps=100,
        needs=["feed"],
    )
    yield PublisherScenario(
        1, "publisher-watched", "what is published for three seconds, and its replay", [steps.CheckWatched(3.0)]
    )
