"""Workloads of a simulated fleet: `Request` objects from traces, generators and recordings."""

from kvevents.sim.workloads.agents import Agents
from kvevents.sim.workloads.arrivals import ARRIVALS, arrivals, rescaled
from kvevents.sim.workloads.chat import Chat
from kvevents.sim.workloads.mooncake import MooncakeRow, mooncake_rows
from kvevents.sim.workloads.recorded import RecordedRequests, from_recording
from kvevents.sim.workloads.registry import WORKLOADS, Workload, settings_of, workload
from kvevents.sim.workloads.sample import SAMPLE, Trace, make_sample
from kvevents.sim.workloads.shared import LlmD, SharedPrompts
from kvevents.sim.workloads.traces import read_trace, write_rows, write_trace
from kvevents.sim.workloads.traffic import Lengths, Traffic

__all__ = [
    "ARRIVALS",
    "SAMPLE",
    "WORKLOADS",
    "Agents",
    "Chat",
    "Lengths",
    "LlmD",
    "MooncakeRow",
    "RecordedRequests",
    "SharedPrompts",
    "Trace",
    "Traffic",
    "Workload",
    "arrivals",
    "from_recording",
    "make_sample",
    "mooncake_rows",
    "read_trace",
    "rescaled",
    "settings_of",
    "workload",
    "write_rows",
    "write_trace",
]
