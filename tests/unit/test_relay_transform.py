"""`kvevents.relay.transform.redact_prompt` keeps only the fields of a store that are listed here."""

from __future__ import annotations

from kvevents.events import BlockStored
from kvevents.relay.transform import placeholder_key, redact_prompt

STORE = BlockStored(
    [1],
    2,
    [3, 4],
    2,
    lora_id=5,
    medium="GPU",
    lora_name="adapter",
    extra_keys=[("image",)],
    group_idx=0,
    kv_cache_spec_kind="full_attention",
    kv_cache_spec_sliding_window=128,
    locality="LOCAL",
    ownership="store",
    session_id="user",
    lookahead_token_ids=[[6]],
    cache_salt="tenant",
    block_keys=[7],
    block_digests=[b"\x01" * 32],
    parent_block_digest=b"\x02" * 32,
    unknown_fields={"note": "text"},
)
UNCHANGED_FIELDS = {
    "block_hashes",
    "parent_block_hash",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "block_digests",
    "parent_block_digest",
}


def test_redaction_keeps_only_fields_that_reveal_nothing_about_a_prompt() -> None:
    """The list names the fields that stay unchanged, so a field of a later release is removed until it is added here."""
    redacted = redact_prompt(STORE, placeholder_key)
    assert isinstance(redacted, BlockStored)
    fields = BlockStored.__struct_fields__
    assert all(getattr(STORE, name) is not None for name in fields)
    assert {name for name in fields if getattr(redacted, name) == getattr(STORE, name)} == UNCHANGED_FIELDS
    assert redacted.token_ids == []
    assert redacted.block_keys not in (None, STORE.block_keys)
