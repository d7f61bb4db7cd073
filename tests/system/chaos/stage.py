"""The stage of one round: a chain of an engine, relays and consumers, with proxies between them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Final

from kvevents.stream import Source
from tests.system.chaos import consumer, example, relaying
from tests.system.chaos.consumer import NAME
from tests.system.chaos.faults import ENDS, FAULTS
from tests.system.chaos.judging import check_claims
from tests.system.chaos.plan import Plan
from tests.system.chaos.relaying import Hop
from tests.system.chaos.settling import SettleLimits, Settling
from tests.system.chaos_kit import truth
from tests.system.chaos_kit.engine import RELEASES
from tests.system.chaos_kit.faults import refuse
from tests.system.chaos_kit.judging import Example, Outcome, Result
from tests.system.chaos_kit.parts import Disk, Part, preload
from tests.system.chaos_kit.stage import EngineProcess, RoundStage

POLL_SECONDS: Final = 0.02

preload(consumer.__name__, example.__name__, relaying.__name__)


class Stage(RoundStage[Plan]):
    """Executes one plan."""

    faults = FAULTS

    def __init__(self, plan: Plan, limits: SettleLimits = SettleLimits()) -> None:  # noqa: B008 - frozen
        super().__init__(plan)
        self._limits: Final = limits
        self.disk: Disk | None = None
        """A small disk for the files of relays and consumers."""
        self.relays: list[Part] = []
        self.consumers: dict[str, Part] = {}
        self._examples: dict[str, Part] = {}
        self._foreign_engine: EngineProcess | None = None
        self._has_cut_connections = False

    # --- processes

    @property
    def engine(self) -> EngineProcess:
        return self.engines[0]

    def set_up(self) -> None:
        self._state_folder = self.folder
        if "full disk" in self.plan.faults:
            self.disk = self.undo.enter_context(Disk(self.folder / "disk"))
            self._state_folder = self.disk.folder
        setting = self.plan.setting
        endpoint = self._endpoint("live")
        replay_endpoint = self._endpoint("replay") if setting.replay else None
        made = replace(setting.engine, endpoint=endpoint, replay_endpoint=replay_endpoint)
        self.engines = [EngineProcess(self, "the engine", made, f"{self.plan.seed}/{self.plan.number}")]
        self.engine.start(self.plan.incarnations[0])
        self.add_leg(_connectable(endpoint), None if replay_endpoint is None else _connectable(replay_endpoint))
        for place, hop in enumerate(setting.hops):
            self._add_relay(place, hop)
        if setting.engine.make in RELEASES and setting.replay:
            self._add_examples()

    def _add_relay(self, place: int, hop: Hop) -> None:
        """Add a relay, and the proxies behind it."""
        before = self.legs[-1]
        endpoint, replay_endpoint = (self._endpoint(f"{name}-{place}", host="127.0.0.1") for name in ("live", "replay"))
        source = Source(before.endpoint, before.replay_endpoint, self.engine.made.topic, NAME)
        settings = hop.settings(source, endpoint, replay_endpoint, str(self._state_folder / f"journal-{place}"))
        self.relays.append(self.start_part("relay", relaying.run, settings, hop.has_short_timeouts, opens=True))
        self.add_leg(endpoint, replay_endpoint)

    def _add_examples(self) -> None:
        """Add the example subscribers of a released publisher."""
        leg = self.legs[-1]
        assert leg.replay_endpoint is not None
        for name in ("example", "example, corrected"):
            is_corrected = name != "example"
            listener = example.Example(name, leg.endpoint, leg.replay_endpoint, is_corrected, self.engine.made.topic)
            self._examples[name] = self.start_part(name, example.run, listener, opens=True)

    def _endpoint(self, name: str, host: str | None = None) -> str:
        """Return an endpoint to bind. Released publishers bind a wildcard only, or `ipc://`."""
        if self.plan.setting.transport == "ipc":
            return f"ipc://{self.folder}/{name}"
        return self.reserve_endpoint(host or ("*" if self.plan.setting.engine.make in RELEASES else "127.0.0.1"))

    def start_foreign_engine(self, share: float) -> list[str]:
        """Return the endpoints of another engine, which has published this share of what the engine was ordered to."""
        if self._foreign_engine is None:
            endpoint, replay_endpoint = (self._endpoint(f"another-{name}") for name in ("live", "replay"))
            made = replace(
                self.engine.made, endpoint=endpoint, replay_endpoint=replay_endpoint if self.plan.setting.replay else None
            )
            seed = f"{self.plan.seed}/{self.plan.number}/another"
            other = EngineProcess(self, "another engine", made, seed, first=truth.MAX_INCARNATIONS)
            count = max(1, int(share * self.engine.ordered))
            other.start(count)
            other.publish(count)
            other.reach(count)
            self._foreign_engine = other
        made = self._foreign_engine.made
        return [_connectable(endpoint) for endpoint in (made.endpoint, made.replay_endpoint) if endpoint is not None]

    # --- commands

    def publish(self, until: int, rate: float) -> None:
        self.engine.publish(until, rate)

    def reach(self, number: int) -> None:
        self.engine.reach(number)

    def end_incarnation(self, ending: str, batches: int) -> None:
        """End the incarnation of the engine as `ENDS` says, and start the next one."""
        end, before = ENDS[ending], self.engine.ordered
        if end.is_orderly:
            self.engine.close()
        with self._block_consumers() if end.passes_number else nullcontext():
            self.engine.kill()
            self.engine.start(batches)
            if end.passes_number:
                self.engine.publish(min(batches, before + 20))
                self.engine.reach(self.engine.ordered)

    @contextmanager
    def _block_consumers(self) -> Iterator[None]:
        """Prevent consumers from reading."""
        first, running = self.legs[0], list(self.consumers.values())
        if first.live is not None:
            for proxy in first.proxies:
                refuse(proxy)
            yield
            first.heal()
            return
        for part in running:
            part.stop()
        yield
        for part in running:
            part.go_on()

    def join(self, name: str) -> None:
        """Start a consumer."""
        leg = self.legs[-1]
        settings = replace(
            next(each for each in self.plan.consumers if each.name == name),
            endpoint=leg.endpoint,
            replay_endpoint=leg.replay_endpoint,
            folder=str(self.folder),
            state_folder=str(self._state_folder),
            counts_batches=bool(self._examples),
        )
        self.consumers[name] = self.start_part(name, consumer.run, settings)

    def tail(self, until: int, lost: bool) -> None:
        """End the round: all faults end before the last batches are published. With `lost`, after they were lost."""
        self.engine.reach(self.engine.ordered)
        if not lost:
            self.end_all_faults()
        else:
            for leg in self.legs:
                assert leg.live is not None
                leg.live.drop(1.0)
        self.engine.publish_all(until)
        if lost:
            # The last batches are lost when they have reached the proxies.
            time.sleep(0.05)
            self.end_all_faults()

    def end_all_faults(self) -> None:
        """End every fault. Start killed relays and consumers again."""
        for leg in self.legs:
            leg.heal()
        if self.disk is not None:
            self.disk.free()
        for part in (*self.relays, *self.consumers.values()):
            part.resume()

    # --- results

    def settle(self) -> list[Result]:
        """Request reports of consumers until each result is final."""
        facts, has_short_timeouts = truth.read_facts(self.engine.facts), self.plan.setting.has_short_timeouts
        waiting = [
            Settling(name, part, self.engine, facts, self._limits, has_short_timeouts=has_short_timeouts)
            for name, part in self.consumers.items()
        ]
        results = []
        while waiting:
            for each in list(waiting):
                result = each.look()
                if result is not None:
                    waiting.remove(each)
                    self.counted.update(each.counted)
                    results.append(result)
            if any(each.is_cut_off for each in waiting) and not self._has_cut_connections:
                self._cut_connections()
            if any(each.is_unconfirmed for each in waiting):
                self.engine.confirm()
            time.sleep(POLL_SECONDS if waiting else 0.0)
        return results

    def _cut_connections(self) -> None:
        """Cut all connections once, so that consumers on dead ones need not wait."""
        self._has_cut_connections = True
        for leg in self.legs:
            for proxy in leg.proxies:
                proxy.cut()

    def check(self, outcome: Outcome) -> Outcome:
        """Return the outcome with the checked claims, and with the results of the example subscribers."""
        facts = truth.read_facts(self.engine.facts)
        # While its ports are swapped, a consumer follows the other engine, and may be EXACT about that.
        swapped = self._foreign_engine if "ports of another engine" in self.plan.faults else None
        known = facts if swapped is None else facts | truth.read_facts(swapped.facts)
        results = []
        for result in outcome.results:
            claims = truth.read_claims(self.folder / f"{result.holder}.claims")
            results.append(result.with_claims(check_claims(claims, known, foreign=self.plan.setting.relays > 0)))
        examples = []
        for name, part in self._examples.items():
            received: example.Received = part.exchange()
            lost = outcome.batches - sum(key in facts for key in received.keys)
            is_right = received.digest == self.engine.digest(facts)
            examples.append(Example(name, outcome.batches, lost, is_right))
        make = self.plan.setting.engine.make
        outcome = replace(outcome, make=make, results=tuple(results), examples=tuple(examples))
        states = "; ".join(str(relay.exchange()) for relay in self.relays) if outcome.wrong else ""
        return replace(outcome, reported=states)


def _connectable(endpoint: str) -> str:
    return endpoint.replace("tcp://*", "tcp://127.0.0.1")
