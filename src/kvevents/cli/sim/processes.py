"""Several policies side by side, each in a process of its own, with the same results as one after the other."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Final, NamedTuple, TypeAlias

from kvevents.cli.sim.traffic import TrafficChoice
from kvevents.errors import ExternalError, KVEventsError
from kvevents.sim.fleet import Progress, simulate
from kvevents.sim.results import PolicyResult
from kvevents.sim.settings import FleetSettings

Told: TypeAlias = Callable[[str, Progress], None]

_SPAWNED: Final = get_context("spawn")
"""Nothing of this process is copied but what is sent, whatever threads it has."""
_JOIN_SECONDS: Final = 5.0
"""A process that has said all ends at once; one that does not is killed."""


class WorkerError(ExternalError):
    """A process ended before it was done."""


class _Run(NamedTuple):
    policy: str
    process: Any
    pipe: Connection


def run_policies(
    policies: Sequence[str], settings: FleetSettings, traffic: TrafficChoice, *, jobs: int, told: Told
) -> list[PolicyResult]:
    """The results in the order of `policies`, `jobs` of which run at a time; `told` is called as each one goes on.

    Raises what `simulate` does, and `WorkerError`. Whatever is raised, no process is left behind.
    """
    if min(jobs, len(policies)) == 1:
        found = [_run_here(policy, settings, traffic, told) for policy in policies]
    else:
        results = _run_there(policies, settings, traffic, jobs, told)
        found = [results[policy] for policy in policies]
    return found


def _run_here(policy: str, settings: FleetSettings, traffic: TrafficChoice, told: Told) -> PolicyResult:
    result = simulate(settings, policy, traffic.make(), progress=partial(told, policy))
    told(policy, _end(result))
    return result


def _run_there(
    policies: Sequence[str], settings: FleetSettings, traffic: TrafficChoice, jobs: int, told: Told
) -> dict[str, PolicyResult]:
    resource_tracker.ensure_running()  # now, since before Python 3.12 its start lets signals in that `_uninterrupted` keeps out
    waiting, running, results = deque(policies), dict[Connection, _Run](), dict[str, PolicyResult]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = _start(waiting.popleft(), settings, traffic)
                running[run.pipe] = run
            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)  # noqa: S101 - nothing else was waited for
                run = running[pipe]
                message = _receive(run)
                if isinstance(message, PolicyResult):
                    results[run.policy] = message
                    _close(running.pop(pipe))
                told(run.policy, _end(message) if isinstance(message, PolicyResult) else message)
    finally:
        for run in running.values():
            run.process.kill()
        for run in running.values():
            _close(run)
    return results


def _start(policy: str, settings: FleetSettings, traffic: TrafficChoice) -> _Run:
    ours, theirs = _SPAWNED.Pipe(duplex=False)
    process = _SPAWNED.Process(target=_work, args=(theirs, policy, settings, traffic), daemon=True)
    with theirs, _uninterrupted():
        process.start()
    return _Run(policy, process, ours)


def _receive(run: _Run) -> Progress | PolicyResult:
    """What a process says next. Raises what it raised, and `WorkerError` when it says nothing any more."""
    try:
        message = run.pipe.recv()
    except (EOFError, OSError) as error:
        run.process.join(_JOIN_SECONDS)
        code = run.process.exitcode
        how = f"was ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with exit code {code}"
        raise WorkerError(
            f"the process for {run.policy} {how} before it was done; with too little memory, fewer --jobs may help"
        ) from error
    if isinstance(message, KVEventsError):
        raise message
    assert isinstance(message, (Progress, PolicyResult))  # noqa: S101 - what `_work` sends
    return message


def _close(run: _Run) -> None:
    run.process.join(_JOIN_SECONDS)
    if run.process.is_alive():
        run.process.kill()
        run.process.join()
    run.process.close()
    run.pipe.close()


def _work(pipe: Connection, policy: str, settings: FleetSettings, traffic: TrafficChoice) -> None:
    """What a process does."""
    with suppress(BrokenPipeError):  # nobody waits for it any more
        try:
            answer: PolicyResult | KVEventsError = simulate(settings, policy, traffic.make(), progress=pipe.send)
        except KVEventsError as error:
            answer = error
        pipe.send(answer)


def _end(result: PolicyResult) -> Progress:
    return Progress(result.seconds, result.requests, result.finished + result.refused)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """A process that is started here never sees Ctrl-C, which a terminal sends to all: this one ends it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
