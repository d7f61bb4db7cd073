//! Searches for payloads that take more steps per byte than a bound, or that make other streams wait for too many steps. Other payloads can
//! precede the payloads that are searched for.

use proptest::prelude::*;

use crate::groups::search::SOURCE_LOOKS;
use crate::holders::contexts::Context;
use crate::keys::{self, Item, Items};
use crate::limits::Limits;
use crate::lookup::matching::{Hit, PromptLength, Walk, merge};
use crate::lookup::{Matches, Scope};
use crate::prefix_index::{Outcome, PrefixIndex};
use crate::step_counter::{self, Steps};
use crate::store::members::Worker;
use crate::testing::cases::text;
use crate::wire::scan::{Limits as ScanLimits, Schema};

/// Maximum number of steps for each byte of a payload; a payload of a megabyte then takes some hundred milliseconds.
const STEPS_PER_BYTE: usize = 40;
/// Maximum number of unused steps that earlier payloads leave in the budgets of partial clears and of blocks that share a hash.
const SAVED_STEPS: usize = 3 << 20;
/// Maximum number of steps for each block that the stream held before, since partial clears may examine these blocks several times.
const STEPS_PER_BLOCK: usize = 20;

/// Maximum number of steps of a lookup for each token of the prompt and each stream that holds some of the prompt. A hybrid stream is
/// searched on each level, with and without uncertain blocks.
const STEPS_PER_TOKEN: usize = 200;

/// Maximum number of steps of an export for each block, each copy, each pending block, and each 64 records of the index. A block whose hash
/// differs from that of its record is examined once for each of 32 parts of the index.
const STEPS_PER_EXPORTED: usize = 40;

/// Maximum number of steps for which other streams, or lookups of the same blocks, wait. A step takes 5 to 20 nanoseconds, so this is at
/// most 5 milliseconds.
const STEPS_PER_HOLD: usize = 250_000;

/// An event, and the number of times that it is repeated.
#[derive(Clone, Debug)]
struct RepeatedEvent {
    kind: u8,
    times: u16,
    /// The first hash. `count` is the number of hashes; `has_equal_hashes` is whether they are all equal.
    first: u8,
    count: u16,
    has_equal_hashes: bool,
    parent: Option<u8>,
    token: u8,
    place: Option<u8>,
    /// The number of media over which the repetitions are spread. If there are several media, their names include the rank.
    media: u8,
    group: u8,
    /// The kind of the event's group: a position in `SPECS`.
    spec: u8,
}

/// Kinds of groups of a hybrid model, each with its window.
const SPECS: [(&str, u8); 5] = [
    ("full_attention", 0),
    ("sliding_window", 9),
    ("sliding_window", 90),
    ("mamba", 0),
    ("other", 0),
];

fn events() -> impl Strategy<Value = Vec<RepeatedEvent>> {
    let times = prop_oneof![Just(1_u16), 1..40_u16, Just(2_000)];
    let count = prop_oneof![1..4_u16, 1..200_u16, Just(1_000), Just(60_000)];
    let hash = prop_oneof![Just(7_u8), 0..100_u8];
    let event = (
        (0..5_u8, times, hash.clone(), count, any::<bool>()),
        (
            prop::option::of(hash),
            0..100_u8,
            prop::option::of(0..3_u8),
            prop_oneof![3 => Just(1_u8), 1 => Just(60)],
            0..6_u8,
            0..SPECS.len() as u8,
        ),
    );
    let event = event.prop_map(
        |((kind, times, first, count, has_equal_hashes), (parent, token, place, media, group, spec))| RepeatedEvent {
            kind,
            times,
            first,
            count,
            has_equal_hashes,
            parent,
            token,
            place,
            media,
            group,
            spec,
        },
    );
    prop::collection::vec(event, 1..6)
}

fn array(items: impl ExactSizeIterator<Item = u8>) -> Vec<u8> {
    let mut out = vec![0xDD];
    out.extend((items.len() as u32).to_be_bytes());
    out.extend(items);
    out
}

impl RepeatedEvent {
    /// Returns the shortest encoding of one repetition, which omits all fields after the last field that is set.
    fn encoded(&self, rank: i64, repetition: u16) -> Vec<u8> {
        let count = usize::from(self.count);
        let number = |at: usize| {
            if self.has_equal_hashes {
                self.first
            } else {
                (usize::from(self.first) + at) as u8 % 100
            }
        };
        let hashes = array((0..count).map(number));
        let tokens = array((0..count).map(|at| (usize::from(self.token) + at) as u8 % 100));
        let medium = match self.place {
            None => vec![0xC0],
            Some(place) if self.media == 1 => vec![0xA1, b'a' + place],
            Some(place) => text(&format!("{rank}-{place}-{}", repetition % u16::from(self.media))),
        };
        let parent = vec![self.parent.unwrap_or(0xC0)];
        let (nil, none) = (vec![0xC0], vec![0x90]);
        let mut fields = match self.kind {
            0 | 1 => vec![
                b"\xABBlockStored".to_vec(),
                hashes,
                parent,
                tokens,
                vec![1],
                nil.clone(),
                medium,
            ],
            2 => vec![
                b"\xABBlockStored".to_vec(),
                hashes,
                parent,
                none,
                vec![0],
                nil.clone(),
                medium,
            ],
            3 => vec![b"\xACBlockRemoved".to_vec(), hashes, medium],
            _ => return self.clear(medium),
        };
        if self.group > 0 && self.kind == 3 {
            fields.push(vec![self.group]);
        } else if self.group > 0 {
            let (kind, window) = SPECS[usize::from(self.spec)];
            fields.extend([nil.clone(), nil, vec![self.group], text(kind), vec![window]]);
        }
        [vec![0x90 | fields.len() as u8], fields.concat()].concat()
    }

    fn clear(&self, medium: Vec<u8>) -> Vec<u8> {
        match self.place {
            None => b"\x91\xB0AllBlocksCleared".to_vec(),
            _ => [b"\x82\xA4type\xB0AllBlocksCleared\xA6medium".to_vec(), medium].concat(),
        }
    }
}

/// A payload of a rank that repeats the sequence of these events as often as it fits into `max_bytes` bytes.
fn payload_of(events: &[RepeatedEvent], rank: i64, max_bytes: usize) -> Vec<u8> {
    let (mut body, mut count) = (Vec::new(), 0_u32);
    'full: for event in events.iter().cycle().take(200) {
        for repetition in 0..event.times {
            let encoded = event.encoded(rank, repetition);
            if body.len() + encoded.len() > max_bytes {
                break 'full;
            }
            body.extend(&encoded);
            count += 1;
        }
    }
    [&[0x92, 1, 0xDD][..], &count.to_be_bytes(), &body].concat()
}

pub(super) fn index() -> PrefixIndex {
    PrefixIndex::new(Schema::new(ScanLimits::default()).unwrap().joining(), Limits::default())
}

