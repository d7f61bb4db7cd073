//! Compares the compactor with a simple model, which has one block per hash and the whole history.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::event::{ExportedEvent, Location, Namespace, Store};
use super::state::MAX_WAITING;
use super::*;
use kvevents_index::limits::BLOCKS_PER_HASH;
use kvevents_index::prefix_index::PrefixIndex;
use kvevents_index::wire::scan::{Limits, scan};

static GPU: Location<'static> = at(b"GPU");
static CPU: Location<'static> = at(b"CPU");

const fn at(medium: &[u8]) -> Location<'_> {
    Location {
        medium: Some(Cow::Borrowed(medium)),
        locality: None,
        ownership: None,
        group: Some(0),
    }
}

fn store<'a>(hashes: &'a [u64], parent: Option<u64>, tokens: &'a [u32], location: &Location<'a>) -> Store<'a> {
    Store {
        hashes: hashes.into(),
        parent,
        tokens: tokens.into(),
        block_size: if tokens.is_empty() { 0 } else { 2 },
        location: location.clone(),
        keyable: Some(hashes.len()),
        ..Store::default()
    }
}

fn exported(state: &State) -> Option<Vec<ExportedEvent>> {
    let mut events = Vec::new();
    export::export(state, |event| events.push(event))?;
    Some(events)
}

/// Whether the block with this hash is announced by its key.
fn is_keyed(hash: u64) -> bool {
    hash.is_multiple_of(5)
}

/// Stores a block of a tree. In this tree, the parent of the block with the hash n is the block with the hash n / 2. Each block has its own
/// tokens, or a key.
fn put(state: &mut State, hash: u64, location: &Location<'_>) {
    if is_keyed(hash) {
        let (hashes, keys) = ([hash], [1000 + hash]);
        let keyed = Store {
            keys: Some(Cow::Borrowed(&keys)),
            block_size: 2,
            ..store(&hashes, Some(hash / 2), &[], location)
        };
        return state.store(&keyed).expect("within limits");
    }
    let parent = (hash > 1).then_some(hash / 2);
    let tokens = [hash as u32, 7];
    state
        .store(&store(&[hash], parent, &tokens, location))
        .expect("within limits");
}

fn take(state: &mut State, hash: u64, location: &Location<'_>) {
    state.remove(&[hash], location).expect("within limits");
}

/// The number of copies for each hash and medium, and the pending blocks in the order of their stores.
#[derive(Clone, Debug, Default, PartialEq)]
struct Model {
    live: BTreeMap<(u64, bool), u32>,
    waiting: Vec<(u64, bool)>,
}

impl Model {
    fn knows(&self, hash: u64) -> bool {
        self.live.contains_key(&(hash, true)) || self.live.contains_key(&(hash, false))
    }

    fn put(&mut self, hash: u64, gpu: bool) {
        // On a tier below the device, a block with a known hash needs no parent.
        if hash > 1 && !is_keyed(hash) && !self.knows(hash / 2) && (gpu || !self.knows(hash)) {
            return self.waiting.push((hash, gpu));
        }
        let fresh = !self.knows(hash);
        *self.live.entry((hash, gpu)).or_default() += 1;
        if fresh {
            let (now, later) = self.waiting.iter().partition(|(other, _)| other / 2 == hash);
            self.waiting = later;
            let now: Vec<(u64, bool)> = now;
            now.into_iter().for_each(|(other, gpu)| self.put(other, gpu));
        }
    }

    fn take(&mut self, hash: u64, gpu: bool) {
        if let Some(count) = self.live.get_mut(&(hash, gpu)) {
            *count -= 1;
            if *count == 0 {
                self.live.remove(&(hash, gpu));
            }
        } else if let Some(at) = self.waiting.iter().position(|item| *item == (hash, gpu)) {
            self.waiting.remove(at);
        }
    }
}

/// Whether a store only announces the rule of its group, since no block with tokens remains that announces the rule.
fn only_announces_rule(store: &Store) -> bool {
    store.keys.as_deref().map_or(*store.tokens == [0, 0], |keys| keys == [0])
}

