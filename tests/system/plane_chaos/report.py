"""The results of a run, as a table and as `docs/developers/plane-chaos.md`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Final

from tests.system.plane_chaos.judging import Outcome
from tests.system.plane_chaos.plan import known_names
from tools import released

DOCUMENT: Final = released.CHECKOUT / "docs" / "developers" / "plane-chaos.md"
NO_FAULT: Final = "nothing"
SHORT: Final = "short replay"
_HEADS: Final = ("fault", "rounds", "right at the end", "not EXACT, and why", "EXACT and wrong", "settled in")


def by_fault(outcomes: Sequence[Outcome]) -> str:
    """Return a table with a row for each fault. A round counts in the row of each of its faults."""
    played_outcomes = [each for each in outcomes if not each.error]
    rows: Mapping[str, Sequence[Outcome]] = {
        name: [each for each in played_outcomes if name in (each.faults or (NO_FAULT,))] for name in (NO_FAULT, *known_names())
    }
    body = [[name, *_format_row(found)] for name, found in rows.items() if found]
    return _format_table([*body, ["**all**", *_format_row(played_outcomes)]] if played_outcomes else body)


def _format_row(outcomes: Sequence[Outcome]) -> list[str]:
    results = [result for outcome in outcomes for result in outcome.results]
    kinds = Counter(result.kind for result in results)
    seconds = sorted(outcome.settled for outcome in outcomes)
    reasons = Counter(result.detail.partition(", at ")[0] for result in results if result.kind == "inexact")
    inexact = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common()) or "0"
    return [
        f"{len(outcomes):,}",
        f"{kinds['right']:,} of {len(results):,}",
        inexact,
        str(kinds["wrong"]),
        f"{median(seconds):.1f} s, at most {seconds[-1]:.1f} s",
    ]


def totals(outcomes: Sequence[Outcome]) -> str:
    """Return the totals as one paragraph."""
    counted: Counter[str] = Counter()
    for outcome in outcomes:
        counted.update(outcome.counted)
    right = sum(outcome.right for outcome in outcomes)
    return (
        f"{len(outcomes):,} rounds, {sum(each.batches for each in outcomes):,} batches published, "
        f"{sum(each.logged for each in outcomes):,} in the logs at the end on {counted['pages']:,} pages, "
        f"{counted['claims']:,} claims to be EXACT checked, {counted['conflicts']:,} pages refused, "
        f"{counted['resyncs']:,} streams resubscribed, {counted['generations']:,} generations of replicas; "
        f"**{right:,} rounds right, {sum(each.wrong for each in outcomes)} wrong, "
        f"{sum(bool(each.error) for each in outcomes)} fell over; "
        f"{sum(each.lost for each in outcomes if SHORT not in each.faults):,} batches lost, {counted['duplicates']} doubled, "
        f"{counted['invalid_records'] + sum(len(each.flaws) for each in outcomes)} breaches**, "
        f"{sum(each.lost for each in outcomes if SHORT in each.faults):,} forgotten by engines with a short replay buffer"
    )


def _format_table(body: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [_HEADS, ["---"] * len(_HEADS), *body])


_HEAD: Final = """\
# Chaos of a plane

For users who decide whether to rely on a [plane](../concepts/plane.md), and for contributors: do three replicas end with what
the engines hold, even if engines, bridges, servers and replicas fail?

`make plane-chaos` plays rounds. `python -m tests.system.plane_chaos --rounds 200 --write` writes this page: do not edit it.

| part | rule |
| --- | --- |
| round | drawn from a seed and its number: three seconds of faults, then each engine publishes its last batches |
| processes | two bridges, three replicas, two to four engines, one or three NATS servers; a proxy from engine to bridge |
| truth | digest of an index in each engine's process after each batch |
| claim | what a replica holds of a stream that it calls EXACT, recorded every 10 ms and compared with the truth |
| right | a replica that is EXACT and holds what the engine holds, counted per engine |
| settled | time from the last batch until all replicas are right; a minute at most |
| log | read page by page: numbers in order, none twice, one engine process per incarnation. Other counts must be 0 |
| forgotten | batches that had left the replay buffer (`short replay`: 200 batches). Any other lost batch is wrong |
| servers lose pages | all servers fall back to an older copy of their files |
| bridge misses an incarnation | a bridge is stopped while an engine restarts twice; the bridge that wrote between is killed |
| replica with a clock ahead | one of three, by an hour |

Timeouts are shorter than by default, and replicas take snapshots every half second. A round counts in the row of each of its
faults.
"""


def document(outcomes: Sequence[Outcome], played: str) -> str:
    """Return `docs/developers/plane-chaos.md`. `played` says which rounds were played."""
    return "\n".join([_HEAD, f"{played}: {totals(outcomes)}.\n", by_fault(outcomes)]) + "\n"
