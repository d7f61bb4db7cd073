use proptest::prelude::*;

use super::*;
use crate::testing::cases::{batch, map, text};
use crate::testing::{OwnedEvent, OwnedExtra, OwnedId, describe, describe_decoded};

fn schema_within(limits: Limits) -> Schema {
    Schema::new(limits).unwrap()
}

fn schema() -> Schema {
    schema_within(Limits::default())
}

fn scan_accepted(payload: &[u8]) -> Option<Vec<OwnedEvent>> {
    describe(payload, &schema())
}

/// The string field `name` of a line of JSON; the line must have no escapes.
fn string<'a>(line: &'a str, name: &str) -> &'a str {
    let marker = format!("\"{name}\":\"");
    let start = line.find(&marker).unwrap() + marker.len();
    &line[start..start + line[start..].find('"').unwrap()]
}

fn unhex(digits: &str) -> Vec<u8> {
    (0..digits.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap())
        .collect()
}

/// Release, case and payload of each golden payload.
fn goldens() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    let lines = include_str!("../../../../../tests/data/dialects.jsonl").lines();
    lines
        .map(|line| {
            (
                string(line, "release"),
                string(line, "case"),
                unhex(string(line, "payload_hex")),
            )
        })
        .collect()
}

fn golden(release: &str, case: &str) -> Vec<u8> {
    goldens()
        .into_iter()
        .find(|found| found.0 == release && found.1 == case)
        .unwrap()
        .2
}

fn stored(fields: &[(&str, &[u8])]) -> Vec<u8> {
    let base: [(&str, &[u8]); 4] = [
        ("block_hashes", &[0x91, 0x05]),
        ("parent_block_hash", &[0xC0]),
        ("token_ids", &[0x92, 0x01, 0x02]),
        ("block_size", &[0x02]),
    ];
    let mut all: Vec<_> = base
        .iter()
        .map(|field| *fields.iter().find(|other| other.0 == field.0).unwrap_or(field))
        .collect();
    all.extend(fields.iter().filter(|field| base.iter().all(|other| other.0 != field.0)));
    batch(&[map("BlockStored", &all)])
}

// --- accepted payloads, and the events that they become ---

#[test]
fn every_released_dialect_is_accepted() {
    let refused: Vec<_> = goldens()
        .into_iter()
        .filter(|golden| scan_accepted(&golden.2).is_none())
        .map(|golden| golden.1)
        .collect();
    assert_eq!(refused, ["map_batch"]);
}

#[test]
fn both_decoders_read_the_same_events_of_every_released_dialect() {
    for (release, case, payload) in goldens() {
        if let Some(events) = scan_accepted(&payload) {
            assert_eq!(events, describe_decoded(&payload, &Limits::default()), "{release} {case}");
        }
    }
}

#[test]
fn a_map_event_of_many_fields() {
    let found = scan_accepted(&golden("0.32.0", "stored_root_2_blocks")).unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].hashes, [0x1111_1111_1111_1111, 0xF222_2222_2222_2222]);
    assert_eq!(found[0].tokens, (100..108).collect::<Vec<_>>());
    assert_eq!((found[0].parent, found[0].block_size), (None, 4));
    assert_eq!(
        (found[0].medium.as_deref(), found[0].lora_name.as_deref()),
        (Some("GPU"), None)
    );
    assert_eq!(
        (found[0].group, found[0].spec_kind.as_deref()),
        (Some(0), Some("full_attention"))
    );
}

#[test]
fn an_array_batch_of_three_events() {
    let found = scan_accepted(&golden("0.9.0", "stored_child_removed_cleared_rank1")).unwrap();
    let kinds: Vec<_> = found.iter().map(|event| event.kind).collect();
    assert_eq!(kinds, [Kind::Stored, Kind::Removed, Kind::Cleared]);
    assert_eq!(found[0].parent, Some(0x2222_2222_2222_2222));
    assert_eq!(found[1].hashes, [0xEEEE_EEEE_EEEE_EEEF]);
}

