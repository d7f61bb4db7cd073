//! The load that engines report, and the selections since.
//!
//! Theory of operation. A reading is the number of requests that an engine had when it reported. The service selects workers but sends no
//! requests, so between two readings it counts its own selections: without them every prompt would go to the worker that was the least
//! loaded at the last reading. A new reading contains the requests that were selected before it, so it ends the count. A reading that is
//! too old does not count.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use parking_lot::RwLock;

/// Names above which readings that are too old are removed: four times as many as a service follows by default.
const MANY_NAMES: usize = 16_384;

/// The newest reading of each worker, by source name and rank. Any thread can use it.
#[derive(Debug)]
pub struct EngineLoads {
    max_age: Duration,
    readings: RwLock<HashMap<String, HashMap<i64, Reading>>>,
}

#[derive(Debug)]
struct Reading {
    requests: f64,
    arrived: Instant,
    /// Selections of the worker since.
    selections: AtomicU32,
}

impl EngineLoads {
    /// Creates it empty. Readings that are older than `max_age` do not count.
    pub fn new(max_age: Duration) -> Self {
        Self {
            max_age,
            readings: RwLock::default(),
        }
    }

    /// Stores a reading that arrived `age` ago. An older one than the stored one is ignored.
    pub fn report(&self, source: &str, rank: i64, requests: f64, age: Duration) {
        let Some(arrived) = Instant::now().checked_sub(age) else {
            return;
        };
        let mut readings = self.readings.write();
        if readings.len() >= MANY_NAMES && !readings.contains_key(source) {
            readings.retain(|_, ranks| ranks.values().any(|reading| reading.arrived.elapsed() <= self.max_age));
        }
        let ranks = readings.entry(source.to_owned()).or_default();
        if ranks.get(&rank).is_none_or(|known| known.arrived < arrived) {
            let selections = AtomicU32::new(0);
            ranks.insert(
                rank,
                Reading {
                    requests,
                    arrived,
                    selections,
                },
            );
        }
    }

    /// Forgets a worker.
    pub fn remove(&self, source: &str, rank: i64) {
        let mut readings = self.readings.write();
        if let Some(ranks) = readings.get_mut(source) {
            ranks.remove(&rank);
            if ranks.is_empty() {
                readings.remove(source);
            }
        }
    }

    /// The requests of a worker: those that its engine has reported, and the selections since. None without a recent reading.
    pub fn requests(&self, source: &str, rank: i64) -> Option<f64> {
        let readings = self.readings.read();
        let reading = readings.get(source)?.get(&rank)?;
        let is_recent = reading.arrived.elapsed() <= self.max_age;
        is_recent.then(|| reading.requests + f64::from(reading.selections.load(Ordering::Relaxed)))
    }

    /// Counts a selection of a worker.
    pub(crate) fn count_selection(&self, source: &str, rank: i64) {
        let readings = self.readings.read();
        if let Some(reading) = readings.get(source).and_then(|ranks| ranks.get(&rank)) {
            reading.selections.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::ZERO;

    #[test]
    fn selections_count_until_the_next_reading() {
        let loads = EngineLoads::new(Duration::from_secs(60));
        assert_eq!(loads.requests("a", 0), None);
        loads.count_selection("a", 0);
        loads.report("a", 0, 3.0, NOW);
        loads.count_selection("a", 0);
        loads.count_selection("a", 0);
        loads.count_selection("a", 1);
        assert_eq!(loads.requests("a", 0), Some(5.0));
        loads.report("a", 0, 4.0, NOW);
        assert_eq!(loads.requests("a", 0), Some(4.0));
    }

    #[test]
    fn an_older_reading_is_ignored_and_one_that_is_too_old_does_not_count() {
        let loads = EngineLoads::new(Duration::from_secs(60));
        loads.report("a", 0, 3.0, Duration::from_secs(1));
        loads.report("a", 0, 9.0, Duration::from_secs(2));
        assert_eq!(loads.requests("a", 0), Some(3.0));
        loads.report("a", 1, 3.0, Duration::from_secs(61));
        assert_eq!(loads.requests("a", 1), None);
        loads.remove("a", 0);
        assert_eq!(loads.requests("a", 0), None);
        loads.remove("a", 1);
        assert!(loads.readings.read().is_empty());
    }
}
