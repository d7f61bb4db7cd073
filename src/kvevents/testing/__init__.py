"""For testing whatever reads KV events, against the engines' real behaviour and without an engine."""

from kvevents.testing.clock import VirtualClock
from kvevents.testing.deck import Sent, TapeCounts
from kvevents.testing.fake_transport import FakeEngine, FakeTransport
from kvevents.testing.faults import Faults
from kvevents.testing.lanes import LaneCounts
from kvevents.testing.proxy import FaultProxy, ProxyCounts
from kvevents.testing.tape import TapePlayer

__all__ = [
    "FakeEngine",
    "FakeTransport",
    "FaultProxy",
    "Faults",
    "LaneCounts",
    "ProxyCounts",
    "Sent",
    "TapeCounts",
    "TapePlayer",
    "VirtualClock",
]
