"""A publisher with a known fault: `conform_publisher.py HABIT ENDPOINT REPLAY_ENDPOINT`. For tests of the referee.

`forgets`: the newest batch is missing in replies. `truncates`: the oldest one is. `exits`: an invalid request ends the
process. `exits-late`: the valid request after an invalid one does. `stutters`: each live batch comes twice.
"""

from __future__ import annotations

import json
import os
import sys
import threading

import msgspec
import zmq

from kvevents.wire import Malformed, encode_seq, parse_replay_request, replay_batch_frames, replay_end_frames


def main(habit: str, endpoint: str, replay_endpoint: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pub, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    pub.bind(endpoint)
    router.bind(replay_endpoint)
    payloads: list[bytes] = []
    threading.Thread(target=answer, args=(habit, router, payloads), daemon=True).start()
    for line in sys.stdin.buffer:
        seq = len(payloads)
        payloads.append(msgspec.msgpack.encode([0.5 * seq, json.loads(line)["events"], 0]))
        for _ in range(2 if habit == "stutters" else 1):
            pub.send_multipart([b"", encode_seq(seq), payloads[-1]])


def answer(habit: str, router: zmq.Socket[bytes], payloads: list[bytes]) -> None:
    had_invalid_request = False
    while True:
        request = parse_replay_request(router.recv_multipart())
        is_invalid = isinstance(request, Malformed)
        if (habit == "exits" and is_invalid) or (habit == "exits-late" and had_invalid_request and not is_invalid):
            os._exit(3)
        if isinstance(request, Malformed):
            had_invalid_request = True
            continue
        numbers = range(request.start, len(payloads))
        kept = {"forgets": numbers[:-1], "truncates": numbers[1:]}.get(habit, numbers)
        for seq in kept:
            router.send_multipart([request.identity, *replay_batch_frames(b"", seq, payloads[seq])])
        router.send_multipart([request.identity, *replay_end_frames(with_topic=True)])


if __name__ == "__main__":
    main(*sys.argv[1:])
