//! Batches that only the tolerant decoder reads, applied by a Rust program without Python.

use kvevents_index::limits::Limits;
use kvevents_index::prefix_index::{Outcome, PrefixIndex};
use kvevents_index::wire::decode::{Reason, decode, decode_into};
use kvevents_index::wire::scan::{self, Event, Run, Schema, Scratch, scan};
use proptest::prelude::*;

fn schema() -> Schema {
    Schema::new(scan::Limits::default()).expect("the limits are high enough")
}

fn index() -> PrefixIndex {
    PrefixIndex::new(schema(), Limits::default())
}

/// An event as `[tag, hashes, nil, tokens, 2]`.
fn stored(hash: &[u8], tokens: &[u8]) -> Vec<u8> {
    [&[0x95, 0xAB][..], b"BlockStored", &[0x91], hash, &[0xC0], tokens, &[2]].concat()
}

/// Events that the scanner refuses are applied: with texts instead of token ids (TensorRT-LLM), with a hash of bytes, and inside of bytes
/// (llm-d). An event of an unknown kind is rejected and does not affect the other events.
#[test]
fn what_the_scanner_leaves_is_applied() {
    let index = index();
    let texts = stored(&[1], &[0x92, 0xA1, b'7', 0xA1, b'8']);
    let digest = [&[0xC4, 9, 0xFF][..], &2_u64.to_be_bytes()].concat();
    let inner = stored(&digest, &[0x92, 7, 9]);
    let wrapped = [&[0xC4, inner.len() as u8][..], &inner].concat();
    let tomorrow = [&[0x92, 0xA8][..], b"Tomorrow", &[1]].concat();
    let payload = [&[0x92, 1, 0x93][..], &texts, &tomorrow, &wrapped].concat();
    let applied = index.batch("a", 0, 0, 0, &payload);
    assert_eq!(applied.outcome, Outcome::Applied(false));
    let rejected = applied.report.expect("something was set aside").rejected;
    assert_eq!(
        (rejected.len(), rejected[0].reason, rejected[0].index),
        (1, Reason::UnknownTag, Some(1))
    );
    assert_eq!(
        (&rejected[0].detail[..], &rejected[0].raw[..]),
        ("event type \"Tomorrow\"", &tomorrow[..])
    );
    let hashes: Vec<u64> = index.blocks("a", 0).0.iter().map(|block| block.hash).collect();
    assert_eq!(hashes, [1, 2]);
    assert_eq!(index.batch("a", 0, 0, 0, &payload).outcome, Outcome::Duplicate);
    let applied = index.batch("a", 0, 0, 1, b"\xC1");
    assert_eq!(applied.outcome, Outcome::Applied(false));
    let rejected = applied.report.expect("something was set aside").rejected;
    assert_eq!(rejected[0].reason, Reason::NotABatch);
}

/// A heartbeat is compared with the state after its own batch.
#[test]
fn heartbeats_are_compared() {
    let index = index();
    let beat = |digest: &[u8]| {
        let fields = [&b"\xA6digest\xD9\x20"[..], digest, b"\xA5every\x05"].concat();
        [&b"\x92\x01\x91\x95\xACBlockRemoved\x90\xC0\xC0\x82"[..], &fields].concat()
    };
    let digests = [b"00000000000000000000000000000000", b"0000000000000000000000000000000f"];
    for (seq, (digest, agrees)) in digests.into_iter().zip([true, false]).enumerate() {
        let applied = index.batch("a", 0, 0, seq as i64, &beat(digest));
        let report = applied.report.expect("there is a heartbeat");
        assert_eq!(report.agrees, Some(agrees));
        assert_eq!(
            report.heartbeat.expect("there is one").digest.as_deref().map(str::as_bytes),
            Some(&digest[..])
        );
        let again = index.batch("a", 0, 0, seq as i64, &beat(digest));
        assert_eq!(
            (again.outcome, again.report.expect("as before").agrees),
            (Outcome::Duplicate, None)
        );
    }
}

