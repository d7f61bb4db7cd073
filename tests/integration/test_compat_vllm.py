"""`kvevents.compat.vllm` behaves like `vllm.distributed.kv_events` of vLLM 0.33.

`test_documents` has what programs for older releases need.
"""

from __future__ import annotations

import dataclasses
import inspect
import ipaddress
import socket
from typing import Any

import msgspec
import pytest
import zmq

from kvevents import events, publisher
from kvevents.compat import vllm
from kvevents.config import KVEventsConfig as OurConfig
from kvevents.errors import ConfigError
from kvevents.wire import decode_batch, dialect_for, encode_batch
from publisher_cases import (  # noqa: F401 - fixtures, used by being here
    ANY,
    Socket,
    batch,
    connect_dealer,
    consumers_context,
    hold_publisher,
    numbers,
    open_consumer,
    read_reply,
    receive,
    request_replay,
    subscribe,
    wait_until,
)
from wire_cases import GOLDENS, Golden

Context = zmq.Context[Socket]
NEWEST = [golden for golden in GOLDENS if golden.engine == "vllm" and golden.release == "0.32.0"]


def parameters(function: Any) -> dict[str, Any]:
    found = inspect.signature(function).parameters
    return {name: parameter.default for name, parameter in found.items() if name != "self"}


REQUIRED = inspect.Parameter.empty


def test_signatures_equal_those_of_vllm() -> None:
    """Names, order and defaults are copied here from vLLM 0.33."""
    assert list(parameters(vllm.ZmqEventPublisher).items()) == [
        ("data_parallel_rank", REQUIRED),
        ("endpoint", "tcp://*:5557"),
        ("replay_endpoint", None),
        ("buffer_steps", 10_000),
        ("hwm", 100_000),
        ("max_queue_size", 100_000),
        ("topic", ""),
        ("dialect", None),
    ]
    assert parameters(vllm.EventPublisher.__init__) == {"data_parallel_rank": 0}
    assert parameters(vllm.EventPublisherFactory.create) == {
        "config": REQUIRED,
        "data_parallel_rank": 0,
        "options": REQUIRED,
    }
    assert parameters(vllm.EventPublisherFactory.register_publisher) == {"name": REQUIRED, "ctor": REQUIRED}
    assert [(field.name, field.default) for field in dataclasses.fields(vllm.KVEventsConfig)] == [
        ("enable_kv_cache_events", False),
        ("publisher", None),
        ("endpoint", "tcp://*:5557"),
        ("replay_endpoint", None),
        ("buffer_steps", 10_000),
        ("hwm", 100_000),
        ("max_queue_size", 100_000),
        ("topic", ""),
    ]
    assert vllm.BlockStored.__struct_fields__ == (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
        *("locality", "ownership", "session_id", "lookahead_token_ids"),
    )
    assert vllm.BlockRemoved.__struct_fields__ == ("block_hashes", "medium", "group_idx", "locality", "ownership")
    assert (vllm.MEDIUM_GPU, vllm.MEDIUM_CPU, vllm.MEDIUM_STORAGE) == ("GPU", "CPU", "STORAGE")
    assert vllm.ZmqEventPublisher.SHUTDOWN_TIMEOUT == 1.0
    assert vllm.ZmqEventPublisher.END_SEQ == b"\xff" * 8


def build_event(event: dict[str, Any]) -> Any:
    """Build an event of a golden with the classes of `compat`, as vLLM builds it with its own."""
    fields = {name: value for name, value in event.items() if name != "type"}
    if fields.get("extra_keys") is not None:
        fields["extra_keys"] = [None if keys is None else tuple(keys) for keys in fields["extra_keys"]]
    return getattr(vllm, event["type"])(**fields)


# Encoded with the classes of the wheel of vLLM 0.33 from the values of the test below.
PAYLOAD_OF_0_33 = bytes.fromhex(
    "93cb3ff800000000000093de000ea474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739201cfffffffffffffffffb1"
    "706172656e745f626c6f636b5f68617368c4207070707070707070707070707070707070707070707070707070707070707070a9746f6b65"
    "6e5f696473920102aa626c6f636b5f73697a6501a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472"
    "615f6b65797392c091a473616c74a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74"
    "696f6ea86c6f63616c697479a54c4f43414caa73657373696f6e5f6964a173b36c6f6f6b61686561645f746f6b656e5f6964739291039084"
    "a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739101a66d656469756dc0a967726f75705f6964780281a47479"
    "7065b0416c6c426c6f636b73436c656172656401"
)


