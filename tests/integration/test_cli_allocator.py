"""`kvevents.cli.process`: free memory returns to the system."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvevents.cli.process import trimming_memory

BURST = """
import os, sys
from pathlib import Path
from threading import Event
from kvevents.cli import process

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

given, trim = Event(), process._malloc_trim()
process._malloc_trim = lambda: lambda pad: (trim(pad), given.set())
# Of a burst of 60 MiB every thousandth piece is kept; free memory is between them.
burst = [bytearray(1000) for _ in range(60_000)]
kept = burst[::1000]
full = resident()
del burst
before = resident()
with process.trimming_memory(0.001):
    given.wait(20)
    given.clear()
    given.wait(20)
print(full, before, resident())
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads what Linux says of a process")
def test_what_a_burst_has_left_behind_is_given_back() -> None:
    """The allocator keeps it as long as something above it is in use; asked to, it does not."""
    output = subprocess.run([sys.executable, "-c", BURST], check=True, capture_output=True, text=True, timeout=60).stdout
    full, before, after = map(int, output.split())
    assert before > full - 10, "the allocator gave it back by itself; this proves nothing"
    assert after < full - 40


def test_the_thread_ends_with_it() -> None:
    """Nothing stays behind."""
    before = threading.active_count()
    with trimming_memory():
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_memory_that_a_process_wants_to_keep_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service configures glibc to keep memory for large requests; trimming must not undo that."""
    kept: list[int] = []
    given = threading.Event()

    def trim(pad: int) -> int:
        kept.append(pad)
        given.set()
        return 0

    monkeypatch.setattr("kvevents.cli.process._malloc_trim", lambda: trim)
    with trimming_memory(0.001, keep=64 << 20):
        assert given.wait(20)
    assert set(kept) == {64 << 20}


def test_without_glibc_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another allocator does not have the function."""
    monkeypatch.setattr("ctypes.CDLL", lambda _: os)
    before = threading.active_count()
    with trimming_memory():
        assert threading.active_count() == before


ENTERED = 77
PROGRAM = f"""
import importlib, sys
from kvevents.cli.program import main

def entered(**_):
    sys.exit({ENTERED})

importlib.import_module(sys.argv[1]).trimming_memory = entered
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("relay", ["relay", "127.0.0.1:1"]),
        ("serve", ["serve", "--port", "0"]),
        ("bridge", ["bridge", "--nats", "nats://127.0.0.1:1", "--model", "m", "--worker", "engine=tcp://127.0.0.1:1"]),
    ],
    ids=lambda each: each if isinstance(each, str) else None,
)
def test_commands_that_run_for_months_give_back(module: str, command: list[str]) -> None:
    """Before anything else begins."""
    program = [sys.executable, "-c", PROGRAM, f"kvevents.cli.{module}", *command]
    ended = subprocess.run(program, check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == ENTERED, ended.stderr
