"""Tests of the plugin for SGLang in a stand-in for SGLang: published events, attestations, and faults, which SGLang ignores.

The stand-in has the names of SGLang 0.5.23; `tests/system/engines/sglang.py` runs the plugin in the real modules.
"""

from __future__ import annotations

import functools
import operator
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from kvevents import Batch, Source, Subscriber, Trust
from kvevents.compat import sglang as compat
from kvevents.engines import sglang
from kvevents.engines.plugin import VARIABLE
from kvevents.events import ATTESTATION_MASK
from kvevents.index import PrefixIndex
from publisher_cases import wait_until

CONFIG = '{"publisher": "%s", "endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0"}'
LOGGER = "sglang.kvevents"


class OwnPublisher(compat.ZmqEventPublisher):
    """The publisher that SGLang uses without the plugin."""


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    class Factory(compat.EventPublisherFactory):
        _registry = {"null": compat.NullEventPublisher, "zmq": OwnPublisher}  # noqa: RUF012 - as in the class of SGLang

    module = types.ModuleType("sglang.srt.disaggregation.kv_events")
    vars(module).update(
        {name: getattr(compat, name) for name in ("BlockStored", "BlockRemoved", "AllBlocksCleared", "KVEventBatch")},
        NullEventPublisher=compat.NullEventPublisher,
    )
    vars(module).update(EventPublisherFactory=Factory, ZmqEventPublisher=OwnPublisher)
    emitters = types.ModuleType("sglang.srt.managers.scheduler_components.kv_events_publisher")
    vars(emitters).update(SchedulerKvEventsPublisher=type("SchedulerKvEventsPublisher", (Emitter,), {}))
    for each in (module, emitters):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    monkeypatch.setenv(VARIABLE, '{"heartbeat": 0.05}')
    yield Factory
    for publisher in created_publishers:
        publisher.shutdown()
    created_publishers.clear()


created_publishers: list[Any] = []


class Cache:
    """A stand-in for a radix tree: the blocks on the GPU, and the queued events."""

    page_size = 2

    def __init__(self) -> None:
        self.resident: list[int] = []
        self.queue: list[Any] = []

    def store(self, block_hash: int, medium: str = "GPU") -> None:
        if medium == "GPU":
            self.resident.append(block_hash)
        self.queue.append(compat.BlockStored([block_hash], None, [block_hash & 0xFFFF, 2], 2, None, medium))

    def remove(self, block_hash: int, medium: str = "GPU") -> None:
        if medium == "GPU":
            self.resident.remove(block_hash)
        self.queue.append(compat.BlockRemoved([block_hash], medium))

    def reset(self) -> None:
        self.resident.clear()
        self.queue.append(compat.AllBlocksCleared())

    def evictable_size(self) -> int:
        return len(self.resident) // 2 * self.page_size

    def protected_size(self) -> int:
        return len(self.resident) * self.page_size - self.evictable_size()

    def take_events(self) -> list[Any]:
        events, self.queue = self.queue, []
        return events


class Emitter:
    """The part of the scheduler of SGLang that publishes events."""

    def __init__(self, publisher: Any, cache: Any) -> None:
        self.enable_kv_cache_events = True
        self.kv_event_publisher = publisher
        self.tree_cache = cache

    def publish_kv_events(self) -> None:
        if events := self.tree_cache.take_events():
            self.kv_event_publisher.publish(compat.KVEventBatch(ts=0.0, events=events))


def make_emitter(factory: Any, cache: Any) -> Any:
    sglang.register()
    publisher = create(factory)
    return sys.modules["sglang.srt.managers.scheduler_components.kv_events_publisher"].SchedulerKvEventsPublisher(
        publisher, cache
    )


def follow_until_heartbeat(publisher: Any, index: PrefixIndex, until: Callable[[int | None], bool]) -> None:
    """Apply the batches of the publisher to `index` until `until` accepts the attestation of a heartbeat."""
    with Subscriber(Source(publisher.endpoint, replay_endpoint=publisher.replay_endpoint)) as subscriber:
        while True:
            delivery = subscriber.receive(timeout=60)
            assert delivery is not None
            report = index.apply(delivery).report
            if report is not None and report.heartbeat is not None and until(report.heartbeat.attestation):
                return


def is_missing(attestation: int | None) -> bool:
    return attestation is None


def create(factory: Any, name: str = "zmq") -> Any:
    created_publishers.append(factory.create(CONFIG % name, 0))
    return created_publishers[-1]


def store(publisher: Any, block_hash: int) -> None:
    event = compat.BlockStored([block_hash], None, [1, 2], 2, None, "GPU")
    publisher.publish(compat.KVEventBatch(ts=0.0, events=[event]))


def first_events(publisher: Any) -> Any:
    with Subscriber(Source(publisher.endpoint, replay_endpoint=publisher.replay_endpoint)) as subscriber:
        while True:
            delivery = subscriber.receive(timeout=60)
            assert isinstance(delivery, Batch)
            if getattr(delivery.events[0], "heartbeat", None) is None:
                return delivery.events


