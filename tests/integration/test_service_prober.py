"""Each fault of an endpoint is reported with its code in trust, metrics and log. Real sockets act as the wrong peers."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import zmq

import paths
from cli_cases import refuse_connections
from kvevents.client.reasons import Reason
from kvevents.service.fleet.member import CODES_OF_DEGRADED_REASONS
from kvevents.service.settings import Probing
from kvevents.stream import DegradedReason
from publisher_cases import ANY, last_endpoint
from service_cases import MODEL, EventStream, Service, engine, serving, wait_for, write
from tools.docs_site import with_generated
from tools.ports import reserve_port

ROOT = paths.ROOT
FAST_PROBES = """
[probe]
connect_seconds = 3.0
pause_seconds = 0.5
patience_seconds = 0.5
"""


def test_a_fault_is_found_within_ten_seconds() -> None:
    """A probe begins at most `pause_seconds` after the previous probe, and each probe takes at most `connect_seconds`."""
    settings = Probing()
    assert settings.connect_seconds + settings.pause_seconds + settings.connect_seconds < 10
    assert settings.patience_seconds + settings.connect_seconds + settings.pause_seconds + settings.connect_seconds < 15


def test_each_degraded_reason_has_its_own_code() -> None:
    assert Reason.OTHER not in CODES_OF_DEGRADED_REASONS.values()
    assert len(set(CODES_OF_DEGRADED_REASONS.values())) == len(DegradedReason)


def test_an_unknown_reason_code_is_read_as_other() -> None:
    assert Reason("invented-later") is Reason.OTHER


@contextmanager
def open_wrong_peers() -> Iterator[dict[str, tuple[str, str | None, Reason]]]:
    """Return by name: an endpoint, a replay endpoint, and the expected reason."""
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())

        def open_socket(kind: int) -> zmq.Socket[bytes]:
            opened = stack.enter_context(context.socket(kind))
            opened.linger = 0
            return opened

        def bind_plain(kind: int) -> str:
            opened = open_socket(kind)
            opened.bind(ANY)
            return last_endpoint(opened)

        def bind_with_curve(kind: int) -> str:
            opened = open_socket(kind)
            opened.curve_publickey, opened.curve_secretkey = zmq.curve_keypair()
            opened.curve_server = True
            opened.bind(ANY)
            return last_endpoint(opened)

        def listen(backlog: int) -> str:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=backlog))
            return f"tcp://127.0.0.1:{server.getsockname()[1]}"

        def fill_backlog() -> str:
            """Return an endpoint with a full backlog, so that the kernel does not answer."""
            endpoint = listen(0)
            for _ in range(4):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(("127.0.0.1", int(endpoint.rpartition(":")[2])))
            return endpoint

        one, two = stack.enter_context(engine(seed=1)), stack.enter_context(engine(seed=2))
        nowhere = stack.enter_context(refuse_connections())
        unknown = "tcp://no-such-host.invalid:5557"
        assert two.replay_endpoint is not None
        yield {
            "swapped": (two.replay_endpoint, two.endpoint, Reason.WRONG_SOCKET),
            "refused": (nowhere, None, Reason.REFUSED),
            "unresolved": (unknown, None, Reason.UNRESOLVED),
            "unanswered": (fill_backlog(), None, Reason.UNANSWERED),
            "silent": (listen(64), None, Reason.UNANSWERED),
            "locked": (bind_with_curve(zmq.PUB), None, Reason.KEYS),
            "replay-is-pub": (bind_plain(zmq.PUB), bind_plain(zmq.PUB), Reason.REPLAY_WRONG_SOCKET),
            "replay-is-the-endpoint": (one.endpoint, one.endpoint, Reason.REPLAY_WRONG_SOCKET),
            "replay-refused": (bind_plain(zmq.PUB), nowhere, Reason.REPLAY_REFUSED),
            "replay-unresolved": (bind_plain(zmq.PUB), unknown, Reason.REPLAY_UNRESOLVED),
            "replay-silent": (bind_plain(zmq.PUB), bind_plain(zmq.ROUTER), Reason.REPLAY_SILENT),
            "replay-locked": (bind_plain(zmq.PUB), bind_with_curve(zmq.ROUTER), Reason.REPLAY_KEYS),
        }


def read_reason_codes(service: Service) -> dict[str, set[str]]:
    """Return the reason codes of each source in `/v1/sources`."""
    return {name: set(each["trust"]["reason_codes"]) for (name, _), each in service.sources().items()}


def test_each_wrong_endpoint_is_reported_in_trust_metrics_and_log(tmp_path: Path) -> None:
    """`/v1/sources` has the code and a sentence, `kvevents_source_reason` has the code, and the log has one warning."""
    with open_wrong_peers() as wrong, serving("--config", write(tmp_path / "c.toml", FAST_PROBES)) as service:
        for name, (endpoint, replay, _) in wrong.items():
            assert service.register(name, endpoint, replay_endpoint=replay).status == 201, name
        wanted = {name: str(reason) for name, (_, _, reason) in wrong.items()}
        wait_for("every reason", lambda: all(reason in read_reason_codes(service)[name] for name, reason in wanted.items()))
        metrics = service.get("/metrics").body.decode()
        for name, (endpoint, replay, reason) in wrong.items():
            state, sentence = service.trust(name)
            assert state in ({"CONNECTING"} if not reason.startswith("replay-") else {"REPLAYING", "DEGRADED"}), name
            assert any(
                f'engine="{name}"' in line and f'reason="{reason}"' in line and line.endswith(" 1.0")
                for line in metrics.splitlines()
            ), name
            if reason is Reason.REPLAY_SILENT:
                assert "the replay endpoint does not answer" in sentence
                continue
            where = replay if reason.startswith("replay-") else endpoint
            assert str(where).removeprefix("tcp://").partition(":")[0] in sentence, name
            assert service.source(name)["fault"] in sentence, name
            service.wait_for_log(rf"WARNING +{name} rank 0: (?!DEGRADED|STALE)")
            assert len(service.log_lines(rf"WARNING +{name} rank 0: (?!DEGRADED|STALE)")) == 1, name


def test_swapped_ports_are_reported_as_swapped(tmp_path: Path) -> None:
    """Trust and log name the ROUTER socket at the event port."""
    with engine() as one, serving("--config", write(tmp_path / "c.toml", FAST_PROBES)) as service:
        assert service.register("a", str(one.replay_endpoint), replay_endpoint=one.endpoint).status == 201
        wait_for("a reason", lambda: "swapped" in service.trust("a")[1])
        assert "ROUTER" in service.trust("a")[1]
        service.wait_for_log("a rank 0: .*ROUTER")
        assert len(service.log_lines("a rank 0: .*ROUTER")) == 1


def test_a_fault_that_has_ended_is_logged_once_and_no_longer_a_reason(tmp_path: Path) -> None:
    port = reserve_port()
    endpoint = f"tcp://127.0.0.1:{port}"
    with serving("--config", write(tmp_path / "c.toml", FAST_PROBES)) as service:
        assert service.register("late", endpoint).status == 201
        wait_for("a reason", lambda: read_reason_codes(service)["late"] >= {"refused"})
        wait_for("one sentence", lambda: service.trust("late")[1] == f"nothing listens at {endpoint}")
        with engine(endpoint=f"tcp://*:{port}", replay_endpoint=None):
            wait_for("a connection", lambda: read_reason_codes(service)["late"] == {"no-replay"})
            # There is one sentence and one line, although the subscriber detects the fault, too.
            wait_for("the log", lambda: service.log_lines("late rank 0: this fault has ended: nothing listens at"))
            assert service.source("late")["fault"] is None
        assert len(service.log_lines("late rank 0: nothing listens")) == 1
        assert not service.log_lines("no connection")


def test_events_report_another_reason_within_one_state(tmp_path: Path) -> None:
    with refuse_connections() as nowhere, serving("--config", write(tmp_path / "c.toml", FAST_PROBES)) as service:
        with EventStream(service) as stream:
            assert service.register("a", nowhere).status == 201
            event = stream.next("state", lambda event: "refused" in event["trust"]["reason_codes"])
        assert event["was"] == "CONNECTING"
        assert event["trust"]["state"] == "CONNECTING"


def test_an_engine_that_never_connects_is_reported(tmp_path: Path) -> None:
    """A service that binds has no endpoint to probe, and an engine might never connect."""
    port = reserve_port()
    table = f'{FAST_PROBES}[[sources]]\ninstance = "a"\nmodel = "{MODEL}"\nbind = true\nendpoint = "tcp://*:{port}"\n'
    with serving("--config", write(tmp_path / "c.toml", table)) as service:
        wait_for("a reason", lambda: read_reason_codes(service).get("a") == {"no-peer", "no-replay"})
        assert "no engine has connected" in service.trust("a")[1]


def test_the_runbook_has_every_reason() -> None:
    """Each code is in the table of docs/operations/runbook.md, with what to do."""
    page = with_generated((ROOT / "docs" / "operations" / "runbook.md").read_text())
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| `")]
    assert [reason for reason in Reason if not any(f"`{reason}`" in codes and advice.strip() for codes, advice in rows)] == []
