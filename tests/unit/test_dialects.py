"""The table of dialects: every row, releases between rows, and unknown releases."""

from __future__ import annotations

import pytest

from kvevents.errors import UnknownDialectError
from kvevents.wire import Dialect, decode_batch, dialect_for, dialects, encode_batch
from wire_cases import GOLDENS, RELEASES, Golden


@pytest.mark.parametrize("golden", GOLDENS, ids=str)
def test_a_golden_payload_encodes_to_the_same_bytes(golden: Golden) -> None:
    """This holds in the dialect of its release, and in the dialect that is detected from its form.

    The values are those of the golden file, which our decoder has not read, and those that our decoder returns.
    """
    released = dialect_for(golden.engine, golden.release)
    decoded = decode_batch(golden.payload)
    assert decoded.dialect is not None
    assert encode_batch(golden.batch(), released) == golden.payload
    assert encode_batch(decoded.batch, released) == golden.payload
    assert encode_batch(decoded.batch, decoded.dialect) == golden.payload


@pytest.mark.parametrize("golden", RELEASES, ids=str)
def test_a_row_has_the_replay_frames_of_its_release(golden: Golden) -> None:
    assert dialect_for(golden.engine, golden.release).has_replay_topic == (len(golden.replay_frames) == 4)


def test_every_row_has_goldens_of_its_first_release() -> None:
    """A row states what a release sends, so its bytes must be in the test data."""
    released = {dialect_for(golden.engine, golden.release) for golden in GOLDENS}
    assert [row.name for row in dialects() if row not in released] == []


@pytest.mark.parametrize(
    ("engine", "release", "row"),
    [
        ("vllm", "0.9.0", "vllm-0.9.0"),
        ("vllm", "0.9.0.1", "vllm-0.9.0"),
        ("vllm", "0.9.2", "vllm-0.9.1"),
        ("vllm", "0.10.1.1", "vllm-0.9.1"),
        ("vllm", "0.11.0", "vllm-0.10.2"),
        ("vllm", "0.13.0", "vllm-0.10.2"),
        ("vllm", "0.14", "vllm-0.14.0"),
        ("vllm", "0.16.9", "vllm-0.14.0"),
        ("vllm", "0.18.1", "vllm-0.17.0"),
        ("vllm", "0.20", "vllm-0.20.0"),
        ("vllm", "0.21.3", "vllm-0.20.0"),
        ("vllm", "0.23.0", "vllm-0.22.0"),
        ("vllm", "0.25.1", "vllm-0.24.0"),
        ("vllm", "0.27.0", "vllm-0.26.0"),
        ("vllm", "0.32.0", "vllm-0.30.0"),
        ("vllm", "0.33.0", "vllm-0.33.0"),
        ("vllm", "1.0", "vllm-0.33.0"),
        ("vllm", "latest", "vllm-0.33.0"),
        ("vllm", "main@0181ea3173e5", "vllm-main@0181ea3173e5"),
        ("vllm", "main@0181ea3173e5 (unreleased, between 0.23 and 0.24)", "vllm-main@0181ea3173e5"),
        ("sglang", "0.4.6.post5", "sglang-0.4.6.post5"),
        ("sglang", "0.4.8", "sglang-0.4.7"),
        ("sglang", "0.5.5", "sglang-0.4.7"),
        ("sglang", "0.5.9", "sglang-0.5.9"),
        ("sglang", "0.5.17", "sglang-0.5.9"),
        ("sglang", "0.5.18", "sglang-0.5.9"),
        ("sglang", "0.5.21", "sglang-0.5.20"),
        ("sglang", "0.5.23", "sglang-0.5.22"),
        ("sglang", "latest", "sglang-0.5.22"),
        # A pre-release comes before its release, a post-release after it.
        ("vllm", "0.24.0rc1", "vllm-0.22.0"),
        ("vllm", "0.24.0.dev12+gabc", "vllm-0.22.0"),
        ("vllm", "0.24.0.post1", "vllm-0.24.0"),
        ("vllm", "0.24.1rc1", "vllm-0.24.0"),
        ("sglang", "0.4.6.post6", "sglang-0.4.6.post5"),
        # Versions as they appear in options and in image tags.
        ("vllm", "0.26.0+cu128", "vllm-0.26.0"),
        ("vllm", "v0.26.0", "vllm-0.26.0"),
        ("VLLM", "V0.26", "vllm-0.26.0"),
        ("SGLang", "v0.5.20-cu129", "sglang-0.5.20"),
        ("sglang", "v0.5.20-b200", "sglang-0.5.20"),
        ("sglang", "v0.5.20-arm64", "sglang-0.5.20"),
        ("sglang", "v0.5.20-rc2", "sglang-0.5.9"),
        ("sglang", "v0.5.20-rc.2-cu129", "sglang-0.5.9"),
        ("sglang", "0.5.20alpha", "sglang-0.5.9"),
        ("sglang", "0.5.20b1", "sglang-0.5.9"),
        ("sglang", "0.4.6.post5-cu124", "sglang-0.4.6.post5"),
    ],
)
def test_a_release_between_rows_uses_the_older_row(engine: str, release: str, row: str) -> None:
    assert dialect_for(engine, release).name == row


@pytest.mark.parametrize(
    ("engine", "release", "sentence"),
    [
        ("tgi", "1.0", "unknown engine 'tgi'; known engines: sglang, vllm"),
        ("vllm", "0.8.5", "vllm 0.8.5 is older than 0.9.0, the first release with KV events"),
        ("vllm", "0.9.0rc1", "vllm 0.9.0rc1 is older than 0.9.0, the first release with KV events"),
        ("sglang", "0.4.6.post4", "sglang 0.4.6.post4 is older than 0.4.6.post5, the first release with KV events"),
        ("vllm", "main", "cannot read release 'main' of vllm; expected a version such as 0.33.0"),
        ("vllm", "", "cannot read release '' of vllm; expected a version such as 0.33.0"),
    ],
)
def test_an_unknown_dialect_raises_with_a_message(engine: str, release: str, sentence: str) -> None:
    with pytest.raises(UnknownDialectError) as raised:
        dialect_for(engine, release)
    assert str(raised.value) == sentence


def test_a_very_long_release_number_is_rejected() -> None:
    """Python cannot convert more than 4,300 digits; the error is still `UnknownDialectError`."""
    with pytest.raises(UnknownDialectError):
        dialect_for("vllm", "9" * 10_000)


@pytest.mark.parametrize("row", dialects(), ids=str)
def test_every_row_is_found_by_its_release(row: Dialect) -> None:
    assert dialect_for(row.engine, row.since) is row
    assert str(row) == row.name == f"{row.engine}-{row.since}"


@pytest.mark.parametrize("row", dialects(), ids=str)
def test_the_fields_of_every_row_begin_with_the_common_ones(row: Dialect) -> None:
    assert row.stored_fields[:5] == ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id")
    assert row.removed_fields[0] == "block_hashes"
    assert row.optional_fields <= {*row.stored_fields, *row.removed_fields}
