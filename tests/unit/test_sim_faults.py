"""`kvevents.sim.live`: the notation of faults, the engines that they affect, and their times."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.errors import ConfigError
from kvevents.routing import Worker
from kvevents.sim.live import FAULT_KINDS, RequestedFault, begin_faults, parse_faults
from kvevents.sim.settings import LiveTimers
from kvevents.sim.simulated_fleet import Timeline

# --- notation


def test_every_kind_of_fault_is_parsed() -> None:
    text = "restart:60s,reset:1.5m,drop:1%,delay:20ms,cut:2h,stall:7s"
    assert parse_faults(text) == [
        RequestedFault("restart", 60),
        RequestedFault("reset", 90),
        RequestedFault("drop", 0.01),
        RequestedFault("delay", 0.02),
        RequestedFault("cut", 7200),
        RequestedFault("stall", 7),
    ]
    assert {fault.kind for fault in parse_faults(text)} == set(FAULT_KINDS)
    assert [fault.kind for fault in parse_faults(text) if not FAULT_KINDS[fault.kind].network] == ["restart", "reset"]


@pytest.mark.parametrize("text", ["", " ", ",", " , "])
def test_an_empty_list_of_faults_is_valid(text: str) -> None:
    assert parse_faults(text) == []


def test_blanks_around_commas_are_ignored_and_the_order_is_preserved() -> None:
    assert parse_faults(" drop:0% , restart:1s,drop:100%,") == [
        RequestedFault("drop", 0),
        RequestedFault("restart", 1),
        RequestedFault("drop", 1),
    ]


WRONG_DURATIONS = ("", "60", "0s", "0.0ms", "-1s", "1 s", "s", "1d", "1%", "1e3s", ".5s", "nans", "\u0663s", "1s:2s")


@pytest.mark.parametrize(
    ("name", "amount"),
    [*(("restart", amount) for amount in WRONG_DURATIONS), *((name, "60") for name in ("reset", "delay", "cut", "stall"))],
)
def test_an_invalid_duration_raises_with_an_example(name: str, amount: str) -> None:
    """One parser reads the durations of all kinds, so one kind is tested with all invalid ones and each other kind with one."""
    message = f"invalid fault '{name}:{amount}': expected a duration above 0, for example {name}:60s"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        parse_faults(f"restart:1s,{name}:{amount}")


@pytest.mark.parametrize("amount", ["", "1", "0.01", "101%", "100.1%", "-1%", "%", "1 %", "60s", "\u0663%"])
def test_an_invalid_share_raises_with_an_example(amount: str) -> None:
    message = f"invalid fault 'drop:{amount}': expected a share from 0% to 100%, for example drop:1%"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        parse_faults(f"drop:{amount}")


@pytest.mark.parametrize("text", ["crash:1s", "Restart:1s", ":1s", "restart 1s", "1%"])
def test_an_unknown_fault_raises_with_the_list_of_known_ones(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^unknown fault '") as caught:
        parse_faults(text)
    for name, kind in FAULT_KINDS.items():
        assert f"{name}:{kind.example} ({kind.effect})" in str(caught.value)


@given(st.sampled_from(sorted(FAULT_KINDS)), st.floats(0.001, 1e6).map(lambda amount: round(amount, 3)))
def test_any_amount_is_parsed_as_written(name: str, amount: float) -> None:
    if FAULT_KINDS[name].share:
        read = {f"{min(amount, 100.0):.3f}%": min(amount, 100.0) / 100}
    else:
        read = {f"{amount:.3f}s": amount, f"{amount:.3f}ms": amount / 1_000, f"{amount:.3f}m": amount * 60}
    for written, meant in read.items():
        (fault,) = parse_faults(f"{name}:{written}")
        assert fault.kind == name
        assert fault.amount == pytest.approx(meant)


# --- the affected engines


TIMERS = LiveTimers()


class InjectedFaults:
    """The parts of a live fleet that faults use; its engines and proxies record what is done to them, and when."""

    def __init__(self, engines: int, pace: float = 1.0) -> None:
        self.pace = self.scale = pace
        self.timeline = Timeline()
        self.injected: Counter[str] = Counter()
        self.stalled: set[Worker] = set()
        self.log: list[tuple[float, str, Worker, Any]] = []
        workers = [(f"engine-{number}", 0) for number in range(engines)]
        self.fleet = SimpleNamespace(
            done=False,
            restart=lambda worker, down: self._note("restart", worker)(down),
            workers={
                worker: SimpleNamespace(is_up=True, incarnation=0, engine=SimpleNamespace(reset=self._note("reset", worker)))
                for worker in workers
            },
        )
        self.sockets = SimpleNamespace(
            proxies={worker: (self._proxy("live", worker), self._proxy("replay", worker)) for worker in workers}
        )

    def schedule_after(self, seconds: float, action: Callable[[], object]) -> None:
        self.timeline.schedule_after(seconds * self.pace, action)

    def play(self, text: str, seconds: float, seed: int = 0) -> list[tuple[float, str, Worker, Any]]:
        """Inject these faults for `seconds` of real time and return the log."""
        self.begin(text, seed)
        while (due := self.timeline.next) is not None and due <= seconds * self.pace:
            self.timeline.step()
        return self.log

    def begin(self, text: str, seed: int = 0) -> None:
        self.requested, self.settings = parse_faults(text), SimpleNamespace(seed=seed)
        self.timers = TIMERS
        begin_faults(self)  # type: ignore[arg-type]

    def entries_of(self, what: str) -> list[tuple[float, Worker]]:
        return [(at, worker) for at, done, worker, _ in self.log if done == what]

    def _proxy(self, name: str, worker: Worker) -> SimpleNamespace:
        effect = ("cut", "stall", "heal", "drop", "delay", "resume", "flow")
        return SimpleNamespace(**{each: self._note(f"{name} {each}", worker) for each in effect})

    def _note(self, what: str, worker: Worker) -> Callable[..., None]:
        def append_entry(*given: Any, **named: Any) -> None:
            self.log.append((round(self.timeline.now / self.pace, 6), what, worker, (*given, *named.values())))

        return append_entry


@given(st.sampled_from(["restart", "reset", "cut"]), st.integers(1, 6), st.integers(1, 20), st.integers(0, 3))
def test_every_engine_gets_equally_many_faults(kind: str, engines: int, times: int, seed: int) -> None:
    """Each engine is affected once before any is affected again, at equal intervals."""
    fleet = InjectedFaults(engines)
    fleet.play(f"{kind}:2s", 2.0 * times + 1.0, seed)
    occurrences = fleet.entries_of({"cut": "live cut"}.get(kind, kind))
    assert [at for at, _ in occurrences] == [2.0 * number for number in range(1, times + 1)]
    injected = [worker for _, worker in occurrences]
    for start in range(0, times, engines):
        round_ = injected[start : start + engines]
        assert len(set(round_)) == len(round_)
    assert fleet.injected == {kind: times}


def test_the_seed_chooses_the_engines() -> None:
    """The same seed chooses the same engines; another seed or another fault of the same kind chooses others."""
    first, again, other = (InjectedFaults(5).play("reset:1s", 20, seed) for seed in (1, 1, 2))
    assert first == again != other
    both = InjectedFaults(5)
    both.play("reset:1s,reset:1s", 20)
    occurrences = [worker for _, worker in both.entries_of("reset")]
    assert occurrences[::2] != occurrences[1::2]


def test_seconds_are_real_time_at_any_pace() -> None:
    """If a fleet runs ten times as fast, an interval or downtime takes ten times as many of its own seconds."""
    slow, fast = InjectedFaults(2), InjectedFaults(2, pace=10.0)
    assert [entry[:3] for entry in slow.play("restart:2s", 9)] == [entry[:3] for entry in fast.play("restart:2s", 9)]
    assert {entry[3] for entry in slow.log} == {(TIMERS.down,)}
    assert {entry[3] for entry in fast.log} == {(TIMERS.down * 10,)}


def test_no_fault_is_injected_after_all_requests_are_answered() -> None:
    fleet = InjectedFaults(2)
    fleet.begin("restart:1s,cut:1s")
    fleet.fleet.done = True
    while fleet.timeline.next is not None:
        fleet.timeline.step()
    assert (fleet.log, fleet.injected) == ([], {})


def test_a_fault_of_an_engine_that_is_down_is_not_counted() -> None:
    fleet = InjectedFaults(1)
    fleet.fleet.workers["engine-0", 0].is_up = False
    fleet.play("restart:1s,reset:1s", 5)
    assert sum(fleet.injected.values()) == 0


# --- effects


def test_permanent_faults_apply_to_all_engines_from_the_beginning() -> None:
    """They apply to live events only; each engine loses other events."""
    fleet = InjectedFaults(3)
    fleet.play("drop:5%,delay:20ms", 100, seed=7)
    assert {(at, what) for at, what, _, _ in fleet.log} == {(0.0, "live drop"), (0.0, "live delay")}
    drops = [given for _, what, _, given in fleet.log if what == "live drop"]
    assert [share for share, _ in drops] == [0.05] * 3
    assert len({seed for _, seed in drops}) == 3
    assert [given for _, what, _, given in fleet.log if what == "live delay"] == [(0.02,)] * 3
    assert fleet.injected == {}


def test_a_cut_closes_both_connections() -> None:
    fleet = InjectedFaults(1)
    fleet.play("cut:1s", 1)
    assert [what for _, what, _, _ in fleet.log] == ["live cut", "replay cut"]


def test_a_stall_ends() -> None:
    """It ends on both connections, without other effects; a stalled engine does not stall again meanwhile."""
    fleet = InjectedFaults(1)
    fleet.play("stall:2s", 6)
    logged = [(at, what) for at, what, _, _ in fleet.log]
    both = [
        ("live stall", 2.0),
        ("replay stall", 2.0),
        ("live resume", 2 + TIMERS.stall),
        ("replay resume", 2 + TIMERS.stall),
    ]
    assert logged == [(at, what) for what, at in [*both, ("live stall", 6.0), ("replay stall", 6.0)]]
    assert fleet.injected["stall"] == 2
