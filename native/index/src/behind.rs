//! Records that are found through the one before them.
//!
//! Most blocks are stored right behind their parents, and get the record right behind that of their parent. Whoever walks along a prompt
//! looks at that one first, so its key need not be listed: of a chain, the table of keys has the beginning, and what did not fit. It is
//! smaller by so much that it stays in a near cache, and what is to be found out of each new block, whether somebody holds it already, is
//! found out there.
//!
//! What makes that exact: *a record that is behind another one is the only one of its key, and the other one, right before it, is the only
//! one of the key of its parent, in the same context*. Whoever places a block knows its parent's record, so it either finds the block there,
//! or it is listed, or nobody holds it. When the parent goes, or gets a twin, the record is listed. Three kinds of blocks come without
//! their parent: those that are told by keys, those of snapshots, and those that were kept without records before somebody asked
//! (`crate::unasked`). While there are any of them, or may be soon, all records are listed, and nobody is looked for where it is not.

use crate::core::{ByKey, Core};
use crate::gate::Writer;
use crate::slab::Record;

/// How many records are behind others, and who wants that there are none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Behind {
    /// Records.
    pub records: usize,
    /// Those who place blocks without knowing their parents.
    pub strangers: usize,
}

impl Core {
    /// Whether a block whose record would be `number`, the only one of its key, may be found through the one before it alone.
    #[inline]
    pub(crate) fn may_be_behind(&self, number: u32, context: u32) -> bool {
        if self.behind.strangers > 0 || self.contexts.has_keyed() || self.keeps() {
            return false;
        }
        let parent = self.records.get(number - 1);
        !parent.has_twins() && parent.context() == context
    }

    /// Lists a record that is behind another one.
    pub(crate) fn list(&mut self, number: u32) {
        let record = self.records.get_mut(number);
        debug_assert!(record.is_behind());
        record.set_behind(false);
        let key = record.key;
        self.behind.records -= 1;
        self.keys.insert(self.spot(key), number, &ByKey(&self.records, self.secret));
    }

    /// Lists the record behind `number`, if it is found through that one alone.
    #[inline]
    pub(crate) fn list_next(&mut self, number: u32) {
        if self.behind.records > 0 && self.records.find(number.wrapping_add(1)).is_some_and(Record::is_behind) {
            self.list(number + 1);
        }
    }

    /// All records of the last block of a chain that begins with the first block of a prompt.
    pub(crate) fn ends_of(&self, keys: &[u64]) -> Vec<u32> {
        let listed = keys.iter().enumerate().rev().find_map(|(at, &key)| {
            let found = self.twins(key, |_| true);
            (!found.is_empty()).then_some((at, found))
        });
        let Some((at, mut found)) = listed else { return Vec::new() };
        // Whoever is behind one of several is listed.
        for &key in &keys[at + 1..] {
            let next = found[0].wrapping_add(1);
            match self.records.find(next) {
                Some(record) if record.is_behind() && record.key == key => found = vec![next],
                _ => return Vec::new(),
            }
        }
        found
    }
}

