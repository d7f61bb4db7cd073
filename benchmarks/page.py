"""`python -m benchmarks.page`: the page of figures, `docs/figures.md`, from `benchmarks/results.json`.

With `--measure` all figures are measured first, and the results are replaced. This takes most of an hour on an otherwise idle
machine. Documents quote figures from this page alone.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.report import spread
from tools.released import CHECKOUT

RESULTS: Final = Path(__file__).with_name("results.json")
PAGE: Final = CHECKOUT / "docs" / "figures.md"
NATIVE: Final = CHECKOUT / "benchmarks" / "native" / "target" / "release" / "kvevents-native-bench"
EQUAL: Final = 0.05
"""Figures that differ by less than this share count as equal."""

SECTIONS: Final = {
    "publish flow replay": ("Publishers", "Publishers of the engines' releases, driven by one program with the same events."),
    "subscribe recover": ("Subscriber", "Beside a loop of pyzmq and msgspec that verifies nothing."),
    "relay": ("Relay", "Beside `zmq.proxy`, which forwards and neither reads nor keeps anything."),
    "bridge": ("Bridge to NATS", "Beside nats-py, which publishes the same payloads as one message each."),
    "service": ("Service", "`kvevents serve` and `python -m dynamo.indexer`, with the same requests over HTTP."),
}
"""First words of trials' names, and the part of the page with the figures of these trials."""


def measure(runs: int, native_runs: int, quick: bool) -> dict[str, Any]:
    """Run all benchmarks. Raises `CalledProcessError`."""
    options = ["--quick"] if quick else []
    subprocess.run(["make", "bench-native-program"], check=True, cwd=CHECKOUT)  # noqa: S607 - make of the path
    command = [sys.executable, "-m", "benchmarks", "--json", "--runs", str(runs), *options]
    report: dict[str, Any] = json.loads(_output(command))
    native = [json.loads(_output([str(NATIVE), "--json", *options])) for _ in range(native_runs)]
    return {
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "commit": _output(["git", "describe", "--always", "--dirty", "--abbrev=10"]).strip(),
        "machine": report["machine"],
        "rust": _output(["rustc", "--version"]).strip(),
        "runs": runs,
        "rows": report["rows"],
        "native": native,
    }


def _output(command: list[str]) -> str:
    """Return the output of a command. Exit code 1 means a missed figure, which the page reports."""
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=CHECKOUT)  # noqa: S603 - ours
    if process.returncode not in {0, 1}:
        process.check_returncode()
    return process.stdout


def page(results: dict[str, Any]) -> str:
    """The page in Markdown."""
    comparisons = [row for row in results["rows"] if row["ratio"] and not row["context"]]
    verdicts = [_verdict(row["ratio"], is_larger_better=row["unit"] == "/s") for row in comparisons]
    origin = (
        f"`make figures` measured everything on this page in one session, and wrote it: {results['date']}, commit"
        f" {results['commit']}, {results['rust']}. Machine: {results['machine']}."
    )
    legend = (
        f"A cell is the median of at most {results['runs']} runs, with the least and the most in brackets;"
        " contenders take turns. The ratio is ours to theirs. `benchmarks/README.md` says how each figure is taken."
    )
    counts = (
        f"Of {len(comparisons)} comparisons kvevents is better in {verdicts.count('better')}, within {EQUAL:.0%} in"
        f" {verdicts.count('equal')}, and worse in {verdicts.count('worse')}."
    )
    losses = (row for row, verdict in zip(comparisons, verdicts, strict=True) if verdict == "worse")
    lines = ["# Figures", "", origin, "", legend, "", "## Wins and losses", "", counts, "", *_losses(losses)]
    for words, (title, text) in SECTIONS.items():
        rows = [row for row in results["rows"] if row["trial"].startswith(tuple(words.split()))]
        if not rows:
            continue
        lines += [
            "",
            f"## {title}",
            "",
            text,
            "",
            "| figure | kvevents | rival | | ratio |",
            "|---|---|---|---|---|",
            *map(_line, rows),
        ]
    lines += ["", *_native(results["native"])]
    return "\n".join(lines) + "\n"


def _verdict(ratio: float, *, is_larger_better: bool) -> str:
    if abs(ratio - 1) < EQUAL:
        return "equal"
    return "better" if (ratio > 1) is is_larger_better else "worse"


def _losses(rows: Iterator[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        yield (
            f"- {row['what']}: {spread(row['ours'], row['unit'])}, {row['rival']} {spread(row['theirs'], row['unit'])},"
            f" ratio {row['ratio']:.2f}"
        )


def _line(row: dict[str, Any]) -> str:
    ratio = f"{row['ratio']:.2f}" if row["ratio"] and not row["context"] else ""
    ours, theirs = (spread(row[side], row["unit"]) for side in ("ours", "theirs"))
    return f"| {row['what']} | {ours} | {theirs} | {row['rival']} | {ratio} |"


def _native(runs: list[list[dict[str, Any]]]) -> Iterator[str]:
    """The tables of the native index: each is a part with the names of its sides."""
    yield "## Index, native"
    yield ""
    yield "Rust libraries on equal input: payloads of vLLM in, sums of scores out. The ratio is ours to the best of the others."
    for index, part in enumerate(runs[0]):
        sides = part["sides"]
        head = (f"| | {' | '.join(sides)} | ratio |", "|---" * (len(sides) + 2) + "|")
        yield from ("", f"### {part['title']}", "", *head)
        for number_of_row, row in enumerate(part["rows"]):
            rows = [run[index]["rows"][number_of_row] for run in runs]
            cells = [_cell([cell["cells"][side] for cell in rows]) for side in range(len(sides))]
            ratios = [cell["measured"] for cell in rows if " of " in cell["reach"]]  # others are judged by a number alone
            yield f"| {row['what']} | {' | '.join(cells)} | {f'{median(ratios):.2f}' if ratios else ''} |"


def _cell(texts: list[str]) -> str:
    """Return median, minimum and maximum of a cell over all runs, or the first run's cell if it is not a number."""
    if len(texts) == 1 or not all(re.fullmatch(r"[\d.]+", text) for text in texts):
        return texts[0]
    values = sorted(texts, key=float)
    return f"{values[len(values) // 2]} ({values[0]} to {values[-1]})" if values[0] != values[-1] else values[0]


def main() -> None:
    """Measure if the option is given, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__)
    parser.add_argument("--measure", action="store_true", help="measure first, and replace the results")
    parser.add_argument("--runs", type=int, default=5, help="runs of each trial and contender (%(default)s)")
    parser.add_argument("--native-runs", type=int, default=3, help="runs of the native benchmark (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="short runs: whether it works, not how fast it is")
    options = parser.parse_args()
    if options.measure:
        results = measure(options.runs, options.native_runs, options.quick)
        RESULTS.write_text(json.dumps(results).replace("}, {", "},\n{") + "\n")  # a line for each row
    PAGE.write_text(page(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
