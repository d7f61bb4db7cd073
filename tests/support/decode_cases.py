"""Events that every decoder rejects, each with the reason of the rejection."""

from __future__ import annotations

import struct

from wire_cases import (
    make_store,
    pack,
)

BAD_EVENTS: dict[str, tuple[bytes, str]] = {
    "nil": (b"\xc0", "malformed"),
    "number": (pack(5), "malformed"),
    "string": (pack("BlockStored"), "malformed"),
    "empty array": (b"\x90", "unknown-tag"),
    "empty map": (b"\x80", "unknown-tag"),
    "tag of another type": (pack([5, [1]]), "unknown-tag"),
    "tag that is a container": (pack({"type": ["BlockStored"]}), "unknown-tag"),
    "hashes missing": (pack({"type": "BlockRemoved"}), "bad-field"),
    "hashes nil": (pack(["BlockRemoved", None]), "bad-field"),
    "hash of another type": (pack(["BlockRemoved", ["a"]]), "bad-field"),
    "hash nil": (pack(["BlockRemoved", [None]]), "bad-field"),
    "hash a float": (pack(["BlockRemoved", [1.0]]), "bad-field"),
    "digest too short": (pack(["BlockRemoved", [b"1234567"]]), "bad-field"),
    "parent of another type": (pack(make_store(parent_block_hash="x")), "bad-field"),
    "tokens missing": (pack(["BlockStored", [1]]), "bad-field"),
    "block size nil": (pack(make_store(block_size=None)), "bad-field"),
    "block size a string": (pack(make_store(block_size="16")), "bad-field"),
    "Mooncake's object key without a hash": (pack({"event_type": "removed", "seq_hashes": [], "object_key": "a"}), "bad-field"),
    "medium a number": (pack(make_store(medium=3)), "bad-field"),
    "extra keys flat": (pack(make_store(extra_keys=["a"])), "bad-field"),
    "extra keys a map": (pack(make_store(extra_keys={"a": []})), "bad-field"),
    "lookahead flat": (pack(make_store(lookahead_token_ids=[1])), "bad-field"),
    "invalid UTF-8 in a value": (pack(make_store(medium="ab")).replace(b"\xa2ab", b"\xa2\xff\xfe"), "malformed"),
    "invalid UTF-8 in a key": (pack(make_store(zz=1)).replace(b"\xa2zz", b"\xa2\xff\xfe"), "malformed"),
    "invalid UTF-8 in the tag": (b"\x91\xa2\xff\xfe", "unknown-tag"),
    "keys that are not strings": (pack({"type": "AllBlocksCleared", 5: 1}), "bad-field"),
    "inner keys that are not strings": (pack(make_store(new={5: 1})), "bad-field"),
    "inner keys that are arrays": (pack(make_store(new=0))[:-1] + b"\x81\x91\x01\x01", "bad-field"),
    "inner keys that are maps": (pack(make_store(new=0))[:-1] + b"\x81\x80\x01", "bad-field"),
    "nested too deep": (pack(make_store(new=[[[[[[[[1]]]]]]]])), "too-deep"),
    "nested bomb of arrays": (pack(make_store(new=0))[:-1] + b"\x91" * 100_000 + b"\x01", "too-deep"),
    "nested bomb of maps": (pack(make_store(new=0))[:-1] + b"\x81\xa1a" * 50_000 + b"\x01", "too-deep"),
    "nested bomb for a tag": (b"\x91" * 100_000 + b"\x01", "unknown-tag"),
    "timestamp that msgpack does not have": (pack(make_store(new=0))[:-1] + b"\xc7\x0c\xff" + b"\xff" * 12, "bad-field"),
    "timestamp that Python does not have": (
        pack(make_store(new=0))[:-1] + b"\xc7\x0c\xff" + struct.pack(">Iq", 0, 253_402_300_800),
        "bad-field",
    ),
    "the same in extra keys": (
        pack(make_store(extra_keys=[[0]]))[:-1] + b"\xc7\x0c\xff" + struct.pack(">Iq", 999_999_999, 253_402_300_799),
        "bad-field",
    ),
}