/// Applies a payload, and asserts that the numbers of steps are within the bounds.
fn apply(index: &PrefixIndex, source: &str, seq: i64, payload: &[u8]) {
    let before = index.info(source, 0).map_or(0, |info| info.blocks + info.orphans);
    step_counter::taken();
    let outcome = index.batch(source, 0, 0, seq, payload).outcome;
    assert!(matches!(outcome, Outcome::Applied(_)), "{outcome:?}");
    let Steps { taken, longest, .. } = step_counter::taken();
    let most = STEPS_PER_BYTE * payload.len() + STEPS_PER_BLOCK * before + SAVED_STEPS;
    assert!(
        taken <= most,
        "{taken} steps of {most} for {} bytes, {before} blocks before",
        payload.len()
    );
    assert!(
        longest <= STEPS_PER_HOLD,
        "others wait for {longest} steps, {before} blocks before"
    );
}

/// Looks up a prompt, and asserts that the numbers of steps are within the bounds.
fn look_up(index: &PrefixIndex, tokens: &[u32], scope: &Scope) -> Matches {
    step_counter::taken();
    let found = index.match_prompt(tokens, scope);
    let Steps { taken, longest, .. } = step_counter::taken();
    let most = STEPS_PER_TOKEN * (tokens.len() + 1) * found.hits.len().max(1);
    assert!(taken <= most, "{taken} steps of {most} for {} tokens", tokens.len());
    assert!(longest <= STEPS_PER_HOLD, "others wait for {longest} steps");
    found
}

/// Compares a stream twice with an equal attestation. The second comparison changes nothing.
fn attest(index: &PrefixIndex) {
    let Some(stream) = index.stream("bad", 0) else { return };
    let locked = stream.lock();
    let (attestation, blocks) = (locked.attestation(), locked.blocks);
    drop(locked);
    for most in [STEPS_PER_BLOCK * blocks, 10] {
        step_counter::taken();
        index.compare("bad", 0, None, None, Some(attestation));
        let Steps { taken, longest, .. } = step_counter::taken();
        assert!(
            taken <= most && longest <= STEPS_PER_HOLD,
            "{taken} steps of {most}, others wait for {longest}"
        );
    }
}

/// Lists the blocks of a stream and writes a snapshot, and asserts that both are within the bounds.
fn export(index: &PrefixIndex) {
    let Some(stream) = index.stream("bad", 0) else { return };
    let locked = stream.lock();
    let copies: usize = locked.held().map(|(_, blocks)| 1 + blocks).sum();
    let bound = index.shared_lock.read().records.bound() as usize / 64;
    let most = STEPS_PER_EXPORTED * (copies + locked.blocks + locked.waiting.len() + bound + 10);
    // The steps of an export are the blocks that it lists or writes, and all other items that it examines.
    let least = [
        2 * locked.blocks,
        locked.blocks + locked.waiting.len() + locked.foreign().len() + bound,
    ];
    drop(locked);
    let list = || _ = index.blocks("bad", 0);
    let save = || _ = index.save(std::io::sink(), None).unwrap();
    for (export, least) in [&list as &dyn Fn(), &save].into_iter().zip(least) {
        step_counter::taken();
        export();
        let Steps { taken, longest, .. } = step_counter::taken();
        assert!(
            least <= taken && taken <= most && longest <= STEPS_PER_HOLD,
            "{taken} steps of {most}, others wait for {longest}"
        );
    }
}

fn check(payloads: &[Vec<RepeatedEvent>], ranks: i64, max_bytes: usize) {
    let index = index();
    for (seq, events) in payloads.iter().enumerate() {
        for rank in 1..ranks {
            index.batch("bad", rank, 0, seq as i64, &payload_of(events, rank, max_bytes));
        }
        apply(&index, "bad", seq as i64, &payload_of(events, 0, max_bytes));
        attest(&index);
        if ranks == 1 {
            export(&index);
        }
        for event in events {
            look_up(
                &index,
                &(0..400).map(|at| (u32::from(event.token) + at) % 100).collect::<Vec<_>>(),
                &Scope::default(),
            );
        }
        assert!(index.stream("bad", 0).is_none_or(|stream| stream.lock().is_counted()));
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: ProptestConfig::default().cases / 4,
        max_shrink_iters: 200,
        ..ProptestConfig::default()
    })]

    #[test]
    fn no_payload_takes_many_steps(
        payloads in prop::collection::vec(events(), 1..4),
        (ranks, max_bytes) in prop_oneof![15 => Just((1, 1_usize << 16)), 1 => Just((1, 1 << 20)), 4 => Just((8, 1 << 14))],
    ) {
        check(&payloads, ranks, max_bytes);
    }
}

/// A lookup, and the numbers of steps of its reads and of its searches.
#[derive(Debug, Default)]
pub(super) struct Walked {
    hits: Vec<Hit>,
    certain: Vec<Hit>,
    pub reads: usize,
    pub searches: usize,
}

/// Looks a prompt up. If `is_again`, reads the holders again, as if they were too many.
pub(super) fn walked(index: &PrefixIndex, tokens: &[u32], is_again: bool) -> Walked {
    let (view, mut walk, mut hits, mut certain) = (index.view.read(), Walk::default(), Vec::new(), Vec::new());
    let Some(model) = view.models.get(&None) else {
        return Walked::default();
    };
    step_counter::taken();
    walk.begin(model.schemes.len(), false);
    let read = |walk: &mut Walk, streams: &[u64], hits: &mut Vec<Hit>| {
        for &(scheme, _) in &model.schemes {
            let (mut locals, context) = (
                Vec::new(),
                Context {
                    scheme,
                    lora: 0,
                    salt: 0,
                },
            );
            keys::locals(
                tokens,
                scheme,
                context.seed(),
                &Items::default(),
                0..scheme.blocks(tokens.len()),
                &mut locals,
            );
            walk.find(&view, &locals, view.contexts.find(&context), None);
            let length = PromptLength {
                tokens: tokens.len(),
                longest: tokens.len(),
            };
            walk.hits(&view, scheme, length, streams, hits);
        }
    };
    read(&mut walk, &model.streams, &mut hits);
    if is_again {
        walk.exceed();
        walk.read_again(&view, &model.streams, &mut hits, |walk, _, streams, hits| {
            read(walk, streams, hits)
        });
    }
    let reads = step_counter::taken().taken;
    walk.search(&view.names, &mut hits, &mut certain);
    let searches = step_counter::taken().taken;
    merge(&mut hits);
    merge(&mut certain);
    Walked {
        hits,
        certain,
        reads,
        searches,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases / 4, ..ProptestConfig::default() })]

    /// Lookups that read the holders again have the same results.
    #[test]
    fn what_is_read_again_is_the_same(payloads in prop::collection::vec((events(), 0..3_usize, 0..3_i64), 1..12), token in 0..100_u32) {
        let index = index();
        for (seq, (events, source, rank)) in payloads.iter().enumerate() {
            index.batch(["a", "b", "c"][*source], *rank, 0, seq as i64, &payload_of(events, *rank, 1 << 12));
        }
        let tokens: Vec<u32> = (0..300).map(|at| (token + at) % 100).collect();
        let [first, again] = [false, true].map(|is_again| walked(&index, &tokens, is_again));
        prop_assert_eq!((first.hits, first.certain), (again.hits, again.certain));
    }
}

/// Some of an engine's blocks, on one of the media of a rank.
#[derive(Clone, Copy, Debug)]
struct Copied {
    medium: u8,
    first: u8,
    count: u8,
}