/// The state of a consumer that has started without blocks and applied these events.
fn apply_all(events: &[ExportedEvent]) -> Model {
    let mut model = Model::default();
    let mut left = events;
    while let [event, rest @ ..] = left {
        left = rest;
        match (event, rest) {
            (ExportedEvent::Stored(store), [ExportedEvent::Removed(hashes, location), ..]) if only_announces_rule(store) => {
                assert_eq!((&*store.hashes, &store.location), (&hashes[..], location));
                assert!(!model.knows(hashes[0]) && model.waiting.iter().all(|(hash, _)| hash / 2 != hashes[0]));
                left = &rest[1..];
                continue;
            }
            _ => {}
        }
        match event {
            ExportedEvent::Stored(store) => {
                let gpu = store.location == GPU;
                for (at, &hash) in store.hashes.iter().enumerate() {
                    if let Some(keys) = &store.keys {
                        assert_eq!((keys[at], store.parent, store.tokens.len()), (1000 + hash, None, 0));
                        model.put(hash, gpu);
                        continue;
                    }
                    assert_eq!(store.tokens[2 * at..2 * at + 2], [hash as u32, 7]);
                    let parent = if at == 0 { store.parent } else { Some(store.hashes[at - 1]) };
                    assert_eq!(parent, (hash > 1).then_some(hash / 2));
                    model.put(hash, gpu);
                }
            }
            ExportedEvent::Removed(hashes, location) => hashes.iter().for_each(|&hash| model.take(hash, *location == GPU)),
            ExportedEvent::Cleared => {}
        }
    }
    model
}

fn highest_limits() -> Schema {
    let none = usize::MAX;
    let limits = Limits {
        max_payload_bytes: none,
        max_events: none,
        max_hashes: none,
        max_free_form_bytes: none,
        ..Limits::default()
    };
    Schema::new(limits).expect("the limits are high enough")
}

/// The exported events of a stream without ranks.
fn events_of(compactor: &Compactor) -> Option<Vec<ExportedEvent>> {
    exported(&compactor.state)
}

/// Encodes events as payloads of at most `limit` bytes, and applies the payloads.
fn apply_encoded(events: &[ExportedEvent], limit: usize) -> Compactor {
    let (mut compactor, schema, mut writer) = (Compactor::default(), highest_limits(), PayloadWriter::new(limit, 1.5, None));
    events.iter().for_each(|event| writer.add(event));
    for payload in writer.finish() {
        compactor.restore(&payload, &schema);
        assert_eq!(compactor.invalid_reason(), None, "{payload:02x?}");
        scan(&payload, &schema, &mut compactor.scratch).expect("the payload is valid");
        let events = &compactor.scratch.events;
        let is_least =
            events.iter().all(|event| event.kind == Kind::Cleared) || (events.len() == 1 && events[0].hashes.length <= 1);
        assert!(payload.len() <= limit || is_least);
        assert_eq!(compactor.scratch.ts, 1.5);
    }
    compactor
}

proptest! {
    /// After any stores and removals of blocks of a tree, some of them by keys, the export leads a consumer to the state of the model. No
    /// data of removed blocks remain.
    #[test]
    fn an_export_rebuilds_the_live_blocks(steps in prop::collection::vec((1..40_u64, any::<bool>(), 0..5_u8), 1..300)) {
        let (mut state, mut model) = (State::default(), Model::default());
        for (hash, gpu, what) in steps {
            let location = if gpu { &GPU } else { &CPU };
            if what < 3 {
                put(&mut state, hash, location);
                model.put(hash, gpu);
            } else {
                take(&mut state, hash, location);
                model.take(hash, gpu);
            }
        }
        let is_known = |&(hash, gpu): &(u64, bool)| !gpu && model.knows(hash);
        let Some(events) = exported(&state) else {
            prop_assert!(model.waiting.iter().any(is_known), "only blocks that would not wait again cannot be exported");
            return Ok(());
        };
        for limit in [1, 90, 200, 1 << 20] {
            let again = apply_encoded(&events, limit);
            prop_assert_eq!(again.live(), state.blocks.live());
            prop_assert_eq!(events_of(&again), Some(events.clone()));
        }
        let mut found = apply_all(&events);
        let mut expected = model.clone();
        found.waiting.sort_unstable();
        expected.waiting.sort_unstable();
        prop_assert_eq!(found, expected);
        let live: std::collections::BTreeSet<u64> = model.live.keys().map(|(hash, _)| *hash).collect();
        prop_assert_eq!(state.blocks.live(), live.len());
        for ((hash, gpu), count) in &model.live {
            (0..*count).for_each(|_| take(&mut state, *hash, if *gpu { &GPU } else { &CPU }));
        }
        for (hash, gpu) in &model.waiting {
            take(&mut state, *hash, if *gpu { &GPU } else { &CPU });
        }
        prop_assert_eq!((state.blocks.live(), state.blocks.dead(), state.waiting.len()), (0, 0, 0));
        prop_assert!(state.bytes() < 8_192 && state.blocks.bound() == 0, "{} bytes", state.bytes());
    }
}

