"""Configuration: defaults, the JSON of both engines, and errors that name the field."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest
import zmq

from certificate_pairs import make_pair
from kvevents.compat import sglang, vllm
from kvevents.config import KVEventsConfig
from kvevents.endpoints import split_tcp
from kvevents.errors import ConfigError, UnknownDialectError
from kvevents.publisher import EventPublisher, EventPublisherFactory, NullEventPublisher, ZmqEventPublisher
from kvevents.wire import dialect_for, resolve_dialect
from kvevents.zeromq.keys import Curve

KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
PAIR = make_pair()


@pytest.mark.parametrize("engine", [vllm, sglang], ids=["vllm", "sglang"])
def test_defaults_equal_those_of_the_engine(engine: Any) -> None:
    """Every setting of an engine has the same name and default here, except `format` and `publisher`."""
    theirs = engine.KVEventsConfig()
    names = inspect.get_annotations(engine.KVEventsConfig).keys() - {"publisher", "format"}
    assert {"endpoint", "replay_endpoint", "buffer_steps", "hwm", "max_queue_size", "topic"} <= names
    ours = KVEventsConfig()
    assert {name: getattr(ours, name) for name in names} == {name: getattr(theirs, name) for name in names}


def test_settings_that_engines_lack_are_off_by_default() -> None:
    """A configuration written for an engine, which lacks these settings, gives the behaviour of the engine."""
    config = KVEventsConfig()
    ours = ("bind", "dialect", "replay_topic", "compact", "heartbeat", "curve")
    assert [getattr(config, name) for name in ours] == [None] * len(ours)


@pytest.mark.parametrize(
    ("arguments", "publisher"),
    [({"enable_kv_cache_events": True}, "zmq"), ({}, "null"), ({"publisher": "mine"}, "mine"), ({"publisher": "zmq"}, "zmq")],
    ids=str,
)
def test_the_publisher_follows_from_whether_events_are_enabled(arguments: dict[str, Any], publisher: str) -> None:
    """A publisher that is named takes precedence."""
    assert KVEventsConfig(**arguments).publisher == publisher


@pytest.mark.parametrize(
    ("text", "enabled", "publisher"),
    [
        ('{"enable_kv_cache_events": true, "endpoint": "tcp://*:7000"}', True, "zmq"),
        ('{"enable_kv_cache_events": false, "publisher": "zmq"}', False, "zmq"),
        ('{"publisher": "zmq", "bind": true, "format": "dynamo"}', True, "zmq"),
        ('{"publisher": "null", "format": "default"}', False, "null"),
        ("{}", False, "null"),
    ],
)
def test_the_json_of_both_engines_is_accepted(text: str, enabled: bool, publisher: str) -> None:
    """vLLM enables events with a flag, SGLang by naming a publisher; all other keys are the same."""
    for config in (KVEventsConfig.from_json(text), KVEventsConfig.from_cli(text), KVEventsConfig.from_json(text.encode())):
        assert (config.enable_kv_cache_events, config.publisher) == (enabled, publisher)


def test_every_field_is_read_from_json() -> None:
    """A configuration encoded by `msgspec` is decoded to an equal one, including keys."""
    config = KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint="tcp://10.0.0.1:7000",
        replay_endpoint="ipc:///run/replay",
        buffer_steps=5,
        hwm=6,
        max_queue_size=7,
        topic="kv@pod@model",
        bind=False,
        dialect="sglang-0.5.17",
        replay_topic=True,
        curve=Curve(public_key=PAIR.public, secret_key=PAIR.secret, server_key=KEY),
    )
    assert KVEventsConfig.from_json(msgspec.json.encode(config)) == config


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "is not a JSON object: Input data was truncated"),
        ("[]", "is not a JSON object: Expected `object`, got `array`"),
        (
            '{"endpont": "x"}',
            "unknown field 'endpont'; did you mean 'endpoint'. known fields: enable_kv_cache_events",
        ),
        ('{"format": "other"}', "format is 'other'"),
        ('{"hwm": "many"}', r"hwm"),
        ('{"hwm": -1}', "hwm is -1; it must be at least 0"),
        ('{"buffer_steps": -5}', "buffer_steps is -5"),
        ('{"max_queue_size": -5}', "max_queue_size is -5"),
        ('{"endpoint": "5557"}', "invalid endpoint '5557': it has no transport; expected tcp://HOST:PORT"),
        ('{"endpoint": "udp://x:1"}', "invalid endpoint 'udp://x:1'"),
        ('{"endpoint": "tcp://*:65536"}', "invalid endpoint .* port up to 65535"),
        ('{"endpoint": "tcp://*:http"}', "invalid endpoint .* port up to 65535"),
        ('{"replay_endpoint": "tcp://*"}', "invalid replay_endpoint .* port"),
        ('{"dialect": "orca-1"}', "dialect: unknown engine 'orca'"),
        ('{"dialect": "vllm-0.1"}', "dialect: vllm 0.1 is older"),
        ('{"curve": {"public_key": "short", "secret_key": "short"}}', "curve"),
        ('{"bind": "maybe"}', "bind"),
    ],
)
def test_errors_name_the_invalid_setting(text: str, sentence: str) -> None:
    """Each error is a ConfigError and a ValueError whose message names the field or key."""
    with pytest.raises(ConfigError, match=sentence) as caught:
        KVEventsConfig.from_json(text)
    assert isinstance(caught.value, ValueError)


def test_a_config_is_frozen() -> None:
    """Its fields cannot be assigned, because `publisher` is derived once."""
    with pytest.raises(AttributeError):
        KVEventsConfig().topic = "x"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("endpoint", "found"),
    [
        ("tcp://*:5557", ("*", 5557)),
        ("tcp://[::1]:5557", ("[::1]", 5557)),
        ("tcp://eth0:*", ("eth0", 0)),
        ("tcp://host", None),
        ("tcp://:5557", None),
        ("tcp://host:", None),
        ("tcp://host:-1", None),
        ("tcp://host:²", None),
        ("ipc://a:5", None),
        ("", None),
    ],
)
def test_split_tcp_returns_host_and_port(endpoint: str, found: tuple[str, int] | None) -> None:
    """It returns None for endpoints that do not have both."""
    assert split_tcp(endpoint) == found


def test_dialects_are_resolved_by_name() -> None:
    """A name has an engine and a release or only an engine; a `Dialect` and None are returned unchanged."""
    newest = dialect_for("vllm")
    assert resolve_dialect("vllm-latest") is resolve_dialect("vllm") is resolve_dialect(newest) is newest
    assert resolve_dialect("sglang-0.5.17") is dialect_for("sglang", "0.5.17")
    assert resolve_dialect(None) is None
    with pytest.raises(UnknownDialectError):
        resolve_dialect("")


def test_a_secret_key_is_never_shown() -> None:
    """It is not in `repr`, `str`, the `repr` of a config, or the output of rich."""
    for server_key in (None, KEY):
        curve = Curve(public_key=PAIR.public, secret_key=PAIR.secret, server_key=server_key)
        for shown in (repr(curve), str(curve), repr(KVEventsConfig(curve=curve)), repr(dict(curve.__rich_repr__()))):
            assert PAIR.secret not in shown
            assert PAIR.public in shown


def test_curve_keys_are_set_on_a_socket() -> None:
    """The socket is a server without `server_key` and a client with it."""
    public, secret = (key.decode() for key in zmq.curve_keypair())
    with zmq.Context() as context, context.socket(zmq.PUB) as server, context.socket(zmq.SUB) as client:
        Curve(public_key=public, secret_key=secret).apply(server)
        Curve(public_key=public, secret_key=secret, server_key=KEY).apply(client)
        assert (server.mechanism, server.curve_server) == (zmq.CURVE, 1)
        assert (client.mechanism, client.curve_server) == (zmq.CURVE, 0)


def test_config_does_not_import_zmq() -> None:
    """A program that only reads configuration does not load libzmq."""
    code = """
