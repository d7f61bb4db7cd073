"""A partition with a hole, which a damaged file or a deletion leaves, heals by itself and disturbs no other partition.

The servers keep the numbers of the missing messages. Bridges and replicas that have read them go on; those that have not must
not wait for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nats
import pytest

from kvevents_plane.digests import ReplicaDigests
from kvevents_plane.layout import Layout
from kvevents_plane.settings import PlaneSettings
from nats_cases import needs_nats
from plane_cases import plane_at, run_bridge
from service_cases import MODEL, Engine, Service, engine, serving, wait_for
from service_replica_cases import watch_of
from tools.nats_servers import NatsServer, nats_server

pytestmark = needs_nats


class Stage:
    """Two engines, the first in the partition that is damaged, the second in the other one."""

    def __init__(self, server: NatsServer, damaged: Engine, whole: Engine) -> None:
        self.server, self.damaged, self.whole = server, damaged, whole
        self.plane: PlaneSettings = plane_at(server.url)
        layout = Layout(self.plane.name, self.plane.partitions)
        names = [f"e{number}" for number in range(20)]
        by_partition = {layout.partition_of(watch_of(name, damaged).source.name or ""): name for name in names}
        self.damaged_name, self.whole_name = by_partition[0], by_partition[1]
        self.watches = watch_of(self.damaged_name, damaged), watch_of(self.whole_name, whole)
        self.stream = layout.stream(0)

    def bridge(self, name: str = "bridge") -> Any:
        return run_bridge(self.plane, *self.watches, name=name)

    def replica(self, name: str) -> Any:
        return serving("--nats", self.server.url, "--replica-name", name, "--snapshot-seconds", "600")

    def store(self, start: int) -> None:
        for each in (self.damaged, self.whole):
            each.store(range(start, start + 64))

    def is_right(self, service: Service, blocks: int) -> bool:
        """Return whether both engines are EXACT with this many blocks. Let them confirm it if they must."""
        service.confirm()
        sources = [service.sources().get((name, 0)) for name in (self.damaged_name, self.whole_name)]
        return all(each is not None and (each["trust"]["state"], each["blocks"]) == ("EXACT", blocks) for each in sources)

    def heals(self, service: Service, blocks: int) -> None:
        """Wait until both engines are EXACT with this many blocks; the partition of the other one must be readable."""

        def look() -> bool:
            found = service.sources().get((self.whole_name, 0))
            assert found is None or "cannot be read" not in found["trust"]["reason"]
            return self.is_right(service, blocks)

        wait_for("both engines to be EXACT", look)

    def last(self) -> int:
        found: int = self.call(lambda js: js.stream_info(self.stream)).state.last_seq
        return found

    def call(self, ask: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        async def main() -> Any:
            client = await nats.connect(self.server.url)
            try:
                return await ask(client.jetstream())
            finally:
                await client.close()

        return asyncio.run(main())

    def delete(self, *positions: int) -> None:
        async def work(js: Any) -> None:
            for position in positions:
                await js.delete_msg(self.stream, position)

        self.call(work)


@pytest.fixture(name="stage")
def running_stage(tmp_path: Path) -> Iterator[Stage]:
    with nats_server(tmp_path) as server, engine() as damaged, engine() as whole:
        yield Stage(server, damaged, whole)


@contextmanager
def right_replica(stage: Stage, name: str, blocks: int) -> Iterator[Service]:
    with stage.replica(name) as service:
        wait_for("both engines to be EXACT", lambda: stage.is_right(service, blocks))
        yield service


@pytest.mark.parametrize("hole", ["newest", "middle"])
def test_deleted_messages_heal_when_bridges_start(stage: Stage, hole: str) -> None:
    """A replica that had read the deleted messages is right again, and so is a replica that starts afterwards."""
    with stage.bridge():
        stage.store(0)
        with right_replica(stage, "before", 4):
            pass
    with stage.replica("while") as reading:
        stage.delete(stage.last() if hole == "newest" else stage.last() // 2)
        with stage.bridge():
            stage.store(100)
            stage.heals(reading, 8)
            with stage.replica("after") as service:
                stage.heals(service, 8)


def test_another_replica_writes_a_snapshot_of_deleted_messages_at_once(stage: Stage) -> None:
    """A replica that lacks the messages requests a snapshot. A later replica begins with the snapshot. No stream starts
    over."""
    with stage.bridge() as bridge:
        stage.store(0)
        with right_replica(stage, "before", 4):
            stage.delete(2, stage.last())
            stage.store(100)
            with stage.replica("after") as service:  # it may answer from the other partition first, if the snapshot takes long
                stage.heals(service, 8)
        with stage.replica("later") as service:
            stage.heals(service, 8)
            service.wait_for_log("loaded from snapshot")
        assert all(each.builder.state.first_page == 1 for each in bridge.partitions)


def test_a_bridge_writes_deleted_messages_again_if_no_replica_has_them(stage: Stage) -> None:
    with stage.bridge():
        stage.store(0)
        wait_for("pages", lambda: stage.last() > 3)
        stage.delete(2, 3)
        with stage.replica("after") as service:
            stage.heals(service, 4)


def test_a_partition_does_not_start_over_for_pages_that_it_never_had(stage: Stage) -> None:
    """A replica can speak of a partition that was deleted and created again meanwhile. The bridge would start over forever."""

    async def publish_missing(js: Any) -> None:
        bucket = await js.key_value(Layout(stage.plane.name, stage.plane.partitions).digests)
        await bucket.put("replica", ReplicaDigests({}, {0: 1_000_000, 1: 2}).encode())

    with stage.bridge() as bridge:
        stage.store(0)
        wait_for("pages", lambda: stage.last() > 3)
        stage.call(publish_missing)
        damaged, whole = bridge.partitions
        wait_for("the other partition to start over", lambda: whole.builder.state.first_page > 2)
        assert damaged.builder.state.first_page == 1


def test_a_replica_answers_for_whole_partitions_without_a_bridge(stage: Stage) -> None:
    """The replica reports why a partition is missing, and does not report the model of the partition's engines as unknown."""
    with stage.bridge():
        stage.store(0)
        with right_replica(stage, "before", 4):
            pass
    stage.delete(2)
    with stage.replica("after") as service:
        tokens = list(range(64))

        def read_answer() -> Any:
            answer = service.post("/v1/match", model=MODEL, tokens=tokens)
            assert answer.status == 200 or (answer.status, answer.reason) == (503, "not-followed-yet")
            return answer.json if answer.status == 200 else None

        answer = wait_for("an answer", read_answer)
        assert [each["instance"] for each in answer["workers"]] == [stage.whole_name]
        assert service.post("/v1/match", model="other", tokens=tokens).status == 503
        warning = "pages of partition 0 are missing"
        wait_for("a warning", lambda: any(warning in each for each in service.get("/health").json["warnings"]))


def test_a_flipped_byte_heals(stage: Stage) -> None:
    """The server cuts the damaged file at the next start."""
    with stage.bridge(), stage.bridge("other"):
        stage.store(0)
        with right_replica(stage, "before", 4) as service:
            stage.server.kill()
            (block,) = stage.server.store.rglob(f"{stage.stream}/msgs/*.blk")
            content = bytearray(block.read_bytes())
            content[len(content) // 2] ^= 0x55
            block.write_bytes(content)
            stage.server.start()
            stage.store(100)
            stage_heals_without_server(stage, service)
            with stage.replica("after") as later:
                stage.heals(later, 8)


def stage_heals_without_server(stage: Stage, service: Service) -> None:
    """Wait as `Stage.heals` does; every engine is STALE while the server is down."""
    wait_for("both engines to be EXACT", lambda: stage.is_right(service, 8))
