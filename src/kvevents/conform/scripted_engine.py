"""An engine of a scenario, with real sockets, and a network in front of it where the scenario needs one."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Final, NamedTuple, Self

import msgspec

from kvevents.conform.scenario import Cut, HalfOpen, Publish, Restart, Scenario, ScenarioEngine, Skip, Stall, expand
from kvevents.recording import LiveBatch
from kvevents.testing import FaultProxy, Faults, TapePlayer
from kvevents.testing.ports import reserve_port
from kvevents.testing.tape import ANY_LOCAL_PORT
from kvevents.wire import live_frames

POLL_SECONDS: Final = 0.01
CUT_SECONDS: Final = 2.0
"""Time of the operating system to end the connections that `cut` closes."""
UNRESOLVABLE: Final = "tcp://no-such-engine.invalid:5557"


class EngineAddress(NamedTuple):
    """The description of an engine that a target receives."""

    worker: str
    rank: int
    endpoint: str
    replay_endpoint: str | None


def wait_until(reached: Callable[[], bool], seconds: float) -> bool:
    """Wait for a condition. Return False after `seconds`."""
    deadline = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def payload_of(step: Publish) -> bytes:
    """Return the bytes of the batch that a step publishes."""
    return bytes.fromhex(step.payload) if step.payload is not None else msgspec.msgpack.encode(expand(step.batch))


def batches_by_incarnation(name: str, scenario: Scenario) -> list[list[LiveBatch]]:
    """Return what an engine publishes, by incarnation: everything is known from the scenario."""
    topic, incarnations = scenario.engines[name].topic.encode(), [list[LiveBatch]()]
    for step in scenario.steps:
        if isinstance(step, Restart) and step.engine == name:
            incarnations.append([])
        if isinstance(step, Skip) and step.engine == name:
            incarnations[-1].append(LiveBatch(topic, len(incarnations[-1]), b""))
        if isinstance(step, Publish) and step.engine == name:
            payload = payload_of(step)
            incarnations[-1] += [LiveBatch(topic, len(incarnations[-1]) + place, payload) for place in range(step.times)]
    return incarnations


class ScriptedEngine:
    """One engine of a scenario. Its methods are the steps of the same names; all but `close` belong to one thread."""

    def __init__(self, name: str, scenario: Scenario) -> None:
        self.settings: Final[ScenarioEngine] = scenario.engines[name]
        self._name = name
        self._incarnations = iter(batches_by_incarnation(name, scenario))
        self._topic = self.settings.topic.encode()
        self._open = ExitStack()
        replay = ANY_LOCAL_PORT if self.settings.replay in {"answers", "silent"} else None
        faults = Faults(
            buffer_steps=self.settings.buffer_steps,
            reply_shape=self.settings.reply_shape,
            replay_send_limit=self.settings.replay_send_limit,
            replay_holes=self.settings.replay_holes,
            replay_junk=[[bytes.fromhex(frame) for frame in frames] for frames in self.settings.replay_junk],
            lose_end_marker=not self.settings.has_end_marker,
            replay_endless=self.settings.is_endless,
            faulty_replies=self.settings.faulty_replies,
            replay_silent=self.settings.replay == "silent",
        )
        self._batches = next(self._incarnations)
        self._tape = self._open.enter_context(TapePlayer(self._batches, faults=faults, replay_endpoint=replay))
        self._proxies: list[FaultProxy] = []
        ends = [end for end in (self._tape.endpoint, self._tape.replay_endpoint) if end is not None]
        if any(isinstance(step, Cut | Stall | HalfOpen) and step.engine == name for step in scenario.steps):
            self._proxies = [self._open.enter_context(FaultProxy(end)) for end in ends]
            ends = [proxy.endpoint for proxy in self._proxies]
        self.endpoint: Final = self._advertised_endpoint(ends[0])
        self.replay_endpoint: Final = self._unused_port() if self.settings.replay == "dead" else next(iter(ends[1:]), None)

    def _advertised_endpoint(self, own: str) -> str:
        if self.settings.address == "unreachable":
            return self._unused_port()
        if self.settings.address == "unresolvable":
            return UNRESOLVABLE
        if self.settings.address == "silent":
            listener = self._open.enter_context(socket.create_server(("127.0.0.1", 0)))
            return f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        return own

    def _unused_port(self) -> str:
        port = reserve_port(ANY_LOCAL_PORT)
        if port.holder is not None:
            self._open.enter_context(port.holder)
        return port.endpoint

    def address(self, replay_endpoint: str | None) -> EngineAddress:
        """Return the description for a target, with the replay endpoint of this or of another engine."""
        return EngineAddress(self.settings.worker or self._name, self.settings.rank, self.endpoint, replay_endpoint)

    def publish(self, times: int, *, lost: bool) -> None:
        """Publish the next batches of the script."""
        self._tape.faults = replace(self._tape.faults, drop=1.0 if lost else (), skipped=())
        self._tape.play(times)

    def skip(self) -> None:
        """Use up a sequence number."""
        self._tape.faults = replace(self._tape.faults, skipped=range(len(self._batches)))
        self._tape.play(1)

    def resend(self, seq: int) -> None:
        """Send the live message of a published batch again."""
        self._tape.send_raw(live_frames(self._topic, seq, self._batches[seq].payload))

    def send(self, frames: list[bytes]) -> None:
        """Send any message."""
        self._tape.send_raw(frames)

    def restart(self) -> None:
        """Begin the next incarnation."""
        self._batches = next(self._incarnations)
        self._tape.restart(self._batches)

    def stop(self) -> None:
        """Close the sockets."""
        self._tape.stop()

    def cut(self) -> None:
        """Close the connections, and refuse new ones. Return when the engine has noticed."""
        for proxy in self._proxies:
            proxy.cut(refuse=True)
        wait_until(lambda: not self._tape.subscriptions, CUT_SECONDS)

    def stall(self) -> None:
        """Deliver nothing."""
        for proxy in self._proxies:
            proxy.stall()

    def half_open(self) -> None:
        """Let open connections deliver nothing. New ones work."""
        for proxy in self._proxies:
            proxy.half_open()

    def heal(self) -> None:
        """End `cut` or `stall`."""
        for proxy in self._proxies:
            proxy.heal()

    def wait_for_subscriber(self, seconds: float) -> bool:
        """Wait for a subscription. Return False after `seconds`."""
        return self._tape.wait_for_subscriber(seconds)

    def close(self) -> None:
        """Close everything."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
