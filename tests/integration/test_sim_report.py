"""Reports of a comparison: the table, the summary, and the picture."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.cli.console import cell_width, format_table
from kvevents.errors import MissingDependencyError
from kvevents.sim.picture import check_picture, write_picture
from kvevents.sim.report_text import COLUMNS, Interval, cells, format_seconds, report_settings, rows, summary, traffic_text
from kvevents.sim.results import Comparison, PolicyResult
from kvevents.sim.settings import FleetSettings, SimulationSettings
from sim_report_cases import result

SETTINGS = report_settings(SimulationSettings(engines=2, blocks=1_000, workload="chat", requests=300, rate=2.0))


def make_unanswered(policy: str = "round-robin", **changes: Any) -> PolicyResult:
    """Return the result of a policy without answered requests."""
    nothing: dict[str, Any] = {"finished": 0, "prompt_tokens": 0, "cached_tokens": 0, "hit_rate": 0.0, "checked": 0}
    return result(policy, **(nothing | {"ttft": None, "latency": None, "tpot": None, "workers": []} | changes))


def compare(*results: PolicyResult) -> Comparison:
    return Comparison(settings=SETTINGS, policies=list(results))


# --- the summary


def seeds_of(policy: str, p90s: Sequence[float], hit_rates: Sequence[float], **changes: Any) -> list[PolicyResult]:
    """Return the results of a policy with one seed for each TTFT p90 and hit rate."""
    return [
        result(policy, seed=seed, p90=p90, hit_rate=hit_rate, **changes)
        for seed, (p90, hit_rate) in enumerate(zip(p90s, hit_rates, strict=True))
    ]


AWARE = seeds_of("prefix-aware", [0.10, 0.11, 0.12], [0.60, 0.61, 0.62])
LOADED = seeds_of("least-loaded", [0.20, 0.22, 0.26], [0.12, 0.12, 0.13])


FASTEST = "least-loaded is the fastest policy without events"


@pytest.mark.parametrize(
    ("results", "finding", "measured"),
    [
        (LOADED, f"events pay here: {FASTEST}", "2.05 times that of prefix-aware (1.83 to 2.30 in 3 seeds)"),
        (
            LOADED + seeds_of("approximate-tree", [0.104, 0.114, 0.122], [0.6] * 3),
            "events pay nothing here: approximate-tree, which needs none, is as fast",
            "1.03 times that of prefix-aware (1.00 to 1.06 in 3 seeds)",
        ),
        (
            seeds_of("approximate-tree", [0.05] * 3, [0.7] * 3) + seeds_of("session-affinity", [0.10, 0.11, 0.12], [0.6] * 3),
            "events pay nothing here: session-affinity, which needs none, is as fast",
            "1.00 times that of prefix-aware (1.00 to 1.00 in 3 seeds)",
        ),
        (
            seeds_of("least-loaded", [0.20, 0.22, 0.25], [0.60, 0.61, 0.62]),
            f"caches gain nothing here, but the balance of load does: {FASTEST}",
            "2.03 times that of prefix-aware (1.91 to 2.15 in 3 seeds)",
        ),
        (
            seeds_of("least-loaded", [0.10, 0.22, 0.16], [0.1] * 3),
            f"more seeds must decide whether events pay here: {FASTEST}",
            "1.39 times that of prefix-aware (0.58 to 3.29 in 3 seeds)",
        ),
    ],
)
def test_the_summary_begins_with_whether_events_pay(results: list[PolicyResult], finding: str, measured: str) -> None:
    """Caches are credited only where hit rates differ, and the simplest policy that is as fast is named."""
    text = summary(compare(*AWARE, *results))
    assert text.startswith(f"{finding}: its TTFT p90 is {measured}, and it found ")
    assert "% of prompt tokens in caches, prefix-aware 61.0%; index and engines agreed on all " in text


TOKENS = "and it found 12.0% of prompt tokens in caches, prefix-aware 60.0%"


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        (
            [AWARE[0], LOADED[0]],
            f"events pay here: {FASTEST}: its TTFT p90 is 2.00 times that of prefix-aware (one seed), {TOKENS}",
        ),
        (AWARE, "prefix-aware has a TTFT p90 of 0.11 s and found 61.0% of prompt tokens in caches"),
        (
            [*LOADED, result("random", p90=9.9)],
            "least-loaded has a TTFT p90 of 0.23 s and found 12.3% of prompt tokens in caches",
        ),
        (
            [make_unanswered("random"), AWARE[0]],
            "prefix-aware has a TTFT p90 of 0.10 s and found 60.0% of prompt tokens in caches",
        ),
        ([make_unanswered()], "no request was answered"),
        ([make_unanswered(requests=0)], "no request was sent"),
        ([], "no request was sent"),
    ],
)
def test_the_summary_of_one_seed_and_of_one_kind_of_policies(results: list[PolicyResult], expected: str) -> None:
    assert summary(compare(*results)).partition(";")[0] == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"checked": 1}, ["index and engines agreed on its only lookup"]),
        ({}, ["index and engines agreed on all 100 lookups"]),
        (
            {"disagreements": 3, "unproven": 2},
            ["index and engines DISAGREED on 3 of 100 lookups, which is a defect, 2 could not be compared"],
        ),
        (
            {"refused": 1, "checked": 0},
            ["1 request was refused, longer than a whole cache", "no lookup was compared with the index"],
        ),
    ],
)
def test_the_summary_ends_with_refusals_and_comparisons(changes: dict[str, Any], expected: list[str]) -> None:
    assert summary(compare(result(**changes))).split("; ")[1:] == expected


def test_an_interval_is_students() -> None:
    """Of 1, 2, 3, 4 and 5 the mean is 3 and the standard error is 0.707; 2.78 of these are 95 %."""
    assert Interval.from_values([1, 2, 3, 4, 5]) == pytest.approx((3, 3 - 1.966, 3 + 1.966), abs=0.001)
    assert Interval.from_values([7.0]) == (7.0, 7.0, 7.0)


def test_durations_have_a_suitable_unit() -> None:
    assert [format_seconds(seconds) for seconds in (0.0, 0.0042, 0.0999, 0.8, 9.304, 1_234.56)] == [
        "0 ms",
        "4.2 ms",
        "99.9 ms",
        "0.80 s",
        "9.30 s",
        "1,234.6 s",
    ]


# --- the table


def find_best(comparison: Comparison, title: str) -> list[str]:
    """Return the policies that are marked as the best in a column."""
    at = [column.title for column in COLUMNS].index(title)
    lines = zip(comparison.policies, cells(comparison), strict=True)
    return [one.policy for one, line in lines if line[at].is_best]


def test_the_best_of_each_column_is_marked_if_there_is_one() -> None:
    comparison = compare(
        result(preemptions=4), result("random", p90=0.5, hit_rate=0.2), result("prefix-aware", p90=0.50001, hit_rate=0.3)
    )
    assert find_best(comparison, "p90") == ["random", "prefix-aware"]  # their texts are equal
    assert find_best(comparison, "hit rate") == ["prefix-aware"]
    assert find_best(comparison, "preemptions") == ["random", "prefix-aware"]
    assert find_best(comparison, "imbalance") == []  # all are equal
    assert find_best(comparison, "disagreements") == []  # this column has no best value
    assert find_best(compare(result()), "hit rate") == []


def test_an_unknown_value_is_a_dash_and_never_the_best() -> None:
    comparison = compare(make_unanswered(), result("random"))
    assert [cell.text for cell in cells(comparison)[0][:6]] == ["-"] * 6
    assert find_best(comparison, "hit rate") == ["random"]


def test_the_table_has_means_over_the_seeds_and_sums_of_counts() -> None:
    ((_, p90, _, hit_rate, *_, checked, disagreements),) = cells(
        compare(*seeds_of("random", [0.1, 0.3], [0.1, 0.2], disagreements=1))
    )
    assert [cell.text for cell in (p90, hit_rate, checked, disagreements)] == ["0.200", "15.0%", "200", "2"]


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.001, 5_000)), max_size=6))
def test_the_table_is_aligned_in_columns(figures: list[tuple[float, float]]) -> None:
    """For any figures, all lines have the same length, and a line begins with its policy."""
    comparison = compare(*(result(f"policy-{number}", hit_rate=hit, p90=p90) for number, (hit, p90) in enumerate(figures)))
    head, *lines = ([cell.text for cell in line] for line in rows(comparison))
    printed = format_table(head, lines, {"policy"})
    assert len(set(map(cell_width, printed))) == 1
    assert [name for name, *_ in (head, *lines)] == ["policy", *(one.policy for one in comparison.policies)]
    assert head[-1] == "disagreements"


# --- settings


def test_settings_show_the_values_in_use() -> None:
    """The number of blocks comes from the preset and is shown as a number, with the source of the preset's figures."""
    found = report_settings(FleetSettings(), workload="trace")
    assert found["blocks"] == FleetSettings().size.blocks
    assert "roofline" in str(found["cost_source"])


