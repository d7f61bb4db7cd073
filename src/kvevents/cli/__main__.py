"""`python -m kvevents.cli`."""

import sys

from kvevents.cli import main

if __name__ == "__main__":
    sys.exit(main())
