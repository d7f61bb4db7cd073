"""SIGINT and SIGTERM, which mean the same to every command."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Final, Self

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_MAX_SLEEP: Final = 60.0
"""`time.sleep` does not accept infinity."""


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _install(action: Any) -> dict[signal.Signals, Any]:
    """Install `action` and return the previous actions. A signal that is ignored, as under `nohup`, stays ignored."""
    handled = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, action) for number in handled}


def _restore(previous: dict[signal.Signals, Any]) -> None:
    for number, action in previous.items():
        signal.signal(number, action)


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Let both signals raise KeyboardInterrupt, so that context managers close what is open."""
    previous = _install(_interrupt)
    try:
        yield
    finally:
        _restore(previous)


class Stop:
    """Both signals as a flag, so that a signal cannot interrupt a function that changes sockets.

    A second signal raises KeyboardInterrupt at once.
    """

    def __init__(self) -> None:
        self.requested = False
        self.began: Final = time.monotonic()
        """When the command began. `--duration` counts from here, so it includes the wait for an engine."""
        self._raises = False
        self._callback: Callable[[], object] | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._previous = _install(self._request)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _restore(self._previous)

    def _request(self, _number: int, _frame: FrameType | None) -> None:
        again, self.requested = self.requested, True
        if self._callback is not None:
            self._callback()
        if again or self._raises:
            raise KeyboardInterrupt

    def on_signal(self, callback: Callable[[], object]) -> None:
        """Call `callback` within the signal handler as well, or at once if a signal has come."""
        self._callback = callback
        if self.requested:
            callback()

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal has come."""
        if self.requested:
            raise KeyboardInterrupt

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Inside, a signal raises KeyboardInterrupt: for waits that can be interrupted at any point."""
        self._raises = True
        try:
            self.check()
            yield
        finally:
            self._raises = False


def sleep_until_signal(seconds: float) -> None:
    """Sleep for `seconds`, which can be infinite, while threads work. A signal ends it if it raises."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, _MAX_SLEEP))
