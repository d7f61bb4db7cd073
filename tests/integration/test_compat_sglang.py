"""`kvevents.compat.sglang` behaves like `sglang.srt.disaggregation.kv_events` of SGLang 0.5.23."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvevents import events
from kvevents.compat import sglang
from kvevents.errors import ConfigError, MissingDependencyError
from kvevents.wire import decode_batch
from publisher_cases import (  # noqa: F401 - fixtures, used by being here
    ANY,
    Socket,
    connect_dealer,
    consumers_context,
    hold_publisher,
    numbers,
    read_reply,
    receive,
    request_replay,
    subscribe,
    wait_until,
)
from wire_cases import GOLDENS, Golden

Context = zmq.Context[Socket]
NEWEST = [golden for golden in GOLDENS if golden.engine == "sglang" and golden.release == "0.5.22"]
REQUIRED = inspect.Parameter.empty


def parameters(function: Any) -> dict[str, Any]:
    found = inspect.signature(function).parameters
    return {name: parameter.default for name, parameter in found.items() if name != "self"}


def test_signatures_equal_those_of_sglang() -> None:
    """Names, order and defaults are copied here from SGLang 0.5.23."""
    assert list(parameters(sglang.ZmqEventPublisher).items()) == [
        ("attn_dp_rank", REQUIRED),
        ("endpoint", "tcp://*:5557"),
        ("replay_endpoint", None),
        ("buffer_steps", 10_000),
        ("hwm", 100_000),
        ("max_queue_size", 100_000),
        ("topic", ""),
        ("bind", None),
        ("dialect", None),
    ]
    assert parameters(sglang.EventPublisherFactory.create) == {
        "config": REQUIRED,
        "attn_dp_rank": 0,
        "options": REQUIRED,
    }
    assert parameters(sglang.select_kv_publisher_dp_rank) == dict.fromkeys(
        ("attn_dp_size", "attn_dp_rank", "dp_rank"), REQUIRED
    )
    assert sglang.EventBatch.__struct_fields__ == ("ts", "events", "attn_dp_rank")
    assert sglang.BlockStored.__struct_fields__ == (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id"),
        *("medium", "cache_salt", "session_id", "lora_name"),
    )
    assert sglang.BlockRemoved.__struct_fields__ == ("block_hashes", "medium")
    assert sglang.OffloadedState() == sglang.OffloadedState(inc_len=0, last_hash=None)
    assert sglang.LOAD_TOPIC == "load"
    assert {medium.name: medium.value for medium in sglang.StorageMedium} == {
        "GPU": "GPU",
        "CPU": "CPU_PINNED",
        "DISK": "DISK",
        "EXTERNAL": "EXTERNAL",
    }


@pytest.mark.parametrize("golden", NEWEST, ids=str)
def test_events_are_encoded_to_the_bytes_of_sglang(golden: Golden, context: Context) -> None:
    """A publisher with the release as its dialect sends the golden frames of SGLang 0.5.22, live and replayed."""
    ts, event_values, rank = golden.decoded
    built = [getattr(sglang, event["type"])(**{k: v for k, v in event.items() if k != "type"}) for event in event_values]
    whole = sglang.KVEventBatch(ts, built, rank)
    assert rank is not None
    topic, seq = golden.pub_frames[0].decode(), int.from_bytes(golden.pub_frames[1], "big")
    publisher = sglang.ZmqEventPublisher(rank, ANY, ANY, topic=topic, dialect="sglang-0.5.22")
    subscriber, replay = subscribe(context, publisher), connect_dealer(context, publisher)
    for _ in range(seq):
        publisher.publish(sglang.KVEventBatch(ts, []))
        subscriber.recv_multipart()
    publisher.publish(whole)
    assert subscriber.recv_multipart() == golden.pub_frames
    request_replay(replay, seq)
    assert [replay.recv_multipart(), replay.recv_multipart()] == [golden.replay_frames, golden.replay_end_frames]
    publisher.shutdown()


def test_goldens_exist() -> None:
    """Without goldens the parametrised test above would not run."""
    assert len(NEWEST) > 5


def test_events_are_also_events_of_kvevents() -> None:
    """They can be encoded in other dialects. A medium may also be a member of `StorageMedium`."""
    event = sglang.BlockStored([1], None, [1], 1, None, medium=sglang.StorageMedium.CPU)
    assert isinstance(event, events.KVCacheEvent)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(event))[6] == "CPU_PINNED"


def test_a_program_written_for_sglang_works(context: Context) -> None:
    """The program uses JSON, the factory, the rank in the batch, the buffer limit, the topic in replies, and shutdown.

    Unlike SGLang, replay begins with a snapshot of evicted batches: a clear with the number of the last one.
    """
    text = json.dumps({"publisher": "zmq", "endpoint": ANY, "replay_endpoint": ANY, "topic": "t", "buffer_steps": 10})
    publisher = sglang.EventPublisherFactory.create(text, attn_dp_rank=3)
    assert isinstance(publisher, sglang.ZmqEventPublisher)
    subscriber, replay = subscribe(context, publisher, b"t"), connect_dealer(context, publisher)
    own, others = sglang.KVEventBatch(0.0, []), sglang.KVEventBatch(1.0, [], 9)
    publisher.publish(own)
    publisher.publish(others)
    assert (own.attn_dp_rank, others.attn_dp_rank) == (3, 9)
    for number in range(2, 30):
        publisher.publish(sglang.KVEventBatch(float(number), []))
    assert [receive(subscriber)[0] for _ in range(30)] == list(range(30))
    request_replay(replay, 0)
    empty, seq, snapshot = replay.recv_multipart()
    assert (empty, seq) == (b"", (19).to_bytes(8, "big"))
    assert [type(event) for event in decode_batch(snapshot).batch.events] == [events.AllBlocksCleared] * 2
    assert numbers(read_reply(replay)) == list(range(20, 30))
    publisher.shutdown()
    with pytest.raises(RuntimeError, match="Publisher is closed"):
        publisher.publish(sglang.EventBatch(1.0, []))


class _NoRank:
    """A batch of a user's own type whose rank cannot be read."""

    @property
    def attn_dp_rank(self) -> int:
        raise ValueError("no rank")


