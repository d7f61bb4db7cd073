"""The plugin for vLLM in a stand-in for the scheduler of vLLM: what it publishes and attests."""

from __future__ import annotations

import json
import logging
import random
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from kvevents import Batch, Source, Subscriber, events
from kvevents.compat import vllm as compat
from kvevents.engines import vllm
from kvevents.engines.plugin import VARIABLE
from kvevents.index import Namespace, PrefixIndex
from paths import DATA
from vllm_stand_in import ENDPOINTS, Vllm, installed_engine, key_of, schedulers_of_a_test  # noqa: F401 - fixtures

SHORT_HEARTBEAT = '{"heartbeat": 0.05}'


@pytest.fixture(autouse=True)
def set_short_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, SHORT_HEARTBEAT)


def follow_until_heartbeat(scheduler: Any, index: PrefixIndex, until: Callable[[int | None], bool]) -> None:
    """Apply the batches of the publisher to `index` until `until` accepts the attestation of a heartbeat."""
    publisher = scheduler.kv_event_publisher
    with Subscriber(Source(publisher.endpoint, replay_endpoint=publisher.replay_endpoint)) as subscriber:
        while True:
            delivery = subscriber.receive(timeout=60)
            assert delivery is not None
            report = index.apply(delivery).report
            if report is not None and report.heartbeat is not None and until(report.heartbeat.attestation):
                return


def receive_events(scheduler: Any, count: int) -> list[Any]:
    """Return the first events that the publisher sends, except heartbeats."""
    publisher = scheduler.kv_event_publisher
    found: list[Any] = []
    with Subscriber(Source(publisher.endpoint, replay_endpoint=publisher.replay_endpoint)) as subscriber:
        while len(found) < count:
            delivery = subscriber.receive(timeout=60)
            assert isinstance(delivery, Batch)
            found += [event for event in delivery.events if getattr(event, "heartbeat", None) is None]
    return found


def test_the_publisher_is_replaced_once_and_keeps_its_name_in_vllm(schedule: Callable[..., Any], engine: Vllm) -> None:
    vllm.register()
    first = engine.factory._registry["zmq"]
    vllm.register()
    assert engine.factory._registry["zmq"] is first
    publisher = schedule().kv_event_publisher
    assert isinstance(publisher, vllm.VllmEventPublisher)
    config = publisher.get_publisher_config()
    assert config.publisher == "zmq"
    assert not config.endpoint.endswith(":0")


def test_a_publisher_replaced_by_another_plugin_is_left_unchanged(engine: Vllm, caplog: pytest.LogCaptureFixture) -> None:
    other = type("Other", (), {})
    engine.factory._registry["zmq"] = other
    vllm.register()
    assert engine.factory._registry["zmq"] is other
    assert "has replaced the publisher 'zmq' already" in caplog.text


def test_options_of_later_releases_are_accepted(schedule: Callable[..., Any], engine: Vllm) -> None:
    vllm.register()
    publisher = engine.factory._registry["zmq"](data_parallel_rank=0, **ENDPOINTS, compression="zstd")
    assert isinstance(publisher, vllm.VllmEventPublisher)
    publisher.shutdown()


@pytest.mark.parametrize("text", [None, "", "off"])
def test_an_installed_plugin_changes_nothing_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, engine: Vllm, text: str | None
) -> None:
    monkeypatch.delenv(VARIABLE) if text is None else monkeypatch.setenv(VARIABLE, text)
    vllm.register()
    assert engine.factory._registry["zmq"] is engine.own_publisher


