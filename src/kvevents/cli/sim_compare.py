"""`kvevents sim compare`: compare routing policies on the same requests, in virtual time and in parallel processes."""

from __future__ import annotations

import os
import signal
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context, resource_tracker
from pathlib import Path
from typing import Final

import msgspec

from kvevents.cli.command import ExitCode
from kvevents.cli.console import Console, Span, format_table
from kvevents.cli.options import check_writable
from kvevents.cli.output import add_output, write_record
from kvevents.cli.settings_parser import SettingsParser, SettingsValues
from kvevents.cli.values import positive_int
from kvevents.diagnosis.text_format import percentage, plural
from kvevents.errors import ExternalError
from kvevents.sim.picture import check_picture, write_picture
from kvevents.sim.report_text import report_settings, rows, summary, traffic_text
from kvevents.sim.results import Comparison, PolicyResult
from kvevents.sim.routers import POLICIES
from kvevents.sim.settings import FleetSettings, SimulationSettings
from kvevents.sim.simulated_fleet import simulate


def add_simulation(parser: ArgumentParser, *, excluded_paths: Collection[str] = ()) -> None:
    """Declare the settings of a fleet and its requests, except `excluded_paths`, which the command does not use."""
    settings = SettingsParser(SimulationSettings, "sim", excluded_paths=excluded_paths)
    requests = parser.add_argument_group("requests")
    settings.add(requests.add_mutually_exclusive_group(), "trace", "workload")
    settings.add(requests, "requests")
    settings.add(requests.add_mutually_exclusive_group(), "rate", "trace_speed")
    fleet_paths = [path for path in FleetSettings.__struct_fields__ if path not in excluded_paths]
    settings.add(parser.add_argument_group("fleet"), *fleet_paths)
    settings.add_other_settings(parser, "TOML file with settings of the fleet and its requests")


def read_simulation(args: Namespace) -> SimulationSettings:
    """Return the values of the settings that `add_simulation` declares. Raises `ConfigError`."""
    given: SettingsValues[SimulationSettings] = args.settings.read(args)
    return given.settings()


# --- processes


def run_policies(
    policies: Sequence[str],
    settings: SimulationSettings,
    *,
    seeds: int = 1,
    jobs: int,
    on_result: Callable[[PolicyResult], None],
) -> list[PolicyResult]:
    """Simulate each policy with consecutive seeds, and return the results in order of policy and seed.

    `on_result` is called with each result when its simulation ends. At most `jobs` simulations run at a time, each in a process
    of its own. Raises the errors of `simulate`, and `ExternalError`. After an error, all processes are killed.
    """
    planned = [(policy, seed) for policy in policies for seed in range(settings.seed, settings.seed + seeds)]
    if min(jobs, len(planned)) == 1:
        results: list[PolicyResult] = []
        for policy, seed in planned:
            results.append(_simulate(settings, policy, seed))
            on_result(results[-1])
        return results
    resource_tracker.ensure_running()  # Before Python 3.12, starting it later would unblock SIGINT.
    # Unlike a forked process, a spawned process does not inherit threads and locks.
    with ProcessPoolExecutor(min(jobs, len(planned)), get_context("spawn")) as pool:
        try:
            with _block_interrupts():
                futures = [pool.submit(_simulate, settings, policy, seed) for policy, seed in planned]
                # The pool detects the death of a process only if the process ran at the newest `submit`: submit one more task.
                pool.submit(os.getpid)
            for future in as_completed(futures):
                on_result(future.result())
        except BrokenProcessPool as error:
            text = "a process ended before its simulation was done; if memory is short, use fewer --jobs"
            raise ExternalError(text) from error
        finally:
            for process in active_children():
                process.kill()
    return [future.result() for future in futures]


def _simulate(settings: SimulationSettings, policy: str, seed: int) -> PolicyResult:
    settings = msgspec.structs.replace(settings, seed=seed)
    return simulate(settings, policy, settings.generate())


