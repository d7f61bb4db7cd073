"""What was seen, as a table and as `docs/developers/plane-chaos.md`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Final

from tests.system.plane_chaos.judging import Outcome
from tests.system.plane_chaos.plan import known
from tools import released

DOCUMENT: Final = released.CHECKOUT / "docs" / "developers" / "plane-chaos.md"
CALM: Final = "nothing"
SHORT: Final = "short replay"
_HEADS: Final = ("fault", "rounds", "batches", "right at the end", "not EXACT, and why", "EXACT and wrong", "settled in")


def by_fault(outcomes: Sequence[Outcome]) -> str:
    """A row for each fault; a round stands in each row of its faults."""
    sound = [each for each in outcomes if not each.error]
    rows: Mapping[str, Sequence[Outcome]] = {
        name: [each for each in sound if name in (each.faults or (CALM,))] for name in (CALM, *known())
    }
    body = [[name, *_row(found)] for name, found in rows.items() if found]
    return _lines([*body, ["**all**", *_row(sound)]] if sound else body)


def _row(outcomes: Sequence[Outcome]) -> list[str]:
    verdicts = [verdict for outcome in outcomes for verdict in outcome.verdicts]
    kinds = Counter(verdict.kind for verdict in verdicts)
    seconds = sorted(outcome.settled for outcome in outcomes)
    reasons = Counter(verdict.detail.partition(", at ")[0] for verdict in verdicts if verdict.kind == "doubted")
    doubted = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common()) or "0"
    return [
        f"{len(outcomes):,}",
        f"{sum(outcome.batches for outcome in outcomes):,}",
        f"{kinds['right']:,} of {len(verdicts):,}",
        doubted,
        str(kinds["wrong"]),
        f"{median(seconds):.1f} s, {seconds[-1]:.1f} s at most",
    ]


def totals(outcomes: Sequence[Outcome]) -> str:
    """One paragraph."""
    counted: Counter[str] = Counter()
    for outcome in outcomes:
        counted.update(outcome.counted)
    right = sum(outcome.right for outcome in outcomes)
    return (
        f"{len(outcomes):,} rounds, {sum(each.batches for each in outcomes):,} batches published, "
        f"{sum(each.logged for each in outcomes):,} in the logs at the end on {counted['pages']:,} pages, "
        f"{counted['claims']:,} claims to be EXACT checked, {counted['conflicts']:,} pages refused, "
        f"{counted['adrift']:,} streams resubscribed, {counted['generations']:,} generations of replicas; "
        f"**{right:,} rounds right, {sum(each.wrong for each in outcomes)} wrong, "
        f"{sum(bool(each.error) for each in outcomes)} fell over; "
        f"{sum(each.lost for each in outcomes if SHORT not in each.faults):,} batches lost, {counted['doubled']} doubled, "
        f"{counted['breaches'] + sum(len(each.flaws) for each in outcomes)} breaches**, "
        f"{sum(each.lost for each in outcomes if SHORT in each.faults):,} forgotten by engines with a short replay buffer"
    )


def _lines(body: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [_HEADS, ["---"] * len(_HEADS), *body])


_HEAD: Final = """\
# Chaos beyond one machine

Whether three replicas of a plane end with what the engines hold, whatever happens to engines, bridges, servers and replicas
meanwhile. `make plane-chaos` plays rounds, and `python -m tests.system.plane_chaos --rounds 200 --write` writes this file from
what it saw: do not edit it.

- A round is drawn from a seed and its number: two bridges, three replicas, two to four engines and one NATS server or a cluster
  of three, each a process of its own, with a proxy between each engine and each bridge. For three seconds faults are done to
  them; then they end, and each engine publishes its last batches.
- The truth is the digest of an index in each engine's process after each batch. Replicas are those of `kvevents serve --nats`,
  with snapshots every half second. Each writes down every hundredth of a second what it holds of every stream of which it says
  that it is EXACT; each of these claims is compared with the truth.
- *Right* is a replica that is EXACT and holds what the engine holds; each is counted once for each engine. *Settled* is the
  time from the last batch until all are right. Who is not is asked for a minute.
- The log is then read page by page: numbers follow each other in each incarnation, none is there twice, and all batches of an
  incarnation are of one life of the engine. What bridges and replicas count besides (records that are doubled, records that no
  bridge writes) must be 0.
- *Forgotten* are batches that had left an engine's replay buffer before a bridge asked for them (`short replay`: 200 batches);
  the log says so, and has the engine's history in their place. Any other batch that the log says is lost counts as wrong.
- *Servers lose pages* is a power cut: all servers fall back to an older copy of their files, which lacks what they acknowledged
  since then. *Bridge misses a life*: it is stopped while an engine ends and begins twice; the bridge that has written the life
  between is killed before it goes on. *Replica with a clock ahead*: one of three, by an hour.
- Timeouts of subscribers, replicas and bridges are shorter than by default, so that a round takes seconds.
- A round stands in the row of each of its faults, so rows do not add up.
"""


def document(outcomes: Sequence[Outcome], played: str) -> str:
    """All of it. `played` says which rounds were played."""
    return "\n".join([_HEAD, f"{played}: {totals(outcomes)}.\n", by_fault(outcomes)]) + "\n"