const MEDIA: u8 = 60;

fn copied() -> impl Strategy<Value = Copied> {
    let medium = prop_oneof![Just(MEDIA - 1), 0..MEDIA];
    (medium, 0..100_u8, 1..100_u8).prop_map(|(medium, first, count)| Copied { medium, first, count })
}

/// An event for copies of blocks. If a rank has media of its own, their names include the rank.
fn copies_event(copied: Copied, blocks: u8, own: Option<i64>, is_stored: bool) -> Vec<u8> {
    let first = copied.first % blocks;
    let hashes = array(first..first.saturating_add(copied.count).min(blocks));
    let medium = text(&format!("{}-{}", own.unwrap_or_default(), copied.medium));
    match is_stored {
        true => [b"\x97\xABBlockStored".to_vec(), hashes, b"\xC0\x90\x00\xC0".to_vec(), medium].concat(),
        false => [b"\x93\xACBlockRemoved".to_vec(), hashes, medium].concat(),
    }
}

/// Changes of blocks that many ranks hold on many media: the sets of holders have thousands of words.
fn check_changes(ranks: i64, has_own_media: bool, blocks: u8, are_equal: bool, changes: &[Copied]) {
    let index = index();
    for rank in (0..ranks).rev() {
        let own = has_own_media.then_some(rank);
        let stored = |at| RepeatedEvent {
            first: at,
            token: at,
            ..repeated(0, 1, 1, None)
        };
        let mut events: Vec<Vec<u8>> = (0..blocks).map(|at| stored(at).encoded(rank, 0)).collect();
        for medium in 0..MEDIA {
            let first = if are_equal { 0 } else { medium % blocks };
            let copied = Copied {
                medium,
                first,
                count: blocks,
            };
            events.push(copies_event(copied, blocks, own, true));
        }
        index.batch("bad", rank, 0, 0, &batch_of(&events));
    }
    let own = has_own_media.then_some(0);
    let removed = changes.iter().map(|&copied| copies_event(copied, blocks, own, false));
    let stored = changes.iter().map(|&copied| copies_event(copied, blocks, own, true));
    let turn: Vec<Vec<u8>> = removed.chain(stored).collect();
    let bytes: usize = turn.iter().map(Vec::len).sum();
    let count = turn.len() * ((1 << 18) / bytes);
    apply(
        &index,
        "bad",
        1,
        &batch_of(&turn.into_iter().cycle().take(count).collect::<Vec<_>>()),
    );
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: ProptestConfig::default().cases / 16,
        max_shrink_iters: 20,
        ..ProptestConfig::default()
    })]

    #[test]
    fn no_change_of_holders_takes_many_steps(
        (ranks, has_own_media) in (prop_oneof![2..64_i64, Just(64)], any::<bool>()),
        (blocks, are_equal) in (prop_oneof![Just(1_u8), 1..30_u8], any::<bool>()),
        changes in prop::collection::vec(copied(), 1..8),
    ) {
        check_changes(ranks, has_own_media, blocks, are_equal, &changes);
    }
}

/// One block that is stored and removed in turn on one of thousands of placements.
#[test]
fn a_block_that_comes_and_goes_on_one_of_many_placements() {
    let change = Copied {
        medium: MEDIA - 1,
        first: 0,
        count: 1,
    };
    check_changes(64, true, 1, true, &[change]);
}

fn repeated(kind: u8, times: u16, count: u16, place: Option<u8>) -> RepeatedEvent {
    RepeatedEvent {
        kind,
        times,
        first: 7,
        count,
        has_equal_hashes: true,
        parent: None,
        token: 0,
        place,
        media: 1,
        group: 0,
        spec: 0,
    }
}

/// Stores blocks with one hash again: to find a block, all blocks with the hash must be examined.
#[test]
fn blocks_of_one_hash_that_are_stored_again() {
    check(
        &[vec![repeated(0, 1, 1_000, None)], vec![repeated(0, 2_000, 1_000, None)]],
        1,
        1 << 20,
    );
}

/// Copies of the newest of many blocks with one hash; the search for this block begins at the oldest.
#[test]
fn copies_of_the_newest_of_many_blocks_of_one_hash() {
    let copies = repeated(2, 1, 60_000, Some(1));
    check(
        &[
            vec![repeated(0, 1, 1_000, None)],
            vec![copies],
            vec![repeated(3, 20, 60_000, Some(1))],
        ],
        1,
        1 << 20,
    );
}

/// A clear of blocks and of hashes that wait for their tokens, with copies on many media.
#[test]
fn a_clear_of_many_waiting_hashes() {
    let waiting = RepeatedEvent {
        has_equal_hashes: false,
        media: 60,
        ..repeated(2, 2_000, 48, Some(0))
    };
    check(
        &[vec![waiting], vec![repeated(0, 1, 1, None), repeated(4, 1, 1, None)]],
        1,
        1 << 16,
    );
}

/// Stores of a block that waits for its parent, with copies on many media.
#[test]
fn stores_of_waiting_blocks_on_many_media() {
    let store = RepeatedEvent {
        has_equal_hashes: false,
        parent: Some(7),
        media: 60,
        ..repeated(0, 2_000, 1_000, Some(0))
    };
    check(&[vec![store]], 1, 1 << 20);
}

/// Stores copies of one hash in a table that has no room for another hash.
#[test]
fn copies_beside_a_full_table() {
    let of_a_window = RepeatedEvent {
        has_equal_hashes: false,
        group: 1,
        spec: 1,
        ..repeated(0, 1, 56, None)
    };
    check(&[vec![of_a_window], vec![repeated(2, 1, 1_000, None)]], 1, 1 << 16);
}

/// Stores and removes blocks that have the same hash.
#[test]
fn blocks_of_one_hash_that_come_and_go() {
    check(&[vec![repeated(0, 1, 1_000, None), repeated(3, 1, 1_000, None)]], 1, 1 << 20);
}

// --- work that grows with one stream, or with all streams

/// A list of hashes in msgpack, five bytes each: 200,000 hashes take a megabyte.
pub(super) fn hashes(numbers: impl ExactSizeIterator<Item = u32>) -> Vec<u8> {
    let mut out = vec![0xDD];
    out.extend((numbers.len() as u32).to_be_bytes());
    for number in numbers {
        out.push(0xCE);
        out.extend(number.to_be_bytes());
    }
    out
}

pub(super) fn batch_of(events: &[Vec<u8>]) -> Vec<u8> {
    let count = events.len() as u32;
    [&[0x92, 1, 0xDD][..], &count.to_be_bytes(), &events.concat()].concat()
}

const CHAIN_BLOCKS: u32 = 150_000;

/// A chain of `CHAIN_BLOCKS` blocks of one token. Chains with different `part` have different tokens.
fn chain(part: u32, first: u32) -> Vec<u8> {
    let tokens = hashes(part * CHAIN_BLOCKS..(part + 1) * CHAIN_BLOCKS);
    let fields = [hashes(first..first + CHAIN_BLOCKS), vec![0xC0], tokens, vec![1]];
    [b"\x95\xABBlockStored".to_vec(), fields.concat()].concat()
}

