"""`python -m kvevents.conform.line_publisher ENDPOINT REPLAY_ENDPOINT BUFFER_STEPS`: publishes what the referee gives it.

Each line of stdin is a batch as JSON. At the end of the input the publisher sends what it has, and the process ends.
"""

from __future__ import annotations

import sys
import time
from typing import Final

import msgspec

from kvevents.events import KVEvent, KVEventBatch
from kvevents.publisher import ZmqEventPublisher

SHUTDOWN_SECONDS: Final = 5.0


class Line(msgspec.Struct):
    """A batch."""

    events: list[KVEvent]


def main(arguments: list[str]) -> int:
    """Publish stdin."""
    endpoint, replay_endpoint, buffer_steps = arguments
    publisher = ZmqEventPublisher(endpoint=endpoint, replay_endpoint=replay_endpoint, buffer_steps=int(buffer_steps), bind=True)
    decode = msgspec.json.Decoder(Line).decode
    for line in sys.stdin.buffer:
        publisher.publish(KVEventBatch(time.time(), decode(line).events, 0))
    publisher.shutdown(SHUTDOWN_SECONDS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
