"""`python -m kvevents` is the command `kvevents`."""

import sys

from kvevents.cli import run_program

sys.exit(run_program())
