"""Tests that code from the documents works. Programs for KV cache events are written from these documents.

The documents are two editions of vLLM's example subscriber, the reference page and the source of `vllm.distributed.kv_events`
of vLLM 0.11, and the source of SGLang's `kv_events.py` of 0.4.7.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

import kvevents
from kvevents.compat import sglang, vllm
from publisher_cases import (  # noqa: F401 - fixtures, used by being here
    ANY,
    Socket,
    consumers_context,
    last_endpoint,
    open_consumer,
    run_publisher,
    wait_until,
)

Context = zmq.Context[Socket]
TOPIC = "kv-events"


# --- the example subscribers: their types and their loop, with its endpoints as parameters and an end


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class FirstStored(KVCacheEvent, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None


class FirstRemoved(KVCacheEvent, tag="BlockRemoved"):
    block_hashes: list[int]


class LaterStored(KVCacheEvent, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class LaterRemoved(KVCacheEvent, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    pass


class FirstBatch(EventBatch):
    events: list[FirstStored | FirstRemoved | AllBlocksCleared]


class LaterBatch(EventBatch):
    events: list[LaterStored | LaterRemoved | AllBlocksCleared]


class Subscriber:
    """The loop of the example subscribers, with their two faults: a gap is noticed only if `last_seq` is set, which live
    batches do not set, and a REQ socket receives only one message of a reply."""

    def __init__(self, context: Context, publisher: Any, batch_type: type[Any]) -> None:
        self.decoder = msgspec.msgpack.Decoder(type=batch_type)
        self.last_seq = -1
        self.printed: list[tuple[float, int]] = []
        self.sub = open_consumer(context, zmq.SUB)
        self.sub.connect(publisher.endpoint)
        self.sub.setsockopt_string(zmq.SUBSCRIBE, TOPIC)
        self.replay = open_consumer(context, zmq.REQ)
        self.replay.connect(publisher.replay_endpoint)
        self.poller = zmq.Poller()
        self.poller.register(self.replay, zmq.POLLIN)

    def process_event(self, event_batch: Any) -> None:
        self.printed.append((event_batch.ts, len(event_batch.events)))

    def receive(self) -> None:
        """Do one round of the loop, in which a batch must arrive."""
        _, seq_bytes, payload = self.sub.recv_multipart()
        seq = int.from_bytes(seq_bytes, "big")
        if self.last_seq >= 0 and seq > self.last_seq + 1:
            self.replay.send((self.last_seq + 1).to_bytes(8, "big"))
            while self.poller.poll(timeout=10_000):
                seq_bytes, replay_payload = self.replay.recv_multipart()
                if not replay_payload:
                    break
                replay_seq = int.from_bytes(seq_bytes, "big")
                if replay_seq > self.last_seq:
                    event_batch = self.decoder.decode(replay_payload)
                    self.process_event(event_batch)
                    self.last_seq = replay_seq
                    if replay_seq >= seq - 1:
                        break
        event_batch = self.decoder.decode(payload)
        self.process_event(event_batch)


PUBLISHERS: dict[str, tuple[Callable[[], Any], Any]] = {
    "kvevents": (lambda: kvevents.ZmqEventPublisher(0, ANY, ANY, topic=TOPIC, bind=True), kvevents),
    "vllm": (lambda: _bound(vllm.ZmqEventPublisher), vllm),
    "vllm, by position": (lambda: _bound(vllm.ZmqEventPublisher, 10_000, 100_000, 100_000), vllm),
    "sglang": (lambda: _bound(sglang.ZmqEventPublisher), sglang),
}


def _bound(kind: Any, *limits: int) -> Any:
    options = {} if limits else {"topic": TOPIC}
    return kind(0, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", *limits, *([TOPIC] if limits else []), **options)


@pytest.fixture(name="publisher", params=PUBLISHERS)
def _publisher(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    create, types = PUBLISHERS[request.param]
    publisher = create()
    yield publisher, types
    publisher.shutdown()


def batches(types: Any) -> list[Any]:
    """Every kind of event, in the ways in which the documents' modules construct them."""
    by_name = {"block_hashes": [3], "parent_block_hash": 2, "token_ids": [5, 6], "block_size": 2, "lora_id": None}
    stored, removed, cleared = types.BlockStored, types.BlockRemoved, types.AllBlocksCleared
    return [
        types.KVEventBatch(ts=1.0, events=[stored([1, 2], None, [1, 2, 3, 4], 2, None)]),
        types.KVEventBatch(2.0, [stored(**by_name), stored(**by_name, medium="GPU")]),
        types.EventBatch(3.0, [removed([1]), removed(block_hashes=[2]), removed([3], medium="GPU")]),
        types.KVEventBatch(4.0, [cleared()]),
        types.KVEventBatch(5.0, [stored([9], None, [1, 2], 2, None, medium="GPU")], 7),
    ]


