"""The stage of one round: its processes, the network between them, and the script that is played on it."""

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
from tests.system.chaos.engine import Life
from tests.system.chaos.faults import ENDS, FAULTS
from tests.system.chaos.judging import Example, Outcome, Verdict, check_claims
from tests.system.chaos.parts import START_SECONDS, Broken, Disk, Leg, Part, Silent
from tests.system.chaos.plan import Command, Plan
from tests.system.chaos.settling import CONFIRM_SECONDS, CONFIRMATIONS, SettleLimits, Settling
from tests.system.chaos.truth import MAX_LIVES

REACH_SECONDS: Final = 60.0
"""Until an engine must have published what was ordered."""
LOOK: Final = 0.02
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - a folder of our own in it


class Stage:
    """Plays one plan. A context manager: nothing that it started stays behind."""

    def __init__(self, plan: Plan, limits: SettleLimits) -> None:
        self.plan: Final = plan
        self._limits: Final = limits
        self.legs: list[Leg] = []
        self.relays: list[relaying.Station] = []
        self._undo = ExitStack()
        self._parts: list[Part] = []
        self._engine: Part | None = None
        self._consumers: dict[str, Part] = {}
        self._examples: dict[str, Part] = {}
        self._disk: Disk | None = None
        self._another: str | None = None
        """The replay endpoint of another engine."""
        self._hastened = False
        self._confirmations = 0
        self._confirm_at = 0.0
        self._life = 0
        self._at = self._ordered = 0
        self._ends: list[int] = []
        """Batches that each incarnation was ordered to publish, without the last one: what they published at most."""
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
            self._set()
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for part in self._parts:
            part.kill()
        self._undo.close()

    def _set(self) -> None:
        parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        self._folder = Path(tempfile.mkdtemp(prefix="chaos-", dir=parent))
        self._undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
        if "full disk" in self.plan.faults:
            self._disk = self._undo.enter_context(Disk(self._folder / "disk"))
        made = self.plan.setting.engine
        wanted = ["live", "replay"] if self.plan.setting.replay else ["live"]
        ports = [self._port(name) for name in wanted]
        self._made = replace(made, endpoint=ports[0], replay_endpoint=ports[1] if len(ports) > 1 else None)
        self._bear(self.plan.lives[0])
        self.legs.append(self._leg(*(self._dialled(port) for port in (*ports, None)[:2])))
        for place, hop in enumerate(self.plan.setting.hops):
            self._relay(place, hop)

    def _relay(self, place: int, hop: relaying.Hop) -> None:
        """One more hop, and the network behind it."""
        before = self.legs[-1]
        own = [self._port(f"{name}-{place}", released=False) for name in ("live", "replay")]
        source = relaying.source(before.endpoint, before.replay_endpoint, self._made.topic)
        folder = self._folder if self._disk is None else self._disk.folder
        settings = hop.settings(source, own[0], own[1], str(folder / f"journal-{place}"))
        self.relays.append(relaying.Station(hop, settings, self._part))
        self.legs.append(self._leg(own[0], own[1]))

    def _port(self, name: str, *, released: bool | None = None) -> str:
        """An endpoint to bind; releases bind a wildcard only, or `ipc://`."""
        if self.plan.setting.transport == "ipc":
            return f"ipc://{self._folder}/{name}"
        if released is None:
            released = self.plan.setting.engine.make in engine.RELEASES
        held: ReservedPort = reserve_port("tcp://*:0" if released else "tcp://127.0.0.1:0")
        if held.holder is not None:
            self._undo.callback(held.holder.close)
        return held.endpoint

    @staticmethod
    def _dialled(endpoint: str | None) -> str | None:
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

    def _bear(self, batches: int) -> None:
        """Another life; it is there when it has opened its sockets."""
        self._life += 1
        seed = f"{self.plan.seed}/{self.plan.number}/life/{self._life}"
        life = Life(self._life, seed, batches + CONFIRMATIONS)
        self._at = self._ordered = 0
        self._engine = self._part(f"engine of life {self._life}", engine.run, self._made, life, self._facts)
        if self.engine.receive(START_SECONDS)[0] != "open":
            raise Broken("the engine did not open")

    def another_engine(self, share: float) -> str:
        """The replay endpoint of another engine, which has published that share of what this one was ordered to."""
        if self._another is None:
            ports = [self._port(f"another-{name}") for name in ("live", "replay")]
            made = replace(self._made, endpoint=ports[0], replay_endpoint=ports[1])
            count = max(1, int(share * self._ordered))
            life = Life(MAX_LIVES, f"{self.plan.seed}/{self.plan.number}/another", count)
            other = self._part("another engine", engine.run, made, life, self._folder / "facts-of-another")
            if other.receive(START_SECONDS)[0] != "open":
                raise Broken("another engine did not open")
            other.send(("publish", count, 1e9))
            end = time.monotonic() + REACH_SECONDS
            while other.receive(max(0.01, end - time.monotonic()))[1] < count:
                pass
            self._another = str(self._dialled(ports[1]))
        return self._another

    @property
    def _facts(self) -> Path:
        return self._folder / "facts"

    def _expect(self, word: str, seconds: float) -> None:
        """Receive from the engine until it says this."""
        end = time.monotonic() + seconds
        while True:
            said, self._at = self.engine.receive(max(0.01, end - time.monotonic()))
            if said == word:
                return

    def reach(self, number: int) -> None:
        """Until the engine has published so many batches, or as many as were ordered."""
        end = time.monotonic() + REACH_SECONDS
        while self._at < min(number, self._ordered):
            _, self._at = self.engine.receive(max(0.01, end - time.monotonic()))

    def publish(self, until: int, rate: float) -> None:
        self._ordered = until
        self.engine.send(("publish", until, rate))

    def _drained(self) -> None:
        """Until all that it was ordered to publish was sent."""
        self.engine.send(("drain",))
        self._expect("drained", REACH_SECONDS)

    def next_life(self, how: str, batches: int) -> None:
        """As `ENDS` says."""
        end = ENDS[how]
        if end.orderly:
            self.reach(self._ordered)
            self.engine.send(("close",))
            self._expect("closed", REACH_SECONDS)
        blind = self._blind() if end.passes else None
        before = self._ordered
        self.published += self._ordered if end.orderly else self._at
        self.engine.kill()
        self._bear(batches)
        if blind is not None:
            self.publish(min(batches, before + 20), 1e9)
            self.reach(self._ordered)
            blind()

    def _blind(self) -> Callable[[], None]:
        """No consumer reads until the returned function is called."""
        if self.legs[0].live is not None:
            for proxy in self.legs[0].proxies:
                proxy.cut(refuse=True)
            return self.legs[0].heal
        watching = [part for part in self._consumers.values() if part.is_alive]
        for part in watching:
            part.stop()

        def look() -> None:
            for part in watching:
                part.go_on()

        return look

    # --- consumers

    def join(self, name: str) -> None:
        """A consumer begins, or comes back."""
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
            counts=bool(self._examples),
        )
        self._consumers[name] = self._part(name, consumer.run, wanted)

    def kill_consumer(self, name: str) -> None:
        if name in self._consumers:
            self._consumers[name].kill()

    def _join_examples(self) -> None:
        """Beside released publishers, the example subscriber of their engine."""
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
        """The whole script, and what came of it."""
        began = time.monotonic()
        self._join_examples()
        for command in self.plan.script:
            self._do(command)
        verdicts = self._settle()
        return Outcome(
            seed=self.plan.seed,
            number=self.plan.number,
            make=self.plan.setting.engine.make,
            relays=self.plan.setting.relays,
            faults=self.plan.faults,
            batches=self.published + self._at,
            verdicts=tuple(verdicts),
            examples=tuple(self._example_results()),
            counted=dict(self._counted),
            seconds=time.monotonic() - began,
        )

    def _do(self, command: Command) -> None:
        word, *details = command
        try:
            _DEEDS[word](self, *details)
        except (Silent, OSError) as error:
            raise Broken(f"{error}, at {' '.join(map(str, command))}") from error

    def strike(self, name: str, leg: int) -> None:
        FAULTS[name].strike(self, leg, self.plan.draw(f"{name}/{self._life}"))

    def heal(self, name: str, leg: int) -> None:
        end = FAULTS[name].heal
        assert end is not None
        end(self, leg)

    def tail(self, until: int, lost: bool) -> None:
        """The end: faults are over, then the last batches come. Or the last batches do not come, then faults are over."""
        self.reach(self._ordered)
        if not lost:
            self.calm()
        else:
            for leg in self.legs:
                assert leg.live is not None
                leg.live.drop(1.0)
        self.publish(until, 1e9)
        self.reach(until)
        self._drained()
        if lost:
            # What was sent is on its way to the proxies: until they have had it, it is not lost.
            time.sleep(0.05)
            self.calm()

    def calm(self) -> None:
        """Every fault is over."""
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

    # --- what came of it

    def _settle(self) -> list[Verdict]:
        """Ask every consumer until it is right, or finally not exact, or the time is up; then read its diary."""
        facts = truth.read_facts(self._facts)
        fact = self._fact(facts)
        brisk = self.plan.setting.brisk
        waiting = [Settling(name, part, fact, self._limits, brisk=brisk) for name, part in self._consumers.items()]
        verdicts = {}
        while waiting:
            for each in list(waiting):
                verdict = each.look()
                if verdict is not None:
                    waiting.remove(each)
                    self._counted.update(each.counted)
                    verdicts[each.name] = verdict
            if any(each.is_cut_off for each in waiting):
                self._hasten()
            if any(each.is_unproven for each in waiting) and self._confirm():
                for each in waiting:
                    each.expect(self._fact(facts))
            time.sleep(LOOK if waiting else 0.0)
        return self._checked(verdicts, facts)

    def _fact(self, facts: Mapping[int, bytes]) -> bytes:
        """Digest of what the engine holds now."""
        return facts[truth.Key(self._life, self._at - 1).packed]

    def _confirm(self) -> bool:
        """Publish one more batch, unless the last one was a moment ago or none is left; whether it was published."""
        now = time.monotonic()
        if self._confirmations == CONFIRMATIONS or now < self._confirm_at:
            return False
        self._confirmations += 1
        self._confirm_at = now + CONFIRM_SECONDS
        self.publish(self._at + 1, 1e9)
        self.reach(self._at + 1)
        self._drained()
        return True

    def _checked(self, verdicts: Mapping[str, Verdict], facts: Mapping[int, bytes]) -> list[Verdict]:
        """With what each claimed before."""
        found = []
        for name, verdict in verdicts.items():
            claims = truth.read_claims(self._folder / f"{name}.claims")
            found.append(verdict.with_claims(check_claims(claims, facts, foreign=self.plan.setting.relays > 0)))
        if any(verdict.kind == "wrong" for verdict in found):
            states = "; ".join(relay.status() for relay in self.relays)
            found = [replace(verdict, detail=f"{verdict.detail}; relays: {states or 'none'}") for verdict in found]
        return found

    def _hasten(self) -> None:
        """Cut dead connections once, so that consumers on them need not wait."""
        if not self._hastened:
            self._hastened = True
            for leg in self.legs:
                for proxy in leg.proxies:
                    proxy.cut()

    def _example_results(self) -> list[Example]:
        """The results of the example subscribers."""
        if not self._examples:
            return []
        facts = truth.read_facts(self._facts)
        final = self._fact(facts)
        published = self.published + self._at
        found = []
        for name, part in self._examples.items():
            received: example.Received = part.ask()
            lost = published - sum(key in facts for key in received.keys)
            found.append(Example(name, published, lost, received.digest == final, received.missed, received.errors))
        return found


_DEEDS: Final[dict[str, Callable[..., None]]] = {
    "publish": Stage.publish,
    "reach": Stage.reach,
    "strike": Stage.strike,
    "heal": Stage.heal,
    "life": Stage.next_life,
    "join": Stage.join,
    "tail": Stage.tail,
}


def play(plan: Plan, limits: SettleLimits = SettleLimits()) -> Outcome:  # noqa: B008 - frozen
    """One round. An exception that breaks the stage is part of the outcome, too."""
    began = time.monotonic()
    try:
        with Stage(plan, limits) as stage:
            return stage.play()
    except (Broken, Silent, TimeoutError) as error:
        return Outcome.broken(plan.seed, plan.number, plan.faults, f"{type(error).__name__}: {error}", time.monotonic() - began)