@pytest.mark.parametrize("name", ["zmq", "kvevents"])
def test_both_registered_names_give_the_publisher_of_kvevents(factory: Any, name: str) -> None:
    sglang.register()
    sglang.register()
    publisher = create(factory, name)
    assert isinstance(publisher, sglang.SglangEventPublisher)
    store(publisher, 7)
    assert first_events(publisher)[0].block_hashes == [7]
    source: Any = publisher.describe_local_source(2)
    assert source["endpoint"] == publisher.endpoint
    assert source["replay_endpoint"] == publisher.replay_endpoint


def test_a_publisher_replaced_by_another_plugin_is_left_unchanged(factory: Any, caplog: pytest.LogCaptureFixture) -> None:
    other = type("Other", (), {})
    factory._registry["zmq"] = other
    sglang.register()
    assert factory._registry["zmq"] is other
    assert "kvevents" not in factory._registry
    assert "has replaced the publisher 'zmq' already" in caplog.text


@pytest.mark.parametrize("seed", range(5))
def test_heartbeats_attest_the_radix_tree_and_match_the_index_of_a_consumer(factory: Any, seed: int) -> None:
    """The test stores, removes and resets at random, on the GPU and in host memory, with signed hashes as in SGLang."""
    cache, rng = Cache(), random.Random(seed)
    emitter = make_emitter(factory, cache)
    for _ in range(300):
        if cache.resident and rng.random() < 0.4:
            cache.remove(rng.choice(cache.resident))
        elif rng.random() < 0.01:
            cache.reset()
        else:
            cache.store(rng.randrange(-(2**63), 2**63), rng.choice(["GPU", "GPU", "CPU_PINNED"]))
        if rng.random() < 0.3:
            emitter.publish_kv_events()
    emitter.publish_kv_events()
    index = PrefixIndex()
    follow_until_heartbeat(
        emitter.kv_event_publisher, index, functools.partial(operator.eq, sum(cache.resident) & ATTESTATION_MASK)
    )
    (worker,) = index.workers()
    assert worker.attested


def lose_a_store(cache: Cache) -> None:
    cache.resident.append(5)


def lose_a_removal(cache: Cache) -> None:
    cache.resident.remove(1)


def announce_twice(cache: Cache) -> None:
    cache.queue.append(compat.BlockStored([1], None, [1, 2], 2, None, "GPU"))


