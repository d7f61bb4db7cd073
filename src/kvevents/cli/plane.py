"""`kvevents plane`: a plane's log, its snapshots, and who writes and reads it."""

from __future__ import annotations

import asyncio
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvevents.cli import options
from kvevents.cli.command import COULD_NOT_LOOK, FAILED, OK, Command
from kvevents.cli.console import Console, Span
from kvevents.cli.parser import CommandParser
from kvevents.cli.serve import LOGIN
from kvevents.cli.settings import Form, Given
from kvevents.errors import PlaneError

if TYPE_CHECKING:
    from kvevents.plane.settings import PlaneSettings
    from kvevents.plane.snapshots import Kept
    from kvevents.plane.status import PlaneView

DEFAULT_SERVER: Final = "nats://127.0.0.1:4222"
_LEASES: Final = {
    "replica.": "the name of replica {}",
    "lease.snapshot.": "snapshots of partition {}",
}
"""By how a key begins, what its lease is about."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the commands."""
    assert isinstance(parser, CommandParser)  # noqa: S101 - as all of the program
    parser.add_commands((STATUS,), "plane_command")


def run(args: Namespace) -> int:
    """Run the command that was chosen."""
    command: Command = args.plane_command
    return command.run(args)


def add_status_arguments(parser: ArgumentParser) -> None:
    """Declare the options of `kvevents plane status`."""
    from kvevents.plane.settings import PlaneSettings  # noqa: PLC0415 - late, for what else this program does

    form = Form(PlaneSettings, "plane", flags={"servers": "--nats"}, defaults={"servers": [DEFAULT_SERVER]}, within="plane")
    form.add(parser, "servers", "name", *(path.removeprefix("plane.") for path in LOGIN))
    form.add_rest(parser, "TOML file with a table [plane], as of a bridge or a service")
    options.add_output(parser, "one JSON object")


def run_status(args: Namespace) -> int:
    """Print the status of the plane; return `FAILED` if it has a fault."""
    given: Given[PlaneSettings] = args.form.read(args)
    settings = given.settings()
    view = asyncio.run(_ask(settings))
    console = Console()
    if args.output == "json":
        console.line(msgspec.json.encode(_told(view)).decode())
    else:
        _print(console, view)
    return FAILED if view.faults else OK


async def _ask(settings: PlaneSettings) -> PlaneView:
    from kvevents.plane.connection import opened, require_jetstream  # noqa: PLC0415 - an extra
    from kvevents.plane.layout import find  # noqa: PLC0415 - as above
    from kvevents.plane.status import look  # noqa: PLC0415 - as above

    async with opened(settings, name="kvevents plane status") as client:
        await require_jetstream(client)
        layout = await find(client.jetstream(), settings.name)
        if layout is None:
            raise PlaneError(f"there is no plane {settings.name!r} at {settings.where}; a bridge makes it", fault="missing")
        return await look(client.jetstream(), layout)


def _told(view: PlaneView) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(view)
    return found | {"faults": view.faults}


def _print(console: Console, view: PlaneView) -> None:
    now = time.time()
    console.line(Span(f"plane {view.name}", "name"))
    for partition in view.partitions:
        held = partition.last - partition.first + 1 if partition.last else 0
        heard = (
            ", ".join(f"{bridge} {max(0.0, now - at):.0f} s ago" for bridge, at in sorted(partition.bridges.items()))
            or "nobody"
        )
        leader = f", led by {partition.leader}" if partition.leader else ""
        shares = f"; held by {', '.join(view.holders(partition.partition)) or 'nobody'}" if view.shares else ""
        pages = f"{held:>9,} pages to {partition.last:,}, {_size(partition.bytes)}{leader}"
        console.line(f"  partition {partition.partition:>3}  {pages}; bridges: {heard}{shares}")
    _print_snapshots(console, view, now)
    for each in view.replicas:
        console.line(f"  replica   {each.name}: {each.behind:,} pages since its last census")
    for share in view.shares:
        console.line(f"  share     {share.name} at {share.url}: {_partitions(share.partitions)}, said {share.silent:.0f} s ago")
    for key, holder in sorted(view.leases.items()):
        console.line(f"  lease     {_lease(key)}: {holder}")
    for fault in view.faults:
        console.line(Span(f"  {fault}", "bad"))


def _print_snapshots(console: Console, view: PlaneView, now: float) -> None:
    """Of each partition the newest; and which partitions have none while others do."""
    newest: dict[int, Kept] = {}
    for kept in view.snapshots:
        newest.setdefault(kept.partition, kept)
    for partition, kept in sorted(newest.items()):
        age = f"{max(0.0, now - kept.at):.0f} s ago by the clock of {kept.by}"
        console.line(
            f"  snapshot  of partition {partition:>3}: {kept.blocks:,} blocks to page {kept.position:,}, "
            f"{_size(kept.bytes)}, {age}"
        )
    without = [partition.partition for partition in view.partitions if partition.partition not in newest]
    if newest and without:
        console.line(Span(f"  snapshot  none of {_partitions(without)}", "warn"))


def _partitions(partitions: Sequence[int]) -> str:
    from kvevents.plane.status import spelled  # noqa: PLC0415 - as above

    return spelled(partitions) if partitions else "no partition"


def _lease(key: str) -> str:
    """What it is about, in words."""
    from kvevents.plane.leases import lease_name  # noqa: PLC0415 - as above

    level = next((level for level in _LEASES if key.startswith(level)), None)
    if level is None:
        return key
    return _LEASES[level].format(lease_name(key.removeprefix("lease.")))


def _size(count: int) -> str:
    return f"{count / (1 << 20):,.1f} MiB"


STATUS: Final = Command(
    name="status",
    summary="show partitions, bridges, snapshots, leases, shards, and whether replicas agree",
    description=(
        "Read from the NATS servers how far the log of a plane is, which bridges write it, which snapshots there are, which "
        "replicas hold which part of it, and whether replicas agree. Exit code 1 if something is wrong, 4 if the servers "
        "cannot be asked."
    ),
    examples="""\
  kvevents plane status
  kvevents plane status --nats nats://10.0.0.9:4222 --plane prod
  kvevents plane status -o json                          for programs
""",
    add_arguments=add_status_arguments,
    run=run_status,
)

COMMAND: Final = Command(
    name="plane",
    summary="inspect the log of a plane on NATS",
    description="Inspect the log of a plane on NATS, the bridges that write it and the replicas that read it.",
    examples=STATUS.examples,
    add_arguments=add_arguments,
    run=run,
    on_error=COULD_NOT_LOOK,
)
