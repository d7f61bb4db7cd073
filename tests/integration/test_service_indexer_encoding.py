"""`kvevents.service.http.indexer_api`: responses that are written as bytes are valid JSON."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from kvevents.service.fleet.member import Member, MemberMatch
from kvevents.service.fleet.registration import Registration
from kvevents.service.http.indexer_api import dynamo, mooncake
from kvevents.stream import Trust

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=6) | st.sampled_from(
    ["%d", "50%", '"', "\\", "a%%b", "7"]
)
COUNTS = st.integers(0, 1 << 40)


def make_member(instance: str, rank: int, trust: Trust = Trust.EXACT) -> Member:
    made = Member(Registration(instance=instance, endpoint="tcp://127.0.0.1:1", model="m", rank=rank), "http", 0.0)
    made.update_trust(trust, 1.0)
    return made


@given(st.lists(st.tuples(NAMES, st.integers(0, 3), COUNTS, COUNTS, COUNTS, COUNTS), unique_by=lambda row: row[:2], max_size=6))
def test_both_encodings_report_the_same_for_any_names_and_ranks(rows: list[tuple[str, int, int, int, int, int]]) -> None:
    """Ranks of an instance are grouped, and scores contain only ranks with blocks on the GPU."""
    matches = [MemberMatch(make_member(name, rank), gpu, cpu, disk, most) for name, rank, gpu, cpu, disk, most in rows]
    one, other = json.loads(dynamo(matches)), json.loads(mooncake("t%d", matches))["t%d"]
    assert one["instances"].keys() == other.keys() == {name for name, *_ in rows}
    for name, encoded in one["instances"].items():
        own = [row for row in rows if row[0] == name]
        longest = max(row[5] for row in own)
        gpu, cpu, disk = (max(row[at] for row in own) for at in (2, 3, 4))
        assert encoded == {
            "longest_matched": longest,
            "gpu": gpu,
            "dp": {str(row[1]): row[2] for row in own},
            "cpu": cpu,
            "disk": disk,
            "trust": {str(row[1]): "EXACT" for row in own},
        }
        assert other[name] == {
            "longest_matched": longest,
            "GPU": gpu,
            "DP": {str(row[1]): row[5] for row in own},
            "CPU": cpu,
            "DISK": disk,
            "trust": encoded["trust"],
        }
        assert one["scores"].get(name, {}) == {str(row[1]): row[2] for row in own if row[2]}


def test_a_response_has_the_newest_trust() -> None:
    one = make_member("a", 0)
    one.update_trust(Trust.STALE, 2.0)
    assert json.loads(dynamo([MemberMatch(one, 1, 1, 1, 1)]))["instances"]["a"]["trust"] == {"0": "STALE"}
