"""Sends or receives many messages of a libzmq socket in one native call.

A message has three frames, and one pyzmq call per frame costs several times as much as libzmq itself. So the native module
calls the functions of the libzmq that pyzmq has loaded, on pyzmq's own sockets. It handles only the ordinary case and leaves
everything else to pyzmq, which raises the proper exception.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, Final

from kvevents.errors import MissingDependencyError
from kvevents.native_module import require_native

FRAMES: Final = 3
"""Number of frames of a message: topic, number, payload."""


@cache
def libzmq_io() -> Any | None:
    """Return a `_native.Libzmq`; None without the native module, or if pyzmq has another backend or an unsupported libzmq."""
    try:
        native = require_native("message transfer in one call")
        backend = importlib.import_module("zmq.backend.cython._zmq")
        return native.Libzmq(backend.__file__)
    except (MissingDependencyError, ImportError, AttributeError, OSError):
        return None
