"""`kvevents register`, `unregister`, `sources` and `reservations`, contexts, and the formats of their output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli_cases import ProcessResult, run
from cli_service_cases import RunningService, blocks, engine, serving
from kvevents.cli.console import Console
from kvevents.cli.output import write_record
from kvevents.cli.program import main


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with serving("--port", 0) as running:
        yield running


def ask(service: RunningService, *words: object) -> ProcessResult:
    return run(*words, "--service", service.url)


def test_an_engine_is_registered_listed_and_unregistered(service: RunningService) -> None:
    """A table names what people look for, and `wide` adds where the engine is."""
    with engine(blocks(2)) as publisher:
        options = ("--replay", publisher.replay_endpoint, "--model", "llama", "--label", "zone=a", "--lease", 60)
        registered = ask(service, "register", "e-1", publisher.endpoint, *options)
        assert registered.code == 0, registered.err
        service.wait("e-1/0", lambda one: one["blocks"] == 2)
        titles, row = ask(service, "sources", "e-1", "--model", "llama").out.splitlines()
        assert titles.split()[:4] == ["worker", "model", "trust", "blocks"]
        assert row.split()[:2] == ["e-1/0", "llama"]
        wide = ask(service, "sources", "e-1", "-o", "wide").out.splitlines()[1]
        assert {publisher.endpoint, publisher.replay_endpoint, "zone=a"} <= set(wide.split())
        assert ask(service, "drain", "e-1").out == "e-1/0: selections leave it out\n"
        service.wait("e-1/0", lambda one: one["draining"])
        assert ask(service, "drain", "e-1", "--rank", 0, "--end").out == "e-1/0: selections choose it again\n"
        assert ask(service, "drain", "e-1", "--model", "other").code == 1
        assert ask(service, "unregister", "e-1", "--model", "llama").code == 0
    assert ask(service, "sources", "--model", "llama").out == "no engine is registered\n"


@pytest.mark.parametrize("name", [(), ("e-1",)])
def test_a_service_that_is_not_ready_does_not_seem_to_have_no_engine(name: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[ready]\nexpected = 1\n")
    with serving("--config", tmp_path / "c.toml") as waiting:
        ended = ask(waiting, "sources", *name)
    assert (ended.code, ended.out) == (1, "")
    assert "is not ready: engines are expected, but no engine is registered or found yet" in ended.err


def test_an_engine_is_registered_with_the_port_of_its_replay_endpoint(service: RunningService) -> None:
    with engine(blocks(2)) as publisher:
        live, port = publisher.endpoint.removeprefix("tcp://"), (publisher.replay_endpoint or "").rpartition(":")[2]
        registered = ask(service, "register", "e-4", f"{live},{port}", "--model", "llama")
        assert registered.code == 0, registered.err
        wide = ask(service, "sources", "e-4", "-o", "wide").out.splitlines()[1]
        assert {publisher.endpoint, publisher.replay_endpoint} <= set(wide.split())
        assert ask(service, "unregister", "e-4").code == 0, "the model is its own by default"


def test_an_engine_that_is_asked_for_by_a_wrong_name_is_an_error_with_a_suggestion(service: RunningService) -> None:
    with engine(blocks(1)) as publisher:
        service.register("decode-1", publisher, model_name="llama")
        service.wait_exact("decode-1/0", 1)
        ended = ask(service, "sources", "decoed-1")
        service.ask("POST", "/unregister", {"instance_id": "decode-1", "model_name": "llama"})
    assert (ended.code, ended.out) == (1, "")
    assert f"no engine 'decoed-1' is registered at {service.url}; did you mean 'decode-1'?" in ended.err


def test_an_engine_that_is_unknown_is_an_error(service: RunningService) -> None:
    ended = ask(service, "unregister", "e-9", "--model", "llama")
    assert (ended.code, ended.out) == (1, "")
    assert "instance e-9 not found; `kvevents sources` or /v1/sources lists the engines" in ended.err


def test_reservations_are_listed_with_their_workers(service: RunningService) -> None:
    with engine(blocks(2)) as publisher:
        service.register("e-2", publisher, model_name="llama")
        service.wait_exact("e-2/0", 2)
        request = {"model": "llama", "tokens": list(range(32)), "reserve": {"id": "request-17"}}
        service.ask("POST", "/v1/select", request)
        for words in ((), ("request-17",)):
            titles, row = ask(service, "reservations", *words).out.splitlines()
            assert row.split()[:4] == ["request-17", "e-2/0", "llama", "waiting"]
            assert titles.split()[:4] == ["id", "worker", "model", "progress"]
        service.ask("DELETE", "/v1/reservations/request-17")
    assert ask(service, "reservations").out == "no reservation is open\n"


def test_every_format_has_the_values_of_the_service(service: RunningService) -> None:
    with engine(blocks(1)) as publisher:
        service.register("e-3", publisher, model_name="llama")
        service.wait_exact("e-3/0", 1)
        found = [ask(service, "sources", "-o", output).out for output in ("json", "yaml")]
        answer = service.ask("GET", "/v1/sources")
        service.ask("POST", "/unregister", {"instance_id": "e-3", "model_name": "llama"})
    for listing in (json.loads(found[0]), yaml.safe_load(found[1])):
        assert listing.keys() == answer.keys()
        assert [one.keys() for one in listing["sources"]] == [one.keys() for one in answer["sources"]]


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        {"a": {"b": [1, [2, {"c": None}], {}]}, "10.0.0.1:80": ["x: y", "- z", "true", "line\nbreak"], "on": {}},
        [[1, 2], [], {"a": {"b": 1.5, "c": True}, "d": 2}],
        "text",
    ],
)
def test_yaml_output_is_read_as_the_same_value(value: Any, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """PyYAML is the judge."""
    assert write_record(value, "yaml", Console())
    assert yaml.safe_load(capfdbinary.readouterr().out) == value


# --- contexts


@pytest.fixture
def contexts(service: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file with the service as context `here`, and make it the file of contexts."""
    file = tmp_path / "contexts.toml"
    file.write_text(f'[contexts.here]\nservice = "{service.url}"\n[contexts.away]\nservice = "http://127.0.0.1:1"\n')
    monkeypatch.setenv("KVEVENTS_CONTEXTS", str(file))
    monkeypatch.delenv("KVEVENTS_SERVICE", raising=False)
    return file