/// Copies, without tokens, of `CHAIN_BLOCKS` blocks whose hashes begin with `first`.
fn copies(first: u32, medium: &[u8]) -> Vec<u8> {
    let fields = [
        hashes(first..first + CHAIN_BLOCKS),
        b"\xC0\x90\x00\xC0".to_vec(),
        medium.to_vec(),
    ];
    [b"\x97\xABBlockStored".to_vec(), fields.concat()].concat()
}

#[test]
fn copies_of_many_blocks() {
    let index = index();
    for part in 0..4 {
        apply(
            &index,
            "bad",
            2 * i64::from(part),
            &batch_of(&[chain(part, part * CHAIN_BLOCKS)]),
        );
        apply(
            &index,
            "bad",
            2 * i64::from(part) + 1,
            &batch_of(&[copies(part * CHAIN_BLOCKS, b"\xC0")]),
        );
    }
    export(&index);
    assert_eq!(index.info("bad", 0).unwrap().copies, 4 * CHAIN_BLOCKS as usize);
}

/// Blocks that two streams announce under different hashes.
#[test]
fn many_blocks_under_hashes_of_their_own() {
    let index = index();
    for part in 0..4 {
        apply(&index, "good", part.into(), &batch_of(&[chain(part, part * CHAIN_BLOCKS)]));
        apply(
            &index,
            "bad",
            part.into(),
            &batch_of(&[chain(part, (10 + part) * CHAIN_BLOCKS)]),
        );
    }
    export(&index);
    for part in 0..4_u32 {
        let gone = hashes((10 + part) * CHAIN_BLOCKS..(11 + part) * CHAIN_BLOCKS);
        apply(
            &index,
            "bad",
            i64::from(4 + part),
            &batch_of(&[[b"\x92\xACBlockRemoved".to_vec(), gone].concat()]),
        );
    }
    assert_eq!(index.info("bad", 0).unwrap().blocks, 0);
}

/// Two blocks of each hash.
#[test]
fn many_hashes_of_two_blocks() {
    let index = index();
    for part in 0..4 {
        apply(
            &index,
            "bad",
            2 * i64::from(part),
            &batch_of(&[chain(part, part * CHAIN_BLOCKS)]),
        );
        apply(
            &index,
            "bad",
            2 * i64::from(part) + 1,
            &batch_of(&[chain(10 + part, part * CHAIN_BLOCKS)]),
        );
    }
    export(&index);
}

/// Blocks in as many namespaces as there are blocks.
#[test]
fn many_namespaces() {
    let index = index();
    for part in 0..20_u32 {
        let event = |at: u32| {
            let number = (part * 30_000 + at).to_be_bytes();
            let fields = [&b"\x91\xCE"[..], &number, b"\xC0\x91\x01\x01\xCE", &number].concat();
            [b"\x96\xABBlockStored".to_vec(), fields].concat()
        };
        apply(
            &index,
            "bad",
            part.into(),
            &batch_of(&(0..30_000).map(event).collect::<Vec<_>>()),
        );
    }
    export(&index);
    assert_eq!(index.info("bad", 0).unwrap().blocks, 600_000);
}

/// Blocks each of which has a different combination of placements.
#[test]
fn many_sets_of_placements() {
    let index = index();
    for part in 0..2_u32 {
        apply(&index, "bad", part.into(), &batch_of(&[chain(part, part * CHAIN_BLOCKS)]));
    }
    for bit in 0..19_u32 {
        let numbers: Vec<u32> = (0..2 * CHAIN_BLOCKS).filter(|number| number >> bit & 1 == 1).collect();
        let fields = [
            hashes(numbers.into_iter()),
            b"\xC0\x90\x00\xC0\xA1".to_vec(),
            vec![b'a' + bit as u8],
        ];
        let event = [b"\x97\xABBlockStored".to_vec(), fields.concat()].concat();
        apply(&index, "bad", i64::from(2 + bit), &batch_of(&[event]));
    }
    export(&index);
}

/// The maximum number of waiting blocks, each with a different missing parent.
#[test]
fn many_orphans() {
    let index = index();
    for part in 0..2_u32 {
        let event = |at: u32| {
            let number = (2 * at + part).to_be_bytes();
            let fields = [
                &b"\x91\xCE"[..],
                &number,
                b"\xCE",
                &(1_000_000 + at).to_be_bytes(),
                b"\x91\x01\x01",
            ]
            .concat();
            [b"\x95\xABBlockStored".to_vec(), fields].concat()
        };
        apply(
            &index,
            "bad",
            part.into(),
            &batch_of(&(0..35_000).map(event).collect::<Vec<_>>()),
        );
    }
    export(&index);
}

// --- lookups

/// Blocks of a group of a hybrid model.
pub(super) fn group(
    number: u8,
    kind: &str,
    window: u32,
    size: u8,
    numbers: impl ExactSizeIterator<Item = u32>,
    tokens: u32,
) -> Vec<u8> {
    let tokens = hashes(0..tokens);
    let fields = [
        hashes(numbers),
        vec![0xC0],
        tokens,
        vec![size, 0xC0, 0xC0, 0xC0, 0xC0, number],
    ];
    let spec = [text(kind), vec![0xCE], window.to_be_bytes().to_vec()];
    [b"\x9C\xABBlockStored".to_vec(), fields.concat(), spec.concat()].concat()
}

/// Windows that are searched again each time that one of two states shortens the prefix by a block.
#[test]
fn groups_that_disagree_at_every_block() {
    const TOKENS: u32 = 2_000;
    for windows in [1, 8, 55] {
        let index = index();
        let mut events = vec![group(0, "full_attention", 0, 1, 0..TOKENS, TOKENS)];
        events.extend((1..=windows).map(|at| group(at, "sliding_window", 1_900 + u32::from(at), 1, 0..TOKENS, 0)));
        let half = TOKENS as usize / 2;
        events.push(group(60, "mamba", 0, 1, (0..TOKENS).step_by(2), 0));
        events.push(group(61, "mamba", 0, 2, (1..TOKENS).step_by(2).take(half), 0));
        apply(&index, "bad", 0, &batch_of(&events));
        let found = look_up(&index, &(0..TOKENS).collect::<Vec<_>>(), &Scope::default());
        assert!(
            found
                .hits
                .iter()
                .all(|hit| !found.is_certain(hit) && found.certain(hit) == [0; 4])
        );
        assert!(
            windows == 1 || found.hits.len() == 1,
            "what is not searched to its end is not certain"
        );
    }
}

