"""`native/server/src/grpc.rs`: a gRPC client gets the same responses as over HTTP, on the same port and with the same
limits."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from google.protobuf.json_format import ParseDict

from certificate_cases import make_certificates
from service_cases import BLOCK, DEADLINE, MODEL, Service, engines, is_refused, prompt, serving, suspend, wait_for, write
from service_connection_cases import TRACED
from service_grpc_cases import read_messages

QUERY: Final = "kvevents.v1.Query"
PROMPT: Final = prompt(1)
SERVING: Final = b"\x08\x01"
NOT_SERVING: Final = b"\x08\x02"
SERVICE_UNKNOWN: Final = b"\x08\x03"


@pytest.fixture(scope="module", name="messages")
def proto_messages() -> Any:
    return read_messages()


@pytest.fixture(scope="module", name="service", params=["plain", "traced"])
def fleet(request: pytest.FixtureRequest) -> Iterator[Service]:
    """Return a service with engines that hold different parts of a prompt. With tracing, the control plane answers."""
    command = None if request.param == "plain" else (sys.executable, "-W", "error", "-c", TRACED)
    with engines(3) as made, serving(command=command) as service:
        service.register("e0", made[0].publisher)
        service.register("e1", made[1].publisher, rank=1)
        service.register("lora", made[2].publisher, lora_name="sql")
        service.register("gone", "tcp://127.0.0.1:1")
        first = made[0].store(PROMPT[: 2 * BLOCK])
        made[0].store(PROMPT[2 * BLOCK :], parent=first, medium="CPU")
        made[1].store(PROMPT[:BLOCK])
        made[2].store(PROMPT)
        for name, rank, blocks in (("e0", 0, 4), ("e1", 1, 1), ("lora", 0, 4)):
            service.exact(name, rank, blocks=blocks)
        # A change between two requests would be a difference between their responses.
        wait_for("the port to be found closed", lambda: is_refused(service, "gone"))
        yield service


@contextmanager
def open_channel(service: Service, credentials: Any = None, **options: Any) -> Iterator[Any]:
    place, given = f"{service.host}:{service.port}", [(name.replace("__", "."), value) for name, value in options.items()]
    made = grpc.insecure_channel(place, given) if credentials is None else grpc.secure_channel(place, credentials, given)
    with made as channel:
        yield channel


def call(channel: Any, messages: Any, method: str, fields: Mapping[str, Any], **more: Any) -> Any:
    message = ParseDict(fields, getattr(messages, f"{method}Request")())
    read = getattr(messages, f"{method}Response", messages.Reservation).FromString
    return channel.unary_unary(f"/{QUERY}/{method}", type(message).SerializeToString, read)(message, timeout=DEADLINE, **more)


def call_and_fail(channel: Any, messages: Any, method: str, fields: Mapping[str, Any], **more: Any) -> tuple[str, str]:
    """Make a call that must fail, and return its code and reason."""
    with pytest.raises(grpc.RpcError) as caught:
        call(channel, messages, method, fields, **more)
    error: Any = caught.value
    assert error.details()
    return error.code().name, dict(error.trailing_metadata()).get("kvevents-reason", "")


def parse_as_message(value: Any, parsed: Any) -> Any:
    """Return an HTTP response as a protobuf message."""

    def add_prefixes(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: f"STATE_{each}" if name == "state" else add_prefixes(each) for name, each in part.items()}
        return [add_prefixes(each) for each in part] if isinstance(part, list) else part

    return ParseDict(add_prefixes(value), parsed())


ITEM: Final = {"start": 0, "length": 3}
CALLS: Final[dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]]] = {
    # Method, path, fields of the HTTP request, and fields of the message that differ.
    "match": ("Match", "/v1/match", {"model": MODEL, "tokens": PROMPT}, {}),
    "whole": ("Match", "/v1/match", {"model": MODEL, "tokens": PROMPT, "whole_prompt": True}, {}),
    "lora": ("Match", "/v1/match", {"model": MODEL, "tokens": PROMPT, "lora": "sql", "expected": True}, {}),
    "lora id": ("Match", "/v1/match", {"model": MODEL, "tokens": PROMPT, "lora_id": 7, "salt": "s"}, {}),
    "media": (
        "Match",
        "/v1/match",
        {"model": MODEL, "tokens": PROMPT, "mm": [{"id": "x", **ITEM}, {"id": 7, **ITEM}]},
        {"mm": [{"name": "x", **ITEM}, {"number": 7, **ITEM}]},
    ),
    "no tokens": ("Match", "/v1/match", {"model": MODEL, "tokens": []}, {}),
    "many": (
        "MatchMany",
        "/v1/match_many",
        {"model": MODEL, "prompts": [PROMPT, [], PROMPT[:20]]},
        {"prompts": [{"tokens": PROMPT}, {}, {"tokens": PROMPT[:20]}]},
    ),
    "select": (
        "Select",
        "/v1/select",
        # With loads, since otherwise the selections before count.
        {
            "model": MODEL,
            "tokens": PROMPT,
            "tie": "first",
            "explain": True,
            "candidates": [{"instance": "e0", "load": 3}, {"instance": "e1", "rank": 1}],
        },
        {"tie": "TIE_FIRST"},
    ),
    "select among": (
        "Select",
        "/v1/select",
        {
            "model": MODEL,
            "tokens": PROMPT,
            "tie": "first",
            "candidates": [{"instance": "e0", "load": 3}, {"instance": "e1", "rank": 1, "load": 0.5}, {"instance": "gone"}],
            "tiers": {"cpu": 0.25},
            "trust": {"DEGRADED": 1},
            "load_weight": 0.3,
            "wait_weight": 0.01,
            "ignores_cache": True,
        },
        {"tie": "TIE_FIRST"},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_grpc_responses_equal_http_responses(service: Service, messages: Any, name: str) -> None:
    method, path, fields, more = CALLS[name]
    answer = service.post(path, fields)
    assert answer.status == 200
    expected = parse_as_message(answer.json, getattr(messages, f"{method}Response"))
    with open_channel(service) as channel:
        assert call(channel, messages, method, {**fields, **more}) == expected


def test_responses_have_the_expected_values(service: Service, messages: Any) -> None:
    """The comparison with HTTP would not detect values that both protocols omit."""
    with open_channel(service) as channel:
        found = call(channel, messages, "Match", {"model": MODEL, "tokens": PROMPT, "whole_prompt": True})
    rows = {(each.instance, each.rank): each for each in found.workers}
    assert (found.prompt_tokens, rows["e0", 0].tokens, rows["e1", 1].tokens) == (4 * BLOCK, 4 * BLOCK, BLOCK)
    assert dict(rows["e0", 0].tiers) == {"gpu": 2 * BLOCK, "cpu": 4 * BLOCK, "disk": 4 * BLOCK}
    assert rows["e0", 0].trust.state == messages.STATE_EXACT
    assert rows["gone", 0].trust.state != messages.STATE_EXACT
    assert rows["gone", 0].trust.reason_codes


def test_errors_have_status_codes_and_reasons(service: Service, messages: Any) -> None:
    ours = {"model": MODEL, "tokens": PROMPT}
    with open_channel(service) as channel:
        for method, fields, expected in (
            ("Match", {"model": "x", "tokens": [1]}, ("NOT_FOUND", "unknown-model")),
            ("Match", {"tokens": [1]}, ("INVALID_ARGUMENT", "missing-model")),
            ("Match", {**ours, "mm": [{"start": 1}]}, ("INVALID_ARGUMENT", "bad-shape")),
            ("Select", {**ours, "load_weight": 1001}, ("INVALID_ARGUMENT", "bad-shape")),
            ("Select", {**ours, "load_weight": "NaN"}, ("INVALID_ARGUMENT", "bad-shape")),
            ("Select", {**ours, "candidates": [{"instance": "a", "load": "Infinity"}]}, ("INVALID_ARGUMENT", "bad-number")),
            ("Select", {**ours, "candidates": [{"instance": "a", "load": "NaN"}]}, ("INVALID_ARGUMENT", "bad-number")),
            ("Select", {**ours, "reserve": {"seconds": "NaN"}}, ("INVALID_ARGUMENT", "bad-number")),
            ("Select", {**ours, "reserve": {"seconds": "Infinity"}}, ("INVALID_ARGUMENT", "bad-number")),
            ("UpdateReservation", {"id": "x", "seconds": "NaN"}, ("INVALID_ARGUMENT", "bad-number")),
            ("Select", {**ours, "wait_weight": -1}, ("INVALID_ARGUMENT", "bad-shape")),
            ("Select", {**ours, "tiers": {"nvme": 1}}, ("INVALID_ARGUMENT", "bad-shape")),
            ("Select", {**ours, "trust": {"GOOD": 1}}, ("INVALID_ARGUMENT", "bad-shape")),
            ("Select", {**ours, "candidates": [{"instance": "a"}] * 2}, ("INVALID_ARGUMENT", "duplicate-candidate")),
        ):
            assert call_and_fail(channel, messages, method, fields) == expected
        for path, body, code in (
            (f"/{QUERY}/Nothing", b"", "UNIMPLEMENTED"),
            ("/kvevents.v2.Query/Match", b"", "UNIMPLEMENTED"),
            (f"/{QUERY}/Match", b"\xff", "INVALID_ARGUMENT"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(path)(body, timeout=DEADLINE)
            assert caught.value.code().name == code
            assert caught.value.details()
        assert call_and_fail(channel, messages, "Match", ours, compression=grpc.Compression.Gzip)[0] == "UNIMPLEMENTED"
        assert call(channel, messages, "Match", ours).prompt_tokens == len(PROMPT)  # the same connection still works


def test_limits_and_allowed_hosts_are_those_of_http(messages: Any, tmp_path: Path) -> None:
    config = write(tmp_path / "c.toml", "limits = { max_body_bytes = 10_000, max_tokens = 100 }\n")
    with serving("--config", config) as service:
        service.register("e", "tcp://127.0.0.1:1")
        with open_channel(service) as channel:
            for tokens, reason in (([1] * 101, "too-many-tokens"), ([1 << 30] * 4_000, "too-large")):
                failure = call_and_fail(channel, messages, "Match", {"model": MODEL, "tokens": tokens})
                assert failure == ("RESOURCE_EXHAUSTED", reason)
        with open_channel(service, grpc__default_authority="evil.example") as channel:
            failure = call_and_fail(channel, messages, "Match", {"model": MODEL, "tokens": [1]})
            assert failure == ("PERMISSION_DENIED", "unknown-host")


def test_calls_need_a_token_and_are_counted_in_metrics(messages: Any, tmp_path: Path) -> None:
    config = write(tmp_path / "c.toml", 'access = { tokens = [{ role = "register", token = "register-0123456789" }] }\n')
    with serving("--config", config, token="register-0123456789") as service:  # noqa: S106 - the test's own
        service.register("e", "tcp://127.0.0.1:1")
        fields = {"model": MODEL, "tokens": [1]}
        with open_channel(service) as channel:
            for metadata in ((), (("authorization", "Bearer wrong-0123456789"),)):
                assert call_and_fail(channel, messages, "Match", fields, metadata=metadata) == (
                    "UNAUTHENTICATED",
                    "unauthorized",
                )
            good = (("authorization", "Bearer register-0123456789"),)
            assert call(channel, messages, "Match", fields, metadata=good).prompt_tokens == 1
            assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=DEADLINE) in {SERVING, NOT_SERVING}
            with pytest.raises(grpc.RpcError) as caught:
                next(channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=DEADLINE))
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        service.wait_for_log("a token is required")
        assert f'kvevents_http_requests_total{{path="/{QUERY}/Match",status="200"}} 1' in service.get("/metrics").body.decode()


def test_a_call_to_a_suspended_service_exceeds_its_deadline(messages: Any) -> None:
    with serving() as service, open_channel(service) as channel:
        service.register("e", "tcp://127.0.0.1:1")
        fields = {"model": MODEL, "tokens": [1]}
        assert call(channel, messages, "Match", fields).prompt_tokens == 1
        suspend(service.program.process)
        message = ParseDict(fields, messages.MatchRequest())
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(f"/{QUERY}/Match")(message.SerializeToString(), timeout=0.1)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        service.program.process.send_signal(signal.SIGCONT)
        assert call(channel, messages, "Match", fields).prompt_tokens == 1


def test_calls_over_tls_are_answered(messages: Any, tmp_path: Path) -> None:
    folder = make_certificates(tmp_path)
    files = {name: str(folder / name) for name in ("server.pem", "server.key", "ca.pem")}
    text = f'tls = {{ certificate = "{files["server.pem"]}", key = "{files["server.key"]}" }}\nsources = []\n'
    with serving("--config", write(tmp_path / "c.toml", text)) as service:
        credentials = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes())
        with open_channel(service, credentials) as channel:
            failure = call_and_fail(channel, messages, "Match", {"model": MODEL, "tokens": [1]})
            assert failure == ("NOT_FOUND", "unknown-model")


def test_the_health_service_has_the_state_of_readyz(tmp_path: Path) -> None:
    """The health service has the state of `/readyz` until the service stops."""
    config = write(tmp_path / "c.toml", "ready = { grace_seconds = 1 }\n")
    with serving("--config", config) as service, open_channel(service) as channel:
        check, watch = (
            channel.unary_unary("/grpc.health.v1.Health/Check"),
            channel.unary_stream("/grpc.health.v1.Health/Watch"),
        )
        service.wait_until_ready()
        known = b"\n\x11" + QUERY.encode()
        assert [check(message, timeout=DEADLINE) for message in (b"", known)] == [SERVING] * 2
        with pytest.raises(grpc.RpcError) as caught:
            check(b"\n\x01x", timeout=DEADLINE)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        unknown = watch(b"\n\x01x", timeout=DEADLINE)
        assert next(unknown) == SERVICE_UNKNOWN
        unknown.cancel()
        watched = watch(known, timeout=DEADLINE)
        assert next(watched) == SERVING
        service.program.process.send_signal(signal.SIGTERM)
        assert next(watched) == NOT_SERVING
        with pytest.raises(grpc.RpcError) as caught:
            next(watched)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert service.program.end().code == 0
