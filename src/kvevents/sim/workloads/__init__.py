"""Workloads of a simulated fleet: `Request` objects from traces, generators and recordings."""

from kvevents.sim.workloads.generators import ARRIVALS, Agents, Chat, Lengths, LlmD, SharedPrompts, Traffic, arrivals, rescaled
from kvevents.sim.workloads.recorded import RecordedRequests, from_recording
from kvevents.sim.workloads.registry import SAMPLE, WORKLOADS, Trace, Workload, make_sample, settings_of, workload
from kvevents.sim.workloads.traces import MooncakeRow, mooncake_rows, read_trace, write_rows, write_trace

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
