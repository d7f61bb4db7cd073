"""Integration tests leave no publisher behind, also if they fail: its threads and its context would end in another test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvevents.publisher import base


@pytest.fixture(autouse=True)
def _shut_down_publishers() -> Iterator[None]:
    """Shut down the publishers that a test has created and, because it failed, has not shut down."""
    before = base.open_publishers.copy()
    yield
    for publisher in base.open_publishers - before:
        publisher.close()