#[test]
fn digests_give_their_last_eight_bytes() {
    let found = scan_accepted(&golden("0.24.0", "stored_bytes_hashes")).unwrap();
    assert_eq!(found[0].hashes, [0xA1A1_A1A1_A1A1_A1A1, 0xB2B2_B2B2_B2B2_B2B2]);
    assert_eq!(found[0].parent, Some(0xC3C3_C3C3_C3C3_C3C3));
    let eight: &[u8] = &[0x92, 0xC4, 8, 1, 2, 3, 4, 5, 6, 7, 8, 0xFF];
    assert_eq!(
        scan_accepted(&stored(&[("block_hashes", eight)])).unwrap()[0].hashes,
        [0x0102_0304_0506_0708, u64::MAX]
    );
    assert_eq!(
        scan_accepted(&stored(&[("block_hashes", &[0x91, 0xC4, 7, 1, 2, 3, 4, 5, 6, 7])])),
        None
    );
}

#[test]
fn extra_keys_of_every_shape() {
    let found = scan_accepted(&golden("0.24.0", "stored_extra_keys_mm_salt_embeds")).unwrap();
    let pair = |id: &str, offset| OwnedExtra::Pair(OwnedId::Text(id.into()), offset);
    let expected = [
        (0, OwnedExtra::Text("tenant-0".into())),
        (1, pair("mm-hash-abc", 1)),
        (1, pair("mm-hash-def", -3)),
        (2, OwnedExtra::Bytes(vec![0xE3; 32])),
    ];
    assert_eq!(found[0].extra_keys.as_deref(), Some(&expected[..]));
    let some: &[u8] = &[0x93, 0xC0, 0x90, 0x93, 0x92, 0xC4, 1, 9, 7, 0x92, 0xFF, 0xFE, 0x05];
    let found = scan_accepted(&stored(&[("extra_keys", some)])).unwrap();
    let expected = [
        (2, OwnedExtra::Pair(OwnedId::Bytes(vec![9]), 7)),
        (2, OwnedExtra::Pair(OwnedId::Int(-1), -2)),
        (2, OwnedExtra::Int(5)),
    ];
    assert_eq!(found[0].extra_keys.as_deref(), Some(&expected[..]));
    assert_eq!(
        scan_accepted(&stored(&[("extra_keys", &[0xC0])])).unwrap()[0].extra_keys,
        None
    );
    for shape in [
        &[0x80][..],
        &[0x91, 0x80],
        &[0x91, 0x01],
        &[0x91, 0x91, 0xC0],
        &[0x91, 0x91, 0xC3],
        &[0x91, 0x91, 0x80],
        &[0x91, 0x91, 0x91, 1],
        &[0x91, 0x91, 0x92, 0xC0, 1],
        &[0x91, 0x91, 0x92, 0xA1, b'a', 0xA1, b'b'],
        &[0x91, 0x91, 0x92, 0x91, 1, 1],
        &[0x91, 0x91, 0xCB, 0, 0, 0, 0, 0, 0, 0, 0],
        &[0x91, 0x91, 0xA1, 0xFF],
    ] {
        assert_eq!(scan_accepted(&stored(&[("extra_keys", shape)])), None, "{shape:?}");
    }
}

/// Both decoders say of each event whether it has extra keys; `describe` compares this.
#[test]
fn extra_keys_that_are_decoded_are_announced() {
    let found = describe_decoded(&golden("0.24.0", "stored_extra_keys_mm_salt_embeds"), &Limits::default());
    assert!(!found[0].extra_keys.as_deref().unwrap().is_empty());
}

#[test]
fn invalid_extra_keys_are_refused() {
    for raw in [&[][..], &[0xC0], &[0x91], &[0x90, 0x90], &[0xDD, 0xFF, 0xFF, 0xFF, 0xFF]] {
        assert_eq!(extra_keys(raw, |_, _| ()), None);
    }
}

