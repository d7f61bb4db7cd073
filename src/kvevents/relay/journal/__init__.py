"""The journal of a relay: a snapshot file and a log of what was sent behind it.

A process that is killed loses nothing that it sent. A relay goes on with the same numbers only where the files prove that they
hold all that was sent; otherwise it begins a new incarnation. A disk that is full is survived in memory.
"""

from kvevents.relay.journal.files import Disk
from kvevents.relay.journal.journal import Journal, JournalLimits, JournalStats
from kvevents.relay.journal.logfile import Batches, Origin, Relayed
from kvevents.relay.journal.recovery import Recovered

__all__ = ["Batches", "Disk", "Journal", "JournalLimits", "JournalStats", "Origin", "Recovered", "Relayed"]
