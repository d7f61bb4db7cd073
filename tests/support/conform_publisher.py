"""A publisher with a known fault, for tests of `kvevents conform`: `conform_publisher.py FAULT ENDPOINT REPLAY_ENDPOINT`.

`forgets`: the newest batch is missing in replay replies. `truncates`: the oldest batch is missing. `exits`: an invalid request
ends the process. `exits-late`: the valid request after an invalid one ends it. `stutters`: each live batch is sent twice.
"""

from __future__ import annotations

import json
import os
import sys
import threading

import msgspec
import zmq

from kvevents.wire import Malformed, encode_seq, parse_replay_request, replay_batch_frames, replay_end_frames


def main(fault: str, endpoint: str, replay_endpoint: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pub, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    pub.bind(endpoint)
    router.bind(replay_endpoint)
    payloads: list[bytes] = []
    threading.Thread(target=answer, args=(fault, router, payloads), daemon=True).start()
    for line in sys.stdin.buffer:
        seq = len(payloads)
        payloads.append(msgspec.msgpack.encode([0.5 * seq, json.loads(line)["events"], 0]))
        for _ in range(2 if fault == "stutters" else 1):
            pub.send_multipart([b"", encode_seq(seq), payloads[-1]])


def answer(fault: str, router: zmq.Socket[bytes], payloads: list[bytes]) -> None:
    had_invalid_request = False
    while True:
        request = parse_replay_request(router.recv_multipart())
        is_invalid = isinstance(request, Malformed)
        if (fault == "exits" and is_invalid) or (fault == "exits-late" and had_invalid_request and not is_invalid):
            os._exit(3)
        if isinstance(request, Malformed):
            had_invalid_request = True
            continue
        numbers = range(request.start, len(payloads))
        sent = {"forgets": numbers[:-1], "truncates": numbers[1:]}.get(fault, numbers)
        for seq in sent:
            router.send_multipart([request.identity, *replay_batch_frames(b"", seq, payloads[seq])])
        router.send_multipart([request.identity, *replay_end_frames(has_topic=True)])


if __name__ == "__main__":
    main(*sys.argv[1:])
