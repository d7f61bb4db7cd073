"""`kvevents.sim.workload_traces`: files of traces, their errors, and their memory."""

from __future__ import annotations

import gzip
import os
import tracemalloc
from array import array
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.errors import ConfigError, WorkloadError
from kvevents.sim.requests import Request, Text, shared_prefix
from kvevents.sim.workload_traces import MooncakeRow
from kvevents.sim.workloads import read_trace, write_trace
from mooncake_cases import write_rows

PLAIN = '{"at": 1.5, "tokens": [1, 2], "output_tokens": 3}'
MOONCAKE = '{"timestamp": 2000, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}'
REAL = Path(os.environ.get("KVEVENTS_MOONCAKE_TRACE", "conversation_trace.jsonl.gz"))

NAMES = st.none() | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
PIECES = st.tuples(st.integers(0, 2**64 - 1), st.integers(1, 10**6)) | st.lists(st.integers(0, 2**32 - 1), min_size=1).map(
    lambda ids: array("I", ids)
)
TEXTS = st.lists(PIECES, min_size=1, max_size=4).map(Text)
REQUESTS = st.builds(Request, st.floats(0, 1e9, allow_nan=False), TEXTS, TEXTS, NAMES, NAMES, NAMES)


def write_file(folder: Path, *lines: str, name: str = "trace.jsonl") -> Path:
    path = folder / name
    text = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return path


@given(st.lists(REQUESTS, max_size=5).map(lambda requests: sorted(requests, key=lambda request: request.at)), st.booleans())
def test_written_requests_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, requests: list[Request], packed: bool
) -> None:
    """This holds for any requests, and equal requests are encoded as equal bytes."""
    folder = tmp_path_factory.mktemp("trace")
    one, other = (folder / f"{name}.jsonl{'.gz' if packed else ''}" for name in "ab")
    assert write_trace(one, requests) == write_trace(other, iter(requests)) == len(requests)
    assert list(read_trace(one)) == requests
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_the_format_of_each_line_is_detected_by_its_keys(tmp_path: Path, name: str) -> None:
    """One file may have both formats and blank lines; sessions of Mooncake's lines are inferred."""
    path = write_file(tmp_path, PLAIN, "", MOONCAKE, name=name)
    plain, mooncake = read_trace(path)
    assert (plain.at, len(plain.prompt), plain.session) == (1.5, 2, None)
    assert (mooncake.at, len(mooncake.prompt), mooncake.session) == (2.0, 600, "session-1")


def test_at_most_the_limit_of_lines_is_read(tmp_path: Path) -> None:
    """A broken line after the limit raises no error."""
    path = write_file(tmp_path, PLAIN, PLAIN, "broken")
    assert len(list(read_trace(path, limit=2))) == 2
    assert list(read_trace(path, limit=0)) == []
    with pytest.raises(ConfigError, match="invalid limit -1"):
        read_trace(path, limit=-1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "truncated"),
        ("[1]", "object"),
        ('{"time": 1}', "neither of the keys hash_ids and at"),
        (PLAIN.replace("[1, 2]", "[-1]"), "tokens"),
        (MOONCAKE.replace("600", "6000"), "needs 12 hash_ids"),
        ('{"at":' + "[" * 100_000, "recursion"),
        (MOONCAKE.replace("2000", "1000"), "1.0 s, but the previous line's time is 1.5 s: sort"),
    ],
)
def test_an_invalid_line_raises_with_its_number(tmp_path: Path, line: str, message: str) -> None:
    """Requests before it are read; the message says what a line must be."""
    requests = read_trace(write_file(tmp_path, PLAIN, line))
    assert next(requests).at == 1.5
    with pytest.raises(WorkloadError, match=rf"trace\.jsonl, line 2: .*{message}.*expected a JSON object"):
        next(requests)


def test_a_line_beyond_the_size_limit_raises(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="line 1: longer than 100 bytes"):
        list(read_trace(write_file(tmp_path, PLAIN + " " * 100), max_line_bytes=100))


def test_unreadable_files_raise(tmp_path: Path) -> None:
    """The files are missing, truncated, or not compressed."""
    with pytest.raises(WorkloadError, match=r"cannot read .*none\.jsonl: .*No such file"):
        list(read_trace(tmp_path / "none.jsonl"))
    path = write_file(tmp_path, *[PLAIN] * 9, name="trace.jsonl.gz")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(WorkloadError, match="fetch it again"):
        list(read_trace(path))
    path.write_text(PLAIN)
    with pytest.raises(WorkloadError, match="Not a gzipped file"):
        list(read_trace(path))


@pytest.mark.parametrize(
    "request_",
    [
        Request(0.5, Text([(1, 1)]), Text([(1, 1)])),
        Request(float("inf"), Text([(1, 1)]), Text([(1, 1)])),
        Request(float("nan"), Text([(1, 1)]), Text([(1, 1)])),
    ],
    ids=["earlier", "never", "no time"],
)
def test_requests_with_invalid_times_are_not_written(tmp_path: Path, request_: Request) -> None:
    """`read_trace` would refuse them."""
    with pytest.raises(WorkloadError, match="request 2 has the time "):
        write_trace(tmp_path / "trace.jsonl", [Request(1.0, Text([(1, 1)]), Text([(1, 1)])), request_])


def test_unwritable_files_raise(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"cannot write .*No such file"):
        write_trace(tmp_path / "no" / "trace.jsonl", [])
    with pytest.raises(WorkloadError, match="No space left"):
        write_trace("/dev/full", [Request(0.0, Text([(1, 1)]), Text([(1, 1)]))])


def test_a_trace_is_not_held_in_memory(tmp_path: Path) -> None:
    """Two thousand requests of forty pieces take 8 MB together; reading them one by one needs a fraction of that."""
    path = tmp_path / "trace.jsonl"
    write_rows(path, (MooncakeRow(at, 512 * 40, 1, list(range(40))) for at in range(2_000)))
    tracemalloc.start()
    assert sum(1 for _ in read_trace(path)) == 2_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


@pytest.mark.skipif(not REAL.exists(), reason="KVEVENTS_MOONCAKE_TRACE names no file: Mooncake's conversation_trace.jsonl.gz")
def test_the_real_trace_has_its_published_figures() -> None:
    """It has 12,031 requests of 145 million tokens, of which an unlimited cache would hold 37 %; as requests they take a few
    megabytes."""
    requests = list(islice(read_trace(REAL), 20_000))
    assert len(requests) == 12_031
    assert sum(len(request.prompt) for request in requests) == 144_793_823
    assert shared_prefix(requests) == pytest.approx(0.374, abs=0.001)
    assert 5_000 < len({request.session for request in requests}) < 10_000
