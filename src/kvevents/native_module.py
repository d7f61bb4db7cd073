"""The compiled package `kvevents_native`: whether it can be used, and the transfer of many messages in one native call.

Publishers and subscribers work without it, with fewer features.

A message has three frames, and one pyzmq call per frame costs several times what libzmq itself does. So the native module calls
the functions of the libzmq that pyzmq has loaded, on pyzmq's own sockets. It handles only the ordinary case and leaves
everything else to pyzmq, which raises the proper exception.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, Protocol

from kvevents.errors import MissingDependencyError
from kvevents.package_metadata import UNKNOWN_VERSION, version

INSTALL_COMMAND = "pip install 'kvevents[native]'"


def require_native(feature: str) -> Any:
    """Return the module `kvevents_native._native`.

    `feature` begins the message of the `MissingDependencyError` that is raised if the package is missing, or if its version
    is not the one of `kvevents`.
    """
    problem = _problem()
    if problem is not None:
        raise MissingDependencyError(f"{feature} needs {problem}: {INSTALL_COMMAND}")
    return importlib.import_module("kvevents_native._native")


def find_native() -> Any | None:
    """Return the module `kvevents_native._native`; None if `require_native` would raise."""
    return None if _problem() is not None else importlib.import_module("kvevents_native._native")


def warn_without_native(logger: logging.Logger, subject: str, features: Sequence[str]) -> None:
    """Log one warning that `subject` works without `features`, if there are any and `find_native` returns None."""
    problem = _problem() if features else None
    if problem is not None:
        logger.warning("%s: no %s without %s: %s", subject, " and no ".join(features), problem, INSTALL_COMMAND)


def _problem() -> str | None:
    """Return what is needed and why it cannot be used; None if it can be used."""
    try:
        native = importlib.import_module("kvevents_native._native")
    except ImportError as error:
        return f"the package kvevents-native, which cannot be imported ({error})"
    if version() not in {UNKNOWN_VERSION, native.VERSION}:
        return f"version {version()} of the package kvevents-native, which is installed in version {native.VERSION}"
    return None


# --- messages of a libzmq socket

FRAMES: Final = 3
"""Frames of a message: topic, number, payload."""


class LibzmqIO(Protocol):
    """The native `Libzmq`. A socket is given as pyzmq's `Socket.underlying`; it must be open, and used by no other thread."""

    def send(self, socket: int, topic: bytes, batches: Sequence[tuple[int, bytes]]) -> int:
        """Send messages of a topic, a number and a payload. Return the number of frames sent, up to the first refused one."""
        ...

    def receive(
        self, socket: int, topic: bytes, first: int, due: int, limit: int
    ) -> tuple[list[bytes], list[list[bytes]], bool]:
        """Receive waiting messages without blocking: about 1 MiB, and at most `limit` messages.

        Returns the payloads of at most `due` messages with this topic and the numbers from `first` on; the frames of all
        messages from the first other one on; and whether no message is left. If all are empty and a message is left, only
        pyzmq's exception has the reason.
        """
        ...


@cache
def libzmq_io() -> LibzmqIO | None:
    """Return the native implementation; None without it, or if pyzmq has another backend or an unsupported libzmq."""
    try:
        native = require_native("message transfer in one call")
        backend = importlib.import_module("zmq.backend.cython._zmq")
        found: LibzmqIO = native.Libzmq(backend.__file__)
    except (MissingDependencyError, ImportError, AttributeError, OSError):
        return None
    return found
