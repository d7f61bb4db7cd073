"""A live fleet to look at: a table that changes on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from kvevents.cli.amounts import duration, share, worker
from kvevents.cli.console import Console

if TYPE_CHECKING:
    from rich.console import Group

    from kvevents.sim.live import LiveFleet, WorkerView

LINE_SECONDS: Final = 5.0
"""Between two lines where there is no terminal."""
FRAME_SECONDS: Final = 0.25
"""Between two frames where there is one."""
MAX_ROWS: Final = 24
"""Workers in the table; the others are counted below it."""
_BAR: Final = 24
_STYLES: Final = {"EXACT": "green", "REPLAYING": "cyan", "DEGRADED": "yellow", "CONNECTING": "magenta", "STALE": "bold red"}


@contextmanager
def board(fleet: LiveFleet, console: Console, *, quiet: bool = False) -> Iterator[Callable[[], None]]:
    """Inside, call what is yielded as often as you like. Nothing is shown when `quiet`."""
    if quiet:
        yield lambda: None
        return
    try:
        from rich.console import Console as Screen  # noqa: PLC0415 - late: it is of an extra
        from rich.live import Live  # noqa: PLC0415 - as above
    except ImportError:
        yield _paced(lambda: console.note(line(fleet)), LINE_SECONDS)
        return
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield _paced(lambda: console.note(line(fleet)), LINE_SECONDS)
        return
    with Live(console=Screen(stderr=True), auto_refresh=False, transient=True) as live:
        yield _paced(lambda: live.update(frame(fleet), refresh=True), FRAME_SECONDS)


def _paced(show: Callable[[], None], seconds: float) -> Callable[[], None]:
    last = time.monotonic()

    def paced() -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= seconds:
            last = now
            show()

    return paced


def line(fleet: LiveFleet, views: Sequence[WorkerView] | None = None) -> str:
    """The fleet in a line; `views` of it spare a look."""
    views, progress = fleet.views() if views is None else views, fleet.fleet.progress
    tally = fleet.fleet.tally
    exact = sum(view.trust == "EXACT" for view in views)
    counts = fleet.follower.audit.counts
    return (
        f"{duration(progress.now)}: {progress.finished:,} of {progress.arrived:,} answered, "
        f"{sum(view.running for view in views):,} running, {sum(view.waiting for view in views):,} waiting, "
        f"{share(tally.cached_tokens, tally.prompt_tokens)} of prompt tokens cached, {exact} of {len(views)} streams EXACT, "
        f"{tally.batches:,} batches, index and engine agreed on {counts.checked - counts.disagreements:,} of {counts.checked:,}"
    )


def frame(fleet: LiveFleet) -> Group:
    """The fleet in a line and a table."""
    from rich.console import Group  # noqa: PLC0415 - late: it is of an extra
    from rich.table import Table  # noqa: PLC0415 - as above
    from rich.text import Text  # noqa: PLC0415 - as above

    views = fleet.views()
    room = fleet.settings.size.blocks
    found = Table(box=None, pad_edge=False)
    for title in ("worker", "trust", "cache", "blocks", "running", "waiting", "hit rate", "batches", "lives"):
        found.add_column(title, justify="left" if title in {"worker", "trust", "cache"} else "right", header_style="dim")
    for view in views[:MAX_ROWS]:
        found.add_row(
            worker(*view.worker), Text(view.trust, _STYLES.get(view.trust, "")), _bar(view.blocks / room), *_figures(view)
        )
    if len(views) > MAX_ROWS:
        found.caption = f"and {len(views) - MAX_ROWS:,} more"
    return Group(Text(f"{fleet.name}  {line(fleet, views)}"), found)


def _figures(view: WorkerView) -> tuple[str, ...]:
    return (
        f"{view.blocks:,}",
        f"{view.running:,}",
        f"{view.waiting:,}",
        f"{view.hit_rate:.0%}",
        f"{view.batches:,}",
        f"{view.restarts + 1:,}",
    )


def _bar(part: float) -> str:
    full = round(_BAR * min(part, 1.0))
    return "█" * full + "·" * (_BAR - full)