@pytest.mark.parametrize("batch_type", [FirstBatch, LaterBatch])
def test_the_example_subscribers_print_every_batch(context: Context, publisher: Any, batch_type: type[EventBatch]) -> None:
    """The example subscribers print live batches and a replayed batch. Behind a REQ socket, a replayed message has two
    frames."""
    sender, types = publisher
    subscriber = Subscriber(context, sender, batch_type)
    wait_until(lambda: sender.stats().subscribers, "the subscription")
    sent = batches(types)
    for number, batch in enumerate(sent):
        sender.publish(batch)
        subscriber.receive()
        assert subscriber.printed[number] == (batch.ts, len(batch.events))
    subscriber.printed.clear()
    subscriber.last_seq = 3
    sender.publish(types.KVEventBatch(6.0, []))
    subscriber.receive()
    assert subscriber.printed == [(5.0, 1), (6.0, 0)]


@pytest.mark.parametrize("batch_type", [FirstBatch, LaterBatch, vllm.KVEventBatch, sglang.KVEventBatch])
def test_the_example_subscribers_read_heartbeats_and_full_history(context: Context, batch_type: type[Any]) -> None:
    """Batches that only kvevents sends have a form that programs read, also with the types of `kvevents.compat`."""
    with run_publisher(replay_endpoint=ANY, buffer_steps=1, topic=TOPIC, heartbeat=0.01) as sender:
        subscriber = Subscriber(context, sender, batch_type)
        wait_until(lambda: sender.stats().subscribers, "the subscription")
        sender.publish(kvevents.KVEventBatch(time.time(), [kvevents.BlockStored([1], None, [1, 2], 2)]))
        for _ in range(3):
            subscriber.receive()
        wait_until(lambda: "batches=0" not in repr(sender.stats().history), "compacted history")
        subscriber.replay.send(bytes(8))
        assert subscriber.decoder.decode(subscriber.replay.recv_multipart()[1]).events


@pytest.mark.parametrize("batch_type", [FirstBatch, LaterBatch])
def test_the_example_subscribers_read_a_clear_of_one_tier_as_a_clear(batch_type: type[EventBatch]) -> None:
    """A compacted history begins with such clears, when nothing is held."""
    events = [kvevents.AllBlocksCleared(), kvevents.AllBlocksCleared({"medium": "CPU"})]
    payload = kvevents.encode_batch(kvevents.KVEventBatch(1.0, [*events]), kvevents.dialect_for("vllm", "0.22.0"))
    assert msgspec.msgpack.Decoder(type=batch_type).decode(payload).events == [AllBlocksCleared()] * 2


def test_types_of_compat_read_what_compat_sends() -> None:
    """The examples copy their types from the engine's module, so a program may import them as well."""
    for types in (vllm, sglang):
        whole = types.KVEventBatch(1.0, [types.BlockStored([1], None, [1, 2], 2, None), types.BlockRemoved([1])], 0)
        for encode in (msgspec.msgpack.encode, default_encoder(types)):
            assert msgspec.msgpack.Decoder(type=types.KVEventBatch).decode(encode(whole)) == whole


def default_encoder(types: Any) -> Callable[[Any], bytes]:
    def encode(batch: Any) -> bytes:
        return kvevents.encode_batch(batch, types.ZmqEventPublisher._default_dialect)

    return encode


