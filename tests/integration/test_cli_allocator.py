"""`kvevents.cli.signals` returns free memory to the system."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvevents.cli.signals import trimming_memory

BURST = """
import os, sys
from pathlib import Path
from threading import Event
from kvevents.cli import signals as process

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

trimmed, trim = Event(), process._find_malloc_trim()
process._find_malloc_trim = lambda: lambda pad: (trim(pad), trimmed.set())
# Every thousandth piece of a burst of 60 MiB stays in use, with free memory between the pieces.
burst = [bytearray(1000) for _ in range(60_000)]
in_use = burst[::1000]
full = resident()
del burst
before = resident()
with process.trimming_memory(0.001):
    trimmed.wait(20)
    trimmed.clear()
    trimmed.wait(20)
print(full, before, resident())
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the resident size of a process from /proc")
def test_free_memory_is_returned_to_the_system_after_a_burst() -> None:
    """The allocator holds free memory below a piece that is in use, unless `malloc_trim` is called."""
    output = subprocess.run([sys.executable, "-c", BURST], check=True, capture_output=True, text=True, timeout=60).stdout
    full, before, after = map(int, output.split())
    assert before > full - 10, "the allocator returned the memory by itself, so this run proves nothing"
    assert after < full - 40


def test_the_trimming_thread_ends_with_the_context() -> None:
    before = threading.active_count()
    with trimming_memory():
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_trimming_leaves_the_memory_that_a_process_wants_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service configures glibc to keep memory for large requests; trimming must not undo that."""
    pads: list[int] = []
    trimmed = threading.Event()

    def trim(pad: int) -> int:
        pads.append(pad)
        trimmed.set()
        return 0

    monkeypatch.setattr("kvevents.cli.signals._find_malloc_trim", lambda: trim)
    with trimming_memory(0.001, keep=64 << 20):
        assert trimmed.wait(20)
    assert set(pads) == {64 << 20}


def test_without_glibc_no_thread_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other allocators do not have `malloc_trim`."""
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
        ("kvevents.cli.relay", ["relay", "127.0.0.1:1"]),
        ("kvevents.cli.serve", ["serve", "--port", "0"]),
        (
            "kvevents_plane.cli.bridge",
            ["bridge", "--nats", "nats://127.0.0.1:1", "--model", "m", "--worker", "e=tcp://127.0.0.1:1"],
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else None,
)
def test_long_running_commands_trim_memory(module: str, command: list[str]) -> None:
    """They enter `trimming_memory` before they do anything else."""
    program = [sys.executable, "-c", PROGRAM, module, *command]
    ended = subprocess.run(program, check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == ENTERED, ended.stderr
