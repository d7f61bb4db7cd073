"""`kvevents plane status`: the state of a plane's log, its writers and its readers."""

from __future__ import annotations

import asyncio
import time
from argparse import ArgumentParser, Namespace
from typing import Final

import msgspec

from kvevents.cli.command import ExitCode
from kvevents.cli.console import Console, Span
from kvevents.cli.output import add_output, write_record
from kvevents.cli.settings_parser import LOGIN_SETTINGS, SettingsParser, SettingsValues
from kvevents.diagnosis.text_format import size
from kvevents.errors import PlaneError
from kvevents_plane.connection import open_client, require_jetstream
from kvevents_plane.layout import find_plane
from kvevents_plane.settings import PlaneSettings
from kvevents_plane.snapshots import SnapshotInfo
from kvevents_plane.status import PlaneView, format_partitions, inspect_plane

DESCRIPTION: Final = (
    "Read the state of a plane from its NATS servers: how far the log is, which bridges write it, which snapshots exist, which "
    "replicas read it, and whether they agree. Exit code 1 means a fault, 4 that the servers did not answer."
)
EXAMPLES: Final = """\
  kvevents plane status
  kvevents plane status --nats nats://10.0.0.9:4222 --plane prod
  kvevents plane status -o json | jq .faults
"""

DEFAULT_SERVER: Final = "nats://127.0.0.1:4222"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    settings = SettingsParser(
        PlaneSettings, "plane", flags={"servers": "--nats"}, defaults={"servers": [DEFAULT_SERVER]}, file_table="plane"
    )
    settings.add(parser, "servers", "name", *(path.removeprefix("plane.") for path in LOGIN_SETTINGS))
    settings.add_other_settings(parser, "TOML file with a table [plane], such as that of a bridge or a service")
    add_output(parser, "one object")


def run(args: Namespace) -> int:
    """Print the current state of the plane. Return `ExitCode.FAILED` if the plane has a fault."""
    given: SettingsValues[PlaneSettings] = args.settings.read(args)
    view = asyncio.run(_read_view(given.settings()))
    console = Console()
    record = msgspec.to_builtins(view) | {"exact_seconds": view.exact_seconds, "faults": view.faults}
    if not write_record(record, args.output, console):
        _print_view(console, view)
    return ExitCode.FAILED if view.faults else ExitCode.OK


async def _read_view(settings: PlaneSettings) -> PlaneView:
    async with open_client(settings, name="kvevents plane status") as client:
        await require_jetstream(client)
        layout = await find_plane(client.jetstream(), settings.name)
        if layout is None:
            raise PlaneError(
                f"plane {settings.name!r} does not exist at {settings.server_list}; start a bridge, which creates it",
                fault="missing",
            )
        return await inspect_plane(client.jetstream(), layout)


def _print_view(console: Console, view: PlaneView) -> None:
    now = time.time()
    console.line(Span(f"plane {view.name}", "name"))
    for partition in view.partitions:
        stored = partition.last - partition.first + 1 - partition.missing if partition.last else 0
        missing = f" ({partition.missing:,} missing)" if partition.missing else ""
        ages = (f"{bridge} {max(0.0, now - at):.0f} s ago" for bridge, at in sorted(partition.bridges.items()))
        # A server without a configured name reports its key of 56 characters as its name.
        leader = f", led by {partition.leader[:12]}" if partition.leader else ""
        pages = f"{stored:>9,} pages to {partition.last:,}{missing}, {size(partition.bytes)}{leader}"
        console.line(f"  partition {partition.partition:>3}  {pages}; bridges: {', '.join(ages) or 'none'}")
    _print_snapshots(console, view, now)
    for replica in view.replicas:
        console.line(f"  replica   {replica.name}: lacks {replica.lag:,} pages")
    console.line(f"  EXACT     is at most {view.exact_seconds:.1f} s old at replicas")
    for fault in view.faults:
        console.line(Span(f"  {fault}", "bad"))


def _print_snapshots(console: Console, view: PlaneView, now: float) -> None:
    """Print the newest snapshot of each partition. If at least one exists, name the partitions without a snapshot."""
    newest: dict[int, SnapshotInfo] = {}
    for snapshot in view.snapshots:
        newest.setdefault(snapshot.partition, snapshot)
    for partition, snapshot in sorted(newest.items()):
        age = f"{max(0.0, now - snapshot.taken_at):.0f} s ago by the clock of {snapshot.replica}"
        console.line(
            f"  snapshot  of partition {partition:>3}: {snapshot.blocks:,} blocks to page {snapshot.position:,}, "
            f"{size(snapshot.bytes)}, {age}"
        )
    without = [partition.partition for partition in view.partitions if partition.partition not in newest]
    if newest and without:
        console.line(Span(f"  snapshot  none of {format_partitions(without)}", "warn"))