def test_a_line_shows_the_request_and_its_worker() -> None:
    assert traffic_text(SETTINGS) == "2 engines, qwen3-32b-2xh100, 300 requests of chat, 2 requests a second, seed 0"
    one = report_settings(SimulationSettings(engines=1, ranks=4, seed=7, trace="t.jsonl", requests=1, trace_speed=2.0))
    assert traffic_text(one) == "1 engine of 4 ranks, qwen3-32b-2xh100, 1 request of the trace t.jsonl, 2 times as fast, seed 7"


def test_a_line_shows_routers_and_seeds() -> None:
    several = report_settings(SimulationSettings(routers=8, seed=2, workload="chat"), seeds=3)
    assert traffic_text(several) == "8 engines, 8 routers, qwen3-32b-2xh100, chat, seeds 2 to 4"


# --- the picture


def test_equal_comparisons_give_equal_pictures(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg", "c.png", "d.pdf"):
        write_picture(tmp_path / name, compare(*AWARE, *LOADED, make_unanswered()))
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert ET.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")  # noqa: S314 - our own


def test_names_of_traces_are_no_formulas(tmp_path: Path) -> None:
    hostile = Comparison(settings=SETTINGS | {"trace": "<script>$x^$.jsonl"}, policies=[result("$y^$", disagreements=1)])
    write_picture(tmp_path / "a.svg", hostile)
    assert "<script>" not in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize(
    "results", [[], [make_unanswered(), make_unanswered("random", requests=0)]], ids=["none", "unanswered"]
)
def test_a_picture_without_results_is_valid(results: list[PolicyResult], tmp_path: Path) -> None:
    write_picture(tmp_path / "a.svg", compare(*results))
    assert ET.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")  # noqa: S314 - our own


def test_without_matplotlib_the_error_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=re.escape("install kvevents[sim]")):
        check_picture(tmp_path / "a.svg")
