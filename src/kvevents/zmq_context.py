"""Ends ZeroMQ contexts within a bound."""

from __future__ import annotations

import threading
from typing import Any

import zmq


def destroy_context(context: zmq.Context[Any], wait: float = 1.0) -> bool:
    """Close all sockets of a context without flushing them, and terminate it. Return whether it ended within `wait` seconds.

    libzmq waits for each socket without a bound. If an interrupt comes while pyzmq makes a socket, the exception holds a socket
    that pyzmq does not close. Termination then goes on in a daemon thread, and ends with the process at the latest.
    """
    ending = threading.Thread(target=context.destroy, kwargs={"linger": 0}, daemon=True, name="zmq-destroy")
    ending.start()
    ending.join(wait)
    return not ending.is_alive()
