"""Process-wide setup that commands share: signals (SIGINT and SIGTERM mean the same), logs, threads and memory."""

from __future__ import annotations

import ctypes
import gc
import logging
import signal
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Final, Self

from kvevents.cli.command import Group


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def handling_signals(action: Callable[[int, FrameType | None], None] = _interrupt) -> Iterator[None]:
    """Call `action` at SIGINT and SIGTERM; by default raise KeyboardInterrupt, so that context managers close resources.

    A signal that is ignored, as under `nohup`, stays ignored.
    """
    handled = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, action) for number in handled}
    try:
        yield
    finally:
        for number, former in previous.items():
            signal.signal(number, former)


class StopSignal:
    """Sets a flag at SIGINT and SIGTERM, so that a signal does not interrupt a function that changes sockets.

    A second signal raises KeyboardInterrupt at once.
    """

    def __init__(self) -> None:
        self.requested = False
        self.began: Final = time.monotonic()
        """Time at which the command began. `--duration` counts from this time, so it includes the wait for an engine."""
        self._raises = False
        self._callback: Callable[[], object] | None = None
        self._handling = handling_signals(self._request)

    def __enter__(self) -> Self:
        self._handling.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._handling.__exit__(kind, error, trace)

    def _request(self, _number: int, _frame: FrameType | None) -> None:
        again, self.requested = self.requested, True
        if self._callback is not None:
            self._callback()
        if again or self._raises:
            raise KeyboardInterrupt

    def on_signal(self, callback: Callable[[], object]) -> None:
        """Call `callback` in the signal handler too; call it at once if a signal has already arrived."""
        self._callback = callback
        if self.requested:
            callback()

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal has arrived."""
        if self.requested:
            raise KeyboardInterrupt

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Context in which a signal raises KeyboardInterrupt at once, for waits that can be interrupted at any point."""
        self._raises = True
        try:
            self.check()
            yield
        finally:
            self._raises = False


SWITCH_SECONDS: Final = 0.0005
"""Time after which a thread must release the interpreter to one that waits for it. A hundred queries take Python's default of 5
ms, and applying a message from the plane acquires the interpreter several times."""


# --- logging


def add_log_options(parser: ArgumentParser | Group) -> None:
    """Declare the options that `configure_logging` reads."""
    levels = ("debug", "info", "warning", "error")
    parser.add_argument("--log-level", choices=levels, default="info", help="least severe level to log (default: info)")
    text = "log lines for people, or one JSON object per line (default: text)"
    parser.add_argument("--log-format", choices=("text", "json"), default="text", help=text)


def configure_logging(args: Namespace) -> None:
    """Write the logs of kvevents to stderr, at the level and in the format of the options."""
    handler = logging.StreamHandler(sys.stderr)
    is_json = args.log_format == "json"
    handler.setFormatter(JsonFormatter() if is_json else logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for package in ("kvevents", "kvevents_plane"):
        logging.getLogger(package).setLevel(args.log_level.upper())


class JsonFormatter(logging.Formatter):
    """Formats a log record as a JSON object with `at`, `level`, `logger`, `message` and, for an exception, `traceback`."""

    def format(self, record: logging.LogRecord) -> str:
        import msgspec  # noqa: PLC0415 - only for this format

        entry = {"at": record.created, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry).decode()


class StateLogger:
    """Logs one line for each change of state. A state that has always been normal is not logged."""

    def __init__(self, log: logging.Logger) -> None:
        self._log: Final = log
        self._logged: dict[str, str] = {}

    def log_changes(self, states: Iterable[tuple[str, str, int]]) -> None:
        """Log the states that have changed. A state has a name, a description (empty if it is normal) and a log level."""
        before, self._logged = self._logged, {}
        for name, state, level in states:
            self._logged[name] = state
            if state and state != before.get(name):
                self._log.log(level, "%s: %s", name, state)
            elif not state and before.get(name):
                self._log.info("%s: normal again", name)


# --- threads


def configure_threads() -> None:
    """Bound the time for which a thread of this process delays another thread. Call it after imports, before work.

    The garbage collector stops all threads. This call makes it ignore the 40,000 objects that exist now: traversing them takes
    10 to 20 ms, and almost none is garbage.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.freeze()


# --- memory


@contextmanager
def trimming_memory(interval: float = 30.0, *, keep: int = 0) -> Iterator[None]:
    """Return free memory to the system every `interval` seconds, except `keep` bytes at the top of the heap.

    glibc has one arena for each thread, and keeps freed memory while any memory above it is in use. So a process whose buffers
    were once full never shrinks. `malloc_trim` returns every free page, in half a millisecond for each 10 MiB. Only programs
    call this, not the library, since the allocator belongs to the process. It does nothing on systems without glibc.
    """
    trim = _malloc_trim()
    if trim is None:
        yield
        return
    stop = threading.Event()

    def trim_regularly() -> None:
        while not stop.wait(interval):
            trim(keep)

    thread = threading.Thread(target=trim_regularly, daemon=True, name="kvevents-malloc-trim")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _malloc_trim() -> Callable[[int], int] | None:
    try:
        function = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes, function.restype = [ctypes.c_size_t], ctypes.c_int
    trim: Callable[[int], int] = function
    return trim
