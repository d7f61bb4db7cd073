"""Recordings: every ZeroMQ frame of a conversation with an engine, as one JSON object per line.

`files` writes, reads and repairs recordings. `deliveries` feeds the frames of a recording to streams.
"""

from kvevents.recording.files import (
    LiveBatch,
    RecordedEndpoint,
    RecordedFrame,
    RecordingReader,
    RecordingWriter,
    live_batches,
    read_recording,
    recorded_endpoints,
)

__all__ = [
    "LiveBatch",
    "RecordedEndpoint",
    "RecordedFrame",
    "RecordingReader",
    "RecordingWriter",
    "live_batches",
    "read_recording",
    "recorded_endpoints",
]
