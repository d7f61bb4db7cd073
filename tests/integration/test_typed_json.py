"""Types that several threads decode for the first time at once."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from kvevents.client.protocol import decode_json

_PROGRAM = """
import sys
import threading
import msgspec
from kvevents.client.protocol import decode_json

sys.setswitchinterval(1e-6)
data = b'{"inner": {"1": {"a": 1, "b": {"x": 2}, "c": ["y"]}}}'
for _ in range(300):
    inner = msgspec.defstruct("Inner", [("a", int), ("b", dict[str, int]), ("c", list[str])])
    kind = msgspec.defstruct("Outer", [("inner", dict[str, inner])])
    barrier, found = threading.Barrier(8), []

    def decode():
        barrier.wait()
        found.append(decode_json(data, kind).inner["1"].c)

    threads = [threading.Thread(target=decode) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [["y"]] * 8, found
"""


def test_several_threads_decode_a_new_type_at_once() -> None:
    """Without a lock the process ends with a segmentation fault in most runs."""
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True, timeout=60)


def test_what_is_no_json_of_the_type_is_an_error() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_json(b'"text"', int)
