"""Simulations of several policies at the same time, each in a process of its own."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Final, NamedTuple, TypeAlias

from kvevents.cli.sim.workload_options import WorkloadOptions
from kvevents.errors import ExternalError, KVEventsError
from kvevents.sim.fleet import Progress, simulate
from kvevents.sim.results import PolicyResult
from kvevents.sim.settings import FleetSettings

OnProgress: TypeAlias = Callable[[str, Progress], None]

_SPAWNED: Final = get_context("spawn")
"""A new process does not inherit the threads and locks of this one."""
_JOIN_SECONDS: Final = 5.0
"""Time of a process to end after its result; then it is killed."""


class WorkerError(ExternalError):
    """A process ended before its simulation did."""


class _Run(NamedTuple):
    policy: str
    process: Any
    pipe: Connection


def run_policies(
    policies: Sequence[str], settings: FleetSettings, workload: WorkloadOptions, *, jobs: int, on_progress: OnProgress
) -> list[PolicyResult]:
    """Return the results in the order of `policies`. At most `jobs` simulations run at a time.

    Raises the errors of `simulate`, and `WorkerError`. No process is left behind after an error.
    """
    if min(jobs, len(policies)) == 1:
        found = [_run_in_process(policy, settings, workload, on_progress) for policy in policies]
    else:
        results = _run_in_processes(policies, settings, workload, jobs, on_progress)
        found = [results[policy] for policy in policies]
    return found


def _run_in_process(policy: str, settings: FleetSettings, workload: WorkloadOptions, on_progress: OnProgress) -> PolicyResult:
    result = simulate(settings, policy, workload.generate(), progress=partial(on_progress, policy))
    on_progress(policy, _end(result))
    return result


def _run_in_processes(
    policies: Sequence[str], settings: FleetSettings, workload: WorkloadOptions, jobs: int, on_progress: OnProgress
) -> dict[str, PolicyResult]:
    resource_tracker.ensure_running()  # now, since before Python 3.12 its start lets signals in that `_uninterrupted` keeps out
    waiting, running, results = deque(policies), dict[Connection, _Run](), dict[str, PolicyResult]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = _start(waiting.popleft(), settings, workload)
                running[run.pipe] = run
            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)  # noqa: S101 - nothing else was waited for
                run = running[pipe]
                message = _receive(run)
                if isinstance(message, PolicyResult):
                    results[run.policy] = message
                    _close(running.pop(pipe))
                on_progress(run.policy, _end(message) if isinstance(message, PolicyResult) else message)
    finally:
        for run in running.values():
            run.process.kill()
        for run in running.values():
            _close(run)
    return results


def _start(policy: str, settings: FleetSettings, workload: WorkloadOptions) -> _Run:
    ours, theirs = _SPAWNED.Pipe(duplex=False)
    process = _SPAWNED.Process(target=_work, args=(theirs, policy, settings, workload), daemon=True)
    with theirs, _uninterrupted():
        process.start()
    return _Run(policy, process, ours)


def _receive(run: _Run) -> Progress | PolicyResult:
    """Return the next message of a process. Raises its error, and `WorkerError` if it has ended."""
    try:
        message = run.pipe.recv()
    except (EOFError, OSError) as error:
        run.process.join(_JOIN_SECONDS)
        code = run.process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with exit code {code}"
        raise WorkerError(
            f"the process for {run.policy} {how} before the simulation was done; if memory is short, use fewer --jobs"
        ) from error
    if isinstance(message, KVEventsError):
        raise message
    assert isinstance(message, (Progress, PolicyResult))  # noqa: S101 - the types that `_work` sends
    return message


def _close(run: _Run) -> None:
    run.process.join(_JOIN_SECONDS)
    if run.process.is_alive():
        run.process.kill()
        run.process.join()
    run.process.close()
    run.pipe.close()


def _work(pipe: Connection, policy: str, settings: FleetSettings, workload: WorkloadOptions) -> None:
    """Run a simulation in its process."""
    with suppress(BrokenPipeError):  # the parent process has ended
        try:
            answer: PolicyResult | KVEventsError = simulate(settings, policy, workload.generate(), progress=pipe.send)
        except KVEventsError as error:
            answer = error
        pipe.send(answer)


def _end(result: PolicyResult) -> Progress:
    return Progress(result.seconds, result.requests, result.finished + result.refused)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Block SIGINT in a process that is started here. A terminal sends it to all, and this process ends the others."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
