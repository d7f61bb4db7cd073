"""What was seen, as tables and as `docs/developers/chaos.md`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from tests.system.chaos.judging import Outcome
from tests.system.chaos.plan import known
from tools import released

DOCUMENT: Final = released.CHECKOUT / "docs" / "developers" / "chaos.md"
CALM: Final = "nothing"
MAKES: Final[Mapping[str, str]] = {
    "ours": "`kvevents.ZmqEventPublisher`, every dialect",
    "tape": "`kvevents.testing.TapePlayer`, every dialect",
    "vllm": released.VLLM.title,
    "sglang": released.SGLANG.title,
}


def by_fault(outcomes: Sequence[Outcome]) -> str:
    """A row for each fault; a round stands in each row of its faults."""
    names = [CALM, *known()]
    return _table("fault", {name: [each for each in outcomes if name in (each.faults or (CALM,))] for name in names})


def by_make(outcomes: Sequence[Outcome]) -> str:
    """A row for each publisher, and one for all."""
    rows = {title: [each for each in outcomes if each.make == make] for make, title in MAKES.items()}
    return _table("publisher", {**rows, "**all**": list(outcomes)})


def _table(first: str, rows: Mapping[str, Sequence[Outcome]]) -> str:
    heads = [first, "rounds", "batches", "EXACT and right", "not EXACT, and why", "EXACT and wrong"]
    return _lines(heads, ([name, *_row(outcomes)] for name, outcomes in rows.items() if outcomes))


def _row(outcomes: Sequence[Outcome]) -> list[str]:
    verdicts = [verdict for outcome in outcomes for verdict in outcome.verdicts]
    kinds = Counter(verdict.kind for verdict in verdicts)
    reasons = Counter(reason for verdict in verdicts if verdict.kind == "doubted" for reason in verdict.reasons)
    listed = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    doubted = f"{kinds['doubted']}: {listed}" if listed else "0"
    batches = sum(outcome.batches for outcome in outcomes)
    return [f"{len(outcomes):,}", f"{batches:,}", f"{kinds['right']:,}", doubted, str(kinds["wrong"])]


def losses(outcomes: Sequence[Outcome]) -> str:
    """Released publishers: what their own example subscriber loses, beside ours, in the same rounds."""
    heads = ["publisher", "subscriber", "rounds", "batches", "lost", "of rounds: state wrong at the end", "of these, reported"]
    body = []
    for make in engines_of(outcomes):
        rounds = [outcome for outcome in outcomes if outcome.make == make and outcome.examples]
        body += [[MAKES[make], name, *_example(rounds, name)] for name in ("example", "example, corrected")]
        body.append([MAKES[make], "ours", *_ours(rounds)])
    return _lines(heads, body)


def engines_of(outcomes: Iterable[Outcome]) -> list[str]:
    """Makes that have an example subscriber."""
    found = {outcome.make for outcome in outcomes if outcome.examples}
    return [make for make in MAKES if make in found]


def _example(rounds: Sequence[Outcome], name: str) -> list[str]:
    found = [example for outcome in rounds for example in outcome.examples if example.name == name]
    wrong = sum(not example.right for example in found)
    published, lost = sum(example.published for example in found), sum(example.lost for example in found)
    return [f"{len(found):,}", f"{published:,}", _share(lost, published), _share(wrong, len(found)), "0"]


def _ours(rounds: Sequence[Outcome]) -> list[str]:
    steady = [(outcome, each) for outcome in rounds for each in outcome.verdicts if each.consumer == "steady"]
    doubted = sum(verdict.kind == "doubted" for _, verdict in steady)
    wrong = sum(verdict.kind == "wrong" for _, verdict in steady)
    published = sum(outcome.batches for outcome, _ in steady)
    lost = published - sum(each.got for _, each in steady)
    summary = f"{doubted:,} not EXACT at the end, each reported; {wrong} silently"
    return [f"{len(steady):,}", f"{published:,}", _share(lost, published), summary, f"{doubted:,}"]


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({part / whole:.1%})" if whole else "0"


def totals(outcomes: Sequence[Outcome]) -> str:
    """One paragraph."""
    counted: Counter[str] = Counter()
    for outcome in outcomes:
        counted.update(outcome.counted)
    verdicts = [verdict for outcome in outcomes for verdict in outcome.verdicts]
    wrong = sum(verdict.kind == "wrong" for verdict in verdicts)
    return (
        f"{len(outcomes):,} rounds, {sum(outcome.batches for outcome in outcomes):,} batches, {len(verdicts):,} consumers, "
        f"{counted['claims']:,} claims to be EXACT checked, {counted['delivered']:,} deliveries, "
        f"{counted['reconnects']:,} reconnects, {counted['resets']:,} resets, {counted['requests']:,} replay requests, "
        f"{counted['healed']:,} gaps filled, {counted['divergences']:,} divergences: **{wrong} wrong**"
    )


def _lines(heads: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, ["---"] * len(heads), *body])


_HEAD: Final = """\
# Chaos

