"""The stage of one round: its processes, the network between them, and the execution of its script."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from kvevents.testing.ports import ReservedPort, reserve_port
from tests.system.chaos import consumer, engine, example, relaying, truth
from tests.system.chaos.engine import Incarnation
from tests.system.chaos.faults import ENDS, FAULTS
from tests.system.chaos.judging import Example, Outcome, Result, check_claims
from tests.system.chaos.parts import START_SECONDS, BrokenStageError, Disk, Leg, Part, SilentPartError
from tests.system.chaos.plan import Command, Plan
from tests.system.chaos.settling import CONFIRM_SECONDS, CONFIRMATIONS, SettleLimits, Settling
from tests.system.chaos.truth import MAX_INCARNATIONS

REACH_SECONDS: Final = 60.0
"""Limit of the wait until an engine has published what it was ordered to."""
POLL_SECONDS: Final = 0.02
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - a folder of our own in it


class Stage:
    """Executes one plan. A context manager that leaves no process and no file behind."""

    def __init__(self, plan: Plan, limits: SettleLimits) -> None:
        self.plan: Final = plan
        self._limits: Final = limits
        self.legs: list[Leg] = []
        self.relays: list[relaying.RelayProcess] = []
        self._undo = ExitStack()
        self._parts: list[Part] = []
        self._engine: Part | None = None
        self._consumers: dict[str, Part] = {}
        self._examples: dict[str, Part] = {}
        self._disk: Disk | None = None
        self._foreign_replay_endpoint: str | None = None
        """The replay endpoint of another engine."""
        self._has_cut_connections = False
        self._confirmations = 0
        self._confirm_at = 0.0
        self._incarnation = 0
        self._at = self._ordered = 0
        self.published = 0
        self._counted: Counter[str] = Counter()

    # --- processes

    @property
    def engine(self) -> Part:
        assert self._engine is not None
        return self._engine

    @property
    def disk(self) -> Disk:
        assert self._disk is not None
        return self._disk

    def consumer(self, name: str) -> Part:
        return self._consumers[name]

    def __enter__(self) -> Self:
        try:
            self._set_up()
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for part in self._parts:
            part.kill()
        self._undo.close()

    def _set_up(self) -> None:
        parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        self._folder = Path(tempfile.mkdtemp(prefix="chaos-", dir=parent))
        self._undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
        if "full disk" in self.plan.faults:
            self._disk = self._undo.enter_context(Disk(self._folder / "disk"))
        made = self.plan.setting.engine
        wanted = ["live", "replay"] if self.plan.setting.replay else ["live"]
        ports = [self._port(name) for name in wanted]
        self._made = replace(made, endpoint=ports[0], replay_endpoint=ports[1] if len(ports) > 1 else None)
        self._start_incarnation(self.plan.incarnations[0])
        self.legs.append(self._leg(*(self._endpoint_to_connect(port) for port in (*ports, None)[:2])))
        for place, hop in enumerate(self.plan.setting.hops):
            self._relay(place, hop)

    def _relay(self, place: int, hop: relaying.Hop) -> None:
        """Add a relay, and the proxies behind it."""
        before = self.legs[-1]
        own = [self._port(f"{name}-{place}", released=False) for name in ("live", "replay")]
        source = relaying.source(before.endpoint, before.replay_endpoint, self._made.topic)
        folder = self._folder if self._disk is None else self._disk.folder
        settings = hop.settings(source, own[0], own[1], str(folder / f"journal-{place}"))
        self.relays.append(relaying.RelayProcess(hop, settings, self._part))
        self.legs.append(self._leg(own[0], own[1]))

    def _port(self, name: str, *, released: bool | None = None) -> str:
        """Return an endpoint to bind. Released publishers bind a wildcard only, or `ipc://`."""
        if self.plan.setting.transport == "ipc":
            return f"ipc://{self._folder}/{name}"
        if released is None:
            released = self.plan.setting.engine.make in engine.RELEASES
        held: ReservedPort = reserve_port("tcp://*:0" if released else "tcp://127.0.0.1:0")
        if held.holder is not None:
            self._undo.callback(held.holder.close)
        return held.endpoint

    @staticmethod
    def _endpoint_to_connect(endpoint: str | None) -> str | None:
        return None if endpoint is None else endpoint.replace("tcp://*", "tcp://127.0.0.1")

    def _leg(self, endpoint: str | None, replay_endpoint: str | None) -> Leg:
        assert endpoint is not None
        leg = Leg(endpoint, replay_endpoint)
        self._undo.callback(leg.close)
        return leg

    def _part(self, name: str, target: Callable[..., None], *arguments: Any) -> Part:
        part = Part(name, target, *arguments)
        self._parts.append(part)
        return part

    # --- the engine

    def _start_incarnation(self, batches: int) -> None:
        """Start the next incarnation of the engine and wait until it has opened its sockets."""
        self._incarnation += 1
        seed = f"{self.plan.seed}/{self.plan.number}/life/{self._incarnation}"
        incarnation = Incarnation(self._incarnation, seed, batches + CONFIRMATIONS)
        self._at = self._ordered = 0
        self._engine = self._part(f"engine incarnation {self._incarnation}", engine.run, self._made, incarnation, self._facts)
        if self.engine.receive(START_SECONDS)[0] != "open":
            raise BrokenStageError("the engine did not open")

    def start_foreign_engine(self, share: float) -> str:
        """Return the replay endpoint of another engine, which has published this share of what the engine was ordered to."""
        if self._foreign_replay_endpoint is None:
            ports = [self._port(f"another-{name}") for name in ("live", "replay")]
            made = replace(self._made, endpoint=ports[0], replay_endpoint=ports[1])
            count = max(1, int(share * self._ordered))
            incarnation = Incarnation(MAX_INCARNATIONS, f"{self.plan.seed}/{self.plan.number}/another", count)
            other = self._part("another engine", engine.run, made, incarnation, self._folder / "facts-of-another")
            if other.receive(START_SECONDS)[0] != "open":
                raise BrokenStageError("another engine did not open")
            other.send(("publish", count, 1e9))
            end = time.monotonic() + REACH_SECONDS
            while other.receive(max(0.01, end - time.monotonic()))[1] < count:
                pass
            self._foreign_replay_endpoint = str(self._endpoint_to_connect(ports[1]))
        return self._foreign_replay_endpoint

    @property
    def _facts(self) -> Path:
        return self._folder / "facts"

    def _wait_for(self, word: str, seconds: float) -> None:
        """Receive messages of the engine up to this word."""
        end = time.monotonic() + seconds
        while True:
            received_word, self._at = self.engine.receive(max(0.01, end - time.monotonic()))
            if received_word == word:
                return

    def reach(self, number: int) -> None:
        """Wait until the engine has published `number` batches, or all that it was ordered to."""
        end = time.monotonic() + REACH_SECONDS
        while self._at < min(number, self._ordered):
            _, self._at = self.engine.receive(max(0.01, end - time.monotonic()))

    def publish(self, until: int, rate: float) -> None:
        self._ordered = until
        self.engine.send(("publish", until, rate))

    def _drain(self) -> None:
        """Wait until the engine has sent everything."""
        self.engine.send(("drain",))
        self._wait_for("drained", REACH_SECONDS)

    def start_next_incarnation(self, ending: str, batches: int) -> None:
        """End the incarnation of the engine as `ENDS` says, and start the next one."""
        end = ENDS[ending]
        if end.is_orderly:
            self.reach(self._ordered)
            self.engine.send(("close",))
            self._wait_for("closed", REACH_SECONDS)
        unblock = self._block_consumers() if end.passes_number else None
        before = self._ordered
        self.published += self._ordered if end.is_orderly else self._at
        self.engine.kill()
        self._start_incarnation(batches)
        if unblock is not None:
            self.publish(min(batches, before + 20), 1e9)
            self.reach(self._ordered)
            unblock()

    def _block_consumers(self) -> Callable[[], None]:
        """Prevent consumers from reading until the returned function is called."""
        if self.legs[0].live is not None:
            for proxy in self.legs[0].proxies:
                proxy.cut(refuse=True)
            return self.legs[0].heal
        running = [part for part in self._consumers.values() if part.is_alive]
        for part in running:
            part.stop()

        def look() -> None:
            for part in running:
                part.go_on()

        return look

    # --- consumers

    def join(self, name: str) -> None:
        """Start a consumer, for the first time or after it was killed."""
        if name in self._consumers and self._consumers[name].is_alive:
            return
        wanted = next(each for each in self.plan.consumers if each.name == name)
        leg = self.legs[-1]
        folder = self._folder if self._disk is None else self._disk.folder
        wanted = replace(
            wanted,
            endpoint=leg.endpoint,
            replay_endpoint=leg.replay_endpoint,
            folder=str(self._folder),
            state_folder=str(folder),
            counts_batches=bool(self._examples),
        )
        self._consumers[name] = self._part(name, consumer.run, wanted)

    def kill_consumer(self, name: str) -> None:
        if name in self._consumers:
            self._consumers[name].kill()

    def _join_examples(self) -> None:
        """Start the example subscribers, if the publisher is a released one."""
        made = self.plan.setting.engine
        if made.make not in engine.RELEASES or not self.plan.setting.replay:
            return
        leg = self.legs[-1]
        assert leg.replay_endpoint is not None
        for corrected in (False, True):
            name = "example, corrected" if corrected else "example"
            listener = example.Example(name, leg.endpoint, leg.replay_endpoint, corrected, made.topic)
            self._examples[name] = self._part(name, example.run, listener)
        for part in self._examples.values():
            part.receive(START_SECONDS)

    # --- the round

    def play(self) -> Outcome:
        """Execute the script and return the outcome."""
        began = time.monotonic()
        self._join_examples()
        for command in self.plan.script:
            self._execute(command)
        results = self._settle()
        return Outcome(
            seed=self.plan.seed,
            number=self.plan.number,
            make=self.plan.setting.engine.make,
            relays=self.plan.setting.relays,
            faults=self.plan.faults,
            batches=self.published + self._at,
            results=tuple(results),
            examples=tuple(self._example_results()),
            counted=dict(self._counted),
            seconds=time.monotonic() - began,
        )

    def _execute(self, command: Command) -> None:
        word, *details = command
        try:
            _COMMANDS[word](self, *details)
        except (SilentPartError, OSError) as error:
            raise BrokenStageError(f"{error}, at {' '.join(map(str, command))}") from error

    def strike(self, name: str, leg: int) -> None:
        FAULTS[name].strike(self, leg, self.plan.draw(f"{name}/{self._incarnation}"))

    def heal(self, name: str, leg: int) -> None:
        end = FAULTS[name].heal
        assert end is not None
        end(self, leg)

    def tail(self, until: int, lost: bool) -> None:
        """End the round: all faults end before the last batches are published. With `lost`, after they were lost."""
        self.reach(self._ordered)
        if not lost:
            self.end_all_faults()
        else:
            for leg in self.legs:
                assert leg.live is not None
                leg.live.drop(1.0)
        self.publish(until, 1e9)
        self.reach(until)
        self._drain()
        if lost:
            # The last batches are lost when they have reached the proxies.
            time.sleep(0.05)
            self.end_all_faults()

    def end_all_faults(self) -> None:
        """End every fault. Start killed relays and consumers again."""
        for leg in self.legs:
            leg.heal()
        if self._disk is not None:
            self._disk.free()
        for relay in self.relays:
            relay.go_on()
            relay.start()
        for name, part in list(self._consumers.items()):
            part.go_on()
            if not part.is_alive:
                self.join(name)

    # --- results

    def _settle(self) -> list[Result]:
        """Request reports of consumers until each result is final, then check their claims."""
        facts = truth.read_facts(self._facts)
        current_digest = self._current_digest(facts)
        has_short_timeouts = self.plan.setting.has_short_timeouts
        waiting = [
            Settling(name, part, current_digest, self._limits, has_short_timeouts=has_short_timeouts)
            for name, part in self._consumers.items()
        ]
        results = {}
        while waiting:
            for each in list(waiting):
                result = each.look()
                if result is not None:
                    waiting.remove(each)
                    self._counted.update(each.counted)
                    results[each.name] = result
            if any(each.is_cut_off for each in waiting):
                self._cut_connections()
            if any(each.is_unconfirmed for each in waiting) and self._confirm():
                for each in waiting:
                    each.expect(self._current_digest(facts))
            time.sleep(POLL_SECONDS if waiting else 0.0)
        return self._check_all_claims(results, facts)

    def _current_digest(self, facts: Mapping[int, bytes]) -> bytes:
        """Return the digest of what the engine holds now."""
        return facts[truth.Key(self._incarnation, self._at - 1).packed]

    def _confirm(self) -> bool:
        """Publish one more batch. Return False if the last one was a moment ago or if none is left."""
        now = time.monotonic()
        if self._confirmations == CONFIRMATIONS or now < self._confirm_at:
            return False
        self._confirmations += 1
        self._confirm_at = now + CONFIRM_SECONDS
        self.publish(self._at + 1, 1e9)
        self.reach(self._at + 1)
        self._drain()
        return True

    def _check_all_claims(self, results: Mapping[str, Result], facts: Mapping[int, bytes]) -> list[Result]:
        """Return the results with the checked claims."""
        found = []
        for name, result in results.items():
            claims = truth.read_claims(self._folder / f"{name}.claims")
            found.append(result.with_claims(check_claims(claims, facts, foreign=self.plan.setting.relays > 0)))
        if any(result.kind == "wrong" for result in found):
            states = "; ".join(relay.status() for relay in self.relays)
            found = [replace(result, detail=f"{result.detail}; relays: {states or 'none'}") for result in found]
        return found

    def _cut_connections(self) -> None:
        """Cut all connections once, so that consumers on dead ones need not wait."""
        if not self._has_cut_connections:
            self._has_cut_connections = True
            for leg in self.legs:
                for proxy in leg.proxies:
                    proxy.cut()

    def _example_results(self) -> list[Example]:
        """Return the results of the example subscribers."""
        if not self._examples:
            return []
        facts = truth.read_facts(self._facts)
        final = self._current_digest(facts)
        published = self.published + self._at
        found = []
        for name, part in self._examples.items():
            received: example.Received = part.exchange()
            lost = published - sum(key in facts for key in received.keys)
            found.append(Example(name, published, lost, received.digest == final, received.missed, received.errors))
        return found


_COMMANDS: Final[dict[str, Callable[..., None]]] = {
    "publish": Stage.publish,
    "reach": Stage.reach,
    "strike": Stage.strike,
    "heal": Stage.heal,
    "end_incarnation": Stage.start_next_incarnation,
    "join": Stage.join,
    "tail": Stage.tail,
}


def play(plan: Plan, limits: SettleLimits = SettleLimits()) -> Outcome:  # noqa: B008 - frozen
    """Play one round. If its stage fails, the outcome has the error."""
    began = time.monotonic()
    try:
        with Stage(plan, limits) as stage:
            return stage.play()
    except (BrokenStageError, SilentPartError, TimeoutError) as error:
        return Outcome.unplayable(
            plan.seed, plan.number, plan.faults, f"{type(error).__name__}: {error}", time.monotonic() - began
        )
