"""`/readyz`: not before there is anything to serve, not while the service ends, and never later than its deadline otherwise."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvevents.errors import ConfigError
from kvevents.service.config import ServiceConfig
from kvevents.service.exposition import exposition
from kvevents.service.reasons import Reason
from kvevents.service.registration import Registration
from kvevents.service.service import Service
from kvevents.service.state_store import StateStore
from kvevents.settings import convert
from kvevents.stream import Trust
from service_cases import Client, engine, prompt, serving, until, write


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def service_of(clock: Clock, watched: Path | None = None, **tables: Any) -> Iterator[Service]:
    """A service that follows nothing: only its own word on readiness is asked for."""
    service = Service(convert(tables, ServiceConfig, "test"), watched, clock=clock)
    try:
        yield service
    finally:
        service.fleet.follower.subscriber.close()
        if service.state_store is not None:
            service.state_store.close()


def register(service: Service, name: str = "a", trust: Trust = Trust.CONNECTING) -> None:
    registration = Registration(instance=name, endpoint="tcp://127.0.0.1:1", model="m")
    service.fleet.register(registration).result()
    service.fleet.members[registration.key].update_trust(trust, 0.0)


def readiness(service: Service) -> tuple[bool, str]:
    answer = service.readiness()
    return answer.ready, answer.why


def test_where_no_engine_is_expected_it_is_ready_at_once() -> None:
    with service_of(Clock()) as service:
        assert readiness(service) == (True, "0 of 0 sources are EXACT")


def watched_file(home: Path) -> Path:
    return write(home / "w.toml", '[[sources]]\nbase_url = "http://127.0.0.1:1"\n')


EXPECTING: dict[str, dict[str, Any]] = {
    "sources": {"sources": [{"base_url": "http://127.0.0.1:1"}]},
    "source_files": {"source_files": ["w.toml"]},
    "dns": {"dns": [{"target": "engines.invalid:5557", "model": "m"}]},
    "expected": {"ready": {"expected": 2}},
    "a watched file": {},
}


@pytest.mark.parametrize("case", EXPECTING)
def test_it_is_not_ready_without_a_single_engine_where_some_are_expected(case: str, tmp_path: Path) -> None:
    """Whatever the deadline: an answer about nothing sends every prompt anywhere. One engine, exact or not, ends it."""
    clock = Clock()
    watched = watched_file(tmp_path) if case == "a watched file" else None
    with service_of(clock, watched, **EXPECTING[case]) as service:
        empty = (False, "engines are expected, and none is registered or found so far")
        assert readiness(service) == empty
        clock.now += 3_600
        assert readiness(service) == empty
        register(service)
        ready, why = readiness(service)
        assert ready
        assert why.startswith("0 of 1 sources are EXACT")
        assert why.endswith("the deadline of 30 s has passed")


def test_registrations_from_before_a_restart_are_expected(tmp_path: Path) -> None:
    """Though the first of them is refused now, and no engine is left."""
    state_store = StateStore(tmp_path / "state")
    state_store.save_registrations(lambda: [Registration(instance="a", endpoint="tcp://8.8.8.8:1", model="m")])
    state_store.close()
    clock = Clock()
    with service_of(clock, state_dir=str(tmp_path / "state")) as service:
        service._register_remembered()
        assert not service.fleet.members
        clock.now += 3_600
        assert not readiness(service)[0]


def test_so_many_are_expected_before_the_deadline_and_fewer_after_it() -> None:
    clock = Clock()
    with service_of(clock, ready={"expected": 2}) as service:
        register(service, "a", Trust.EXACT)
        assert readiness(service) == (False, "1 of 2 expected sources are registered")
        clock.now += 30
        assert readiness(service) == (
            True,
            "1 of 1 sources are EXACT, and 2 were expected; the deadline of 30 s has passed",
        )


def test_so_many_that_are_expected_are_enough() -> None:
    with service_of(Clock(), ready={"expected": 2}) as service:
        register(service, "a", Trust.EXACT)
        register(service, "b", Trust.EXACT)
        assert readiness(service) == (True, "2 of 2 sources are EXACT")


def test_idle_engines_do_not_delay_it() -> None:
    """Nothing is known to be missing of an engine whose replay no live batch has confirmed yet; with another doubt there is."""
    with service_of(Clock()) as service:
        register(service)
        (member,) = service.fleet.members.values()
        member.set_trust(Trust.DEGRADED, (Reason.LOST, Reason.REPLAY_UNPROVEN), 0.0)
        assert readiness(service) == (False, "0 of 1 sources are EXACT")
        member.set_trust(Trust.DEGRADED, (Reason.REPLAY_UNPROVEN,), 0.0)
        assert readiness(service) == (True, "0 of 1 sources are EXACT, 1 wait for a live batch")


def test_a_service_that_follows_nothing_any_more_is_not_ready() -> None:
    """Every question is 503 then, whatever was ready before: a router must be sent elsewhere until the process is restarted."""
    with service_of(Clock()) as service:
        register(service, trust=Trust.EXACT)
        assert readiness(service)[0]
        service.fleet.on_failure(RuntimeError("it broke"))
        assert readiness(service) == (False, "the service no longer receives events: RuntimeError: it broke")
        service.is_ending = True
        assert readiness(service) == (False, "the service is ending")


def test_engines_that_are_not_exact_delay_it_up_to_the_deadline() -> None:
    """The answer says that the deadline has passed, and later doubts do not take it back."""
    clock = Clock()
    with service_of(clock) as service:
        register(service)
        assert readiness(service) == (False, "0 of 1 sources are EXACT")
        clock.now += 29.9
        assert not readiness(service)[0]
        clock.now += 0.1
        assert readiness(service) == (True, "0 of 1 sources are EXACT; the deadline of 30 s has passed")
        clock.now = 0.0
        assert readiness(service)[0]


def test_it_is_not_ready_while_it_ends() -> None:
    with service_of(Clock()) as service:
        assert readiness(service)[0]
        service.is_ending = True
        assert readiness(service) == (False, "the service is ending")
        assert b"kvevents_ready 0" in exposition(service)


@pytest.mark.parametrize("ready", [{"expected": -1}, {"grace_seconds": -1}, {"grace_seconds": 1e9}])
def test_what_cannot_be_is_refused(ready: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="ready"):
        convert({"ready": ready}, ServiceConfig, "test")
    assert ServiceConfig().ready.grace_seconds == 0


def test_after_sigterm_it_answers_for_the_grace_and_is_not_ready() -> None:
    """On new connections too. The second signal ends the grace, which is far longer than this test."""
    with ExitStack() as stack:
        made = stack.enter_context(engine())
        service = stack.enter_context(serving("--grace-seconds", 600))
        assert service.register("a", made.publisher).status == 201
        tokens = prompt(1)
        made.store(tokens)
        service.holds("a", tokens)
        until("ready", lambda: service.get("/readyz").status == 200)
        service.program.process.send_signal(signal.SIGTERM)
        until("not ready", lambda: service.get("/readyz").status == 503)
        other = Client(service.url)
        assert other.get("/readyz").json["why"] == "the service is ending"
        assert other.get("/livez").status == 200
        assert service.held(tokens)["a"] == len(tokens)
        other.close()
        assert service.end(signal.SIGTERM).code == 0


def test_the_grace_comes_to_an_end() -> None:
    with serving("--grace-seconds", 0.3) as service:
        assert service.end(signal.SIGTERM).code == 0
        service.says("not ready any more; ending in 0.3 s")