/// Many ranks of one engine. The groups of each rank disagree in a different way. The cost of a lookup is bounded for all ranks together.
/// No other thread waits for the searches. The search of another stream that holds the prompt is completed.
#[test]
fn groups_of_many_ranks_that_disagree() {
    const TOKENS: u32 = 2_000;
    const RANKS: u32 = 40;
    let index = index();
    let events = [
        group(0, "full_attention", 0, 1, 0..TOKENS, TOKENS),
        group(1, "sliding_window", 9, 1, 0..TOKENS, 0),
    ];
    index.batch("good", 0, 0, 0, &batch_of(&events));
    for rank in 0..RANKS {
        let mut events = vec![group(0, "full_attention", 0, 1, 0..TOKENS, TOKENS)];
        events.extend((1..=20).map(|at| group(at, "sliding_window", 1_800 + rank + u32::from(at), 1, 0..TOKENS, 0)));
        events.push(group(60, "mamba", 0, 1, (0..TOKENS).step_by(2), 0));
        events.push(group(61, "mamba", 0, 2, (1..TOKENS).step_by(2).take(TOKENS as usize / 2), 0));
        index.batch("bad", rank.into(), 0, 0, &batch_of(&events));
    }
    step_counter::taken();
    let found = index.match_prompt(&(0..TOKENS).collect::<Vec<_>>(), &Scope::default());
    let Steps { taken, longest, .. } = step_counter::taken();
    let most = SOURCE_LOOKS + 8 * (RANKS * TOKENS) as usize;
    assert!((SOURCE_LOOKS..=most).contains(&taken), "{taken} steps of {most}");
    assert!(longest <= STEPS_PER_HOLD / 8, "others wait for {longest} steps");
    let good = found.hits.iter().find(|hit| found.worker(hit).source == "good").unwrap();
    assert!(good.tokens == [TOKENS; 4] && found.is_certain(good));
}

/// Many ranks that hold a long prompt on the maximum number of placements, with each block on some of the placements.
#[test]
fn many_placements_of_many_ranks() {
    const TOKENS: u32 = 32_000;
    let index = index();
    for rank in 0..8 {
        let mut events = vec![group(0, "full_attention", 0, 1, 0..TOKENS, TOKENS)];
        events.extend((1..=40).map(|at| group(at, "sliding_window", 9, 1, (u32::from(at) % 2..TOKENS).step_by(2), 0)));
        for (seq, event) in events.iter().enumerate() {
            index.batch("bad", rank, 0, seq as i64, &batch_of(std::slice::from_ref(event)));
        }
    }
    step_counter::taken();
    let found = index.match_prompt(&(0..TOKENS).collect::<Vec<_>>(), &Scope::default());
    let Steps { taken, longest, .. } = step_counter::taken();
    assert!(longest <= STEPS_PER_HOLD, "others wait for {longest} steps");
    assert!(taken <= 8 << 20, "{taken} steps");
    assert!(found.hits.iter().all(|hit| hit.tokens[0] == TOKENS && !found.is_certain(hit)));
}

/// Many engines with one group. Each engine has the maximum number of separate media, and each medium holds every second block of a prompt. The test also has two blocks for each key, and blocks of several sizes. Blocks that the lookup does not read are not certain.
#[test]
fn many_media_of_many_engines() {
    for (engines, twins, sizes, tokens) in [(64, 1, &[1][..], 1_200), (24, 2, &[1, 2, 4, 5], 200)] {
        let chains: Vec<(u32, u32)> = sizes
            .iter()
            .flat_map(|&size| (0..twins).map(move |twin| (size, twin)))
            .collect();
        let numbers = |(size, twin): (u32, u32)| (10 * size + twin) * tokens..(10 * size + twin) * tokens + tokens / size;
        let stored = |numbers, size: u32, tokens| {
            let fields = [hashes(numbers), vec![0xC0], hashes(0..tokens), vec![size as u8]];
            [b"\x95\xABBlockStored".to_vec(), fields.concat()].concat()
        };
        let index = index();
        for engine in 0..engines {
            let copies = |medium: u32| {
                let odd: Vec<u32> = chains
                    .iter()
                    .flat_map(|&chain| numbers(chain).skip(medium as usize % 2).step_by(2))
                    .collect();
                let fields = [
                    hashes(odd.into_iter()),
                    b"\xC0\x90\x00\xC0".to_vec(),
                    text(&format!("{engine}-{medium}")),
                ];
                [b"\x97\xABBlockStored".to_vec(), fields.concat()].concat()
            };
            let events = chains.iter().map(|&(size, twin)| stored(numbers((size, twin)), size, tokens));
            let events = events.chain((0..60).map(copies)).collect::<Vec<_>>();
            index.batch(&format!("bad-{engine}"), 0, 0, 0, &batch_of(&events));
        }
        index.batch("good", 0, 0, 0, &batch_of(&[stored(0..5, 1, 5)]));
        let prompt: Vec<u32> = (0..tokens).collect();
        let found = look_up(&index, &prompt, &Scope::default());
        index.match_prompt(&prompt, &Scope::default());
        assert!(step_counter::taken().longest > STEPS_PER_HOLD / 8, "reads are counted");
        assert_eq!(found.hits.len(), 1 + engines as usize);
        for hit in &found.hits {
            let [certain, ..] = found.certain(hit);
            match &*found.worker(hit).source {
                "good" => assert_eq!((hit.tokens[0], certain), (5, 5)),
                _ if twins == 2 => assert_eq!((hit.tokens[0], certain), (tokens, 0)),
                _ => assert!(hit.tokens[0] == tokens && (100..=tokens).contains(&certain)),
            }
        }
        assert!(found.hits.iter().any(|hit| !found.is_certain(hit)));
    }
}

/// A prompt of blocks of one token that a good engine holds, and the blocks of its second stream on two media.
pub(super) struct FairCase {
    pub tokens: u32,
    pub is_hybrid: bool,
}

impl FairCase {
    /// A store of the first `count` blocks of the prompt, under the hashes from `first` on.
    pub(super) fn store(&self, first: u32, count: u32, size: u32) -> Vec<u8> {
        let fields = [
            hashes(first..first + count / size),
            vec![0xC0],
            hashes(0..count),
            vec![size as u8],
        ];
        [b"\x95\xABBlockStored".to_vec(), fields.concat()].concat()
    }

    /// Copies without tokens of blocks on a medium.
    pub(super) fn copies(numbers: impl Iterator<Item = u32>, medium: &str) -> Vec<u8> {
        let numbers: Vec<u32> = numbers.collect();
        let fields = [hashes(numbers.into_iter()), b"\xC0\x90\x00\xC0".to_vec(), text(medium)];
        [b"\x97\xABBlockStored".to_vec(), fields.concat()].concat()
    }

    /// Adds two good workers, after the hostile engine. Asserts that their matches are those of an index without the hostile engine.
    fn check(&self, index: &PrefixIndex) {
        let (alone, tokens) = (self::index(), self.tokens);
        for index in [index, &alone] {
            let mut all = vec![self.store(0, tokens, 1)];
            let mut halves = vec![self.store(0, tokens / 2, 1), Self::copies(tokens / 4..tokens / 2, "cpu")];
            if self.is_hybrid {
                let window = || group(1, "sliding_window", 9, 1, tokens / 2 - 9..tokens / 2, 0);
                (all, halves) = (
                    vec![group(0, "full_attention", 0, 1, 0..tokens, tokens), window()],
                    vec![group(0, "full_attention", 0, 1, 0..tokens / 2, tokens / 2), window()],
                );
            }
            index.batch("good", 0, 0, 0, &batch_of(&all));
            index.batch("other", 0, 0, 0, &batch_of(&halves));
        }
        let prompt: Vec<u32> = (0..tokens).collect();
        let expected = alone.match_prompt(&prompt, &Scope::default());
        step_counter::taken();
        let found = index.match_prompt(&prompt, &Scope::default());
        let Steps { taken, longest, .. } = step_counter::taken();
        assert!(longest <= STEPS_PER_HOLD, "others wait for {longest} steps");
        assert!(taken <= 4 << 20, "{taken} steps");
        assert!(
            found.hits.iter().any(|hit| !found.is_certain(hit)),
            "the hostile engine is within its budget"
        );
        for hit in &expected.hits {
            let same = |other: &&Hit| found.worker(other) == expected.worker(hit);
            let other = found.hits.iter().find(same).expect("a good worker is found");
            assert_eq!((other.tokens, found.certain(other)), (hit.tokens, expected.certain(hit)));
            assert!(found.is_certain(other));
        }
        assert_eq!(expected.hits.len(), 2);
    }
}

