"""`/v1` over real sockets: prompts in every form, selection, listings, events, readiness and errors."""

from __future__ import annotations

import asyncio
import json
import re
from array import array
from collections.abc import Iterator
from itertools import chain, count, takewhile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli_cases import refuse_connections
from discovery_fetch_cases import Engine as Web
from kvevents.client.schemas import MatchManyRequest
from kvevents.service.access import Client
from kvevents.service.errors import ServiceError, UnavailableError
from kvevents.service.fleet.event_bus import MAX_EVENTS, EventBus, LossEvent
from kvevents.service.http import v1
from kvevents.service.http.messages import Decoders, Headers, HttpRequest
from kvevents.service.service import Service as ServiceInProcess
from kvevents.service.settings import Limits, ServiceSettings
from service_cases import (
    BLOCK,
    DEADLINE,
    Engine,
    EventStream,
    Service,
    engine,
    engines,
    hex_keys,
    prompt,
    serving,
    wait_for,
    write,
)

NUMBERS = count(1)
RAW = "application/octet-stream"
JSON, MSGPACK = "application/json", "application/msgpack"


@pytest.fixture(scope="module", name="service")
def one_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    config = write(tmp_path_factory.mktemp("v1") / "service.toml", "limits = { max_listeners = 3 }\n")
    with serving("--config", config) as service:
        yield service


@pytest.fixture(name="fresh")
def fresh_engine(service: Service) -> Iterator[tuple[str, str, Engine]]:
    """Return a registered engine with a unique name and model, and unregister it afterwards."""
    number = next(NUMBERS)
    name, model = f"e{number}", f"v{number}"
    with engine(seed=number) as made:
        assert service.register(name, made.publisher, model_name=model).status == 201
        yield name, model, made
        service.post("/unregister", instance_id=name)


def pack(tokens: list[int]) -> bytes:
    return array("I", tokens).tobytes()


# --- prompts


def test_a_prompt_in_three_encodings_has_equal_responses(service: Service, fresh: tuple[str, str, Engine]) -> None:
    name, model, made = fresh
    tokens = prompt(1, 3)
    first = made.store(tokens[:32])
    made.store(tokens[32:], parent=first, medium="DISK")
    service.wait_for_prefix(name, tokens, model_name=model)
    service.exact(name)
    body = {"model": model, "tokens": [*tokens, 1]}
    answers = [
        service.post("/v1/match", body),
        service.ask("POST", "/v1/match", msgspec.msgpack.encode(body), content_type=MSGPACK),
        service.ask("POST", f"/v1/match?model={model}", pack([*tokens, 1]), content_type=RAW),
    ]
    held = {
        "instance": name,
        "rank": 0,
        "url": None,
        "labels": {},
        "tokens": 48,
        "certain": 48,
        "tiers": {"gpu": 32, "cpu": 32, "disk": 48},
        "trust": {"state": "EXACT", "reason": "", "reason_codes": [], "attested": False},
    }
    assert [answer.json for answer in answers] == [{"prompt_tokens": 49, "workers": [held]}] * 3
    answer = service.ask("POST", "/v1/match", msgspec.msgpack.encode(body), content_type=MSGPACK, accept=MSGPACK)
    assert answer.headers["content-type"] == MSGPACK
    assert msgspec.msgpack.decode(answer.body) == answers[0].json


ACCEPTED = {
    "*/*": JSON,
    "text/html, */*;q=0.8": JSON,
    "text/html": JSON,
    "application/json;q=0.5, text/html": JSON,
    "application/json, application/msgpack": JSON,
    "application/json;q=0.5, application/msgpack;q=0.4": JSON,
    "application/msgpack;q=0, */*": JSON,
    "application/msgpack;q=2": JSON,
    "application/msgpack, application/json": MSGPACK,
    "application/json;q=0.5, application/msgpack": MSGPACK,
    "application/msgpack;q=0.9, */*;q=0.1": MSGPACK,
    "Application/MsgPack": MSGPACK,
    "application/x-msgpack ; q=1.0": MSGPACK,
}
"""Headers `Accept`, and the format of the answer."""


@pytest.mark.parametrize("path", ["/v1/match", "/v1/select", "/v1/stats", "/v1/reservations", "/v1/select/explain", "/livez"])
def test_the_format_that_a_client_prefers_is_sent(service: Service, fresh: tuple[str, str, Engine], path: str) -> None:
    body = json.dumps({"model": fresh[1], "tokens": [1, 2]}).encode() if path in {"/v1/match", "/v1/select"} else None
    for accept, kind in ACCEPTED.items():
        answer = service.ask("GET" if body is None else "POST", path, body, content_type=JSON, accept=accept)
        assert (answer.status, answer.headers["content-type"]) == (200, kind), accept
        assert isinstance((json.loads if kind == JSON else msgspec.msgpack.decode)(answer.body), dict)


def test_raw_prompts_have_all_other_fields_in_the_query_string(service: Service, fresh: tuple[str, str, Engine]) -> None:
    name, model, made = fresh
    tokens = prompt(2)
    made.store(tokens, lora_name="ad")
    service.wait_for_prefix(name, tokens, model_name=model, lora_name="ad")
    path = f"/v1/match?model={model}"
    for query, sent, held in (
        ("&lora=ad&whole_prompt=true", pack(tokens), 64),
        ("&lora_name=ad&whole_prompt=1", pack(tokens), 64),
        ("&lora=ad", pack(tokens), 48),
        ("", pack(tokens), 0),
        ("&expected=true", b"", 0),
    ):
        found = service.ask("POST", path + query, sent, content_type=RAW).json
        assert found["prompt_tokens"] == len(sent) // 4
        assert [worker["tokens"] for worker in found["workers"]] == [held]
    for wrong, status, reason in (
        (path, 400, "malformed-body"),
        ("/v1/match", 400, "missing-model"),
        (f"{path}&expected=perhaps", 400, "bad-parameter"),
        (f"{path}&mm=x", 400, "unknown-field"),
        (f"{path}&slat=x", 400, "unknown-field"),
        (f"{path}&lora_id=x", 400, "bad-parameter"),
        (f"{path}&lora=a&lora_name=b", 400, "contradiction"),
    ):
        body = b"123" if reason == "malformed-body" else pack(tokens)
        answer = service.ask("POST", wrong, body, content_type=RAW)
        assert (answer.status, answer.reason) == (status, reason)


