"""Settings of Python's interpreter for processes in which threads answer beside one another."""

from __future__ import annotations

import gc
import sys
from typing import Final

SWITCH_SECONDS: Final = 0.0005
"""How long one thread may keep the interpreter while another waits: Python's 5 ms are a hundred queries, and a page of the
plane needs the interpreter several times."""


def be_responsive() -> None:
    """Let no thread of this process keep the interpreter for long; when all modules are imported, before anything is done.

    The garbage collector stops all threads. It no longer looks at what exists now, 45,000 objects, which takes 10 to 20 ms.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
