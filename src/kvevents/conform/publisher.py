"""Targets that publish: the referee gives a publisher batches, and compares the publisher's messages with these batches.

Sequence numbers reveal a loss: a consumer notices a number that is missing between two received numbers, and a reply whose
first number is above the requested number. A consumer cannot notice that batches at the end are missing, so the verdict is then
"silently wrong".
"""

from __future__ import annotations

import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from functools import singledispatchmethod
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import zmq

from kvevents.conform import scenario as steps
from kvevents.conform.scenario import Forms, Macros, PublisherScenario, ScenarioEngine, block_hash
from kvevents.conform.target import Program, TargetError, check_program, is_open
from kvevents.conform.verdict import Result, ScenarioOutcome, Verdict, worst
from kvevents.diagnosis.replay_sample import ReplaySample, Timeouts, send_request
from kvevents.endpoints import complete_replay
from kvevents.errors import ConfigError
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvevents.package_metadata import VERSION
from kvevents.testing.ports import reserve_port
from kvevents.testing.tape import ANY_LOCAL_PORT
from kvevents.wire import Malformed, decode_batch, parse_live
from kvevents.wire.decode import begins_with_clear
from kvevents.zeromq.sockets import disable_monitor

BLOCK_SIZE: Final = 16
FEED_SECONDS: Final = 30.0
"""Maximum time for a publisher to read the batches that the referee writes."""
END_SECONDS: Final = 15.0
"""Maximum time from the end of a publisher's input until its process ends."""
CONNECT_SECONDS: Final = 15.0
JOIN_SECONDS: Final = 0.3
"""Time for a subscription to reach the publisher over an open connection; ZMTP does not acknowledge subscriptions."""
SILENCE_SECONDS: Final = 3.0
"""Time without a message after which a reply without an end marker counts as ended."""
_CANNOT_FEED_REASON: Final = "the referee cannot give batches to a running publisher; name its command instead of endpoints"


class ReceivedStream(NamedTuple):
    """The batches that were received from a stream (number and payload), and the fault of the stream."""

    batches: list[tuple[int, bytes]]
    fault: str | None = None
    """A sentence that describes invalid frames or a missing end marker, or None if neither was found."""


def fed_hash(incarnation: int, number: int) -> int:
    """Return the hash of the block that batch `number` of an incarnation stores."""
    return block_hash(incarnation + 1, 0, number)


def apply_batch(blocks: set[int], payload: bytes) -> str | None:
    """Apply a batch to a consumer's blocks. Return why an event of the batch cannot be decoded, or None if all were decoded."""
    decoded = decode_batch(payload)
    for event in decoded.batch.events:
        if isinstance(event, AllBlocksCleared):
            blocks.clear()
        elif isinstance(event, BlockStored):
            blocks.update(hash_ for hash_ in event.block_hashes if isinstance(hash_, int))
        elif isinstance(event, BlockRemoved):
            blocks.difference_update(event.block_hashes)
    return decoded.rejected[0].detail if decoded.rejected else None


def judge_stream(stream: ReceivedStream, start: int, required: set[int], allowed: set[int]) -> ScenarioOutcome:
    """Return the verdict about batches from `start` on: consumers must get all `required` blocks, and only `allowed` blocks."""
    held, last, gaps = set[int](), start - 1, list[str]()
    for number, payload in stream.batches:
        if number <= last and not (held == set() and begins_with_clear(payload)):
            return ScenarioOutcome(Verdict.SILENT, f"number {number} came after {last}")
        if number != last + 1 and not begins_with_clear(payload):
            gaps.append(f"numbers {last + 1} to {number - 1} are missing")
        last = number
        if (fault := apply_batch(held, payload)) is not None:
            return ScenarioOutcome(Verdict.SILENT, f"number {number} cannot be read: {fault}")
    missing, foreign = len(required - held), len(held - allowed)
    if foreign:
        return ScenarioOutcome(Verdict.SILENT, f"{foreign} blocks that were not given")
    if not missing:
        return ScenarioOutcome(Verdict.CORRECT if stream.fault is None else Verdict.REPORTED, stream.fault or "")
    reports = [*gaps[:3], stream.fault] if stream.fault else gaps[:3]
    detail = f"{missing} of {len(required)} blocks are missing"
    return ScenarioOutcome(Verdict.REPORTED if reports else Verdict.SILENT, "; ".join([detail, *reports]))


