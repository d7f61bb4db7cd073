"""How far each policy is, on a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvevents.cli.amounts import duration
from kvevents.sim.fleet import Progress


@contextmanager
def bars(policies: Sequence[str], total: int) -> Iterator[Callable[[str, Progress], None]]:
    """A bar for each policy on stderr while inside; nothing unless a person watches and `rich` is installed."""
    try:
        from rich import progress as rich  # noqa: PLC0415 - late: it is of an extra
        from rich.console import Console  # noqa: PLC0415 - as above
    except ImportError:
        yield _nothing
        return
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield _nothing
        return
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.TextColumn("{task.completed:,} / {task.total:,}"),
        rich.TextColumn("{task.fields[now]}"),
    )
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        tasks = {policy: shown.add_task(policy, total=total, now="") for policy in policies}

        def told(policy: str, now: Progress) -> None:
            shown.update(tasks[policy], completed=now.finished, now=f"{duration(now.now)} of the fleet's time")

        yield told


def _nothing(_policy: str, _now: Progress) -> None:
    """Nobody watches."""