/// A chain is exported as one event. The removed blocks of the chain are stored as parents, and then removed. A walk to the root for each
/// block would take minutes.
#[test]
fn a_long_chain_of_dead_ancestors_that_share_hashes_is_exported() {
    const BLOCKS: u64 = 60_000;
    let (mut state, tokens) = (State::default(), (0..2 * BLOCKS as u32 + 2).collect::<Vec<_>>());
    let hashes: Vec<u64> = (0..BLOCKS).map(|at| 1 + at % (BLOCKS / 2)).chain([1 << 40]).collect();
    state.store(&store(&hashes, None, &tokens, &GPU)).expect("within limits");
    for some in hashes[..BLOCKS as usize].chunks(2_000) {
        state.remove(some, &GPU).expect("within limits");
    }
    assert!(exported(&state).is_some());
}

#[test]
fn a_chain_is_exported_as_one_run_with_its_dead_ancestors() {
    let mut state = State::default();
    for hash in [1, 2, 4, 8] {
        put(&mut state, hash, &GPU);
    }
    take(&mut state, 1, &GPU);
    take(&mut state, 2, &GPU);
    let events = exported(&state).expect("hashes are distinct");
    let stored: Vec<_> = (events.iter())
        .filter_map(|event| match event {
            ExportedEvent::Stored(store) => Some((store.hashes.to_vec(), store.parent)),
            ExportedEvent::Removed(..) | ExportedEvent::Cleared => None,
        })
        .collect();
    assert_eq!(stored, [(vec![1, 2], None), (vec![4, 8], Some(2))]);
    assert_eq!(events.last(), Some(&ExportedEvent::Removed(vec![2, 1], GPU.clone())));
}

/// Blocks with equal hashes and different parents are exported in order, since children belong to the newest block, and a removal takes the
/// oldest.
#[test]
fn twins_are_exported_with_their_children_in_the_order_of_their_stores() {
    let mut state = State::default();
    let mut put = |hash, parent, token| {
        state
            .store(&store(&[hash], parent, &[token, 7], &GPU))
            .expect("within limits");
    };
    put(1, None, 1);
    put(2, None, 2);
    put(9, Some(1), 5);
    put(10, Some(9), 6);
    put(9, Some(2), 5);
    put(11, Some(9), 6);
    let events = exported(&state).expect("their order can be exported");
    let order: Vec<u64> = (events.iter())
        .flat_map(|event| match event {
            ExportedEvent::Stored(store) => store.hashes.to_vec(),
            ExportedEvent::Removed(hashes, _) => hashes.clone(),
            ExportedEvent::Cleared => Vec::new(),
        })
        .collect();
    let at = |hash| order.iter().position(|&other| other == hash).expect("it is exported");
    let second = order.iter().rposition(|&other| other == 9).expect("it is exported");
    assert!(at(9) < at(10) && at(10) < second && second < at(11), "{order:?}");
}

/// After a limit was exceeded, nothing is stored or exported until the next clear of everything.
#[test]
fn too_many_orphans_are_lost_until_a_clear() {
    let mut state = State::default();
    let hashes: Vec<u64> = (10..11 + MAX_WAITING as u64).collect();
    let tokens = vec![7; 2 * hashes.len()];
    assert_eq!(state.store(&store(&hashes, Some(5), &tokens, &GPU)), Err("orphans"));
    state.invalidate("orphans");
    assert!(exported(&state).is_none() && state.bytes() < 8_192);
    put(&mut state, 1, &GPU);
    assert_eq!((state.blocks.live(), state.invalid), (0, Some("orphans")));
    state.clear(None, None).expect("within limits");
    put(&mut state, 1, &GPU);
    // The first two events show that tiers below the device can have unknown blocks.
    assert_eq!(exported(&state).map(|events| events.len()), Some(3));
}

