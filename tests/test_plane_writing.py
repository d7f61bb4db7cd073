"""Bridges that write into one lane: whatever happens to them, the log is one story of every stream."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvevents.plane.ledger import Arrival, Breach, Departure, Ledger, Start
from kvevents.plane.records import (
    VERSION,
    Batched,
    Beat,
    Blank,
    Join,
    Leave,
    Lost,
    Page,
    Piece,
    Renewed,
    StreamRecord,
    Trusting,
    decode_page,
    encode_page,
    message_id,
)
from kvevents.plane.writing import RECORD_BYTES, Composer
from kvevents.stream import Checkpoint, Gap, RawBatch, Reset
from kvevents.stream.checkpoint import Fingerprint
from kvevents.stream.state import digest_of
from kvevents.stream.trust import KEPT_BY_CHECKPOINT

KEY = ("engine", 0)
ROOM = 1_000


def batched(seq: int, payload: bytes = b"x", incarnation: int = 0) -> Batched:
    return Batched(*KEY, incarnation, seq, False, payload)


@dataclass
class Lane:
    """What the server does: a page is taken only if the lane ends where its writer believes."""

    pages: list[bytes] = field(default_factory=list)

    def append(self, page: Page, expected: int) -> int | None:
        if expected != len(self.pages):
            return None
        self.pages.append(encode_page(page))
        return len(self.pages)

    def read(self, composer: Composer) -> None:
        for position in range(composer.ledger.position + 1, len(self.pages) + 1):
            page = decode_page(self.pages[position - 1])
            assert page is not None
            composer.read(position, page)

    def ledger(self) -> tuple[Ledger, list[object]]:
        found: list[object] = []
        ledger = Ledger()
        for position, data in enumerate(self.pages, 1):
            page = decode_page(data)
            assert page is not None
            found += ledger.feed(position, page)
        return ledger, found


def write(lane: Lane, composer: Composer, now: float = 0.0) -> bool:
    """One attempt; whether it was taken."""
    page = composer.compose(now, 0.0)
    if page is None:
        return False
    position = lane.append(page, composer.ledger.position)
    if position is None:
        composer.returned()
        lane.read(composer)
        return False
    composer.landed(position)
    return True


def bridge(name: str = "a", *records: StreamRecord, lane: Lane | None = None) -> Composer:
    composer = Composer(Ledger(), name, ROOM)
    if lane is not None:
        lane.read(composer)
    composer.anchor(KEY)
    for record in records:
        composer.offer(record)
    return composer


def numbers(found: list[object]) -> list[int]:
    return [event.seq for event in found if isinstance(event, RawBatch)]


# --- the rules, one by one


def test_what_is_there_is_not_written_again() -> None:
    """Two bridges with the same batches leave each once, whoever is first."""
    lane = Lane()
    one, two = (
        bridge("a", Join(*KEY, b""), batched(0), batched(1)),
        bridge("b", Join(*KEY, b""), batched(0), batched(1), batched(2)),
    )
    assert write(lane, one)
    assert not write(lane, two)
    assert write(lane, two)
    ledger, found = lane.ledger()
    assert numbers(found) == [0, 1, 2]
    assert (ledger.doubled, ledger.breaches, two.waiting) == (0, 0, 0)


def test_another_batch_under_the_same_number_sets_the_bridge_adrift() -> None:
    """Numbers agree in two lives as well; payloads do not."""
    lane = Lane()
    write(lane, bridge("a", Join(*KEY, b""), batched(0, b"this life")))
    two = bridge("b", Join(*KEY, b""), batched(0, b"that life"), batched(1, b"that life"))
    assert not write(lane, two)
    assert not write(lane, two)
    assert list(two.adrift) == [KEY]
    assert numbers(lane.ledger()[1]) == [0]
    # It is followed anew from where the log stands, which the checkpoint makes its publisher prove.
    resume = two.ledger.start(KEY, "b").resume
    assert resume is not None
    assert resume.anchor == Fingerprint(0, digest_of(b"this life"), live=True)
    two.anchor(KEY)
    two.offer(Renewed(*KEY, 1, "another life"))
    two.offer(batched(0, b"that life", 1))
    assert write(lane, two)
    assert [type(event) for event in lane.ledger()[1][-2:]] == [Reset, RawBatch]


def test_the_newest_batch_of_a_snapshot_is_compared_by_its_digest() -> None:
    lane = Lane()
    write(lane, bridge("a", Join(*KEY, b""), batched(0, b"this life")))
    for payload, adrift in ((b"this life", []), (b"that life", [KEY])):
        composer = Composer(Ledger.restore(lane.ledger()[0].save()), "b", ROOM)
        composer.anchor(KEY)
        composer.offer(batched(0, payload))
        composer.compose(0.0, 0.0)
        assert list(composer.adrift) == adrift


def test_what_one_bridge_has_lost_another_one_fills() -> None:
    """A gap is written where it was not filled before it was due."""
    lane = Lane()
    one = bridge("a", Join(*KEY, b""), batched(0))
    one.offer(Lost(*KEY, 0, 1, 3), due=5.0)
    one.offer(batched(4))
    two = bridge("b", Join(*KEY, b""), *map(batched, range(3)))
    assert write(lane, one)
    assert one.due() == 5.0
    assert not write(lane, two)
    assert write(lane, two)
    assert not write(lane, one, now=6.0)
    assert write(lane, one, now=6.0)
    found = lane.ledger()[1]
    assert numbers(found) == [0, 1, 2, 4]
    assert [event for event in found if isinstance(event, Gap)] == [Gap(*KEY, 3, 3, 0)]


def test_trust_is_said_behind_what_it_is_about() -> None:
    """And not at all while it is not known whether bridge and log mean the same life."""
    lane = Lane()
    one = bridge("a", Join(*KEY, b""), batched(0))
    one.offer(Trusting(*KEY, "a", "EXACT", "", {}))
    one.offer(batched(1))
    assert write(lane, one)
    page = decode_page(lane.pages[0])
    assert page is not None
    assert [type(record) for record in page.records] == [Join, Batched, Batched, Trusting]
    two = bridge("b", Trusting(*KEY, "b", "EXACT", "", {}))
    lane.read(two)
    assert two.compose(0.0, 0.0) is None
    two.offer(batched(1))
    assert write(lane, two)
    assert set(lane.ledger()[0].streams[KEY].told) == {"a", "b"}


def test_trust_of_a_life_that_ended_is_not_said() -> None:
    lane = Lane()
    one = bridge("a", Join(*KEY, b""), batched(0), Trusting(*KEY, "a", "EXACT", "", {}), Renewed(*KEY, 1, "restart"))
    write(lane, one)
    assert lane.ledger()[0].streams[KEY].told == {}


def test_a_stream_that_left_comes_back_with_a_new_incarnation() -> None:
    """Nothing counts of the old one, whoever still has some of it."""
    lane = Lane()
    one = bridge("a", Join(*KEY, b""), batched(0), Leave(*KEY, "gone"))
    two = bridge("b", Join(*KEY, b""), batched(0), batched(1))
    write(lane, one)
    write(lane, two)
    assert not write(lane, two)  # joins again, but what it has is of the incarnation that has ended
    assert list(two.adrift) == [KEY]
    assert two.ledger.start(KEY, "b") == Start(Checkpoint(*KEY, 0, -1), 0)
    two.anchor(KEY)
    for record in (Join(*KEY, b""), Renewed(*KEY, 1, "it left"), batched(0, incarnation=1)):
        two.offer(record)
    assert write(lane, two)
    ledger, found = lane.ledger()
    assert ledger.breaches == 0
    assert [type(event).__name__ for event in found[-3:]] == ["Arrival", "Reset", "RawBatch"]


def test_a_large_batch_comes_in_pieces_and_another_bridge_may_go_on_with_them() -> None:
    lane = Lane()
    large = bytes(range(256)) * 12
    one, two = (bridge(name, Join(*KEY, b""), batched(0, large), batched(1)) for name in "ab")
    write(lane, one)  # the join, for which there is room
    write(lane, one)
    for _ in range(20):
        write(lane, two)
    assert len(lane.pages) > 4
    found = lane.ledger()[1]
    assert [event.payload for event in found if isinstance(event, RawBatch)] == [large, b"x"]


def test_a_breach_is_counted_and_ends_the_incarnation() -> None:
    """What no writer of ours writes: nothing is made of it."""
    ledger = Ledger()
    odd: list[StreamRecord] = [batched(5), batched(1, incarnation=3), Lost(*KEY, 0, 4, 5), Piece(*KEY, 0, 1, False, 7, 9, b"x")]
    for record in odd:
        ledger = Ledger()
        found = ledger.feed(1, Page(VERSION, "a", 0.0, [Join(*KEY, b""), batched(0), record, batched(1)]))
        assert [type(event) for event in found[2:]] == [Breach, Breach]
        assert numbers(list(found)) == [0]
        assert ledger.start(KEY, "a") == Start(Checkpoint(*KEY, 0, -1), 0)


def test_bytes_of_others_are_no_page() -> None:
    for data in (
        b"",
        b"\xc1",
        b"hello",
        encode_page(Page(99, "a", 0.0, [])),
        b"\x94\x01\xa1a\xcb\0\0\0\0\0\0\0\0\x91\x91\xa1?",
    ):
        assert decode_page(data) is None


def test_what_is_held_back_is_dropped_as_soon_as_somebody_else_has_written_it() -> None:
    """A bridge in reserve keeps only what others have not written yet, however long it would wait."""
    lane = Lane()
    reserve = bridge("reserve")
    records: list[StreamRecord] = [Join(*KEY, b""), *map(batched, range(10))]
    for record in records:
        reserve.offer(record, due=1000.0)
    assert reserve.compose(0.0, 0.0) is None
    assert reserve.waiting == 11
    write(lane, bridge("active", Join(*KEY, b""), *map(batched, range(8))))
    lane.read(reserve)
    assert reserve.compose(0.0, 0.0) is None
    assert (reserve.waiting, reserve.due()) == (2, 1000.0)
    assert write(lane, reserve, now=1000.0)
    assert numbers(lane.ledger()[1]) == list(range(10))
    assert (reserve.waiting, reserve.queued_bytes) == (0, 0)


def test_behind_a_hole_everything_begins_anew_for_everybody() -> None:
    """With incarnations above all that were, so that those who had read all of it are of the same mind."""
    lane = Lane()
    knows = bridge("knows", Join(*KEY, b""), batched(0), Renewed(*KEY, 1, "restart"), batched(0, incarnation=1))
    write(lane, knows)
    new = Composer(Ledger.behind(len(lane.pages), "purged"), "new", ROOM)
    new.anchor(KEY)
    new.offer(Join(*KEY, b"card"))
    assert write(lane, new)
    page = decode_page(lane.pages[-1])
    assert page is not None
    assert [type(record) for record in page.records] == [Blank]
    floor = new.ledger.start(KEY, "new").added
    assert floor > 1
    for seq in (5, 6):
        new.offer(batched(seq, incarnation=floor))
    assert write(lane, new)
    knows.offer(batched(1, incarnation=1))
    write(lane, knows)
    write(lane, knows)
    assert list(knows.adrift) == [KEY]
    ledger, found = lane.ledger()
    assert [type(event) for event in found[-4:]] == [Departure, Arrival, RawBatch, RawBatch]
    assert knows.ledger.save() == ledger.save()
    assert ledger.streams[KEY].incarnation == new.ledger.streams[KEY].incarnation == floor
    assert (ledger.doubled, ledger.breaches) == (0, 0)


def test_behind_a_hole_nothing_is_believed_before() -> None:
    ledger = Ledger.behind(7, "purged")
    assert ledger.feed(8, Page(VERSION, "a", 0.0, [Join(*KEY, b""), batched(5), Beat("a", 1.0, 0.0)])) == []
    assert (ledger.streams, ledger.breaches, list(ledger.beats)) == ({}, 0, ["a"])
    again = Ledger.restore(ledger.save())
    assert (again.hole, again.position) == ("purged", 8)


def test_a_page_that_was_meant_for_another_lane_is_void() -> None:
    """Its writer had not noticed that the lane was deleted; its number was right by chance."""
    ledger = Ledger()
    ledger.feed(1, Page(VERSION, "a", 0.0, [Join(*KEY, b""), batched(0)], "this life"))
    assert ledger.feed(2, Page(VERSION, "b", 0.0, [batched(7)], "that life")) == []
    assert (ledger.strays, ledger.breaches, ledger.position, ledger.streams[KEY].last_seq) == (1, 0, 2, 0)
    assert Ledger.restore(ledger.save()).life == "this life"


def test_lives_of_a_lane_do_not_share_the_names_of_pages() -> None:
    """Or the server would take what is written again for what a stray page has brought."""
    names = {message_id(Page(VERSION, "a", 0.0, [batched(0)], life), "") for life in ("", "1", "2")}
    assert len(names) == 3


def test_long_texts_count() -> None:
    """A page stays within its room whatever engines give as reasons, and are called."""
    keys = [("ü" * 100, rank) for rank in range(40)]
    composer = Composer(Ledger(), "b" * 128, 4_000)
    for key in keys:
        composer.anchor(key)
        composer.offer(Join(*key, bytes(300)))
        composer.offer(Renewed(*key, 1, "reason " * 70))
        composer.offer(Trusting(*key, "b" * 128, "DEGRADED", "ü" * 500, dict.fromkeys(DOUBTS, 2**60)))
    position = 0
    while (page := composer.compose(0.0, 0.0)) is not None:
        position += 1
        assert len(encode_page(page)) <= 4_000 + 300
        composer.landed(position)
        assert position < 200
    assert {*composer.ledger.streams} == {*keys}
    assert all(standing.told for standing in composer.ledger.streams.values())


DOUBTS = [doubt.name for doubt in KEPT_BY_CHECKPOINT]


def test_a_page_is_named_by_what_may_be_there_once_only() -> None:
    """Source, rank, incarnation, number; ASCII whatever the source is called."""
    beat = Beat("a", 1.0, 0.0)
    page = Page(
        VERSION, "a", 0.0, [beat, Trusting("ü\x1f/x", 3, "a", "EXACT", "", {}), Batched("ü\x1f/x", 3, 2, 7, False, b"")]
    )
    assert message_id(page, "") == "%C3%BC%1F%2Fx/3/2/7"
    assert message_id(Page(VERSION, "a", 0.0, [beat]), "brid\nge/1#7") == "brid%0Age/1%237"


def test_a_page_stays_within_its_room() -> None:
    composer = bridge("a", Join(*KEY, b""), *(batched(number, bytes(100)) for number in range(50)))
    for position in range(1, 40):
        page = composer.compose(0.0, 0.0)
        if page is None:
            break
        assert len(encode_page(page)) <= ROOM + RECORD_BYTES
        composer.landed(position)
    assert (composer.waiting, composer.queued_bytes, composer.written) == (0, 0, 50)


# --- any number of bridges, killed, cut off and late, over several lives of an engine


@dataclass
class Engine:
    """Lives, each a list of payloads."""

    lives: list[list[bytes]] = field(default_factory=lambda: [[]])

    @property
    def now(self) -> list[bytes]:
        return self.lives[-1]


@dataclass
class Watcher:
    """A bridge around a composer: follows the engine as a subscriber does."""

    composer: Composer
    life: list[bytes]
    incarnation: int = 0
    handed: int = 0
    in_flight: tuple[Page, int] | None = None

    def follow(self, engine: Engine) -> None:
        """Hand over what is new; a new life begins with a reset."""
        if self.life is not engine.now:
            self.life, self.handed = engine.now, 0
            self.incarnation += 1
            self.composer.offer(Renewed(*KEY, self.incarnation, "restart"))
        for seq in range(self.handed, len(self.life)):
            self.composer.offer(batched(seq, self.life[seq], self.incarnation))
        self.handed = len(self.life)

    def resume(self, engine: Engine) -> None:
        """From where the log stands, as `Subscriber.add(resume=...)` does it: proven by the newest batch, or a reset."""
        checkpoint, self.incarnation = self.composer.ledger.start(KEY, "")
        self.composer.anchor(KEY)
        self.composer.offer(Join(*KEY, b"card"))
        self.life, self.handed = engine.now, 0
        if checkpoint is None:
            return
        self.incarnation = checkpoint.incarnation
        anchor = checkpoint.anchor
        if anchor is not None and anchor.seq < len(self.life) and digest_of(self.life[anchor.seq]) == anchor.digest:
            self.handed = checkpoint.last_seq + 1
            return
        self.incarnation += 1
        self.composer.offer(Renewed(*KEY, self.incarnation, "not proven"))


class Story:
    """Three bridges, one lane, one engine, and what happens to them."""

    def __init__(self) -> None:
        self.lane, self.engine = Lane(), Engine()
        self.made = 0
        self.watchers = [self.begin(at) for at in range(3)]

    def begin(self, at: int) -> Watcher:
        composer = Composer(Ledger(), f"bridge {at}", ROOM)
        self.lane.read(composer)
        watcher = Watcher(composer, [])
        watcher.resume(self.engine)
        return watcher

    def publish(self, _: int, size: int = 0) -> None:
        self.made += 1
        self.engine.now.append(b"%d " % self.made + bytes(size))

    def large(self, at: int) -> None:
        self.publish(at, 2_500)

    def restart(self, _: int) -> None:
        self.engine.lives.append([])

    def follow(self, at: int) -> None:
        self.watchers[at].follow(self.engine)

    def kill(self, at: int) -> None:
        self.watchers[at] = self.begin(at)

    def send(self, at: int) -> None:
        """A page is on its way: it may arrive late, or never."""
        watcher = self.watchers[at]
        page = watcher.composer.compose(0.0, 0.0)
        if page is not None:
            watcher.in_flight = page, watcher.composer.ledger.position
            watcher.composer.returned()

    def arrive(self, at: int) -> None:
        watcher = self.watchers[at]
        if watcher.in_flight is not None:
            self.lane.append(*watcher.in_flight)
            watcher.in_flight = None

    def write(self, at: int) -> None:
        watcher = self.watchers[at]
        write(self.lane, watcher.composer)
        if watcher.composer.adrift:
            watcher.resume(self.engine)

    def end(self) -> None:
        """Each follows, reads and writes until there is nothing more to say."""
        for at in [at for _ in range(12) for at in range(3)]:
            self.follow(at)
            for _ in range(12):
                self.lane.read(self.watchers[at].composer)
                self.write(at)


DEEDS = ("publish", "publish", "follow", "follow", "write", "write", "write", "send", "arrive", "restart", "kill", "large")
STEPS = st.lists(st.tuples(st.sampled_from(DEEDS), st.integers(0, 2)), max_size=80)


@given(STEPS)
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_log_is_one_story_whatever_becomes_of_its_writers(steps: list[tuple[str, int]]) -> None:
    """In the end the log's last incarnation is the engine's life, each batch once, in order."""
    story = Story()
    for deed, at in steps:
        getattr(story, deed)(at)
    story.end()
    ledger, found = story.lane.ledger()
    assert (ledger.breaches, ledger.doubled) == (0, 0)
    last = max((at for at, event in enumerate(found) if isinstance(event, Reset)), default=-1)
    assert [event.payload for event in found[last + 1 :] if isinstance(event, RawBatch)] == story.engine.now
    assert all(watcher.composer.waiting == 0 for watcher in story.watchers)