def test_match_many_answers_prompts_in_their_order(service: Service, fresh: tuple[str, str, Engine]) -> None:
    name, model, made = fresh
    prompts = [prompt(number, 2) for number in range(3, 8)]
    for tokens in prompts[:3]:
        made.store(tokens)
    service.exact(name, blocks=6)
    found = service.post("/v1/match_many", model=model, prompts=[*prompts, []], whole_prompt=True).json["matches"]
    assert [each["prompt_tokens"] for each in found] == [32] * 5 + [0]
    assert [[holder["tokens"] for holder in each["holders"]] for each in found] == [[32]] * 3 + [[]] * 3
    body = json.dumps({"model": model, "prompts": [*prompts, []], "whole_prompt": True}).encode()
    packed_answer = service.ask("POST", "/v1/match_many", body, content_type="application/json", accept=MSGPACK)
    assert msgspec.msgpack.decode(packed_answer.body)["matches"] == found
    assert service.post("/v1/match_many", model=model, prompts=[[]] * 1025).status == 422
    assert service.post("/v1/match_many", model="absent", prompts=[[]]).status == 404
    assert service.post("/v1/match_many", model="absent", prompts=[]).status == 404
    assert service.post("/v1/match_many", model=model, prompts=[]).json["matches"] == []


def test_a_misspelled_field_is_refused(service: Service, fresh: tuple[str, str, Engine]) -> None:
    assert service.post("/v1/match", model=fresh[1], tokens=[], slat="x").status == 422


class Pairs(tuple[tuple[str, Any], ...]):
    """The fields of a JSON object, in order."""

    __slots__ = ()


def pack_repeated(value: Any) -> bytes:
    """Return a small value as msgpack, with all `Pairs` of its objects."""
    if isinstance(value, Pairs):
        return bytes([0x80 | len(value)]) + b"".join(map(pack_repeated, chain.from_iterable(value)))
    if isinstance(value, list):
        return bytes([0x90 | len(value)]) + b"".join(map(pack_repeated, value))
    return msgspec.msgpack.encode(value)


def check_occurs_twice(service: Service, path: str, body: str) -> None:
    """Check that a body with a repeated name is refused as JSON and as msgpack."""
    packed = pack_repeated(json.loads(body, object_pairs_hook=Pairs))
    for content, kind in ((body.encode(), JSON), (packed, "application/msgpack")):
        answer = service.ask("POST", path, content, content_type=kind)
        assert (answer.status, answer.reason) == (400, "malformed-body"), answer
        assert "occurs twice" in answer.json["detail"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/match", '{"model": "m", "tokens": [1], "tenant": "a", "tenant": "default"}'),
        ("/v1/match", '{"model": "m", "tokens": [1], "tokens": [2]}'),
        ("/v1/select", '{"model": "m", "tokens": [1], "mod\\u0065l": "n"}'),
        ("/v1/select", '{"model": "m", "tokens": [1], "candidates": [{"instance": "a", "instance": "b"}]}'),
        ("/query", '{"model_name": "m", "token_ids": [1], "cache_salt": "x", "cache_salt": "y"}'),
        ("/register", '{"model_name": "m", "instance_id": 7, "endpoint": "tcp://127.0.0.1:1", "instance_id": 8}'),
        ("/unregister", '{"instance_id": 7, "instance_id": 8}'),
    ],
)
def test_a_field_that_occurs_twice_is_refused(service: Service, path: str, body: str) -> None:
    """A gateway might check the first tenant, where the service would read the last one."""
    check_occurs_twice(service, path, body)


def test_an_unknown_tier_is_answered_with_the_known_ones(service: Service) -> None:
    answer = service.post("/v1/select", model="llama", tokens=[1], tiers={"gpo": 1})
    assert (answer.status, answer.reason) == (422, "bad-shape")
    assert "invalid body: tiers: Invalid enum value 'gpo'; expected gpu, cpu, disk, other" in answer.body.decode()


@pytest.mark.parametrize(
    "field", ['"tiers": {"gpu": 1, "gpu": 0}', '"trust": {"EXACT": 1, "EXACT": 1}', '"labels": {"a": "b", "a": "c"}']
)
def test_a_name_that_occurs_twice_is_refused(service: Service, fresh: tuple[str, str, Engine], field: str) -> None:
    """The data plane answers a request for a known model without such a name by itself."""
    check_occurs_twice(service, "/v1/select", f'{{"model": "{fresh[1]}", "tokens": [1], {field}}}')


@settings(max_examples=250)
@given(st.data())
def test_native_and_python_decoding_find_the_same_token_ids(natively_decoding: Service, data: st.DataObject) -> None:
    """Native decoding (`application/json`) and Python decoding (another JSON type) give the same response for any text."""
    text = data.draw(_texts())
    native = natively_decoding.ask("POST", "/query", text, content_type="application/json")
    in_python = natively_decoding.ask("POST", "/query", text, content_type="application/vnd.api+json")
    assert native.status == in_python.status, (text, native.body, in_python.body)
    if native.status != 200:
        assert native.reason == in_python.reason
        return
    assert native.json == in_python.json
    # Both decoders skip unknown fields without decoding them, so a skipped name or value might not be UTF-8.
    tokens = json.loads(text.decode("utf-8-sig", "replace"))["token_ids"]
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(tokens, STORED_TOKENS, strict=False))))
    same = min(same, max(len(tokens) - 1, 0))  # an engine recomputes the last token
    if "scores" not in native.json:  # a fault has changed `model_name` to `modelname`, the field of Mooncake
        assert b'"modelname"' in text
        return
    assert native.json["scores"] == ({"one": {"0": same}} if same else {})