@pytest.mark.parametrize("seed", range(5))
def test_heartbeats_attest_the_cache_and_match_the_index_of_a_consumer(schedule: Callable[..., Any], seed: int) -> None:
    """The test stores, copies and evicts at random in two groups; in the end the index and the pool hold the same blocks."""
    vllm.register()
    scheduler, rng = schedule(), random.Random(seed)
    resident: list[tuple[int, int, int]] = []
    for block in range(200):
        if resident and rng.random() < 0.4:
            scheduler.pool.evict(*resident.pop(rng.randrange(len(resident))))
        else:
            resident.append((rng.randrange(1, 2**64), block, rng.randrange(2)))
            scheduler.pool.store(*resident[-1])
        if rng.random() < 0.3:
            scheduler.step()
    scheduler.step()
    total = sum(events.attestation_term(block_hash, group) for block_hash, _, group in resident) & events.ATTESTATION_MASK
    index = PrefixIndex()
    follow_until_heartbeat(scheduler, index, lambda found: found == total)
    (worker,) = index.workers()
    assert worker.attested


def test_no_heartbeat_attests_while_a_batch_is_pending(schedule: Callable[..., Any]) -> None:
    """The scheduler has taken events that are not published yet, so the cache is ahead of the published batches."""
    vllm.register()
    scheduler = schedule()
    scheduler.pool.store(5, 0)
    scheduler.kv_cache_manager.take_events()
    publisher = scheduler.kv_event_publisher
    assert publisher._attestation() is None
    publisher.publish(compat.KVEventBatch(ts=0.0, events=[]))
    follow_until_heartbeat(scheduler, PrefixIndex(), lambda found: found == 5)


def test_blocks_that_are_already_cached_are_not_announced_again(schedule: Callable[..., Any]) -> None:
    vllm.register()
    scheduler = schedule()
    scheduler.pool.store(1, 0)
    scheduler.pool.emit_cached_block_events(1)
    scheduler.pool.store(2, 1)
    scheduler.step()
    assert [event.block_hashes for event in receive_events(scheduler, 2)] == [[1], [2]]


@pytest.mark.parametrize(("release", "event_form", "frames"), [("0.12.0", list, 3), ("0.24.0", dict, 3), ("0.33.0", dict, 4)])
def test_heartbeats_and_replies_have_the_layout_of_the_release(
    schedule: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, release: str, event_form: type, frames: int
) -> None:
    """Consumers that were written for a release read arrays before 0.24, and replies without a topic before 0.26."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=release))
    vllm.register()
    publisher = schedule().kv_event_publisher
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(publisher.replay_endpoint)
        messages: list[list[bytes]] = []
        while not messages:  # until the first heartbeat has been sent
            socket.send_multipart([b"", bytes(8)])
            while socket.poll(60_000) and (message := socket.recv_multipart())[-1]:
                messages.append(message)
        first = messages[0]
        (event,) = msgspec.msgpack.decode(first[-1])[1]
    assert len(first) == frames
    assert type(event) is event_form


def test_a_reset_of_an_idle_engine_is_published_at_once(schedule: Callable[..., Any]) -> None:
    vllm.register()
    scheduler = schedule()
    scheduler.pool.store(1, 0)
    scheduler.step()
    assert scheduler.reset_prefix_cache()
    follow_until_heartbeat(scheduler, PrefixIndex(), lambda found: found == 0)


class Connector:
    """A connector with a cache of its own, whose clear names no tier and comes late."""

    def __init__(self, is_emptied: bool | None) -> None:
        self._is_emptied = is_emptied

    def reset_cache(self) -> bool | None:
        return self._is_emptied

    def take_events(self) -> list[Any]:
        return [type("AllBlocksCleared", (), {})()]


@pytest.mark.parametrize("is_in_use", [False, True])
@pytest.mark.parametrize("is_emptied", [True, False, None])
@pytest.mark.parametrize("reset_connector", [False, True])
def test_a_reset_says_whether_the_connector_was_emptied(
    schedule: Callable[..., Any], reset_connector: bool, is_emptied: bool | None, is_in_use: bool
) -> None:
    """vLLM empties the connector's cache even if it refuses to empty that of the GPU, and some connectors cannot be emptied."""
    vllm.register()
    scheduler = schedule()
    scheduler.pool.store(1, 0)
    scheduler.step()
    scheduler.connector = Connector(is_emptied)
    scheduler.pool.is_in_use = is_in_use
    scheduler.reset_prefix_cache(reset_connector=reset_connector)
    scheduler.pool.store(2, 1)
    scheduler.step()
    expected = [None] * (not is_in_use) + [{"medium": "CPU"}] * (reset_connector and is_emptied is True)
    received = receive_events(scheduler, 2 + len(expected))
    assert isinstance(received[-1], events.BlockStored)
    assert [event.unknown_fields for event in received if isinstance(event, events.AllBlocksCleared)] == expected


