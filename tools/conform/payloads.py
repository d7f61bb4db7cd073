"""Scenarios of bytes that are no batches, and of batches with an event that cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvevents.events import BlockStored, EventBatch
from kvevents.wire import dialect_for, encode_batch, live_frames
from tools.conform.script import BLOCK, A, B, D, Engine, Play, Script


def _bytes(send: Callable[[Engine], None], settings: dict[str, Any] | None = None) -> Play:
    """Something that is no batch, between good ones."""

    def play(script: Script) -> None:
        engine = script.warm(A, 5, **(settings or {}))
        send(engine)
        engine.store(A, range(5, 10))
        script.check()

    return play


def _payload(payload: bytes) -> Play:
    return _bytes(lambda engine: engine.publish_bytes(payload))


def _whole() -> bytes:
    event = BlockStored([D.name_of(0, 1)], None, D.part(0), BLOCK, medium="GPU")
    return encode_batch(EventBatch(1.0, [event], 0), dialect_for("vllm"))


def _odd_event(make: Callable[[Engine], Any]) -> Play:
    """A batch of three: a block, an event that cannot be read, and the next block."""

    def play(script: Script) -> None:
        engine = script.warm(A, 4)
        engine.publish([engine.stored(A, 4), make(engine), engine.stored(A, 5)])
        engine.store(A, range(6, 10))
        script.check()

    return play


def _odd_stored(**fields: Any) -> Callable[[Engine], Any]:
    """A store of a block of D with a field that is out of range."""
    event = {"type": "BlockStored", "block_hashes": [7], "parent_block_hash": None, "token_ids": D.part(0), "block_size": BLOCK}
    return lambda _: {**event, "lora_id": None, "medium": "GPU", **fields}


def _jump(seq: int, **settings: Any) -> Play:
    """A batch with a number that is not its turn, and what comes a moment later."""

    def play(script: Script) -> None:
        engine = script.warm(A, 5, **settings)
        engine.send(live_frames(b"", seq, encode_batch(EventBatch(1.0, [], 0), dialect_for("vllm"))))
        script.pause(1.0)
        script.ask(B)
        engine.store(A, range(5, 10))
        engine.store(B)
        script.check()

    return play


def payloads() -> Iterator[tuple[Script, Play]]:
    for name, title, play in (
        ("garbage", "a payload of garbage", _payload(b"\xc1garbage")),
        ("truncated", "a payload that ends in the middle", _payload(_whole()[:40])),
        ("empty", "an empty payload", _payload(b"")),
        ("json", "a payload of JSON", _payload(b'{"ts": 1, "events": []}')),
        ("huge-array", "a payload that claims 4 billion events", _payload(b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff")),
        ("nested", "a payload of 3,000 nested arrays", _payload(b"\x91" * 3_000 + b"\x90")),
        ("two-frames", "a message of two frames", _bytes(lambda engine: engine.send(live_frames(b"", engine.next, b"")[:2]))),
        (
            "four-frames",
            "a message of four frames",
            _bytes(lambda engine: engine.send([*live_frames(b"", engine.next, b"x"), b""])),
        ),
        (
            "short-number",
            "a sequence number of four bytes",
            _bytes(lambda engine: engine.send([b"", b"\0\0\0\5", _whole()])),
        ),
        ("jump", "one batch with number 2^40, then on as before", _jump(1 << 40)),
        ("jump-signed", "one batch with number 2^63, then on as before", _jump(1 << 63)),
        ("jump-no-replay", "one batch with number 2^40, then on as before, no replay endpoint", _jump(1 << 40, replay="none")),
        (
            "unknown-event",
            "an unknown event between two good ones of a batch",
            _odd_event(lambda _: {"type": "BlockPinned", "block_hashes": [1]}),
        ),
        ("no-event", "a number in place of an event, between two good ones", _odd_event(lambda _: 7)),
        ("token-range", "a token id of 2^32, between two good events", _odd_event(_odd_stored(token_ids=[1 << 32] * BLOCK))),
        ("token-negative", "a negative token id, between two good events", _odd_event(_odd_stored(token_ids=[-1] * BLOCK))),
        ("hash-type", "a block hash of 1.5, between two good events", _odd_event(_odd_stored(block_hashes=[1.5]))),
    ):
        yield Script(name, title, "bytes"), play
