"""How benchmarks judge what they have measured."""

from __future__ import annotations

import pytest

from benchmarks.figures import FIGURES
from benchmarks.peers import lost
from benchmarks.trials import rows


@pytest.mark.parametrize(
    ("seen", "missing"),
    [
        (range(100), 0),
        (range(20, 120), 0),  # the buffer has evicted batches
        (range(20, 130), 0),  # the reply continues with batches that were live at the time of the request
        (range(90), 10),
        ([*range(50), *range(60, 130)], 10),  # more batches than requested, and some requested batches missing
        ([], 100),
    ],
)
def test_what_a_replay_of_100_batches_has_lost(seen: range | list[int], missing: int) -> None:
    assert lost(set(seen), 100) == missing


@pytest.mark.parametrize(("numbers", "met"), [([0, 0, 0], True), ([0, 1, 0], False)])
def test_a_replay_without_losses_is_met(numbers: list[int], met: bool) -> None:
    """No run may lose a batch."""
    figure = next(figure for figure in FIGURES if figure.value == "lost_fast")
    (row,) = rows([figure], {"replay": {"ours": [{"lost_fast": lost(set(range(10 - number)), 10)} for number in numbers]}})
    assert row.met is met