@pytest.mark.parametrize("fault", [lose_a_store, lose_a_removal, announce_twice])
def test_a_radix_tree_with_missing_or_repeated_events_is_not_attested(
    factory: Any, fault: Callable[[Cache], None], caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged once, after more batches than a load from host memory can explain."""
    cache = Cache()
    emitter = make_emitter(factory, cache)
    cache.store(1)
    fault(cache)
    cache.store(2)
    emitter.publish_kv_events()
    follow_until_heartbeat(emitter.kv_event_publisher, PrefixIndex(), is_missing)
    for block in range(3, 1010):
        cache.store(block)
        emitter.publish_kv_events()
    assert caplog.text.count("SGLang's Cache holds") == 1
    assert [each for each in caplog.records if each.name == LOGGER and each.levelname == "WARNING"][1:] == []


class WindowedCache(Cache):
    """A radix tree of a model with sliding windows, which SGLang drops without an event."""

    gates_prefix_match = True

    @property
    def components(self) -> dict[str, Any]:
        return {"full": object(), "swa": self}

    def supports_swa(self) -> bool:
        return True

    def supports_mamba(self) -> bool:
        return False


@pytest.mark.parametrize("attestation", ["true", "false"])
def test_a_radix_tree_with_sliding_windows_is_never_exact(
    factory: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, attestation: str
) -> None:
    """SGLang publishes events of full attention only, although a dropped window shortens matches.

    The first heartbeat, which precedes all events, reports this and has no attestation.
    """
    monkeypatch.setenv(VARIABLE, f'{{"heartbeat": 60, "attestation": {attestation}}}')
    cache = WindowedCache()
    emitter = make_emitter(factory, cache)
    cache.store(1)
    emitter.publish_kv_events()
    publisher = emitter.kv_event_publisher
    with Subscriber(Source(publisher.endpoint, replay_endpoint=publisher.replay_endpoint)) as subscriber:

        def has_reason() -> bool:
            subscriber.receive_many(timeout=0.01)
            return "SGLang does not announce which sliding windows its cache holds" in str(subscriber.trust())

        wait_until(has_reason, "the reason")
        assert subscriber.trust() == Trust.DEGRADED
    follow_until_heartbeat(publisher, PrefixIndex(), is_missing)
    assert caplog.text.count("the stream is not exact: SGLang does not announce") == 1


def test_sliding_windows_of_a_draft_model_do_not_prevent_attestation(factory: Any) -> None:
    cache = WindowedCache()
    cache.gates_prefix_match = False
    emitter = make_emitter(factory, cache)
    cache.store(1)
    emitter.publish_kv_events()
    follow_until_heartbeat(emitter.kv_event_publisher, PrefixIndex(), functools.partial(operator.eq, 1))


def test_a_cache_with_another_interface_is_not_attested(factory: Any, caplog: pytest.LogCaptureFixture) -> None:
    cache = types.SimpleNamespace(take_events=lambda: [compat.BlockStored([7], None, [1, 2], 2, None, "GPU")])
    emitter = make_emitter(factory, cache)
    emitter.publish_kv_events()
    follow_until_heartbeat(emitter.kv_event_publisher, PrefixIndex(), is_missing)
    emitter.publish_kv_events()
    assert caplog.text.count("attestation is switched off: a hook failed") == 1


def test_a_fault_in_the_digest_does_not_reach_the_engine(
    factory: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache()
    emitter = make_emitter(factory, cache)
    cache.store(1)
    emitter.publish_kv_events()
    monkeypatch.setattr(cache, "evictable_size", raise_error)
    cache.store(2)
    emitter.publish_kv_events()
    cache.store(3)
    emitter.publish_kv_events()
    follow_until_heartbeat(emitter.kv_event_publisher, PrefixIndex(), is_missing)
    assert emitter.kv_event_publisher.stats().accepted == 3
    assert caplog.text.count("attestation is switched off: a hook failed") == 1


def raise_error(*_arguments: Any, **_named: Any) -> Any:
    raise RuntimeError("broken on purpose")


FAULTS = ('{"heartbeet": 1}', "constructor")


@pytest.mark.parametrize("fault", FAULTS)
def test_if_the_plugin_fails_sglang_uses_its_own_publisher(
    factory: Any, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The fault is logged in one line, and events are published."""
    if fault == "constructor":
        monkeypatch.setattr(sglang.SglangEventPublisher, "__init__", raise_error)
    else:
        monkeypatch.setenv(VARIABLE, fault)
    sglang.register()
    publisher = create(factory)
    assert type(publisher) is OwnPublisher
    store(publisher, 7)
    assert first_events(publisher)[0].block_hashes == [7]
    assert [each.getMessage()[:20] for each in caplog.records if each.name == LOGGER] == ["kvevents is not used"]


@pytest.mark.parametrize("text", ["/nowhere.toml", '{"curve": {"key_file": "/nowhere/key"}}'])
def test_nothing_is_published_if_settings_that_may_ask_for_keys_cannot_be_used(
    factory: Any, text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Under both names SGLang gets its own null publisher."""
    monkeypatch.setenv(VARIABLE, text)
    sglang.register()
    for name in ("zmq", "kvevents"):
        assert type(create(factory, name)) is compat.NullEventPublisher
    assert caplog.text.count("no KV cache events are published, since the settings ask for keys") == 2


@pytest.mark.parametrize("text", [None, "off"])
def test_without_the_variable_only_the_name_of_kvevents_leads_to_it(
    factory: Any, text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed kvevents changes nothing unless the configuration of the engine names the publisher of kvevents."""
    monkeypatch.delenv(VARIABLE) if text is None else monkeypatch.setenv(VARIABLE, text)
    sglang.register()
    assert type(create(factory)) is OwnPublisher
    assert isinstance(create(factory, "kvevents"), sglang.SglangEventPublisher)


def test_the_hook_passes_on_arguments_that_it_does_not_know(factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later release may give the method more arguments."""
    passed: list[Any] = []
    owner = sys.modules["sglang.srt.managers.scheduler_components.kv_events_publisher"].SchedulerKvEventsPublisher
    monkeypatch.setattr(owner, "publish_kv_events", lambda _self, *given, **named: passed.append((given, named)))
    emitter = make_emitter(factory, Cache())
    emitter.publish_kv_events(1, later=2)
    assert passed == [((1,), {"later": 2})]


@pytest.mark.parametrize(("is_array", "event_form"), [(True, list), (False, dict)])
def test_heartbeats_are_encoded_like_the_events_of_the_release(
    factory: Any, monkeypatch: pytest.MonkeyPatch, is_array: bool, event_form: type
) -> None:
    """Consumers that were written for SGLang before 0.5.20 read arrays."""
    events = sys.modules["sglang.srt.disaggregation.kv_events"]
    stored = msgspec.defstruct("BlockStored", [("block_hashes", list[int])], tag=True, array_like=is_array)
    monkeypatch.setattr(events, "BlockStored", stored)
    sglang.register()
    publisher = create(factory)
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.subscribe(b"")
        socket.connect(publisher.endpoint)
        assert socket.poll(60_000)
        (event,) = msgspec.msgpack.decode(socket.recv_multipart()[-1])[1]
    assert type(event) is event_form
