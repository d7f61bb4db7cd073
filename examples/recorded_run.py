"""A recorded run of a real vLLM over real sockets, with all faults that an engine can have.

The example needs no GPU and no engine. A tape player is the engine: it loses a fifth of its live batches, answers replay
requests incompletely, and is restarted. A subscriber follows the tape player; at the end the delivered batches are compared
with the published ones.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kvevents import Batch, Delivery, Gap, Reset, Source, Subscriber
from kvevents.cli.console import Console, Span
from kvevents.cli.delivery_output import LineFormat
from kvevents.diagnosis.text_format import plural
from kvevents.recording import live_batches
from kvevents.testing import Faults, TapePlayer

ROOT = Path(__file__).resolve().parent.parent
RECORDING = ROOT / "tests" / "data" / "vllm-0.32-captures.jsonl.gz"
RUNS = ("bs32-sha256cbor-seed0", "bs64-emptytopic")
"""Two runs of the recording: before the restart blocks of 32 tokens, after it blocks of 64."""
LOST = 0.2
"""Share of live batches that are lost."""
REPLIES_END_AFTER = 12
"""Number of batches of one reply that arrive; engines' send queues overflow at 1,000."""
BEFORE_WE_CAME = 24
UNSEEN_AFTER_RESTART = 9
RATE = 30.0
DEADLINE = 60.0
"""Maximum number of seconds of each act, which takes about three seconds, and longer on a busy machine."""

NEXT = """
Try next:
  .venv/bin/kvevents play tests/data/vllm-0.32-captures.jsonl.gz --wait-for-subscriber --linger &
  .venv/bin/kvevents tail 127.0.0.1:5557 --replay 127.0.0.1:5558 -o wide    the same run, event by event
  .venv/bin/kvevents doctor tcp://127.0.0.1:5557             what works, what does not, what to do
  .venv/bin/python examples/subscribe.py                     the same in ten lines of Python
and with an engine of your own:
  vllm serve MODEL --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq",
    "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'
"""


class EveryOtherTime:
    """Omits some numbers from replies, but never from two consecutive replies, because such a batch would really be lost."""

    def __init__(self) -> None:
        self._left_out: set[int] = set()

    def __call__(self, seq: int) -> bool:
        if seq % 7 != 3 or seq in self._left_out:
            self._left_out.discard(seq)
            return False
        self._left_out.add(seq)
        return True


class Demo:
    """The subscriber's side: prints the deliveries and stores them for the comparison."""

    def __init__(self, tape: TapePlayer, subscriber: Subscriber, console: Console) -> None:
        self.delivered: dict[int, list[Batch]] = {0: [], 1: []}
        self.gaps = 0
        self._tape = tape
        self._subscriber = subscriber
        self._console = console
        self._lines = LineFormat(width=len("vllm/0"))

    def say(self, text: str) -> None:
        """Print a line about the run."""
        self._console.line()
        self._console.line(Span(f"== {text}", "bold"))

    def follow(self, done: Callable[[], bool]) -> None:
        """Show deliveries until `done`, at most `DEADLINE` seconds."""
        until = time.monotonic() + DEADLINE
        while time.monotonic() < until:
            delivery = self._subscriber.receive(timeout=0.05)
            if delivery is not None:
                self._take(delivery)
                continue
            for (source, rank), trust in self._subscriber.trust_changes():
                self._console.line(*self._lines.trust(source, rank, trust))
            if done():
                return

    def _take(self, delivery: Delivery) -> None:
        if isinstance(delivery, Batch):
            self.delivered.setdefault(delivery.incarnation, []).append(delivery)
            for line in self._lines.batch(delivery):
                self._console.line(*line)
        elif isinstance(delivery, Reset):
            self._console.line(*self._lines.reset(delivery))
        elif isinstance(delivery, Gap):
            self.gaps += 1
            self._console.line(*self._lines.gap(delivery))

    def has_all_of(self, incarnation: int) -> bool:
        """Whether all batches that an incarnation published have arrived."""
        return len(self.delivered[incarnation]) >= len(self._tape.batches(incarnation))

    @property
    def is_exact(self) -> bool:
        """Whether the subscriber reports EXACT."""
        return self._subscriber.trust().name == "EXACT"