Whether a consumer that says `EXACT` ever holds something else than its engine. `make chaos` plays rounds of faults for some
minutes (`--hours 1` for longer), and `python -m tests.system.chaos --write` writes this file from what it saw: do not edit it.

- A round is drawn from a seed and its number. Engine, relays and consumers are processes of their own, on real TCP or `ipc://`
  sockets, with `FaultProxy` between them. The seed is printed; `--seed S --round N` plays a round again, `--only FAULT` others
  with the same fault. What races is not repeated exactly.
- The engine drives a random, valid KV cache: chains and branches, removals, copies, tiers, a sliding-window group, LoRA, salts,
  clears. The truth is the digest of an index in the engine's process after each batch, made from the events before they are
  published, and counted again by the cache itself.
- Publishers: ours in every dialect, with and without compaction; the tape player with the faults of engine generations; and the
  released classes of vLLM and SGLang out of their wheels. Relays, none to two, are `kvevents.relay` with journals and
  heartbeats.
- Consumers: one from the beginning, one that joins late, one that is killed and goes on from its checkpoint and snapshot; with
  threads or asyncio, with events or bytes. Every few milliseconds, a consumer that is `EXACT` writes
  down what it holds, and after which batch. Each of these claims is compared with the truth after that batch.
- At the end faults stop, the last batches come, or are lost and only replay has them, and the engine is quiet. Within a bounded
  time each consumer must be `EXACT` with what the engine holds, or say why it is not.
- *EXACT and wrong* is a consumer whose claim was wrong at any time, or that says `EXACT` in the end and holds something else.
  One ends the run, with the round's schedule.
- A round stands in the row of each of its faults, so rows do not add up. A consumer that is not `EXACT` may have several
  reasons, which `docs/concepts/trust.md` explains.

No round requires what no consumer can know: if replay has gaps or is mute, a round does not lose its last batches, since
nothing that arrives shows that there were more. Without a replay endpoint the same is always possible: such a consumer is never
`EXACT`. A relay always has heartbeats here; without, it has no way to say how far it trusts its batches.
"""
_LOSSES: Final = """\
vLLM's example subscriber, beside ours, on the released publishers under the same faults. It is connected before the first
batch. As released it never stores the number of a live batch, so it never requests replay; *corrected* does. Neither takes
more than one message of an answer, nor notices a restart. *Lost* are batches that were published and never came; batches that
a killed engine had not sent are among them.
"""
_SOAK_BEGINS: Final = "<!-- soak: written by `python -m tests.system.chaos.soak --write` -->"
_SOAK_ENDS: Final = "<!-- /soak -->"
_SOAK: Final = """\
`make soak` has an engine, a relay, consumers and a service under churn and cut connections, and fails when memory, descriptors
or threads of a process grow. It begins with two outages, so that the cost of the worst is there before the measurement; the
later half of the time is judged. *From*, *to* and *per hour* are of the line through the least of each twentieth of that half,
*at most* is the highest of all. Memory is what is resident, free memory given back every 30 s.
"""


def document(outcomes: Sequence[Outcome], played: str, before: str = "") -> str:
    """All of `docs/developers/chaos.md`; what `before` says of the soak stays. `played` says which rounds were played."""
    parts = [
        _HEAD,
        f"{played}: {totals(outcomes)}.\n",
        "## By publisher\n",
        by_make(outcomes),
        "\n## By fault\n",
        by_fault(outcomes),
        "\n## Losses of the engines' example subscriber\n",
        _LOSSES,
        losses(outcomes),
        "\n## Soak\n",
        _SOAK,
        f"{_SOAK_BEGINS}\n{_soak_of(before)}\n{_SOAK_ENDS}",
    ]
    return "\n".join(parts) + "\n"


def with_soak(document: str, result: str) -> str:
    """The document with another soak in it."""
    head, _, rest = document.partition(_SOAK_BEGINS)
    _, _, tail = rest.partition(_SOAK_ENDS)
    return f"{head}{_SOAK_BEGINS}\n{result}\n{_SOAK_ENDS}{tail}"


def _soak_of(document: str) -> str:
    return document.partition(_SOAK_BEGINS)[2].partition(_SOAK_ENDS)[0].strip()
