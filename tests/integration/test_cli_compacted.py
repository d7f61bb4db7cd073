"""A consumer that joins late receives a snapshot of older batches, and no command reports these batches as lost."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli_cases import SECONDS, run
from cli_doctor_cases import Findings, examine, findings, has_traffic
from cli_service_cases import serving
from kvevents.events import BlockStored, KVEventBatch
from kvevents.export import export
from kvevents.publisher import ZmqEventPublisher
from kvevents.stream import Gap
from publisher_cases import wait_until

pytest.importorskip("kvevents_native._native", reason="publishers need the native module for compaction")

PUBLISHED = 60
BUFFERED = 10


@pytest.fixture
def old_engine() -> Iterator[ZmqEventPublisher]:
    """A publisher that has compacted most of its history and continues to publish."""
    publisher = ZmqEventPublisher(
        endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", topic="kv", buffer_steps=BUFFERED
    )
    done = threading.Event()
    seq = 0

    def publish() -> None:
        nonlocal seq
        stored = BlockStored([1000 + seq], None, [seq, 1, 2, 3], 4, medium="GPU")
        publisher.publish(KVEventBatch(time.time(), [stored], 0))
        seq += 1

    def publish_continuously() -> None:
        while not done.wait(0.02):
            publish()

    for _ in range(PUBLISHED):
        publish()
    wait_until(lambda: publisher.stats().published == PUBLISHED, "all batches to be sent")
    thread = threading.Thread(target=publish_continuously)
    thread.start()
    try:
        yield publisher
    finally:
        done.set()
        thread.join(SECONDS)
        publisher.shutdown()


def endpoint_arguments(publisher: ZmqEventPublisher) -> tuple[str, ...]:
    assert publisher.replay_endpoint
    return (publisher.endpoint, "--replay", publisher.replay_endpoint)


def test_tail_reports_a_snapshot(old_engine: ZmqEventPublisher) -> None:
    """The snapshot is on a line of its own, in JSON, and in the summary; trust is EXACT."""
    ended = run("tail", *endpoint_arguments(old_engine), "--count", 30)
    first = re.search(r"SNAPSHOT of batches 0 to (\d+) follows: nothing is lost", ended.out)
    assert first, ended.out
    assert "GAP" not in ended.out
    assert f"0 gaps, 0 lost, 0 resets, a snapshot of {int(first[1]) + 1} older batches, trust EXACT" in ended.err
    lines = [
        json.loads(line)
        for line in run("tail", *endpoint_arguments(old_engine), "--count", 2, "--output=json").out.splitlines()
    ]
    [gap] = [line for line in lines if line["kind"] == "gap"]
    assert (gap["first"], gap["compacted"]) == (0, True)
    assert gap["last"] == next(line["seq"] for line in lines if line["kind"] == "batch") - 1


def test_record_and_export_count_no_loss_for_a_snapshot(old_engine: ZmqEventPublisher, tmp_path: Path) -> None:
    """The recording contains the snapshot, and the exported tables count no batch as lost."""
    path = tmp_path / "run.jsonl"
    ended = run("record", *endpoint_arguments(old_engine), path, "--count", 30)
    assert re.search(r"0 gaps, 0 lost, 0 resets, a snapshot of \d+ older batches, ", ended.err)
    exported = run("export", path, tmp_path / "tables")
    assert exported.code == 0
    assert re.search(r"\d+ batches represented by a snapshot, so nothing is lost", exported.err)
    assert "missing" not in exported.err
    counts = export([path], tmp_path / "again").counts
    assert counts.get("lost", 0) == 0
    assert counts["compacted"] >= PUBLISHED - BUFFERED - 1


def test_doctor_reports_a_snapshot(old_engine: ZmqEventPublisher) -> None:
    """History that is represented by a snapshot is complete."""

    def is_enough(found: Findings) -> bool:
        return has_traffic(found) and "EXACT" in found["trust"]["text"]

    found = examine(*endpoint_arguments(old_engine), is_enough=is_enough)
    assert {check: finding["verdict"] for check, finding in found.items()} == dict.fromkeys(found, "ok")
    assert re.search(r"the first is a snapshot of batches 0 to \d+, so a late subscriber is complete", found["replay"]["text"])
    assert re.search(r"0 lost; a snapshot represents \d+ older batches", found["trust"]["text"])


def test_the_service_top_and_doctor_count_no_loss_for_a_snapshot(old_engine: ZmqEventPublisher) -> None:
    """The log of the service contains no warning about a loss either."""
    with serving() as served:
        served.register("engine-0", old_engine, block_size=4)
        served.wait("engine-0/0", lambda source: source["trust"]["state"] == "EXACT")
        [source] = served.ask("GET", "/v1/sources")["sources"]
        assert (source["lost"], source["gap_count"], source["gaps"]) == (0, 0, [])
        assert findings(run("doctor", "--service", served.url, "--output=json")).get("losses") is None
        top = run("top", "--once", "--service", served.url, "--output=json").out
        ended = served.program.interrupt()
    assert json.loads(top)["sources"][0]["lost"] == 0
    assert "lost" not in ended.err
    assert "WARNING" not in ended.err


def test_a_gap_that_is_not_compacted_is_reported_as_lost() -> None:
    """Only gaps with `compacted` are reported as snapshots."""
    from kvevents.cli.delivery_output import LineFormat  # noqa: PLC0415

    texts = ["".join(str(part) for part in LineFormat().gap(Gap("a", 0, 1, 3, 0, compacted))) for compacted in (False, True)]
    assert ["GAP     #1 to #3: 3 batches permanently lost" in text for text in texts] == [True, False]