/// A heartbeat without a digest causes no comparison, but its other fields are reported.
#[test]
fn heartbeats_without_a_digest_are_not_compared() {
    let index = index();
    let payload = b"\x92\x01\x91\x95\xACBlockRemoved\x90\xC0\xC0\x83\xA6digest\xC0\xA5every\x05\xABincarnation\x07";
    let report = index.batch("a", 0, 0, 0, payload).report.expect("there is a heartbeat");
    assert_eq!((report.agrees, report.attested), (None, None));
    let heartbeat = report.heartbeat.expect("there is one");
    assert_eq!((heartbeat.digest, heartbeat.incarnation), (None, 7));
}

/// A multimodal item that marks many blocks adds few bytes to each block. With many bytes, the memory of a payload would grow with the
/// square of its length.
#[test]
fn an_item_of_no_form_is_not_repeated_for_each_block() {
    let (blocks, item) = (10_000, vec![b'y'; 10_000]);
    let mut payload = [&[0x92, 1, 0x91, 0x86][..], b"\xA4type\xABBlockStored\xACblock_hashes\xDC"].concat();
    payload.extend((blocks as u16).to_be_bytes());
    payload.extend(vec![1; blocks]);
    payload.extend(b"\xB1parent_block_hash\xC0\xA9token_ids\x90\xAAblock_size\x01\xA7mm_keys\xC5");
    payload.extend((item.len() as u16).to_be_bytes());
    payload.extend(&item);
    let mut scratch = Scratch::default();
    let batch = decode_into(&payload, &scan::Limits::default(), &mut scratch);
    assert_eq!(scratch.events.len(), 1);
    assert!(batch.bytes.len() < 30 * payload.len());
}

/// Bytes that often begin a value of msgpack.
fn any_byte() -> impl Strategy<Value = u8> {
    prop_oneof![any::<u8>(), 0x80..=0xA8_u8, 0xC0..=0xDF_u8, 0..4_u8]
}

fn golden_payloads() -> Vec<Vec<u8>> {
    let unhex = |digits: &str| {
        let bytes = digits.as_bytes().chunks(2);
        let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap_or(""), 16).unwrap_or(0);
        bytes.map(byte).collect()
    };
    let lines = include_str!("../../../tests/data/dialects.jsonl").lines();
    let digits = lines.filter_map(|line| line.split("\"payload_hex\":\"").nth(1)?.split('"').next());
    digits.map(unhex).collect()
}

/// Returns the hashes, tokens, keys and numbers of each event.
fn contents(scratch: &Scratch) -> Vec<impl std::fmt::Debug + PartialEq + use<>> {
    let lists = |event: &Event| {
        let of = |run: Run| run.slice(&scratch.hashes).to_vec();
        (of(event.hashes), event.tokens.slice(&scratch.tokens).to_vec(), of(event.keys))
    };
    let numbers = |event: &Event| {
        let integers = [event.lora_id, event.group, event.window];
        (
            event.pairs,
            event.keyable,
            event.keyed,
            event.parent,
            event.block_size,
            integers,
        )
    };
    scratch
        .events
        .iter()
        .map(|event| (event.kind, lists(event), numbers(event)))
        .collect()
}

fn check(payload: &[u8]) {
    let batch = decode(payload, &scan::Limits::default());
    let mut scratch = Scratch::default();
    let read = decode_into(payload, &scan::Limits::default(), &mut scratch);
    assert_eq!((scratch.events.len(), &read.rejected), (batch.events.len(), &batch.rejected));
    let decoded = contents(&scratch);
    if scan(payload, &schema(), &mut scratch).is_some() {
        assert_eq!((scratch.events.len(), batch.rejected.len()), (batch.events.len(), 0));
        assert_eq!(contents(&scratch), decoded);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    /// Any bytes can be decoded without a panic. If the scanner accepts a payload, both decoders return equal events, and reject none.
    #[test]
    fn any_bytes(payload in prop::collection::vec(any_byte(), 0..120), is_event in any::<bool>()) {
        check(&payload);
        let head: &[u8] = if is_event { &[0x92, 1, 0x91] } else { &[0x92, 1] };
        check(&[head, &payload].concat());
    }

    /// Real payloads with some bytes changed, removed or added, and truncated payloads.
    #[test]
    fn mutated_goldens(
        which in any::<prop::sample::Index>(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any_byte(), 0..3_u8), 0..4),
        cut in prop::option::weighted(0.2, any::<prop::sample::Index>()),
    ) {
        let mut payload = which.get(&golden_payloads()).clone();
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
        check(&payload);
    }
}
