"""Failures of the plugin inside a real engine, which must continue to serve and log the failure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from tests.system.engines.installation import unpack_kvevents
from tests.system.engines.server import BLOCK_SIZE, Engine, EngineError, wait_until
from tests.system.engines.service import Service
from tests.system.engines.stage import PLUGIN, Stage
from tests.system.engines.traffic import Habits, Traffic

REQUESTS: Final = 5
EVENTS_SECONDS: Final = 15.0
BLOCKS: Final = 48


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure in the process of an engine."""

    name: str
    variables: dict[str, str] = field(default_factory=dict)
    has_package: bool = True
    """Whether the package of the entry point can be imported."""


FAULTS: Final = (
    Fault("setting of a wrong type", {"KVEVENTS_PUBLISHER": '{"heartbeat": "soon"}'}),
    Fault("settings that are no JSON", {"KVEVENTS_PUBLISHER": "{heartbeat"}),
    Fault("import error", has_package=False),
    Fault(
        "exception in the constructor",
        {"ENGINE_OBSERVER_FAULT": "kvevents.publisher.zmq_publisher:ZmqEventPublisher.__init__"},
    ),
    Fault("exception in a hook into the cache", {"ENGINE_OBSERVER_FAULT": "kvevents.engines.vllm:_digest_of"}),
    Fault("exception in publish()", {"ENGINE_OBSERVER_FAULT": "kvevents.publisher.base:QueuedPublisher.publish"}),
    Fault(
        "exception whenever batches are sent",
        {"ENGINE_OBSERVER_FAULT": "kvevents.publisher.event_server:EventServer.send"},
    ),
)


class FailureResult(msgspec.Struct):
    """Result of one fault."""

    fault: str
    serves: bool
    """Whether requests are answered."""
    has_events: bool
    """Whether the service has blocks of the engine."""
    log_lines: int
    """Lines of EngineCore's log, at WARNING or above, that name kvevents. Each of vLLM's processes loads plugins."""
    log: str
    """The first of these lines."""

    @property
    def is_survived(self) -> bool:
        return self.serves and self.log_lines > 0


def run_failures(stage: Stage) -> Iterator[FailureResult]:
    """Start one engine for each fault."""
    for fault in FAULTS:
        yield _run(stage, fault)


def _run(stage: Stage, fault: Fault) -> FailureResult:
    print(f"fault: {fault.name}", flush=True)
    path = None if fault.has_package else unpack_kvevents(stage.wheel, stage.folder / "without-package", with_package=False)
    try:
        with (
            stage.engine(PLUGIN, "llama", BLOCKS, path=path, variables=fault.variables) as engine,
            Service(engine.url, engine.settings.folder) as service,
        ):
            traffic = Traffic("failures", Habits(), BLOCK_SIZE)
            for _ in range(REQUESTS):
                engine.complete(traffic.next())
            has_events = wait_until(lambda: bool((service.source() or {}).get("blocks")), EVENTS_SECONDS)
            lines = _find_failure_lines(engine)
            return FailureResult(
                fault.name, serves=True, has_events=has_events, log_lines=len(lines), log=next(iter(lines), "")[:300]
            )
    except (EngineError, OSError) as error:
        return FailureResult(fault.name, serves=False, has_events=False, log_lines=0, log=str(error)[-300:])


def _find_failure_lines(engine: Engine) -> list[str]:
    text = engine.log.read_text(encoding="utf-8", errors="replace")
    return [
        line.partition("(EngineCore ")[2].partition(") ")[2] or line for line in text.splitlines() if _is_failure_line(line)
    ]


def _is_failure_line(line: str) -> bool:
    """Return whether a line of the log reports a failure of kvevents. Loggers other than those of vLLM have another format."""
    if line.startswith("(EngineCore "):
        return "kvevents" in line and ("WARNING" in line or "ERROR" in line)
    return "failed: RuntimeError('the observer makes" in line
