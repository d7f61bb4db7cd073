"""`make plane-chaos`: rounds of faults in replicas, bridges, engines and NATS servers."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Final

from tests.system.chaos_kit.command_line import Program
from tests.system.chaos_kit.jobs import Run
from tests.system.plane_chaos import report
from tests.system.plane_chaos.plan import draw_plan, known_names
from tests.system.plane_chaos.stage import Stage


def make_run(options: argparse.Namespace) -> Run:
    if options.logs:
        Path(options.logs).mkdir(parents=True, exist_ok=True)
    draw = partial(draw_plan, options.seed, only=options.only, without=options.without)
    return Run(options.seed, draw, partial(Stage, logs=options.logs))


LOGS: Final = {"default": "", "metavar": "FOLDER", "help": "folder for the logs of bridges and replicas"}
PROGRAM: Final = Program(
    name="tests.system.plane_chaos",
    description=__doc__,
    report=report,
    known_names=known_names(),
    make_run=make_run,
    options={"--logs": LOGS},
    jobs=2,
    rounds=20,
    must_be_exact=True,
    is_verbose=True,
)

if __name__ == "__main__":
    sys.exit(PROGRAM.main())
