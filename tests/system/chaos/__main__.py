"""`make chaos`: rounds of faults, compared with the truth. A consumer that is EXACT and wrong ends the run."""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Final

from tests.system.chaos import report
from tests.system.chaos.plan import draw_plan, known_names
from tests.system.chaos.stage import Stage
from tests.system.chaos_kit.command_line import Program
from tests.system.chaos_kit.engine import RELEASES, Make
from tests.system.chaos_kit.jobs import Run
from tests.system.chaos_kit.parts import Disk
from tools import released

BATCHES: Final = 10_000


def make_run(options: argparse.Namespace) -> Run:
    draw = partial(
        draw_plan,
        options.seed,
        batches=options.batches,
        makes=_list_makes(),
        only=options.only,
        without=options.without,
        can_mount=_can_mount(),
    )
    return Run(options.seed, draw, Stage)


def _list_makes() -> list[Make]:
    """Return the makes of engines. Released classes without a wheel are left out, with a message."""
    makes: list[Make] = ["ours", "tape"]
    for make, release in RELEASES.items():
        if released.at_hand(release) is None:
            print(f"without {release.title}: `make bench` downloads its wheel, or KVEVENTS_WHEELS names a folder with it")
        else:
            makes.append(make)
    return makes


def _can_mount() -> bool:
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        can_mount_disk = Disk.is_available(Path(folder) / "disk")
    if not can_mount_disk:
        print("without full disks: only root can mount a small file system")
    return can_mount_disk


PROGRAM: Final = Program(
    name="tests.system.chaos",
    description=__doc__,
    report=report,
    known_names=known_names(),
    make_run=make_run,
    options={"--batches": {"type": int, "default": BATCHES, "help": f"batches of a round, about ({BATCHES})"}},
    jobs=4,
    seconds=150.0,
    ends_when_wrong=True,
)

if __name__ == "__main__":
    sys.exit(PROGRAM.main())
