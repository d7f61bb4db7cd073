"""Reports of a comparison: the table, the summary, and the page."""

from __future__ import annotations

import re
import sys
from base64 import b64decode
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.errors import MissingDependencyError
from kvevents.sim.report import page
from kvevents.sim.report_text import COLUMNS, cells, report_settings, rows, span, summary, traffic_text
from kvevents.sim.results import Comparison, Distribution, PolicyResult
from kvevents.sim.settings import FleetSettings, SimulationSettings
from sim_report_cases import result

SETTINGS = report_settings(SimulationSettings(engines=2, blocks=1_000, workload="chat", requests=300, rate=2.0))


def make_unanswered(policy: str = "round-robin", **changes: Any) -> PolicyResult:
    """Return the result of a policy without answered requests."""
    nothing: dict[str, Any] = {"finished": 0, "prompt_tokens": 0, "cached_tokens": 0, "hit_rate": 0.0, "checked": 0}
    return result(policy, **(nothing | {"ttft": None, "latency": None, "tpot": None, "workers": [], "series": []} | changes))


def compare(*results: PolicyResult) -> Comparison:
    return Comparison(settings=SETTINGS, policies=list(results))


# --- the summary


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        (
            [result(), result("prefix-aware", hit_rate=0.41, p90=0.2, checked=50)],
            [
                "prefix-aware found 41.0% of prompt tokens in caches, round-robin 12.0%",
                "its TTFT p90 was 0.20 s against 0.90 s",
                "routing by cache made the TTFT p90 78% shorter than round-robin, the best policy without events",
                "index and engines agreed on all 150 lookups",
            ],
        ),
        (
            [result("random", checked=1)],
            [
                "random found 12.0% of prompt tokens in caches",
                "its TTFT p90 was 0.90 s",
                "index and engines agreed on its only lookup",
            ],
        ),
        (
            [result("random", hit_rate=0.5), result("least-loaded", p90=12.34)],
            [
                "random found 50.0% of prompt tokens in caches, least-loaded 12.0%",
                "its TTFT p90 was 0.90 s against 12.3 s",
                "index and engines agreed on all 200 lookups",
            ],
        ),
        (
            [result(), result("session-affinity", hit_rate=0.6, p90=0.05), result("prefix-aware", hit_rate=0.41, p90=0.2)],
            [
                "prefix-aware found 41.0% of prompt tokens in caches, round-robin 12.0% (session-affinity the most, 60.0%)",
                "its TTFT p90 was 0.20 s against 0.90 s (session-affinity the least, 50 ms)",
                "routing by cache is worth nothing here: with session-affinity, which needs no events, TTFT is shorter",
                "index and engines agreed on all 300 lookups",
            ],
        ),
        (
            [result(disagreements=3, unproven=2)],
            [
                "round-robin found 12.0% of prompt tokens in caches",
                "its TTFT p90 was 0.90 s",
                "index and engines DISAGREED on 3 of 100 lookups, which is a defect, 2 could not be compared",
            ],
        ),
        (
            [result(refused=1, checked=0)],
            [
                "round-robin found 12.0% of prompt tokens in caches",
                "its TTFT p90 was 0.90 s",
                "1 request was refused, longer than a whole cache",
                "no lookup was compared with the index",
            ],
        ),
        (
            [make_unanswered(refused=100)],
            [
                "no request was answered",
                "100 requests were refused, longer than a whole cache",
                "no lookup was compared with the index",
            ],
        ),
        ([make_unanswered(requests=0)], ["no request was sent"]),
        ([], ["no request was sent"]),
        (
            [make_unanswered("prefix-aware"), result()],
            [
                "round-robin found 12.0% of prompt tokens in caches",
                "its TTFT p90 was 0.90 s",
                "index and engines agreed on all 100 lookups",
            ],
        ),
    ],
)
def test_the_summary_describes_the_results(results: list[PolicyResult], expected: list[str]) -> None:
    assert summary(compare(*results)) == "; ".join(expected)


@pytest.mark.parametrize(
    ("p90", "expected"),
    [
        (0.85, "routing by cache made the TTFT p90 6% shorter than least-loaded, the best policy without events"),
        (0.86, WITHIN := "is worth nothing here: with least-loaded, which needs no events, TTFT is within 5% or shorter"),
        (0.94, WITHIN),
        (0.95, "is worth nothing here: with least-loaded, which needs no events, TTFT is shorter"),
    ],
)
def test_routing_by_cache_is_worthless_if_it_shortens_no_ttft(p90: float, expected: str) -> None:
    """The best policy that needs no events decides, whatever round robin or another hit rate would suggest."""
    aware = result("prefix-aware", hit_rate=0.9, p90=p90)
    assert expected in summary(compare(result(p90=2.0), result("least-loaded"), aware))