def play_rest(tape: TapePlayer, demo: Demo, incarnation: int, batches: int) -> None:
    """Publish the rest of an incarnation with `batches` batches, the last batch when all earlier batches have arrived.

    The last batch is not lost, because a live batch must confirm the replayed batches.
    """
    playing = tape.start_playing(batches - len(tape.batches(incarnation)) - 1, rate=RATE)
    demo.follow(lambda: playing.done() and demo.has_all_of(incarnation))
    tape.faults = replace(tape.faults, drop=0.0)
    tape.play(1)
    demo.follow(lambda: demo.has_all_of(incarnation) and demo.is_exact)
    tape.faults = replace(tape.faults, drop=LOST)


def play(tape: TapePlayer, demo: Demo) -> None:
    """Play both incarnations of the engine."""
    demo.say("an engine has been running for a while; we subscribe late, and a fifth of what it sends now is lost on the way")
    play_rest(tape, demo, 0, len(list(live_batches(RECORDING, RUNS[0]))))
    demo.say("the engine is killed, comes back on the same port, and is busy before we have reconnected")
    second_run = [batch._replace(topic=b"kv-events") for batch in live_batches(RECORDING, RUNS[1])]
    tape.restart(second_run, unseen_until=UNSEEN_AFTER_RESTART)
    play_rest(tape, demo, 1, len(second_run))


def conclude(tape: TapePlayer, demo: Demo, console: Console) -> bool:
    """Compare, batch by batch and byte by byte."""
    demo.say("published and delivered, compared payload by payload")
    lossless = True
    for incarnation in sorted(demo.delivered):
        published = tape.batches(incarnation)
        delivered = demo.delivered[incarnation]
        equal = [(batch.seq, batch.payload) for batch in delivered] == published
        lossless = lossless and equal
        replayed = sum(batch.replayed for batch in delivered)
        counts = f"{len(published):3} published, {len(delivered):3} delivered, {replayed:3} of them by replay: "
        outcome = Span("equal, in order, byte for byte", "good") if equal else Span("NOT EQUAL", "bad")
        console.line(f"incarnation {incarnation}: {counts}", outcome)
    return lossless and not demo.gaps and tape.counts.incarnations == len(demo.delivered)


def summarize(tape: TapePlayer, demo: Demo, lossless: bool, console: Console) -> None:
    """Return the result of the comparison as a sentence."""
    counts = tape.counts
    replayed = sum(batch.replayed for batches in demo.delivered.values() for batch in batches)
    console.line()
    if not lossless:
        console.line(Span("This should not happen: what was delivered is not what was published. Please report it.", "bad"))
        return
    published, requests = plural(counts.published, "batch"), plural(counts.requests, "request")
    console.line(
        f"vLLM published {published}. {replayed} of them were sent before we were there or lost on the way; {requests} for"
        f" replay, whose answers left out {counts.withheld}, brought every one, once and in order. The restart was noticed,"
        " though no engine announces one."
    )
    for line in NEXT.splitlines():
        console.line(line)


def main() -> int:
    """Play, follow, compare."""
    console = Console()
    faults = Faults(drop=LOST, replay_send_limit=REPLIES_END_AFTER, replay_holes=EveryOtherTime(), seed=4)
    with TapePlayer(RECORDING, run=RUNS[0], faults=faults) as tape:
        tape.play(BEFORE_WE_CAME)
        with Subscriber(Source(tape.endpoint, tape.replay_endpoint, name="vllm")) as subscriber:
            demo = Demo(tape, subscriber, console)
            play(tape, demo)
        lossless = conclude(tape, demo, console)
        summarize(tape, demo, lossless, console)
    return 0 if lossless else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
