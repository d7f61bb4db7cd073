"""`kvevents doctor`: what works, between here and an engine or of a service, what does not, and what to do about it."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec

from kvevents.cli import options
from kvevents.cli.asking import Reply
from kvevents.cli.checkup.address import check_address, next_ranks
from kvevents.cli.checkup.candidate import examine_candidate
from kvevents.cli.checkup.comparing import check_losses, check_stream, compare
from kvevents.cli.checkup.findings import Finding, Verdict, warn, worst
from kvevents.cli.checkup.replay import NAME_IT, check_replay, contents_of, topics_of
from kvevents.cli.checkup.sample import MAX_PER_TURN, Sample
from kvevents.cli.checkup.service import ServiceExamination
from kvevents.cli.checkup.traffic import check_decoding, check_frames, check_ranks, check_topic, check_traffic
from kvevents.cli.checkup.trust import check_trust
from kvevents.cli.client import client_of
from kvevents.cli.command import COULD_NOT_LOOK, FAILED, OK, Command
from kvevents.cli.console import Console, Span, Style
from kvevents.cli.stopping import Stop
from kvevents.stream import Source, Trust
from kvevents.subscriber import StreamStatus, Subscriber

DEFAULT_SECONDS: Final = 5.0
TURN: Final = 0.02

_STYLES: Final[dict[Verdict, Style]] = {Verdict.OK: "good", Verdict.WARN: "warn", Verdict.FAIL: "bad"}
_ADVICE_INDENT: Final = " " * 18


class Report(msgspec.Struct, frozen=True):
    """What `-o json` prints of an engine."""

    endpoint: str
    replay_endpoint: str | None
    verdict: Verdict
    findings: list[Finding]


class ServiceReport(msgspec.Struct, frozen=True):
    """What `-o json` prints of a service."""

    service: str
    version: str | None
    verdict: Verdict
    findings: list[Finding]


class Examination:
    """One engine under examination; `findings` yields what is found, as it is found."""

    def __init__(self, args: Namespace) -> None:
        self.replay: str | None = args.replay
        self._curve = options.curve_of(args)
        self._args = args

    def findings(self) -> Iterator[Finding]:
        """Every check whose preconditions hold, from the address up to trust."""
        if not self._args.bind:
            found, publishes = check_address(self._args.endpoint, self._curve)
            yield from found
            if not publishes:
                return
        replay: list[Finding] = []
        reply: Reply | None = None
        with Stop() as stop, self._sample() as sample:
            if self.replay is None:
                replay.append(self._look_for_replay(sample, stop))
            if self.replay is not None:
                found, reply = check_replay(self.replay, self._curve)
                replay += found
            status = self._watch(sample, stop)
        yield from self._traffic(sample, reply, status.trust != Trust.CONNECTING)
        yield from replay
        yield from self._comparisons(sample, reply)
        yield check_trust(status, self._args.duration)

    def _sample(self) -> Sample:
        return Sample(self._args.endpoint, self._args.topic_prefix, bind=self._args.bind, curve=self._curve)

    def _look_for_replay(self, sample: Sample, stop: Stop) -> Finding:
        """Use the unnamed replay endpoint if it is proven to belong to this stream; what was found."""
        if self._args.no_replay or self._args.bind:
            return warn("replay", "no replay endpoint given: what is missed cannot be had again", NAME_IT)

        def wait_for_live() -> None:
            self._until_over(stop, lambda: sample.take(TURN), lambda: bool(sample.numbers.received))

        found = examine_candidate(self._args.endpoint, sample.numbers, wait_for_live, self._curve)
        self.replay = found.endpoint
        return found.finding

    def _comparisons(self, sample: Sample, reply: Reply | None) -> Iterator[Finding]:
        """Whether replay belongs to the stream, and what was lost of the live batches."""
        proven: str | None = None
        if self.replay is not None and reply is not None and reply.answered:
            comparison = compare(self.replay, sample.numbers, self._curve)
            if (finding := check_stream(self.replay, comparison)) is not None:
                yield finding
            proven = self.replay if comparison.same_stream else None
        if (losses := check_losses(sample.numbers, proven, self._curve)) is not None:
            yield losses

    def _watch(self, sample: Sample, stop: Stop) -> StreamStatus:
        """Take the sample and follow the stream, at the same time where both can connect."""
        if self._args.bind:
            self._until_over(stop, lambda: sample.take(TURN))
            # Only one socket can listen at an address; the engine comes back to the next one.
            sample.close()
        with Subscriber(self._source()) as subscriber:
            self._until_over(stop, lambda: self._turn(subscriber, sample))
            # What is still being fetched has as long again: its trust would say nothing.
            self._until_over(stop, lambda: self._turn(subscriber, sample), lambda: _trust(subscriber) != Trust.REPLAYING)
            return subscriber.statuses()[0]

    def _until_over(self, stop: Stop, turn: Callable[[], None], done: Callable[[], bool] = lambda: False) -> None:
        until = time.monotonic() + self._args.duration
        while time.monotonic() < until and not done():
            stop.check()
            turn()

    def _turn(self, subscriber: Subscriber, sample: Sample) -> None:
        if self._args.bind:
            subscriber.receive(timeout=TURN)
        else:
            sample.take(TURN)
        for _ in range(MAX_PER_TURN):
            if subscriber.receive(timeout=0) is None:
                return

    def _source(self) -> Source:
        return Source(self._args.endpoint, self.replay, topic=self._args.topic_prefix, bind=self._args.bind, curve=self._curve)

    def _traffic(self, sample: Sample, reply: Reply | None, connected: bool) -> Iterator[Finding]:
        """What flows; where nothing does, what replay holds says as much about topic and dialect."""
        args = self._args
        yield check_traffic(sample, connected=connected)
        replayed = reply is not None and not sample.messages
        contents = contents_of(reply) if reply is not None and replayed else sample.contents
        topics = topics_of(reply) if reply is not None and replayed else sample.topics
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
    """Examine, show every finding as it comes, and conclude."""
    console = Console()
    report: Report | ServiceReport
    if args.service is not None:
        service = ServiceExamination(client_of(args))
        found = _told(service.findings(), console, quiet=args.output == "json")
        report = ServiceReport(args.service, service.version, worst(found), found)
    else:
        engine = Examination(args)
        found = _told(engine.findings(), console, quiet=args.output == "json")
        report = Report(args.endpoint, engine.replay, worst(found), found)
    if args.output == "json":
        console.data(msgspec.json.encode(report))
    else:
        _conclude(found, console)
    bad = {Verdict.FAIL, Verdict.WARN} if args.strict else {Verdict.FAIL}
    return FAILED if report.verdict in bad else OK


def _told(findings: Iterable[Finding], console: Console, *, quiet: bool) -> list[Finding]:
    found: list[Finding] = []
    for finding in findings:
        found.append(finding)
        if not quiet:
            _show(finding, console)
    return found


def _show(finding: Finding, console: Console) -> None:
    verdict = Span(f"{finding.verdict.value:<6}", _STYLES[finding.verdict])
    console.line(verdict, Span(f"{finding.check:<10}", "bold"), finding.text)
    if finding.advice:
        console.line(_ADVICE_INDENT, Span(f"-> {finding.advice}", "name"))


def _conclude(found: list[Finding], console: Console) -> None:
    counts = Counter(finding.verdict for finding in found)
    console.line(
        Span(f"{worst(found).value:<6}", _STYLES[worst(found)]),
        ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict),
    )


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument(
        "endpoint", nargs="?", metavar="ENDPOINT", type=options.endpoint, help="where the engine publishes: tcp://HOST:PORT"
    )
    who.add_argument(
        "--service", metavar="URL", type=options.service_url, help="examine a service and its fleet instead: http://HOST:PORT"
    )
    options.add_output(parser, "one JSON object after the last check")
    parser.add_argument("--strict", action="store_true", help="exit code 1 for warnings too, as for failed checks")
    engine = parser.add_argument_group("of an engine")
    options.add_engine_details(engine)
    engine.add_argument(
        "--duration", type=options.seconds, default=DEFAULT_SECONDS, metavar="S", help="how long to look (default: %(default)g)"
    )
    options.add_access(parser.add_argument_group("of a service"))


COMMAND: Final = Command(
    "doctor",
    "find out what works, what does not, and what to do about it",
    "Find out what works between here and an engine, or of a service and its fleet, what does not, and what to do about it.\n"
    "It asks an engine for everything that can be replayed, which may delay a busy engine's live events by up to 0.2 s.\n"
    "Without --replay the next port is used if it holds live batches as they were published.",
    """\
  kvevents doctor tcp://10.0.0.7:5557
  kvevents doctor 10.0.0.7:5557 --replay 10.0.0.7:5558 --topic-prefix kv@ --duration 30
  kvevents doctor 'tcp://*:5557' --bind              the engine connects to us
  kvevents doctor --service http://10.0.0.9:8090     a service, and every engine that it follows
""",
    add_arguments,
    run,
    COULD_NOT_LOOK,
)