def test_routing_by_cache_is_useful_if_it_shortens_the_mean_ttft() -> None:
    aware = result("prefix-aware", ttft=Distribution(0.3, 0.3, 0.9, 1.0, 1.0))
    assert "routing by cache made the TTFT mean 33% shorter than least-loaded" in summary(
        compare(result("least-loaded"), aware)
    )


def test_the_worth_of_events_is_reported_only_if_both_kinds_of_policies_ran() -> None:
    assert "routing by cache" not in summary(compare(result("prefix-aware")))
    assert "routing by cache" not in summary(compare(result("least-loaded"), result("random")))


def test_durations_have_a_suitable_unit() -> None:
    assert [span(seconds) for seconds in (0.0, 0.0042, 0.0999, 0.8, 9.304, 1_234.56)] == [
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
    return [one.policy for one, line in lines if line[at].best]


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


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.001, 5_000)), max_size=6))
def test_the_table_is_aligned_in_columns(figures: list[tuple[float, float]]) -> None:
    """For any figures, all lines have the same length, and a line begins with its policy."""
    comparison = compare(*(result(f"policy-{number}", hit_rate=hit, p90=p90) for number, (hit, p90) in enumerate(figures)))
    table = rows(comparison)
    assert len({len("  ".join(cell.text for cell in line)) for line in table}) == 1
    assert [line[0].text.strip() for line in table] == ["policy", *(one.policy for one in comparison.policies)]
    assert table[0][-1].text.strip() == "disagreements"


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


# --- the page

IMAGE = "data:image/svg+xml;base64,"


class PageParser(HTMLParser):
    """Reads a page: its elements, which must be closed in order, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "img"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def images(self) -> list[str]:
        """Return the drawings of the page, which are valid XML."""
        found = [str(attributes["src"]) for tag, attributes in self.tags if tag == "img"]
        drawings = [b64decode(source.removeprefix(IMAGE)).decode() for source in found]
        assert all(ET.fromstring(drawing).tag.endswith("svg") for drawing in drawings)  # noqa: S314 - our own
        return drawings


@pytest.fixture(scope="module", name="usual")
def usual_comparison() -> Comparison:
    return compare(
        result(),
        result("prefix-aware", hit_rate=0.41, p90=0.2),
        make_unanswered("random"),
    )


def test_the_page_has_three_pictures_the_table_and_the_settings(usual: Comparison) -> None:
    text = page(usual)
    assert page(usual) == text
    parsed = PageParser(text)
    assert len(parsed.images()) == 3
    assert "prefix-aware found 41.0% of prompt tokens in caches, round-robin 12.0%" in parsed.text
    for value in usual.settings.values():
        assert value is None or str(value) in parsed.text
    for line in cells(usual):
        assert all(cell.text in parsed.text for cell in line)


def test_the_page_loads_nothing(usual: Comparison) -> None:
    """The page has no script, and it forbids browsers to load anything."""
    text = page(usual)
    tags = {tag for tag, _ in PageParser(text).tags}
    assert not tags & {"script", "link", "iframe"}
    assert "//" not in re.sub(r'src="[^"]*"', "", text)
    assert "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\"" in text


HOSTILE = "<script>alert(1)</script>\"'&$x^$\x1b[2J"


def test_names_are_escaped() -> None:
    """This holds for names of policies, settings and traces, and in the pictures."""
    settings = SETTINGS | {"trace": HOSTILE, HOSTILE: HOSTILE, "preset": HOSTILE, "cost_source": HOSTILE}
    text = page(Comparison(settings=settings, policies=[result(HOSTILE, disagreements=1)]))
    parsed = PageParser(text)
    assert len(parsed.images()) == 3
    assert "script" not in {tag for tag, _ in parsed.tags}
    assert "\x1b" not in text
    assert "<script>alert(1)</script>\"'&$x^$\\x1b[2J" in parsed.text
    assert "DISAGREED on 1 of 100 lookups" in parsed.text


@pytest.mark.parametrize(
    "results", [[], [make_unanswered(), make_unanswered("random", requests=0)]], ids=["none", "unanswered"]
)
def test_a_page_without_results_is_valid(results: list[PolicyResult]) -> None:
    assert len(PageParser(page(compare(*results))).images()) == 3


def test_a_page_without_matplotlib_is_an_error_with_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=re.escape("pip install 'kvevents[sim]'")):
        page(compare(result()))
