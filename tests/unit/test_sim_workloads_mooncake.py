"""`kvevents.sim.workload_traces`: the format of Mooncake's traces."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.sim.requests import Drawn, Request, Text
from kvevents.sim.workload_traces import FIRST_ANSWER, PIECE_TOKENS, MooncakeRow, Sessions, mooncake_request
from kvevents.sim.workloads import workload
from mooncake_cases import mooncake_rows


def make_row(**fields: object) -> bytes:
    return msgspec.json.encode({"timestamp": 1500, "input_length": 1100, "output_length": 7, "hash_ids": [0, 4, 5]} | fields)


def test_a_line_is_read_as_a_request() -> None:
    """Each id represents 512 tokens, and the last id the rest. The answer is a text that no other request has. Times are in
    milliseconds."""
    request = mooncake_request(Sessions(), make_row(unknown="left alone"), 3)
    assert request.at == 1.5
    assert request.prompt.pieces == (Drawn(0, 512), Drawn(4, 512), Drawn(5, 76))
    assert request.output.pieces == (Drawn(FIRST_ANSWER + 3, 7),)
    assert request.session == "session-1"


@pytest.mark.parametrize(("length", "ids"), [(1, 1), (511, 1), (512, 1), (513, 2), (1024, 2), (1025, 3)])
def test_lengths_and_ids_must_agree(length: int, ids: int) -> None:
    assert len(mooncake_request(Sessions(), make_row(input_length=length, hash_ids=list(range(ids))), 1).prompt) == length
    for wrong in (ids - 1, ids + 1):
        with pytest.raises(ValueError, match=f"input_length {length} needs {ids} hash_ids, .* but has {wrong}"):
            mooncake_request(Sessions(), make_row(input_length=length, hash_ids=list(range(wrong))), 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"timestamp": -1},
        {"timestamp": None},
        {"input_length": 0},
        {"output_length": 0},
        {"hash_ids": [0, 1, -1]},
        {"hash_ids": [0, 1, 1 << 63]},
        {"hash_ids": "x"},
    ],
)
def test_invalid_values_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(fields)))):
        mooncake_request(Sessions(), make_row(**fields), 1)


TEXTS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2 * PIECE_TOKENS)), min_size=1, max_size=4).map(Text)


@given(st.lists(st.tuples(TEXTS, st.sampled_from([None, "a"])), max_size=8))
def test_rows_share_ids_exactly_if_prompts_share_their_beginning(given_: list[tuple[Text, str | None]]) -> None:
    """An id stands for a piece and everything before it, in one namespace."""
    requests = [Request(0.0, text, Text([(9, 1)]), lora=lora) for text, lora in given_]
    rows = list(mooncake_rows(requests))
    names: dict[object, int] = {}
    for request, found in zip(requests, rows, strict=True):
        tokens = request.prompt.tokens().tolist()
        ends = [*range(PIECE_TOKENS, len(tokens), PIECE_TOKENS), len(tokens)]
        expected = [names.setdefault((request.lora, tuple(tokens[:end])), len(names)) for end in ends]
        assert found == MooncakeRow(0, len(tokens), 1, expected)


def test_most_inferred_sessions_are_the_true_ones() -> None:
    """Rows do not name sessions. Nearly all turns are found whose previous prompt had a complete piece of its own."""
    requests = list(workload("chat", requests=2_000, preamble=600))
    sessions = Sessions()
    found = [mooncake_request(sessions, msgspec.json.encode(one), number) for number, one in enumerate(mooncake_rows(requests))]
    last: dict[str | None, tuple[Request, Request]] = {}
    right_sessions = turns = wrong_sessions = first_turns = 0
    for true, inferred in zip(requests, found, strict=True):
        before = last.get(true.session)
        last[true.session] = true, inferred
        if before is None:
            first_turns += 1
            wrong_sessions += inferred.session in {old.session for _, old in last.values() if old is not inferred}
        elif len(before[0].prompt) // PIECE_TOKENS * PIECE_TOKENS > sum(piece[1] for piece in true.prompt.pieces[:2]):
            turns += 1
            right_sessions += inferred.session == before[1].session
    assert turns > 300
    assert right_sessions / turns > 0.9
    assert wrong_sessions / first_turns < 0.1
