"""The journal of a relay: a snapshot file, and a log of what was sent after it.

A process that is killed loses nothing that it sent. A relay continues its numbers only if the files prove that they hold all
that was sent. Otherwise it begins a new incarnation. While the disk fails, the relay runs without a journal.
"""

from kvevents.relay.journal.disk import Disk
from kvevents.relay.journal.file_format import Batches, ForwardedBatch, Origin
from kvevents.relay.journal.journal import Journal, JournalLimits, JournalStats
from kvevents.relay.journal.recovery import Recovered

__all__ = ["Batches", "Disk", "ForwardedBatch", "Journal", "JournalLimits", "JournalStats", "Origin", "Recovered"]
