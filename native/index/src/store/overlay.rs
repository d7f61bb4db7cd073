//! Speculative entries: routing decisions that no event has confirmed yet. They are short-lived, so they are stored separately from the
//! blocks of streams.
//!
//! An entry is removed when its worker announces the last block of the prompt, or when the entry expires. If there are too many entries,
//! the oldest one is removed. The cost of an entry does not depend on the number of entries. For each block, the entries that contain the
//! block are counted. So the removal of an entry does not affect other entries with the same prefix.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

use crate::step_counter;
use crate::store::members::Worker;

/// A speculative entry: the decision to send a prompt to a worker.
#[derive(Debug)]
struct Decision {
    worker: Worker,
    /// For each scheme by which engines divide prompts, the keys of the prompt's blocks.
    prompts: Vec<Vec<u64>>,
    end: i64,
}

impl Decision {
    fn keys(&self) -> impl Iterator<Item = &u64> {
        self.prompts.iter().flatten()
    }

    fn ends(&self) -> impl Iterator<Item = u64> {
        self.prompts.iter().filter_map(|keys| keys.last().copied())
    }
}

/// All speculative entries: the blocks that workers will probably hold soon.
#[derive(Debug)]
pub struct Overlay {
    /// Maps IDs to entries, in the order in which the entries were added.
    decisions: BTreeMap<u64, Decision>,
    /// The time of expiry and the ID of each entry, the earliest first.
    ends: BTreeSet<(i64, u64)>,
    /// Maps the key of the last block of a prompt to the IDs of the prompt's entries.
    by_end: HashMap<u64, BTreeSet<u64>>,
    /// For each worker, maps the key of a block to the number of entries that contain the block.
    expected: HashMap<Worker, HashMap<u64, u32>>,
    next: u64,
    size: usize,
    limit: usize,
    /// Number of removed entries whose prompt the worker had stored, or held when the entry was removed.
    pub confirmed: u64,
    /// Number of entries that expired before they were confirmed.
    pub expired: u64,
    /// Number of unconfirmed entries that were removed before they expired, since there were too many entries.
    pub displaced: u64,
}

/// Maximum number of blocks of the entries that are removed before other threads can lock the overlay; this takes about 2 ms.
const ENDED_PER_HOLD: usize = 1 << 12;

/// Converts a time to an integer that has the same order, since `f64` has no total order.
fn order(moment: f64) -> i64 {
    let bits = moment.to_bits().cast_signed();
    bits ^ ((bits >> 63).cast_unsigned() >> 1).cast_signed()
}

impl Overlay {
    /// Creates an overlay whose entries can have at most `limit` blocks together. At the limit, the oldest entries are removed.
    pub fn new(limit: usize) -> Self {
        Self {
            decisions: BTreeMap::new(),
            ends: BTreeSet::new(),
            by_end: HashMap::new(),
            expected: HashMap::new(),
            next: 0,
            size: 0,
            limit,
            confirmed: 0,
            expired: 0,
            displaced: 0,
        }
    }

    /// Whether the overlay has no entries.
    pub fn is_empty(&self) -> bool {
        self.decisions.is_empty()
    }

    /// Number of blocks of all entries.
    pub fn len(&self) -> usize {
        self.size
    }

    /// Workers with entries.
    pub fn workers(&self) -> impl Iterator<Item = &Worker> {
        self.expected.keys()
    }

    /// Adds an entry: until the time `until`, a worker is expected to hold the blocks of a prompt. `prompts` has the keys of the prompt's
    /// blocks for each of several schemes. An entry without keys is not added.
    pub fn add(&mut self, worker: Worker, mut prompts: Vec<Vec<u64>>, until: f64) {
        let end = order(until);
        prompts.retain(|keys| !keys.is_empty());
        let decision = Decision { worker, prompts, end };
        let size = decision.keys().count();
        if size == 0 {
            return;
        }
        let expected = self.expected.entry(decision.worker.clone()).or_default();
        step_counter::count(size);
        for &key in decision.keys() {
            *expected.entry(key).or_default() += 1;
        }
        for key in decision.ends() {
            self.by_end.entry(key).or_default().insert(self.next);
        }
        self.size += size;
        self.ends.insert((end, self.next));
        self.decisions.insert(self.next, decision);
        self.next += 1;
    }

    /// Whether a worker has entries.
    pub fn expects(&self, source: &str, rank: i64) -> bool {
        self.expected
            .keys()
            .any(|worker| worker.rank == rank && worker.source == source)
    }

