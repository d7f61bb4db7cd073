"""`python -m tools.goldens ENGINE RELEASE --like OLDER`: golden payloads and frames of a release, from its own wheel.

The values are those of another release's goldens, without fields that the classes of this release lack. The release's own
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
"""Number of the batch whose frames are stored."""
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
        print(json.dumps(row | _send(types, [_build(types, event) for event in events], rank), separators=(",", ":")))
    return 0


def _cases(engine: str, release: str) -> Iterator[tuple[str, list[Fields], int]]:
    """Name, events by their fields, and rank of each golden of a release."""
    fields = dialect_for(engine, release)
    for line in GOLDENS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line, object_hook=lambda value: bytes.fromhex(value["$hex"]) if "$hex" in value else value)
        if (row["engine"], row["release"]) == (engine, release):
            _, events, rank = row["decoded_json"]
            yield row["case"], [event if isinstance(event, dict) else _fields_of(event, fields) for event in events], rank


def _fields_of(event: list[Any], dialect: Dialect) -> Fields:
    """The fields of an event that was sent as an array."""
    names = {"BlockStored": dialect.stored_fields, "BlockRemoved": dialect.removed_fields}.get(event[0], ())
    return {"type": event[0], **dict(zip(names, event[1:], strict=False))}


def _build(types: Any, event: Fields) -> Any:
    event_type = getattr(types, event["type"])
    return event_type(**{name: value for name, value in event.items() if name in event_type.__struct_fields__})


def _send(types: Any, events: list[Any], rank: int) -> Fields:
    """Return the messages with batch `SEQ` of the release's publisher, live and by replay, as fields of a row."""
    port, replay_port = reserve_port(), reserve_port()
    ends = (f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay_port}")
    publisher = types.ZmqEventPublisher(rank, *(f"tcp://*:{int(end.rpartition(':')[2]) - rank}" for end in ends), topic=TOPIC)
    with zmq.Context() as context, context.socket(zmq.SUB) as live, context.socket(zmq.DEALER) as replay:
        for socket, end in ((live, ends[0]), (replay, ends[1])):
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(end)
        live.subscribe(b"")
        frames: list[bytes] = []
        for seq in range(SEQ + 1):
            publisher.publish(types.KVEventBatch(ts=TIMESTAMP, events=events))
            frames = _receive(live, 1_000) or frames
            if frames and frames[1] != encode_seq(seq):
                sys.exit(f"batch {seq} was awaited, and the frames {frames} came")
        if not frames:
            sys.exit("the publisher sent nothing: is another program at its port?")
        replay.send_multipart([b"", encode_seq(SEQ)])
        batch, marker = _receive(replay, WAIT_MS), _receive(replay, WAIT_MS)
    publisher.shutdown()
    return {
        "payload_hex": frames[2].hex(),
        "decoded_json": _json_of(msgspec.msgpack.decode(frames[2])),
        "pub_frames_hex": [frame.hex() for frame in frames],
        "replay_frames_hex": [frame.hex() for frame in batch],
        "replay_end_frames_hex": [frame.hex() for frame in marker],
    }


def _receive(socket: zmq.Socket[bytes], milliseconds: int) -> list[bytes]:
    """Return the next message; an empty list if no message arrives in time."""
    return socket.recv_multipart() if socket.poll(milliseconds) else []


def _json_of(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"$hex": value.hex()}
    if isinstance(value, dict):
        return {name: _json_of(item) for name, item in value.items()}
    return [_json_of(item) for item in value] if isinstance(value, list) else value


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