def test_events_are_encoded_to_the_bytes_of_vllm() -> None:
    """They equal the bytes of vLLM 0.33, including the 16-bit map header that msgspec reserves for 16 fields."""
    hashes: list[int | bytes] = [1, 2**64 - 1]
    keys: list[tuple[str, ...] | None] = [None, ("salt",)]
    kind = "full_attention"
    first = vllm.BlockStored(
        hashes, b"p" * 32, [1, 2], 1, None, "GPU", None, keys, 0, kind, None, "LOCAL", None, "s", [[3], []]
    )
    whole = vllm.KVEventBatch(1.5, [first, vllm.BlockRemoved([1], None, 2), vllm.AllBlocksCleared()], 1)
    assert encode_batch(whole, dialect_for("vllm", "0.33")) == PAYLOAD_OF_0_33


@pytest.mark.parametrize("golden", NEWEST, ids=str)
def test_goldens_are_reproduced_with_the_classes_of_compat(golden: Golden, context: Context) -> None:
    """A publisher with the release as its dialect sends the frames of vLLM 0.32, live and replayed."""
    ts, event_values, rank = golden.decoded
    whole = vllm.KVEventBatch(ts, [build_event(event) for event in event_values], rank)
    assert encode_batch(whole, dialect_for("vllm", "0.32.0")) == golden.payload
    assert rank is not None
    topic, seq = golden.pub_frames[0].decode(), int.from_bytes(golden.pub_frames[1], "big")
    publisher = vllm.ZmqEventPublisher(rank, ANY, ANY, topic=topic, dialect="vllm-0.32.0")
    subscriber, replay = subscribe(context, publisher), connect_dealer(context, publisher)
    for _ in range(seq):
        publisher.publish(vllm.KVEventBatch(ts, []))
        subscriber.recv_multipart()
    publisher.publish(whole)
    assert subscriber.recv_multipart() == golden.pub_frames
    request_replay(replay, seq)
    assert replay.recv_multipart() == golden.replay_frames
    assert replay.recv_multipart() == golden.replay_end_frames
    publisher.shutdown()


def test_the_newest_field_is_sent() -> None:
    """`lookahead_token_ids`, new in 0.33, is sent under its name."""
    event = vllm.BlockStored([1], None, [1], 1, None, "GPU", None, lookahead_token_ids=[[2, 3]])
    for dialect in (None, dialect_for("vllm", "0.33")):
        payload = encode_batch(vllm.KVEventBatch(0.0, [event]), dialect)
        assert msgspec.msgpack.decode(payload)[1][0]["lookahead_token_ids"] == [[2, 3]]


def test_goldens_exist() -> None:
    """Without goldens the parametrised test above would not run."""
    assert len(NEWEST) > 5


def test_events_are_also_events_of_kvevents_and_hashable() -> None:
    """They can be aggregated and encoded in other dialects. Decoding ignores unknown fields."""
    removed = vllm.BlockRemoved([1], "GPU", 2)
    full = vllm.BlockStored([1], b"x" * 32, [1], 1, None, "GPU", None, [("a",)], 0, "full", 5, "LOCAL", "o", "s", [[1]])
    for event in (removed, full, vllm.BlockStored([1], None, [1], 1, None, None, None)):
        assert isinstance(event, events.KVCacheEvent)
        assert hash(event) == hash(msgspec.structs.replace(event))
    assert hash(removed) != hash(vllm.BlockRemoved([1], "GPU", 3))
    assert msgspec.msgpack.decode(
        msgspec.msgpack.encode(["BlockRemoved", [1], None, None, None, None, "tomorrow"]),
        type=vllm.BlockRemoved,
    ) == vllm.BlockRemoved([1], None)


HASHED = {
    "block_hashes": [2],
    "parent_block_hash": 1,
    "token_ids": [2],
    "block_size": 2,
    "lora_id": 1,
    "medium": "CPU",
    "extra_keys": [("salt",)],
    "group_idx": 1,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 128,
    "locality": "LOCAL",
    "ownership": "tier",
    "session_id": "s",
    "lookahead_token_ids": [[1]],
}