#[test]
fn integers_of_any_width() {
    for (wire, value) in [(&[0xD0, 0xFF][..], -1), (&[0xFF], -1), (&[0xCF, 0, 0, 0, 0, 0, 0, 0, 7], 7)] {
        let found = scan_accepted(&stored(&[
            ("lora_id", wire),
            ("group_idx", wire),
            ("block_hashes", &[&[0x91], wire].concat()),
        ]));
        let found = found.unwrap();
        assert_eq!((found[0].lora_id, found[0].group), (Some(value), Some(value)));
        assert_eq!(found[0].hashes, [value as u64]);
    }
    // Python reads these fields; the index does not use them.
    assert_eq!(
        scan_accepted(&stored(&[("lora_id", &[0xCF, 0x80, 0, 0, 0, 0, 0, 0, 0])])),
        None
    );
    assert_eq!(scan_accepted(&stored(&[("block_size", &[0xFF])])), None);
}

#[test]
fn token_ids_without_keys() {
    let found = scan_accepted(&stored(&[("token_ids", &[0x92, 0x01, 0xFF])])).unwrap();
    assert!(found[0].keyable == 1 && !found[0].pairs);
    let found = scan_accepted(&stored(&[("token_ids", &[0x92, 0x92, 1, 2, 0x92, 2, 3])])).unwrap();
    assert!(found[0].keyable == 2 && found[0].pairs);
    assert_eq!(found[0].tokens, [1, 2, 2, 3]);
    for mixed in [
        &[0x92, 1, 0x92, 1, 2][..],
        &[0x92, 0x92, 1, 2, 1],
        &[0x91, 0xA1, b'7'],
        &[0x91, 0xC0],
        &[0xC0],
    ] {
        assert_eq!(scan_accepted(&stored(&[("token_ids", mixed)])), None);
    }
}

#[test]
fn keys_in_the_place_of_tokens() {
    let keys = |wire: &[u8]| {
        scan_accepted(&stored(&[("token_ids", &[0x90]), ("block_keys", wire)])).map(|found| found[0].keys.clone())
    };
    assert_eq!(keys(&[0xC0]), Some(None));
    assert_eq!(keys(&[0x90]), Some(Some(vec![])));
    assert_eq!(keys(&[0x92, 7, 0xFF]), Some(Some(vec![7, u64::MAX])));
    assert_eq!(
        keys(&[0x91, 0xCF, 1, 2, 3, 4, 5, 6, 7, 8]),
        Some(Some(vec![0x0102_0304_0506_0708]))
    );
    for other in [
        &[0x91, 0xC0][..],
        &[0x91, 0xC4, 8, 1, 2, 3, 4, 5, 6, 7, 8],
        &[0x07],
        &[0x91, 0xA1, b'7'],
        &[0x80],
    ] {
        assert_eq!(keys(other), None, "{other:?}");
    }
    let digest: &[u8] = &[0x91, 0xC4, 8, 1, 2, 3, 4, 5, 6, 7, 8];
    let mut scratch = Scratch::default();
    let payload = stored(&[("block_hashes", digest), ("block_keys", &[0x91, 1])]);
    assert_eq!(scan(&payload, &schema(), &mut scratch), Some(()));
    assert!(
        scratch.digests && scratch.events[0].size_of_keyed().is_none(),
        "digests stay known, and tokens are in the way"
    );
}

#[test]
fn a_store_has_one_key_for_each_hash() {
    let size = |fields: &[(&str, &[u8])]| {
        let mut scratch = Scratch::default();
        scan(&stored(fields), &schema(), &mut scratch).map(|()| scratch.events[0].size_of_keyed())
    };
    let keyed: [(&str, &[u8]); 2] = [("token_ids", &[0x90]), ("block_keys", &[0x91, 1])];
    assert_eq!(size(&keyed), Some(Some(2)));
    let with = |field| size(&[keyed[0], keyed[1], field]);
    assert_eq!(with(("block_size", &[0xCE, 0xFF, 0xFF, 0xFF, 0xFF])), Some(Some(u32::MAX)));
    assert_eq!(with(("block_hashes", &[0x92, 1, 2])), Some(None));
    assert_eq!(with(("block_size", &[0])), Some(None));
    assert_eq!(with(("block_size", &[0xCF, 0, 0, 0, 1, 0, 0, 0, 0])), Some(None));
    assert_eq!(size(&keyed[1..]), Some(None), "a store with keys but without tokens");
    assert_eq!(size(&keyed[..1]), Some(None));
}

