"""`kvevents.sim.workload_traces`: the plain format of traces."""

from __future__ import annotations

import msgspec
import pytest

from kvevents.sim.requests import Drawn, Request, Text
from kvevents.sim.workload_traces import FIRST_ANSWER, plain_request, plain_row


def read(line: str, number: int = 1) -> Request:
    return plain_request(line.encode(), number)


def test_a_line_with_only_the_required_keys_is_read() -> None:
    """It has token ids and the length of an answer, whose text no other request has."""
    request = read('{"at": 1.5, "tokens": [5, 4294967295], "output_tokens": 120}', 7)
    assert request == Request(1.5, Text.from_tokens([5, 2**32 - 1]), Text([Drawn(FIRST_ANSWER + 7, 120)]))


def test_a_line_with_all_keys_is_read() -> None:
    request = read(
        '{"at": 0, "prompt": [[18446744073709551615, 600], {"tokens": [1, 2]}], "output": [[9, 30]],'
        ' "session": "u7", "lora": "adapter-a", "salt": "tenant-1"}'
    )
    assert request == Request(
        0.0, Text([(2**64 - 1, 600)]) + Text.from_tokens([1, 2]), Text([(9, 30)]), "u7", "adapter-a", "tenant-1"
    )
    assert plain_request(msgspec.json.encode(plain_row(request)), 1) == request


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"at": 1, "output_tokens": 1}', "exactly one of the keys prompt and tokens"),
        ('{"at": 1, "tokens": [1], "prompt": [[1, 1]], "output_tokens": 1}', "exactly one of the keys prompt and tokens"),
        ('{"at": 1, "tokens": [1]}', "exactly one of the keys output and output_tokens"),
        ('{"at": -1, "tokens": [1], "output_tokens": 1}', "at"),
        ('{"at": 1, "tokens": [], "output_tokens": 1}', "tokens"),
        ('{"at": 1, "tokens": [4294967296], "output_tokens": 1}', r"tokens\[0\]"),
        ('{"at": 1, "tokens": [1], "output_tokens": 0}', "output_tokens"),
        ('{"at": 1, "prompt": [[1, 0]], "output_tokens": 1}', "prompt"),
        ('{"at": 1, "prompt": [[18446744073709551616, 1]], "output_tokens": 1}', "."),
        ('{"at": 1, "prompt": [], "output_tokens": 1}', "prompt"),
        ('{"at": 1, "tokens": [1], "output_tokens": 1, "sesion": "x"}', "sesion"),
        ('{"at": 1, "tokens": [1], "output_tokens": 1, "salt": ""}', "salt"),
    ],
)
def test_invalid_lines_raise(line: str, message: str) -> None:
    """A misspelt key is an error too, because ignoring it would lose a value silently."""
    with pytest.raises(ValueError, match=message):
        read(line)
