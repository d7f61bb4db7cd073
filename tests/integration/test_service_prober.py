"""Each fault of an endpoint is named, with its code, wherever an operator looks; real sockets play the wrong peers."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import zmq

import paths
from cli_cases import refusing
from kvevents.service.config import Probing
from kvevents.service.reasons import REASON_OF_DOUBT, Reason
from kvevents.stream import DegradedReason
from publisher_cases import ANY, last_endpoint
from service_cases import MODEL, Service, Stream, engine, serving, until, write

ROOT = paths.ROOT
HASTY = """
[probe]
connect_seconds = 1.0
pause_seconds = 0.5
patience_seconds = 0.5
"""


def test_a_fault_is_named_within_ten_seconds() -> None:
    """A probe begins at most `pause` after the one before has ended, and each takes at most `connect_seconds`."""
    settings = Probing()
    assert settings.connect_seconds + settings.pause_seconds + settings.connect_seconds < 10
    assert settings.patience_seconds + settings.connect_seconds + settings.pause_seconds + settings.connect_seconds < 15


def test_each_doubt_has_a_code_of_its_own() -> None:
    assert Reason.OTHER not in REASON_OF_DOUBT.values()
    assert len(set(REASON_OF_DOUBT.values())) == len(DegradedReason)


def test_codes_of_a_newer_service_can_be_read() -> None:
    assert Reason("invented-later") is Reason.OTHER


@contextmanager
def peers() -> Iterator[dict[str, tuple[str, str | None, Reason]]]:
    """By name: an endpoint, a replay endpoint, and what is wrong with one of them."""
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())

        def bound(kind: int) -> zmq.Socket[bytes]:
            opened = stack.enter_context(context.socket(kind))
            opened.linger = 0
            return opened

        def at(kind: int) -> str:
            opened = bound(kind)
            opened.bind(ANY)
            return last_endpoint(opened)

        def locked(kind: int) -> str:
            opened = bound(kind)
            opened.curve_publickey, opened.curve_secretkey = zmq.curve_keypair()
            opened.curve_server = True
            opened.bind(ANY)
            return last_endpoint(opened)

        def listening(backlog: int) -> str:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=backlog))
            return f"tcp://127.0.0.1:{server.getsockname()[1]}"

        def full() -> str:
            """The kernel answers nothing where no connection can wait any more."""
            endpoint = listening(0)
            for _ in range(4):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(("127.0.0.1", int(endpoint.rpartition(":")[2])))
            return endpoint

        one, two = stack.enter_context(engine(seed=1)), stack.enter_context(engine(seed=2))
        nowhere = stack.enter_context(refusing())
        unknown = "tcp://no-such-host.invalid:5557"
        assert two.replay_endpoint is not None
        yield {
            "swapped": (two.replay_endpoint, two.endpoint, Reason.WRONG_SOCKET),
            "refused": (nowhere, None, Reason.REFUSED),
            "unresolved": (unknown, None, Reason.UNRESOLVED),
            "unanswered": (full(), None, Reason.UNANSWERED),
            "mute": (listening(64), None, Reason.UNANSWERED),
            "locked": (locked(zmq.PUB), None, Reason.KEYS),
            "replay-is-pub": (at(zmq.PUB), at(zmq.PUB), Reason.REPLAY_WRONG_SOCKET),
            "replay-is-the-endpoint": (one.endpoint, one.endpoint, Reason.REPLAY_WRONG_SOCKET),
            "replay-refused": (at(zmq.PUB), nowhere, Reason.REPLAY_REFUSED),
            "replay-unresolved": (at(zmq.PUB), unknown, Reason.REPLAY_UNRESOLVED),
            "replay-mute": (at(zmq.PUB), at(zmq.ROUTER), Reason.REPLAY_SILENT),
            "replay-locked": (at(zmq.PUB), locked(zmq.ROUTER), Reason.REPLAY_KEYS),
        }


def codes(service: Service) -> dict[str, set[str]]:
    """By source what speaks against it, in `/v1/sources`."""
    return {name: set(each["trust"]["reason_codes"]) for (name, _), each in service.sources().items()}


def test_each_wrong_endpoint_is_named_in_trust_metrics_and_log(tmp_path: Path) -> None:
    """In `/v1/sources` as code and sentence, in `kvevents_source_reason`, and in the log as one warning."""
    with peers() as wrong, serving("--config", write(tmp_path / "c.toml", HASTY)) as service:
        for name, (endpoint, replay, _) in wrong.items():
            assert service.register(name, endpoint, replay_endpoint=replay).status == 201, name
        wanted = {name: str(reason) for name, (_, _, reason) in wrong.items()}
        until("every reason", lambda: all(reason in codes(service)[name] for name, reason in wanted.items()))
        metrics = service.get("/metrics").body.decode()
        for name, (endpoint, replay, reason) in wrong.items():
            state, sentence = service.trust(name)
            assert state in ({"CONNECTING"} if not reason.startswith("replay-") else {"REPLAYING", "DEGRADED"}), name
            assert any(
                f'engine="{name}"' in line and f'reason="{reason}"' in line and line.endswith(" 1")
                for line in metrics.splitlines()
            ), name
            if reason is Reason.REPLAY_SILENT:
                assert "the replay endpoint does not answer" in sentence
                continue
            where = replay if reason.startswith("replay-") else endpoint
            assert str(where).removeprefix("tcp://").partition(":")[0] in sentence, name
            assert service.source(name)["fault"] in sentence, name
            assert len(service.log_lines(rf"WARNING +{name} rank 0: (?!DEGRADED|STALE)")) == 1, name


def test_the_swapped_ports_are_called_that(tmp_path: Path) -> None:
    """Newcomer's report D9: 75 seconds of CONNECTING without a reason."""
    with engine() as one, serving("--config", write(tmp_path / "c.toml", HASTY)) as service:
        assert service.register("a", str(one.replay_endpoint), replay_endpoint=one.endpoint).status == 201
        until("a reason", lambda: "swapped" in service.trust("a")[1])
        assert "ROUTER" in service.trust("a")[1]
        assert len(service.log_lines("a rank 0: .*ROUTER")) == 1


