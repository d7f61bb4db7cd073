"""`/readyz` fails without expected sources, while the service ends, and until a deadline while sources are not EXACT."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvevents.client.reasons import Reason
from kvevents.errors import ConfigError
from kvevents.service.exposition import format_metrics
from kvevents.service.fleet.registration import Registration
from kvevents.service.service import Service
from kvevents.service.settings import ServiceSettings
from kvevents.service.state_store import SavedRegistration, StateStore
from kvevents.settings import convert
from kvevents.stream import Trust
from service_cases import Client, engine, prompt, serving, wait_for, write


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def make_service(clock: Clock, watched: Path | None = None, **tables: Any) -> Iterator[Service]:
    """Return a service that follows no engines. Only its readiness is tested."""
    service = Service(convert(tables, ServiceSettings, "test"), watched, clock=clock)
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


def test_a_service_without_expected_engines_is_ready_at_once() -> None:
    with make_service(Clock()) as service:
        assert readiness(service) == (True, "0 of 0 sources are EXACT")


def write_watched_file(home: Path) -> Path:
    return write(home / "w.toml", '[[sources]]\nbase_url = "http://127.0.0.1:1"\n')


EXPECTING: dict[str, dict[str, Any]] = {
    "sources": {"sources": [{"base_url": "http://127.0.0.1:1"}]},
    "source_files": {"source_files": ["w.toml"]},
    "dns": {"dns": [{"target": "engines.invalid:5557", "model": "m"}]},
    "expected": {"ready": {"expected": 2}},
    "a watched file": {},
}


@pytest.mark.parametrize("case", EXPECTING)
def test_a_service_is_not_ready_before_the_first_expected_engine(case: str, tmp_path: Path) -> None:
    """The deadline does not matter before. After the first engine is registered, the deadline applies, also if it is not
    EXACT."""
    clock = Clock()
    watched = write_watched_file(tmp_path) if case == "a watched file" else None
    with make_service(clock, watched, **EXPECTING[case]) as service:
        empty = (False, "engines are expected, but no engine is registered or found yet")
        assert readiness(service) == empty
        clock.now += 3_600
        assert readiness(service) == empty
        register(service)
        ready, why = readiness(service)
        assert ready
        assert why.startswith("0 of 1 sources are EXACT")
        assert why.endswith("ready because 30 s have passed since the start")


def test_registrations_from_before_a_restart_are_expected(tmp_path: Path) -> None:
    """The stored registration is refused after the restart, so no engine is left."""
    state_store = StateStore(tmp_path / "state")
    registered = SavedRegistration(registration=Registration(instance="a", endpoint="tcp://8.8.8.8:1", model="m"))
    state_store.save_registrations(lambda: [registered])
    state_store.close()
    clock = Clock()
    with make_service(clock, state_dir=str(tmp_path / "state")) as service:
        service.registrations.restore(print)
        assert not service.fleet.members
        clock.now += 3_600
        assert not readiness(service)[0]


def test_fewer_sources_than_expected_suffice_only_after_the_deadline() -> None:
    clock = Clock()
    with make_service(clock, ready={"expected": 2}) as service:
        register(service, "a", Trust.EXACT)
        assert readiness(service) == (False, "1 of 2 expected sources are registered")
        clock.now += 30
        assert readiness(service) == (
            True,
            "1 of 1 sources are EXACT, and 2 were expected; ready because 30 s have passed since the start",
        )


def test_a_service_with_all_expected_sources_is_ready() -> None:
    with make_service(Clock(), ready={"expected": 2}) as service:
        register(service, "a", Trust.EXACT)
        register(service, "b", Trust.EXACT)
        assert readiness(service) == (True, "2 of 2 sources are EXACT")


def test_idle_engines_do_not_delay_readiness() -> None:
    """If replay only waits for a confirming live batch, nothing is known to be missing. Another degraded reason delays
    readiness."""
    with make_service(Clock()) as service:
        register(service)
        (member,) = service.fleet.members.values()
        member.set_trust(Trust.DEGRADED, (Reason.LOST, Reason.REPLAY_UNPROVEN), 0.0)
        assert readiness(service) == (False, "0 of 1 sources are EXACT")
        member.set_trust(Trust.DEGRADED, (Reason.REPLAY_UNPROVEN,), 0.0)
        assert readiness(service) == (True, "0 of 1 sources are EXACT, 1 wait for a live batch")


def test_a_service_that_no_longer_receives_events_is_not_ready() -> None:
    """Every query is 503 then. A router must use other services until the process is restarted."""
    with make_service(Clock()) as service:
        register(service, trust=Trust.EXACT)
        assert readiness(service)[0]
        service.fleet.on_failure(RuntimeError("it broke"))
        assert readiness(service) == (False, "the service no longer receives events: RuntimeError: it broke")
        service.is_ending = True
        assert readiness(service) == (False, "the service is ending")


def test_engines_that_are_not_exact_delay_readiness_until_the_deadline() -> None:
    """The response says that the deadline has passed, and readiness is not revoked later."""
    clock = Clock()
    with make_service(clock) as service:
        register(service)
        assert readiness(service) == (False, "0 of 1 sources are EXACT")
        clock.now += 29.9
        assert not readiness(service)[0]
        clock.now += 0.1
        assert readiness(service) == (True, "0 of 1 sources are EXACT; ready because 30 s have passed since the start")
        clock.now = 0.0
        assert readiness(service)[0]


def test_a_service_that_is_ending_is_not_ready() -> None:
    with make_service(Clock()) as service:
        assert readiness(service)[0]
        service.is_ending = True
        assert readiness(service) == (False, "the service is ending")
        assert b"kvevents_ready 0" in format_metrics(service)


@pytest.mark.parametrize("ready", [{"expected": -1}, {"grace_seconds": -1}, {"grace_seconds": 1e9}])
def test_invalid_readiness_settings_are_refused(ready: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="ready"):
        convert({"ready": ready}, ServiceSettings, "test")
    assert ServiceSettings().ready.grace_seconds == 0


def test_after_sigterm_a_service_answers_during_its_grace_period_and_is_not_ready() -> None:
    """New connections are answered, too. The second signal ends the grace period, which is far longer than this test."""
    with ExitStack() as stack:
        made = stack.enter_context(engine())
        service = stack.enter_context(serving("--grace-seconds", 600))
        assert service.register("a", made.publisher).status == 201
        tokens = prompt(1)
        made.store(tokens)
        service.wait_for_prefix("a", tokens)
        wait_for("ready", lambda: service.get("/readyz").status == 200)
        service.program.process.send_signal(signal.SIGTERM)
        wait_for("not ready", lambda: service.get("/readyz").status == 503)
        other = Client(service.url)
        assert other.get("/readyz").json["why"] == "the service is ending"
        assert other.get("/livez").status == 200
        assert service.held(tokens)["a"] == len(tokens)
        other.close()
        assert service.end(signal.SIGTERM).code == 0


def test_a_service_ends_after_its_grace_period() -> None:
    with serving("--grace-seconds", 0.3) as service:
        assert service.end(signal.SIGTERM).code == 0
        service.wait_for_log("no longer ready for queries; the process ends in 0.3 s")
