//! Models of a lookup beside a writer, in every order of threads and memory accesses; `make model` runs them with loom.
//!
//! Each model has a writer and a lookup. The writer changes a `SharedState` from one state to the next, and publishes each state. The
//! lookup reads one time. A sound reading must find one of these states. The states are chosen so that a mixture of slots of two states
//! would give an answer that was never true.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::holders::contexts::Context;
use crate::holders::holder_sets::Move;
use crate::holders::placements::Placement;
use crate::keys::{self, Scheme};
use crate::limits::Limits;
use crate::lookup::matching::{PromptLength, Walk};
use crate::memory::hasher::Secret;
use crate::rules::replaced_loras::ReplacedLoras;
use crate::store::members::{Member, Worker};
use crate::store::records::CHUNK_SLOTS;
use crate::store::shared_state::{Block, SharedState};
use crate::sync::atomics::be_the_writer;
use crate::sync::yielding_lock::Publish;

const SCHEME: Scheme = Scheme { size: 1, eagle: false };

/// The slot of the first block that is added after `State::new`.
const FIRST_NEW_SLOT: u32 = 3;

/// A `SharedState` with a context and a placement for blocks of its streams.
struct State {
    shared: SharedState,
    context: u32,
    placement: u16,
}

impl State {
    /// Two streams without blocks.
    fn empty() -> Self {
        // The secret is fixed: loom runs a model many times, and each run must place entries in the same way.
        let mut shared = SharedState::with_secret(Limits::default(), Secret(3, 5));
        for number in 0..2_u32 {
            let worker = Arc::new(Worker {
                source: number.to_string(),
                rank: 0,
            });
            let member = Member {
                worker,
                model: None,
                lookup: None,
                schemes: Vec::new(),
                placements: Vec::new(),
                blocks: AtomicUsize::new(0),
                uncertain: BTreeSet::new(),
                loras: ReplacedLoras::default(),
            };
            shared.join(number, member);
            shared.use_scheme(number, SCHEME);
        }
        let placement = Placement {
            tier: "gpu".into(),
            locality: None,
            ownership: None,
            group: 0,
        };
        let placement = shared.view.change().placements.retain(placement).unwrap();
        let context = Context {
            scheme: SCHEME,
            lora: 0,
            salt: 0,
        };
        let context = shared.contexts.retain(context).unwrap();
        shared.publish();
        Self {
            shared,
            context,
            placement,
        }
    }

    /// Two streams with three blocks, so that all sets of holders that the models need exist. New sets would be published under the lock,
    /// and the memory order of this lock would hide the memory order of slots.
    fn new() -> Self {
        let mut state = Self::empty();
        for (local, holders) in [(100, &[0][..]), (101, &[1]), (102, &[0, 1])] {
            for &stream in holders {
                state.add_holder(stream, &[local], None);
            }
        }
        state
    }

    /// Adds a stream to the holders of the last block of a chain of local hashes. Returns the block's record.
    fn add_holder(&mut self, stream: u32, chain: &[u64], parent: Option<u32>) -> u32 {
        let mut rolled = chain.to_vec();
        keys::chain(None, &mut rolled);
        let (key, local) = (*rolled.last().unwrap(), *chain.last().unwrap());
        let block = Block {
            hash: key,
            key,
            local,
            context: self.context,
            keyed: false,
            mixed_key: self.shared.mixed(key),
            mixed_hash: self.shared.mixed(key),
        };
        let held = self
            .shared
            .add_holder(&block, parent, self.placement, stream, &mut Move::default());
        held.unwrap().number
    }

    /// Adds a stream to the holders of a block, or removes the stream if it is already a holder. Removes the block if it has no holder any
    /// more.
    fn toggle(&mut self, stream: u32, number: u32) {
        self.shared.toggle(number, self.placement, stream, &mut Move::default());
        self.shared.sweep(number);
    }
}

/// The result of a lookup: streams, each with the number of blocks that it holds.
type Found = Vec<(u32, u32)>;

/// Runs a writer beside a lookup of a prompt, in all orders. Returns the results of sound lookups, and the number of unsound lookups.
fn run_lookup_beside(
    prompt: &'static [u64],
    make: impl Fn() -> State + Send + Sync + 'static,
    write: impl Fn(&mut State) + Send + Sync + 'static,
) -> (BTreeSet<Found>, usize) {
    let all = Arc::new((Mutex::new(BTreeSet::new()), AtomicUsize::new(0)));
    let (seen, write) = (all.clone(), Arc::new(write));
    loom::model(move || {
        let mut state = make();
        let (view, context, write) = (state.shared.view.reader(), state.context, write.clone());
        let writer = loom::thread::spawn(move || {
            be_the_writer();
            write(&mut state);
            state
        });
        let mut walk = Walk::default();
        let view = view.read();
        walk.begin(1, false);
        walk.find(&view, prompt, Some(context), None);
        if walk.is_sound(&view) {
            let mut hits = Vec::new();
            let length = PromptLength {
                tokens: prompt.len(),
                longest: prompt.len(),
            };
            walk.hits(&view, SCHEME, length, &view.models[&None].streams, &mut hits);
            walk.search(&view.names, &mut hits, &mut Vec::new());
            let found = hits.iter().map(|hit| (hit.stream, hit.tokens[0])).collect();
            seen.0.lock().unwrap().insert(found);
        } else {
            seen.1.fetch_add(1, Ordering::Relaxed);
        }
        drop(view);
        drop(writer.join().unwrap());
    });
    let found = all.0.lock().unwrap().clone();
    (found, all.1.load(Ordering::Relaxed))
}

