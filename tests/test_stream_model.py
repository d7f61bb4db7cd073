"""The stream against a model network: whatever is dropped, cut, restarted or truncated, order and trust hold."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvevents.stream import Source, Stream, StreamLimits, Trust
from network_model import Network, Publisher, Twins, Word

LIMITS = StreamLimits(max_pending_batches=40, max_recent=8)
KINDS = st.sampled_from(["sent", "sent", "sent", "dropped", "burnt", "clear", "unreadable", "unreadable clear"])
WORDS: st.SearchStrategy[Word] = st.sampled_from(["EXACT", "EXACT", "EXACT", "lie", "DEGRADED", "STALE"])


class StreamMachine(RuleBasedStateMachine):
    """Every sequence of faults leaves each batch delivered once and in order per incarnation, and no false EXACT."""

    network: Network

    @initialize(buffer_steps=st.integers(1, 30), replay=st.booleans(), up=st.booleans(), at_once=st.booleans())
    def begin(self, buffer_steps: int, replay: bool, up: bool, at_once: bool) -> None:
        self.has_replay = replay
        source = Source("tcp://e:1", "tcp://e:2" if replay else None, topic="k", name="e")
        self.network = Network(Publisher(buffer_steps), self.open(source))
        self.network.reports_at_once = at_once or isinstance(self.network.stream, Twins)
        if up:
            self.network.connect()

    def open(self, source: Source) -> Stream | Twins:
        return Stream(source, LIMITS)

    @rule(kinds=st.lists(KINDS, min_size=1, max_size=12))
    def publish(self, kinds: list[str]) -> None:
        for kind in kinds:
            self.network.publish(
                drop=kind == "dropped", burnt=kind == "burnt", clear="clear" in kind, unreadable="unreadable" in kind
            )

    @rule(says=WORDS, drop=st.booleans())
    def heartbeat(self, says: Word, drop: bool) -> None:
        self.network.publish(says=says, drop=drop)

    @rule()
    def spoil(self) -> None:
        self.network.spoil()

    @precondition(lambda self: hasattr(self, "network") and self.network.unreported)
    @rule(which=st.integers(0, 20))
    def report_heartbeat(self, which: int) -> None:
        """Late, and in any order."""
        self.network.report(which)

    @rule(count=st.integers(50, 120))
    def flood(self, count: int) -> None:
        self.network.publish(drop=True)
        for _ in range(count):
            self.network.publish()

    @rule(count=st.integers(1, 30))
    def read_live(self, count: int) -> None:
        self.network.read_live(count)

    @rule(count=st.integers(1, 30))
    def read_replies(self, count: int) -> None:
        self.network.read_replies(count)

    @rule(seconds=st.sampled_from([0.1, 0.9, 1.1, 2.1, 40.0]))
    def advance(self, seconds: float) -> None:
        self.network.advance(seconds)

    @rule()
    def cut(self) -> None:
        self.network.cut()

    @rule()
    def connect(self) -> None:
        self.network.connect()

    @rule(unseen=st.integers(0, 60))
    def restart(self, unseen: int) -> None:
        self.network.restart()
        for _ in range(unseen):
            self.network.publish()

    @rule(waiting=st.integers(0, 3))
    def save(self, waiting: int) -> None:
        """The application writes a checkpoint and its state, maybe before it was handed out the newest deliveries."""
        self.told()
        self.network.save(waiting)

    @precondition(lambda self: hasattr(self, "network") and self.network.saved)
    @rule(which=st.integers(0, 5) | st.just(-1), newer=st.integers(0, 2))
    def resubscribe(self, which: int, newer: int) -> None:
        """The subscriber restarts with one of its checkpoints, and the state of that moment or of a later one."""
        self.network.resubscribe(self.open(self.network.stream.source), which, newer)

    @rule(limit=st.none() | st.integers(1, 6), lose_marker=st.booleans(), mute=st.booleans())
    def weather(self, limit: int | None, lose_marker: bool, mute: bool) -> None:
        self.network.reply_limit, self.network.lose_marker, self.network.mute = limit, lose_marker, mute

    @invariant()
    def bounded(self) -> None:
        if hasattr(self, "network"):
            assert self.network.stream.waiting <= 2 * LIMITS.max_pending_batches

    @invariant()
    def divergence_is_never_a_false_alarm(self) -> None:
        if hasattr(self, "network") and self.network.honest:
            assert self.network.stream.counters.divergences == 0

    @precondition(lambda self: hasattr(self, "network"))
    @rule()
    def heal(self) -> None:
        """On a healthy network everything that still exists arrives, and trust says whether that is everything."""
        network = self.network
        self.quiesce()
        life = network.publisher.life
        observer = network.observer
        if self.has_replay and life.payloads:
            assert observer.life == life.number, "an idle engine's restart was not noticed"
            assert observer.next_seq > max(life.payloads), "the tail of an idle engine was not found"
        network.publish()
        network.publish(says="EXACT")
        self.quiesce()
        if not self.has_replay:
            # If the heartbeat has shown another life, nobody can be asked for what that holds.
            network.publish()
            self.quiesce()
        assert observer.next_seq == life.next_seq, "the newest batch was not reached"
        assert observer.life == life.number
        if not self.has_replay:
            assert network.stream.trust == Trust.DEGRADED
        elif network.stream.trust != Trust.EXACT:
            assert network.stream.trust == Trust.DEGRADED
            assert observer.gap_since_clear or observer.unreadable_since_clear, (
                f"degraded without a cause: {network.stream.trust}"
            )
        assert not observer.spoilt, "a true digest has not found what was wrong"
        assert (network.stream.trust == Trust.EXACT) <= observer.holds_everything()

    def quiesce(self) -> None:
        """Everything has arrived and was reported, and what came of that too."""
        self.network.quiesce()
        self.told()
        while self.network.moved:
            self.network.quiesce()
            self.told()

    def told(self) -> None:
        """Everything that a consumer found has been reported."""
        self.network.report_all()

    def teardown(self) -> None:
        if hasattr(self, "network"):
            self.heal()


class RawStreamMachine(StreamMachine):
    """The same without decoding: what its consumer reports, late and in any order, leaves what decoding would have left."""

    twins: Twins

    def open(self, source: Source) -> Twins:
        self.twins = Twins(source, LIMITS)
        return self.twins

    @precondition(lambda self: hasattr(self, "twins") and self.twins.unreported)
    @rule(choices=st.lists(st.integers(0, 20), min_size=1, max_size=6))
    def report(self, choices: list[int]) -> None:
        for which in choices[: len(self.twins.unreported)]:
            self.twins.report_one(which)
        self.network.check_exact()

    @precondition(lambda self: hasattr(self, "twins"))
    @rule()
    def told(self) -> None:
        self.twins.report_all()
        super().told()


SETTINGS = settings(max_examples=300, stateful_step_count=40)
TestStream = StreamMachine.TestCase
TestStream.settings = SETTINGS
TestRawStream = RawStreamMachine.TestCase
TestRawStream.settings = SETTINGS
