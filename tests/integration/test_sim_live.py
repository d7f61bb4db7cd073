"""`kvevents.sim.live`: small fleets over real sockets, with each kind of fault."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import pytest
import zmq

from kvevents import Subscriber
from kvevents.errors import ConfigError, EndpointError, ExternalError
from kvevents.index import ApplyResult
from kvevents.routing import Choice, Policy, Prompt, Worker, policy
from kvevents.routing.policy_types import Candidate
from kvevents.sim import routers
from kvevents.sim.live import LiveFleet
from kvevents.sim.requests import Request
from kvevents.sim.results import PolicyResult, StreamResult
from kvevents.sim.settings import FleetSettings, LiveTimers
from kvevents.sim.simulated_fleet import simulate
from kvevents.stream import RawBatch
from kvevents.testing import FaultProxy
from publisher_cases import wait_until
from resource_cases import leave_nothing_open
from sim_cases import conversations, request
from sim_live_cases import SMALL, open_fleet

TENANTS = (None, "one", "two")
MAX_SECONDS = 50.0
"""Seconds within which a run without waits must end. The fleet waits longer for events that never come."""


class RunResult(NamedTuple):
    """The results of a run."""

    fleet: LiveFleet
    result: PolicyResult
    streams: list[StreamResult]
    seconds: float


def run_fleet(requests: Sequence[Request], **given: Any) -> RunResult:
    with open_fleet(**given) as fleet:
        began = time.monotonic()
        result = fleet.run(requests)
        return RunResult(fleet, result, fleet.streams(), time.monotonic() - began)


def sum_streams(streams: Sequence[StreamResult], name: str) -> int:
    return sum(getattr(stream, name) for stream in streams)


def check_run(run: RunResult, requests: Sequence[Request]) -> None:
    """Check that all requests are answered, every lookup is compared, and no batch is lost."""
    result = run.result
    assert (result.requests, result.finished, result.refused) == (len(requests), len(requests), 0)
    assert (result.disagreements, result.unproven, result.examples) == (0, 0, [])
    assert result.checked >= result.finished
    assert sum_streams(run.streams, "lost") == 0
    assert [stream.trust for stream in run.streams] == ["EXACT"] * len(run.streams)
    assert run.seconds < MAX_SECONDS


# --- without faults


@pytest.mark.parametrize(
    ("given", "within"),
    [
        ({}, (None,)),
        ({"engines": 2, "ranks": 2, "dialect": "vllm-0.9.1"}, (None,)),
        ({"dialect": "vllm-0.24", "window": 24, "blocks": 140}, TENANTS),
        ({"dialect": "sglang-0.5.22"}, TENANTS),
        ({"engines": 2, "host_blocks": 60}, (None,)),
    ],
    ids=str,
)
def test_index_and_engines_agree_over_sockets(given: dict[str, Any], within: Sequence[str | None]) -> None:
    """This holds for several dialects, ranks, tenants, a window and host memory. Every batch is delivered once."""
    requests = list(conversations(60, rate=60, salts=within))
    run = run_fleet(requests, **given)
    check_run(run, requests)
    result = run.result
    assert result.checked == result.finished + result.preemptions
    assert result.cached_tokens > 0
    assert {(one.source, one.rank): one.batches for one in run.streams} == {
        worker: simulated.batches for worker, simulated in run.fleet.fleet.workers.items()
    }
    assert sum_streams(run.streams, "batches") == result.batches
    assert [sum_streams(run.streams, name) for name in ("replayed", "gaps_repaired", "resets", "reconnects")] == [0] * 4
    assert run.fleet.injected == {}


def test_a_time_scale_that_is_too_fast_is_reported_and_changes_no_result() -> None:
    """The fleet is later than the whole duration of the requests. Results have its simulated time."""
    requests = list(conversations(60, rate=60))
    run = run_fleet(requests, pace=10_000)
    check_run(run, requests)
    assert run.fleet.behind > run.result.seconds / 10_000


@pytest.mark.parametrize("pace", [0, -1, float("inf"), float("nan")])
def test_an_invalid_pace_is_refused(pace: float) -> None:
    with pytest.raises(ConfigError, match=r"^invalid pace .*: expected a number above 0"), open_fleet(pace=pace):
        pass


def test_a_request_that_the_dialect_cannot_announce_ends_the_run() -> None:
    with open_fleet(engines=1, dialect="vllm-0.9.1") as fleet, pytest.raises(ConfigError, match="has no field for salts"):
        fleet.run([request([1], salt="a")])


# --- in steps


@pytest.mark.parametrize("wrong", ["", "restart:300ms,reset:200ms,drop:20%"])
def test_a_fleet_in_steps_gives_equal_results_each_time(wrong: str) -> None:
    """This holds for all figures of the policy, and for the faults, although threads and sockets differ each time."""
    requests = list(conversations(80, rate=60, seed=1))
    runs = [run_fleet(requests, wrong=wrong, pace=None, blocks=140) for _ in range(2)]
    for run in runs:
        assert run.result == runs[0].result
        assert run.fleet.injected == runs[0].fleet.injected
        assert run.fleet.sockets.dropped == runs[0].fleet.sockets.dropped
        assert run.fleet.behind == 0.0
    assert (runs[0].result.finished, runs[0].result.disagreements, runs[0].result.unproven) == (len(requests), 0, 0)
    if wrong:
        assert min(runs[0].fleet.sockets.dropped, runs[0].result.retried, *runs[0].fleet.injected.values()) > 0


def test_a_fleet_in_steps_has_the_results_of_virtual_time() -> None:
    """Events that arrive without delay lead to equal choices, so the sockets change nothing."""
    requests = list(conversations(80, rate=60, seed=3))
    run = run_fleet(requests, pace=None)
    assert run.result == simulate(FleetSettings(**SMALL, event_delay=0.0), "prefix-aware", requests)


@pytest.mark.parametrize("wrong", ["delay:20ms", "cut:1s", "drop:1%,stall:1s"])
def test_a_fault_that_takes_real_time_is_refused_in_steps(wrong: str) -> None:
    kind = wrong.rpartition(",")[2].partition(":")[0]
    expected = rf"^invalid fault '{kind}' for a fleet that runs in steps: give the fleet a pace$"
    with pytest.raises(ConfigError, match=expected), open_fleet(pace=None, wrong=wrong):
        pass


def test_events_that_do_not_arrive_end_a_fleet_in_steps() -> None:
    """The error names the engine; without it the fleet would wait for ever."""
    timers = LiveTimers(settle=0.3)
    with open_fleet(engines=1, pace=None, wrong="drop:1%", timers=timers) as fleet:
        for proxy in fleet.sockets.proxies["engine-0", 0]:
            proxy.stall()
        with pytest.raises(ExternalError, match=r"^batches of engine-0/0 did not arrive within 0\.3 s$"):
            fleet.run([request(range(40)), request(range(40), at=1.0)])


# --- other consumers


def test_all_consumers_receive_the_same_batches() -> None:
    """One consumer is a bare SUB socket from the beginning. The other one is a `Subscriber` that starts in the middle."""
    requests = list(conversations(60, rate=60))
    with open_fleet(dialect="vllm-0.24") as fleet, zmq.Context() as context, context.socket(zmq.SUB) as bare:
        bare.subscribe(b"")
        bare.set_hwm(0)
        for address in fleet.addresses:
            bare.connect(address.endpoint)
        wait_until(lambda: fleet.sockets.subscribers() == 2, "the bare socket to be subscribed")
        late_consumer = LateConsumer(fleet)
        result = fleet.run(requests, look=late_consumer.look)
        live_payloads = sorted(bare.recv_multipart()[2] for _ in range(result.batches))
        assert bare.poll(0) == 0
        late_payloads = late_consumer.all(result.batches)
    assert late_consumer.after > 0
    assert sorted(late_payloads) == live_payloads
    assert result.disagreements == 0


class LateConsumer:
    """A consumer that subscribes in the middle of a run."""

    def __init__(self, fleet: LiveFleet) -> None:
        self.after = 0
        """The number of batches that were sent before."""
        self._sources = [address.source for address in fleet.addresses]
        self._found: list[bytes] = []
        self._wanted: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def look(self, fleet: LiveFleet) -> None:
        if not self.after and fleet.fleet.progress.finished >= 10:
            self.after = fleet.fleet.metrics.batches
            self._thread.start()

    def all(self, wanted: int) -> list[bytes]:
        self._wanted = wanted
        if not self._thread.ident:
            self._thread.start()
        self._thread.join(MAX_SECONDS)
        assert not self._thread.is_alive(), f"{len(self._found)} of {wanted} batches"
        return self._found

    def _run(self) -> None:
        with Subscriber(self._sources, decode=False) as subscriber:
            while self._wanted is None or len(self._found) < self._wanted:
                self._found += [one.payload for one in subscriber.receive_many(None, 0.05) if isinstance(one, RawBatch)]


# --- the end


def test_a_run_ends_at_once_if_another_thread_stops_it() -> None:
    """The next request is due in three months."""
    has_begun = threading.Event()
    requests = [request([1, 2, 3]), request([1], at=1e7)]
    stopped: list[float] = []
    with open_fleet(engines=2, pace=1.0) as fleet:

        def stop() -> None:
            assert has_begun.wait(MAX_SECONDS)
            stopped.append(time.monotonic())
            fleet.stop()

        stopping = threading.Thread(target=stop, daemon=True)
        stopping.start()
        result = fleet.run(requests, look=lambda _: has_begun.set())
        ended = time.monotonic()
        stopping.join(MAX_SECONDS)
    assert ended - stopped[0] < MAX_SECONDS
    assert (result.requests, result.disagreements) == (1, 0)


def test_a_run_that_was_stopped_before_it_began_sends_no_request() -> None:
    with open_fleet(engines=1) as fleet:
        fleet.stop()
        result = fleet.run(conversations(5))
    assert (result.requests, result.finished, result.checked) == (0, 0, 0)


class IndexFailedError(Exception):
    """An exception of an index."""


def fail_consumer(fleet: LiveFleet, when: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the consumer fail at its next delivery after `when` holds."""
    apply = fleet.follower.audit.apply

    def apply_or_fail(*given: Any) -> ApplyResult:
        if when():
            raise IndexFailedError("no room left")
        return apply(*given)

    monkeypatch.setattr(fleet.follower.audit, "apply", apply_or_fail)


