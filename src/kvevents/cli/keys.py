"""Single keys of a terminal, as they are pressed."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from types import TracebackType
from typing import Any, Final, Self

_ENDING: Final = frozenset(b"qQ\x04")
"""q, and Ctrl-D."""
_STDIN: Final = 0


class Keys:
    """Inside, keys come without Enter and are not shown; where stdin is no terminal, none come."""

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    def __enter__(self) -> Self:
        if sys.stdin is not None and sys.stdin.isatty():
            self._before = termios.tcgetattr(_STDIN)
            tty.setcbreak(_STDIN)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._before is not None:
            termios.tcsetattr(_STDIN, termios.TCSADRAIN, self._before)

    def wait(self, seconds: float) -> bool:
        """Wait; True as soon as somebody wants to end."""
        if self._before is None:
            time.sleep(seconds)
            return False
        until = time.monotonic() + seconds
        while select.select([_STDIN], [], [], max(until - time.monotonic(), 0.0))[0]:
            pressed = os.read(_STDIN, 64)
            if not pressed or _ENDING & set(pressed):  # the terminal is gone, or the user goes
                return True
        return False
