"""The settings of a comparison: which are reported, and how a report shows them in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from kvevents.sim.settings import FleetSettings

Settings: TypeAlias = Mapping[str, str | int | float | bool | None]


def report_settings(fleet: FleetSettings, traffic: Settings) -> dict[str, str | int | float | bool | None]:
    """Return the settings of a fleet and its requests, with the real number of blocks and the source of the costs."""
    found = msgspec.structs.asdict(fleet) | {"blocks": fleet.size.blocks, "cost_source": fleet.costs.source}
    return found | dict(traffic)


def traffic_text(settings: Settings) -> str:
    """Return a fleet and its requests as one line: `8 engines, llama-3.1-8b-h100, 200 requests of chat, seed 0`."""
    engines, ranks = settings.get("engines"), settings.get("ranks")
    parts = [
        f"{engines} engine{'' if engines == 1 else 's'}" + ("" if ranks in {None, 1} else f" of {ranks} ranks"),
        str(settings.get("preset")),
        _source(settings),
        _pace(settings),
        f"seed {settings.get('seed')}",
    ]
    return ", ".join(part for part in parts if part)


def capacity_blocks(settings: Settings) -> int | None:
    """Return the capacity of all caches of the fleet in blocks; None if the settings do not give it."""
    known = [value for name in ("engines", "ranks", "blocks", "host_blocks") if isinstance(value := settings.get(name), int)]
    if len(known) < 4:
        return None
    engines, ranks, blocks, host = known
    return engines * ranks * (blocks + host)


def _source(settings: Settings) -> str:
    trace, workload, requests = (settings.get(name) for name in ("trace", "workload", "requests"))
    count = f"{requests:,} request{'' if requests == 1 else 's'} of " if isinstance(requests, int) else ""
    if trace is not None:
        return f"{count}the trace {trace}"
    return "" if workload is None else f"{count}the packaged sample" if workload == "trace" else f"{count}{workload}"


def _pace(settings: Settings) -> str:
    rate, speed = settings.get("rate"), settings.get("speed")
    return f"{rate:g} requests a second" if rate is not None else f"{speed:g} times as fast" if speed is not None else ""