/// If a payload cannot be read completely, the history is invalid until the next clear of everything.
#[test]
fn an_unreadable_payload_invalidates_the_history() {
    let schema = Schema::new(Limits::default()).expect("the limits are high enough");
    for payload in [&b""[..], b"\x92\x01", b"\x92\x01\x91\x91\xA1x", b"\xC1"] {
        let mut compactor = Compactor::default();
        compactor.apply(b"\x92\x01\x90", &schema);
        assert_eq!((compactor.invalid_reason(), events_of(&compactor)), (None, Some(Vec::new())));
        compactor.apply(payload, &schema);
        assert_eq!(compactor.invalid_reason(), Some("payloads"));
        compactor.apply(b"\x92\x01\x91\x91\xB0AllBlocksCleared", &schema);
        assert_eq!(compactor.invalid_reason(), None);
    }
}

/// The scanner refuses a payload whose timestamp is a text, but its events are not lost.
#[test]
fn a_payload_that_is_decoded_is_applied() {
    let schema = Schema::new(Limits::default()).expect("the limits are high enough");
    let mut compactor = Compactor::default();
    let stored = b"\x92\xA1x\x91\x95\xABBlockStored\x91\x07\xC0\x92\x01\x02\x02";
    assert!(scan(stored, &schema, &mut Scratch::default()).is_none());
    compactor.apply(stored, &schema);
    assert_eq!((compactor.live(), compactor.invalid_reason()), (1, None));
}

/// Of the blocks that share a hash, a history stores exactly those that an index with default limits stores.
#[test]
fn a_history_has_as_many_blocks_of_one_hash_as_an_index() {
    let count = BLOCKS_PER_HASH as u32 + 10;
    let mut writer = PayloadWriter::new(usize::MAX, 1.5, None);
    for token in 0..count {
        let alone = Store {
            hashes: Cow::Owned(vec![7]),
            tokens: Cow::Owned(vec![token, token]),
            ..store(&[], None, &[7], &GPU)
        };
        writer.add(&ExportedEvent::Stored(alone));
    }
    let (payload, schema) = (&writer.finish()[1], highest_limits());
    let (mut compactor, direct, late) = (Compactor::default(), index(), index());
    compactor.apply(payload, &schema);
    assert_eq!(compactor.live(), BLOCKS_PER_HASH);
    direct.batch("a", 0, 0, 0, payload);
    let payloads = compactor.payloads(usize::MAX, 1.5).expect("they have an order of events");
    late.batch("a", 0, 0, 0, &payloads[1]);
    let digest = |index: &PrefixIndex| index.stream("a", 0).map(|stream| stream.lock().tally.digest);
    assert_eq!(digest(&direct), digest(&late));
}

fn index() -> PrefixIndex {
    PrefixIndex::new(highest_limits(), kvevents_index::limits::Limits::default())
}

/// Each removal searches for the oldest block that has its hash and location. In this test, that block is always the last of a thousand
/// blocks.
#[test]
fn removals_that_examine_too_many_blocks_invalidate_the_history() {
    let mut state = State::default();
    for token in 0..1_000 {
        let location = if token < 999 { &GPU } else { &CPU };
        state
            .store(&store(&[7], None, &[token, token], location))
            .expect("within limits");
    }
    let hashes = vec![7; 1_000];
    state.store(&store(&hashes, None, &[], &CPU)).expect("within limits");
    assert_eq!(state.remove(&hashes, &CPU), Err("blocks that share a hash"));
    state.blocks.collisions.grant(1 << 20);
    assert_eq!(state.remove(&hashes[..100], &CPU), Ok(()));
}

/// A clear of a tier with few blocks examines all blocks. So a stream with many such clears loses its history.
#[test]
fn clears_that_examine_too_many_blocks_invalidate_the_history() {
    let mut state = State::default();
    (1..4_000)
        .filter(|&hash| !is_keyed(hash))
        .for_each(|hash| put(&mut state, hash, &GPU));
    let clears = (0..1_000).map(|_| {
        put(&mut state, 1, &CPU);
        state.clear(Some(b"CPU"), None)
    });
    let done = clears.take_while(Result::is_ok).count();
    assert!((300..400).contains(&done), "{done} clears");
    assert_eq!(state.clear(Some(b"CPU"), None), Err("clears"));
    assert_eq!(state.clear(Some(b"DISK"), None), Ok(()));
    assert_eq!(state.clear(None, None), Ok(()));
    put(&mut state, 1, &CPU);
    assert_eq!(state.clear(Some(b"CPU"), None), Ok(()));
}

