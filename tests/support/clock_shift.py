"""Run a program with a shifted wall clock: `python clock_shift.py FOLDER PROGRAM [ARGUMENT...]`.

Go's runtime, and so nats-server, gets the time from the kernel's vDSO. A static program loads no library with LD_PRELOAD, so
the function is replaced in the program's own copy of the vDSO: a second process traces the program's `exec`, writes the new
function before the first instruction runs, and detaches. The process that was started becomes the program itself, so signals
and the exit code are those of the program.

`FOLDER/shift` contains the seconds to add, in 8 bytes. `FOLDER/PID` contains the address of the seconds in the process with
that id, so that `clock_cases` can change them while it runs. Monotonic time does not change, as when a machine's clock is set.
This works on x86-64 Linux only.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from pathlib import Path
from typing import BinaryIO, Final

SHIFT: Final = "shift"
FUNCTION: Final = b"__vdso_clock_gettime"
CODE: Final = (
    bytes.fromhex(
        "b8e4000000"  # mov eax, SYS_clock_gettime
        "0f05"  # syscall
        "85ff"  # test edi, edi: CLOCK_REALTIME
        "7405"  # je +5
        "83ff05"  # cmp edi, CLOCK_REALTIME_COARSE
        "750a"  # jne +10
        "488b0d09000000"  # mov rcx, [rip + 9]: the seconds behind this code
        "48010e"  # add [rsi], rcx
        "c3"  # ret
    )
    + b"\x90" * 5
)
"""The new function. The seconds follow it; its length is a multiple of 8, so that they are aligned and written atomically."""

_PR_SET_PTRACER: Final = 0x59616D61
_ANY: Final = 2**64 - 1
_SEIZE: Final = 0x4206
_CONT: Final = 7
_DETACH: Final = 17
_TRACE_EXEC: Final = 0x10
_EXEC_EVENT: Final = 4
_WALL: Final = 0x40000000
_AT_SYSINFO_EHDR: Final = 33
_LOAD, _DYNAMIC, _STRTAB, _SYMTAB = 1, 2, 5, 6


def find_function(memory: BinaryIO, base: int) -> int:
    """Return the address of `FUNCTION` in a process whose vDSO is at `base`."""

    def read(at: int, form: str) -> tuple[int, ...]:
        memory.seek(at)
        return struct.unpack(form, memory.read(struct.calcsize(form)))

    (headers,) = read(base + 32, "<Q")
    size, count = read(base + 54, "<HH")
    loaded = dynamic = 0
    for header in range(base + headers, base + headers + size * count, size):
        kind, _flags, offset, address = read(header, "<IIQQ")
        if kind == _LOAD:
            loaded = base + offset - address
        elif kind == _DYNAMIC:
            dynamic = base + offset
    tables: dict[int, int] = {}
    while (entry := read(dynamic, "<QQ"))[0]:
        tables[entry[0]] = loaded + entry[1]
        dynamic += 16
    symbol, names = tables[_SYMTAB], tables[_STRTAB]
    while symbol < names:  # in every vDSO of Linux the string table follows the symbol table
        name, *_, value, _size = read(symbol, "<IBBHQQ")
        memory.seek(names + name)
        if memory.read(len(FUNCTION) + 1) == FUNCTION + b"\0":
            return loaded + value
        symbol += 24
    raise LookupError(f"the vDSO has no {FUNCTION.decode()}")


def replace_function(pid: int, folder: Path) -> None:
    """Replace the clock function of a stopped process, with the shift in `folder`."""
    auxiliary = struct.iter_unpack("<QQ", Path(f"/proc/{pid}/auxv").read_bytes())
    base = next(value for kind, value in auxiliary if kind == _AT_SYSINFO_EHDR)
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        at = -(-find_function(memory, base) // 8) * 8
        seconds = (folder / SHIFT).read_bytes()
        memory.seek(at)
        memory.write(CODE + seconds)
    (folder / str(pid)).write_text(str(at + len(CODE)))


def trace(libc: ctypes.CDLL, pid: int, folder: Path, ready: int) -> None:
    """Wait for the `exec` of a process, and replace the function in the new program."""

    def ptrace(request: int, data: int = 0) -> None:
        if libc.ptrace(ctypes.c_long(request), ctypes.c_long(pid), None, ctypes.c_long(data)) < 0:
            raise OSError(ctypes.get_errno(), "ptrace")

    ptrace(_SEIZE, _TRACE_EXEC)
    os.write(ready, b"1")
    while True:
        _, status = os.waitpid(pid, _WALL)
        if not os.WIFSTOPPED(status):
            return  # the process has ended
        if status >> 16 == _EXEC_EVENT:
            break
        ptrace(_CONT, os.WSTOPSIG(status) if not status >> 16 else 0)
    replace_function(pid, folder)
    ptrace(_DETACH)


def main(folder: Path, command: list[str]) -> None:
    """Replace this process by `command`, with a shifted clock."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(ctypes.c_int(_PR_SET_PTRACER), ctypes.c_ulong(_ANY), 0, 0, 0)
    pid = os.getpid()
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        if os.fork() == 0:  # a grandchild, since the program would not reap a child
            os.close(reading)
            trace(libc, pid, folder, writing)
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    if os.read(reading, 1) != b"1":
        sys.exit("the program cannot be traced, so its clock cannot be set")
    os.execv(command[0], command)  # noqa: S606 - the command of a test


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
