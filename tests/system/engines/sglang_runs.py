"""Runs the plugin with the radix trees of SGLang, release by release: `python -m tests.system.engines.sglang_runs`.

SGLang has no build for CPUs on PyPI. Its trees and the component of its scheduler that publishes KV cache events run without
a build, from the wheel, in the environment of `installation.py`, which has PyTorch. The program there is `sglang_cache.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from tests.system.engines.installation import environment
from tests.system.engines.sglang_cache import Result
from tools.released import CACHE, CHECKOUT, SGLANG, wheel

RELEASES: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("0.5.10", "0.5.11", "0.5.12.post1", "0.5.13.post1"), ("radix",)),
    "0.5.17": ("radix", "swa"),
    **dict.fromkeys(("0.5.20", "0.5.22"), ("unified-rust",)),
    "0.5.23": ("radix", "unified-python", "unified-rust", "swa-python", "swa-rust", "mamba-python"),
}
"""The trees that are run, by release. `unified-rust` is the default of the newest release."""
SECONDS: Final = 1200.0
"""Limit of one run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if no prediction was wrong and all runs without sliding windows and states were attested, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.engines.sglang_runs", description=__doc__)
    parser.add_argument(
        "--release", action="append", choices=list(RELEASES), help="release of SGLang; may be repeated (the newest)"
    )
    parser.add_argument("--all", action="store_true", help="all releases")
    parser.add_argument("--requests", type=int, default=2000, help="requests of each run (2000)")
    parser.add_argument("--seed", type=int, action="append", help="seed of the requests; may be repeated (1)")
    parser.add_argument(
        "--blocks", type=int, default=0, help="blocks of a tree in which the cost of the attestation is measured"
    )
    options = parser.parse_args(arguments)
    releases = list(RELEASES) if options.all else options.release or [SGLANG.release]
    has_failed = False
    print("release       tree            seed  requests  hits  wrong  attested  resets  attestation")
    for release in releases:
        for result in _runs(release, options):
            has_failed |= result.is_failed
            cost = f"{result.attestation_us:.1f} us at {result.blocks} blocks" if result.blocks else ""
            print(
                f"{release:13} {result.tree:15} {result.seed:4} {result.requests:9} {result.hits:5} {result.wrong:6} "
                f"{result.attested:9} {result.resets:7}  {cost}",
                flush=True,
            )
            for example in result.examples[:5]:
                print(f"  {example}")
    return 1 if has_failed else 0


def _runs(release: str, options: argparse.Namespace) -> Iterator[Result]:
    folder = _unpack_wheel(release)
    python = environment().python
    path = os.pathsep.join(map(str, (CHECKOUT / "src", CHECKOUT / "native" / "python", CHECKOUT)))
    for tree in RELEASES[release]:
        for seed in options.seed or [1]:
            command = [str(python), "-W", "ignore", "-m", "tests.system.engines.sglang_cache", str(folder), release, tree]
            command += ["--seed", str(seed), "--requests", str(options.requests), "--blocks", str(options.blocks)]
            environ = {**os.environ, "PYTHONPATH": path}
            done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, timeout=SECONDS, check=False)
            lines = done.stdout.splitlines()
            if not lines:
                raise SystemExit(f"SGLang {release}, {tree}: the program ended with {done.returncode} and without a result")
            yield msgspec.json.decode(lines[-1], type=Result)


def _unpack_wheel(release: str) -> Path:
    """Return the folder of the unpacked wheel of a release. Download the wheel first if it is not there."""
    folder = CACHE / "engines" / f"sglang-{release}-wheel"
    stamp = folder / ".ready"
    if not stamp.exists():
        with zipfile.ZipFile(wheel(dataclasses.replace(SGLANG, release=release))) as archive:
            archive.extractall(folder)
        stamp.touch()
    return folder


if __name__ == "__main__":
    sys.exit(main())