@contextmanager
def _block_interrupts() -> Iterator[None]:
    """Block SIGINT in processes started in this context. Ctrl-C signals all processes, but only this process must react."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- the command

DESCRIPTION: Final = (
    "Simulate a fleet under each routing policy, with the same requests and in virtual time, and say whether events pay: "
    "whether the policy that needs them is faster than all that do not, and finds more in caches. The cached tokens of every "
    "prompt are also compared with an index that is built from the events; exit code 1 means that they differed. The same "
    "options give the same output."
)
EXAMPLES: Final = """\
  kvevents sim compare
  kvevents sim compare --workload agents --rate 8 --routers 4 --seeds 5
  kvevents sim compare --trace conversation_trace.jsonl.gz --trace-speed 2 --engines 16 --picture compared.svg
  kvevents sim compare --requests 200 -o json | jq -c .policies[0].hit_rate
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    text = "simulate this policy; can be repeated (default: all)"
    parser.add_argument("--policy", action="append", choices=list(POLICIES), help=text)
    parser.add_argument("--seeds", type=positive_int, default=3, help="simulate each policy with N seeds, from --seed on")
    parser.add_argument("-j", "--jobs", type=positive_int, help="simulations at the same time (default: the number of CPUs)")
    add_output(parser, "one object with all results")
    parser.add_argument("--picture", type=Path, help="draw the comparison into FILE (.svg, .png or .pdf), which is replaced")
    add_simulation(parser)


def run(args: Namespace) -> int:
    """Simulate the fleet under each policy, and print the comparison. Raises `ConfigError` and other errors of kvevents."""
    console = Console()
    settings = read_simulation(args)
    policies = list(dict.fromkeys(args.policy or POLICIES))
    if args.picture is not None:
        check_picture(args.picture)
        check_writable(args.picture)
    requests, done = settings.count(), Counter[str]()

    def on_result(result: PolicyResult) -> None:
        done[result.policy] += 1
        console.progress(", ".join(f"{name} {percentage(done[name], args.seeds)}" for name in policies))

    try:
        jobs = args.jobs or len(os.sched_getaffinity(0))
        results = run_policies(policies, settings, seeds=args.seeds, jobs=jobs, on_result=on_result)
    except KeyboardInterrupt:
        planned = plural(len(policies) * args.seeds, "simulation")
        console.note(f"interrupted after {done.total()} of {planned}; their results are discarded")
        return ExitCode.INTERRUPTED
    comparison = Comparison(settings=report_settings(settings, requests=requests, seeds=args.seeds), policies=results)
    if not write_record(comparison, args.output, console):
        print_comparison(comparison, console)
    if args.picture is not None:
        write_picture(args.picture, comparison)
        console.note(f"wrote {args.picture}")
    return ExitCode.FAILED if report_disagreements(results, console) else ExitCode.OK


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the table of policies, and a conclusion."""
    console.note(Span(f"{traffic_text(comparison.settings)}; times in seconds, * is the best", "dim"))
    head, *lines = rows(comparison)
    spans = [[Span(n.text, "name"), *(Span(c.text, "good" if c.is_best else "plain") for c in cells)] for n, *cells in lines]
    console.lines(format_table([cell.text for cell in head], spans, {"policy"}))
    console.line(summary(comparison))


def report_disagreements(results: list[PolicyResult], console: Console) -> int:
    """Print examples of lookups for which index and engine disagree (a defect). Return the number of all these lookups."""
    for result in results:
        for lookup in result.examples:
            text = f"found {lookup.cached:,} of {lookup.prompt:,} tokens where the index says {lookup.indexed:,}"
            place = f"incarnation {lookup.incarnation}, batch {lookup.seq}, after {plural(lookup.position, 'event')} of it"
            console.note(Span(f"{result.policy}: {lookup.source}/{lookup.rank} ", "bad"), f"{text} ({place})")
    wrong = sum(result.disagreements for result in results)
    if wrong:
        text = f"index and engines disagree on {plural(wrong, 'lookup')}: a defect of kvevents, please report it"
        console.note(Span("kvevents: ", "bad"), text)
    return wrong
