"""Reports of a comparison: the table, the summary, and the page, which is also rendered in a real Chromium."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chromium import Chromium, find_chromium
from kvevents.errors import MissingDependencyError
from kvevents.sim.report import page, report_settings, rows, summary, traffic_text
from kvevents.sim.report_figures import DRAWINGS, MAX_DOTS, MAX_POINTS, _sample_dots, hit_rates
from kvevents.sim.report_text import COLUMNS, capacity_blocks, cells, span
from kvevents.sim.results import Comparison, Disagreement, Distribution, FleetSample, PolicyResult
from kvevents.sim.settings import FleetSettings
from sim_report_cases import result

VOID = frozenset({"meta", "link", "br", "hr", "img", "input"})
SETTINGS = report_settings(
    FleetSettings(engines=2, blocks=1_000), {"trace": None, "workload": "chat", "requests": 300, "rate": 2.0}
)
DIFFERENCE = Disagreement("engine-1", 0, 0, 17, 3, 4_096, 512, 528)


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
    found = report_settings(FleetSettings(), {"workload": "trace"})
    assert found["blocks"] == FleetSettings().size.blocks
    assert "roofline" in str(found["cost_source"])
    assert capacity_blocks(found) == 8 * FleetSettings().size.blocks
    assert capacity_blocks(report_settings(FleetSettings(engines=3, ranks=2, blocks=100, host_blocks=50), {})) == 900
    assert capacity_blocks({"engines": 8}) is None


def test_a_line_shows_the_request_and_its_worker() -> None:
    assert traffic_text(SETTINGS) == "2 engines, qwen3-32b-2xh100, 300 requests of chat, 2 requests a second, seed 0"
    one = report_settings(FleetSettings(engines=1, ranks=4, seed=7), {"trace": "t.jsonl", "requests": 1, "speed": 2.0})
    assert traffic_text(one) == "1 engine of 4 ranks, qwen3-32b-2xh100, 1 request of the trace t.jsonl, 2 times as fast, seed 7"


# --- figures


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=300))
def test_hit_rates_over_time_cover_all_samples(pairs: list[tuple[int, int]]) -> None:
    """The result has few points in the order of time. Each is between the least and the highest rate of its samples."""
    series = [FleetSample(float(at), 0, 0, 0, 0, prompt + cached, cached) for at, (prompt, cached) in enumerate(pairs)]
    times, rates = hit_rates(series)
    assert len(times) == len(rates) <= MAX_POINTS
    assert times == sorted(set(times))
    assert all(0 <= rate <= 1 for rate in rates)
    assert bool(times) == any(sample.prompt_tokens for sample in series)


def test_dots_of_many_workers_include_the_lowest_and_the_highest() -> None:
    values = [float(number) for number in range(4_096)]
    sampled = _sample_dots(values)
    assert len(sampled) == MAX_DOTS
    assert (sampled[0], sampled[-1]) == (0.0, 4_095.0)
    assert _sample_dots(values[:5]) == values[:5]


# --- the page


class PageParser(HTMLParser):
    """A parser that reads a page as strictly as XML. It records elements, ids and visible text."""

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
        assert len(dict(attrs)) == len(attrs), f"{tag} has a duplicate attribute"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if self.open and self.open[-1] != "style" else ""

    def of(self, *names: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag in names]


@pytest.fixture(scope="module", name="usual")
def usual_comparison() -> Comparison:
    return compare(
        result(),
        result("prefix-aware", hit_rate=0.41, p90=0.2, predicted_tokens=400, overpredictions=7),
        make_unanswered("random"),
    )


@pytest.fixture(scope="module", name="text")
def usual_page(usual: Comparison) -> str:
    return page(usual)


def test_the_page_is_complete_and_well_formed(text: str) -> None:
    parsed = PageParser(text)
    assert text.startswith("<!doctype html>\n")
    ids = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for attributes in parsed.of("use"):
        assert str(attributes["xlink:href"]).removeprefix("#") in ids
    assert set(re.findall(r"url\(#([^)]*)\)", text)) <= set(ids)


def test_the_page_is_self_contained(text: str) -> None:
    """The page has no script and loads nothing, and it forbids browsers to do either."""
    parsed = PageParser(text)
    assert parsed.of("script", "link", "img", "iframe", "image") == []
    assert "http://" not in text
    assert "https://" not in text
    assert "@import" not in text
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    policies = [one["content"] for one in parsed.of("meta") if one.get("http-equiv") == "Content-Security-Policy"]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_the_same_comparison_gives_the_same_page(usual: Comparison, text: str) -> None:
    assert page(usual) == text


def test_every_figure_has_a_label(text: str) -> None:
    parsed = PageParser(text)
    labels = [str(one["aria-label"]) for one in parsed.of("svg")]
    assert len(labels) == len(parsed.of("figure")) == len(DRAWINGS)
    assert all("prefix-aware: " in label for label in labels)
    assert "p50 66.7 ms, p90 0.20 s, p99 0.80 s" in labels[0]
    assert all(one["role"] == "img" for one in parsed.of("svg"))
    titles = {one.get("id") for one in parsed.of("h2")}
    assert all(one["aria-labelledby"] in titles for one in parsed.of("figure"))


def test_figures_use_the_colors_of_the_page(text: str) -> None:
    """The page has a light and a dark style, so a figure must not have a color of its own."""
    style, body = text.split("</style>")
    assert "prefers-color-scheme: dark" in style
    assert "color-scheme: light dark" in style
    assert re.findall(r"#[0-9a-f]{6}\b", body) == []
    for used in set(re.findall(r"var\((--[\w-]+)\)", body)):
        assert style.count(f"{used}:") == 2
    assert "currentColor" in body


def test_the_page_has_the_results_and_the_settings(text: str, usual: Comparison) -> None:
    parsed = re.sub(r"\s+", " ", PageParser(text).text)
    assert "Prefix-aware found 41.0% of prompt tokens in caches, round-robin 12.0%" in parsed
    assert "prefix-aware: 100 compared, 0 differed, 0 could not be compared; 400 cached tokens were predicted" in parsed
    assert "7 requests found fewer than predicted" in parsed
    for value in usual.settings.values():
        assert value is None or str(value) in parsed
    for line in cells(usual):
        assert all(cell.text in parsed for cell in line)


HOSTILE = "<script>alert(1)</script>\"'&$x^$\x1b[2J"


def test_names_are_escaped() -> None:
    """This holds for names of policies, settings, traces and engines, in attributes, in figures and in labels."""
    settings = SETTINGS | {"trace": HOSTILE, HOSTILE: HOSTILE, "preset": HOSTILE, "cost_source": HOSTILE}
    wrong = result(HOSTILE, disagreements=1, examples=[Disagreement(HOSTILE, 0, 0, 1, 1, 1, 1, 1)])
    text = page(Comparison(settings=settings, policies=[wrong]))
    parsed = PageParser(text)
    assert parsed.of("script") == []
    assert "\x1b" not in text
    assert "<script>alert(1)</script>\"'&$x^$\\x1b[2J" in parsed.text
    assert "DISAGREED on 1 of 100 lookups" in parsed.text
    assert "class=bad" in text


@pytest.mark.parametrize(
    "results", [[], [make_unanswered(), make_unanswered("random", requests=0)]], ids=["none", "unanswered"]
)
def test_a_page_without_results_is_valid(results: list[PolicyResult]) -> None:
    parsed = PageParser(page(compare(*results)))
    assert len(parsed.of("svg")) == len(DRAWINGS)


def test_a_page_without_matplotlib_is_an_error_with_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=re.escape("pip install 'kvevents[sim]'")):
        page(compare(result()))


@pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed; tools/setup installs Debian's")
def test_a_browser_shows_the_page_wide_and_narrow_light_and_dark(text: str, tmp_path: Path) -> None:
    """The browser reports no error and requests nothing else, the page does not overflow, and the text is visible."""
    file = tmp_path / "report.html"
    file.write_text(text)
    backgrounds = set()
    with Chromium() as browser:
        for width, dark in ((1_200, False), (400, True)):
            browser.set_viewport(width, 900, dark=dark)
            browser.open(file.as_uri())
            assert browser.run("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
            sizes = browser.run("[...document.querySelectorAll('svg')].map(one => one.getBoundingClientRect().width)")
            assert len(sizes) == len(DRAWINGS)
            assert all(250 < size < width for size in sizes)
            background, color = browser.run("(style => [style.backgroundColor, style.color])(getComputedStyle(document.body))")
            assert background != color
            backgrounds.add(background)
        assert browser.console == []
        assert {url.split(":")[0] for url in browser.requested_urls} == {"file"}
    assert len(backgrounds) == 2
