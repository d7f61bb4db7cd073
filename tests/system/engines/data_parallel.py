"""A real engine with two data-parallel ranks, which the service finds by the URL of the engine, with their loads."""

from __future__ import annotations

import threading
from random import Random
from typing import Any, Final

import msgspec

from tests.system.engines.models import FIRST_TOKEN, VOCABULARY
from tests.system.engines.server import BLOCK_SIZE, MAX_LENGTH, Engine, wait_until
from tests.system.engines.service import Service
from tests.system.engines.stage import HEARTBEAT_SECONDS, PLUGIN, Stage
from tests.system.engines.traffic import Prompt

RANKS: Final = 2
PROMPTS: Final = 20
BLOCKS: Final = 96
_PROMPT_BLOCKS: Final = range(1, 8)
_SETTLE_SECONDS: Final = 15.0


class RankResult(msgspec.Struct):
    """State of one rank in the service."""

    rank: int
    endpoint: str
    replay_endpoint: str | None
    blocks: int
    state: str
    is_attested: bool
    load: dict[str, Any] | None
    """The newest reading of the engine's load."""
    has_running: bool = False
    """Whether the load showed a running request only for this rank while only this rank had a request."""


class RanksResult(msgspec.Struct):
    """Result of one engine with several ranks."""

    requests: int = 0
    wrong: int = 0
    """Requests for which a rank had cached another number of tokens than the service had predicted."""
    ranks: list[RankResult] = []
    faults: list[str] = []

    @property
    def is_right(self) -> bool:
        return not self.wrong and not self.faults


def run_ranks(stage: Stage) -> RanksResult:
    """Send each prompt twice to one rank, and then to the other rank. Before each request, compare both ranks with the
    service."""
    found = RanksResult()
    draw = Random("ranks")
    with (
        stage.engine(PLUGIN, "llama", BLOCKS, ranks=RANKS) as engine,
        Service(engine.url, engine.settings.folder) as service,
    ):
        wait_until(lambda: len(service.sources()) == RANKS, _SETTLE_SECONDS)
        for _ in range(PROMPTS):
            length = draw.choice(_PROMPT_BLOCKS) * BLOCK_SIZE + 1  # the last token is computed again
            prompt = Prompt([draw.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(length)], 1)
            first = draw.randrange(RANKS)
            cached_tokens = dict.fromkeys(range(RANKS), 0)
            for rank in (first, first, 1 - first):
                if not wait_until(lambda: predict_ranks(service, prompt) == cached_tokens, _SETTLE_SECONDS):  # noqa: B023
                    found.faults.append(
                        f"the service predicts {predict_ranks(service, prompt)} for ranks that hold {cached_tokens}"
                    )
                predicted = predict_ranks(service, prompt).get(rank)
                cached = engine.complete(prompt, rank).cached
                found.requests += 1
                found.wrong += predicted != cached
                cached_tokens[rank] = length - 1
        await_attestations(service)
        running = [keep_busy(engine, service, rank) for rank in range(RANKS)]
        found.ranks = [to_rank_result(source) for source in sorted(service.sources(), key=lambda each: each["rank"])]
        for each in found.ranks:
            each.has_running = running[each.rank]
        found.faults += _check_ranks(engine, found.ranks)
    return found


def predict_ranks(service: Service, prompt: Prompt) -> dict[int, int]:
    """Return the predicted tokens of each rank that is EXACT."""
    workers = service.match(prompt)
    return {worker["rank"]: worker["tokens"] for worker in workers if worker["trust"]["state"] == "EXACT"}


def await_attestations(service: Service) -> None:
    """Wait until heartbeats have attested all ranks, and the load has been polled."""

    def is_complete() -> bool:
        return all(each["trust"]["attested"] and each["load"] is not None for each in service.sources())

    wait_until(is_complete, 5 * HEARTBEAT_SECONDS)


def keep_busy(engine: Engine, service: Service, rank: int) -> bool:
    """Keep one rank busy until the service shows that only this rank is. Return False if it does not."""
    is_shown = threading.Event()

    def send() -> None:
        while not is_shown.is_set():
            engine.complete(Prompt([FIRST_TOKEN] * BLOCK_SIZE, MAX_LENGTH - BLOCK_SIZE - 1), rank)

    def is_running() -> bool:
        loads = {each["rank"]: each["load"] for each in service.sources()}
        return all(load is not None and load["running"] == (each == rank) for each, load in loads.items())

    sender = threading.Thread(target=send, name="busy rank", daemon=True)
    sender.start()
    found = wait_until(is_running, _SETTLE_SECONDS)
    is_shown.set()
    sender.join(_SETTLE_SECONDS)
    return found


def to_rank_result(source: dict[str, Any]) -> RankResult:
    """Return the checked part of an entry of `/v1/sources`."""
    trust, names = source["trust"], ("rank", "endpoint", "replay_endpoint", "blocks", "load")
    return RankResult(state=trust["state"], is_attested=trust["attested"], **{name: source[name] for name in names})


def _check_ranks(engine: Engine, ranks: list[RankResult]) -> list[str]:
    """Return what is wrong with the ranks at the end. Each must have its own ports, blocks, attestation and load."""
    faults = []
    if [each.rank for each in ranks] != list(range(RANKS)):
        faults.append(f"the service has the ranks {[each.rank for each in ranks]}")
    for each in ranks:
        expected = tuple(f"tcp://127.0.0.1:{port + each.rank}" for port in engine.ports)
        if (each.endpoint, each.replay_endpoint) != expected:
            faults.append(f"rank {each.rank} is at {each.endpoint} and {each.replay_endpoint} in place of {expected}")
        if not each.blocks or each.state != "EXACT" or not each.is_attested:
            faults.append(f"rank {each.rank} has {each.blocks} blocks, is {each.state}, attested: {each.is_attested}")
        if each.load is None:
            faults.append(f"the load of rank {each.rank} is unknown")
        if not each.has_running:
            faults.append(f"the load did not show the request of rank {each.rank}")
    return faults