@pytest.mark.parametrize("name", HASHED)
def test_events_hash_as_in_vllm(name: str) -> None:
    """Events that differ in a field that vLLM hashes have different hashes."""
    event = vllm.BlockStored([1], None, [1], 1, None, "GPU", None)
    assert hash(event) != hash(msgspec.structs.replace(event, **{name: HASHED[name]}))


def test_a_program_written_for_vllm_works(context: Context) -> None:
    """The program uses the config, the factory, the rank offset, the topic in replies, the buffer limit, and shutdown.

    Unlike vLLM, replay begins with a snapshot of evicted batches: a clear with the number of the last one.
    """
    config = vllm.KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint="inproc://vllm-events",
        replay_endpoint="inproc://vllm-replay",
        buffer_steps=10,
        topic="t",
    )
    publisher = vllm.EventPublisherFactory.create(config, data_parallel_rank=1)
    assert isinstance(publisher, vllm.ZmqEventPublisher)
    assert publisher._data_parallel_rank == 1
    own: Context = zmq.Context.instance()
    with open_consumer(own, zmq.SUB) as subscriber, open_consumer(own, zmq.DEALER) as replay:
        subscriber.connect("inproc://vllm-events_dp1")
        subscriber.subscribe("t")
        wait_until(lambda: publisher.stats().subscribers, "a subscription")
        for number in range(30):
            publisher.publish(vllm.KVEventBatch(float(number), []))
        assert [receive(subscriber)[0] for _ in range(30)] == list(range(30))
        replay.connect("inproc://vllm-replay_dp1")
        request_replay(replay, 0)
        empty, seq, snapshot = replay.recv_multipart()
        assert (empty, seq) == (b"", (19).to_bytes(8, "big"))
        assert [type(event) for event in decode_batch(snapshot).batch.events] == [events.AllBlocksCleared] * 2
        assert numbers(read_reply(replay)) == list(range(20, 30))
    publisher.shutdown()
    publisher.shutdown()
    with pytest.raises(RuntimeError, match="Publisher is closed"):
        publisher.publish(vllm.EventBatch(1.0, []))


