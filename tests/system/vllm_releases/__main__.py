"""Run the plugin with releases of vLLM, and print a table: `python -m tests.system.vllm_releases [--only RELEASE ...]`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import fields
from typing import Final

from tests.system.vllm_releases.driver import Findings
from tests.system.vllm_releases.own_tests import run_own_tests
from tests.system.vllm_releases.sources import source

RELEASES: Final = (
    *("0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.13.0", "0.14.0", "0.14.1", "0.16.0", "0.17.0", "0.17.1"),
    *("0.18.0", "0.18.1", "0.19.0", "0.19.1", "0.20.0", "0.20.1", "0.20.2", "0.21.0", "0.22.0", "0.22.1", "0.23.0", "0.24.0"),
    *("0.25.0", "0.25.1", "0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"),
)
"""All releases on PyPI from 0.11 on that have a source distribution; 0.15 has none."""
SECONDS: Final = 120.0
"""Time limit for one release."""
_COUNTS: Final = ("events", "blocks")
_AS_EXPECTED: Final = ("yes", "not in this release")


def drive(release: str, seed: int) -> dict[str, Findings] | str:
    """Return what was found in one release, for a model with one kind of attention and a hybrid one, or its error."""
    command = [sys.executable, "-m", "tests.system.vllm_releases.driver", str(source(release)), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    if done.returncode:
        return done.stderr.strip().rpartition("\n")[2]
    return {kind: Findings(**found) for kind, found in json.loads(done.stdout).items()}


def main() -> int:
    """Return 0 if the plugin published and attested in each release, and vLLM's own tests passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.vllm_releases", description=__doc__)
    parser.add_argument("--only", nargs="+", default=RELEASES, metavar="RELEASE", help="default: all from 0.11")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random requests")
    options = parser.parse_args()
    columns = [each.name for each in fields(Findings)]
    print("| release | model |", " | ".join(columns).replace("_", " "), "|")
    print("|---|---|" + "---|" * len(columns))
    failures = 0
    for release in options.only:
        found = drive(release, options.seed)
        if isinstance(found, str):
            failures += 1
            print(f"| {release} | | {found} |" + " |" * (len(columns) - 1), flush=True)
            continue
        for kind, findings in found.items():
            cells = {name: str(getattr(findings, name)) for name in columns}
            failures += any(cell not in _AS_EXPECTED for name, cell in cells.items() if name not in _COUNTS)
            print(f"| {release} | {kind} |", " | ".join(cells.values()), "|", flush=True)
    print(f"\nvLLM {RELEASES[-1]}'s tests of its events, with kvevents.compat.vllm: ", end="", flush=True)
    status, summary = run_own_tests(source(RELEASES[-1]))
    print(summary)
    return int(bool(failures or status))


if __name__ == "__main__":
    sys.exit(main())
