"""The life of a registration: leases, who owns a registration, and how contradictions heal."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest

from cli_cases import refuse_connections
from discovery_fetch_cases import Engine as ApiServer
from service_cases import MODEL, engine, engines, prompt, serving, wait_for, write
from tools.ports import reserve_port


def test_an_engine_that_never_connected_is_hidden_like_one_that_has_left(tmp_path: Path) -> None:
    """Clients of the indexer API might ignore trust. `/v1` shows it still."""
    config = write(tmp_path / "c.toml", "hide_stale_seconds = 1\n")
    with engine() as made, refuse_connections() as nowhere, serving("--config", config) as service:
        assert service.register("e", made.publisher).status == 201
        service.exact("e")

        def is_shown_at_first() -> bool:
            service.post("/unregister", instance_id="never")
            assert service.register("never", nowhere).status == 201
            shown = service.query([1])["instances"].get("never")
            return shown is not None and shown["trust"] == {"0": "CONNECTING"}

        wait_for("never to be shown", is_shown_at_first)
        wait_for("never to be hidden", lambda: "never" not in service.query([1])["instances"])
        matched = service.post("/v1/match", model="m", tokens=[1]).json["workers"]
        assert {worker["instance"]: worker["trust"]["state"] for worker in matched} == {"e": "EXACT", "never": "CONNECTING"}


# --- leases


def test_a_registration_ends_with_its_lease(tmp_path: Path) -> None:
    """The rank and its blocks are gone, the audit log says why, and the file of registrations does not have it any more."""
    with engine() as made, serving("--state-dir", tmp_path) as service:
        began = time.time()
        assert service.register("e", made.publisher, lease_seconds=600).status == 201
        made.store(prompt(1))
        assert began + 599 < service.exact("e", blocks=4)["lease_expires_at"] < time.time() + 601
        began = time.monotonic()
        assert service.register("e", made.publisher, lease_seconds=2).status == 200
        wait_for("the end of the lease", lambda: not service.sources())
        assert time.monotonic() >= began + 2
        service.wait_for_log("unregistered e rank 0 of tenant default: its lease of 2 s ended")
        assert b"kvevents_ended_leases_total 1" in service.get("/metrics").body
        wait_for("no blocks", lambda: service.get("/v1/stats").json["blocks"] == 0)
        assert service.register("e", made.publisher).status == 201
        assert service.exact("e", blocks=4)["lease_expires_at"] is None
        assert service.post("/unregister", instance_id="e").status == 200
        service.kill()
        with serving("--state-dir", tmp_path) as again:
            assert not again.sources()


def test_an_equal_registration_renews_the_lease_and_changes_its_length() -> None:
    with refuse_connections() as nowhere, serving() as service:
        assert service.register("e", nowhere, lease_seconds=600).status == 201
        first_end = service.source("e")["lease_expires_at"]

        def is_renewed() -> bool:
            assert service.register("e", nowhere, lease_seconds=600).status == 200
            return bool(service.source("e")["lease_expires_at"] > first_end)

        wait_for("a later end", is_renewed)
        assert service.register("e", nowhere, lease_seconds=3).status == 200
        assert service.register("e", nowhere, lease_seconds=3600).status == 200
        # This lease ends later than the replaced lease of three seconds would have ended.
        assert service.register("later", nowhere, lease_seconds=3).status == 201
        wait_for("the end of a later lease", lambda: ("later", 0) not in service.sources())
        assert service.source("e")["lease_expires_at"] > time.time() + 3000
        assert service.register("e", nowhere).status == 200
        assert service.source("e")["lease_expires_at"] is None
        assert service.register("e", nowhere, lease_seconds=1).status == 200
        wait_for("the end of the lease", lambda: not service.sources())


def test_a_lease_survives_a_restart_and_begins_again(tmp_path: Path) -> None:
    with refuse_connections() as nowhere:
        with serving("--state-dir", tmp_path) as service:
            assert service.register("e", nowhere, lease_seconds=600).status == 201
            assert service.register("e", nowhere, lease_seconds=2).status == 200
            service.kill()
        began = time.monotonic()
        with serving("--state-dir", tmp_path) as service:
            service.wait_for_log("unregistered e rank 0 of tenant default: its lease of 2 s ended")
            assert time.monotonic() >= began + 2
            wait_for("the end of the registration", lambda: not service.sources())


@pytest.mark.parametrize("seconds", [0, -1, 1.5, "30", 604_801, True])
def test_an_invalid_lease_is_422(seconds: object) -> None:
    with serving() as service:
        answer = service.register("e", "tcp://127.0.0.1:1", lease_seconds=seconds)
        assert (answer.status, answer.reason) == (422, "bad-shape")
        assert "lease_seconds" in answer.json["detail"]


# --- engines that discovery finds and clients register


def name_engines(path: Path, **endpoints: str) -> Path:
    """Write a file that names one engine for each endpoint, and return its path."""
    tables = [
        f'[[sources]]\ninstance = "{name}"\nmodel = "m"\nblock_size = 16\nendpoint = "{at}"\n' for name, at in endpoints.items()
    ]
    return write(path, "\n".join(tables) or "sources = []\n")


def test_an_engine_that_discovery_names_cannot_be_unregistered(tmp_path: Path) -> None:
    """Discovery would register the engine again at once. When the provider no longer names the engine, the engine leaves."""
    with refuse_connections() as nowhere, refuse_connections() as other:
        path = name_engines(tmp_path / "fleet.toml", e=nowhere)
        with serving("--sources", path) as service:
            wait_for("the engine", service.sources)
            answer = service.post("/unregister", instance_id="e")
            assert (answer.status, answer.reason) == (409, "named-by-discovery")
            assert answer.json["detail"] == f"e rank 0 was found by file {path}"
            assert service.register("e", nowhere, 1).status == 201
            assert service.post("/unregister", instance_id="e").reason == "named-by-discovery"
            assert list(service.sources()) == [("e", 0), ("e", 1)]
            assert service.post("/unregister", instance_id="e", dp_rank=1).status == 200
            name_engines(path, other=other)
            wait_for("the change", lambda: list(service.sources()) == [("other", 0)])
            assert service.post("/unregister", instance_id="e").reason == "not-registered"


def test_who_registers_what_discovery_names_learns_who_owns_it(tmp_path: Path) -> None:
    with refuse_connections() as nowhere:
        path = name_engines(tmp_path / "fleet.toml", e=nowhere)
        with serving("--sources", path, "--state-dir", tmp_path / "state") as service:
            wait_for("the engine", service.sources)
            answer = service.register("e", nowhere, lease_seconds=1)
            warning = f"e rank 0 was found by file {path}, which alone can unregister it"
            assert (answer.status, answer.json) == (200, {"status": "ok", "warnings": [warning]})
            assert service.source("e")["lease_expires_at"] is None
            answer = service.register("e", nowhere, topic="t")
            assert (answer.status, answer.reason) == (409, "named-by-discovery")
            assert answer.json["detail"] == f"e rank 0 was found by file {path}, with a different topic"
            assert service.source("e")["origin"] == "discovery"


def test_an_engine_under_two_names_is_a_warning() -> None:
    """Ranks of one instance, and other scopes and topics, are no second name."""
    with refuse_connections() as nowhere, serving() as service:
        assert service.register("e", nowhere).json == {"status": "ok"}
        assert "warnings" not in service.register("f", nowhere, topic="t").json
        assert "warnings" not in service.register("g", nowhere, model_name="other").json
        assert "warnings" not in service.register("e", nowhere, rank=1).json
        warning = "e rank 0 has the same endpoint and topic: one engine counts as two, and is chosen twice as often"
        assert service.register("h", nowhere).json["warnings"] == [warning]


def test_discovery_takes_over_an_equal_registration_of_a_client(tmp_path: Path) -> None:
    """The stream and its blocks stay, the lease has no effect any more, and it ends when the provider does not name it."""
    state = tmp_path / "state"
    with engine(replay_endpoint=None) as made:
        path = name_engines(tmp_path / "fleet.toml")
        with serving("--sources", path, "--state-dir", state) as service:
            assert service.register("e", made.publisher, lease_seconds=600).status == 201
            wait_for("the subscription", lambda: made.publisher.stats().subscribers)
            made.store(prompt(1))
            service.wait_for_prefix("e", prompt(1))
            name_engines(path, e=made.endpoint)
            wait_for("the new owner", lambda: service.source("e")["origin"] == "discovery")
            assert service.held(prompt(1)) == {"e": 64}
            assert service.get("/v1/sources").json["faults"] == {}
            assert service.source("e")["lease_expires_at"] is None
            assert service.end().code == 0
        with serving("--sources", path, "--state-dir", state) as service:
            wait_for("the engine", service.sources)
            assert service.source("e")["origin"] == "discovery"
            name_engines(path)
            wait_for("its end", lambda: not service.sources())


def test_a_contradiction_of_discovery_and_a_client_heals(tmp_path: Path) -> None:
    """The fault names the owner, the log has it once, and the provider's engine is followed once the other is unregistered."""
    with refuse_connections() as nowhere, refuse_connections() as other:
        path = name_engines(tmp_path / "fleet.toml")
        with serving("--sources", path) as service:
            assert service.register("e", other).status == 201
            name_engines(path, e=nowhere)
            fault = "e rank 0 is registered over HTTP already, with another endpoint; unregister it first"
            wait_for("the fault", lambda: service.get("/v1/sources").json["faults"] == {"fleet": [fault]})
            assert service.source("e")["endpoint"] == other
            assert service.post("/unregister", instance_id="e").status == 200
            wait_for("the engine", lambda: service.sources().get(("e", 0), {}).get("endpoint") == nowhere)
            wait_for("no fault", lambda: not service.get("/v1/sources").json["faults"])
            service.wait_for_log(f"this fault has ended: {fault}")
            assert len(service.log_lines(f"WARNING.*{fault}")) == 1