    /// Removes those entries of a worker that end with a block that has one of these keys: events have announced this block. Returns how
    /// many of the keys were processed. The caller repeats the call with the remaining keys until all are processed.
    pub fn confirm(&mut self, source: &str, rank: i64, stored: &[u64]) -> usize {
        let mut work = 0;
        for (done, key) in stored.iter().enumerate() {
            let numbers = self.by_end.get(key).into_iter().flatten();
            let is_meant = |number: &&u64| {
                let decision = self.decisions.get(number);
                decision.is_some_and(|decision| decision.worker.rank == rank && decision.worker.source == source)
            };
            for number in numbers.filter(is_meant).copied().collect::<Vec<_>>() {
                if work >= ENDED_PER_HOLD {
                    return done;
                }
                work += self.end(number).map_or(0, |decision| decision.keys().count());
                self.confirmed += 1;
            }
        }
        stored.len()
    }

    /// Whether `expire` would remove an entry.
    pub fn is_due(&self, now: f64) -> bool {
        self.size > self.limit || self.next_expired(now).is_some()
    }

    /// Returns the next entry that has expired.
    fn next_expired(&self, now: f64) -> Option<u64> {
        let &(end, number) = self.ends.first()?;
        (end <= order(now)).then_some(number)
    }

    /// Removes the entries that have expired; if there are still too many blocks, also removes the oldest entries. One call removes a
    /// limited number of blocks. `held` returns whether a worker holds the block with the last key of a prompt. Returns the number of
    /// blocks of the removed entries.
    pub fn expire(&mut self, now: f64, held: impl Fn(&Worker, &[u64]) -> bool) -> usize {
        let mut ended = 0;
        while ended < ENDED_PER_HOLD && self.is_due(now) {
            let expired = self.next_expired(now);
            let oldest = || self.decisions.first_key_value().map(|(&number, _)| number);
            let Some(decision) = expired.or_else(oldest).and_then(|number| self.end(number)) else {
                break;
            };
            ended += decision.keys().count();
            let is_confirmed = decision.prompts.iter().any(|keys| held(&decision.worker, keys));
            *match expired {
                _ if is_confirmed => &mut self.confirmed,
                Some(_) => &mut self.expired,
                None => &mut self.displaced,
            } += 1;
        }
        ended
    }

    /// The range of the IDs of all entries that were ever added.
    pub fn numbers(&self) -> Range<u64> {
        0..self.next
    }

    /// Removes the entries of a worker, or of all ranks of a source if `rank` is None; only entries with IDs in the range `numbers` are
    /// removed. They count as neither confirmed nor expired. One call examines a limited number of IDs, and removes them from the range.
    /// The caller repeats the call until the range is empty.
    pub fn forget(&mut self, source: &str, rank: Option<i64>, numbers: &mut Range<u64>) {
        let mut work = 0;
        while work < ENDED_PER_HOLD {
            let Some((&number, Decision { worker, .. })) = self.decisions.range(numbers.clone()).next() else {
                numbers.start = numbers.end;
                return;
            };
            numbers.start = number + 1;
            work += 1;
            if worker.source == source && rank.is_none_or(|rank| rank == worker.rank) {
                work += self.end(number).map_or(0, |decision| decision.keys().count());
            }
        }
    }

    fn end(&mut self, number: u64) -> Option<Decision> {
        let decision = self.decisions.remove(&number)?;
        step_counter::count(decision.keys().count());
        self.ends.remove(&(decision.end, number));
        self.size -= decision.keys().count();
        for key in decision.ends() {
            if let Some(numbers) = self.by_end.get_mut(&key) {
                numbers.remove(&number);
                if numbers.is_empty() {
                    self.by_end.remove(&key);
                }
            }
        }
        let expected = self.expected.get_mut(&decision.worker)?;
        for key in decision.keys() {
            if let Some(count) = expected.get_mut(key) {
                *count -= 1;
                if *count == 0 {
                    expected.remove(key);
                }
            }
        }
        if expected.is_empty() {
            self.expected.remove(&decision.worker);
        }
        Some(decision)
    }