def test_token_ids_that_occur_twice_are_refused(natively_decoding: Service) -> None:
    """This holds for escaped field names, too, which native decoding does not read."""
    for text in (
        b'{"model_name":"lift","token_ids":[],"token\\u005fids":[0,1]}',
        b'{"model_name":"lift","token_ids":[0,1],"\\u0074oken_ids":[]}',
        b'{"model_name":"lift","token_ids":[0,1],"token_ids":[0,1,2]}',
    ):
        for kind in ("application/json", "application/vnd.api+json"):
            answer = natively_decoding.ask("POST", "/query", text, content_type=kind)
            assert (answer.status, answer.reason) == (400, "malformed-body"), text


STORED_TOKENS = [0, 1, 2, 3, 2**32 - 1, 10, 100, 7]


@pytest.fixture(scope="module", name="natively_decoding")
def service_with_short_blocks(service: Service) -> Iterator[Service]:
    """Return the service with an engine whose blocks have one token each."""
    with engine(seed=77) as made:
        assert service.register("one", made.publisher, model_name="lift", block_size=1).status == 201
        made.store(STORED_TOKENS, block_size=1)
        service.wait_for_prefix("one", STORED_TOKENS, model_name="lift")
        service.exact("one")
        yield service
        service.post("/unregister", instance_id="one")


_SPACE = st.sampled_from(["", "", "", " ", "\n", "\t\r ", "\f", "\u00a0"])
_PLAIN = ["0", "1", "2", "3", "4294967295", "10", "100", "7"]
_NUMBER = st.one_of(
    st.sampled_from(
        [*_PLAIN, "-0", "00", "1.0", "1e0", "1E2", "-1", "4294967296", "+1", "0x1", "1_0", "true", "null", '"1"', "[1]"]
    ),
    st.integers(0, 2**33).map(str),
    st.just("9" * 40),
    st.just(""),
)
_KEY = st.sampled_from(['"token_ids"', '"token_ids"', '"token\\u005fids"', '"\\u0074oken_ids"', '"tokens"', '"token_ids "'])
_OTHER = st.sampled_from(
    [
        '"lora_name":null',
        '"x":{"token_ids":[9,9]}',
        '"y":"\\"token_ids\\":[1]"',
        '"z":[{"token_ids":[1]},"]"]',
        '"e":"\\\\"',
        '"n":1e999',
        '"u":"\\ud83d\\ude00\\u0000"',
        '"bad":"\\ud800"',
        '"model_name":"lift"',
        '"instance_id":7',
        '"lora_name":5',
    ]
)


@st.composite
def _arrays(draw: st.DrawFn) -> str:
    good = draw(st.integers(0, len(_PLAIN)))
    more = draw(st.lists(_NUMBER, max_size=2)) if draw(st.booleans()) else []
    space = draw(_SPACE)
    return f"[{space}{f'{space},{space}'.join(_PLAIN[:good] + more)}{space}]"


@st.composite
def _texts(draw: st.DrawFn) -> bytes:
    """Return mostly valid requests with spaces, escapes, duplicate keys and decoys, and sometimes a fault at any place."""
    fields = ['"model_name":"lift"', *draw(st.lists(_OTHER, max_size=2))]
    for _ in range(draw(st.sampled_from([1, 1, 1, 2]))):
        space = draw(_SPACE)
        fields.append(f"{draw(_KEY)}{space}:{space}{draw(_arrays())}")
    space = draw(_SPACE)
    text = f"{space}{{{space}{f'{space},'.join(draw(st.permutations(fields)))}{space}}}{space}".encode()
    if draw(st.integers(0, 3)) == 0:
        place = draw(st.integers(0, len(text)))
        text = (
            text[:place]
            + draw(st.sampled_from([b"", b",", b"]", b"}", b'"', b"\\", b"\0", b"\xff", b"1", b"-"]))
            + text[place + draw(st.integers(0, 2)) :]
        )
    return text


def test_workers_that_hold_nothing_are_listed_with_their_trust(service: Service, fresh: tuple[str, str, Engine]) -> None:
    """Every response about a prompt distinguishes "holds nothing" from "unknown"."""
    name, model, made = fresh
    tokens = prompt(30)
    made.store(tokens)
    with engine(seed=903) as empty, refuse_connections() as nowhere:
        assert service.register("empty", empty.publisher, model_name=model).status == 201
        assert service.register("unknown", nowhere, model_name=model).status == 201
        service.exact(name, blocks=4)
        service.exact("empty")
        no_tokens = {"gpu": 0, "cpu": 0, "disk": 0}
        states = {name: "EXACT", "empty": "EXACT", "unknown": "CONNECTING"}

        def states_of(rows: list[Any]) -> dict[str, str]:
            return {row["instance"]: row["trust"]["state"] for row in rows}

        for requested_tokens in (tokens, prompt(31)):
            workers = service.post("/v1/match", model=model, tokens=requested_tokens).json["workers"]
            held = [row for row in workers if row["tokens"]]
            assert states_of(workers) == states
            assert [row["instance"] for row in held] == ([name] if requested_tokens is tokens else [])
            assert workers[: len(held)] == held
            assert all(row["tiers"] == no_tokens for row in workers[len(held) :])
        many = service.post("/v1/match_many", model=model, prompts=[tokens, prompt(31)]).json
        assert states_of(many["workers"]) == states
        assert [[row["instance"] for row in each["holders"]] for each in many["matches"]] == [[name], []]
        # In responses of the other APIs, an absent worker is EXACT and holds nothing.
        zero = {"longest_matched": 0, "gpu": 0, "dp": {"0": 0}, "cpu": 0, "disk": 0, "trust": {"0": "CONNECTING"}}
        found = service.post("/query", model_name=model, token_ids=prompt(31)).json
        assert found == {"scores": {}, "frequencies": [], "instances": {"unknown": zero}}
        found = service.post("/query", model=model, token_ids=prompt(31)).json
        assert {each: row["trust"] for each, row in found["default"].items()} == {"unknown": {"0": "CONNECTING"}}
        assert service.post("/query_by_hash", model_name=model, block_hashes=[1]).json["instances"] == {"unknown": zero}
        for gone in ("empty", "unknown"):
            assert service.post("/unregister", instance_id=gone).status == 200


