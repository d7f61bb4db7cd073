"""Scenarios of the newest vLLM in the dialect of another release, so that every fault can be played with every release."""

from __future__ import annotations

from typing import Any

import msgspec

from kvevents.conform.scenario import Publish, Scenario
from kvevents.conform.scripted_engine import payload_of
from kvevents.wire import Dialect, decode_batch, encode_batch

DEFAULT_MEDIUM = "GPU"
"""The medium of events that name none."""


def in_dialect(scenario: Scenario, dialect: Dialect) -> Scenario | None:
    """Return the scenario with the batches and replies of a release. Return None if the release cannot express the scenario.

    Payloads that are not batches stay as they are.
    """
    steps = [_step(step, dialect) if isinstance(step, Publish) else step for step in scenario.steps]
    if None in steps:
        return None
    shape = "topic" if dialect.has_replay_topic else "no-topic"
    engines = {
        name: msgspec.structs.replace(engine, reply_shape=shape if engine.reply_shape == "topic" else engine.reply_shape)
        for name, engine in scenario.engines.items()
    }
    return msgspec.structs.replace(scenario, name=f"{scenario.name}.{dialect}", steps=steps, engines=engines)


def _step(step: Publish, dialect: Dialect) -> Publish | None:
    if step.batch is None:
        return step
    original = decode_batch(payload_of(step))
    if original.rejected:
        return None
    payload = encode_batch(original.batch, dialect)
    if _facts(payload) != _facts(payload_of(step)):
        return None
    return msgspec.structs.replace(step, batch=None, payload=payload.hex())


def _facts(payload: bytes) -> list[dict[str, Any]]:
    """Return the content of a batch's events, in a form that does not depend on the dialect."""
    events = [msgspec.to_builtins(event) for event in decode_batch(payload).batch.events]
    for event in events:
        event["medium"] = event.get("medium") or DEFAULT_MEDIUM
    return events