#[test]
fn the_scanner_refuses_heartbeats() {
    let removed = |wire: &[u8]| {
        scan_accepted(&batch(&[map(
            "BlockRemoved",
            &[("block_hashes", &[0x90]), ("heartbeat", wire)],
        )]))
    };
    assert!(removed(&[0xC0]).is_some());
    let beat = [&[0x82][..], &text("digest"), &text("d"), &text("every"), &[1]].concat();
    for wire in [&beat[..], &[0x80], &[0x01]] {
        assert_eq!(removed(wire), None);
    }
    let array = |wire: &[u8]| {
        scan_accepted(&batch(&[
            [&[0x95][..], &text("BlockRemoved"), &[0x90, 0xC0, 0xC0], wire].concat()
        ]))
    };
    assert!(array(&[0xC0]).is_some());
    assert_eq!(array(&beat), None);
}

#[test]
fn unused_fields_must_have_their_types() {
    for (name, good, bad) in [
        ("session_id", &[0xA1, b'a'][..], &[0x01][..]),
        ("session_id", &[0xC0], &[0xA1, 0xFF]),
        ("lookahead_token_ids", &[0x92, 0x90, 0x91, 0x01], &[0x91, 0xC0]),
        ("lookahead_token_ids", &[0xC0], &[0x91, 0x91, 0xC0]),
        ("block_digests", &[0xC0], &[0x90]),
        ("parent_block_digest", &[0xC0], &[0x90]),
    ] {
        assert!(scan_accepted(&stored(&[(name, good)])).is_some(), "{name}");
        assert_eq!(scan_accepted(&stored(&[(name, bad)])), None, "{name}");
    }
}

#[test]
fn unexpected_values_are_refused() {
    let cleared = map("AllBlocksCleared", &[]);
    assert!(scan_accepted(&batch(std::slice::from_ref(&cleared))).is_some());
    let whole = stored(&[]);
    assert!(scan_accepted(&whole).is_some());
    assert_eq!(scan_accepted(&[&whole[..], &[0xC0]].concat()), None, "trailing bytes");
    assert_eq!(
        scan_accepted(&stored(&[("medium", &[0xC0]), ("medium", &[0xC0])])),
        None,
        "a field twice"
    );
    assert_eq!(scan_accepted(&stored(&[("tomorrow", &[0xC0])])), None, "an unknown field");
    assert_eq!(
        scan_accepted(&stored(&[("medium", &[0x01])])),
        None,
        "a medium that is no text"
    );
    assert_eq!(
        scan_accepted(&stored(&[("medium", &[0xA1, 0xFF])])),
        None,
        "a medium that is no UTF-8"
    );
    assert_eq!(scan_accepted(&batch(&[map("BlockMoved", &[])])), None, "an unknown tag");
    assert_eq!(scan_accepted(&batch(&[map("BlockRemoved", &[])])), None, "no hashes");
    assert_eq!(
        scan_accepted(&batch(&[map("BlockStored", &[("block_hashes", &[0x90])])])),
        None,
        "no tokens"
    );
    assert_eq!(
        scan_accepted(&batch(&[[&[0xC4, cleared.len() as u8], &cleared[..]].concat()])),
        None,
        "an event in a bin"
    );
    assert_eq!(
        scan_accepted(&batch(&[[&[0x94], &text("AllBlocksCleared")[..], &[0xC0; 3]].concat()])),
        None,
        "a longer array"
    );
    assert_eq!(scan_accepted(&batch(&[vec![0x90]])), None, "an event without a tag");
    assert_eq!(scan_accepted(&batch(&[vec![0x80]])), None, "a map without a tag");
    let behind = [&[0x80][..], &text("type"), &text("AllBlocksCleared")].concat();
    assert_eq!(scan_accepted(&batch(&[behind])), None, "a tag behind a map that is empty");
    assert_eq!(scan_accepted(&[0x91, 0x01]), None, "no events");
    assert_eq!(scan_accepted(&[0x82, 0xA2, b't', b's', 0x01]), None, "a map");
    assert_eq!(scan_accepted(&[]), None, "nothing");
}