def test_the_block_of_the_last_token_does_not_count(service: Service, fresh: tuple[str, str, Engine]) -> None:
    """Engines recompute the last token, so at most (n - 1) // block size blocks of n tokens are useful."""
    name, model, made = fresh
    tokens = prompt(32)
    made.store(tokens)
    service.exact(name, blocks=4)
    for requested, usable in ((tokens, 48), ([*tokens, 1], 64), (tokens[:63], 48), (tokens[:16], 0), (tokens[:1], 0), ([], 0)):
        whole = len(requested) // BLOCK * BLOCK
        for more, expected in (({}, usable), ({"whole_prompt": True}, whole)):
            body = {"model": model, **more}
            query = "".join(f"&{field}=true" for field in more)
            matched = service.post("/v1/match", body | {"tokens": requested}).json
            raw = service.ask("POST", f"/v1/match?model={model}{query}", pack(requested), content_type=RAW).json
            many = service.post("/v1/match_many", body | {"prompts": [requested]}).json["matches"][0]
            select_instances = service.post("/v1/select", body | {"tokens": requested, "explain": True}).json["considered"]
            assert matched == raw
            assert (matched["prompt_tokens"], many["prompt_tokens"]) == (len(requested), len(requested))
            assert [row["tokens"] for row in (*matched["workers"], *select_instances)] == [expected] * 2
            assert [row["tokens"] for row in many["holders"]] == ([expected] if expected else [])
            found = service.post("/query", {"model_name": model, "token_ids": requested, **more}).json["instances"]
            assert found.get(name, {"longest_matched": 0})["longest_matched"] == expected
    assert service.keys(name) == {(key, "gpu") for key in hex_keys(tokens)}


def test_a_prompt_can_name_an_adapter_that_an_engine_lists() -> None:
    """vLLM lists adapters in `/v1/models`. Requests name them as their model, and events have the LoRA name."""
    with engine(seed=904) as made, Web() as web:
        web.pages = {
            "/kv_event_sources": {"0": {"endpoint": made.endpoint, "replay_endpoint": made.replay_endpoint, "topic": ""}},
            "/v1/models": {"data": [{"id": "base"}, {"id": "adapter-0", "parent": "base"}]},
        }
        base, adapted = prompt(33), prompt(34)
        made.store(base)
        made.store(adapted, lora_name="adapter-0")
        with serving("--engine", web.url) as service:
            name, _ = wait_for("the engine", lambda: next(iter(service.sources()), None))
            service.exact(name, blocks=8)

            def held(model: str, tokens: list[int]) -> int:
                (row,) = service.post("/v1/match", model=model, tokens=[*tokens, 1]).json["workers"]
                return int(row["tokens"])

            assert (held("adapter-0", adapted), held("base", base)) == (64, 64)
            assert (held("adapter-0", base), held("base", adapted)) == (0, 0)
            assert service.post("/v1/select", model="adapter-0", tokens=adapted).json["instance"] == name
            assert service.post("/v1/match", model="adapter-1", tokens=adapted).status == 404


# --- selection


def test_select_returns_the_longest_match_and_a_reason(service: Service, fresh: tuple[str, str, Engine]) -> None:
    name, model, made = fresh
    tokens = prompt(10)
    with engine(seed=901) as other:
        assert service.register("other", other.publisher, model_name=model).status == 201
        made.store(tokens[:16])
        other.store(tokens)
        for each, blocks in ((name, 1), ("other", 4)):
            service.exact(each, blocks=blocks)
        answer = service.post("/v1/select", model=model, tokens=tokens, explain=True, whole_prompt=True).json
        assert (answer["instance"], answer["rank"]) == ("other", 0)
        assert answer["why"].startswith("other rank 0 is EXACT, holds 64 of 64 tokens")
        assert [(each["instance"], each["tokens"]) for each in answer["considered"]] == [("other", 64), (name, 16)]
        busy = [{"instance": "other", "load": 90.0}, {"instance": name, "load": 10.0}]
        weighed = service.post("/v1/select", model=model, tokens=tokens, candidates=busy, load_weight=1.0).json
        assert weighed["instance"] == name
        alone = service.post("/v1/select", model=model, tokens=tokens, candidates=[{"instance": name}]).json
        assert (alone["instance"], alone["considered"]) == (name, None)
        assert service.post("/v1/select", model=model, tokens=tokens, candidates=[]).reason == "no-candidates"
        assert service.post("/unregister", instance_id="other").status == 200


