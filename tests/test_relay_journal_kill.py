"""A process that appends is killed, again and again; the next one goes on where it was."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

from kvevents.relay.journal import Relayed
from relay_journal_cases import TINY, open_journal, payload_of

KILLS = 8
LIFE = 5
CHILD = """
import sys
from kvevents.relay.journal import Disk, Journal
from relay_journal_cases import TINY, payload_of
class Counting(Disk):
    reused = 0
    def open(self, name, folder):
        self.reused += name.endswith(".spare.tmp")
        return super().open(name, folder)
disk = Counting()
journal = Journal(sys.argv[1], TINY, disk=disk)
found = journal.recover()
assert not found.unclean, found.because
journal.resume() if found.resumable else journal.begin(5)
while True:
    first = journal.next_number
    journal.append([(number, 0, 1, number, payload_of(number, number % 300)) for number in range(first, first + first % 4 + 1)])
    print(journal.next_number - 1, disk.reused, flush=True)
    journal.tick()
    if journal.wants_snapshot:
        number = max(0, journal.next_number - 20)
        journal.snapshot(number, [payload_of(number, 400)] * 3)
"""


def test_a_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """Numbers go on without a gap through every life, and each payload is that of its number; also where segments were written
    over."""
    dice = random.Random(11)
    path, acknowledged, compacted, reused = tmp_path / "journal", -1, 0, 0
    for _ in range(KILLS):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, cwd=Path(__file__).parent)
        assert child.stdout is not None
        for _ in range(dice.randint(1, 120)):
            acknowledged, count = map(int, child.stdout.readline().split())
            reused += count
        child.kill()
        rest = child.stdout.read().splitlines(keepends=True)
        child.wait()
        child.stdout.close()
        acknowledged = max([acknowledged, *(int(line.split()[0]) for line in rest if line.endswith(b"\n"))])
        journal = open_journal(path, TINY)
        found = journal.recover()
        assert found.resumable, found.because
        assert acknowledged < found.next_number <= acknowledged + 1 + 4
        number = -1 if found.snapshot is None else found.snapshot.number
        assert found.snapshot is None or list(found.snapshot.parts()) == [payload_of(number, 400)] * 3
        wanted = [Relayed(each, 0, 1, each, payload_of(each, each % 300)) for each in range(number + 1, found.next_number)]
        assert list(found.records()) == wanted
        assert found.positions == {0: (1, found.next_number - 1)}
        assert found.incarnation == LIFE
        compacted += found.snapshot is not None
        journal.close()
    assert compacted > 1
    assert reused > 1
