"""`python -m benchmarks.plane bridge|latency|bootstrap|shards`: a plane on NATS."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Final

MODULES: Final = {
    "bridge": "benchmarks.plane.bridging",
    "latency": "benchmarks.plane.latency",
    "bootstrap": "benchmarks.plane.bootstrap",
    "shards": "benchmarks.plane.shards",
}


def main() -> int:
    """Run what is named first, with the arguments behind it."""
    if len(sys.argv) < 2 or sys.argv[1] not in MODULES:
        print(__doc__, file=sys.stderr)
        return 2
    run: Callable[[list[str]], int] = import_module(MODULES[sys.argv[1]]).main
    return run(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