def published_by(publisher: Any) -> Callable[[], object]:
    return lambda: publisher.stats().published


def test_readers_of_the_newest_releases_are_one_argument_away(context: Context) -> None:
    """With a named release its bytes and its replies are sent."""
    for create, release in (
        (kvevents.ZmqEventPublisher, "vllm-0.33"),
        (vllm.ZmqEventPublisher, "vllm-latest"),
        (sglang.ZmqEventPublisher, "sglang-0.5.23"),
    ):
        types: Any = sglang if create is sglang.ZmqEventPublisher else vllm
        sender = create(0, ANY, ANY, dialect=release)
        replay = open_consumer(context, zmq.REQ)
        replay.connect(sender.replay_endpoint or "")
        sender.publish(types.KVEventBatch(1.0, [types.BlockRemoved([1])]))
        wait_until(published_by(sender), "a batch")
        replay.send(bytes(8))
        topic, _, payload = replay.recv_multipart()
        assert topic == b""
        assert msgspec.msgpack.decode(payload)[1] == [
            {"type": "BlockRemoved", "block_hashes": [1]} | ({} if types is sglang else {"medium": None})
        ]
        sender.shutdown()


def test_nothing_is_left_out_of_an_event_that_an_array_has_no_place_for(context: Context) -> None:
    """It is sent as a map, which newer subscribers read; the events beside it stay arrays."""
    plain = kvevents.BlockStored([1], None, [1], 1)
    salted, keyed = (msgspec.structs.replace(plain, **more) for more in ({"cache_salt": "x"}, {"block_keys": [7]}))
    payload = default_encoder(kvevents)(kvevents.KVEventBatch(0.0, [plain, salted, keyed]))
    forms = [type(event) for event in msgspec.msgpack.decode(payload)[1]]
    assert forms == [list, dict, dict]
    assert kvevents.decode_batch(payload).batch.events == [plain, salted, keyed]
    moved = sglang.BlockStored([-1], None, [1], 1, None, session_id="s")
    payload = default_encoder(sglang)(sglang.KVEventBatch(0.0, [moved]))
    assert msgspec.msgpack.decode(payload)[1][0]["block_hashes"] == [-1]


# --- the reference page of the module


def test_a_connector_with_the_four_methods_of_the_page_works() -> None:
    """The two methods about workers came later."""

    class Events(vllm.KVConnectorKVEvents):
        def __init__(self) -> None:
            self._aggregator = vllm.KVEventAggregator(1)

        def add_events(self, events: list[Any]) -> None:
            self._aggregator.add_events(events)

        def aggregate(self) -> vllm.KVConnectorKVEvents:
            common = self._aggregator.get_common_events()
            self._aggregator.clear_events()
            self._aggregator.add_events(common)
            return self

        def get_all_events(self) -> list[Any]:
            return self._aggregator.get_all_events()

        def clear_events(self) -> None:
            self._aggregator.clear_events()

    events = Events()
    stored = vllm.BlockStored([1], None, [1, 2], 2, None, "GPU")
    events.add_events([stored])
    assert events.aggregate().get_all_events() == [stored]
    events.clear_events()
    assert events.get_all_events() == []
    with pytest.raises(NotImplementedError, match=r"Events does not implement increment_workers\(\)"):
        events.increment_workers()
    with pytest.raises(NotImplementedError, match="get_number_of_workers"):
        events.get_number_of_workers()


def test_an_aggregator_returns_what_all_workers_announced() -> None:
    """Names and results are those of the page."""
    aggregator = vllm.KVEventAggregator(num_workers=2)
    both, one = vllm.BlockRemoved([1]), vllm.BlockRemoved([2])
    aggregator.add_events([both, one])
    aggregator.add_events([both])
    assert aggregator.get_common_events() == [both]
    assert len(aggregator.get_all_events()) == 3
    aggregator.clear_events()
    assert aggregator.get_all_events() == []


MODULES = [(vllm, "data_parallel_rank"), (sglang, "attn_dp_rank")]
PRIVATE = (
    *("_event_queue", "_buffer", "_ctx", "_pub", "_replay", "_hwm", "_seq_gen", "_running", "_pack"),
    *("_socket_setup", "_service_replay", "_publisher_thread"),
)
"""Members of the publisher in the documents that our publisher lacks."""