/// Every field that a store can have, numbers of every width, and a chain that is split into several payloads.
#[test]
fn encoded_events_are_read_again() {
    let widths = [0, 1 << 7, 1 << 8, 1 << 16, u64::from(u32::MAX), 1 << 32, u64::MAX];
    let hashes: Vec<u64> = widths.iter().flat_map(|&width| [width, width ^ 5]).collect();
    let tokens: Vec<u32> = (hashes.iter()).flat_map(|&hash| [hash as u32, 7]).collect();
    let pairs: Vec<u32> = (hashes.iter()).flat_map(|&hash| [hash as u32, 7, 7, 8]).collect();
    let extra: &[u8] = &[&[0x9E, 0xC0, 0x92, 0xA4][..], b"salt", &[0x92, 0xA1, b'i', 3], &[0xC0; 12]].concat();
    let long = [b'n'; 40];
    let location = Location {
        locality: Some(Cow::Borrowed(b"REMOTE")),
        ownership: Some(Cow::Borrowed(&long)),
        group: Some(-3),
        ..at("STÖRAGE".as_bytes())
    };
    let rich = Store {
        namespace: Namespace {
            lora_id: Some(i64::MIN),
            lora_name: Some(Cow::Borrowed(b"lora")),
            cache_salt: Some(Cow::Borrowed(b"tenant")),
            extra_keys: None,
        },
        extra_keys: Some(Cow::Borrowed(extra)),
        kind: Some(Cow::Borrowed(b"mla_attention")),
        window: Some(-1),
        ..store(&hashes, None, &tokens, &location)
    };
    let eagle = Store {
        pairs: true,
        ..store(&hashes, Some(3), &pairs, &GPU)
    };
    for view in [
        store(&hashes, None, &tokens, &CPU),
        rich,
        eagle,
        store(&hashes, Some(77), &tokens, &GPU),
    ] {
        let mut state = State::default();
        state.store(&view).expect("within limits");
        state.remove(&hashes[..5], &view.location).expect("within limits");
        let events = exported(&state).expect("hashes are distinct");
        for limit in (1..400).step_by(7).chain([1 << 20]) {
            assert_eq!(events_of(&apply_encoded(&events, limit)).as_ref(), Some(&events));
        }
    }
}

/// Blocks with keys are stored one by one but exported together. A child with tokens continues from the key of a block with a key, and is
/// exported after it.
#[test]
fn blocks_with_keys_are_exported_together() {
    let mut state = State::default();
    let keyed = |hashes, keys| Store {
        keys: Some(Cow::Borrowed(keys)),
        block_size: 1 << 31,
        ..store(hashes, Some(77), &[], &GPU)
    };
    state.store(&keyed(&[1, 2], &[11, 12])).expect("within limits");
    state.store(&store(&[3], Some(1), &[5, 6], &GPU)).expect("within limits");
    state.store(&keyed(&[4], &[14])).expect("within limits");
    state.remove(&[1], &GPU).expect("within limits");
    for malformed in [
        keyed(&[8], &[1, 2]),
        Store {
            tokens: Cow::Borrowed(&[1]),
            ..keyed(&[8], &[1])
        },
    ] {
        let malformed = Store {
            keyable: None,
            ..malformed
        };
        state.store(&malformed).expect("it is set aside");
    }
    let events = exported(&state).expect("hashes are distinct");
    let stored: Vec<_> = (events.iter())
        .filter_map(|event| match event {
            ExportedEvent::Stored(store) => Some((
                store.hashes.to_vec(),
                store.parent,
                store.keys.as_deref().map(<[u64]>::to_vec),
            )),
            ExportedEvent::Removed(..) | ExportedEvent::Cleared => None,
        })
        .collect();
    let expected = [
        (vec![1], None, Some(vec![11])),
        (vec![3], Some(1), None),
        (vec![2, 4], None, Some(vec![12, 14])),
        (vec![5], None, None), // consumers cannot use it either
    ];
    assert_eq!(stored, expected);
    let local = kvevents_index::keys::local(&[5, 6], kvevents_index::keys::seed(0, 0));
    let child = state.blocks.find(3).expect("it is live");
    assert_eq!({ state.blocks.get(child).key }, kvevents_index::keys::chained(11, local));
    state.remove(&[2, 3, 4], &GPU).expect("within limits");
    assert_eq!((state.blocks.bound(), state.blocks.widths()), (0, 0));
    let taught = exported(&state).expect("nothing is live");
    assert!(
        matches!(&taught[..], [_, ExportedEvent::Stored(one), ExportedEvent::Removed(..)] if one.keys.as_deref() == Some(&[0][..]) && one.tokens.is_empty())
    );
}

