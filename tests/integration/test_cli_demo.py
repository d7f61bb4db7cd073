"""`kvevents demo` shows each routing policy and the fate of the events, in few lines."""

from __future__ import annotations

import re

from cli_cases import Program

LINES = 15
"""Maximum number of lines, so that the output fits on a screen."""


def test_demo_shows_waits_events_and_index_in_few_lines() -> None:
    """The waiting time of users comes first; no event is lost, and no answer of the index is wrong."""
    with Program("demo", "--requests", 20) as demo:
        ended = demo.end()
    assert ended.code == 0, ended.out + ended.err
    assert len(ended.out.splitlines()) <= LINES
    assert "wait" in ended.out.splitlines()[1]
    row = r"(?m)^{}  +[\d.]+ s +[\d.]+ s +\d+%$"
    for policy in ("least-loaded", "session-affinity", "tree of what was sent", "prefix-aware, by events"):
        assert re.search(row.format(policy), ended.out), ended.out
    assert re.search(r"(?m)^Events: .* 0 are missing; ", ended.out)
    checked = re.search(r"(?m)^Index: right .* for (\d+) of the (\d+) prompts ", ended.out)
    assert checked
    assert checked[1] == checked[2] != "0"
    assert "\x1b[" not in ended.out + ended.err


def test_demo_prints_the_same_figures_each_time() -> None:
    """Batches are lost while the requests arrive. Only the duration differs."""
    outputs: list[str] = []
    for _ in range(2):
        with Program("demo", "--requests", 60) as demo:
            outputs.append(re.sub(r"(?m)^It took \d+ s", "It took N s", demo.end().out))
    assert outputs[0] == outputs[1]
    assert re.search(r"(?m)^Events: the network lost [1-9]", outputs[0])


def test_ctrl_c_ends_demo_without_a_traceback() -> None:
    with Program("demo") as demo:
        demo.out.wait("Users wait")
        ended = demo.interrupt()
    assert ended.code == 130, ended
    assert "Traceback" not in ended.out + ended.err


def test_an_invalid_option_is_reported_in_one_sentence() -> None:
    with Program("demo", "--requests", 0) as demo:
        ended = demo.end()
    assert ended.code == 2
    assert ended.err.splitlines()[-1].endswith("argument --requests: invalid value '0': expected a whole number above 0")