import sys, types
import importlib.util
root = importlib.util.find_spec("kvevents").submodule_search_locations
package = types.ModuleType("kvevents"); package.__path__ = root; sys.modules["kvevents"] = package
import kvevents.config
assert "zmq" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the factory -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A copy of the registry, to which the test may add."""
    copy = dict(EventPublisherFactory._registry)
    monkeypatch.setattr(EventPublisherFactory, "_registry", copy)
    return copy


@pytest.mark.parametrize("config", [None, KVEventsConfig(), KVEventsConfig(enable_kv_cache_events=True, publisher="null")])
def test_the_null_publisher_is_used_if_events_are_off(config: KVEventsConfig | None) -> None:
    """It is used without a configuration, if events are not enabled, and for the name `null`."""
    assert type(EventPublisherFactory.create(config, 2)) is NullEventPublisher


def test_the_factory_passes_json_settings_to_the_zmq_publisher() -> None:
    """The publisher gets the rank, the topic, the dialect and the size of the replay buffer."""
    settings = {
        "endpoint": "tcp://127.0.0.1:*",
        "replay_endpoint": "tcp://127.0.0.1:*",
        "topic": "t",
        "dialect": "sglang-0.5.17",
    }
    config = KVEventsConfig.from_json(json.dumps({"publisher": "zmq", "buffer_steps": 3, **settings}))
    publisher = EventPublisherFactory.create(config, data_parallel_rank=2)
    assert isinstance(publisher, ZmqEventPublisher)
    assert publisher._data_parallel_rank == 2
    assert publisher._topic_bytes == b"t"
    assert publisher._dialect is dialect_for("sglang", "0.5.17")
    assert publisher._replay_buffer._steps == 3
    publisher.shutdown()


def test_registered_publishers_get_the_engines_settings(registry: dict[str, Any]) -> None:
    """Settings that engines lack are passed only if they are set, because a publisher written for an engine rejects them."""
    calls: list[dict[str, Any]] = []

    def make(**settings: Any) -> EventPublisher:
        calls.append(settings)
        return NullEventPublisher()

    EventPublisherFactory.register_publisher("mine", make)
    EventPublisherFactory.create(KVEventsConfig(enable_kv_cache_events=True, publisher="mine"), 1)
    EventPublisherFactory.create(KVEventsConfig(enable_kv_cache_events=True, publisher="mine", bind=False), 1)
    engines_own = {"data_parallel_rank", "endpoint", "replay_endpoint", "buffer_steps", "hwm", "max_queue_size", "topic"}
    assert [call.keys() for call in calls] == [engines_own, engines_own | {"bind"}]


def test_names_are_registered_once_and_must_be_known(registry: dict[str, Any]) -> None:
    """A registered name raises KeyError, an unknown one ValueError, with the messages of the engines."""
    with pytest.raises(KeyError, match="publisher 'zmq' already registered"):
        EventPublisherFactory.register_publisher("zmq", NullEventPublisher)
    with pytest.raises(ValueError, match="Unknown event publisher 'carrier-pigeon'"):
        EventPublisherFactory.create(KVEventsConfig(enable_kv_cache_events=True, publisher="carrier-pigeon"))