@pytest.mark.parametrize("name", [*PRIVATE, "END_SEQ"])
@pytest.mark.parametrize("base", [kvevents.ZmqEventPublisher, vllm.ZmqEventPublisher, sglang.ZmqEventPublisher])
def test_a_subclass_that_overrides_a_private_member_is_refused(name: str, base: type) -> None:
    """Its override would never be called, so the class cannot be made."""
    with pytest.raises(TypeError, match=f"Mine overrides {name}: .*; override"):
        type("Mine", (base,), {name: None})


def test_private_members_exist_or_say_that_they_do_not() -> None:
    """Reading or setting a missing member raises an error with a sentence. Existing members have the values of the
    documents."""
    with run_publisher(replay_endpoint=ANY, topic="t") as publisher:
        for name in PRIVATE:
            assert not hasattr(publisher, name)
            with pytest.raises(AttributeError, match=f"kvevents has no {name}"):
                setattr(publisher, name, None)
        assert (publisher._dp_rank, publisher._data_parallel_rank, publisher._topic_bytes) == (0, 0, b"t")
        assert (publisher._endpoint, publisher._replay_endpoint) == (ANY, ANY)
        thread = publisher._thread
        assert (thread.name, thread.daemon, thread.is_alive()) == ("zmq-publisher", True, True)
        for name in ("_topic_bytes", "_dp_rank"):
            with pytest.raises(AttributeError):
                setattr(publisher, name, None)


