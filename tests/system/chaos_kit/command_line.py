"""The command line of a program of chaos."""

from __future__ import annotations

import argparse
import itertools
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from tests.system.chaos_kit.jobs import Run, play_rounds
from tests.system.chaos_kit.judging import Outcome

PRINT_SECONDS: Final = 20.0
"""Seconds between two lines with totals."""


class Report(Protocol):
    """The module that writes the results of a program."""

    @property
    def DOCUMENT(self) -> Path: ...  # noqa: N802 - a constant of the module

    def tables(self, outcomes: Sequence[Outcome], /) -> str: ...

    def totals(self, outcomes: Sequence[Outcome], /) -> str:
        """Return the totals as one paragraph."""
        ...

    def document(self, outcomes: Sequence[Outcome], played: str, before: str, /) -> str:
        """Return the new text of the document. `played` says which rounds were played, `before` is the old text."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A program that plays rounds of faults."""

    name: str
    description: str | None
    report: Report
    known_names: Sequence[str]
    """Names for `--only` and `--without`."""
    make_run: Callable[[argparse.Namespace], Run]
    options: Mapping[str, Mapping[str, Any]]
    """Options that only this program has, with the arguments of `add_argument`."""
    jobs: int
    """Concurrent rounds by default: much of each is waiting."""
    rounds: int = 0
    """Number of rounds by default; 0 for all that begin within `seconds`."""
    seconds: float = 0.0
    must_be_exact: bool = False
    """Whether a round without an error has failed if a result is not EXACT."""
    ends_when_wrong: bool = False
    """Whether no round begins after one was wrong."""
    is_verbose: bool = False

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Return 0 if every round ended as it must, 1 if something was wrong, 2 if a round failed otherwise."""
        options = self._parse(arguments)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes are ended, as after Ctrl-C
        run = self.make_run(options)
        if options.round is not None:
            print(run.plan(options.round).schedule(), flush=True)
        print(f"seed {run.seed}; `--seed {run.seed} --round N` plays one round again", flush=True)
        began = time.monotonic()
        outcomes = self._play(run, options)
        print(f"\n{self.report.tables(outcomes)}\n\n{self.report.totals(outcomes)}")
        seconds, document = time.monotonic() - began, self.report.DOCUMENT
        if options.write:
            choices = (("only", options.only), ("without", options.without))
            chosen = "".join(f", {preposition} {', '.join(names)}" for preposition, names in choices if names)
            before = document.read_text(encoding="utf-8") if document.exists() else ""
            played = f"Seed `{run.seed}`{chosen}, {seconds / 60:.0f} minutes"
            document.write_text(self.report.document(outcomes, played, before), encoding="utf-8")
        unplayed = sum(bool(each.error) for each in outcomes)
        print(f"seed {run.seed}, {seconds:.0f} s, {unplayed} rounds could not be played")
        return 1 if any(each.wrong for each in outcomes) else 2 if any(map(self._has_failed, outcomes)) else 0

    def _play(self, run: Run, options: argparse.Namespace) -> list[Outcome]:
        """Play the rounds, and print those that have failed."""
        found: list[Outcome] = []
        began = printed_at = time.monotonic()
        end = began + (options.hours * 3600 or options.seconds or float("inf"))

        def may_begin() -> bool:
            return time.monotonic() < end and not (self.ends_when_wrong and any(each.wrong for each in found))

        for outcome in play_rounds(run, iter(_list_numbers(options)), options.jobs, may_begin):
            found.append(outcome)
            if self._has_failed(outcome):
                kind = "WRONG" if outcome.wrong else "NOT PLAYED" if outcome.error else "NOT EXACT"
                lines = [f"\n{kind}: {outcome}", f"counted: {dict(outcome.counted)}, reported: {outcome.reported}"]
                print("\n".join([*lines, run.plan(outcome.number).schedule()]), file=sys.stderr, flush=True)
            elif options.verbose or outcome.counted.get("divergences"):
                print(outcome, flush=True)
            if time.monotonic() - printed_at > PRINT_SECONDS:
                printed_at = time.monotonic()
                print(f"{printed_at - began:.0f} s: {self.report.totals(found)}", flush=True)
        return found

    def _has_failed(self, outcome: Outcome) -> bool:
        return not outcome.right if self.must_be_exact else outcome.wrong or bool(outcome.error)

    def _parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        parser = argparse.ArgumentParser(prog=f"python -m {self.name}", description=self.description)
        add = parser.add_argument
        default = f"{self.rounds} rounds" if self.rounds else f"rounds for {self.seconds:g} s"
        add("--seed", default=secrets.token_hex(4), help="seed of the rounds (default: a new one)")
        add("--round", type=int, metavar="N", help="play this round alone, --rounds times, and print it")
        add("--rounds", type=int, default=0, metavar="N", help=f"number of rounds (default: {default})")
        add("--first", type=int, default=0, metavar="N", help="number of the first round (0)")
        add("--seconds", type=float, default=0.0, help="time in which rounds begin")
        add("--hours", type=float, default=0.0, help="the same time in hours")
        add("--only", action="append", default=[], metavar="FAULT", help="rounds that have this fault; may be repeated")
        add("--without", action="append", default=[], metavar="FAULT", help="rounds that do not; may be repeated")
        add("--jobs", type=int, default=self.jobs, help=f"concurrent rounds ({self.jobs})")
        add("--write", action="store_true", help=f"write the results to {self.report.DOCUMENT}")
        add("--verbose", action="store_true", default=self.is_verbose, help="print each round")
        for name, details in self.options.items():
            add(name, **details)
        options = parser.parse_args(arguments)
        unknown = [name for name in (*options.only, *options.without) if name not in self.known_names]
        if unknown:
            parser.error(f"unknown fault {unknown[0]!r}: expected one of {', '.join(self.known_names)}")
        if options.round is None and not (options.rounds or options.seconds or options.hours):
            options.rounds, options.seconds = self.rounds, self.seconds
        return options


def _list_numbers(options: argparse.Namespace) -> Iterable[int]:
    if options.round is not None:
        return [options.round] * (options.rounds or 1)
    return range(options.first, options.first + options.rounds) if options.rounds else itertools.count(options.first)
