"""The results of a run, as tables and as `docs/developers/chaos.md`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from tests.system.chaos.plan import known_names
from tests.system.chaos_kit.judging import Outcome
from tests.system.chaos_kit.report import add_counters, format_table, make_fault_rows, tally
from tools import released

DOCUMENT: Final = released.CHECKOUT / "docs" / "developers" / "chaos.md"
REASONS: Final = 4
"""Number of the most frequent reasons that a row names."""
MAKES: Final[Mapping[str, str]] = {
    "ours": "`kvevents.ZmqEventPublisher`, every dialect",
    "tape": "`kvevents.testing.TapePlayer`, every dialect",
    "vllm": released.VLLM.title,
    "sglang": released.SGLANG.title,
}


def tables(outcomes: Sequence[Outcome]) -> str:
    """Return all tables."""
    return "\n\n".join([by_fault(outcomes), by_make(outcomes), losses(outcomes)])


def by_fault(outcomes: Sequence[Outcome]) -> str:
    """Return a table with a row for each fault."""
    heads = ["fault", "EXACT and right", "not EXACT"]
    return format_table(heads, make_fault_rows(outcomes, known_names(), _format_fault_row))


def _format_fault_row(outcomes: Sequence[Outcome]) -> list[str]:
    found = tally(outcomes)
    return [f"{count:,}" for count in (found.right, found.inexact)]


def by_make(outcomes: Sequence[Outcome]) -> str:
    """Return a table with a row for each publisher, and one for all."""
    rows = {title: [each for each in outcomes if each.make == make] for make, title in MAKES.items()}
    heads = ["publisher", "rounds", "batches", "EXACT and right", "not EXACT, most frequent reasons", "EXACT and wrong"]
    return format_table(
        heads, ([name, *_format_make_row(found)] for name, found in {**rows, "**all**": outcomes}.items() if found)
    )


def _format_make_row(outcomes: Sequence[Outcome]) -> list[str]:
    found = tally(outcomes)
    listed = ", ".join(f"{count} {reason}" for reason, count in found.reasons[:REASONS])
    inexact = f"{found.inexact}: {listed}" if listed else "0"
    return [f"{found.rounds:,}", f"{found.batches:,}", f"{found.right:,}", inexact, str(found.wrong)]


def losses(outcomes: Sequence[Outcome]) -> str:
    """Return a table of the batches that the example subscriber and ours lose in the same rounds, by released publisher."""
    heads = ["publisher", "subscriber", "rounds", "lost batches", "of rounds: state wrong at the end", "of these, reported"]
    body = []
    for make, title in MAKES.items():
        rounds = [outcome for outcome in outcomes if outcome.make == make and outcome.examples]
        if not rounds:
            continue
        body += [[title, name, *_format_example_row(rounds, name)] for name in ("example", "example, corrected")]
        body.append([title, "ours", *_format_own_row(rounds)])
    return format_table(heads, body)


def _format_example_row(rounds: Sequence[Outcome], name: str) -> list[str]:
    found = [example for outcome in rounds for example in outcome.examples if example.name == name]
    wrong = sum(not example.right for example in found)
    published, lost = sum(example.published for example in found), sum(example.lost for example in found)
    return [f"{len(found):,}", _format_share(lost, published), _format_share(wrong, len(found)), "0"]


def _format_own_row(rounds: Sequence[Outcome]) -> list[str]:
    steady = [(outcome, each) for outcome in rounds for each in outcome.results if each.holder == "steady"]
    inexact = sum(result.kind == "inexact" for _, result in steady)
    wrong = sum(result.kind == "wrong" for _, result in steady)
    published = sum(outcome.batches for outcome, _ in steady)
    lost = published - sum(each.received for _, each in steady)
    summary = f"{inexact:,} not EXACT; {wrong} silently"
    return [f"{len(steady):,}", _format_share(lost, published), summary, f"{inexact:,}"]


def _format_share(part: int, whole: int) -> str:
    return f"{part:,} ({part / whole:.1%})" if whole else "0"


def totals(outcomes: Sequence[Outcome]) -> str:
    """Return the totals as one paragraph."""
    found, counted = tally(outcomes), add_counters(outcomes)
    return (
        f"{found.rounds:,} rounds, {found.batches:,} batches, {found.results:,} consumers, "
        f"{counted['claims']:,} claims to be EXACT checked, {counted['delivered']:,} deliveries, "
        f"{counted['reconnects']:,} reconnects, {counted['resets']:,} resets, {counted['requests']:,} replay requests, "
        f"{counted['repaired']:,} gaps filled, {counted['divergences']:,} divergences: **{found.wrong} wrong**"
    )


_HEAD: Final = """\
# Chaos

For users who decide whether to rely on `EXACT`, and for contributors: does a consumer that says `EXACT` ever hold something
else than its engine?

`make chaos` plays rounds of faults. `python -m tests.system.chaos --write` writes this page: do not edit it.

| part | rule |
| --- | --- |
| round | drawn from a seed and its number; its consumers count in the row of each of its faults |
| processes | engine, up to two relays with journals, consumers; TCP or `ipc://`, `FaultProxy` between |
| engine | a random, valid KV cache: branches, removals, copies, tiers, sliding windows, LoRA, salts, clears |
| consumers | early, late, or killed and resumed; threads or asyncio; events or bytes |
| claim | what an `EXACT` consumer holds after a batch, compared every few milliseconds with an index in the engine's process |
| end | in bounded time after the last batches a consumer is `EXACT` and right, or [says why not](../concepts/trust.md) |
| EXACT and wrong | a wrong claim at any time; the first one ends the run |

If replay has gaps or never answers, a round does not lose its last batches: no consumer could know of them.
"""
_LOSSES: Final = """\
vLLM's example subscriber and ours under the same faults. As released, it never requests replay; *corrected* does. Neither
notices a restart. *Lost*: published and never received, including what a killed engine had not sent.
"""
_SOAK_BEGINS: Final = "<!-- soak: written by `python -m tests.system.chaos.soak --write` -->"
_SOAK_ENDS: Final = "<!-- /soak -->"
_SOAK: Final = """\
`make soak` runs an engine, a relay, consumers and a service under churn and cut connections, and fails if resident memory,
descriptors or threads grow. The figures are of the line through the least of each twentieth of the later half of the time.
"""


def document(outcomes: Sequence[Outcome], played: str, before: str = "") -> str:
    """Return `docs/developers/chaos.md`, with the soak of the document `before`. `played` says which rounds were played."""
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
        f"{_SOAK_BEGINS}\n{_extract_soak(before)}\n{_SOAK_ENDS}",
    ]
    return "\n".join(parts) + "\n"


def with_soak(document: str, soak_result: str) -> str:
    """Return the document with another result of a soak."""
    head, _, rest = document.partition(_SOAK_BEGINS)
    _, _, tail = rest.partition(_SOAK_ENDS)
    return f"{head}{_SOAK_BEGINS}\n{soak_result}\n{_SOAK_ENDS}{tail}"


def _extract_soak(document: str) -> str:
    return document.partition(_SOAK_BEGINS)[2].partition(_SOAK_ENDS)[0].strip()
