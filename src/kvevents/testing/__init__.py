"""Tools to test consumers of KV events without an engine: fake engines, recorded tapes, faults and a virtual clock."""

from kvevents.testing.fake_transport import FakeEngine, FakeTransport, VirtualClock
from kvevents.testing.playlist import Faults
from kvevents.testing.proxy import FaultProxy, ProxyCounts, ProxyLimits
from kvevents.testing.proxy_pipe import DirectionCounts
from kvevents.testing.tape import TapePlayer
from kvevents.testing.tape_sockets import Sent, TapeCounts

__all__ = [
    "DirectionCounts",
    "FakeEngine",
    "FakeTransport",
    "FaultProxy",
    "Faults",
    "ProxyCounts",
    "ProxyLimits",
    "Sent",
    "TapeCounts",
    "TapePlayer",
    "VirtualClock",
]