/// The slot of a block is reused for a block of another stream. No lookup sees the word of one block with the holders of the other block.
#[test]
fn a_slot_is_read_as_a_whole() {
    let make = || {
        let mut state = State::new();
        assert_eq!(state.add_holder(0, &[1], None), FIRST_NEW_SLOT);
        state.add_holder(1, &[1], None);
        assert_eq!(state.add_holder(0, &[1, 2], Some(FIRST_NEW_SLOT)), FIRST_NEW_SLOT + 1);
        state.shared.publish();
        state
    };
    let (found, unsound) = run_lookup_beside(&[1, 2], make, |state| {
        state.toggle(0, FIRST_NEW_SLOT + 1);
        assert_eq!(
            state.add_holder(1, &[1, 3], Some(FIRST_NEW_SLOT)),
            FIRST_NEW_SLOT + 1,
            "it takes the slot of the other"
        );
        state.shared.publish();
    });
    assert_eq!(found, BTreeSet::from([vec![(0, 2), (1, 1)], vec![(0, 1), (1, 1)]]));
    assert!(unsound > 0);
}

/// The two blocks of a prompt are in two chunks. A stream has one of the blocks, loses it, and then gets the other block. If `loses_first`,
/// the stream loses the first block.
fn lookup_of_two_chunks(loses_first: bool) -> BTreeSet<Found> {
    let make = move || {
        let mut state = State::new();
        assert_eq!(state.add_holder(0, &[1], None), FIRST_NEW_SLOT);
        // Fills the remaining slots of the chunk.
        while state.shared.records.take(Some(FIRST_NEW_SLOT), CHUNK_SLOTS).unwrap().first < CHUNK_SLOTS as u32 {}
        state.shared.records.give(CHUNK_SLOTS as u32, CHUNK_SLOTS as u32);
        assert_eq!(state.add_holder(0, &[1, 2], Some(FIRST_NEW_SLOT)), CHUNK_SLOTS as u32);
        state.toggle(1, if loses_first { FIRST_NEW_SLOT } else { CHUNK_SLOTS as u32 });
        state.shared.publish();
        state
    };
    let (found, unsound) = run_lookup_beside(&[1, 2], make, move |state| {
        let numbers = [FIRST_NEW_SLOT, CHUNK_SLOTS as u32];
        for number in if loses_first { numbers } else { [numbers[1], numbers[0]] } {
            state.toggle(1, number);
            state.shared.publish();
        }
    });
    assert!(unsound > 0);
    found
}

#[test]
fn chunks_are_read_at_one_moment() {
    let (never, first) = (vec![(0, 2)], vec![(0, 2), (1, 1)]);
    assert_eq!(lookup_of_two_chunks(true), BTreeSet::from([first.clone(), never.clone()]));
    assert_eq!(lookup_of_two_chunks(false), BTreeSet::from([never, first]));
}

/// A block gets a new set of holders: a lookup knows the set as soon as a slot has the set's ID.
#[test]
fn holders_are_known_before_slots_name_them() {
    let make = || {
        let mut state = State::empty();
        state.add_holder(0, &[1], None);
        state.shared.publish();
        state
    };
    let (found, unsound) = run_lookup_beside(&[1], make, |state| {
        state.add_holder(1, &[1], None);
        state.shared.publish();
    });
    assert_eq!(found, BTreeSet::from([vec![(0, 1)], vec![(0, 1), (1, 1)]]));
    assert!(unsound > 0);
}

/// A chunk releases its memory and gets new memory. A lookup sees only the state with the old memory or the state with the new memory.
#[test]
fn memory_that_is_given_back_is_not_read() {
    let make = || {
        let mut state = State::empty();
        state.add_holder(0, &[1], None);
        state.shared.publish();
        state
    };
    let (found, _) = run_lookup_beside(&[1], make, |state| {
        state.toggle(0, 0);
        state.shared.publish();
        assert_eq!(state.add_holder(1, &[1], None), 0);
        state.shared.publish();
    });
    assert_eq!(found, BTreeSet::from([vec![], vec![(0, 1)], vec![(1, 1)]]));
}