def test_publish_raises_nothing_for_a_batch_whose_rank_cannot_be_read() -> None:
    """`publish()` is called in the scheduler loop; the batch that cannot be encoded is dropped, and counted."""
    text = json.dumps({"publisher": "zmq", "endpoint": "tcp://127.0.0.1:*"})
    publisher = sglang.EventPublisherFactory.create(text, attn_dp_rank=3)
    try:
        publisher.publish(_NoRank())
    finally:
        publisher.shutdown()


def test_batches_of_other_types_are_published(context: Context) -> None:
    """Batches of vLLM, whose rank field has another name, are accepted, also if the queue is full."""
    publisher = sglang.ZmqEventPublisher(2, ANY, max_queue_size=1)
    subscriber = subscribe(context, publisher)
    publisher.publish(events.EventBatch(1.0, []))
    assert receive(subscriber)[0] == 0
    with hold_publisher(publisher):
        for _ in range(3):
            publisher.publish(sglang.EventBatch(1.0, []))
        assert publisher.stats().dropped["queue_full"] == 2
    publisher.shutdown()


def test_a_local_source_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Endpoints are reachable from this host, with absolute paths as of the bind; None if no process can subscribe."""
    publisher = sglang.ZmqEventPublisher(1, "tcp://*:0", topic="t")
    assert publisher.describe_local_source(16) == {"dp_rank": 1, "endpoint": publisher.endpoint, "topic": "t", "block_size": 16}
    assert publisher.endpoint.startswith("tcp://127.0.0.1:")
    publisher.shutdown()
    monkeypatch.chdir(tmp_path)
    publisher = sglang.ZmqEventPublisher(0, "ipc://events", "ipc://replay")
    os.chdir("/")
    described = publisher.describe_local_source(1)
    assert described is not None
    assert (described["endpoint"], described["replay_endpoint"]) == (f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    publisher.shutdown()
    for endpoint in ("inproc://described", "tcp://127.0.0.1:9"):
        publisher = sglang.ZmqEventPublisher(0, endpoint)
        assert publisher.describe_local_source(1) is None
        publisher.shutdown()
    assert sglang.NullEventPublisher().describe_local_source(1) is None
    abstract = sglang.ZmqEventPublisher(0, f"ipc://@kvevents-{os.getpid()}")
    assert abstract.describe_local_source(1) == {
        "dp_rank": 0,
        "endpoint": f"ipc://@kvevents-{os.getpid()}",
        "topic": "",
        "block_size": 1,
    }
    abstract.shutdown()


# --- configuration and factory ---------------------------------------------------------------------------------------------


def test_the_config_behaves_like_a_pydantic_model() -> None:
    """It has dumps, JSON, validation of mappings and instances, copies, equality and repr; unknown fields are ignored."""
    config = sglang.KVEventsConfig(publisher="zmq", hwm="5", bind="true", tomorrow=1)
    assert config.model_dump() == {
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "bind": True,
        "replay_endpoint": None,
        "buffer_steps": 10_000,
        "hwm": 5,
        "max_queue_size": 100_000,
        "topic": "",
        "format": "default",
    }
    assert config.model_fields_set == {"publisher", "hwm", "bind"}
    assert sglang.KVEventsConfig.from_cli(config.model_dump_json()) == config
    assert json.loads(config.model_dump_json()) == config.model_dump()
    assert sglang.KVEventsConfig.model_validate(config) is config
    assert sglang.KVEventsConfig.model_validate(config.model_dump()) == config != sglang.KVEventsConfig()
    assert config != 1  # type: ignore[comparison-overlap]
    changed = config.model_copy(update={"topic": "x"})
    assert (changed.topic, config.topic) == ("x", "")
    assert repr(sglang.KVEventsConfig()).startswith("KVEventsConfig(publisher='null', endpoint='tcp://*:5557', bind=None, ")
    config.topic = "y"
    assert config.model_dump()["topic"] == "y"
    with pytest.raises(TypeError):
        sglang.KVEventsConfig("zmq")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "JSON"),
        ("[]", "object"),
        ('{"publisher": null}', "publisher"),
        ('{"hwm": "ten"}', "hwm"),
        ('{"format": "other"}', "format: expected 'default' or 'dynamo'"),
        ('{"bind": 5}', "bind"),
        ('{"topic": 1, "hwm": []}', r"2 validation error(.|\n)*hwm(.|\n)*topic"),
    ],
)
def test_config_errors_name_the_field(text: str, message: str) -> None:
    """One ValueError names all invalid fields."""
    with pytest.raises(ConfigError, match=message):
        sglang.KVEventsConfig.from_cli(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, False), ("", False), ("{}", False), ('{"format": "default"}', False), ('{"format": "dynamo"}', True)],
)
def test_the_dynamo_format_is_detected(text: str | None, expected: bool) -> None:
    """`uses_dynamo_format` reads the JSON."""
    assert sglang.uses_dynamo_format(text) is expected


def test_the_factory_behaves_as_in_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """It returns the null publisher in the same cases as SGLang, and passes settings to registered publishers."""
    monkeypatch.setattr(sglang.EventPublisherFactory, "_registry", dict(sglang.EventPublisherFactory._registry))
    for config in (None, ""):
        assert type(sglang.EventPublisherFactory.create(config)) is sglang.NullEventPublisher
    calls: list[dict[str, Any]] = []

    def make(**settings: Any) -> sglang.EventPublisher:
        calls.append(settings)
        return sglang.NullEventPublisher()

    sglang.EventPublisherFactory.register_publisher("mine", make)
    with pytest.raises(KeyError, match="publisher 'mine' already registered"):
        sglang.EventPublisherFactory.register_publisher("mine", make)
    sglang.EventPublisherFactory.create('{"publisher": "mine", "format": "dynamo"}', 2)
    assert calls[0].keys() == parameters(sglang.ZmqEventPublisher).keys() - {"bind", "dialect"}
    with pytest.raises(ValueError, match="Unknown event publisher 'other'"):
        sglang.EventPublisherFactory.create('{"publisher": "other"}')


# --- ranks, hashes, ports --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "attn", "dp", "expected"), [(4, 3, 1, 3), (1, 0, 2, 2), (1, 0, None, 0), (0, 5, 1, 1)])
def test_the_rank_that_offsets_the_port_depends_on_attention_data_parallelism(
    size: int, attn: int, dp: int | None, expected: int
) -> None:
    """It is the attention rank with attention data parallelism, otherwise the rank of the replica."""
    assert sglang.select_kv_publisher_dp_rank(size, attn, dp) == expected


def test_only_the_first_scheduler_of_a_rank_publishes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime of SGLang decides; it is imported only if events are enabled, and the error without it names the package."""
    assert sglang.is_kv_publisher_rank(None) is False
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", None)
    with pytest.raises(MissingDependencyError, match="install sglang"):
        sglang.is_kv_publisher_rank("{}")
    for ranks, expected in (((0, 0, 0), True), ((1, 0, 0), False), ((0, 1, 0), False), ((0, 0, 1), False)):
        parallel = types.SimpleNamespace(**dict(zip(("pp_rank", "attn_tp_rank", "attn_cp_rank"), ranks, strict=True)))
        runtime = types.ModuleType("sglang.srt.runtime_context")
        monkeypatch.setattr(runtime, "get_parallel", lambda found=parallel: found, raising=False)
        for name in ("sglang", "sglang.srt"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, runtime.__name__, runtime)
        assert sglang.is_kv_publisher_rank("{}") is expected


