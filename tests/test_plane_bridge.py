"""Bridges on a real NATS server: the log has what the engines said, whoever writes it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nats_servers import NatsServer, nats_server, needs_nats
from plane_cases import Log, bridging, plane_at, watch
from publisher_cases import ANY, batch, publishing

pytestmark = needs_nats


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with nats_server(tmp_path_factory.mktemp("nats")) as found:
        yield found


def test_the_log_has_every_batch_once_and_in_order(server: NatsServer) -> None:
    plane = plane_at(server.url, name="once")
    with publishing(replay_endpoint=ANY) as publisher, bridging(plane, watch(publisher)) as bridge:
        for number in range(500):
            publisher.publish(batch(number))
        log = Log(plane).until("all batches", lambda log: len(log.numbers()) == 500)
        assert log.numbers() == list(range(500))
        assert log.flaws == (0, 0)
        assert bridge.status().written == 500
        assert len(log.pages) < 500
        log.until(
            "trust",
            lambda log: (
                {told.trust for told in log.ledgers[log.layout.lane_of("engine")].streams["engine", 0].told.values()}
                == {"EXACT"}
            ),
        )
