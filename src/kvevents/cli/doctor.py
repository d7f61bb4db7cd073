"""`kvevents doctor`: run the checks of an engine or of a service, and print the findings."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from kvevents.cli.command import CommandLineError, ExitCode
from kvevents.cli.console import Console, Span, Style
from kvevents.cli.options import add_engine, add_engine_details, read_sources
from kvevents.cli.output import DATA_FORMATS, add_output, write_record
from kvevents.cli.service_options import add_service, make_client
from kvevents.cli.signals import StopSignal
from kvevents.cli.values import positive_seconds
from kvevents.diagnosis.engine_checks import EngineChecks
from kvevents.diagnosis.findings import CheckResult, Severity, worst_severity
from kvevents.diagnosis.service_checks import ServiceChecks

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
  kvevents doctor                                    the service of KVEVENTS_SERVICE, or of the current context
"""

_SEVERITY_STYLES: Final[dict[Severity, Style]] = {Severity.OK: "good", Severity.WARN: "warn", Severity.FAIL: "bad"}


def run(args: Namespace) -> int:
    """Run the checks, print each finding, and return the exit code."""
    if args.endpoint is not None and (args.service or args.context or args.token_file or args.tls_ca):
        raise CommandLineError("name an engine or a service (--service, --context), not both")
    if args.endpoint is None and (args.replay or args.no_replay or args.topic_prefix or args.bind or args.curve_key):
        raise CommandLineError(
            "--replay, --no-replay, --topic-prefix, --bind and --curve-key need ENDPOINT: they are for an engine"
        )
    console = Console()
    quiet = args.output in DATA_FORMATS
    subject: dict[str, Any]
    if args.endpoint is None:
        service = ServiceChecks(make_client(args))
        findings = _collect_results(service.findings(), console, quiet=quiet)
        subject = {"service": args.service, "version": service.version}
    else:
        engine = EngineChecks(read_sources(args)[0], StopSignal(), args.duration, searches=not args.no_replay)
        findings = _collect_results(engine.findings(), console, quiet=quiet)
        subject = {"endpoint": engine.source.endpoint, "replay_endpoint": engine.source.replay_endpoint}
    verdict = worst_severity(findings)
    if not write_record(subject | {"verdict": verdict, "findings": findings}, args.output, console):
        counts = Counter(finding.verdict for finding in findings)
        totals = ", ".join(f"{counts[severity]} {severity.value}" for severity in Severity)
        console.line(Span(f"{verdict.value:<6}", _SEVERITY_STYLES[verdict]), totals)
    return ExitCode.FAILED if verdict == Severity.FAIL or (args.strict and verdict == Severity.WARN) else ExitCode.OK


def _collect_results(findings: Iterable[CheckResult], console: Console, *, quiet: bool) -> list[CheckResult]:
    collected: list[CheckResult] = []
    for finding in findings:
        collected.append(finding)
        if not quiet:
            verdict = Span(f"{finding.verdict.value:<6}", _SEVERITY_STYLES[finding.verdict])
            console.line(verdict, Span(f"{finding.check:<10}", "bold"), finding.text)
            if finding.advice:
                console.line(" " * 18, Span(f"-> {finding.advice}", "name"))
    return collected


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    add_engine(parser, "check a service")
    add_output(parser, "one object after the last check")
    parser.add_argument("--strict", action="store_true", help="return exit code 1 for warnings too")
    engine = parser.add_argument_group("for an engine")
    add_engine_details(engine)
    parser.set_defaults(source_name=None, ranks=1)
    engine.add_argument("--duration", type=positive_seconds, default=5.0, help="seconds to receive events")
    add_service(parser.add_argument_group("for a service and its fleet"))
