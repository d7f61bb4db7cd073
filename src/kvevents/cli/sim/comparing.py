"""What `kvevents sim compare` does."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

import msgspec

from kvevents.cli.command import FAILED, INTERRUPTED, OK
from kvevents.cli.console import Console, Part, Span
from kvevents.cli.lines import plural
from kvevents.cli.sim.bars import bars
from kvevents.cli.sim.options import fleet_of, traffic_of
from kvevents.cli.sim.processes import run_policies
from kvevents.errors import ConfigError
from kvevents.routing import POLICIES
from kvevents.sim.fleet import Progress
from kvevents.sim.report import Cell, asked, check_drawing, described, page, rows, seen
from kvevents.sim.results import Comparison, PolicyResult


def compare(args: Namespace, console: Console) -> int:
    """Run, tell, and write. Raises `ConfigError` and other errors of ours."""
    settings, traffic = fleet_of(args), traffic_of(args)
    policies = list(dict.fromkeys(args.policy or POLICIES))
    if args.html is not None:
        check_drawing()
        _check_place(args.html)
    total, done = traffic.count(), set[str]()
    try:
        with bars(policies, total) as show:

            def told(policy: str, now: Progress) -> None:
                show(policy, now)
                if now.finished >= total:
                    done.add(policy)

            jobs = args.jobs or len(os.sched_getaffinity(0))
            results = run_policies(policies, settings, traffic, jobs=jobs, told=told)
    except KeyboardInterrupt:
        console.note(f"interrupted when {len(done)} of {plural(len(policies), 'run')} were done; nothing is kept")
        return INTERRUPTED
    comparison = Comparison(
        settings=described(settings, msgspec.structs.asdict(traffic) | {"requests": total}), policies=results
    )
    tell(comparison, console, json=args.output == "json")
    if args.html is not None:
        _write(args.html, page(comparison))
        console.note(f"wrote {args.html}")
    return FAILED if judge(results, console) else OK


def tell(comparison: Comparison, console: Console, *, json: bool) -> None:
    """The table and the sentence, or one JSON object."""
    if json:
        console.data(msgspec.json.encode(comparison))
        return
    console.note(Span(f"{asked(comparison.settings)}; times in seconds, * is the best", "dim"))
    head, *lines = rows(comparison)
    console.line(Span("  ".join(cell.text for cell in head).rstrip(), "dim"))
    for line in lines:
        console.line(*_painted(line))
    console.line(seen(comparison))


def _painted(line: list[Cell]) -> list[Part]:
    name, *figures = line
    parts: list[Part] = [Span(name.text, "name")]
    for cell in figures:
        parts += ["  ", Span(cell.text, "good" if cell.best else "plain")]
    return parts


def judge(results: list[PolicyResult], console: Console) -> int:
    """How often fleet and index disagree, which is a fault of ours; if ever, examples are told."""
    for result in results:
        for one in result.examples:
            console.note(
                Span(f"{result.policy}: {one.source}/{one.rank} ", "bad"),
                f"found {one.cached:,} of {one.prompt:,} tokens where the index says {one.indexed:,}"
                f" (life {one.life}, batch {one.seq}, after {plural(one.position, 'event')} of it)",
            )
    wrong = sum(result.disagreements for result in results)
    if wrong:
        console.note(Span("kvevents: ", "bad"), f"index and engines disagree on {plural(wrong, 'lookup')}; please report this")
    return wrong


def _check_place(file: Path) -> None:
    """A report that cannot be written is told before the work, not after it."""
    if file.is_dir():
        raise ConfigError(f"cannot write {file}: it is a folder; name a file")
    if not file.parent.is_dir():
        raise ConfigError(f"cannot write {file}: there is no folder {file.parent}; make it first")


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror or error}") from error
