"""The journal of a relay: an append-only, checksummed record of what it has sent.

Files of frames, each frame checked with everything before it; a snapshot now and then, so that old files can go. A process that
is killed loses nothing; what a machine loses with its power is in `JournalSettings`. A disk that is full is survived in memory.
"""

from kvevents.relay.journal.clerk import Clerk
from kvevents.relay.journal.disk import Disk
from kvevents.relay.journal.journal import Journal
from kvevents.relay.journal.limits import FsyncPolicy, JournalSettings
from kvevents.relay.journal.records import Hole, Mark, Positions, Record, Relayed, UpstreamReset
from kvevents.relay.journal.recovery import Recovered, Snapshot
from kvevents.relay.journal.stats import JournalStats, State

__all__ = [
    "Clerk",
    "Disk",
    "FsyncPolicy",
    "Hole",
    "Journal",
    "JournalSettings",
    "JournalStats",
    "Mark",
    "Positions",
    "Record",
    "Recovered",
    "Relayed",
    "Snapshot",
    "State",
    "UpstreamReset",
]
