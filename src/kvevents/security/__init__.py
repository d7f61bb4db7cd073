"""CURVE keys of ZeroMQ sockets, and the lists of keys that may connect to them (`kvevents.security.zap`).

This module imports no zmq.
"""

from kvevents.security.keys import Curve, KeyPair

__all__ = ["Curve", "KeyPair"]
