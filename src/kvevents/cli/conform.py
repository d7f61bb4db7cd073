"""`kvevents conform`: play scenarios against an indexer, router or publisher, and print whether it behaved correctly."""

from __future__ import annotations

import os
import sys
import time
from argparse import ArgumentParser, Namespace
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from kvevents.cli.command import CommandLineError, ExitCode
from kvevents.cli.console import Console, Span, Style
from kvevents.cli.options import check_writable
from kvevents.cli.output import add_output, write_record
from kvevents.cli.values import positive_int, service_url, whole_number
from kvevents.conform import scenario as steps
from kvevents.conform.indexer import Indexer, MooncakeIndexer, RunningIndexer, dynamo_indexer, kvevents_indexer
from kvevents.conform.player import play, play_all
from kvevents.conform.publisher import PublisherDriver, kvevents_publisher, publisher_driver
from kvevents.conform.router_target import command_router, vllm_router
from kvevents.conform.target import Driver
from kvevents.conform.verdict import Result, Verdict, make_run, to_json, to_junit
from kvevents.errors import ConfigError
from kvevents.wire import Dialect, resolve_dialect

DESCRIPTION: Final = (
    "Play engines of every release, with all their faults, against an indexer or a router, or consumers against a publisher. "
    "Print whether answers were correct, whether it was reported that they were not, or whether they were silently wrong.\n"
    "Exit code 1: an answer was silently wrong or missing, or too many workers were reported without need."
)
EXAMPLES: Final = """\
  kvevents conform ours
  kvevents conform dynamo                                NVIDIA Dynamo's indexer, from its released wheel
  kvevents conform vllm-router                           its policy kv_aware, from the released wheel
  kvevents conform --indexer http://10.0.0.9:8090        an indexer that runs and can reach this machine's 127.0.0.1
  kvevents conform ours --dialect sglang-0.5.9           every fault with engines of that release
  kvevents conform ours --save results.xml               JUnit XML beside the text
"""

DEFAULT_JOBS: Final = 4
"""Number of scenarios that are played at the same time. Scenarios need little CPU, because they usually wait."""
FOLDER_VARIABLE: Final = "KVEVENTS_CONFORM_FOLDER"
AnyDriver: TypeAlias = Driver | PublisherDriver
DRIVERS: Final[dict[str, Callable[[Path], AnyDriver]]] = {
    "ours": lambda _: kvevents_indexer(),
    "ours-publisher": lambda _: kvevents_publisher(),
    "dynamo": dynamo_indexer,
    "vllm-router": vllm_router,
}
INDEXER_KINDS: Final[dict[str, type[Indexer]]] = {"dynamo": Indexer, "mooncake": MooncakeIndexer}
_VERDICT_STYLES: Final[dict[Verdict, Style]] = {
    Verdict.NOT_APPLICABLE: "dim",
    Verdict.CORRECT: "good",
    Verdict.REPORTED: "warn",
    Verdict.NEEDLESS: "bad",
    Verdict.SILENT: "bad",
    Verdict.UNANSWERED: "loud",
}
_WIDTH: Final = max(len(verdict) for verdict in Verdict)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    targets = parser.add_mutually_exclusive_group()
    targets.add_argument("target", metavar="TARGET", nargs="?", choices=list(DRIVERS), help=f"start it: {', '.join(DRIVERS)}")
    targets.add_argument("--indexer", type=service_url, help="a running indexer with the API of RFC #1403")
    parser.add_argument("--api", choices=tuple(INDEXER_KINDS), help="whose form of the API the indexer has (default: dynamo)")
    text = "a router to start; {port}, {block_size}, {urls}, {endpoints} and {replays} in COMMAND are filled in"
    targets.add_argument("--router", metavar="COMMAND", help=text)
    text = "ENDPOINT,REPLAY of a running publisher, or a command with {endpoint}, {replay_endpoint}, {buffer_steps}"
    targets.add_argument("--publisher", metavar="TARGET", help=text)
    text = "only scenarios with TEXT in their name; can be repeated"
    parser.add_argument("--only", metavar="TEXT", action="append", default=[], help=text)
    parser.add_argument("--scenarios", metavar="PATH", type=Path, help="a scenario file or a folder of them (default: ours)")
    text = "let all engines send as RELEASE does, such as sglang-0.5.9; scenarios that it cannot express are skipped"
    parser.add_argument("--dialect", metavar="NAME", type=_parse_dialect, help=text)
    parser.add_argument("--title", metavar="TEXT", help="name of the target in results (default: its name and version)")
    parser.add_argument("--list", action="store_true", help="list the scenarios and exit")
    parser.add_argument("-j", "--jobs", type=positive_int, default=DEFAULT_JOBS, help="scenarios at a time")
    folder = os.environ.get(FOLDER_VARIABLE) or Path("~/.cache/kvevents/conform").expanduser()
    text = f"virtual environments of programs from wheels (default: ${FOLDER_VARIABLE} or ~/.cache/kvevents/conform)"
    parser.add_argument("--folder", metavar="DIR", type=Path, default=folder, help=text)
    text = "exit with 1 if more than N scenarios, or any without a fault, have a false alarm (default: a twentieth of them)"
    parser.add_argument("--max-needless", type=whole_number, help=text)
    parser.add_argument("--exit-zero", action="store_true", help="exit with 0 regardless of the verdicts")
    add_output(parser, "one object at the end, or for each scenario of --list", "junit")
    parser.add_argument("--save", type=Path, action="append", default=[], help="also write JSON, or JUnit if FILE ends in .xml")


