"""Ctrl-C and SIGTERM, which mean the same here."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Final, Self

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _install(action: Any) -> dict[signal.Signals, Any]:
    """Install `action` and return what was there. A signal that is ignored, as under `nohup`, stays ignored."""
    heeded = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, action) for number in heeded}


@contextmanager
def interrupting() -> Iterator[None]:
    """Have both signals raise KeyboardInterrupt, so that everything open is closed on the way out."""
    before = _install(_interrupt)
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, action)


class Stop:
    """Both signals as a flag, while sockets are open that must not be left half made; a second signal interrupts at once."""

    def __init__(self) -> None:
        self.requested = False
        self.began: Final = time.monotonic()
        """When the command began: what `--duration` counts from, waiting for an engine included."""
        self._raises = False
        self._tell: Callable[[], object] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = _install(self._request)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, action in self._before.items():
            signal.signal(number, action)

    def _request(self, _number: int, _frame: FrameType | None) -> None:
        again, self.requested = self.requested, True
        if self._tell is not None:
            self._tell()
        if again or self._raises:
            raise KeyboardInterrupt

    def tell(self, whom: Callable[[], object]) -> None:
        """Call this as well when a signal comes, within the signal's handler; at once if one has come."""
        self._tell = whom
        if self.requested:
            whom()

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal has come."""
        if self.requested:
            raise KeyboardInterrupt

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Inside, a signal raises KeyboardInterrupt: for waits that may be broken off anywhere."""
        self._raises = True
        try:
            self.check()
            yield
        finally:
            self._raises = False
