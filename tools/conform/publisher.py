"""Publishers of released engines for `kvevents conform --publisher`, which gives them batches as lines of JSON.

`kvevents conform --publisher 'python -m tools.conform.publisher vllm {endpoint} {replay_endpoint} {buffer_steps}'`
"""

from __future__ import annotations

import sys
import time
from typing import Any, Final

import msgspec

from tools import released

ENGINES: Final = {"vllm": released.VLLM_NEWEST, "sglang": released.SGLANG}
HWM: Final = 100_000


def main(arguments: list[str]) -> int:
    """Publish stdin."""
    name, endpoint, replay_endpoint, buffer_steps = arguments
    types: Any = released.load(ENGINES[name])
    listen = (endpoint.replace("127.0.0.1", "*"), replay_endpoint.replace("127.0.0.1", "*"))  # engines bind only to a `*`
    publisher = types.ZmqEventPublisher(0, *listen, int(buffer_steps), HWM, HWM, "")
    for line in sys.stdin.buffer:
        events = [
            types.BlockStored(**{key: value for key, value in event.items() if key != "type"})
            for event in msgspec.json.decode(line)["events"]
        ]
        publisher.publish(types.KVEventBatch(time.time(), events))
    publisher.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
