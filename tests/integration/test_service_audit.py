"""The audit log: which caller changed what, and which requests were refused."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import pytest

from kvevents.service.access import REFUSALS_PER_SECOND, AuditLog
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
            rf"deployer from {where} registered 7 rank 0 of tenant default at tcp://127\.0\.0\.1:9",
            rf"deployer from {where} unregistered 7 rank 0 of tenant default",
            rf"refused POST /register of reader from {where}: this token does not have the required role",
            rf"refused POST /register of unknown token from {where}: unknown token",
            rf"refused POST /register of no token from {where}: a token is required",
            rf"refused POST /query of unknown token from {where}: unknown token",
        ):
            wait_for(line, partial(service.log_lines, line))
            assert len(service.log_lines(line)) == 1
        assert not service.log_lines("0123456789")
        for client in clients:
            client.close()


def test_refused_requests_cannot_fill_the_disk(caplog: pytest.LogCaptureFixture) -> None:
    """A limited number of each second is logged, and the next line counts the others."""
    clock = VirtualClock(1000)
    audit = AuditLog(clock)
    with caplog.at_level(logging.INFO):
        for _ in range(3 * REFUSALS_PER_SECOND):
            audit.log_refusal("GET /dump", caller="no token", peer="10.0.0.1:1", reason="a token is required")
        assert len(caplog.records) == REFUSALS_PER_SECOND
        clock.advance(1)
        audit.log_refusal("GET /dump", caller="no token", peer="10.0.0.1:1", reason="a token is required")
    assert [record.message for record in caplog.records[REFUSALS_PER_SECOND:]] == [
        f"{2 * REFUSALS_PER_SECOND} more refused requests were not logged",
        "refused GET /dump of no token from 10.0.0.1:1: a token is required",
    ]