/// Known blocks are exported even if other blocks were not received. The history is complete again after a clear of everything.
#[test]
fn a_history_is_partial_until_a_clear_of_everything() {
    let mut compactor = Compactor::default();
    put(&mut compactor.state, 1, &GPU);
    assert!(!compactor.is_partial());
    compactor.mark_partial();
    put(&mut compactor.state, 2, &GPU);
    assert_eq!((compactor.is_partial(), compactor.live()), (true, 2));
    assert_eq!(events_of(&compactor).map(|events| events.len()), Some(1));
    compactor.state.clear(Some(b"CPU"), None).expect("within limits");
    compactor.invalidate("orphans");
    assert_eq!((compactor.is_partial(), compactor.invalid_reason()), (true, Some("orphans")));
    compactor.state.clear(None, None).expect("within limits");
    assert_eq!((compactor.is_partial(), compactor.invalid_reason()), (false, None));
}

/// A clear without a tier examines the blocks of lower tiers, which stay. If only few stores come between such clears, these blocks are
/// soon dropped instead. If no store comes between them, only the first one examines the blocks.
#[test]
fn clears_without_a_tier_take_a_bounded_time() {
    let mut state = State::default();
    let hashes: Vec<u64> = (1..=1 << 14).collect();
    state
        .store(&store(&hashes, None, &vec![7; 2 * hashes.len()], &CPU))
        .expect("within limits");
    state.clear(None, None).expect("within limits");
    (0..200).for_each(|_| state.clear(None, None).expect("within limits"));
    assert_eq!((state.blocks.live(), state.evidence.unknown_levels), (hashes.len(), 0));
    let clears = (0..200).take_while(|_| {
        state.store(&store(&hashes[..1], None, &[7; 2], &CPU)).expect("within limits");
        state.clear(None, None).expect("within limits");
        state.blocks.live() > 0
    });
    assert!(clears.count() < 100);
    assert_eq!(state.evidence.unknown_levels, 0b10);
}

/// An action on a cache, encoded as small numbers.
type Step = (u8, u8, u8, u8);

/// Applies a step. Stores can be long. They can repeat hashes at other locations, with other tokens, inside of other stores, and after
/// removals.
fn step(state: &mut State, (what, hash, count, variant): Step) {
    let first = u64::from(hash) * 8;
    let location = if variant.is_multiple_of(11) { &CPU } else { &GPU };
    let count = u64::from(count) % if variant.is_multiple_of(3) { 150 } else { 3 } + 1;
    let hashes: Vec<u64> = (first..first + count).collect();
    let outcome = match what % 16 {
        0..=6 => {
            let parent = match variant % 7 {
                0 => None,
                1 => Some(first / 2),
                _ => first.checked_sub(1),
            };
            let salt = if variant.is_multiple_of(13) { 9 } else { 7 };
            let tokens: Vec<u32> = hashes.iter().flat_map(|&hash| [hash as u32, salt]).collect();
            state.store(&Store {
                namespace: Namespace {
                    lora_id: (variant % 17 == 0).then_some(1),
                    ..Namespace::default()
                },
                ..store(&hashes, parent, &tokens, location)
            })
        }
        7 => state.store(&store(&hashes[..1], None, &[], location)),
        8 => {
            let keys: Vec<u64> = hashes.iter().map(|hash| hash + 1000).collect();
            state.store(&Store {
                keys: Some(Cow::Borrowed(&keys[..1])),
                block_size: 2,
                ..store(&hashes[..1], None, &[], location)
            })
        }
        9 if variant.is_multiple_of(16) && hash % 3 == 0 => state.clear(None, None),
        9 if variant.is_multiple_of(32) => state.clear(Some(if hash % 2 == 0 { b"CPU" } else { b"GPU" }), None),
        9..=11 => state.remove(&hashes, location),
        12 | 13 => {
            let last: Vec<u64> = hashes.iter().rev().copied().collect();
            state.remove(&last, location)
        }
        _ => {
            let some: Vec<u64> = hashes
                .iter()
                .filter(|&hash| hash % 5 != u64::from(variant % 5))
                .copied()
                .collect();
            state.remove(&some, location)
        }
    };
    outcome.expect("within limits");
}

