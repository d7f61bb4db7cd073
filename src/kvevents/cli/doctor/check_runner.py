"""`kvevents doctor`: run the checks of an engine or of a service, and report."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec

from kvevents.cli.command import FAILED, OK
from kvevents.cli.console import Console, Span, Style
from kvevents.cli.doctor import CheckResult, Severity, warn, worst
from kvevents.cli.doctor.address import check_address, next_ranks
from kvevents.cli.doctor.replay import (
    USE_REPLAY,
    ReplayResponse,
    check_losses,
    check_replay,
    check_stream,
    compare,
    count_topics,
    decode_response,
    find_replay_endpoint,
)
from kvevents.cli.doctor.service_checks import ServiceChecks
from kvevents.cli.doctor.traffic import (
    MAX_PER_TURN,
    TrafficSample,
    check_decoding,
    check_frames,
    check_ranks,
    check_topic,
    check_traffic,
    check_trust,
)
from kvevents.cli.options import (
    add_access,
    add_engine_details,
    add_output,
    endpoint,
    make_client,
    positive_seconds,
    read_curve,
    service_url,
)
from kvevents.cli.process import StopSignal
from kvevents.stream import Source, Trust
from kvevents.subscriber import StreamStatus, Subscriber

DESCRIPTION: Final = (
    "Check the connection to an engine, or a service and its fleet, and print advice for each fault.\n"
    "All batches that the engine can replay are requested, which can delay live events of a busy engine by up to 0.2 s. "
    "Without --replay, the next port is used if it provably belongs to the stream.\n"
    "Exit codes: 0 no fault, 1 a failed check, 4 the checks were not possible."
)
EXAMPLES: Final = """\
  kvevents doctor tcp://10.0.0.7:5557
  kvevents doctor 10.0.0.7:5557 --replay 10.0.0.7:5558 --topic-prefix kv@ --duration 30
  kvevents doctor 'tcp://*:5557' --bind              for an engine that connects
  kvevents doctor --service http://10.0.0.9:8090     a service and its engines