def test_namespaced_hashes_equal_those_of_sglang() -> None:
    """The seed equals the digest computed here, and a hash equals a test vector computed by SGLang 0.5.23."""
    seed = sglang.kv_event_namespace_seed
    assert seed(extra_key=None, cache_salt=None) is None
    by_hand = hashlib.sha256(b"sglang-kv-event-namespace-v1" + b"\1" + (1).to_bytes(8, "little") + b"a" + b"\0").digest()
    assert seed(extra_key="a", cache_salt=None) == by_hand
    assert len({seed(extra_key=key, cache_salt=salt) for key, salt in (("a", "bc"), ("ab", "c"), ("", None), (None, ""))}) == 4
    assert sglang.namespaced_block_hash(-5, namespace_seed=None) == -5
    assert sglang.namespaced_block_hash(-5, namespace_seed=seed(extra_key="lora", cache_salt="salt")) == VECTOR
    with pytest.raises(OverflowError):
        sglang.namespaced_block_hash(2**63, namespace_seed=by_hand)


VECTOR = 6078853747462455894


@pytest.mark.parametrize(
    ("endpoint", "port", "advertised", "bindable"),
    [
        ("tcp://*:5557", 5557, ("*", 5557), ("*", 5557)),
        ("tcp://0.0.0.0:1", 1, ("0.0.0.0", 1), ("0.0.0.0", 1)),  # noqa: S104 - names, not sockets
        ("tcp://[::]:65535", 65535, ("[::]", 65535), ("::", 65535)),
        ("tcp://[fe80::1]:5", 5, ("[fe80::1]", 5), None),
        ("tcp://host:5", 5, ("host", 5), None),
        ("tcp://::1:5", None, None, None),
        ("tcp://[host]:5", None, None, None),
        ("tcp://[::1]5", None, None, None),
        ("tcp://host:0", None, None, None),
        ("tcp://host:65536", None, None, None),
        ("tcp://host:http", None, None, None),
        ("tcp://:5", None, None, None),
        ("tcp://host", None, None, None),
        ("ipc://host:5", None, None, None),
        ("", None, None, None),
        (None, None, None, None),
    ],
)
def test_endpoints_are_parsed_as_in_sglang(endpoint: str | None, port: int | None, advertised: Any, bindable: Any) -> None:
    """The functions return a port with any host, an advertisable address, a bindable address; None for invalid endpoints."""
    assert sglang.parse_tcp_port(endpoint) == port
    assert sglang.parse_advertisable_tcp(endpoint) == advertised
    assert sglang.parse_bindable_tcp(endpoint) == bindable