/// Hashes and placements of blocks with copies that might be gone.
fn doubtful_hashes(state: &State) -> BTreeSet<(u64, u64, u64)> {
    let blocks = &state.blocks;
    let doubtful = blocks.numbers().flat_map(|number| {
        let copies = super::announcements::bits(blocks.attributes(number).copies);
        copies
            .filter(move |&announcement| blocks.is_uncertain(number, announcement))
            .map(move |announcement| (number, announcement))
    });
    doubtful
        .map(|(number, announcement)| {
            let block = blocks.get(number);
            (
                block.hash,
                block.key,
                state.announcements.get(announcement).placement.digest(),
            )
        })
        .collect()
}

proptest! {
    /// For any input: if the exported events are applied to an empty state, the result has the same copies of the same blocks, and the same
    /// twins in the same order. No data of cleared blocks remain.
    #[test]
    fn an_export_rebuilds_the_same_blocks(steps in prop::collection::vec(any::<Step>(), 1..250), every in 1..40_usize) {
        let mut state = State::default();
        for (at, &taken) in steps.iter().enumerate() {
            step(&mut state, taken);
            let blocks = &state.blocks;
            prop_assert_eq!(blocks.numbers().count(), blocks.live() + blocks.dead());
            prop_assert!(blocks.collisions.is_counted());
            if at % every != 0 {
                continue;
            }
            let Some(events) = exported(&state) else { continue };
            let mut rebuilt = State::default();
            for event in &events {
                let outcome = match event {
                    ExportedEvent::Stored(store) => rebuilt.store(store),
                    ExportedEvent::Removed(hashes, location) => rebuilt.remove(hashes, location),
                    ExportedEvent::Cleared => rebuilt.clear(None, None),
                };
                prop_assert_eq!(outcome, Ok(()));
            }
            let counts = |state: &State| (state.blocks.live(), state.blocks.dead(), state.waiting.len());
            prop_assert_eq!(counts(&rebuilt), counts(&state));
            prop_assert_eq!(export::copies_of(&rebuilt), export::copies_of(&state));
            prop_assert!(doubtful_hashes(&rebuilt).is_superset(&doubtful_hashes(&state)));
            prop_assert_eq!(export::twin_keys(&rebuilt.blocks), export::twin_keys(&state.blocks));
        }
        state.clear(Some(b"GPU"), None).expect("within limits");
        state.clear(Some(b"CPU"), None).expect("within limits");
        prop_assert_eq!((state.blocks.live(), state.blocks.dead(), state.waiting.len(), state.blocks.bound()), (0, 0, 0, 0));
        prop_assert!(state.bytes() < 8_192, "{} bytes", state.bytes());
    }
}

/// Number of bytes of a block's tokens and hash in these tests, plus the maximum number of further bytes for a block.
const BLOCK_BYTES: usize = 16 + 150;

/// A state with `chains` chains of 512 blocks, of which only the positions that `stays` accepts remain.
fn thinned_state(chains: u64, stays: impl Fn(u64) -> bool) -> State {
    let mut state = State::default();
    for first in (0..chains).map(|chain| chain << 9) {
        let hashes: Vec<u64> = (first..first + 512).collect();
        let tokens: Vec<u32> = hashes.iter().flat_map(|&hash| [hash as u32, 7]).collect();
        state.store(&store(&hashes, None, &tokens, &GPU)).expect("within limits");
        let gone: Vec<u64> = hashes.into_iter().filter(|&hash| !stays(hash - first)).collect();
        state.remove(&gone, &GPU).expect("within limits");
    }
    state
}

