"""The engine's side of a fault: real sockets, the wire's real bytes, and a count of what it holds, which is the truth."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from threading import Event, Thread
from types import TracebackType
from typing import Any, Final, Literal, Self

import zmq

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from kvevents.recording import LiveBatch
from kvevents.testing import Faults
from kvevents.testing.ports import reserve_port
from kvevents.wire import Malformed, encode_batch, encode_seq, live_frames, parse_replay_request

TOPIC: Final = b"kv-events"
BLOCK: Final = 16
PATIENCE: Final = 15.0
"""Seconds until a subscriber must have come, or come back."""
LINGER_MS: Final = 1_000
"""How long what was sent may take to leave before a restart."""
_LOOK_MS: Final = 50

Replay = Literal["answers", "none", "dead"]
"""`dead`: clients register this endpoint, and nothing listens there."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens that no prompt of another number has; with a salt it is another prompt, of the same tokens."""

    number: int
    blocks: int
    salt: str | None = None
    block_size: int = BLOCK

    @property
    def tokens(self) -> list[int]:
        return [self.number * 1_000 + place for place in range(self.blocks * self.block_size)]

    def unsalted(self) -> Prompt:
        """The same tokens as a client without the salt asks for them."""
        return replace(self, salt=None)

    def part(self, place: int) -> list[int]:
        """Tokens of one block."""
        return self.tokens[place * self.block_size :][: self.block_size]

    def hashed(self, place: int, seed: int) -> int:
        """What an engine calls the block; another engine, with another seed, has another name for it."""
        known = repr((seed, self.number, self.block_size, self.salt, place)).encode()
        return int.from_bytes(blake2b(known, digest_size=8).digest(), "big")


class Engine:
    """Numbers, sends and keeps batches as released engines do; what is `lost` is kept and not sent.

    `faults` are those of replies. Sending belongs to the thread that made it; replies are sent by another.
    """

    def __init__(self, *, replay: Replay = "answers", faults: Faults | None = None, seed: int = 1) -> None:
        self._faults = faults or Faults()
        self._seed = seed
        self._ports = [reserve_port("tcp://127.0.0.1:*") for _ in range(2)]
        self._replay = replay
        self.endpoint = self._ports[0].endpoint
        self.replay_endpoint = None if replay == "none" else self._ports[1].endpoint
        self.requests: list[int] = []
        """Numbers from which replay was asked for."""
        self._open()

    def _open(self) -> None:
        self._held: set[tuple[int, str]] = set()
        self._kept: list[LiveBatch] = []
        self.next = 0
        """Number of the next batch."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._events = self._context.socket(zmq.XPUB)
        self._events.set_hwm(0)
        # Otherwise a subscription that comes before the end of the connection before it is not reported.
        self._events.setsockopt(zmq.XPUB_VERBOSER, 1)
        self._events.bind(self.endpoint)
        self._stop = Event()
        self._thread: Thread | None = None
        if self._replay == "answers":
            router = self._context.socket(zmq.ROUTER)
            router.bind(self._ports[1].endpoint)
            self._thread = Thread(target=self._answer, args=(router,), daemon=True)
            self._thread.start()

    def wait_for_subscriber(self) -> None:
        """Until a consumer has subscribed, or, after a restart, has come back. Raises `TimeoutError`."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if self._events.poll(_LOOK_MS) and self._events.recv()[:1] == b"\x01":
                return
        raise TimeoutError(f"no consumer has subscribed to {self.endpoint} within {PATIENCE:g} s")

    # Its events

    def store(self, prompt: Prompt, blocks: Iterable[int] | None = None, *, lost: bool = False, medium: str = "GPU") -> None:
        """Compute some blocks of a prompt, all by default, with one batch for each."""
        for place in range(prompt.blocks) if blocks is None else blocks:
            self.publish([self.stored(prompt, place, medium)], lost=lost)

    def stored(self, prompt: Prompt, place: int, medium: str = "GPU") -> BlockStored:
        """The event for one block, which is held from now on."""
        own = prompt.hashed(place, self._seed)
        self._held.add((own, medium))
        parent = prompt.hashed(place - 1, self._seed) if place else None
        # vLLM `v1/core/kv_cache_utils.py`: the salt is an extra key of the first block alone
        extra: list[tuple[Any, ...] | None] | None = [(prompt.salt,)] if prompt.salt is not None and not place else None
        return BlockStored([own], parent, prompt.part(place), prompt.block_size, medium=medium, extra_keys=extra)

    def remove(self, prompt: Prompt, places: Iterable[int], medium: str = "GPU") -> None:
        """Give some blocks of a prompt up, in one batch."""
        hashes = [prompt.hashed(place, self._seed) for place in places]
        self._held -= {(each, medium) for each in hashes}
        self.publish([BlockRemoved(hashes, medium=medium)])

    def clear(self) -> None:
        """Give everything up."""
        self._held.clear()
        self.publish([AllBlocksCleared()])

    def publish(self, events: Sequence[Any], *, lost: bool = False) -> None:
        """One batch of any events."""
        self.publish_payload(encode_batch(EventBatch(time.time(), list(events), 0)), lost=lost)

    def publish_payload(self, payload: bytes, *, lost: bool = False) -> None:
        """One batch of any bytes, with the next number."""
        seq, self.next = self.next, self.next + 1
        self._kept = [*self._kept, LiveBatch(TOPIC, seq, payload)][-self._faults.buffer_steps :]
        if not lost:
            self.send(live_frames(TOPIC, seq, payload))

    def send_numbered(self, seq: int) -> None:
        """A batch without events, under a number that is not its turn."""
        self.send([TOPIC, encode_seq(seq), encode_batch(EventBatch(time.time(), [], 0))])

    def send(self, frames: list[bytes]) -> None:
        """Any message."""
        self._events.send_multipart(frames)

    # What is true

    def holds(self, prompt: Prompt) -> int:
        """Tokens of the longest beginning of a prompt that it has, on whatever medium."""
        held = {known for known, _ in self._held}
        places = range(prompt.blocks)
        missing = next((place for place in places if prompt.hashed(place, self._seed) not in held), prompt.blocks)
        return missing * prompt.block_size

    # Its end

    def restart(self) -> None:
        """A new process at the same addresses: it holds nothing, keeps nothing, and counts from 0."""
        self.die()
        self._open()

    def die(self) -> None:
        """Close everything; idempotent."""
        self._held.clear()
        if not self._context.closed:
            self._stop.set()
            if self._thread is not None:
                self._thread.join()
            self._events.close(LINGER_MS)
            self._context.term()

    def _answer(self, router: zmq.Socket[bytes]) -> None:
        while not self._stop.is_set():
            if not router.poll(_LOOK_MS):
                continue
            request = parse_replay_request(router.recv_multipart())
            if isinstance(request, Malformed):
                continue
            self.requests.append(request.start)
            for frames in self._faults.reply(self._kept, request.start, len(self.requests) - 1).messages:
                router.send_multipart([request.identity, *frames])
        router.close(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.die()
        for port in self._ports:
            if port.holder is not None:
                port.holder.close()
