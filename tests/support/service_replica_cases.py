"""Watches of engines for replicas of the service."""

from __future__ import annotations

from typing import Any

import msgspec

from kvevents.service.fleet.registration import Registration
from kvevents_plane.bridge import Watch
from service_cases import MODEL, Engine


def watch_of(instance: str, found: Engine, **more: Any) -> Watch:
    registration = Registration(
        instance=instance,
        endpoint=found.publisher.endpoint,
        replay_endpoint=found.publisher.replay_endpoint,
        model=MODEL,
        **more,
    )
    return Watch(registration.source(), msgspec.json.encode(registration))
