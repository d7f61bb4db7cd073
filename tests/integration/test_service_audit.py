"""The audit log: which caller changed what, and which requests were refused."""

from __future__ import annotations

import logging
import re
from functools import partial
from pathlib import Path

import pytest

from kvevents.service.access import LOGGED_REFUSALS_PER_SECOND, AuditLog
from kvevents.testing import VirtualClock
from service_cases import Client, serving, wait_for, write

TOKENS = {"reader": ("read", "reader-0123456789"), "deployer": ("register", "deployer-0123456789")}


def test_changes_and_refusals_are_logged_with_the_name_of_the_token(tmp_path: Path) -> None:
    """Each line has the caller, its address and the action, and never a token."""
    rows = "".join(
        f'[[access.tokens]]\nname = "{name}"\nrole = "{role}"\ntoken = "{token}"\n' for name, (role, token) in TOKENS.items()
    )
    body = {"instance_id": 7, "endpoint": "tcp://127.0.0.1:9", "model_name": "m", "block_size": 16}
    with serving("--config", write(tmp_path / "service.toml", rows)) as service:
        clients = [
            Client(service.url, token) for token in (TOKENS["deployer"][1], TOKENS["reader"][1], "stranger-0123456789", None)
        ]
        answers = [client.post("/register", body) for client in clients]
        assert [answer.status for answer in answers] == [201, 403, 401, 401]
        assert clients[0].post("/unregister", instance_id=7).status == 200
        assert clients[2].post("/query", model="m", token_ids=[1]).status == 401
        where = r"127\.0\.0\.1:\d+"
        for line in (
            rf"deployer client={where} registered 7 rank 0 of tenant default at tcp://127\.0\.0\.1:9",
            rf"deployer client={where} unregistered 7 rank 0 of tenant default",
            rf"refused POST /register by reader client={where}: this token does not have the required role",
            rf"refused POST /register by unknown token client={where}: unknown token",
            rf"refused POST /register by anonymous client={where}: a token is required",
            rf"refused POST /query by unknown token client={where}: unknown token",
        ):
            wait_for(line, partial(service.log_lines, line))
            assert len(service.log_lines(line)) == 1
        assert not service.log_lines("0123456789")
        for client in clients:
            client.close()


def test_refused_requests_cannot_fill_the_disk(caplog: pytest.LogCaptureFixture) -> None:
    """A limited number of refused requests is logged per second, and the next line counts the requests that were not logged."""
    clock = VirtualClock(1000)
    audit = AuditLog(clock)
    with caplog.at_level(logging.INFO):
        for _ in range(3 * LOGGED_REFUSALS_PER_SECOND):
            audit.log_refusal("GET /dump", caller="anonymous", peer="10.0.0.1:1", reason="a token is required")
        assert len(caplog.records) == LOGGED_REFUSALS_PER_SECOND
        clock.advance(1)
        audit.log_refusal("GET /dump", caller="anonymous", peer="10.0.0.1:1", reason="a token is required")
    assert [record.message for record in caplog.records[LOGGED_REFUSALS_PER_SECOND:]] == [
        f"{2 * LOGGED_REFUSALS_PER_SECOND} more refused requests were not logged",
        "refused GET /dump by anonymous client=10.0.0.1:1: a token is required",
    ]


def test_refused_registrations_are_logged() -> None:
    """A client that probes the network through the service leaves a trace. A request cannot write lines of its own."""
    body = {"instance_id": 7, "model_name": "m", "block_size": 16}
    with serving() as service:
        refused = {
            "tcp://169.254.169.254:80": "169.254.169.254 is a link-local address, where clouds have metadata services",
            "tcp://8.8.8.8:80": "no pattern of the allow-list covers it",
            "tcp://x\nrefused": r"invalid endpoint 'tcp://x\nrefused'",
        }
        for endpoint, why in refused.items():
            assert service.post("/register", body | {"endpoint": endpoint}).status == 400
            service.wait_for_log(rf"WARNING.*refused POST /register by anonymous client=127\.0\.0\.1:\d+: .*{re.escape(why)}")
        load = "http://127.0.0.1:1/unregister"
        answer = service.post("/register", body | {"endpoint": "tcp://127.0.0.1:9", "load": load})
        assert (answer.status, answer.reason) == (400, "endpoint-refused")
        service.wait_for_log(f"refused POST /register by anonymous .*{load}' is refused: no load is read at this path")
        assert service.post("/unregister", instance_id=8).status == 404
        service.wait_for_log("refused POST /unregister by anonymous .*instance 8 not found")
        assert service.post("/query", model_name="absent", token_ids=[1]).status == 404
        assert len(service.log_lines("refused")) == 5