def test_public_members_can_be_overridden(context: Context) -> None:
    """A subclass may change the methods and the limit of the public surface."""

    class Mine(vllm.ZmqEventPublisher):
        SHUTDOWN_TIMEOUT = 0.5

        def publish(self, events: Any) -> None:
            events.ts = 9.0
            super().publish(events)

        @staticmethod
        def offset_endpoint_port(endpoint: str | None, data_parallel_rank: int) -> str | None:  # noqa: ARG004
            return endpoint

    mine = Mine(3, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    mine.publish(vllm.KVEventBatch(0.0, []))
    assert mine.shutdown().sent == 1


# --- the sources of both modules


@pytest.mark.parametrize(("module", "rank"), MODULES)
def test_a_publisher_of_ones_own_is_written_as_in_the_source(module: Any, rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes its rank to the base class, is registered, and gets the documented options and no others."""
    monkeypatch.setattr(module.EventPublisherFactory, "_registry", dict(module.EventPublisherFactory._registry))

    class Mine(module.EventPublisher):  # type: ignore[misc]
        def __init__(
            self,
            *,
            endpoint: str,
            replay_endpoint: str | None,
            buffer_steps: int,
            hwm: int,
            max_queue_size: int,
            topic: str,
            **ranks: int,
        ) -> None:
            super().__init__(**ranks)
            self.given = (endpoint, replay_endpoint, buffer_steps, hwm, max_queue_size, topic)

        def publish(self, events: Any) -> None:
            self.last = events

        def shutdown(self) -> None:
            pass

    module.EventPublisherFactory.register_publisher("mine", Mine)
    with pytest.raises(KeyError, match="publisher 'mine' already registered"):
        module.EventPublisherFactory.register_publisher("mine", Mine)
    config: Any = '{"publisher": "mine", "topic": "t"}'
    if module is vllm:
        config = vllm.KVEventsConfig(enable_kv_cache_events=True, publisher="mine", topic="t")
    mine = module.EventPublisherFactory.create(config, **{rank: 2})
    assert mine.given == ("tcp://*:5557", None, 10_000, 100_000, 100_000, "t")
    assert getattr(mine, f"_{rank}") == 2


@pytest.mark.parametrize(("module", "rank"), MODULES)
def test_ranks_are_given_by_the_name_of_the_source(module: Any, rank: str) -> None:
    """Base class and null publisher take the rank, by position and by name."""
    for null in (module.NullEventPublisher(1), module.NullEventPublisher(**{rank: 1})):
        assert getattr(null, f"_{rank}") == 1
        assert null.publish(module.KVEventBatch(0.0, [])) is None
        assert null.shutdown() is None
    assert getattr(module.NullEventPublisher(), f"_{rank}") == 0


@pytest.mark.parametrize(("module", "rank"), MODULES)
def test_a_batch_gets_the_rank_of_its_publisher(module: Any, rank: str) -> None:
    """A batch that has one keeps it; after `shutdown` nothing is accepted."""
    publisher = module.ZmqEventPublisher(**{rank: 1}, endpoint="inproc://documents", replay_endpoint=None)
    empty, ranked = module.KVEventBatch(0.0, []), module.KVEventBatch(0.0, [], 5)
    publisher.publish(empty)
    publisher.publish(ranked)
    assert (getattr(empty, rank), getattr(ranked, rank)) == (1, 5)
    publisher.shutdown()
    with pytest.raises(RuntimeError, match="Publisher is closed"):
        publisher.publish(empty)


def test_the_factories_create_what_their_configuration_names() -> None:
    """Without events it is the null publisher, also for an empty JSON object."""
    create: Any = sglang.EventPublisherFactory.create
    for config in (None, "", "{}", '{"publisher": "null"}'):
        assert isinstance(create(config, 1), sglang.NullEventPublisher)
    with pytest.raises(ValueError, match="Unknown event publisher 'x'"):
        create('{"publisher": "x"}')
    made = create('{"publisher": "zmq", "endpoint": "inproc://d", "topic": "kv-events"}', attn_dp_rank=1)
    assert made.endpoint == "inproc://d_dp1"
    made.shutdown()

    create_vllm: Any = vllm.EventPublisherFactory.create
    for off in (None, vllm.KVEventsConfig(), vllm.KVEventsConfig(enable_kv_cache_events=True, publisher="null")):
        assert isinstance(create_vllm(off), vllm.NullEventPublisher)

    @dataclasses.dataclass
    class Config:  # the engine's own, of the time of the document
        enable_kv_cache_events: bool = True
        publisher: str = "zmq"
        endpoint: str = "inproc://v"
        replay_endpoint: str | None = None
        buffer_steps: int = 10_000
        hwm: int = 100_000
        max_queue_size: int = 100_000
        topic: str = ""

    given: Any = Config()
    create_ours: Any = kvevents.EventPublisherFactory.create
    for create_any in (create_vllm, create_ours):
        made = create_any(given, data_parallel_rank=2, dialect="vllm-latest")
        assert made.endpoint == "inproc://v_dp2"
        made.shutdown()


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        (None, 1, None),
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://host:5557", 1, "tcp://host:5558"),
        ("tcp://10.0.0.1:0;host:5557", 1, "tcp://10.0.0.1:0;host:5558"),
        ("inproc://cache", 1, "inproc://cache_dp1"),
    ],
)
def test_ports_are_offset_as_in_the_source(endpoint: str | None, rank: int, expected: str | None) -> None:
    """`ipc://`, which the source refuses, gets a suffix."""
    for kind in (kvevents.ZmqEventPublisher, vllm.ZmqEventPublisher, sglang.ZmqEventPublisher):
        assert kind.offset_endpoint_port(endpoint, rank) == expected
        for wrong in ("tcp://x", "udp://x:1"):
            with pytest.raises(ValueError, match="nvalid endpoint"):
                kind.offset_endpoint_port(wrong, 1)


def test_the_configuration_of_sglang_has_the_methods_and_defaults_of_its_model() -> None:
    """It is a pydantic model in the source."""
    config = sglang.KVEventsConfig.from_cli('{"publisher": "zmq", "topic": "kv-events"}')
    expected = ("tcp://*:5557", None, 10_000, 100_000, 100_000, "kv-events")
    names = ("endpoint", "replay_endpoint", "buffer_steps", "hwm", "max_queue_size", "topic")
    assert tuple(config.model_dump()[name] for name in names) == expected
    assert sglang.KVEventsConfig.model_validate_json("{}").publisher == "null"
    assert vllm.MEDIUM_GPU == "GPU"