def test_select_never_returns_a_disconnected_engine_while_another_is_connected(
    service: Service, fresh: tuple[str, str, Engine]
) -> None:
    """The disconnected engine holds the prompt and has no load, because requests to it fail at once.
    The response has its trust.

    If no engine is connected, a disconnected one is selected, and the response says that no candidate takes requests.
    """
    name, model, made = fresh
    tokens = prompt(24)
    made.store(prompt(25))
    with refuse_connections() as nowhere:
        with engine(seed=902) as other:
            assert service.register("other", other.publisher, model_name=model).status == 201
            other.store(tokens)
            service.exact(name, blocks=4)
            service.exact("other", blocks=4)
        wait_for("stale", lambda: service.trust("other")[0] == "STALE")
        assert service.register("refused", nowhere, model_name=model).status == 201
        # The service has probed both. Before that it does not know that an engine without a connection is dead.
        wait_for("refused", lambda: all("nothing listens at" in service.trust(dead)[1] for dead in ("other", "refused")))
        body = {"model": model, "tokens": tokens, "explain": True}
        loads = [{"instance": name, "load": 50.0}, {"instance": "other"}, {"instance": "refused"}]
        every: list[dict[str, Any]] = [
            {},
            {"candidates": loads, "load_weight": 1000.0},
            {"candidates": loads, "trust": {"STALE": 1.0}},
        ]
        for more in every:
            for _ in range(6):
                answer = service.post("/v1/select", body | more).json
                assert (answer["instance"], answer["trust"]["state"], len(answer["considered"])) == (name, "EXACT", 1)
                assert {each["instance"]: each["trust"]["state"] for each in answer["unreachable"]} == {
                    "other": "STALE",
                    "refused": "CONNECTING",
                }
                assert answer["why"].endswith("2 left out: 1 CONNECTING, 1 STALE.")
        dead = {"candidates": loads[1:]}
        answer = service.post("/v1/select", body | dead | {"trust": {"STALE": 1.0}}).json
        assert (answer["instance"], answer["trust"]["state"]) == ("other", "STALE")
        assert answer["why"].endswith("no candidate takes requests: 1 CONNECTING, 1 STALE.")
        for gone in ("other", "refused"):
            assert service.post("/unregister", instance_id=gone).status == 200


def test_select_returns_only_engines_of_the_lora_and_salt(service: Service, fresh: tuple[str, str, Engine]) -> None:
    """An engine registered with a LoRA or a salt gets only prompts that name it. Other engines get any prompt."""
    name, model, _ = fresh
    with engines(2) as made:
        assert service.register("adapter", made[0].publisher, model_name=model, lora_name="sql").status == 201
        assert service.register("salted", made[1].publisher, model_name=model, additionalsalt="s3cret").status == 201
        for each in ("adapter", "salted"):
            service.exact(each)
        service.exact(name)

        def select_instances(**scope: Any) -> set[str]:
            """Return the instances of several selections, because equal candidates rotate."""
            scope |= {"wait_weight": 0, "load_weight": 0}
            answers = [service.post("/v1/select", model=model, tokens=prompt(26), **scope) for _ in range(6)]
            return {answer.json["instance"] for answer in answers}

        assert select_instances() == {name}
        assert select_instances(lora="sql") == {name, "adapter"}
        assert select_instances(lora="another") == {name}
        assert select_instances(salt="s3cret") == {name, "salted"}
        assert select_instances(salt="guessed") == {name}
        every = [{"instance": each} for each in (name, "adapter", "salted")]
        assert select_instances(candidates=every) == {name}
        assert select_instances(candidates=every, salt="s3cret") == {name, "salted"}
        refused = service.post("/v1/select", model=model, tokens=[], candidates=every[1:])
        assert (refused.status, refused.reason) == (400, "no-candidates")
        for gone in ("adapter", "salted"):
            assert service.post("/unregister", instance_id=gone).status == 200


def test_an_expectation_of_select_counts_only_if_it_is_requested(service: Service, fresh: tuple[str, str, Engine]) -> None:
    name, model, made = fresh
    tokens = prompt(11)
    service.exact(name)
    # Events of an engine that has sent nothing have no block size yet, so the registered one is used.
    made.store(prompt(12, 1))
    service.exact(name, blocks=1)
    assert service.post("/v1/select", model=model, tokens=tokens, expect_seconds=60).json["instance"] == name
    with_it = service.post("/v1/match", model=model, tokens=[*tokens, 1], expected=True).json["workers"]
    assert [(each["tokens"], each["certain"], each["trust"]["state"]) for each in with_it] == [(64, 0, "DEGRADED")]
    assert with_it[0]["trust"]["reason_codes"] == ["uncertain-copies"]
    made.store(tokens)
    service.exact(name, blocks=5)
    made.clear()
    service.exact(name, blocks=0)
    evicted = service.post("/v1/match", model=model, tokens=[*tokens, 1], expected=True).json["workers"]
    assert [each["tokens"] for each in evicted] == [0]
    without = service.post("/v1/match", model=model, tokens=[*tokens, 1]).json["workers"]
    assert [each["tokens"] for each in without] == [0]
    assert service.held(tokens, model_name=model) == {}
    assert service.post("/v1/select", model=model, tokens=tokens, expect_seconds=61).status == 422


# --- listings


def test_sources_describe_each_source(service: Service, fresh: tuple[str, str, Engine]) -> None:
    name, model, made = fresh
    made.store(prompt(13))
    service.exact(name, blocks=4)
    found = wait_for("all its batches", lambda: row if (row := service.source(name))["last_seq"] == made.last_seq else None)
    assert {part: found[part] for part in ("instance", "rank", "model", "tenant", "group", "endpoint", "origin", "fault")} == {
        "instance": name,
        "rank": 0,
        "model": model,
        "tenant": "default",
        "group": "default",
        "endpoint": made.endpoint,
        "origin": "http",
        "fault": None,
    }
    assert (found["batches"], found["lost"], found["gaps"], found["rejected"]) == (made.last_seq + 1, 0, [], {})
    assert (found["block_sizes"], found["declared_block_size"]) == ([BLOCK], BLOCK)
    for query, there in (
        (f"instance={name}", True),
        (f"model={model}&tenant=default&group=default", True),
        (f"model={model}&tenant=x", False),
        ("group=x", False),
    ):
        rows = service.get(f"/v1/sources?{query}").json["sources"]
        assert (name in {row["instance"] for row in rows}) == there
    assert service.get("/v1/sources").json["faults"] == {}


