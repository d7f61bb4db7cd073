"""`python -m kvevents` is the command `kvevents`."""

import sys

from kvevents.cli import main

sys.exit(main())