def test_get_publisher_config_returns_the_resolved_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ports include the rank; port 0 becomes the address of this node with the chosen port, as in vLLM from 0.31."""
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    publisher = vllm.ZmqEventPublisher(2, "tcp://*:0", "tcp://*:0", buffer_steps=5, topic="t")
    found = publisher.get_publisher_config()
    assert found.endpoint == publisher.endpoint != "tcp://*:0"
    assert found.replay_endpoint == publisher.replay_endpoint != "tcp://*:0"
    assert (found.enable_kv_cache_events, found.publisher, found.buffer_steps, found.topic) == (True, "zmq", 5, "t")
    publisher.shutdown()
    publisher = vllm.ZmqEventPublisher(1, "inproc://configured")
    assert publisher.get_publisher_config() == vllm.KVEventsConfig(True, "zmq", "inproc://configured_dp1")
    publisher.shutdown()
    assert vllm.NullEventPublisher(3).get_publisher_config() is None


def test_the_publisher_of_kvevents_returns_its_configuration_too() -> None:
    """vLLM calls this method of every publisher when the engine starts, and fails without it."""
    own = publisher.ZmqEventPublisher(1, "tcp://*:0", buffer_steps=7, topic="t")
    port = own.endpoint.rpartition(":")[2]
    assert own.get_publisher_config() == OurConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=f"tcp://*:{port}", buffer_steps=7, topic="t"
    )
    own.shutdown()
    assert publisher.NullEventPublisher().get_publisher_config() is None


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_port_chosen_by_the_os_is_bound_at_the_address_of_the_node(
    address: str, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publisher listens only at the address that it returns, for IPv4 and IPv6."""
    monkeypatch.setattr(vllm, "get_ip", lambda: address)
    publisher = vllm.ZmqEventPublisher(0, "tcp://*:0", "tcp://*:0")
    found = publisher.get_publisher_config()
    assert found.replay_endpoint is not None
    host, _, port = found.endpoint.removeprefix("tcp://").rpartition(":")
    assert host.strip("[]") == address
    with open_consumer(context, zmq.SUB) as subscriber, open_consumer(context, zmq.DEALER) as replay:
        subscriber.ipv6 = replay.ipv6 = True
        subscriber.connect(found.endpoint)
        subscriber.subscribe("")
        wait_until(lambda: publisher.stats().subscribers, "a subscription")
        publisher.publish(batch(1))
        assert receive(subscriber)[0] == 0
        replay.connect(found.replay_endpoint)
        request_replay(replay, 0)
        assert numbers(read_reply(replay)) == [0]
    with socket.socket() as other_address:
        assert other_address.connect_ex(("127.0.0.2", int(port))) != 0
    publisher.shutdown()


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])  # noqa: S104 - not bound
def test_a_node_without_an_address_cannot_leave_the_port_to_the_os(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No consumer could connect to a wildcard; the message names the variable to set."""
    monkeypatch.setattr(vllm, "get_ip", lambda: address)
    with pytest.raises(ConfigError, match="VLLM_HOST_IP"):
        vllm.ZmqEventPublisher(0, "tcp://*:0")
    with pytest.raises(ConfigError, match="VLLM_HOST_IP"):
        vllm.ZmqEventPublisher(0, "tcp://127.0.0.1:0", "tcp://*:0")


def test_the_address_of_this_node_comes_from_vllm_host_ip_or_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is `VLLM_HOST_IP`, or an address of this host, or the wildcard without a route."""
    monkeypatch.setenv("VLLM_HOST_IP", "fe80::1")
    assert vllm.get_ip() == "fe80::1"
    monkeypatch.delenv("VLLM_HOST_IP")
    assert ipaddress.ip_address(vllm.get_ip())


def test_a_rank_alone_on_its_node_has_the_ports_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """In vLLM, adjacent ports work for rank 1 if rank 0 is on another node; the class of kvevents itself rejects them."""
    opened: list[tuple[str, str | None]] = []

    class ServerOpenedError(Exception):
        pass

    def open_server(endpoint: str, replay_endpoint: str | None, **settings: Any) -> None:
        opened.append((endpoint, replay_endpoint))
        raise ServerOpenedError

    monkeypatch.setattr("kvevents.publisher.zmq_publisher.EventServer", open_server)
    with pytest.raises(ServerOpenedError):
        vllm.ZmqEventPublisher(1, "tcp://*:5557", "tcp://*:5558")
    assert opened == [("tcp://*:5558", "tcp://*:5559")]
    with pytest.raises(ConfigError, match="is the replay port of rank 0"):
        publisher.ZmqEventPublisher(1, "tcp://*:5557", "tcp://*:5558")


def test_a_full_queue_does_not_block(context: Context) -> None:
    """Excess batches are dropped and counted; vLLM would block in `publish` instead."""
    publisher = vllm.ZmqEventPublisher(0, ANY, max_queue_size=2)
    with hold_publisher(publisher):
        for number in range(10):
            publisher.publish(batch(number))
        assert publisher.stats().dropped["queue_full"] == 8
    publisher.shutdown()


# --- configuration ---------------------------------------------------------------------------------------------------------


def test_config_is_a_dataclass() -> None:
    """It has `asdict`, equality and positional fields; `publisher` follows from the flag."""
    config = vllm.KVEventsConfig(True)
    assert dataclasses.asdict(config) == dataclasses.asdict(vllm.KVEventsConfig(enable_kv_cache_events=True, publisher="zmq"))
    assert vllm.KVEventsConfig().publisher == "null"
    assert dataclasses.replace(config, topic="x").topic == "x"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"hwm": "10"}, ("hwm", 10)),
        ({"hwm": "10.0"}, ("hwm", 10)),
        ({"hwm": 10.0}, ("hwm", 10)),
        ({"hwm": " +1_000.00 "}, ("hwm", 1_000)),
        ({"hwm": "007"}, ("hwm", 7)),
        ({"enable_kv_cache_events": "yes"}, ("enable_kv_cache_events", True)),
        ({"enable_kv_cache_events": 0}, ("enable_kv_cache_events", False)),
        ({"enable_kv_cache_events": 1.0}, ("enable_kv_cache_events", True)),
    ],
    ids=str,
)
def test_config_converts_values_as_pydantic_does(arguments: dict[str, Any], expected: tuple[str, Any]) -> None:
    """Numbers and flags may be written in the ways that pydantic accepts."""
    value = getattr(vllm.KVEventsConfig(**arguments), expected[0])
    assert value == expected[1]
    assert type(value) is type(expected[1])