/// Engines that hold the blocks of a prompt on many media of their own.
pub(super) fn hostile_media(case: &FairCase, twins: u32) -> PrefixIndex {
    let index = index();
    for rank in 0..64 {
        let chains = (0..twins).map(|twin| case.store(twin * case.tokens, case.tokens, 1));
        let numbers = |medium: u32| (0..twins * case.tokens).filter(move |number| (number + medium).is_multiple_of(2));
        let copies = (0..60).map(|medium| FairCase::copies(numbers(medium), &format!("{rank}-{medium}")));
        let events = chains.chain(copies).collect::<Vec<_>>();
        index.batch(&format!("bad-{rank}"), 0, 0, 0, &batch_of(&events));
    }
    index
}

/// An engine that uses up every budget of a lookup leaves enough for the workers of other engines.
#[test]
fn media_of_many_engines_leave_budgets_to_others() {
    let case = FairCase {
        tokens: 1_200,
        is_hybrid: false,
    };
    case.check(&hostile_media(&case, 1));
}

#[test]
fn media_of_many_engines_leave_budgets_to_hybrid_others() {
    let case = FairCase {
        tokens: 1_200,
        is_hybrid: true,
    };
    case.check(&hostile_media(&case, 1));
}

#[test]
fn hashes_of_one_engine_leave_budgets_to_others() {
    let case = FairCase {
        tokens: 400,
        is_hybrid: false,
    };
    case.check(&hostile_media(&case, 4));
}

#[test]
fn groups_of_one_engine_leave_budgets_to_others() {
    for case in [2_000, 8_000].map(|tokens| FairCase { tokens, is_hybrid: true }) {
        let index = index();
        for rank in 0..32 {
            let mut events = vec![group(0, "full_attention", 0, 1, 0..case.tokens, case.tokens)];
            events.extend((1..=40_u8).map(|at| {
                let is_held = |number: &u32| (number + (rank as u32 >> (at % 6))).is_multiple_of(2);
                let numbers: Vec<u32> = (0..case.tokens).filter(is_held).collect();
                group(at, "sliding_window", 9, 1, numbers.into_iter(), 0)
            }));
            for (seq, event) in events.iter().enumerate() {
                index.batch("bad", rank, 0, seq as i64, &batch_of(std::slice::from_ref(event)));
            }
        }
        case.check(&index);
    }
}

/// Windows and states that disagree at every block. A stream of another source needs more looks than its own. Returns the number of steps
/// of a lookup, and whether the match of that stream is certain.
fn look_beside(sources: i64) -> (usize, bool) {
    const TOKENS: u32 = 2_000;
    let index = index();
    let disagreeing = |windows: u8, size: u32| {
        let mut events = vec![group(0, "full_attention", 0, 1, 0..TOKENS, TOKENS)];
        events.extend((1..=windows).map(|at| group(at, "sliding_window", size + u32::from(at), 1, 0..TOKENS, 0)));
        let states: Vec<u32> = (0..TOKENS).filter(|&number| number < 20 || number % 2 == 0).collect();
        events.push(group(60, "mamba", 0, 1, states.into_iter(), 0));
        events.push(group(61, "mamba", 0, 2, (1..TOKENS).step_by(2).take(TOKENS as usize / 2), 0));
        batch_of(&events)
    };
    for rank in 0..40 {
        let source = format!("bad-{}", rank % sources);
        index.batch(&source, rank, 0, 0, &disagreeing(20, 1_800 + rank as u32));
    }
    index.batch("good", 0, 0, 0, &disagreeing(2, 8));
    let look = || {
        step_counter::taken();
        let found = index.match_prompt(&(0..TOKENS).collect::<Vec<_>>(), &Scope::default());
        let taken = step_counter::taken().taken;
        let is_good = |hit: &&Hit| found.worker(hit).source == "good";
        assert!(found.hits.iter().any(|hit| !found.is_certain(hit)));
        (
            taken,
            found.hits.iter().find(is_good).is_some_and(|hit| found.is_certain(hit)),
        )
    };
    let first = look();
    // No lookup uses looks of the next one.
    assert!((0..5).all(|_| look() == first));
    first
}

#[test]
fn looks_of_one_engine_are_not_those_of_others() {
    let (one, is_certain) = look_beside(1);
    assert!(
        (4 * SOURCE_LOOKS..6 * SOURCE_LOOKS).contains(&one) && is_certain,
        "{one} steps"
    );
    // Four sources can use up the looks that all share.
    let (many, is_certain) = look_beside(7);
    assert!(many - one <= 3 * SOURCE_LOOKS && !is_certain, "{many} steps beside {one}");
}

/// An engine with many block sizes.
#[test]
fn block_sizes_of_one_engine_leave_budgets_to_others() {
    let case = FairCase {
        tokens: 1_200,
        is_hybrid: false,
    };
    let index = index();
    for rank in 0..64_u32 {
        let sizes = (0..15).map(|at| 1 + (rank * 15 + at) % 250);
        let mut events: Vec<_> = sizes
            .clone()
            .map(|size| case.store(10_000 * size, case.tokens / size * size, size))
            .collect();
        events.push(case.store(0, case.tokens, 1));
        events.push(FairCase::copies(
            (0..case.tokens).filter(|number| (number >> (rank % 6)) % 2 == 0),
            &format!("{rank}-medium"),
        ));
        index.batch("bad", rank.into(), 0, 0, &batch_of(&events));
    }
    case.check(&index);
}

/// Many ranks with blocks that might be gone, among blocks of other chains.
#[test]
fn uncertain_blocks_of_many_ranks() {
    const TOKENS: u32 = 8_000;
    for is_hybrid in [false, true] {
        let index = index();
        for rank in 0..64 {
            let stored = group(0, "full_attention", 0, 1, 0..TOKENS, TOKENS);
            let mut events = vec![stored.clone(), stored];
            if is_hybrid {
                events.push(group(1, "sliding_window", 9, 1, 0..TOKENS, 0));
            }
            let gone = [hashes((0..TOKENS).step_by(2)), vec![0xC0, 0]].concat();
            events.push([b"\x94\xACBlockRemoved".to_vec(), gone].concat());
            index.batch("bad", rank, 0, 0, &batch_of(&events));
        }
        step_counter::taken();
        index.match_prompt(&(0..TOKENS).collect::<Vec<_>>(), &Scope::default());
        let Steps { taken, longest, .. } = step_counter::taken();
        assert!(longest <= STEPS_PER_HOLD, "others wait for {longest} steps");
        assert!(taken <= 4 << 20, "{taken} steps");
    }
}