@pytest.mark.parametrize(
    ("events_at", "replay_at", "ranks", "setting", "found", "reason"),
    [
        ("tcp://*:5557", None, 2, None, None, None),
        ("tcp://*:5557", None, 2, " OFF ", None, None),
        ("tcp://*:5557", None, 0, "auto", None, None),
        ("tcp://*:5557", None, 2, "auto", ("*", 5559), None),
        ("tcp://*:5557", "tcp://*:5558", 2, "auto", ("*", 5560), None),
        ("tcp://*:5557", "tcp://h:5600", 2, "auto", ("*", 5559), None),
        ("tcp://h:5557", None, 2, "auto", None, "it is 'tcp://h:5557'"),
        (None, None, 2, "auto", None, "it is not set"),
        ("tcp://*:65534", None, 2, "auto", None, "u16 ceiling"),
        ("tcp://*:5557", None, 2, "tcp://*:6000", ("*", 6000), None),
        ("tcp://h:5557", None, 2, "tcp://[::]:6000", ("::", 6000), None),
        ("ipc://x", None, 2, "tcp://*:6000", None, "for endpoint 'ipc://x'"),
        (None, None, 2, "tcp://*:6000", None, "without --kv-events-config"),
        ("tcp://*:5557", None, 2, "tcp://h:6000", None, "not a bindable"),
        ("tcp://*:5557", None, 2, "tcp://*:5558", None, "overlaps"),
        ("tcp://*:5557", "tcp://*:6001", 2, "tcp://*:6000", None, "overlaps"),
    ],
)
def test_the_address_of_load_reports_follows_the_settings(
    events_at: str | None, replay_at: str | None, ranks: int, setting: str | None, found: Any, reason: str | None
) -> None:
    """Load reports are off by default; `auto` uses the ports after events and replay; a given address must not overlap."""
    address, refusal = sglang.resolve_load_pub_range(
        kv_endpoint=events_at, replay_endpoint=replay_at, dp_size=ranks, load_publish_endpoint=setting
    )
    assert address == found
    assert (reason in (refusal or "")) if reason else refusal is None
