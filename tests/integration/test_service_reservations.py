"""`/v1/select` with a reservation, labels, a session: what a router needs to send a request, and to be right about load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from google.protobuf.json_format import MessageToDict, ParseDict

from kvevents.client.schemas import Decision, DecisionsAnswer, Reservation, ReservationsAnswer, Selection
from service_cases import BLOCK, DEADLINE, MODEL, Service, engine, engines, prompt, serving, wait_for, write
from service_grpc_cases import read_messages

PROMPT = [*prompt(1), 1]
URLS = {"a": "http://10.0.0.1:8000", "b": "http://10.0.0.2:8000"}


@pytest.fixture(scope="module", name="service")
def fleet() -> Iterator[Service]:
    """A service with two engines, of which the first holds a prompt."""
    with engines(2) as made, serving() as service:
        for (name, url), one, role in zip(URLS.items(), made, ("prefill", "decode"), strict=True):
            answer = service.register(name, one.publisher, url=url, labels={"role": role})
            assert answer.status == 201
        made[0].store(prompt(1))
        made[1].store(prompt(2))
        service.exact("a", blocks=4)
        service.exact("b", blocks=4)
        yield service


def select(service: Service, **fields: Any) -> Selection:
    answer = service.post("/v1/select", {"model": MODEL, "tokens": PROMPT, **fields})
    assert answer.status == 200, answer
    return msgspec.json.decode(answer.body, type=Selection)


def reserve(service: Service, **fields: Any) -> Reservation:
    reservation = select(service, **{"reserve": True, **fields}).reservation
    assert reservation is not None
    return reservation


def end_all(service: Service) -> None:
    for one in msgspec.json.decode(service.get("/v1/reservations").body, type=ReservationsAnswer).reservations:
        assert service.ask("DELETE", f"/v1/reservations/{one.id}").status == 200


def fresh(number: int, length: int = 64) -> list[int]:
    """A prompt that no engine holds."""
    return [1_000_000 + number * length + place for place in range(length)]


def test_a_selection_says_where_to_send_the_request(service: Service) -> None:
    found = select(service, explain=True)
    assert (found.instance, found.url, found.labels, found.usable) == ("a", URLS["a"], {"role": "prefill"}, True)
    assert {one.url for one in found.considered or ()} == set(URLS.values())
    for held in service.post("/v1/match", {"model": MODEL, "tokens": PROMPT}).json["workers"]:
        assert held["url"] == URLS[held["instance"]]
    assert service.source("b")["url"] == URLS["b"]
    assert service.source("b")["labels"] == {"role": "decode"}


def test_a_reservation_lives_from_select_to_finish(service: Service) -> None:
    made = reserve(service)
    path = f"/v1/reservations/{made.id}"
    assert (made.instance, made.url, made.model, made.progress) == ("a", URLS["a"], MODEL, "waiting")
    assert (made.prompt_tokens, made.uncached_tokens) == (4 * BLOCK + 1, 1)
    assert 200 < made.expires_in <= 300
    assert service.get(path).json["id"] == made.id
    updated = service.post(path, first_token=True, output_tokens=7).json
    assert (updated["progress"], updated["output_tokens"]) == ("decoding", 7)
    assert service.post(path, output_tokens=3).json["output_tokens"] == 7
    assert service.post(path, seconds=1_000).json["expires_in"] > 900
    assert service.post(path, {}).json["expires_in"] > 900
    assert service.ask("DELETE", path).json["progress"] == "decoding"
    for answer in (service.get(path), service.post(path, {}), service.ask("DELETE", path)):
        assert (answer.status, answer.json["reason"]) == (404, "no-such-reservation")


def test_open_reservations_are_load(service: Service) -> None:
    """A worker with open reservations gets fewer new prompts; finished ones count no longer."""
    first = [reserve(service, tokens=fresh(number), candidates=[{"instance": "a"}]) for number in range(12)]
    spread = Counter(reserve(service, tokens=fresh(100 + number)).instance for number in range(8))
    assert spread == {"b": 8}
    for one in first:
        service.ask("DELETE", f"/v1/reservations/{one.id}")
    spread = Counter(reserve(service, tokens=fresh(200 + number)).instance for number in range(4))
    assert spread == {"a": 4}
    end_all(service)


def test_a_request_that_waits_is_as_much_work_as_it_has_to_compute(service: Service) -> None:
    """Of two workers with one request each, the one with the shorter prompt gets the next."""
    reserve(service, tokens=fresh(1, 4_000), candidates=[{"instance": "a"}])
    short = reserve(service, tokens=fresh(2, 40), candidates=[{"instance": "b"}])
    assert reserve(service, tokens=fresh(3, 400)).instance == "b"
    service.post(f"/v1/reservations/{short.id}", first_token=True)
    assert reserve(service, tokens=fresh(4, 400)).instance == "b"
    end_all(service)


def test_a_name_that_is_used_again_replaces_the_reservation(service: Service) -> None:
    """A client that repeats a selection after a lost answer counts once."""
    first = reserve(service, reserve={"id": "request-1", "seconds": 60})
    again = reserve(service, reserve={"id": "request-1", "seconds": 90}, candidates=[{"instance": "b"}])
    assert (first.id, again.id, again.instance) == ("request-1", "request-1", "b")
    listed = msgspec.json.decode(service.get("/v1/reservations").body, type=ReservationsAnswer)
    assert (listed.open, [one.instance for one in listed.reservations]) == (1, ["b"])
    end_all(service)


def test_forgotten_reservations_expire(service: Service) -> None:
    reserve(service, reserve={"seconds": 1})
    wait_for("the reservation to expire", lambda: service.get("/v1/reservations").json["open"] == 0)


def test_reservations_are_limited(tmp_path: Path) -> None:
    config = write(tmp_path / "c.toml", "limits = { max_reservations = 2, reservation_seconds = 60 }\n")
    with engines(1) as (one,), serving("--config", config) as service:
        service.register("a", one.publisher)
        one.store(prompt(1))
        service.exact("a", blocks=4)
        assert reserve(service, reserve={"id": "x"}).expires_in <= 60
        reserve(service)
        refused = service.post("/v1/select", {"model": MODEL, "tokens": PROMPT, "reserve": True})
        assert (refused.status, refused.json["reason"]) == (503, "too-many-reservations")
        assert select(service).instance == "a"
        reserve(service, reserve={"id": "x"})
        metrics = service.get("/metrics").body.decode()
        assert 'kvevents_reservations_total{outcome="refused"} 1' in metrics
        assert "kvevents_reservations_open 2" in metrics


def test_a_worker_that_leaves_takes_no_count_along(service: Service) -> None:
    """Reservations of a worker that was unregistered can be finished, and do not count for a new worker of its name."""
    with engines(1) as (one,):
        service.register("c", one.publisher)
        service.exact("c")
        made = reserve(service, candidates=[{"instance": "c"}])
        service.post("/unregister", instance_id="c", model_name=MODEL)
        assert service.ask("DELETE", f"/v1/reservations/{made.id}").status == 200


def test_reservations_of_an_engine_that_restarts_count_no_longer(service: Service) -> None:
    """Its requests have ended with it. So it has the mean number of requests of the other engines, as a new engine has."""
    labels = {"role": "restarts"}

    def requests() -> dict[str, float | None]:
        found = select(service, tokens=fresh(1), labels=labels, explain=True)
        return {one.instance: one.requests for one in found.considered or ()}

    with engine() as steady, engine() as first:
        place: dict[str, Any] = {"endpoint": first.endpoint, "replay_endpoint": first.replay_endpoint, "bind": True}
        service.register("d", steady.publisher, labels=labels)
        service.register("e", first.publisher, labels=labels)
        for one in (steady, first):
            one.store(prompt(9))
        for name in ("d", "e"):
            service.exact(name)
        made = [reserve(service, candidates=[{"instance": "e"}]) for _ in range(40)]
        assert (requests()["e"] or 0) >= 40
    with engine(**place) as again:
        again.store(prompt(3))
        service.exact("e")
        wait_for("the load of the process that has ended to be forgotten", lambda: (requests()["e"] or 0) < 20)
        assert all(service.ask("DELETE", f"/v1/reservations/{one.id}").status == 200 for one in made)
    for name in ("d", "e"):
        service.post("/unregister", instance_id=name, model_name=MODEL)


def test_nothing_is_reserved_where_nothing_can_be_reached(service: Service) -> None:
    service.register("dead", "tcp://127.0.0.1:1", labels={"role": "dead"})
    found = select(service, labels={"role": "dead"}, reserve=True)
    assert (found.instance, found.usable, found.reservation) == ("dead", False, None)
    service.post("/unregister", instance_id="dead", model_name=MODEL)


def test_labels_filter_candidates(service: Service) -> None:
    assert select(service, labels={"role": "decode"}).instance == "b"
    refused = service.post("/v1/select", {"model": MODEL, "tokens": PROMPT, "labels": {"role": "decode", "zone": "x"}})
    assert (refused.status, refused.json["reason"]) == (400, "no-candidates")
    assert "role=decode" in refused.json["detail"]


def test_a_session_stays_at_its_worker(service: Service) -> None:
    """Each session has one worker for prompts that nothing else decides, and sessions are spread."""
    loads = [{"instance": name, "load": 1} for name in URLS]
    own = {
        f"session-{number}": {
            select(service, tokens=fresh(turn), session=f"session-{number}", candidates=loads).instance for turn in range(4)
        }
        for number in range(32)
    }
    assert all(len(workers) == 1 for workers in own.values())
    spread = Counter(name for workers in own.values() for name in workers)
    assert min(spread.values()) >= 8
    for session in own:
        assert select(service, session=session, candidates=loads).instance == "a", "it holds the prompt"


def test_decisions_are_sampled(service: Service) -> None:
    """Once a second a decision is kept, with its candidates; the client does not see them unless it asks."""

    def newest() -> Decision | None:
        assert select(service).considered is None
        answer = msgspec.json.decode(service.get("/v1/select/explain").body, type=DecisionsAnswer)
        sampled = [one for one in answer.decisions if len(one.selection.considered or ()) == len(URLS)]
        return next((one for one in sampled if one.prompt_tokens == len(PROMPT)), None)  # there are those of other tests

    assert wait_for("a decision", newest).model == MODEL


def test_bad_reservations_are_refused(service: Service) -> None:
    for wrong in (
        {"reserve": {"id": ""}},
        {"reserve": {"id": "a/b"}},
        {"reserve": {"id": "."}},
        {"reserve": {"id": ".."}},
        {"reserve": {"id": "a\n"}},
        {"reserve": {"id": "a" * 129}},
        {"reserve": {"seconds": 0.5}},
        {"reserve": {"seconds": 86_401}},
        {"reserve": {"what": 1}},
        {"reserve": None},
        {"labels": {"a": ""}},
        {"labels": {str(number): "x" for number in range(33)}},
        {"session": ""},
    ):
        assert service.post("/v1/select", {"model": MODEL, "tokens": PROMPT, **wrong}).status == 422, wrong
    made = reserve(service)
    for changes in ({"seconds": 0}, {"output_tokens": -1}, {"first_token": 1}, {"finish": True}):
        assert service.post(f"/v1/reservations/{made.id}", changes).status == 422, changes
    assert service.get("/v1/reservations/a%2Fb").status == 404
    assert service.get("/v1/reservations/a%20b").status == 404
    assert service.ask("PUT", f"/v1/reservations/{made.id}").status == 405
    end_all(service)


def test_reservations_need_a_token(tmp_path: Path) -> None:
    config = write(tmp_path / "c.toml", 'access = { tokens = [{ role = "read", token = "read-0123456789-0123" }] }\n')
    with serving("--config", config) as service:
        for method in ("GET", "POST", "DELETE"):
            assert service.ask(method, "/v1/reservations/x", b"{}", content_type="application/json").status == 401
        service.token = "read-0123456789-0123"  # noqa: S105 - the test's own
        assert service.get("/v1/reservations/x").status == 404


def test_grpc_reserves_as_http_does(service: Service) -> None:
    messages = read_messages()
    with grpc.insecure_channel(f"{service.host}:{service.port}") as channel:

        def call(method: str, request: str, response: str, **fields: Any) -> dict[str, Any]:
            message = ParseDict(fields, getattr(messages, request)())
            read = getattr(messages, response).FromString
            answer = channel.unary_unary(f"/kvevents.v1.Query/{method}", type(message).SerializeToString, read)
            read_fields: dict[str, Any] = MessageToDict(answer(message, timeout=DEADLINE), preserving_proto_field_name=True)
            return read_fields

        candidates = [{"instance": name, "load": 1} for name in URLS]
        fields = {"model": MODEL, "tokens": PROMPT, "reserve": {"id": "g"}, "candidates": candidates}
        found = call("Select", "SelectRequest", "SelectResponse", **fields)
        assert (found["url"], found["usable"], found["reservation"]["id"]) == (URLS["a"], True, "g")
        update = ("UpdateReservation", "UpdateReservationRequest", "Reservation")
        updated = call(*update, id="g", first_token=True, output_tokens=2, seconds=60)
        assert (updated["progress"], updated["output_tokens"]) == ("decoding", "2")
        assert service.get("/v1/reservations/g").json["expires_in"] <= 60
        finish = ("FinishReservation", "FinishReservationRequest", "Reservation")
        assert call(*finish, id="g")["id"] == "g"
        for name in ("g", "a/b"):
            with pytest.raises(grpc.RpcError) as caught:
                call(*finish, id=name)
            error: Any = caught.value
            assert error.code() is grpc.StatusCode.NOT_FOUND
            assert dict(error.trailing_metadata())["kvevents-reason"] == "no-such-reservation"
        refused = {"model": MODEL, "tokens": PROMPT, "labels": {"role": "none"}}
        with pytest.raises(grpc.RpcError) as caught:
            call("Select", "SelectRequest", "SelectResponse", **refused)
        error = caught.value
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