/// Creates a hybrid stream with blocks that are known only by the engine's hashes.
pub(super) fn by_hashes(index: &PrefixIndex) {
    for part in 0..2 {
        apply(index, "bad", part.into(), &batch_of(&[group_chain(part)]));
    }
    let states = group(1, "mamba", 0, 5, 0..1, 0);
    apply(index, "bad", 2, &batch_of(&[states]));
    assert!(index.stream("bad", 0).unwrap().lock().group_cache.is_some());
}

/// Blocks of a group with full attention.
fn group_chain(part: u32) -> Vec<u8> {
    let numbers = part * CHAIN_BLOCKS..(part + 1) * CHAIN_BLOCKS;
    let fields = [
        hashes(numbers),
        vec![0xC0],
        hashes(2 * part * CHAIN_BLOCKS..2 * (part + 1) * CHAIN_BLOCKS),
        vec![2, 0xC0, 0xC0, 0xC0, 0xC0, 0],
    ];
    [b"\x9B\xABBlockStored".to_vec(), fields.concat(), text("full_attention")].concat()
}

/// Stores of a hybrid stream that repeat a hash with many blocks.
#[test]
fn a_hash_of_many_blocks_that_is_repeated() {
    let index = index();
    by_hashes(&index);
    let blocks = |count: usize, tokens: Vec<u8>, size: u8| {
        let fields = [
            hashes(vec![7; count].into_iter()),
            vec![0xC0],
            tokens,
            vec![size, 0xC0, 0xC0, 0xC0, 0xC0, 0],
        ];
        [b"\x9B\xABBlockStored".to_vec(), fields.concat(), text("full_attention")].concat()
    };
    apply(&index, "bad", 3, &batch_of(&[blocks(1_000, hashes(0..2_000), 2)]));
    apply(&index, "bad", 4, &batch_of(&[blocks(60_000, vec![0x90], 0)]));
}

/// Copies of many hashes, in many groups, where each hash has many blocks. Each block is examined once for all groups, and many short
/// batches do not cause many checks.
#[test]
fn copies_of_many_hashes_of_many_blocks() {
    let index = index();
    by_hashes(&index);
    let mut seq = 3;
    for part in 0..250 {
        let fields = [
            hashes((0..600).map(|at| 1_000_000 + at)),
            vec![0xC0],
            hashes(part * 1_200..(part + 1) * 1_200),
            vec![2, 0xC0, 0xC0, 0xC0, 0xC0, 0],
        ];
        let event = [b"\x9B\xABBlockStored".to_vec(), fields.concat(), text("full_attention")].concat();
        apply(&index, "bad", seq, &batch_of(&[event]));
        seq += 1;
    }
    let copies = |number| group(number, "sliding_window", 9, 2, (0..600).map(|at| 1_000_000 + at), 0);
    let blocks = index.info("bad", 0).unwrap().blocks;
    let batches = [(10..30).map(copies).collect(), vec![copies(10)]];
    for (times, events) in [1, 100].into_iter().zip(batches) {
        let payload = batch_of(&events);
        step_counter::taken();
        for _ in 0..times {
            index.batch("bad", 0, 0, seq, &payload);
            seq += 1;
        }
        let Steps { taken, longest, .. } = step_counter::taken();
        let most = STEPS_PER_BYTE / 2 * times * payload.len() + 2 * blocks;
        assert!(taken <= most, "{taken} steps of {most}");
        assert!(longest <= STEPS_PER_HOLD, "others wait for {longest} steps");
    }
    assert!(index.stream("bad", 0).unwrap().lock().estimate().is_some());
}

/// Clears of a tier on which a hybrid stream holds no block.
#[test]
fn clears_that_remove_nothing() {
    let index = index();
    by_hashes(&index);
    let clear = [b"\x82\xA4type\xB0AllBlocksCleared\xA6medium".to_vec(), text("DISK")].concat();
    step_counter::taken();
    index.batch("bad", 0, 0, 3, &batch_of(&vec![clear; 1_000]));
    assert!(step_counter::taken().taken < 100_000);
}

/// Clears that name no tier, after a clear that has marked all blocks as uncertain.
#[test]
fn clears_of_blocks_that_might_be_gone() {
    let (index, clear) = (index(), b"\x91\xB0AllBlocksCleared".to_vec());
    let events = [chain(0, 0), copies(0, b"\xA3CPU"), clear.clone()];
    for (seq, event) in events.into_iter().enumerate() {
        apply(&index, "bad", seq as i64, &batch_of(&[event]));
    }
    step_counter::taken();
    index.batch("bad", 0, 0, 3, &batch_of(&vec![clear; 1_000]));
    assert!(step_counter::taken().taken < 100_000);
    assert_eq!(index.info("bad", 0).unwrap().uncertain, CHAIN_BLOCKS as usize);
}

/// Equal attestations of a hybrid stream that has second copies: only the first attestation has an effect.
#[test]
fn equal_attestations() {
    let index = index();
    by_hashes(&index);
    apply(&index, "bad", 3, &batch_of(&[group_chain(0)]));
    let attestation = index.stream("bad", 0).unwrap().lock().attestation();
    for most in [10 * CHAIN_BLOCKS as usize, 10, 10] {
        step_counter::taken();
        assert_eq!(index.compare("bad", 0, None, None, Some(attestation)).1, Some(true));
        let Steps { taken, longest, .. } = step_counter::taken();
        assert!(
            taken <= most && longest <= STEPS_PER_HOLD,
            "{taken} steps, others wait for {longest}"
        );
    }
}

/// Groups whose kinds change with each batch, so that lookups need hashes after some batches only.
#[test]
fn kinds_that_change_with_each_batch() {
    let index = index();
    by_hashes(&index);
    let mut steps = 0;
    for seq in 3..40 {
        let kind = if seq % 2 == 0 { "mamba" } else { "other" };
        step_counter::taken();
        index.batch("bad", 0, 0, seq, &batch_of(&[group(1, kind, 0, 5, 0..1, 0)]));
        let Steps { taken, longest, .. } = step_counter::taken();
        assert!(longest <= STEPS_PER_HOLD, "others wait for {longest} steps");
        steps += taken;
    }
    assert!(steps <= 9 * 2 * CHAIN_BLOCKS as usize, "{steps} steps");
}

/// Multimodal items each of which covers the whole prompt: without a bound, each item would be hashed in every block.
#[test]
fn items_that_share_their_tokens() {
    let index = index();
    apply(&index, "bad", 0, &payload_of(&[repeated(0, 1, 1, None)], 0, 1 << 10));
    let item = |id| Item {
        id,
        placeless: false,
        start: 0,
        length: i64::MAX,
    };
    for count in [1, 4, 5, 17, 1_024] {
        let scope = Scope {
            items: (0..count).map(item).collect::<Vec<_>>().into(),
            ..Scope::default()
        };
        let tokens = vec![7; 20_000];
        look_up(&index, &tokens, &scope);
        step_counter::taken();
        index.speculate(&worker(), &tokens, &scope, 0.0, 1.0);
        let taken = step_counter::taken().taken;
        assert!(taken <= 16 * tokens.len(), "{taken} steps for {count} items");
    }
}

