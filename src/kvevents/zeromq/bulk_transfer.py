"""Sends or receives many messages of a libzmq socket in one native call.

A message has three frames, and one pyzmq call per frame costs several times as much as libzmq itself. So the native module
calls the functions of the libzmq that pyzmq has loaded, on pyzmq's own sockets. The module handles only messages that can be
transferred without waiting, and leaves all other messages to pyzmq, which raises the proper exception.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, Final

from kvevents.errors import MissingDependencyError
from kvevents.native_module import require_native

FRAMES_PER_MESSAGE: Final = 3
"""Number of frames of a message: topic, number, payload."""


@cache
def libzmq_io() -> Any | None:
    """Return a `_native.Libzmq`; None if there is no native module, or it does not support pyzmq's backend or libzmq."""
    try:
        native = require_native("message transfer in one call")
        backend = importlib.import_module("zmq.backend.cython._zmq")
        return native.Libzmq(backend.__file__)
    except (MissingDependencyError, ImportError, AttributeError, OSError):
        return None