#[test]
fn timestamps_in_seconds() {
    let with = |ts: &[u8]| [&[0x92], ts, &[0x90]].concat();
    let double = |ts: f64| [&[0xCB], &ts.to_be_bytes()[..]].concat();
    let single = |ts: f32| [&[0xCA], &ts.to_be_bytes()[..]].concat();
    for (ts, wanted) in [(double(1e11), 1e11), (single(0.5), 0.5), (double(-0.0), 0.0), (vec![7], 7.0)] {
        let mut scratch = Scratch::default();
        assert_eq!(scan(&with(&ts), &schema(), &mut scratch), Some(()));
        assert_eq!(scratch.ts, wanted);
    }
    for ts in [
        double(1.1e11),
        double(-1.0),
        double(f64::NAN),
        double(f64::INFINITY),
        vec![0xFF],
        vec![0xC0],
        vec![0xC3],
    ] {
        assert_eq!(scan_accepted(&with(&ts)), None);
    }
}

#[test]
fn ranks_and_later_fields() {
    let rank = |more: &[u8]| {
        let mut scratch = Scratch::default();
        scan(
            &[&[0x90 | (more.len() + 2) as u8, 1, 0x90], more].concat(),
            &schema(),
            &mut scratch,
        )
        .map(|()| scratch.rank)
    };
    assert_eq!(rank(&[]), Some(None));
    assert_eq!(rank(&[0xC0]), Some(None));
    assert_eq!(rank(&[3, 0xC3, 0x90, 0x80]), Some(Some(3)));
    assert_eq!(rank(&[0xC3]), None);
    assert_eq!(rank(&[1, 0xC1]), None);
    let nested = |levels: usize| [&[0x94, 1, 0x90, 0xC0][..], &vec![0x91; levels], &[0xC0]].concat();
    assert!(scan_accepted(&nested(SKIPPED_NESTING)).is_some());
    assert_eq!(scan_accepted(&nested(SKIPPED_NESTING + 1)), None);
}

// --- limits ---

#[test]
fn limits_equal_those_of_python() {
    let payload = stored(&[("extra_keys", &[0x93, 0xC0, 0xC0, 0xC0]), ("block_hashes", &[0x93, 1, 2, 3])]);
    let within = Limits {
        max_payload_bytes: payload.len(),
        max_events: 1,
        max_hashes: 3,
        max_fields: 6,
        max_free_form_bytes: 4,
        max_nesting: 4,
        ..Limits::default()
    };
    assert!(describe(&payload, &schema_within(within)).is_some());
    for beyond in [
        Limits {
            max_payload_bytes: payload.len() - 1,
            ..within
        },
        Limits { max_events: 0, ..within },
        Limits { max_hashes: 2, ..within },
        Limits { max_fields: 5, ..within },
        Limits {
            max_free_form_bytes: 3,
            ..within
        },
    ] {
        assert_eq!(describe(&payload, &schema_within(beyond)), None, "{beyond:?}");
    }
    assert!(
        Schema::new(Limits {
            max_nesting: 3,
            ..within
        })
        .is_err()
    );
}

#[test]
fn a_schema_of_unknown_names_is_an_error() {
    let events =
        |tag: &str, array: &[&str], map: &[&str]| Schema::of_layouts(&[(tag, array, map)], Limits::default()).unwrap_err();
    assert_eq!(events("BlockMoved", &[], &[]), "unknown event BlockMoved");
    assert_eq!(events("BlockRemoved", &["colour"], &[]), "unknown field colour");
    assert_eq!(events("BlockRemoved", &[], &["colour"]), "unknown field colour");
    assert_eq!(
        events("BlockRemoved", &["medium"], &["block_hashes"]),
        "BlockRemoved has no BlockHashes, which it needs"
    );
}

