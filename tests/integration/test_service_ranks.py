"""A service whose engine sends several ranks in one stream, as a relay does: each rank has its own blocks and answers."""

from __future__ import annotations

import re
from pathlib import Path
from time import time
from typing import Any

import msgspec

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from service_cases import BLOCK, Engine, Service, engine, escape, prompt, serving, wait_for

FIRST, SECOND = prompt(1), prompt(900)


def publish(made: Engine, rank: int | None, *events: Any) -> None:
    made.publisher.publish(KVEventBatch(time(), list(events), rank))


def stored(tokens: list[int]) -> BlockStored:
    return BlockStored(list(range(1, 1 + len(tokens) // BLOCK)), None, tokens, BLOCK, medium="GPU")


def answers(service: Service, tokens: list[int]) -> list[dict[str, int]]:
    """Return the tokens of each rank by the native server, by Python, and by `/v1/match`."""
    body = msgspec.json.encode({"model_name": "m", "token_ids": tokens, "whole_prompt": True})
    bodies = [service.ask("POST", path, body, content_type="application/json").json for path in ("/query", escape("/query"))]
    found = [each["instances"].get("pod", {"dp": {}})["dp"] for each in bodies]
    rows = service.post("/v1/match", model="m", tokens=tokens, whole_prompt=True).json["workers"]
    found.append({str(row["rank"]): row["tokens"] for row in rows})
    return [{rank: count for rank, count in each.items() if count} for each in found]


def wait_for_ranks(service: Service, tokens: list[int], expected: dict[str, int]) -> None:
    wait_for(f"{expected} of {answers(service, tokens)}", lambda: answers(service, tokens) == [expected] * 3)


def test_each_rank_of_a_stream_has_its_own_answers(tmp_path: Path) -> None:
    with engine() as made:
        with serving("--state-dir", tmp_path, "--snapshot-seconds", "0.2") as service:
            assert service.register("pod", made.publisher).status == 201
            publish(made, 2, stored(FIRST))
            wait_for_ranks(service, FIRST, {"0": 64})
            publish(made, 1, stored(FIRST), stored(SECOND))
            wait_for_ranks(service, FIRST, {"1": 64, "2": 64})
            wait_for_ranks(service, SECOND, {"1": 64})
            service.exact("pod", 1, blocks=8)
            service.exact("pod", 2, blocks=4)
            wait_for("equal trust", lambda: service.source("pod", 2)["trust"] == service.source("pod")["trust"])
            assert len(service.keys("pod", 1)) == 8
            chosen = service.post("/v1/select", model="m", tokens=SECOND).json
            assert (chosen["instance"], chosen["rank"]) == ("pod", 1)
            publish(made, 2, BlockRemoved([1, 2, 3, 4], medium="GPU"))
            wait_for_ranks(service, FIRST, {"1": 64})
            publish(made, 2, stored(FIRST))
            wait_for_ranks(service, FIRST, {"1": 64, "2": 64})
            metrics = service.get("/metrics").body.decode()
            assert re.search(r'kvevents_source_blocks\{engine="pod",.*rank="1"', metrics)
            known = time()
            wait_for("a snapshot", lambda: (service.get("/v1/stats").json["snapshot_at"] or 0.0) > known)
            service.kill()
        publish(made, 1, AllBlocksCleared())
        with serving("--state-dir", tmp_path) as service:
            wait_for_ranks(service, FIRST, {"2": 64})
            wait_for_ranks(service, SECOND, {})
            service.exact("pod", 2, blocks=4)
            assert service.source("pod")["resets"] == 0
            assert service.post("/unregister", instance_id="pod", model_name="m").status == 200
            assert service.sources() == {}


def test_a_rank_that_is_registered_takes_no_blocks_from_another_stream() -> None:
    with engine(seed=1) as merged, engine(seed=2) as own, serving() as service:
        service.register("pod", merged.publisher)
        publish(merged, 0, stored(FIRST))
        publish(merged, 1, stored(FIRST))
        wait_for_ranks(service, FIRST, {"0": 64, "1": 64})
        service.register("pod", own.publisher, rank=1)
        publish(own, 1, stored(SECOND))
        wait_for_ranks(service, SECOND, {"1": 64})
        publish(merged, 1, BlockRemoved([1, 2, 3, 4], medium="GPU"))
        wait_for("the fault", lambda: "set-aside" in service.source("pod")["trust"]["reason_codes"])
        wait_for_ranks(service, SECOND, {"1": 64})
        wait_for_ranks(service, FIRST, {"0": 64})


def test_a_rank_of_another_rank_s_stream_is_drained_with_that_rank() -> None:
    """The answer names the rank that can be drained. The listing shows both as drained."""
    with engine() as made, serving() as service:
        assert service.register("pod", made.publisher).status == 201
        for rank in (0, 1):
            publish(made, rank, stored(FIRST))
        wait_for_ranks(service, FIRST, {"0": 64, "1": 64})
        answer = service.post("/v1/drain", instance="pod", rank=1)
        assert answer.status == 404
        assert "pod rank 1 not found: it changes with pod rank 0, which has its events" in answer.json["detail"]
        assert service.post("/v1/drain", instance="pod", rank=0).json["ranks"] == [0]
        wait_for("both ranks", lambda: all(service.source("pod", rank)["draining"] for rank in (0, 1)))
