"""Process-wide setup for several commands: signals (SIGINT and SIGTERM have the same effect), logs, threads and memory."""

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


@contextmanager
def handling_signals(action: Callable[[int, FrameType | None], None] = signal.default_int_handler) -> Iterator[None]:
    """Return a context in which SIGINT and SIGTERM call `action`; by default they raise KeyboardInterrupt.

    If the process already ignores a signal, as under `nohup`, the signal stays ignored.
    """
    handled = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, action) for number in handled}
    try:
        yield
    finally:
        for number, former in previous.items():
            signal.signal(number, former)


class StopSignal:
    """Context in which SIGINT and SIGTERM set `requested`, so that a signal does not interrupt a function that changes sockets.

    A second signal raises KeyboardInterrupt at once.
    """

    def __init__(self) -> None:
        self.requested = False
        """Whether a signal has arrived."""
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
        """Make the signal handler call `callback`. If a signal has already arrived, call `callback` now."""
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


THREAD_SWITCH_SECONDS: Final = 0.0005
"""Seconds after which a thread must release the interpreter to a waiting thread. In Python's default of 5 ms, the
service could answer a hundred queries. A thread that applies a message from the plane waits several times."""


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
        import msgspec  # noqa: PLC0415 - only this format needs it

        entry = {"at": record.created, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry).decode()


class StateLogger:
    """Logs one line for each change of a state. A state that is normal from the start on is not logged."""

    def __init__(self, log: logging.Logger) -> None:
        self._log: Final = log
        self._logged: dict[str, str] = {}

    def log_changes(self, states: Iterable[tuple[str, str, int]]) -> None:
        """Log the states that have changed. A state consists of name, description (empty if it is normal) and log level."""
        before, self._logged = self._logged, {}
        for name, state, level in states:
            self._logged[name] = state
            if state and state != before.get(name):
                self._log.log(level, "%s: %s", name, state)
            elif not state and before.get(name):
                self._log.info("%s: normal again", name)


# --- threads


def configure_threads() -> None:
    """Bound the time for which a thread of this process delays another thread. Call this function after all imports.

    The garbage collector stops all threads. After this call, the collector ignores the 40,000 objects that exist now, because
    traversing these objects takes 10 to 20 ms, and almost all of them stay.
    """
    sys.setswitchinterval(THREAD_SWITCH_SECONDS)
    gc.freeze()


# --- memory


@contextmanager
def trimming_memory(interval: float = 30.0, *, keep: int = 0) -> Iterator[None]:
    """Return a context that returns free memory to the system every `interval` seconds, except `keep` bytes of the heap's top.

    glibc has one arena for each thread, and keeps freed memory as long as memory above it is in use. So the memory of a process
    would never shrink after the process has filled its buffers. `malloc_trim` returns every free page, in half a millisecond
    for each 10 MiB. A library must not call this function, because the allocator belongs to the process. Without glibc, the
    context does nothing.
    """
    trim = _find_malloc_trim()
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


def _find_malloc_trim() -> Callable[[int], int] | None:
    try:
        function = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes, function.restype = [ctypes.c_size_t], ctypes.c_int
    trim: Callable[[int], int] = function
    return trim