/// A scratch stays within its memory bound, even after several payloads.
#[test]
fn memory_follows_the_payload() {
    let size = 60_000_u16;
    let many = |head: &[u8], element: &[u8]| {
        let count = usize::from(size) / element.len();
        [head, &[0xDC], &(count as u16).to_be_bytes(), &element.repeat(count)].concat()
    };
    let stored = |field: Vec<u8>| [&[0x92, 1, 0x91, 0x95], &text("BlockStored")[..], &field].concat();
    let hashes = stored(many(&[], &[1]));
    let tokens = stored(many(&[0x90, 0xC0], &[1]));
    let pairs = stored(many(&[0x90, 0xC0], &[0x92, 1, 1]));
    let events = many(&[0x92, 1], &[&[0x91], &text("AllBlocksCleared")[..]].concat());
    let mut scratch = Scratch::default();
    for payload in [&hashes, &tokens, &pairs, &events] {
        // Arrays that state too many elements cause no allocation, whether they are truncated or complete.
        for length in (0..payload.len()).step_by(997).chain([payload.len()]) {
            let _ = scan(&payload[..length], &schema(), &mut scratch);
        }
        assert!(scratch.bytes() <= SCRATCH_BYTES_PER_PAYLOAD_BYTE * payload.len());
    }
    assert!(
        scratch.hashes.capacity() >= usize::from(size),
        "the test reaches what it is about"
    );
    assert!(scratch.bytes() > MIN_SCRATCH_BYTES);
    scratch.shrink();
    assert_eq!(scratch.bytes(), 0);
    scan(&stored(many(&[], &[1])), &schema(), &mut scratch);
    scratch.shrink();
    assert!(scratch.bytes() > 0, "a little is kept");
}

#[test]
fn declared_lengths_allocate_nothing() {
    for field in [&[0xDD, 0xFF, 0xFF, 0xFF, 0xFF][..], &[0xDC, 0xFF, 0xFF]] {
        let mut scratch = Scratch::default();
        let payload = [&[0x92, 1, 0x91, 0x95], &text("BlockStored")[..], field].concat();
        assert_eq!(scan(&payload, &schema(), &mut scratch), None);
        let payload = [&[0x92, 1, 0x91, 0x95], &text("BlockStored")[..], &[0x90, 0xC0], field].concat();
        assert_eq!(scan(&payload, &schema(), &mut scratch), None);
        assert_eq!(scan(&[&[0x92, 1], field].concat(), &schema(), &mut scratch), None);
        assert_eq!(scratch.bytes(), 0);
    }
}

// --- arbitrary payloads ---

/// Meaningless msgpack with the names of real fields.
fn msgpack() -> impl Strategy<Value = Vec<u8>> {
    let mut names: Vec<&str> = (layouts::LAYOUTS.iter())
        .flat_map(|(tag, _, map)| [&[*tag], *map].concat())
        .collect();
    names.push("type");
    let name = prop::sample::select(names);
    let leaf = prop_oneof![
        Just(vec![0xC0]),
        any::<u8>().prop_map(|byte| vec![byte & 0x7F]),
        any::<u64>().prop_map(|value| [&[0xCF], &value.to_be_bytes()[..]].concat()),
        any::<u16>().prop_map(|value| [&[0xCD], &value.to_be_bytes()[..]].concat()),
        any::<f64>().prop_map(|value| [&[0xCB], &value.to_be_bytes()[..]].concat()),
        name.prop_map(text),
    ];
    leaf.prop_recursive(5, 60, 6, |inner| {
        (prop::collection::vec(inner, 0..8), any::<bool>()).prop_map(|(values, map)| {
            let head = if map {
                0x80 | (values.len() / 2) as u8
            } else {
                0x90 | values.len() as u8
            };
            let whole = if map { values.len() / 2 * 2 } else { values.len() };
            [vec![head], values[..whole].concat()].concat()
        })
    })
}

/// The result of a scan.
fn found(payload: &[u8], schema: &Schema, scratch: &mut Scratch) -> Option<impl PartialEq + std::fmt::Debug + use<>> {
    scan(payload, schema, scratch)?;
    let (events, hashes, tokens) = (scratch.events.clone(), scratch.hashes.clone(), scratch.tokens.clone());
    Some((events, hashes, tokens, scratch.ts.to_bits(), scratch.rank, scratch.digests))
}

/// Asserts that all spans of an accepted payload can be read, and that an earlier payload in the scratch makes no difference.
fn check_payload_after(before: &[u8], payload: &[u8]) {
    let _ = scan_accepted(payload);
    for schema in [schema(), schema().joining()] {
        let mut scratch = Scratch::default();
        let _ = scan(before, &schema, &mut scratch);
        let fresh = found(payload, &schema, &mut Scratch::default());
        assert_eq!(found(payload, &schema, &mut scratch), fresh);
        assert_eq!(found(payload, &schema, &mut scratch), fresh);
    }
}