class Publisher(NamedTuple):
    """A publisher at two endpoints."""

    endpoint: str
    replay_endpoint: str
    program: Program | None = None
    """The publisher's process if the referee starts the publisher, or None if it is already running."""

    def start(self) -> None:
        """Start the process, and wait until both endpoints accept connections."""
        if self.program is not None:
            self.program.start(lambda: all(map(is_open, (self.endpoint, self.replay_endpoint))))


class PublisherPlayer:
    """Plays one scenario with one publisher."""

    def __init__(self, publisher: Publisher, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.outcomes: Final[list[ScenarioOutcome]] = []
        self._publisher = publisher
        self._context = context
        self._readers: dict[str, zmq.Socket[bytes]] = {}
        self._incarnation = 0
        self._given = 0

    @singledispatchmethod
    def perform(self, step: Any) -> None:
        """Perform a step."""
        raise NotImplementedError(step)

    @property
    def _program(self) -> Program:
        if self._publisher.program is None:
            raise TargetError(_CANNOT_FEED_REASON)
        return self._publisher.program

    @perform.register
    def _feed_batches(self, step: steps.FeedBatches) -> None:
        macros = Macros(Forms(), BLOCK_SIZE, ScenarioEngine(seed=self._incarnation + 1))
        stores = ([{"$store": [0, self._given + place, 1]}] for place in range(step.batches))
        batches = [msgspec.json.encode({"events": macros.expand(store, {})}) for store in stores]
        self._given += step.batches
        self._program.feed(b"".join(batch + b"\n" for batch in batches), FEED_SECONDS)

    @perform.register
    def _restart_publisher(self, _: steps.RestartPublisher) -> None:
        self._program.kill()
        self._incarnation, self._given = self._incarnation + 1, 0
        self._publisher.start()

    @perform.register
    def _end_publisher(self, _: steps.EndPublisher) -> None:
        self._program.end(END_SECONDS)

    @perform.register
    def _pause(self, step: steps.Pause) -> None:
        time.sleep(step.seconds)

    @perform.register
    def _subscribe(self, step: steps.Subscribe) -> None:
        reader = self._readers[step.reader] = self._context.socket(zmq.SUB)
        reader.set(zmq.RCVHWM, 1 if step.stalls else 0)
        if step.stalls:
            reader.set(zmq.RCVBUF, 4096)
        reader.subscribe(b"")
        self._connect(reader, self._publisher.endpoint)
        time.sleep(JOIN_SECONDS)

    def _connect(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        deadline = time.monotonic() + CONNECT_SECONDS
        with socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor:
            try:
                socket.connect(endpoint)
                while not monitor.poll(100):
                    if self._publisher.program is not None:
                        self._publisher.program.check()
                    if time.monotonic() > deadline:
                        raise TargetError(f"no connection to {endpoint} within {CONNECT_SECONDS:g} s")
            finally:
                disable_monitor(socket)  # if the socket closes first, libzmq waits forever to report to the monitor

    @perform.register
    def _send_request(self, step: steps.SendRequest) -> None:
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.set(zmq.LINGER, 1_000)
            self._connect(dealer, self._publisher.replay_endpoint)
            dealer.send_multipart([bytes.fromhex(frame) for frame in step.frames])

    # --- checks

    @perform.register
    def _check_live(self, step: steps.CheckLive) -> None:
        numbers = range(step.first, step.last + 1)
        stream = self._read_live(step.reader, len(numbers), step.within)
        required = {fed_hash(self._incarnation, number) for number in numbers}
        self.outcomes.append(judge_stream(stream, step.first, required, required))

    def _read_live(self, reader: str, count: int, seconds: float) -> ReceivedStream:
        socket, deadline, batches = self._readers[reader], time.monotonic() + seconds, list[tuple[int, bytes]]()
        while len(batches) < count and socket.poll(int(max(0.0, deadline - time.monotonic()) * 1000)):
            message = parse_live(socket.recv_multipart())
            if isinstance(message, Malformed):
                return ReceivedStream(batches, f"an invalid live message: {message.reason}")
            batches.append((message.seq, message.payload))
        return ReceivedStream(batches)

    @perform.register
    def _check_replay(self, step: steps.CheckReplay) -> None:
        with ExitStack() as stack:
            dealers = [stack.enter_context(self._context.socket(zmq.DEALER)) for _ in range(step.consumers)]
            for dealer in dealers:
                self._connect(dealer, self._publisher.replay_endpoint)
                send_request(dealer, step.start)
            time.sleep(step.delay)
            allowed = {fed_hash(self._incarnation, number) for number in range(self._given)}
            required = {fed_hash(self._incarnation, number) for number in range(step.start, self._given)}
            for dealer in dealers:
                self.outcomes.append(judge_stream(self._read_reply(dealer, step.within), step.start, required, allowed))

    def _read_reply(self, dealer: zmq.Socket[bytes], seconds: float) -> ReceivedStream:
        """Read a reply until it ends or is silent, for at most `seconds`. Raise `TargetError` if the publisher has ended."""
        sample, fault = ReplaySample(), None
        sample.read(dealer, Timeouts(SILENCE_SECONDS, seconds), is_strict=True)
        if sample.malformed:
            fault = f"an invalid message in the reply: {sample.malformed[0]}"
        elif sample.is_cut:
            fault = f"the reply did not end within {seconds:g} s"
        elif not sample.has_end:
            fault = "the reply has no end marker"
            if self._publisher.program is not None:
                self._publisher.program.check()
        return ReceivedStream([(batch.seq, batch.payload) for batch in sample.batches], fault)

    @perform.register
    def _check_watched(self, step: steps.CheckWatched) -> None:
        self._subscribe(steps.Subscribe("watcher"))
        if self._publisher.program is not None:
            self._feed_batches(steps.FeedBatches(10))
        live = self._read_live("watcher", sys.maxsize, step.seconds)
        self.outcomes.append(self._compare_with_replay(live, step.seconds))

    def _compare_with_replay(self, live: ReceivedStream, seconds: float) -> ScenarioOutcome:
        if live.fault is not None or not live.batches:
            verdict = Verdict.SILENT if live.fault else Verdict.NOT_APPLICABLE
            return ScenarioOutcome(verdict, live.fault or "nothing was published")
        unreadable = [number for number, payload in live.batches if decode_batch(payload).rejected]
        first, last = live.batches[0][0], live.batches[-1][0]
        with self._context.socket(zmq.DEALER) as dealer:
            self._connect(dealer, self._publisher.replay_endpoint)
            send_request(dealer, first)
            reply = self._read_reply(dealer, seconds)
        replayed = dict(reply.batches)
        different = [number for number, payload in live.batches if replayed.get(number, payload) != payload]
        missing = [number for number in range(first, last + 1) if number not in replayed]
        twice = [number for number, count in Counter(number for number, _ in live.batches).items() if count > 1]
        for numbers, fault in ((unreadable, "cannot be read"), (different, "differ from their replay"), (twice, "came twice")):
            if numbers:
                return ScenarioOutcome(Verdict.SILENT, f"live numbers {numbers[:5]} {fault}")
        faults = [f"numbers {missing[:5]} are not replayed"] if missing else []
        faults += [reply.fault] if reply.fault else []
        return ScenarioOutcome(Verdict.REPORTED if faults else Verdict.CORRECT, "; ".join(faults))


class PublisherDriver:
    """Plays scenarios with a publisher. The driver starts a publisher for each scenario, or uses one that is already running.

    `source` is the running publisher, or the words of a command with the fields `{endpoint}`, `{replay_endpoint}` and
    `{buffer_steps}`.
    """

    def __init__(self, title: str, source: Sequence[str] | Publisher) -> None:
        self.title: Final = title
        self._source = source

    def play(self, scenario: PublisherScenario) -> Result:
        """Play a scenario. A `TargetError` becomes the verdict `UNANSWERED`."""
        began = time.monotonic()
        try:
            outcome = self._outcome(scenario)
        except TargetError as error:
            outcome = ScenarioOutcome(Verdict.UNANSWERED, str(error))
        seconds = round(time.monotonic() - began, 1)
        return Result(scenario.name, scenario.group, scenario.title, outcome.verdict, outcome.detail, seconds, 0.0)

    def _outcome(self, scenario: PublisherScenario) -> ScenarioOutcome:
        if scenario.needs and isinstance(self._source, Publisher):
            return ScenarioOutcome(Verdict.NOT_APPLICABLE, _CANNOT_FEED_REASON)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with ExitStack() as stack:
            stack.callback(context.destroy, linger=0)
            publisher = self._publisher(scenario, stack)
            publisher.start()
            player = PublisherPlayer(publisher, context)
            for step in scenario.steps:
                player.perform(step)
            return worst(player.outcomes)

    def _publisher(self, scenario: PublisherScenario, stack: ExitStack) -> Publisher:
        if isinstance(self._source, Publisher):
            return self._source
        ports = [reserve_port(ANY_LOCAL_PORT) for _ in range(2)]
        for port in ports:
            stack.callback(port.close)
        endpoint, replay_endpoint = (port.endpoint for port in ports)
        words = _fill_placeholders(self._source, endpoint, replay_endpoint, scenario.buffer_steps)
        program = stack.enter_context(Program(self.title, lambda _port, _folder: words, is_fed=True))
        return Publisher(endpoint, replay_endpoint, program)


def _fill_placeholders(words: Sequence[str], endpoint: str, replay_endpoint: str, buffer_steps: int) -> list[str]:
    fields = {"endpoint": endpoint, "replay_endpoint": replay_endpoint, "buffer_steps": buffer_steps}
    return [word.format(**fields) for word in words]


def kvevents_publisher() -> PublisherDriver:
    """Return the driver of this package's publisher, with its defaults."""
    options = ("--endpoint", "{endpoint}", "--replay", "{replay_endpoint}", "--buffer-steps", "{buffer_steps}")
    return PublisherDriver(f"kvevents {VERSION} publisher", [sys.executable, "-m", "kvevents", "publish", *options])


def publisher_driver(target: str) -> PublisherDriver:
    """Return the driver of a publisher. `target` is `ENDPOINT,REPLAY` of a running publisher, or a command.

    Each line of the command's stdin is a JSON object with `events`, which the command must publish as one batch. At the end of
    its input, it must send all batches and then end. Raise `ConfigError`.
    """
    if target.startswith("tcp://"):
        endpoint, _, replay_endpoint = target.partition(",")
        if not replay_endpoint:
            raise ConfigError(f"invalid publisher {target!r}: expected tcp://HOST:PORT,tcp://HOST:REPLAY_PORT or a command")
        return PublisherDriver(target, Publisher(endpoint, complete_replay(endpoint, replay_endpoint)))
    try:
        words = shlex.split(target)
        title = Path(words[0]).name
        _fill_placeholders(words, "", "", 1)
    except (ValueError, LookupError) as error:
        raise ConfigError(f"invalid publisher command {target!r}: {error}; expected fields such as {{endpoint}}") from error
    check_program(words[0])
    return PublisherDriver(title, words)
