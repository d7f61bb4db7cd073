//! Searches for events that make an export, or the application of the exported events, examine more blocks than a bound.

use std::borrow::Cow;

use proptest::prelude::*;

use super::event::{Location, Namespace, Store};
use super::examined_blocks;
use super::export::export;
use super::state::State;

/// Maximum number of steps of an export for each block and for each copy of a block.
const STEPS_PER_BLOCK: usize = 60;
/// Maximum number of additional steps that the application of exported events takes for blocks that share a hash.
const FREE_STEPS: usize = 3 << 20;

/// An event, and how many times it is repeated.
#[derive(Clone, Debug)]
struct RepeatedEvent {
    kind: u8,
    times: u64,
    /// The first hash, the number of hashes, and the difference between a hash and the next one.
    first: u64,
    count: u64,
    rise: u64,
    has_parent: bool,
    token: u32,
    medium: &'static str,
    lora: i64,
    group: i64,
}

fn events() -> impl Strategy<Value = Vec<RepeatedEvent>> {
    let times = prop_oneof![Just(1_u64), 1..20_u64];
    let count = prop_oneof![1..4_u64, 1..200_u64, Just(1_000)];
    let hash = prop_oneof![Just(1_u64), 0..100_u64];
    let place = (prop::sample::select(vec!["GPU", "CPU", "DISK"]), 0..4_i64, 0..3_i64);
    let event = (0..6_u8, times, hash, count, 0..3_u64, any::<bool>(), 0..50_u32, place);
    let event = event.prop_map(
        |(kind, times, first, count, rise, has_parent, token, (medium, lora, group))| RepeatedEvent {
            kind,
            times,
            first,
            count,
            rise,
            has_parent,
            token,
            medium,
            lora,
            group,
        },
    );
    prop::collection::vec(event, 1..8)
}

impl RepeatedEvent {
    fn apply(&self, state: &mut State) {
        let location = Location {
            medium: Some(Cow::Borrowed(self.medium.as_bytes())),
            group: (self.group > 0).then_some(self.group),
            ..Location::default()
        };
        for time in 0..self.times {
            let first = self.first + time * self.rise * self.count;
            let hashes: Vec<u64> = (0..self.count).map(|at| first + at * self.rise).collect();
            let tokens = (0..self.count as u32).map(|at| self.token + at * self.rise as u32).collect();
            state.blocks.collisions.grant(12 * hashes.len());
            let store = Store {
                keyable: Some(hashes.len()),
                parent: self.has_parent.then(|| first.wrapping_sub(1)),
                location: location.clone(),
                namespace: Namespace {
                    lora_id: (self.lora > 0).then_some(self.lora),
                    ..Namespace::default()
                },
                block_size: 1,
                ..Store::default()
            };
            let outcome = match self.kind {
                0..=2 => state.store(&Store {
                    hashes: hashes.into(),
                    tokens: Cow::Owned(tokens),
                    ..store
                }),
                3 => state.store(&Store {
                    hashes: hashes.into(),
                    ..store
                }),
                4 => state.remove(&hashes[..hashes.len() - usize::from(self.has_parent)], &location),
                _ if self.has_parent => state.clear(Some(self.medium.as_bytes()), None),
                _ => state.clear(None, None),
            };
            if let Err(reason) = outcome {
                state.invalidate(reason);
            }
        }
    }
}

/// Asserts that an export of the state is within the bound.
fn check(state: &State) {
    let blocks = &state.blocks;
    let copies = |number| blocks.count_on(number, u64::MAX) as usize + 1;
    let found: usize = blocks.numbers().map(copies).sum::<usize>() + state.waiting.len() + state.unkept.len();
    let most = STEPS_PER_BLOCK * found + FREE_STEPS;
    examined_blocks::taken();
    let mut events = 0;
    export(state, |_| events += 1);
    let taken = examined_blocks::taken();
    assert!(taken <= most, "{taken} steps of {most}, {events} events");
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: ProptestConfig::default().cases / 4,
        max_shrink_iters: 200,
        ..ProptestConfig::default()
    })]

    #[test]
    fn no_history_takes_many_steps(events in events()) {
        let mut state = State::default();
        for event in events {
            event.apply(&mut state);
            check(&state);
        }
    }
}

const BLOCKS: u64 = 20_000;

fn stored(first: u64, count: u64, token: u32) -> RepeatedEvent {
    RepeatedEvent {
        kind: 0,
        times: 1,
        first,
        count,
        rise: 1,
        has_parent: false,
        token,
        medium: "GPU",
        lora: 0,
        group: 0,
    }
}

/// All small hashes belong to dead ancestors, and the export needs a hash that no block has.
#[test]
fn a_hash_that_no_ancestor_has() {
    let mut state = State::default();
    let chain = stored(1, BLOCKS, 7);
    chain.apply(&mut state);
    let ancestors = RepeatedEvent {
        kind: 4,
        has_parent: true,
        ..chain.clone()
    };
    ancestors.apply(&mut state);
    let of_lora = RepeatedEvent {
        first: 2 * BLOCKS,
        count: 1,
        lora: 1,
        ..chain
    };
    of_lora.apply(&mut state);
    RepeatedEvent { kind: 4, ..of_lora }.apply(&mut state);
    assert_eq!((state.blocks.live(), state.blocks.dead()), (1, BLOCKS as usize - 1));
    check(&state);
}

/// All small hashes belong to blocks, and many LoRAs were replaced. For each of these LoRAs, a sign of the replacement is exported.
#[test]
fn a_sign_for_each_of_many_loras() {
    let mut state = State::default();
    stored(1, BLOCKS, 7).apply(&mut state);
    for lora in 1..BLOCKS / 40 {
        for part in 0..2 {
            let block = stored(2 * BLOCKS + 2 * lora + part, 1, 7);
            RepeatedEvent {
                lora: lora as i64,
                ..block
            }
            .apply(&mut state);
        }
    }
    assert!(state.blocks.replaced_loras().len() as u64 >= BLOCKS / 40 - 1);
    check(&state);
}

/// Pairs of blocks with one hash. In each pair, the second block waits for the first. Of the waiting blocks, the one that has waited
/// longest can be exported first.
#[test]
fn twins_that_stop_waiting_in_the_order_in_which_they_began() {
    let mut state = State::default();
    for at in 1..=BLOCKS {
        stored(at, 1, at as u32).apply(&mut state);
        let child = stored(3 * BLOCKS - at, 1, 7);
        state
            .store(&Store {
                hashes: vec![child.first].into(),
                parent: Some(at),
                tokens: vec![7].into(),
                keyable: Some(1),
                block_size: 1,
                location: Location {
                    medium: Some(Cow::Borrowed(b"GPU")),
                    ..Location::default()
                },
                ..Store::default()
            })
            .expect("within limits");
        stored(child.first, 1, (BLOCKS + at) as u32).apply(&mut state);
    }
    assert_eq!(state.blocks.live() as u64, 3 * BLOCKS);
    check(&state);
}