@pytest.mark.parametrize(
    "arguments",
    [
        {"hwm": "ten"},
        {"hwm": "1__0"},
        {"hwm": "1 000"},
        {"hwm": "\N{ARABIC-INDIC DIGIT FIVE}"},
        {"hwm": 1.5},
        {"hwm": None},
        {"hwm": float("nan")},
        {"hwm": float("inf")},
        {"endpoint": 5557},
        {"endpoint": None},
        {"topic": b"t"},
        {"enable_kv_cache_events": "perhaps"},
        {"enable_kv_cache_events": 2},
        {"enable_kv_cache_events": None},
        {"publisher": 1},
    ],
    ids=str,
)
def test_config_rejects_what_pydantic_rejects(arguments: dict[str, Any]) -> None:
    """The error is a ValueError that names the field."""
    with pytest.raises(ConfigError, match=next(iter(arguments))) as caught:
        vllm.KVEventsConfig(**arguments)
    assert isinstance(caught.value, ValueError)


def test_config_is_read_from_the_command_line() -> None:
    """The JSON of `--kv-events-config` is read; other text and unknown keys are rejected."""
    assert vllm.KVEventsConfig.from_cli('{"enable_kv_cache_events": true, "topic": "x"}') == vllm.KVEventsConfig(
        True, topic="x"
    )
    for text in ("{", "[]", '{"endpont": "x"}', '{"format": "default"}'):
        with pytest.raises(ConfigError):
            vllm.KVEventsConfig.from_cli(text)


def test_the_factory_refuses_the_config_of_kvevents() -> None:
    """It has settings for which vLLM's interface has no parameters."""
    config: Any = OurConfig(enable_kv_cache_events=True)
    with pytest.raises(ConfigError, match=r"expected a KVEventsConfig of vLLM; kvevents\.publisher\.EventPublisherFactory"):
        vllm.EventPublisherFactory.create(config)


# --- factory ---------------------------------------------------------------------------------------------------------------


def test_the_factory_behaves_as_in_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without events it returns the null publisher; registered names get vLLM's settings; other names raise as in vLLM."""
    monkeypatch.setattr(vllm.EventPublisherFactory, "_registry", dict(vllm.EventPublisherFactory._registry))
    for config in (None, vllm.KVEventsConfig(), vllm.KVEventsConfig(True, "null")):
        assert type(vllm.EventPublisherFactory.create(config)) is vllm.NullEventPublisher
    calls: list[dict[str, Any]] = []

    class Mine(vllm.EventPublisher):
        def __init__(self, **settings: Any) -> None:
            calls.append(settings)

        def publish(self, events: Any) -> None: ...
        def shutdown(self) -> None: ...

    vllm.EventPublisherFactory.register_publisher("mine", Mine)
    with pytest.raises(KeyError, match="publisher 'mine' already registered"):
        vllm.EventPublisherFactory.register_publisher("mine", Mine)
    vllm.EventPublisherFactory.create(vllm.KVEventsConfig(True, "mine"), 4)
    names = {field.name for field in dataclasses.fields(vllm.KVEventsConfig)} - {"enable_kv_cache_events", "publisher"}
    assert calls[0].keys() == names | {"data_parallel_rank"}
    with pytest.raises(ValueError, match=r"'other': Input should be 'mine' or 'null' or 'zmq'"):
        vllm.KVEventsConfig(True, "other")


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [(None, 1, None), ("tcp://*:5557", 1, "tcp://*:5558"), ("inproc://a", 1, "inproc://a_dp1"), ("tcp://*:0", 1, "tcp://*:0")],
)
def test_the_rank_is_added_to_ports(endpoint: str | None, rank: int, expected: str | None) -> None:
    """Programs call `offset_endpoint_port` to find the endpoint of a rank."""
    assert vllm.ZmqEventPublisher.offset_endpoint_port(endpoint, data_parallel_rank=rank) == expected