"""

DEFAULT_SECONDS: Final = 5.0
POLL_SECONDS: Final = 0.02

_STYLES: Final[dict[Severity, Style]] = {Severity.OK: "good", Severity.WARN: "warn", Severity.FAIL: "bad"}
_ADVICE_INDENT: Final = " " * 18


class DoctorReport(msgspec.Struct, frozen=True):
    """The JSON output of the checks of an engine."""

    endpoint: str
    replay_endpoint: str | None
    verdict: Severity
    findings: list[CheckResult]


class ServiceReport(msgspec.Struct, frozen=True):
    """The JSON output of the checks of a service."""

    service: str
    version: str | None
    verdict: Severity
    findings: list[CheckResult]


class EngineChecks:
    """The checks of one engine."""

    def __init__(self, args: Namespace) -> None:
        self.replay: str | None = args.replay
        self._curve = read_curve(args)
        self._args = args

    def findings(self) -> Iterator[CheckResult]:
        """Run every check whose preconditions hold, from the address to trust, and yield the findings."""
        if not self._args.bind:
            found, publishes = check_address(self._args.endpoint, self._curve)
            yield from found
            if not publishes:
                return
        replay: list[CheckResult] = []
        response: ReplayResponse | None = None
        with StopSignal() as stop, self._sample() as sample:
            if self.replay is None:
                replay.append(self._find_replay(sample, stop))
            if self.replay is not None:
                found, response = check_replay(self.replay, self._curve)
                replay += found
            status = self._watch(sample, stop)
        yield from self._traffic(sample, response, status.trust != Trust.CONNECTING)
        yield from replay
        yield from self._comparisons(sample, response)
        yield check_trust(status, self._args.duration)

    def _sample(self) -> TrafficSample:
        return TrafficSample(self._args.endpoint, self._args.topic_prefix, bind=self._args.bind, curve=self._curve)

    def _find_replay(self, sample: TrafficSample, stop: StopSignal) -> CheckResult:
        """Look for a replay endpoint, and use it if it is verified to belong to the stream."""
        if self._args.no_replay or self._args.bind:
            return warn("replay", "no replay endpoint given, so lost batches stay lost", USE_REPLAY)

        def wait_for_live() -> None:
            self._repeat(stop, lambda: sample.take(POLL_SECONDS), lambda: bool(sample.numbers.received))

        found = find_replay_endpoint(self._args.endpoint, sample.numbers, wait_for_live, self._curve)
        self.replay = found.endpoint
        return found.finding

    def _comparisons(self, sample: TrafficSample, response: ReplayResponse | None) -> Iterator[CheckResult]:
        """Check whether the replay endpoint belongs to the stream, and whether live batches were lost."""
        verified: str | None = None
        if self.replay is not None and response is not None and response.answered:
            comparison = compare(self.replay, sample.numbers, self._curve)
            if (finding := check_stream(self.replay, comparison)) is not None:
                yield finding
            verified = self.replay if comparison.same_stream else None
        if (losses := check_losses(sample.numbers, verified, self._curve)) is not None:
            yield losses

    def _watch(self, sample: TrafficSample, stop: StopSignal) -> StreamStatus:
        """Take the sample and subscribe to the stream, at the same time if both can connect."""
        if self._args.bind:
            self._repeat(stop, lambda: sample.take(POLL_SECONDS))
            # Only one socket can listen at an address. The engine reconnects to the next one.
            sample.close()
        with Subscriber(self._source()) as subscriber:
            self._repeat(stop, lambda: self._turn(subscriber, sample))
            # A replay that is not complete gets the same time again, since trust is unknown before its end.
            self._repeat(stop, lambda: self._turn(subscriber, sample), lambda: _trust(subscriber) != Trust.REPLAYING)
            return subscriber.statuses()[0]

    def _repeat(self, stop: StopSignal, turn: Callable[[], None], done: Callable[[], bool] = lambda: False) -> None:
        until = time.monotonic() + self._args.duration
        while time.monotonic() < until and not done():
            stop.check()
            turn()

    def _turn(self, subscriber: Subscriber, sample: TrafficSample) -> None:
        if self._args.bind:
            subscriber.receive(timeout=POLL_SECONDS)
        else:
            sample.take(POLL_SECONDS)
        for _ in range(MAX_PER_TURN):
            if subscriber.receive(timeout=0) is None:
                return

    def _source(self) -> Source:
        return Source(self._args.endpoint, self.replay, topic=self._args.topic_prefix, bind=self._args.bind, curve=self._curve)

    def _traffic(self, sample: TrafficSample, response: ReplayResponse | None, connected: bool) -> Iterator[CheckResult]:
        """Check what arrives. If nothing does, check topic and dialect of the replayed batches."""
        args = self._args
        yield check_traffic(sample, connected=connected)
        replayed = response is not None and not sample.messages
        contents = decode_response(response) if response is not None and replayed else sample.contents
        topics = count_topics(response) if response is not None and replayed else sample.topics
        neighbours = 0 if args.bind else next_ranks(args.endpoint)
        checks = (
            check_topic(topics, args.topic_prefix),
            check_frames(sample),
            check_decoding(contents, "replayed" if replayed else "live"),
            check_ranks(contents.ranks, neighbours),
        )
        yield from (finding for finding in checks if finding is not None)


def _trust(subscriber: Subscriber) -> Trust:
    return subscriber.statuses()[0].trust


def run(args: Namespace) -> int:
    """Run the checks, print each finding, and return the exit code."""
    console = Console()
    report: DoctorReport | ServiceReport
    if args.service is not None:
        service = ServiceChecks(make_client(args))
        found = _collect(service.findings(), console, quiet=args.output == "json")
        report = ServiceReport(args.service, service.version, worst(found), found)
    else:
        engine = EngineChecks(args)
        found = _collect(engine.findings(), console, quiet=args.output == "json")
        report = DoctorReport(args.endpoint, engine.replay, worst(found), found)
    if args.output == "json":
        console.data(msgspec.json.encode(report))
    else:
        _print_totals(found, console)
    bad = {Severity.FAIL, Severity.WARN} if args.strict else {Severity.FAIL}
    return FAILED if report.verdict in bad else OK


def _collect(findings: Iterable[CheckResult], console: Console, *, quiet: bool) -> list[CheckResult]:
    found: list[CheckResult] = []
    for finding in findings:
        found.append(finding)
        if not quiet:
            _print_finding(finding, console)
    return found


def _print_finding(finding: CheckResult, console: Console) -> None:
    verdict = Span(f"{finding.verdict.value:<6}", _STYLES[finding.verdict])
    console.line(verdict, Span(f"{finding.check:<10}", "bold"), finding.text)
    if finding.advice:
        console.line(_ADVICE_INDENT, Span(f"-> {finding.advice}", "name"))


def _print_totals(found: list[CheckResult], console: Console) -> None:
    counts = Counter(finding.verdict for finding in found)
    console.line(
        Span(f"{worst(found).value:<6}", _STYLES[worst(found)]),
        ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Severity),
    )


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument(
        "endpoint", nargs="?", metavar="ENDPOINT", type=endpoint, help="endpoint of the engine's events: tcp://HOST:PORT"
    )
    subject.add_argument(
        "--service", metavar="URL", type=service_url, help="check a service and its fleet instead: http://HOST:PORT"
    )
    add_output(parser, "one JSON object after the last check")
    parser.add_argument("--strict", action="store_true", help="return exit code 1 for warnings too")
    engine = parser.add_argument_group("for an engine")
    add_engine_details(engine)
    engine.add_argument(
        "--duration",
        type=positive_seconds,
        default=DEFAULT_SECONDS,
        metavar="S",
        help="seconds to receive events (default: %(default)g)",
    )
    add_access(parser.add_argument_group("for a service"))
