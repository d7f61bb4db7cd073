"""A shared system prompt draws requests to one engine; a choice that is safe under load spreads them, and keeps the hits."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import pytest

from service_cases import BLOCK, MODEL, Service, engines, serving

LENGTH = 512
REQUESTS = 50
"""For each engine."""
IN_FLIGHT = 10
"""For each engine."""


@pytest.mark.parametrize("loads", ["given", "unknown", "reserved"])
@pytest.mark.parametrize("share", [0.12, 0.75])
@pytest.mark.parametrize("count", [4, 16])
def test_a_shared_system_prompt_spreads_over_all_engines(count: int, share: float, loads: str) -> None:
    """The busiest has at most 1.5 times the mean, and the hits are at least 0.95 of the most that this bound allows."""
    shared = int(LENGTH * share) // BLOCK * BLOCK
    with engines(count) as made, serving() as service:
        for number, one in enumerate(made):
            service.register(number, one.publisher)
            one.store([9_000 + place for place in range(BLOCK)])
        for number in range(count):
            service.exact(number, blocks=1)
        chosen, hits = _send(service, made, shared, loads)
    busiest = max(chosen.values()) / REQUESTS
    fewest_engines = -(-count * 2 // 3)
    most_hits = shared * (REQUESTS * count - fewest_engines)
    print(f"{count} engines, {share:.0%}, {loads}: busiest {busiest:.2f} of the mean, hits {hits / most_hits:.3f} of the most")
    assert busiest <= 1.5
    assert hits >= 0.95 * most_hits


def _send(service: Service, made: list[Any], shared: int, loads: str) -> tuple[Counter[int], int]:
    """Select engines for all requests. Return how many each got, and how many tokens were cached."""
    system, chosen, hits = list(range(shared)), Counter[int](), 0
    in_flight = deque[tuple[int, str]]()
    load: Counter[int] = Counter()
    for request in range(REQUESTS * len(made)):
        if len(in_flight) == IN_FLIGHT * len(made):
            ended, reservation = in_flight.popleft()
            load[ended] -= 1
            if reservation:
                assert service.ask("DELETE", f"/v1/reservations/{reservation}").status == 200
        own = [1_000_000 + request * LENGTH + place for place in range(LENGTH - shared)]
        body: dict[str, Any] = {"model": MODEL, "tokens": system + own, "reserve": loads == "reserved"}
        if loads == "given":
            body["candidates"] = [{"instance": str(number), "load": load[number]} for number in range(len(made))]
        answer = service.post("/v1/select", body).json
        number = int(answer["instance"])
        if number in chosen:
            hits += shared
        else:
            made[number].store(system)
        reservation = answer["reservation"]["id"] if answer["reservation"] else ""
        if reservation and request % 3 == 0:
            service.post(f"/v1/reservations/{reservation}", first_token=True)
        chosen[number] += 1
        load[number] += 1
        in_flight.append((number, reservation))
    return chosen, hits