/// One block of each store remains, which needs all its ancestors. Only needed blocks take memory. After the last removal, no block takes
/// memory.
#[test]
fn only_needed_blocks_take_memory() {
    for (last, needed) in [(0, 1), (15, 16), (63, 64), (64, 65), (200, 201)] {
        let mut state = thinned_state(300, |at| at == last);
        let blocks = &state.blocks;
        assert_eq!((blocks.live(), blocks.live() + blocks.dead()), (300, 300 * needed));
        let most = 300 * needed * BLOCK_BYTES + 65_536;
        assert!(state.bytes() < most, "{needed}: {} bytes", state.bytes());
        let rest: Vec<u64> = (0..300).map(|chain| chain * 512 + last).collect();
        state.remove(&rest, &GPU).expect("within limits");
        assert!(state.blocks.dead() == 0 && state.bytes() < 8_192, "{} bytes", state.bytes());
    }
}

/// If chains with a common beginning grow in turn, one block at a time, they take no more memory than if each were stored at once.
#[test]
fn blocks_that_are_stored_one_by_one_take_no_more_memory() {
    let mut state = State::default();
    for length in 0..100 {
        for chain in 1..50_u64 {
            let hash = chain * 1000 + length;
            let parent = if length > 0 { hash - 1 } else { 1000 };
            let tokens = [hash as u32, 7];
            state
                .store(&store(&[hash], (hash > 1000).then_some(parent), &tokens, &GPU))
                .expect("within limits");
        }
    }
    assert_eq!(state.blocks.live(), 4900);
    assert!(state.bytes() < 4900 * 70 + 16_384, "{} bytes", state.bytes());
}

/// Consecutive removals of one hash each that differ only in the hash become one event. All other events stay separate.
#[test]
fn consecutive_removals_are_joined() {
    let removal = |hash: u64, medium: u8| {
        [
            &[0x93, 0xAC][..],
            b"BlockRemoved",
            &[0x91, 0xCF],
            &hash.to_be_bytes(),
            &[0xA1, medium],
        ]
        .concat()
    };
    let small = [&[0x93, 0xAC][..], b"BlockRemoved", &[0x91, 7, 0xA1, b'a']].concat();
    let clear = [&[0x91, 0xB0][..], b"AllBlocksCleared"].concat();
    let (one, other) = (u64::MAX, 1 << 40);
    let events = [
        removal(one, b'a'),
        removal(other, b'a'),
        removal(one, b'a'),
        removal(one, b'b'),
        clear,
        removal(one, b'b'),
        removal(other, b'b'),
        small.clone(),
        small,
        removal(other, b'a'),
    ];
    let payload = [&[0x92, 0x01, 0x9A][..], &events.concat()].concat();
    let found = |schema: &Schema, payload: &[u8]| {
        let mut scratch = Scratch::default();
        scan(payload, schema, &mut scratch)?;
        Some(
            scratch
                .events
                .iter()
                .map(|event| event.hashes.slice(&scratch.hashes).to_vec())
                .collect::<Vec<_>>(),
        )
    };
    let (plain, joining) = (highest_limits(), highest_limits().joining());
    let all = found(&plain, &payload).expect("the payload is valid");
    let joined = found(&joining, &payload).expect("the payload is valid");
    assert_eq!(joined.concat(), all.concat());
    assert_eq!(joined.iter().map(Vec::len).collect::<Vec<_>>(), [3, 1, 0, 2, 1, 1, 1]);
    for cut in 0..payload.len() {
        assert_eq!(found(&joining, &payload[..cut]), None);
    }
    for at in 3..payload.len() {
        let mut wrong = payload.clone();
        wrong[at] ^= 0x41;
        assert_eq!(
            found(&joining, &wrong).map(|events| events.concat()),
            found(&plain, &wrong).map(|events| events.concat())
        );
    }
}

/// If no block of a group remains, the export stores and removes a block only to announce the rule of the group. It does this whether the
/// last block of the group was stored with tokens or with a key.
#[test]
fn rules_outlive_their_blocks() {
    for hash in [37, 5] {
        let (mut state, model) = (State::default(), Model::default());
        put(&mut state, hash, &GPU);
        take(&mut state, hash, &GPU);
        let events = exported(&state).expect("hashes are distinct");
        assert!(
            matches!(&events[..], [ExportedEvent::Stored(store), ExportedEvent::Removed(..)] if only_announces_rule(store)),
            "{events:?}"
        );
        assert_eq!(apply_all(&events), model);
    }
}
