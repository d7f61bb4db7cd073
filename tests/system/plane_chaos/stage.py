"""The stage of one round: its processes, the network between them, the execution of its faults, and its outcome."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Final, Self

import msgspec
import nats

from kvevents.plane.bridge import BridgeSettings, Watch
from kvevents.plane.layout import Layout
from kvevents.plane.settings import PlaneSettings, ReaderLimits, ReplicaTimers
from kvevents.service.fleet.registration import Registration
from kvevents.stream import Trust
from kvevents.testing.ports import reserve_port
from tests.system.chaos import engine, truth
from tests.system.chaos.engine import Incarnation
from tests.system.chaos.parts import START_SECONDS, BrokenStageError, Leg, Part, SilentPartError, preload
from tests.system.chaos.settling import CONFIRM_SECONDS, CONFIRMATIONS
from tests.system.plane_chaos import roles
from tests.system.plane_chaos.audit import Audit, read_log
from tests.system.plane_chaos.judging import FORBIDDEN_COUNTERS, CheckedClaims, Outcome, Result, check_claims, judge
from tests.system.plane_chaos.plan import BRIDGES, LEAST_PARTITION_BYTES, REPLICAS, SECONDS, TAIL, Plan, Strike
from tests.system.plane_chaos.roles import BridgeRole, Held, ReplicaRole, TrustReport
from tools.nats_process import Server, Servers

REACH_SECONDS: Final = 90.0
"""Limit of the wait until an engine has published what it was ordered to."""
READY_SECONDS: Final = 60.0
SETTLE_SECONDS: Final = 60.0
"""Limit of the wait until every replica is right, after the last batch."""
ASK_SECONDS: Final = 10.0
POLL_SECONDS: Final = 0.05
PAGES_AT_ONCE: Final = 200
"""Pages per request when the log is read at the end."""
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - a folder of our own in it
SMALL_PAYLOAD: Final = 24 << 10
SMALL_PENDING: Final = 1 << 20
DEAD_SECONDS: Final = 4.0
"""Time after which the log drops an engine; longer than most faults last."""
SNAPSHOT_SECONDS: Final = 0.5


@dataclass(slots=True)
class EngineState:
    """An engine in all its incarnations."""

    made: engine.Engine
    facts: Path
    legs: list[Leg]
    incarnation: int = 0
    part: Part | None = None
    confirmations: int = 0
    """Batches that it has published to confirm replayed ones."""
    confirm_at: float = 0.0
    batches: int = 0
    """Batches that earlier incarnations are known to have published."""
    at: int = 0

    def publish(self, until: int) -> None:
        """Publish batches up to number `until` and wait until they are sent."""
        assert self.part is not None
        self.part.send(("publish", until, 1e9))
        self.wait_for("published", REACH_SECONDS)
        self.part.send(("drain",))
        self.wait_for("drained", REACH_SECONDS)

    def confirm(self) -> None:
        """Publish one more batch, unless the last one was a moment ago or none is left."""
        now = time.monotonic()
        if self.confirmations < CONFIRMATIONS and now >= self.confirm_at:
            self.confirmations += 1
            self.confirm_at = now + CONFIRM_SECONDS
            self.publish(self.at + 1)

    def wait_for(self, word: str, seconds: float) -> None:
        """Receive messages of the engine up to this word."""
        assert self.part is not None
        end = time.monotonic() + seconds
        while True:
            received_word, self.at = self.part.receive(max(0.01, end - time.monotonic()))
            if received_word == word:
                return


class Stage:
    """Executes one plan. A context manager that leaves no process and no file behind."""

    def __init__(self, plan: Plan, logs: str = "") -> None:
        self.plan: Final = plan
        self.counted: Counter[str] = Counter()
        self.faults: list[str] = []
        """Faults that bridges and replicas have reported last."""
        self._logs: Final = logs
        self._undo = ExitStack()
        self._parts: list[Part] = []
        self._engines: list[EngineState] = []
        self._bridges: dict[int, Part] = {}
        self._replicas: dict[int, Part] = {}
        self._copies: list[Mapping[str, Path]] = []
        """Copies of the files of servers from earlier moments, by server."""

    def __enter__(self) -> Self:
        try:
            self._set_up()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for part in self._parts:
            part.kill()
        self._undo.close()

    # --- processes

    def _set_up(self) -> None:
        parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        self._folder = Path(tempfile.mkdtemp(prefix="chaos-", dir=parent))
        self._undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
        traits = self.plan.traits
        options: dict[str, Any] = {}
        if "small max_payload" in traits:
            options["max_payload"] = SMALL_PAYLOAD
        if "small max_pending" in traits:
            options["max_pending"] = SMALL_PENDING
        self._servers = self._undo.enter_context(Servers(self._folder / "nats", 3 if "cluster" in traits else 1, **options))
        self.plane = PlaneSettings(
            servers=self._servers.urls,
            name="chaos",
            partitions=self.plan.partitions,
            copies=3 if "cluster" in traits else 1,
            reader=ReaderLimits(heartbeat_seconds=0.3, quiet_heartbeats=1, check_seconds=1.0, digest_pages=4),
            replicas=ReplicaTimers(retry_seconds=0.3, compare_seconds=0.5, turn_seconds=3.0, rebuild_seconds=5.0),
            partition_bytes=LEAST_PARTITION_BYTES if "small partitions" in traits else 256 << 20,
        )
        self.layout = Layout("chaos", self.plan.partitions)
        self._engines = [self._engine(number, made) for number, made in enumerate(self.plan.engines)]
        for number in range(BRIDGES):
            self._start_bridge(number)
        for number in range(REPLICAS):
            self._start_replica(number)

    def _engine(self, number: int, made: engine.Engine) -> EngineState:
        ports = []
        for _ in range(2):
            held = reserve_port("tcp://127.0.0.1:0")
            if held.holder is not None:
                self._undo.callback(held.holder.close)
            ports.append(held.endpoint)
        legs = [Leg(ports[0], ports[1]) for _ in range(BRIDGES)]
        for leg in legs:
            self._undo.callback(leg.close)
        found = EngineState(replace(made, endpoint=ports[0], replay_endpoint=ports[1]), self._folder / f"facts-{number}", legs)
        self._start_incarnation(found, number)
        return found

    def _start_incarnation(self, each: EngineState, number: int) -> None:
        """Start the next incarnation of an engine, which begins to publish."""
        each.incarnation += 1
        each.at = 0
        seed = f"{self.plan.seed}/{self.plan.number}/{number}/life/{each.incarnation}"
        incarnation = Incarnation(each.incarnation, seed, self.plan.batches(number) + CONFIRMATIONS)
        each.part = self._part(
            f"incarnation {each.incarnation} of engine {number}", engine.run, each.made, incarnation, each.facts
        )
        each.wait_for("open", START_SECONDS)
        self._publish(each, number)

    def _publish(self, each: EngineState, number: int) -> None:
        assert each.part is not None
        each.part.send(("publish", self.plan.batches(number) - TAIL, self.plan.rates[number]))

    def _part(self, name: str, target: Callable[..., None], *arguments: Any) -> Part:
        part = Part(name, target, *arguments)
        self._parts.append(part)
        return part

    def registration(self, number: int) -> Registration:
        made = self._engines[number].made
        return Registration(
            instance=f"e{number}", endpoint=made.endpoint, replay_endpoint=made.replay_endpoint, model="m", topic=made.topic
        )

    def _start_bridge(self, number: int) -> None:
        watches = []
        for place, each in enumerate(self._engines):
            leg, registration = each.legs[number], self.registration(place)
            source = replace(registration.source(), endpoint=leg.endpoint, replay_endpoint=leg.replay_endpoint)
            watches.append(Watch(source, msgspec.json.encode(registration)))
        settings = BridgeSettings(
            plane=self.plane,
            name=f"b{number}",
            dead_seconds=DEAD_SECONDS,
            heartbeat_seconds=0.3,
        )
        self._bridges[number] = self._part(
            f"bridge {number}", roles.bridge, BridgeRole(settings, tuple(watches), self._log(f"b{number}"))
        )

    def _start_replica(self, number: int) -> None:
        names = tuple(self.registration(place).key[0] for place in range(len(self._engines)))
        seconds = 1e6 if "no snapshots" in self.plan.traits else SNAPSHOT_SECONDS
        role = ReplicaRole(
            self.plane,
            f"r{number}",
            names,
            self._claims_path(number),
            seconds,
            self._log(f"r{number}"),
            clock_ahead=3600.0 if number == 0 and "replica with a clock ahead" in self.plan.traits else 0.0,
        )
        self._replicas[number] = self._part(f"replica {number}", roles.replica, role)

    def _claims_path(self, number: int) -> Path:
        return self._folder / f"replica-{number}.claims"

    def _log(self, name: str) -> str:
        return f"{self._logs}/{name}.log" if self._logs else ""

    # --- the round

    def play(self) -> Outcome:
        """Execute the plan and return the outcome."""
        began = time.monotonic()
        actions: list[tuple[float, Callable[[], None]]] = []
        for strike in self.plan.strikes:
            actions.append((strike.at, lambda strike=strike: self._strike(strike)))  # type: ignore[misc]
            if strike.until is not None:
                actions.append((strike.until, lambda strike=strike: self._heal(strike)))  # type: ignore[misc]
        for at, action in sorted(actions, key=lambda each: each[0]):
            time.sleep(max(0.0, began + at - time.monotonic()))
            action()
        time.sleep(max(0.0, began + SECONDS - time.monotonic()))
        self._end_all_faults()
        self._publish_last_batches()
        last_batch_at = time.monotonic()
        results = self._settle()
        settled = time.monotonic() - last_batch_at
        audit = self._audit()
        claims = self._check_claims()
        return Outcome(
            self.plan.seed,
            self.plan.number,
            self.plan.faults,
            sum(each.batches + each.at for each in self._engines),
            tuple(results),
            audit.batches,
            audit.lost,
            (*audit.flaws[:3], *self._check_losses(audit), *claims.wrong),
            dict(self.counted) | {"claims": claims.count, "pages": audit.pages},
            time.monotonic() - began,
            settled,
            reported="; ".join(self.faults),
        )

    def _strike(self, strike: Strike) -> None:
        STRIKES[strike.name](self, strike.target)

    def _heal(self, strike: Strike) -> None:
        HEALS[strike.name](self, strike.target)

    def _end_all_faults(self) -> None:
        """End every fault. Start killed bridges and replicas again."""
        self._servers.start()
        for each in self._engines:
            for leg in each.legs:
                leg.heal()
            assert each.part is not None
            each.part.go_on()
        for number in range(BRIDGES):
            self.resume_bridge(number)
        for number in range(REPLICAS):
            self.resume_replica(number)

    def _publish_last_batches(self) -> None:
        """Publish the last batches of every engine."""
        for number, each in enumerate(self._engines):
            each.wait_for("published", REACH_SECONDS)
            each.publish(self.plan.batches(number))

    # --- faults

    def resume_bridge(self, number: int) -> None:
        self._bridges[number].go_on()
        if not self._bridges[number].is_alive:
            self._start_bridge(number)

    def resume_replica(self, number: int) -> None:
        self._replicas[number].go_on()
        if not self._replicas[number].is_alive:
            self._start_replica(number)

    def bridge(self, number: int) -> Part:
        return self._bridges[number]

    def replica(self, number: int) -> Part:
        return self._replicas[number]

    def server(self, number: int) -> Server:
        return self._servers.nodes[number]

    def engine(self, number: int) -> Part:
        part = self._engines[number].part
        assert part is not None
        return part

    def copy_servers(self, _: int) -> None:
        """Copy the files of all servers, for `lose_pages`. The servers are restarted, so that each copy is complete."""
        copies = {node.name: self._folder / f"{node.name}-{self.counted['copies of servers']}" for node in self._servers.nodes}
        self.counted["copies of servers"] += 1
        for node in self._servers.nodes:
            node.end()
        for node in self._servers.nodes:
            node.copy(copies[node.name])
            node.launch()
        self._copies.append(copies)

    def lose_pages(self, _: int) -> None:
        """Return all servers to their oldest copy, so that they lose what they have acknowledged since."""
        copies = self._copies.pop(0)
        for node in self._servers.nodes:
            node.fall_back(copies[node.name])
        for node in self._servers.nodes:
            node.launch()

    def miss_incarnation(self, number: int) -> None:
        """Stop a bridge, then start the next incarnation of an engine."""
        _stop(self.bridge(number))
        self.start_next_incarnation(self._missed_engine(number), orderly=False)

    def end_missed_incarnation(self, number: int) -> None:
        """Start a further incarnation and kill the bridge that has written the missed one, then resume the stopped bridge."""
        self.start_next_incarnation(self._missed_engine(number), orderly=False)
        self.bridge((number + 1) % BRIDGES).kill()
        self.resume_bridge(number)

    def _missed_engine(self, bridge: int) -> int:
        return (self.plan.number + bridge) % len(self._engines)

    def leg(self, number: int) -> Leg:
        return self._engines[number // BRIDGES].legs[number % BRIDGES]

    def start_next_incarnation(self, number: int, *, orderly: bool) -> None:
        """End an incarnation, at once or after it has published everything, and start the next one."""
        each = self._engines[number]
        assert each.part is not None
        each.part.go_on()
        if orderly:
            each.wait_for("published", REACH_SECONDS)
            each.part.send(("close",))
            each.wait_for("closed", REACH_SECONDS)
        each.batches += each.at
        each.part.kill()
        self._start_incarnation(each, number)

    def change_partition(self, work: Callable[[Any, str, str], Coroutine[Any, Any, Any]], partition: int) -> None:
        """Change a partition as another client of NATS. Do nothing if the servers do not respond."""
        name, subject = self.layout.stream(partition), self.layout.subject(partition)

        async def main() -> None:
            async with asyncio.timeout(2.0):
                client = await nats.connect(list(self.plane.servers), allow_reconnect=False)
                try:
                    await work(client.jetstream(timeout=1.0), name, subject)
                finally:
                    await client.close()

        with suppress(Exception):
            asyncio.run(main())
            self.counted["done to partitions"] += 1

    # --- results

    def _settle(self) -> list[Result]:
        """Request reports of replicas until all are right or the time is over. Return their results."""
        facts = [truth.read_facts(each.facts) for each in self._engines]
        names = [self.registration(place).key[0] for place in range(len(self._engines))]
        end = time.monotonic() + SETTLE_SECONDS
        while True:
            digests = {
                name: fact[truth.Key(each.incarnation, each.at - 1).packed]
                for name, fact, each in zip(names, facts, self._engines, strict=True)
            }
            reports = {number: self._request_report(part) for number, part in self._replicas.items()}
            results = [judge(f"r{number}", name, reports[number], digests[name]) for number in reports for name in names]
            if all(result.kind == "right" for result in results) or time.monotonic() > end:
                self._count(reports)
                return results
            for name, each in zip(names, self._engines, strict=True):
                if any(_is_unconfirmed(one.held.get(name), digests[name]) for one in reports.values()):
                    each.confirm()
            time.sleep(POLL_SECONDS)

    def _request_report(self, part: Part) -> TrustReport:
        try:
            report = part.exchange(seconds=ASK_SECONDS)
        except SilentPartError as error:
            raise BrokenStageError(str(error)) from error
        if not isinstance(report, TrustReport):
            raise BrokenStageError(f"{part.name} has failed: {report}")
        return report

    def _count(self, reports: dict[int, TrustReport]) -> None:
        """Add the counters of bridges and replicas, and store the faults that they report."""
        bridges = {number: self._request_report(part) for number, part in self._bridges.items()}
        for kind, found in (("b", bridges), ("r", reports)):
            for number, each in found.items():
                self.counted.update({name: value for name, value in each.counted.items() if name != "claims"})
                wrong_counts = [f"{value} {name}" for name in FORBIDDEN_COUNTERS if (value := each.counted.get(name))]
                if each.fault or wrong_counts:
                    self.faults.append(f"{kind}{number}: {' '.join([*wrong_counts, each.fault])}")

    def _audit(self) -> Audit:
        try:
            at_once = 1 if "small max_pending" in self.plan.traits else PAGES_AT_ONCE
            return asyncio.run(read_log(self.plane.servers, self.layout, at_once))
        except Exception as error:
            raise BrokenStageError(f"the log cannot be read: {error!r}") from error

    def _check_losses(self, audit: Audit) -> list[str]:
        """Return a flaw if batches are lost that their engines could still have sent."""
        if not audit.lost or "short replay" in self.plan.traits:
            return []
        return [f"{audit.lost} batches are lost, though every engine had all of them"]

    def _check_claims(self) -> CheckedClaims:
        facts = [truth.read_facts(each.facts) for each in self._engines]
        exact = [not dict(each.made.options).get("heartbeat") for each in self._engines]
        found = CheckedClaims(0, ())
        for number in range(REPLICAS):
            found = found.merge(check_claims(f"r{number}", truth.read_claims(self._claims_path(number)), facts, exact))
        return found


async def _delete(js: Any, name: str, _: str) -> None:
    await js.delete_stream(name)


async def _purge(js: Any, name: str, _: str) -> None:
    await js.purge_stream(name, seq=(await js.stream_info(name)).state.last_seq)


async def _publish_foreign_message(js: Any, _: str, subject: str) -> None:
    await js.publish(subject, Random(subject).randbytes(100))


def _is_unconfirmed(held: Held | None, truth: bytes) -> bool:
    """Return whether a replica holds what an engine holds and is not EXACT, so that a live batch may have to confirm it."""
    return held is not None and held.trust != Trust.EXACT.name and held.digest == truth


def _stop(part: Part) -> None:
    if part.is_alive:
        part.stop()


def _drop_live_batches(stage: Stage, number: int) -> None:
    for proxy in stage.leg(number).proxies[:1]:
        proxy.drop(0.2, seed=stage.plan.number)


def _apply_to_proxies(stage: Stage, number: int, act: Callable[[Any], None]) -> None:
    for proxy in stage.leg(number).proxies:
        act(proxy)


Action = Callable[[Stage, int], None]
STRIKES: Final[dict[str, Action]] = {
    "kill bridge": lambda stage, number: stage.bridge(number).kill(),
    "stop bridge": lambda stage, number: _stop(stage.bridge(number)),
    "bridge misses an incarnation": Stage.miss_incarnation,
    "servers lose pages": Stage.copy_servers,
    "kill replica": lambda stage, number: stage.replica(number).kill(),
    "stop replica": lambda stage, number: _stop(stage.replica(number)),
    "kill server": lambda stage, number: stage.server(number).kill(),
    "stop server": lambda stage, number: stage.server(number).stop(),
    "kill engine": lambda stage, number: stage.start_next_incarnation(number, orderly=False),
    "end engine": lambda stage, number: stage.start_next_incarnation(number, orderly=True),
    "stop engine": lambda stage, number: stage.engine(number).stop(),
    "delete partition": lambda stage, partition: stage.change_partition(_delete, partition),
    "purge partition": lambda stage, partition: stage.change_partition(_purge, partition),
    "stranger's message": lambda stage, partition: stage.change_partition(_publish_foreign_message, partition),
    "cut engine off": lambda stage, number: _apply_to_proxies(stage, number, lambda proxy: proxy.cut(refuse=True)),
    "half-open engine": lambda stage, number: _apply_to_proxies(stage, number, lambda proxy: proxy.half_open()),
    "drop live batches": _drop_live_batches,
}
HEALS: Final[dict[str, Action]] = {
    "kill bridge": Stage.resume_bridge,
    "stop bridge": lambda stage, number: stage.bridge(number).go_on(),
    "bridge misses an incarnation": Stage.end_missed_incarnation,
    "servers lose pages": Stage.lose_pages,
    "kill replica": Stage.resume_replica,
    "stop replica": lambda stage, number: stage.replica(number).go_on(),
    "kill server": lambda stage, number: stage.server(number).launch(),
    "stop server": lambda stage, number: stage.server(number).go_on(),
    "stop engine": lambda stage, number: stage.engine(number).go_on(),
    "cut engine off": lambda stage, number: stage.leg(number).heal(),
    "half-open engine": lambda stage, number: stage.leg(number).heal(),
    "drop live batches": lambda stage, number: stage.leg(number).heal(),
}


def play(plan: Plan, logs: str = "") -> Outcome:
    """Play one round. If its stage fails, the outcome has the error."""
    began = time.monotonic()
    preload("tests.system.plane_chaos.roles")
    try:
        with Stage(plan, logs) as stage:
            return stage.play()
    except (BrokenStageError, SilentPartError, TimeoutError) as error:
        return Outcome.unplayable(
            plan.seed, plan.number, plan.faults, f"{type(error).__name__}: {error}", time.monotonic() - began
        )