def test_stats_count_lookups_batches_and_blocks(service: Service, fresh: tuple[str, str, Engine]) -> None:
    name, model, made = fresh
    service.exact(name)
    wait_for("all its batches", lambda: service.source(name)["last_seq"] == made.last_seq)
    before = service.get("/v1/stats").json
    made.store(prompt(14), medium="CPU")
    service.exact(name, blocks=4)
    service.post("/v1/match", model=model, tokens=prompt(14))
    service.post("/v1/match", model=model, tokens=prompt(15))
    after = service.get("/v1/stats").json
    assert (after["lookups"] - before["lookups"], after["hits"] - before["hits"]) == (2, 1)
    assert (after["batches"] - before["batches"], after["blocks"] - before["blocks"]) == (1, 4)
    assert after["tiers"].get("cpu", 0) - before["tiers"].get("cpu", 0) == 4
    assert after["uptime_seconds"] > before["uptime_seconds"]
    assert (after["snapshot_at"], after["snapshot_fault"]) == (None, None)


def test_stats_count_blocks_and_unique_blocks_at_the_same_time(service: Service, fresh: tuple[str, str, Engine]) -> None:
    name, _model, made = fresh
    service.exact(name)
    before = after = service.get("/v1/stats").json
    made.store(prompt(19))
    while after["unique_blocks"] == before["unique_blocks"]:
        after = service.get("/v1/stats").json
    assert [after[key] - before[key] for key in ("blocks", "unique_blocks")] == [4, 4]
    assert sum(after["tiers"].values()) - sum(before["tiers"].values()) == 4


def test_blocks_are_listed_in_pages_of_one_snapshot(service: Service, fresh: tuple[str, str, Engine]) -> None:
    """All pages show the blocks of the same moment, although blocks change meanwhile. Each block is on one page."""
    name, _model, made = fresh
    exact = {"state": "EXACT", "reason": "", "reason_codes": [], "attested": False}
    service.exact(name)
    assert service.get(f"/v1/blocks?instance={name}").json == {"total": 0, "blocks": [], "next": None, "trust": exact}
    tokens = prompt(16, 25)
    hashes = made.store(tokens)
    made.store(tokens, medium="CPU", parent=())
    service.exact(name)
    wait_for("both tiers", lambda: service.get(f"/v1/blocks?instance={name}").json["total"] == 50)
    pages, cursor = [], ""
    while True:
        page = service.get(f"/v1/blocks?instance={name}&limit=7&cursor={cursor}").json
        pages.append(page["blocks"])
        assert (page["total"], page["trust"]) == (50, exact)
        if len(pages) == 3:
            made.remove(hashes)
            wait_for("less", lambda: service.source(name)["blocks"] == 25)
        if page["next"] is None:
            break
        before, cursor = cursor, page["next"]
    blocks = [block for page in pages for block in page]
    assert [len(page) for page in pages] == [7] * 7 + [1]
    found = [(block["key"], block["tier"]) for block in blocks]
    assert sorted(found) == sorted((key, tier) for key in hex_keys(tokens) for tier in ("gpu", "cpu"))
    assert {block["hash"] for block in blocks if block["tier"] == "gpu"} == {f"{each:016x}" for each in hashes}
    assert {(block["group"], block["copies"]) for block in blocks} == {(0, 1)}
    assert service.keys(name) == {(key, "cpu") for key in hex_keys(tokens)}
    ended = service.get(f"/v1/blocks?instance={name}&limit=7&cursor={before}")
    assert (ended.status, ended.reason) == (404, "no-cursor")


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("", 400),
        ("instance=absent", 404),
        ("instance={name}&rank=1", 404),
        ("instance={name}&rank=-1", 400),
        ("instance={name}&rank=x", 400),
        ("instance={name}&tenant=x", 404),
        ("instance={name}&limit=0", 400),
        ("instance={name}&limit=10001", 400),
        ("instance={name}&limit=" + "9" * 5000, 400),
        ("instance={name}&cursor=zz", 400),
        ("instance={name}&cursor=0123456789abcdef.7", 404),
        ("instance=%ff", 400),
        ("instance={name}&rank=0&rank=0", 400),
    ],
)
def test_invalid_requests_for_blocks_are_refused(
    service: Service, fresh: tuple[str, str, Engine], query: str, status: int
) -> None:
    answer = service.get(f"/v1/blocks?{query.format(name=fresh[0])}")
    assert answer.status == status
    assert answer.reason


# --- events


def test_events_report_states_batches_and_losses(service: Service) -> None:
    with EventStream(service, "?instance=watched") as stream, EventStream(service, "?instance=another") as silent:
        with engine(seed=60) as made:
            assert service.register("watched", made.publisher).status == 201
            service.exact("watched")
            exact = stream.next("state", lambda event: event["trust"]["state"] == "EXACT")
            assert (exact["instance"], exact["rank"], exact["model"], exact["type"]) == ("watched", 0, "m", "state")
            made.store(prompt(20))
            batch = stream.next("batches", lambda event: event["blocks"] == 4)
            assert batch["last_seq"] == made.last_seq
            assert batch["batches"] >= 1
            place = made.publisher.endpoint, made.publisher.replay_endpoint
        stale = stream.next("state", lambda event: event["trust"]["state"] == "STALE")
        assert stale["was"] == "EXACT"
        with engine(seed=61, endpoint=place[0], replay_endpoint=place[1], bind=True) as again:
            again.store(prompt(21, 2))
            loss = stream.next("loss")
            assert (loss["what"], loss["instance"]) == ("reset", "watched")
            assert loss["sentence"].startswith("its blocks are removed")
            service.exact("watched", blocks=2)
            stream.next("state", lambda event: event["trust"]["state"] == "EXACT")
        assert service.post("/unregister", instance_id="watched").status == 200
        silent.close()