def run(args: Namespace) -> int:
    """Play scenarios. Return FAILED for wrong or missing answers without a report, or for too many needless reports."""
    console = Console()
    scenarios = _choose_scenarios(args)
    if args.list:
        for scenario in scenarios:
            if not write_record({"name": scenario.name, "title": scenario.title}, args.output, console):
                console.line(Span(f"{scenario.name:<34}", "name"), f" {scenario.title}")
        return ExitCode.OK
    for path in args.save:
        check_writable(path)
    driver = _make_driver(args)
    plays = _play_functions(scenarios, driver)
    if not plays:
        raise ConfigError(f"none of the chosen scenarios is for {driver.title}; --list prints all scenarios")
    done = 0

    def show_progress(_: Result) -> None:
        nonlocal done
        done += 1
        console.progress(f"{done} of {len(plays)} scenarios played; Ctrl-C ends the command")

    began, results = time.monotonic(), list[Result]()
    for result in play_all(plays, args.jobs, show_progress):
        results.append(result)
        if args.output in {"table", "wide"}:
            _print_result(console, result, is_first=len(results) == 1 or results[-2].group != result.group)
    outcome = make_run(args.title or driver.title, ["kvevents", *sys.argv[1:]], time.monotonic() - began, results)
    for path in args.save:
        path.write_bytes((to_junit if path.suffix == ".xml" else to_json)(outcome))
    if args.output == "junit":
        console.data(to_junit(outcome))
    elif not write_record(outcome, args.output, console):
        console.line(outcome.summary)
    return ExitCode.FAILED if outcome.has_failed(args.max_needless) and not args.exit_zero else ExitCode.OK


def _play_functions(scenarios: Iterable[steps.AnyScenario], driver: AnyDriver) -> list[Callable[[], Result]]:
    """Return one function for each scenario that the driver can play; the function plays it."""
    if isinstance(driver, PublisherDriver):
        return [partial(driver.play, scenario) for scenario in scenarios if isinstance(scenario, steps.PublisherScenario)]
    return [partial(play, scenario, driver) for scenario in scenarios if isinstance(scenario, steps.Scenario)]


def _choose_scenarios(args: Namespace) -> Sequence[steps.AnyScenario]:
    if args.scenarios is None:
        known = list(steps.shipped_scenarios())
    else:
        paths = sorted(args.scenarios.glob("*.json")) if args.scenarios.is_dir() else [args.scenarios]
        if not paths:
            raise ConfigError(f"{args.scenarios} contains no scenario: expected files *.json")
        known = [steps.read_scenario(path.read_bytes().removeprefix(BOM_UTF8), str(path)) for path in paths]
    chosen = [each for each in known if not args.only or any(text in each.name for text in args.only)]
    if args.dialect is not None:
        own = f"dialect-{args.dialect.name.replace('@', '-')}"
        release = next(each for each in steps.shipped_scenarios() if each.name == own and isinstance(each, steps.Scenario))
        readers = [each for each in chosen if isinstance(each, steps.Scenario) and each.group != "dialects"]
        chosen = list[steps.AnyScenario](found for each in readers if (found := steps.to_dialect(each, release)) is not None)
    if not chosen:
        filters = [*(f"--only {text}" for text in args.only), *([f"--dialect {args.dialect}"] if args.dialect else [])]
        raise ConfigError(f"no scenario fits {' '.join(filters)}; --list prints all scenarios")
    return chosen


def _parse_dialect(text: str) -> Dialect:
    dialect = resolve_dialect(text)
    if dialect is None:
        raise ConfigError(f"unknown release {text!r}: expected a release such as sglang-0.5.9")
    return dialect


def _make_driver(args: Namespace) -> AnyDriver:
    if args.api is not None and args.indexer is None:
        raise CommandLineError("--api needs --indexer: the forms of the API of other targets are known")
    if args.indexer is not None:
        return RunningIndexer(args.indexer, kind=INDEXER_KINDS[args.api or "dynamo"])
    if args.publisher is not None:
        return publisher_driver(args.publisher)
    if args.router is not None:
        return command_router(args.router)
    if args.target is None:
        raise CommandLineError(f"name a target: {', '.join(DRIVERS)}, --indexer URL, --router COMMAND or --publisher TARGET")
    return DRIVERS[args.target](Path(args.folder))


def _print_result(console: Console, result: Result, *, is_first: bool) -> None:
    if is_first:
        console.line(Span(steps.GROUPS[result.group], "bold"))
    console.line("  ", Span(f"{result.verdict:<{_WIDTH}}", _VERDICT_STYLES[result.verdict]), f"  {result.name}: {result.title}")
    if result.detail:
        console.line(" " * (_WIDTH + 4), Span(result.detail, "dim"))
