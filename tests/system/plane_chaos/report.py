"""The results of a run, as a table and as `docs/developers/plane-chaos.md`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Final

from tests.system.chaos_kit.judging import Outcome
from tests.system.chaos_kit.report import add_counters, format_table, make_fault_rows, tally
from tests.system.plane_chaos.plan import known_names
from tools import released

DOCUMENT: Final = released.CHECKOUT / "docs" / "developers" / "plane-chaos.md"
SHORT: Final = "short replay"
_HEADS: Final = ("fault", "right at the end", "settled in s", "at most")


def tables(outcomes: Sequence[Outcome]) -> str:
    """Return a table with a row for each fault."""
    rows = make_fault_rows(outcomes, known_names(), _format_row)
    return format_table(_HEADS, [*rows, *([["**all**", *_format_row(outcomes)]] if rows else [])])


def _format_row(outcomes: Sequence[Outcome]) -> list[str]:
    found = tally(outcomes)
    seconds = sorted(outcome.settled for outcome in outcomes if not outcome.error)
    others = [*found.reasons, *([("wrong", found.wrong)] if found.wrong else [])]
    right = [f"{found.right:,} of {found.results:,}", *(f"{count} {reason}" for reason, count in others)]
    return ["; ".join(right), f"{median(seconds):.1f}", f"{seconds[-1]:.1f}"]


def totals(outcomes: Sequence[Outcome]) -> str:
    """Return the totals as one paragraph."""
    counted, forgotten = add_counters(outcomes), add_counters(each for each in outcomes if SHORT in each.faults)["lost"]
    return (
        f"{len(outcomes):,} rounds, {tally(outcomes).batches:,} batches published, "
        f"{counted['logged']:,} in the logs at the end on {counted['pages']:,} pages, "
        f"{counted['claims']:,} claims to be EXACT checked, {counted['conflicts']:,} pages refused, "
        f"the oldest content of a claim outdated for {_oldest_claim(outcomes):.1f} s, "
        f"{counted['resyncs']:,} streams resubscribed, {counted['generations']:,} generations of replicas; "
        f"**{sum(each.right for each in outcomes):,} rounds right, {sum(each.wrong for each in outcomes)} wrong, "
        f"{sum(bool(each.error) for each in outcomes)} fell over; "
        f"{counted['lost'] - forgotten:,} batches lost, {counted['duplicates']} doubled, "
        f"{sum(len(each.flaws) for each in outcomes)} breaches**, "
        f"{forgotten:,} forgotten by engines with a short replay buffer"
    )


def _oldest_claim(outcomes: Sequence[Outcome]) -> float:
    return max((each.counted.get("oldest claim in ms", 0) / 1_000 for each in outcomes), default=0.0)


_HEAD: Final = """\
# Chaos of a plane

For users who decide whether to rely on a [plane](../concepts/plane.md), and for contributors: do three replicas end with what
the engines hold, even if engines, bridges, servers and replicas fail?

`make plane-chaos` plays rounds. `python -m tests.system.plane_chaos --rounds 200 --write` writes this page: do not edit it.

| part | rule |
| --- | --- |
| round | three seconds of faults, then each engine publishes its last batches; counts in the row of each of its faults |
| processes | two bridges, three replicas, two to four engines, one or three NATS servers; a proxy from engine to bridge |
| claim | what a replica holds of a stream that it calls EXACT, compared every 10 ms with an index in the engine's process |
| outdated | time from the engine's next batch to the claim, unless the link of an engine fails |
| right | a replica that is EXACT and holds what the engine holds, counted per engine |
| settled | median seconds from the last batch until all replicas are right |
| log | numbers in order, none twice, one engine process per incarnation; other counts must be 0 |
| forgotten | batches that had left the replay buffer (`short replay`: 200 batches). Any other lost batch is wrong |
| servers lose pages | all fall back to an older copy of their files |
| flip byte, cut file | in the newest file of a partition of a server that has ended |
| bridge misses an incarnation | a bridge is stopped while an engine restarts twice; the bridge that wrote between is killed |
"""


def document(outcomes: Sequence[Outcome], played: str, _: str = "") -> str:
    """Return `docs/developers/plane-chaos.md`. `played` says which rounds were played."""
    return "\n".join([_HEAD, f"{played}: {totals(outcomes)}.\n", tables(outcomes)]) + "\n"