impl Writer<'_> {
    /// Lists all records, in pieces that let others in. The caller sees to it that no new one gets behind another.
    pub(crate) fn list_all(&mut self) {
        let mut number = 0;
        while self.behind.records > 0 && number < self.records.bound() {
            if self.records.find(number).is_some_and(Record::is_behind) {
                self.list(number);
            }
            number += 1;
            self.pause(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, HashMap};
    use std::sync::Arc;

    use parking_lot::Mutex;
    use proptest::prelude::*;

    use super::*;
    use crate::contexts::Context;
    use crate::core::Worker;
    use crate::gate::Gate;
    use crate::index::Newcomer;
    use crate::keys::Scheme;
    use crate::matching::{Walk, hits};
    use crate::planes::Plane;
    use crate::stream::{Block, Stream};

    const SCHEME: Scheme = Scheme { size: 1, eagle: false };
    const STREAMS: usize = 3;
    /// Blocks of the longest chain.
    const DEPTH: usize = 9;

    #[derive(Clone, Debug)]
    enum Step {
        /// A stream stores some blocks of a chain, behind one that it has or from the first one on, by another hash or its usual one.
        Store(usize, u16, usize, usize, u64),
        /// It removes one of those that it has.
        Remove(usize, usize),
        Forget(usize),
        /// Blocks of a chain come without their parents, those of a snapshot or with their keys; before that another stream has the chain.
        Strange(usize, u16, usize, usize, bool),
    }

    fn step() -> impl Strategy<Value = Step> {
        // Chains part where their bits do: most have a common beginning.
        let chain = prop_oneof![Just(0_u16), (0..DEPTH).prop_map(|at| 1 << at), 0..1_u16 << DEPTH];
        let part = (0..STREAMS, chain, 0..DEPTH, 1..=DEPTH);
        prop_oneof![
            8 => (part.clone(), prop_oneof![4 => Just(0_u64), 1 => 1..3_u64])
                .prop_map(|((stream, chain, from, count), other)| Step::Store(stream, chain, from, count, other)),
            4 => (0..STREAMS, any::<usize>()).prop_map(|(stream, at)| Step::Remove(stream, at)),
            1 => (0..STREAMS).prop_map(Step::Forget),
            1 => (part, any::<bool>()).prop_map(|((stream, chain, from, count), keyed)| Step::Strange(stream, chain, from, count, keyed)),
        ]
    }

    /// Keys of a chain: those of two are alike as far as their bits are.
    fn keys(chain: u16) -> Vec<u64> {
        let key = |at: usize| 1_000 * (at as u64 + 1) + u64::from(chain & ((2 << at) - 1));
        (0..DEPTH).map(key).collect()
    }

    struct World {
        gate: Gate,
        streams: Vec<Arc<Mutex<Stream>>>,
        plane: u16,
        /// Of each stream, by hash what it holds.
        held: Vec<HashMap<u64, (u64, bool)>>,
    }

    impl World {
        fn new() -> Self {
            let gate = Gate::default();
            let mut core = gate.write();
            let plane = Plane {
                tier: "gpu".into(),
                locality: None,
                ownership: None,
                group: 0,
            };
            let plane = core.plane(plane).unwrap();
            let streams = (0..STREAMS).map(|number| {
                let worker = Worker {
                    source: "engine".into(),
                    rank: number as i64,
                };
                let joined = Newcomer::join(&mut core, number as u32, worker, 0, None);
                core.show(number as u32, true);
                joined.stream
            });
            let streams = streams.collect();
            drop(core);
            Self {
                gate,
                streams,
                plane,
                held: vec![HashMap::new(); STREAMS],
            }
        }

        /// Has a stream hold some blocks; `next` is the number behind the record of the first one's parent, if that is known.
        fn place(&mut self, of: usize, keys: &[u64], other: u64, keyed: bool, next: Option<u32>) {
            let mut stream = self.streams[of].lock();
            let mut writer = self.gate.write();
            let context = if keyed {
                Context::keyed(SCHEME.size)
            } else {
                Context {
                    scheme: SCHEME,
                    lora: 0,
                    salt: 0,
                }
            };
            let context = writer.contexts.retain(context, 1);
            if keyed {
                writer.list_all();
            }
            let mut next = next.unwrap_or(u32::MAX);
            for &key in keys {
                let hash = hash_of(of, key, other, keyed);
                let block = Block::new(&writer, hash, key, context);
                let (number, _) = stream.place(&mut writer, &block, self.plane, next).unwrap();
                // What is told by keys has no parent.
                next = if keyed { u32::MAX } else { number + 1 };
                let known = self.held[of].insert(hash, (key, keyed)).is_some();
                if known {
                    // A copy more is no block more.
                    let leaving = stream.leaving(&writer, hash);
                    stream.remove(&mut writer, &leaving, self.plane);
                }
            }
            writer.contexts.release(context, 1);
        }

        fn take(&mut self, step: &Step) {
            match *step {
                Step::Store(of, chain, from, count, other) => {
                    let keys = keys(chain);
                    let parent = |from: usize| {
                        let hash = hash_of(of, keys[from - 1], other, false);
                        self.streams[of].lock().newest(&self.gate.read(), hash)
                    };
                    let (from, next) = match from.checked_sub(1).and_then(|_| parent(from)) {
                        Some(number) => (from, Some(number + 1)),
                        None => (0, None),
                    };
                    self.place(of, &keys[from..DEPTH.min(from + count)], other, false, next);
                }
                Step::Remove(of, at) => {
                    let hashes: BTreeSet<u64> = self.held[of].keys().copied().collect();
                    if hashes.is_empty() {
                        return;
                    }
                    let hash = *hashes.iter().nth(at % hashes.len()).unwrap();
                    self.held[of].remove(&hash);
                    let mut stream = self.streams[of].lock();
                    let mut writer = self.gate.write();
                    let leaving = stream.leaving(&writer, hash);
                    assert!(stream.remove(&mut writer, &leaving, self.plane));
                }
                Step::Forget(of) => {
                    self.held[of].clear();
                    self.streams[of].lock().forget(&mut self.gate.write());
                }
                Step::Strange(of, chain, from, count, keyed) => {
                    let keys = keys(chain);
                    let mut writer = self.gate.write();
                    writer.behind.strangers += 1;
                    writer.list_all();
                    drop(writer);
                    self.take(&Step::Store((of + 1) % STREAMS, chain, 0, DEPTH, 0));
                    self.place(of, &keys[from..DEPTH.min(from + count)], 0, keyed, None);
                    self.gate.write().behind.strangers -= 1;
                }
            }
        }

        /// What the module says of records is true of all of them.
        fn check_records(&self) {
            let core = self.gate.read();
            let listed: Vec<u32> = core.keys.iter().collect();
            let all: Vec<u32> = core.records.numbers().collect();
            let behind = |number: &&u32| core.records.get(**number).is_behind();
            let count = all.iter().filter(behind).count();
            assert_eq!((core.behind.records, listed.len()), (count, all.len() - count));
            assert!(!listed.iter().any(|number| behind(&number)));
            for &number in &all {
                let record = core.records.get(number);
                let alike = all.iter().filter(|&&other| core.records.get(other).key == record.key).count();
                assert!(alike == 1 || record.has_twins());
                if record.is_behind() {
                    let parent = core.records.find(number - 1).unwrap();
                    assert!(alike == 1 && !parent.has_twins() && parent.context() == record.context());
                    assert_eq!(parent.key / 1_000 + 1, record.key / 1_000);
                }
            }
        }

        /// Of each prompt everybody is found who holds a beginning of it, and everybody who holds its end.
        fn check_prompts(&self) {
            let core = self.gate.read();
            let holds = |of: usize, key: u64| self.held[of].values().any(|&(held, _)| held == key);
            let context = Context {
                scheme: SCHEME,
                lora: 0,
                salt: 0,
            };
            for chain in (0..1_u16 << DEPTH).step_by(7).chain((0..DEPTH).map(|at| 1 << at)) {
                let keys = keys(chain);
                let (mut walk, mut depths) = (Walk::default(), Vec::new());
                walk.find(&core, &keys, &context);
                walk.depths(&core, SCHEME, &None, &mut depths);
                let found: Vec<(i64, u64)> = (hits(&core, &mut depths, false).iter())
                    .map(|hit| (hit.worker.rank, hit.tokens[0]))
                    .collect();
                let expected: Vec<(i64, u64)> = (0..STREAMS)
                    .map(|of| (of as i64, keys.iter().take_while(|&&key| holds(of, key)).count() as u64))
                    .filter(|&(_, depth)| depth > 0)
                    .collect();
                assert_eq!(found, expected, "{chain:b}");
                for end in 1..=DEPTH {
                    let ends = core.ends_of(&keys[..end]);
                    for of in 0..STREAMS {
                        let told = ends
                            .iter()
                            .any(|&number| core.sets.knows(core.records.get(number).set, of as u32));
                        assert_eq!(told, holds(of, keys[end - 1]), "{chain:b} {end}");
                    }
                }
            }
        }
    }

    /// The hash that a stream has for a block, or another one.
    fn hash_of(stream: usize, key: u64, other: u64, keyed: bool) -> u64 {
        (key << 8) + ((stream as u64 / 2) << 4) + (other << 1) + u64::from(keyed)
    }

    proptest! {
        /// Chains that part, gaps in the middle of them, blocks under two hashes, and some whose parents nobody knows.
        #[test]
        fn whatever_is_listed_or_not_is_found(steps in prop::collection::vec(step(), 1..40)) {
            let mut world = World::new();
            for step in &steps {
                world.take(step);
                world.check_records();
            }
            world.check_prompts();
        }
    }

    /// A chain has its first record listed alone; the others are when it comes with keys, and those that come later are not again.
    #[test]
    fn a_chain_is_listed_when_somebody_comes_without_parents() {
        let mut world = World::new();
        let listed = |world: &World| (world.gate.read().keys.len(), world.gate.read().behind.records);
        world.take(&Step::Store(0, 0, 0, DEPTH, 0));
        assert_eq!(listed(&world), (1, DEPTH - 1));
        world.take(&Step::Strange(1, 0, 4, 1, false));
        assert_eq!(listed(&world), (DEPTH, 0));
        world.take(&Step::Store(0, 1, 0, DEPTH, 0));
        assert_eq!(listed(&world), (DEPTH + 1, DEPTH - 1));
        world.take(&Step::Strange(1, 0, 4, 1, true));
        world.take(&Step::Store(2, 3, 0, DEPTH, 0));
        assert_eq!(listed(&world).1, 0);
        world.check_records();
        world.check_prompts();
    }

    /// Who is removed first in a chain leaves the next one listed; who is removed last leaves nothing to do.
    #[test]
    fn a_chain_goes_from_both_ends() {
        let mut world = World::new();
        world.take(&Step::Store(0, 0, 0, DEPTH, 0));
        world.take(&Step::Remove(0, 0));
        world.take(&Step::Remove(0, DEPTH - 2));
        world.check_records();
        assert_eq!(world.gate.read().keys.len(), 1);
        (0..DEPTH - 2).for_each(|_| world.take(&Step::Remove(0, 0)));
        assert!(world.gate.read().records.is_empty() && world.gate.read().keys.is_empty());
        assert_eq!(world.gate.read().behind, Behind::default());
    }
}