fn worker() -> Worker {
    Worker {
        source: "bad".into(),
        rank: 0,
    }
}

/// Speculative entries that expire at the same time.
#[test]
fn many_decisions_that_end_at_once() {
    let index = index();
    apply(&index, "bad", 0, &payload_of(&[repeated(0, 1, 1, None)], 0, 1 << 10));
    for at in 0..60 {
        let tokens: Vec<u32> = (at..at + 16_384).collect();
        index.speculate(&worker(), &tokens, &Scope::default(), 0.0, 1.0);
    }
    assert_eq!(index.speculated(0.0).blocks, 60 << 14);
    for expired in [4, 8, 12] {
        step_counter::taken();
        assert_eq!(index.speculated(1.0).expired, expired);
        let Steps { taken, longest, .. } = step_counter::taken();
        assert!(
            taken <= 4 << 14 && longest <= STEPS_PER_HOLD,
            "{taken} steps, others wait for {longest}"
        );
    }
    // A call that adds a speculative entry can remove as many additional blocks as it adds. So the number of blocks that have expired and
    // are not removed yet does not grow.
    index.speculate(&worker(), &[5; 40_000], &Scope::default(), 1.0, 1.0);
    assert_eq!(index.speculated(0.0).expired, 19);
    for _ in 0..11 {
        index.speculated(1.0);
    }
    assert_eq!((index.speculated(1.0).blocks, index.speculated(1.0).expired), (0, 61));
}

/// A prompt that many workers are expected to hold.
#[test]
fn a_prompt_that_is_expected_on_many_workers() {
    let index = index();
    let tokens: Vec<u32> = (0..2_000).collect();
    for at in 0..400 {
        let source = format!("w{at}");
        apply(&index, &source, 0, &payload_of(&[repeated(0, 1, 1, None)], 0, 1 << 10));
        let worker = Worker { source, rank: 0 };
        index.speculate(&worker, &tokens, &Scope::default(), 0.0, 1.0);
    }
    let mut found = look_up(&index, &tokens, &Scope::default());
    step_counter::taken();
    index.extend_by_overlay(&tokens, &Scope::default(), 0.0, &mut found);
    let Steps { taken, .. } = step_counter::taken();
    assert!(
        found.hits.len() == 400 && taken <= 400 * 16 + 4 * tokens.len(),
        "{taken} steps"
    );
}

/// Speculative entries that are removed because their worker clears its cache, or stores the last block of their prompts.
#[test]
fn many_decisions_that_end_by_one_event() {
    let index = index();
    apply(&index, "bad", 0, &payload_of(&[repeated(0, 1, 1, None)], 0, 1 << 10));
    let tokens = |at: u32| [&vec![at; 16_383][..], &[7]].concat();
    let expect = |at| index.speculate(&worker(), &tokens(at), &Scope::default(), 0.0, 1.0);
    let is_within_bounds = |seq, payload: &[u8]| {
        step_counter::taken();
        index.batch("bad", 0, 0, seq, payload);
        assert!(step_counter::taken().longest <= STEPS_PER_HOLD);
        assert_eq!(index.speculated(0.0).blocks, 0);
    };
    (0..60).for_each(expect);
    is_within_bounds(1, &batch_of(&[b"\x91\xB0AllBlocksCleared".to_vec()]));
    (0..60).for_each(|_| expect(7));
    let blocks = [hashes(1..16_385), vec![0xC0], hashes(tokens(7).into_iter()), vec![1]];
    is_within_bounds(2, &batch_of(&[[b"\x95\xABBlockStored".to_vec(), blocks.concat()].concat()]));
    assert_eq!(index.speculated(0.0).confirmed, 60);
}

/// A speculative entry of a prompt with more blocks than any engine computes at once.
#[test]
fn a_decision_for_a_very_long_prompt() {
    let index = index();
    apply(&index, "bad", 0, &payload_of(&[repeated(0, 1, 1, None)], 0, 1 << 10));
    let tokens = vec![5; 500_000];
    step_counter::taken();
    index.speculate(&worker(), &tokens, &Scope::default(), 0.0, 1.0);
    index.speculated(1.0);
    let Steps { taken, longest, .. } = step_counter::taken();
    assert!(
        taken <= 4 << 16 && longest <= STEPS_PER_HOLD,
        "{taken} steps, others wait for {longest}"
    );
}

// --- forms that only the tolerant decoder reads

/// A store with one block and with these additional fields.
fn stored_with(fields: &[Vec<u8>]) -> Vec<u8> {
    let usual =
        b"\xA4type\xABBlockStored\xACblock_hashes\x91\x01\xB1parent_block_hash\xC0\xA9token_ids\x91\x01\xAAblock_size\x01";
    let count = (5 + fields.len()) as u16;
    [&[0xDE][..], &count.to_be_bytes(), usual, &fields.concat()].concat()
}

fn named(name: &str, value: &[u8]) -> Vec<u8> {
    [&[0xA0 | name.len() as u8][..], name.as_bytes(), value].concat()
}

/// An array that repeats one element, of about a megabyte.
fn large_array(element: &[u8]) -> Vec<u8> {
    let count = (1 << 20) / element.len() - 200;
    [&[0xDD][..], &(count as u32).to_be_bytes(), &element.repeat(count)].concat()
}

#[test]
fn rare_forms() {
    let many_fields: Vec<Vec<u8>> = (100..350).map(|at| named(&at.to_string(), &[1])).collect();
    let blocks = large_array(&[1, 1]);
    let marked = [
        named("type", b"\xABBlockStored"),
        named("block_hashes", &[&[0xDD, 0, 7, 0, 0][..], &[1; 0x7_0000]].concat()),
        named("token_ids", &[&[0xDD, 0, 7, 0, 0][..], &[1; 0x7_0000]].concat()),
        named("parent_block_hash", &[0xC0]),
        named("block_size", &[1]),
        named("mm_keys", b"\xA1x"),
    ];
    let bodies = [
        large_array(&[0x91, 0xA0]),
        large_array(&[0xC4, 1, 0xA0]),
        large_array(&stored_with(&[])[3..]),
        large_array(&stored_with(&many_fields)),
        [
            &[0x91][..],
            &stored_with(&[named("extra_keys", &large_array(&[0x90])), named("new", &[1])]),
        ]
        .concat(),
        [
            &[0x91][..],
            &stored_with(&[
                named("extra_keys", &[&[0x91][..], &large_array(&[0xA0])].concat()),
                named("new", &[1]),
            ]),
        ]
        .concat(),
        [&[0x91][..], &stored_with(&[named("new", &large_array(&[0xA0]))])].concat(),
        [
            &[0x91][..],
            &stored_with(&[
                named("lookahead_token_ids", &large_array(&[0x91, 1])),
                named("session_id", &[1]),
            ]),
        ]
        .concat(),
        [&[0x91][..], &stored_with(&[named("block_keys", &blocks), named("new", &[1])])].concat(),
        [&[0x91, 0x86][..], &marked.concat()].concat(),
        large_array(&[&[0x91; 500][..], &[1]].concat()),
    ];
    for body in bodies {
        apply(&index(), "bad", 0, &[&[0x92, 1][..], &body].concat());
    }
}