def test_what_is_over_is_logged_once_and_no_longer_a_reason(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    endpoint = f"tcp://127.0.0.1:{port}"
    with serving("--config", write(tmp_path / "c.toml", HASTY)) as service:
        assert service.register("late", endpoint).status == 201
        until("a reason", lambda: codes(service)["late"] >= {"refused"})
        until("one sentence", lambda: service.trust("late")[1] == f"nothing listens at {endpoint}")
        with engine(endpoint=f"tcp://*:{port}", replay_endpoint=None):
            until("a connection", lambda: codes(service)["late"] == {"no-replay"})
            # One sentence and one line, though the subscriber has found out something as well.
            until("the log", lambda: service.log_lines("late rank 0: this fault has ended: nothing listens at"))
            assert service.source("late")["fault"] is None
        assert len(service.log_lines("late rank 0: nothing listens")) == 1
        assert not service.log_lines("no connection")


def test_events_report_another_reason_within_one_state(tmp_path: Path) -> None:
    with refusing() as nowhere, serving("--config", write(tmp_path / "c.toml", HASTY)) as service:
        with Stream(service) as stream:
            assert service.register("a", nowhere).status == 201
            event = stream.next("state", lambda event: "refused" in event["trust"]["reason_codes"])
        assert event["was"] == "CONNECTING"
        assert event["trust"]["state"] == "CONNECTING"


def test_an_engine_that_is_waited_for_is_named_too(tmp_path: Path) -> None:
    """Where the service binds, there is nothing to probe, and still no engine may come."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    table = f'{HASTY}[[sources]]\ninstance = "a"\nmodel = "{MODEL}"\nbind = true\nendpoint = "tcp://*:{port}"\n'
    with serving("--config", write(tmp_path / "c.toml", table)) as service:
        until("a reason", lambda: codes(service).get("a") == {"no-peer", "no-replay"})
        assert "no engine has connected" in service.trust("a")[1]


def test_the_runbook_has_every_reason() -> None:
    """Each code stands in a table of docs/operations/runbook.md, with what to do."""
    rows = [
        line.split("|")[1]
        for line in (ROOT / "docs" / "operations" / "runbook.md").read_text().splitlines()
        if line.startswith("| `")
    ]
    assert [reason for reason in Reason if not any(f"`{reason}`" in row for row in rows)] == []
