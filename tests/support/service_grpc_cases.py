"""The messages of the service's gRPC contract."""

from __future__ import annotations

import functools
import sys
from typing import Any, Final

import grpc

import paths

PROTO: Final = paths.ROOT / "src" / "kvevents" / "service" / "proto" / "kvevents" / "v1"
"""Not the folder above: `kvevents.v1` would be looked for in the package."""


@functools.cache
def read_messages() -> Any:
    """Classes of the messages, made from the contract itself."""
    sys.path.insert(0, str(PROTO))
    try:
        return grpc.protos("query.proto")
    finally:
        sys.path.remove(str(PROTO))
