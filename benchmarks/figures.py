"""What is measured of publishers and subscribers, and what each figure has to reach."""

from __future__ import annotations

from typing import Final

from benchmarks.trials import Figure, Trial

TRIALS: Final = (
    Trial("publish-busy", "publishing", "busy", (1, 20), (1, 5)),
    Trial("publish-paced", "publishing", "paced", (1, 2_000, 500), (1, 500, 500)),
    Trial("flow-1", "publishing", "flow", (1, 100_000), (1, 20_000)),
    Trial("flow-32", "publishing", "flow", (32, 60_000), (32, 10_000)),
    Trial("replay", "publishing", "replay", (32, 10_000, 500), (32, 10_000, 500)),
    Trial("subscribe-1", "subscribing", "read", (1, 60_000), (1, 20_000), ("ours", "bare")),
    Trial("subscribe-32", "subscribing", "read", (32, 30_000), (32, 10_000), ("ours", "bare")),
    Trial("recover", "subscribing", "recover", (32, 10_000), (32, 10_000), ("vllm", "sglang")),
)

FIGURES: Final = (
    Figure("publish() p50, busy", "publish-busy", "p50", "ns", 1 / 4),
    Figure("publish() p99, busy", "publish-busy", "p99", "ns", 1.0),
    Figure("time to read the clock, in each of these", "publish-busy", "clock", "ns", None, context=True),
    Figure("publish() p50, 500/s", "publish-paced", "p50", "ns", 1 / 2),
    Figure("publish() p99, 500/s", "publish-paced", "p99", "ns", 1.0),
    Figure("CPU per batch at 500/s, 1 block", "publish-paced", "cpu", "us", None),
    Figure("batches/s to one process, 1 block", "flow-1", "rate", "/s", 2.0, "ratio at least"),
    Figure("batches/s to one process, 32 blocks", "flow-32", "rate", "/s", 2.0, "ratio at least"),
    Figure("batches lost on the way, 1 block", "flow-1", "lost", "", 0.0, "none"),
    Figure("batches lost on the way, 32 blocks", "flow-32", "lost", "", 0.0, "none"),
    Figure("publisher CPU per batch, 1 block", "flow-1", "cpu", "us", 1 / 3),
    Figure("publisher CPU per batch, 32 blocks", "flow-32", "cpu", "us", 1 / 2),
    Figure("replay of 10,000, lost by a fast reader", "replay", "lost_fast", "", 0.0, "none"),
    Figure("replay of 10,000, lost by a slow reader", "replay", "lost_slow", "", 0.0, "none"),
    Figure("replay of 10,000, lost by a late reader", "replay", "lost_late", "", 0.0, "none"),
    Figure("longest stall of live events in replay", "replay", "stall", "ms", 5.0, "below"),
    Figure("longest stall of live events without replay", "replay", "stall_quiet", "ms", 1.0),
    Figure("publish() to reader p50, 500/s, without replay", "replay", "delivery_quiet", "us", 2.0),
    Figure("subscriber CPU per batch, 1 block", "subscribe-1", "cpu", "us", 1.5),
    Figure("subscriber CPU per batch, 32 blocks", "subscribe-32", "cpu", "us", 1.5),
    Figure("subscriber batches/s, 1 block", "subscribe-1", "rate", "/s", None),
    Figure("subscriber batches/s, 32 blocks", "subscribe-32", "rate", "/s", None),
    Figure("recovery of 10,000 from the engine: missing", "recover", "missing", "", 0.0, "none"),
    Figure("recovery of 10,000 from the engine: time", "recover", "seconds", "s", None),
    Figure("recovery of 10,000 from the engine: requests", "recover", "requests", "", None, context=True),
)