@pytest.mark.parametrize("path", ["/first", "/second"])
def test_a_lora_from_another_path_makes_its_blocks_uncertain_before_the_next_request(
    schedule: Callable[..., Any], engine: Vllm, path: str
) -> None:
    """vLLM announces nothing about the swap, and no request finds the blocks of the former weights again."""
    vllm.register()
    scheduler, tokens = schedule(), [1, 2, 3, 4]
    core = engine.core(scheduler)
    core.add_lora(SimpleNamespace(lora_name="adapter", lora_int_id=1, lora_path="/first"))
    for group, (kind, window) in enumerate(scheduler.kv_cache_manager.kv_cache_event_metadata):
        event = compat.BlockStored([11], None, tokens, 4, 1, "GPU", "adapter", None, group, kind, window)
        scheduler.pool.queue.append(event)
        scheduler.pool.cached_block_hash_to_block.insert(key_of(11, group), group)
    core.add_lora(lora_request=SimpleNamespace(lora_name="adapter", lora_int_id=2, lora_path=path))
    scheduler.step()
    index = PrefixIndex()
    total = sum(events.attestation_term(11, group) for group in range(2)) & events.ATTESTATION_MASK
    follow_until_heartbeat(scheduler, index, lambda found: found == total)
    (worker,) = index.workers()
    best = index.match(tokens, Namespace(lora="adapter")).best
    assert best is not None
    assert (worker.attested, worker.blocks, best.tokens, best.is_certain) == (True, 1, 4, path == "/first")


def test_without_the_native_package_events_are_published_and_the_package_is_named(
    schedule: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="vllm.kvevents")
    monkeypatch.setitem(sys.modules, "kvevents_native._native", None)
    vllm.register()
    scheduler = schedule()
    monkeypatch.undo()
    assert isinstance(scheduler.kv_event_publisher, vllm.VllmEventPublisher)
    scheduler.pool.store(1, 0)
    scheduler.step()
    assert [event.block_hashes for event in receive_events(scheduler, 1)] == [[1]]
    follow_until_heartbeat(scheduler, PrefixIndex(), lambda found: found == 1)
    assert "no digests: kvevents[native] adds them and full history" in caplog.text


def test_attestation_terms_equal_the_test_vectors() -> None:
    """Other programs can check their implementation against `tests/data/attestation.json`."""
    for case in json.loads((DATA / "attestation.json").read_text()):
        blocks = [(bytes.fromhex(each) if isinstance(each, str) else each, group) for each, group in case["blocks"]]
        total = sum(events.attestation_term(each, group) for each, group in blocks) & events.ATTESTATION_MASK
        assert total == case["digest"], case


def test_log_lines_of_the_publisher_appear_once_in_the_log_of_vllm(
    schedule: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM configures only its own logger, so the plugin passes log lines of kvevents to it, each once."""
    package_logger = logging.getLogger("kvevents")
    monkeypatch.setattr(package_logger, "propagate", False)
    monkeypatch.setattr(package_logger, "handlers", [])
    monkeypatch.setattr(package_logger, "level", logging.NOTSET)
    caplog.set_level("INFO", logger="vllm")
    vllm.register()
    schedule()
    schedule()
    logging.getLogger("kvevents.publisher.zmq_publisher").warning("the queue is full")
    assert [each.getMessage() for each in caplog.records].count("the queue is full") == 1
    assert any("publishing KV events of rank 0" in each.getMessage() for each in caplog.records)
