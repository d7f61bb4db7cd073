"""A process that appends to a journal is killed repeatedly, and the next process continues."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import paths
from relay_journal_cases import TINY, crash, is_resumable, open_journal, payload_of

KILLS = 8
INCARNATION = 5
CHILD = """
import sys
from dataclasses import replace
from kvevents.relay.journal import Journal
from kvevents.relay.journal_format import Batches
from relay_journal_cases import TINY, is_resumable, payload_of
journal = Journal(sys.argv[1], replace(TINY, max_log_bytes=1 << 30))  # slow disks delay snapshots
found = journal.recover()
assert not found.incomplete_reason, found.incomplete_reason
journal.resume(found) if is_resumable(found) else journal.begin(5)
first = found.next_number
while True:
    numbers = range(first, first + first % 4 + 1)
    payloads = [payload_of(number, number % 300) for number in numbers]
    journal.append(Batches(first, [0] * len(numbers), [1] * len(numbers), list(numbers), payloads))
    first = numbers[-1] + 1
    print(numbers[-1], flush=True)
    journal.tick()
    if journal.wants_snapshot:
        number = max(0, first - 20)
        tail = [(each, payload_of(each, each % 300)) for each in range(number + 1, first)]
        journal.snapshot(number, [payload_of(number, 400)] * 3, tail, 9)
"""


def test_batches_that_a_journal_acknowledged_survive_sigkill(tmp_path: Path) -> None:
    """Numbers continue without a gap through all processes, and each payload belongs to its number."""
    rng = random.Random(11)
    path, acknowledged, compacted = tmp_path / "journal", -1, 0
    kills = 0
    while kills < KILLS or (compacted < 2 and kills < 20 * KILLS):  # slow disks delay snapshots
        kills += 1
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, cwd=paths.TESTS / "support")
        assert child.stdout is not None
        for _ in range(rng.randint(1, 600)):
            acknowledged = int(child.stdout.readline())
        child.kill()
        rest = child.stdout.read().splitlines(keepends=True)
        child.wait()
        child.stdout.close()
        acknowledged = max([acknowledged, *(int(line) for line in rest if line.endswith(b"\n"))])
        journal = open_journal(path, TINY)
        found = journal.recover()
        assert is_resumable(found), found.incomplete_reason
        assert acknowledged < found.next_number <= acknowledged + 1 + 4
        number = found.snapshot_number
        assert list(found.parts()) == ([] if number < 0 else [payload_of(number, 400)] * 3)
        expected = [(each, payload_of(each, each % 300)) for each in range(number + 1, found.next_number)]
        assert [(each.number, each.payload) for each in found.batches()] == expected
        assert found.positions == {0: (1, found.next_number - 1)}
        assert found.incarnation == INCARNATION
        compacted += number >= 0
        crash(journal)
    assert compacted > 1