    /// Number of leading keys whose blocks a worker was expected to hold when `expire` was last called.
    pub fn depth(&self, worker: &Worker, keys: &[u64]) -> usize {
        let Some(expected) = self.expected.get(worker) else { return 0 };
        // An entry has all blocks of a prompt from the first block on. So if a block is expected, all blocks before it are also expected.
        keys.partition_point(|key| {
            step_counter::count(1);
            expected.contains_key(key)
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        /// An entry: the worker, the chain, the length of the prompt in blocks of the chain, and the time at which the entry expires.
        Add(i64, u64, usize, u8),
        Pass(u8),
        Forget(Option<i64>),
        /// A worker stores the block at this position of a chain.
        Confirm(i64, u64, usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            6 => (0_i64..3, 0_u64..3, 0_usize..6, 1_u8..8).prop_map(|(rank, chain, length, ttl)| Step::Add(rank, chain, length, ttl)),
            3 => (0_u8..5).prop_map(Step::Pass),
            1 => prop::option::of(0_i64..3).prop_map(Step::Forget),
            2 => (0_i64..3, 0_u64..3, 1_usize..6).prop_map(|(rank, chain, length)| Step::Confirm(rank, chain, length)),
        ]
    }

    /// Keys of a chain; all chains share their first two keys.
    fn keys(chain: u64, length: usize) -> Vec<u64> {
        (0..length as u64)
            .map(|at| if at < 2 { at } else { 10 * chain + at })
            .collect()
    }

    fn worker(rank: i64) -> Worker {
        Worker {
            source: "a".into(),
            rank,
        }
    }

    /// The entries in a list, the oldest first.
    #[derive(Default)]
    struct Model {
        decisions: Vec<(i64, Vec<u64>, f64)>,
        confirmed: u64,
        expired: u64,
        displaced: u64,
    }

    impl Model {
        fn size(&self) -> usize {
            self.decisions.iter().map(|(_, keys, _)| keys.len()).sum()
        }

        fn expire(&mut self, now: f64, limit: usize, held: impl Fn(&Worker, &[u64]) -> bool) {
            while let Some(at) = self
                .decisions
                .iter()
                .position(|(.., until)| *until <= now)
                .or_else(|| (self.size() > limit).then_some(0))
            {
                let (rank, keys, until) = self.decisions.remove(at);
                match held(&worker(rank), &keys) {
                    true => self.confirmed += 1,
                    false if until <= now => self.expired += 1,
                    false => self.displaced += 1,
                }
            }
        }

        fn depth(&self, rank: i64, keys: &[u64]) -> usize {
            let known = |key: &&u64| {
                let mut mine = self.decisions.iter().filter(|(other, ..)| *other == rank);
                mine.any(|(_, keys, _)| keys.contains(key))
            };
            keys.iter().take_while(known).count()
        }
    }

    proptest! {
        /// For whatever reason an entry is removed (its expiry, the limit, or the removal of its worker), the blocks of the remaining
        /// entries are still expected.
        #[test]
        fn an_overlay_equals_a_list_of_decisions(steps in prop::collection::vec(step(), 0..60), limit in 0_usize..30) {
            let held = |worker: &Worker, keys: &[u64]| (keys[keys.len() - 1] + worker.rank as u64).is_multiple_of(2);
            let (mut overlay, mut model, mut now) = (Overlay::new(limit), Model::default(), -5.0);
            for step in steps {
                match step {
                    Step::Add(rank, chain, length, ttl) => {
                        let until = now + f64::from(ttl);
                        overlay.add(worker(rank), vec![keys(chain, length), Vec::new()], until);
                        if length > 0 {
                            model.decisions.push((rank, keys(chain, length), until));
                        }
                    }
                    Step::Pass(time) => now += f64::from(time),
                    Step::Confirm(rank, chain, length) => {
                        let stored = *keys(chain, length).last().expect("it has keys");
                        prop_assert_eq!(overlay.confirm("a", rank, &[stored, 77]), 2);
                        prop_assert_eq!(overlay.confirm("b", rank, &[stored]), 1);
                        let before = model.decisions.len();
                        model.decisions.retain(|(other, keys, _)| *other != rank || keys.last() != Some(&stored));
                        model.confirmed += (before - model.decisions.len()) as u64;
                    }
                    Step::Forget(rank) => {
                        let numbers = overlay.numbers();
                        overlay.forget("a", rank, &mut numbers.clone());
                        overlay.forget("b", None, &mut numbers.clone());
                        model.decisions.retain(|(other, ..)| rank.is_some_and(|rank| rank != *other));
                    }
                }
                let due = model.size() > limit || model.decisions.iter().any(|(.., until)| *until <= now);
                prop_assert_eq!(overlay.is_due(now), due);
                overlay.expire(now, held);
                model.expire(now, limit, held);
                prop_assert!(!overlay.is_due(now));
                prop_assert_eq!(
                    (overlay.len(), overlay.is_empty(), overlay.confirmed, overlay.expired, overlay.displaced),
                    (model.size(), model.decisions.is_empty(), model.confirmed, model.expired, model.displaced)
                );
                for rank in 0..3 {
                    let known = model.decisions.iter().any(|(other, ..)| *other == rank);
                    prop_assert_eq!(overlay.workers().any(|other| other.rank == rank), known);
                    prop_assert_eq!(overlay.expects("a", rank), known);
                    for chain in 0..3 {
                        prop_assert_eq!(overlay.depth(&worker(rank), &keys(chain, 6)), model.depth(rank, &keys(chain, 6)));
                    }
                }
            }
        }

        /// `order` keeps the order of times, negative ones included.
        #[test]
        fn moments_keep_their_order(one in any::<f64>(), other in any::<f64>()) {
            prop_assert_eq!(order(one).cmp(&order(other)), one.total_cmp(&other));
        }
    }
}
