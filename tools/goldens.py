"""`python -m tools.goldens ENGINE RELEASE --like OLDER`: golden payloads and frames of a release, from its own wheel.

The values are those of the goldens of another release, without the fields that this one's classes lack. The release's own
publisher encodes and sends them over real sockets: what is printed, one row of `tests/data/dialects.jsonl` a line, is what a
consumer received. With `--case NAME EVENTS` there is a further row; EVENTS is a JSON list of objects such as
`{"type": "BlockStored", ...}`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import msgspec
import zmq

from kvevents.wire import encode_seq
from kvevents.wire.dialects import Dialect, dialect_for
from tools import released
from tools.ports import reserve_port
from tools.released import CHECKOUT

GOLDENS: Final = CHECKOUT / "tests" / "data" / "dialects.jsonl"
TOPIC: Final = "kv-events"
SEQ: Final = 7
"""Of the batch whose frames are kept."""
WAIT_MS: Final = 10_000
TIMESTAMP: Final = 1_700_000_000.25

Fields = dict[str, Any]


def main() -> int:
    """Returns 0; ends with a sentence when the wheel cannot be had or its publisher sends nothing."""
    options = _options()
    release = replace({"vllm": released.VLLM, "sglang": released.SGLANG}[options.engine], release=options.release)
    types = released.load(release)
    cases = [*_cases(options.engine, options.like), *((name, json.loads(events), 0) for name, events in options.case)]
    for name, events, rank in cases:
        if name in options.without:
            continue
        row = {"engine": options.engine, "release": options.release, "case": name}
        print(json.dumps(row | _sent(types, [_built(types, event) for event in events], rank), separators=(",", ":")))
    return 0


def _cases(engine: str, release: str) -> Iterator[tuple[str, list[Fields], int]]:
    """Name, events by their fields, and rank of each golden of a release."""
    fields = dialect_for(engine, release)
    for line in GOLDENS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line, object_hook=lambda value: bytes.fromhex(value["$hex"]) if "$hex" in value else value)
        if (row["engine"], row["release"]) == (engine, release):
            _, events, rank = row["decoded_json"]
            yield row["case"], [event if isinstance(event, dict) else _named(event, fields) for event in events], rank


def _named(event: list[Any], dialect: Dialect) -> Fields:
    """The fields of an event that was sent as an array."""
    names = {"BlockStored": dialect.stored_fields, "BlockRemoved": dialect.removed_fields}.get(event[0], ())
    return {"type": event[0], **dict(zip(names, event[1:], strict=False))}


def _built(types: Any, event: Fields) -> Any:
    made = getattr(types, event["type"])
    return made(**{name: value for name, value in event.items() if name in made.__struct_fields__})


def _sent(types: Any, events: list[Any], rank: int) -> Fields:
    """What a consumer receives of batch `SEQ` from the release's publisher, live and by replay, as the row has it."""
    port, replay_port = reserve_port(), reserve_port()
    ends = (f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay_port}")
    publisher = types.ZmqEventPublisher(rank, *(f"tcp://*:{int(end.rpartition(':')[2]) - rank}" for end in ends), topic=TOPIC)
    with zmq.Context() as context, context.socket(zmq.SUB) as live, context.socket(zmq.DEALER) as replay:
        for socket, end in ((live, ends[0]), (replay, ends[1])):
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(end)
        live.subscribe(b"")
        received: list[bytes] = []
        for seq in range(SEQ + 1):
            publisher.publish(types.KVEventBatch(ts=TIMESTAMP, events=events))
            received = _received(live, 1_000) or received
            if received and received[1] != encode_seq(seq):
                sys.exit(f"batch {seq} was awaited, and the frames {received} came")
        if not received:
            sys.exit("the publisher sent nothing: is another program at its port?")
        replay.send_multipart([b"", encode_seq(SEQ)])
        batch, marker = _received(replay, WAIT_MS), _received(replay, WAIT_MS)
    publisher.shutdown()
    return {
        "payload_hex": received[2].hex(),
        "decoded_json": _json_of(msgspec.msgpack.decode(received[2])),
        "pub_frames_hex": [frame.hex() for frame in received],
        "replay_frames_hex": [frame.hex() for frame in batch],
        "replay_end_frames_hex": [frame.hex() for frame in marker],
    }


def _received(socket: zmq.Socket[bytes], milliseconds: int) -> list[bytes]:
    """The next message; nothing when none comes in time."""
    return socket.recv_multipart() if socket.poll(milliseconds) else []


def _json_of(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"$hex": value.hex()}
    if isinstance(value, dict):
        return {name: _json_of(each) for name, each in value.items()}
    return [_json_of(each) for each in value] if isinstance(value, list) else value


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.goldens", description=__doc__)
    parser.add_argument("engine", choices=("vllm", "sglang"))
    parser.add_argument("release")
    parser.add_argument("--like", required=True, metavar="RELEASE", help="the release whose goldens have the values")
    parser.add_argument("--without", action="append", default=[], metavar="CASE", help="leave this one out; may be repeated")
    parser.add_argument("--case", action="append", default=[], nargs=2, metavar=("NAME", "EVENTS"), help="one row more")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