fn check_payload(payload: &[u8]) {
    check_payload_after(payload, payload);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn random_bytes(payload in prop::collection::vec(any::<u8>(), 0..200)) {
        check_payload(&payload);
    }

    #[test]
    fn random_msgpack(parts in prop::collection::vec(msgpack(), 1..4), whole in msgpack()) {
        check_payload(&whole);
        check_payload(&[vec![0x92, 1, 0x90 | parts.len() as u8], parts.concat()].concat());
    }

    /// Golden payloads in which bytes were changed, removed or inserted, or which were truncated.
    #[test]
    fn mutated_goldens(
        which in any::<prop::sample::Index>(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3_u8), 0..4),
        cut in prop::option::weighted(0.2, any::<prop::sample::Index>()),
    ) {
        let golden = which.get(&goldens()).2.clone();
        let mut payload = golden.clone();
        for (at, byte, how) in edits {
            let at = at.index(payload.len());
            match how {
                0 => payload[at] = byte,
                1 => payload.insert(at, byte),
                _ => drop(payload.remove(at)),
            }
        }
        if let Some(cut) = cut {
            payload.truncate(cut.index(payload.len()));
        }
        check_payload_after(&golden, &payload);
    }

    /// One scratch reads payloads of two dialects, one after the other.
    #[test]
    fn any_two_goldens(before in any::<prop::sample::Index>(), after in any::<prop::sample::Index>()) {
        let goldens = goldens();
        check_payload_after(&before.get(&goldens).2, &after.get(&goldens).2);
    }
}

#[test]
fn every_prefix_of_a_golden_is_refused() {
    for (release, case, payload) in goldens() {
        for length in 0..payload.len() {
            assert_eq!(scan_accepted(&payload[..length]), None, "{release} {case} {length}");
        }
    }
}

/// Each event depends only on its own bytes, not on the previous event or an earlier payload.
#[test]
fn events_are_read_one_by_one() {
    let store = |hash: u8, parent: u8, medium: &str, size: u8| {
        let fields: [(&str, &[u8]); 5] = [
            ("block_hashes", &[0x91, hash]),
            ("parent_block_hash", &[parent]),
            ("token_ids", &[0x92, hash, 7]),
            ("block_size", &[size]),
            ("medium", &text(medium)),
        ];
        map("BlockStored", &fields)
    };
    let first = batch(&[store(1, 0xC0, "GPU", 2)]);
    let others = [
        store(2, 1, "GPU", 2),
        store(3, 2, "CPU", 2),
        store(4, 3, "CPU", 1),
        store(5, 4, "CPU", 1),
        map("BlockRemoved", &[("block_hashes", &[0x91, 5])]),
        store(6, 0xC0, "CPU", 1),
    ];
    let payload = batch(&others);
    check_payload_after(&first, &payload);
    let events = scan_accepted(&payload).expect("it is read");
    let media: Vec<Option<&str>> = events.iter().map(|event| event.medium.as_deref()).collect();
    assert_eq!(media, [Some("GPU"), Some("CPU"), Some("CPU"), Some("CPU"), None, Some("CPU")]);
    let parents: Vec<Option<u64>> = events.iter().map(|event| event.parent).collect();
    assert_eq!(parents, [Some(1), Some(2), Some(3), Some(4), None, None]);
    assert_eq!(
        events.iter().map(|event| event.block_size).collect::<Vec<_>>(),
        [2, 2, 1, 1, 0, 1]
    );
}

/// A schema applies its own limits to a payload, even if another schema has accepted the payload.
#[test]
fn each_schema_has_its_own_limits() {
    let payload = stored(&[("medium", &text("GPU"))]);
    let strict = schema_within(Limits {
        max_fields: 3,
        ..Limits::default()
    });
    let mut scratch = Scratch::default();
    assert!(scan(&payload, &schema(), &mut scratch).is_some());
    assert!(scan(&payload, &strict, &mut scratch).is_none());
}
