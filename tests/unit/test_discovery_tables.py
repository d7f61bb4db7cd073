"""Source tables of discovery: the settings of an engine."""

from __future__ import annotations

import msgspec
import pytest

from certificate_pairs import make_pair
from kvevents.errors import ConfigError
from kvevents.service.discovery.provider import MAX_RANKS, SourceTable, Template, parse_table
from kvevents.stream import Source


def test_ranks_of_a_table_use_consecutive_ports_like_those_of_a_source() -> None:
    """`ranks = N` equals `Source.ranks(N)`: same ports, same replay ports, same ranks."""
    table = SourceTable(
        instance="a", endpoint="tcp://h:5557", replay_endpoint="tcp://h:6557", model="m", ranks=3, rank=4, topic="kv"
    )
    expected = Source("tcp://h:5557", "tcp://h:6557", topic="kv", name="a", rank=4).ranks(3)
    found = [each.source() for each in table.static_registrations()]
    assert [(s.endpoint, s.replay_endpoint, s.rank, s.topic) for s in found] == [
        (s.endpoint, s.replay_endpoint, s.rank, s.topic) for s in expected
    ]


def test_every_field_of_a_table_is_in_the_registration() -> None:
    pair = make_pair()
    fields = {
        "instance": "a", "endpoint": "tcp://*:1", "model": "m", "rank": 2, "replay_endpoint": "tcp://h:2", "block_size": 16,
        "tenant": "t", "group": "g", "topic": "kv", "bind": True, "lora_name": "l", "salt": "s",
        "curve": {"public_key": pair.public, "secret_key": pair.secret, "server_key": "k" * 40},
        "stores_only": ("cpu", "disk"), "drafts": (3,), "load": "tcp://h:3",
        "url": "http://h:8000", "labels": {"role": "decode"},
    }  # fmt: skip
    (found,) = parse_table(1, fields).static_registrations()
    assert msgspec.to_builtins(found) == fields | {"replay_is_proven": False}, "only an engine's own answer proves replay"


def test_an_engine_without_a_name_is_named_by_its_address() -> None:
    """The name is the endpoint without its transport, as in the command line."""
    assert SourceTable(endpoint="tcp://10.0.0.7:5557", model="m").static_registrations()[0].instance == "10.0.0.7:5557"


def test_a_wildcard_host_of_a_url_is_replaced_by_the_host_of_the_engine() -> None:
    (found,) = Template(model="m", url="http://*:8000").registrations("a", "tcp://10.0.0.7:5557")
    assert found.url == "http://10.0.0.7:8000"


def test_a_wildcard_replay_host_is_replaced_by_the_host_of_the_engine() -> None:
    """`tcp://*:6557` means "at the same host", which a template for many hosts needs."""
    (found,) = Template(model="m", replay_endpoint="tcp://*:6557").registrations("a", "tcp://[fd00::1]:5557")
    assert found.replay_endpoint == "tcp://[fd00::1]:6557"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"instance": "a", "endpont": "tcp://h:1", "model": "m"}, ["[[sources]] 3 (a)", "endpont", "known fields: model"]),
        ({"endpoint": "tcp://h:1", "model": 7}, ["[[sources]] 3:", "model: Expected `str"]),
        ({"endpoint": "tcp://h:1"}, ["model is missing"]),
        ({"model": "m"}, ["either endpoint or base_url"]),
        ({"model": "m", "endpoint": "tcp://h:1", "base_url": "http://h"}, ["not both"]),
        ({"model": "m", "endpoint": "h:1"}, ["endpoint", "tcp://HOST:PORT"]),
        ({"model": "m", "endpoint": "tcp://h"}, ["endpoint", "port from 1"]),
        ({"model": "m", "endpoint": "tcp://h:0"}, ["endpoint", "port from 1"]),
        ({"model": "m", "endpoint": "tcp://*:5557"}, ["endpoint", "wildcard host", "bind = true"]),
        ({"model": "m", "endpoint": "tcp://h:1", "replay_endpoint": "udp://h:1"}, ["replay_endpoint"]),
        ({"model": "m", "endpoint": "tcp://h:65535", "ranks": 2}, ["65536", "65535"]),
        ({"model": "m", "endpoint": "tcp://h:5557", "replay_endpoint": "tcp://h:5558", "ranks": 2}, ["5558", "rank 1"]),
        ({"model": "m", "endpoint": "tcp://h:1", "ranks": 0}, ["ranks is 0"]),
        ({"model": "m", "endpoint": "ipc:///a", "ranks": 10**9}, ["ranks", str(MAX_RANKS)]),
        ({"model": "m", "endpoint": "tcp://h:1", "rank": -1}, ["rank is -1"]),
        ({"model": "m", "endpoint": "tcp://h:1", "block_size": 0}, ["block_size is 0"]),
        ({"model": "m", "endpoint": "tcp://h:1", "curve": {"public_key": "x"}}, ["curve"]),
        ({"model": "m", "base_url": "h:8000"}, ["base_url", "http://HOST:PORT"]),
        ({"model": "m", "endpoint": "tcp://h:1", "url": "h:8000"}, ["url", "http://HOST:PORT"]),
        ({"model": "m", "endpoint": "tcp://h:1", "url": "http://u@h"}, ["url", "http://HOST:PORT"]),
        ({"model": "m", "endpoint": "tcp://h:1", "labels": {"role": ""}}, ["label ''"]),
        ({"model": "m", "endpoint": "tcp://h:1", "labels": {str(n): "x" for n in range(33)}}, ["33 labels"]),
        ({"model": "m", "endpoint": "tcp://h:1", "labels": {str(n): "x" * 500 for n in range(5)}}, ["2505 bytes", "2048"]),
        ({"model": "m", "base_url": "http://user:pass@h"}, ["base_url", "http://HOST:PORT"]),
        ({"model": "m", "base_url": "http://h:99999"}, ["base_url", "ort"]),
        ({"model": "m", "base_url": "http://h/a b"}, ["escaped"]),
        ([], ["[[sources]] 3", "object"]),
    ],
)
def test_an_error_names_the_table_and_the_field(fields: object, words: list[str]) -> None:
    """An operator finds the place with the message alone."""
    with pytest.raises(ConfigError) as caught:
        parse_table(3, fields)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert str(caught.value).startswith("[[sources]] 3")