def test_compacted_history_is_reported_as_a_snapshot_and_not_as_a_loss(tmp_path: Path) -> None:
    """An engine with more history than its buffer is EXACT, and nothing reports lost batches."""
    with engine(seed=80, compact=True, buffer_steps=4) as made, serving() as service, EventStream(service) as stream:
        for number in range(40):
            made.store(prompt(800 + number, 1))
        wait_for("all to be sent", lambda: made.publisher.stats().published == 40)
        assert service.register("old", made.publisher).status == 201
        snapshot = stream.next("snapshot")
        assert (snapshot["instance"], snapshot["first"]) == ("old", 0)
        source = service.exact("old", blocks=40)
        assert (source["lost"], source["gap_count"], source["gaps"]) == (0, 0, [])
        assert source["compacted"] == snapshot["last"] + 1 > 0
        metrics = service.get("/metrics").body.decode()
        [compacted] = [line for line in metrics.splitlines() if line.startswith("kvevents_source_compacted_batches_total{")]
        assert compacted.endswith(f" {source['compacted']}.0")
        for name in ('kvevents_source_lost_batches_total{engine="old"', 'kvevents_source_gaps_total{engine="old"'):
            lines = [line for line in metrics.splitlines() if line.startswith(name)]
            [losses] = [line for line in lines if 'outcome="recovered"' not in line]
            assert losses.endswith(" 0.0"), lines
        assert not service.log_lines("WARNING|lost")


def test_listeners_are_limited_and_counted_until_they_leave(service: Service) -> None:
    def has_no_clients() -> bool:
        return b"kvevents_event_stream_clients 0.0\n" in service.get("/metrics").body

    wait_for("the closed connections of other tests", has_no_clients)
    streams = [EventStream(service) for _ in range(3)]
    refused = EventStream(service)
    assert refused.status == 503
    assert json.loads(refused.response.read())["reason"] == "too-many-listeners"
    for stream in [*streams, refused]:
        stream.close()
    wait_for("the closed connections", has_no_clients)


async def test_clients_of_events_that_connect_at_once_are_limited() -> None:
    """A client counts from its request on, not from the first event that is sent to it."""
    service = ServiceInProcess(ServiceSettings(limits=Limits(max_listeners=1)))
    request = HttpRequest("GET", "/v1/events", b"", Headers([]), b"", Decoders(), Limits(), Client("", ""))
    first = v1.events(service, request)
    with pytest.raises(UnavailableError, match="1 clients are already connected"):
        v1.events(service, request)
    first.release()
    v1.events(service, request).release()
    service.fleet.follower.subscriber.close()


def test_a_body_with_an_error_is_decoded_once() -> None:
    """Two million bytes of empty lists take Python 50 ms, and a second attempt would take as long."""

    class Decoder:
        type = MatchManyRequest
        calls = 0

        def decode(self, body: bytes) -> MatchManyRequest:
            self.calls += 1
            return msgspec.json.decode(body, type=MatchManyRequest)

    decoder = Decoder()
    headers = Headers([("content-type", b"application/json")])
    body = json.dumps({"prompts": [[]] * 30_000}).encode()
    request = HttpRequest("POST", "/v1/match_many", b"", headers, body, Decoders(decoder), Limits(), Client("", ""))
    with pytest.raises(ServiceError, match="1024"):
        request.read()
    assert decoder.calls == 1


def loss(number: int, instance: str = "e") -> LossEvent:
    return LossEvent(
        at=0.0, instance=instance, rank=number, model="m", tenant="default", group="default", what="gap", sentence="lost"
    )


async def test_a_slow_client_receives_the_number_of_missed_events() -> None:
    """This tests the bus, because filling the buffers of sockets takes tens of thousands of events."""
    event_bus = EventBus()
    with event_bus.subscribe() as slow, event_bus.subscribe() as fast:
        for number in range(MAX_EVENTS + 5):
            event_bus.publish(loss(number))
            assert await fast.get(1) == loss(number)
        assert await slow.get(1) == 5
        assert [await slow.get(1) for _ in range(MAX_EVENTS)] == [loss(number) for number in range(5, MAX_EVENTS + 5)]
        event_bus.publish(loss(-1))
        assert await slow.get(1) == loss(-1)
        assert await slow.get(0.001) is None


async def test_events_continue_after_the_id_of_the_last_one() -> None:
    event_bus = EventBus()
    with event_bus.subscribe() as first:
        before = first.last_id
        for number in range(3):
            event_bus.publish(loss(number))
        assert await first.get(1) == loss(0)
        after_one = first.last_id
    event_bus.publish(loss(3))  # while no client listens
    for known_id, numbers in ((before, [0, 1, 2, 3]), (after_one, [1, 2, 3]), ("other-2", [0, 1, 2, 3]), ("", [0, 1, 2, 3])):
        with event_bus.subscribe(known_id) as again:
            assert [await again.get(1) for _ in numbers] == list(map(loss, numbers)), known_id
            assert await again.get(0.001) is None
    name = before.partition("-")[0]
    for last_id in (None, f"{name}-4", f"{name}-{10**18}"):
        with event_bus.subscribe(last_id) as later:
            assert await later.get(0.001) is None
    for number in range(4, MAX_EVENTS + 6):
        event_bus.publish(loss(number))
    with event_bus.subscribe(after_one) as late:
        assert await late.get(1) == 5
        assert await late.get(1) == loss(6)


async def test_a_client_whose_filters_nothing_passes_receives_comments_with_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v1, "HEARTBEAT_SECONDS", 0.05)
    event_bus = EventBus()
    with event_bus.subscribe() as subscription:
        events = v1._encode_events(subscription, {"instance": "another"})
        first = await anext(events)

        async def publish() -> None:
            for number in count():
                event_bus.publish(loss(number))
                await asyncio.sleep(0.01)

        busy = asyncio.create_task(publish())
        async with asyncio.timeout(DEADLINE):
            comment = await anext(events)
        busy.cancel()
        await events.aclose()  # type: ignore[attr-defined]  # it is a generator
    assert comment.startswith(b": still here\nid: ")
    assert comment.rpartition(b"id: ")[2] != first.rpartition(b"id: ")[2]


