"""The stage of one round: servers, engines, bridges and replicas, and proxies between engines and bridges."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from kvevents.service.fleet.registration import Registration
from kvevents.stream import Trust
from kvevents_plane.bridge import BridgeSettings, Watch
from kvevents_plane.layout import Layout
from kvevents_plane.settings import PlaneSettings, ReaderLimits, ReplicaTimers
from tests.system.chaos_kit import truth
from tests.system.chaos_kit.engine import Engine, times_path
from tests.system.chaos_kit.judging import Outcome, Result, judge
from tests.system.chaos_kit.parts import BrokenStageError, Part, preload
from tests.system.chaos_kit.stage import EngineProcess, RoundStage
from tests.system.plane_chaos import roles
from tests.system.plane_chaos.audit import Audit, read_log
from tests.system.plane_chaos.faults import FAULTS, LINK_FAULTS
from tests.system.plane_chaos.judging import check_claims, oldest_claim
from tests.system.plane_chaos.plan import BRIDGES, LEAST_PARTITION_BYTES, REPLICAS, TAIL, Plan
from tests.system.plane_chaos.roles import BridgeRole, ReplicaRole, TrustReport
from tools.nats_servers import NatsServer, nats_cluster, nats_server

SETTLE_SECONDS: Final = 60.0
"""Limit of the wait until every replica is right, after the last batch."""
POLL_SECONDS: Final = 0.05
PAGES_AT_ONCE: Final = 200
"""Pages per request when the log is read at the end."""
SMALL_PAYLOAD: Final = 24 << 10
SMALL_PENDING: Final = 1 << 20
DEAD_SECONDS: Final = 4.0
"""Time after which the log drops an engine; longer than most faults last."""
SNAPSHOT_SECONDS: Final = 0.5
OLDEST_SECONDS: Final = 3.0
"""Seconds for which the content of a claim may have been outdated: the documented two, and one for a busy machine."""
FORBIDDEN_COUNTERS: Final = ("invalid_records", "duplicates", "failures")
"""Counters of bridges and replicas that must stay 0."""

preload(roles.__name__)


class PlaneEngine(EngineProcess):
    """An engine whose incarnations publish `batches` at `rate`, except the last few."""

    def __init__(self, stage: Stage, number: int, made: Engine) -> None:
        plan = stage.plan
        super().__init__(stage, f"engine {number}", made, f"{plan.seed}/{plan.number}/{number}")
        self.registration: Final = Registration(
            instance=f"e{number}", endpoint=made.endpoint, replay_endpoint=made.replay_endpoint, model="m", topic=made.topic
        )
        self.name: Final = self.registration.key[0]
        """Its name in the index."""
        self.batches: Final = plan.batches(number)
        self._rate: Final = plan.rates[number]
        self.run()

    def run(self) -> None:
        """Start the next incarnation."""
        self.start(self.batches)
        self.publish(self.batches - TAIL, self._rate)

    def restart(self) -> None:
        self.kill()
        self.run()

    def close_and_restart(self) -> None:
        """Restart it after it has published everything."""
        self.close()
        self.restart()


class Stage(RoundStage[Plan]):
    """Executes one plan."""

    faults = FAULTS

    def __init__(self, plan: Plan, logs: str = "") -> None:
        super().__init__(plan)
        self.servers: list[NatsServer] = []
        self.engines: list[PlaneEngine] = []
        self.bridges: list[Part] = []
        self.replicas: list[Part] = []
        self.copies: list[Mapping[str, Path]] = []
        """Copies of the files of servers from earlier moments, by server."""
        self._reported: list[str] = []
        """Faults that bridges and replicas have reported last."""
        self._logs: Final = logs

    # --- processes

    def set_up(self) -> None:
        traits = self.plan.traits
        options: dict[str, Any] = {}
        if "small max_payload" in traits:
            options["max_payload"] = SMALL_PAYLOAD
        if "small max_pending" in traits:
            options["max_pending"] = SMALL_PENDING
        if "cluster" in traits:
            cluster = self.undo.enter_context(nats_cluster(self.folder / "nats", **options))
            self.servers = list(cluster.nodes.values())
        else:
            self.servers = [self.undo.enter_context(nats_server(self.folder / "nats", **options))]
        self.plane = PlaneSettings(
            servers=tuple(server.url for server in self.servers),
            name="chaos",
            partitions=self.plan.partitions,
            copies=3 if "cluster" in traits else 1,
            reader=ReaderLimits(heartbeat_seconds=0.3, quiet_heartbeats=1, check_seconds=1.0, digest_pages=4),
            replicas=ReplicaTimers(retry_seconds=0.3, compare_seconds=0.5, turn_seconds=3.0, rebuild_seconds=5.0),
            partition_bytes=LEAST_PARTITION_BYTES if "small partitions" in traits else 256 << 20,
        )
        self.layout = Layout("chaos", self.plan.partitions)
        for number, drawn in enumerate(self.plan.engines):
            endpoint, replay_endpoint = self.reserve_endpoint(), self.reserve_endpoint()
            for _ in range(BRIDGES):
                self.add_leg(endpoint, replay_endpoint)
            made = replace(drawn, endpoint=endpoint, replay_endpoint=replay_endpoint)
            self.engines.append(PlaneEngine(self, number, made))
        for number in range(BRIDGES):
            self.bridges.append(self.start_part(f"bridge {number}", roles.bridge, self._bridge_role(number)))
        for number in range(REPLICAS):
            self.replicas.append(self.start_part(f"replica {number}", roles.replica, self._replica_role(number)))

    def _bridge_role(self, number: int) -> BridgeRole:
        watches = []
        for engine, leg in zip(self.engines, self.legs[number::BRIDGES], strict=True):
            source = msgspec.structs.replace(
                engine.registration.source(), endpoint=leg.endpoint, replay_endpoint=leg.replay_endpoint
            )
            watches.append(Watch(source, msgspec.json.encode(engine.registration)))
        settings = BridgeSettings(name=f"b{number}", dead_seconds=DEAD_SECONDS, heartbeat_seconds=0.3)
        return BridgeRole(self.plane, settings, tuple(watches), self._log(f"b{number}"))

    def _replica_role(self, number: int) -> ReplicaRole:
        return ReplicaRole(
            self.plane,
            f"r{number}",
            tuple(engine.name for engine in self.engines),
            self._claims_path(number),
            1e6 if "no snapshots" in self.plan.traits else SNAPSHOT_SECONDS,
            self._log(f"r{number}"),
            clock_ahead=3600.0 if number == 0 and "replica with a clock ahead" in self.plan.traits else 0.0,
        )

    def _claims_path(self, number: int) -> Path:
        return self.folder / f"replica-{number}.claims"

    def _log(self, name: str) -> str:
        return f"{self._logs}/{name}.log" if self._logs else ""

    def find_missed_engine(self, bridge: int) -> PlaneEngine:
        """Return the engine of which a bridge misses an incarnation."""
        return self.engines[(self.plan.number + bridge) % len(self.engines)]

    # --- commands

    def wait(self, seconds: float) -> None:
        """Wait until this many seconds after the begin of the round."""
        time.sleep(max(0.0, self.began + seconds - time.monotonic()))

    def tail(self) -> None:
        """End every fault, start killed bridges and replicas again, and publish the last batches of every engine."""
        for server in self.servers:
            server.resume()
            server.launch()
        for server in self.servers:
            server.settle()
        for leg in self.legs:
            leg.heal()
        for engine in self.engines:
            engine.part.go_on()
        for part in (*self.bridges, *self.replicas):
            part.resume()
        for engine in self.engines:
            engine.publish_all(engine.batches)

    # --- results

    def settle(self) -> list[Result]:
        """Request reports of replicas until all are right or the time is over."""
        facts = [truth.read_facts(engine.facts) for engine in self.engines]
        end = time.monotonic() + SETTLE_SECONDS
        while True:
            digests = [engine.digest(fact) for engine, fact in zip(self.engines, facts, strict=True)]
            reports = [self._request_report(part) for part in self.replicas]
            results: list[Result] = []
            for number, (engine, digest) in enumerate(zip(self.engines, digests, strict=True)):
                states = [report.state_of(engine.name) for report in reports]
                results += [judge(f"r{replica} e{number}", state, digest) for replica, state in enumerate(states)]
                if any(state.trust != Trust.EXACT.name and state.digest == digest for state in states):
                    engine.confirm()  # a live batch may have to confirm what a replica holds
            if all(result.kind == "right" for result in results) or time.monotonic() > end:
                self._count([*map(self._request_report, self.bridges), *reports])
                return results
            time.sleep(POLL_SECONDS)

    def _request_report(self, part: Part) -> TrustReport:
        report = part.exchange()
        if not isinstance(report, TrustReport):
            raise BrokenStageError(f"{part.name} has failed: {report}")
        return report

    def _count(self, reports: Sequence[TrustReport]) -> None:
        """Add the counters of bridges and replicas, and store the faults that they report."""
        for part, report in zip((*self.bridges, *self.replicas), reports, strict=True):
            self.counted.update({name: value for name, value in report.counted.items() if name != "claims"})
            if report.fault:
                self._reported.append(f"{part.name}: {report.fault}")

    def check(self, outcome: Outcome) -> Outcome:
        """Return the outcome with errors in the log, in the claims of replicas and in counters."""
        audit = self._audit()
        flaws = [*audit.flaws[:3], *(f"{self.counted[name]} {name}" for name in FORBIDDEN_COUNTERS if self.counted[name])]
        if audit.lost and "short replay" not in self.plan.traits:
            flaws.append(f"{audit.lost} batches are lost, though every engine had all of them")
        facts = [truth.read_facts(engine.facts) for engine in self.engines]
        exact = [not dict(engine.made.options).get("heartbeat") for engine in self.engines]
        times = [truth.read_times(times_path(each.facts)) if has else {} for each, has in zip(self.engines, exact, strict=True)]
        ages = [0.0]
        for number, part in enumerate(self.replicas):
            checked = check_claims(truth.read_claims(self._claims_path(number)), facts, exact)
            self.counted["claims"] += checked.claims
            ages.append(oldest_claim(truth.read_claims(self._claims_path(number)), facts, times))
            flaws += [f"{part.name}: {error}" for error in checked.wrong]
        if not LINK_FAULTS & set(self.plan.faults):
            self.counted["oldest claim in ms"] = int(1_000 * max(ages))
            if max(ages) > OLDEST_SECONDS:
                flaws.append(f"a replica was EXACT with content that had been outdated for {max(ages):.1f} s")
        self.counted.update(pages=audit.pages, logged=audit.batches, lost=audit.lost)
        return replace(outcome, flaws=tuple(flaws), reported="; ".join(self._reported))

    def _audit(self) -> Audit:
        try:
            at_once = 1 if "small max_pending" in self.plan.traits else PAGES_AT_ONCE
            return asyncio.run(read_log(self.plane.servers, self.layout, at_once))
        except Exception as error:
            raise BrokenStageError(f"the log cannot be read: {error!r}") from error