def test_an_engine_whose_port_becomes_free_is_followed(tmp_path: Path) -> None:
    """A bound endpoint that is in use is tried again, and the log has the fault once."""
    with socket.create_server(("127.0.0.1", reserve_port())) as blocker:
        at = f"tcp://127.0.0.1:{blocker.getsockname()[1]}"
        text = f'[[sources]]\ninstance = "e"\nmodel = "m"\nbind = true\nendpoint = "{at}"\n'
        with serving("--sources", write(tmp_path / "fleet.toml", text)) as service:
            service.wait_for_log(f"cannot follow e rank 0: .*{at}")
            wait_for("the fault", lambda: service.get("/v1/sources").json["faults"].get("fleet"))
            blocker.close()
            service.wait_for_log(f"e rank 0: following {at}")
            wait_for("no fault", lambda: not service.get("/v1/sources").json["faults"])
            assert len(service.log_lines("cannot follow")) == 1


def test_an_engine_is_registered_by_its_url() -> None:
    """The engine names model and endpoints of all its ranks, and one request registers them with its URL."""
    with engines(2) as made, serving() as service:
        pages: dict[str, Any] = {
            "/kv_event_sources": {
                str(rank): {"publisher": "zmq", "endpoint": one.endpoint, "replay_endpoint": one.replay_endpoint, "topic": ""}
                for rank, one in enumerate(made)
            },
            "/v1/models": {"data": [{"id": MODEL}]},
        }
        with ApiServer(pages) as server:
            body = {"instance_id": "e", "url": server.url, "labels": {"role": "prefill"}}
            answer = service.post("/register", body)
            assert (answer.status, answer.json) == (201, {"status": "ok", "ranks": [0, 1]})
            for rank in (0, 1):
                source = service.exact("e", rank)
                assert (source["url"], source["labels"], source["model"]) == (server.url, {"role": "prefill"}, MODEL)
            assert service.post("/register", body).status == 200
            other = service.post("/register", {"instance_id": "f", "url": server.url, "dp_rank": 7})
            assert (other.status, other.json["reason"]) == (400, "no-events")
        assert service.post("/unregister", {"instance_id": "e"}).status == 200
        gone = service.post("/register", {"instance_id": "e", "url": server.url})
        assert (gone.status, gone.json["reason"]) == (503, "engine-silent")
        refused = service.post("/register", {"instance_id": "e", "url": "http://169.254.169.254"})
        assert (refused.status, refused.json["reason"]) == (400, "endpoint-refused")
        assert service.post("/register", {"instance_id": "e", "model_name": MODEL}).json["reason"] == "bad-shape"