@pytest.mark.parametrize(
    ("words", "variables", "current", "code"),
    [
        (["--context", "here"], {"KVEVENTS_SERVICE": "http://127.0.0.1:1"}, "away", 0),
        ([], {"KVEVENTS_CONTEXT": "here"}, "away", 0),
        ([], {}, "here", 0),
        ([], {"KVEVENTS_SERVICE": "http://127.0.0.1:1"}, "here", 1),
        (["--service", "http://127.0.0.1:1"], {}, "here", 1),
        (["--context", "heer"], {}, "here", 2),
    ],
)
def test_the_nearest_name_of_a_service_counts(
    words: list[str], variables: dict[str, str], current: str, code: int, contexts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option is nearer than a variable, a variable nearer than the file; a context named by an option is an option."""
    contexts.write_text(f'current = "{current}"\n{contexts.read_text()}')
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["sources", *words]) == code


def test_a_wrong_name_of_a_context_has_a_suggestion(contexts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--context", "heer"]) == 2
    assert "unknown context 'heer'; did you mean 'here'?" in capsys.readouterr().err


def test_the_token_of_a_context_goes_to_its_service_only(contexts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file of the token does not exist, so a command that reads it ends with an error."""
    contexts.write_text(contexts.read_text().replace("[contexts.away]", 'token_file = "/none"\n[contexts.away]'))
    assert main(["sources", "--context", "here"]) == 2
    assert "cannot read the context's token_file /none: No such file" in capsys.readouterr().err
    assert main(["sources", "--service", "http://127.0.0.1:1"]) == 1


def test_doctor_checks_the_service_that_is_named_outside_of_the_command(
    contexts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contexts.write_text(f'current = "here"\n{contexts.read_text()}')
    main(["doctor"])
    assert "service   kvevents" in capsys.readouterr().out
    assert main(["doctor", "127.0.0.1:1", "--context", "here"]) == 2