@pytest.mark.parametrize("moment", ["at once", "at the end"])
def test_a_failure_of_the_consumer_is_raised(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes a failure after all answers, while the fleet waits for the last events, which are delayed here."""
    requests = [*conversations(60, rate=60), *([request([1], at=1e7)] if moment == "at once" else [])]
    with open_fleet(engines=2, wrong="delay:300ms") as fleet:
        fail_consumer(fleet, lambda: moment == "at once" or fleet.fleet.done, monkeypatch)
        began = time.monotonic()
        with pytest.raises(IndexFailedError, match="no room left"):
            fleet.run(requests)
        assert time.monotonic() - began < MAX_SECONDS
        assert fleet.fleet.done == (moment == "at the end")


def stop_soon(fleet: LiveFleet) -> None:
    """Stop the fleet when a batch was published."""
    if fleet.fleet.metrics.batches:
        fleet.stop()


def test_a_failure_of_the_consumer_while_the_run_is_stopped_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_fleet(engines=1, pace=1.0) as fleet:
        closing, close = threading.Event(), fleet.follower.close
        fail_consumer(fleet, lambda: closing.wait(MAX_SECONDS), monkeypatch)

        def signal_and_close() -> None:
            closing.set()
            close()

        monkeypatch.setattr(fleet.follower, "close", signal_and_close)
        with pytest.raises(IndexFailedError):
            fleet.run([request(range(20)), request([1], at=1e7)], look=stop_soon)


@pytest.mark.parametrize("wrong", ["", "drop:1%"])
def test_a_run_leaves_no_descriptors_and_threads(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds after a run, and after a run whose consumer failed."""
    with leave_nothing_open():
        run_fleet(list(conversations(10, rate=60)), wrong=wrong, engines=2)
    with leave_nothing_open(), open_fleet(wrong=wrong, engines=2) as fleet:
        fail_consumer(fleet, lambda: True, monkeypatch)
        with suppress(IndexFailedError):
            fleet.run(conversations(10, rate=60))


@pytest.mark.parametrize("wrong", ["", "drop:1%"])
@pytest.mark.parametrize("behind", [0, 1, 3])
def test_a_port_in_use_is_an_error_that_leaves_nothing_open(behind: int, wrong: str) -> None:
    """The port is the event port or the replay port of the first worker, or the replay port of the second one."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        refusal = pytest.raises(EndpointError, match=r"127\.0\.0\.1:\d+")
        with leave_nothing_open(), refusal, open_fleet(base_port=port - behind, wrong=wrong):
            pass


# --- faults


FAULTS: dict[str, Callable[[RunResult], object]] = {
    "restart:200ms": lambda run: sum_streams(run.streams, "resets") > 0 < run.result.retried,
    "drop:10%": lambda run: sum_streams(run.streams, "gaps_repaired") > 0,
    "cut:80ms": lambda run: sum_streams(run.streams, "reconnects") > 0,
    "stall:150ms": lambda run: run.fleet.injected["stall"] > 0,
    "reset:80ms": lambda run: run.fleet.injected["reset"] > 0 == sum_streams(run.streams, "resets"),
    # Replay, which is requested at the first live batch, can overtake delayed batches.
    "delay:100ms": lambda run: sum_streams(run.streams, "resets") == 0,
    "restart:200ms,drop:10%,cut:100ms": lambda run: (
        sum_streams(run.streams, "resets") > 0 < sum_streams(run.streams, "gaps_repaired")
    ),
}
"""Faults, and a condition that holds if the fault had an effect."""


@pytest.mark.parametrize("wrong", FAULTS)
def test_index_and_engines_agree_with_each_fault(wrong: str) -> None:
    """All requests are answered, all gaps are repaired, no lookup differs, and in the end all streams are EXACT again."""
    requests = list(conversations(80, rate=60, seed=1))
    run = run_fleet(requests, wrong=wrong, pace=2.0, blocks=140)
    result = run.result
    assert result.finished == result.requests == len(requests)
    assert (result.disagreements, result.examples) == (0, [])
    assert FAULTS[wrong](run), run
    assert sum_streams(run.streams, "lost") == 0 or "restart" in wrong
    assert run.seconds < MAX_SECONDS
    assert {stream.trust for stream in run.streams if has_published(run, stream)} <= {"EXACT"}


def test_a_connection_that_is_cut_at_the_end_of_the_run_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The streams may still be EXACT when the run begins to wait, because the subscriber does not know of it yet."""
    heal = FaultProxy.heal

    def cut_and_heal(proxy: FaultProxy) -> None:
        proxy.cut()
        heal(proxy)

    monkeypatch.setattr(FaultProxy, "heal", cut_and_heal)
    run = run_fleet(list(conversations(10, rate=60)), wrong="drop:1%", engines=2)
    assert [stream.trust for stream in run.streams] == ["EXACT", "EXACT"]
    assert all(stream.reconnects for stream in run.streams)


def has_published(run: RunResult, stream: StreamResult) -> bool:
    """Return whether the engine is up and has published in its incarnation. Without a batch it could be another process."""
    simulated = run.fleet.fleet.workers[stream.source, stream.rank]
    return simulated.is_up and simulated.batches > 0


def test_restarts_keep_the_ports_and_are_delivered_as_resets() -> None:
    requests = list(conversations(60, rate=60, seed=2))
    with open_fleet(wrong="restart:150ms", pace=2, engines=2) as fleet:
        before = fleet.addresses
        result = fleet.run(requests)
        streams = {(one.source, one.rank): one for one in fleet.streams()}
        assert fleet.addresses == before
    restarts = {(one.source, one.rank): one.restarts for one in result.workers}
    assert sum(restarts.values()) > 2
    # An incarnation without a batch might not be detected.
    assert all(0 < streams[worker].resets <= restarts[worker] for worker in restarts)
    assert result.retried > 0
    assert result.disagreements == 0


def test_a_stall_ends_no_other_fault() -> None:
    """An engine whose network was stalled once continues to lose batches."""
    dropped_before: list[int] = []

    def look(each: LiveFleet) -> None:
        if each.injected["stall"] and not dropped_before:
            dropped_before.append(dropped(each))

    def dropped(each: LiveFleet) -> int:
        return sum(proxy.counts.down.dropped for proxy, _ in each.sockets.proxies.values())

    with open_fleet(engines=1, wrong="stall:400ms,drop:50%", pace=1.0, blocks=300) as fleet:
        result = fleet.run(conversations(60, rate=60), look=look)
        assert dropped_before
        assert dropped(fleet) > dropped_before[0] + 3
    assert result.disagreements == 0


# --- trust


class RecordingPolicy:
    """A policy that records the trust of its candidates."""

    def __init__(self, chosen: Policy, seen: set[tuple[Worker, str]]) -> None:
        self.name, self.uses_index = chosen.name, chosen.uses_index
        self._chosen, self._seen = chosen, seen

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Choice:
        self._seen.update((one.worker, one.trust) for one in candidates)
        return self._chosen.choose(prompt, candidates)


def test_the_router_receives_the_trust_of_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose connections stay cut is never a candidate. The other one becomes EXACT."""
    seen: set[tuple[Worker, str]] = set()
    recording = {"prefix-aware": lambda seed=None: RecordingPolicy(policy("prefix-aware", seed), seen)}
    monkeypatch.setattr(routers, "POLICIES", recording)
    first, second = ("engine-0", 0), ("engine-1", 0)
    with open_fleet(engines=2, wrong="delay:1ms", timers=LiveTimers(settle=0.0)) as fleet:
        for proxy in fleet.sockets.proxies[first]:
            proxy.cut(refuse=True)
        wait_until(lambda: fleet.follower.trust[first] == "STALE", "the stream to be STALE")
        fleet.run(conversations(60, rate=60))
    assert {worker for worker, _ in seen} == {second}
    assert (second, "EXACT") in seen
