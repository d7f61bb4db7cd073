"""`kvevents.sim.workloads`: the sample of a trace that is part of the package."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import fmean, median

import msgspec
import pytest

from kvevents.errors import ConfigError, WorkloadError
from kvevents.sim.requests import shared_prefix
from kvevents.sim.workload_traces import MooncakeRow
from kvevents.sim.workloads import JITTER, SAMPLE, Chat, Lengths, Trace, read_trace
from mooncake_cases import mooncake_rows, write_rows


def make_sample() -> Iterator[MooncakeRow]:
    """Generate the rows of `SAMPLE`."""
    chat = Chat(
        rate=1_000 / 600,
        apps=12,
        preamble=600,
        system=Lengths(300, 0.5, 50, 2_000),
        user=Lengths(1_300, 1.4, 10, 60_000),
        answer=Lengths(300, 0.5, 1, 2_000),
        turns=1.8,
        think=Lengths(40, 1.0, 3, 300),
        context=64_000,
    )
    return mooncake_rows(islice(chat.requests(8), 1_000))


def test_the_sample_file_equals_the_generated_sample() -> None:
    """`write_rows(SAMPLE, make_sample())` has written the file."""
    expected = b"".join(msgspec.json.encode(row) + b"\n" for row in make_sample())
    assert gzip.decompress(SAMPLE.read_bytes()) == expected


def test_the_sample_is_small_and_resembles_the_real_trace() -> None:
    """The figures are those of docs/guides/workloads.md."""
    requests = list(read_trace(SAMPLE))
    inputs, outputs = ([len(text) for text in texts] for texts in zip(*((r.prompt, r.output) for r in requests), strict=True))
    assert SAMPLE.stat().st_size < 100_000
    assert len(requests) == 1_000
    assert requests[-1].at == pytest.approx(600, rel=0.05)
    assert len({request.prompt.pieces[0].number for request in requests if len(request.prompt) >= 512}) == 1  # type: ignore[union-attr]
    assert fmean(inputs) == pytest.approx(5_589, abs=1)
    assert median(inputs) == pytest.approx(3_382, abs=10)
    assert fmean(outputs) == pytest.approx(342, abs=1)
    assert shared_prefix(requests) == pytest.approx(0.393, abs=0.001)
    assert len({request.session for request in requests}) == 648


def test_a_seed_changes_the_speed_of_a_trace(tmp_path: Path) -> None:
    """Seed 0 keeps its times; any other one scales all of them by a factor of its own, near 1."""
    path = tmp_path / "trace.jsonl"
    write_rows(path, [MooncakeRow(at, 1, 1, [0]) for at in (1_000, 2_000)])
    times = {seed: [request.at for request in Trace(path=path).requests(seed)] for seed in range(5)}
    assert times[0] == [1.0, 2.0]
    assert len({first for first, _ in times.values()}) == 5
    assert all(1 / (1 + JITTER) <= first == second / 2 <= 1 / (1 - JITTER) for first, second in times.values())


def test_a_trace_keeps_its_times_unless_a_rate_is_given(tmp_path: Path) -> None:
    """All times are scaled by one factor, so bursts remain."""
    path = tmp_path / "trace.jsonl"
    write_rows(path, [MooncakeRow(at, 10, 1, [0]) for at in (1_000, 1_000, 5_000)])
    assert [request.at for request in Trace(path=path).requests()] == [1.0, 1.0, 5.0]
    assert [request.at for request in Trace(path=path, rate=1.0).requests()] == [0.5, 0.5, 2.5]


@pytest.mark.parametrize("times", [(), (3_000,), (3_000, 3_000)])
def test_a_trace_without_duration_keeps_its_times_at_any_rate(tmp_path: Path, times: tuple[int, ...]) -> None:
    path = tmp_path / "trace.jsonl"
    write_rows(path, [MooncakeRow(at, 10, 1, [0]) for at in times])
    assert [request.at for request in Trace(path=path, rate=7.0).requests()] == [at / 1000 for at in times]


def test_invalid_settings_raise() -> None:
    with pytest.raises(ConfigError, match="rate is -1"):
        Trace(rate=-1)
    with pytest.raises(WorkloadError, match="cannot read"):
        list(Trace(path="/none").requests())