def test_a_client_that_connects_again_receives_what_it_missed() -> None:
    with refuse_connections() as nowhere, serving() as service:
        with EventStream(service) as stream:
            assert service.register("a", nowhere).status == 201
            stream.next("state", lambda event: "refused" in event["trust"]["reason_codes"])
            last_id = stream.last_id
        assert service.register("b", nowhere).status == 201
        wait_for("the fault", lambda: "refused" in service.source("b")["trust"]["reason_codes"])
        with EventStream(service, last_id=last_id) as again:
            assert again.next("state")["instance"] == "b"
            assert again.last_id != last_id
        with EventStream(service, "?instance=b", last_id="of-another-process") as from_first:
            assert from_first.next("state")["instance"] == "b"


# --- probes


def test_readiness_waits_for_the_quorum_and_is_not_revoked(tmp_path: Path) -> None:
    with engine(seed=70) as made, refuse_connections() as nowhere:
        config = write(tmp_path / "service.toml", "ready = { quorum = 0.5, deadline_seconds = 3600 }\n")
        flags = ("--config", config, "--model", "m", "--worker")
        with serving(*flags, f"a={made.endpoint},{made.replay_endpoint}", "--worker", f"b={nowhere}") as service:
            service.exact("a")
            ready = wait_for("quorum", lambda: found if (found := service.get("/readyz").json)["exact"] == 1 else None)
            assert (ready["ready"], ready["sources"], ready["quorum"]) == (True, 2, 0.5)
            # Later degraded reasons are in the trust of responses. A service that stops answering would be worse.
            made.publisher.shutdown()
            wait_for("stale", lambda: service.trust("a")[0] == "STALE")
            assert service.get("/readyz").status == 200


def test_a_service_is_ready_at_the_deadline(tmp_path: Path) -> None:
    """tests/integration/test_service_readiness.py tests with a virtual clock when a service is not ready."""
    with refuse_connections() as nowhere:
        config = write(tmp_path / "service.toml", "ready = { deadline_seconds = 0.5 }\n")
        with serving("--config", config, "--model", "m", "--worker", f"b={nowhere}") as service:
            late = wait_for("the deadline", lambda: answer if (answer := service.get("/readyz")).status == 200 else None)
            assert late.json["why"] == "0 of 1 sources are EXACT; ready because 0.5 s have passed since the start"


def test_probes_and_pages_have_their_content_types(service: Service) -> None:
    wait_for("the service to be ready", lambda: service.get("/readyz").status == 200)
    for path, kind in (
        ("/health", "application/json"),
        ("/livez", "application/json"),
        ("/readyz", "application/json"),
        ("/metrics", "text/plain; version=0.0.4; charset=utf-8"),
        ("/openapi.json", "application/json"),
        ("/", "text/html; charset=utf-8"),
    ):
        answer = service.get(path)
        assert (answer.status, answer.headers["content-type"]) == (200, kind)
    assert service.get("/health").json == {"status": "ok", "warnings": []}


# --- pages and entity tags


def test_listings_of_the_fleet_come_in_pages() -> None:
    """Every item is on one page, in order. The listing without `limit` is the whole."""
    with refuse_connections() as nowhere, serving() as service:
        for number in range(5):
            for rank in range(2):
                assert service.register(f"e{number}", nowhere, rank).status == 201
        assert service.register("other", nowhere, model_name="another").status == 201
        wait_for("the faults", lambda: all(each["fault"] for each in service.sources().values()))
        whole = service.get("/v1/sources").json
        assert whole["next"] is None
        assert len(whole["sources"]) == 11
        pages: list[list[tuple[str, int]]] = []
        cursor: str | None = ""
        while cursor is not None:
            page = service.get(f"/v1/sources?model=m&limit=3&cursor={cursor}").json
            pages.append([(each["instance"], each["rank"]) for each in page["sources"]])
            cursor = page["next"]
        assert [len(page) for page in pages] == [3, 3, 3, 1]
        in_order = [(each["instance"], each["rank"]) for each in whole["sources"] if each["model"] == "m"]
        assert [each for page in pages for each in page] == in_order

        workers, path = [], "/workers?model_name=m&limit=2"
        while path:
            answer = service.get(path)
            workers += [(each["instance_id"], sorted(each["endpoints"])) for each in answer.json]
            link = re.fullmatch(r'<(.*)>; rel="next"', answer.headers.get("link", ""))
            path = "" if link is None else link[1]
        assert workers == [(f"e{number}", ["0", "1"]) for number in range(5)]
        for query in ("limit=0", "limit=x", "limit=10001", "cursor=x", "cursor=.1", "cursor=6.1", f"cursor=61.{'9' * 11}"):
            for path in ("/v1/sources", "/workers"):
                assert service.get(f"{path}?{query}").reason == "bad-parameter", query


@pytest.mark.parametrize("path", ["/v1/sources", "/workers"])
def test_a_listing_that_has_not_changed_is_not_sent_again(path: str) -> None:
    with refuse_connections() as nowhere, serving() as service:
        assert service.register("e", nowhere).status == 201
        wait_for("the fault", lambda: "refused" in service.source("e")["trust"]["reason_codes"])
        first = service.get(path)
        etag = first.headers["etag"]
        for known in (etag, f'"x", W/{etag}', "*"):
            again = service.get(path, if_none_match=known)
            assert (again.status, again.body, again.headers["etag"]) == (304, b"", etag)
            assert "content-type" not in again.headers
        assert service.get(path, if_none_match='"x"').body == first.body
        assert service.get(path, accept="application/msgpack", if_none_match=etag).status == 200
        assert service.register("other", nowhere).status == 201
        assert service.get(path, if_none_match=etag).status == 200
