"""Entries of the bucket whose entries expire: what bridges and replicas say of themselves."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kvevents.errors import PlaneError
from kvevents.plane.faults import told
from kvevents.plane.layout import Layout

if TYPE_CHECKING:
    from nats.js import JetStreamContext

ANSWER_SECONDS: Final = 5.0
"""For all of them to be read."""


async def entries(js: JetStreamContext, layout: Layout, what: str, prefix: str = "") -> dict[str, bytes]:
    """Those whose keys begin with `prefix`, by what follows it; `what` says what for. Raises `PlaneError`.

    The servers are asked for their subjects, and then for each. nats-py's `KeyValue.keys` makes a consumer, and waits for ever
    where the last entry of its list is written anew meanwhile.
    """
    from nats.js.errors import KeyNotFoundError  # noqa: PLC0415 - an extra

    begin = f"$KV.{layout.leases}.{prefix}"
    found: dict[str, bytes] = {}
    try:
        with told(what):
            async with asyncio.timeout(ANSWER_SECONDS):
                bucket = await js.key_value(layout.leases)
                info = await js.stream_info(f"KV_{layout.leases}", subjects_filter=f"{begin}>")
                for subject in info.state.subjects or {}:
                    name = subject.removeprefix(begin)
                    with suppress(KeyNotFoundError):  # it was deleted, or has expired
                        found[name] = (await bucket.get(prefix + name)).value or b""
    except TimeoutError as error:
        raise PlaneError(f"{what}: no answer in {ANSWER_SECONDS:g} s; look at the servers' load", fault="timeout") from error
    return found
