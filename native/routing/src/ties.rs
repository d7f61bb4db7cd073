//! Rotation among equally good workers.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, Hash, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use serde::Deserialize;

/// Maximum number of workers whose last choice is stored. It is four times the number of workers that a service follows by default.
pub const MAX_TURNS: usize = 16_384;

/// The rule by which one of several equal candidates is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tie {
    /// The candidate that was chosen longest ago.
    #[default]
    Rotate,
    /// A random candidate.
    Random,
    /// The first candidate in the list.
    First,
}

/// A function that returns a random number below its argument.
type Draw = Box<dyn Fn(usize) -> usize + Send + Sync>;

/// A rotation among equal workers, which stores the last choice of each worker. The first choice is random, so that many routers do not
/// begin with the same worker.
pub struct Ties {
    secret: RandomState,
    /// The fraction of the equal candidates, from 0 to below 1, at which the rotation begins.
    start: f64,
    max_workers: usize,
    draw: Draw,
    turns: Mutex<Turns>,
}

#[derive(Default)]
struct Turns {
    number: u64,
    last: HashMap<u64, u64>,
    by_number: BTreeMap<u64, u64>,
}

impl Ties {
    /// Creates a rotation that begins at the fraction `start`, from 0 to below 1, of the equal candidates. The rotation stores the last
    /// choices of at most `max_workers` workers.
    pub fn new(start: f64, max_workers: usize, draw: Draw) -> Self {
        Self {
            secret: RandomState::new(),
            start,
            max_workers,
            draw,
            turns: Mutex::default(),
        }
    }

    /// Creates a rotation that begins at a random candidate, with random numbers of its own.
    pub fn by_chance() -> Self {
        let (random, drawn) = (RandomState::new(), AtomicU64::new(0));
        let start = (random.hash_one("start") >> 11) as f64 / (1_u64 << 53) as f64;
        let draw = move |count: usize| (random.hash_one(drawn.fetch_add(1, Ordering::Relaxed)) % count as u64) as usize;
        Self::new(start, MAX_TURNS, Box::new(draw))
    }

    /// The key by which the rotation knows a worker.
    pub fn key(&self, worker: impl Hash) -> u64 {
        self.secret.hash_one(worker)
    }

    /// Returns the position of the chosen worker in `equal`; 0 if `equal` has at most one worker.
    pub fn pick(&self, tie: Tie, equal: &[u64]) -> usize {
        if equal.len() < 2 {
            return 0;
        }
        match tie {
            Tie::First => 0,
            Tie::Random => (self.draw)(equal.len()),
            Tie::Rotate => {
                let start = (self.start * equal.len() as f64) as usize;
                let turns = self.turns.lock();
                let waited = |&place: &usize| {
                    let last = turns.last.get(&equal[place]).copied().unwrap_or(0);
                    (last, (place + equal.len() - start) % equal.len())
                };
                (0..equal.len()).min_by_key(waited).unwrap_or(0)
            }
        }
    }

    /// Records that a worker was chosen, so that it is the last one in the rotation.
    pub fn record_choice(&self, key: u64) {
        let mut guard = self.turns.lock();
        let turns = &mut *guard;
        turns.number += 1;
        if let Some(before) = turns.last.insert(key, turns.number) {
            turns.by_number.remove(&before);
        }
        turns.by_number.insert(turns.number, key);
        if turns.last.len() > self.max_workers
            && let Some((_, oldest)) = turns.by_number.pop_first()
        {
            turns.last.remove(&oldest);
        }
    }

    /// Number of workers whose last choice is stored.
    pub fn worker_count(&self) -> usize {
        self.turns.lock().last.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_workers_take_turns() {
        let ties = Ties::by_chance();
        let equal: Vec<u64> = (0..4).collect();
        let mut seen = Vec::new();
        for _ in 0..8 {
            let place = ties.pick(Tie::Rotate, &equal);
            ties.record_choice(equal[place]);
            seen.push(place);
        }
        assert_eq!(seen[..4], seen[4..]);
        seen.truncate(4);
        seen.sort_unstable();
        assert_eq!(seen, [0, 1, 2, 3]);
        assert_eq!(ties.pick(Tie::First, &equal), 0);
        let drawn: std::collections::HashSet<usize> = (0..100).map(|_| ties.pick(Tie::Random, &equal)).collect();
        assert_eq!(drawn.len(), 4);
    }

    #[test]
    fn memory_is_bounded() {
        let ties = Ties::by_chance();
        for key in 0..2 * MAX_TURNS as u64 {
            ties.record_choice(key);
        }
        assert_eq!(ties.worker_count(), MAX_TURNS);
        assert_eq!(ties.turns.lock().by_number.len(), MAX_TURNS);
    }
}
