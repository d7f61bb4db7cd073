"""`kvevents query`: who holds how much of a prompt."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from kvevents.cli import options
from kvevents.cli.amounts import share, some, worker
from kvevents.cli.client import ServiceClient, client_of
from kvevents.cli.command import OK, Command
from kvevents.cli.console import Console, Part, Span, Style, printable
from kvevents.cli.lines import plural, trust_style
from kvevents.cli.prompt import add_prompt, prompt_of
from kvevents.errors import ConfigError
from kvevents.service.registration import DEFAULT_GROUP
from kvevents.service.schemas import (
    MatchAnswer,
    ScoredCandidate,
    Selection,
    SourcesAnswer,
    SourceView,
    TrustStatus,
    WorkerMatch,
)
from kvevents.stream import Trust
from kvevents.weights import tiers_by_reach

Cells: TypeAlias = list[list[Part]]

BAR_CELLS: Final = 24
_TIERS: Final[dict[str, tuple[str, str, Style]]] = {
    "gpu": ("█", "#", "good"),
    "cpu": ("▓", "=", "name"),
    "disk": ("▒", "-", "warn"),
}
"""How a tier is drawn: where block characters can be, where not, and in which style; the fastest first."""
_OTHER_TIER: Final[tuple[str, str, Style]] = ("░", "+", "loud")
_NOT_HELD: Final[tuple[str, str, Style]] = ("·", ".", "dim")


def run(args: Namespace) -> int:
    """Ask, and show the answer."""
    tokens = prompt_of(args)
    client = client_of(args)
    scope = {name: given for name in ("tenant", "group", "lora", "salt") if (given := getattr(args, name)) is not None}
    sources = _Sources(client, scope)
    asked: dict[str, Any] = {"model": args.model or sources.only_model(), "tokens": tokens, **scope}
    if args.whole_prompt:
        asked["whole_prompt"] = True
    answer: MatchAnswer | Selection
    if args.select:
        answer = client.post("/v1/select", asked | {"explain": True}, Selection)
    else:
        answer = client.post("/v1/match", asked, MatchAnswer)
    console = Console()
    if args.output == "json":
        console.data(msgspec.json.encode(answer))
    elif isinstance(answer, Selection):
        _show_choice(answer, len(tokens), console)
    else:
        _show_holders(answer, asked["model"], sources, console)
    return OK


class _Sources:
    """What the service follows for whoever asks, fetched when it is needed."""

    def __init__(self, client: ServiceClient, scope: Mapping[str, str]) -> None:
        self._client = client
        self._whose = {name: scope.get(name, DEFAULT_GROUP) for name in ("tenant", "group")}

    def of(self, **wanted: str) -> list[SourceView]:
        return self._client.get("/v1/sources", SourcesAnswer, {**self._whose, **wanted}).sources

    def only_model(self) -> str:
        """The model of a fleet that has just one. Raises `ConfigError`."""
        models = sorted({source.model for source in self.of()})
        whom = " ".join(f"{name} {value}" for name, value in self._whose.items())
        if not models:
            raise ConfigError(f"no engine of {whom} is registered at {self._client.url}; see `kvevents top`")
        if len(models) > 1:
            raise ConfigError(f"several models are served for {whom}: {some(models)}; name one with --model")
        return models[0]

    def why_nothing(self, model: str, prompt: int) -> str:
        """What may be the reason that nobody holds anything of a prompt."""
        sources = self.of(model=model)
        if not any(source.blocks for source in sources):
            return "no engine of this model has told of a block yet; `kvevents top` shows them"
        smallest = min((size for source in sources for size in _block_sizes(source)), default=0)
        if prompt <= smallest:
            return (
                f"the prompt is no longer than a block of {smallest} tokens: engines keep whole blocks, "
                "and recompute the one of the last token"
            )
        return "if an engine should hold it, compare tokens, LoRA and salt with its own: `kvevents tail ENDPOINT --token-ids`"


def _block_sizes(source: SourceView) -> list[int]:
    declared = source.declared_block_size
    return source.block_sizes or ([] if declared is None else [declared])


# --- who holds what


def _show_holders(answer: MatchAnswer, model: str, sources: _Sources, console: Console) -> None:
    head: list[Part] = [Span(plural(answer.prompt_tokens, "token"), "bold"), " of model ", Span(model, "name")]
    holding = sum(held.tokens > 0 for held in answer.workers)
    # A worker that is not EXACT may hold more than is known, also where that is nothing.
    shown = [held for held in answer.workers if held.tokens or held.trust.state != "EXACT"]
    if holding:
        console.line(*head, f": {plural(holding, 'worker')} {_verb(holding)} a beginning of them")
    else:
        console.line(*head, ": no worker holds a beginning of them, as far as is known")
        console.note(sources.why_nothing(model, answer.prompt_tokens))
    if not shown:
        return
    holders = sorted(shown, key=lambda held: (-held.tokens, held.instance, held.rank))
    rows = [_held(held, answer.prompt_tokens) for held in holders]
    _table(("worker", "tokens", "share", "held", "tiers", "trust"), rows, console)
    _legend([held.tiers for held in holders], console)


def _verb(count: int) -> str:
    return "holds" if count == 1 else "hold"


def _held(held: WorkerMatch, prompt: int) -> Cells:
    return [
        [Span(worker(held.instance, held.rank), "name")],
        [f"{held.tokens:,}"],
        [share(held.tokens, prompt)],
        _bar(held.tiers, prompt),
        [_reached(held.tiers)],
        _trust(held.trust),
    ]


def _show_choice(selected: Selection, prompt: int, console: Console) -> None:
    console.line(Span(worker(selected.instance, selected.rank), "name"), " should take it")
    console.line(selected.why)
    considered = selected.considered or []
    if left_out := selected.unreachable:
        console.note("left out: " + some([f"{worker(one.instance, one.rank)} is {one.trust.state}" for one in left_out]))
    rows = [_considered(one, prompt) for one in considered]
    _table(("worker", "score", "to compute", "load", "tokens", "held", "tiers", "trust"), rows, console)
    _legend([one.tiers for one in considered], console)


def _considered(one: ScoredCandidate, prompt: int) -> Cells:
    return [
        [Span(worker(one.instance, one.rank), "name")],
        [f"{one.score:.3f}"],
        [share(one.uncached, 1)],
        [f"{one.load:.2f}"],
        [f"{one.tokens:,}"],
        _bar(one.tiers, prompt),
        [_reached(one.tiers)],
        _trust(one.trust),
    ]


# --- how it looks


def _table(titles: Sequence[str], rows: Sequence[Cells], console: Console) -> None:
    """Lines with their cells below each other; numbers to the right."""
    head: Cells = [[Span(title, "dim")] for title in titles]
    whole = [head, *rows]
    widths = [max(_width(row[place]) for row in whole) for place in range(len(titles))]
    for row in whole:
        line: list[Part] = []
        for title, cell, width in zip(titles, row, widths, strict=True):
            blank = " " * (width - _width(cell))
            line += [*cell, blank, "  "] if title in _LEFT else [blank, *cell, "  "]
        console.line(*_without_end(line))


_LEFT: Final = frozenset({"worker", "held", "tiers", "trust"})


def _without_end(line: list[Part]) -> list[Part]:
    while isinstance(line[-1], str) and not line[-1].strip():
        line.pop()
    return line


def _width(cell: Sequence[Part]) -> int:
    return sum(len(printable(part.text if isinstance(part, Span) else part)) for part in cell)


def _bar(tiers: Mapping[str, int], prompt: int) -> list[Part]:
    bar: list[Part] = []
    drawn = 0
    for tier, tokens in tiers_by_reach(tiers):
        cells = max(min(BAR_CELLS, round(BAR_CELLS * tokens / max(prompt, 1))), drawn)
        bar += _cells(_TIERS.get(tier, _OTHER_TIER), cells - drawn)
        drawn = cells
    return [*bar, *_cells(_NOT_HELD, BAR_CELLS - drawn)]


def _cells(look: tuple[str, str, Style], count: int) -> list[Part]:
    return [Span(look[not _draws_blocks()] * count, look[2])] if count else []


def _draws_blocks() -> bool:
    try:
        "█▓▒░·".encode(sys.stdout.encoding or "ascii")
    except (UnicodeError, LookupError):
        return False
    return True


def _reached(tiers: Mapping[str, int]) -> str:
    return ", ".join(f"{tier} {tokens:,}" for tier, tokens in tiers_by_reach(tiers))


def _legend(all_tiers: Sequence[Mapping[str, int]], console: Console) -> None:
    names = dict.fromkeys(tier for tiers in all_tiers for tier, _ in tiers_by_reach(tiers))
    looks = [(_TIERS.get(tier, _OTHER_TIER), f"down to {tier}") for tier in names]
    parts: list[Part] = []
    for look, name in [*looks, (_NOT_HELD, "to be computed")]:
        parts += [*_cells(look, 1), Span(f" {name}   ", "dim")]
    console.note(*parts)


def _trust(trust: TrustStatus) -> list[Part]:
    reason = f" ({trust.reason})" if trust.reason else ""
    return [Span(trust.state, trust_style(Trust(trust.state))), reason]


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    add_prompt(parser)
    options.add_service(parser)
    parser.add_argument("--model", metavar="NAME", help="whose tokens these are; needed where several models are served")
    parser.add_argument("--tenant", metavar="NAME", help="tenant (default: default)")
    parser.add_argument("--group", metavar="NAME", help="routing group (default: default)")
    parser.add_argument("--lora", metavar="NAME", help="LoRA adapter that the prompt is for")
    parser.add_argument("--salt", metavar="SALT", help="cache salt that the prompt has")
    parser.add_argument(
        "--whole-prompt",
        action="store_true",
        help="look up the last token too, which engines recompute with its block",
    )
    parser.add_argument("--select", action="store_true", help="ask which worker should take the prompt, and why")
    options.add_output(parser, "the service's response as one JSON object")


COMMAND: Final = Command(
    "query",
    "ask a service who holds how much of a prompt",
    "Ask a service who holds how much of a prompt, on which tiers, and how far that can be trusted.\n"
    "The prompt is token ids, or text and the model's tokenizer.",
    """\
  kvevents query 791 6864 315 9822 374
  kvevents query --text-file prompt.txt --tokenizer tokenizer.json --model llama
  kvevents query --prompt-file prompt.u32 --select   which worker should take it, and why
  kvevents query - -o json --service https://indexer:8090 --tls-ca ca.pem
""",
    add_arguments,
    run,
)
