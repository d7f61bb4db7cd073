"""What Prometheus is told of a replica and the log that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

from kvevents.plane.ledger import Ledger
from kvevents.plane.subscriber import Lane
from kvevents.service.replica.replica import Replica
from kvevents.service.shards.asking import Shards


class Page(Protocol):
    """What metrics are written on."""

    def gauge(self, name: str, text: str, samples: Mapping[str, float | None]) -> None:
        """A value that goes up and down."""

    def counter(self, name: str, text: str, samples: Mapping[str, float | None]) -> None:
        """A value that only rises."""


def write_plane(page: Page, replica: Replica, now: float) -> None:
    """Everything about the plane that a replica knows, at `now` seconds since the epoch."""
    for name, text, value in _numbers(replica):
        page.gauge(name, text, {"": value})
    page.counter("kvevents_plane_generations_total", "Times that the index was built from the log", {"": replica.generations})
    page.counter(
        "kvevents_plane_disagreements_total", "Times that another replica held something else", {"": replica.disagreements}
    )
    if (generation := replica.generation) is None:
        return
    subscriber = generation.subscriber
    lanes = dict(subscriber.lanes)
    ledgers = list(subscriber.ledgers.values())
    for name, text, count in _COUNTS:
        page.counter(name, text, {"": sum(map(count, ledgers))})
    page.gauge("kvevents_plane_bridges", "Bridges that are heard", {"": subscriber.bridges()})
    page.gauge(
        "kvevents_plane_lane_position", "Number of the newest page in the index", _by_lane(lanes, lambda lane: lane.position)
    )
    page.gauge(
        "kvevents_plane_lane_behind",
        "Pages that are not in the index yet; -1 while that is not known",
        _by_lane(lanes, lambda lane: -1 if lane.behind is None else lane.behind),
    )
    page.gauge(
        "kvevents_plane_lane_age_seconds",
        "Since the newest page in the index was written, by its writer's clock",
        _by_lane(lanes, lambda lane: None if lane.at is None else max(0.0, now - lane.at)),
    )
    page.gauge(
        "kvevents_plane_lane_snapshot_age_seconds",
        "Since this replica found the newest snapshot of the lane",
        {f'lane="{lane}"': age for lane, age in generation.snapshot_ages().items()},
    )


def _numbers(replica: Replica) -> Iterable[tuple[str, str, float | None]]:
    yield "kvevents_plane_complete", "Whether the log was ever read to its end", int(replica.is_complete)
    yield "kvevents_plane_readable", "Whether the log can be read at the moment", int(not replica.fault)
    ages = {} if replica.generation is None else replica.generation.snapshot_ages()
    age = max(ages.values(), default=None)
    yield (
        "kvevents_plane_snapshot_age_seconds",
        "Since this replica found the newest snapshot of a lane, the longest of those",
        age,
    )
    yield "kvevents_plane_snapshot_failing", "Whether the last attempt to take one failed", int(bool(replica.snapshot_fault))


_COUNTS: Final[tuple[tuple[str, str, Callable[[Ledger], int]], ...]] = (
    (
        "kvevents_plane_breaches_total",
        "Records of the log that no bridge writes",
        lambda ledger: ledger.breaches + ledger.foreign,
    ),
    (
        "kvevents_plane_doubled_records_total",
        "Records of the log that say again what it said, or are of a life that has ended",
        lambda ledger: ledger.doubled,
    ),
    (
        "kvevents_plane_void_pages_total",
        "Pages of the log that are void, since their writer expected others before them",
        lambda ledger: ledger.overtaken + ledger.strays,
    ),
)
"""Of each lane's ledger."""


def _by_lane(lanes: Mapping[int, Lane], value: Callable[[Lane], float | None]) -> dict[str, float | None]:
    return {f'lane="{number}"': value(lane) for number, lane in lanes.items()}


def write_shards(page: Page, replica: Replica, shards: Shards) -> None:
    """What a replica that holds a share knows of it, and of the others."""
    lanes = {
        'state="shown"': len(replica.shown),
        'state="wanted"': len(replica.wanted),
        'state="uncovered"': len(shards.uncovered),
    }
    page.gauge("kvevents_shard_lanes", "Lanes that are answered for here, are to be, and that no replica holds", dict(lanes))
    page.gauge("kvevents_shard_replicas", "Other replicas that are heard of", {"": shards.replicas})
    page.gauge("kvevents_shard_refused_replicas", "Other replicas that must not be asked", {"": len(replica.refused)})
    page.counter("kvevents_shard_failures_total", "Questions that another replica did not answer", {"": shards.peers.failures})
    page.counter("kvevents_shard_incomplete_total", "Answers that were not of the whole fleet", {"": shards.incomplete})
