"""The messages of the service's gRPC contract."""

from __future__ import annotations

import functools
import sys
from typing import Any, Final

import grpc

import paths

PROTO: Final = paths.ROOT / "src" / "kvevents" / "service" / "proto" / "kvevents" / "v1"
"""The folder of the contract. With a parent folder, `kvevents.v1` would be searched in the package."""


@functools.cache
def read_messages() -> Any:
    """Return the classes of the messages, generated from the contract."""
    sys.path.insert(0, str(PROTO))
    try:
        return grpc.protos("query.proto")
    finally:
        sys.path.remove(str(PROTO))
