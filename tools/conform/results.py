"""`python -m tools.conform.results`: plays every scenario against ours and the released rivals, and writes the results page.

Results go to `docs/reference/conformance.json`, and the tables of `docs/reference/conformance.md` are made from that file; with
`--tables` only the latter. `--only TARGET` plays one target again and keeps the results of all other targets.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from kvevents.conform.scenario import GROUPS, PublisherScenario, shipped_scenarios
from kvevents.conform.verdict import ConformRun, Result, Verdict
from tools.released import CHECKOUT

RESULTS: Final = CHECKOUT / "docs" / "reference" / "conformance.json"
PAGE: Final = CHECKOUT / "docs" / "reference" / "conformance.md"
BEGIN: Final = "<!-- results: written by tools/conform/results.py -->\n"
END: Final = "<!-- end of results -->\n"
PUBLISHER: Final = "python -m tools.conform.publisher {} {{endpoint}} {{replay_endpoint}} {{buffer_steps}}"
CONFORM: Final = ("kvevents", "conform")
TARGETS: Final = {
    "ours": (*CONFORM, "ours"),
    "smg-rust": ("tools.conform.smg", "rust"),
    "smg-python": ("tools.conform.smg", "python"),
    "dynamo": (*CONFORM, "dynamo"),
    "vllm-router": (*CONFORM, "vllm-router"),
    "ours-publisher": (*CONFORM, "ours-publisher"),
    "vllm-publisher": (*CONFORM, "--publisher", PUBLISHER.format("vllm"), "--title", "vllm 0.33.0 publisher"),
    "sglang-publisher": (*CONFORM, "--publisher", PUBLISHER.format("sglang"), "--title", "sglang 0.5.23 publisher"),
}
"""A module and its arguments, in the order of the columns."""
CELLS: Final = {
    Verdict.CORRECT: "correct",
    Verdict.REPORTED: "reported",
    Verdict.NEEDLESS: "**without need**",
    Verdict.SILENT: "**silently wrong**",
    Verdict.UNANSWERED: "**unanswered**",
    Verdict.NOT_APPLICABLE: "-",
}


def play(name: str, only: Sequence[str] = ()) -> ConformRun:
    """The results of one target, of all scenarios or of some."""
    words = TARGETS[name]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder, "run.json")
        chosen = [word for scenario in only for word in ("--only", scenario)]
        command = [sys.executable, "-m", *words, *chosen, "--exit-zero", "--save", str(saved)]
        subprocess.run(command, cwd=CHECKOUT, env=os.environ | {"PATH": path}, check=True)  # noqa: S603 - our own command
        run = msgspec.json.decode(saved.read_bytes(), type=ConformRun)
    return msgspec.structs.replace(run, command=shown(words))


def shown(words: Sequence[str]) -> str:
    """The command of a target for readers."""
    program = [] if words[0] == "kvevents" else ["python", "-m"]
    return " ".join(f"'{word}'" if " " in word else word for word in [*program, *words])


def complete(name: str, known: ConformRun) -> ConformRun:
    """The results of one target, with those of scenarios that were added since it was played."""
    scenarios = [
        scenario.name for scenario in shipped_scenarios() if isinstance(scenario, PublisherScenario) == ("publisher" in name)
    ]
    results = {result.name: result for result in known.results}
    missing = [scenario for scenario in scenarios if scenario not in results]
    if not missing:
        return msgspec.structs.replace(known, results=[results[scenario] for scenario in scenarios])
    added = play(name, missing)
    results |= {result.name: result for result in added.results if result.name in missing}
    in_order = [results[scenario] for scenario in scenarios]
    return msgspec.structs.replace(added, results=in_order, seconds=known.seconds + added.seconds)


def read() -> dict[str, ConformRun]:
    """The results by target; none before the first run."""
    return msgspec.json.decode(RESULTS.read_bytes(), type=dict[str, ConformRun]) if RESULTS.exists() else {}


def tables(runs: dict[str, ConformRun]) -> str:
    """The tables of the page."""
    readers = [runs[name] for name in TARGETS if name in runs and "publisher" not in name]
    publishers = [runs[name] for name in TARGETS if name in runs and "publisher" in name]
    parts = [_runs([*readers, *publishers])]
    for title, columns in (("Readers", readers), ("Publishers", publishers)):
        parts += [f"### {title}\n", _counts(columns)]
        for group, heading in GROUPS.items():
            rows = [result for result in columns[0].results if result.group == group]
            if rows:
                parts += [f"#### {heading}\n", _verdicts(rows, columns)]
    return "\n".join(parts)


def _runs(runs: Sequence[ConformRun]) -> str:
    rows = [[run.target, f"`{run.command}`", run.date, f"{run.seconds:.0f} s", run.machine] for run in runs]
    return _table(["target", "command", "date", "took", "machine"], rows)


def _counts(runs: Sequence[ConformRun]) -> str:
    order = [*list(Verdict)[1:], Verdict.NOT_APPLICABLE]
    rows = [[verdict.value, *(str(run.counts[verdict]) for run in runs)] for verdict in order]
    return _table([f"of {len(runs[0].results)} scenarios", *(run.target for run in runs)], rows)


def _verdicts(rows: Sequence[Result], runs: Sequence[ConformRun]) -> str:
    columns = [{result.name: result.verdict for result in run.results} for run in runs]
    body = [[f"`{row.name}`", row.title, *(CELLS[verdicts[row.name]] for verdicts in columns)] for row in rows]
    return _table(["scenario", "what happens", *(run.target for run in runs)], body)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, ["---"] * len(heads), *rows]) + "\n"


def page(text: str, runs: dict[str, ConformRun]) -> str:
    """The page with the tables of these results."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{tables(runs)}\n{END}{rest.partition(END)[2]}"


def main() -> int:
    """Play, and write both files."""
    parser = argparse.ArgumentParser(prog="python -m tools.conform.results", description=__doc__)
    parser.add_argument("--only", action="append", choices=TARGETS, metavar="TARGET")
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--missing", action="store_true", help="play only scenarios without a result")
    options = parser.parse_args()
    runs = read()
    if not options.tables:
        names = options.only or TARGETS
        runs |= {name: complete(name, runs[name]) if options.missing and name in runs else play(name) for name in names}
        ordered = {name: runs[name] for name in TARGETS if name in runs}
        RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(ordered), indent=1) + b"\n")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), runs), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
