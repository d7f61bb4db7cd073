//! The load that engines report, and the selections of this process.
//!
//! Theory of operation. A reading is the number of requests that an engine had when it reported. The service selects workers but sends no
//! requests, so between two readings it counts its own selections: without them every prompt would go to the worker that was the least
//! loaded at the last reading. A new reading contains the requests that were selected before it, so it ends the count. A reading that is
//! too old does not count.
//!
//! Where no engine reports, nothing says when a request ends. So a selection counts as a request that decays: half of it is left after
//! `HALF_LIFE`. Only proportions between workers matter then, and these are right whatever the true duration of requests is.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};

/// Names above which readings that are too old are removed: four times as many as a service follows by default.
const MANY_NAMES: usize = 16_384;

/// Time after which half of a selection counts, for workers whose engine does not report.
const HALF_LIFE: Duration = Duration::from_secs(10);

/// Decayed selections that count as none.
const NEGLIGIBLE: f64 = 0.01;

/// The newest reading and the recent selections of each worker, by source name and rank. Any thread can use it.
#[derive(Debug)]
pub struct EngineLoads {
    max_age: Duration,
    readings: RwLock<HashMap<String, HashMap<i64, Reading>>>,
    selections: Mutex<HashMap<String, HashMap<i64, Recent>>>,
}

/// Selections that decay.
#[derive(Clone, Copy, Debug)]
struct Recent {
    count: f64,
    /// When `count` was right.
    at: Instant,
}

impl Recent {
    fn at(self, now: Instant) -> f64 {
        let halvings = now.saturating_duration_since(self.at).as_secs_f64() / HALF_LIFE.as_secs_f64();
        self.count * (-halvings).exp2()
    }
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
            selections: Mutex::default(),
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
        forget(&mut self.readings.write(), source, rank);
        forget(&mut self.selections.lock(), source, rank);
    }

    /// The requests of a worker: those that its engine has reported, and the selections since. None without a recent reading.
    pub fn requests(&self, source: &str, rank: i64) -> Option<f64> {
        let readings = self.readings.read();
        let reading = readings.get(source)?.get(&rank)?;
        let is_recent = reading.arrived.elapsed() <= self.max_age;
        is_recent.then(|| reading.requests + f64::from(reading.selections.load(Ordering::Relaxed)))
    }

    /// The recent selections of a worker, of which older ones count less. None without any.
    pub fn recent_selections(&self, source: &str, rank: i64) -> Option<f64> {
        let selections = self.selections.lock();
        let count = selections.get(source)?.get(&rank)?.at(Instant::now());
        (count > NEGLIGIBLE).then_some(count)
    }

    /// Counts a selection of a worker.
    pub(crate) fn count_selection(&self, source: &str, rank: i64) {
        let readings = self.readings.read();
        if let Some(reading) = readings.get(source).and_then(|ranks| ranks.get(&rank)) {
            reading.selections.fetch_add(1, Ordering::Relaxed);
        }
        drop(readings);
        let now = Instant::now();
        let mut selections = self.selections.lock();
        if selections.len() >= MANY_NAMES && !selections.contains_key(source) {
            selections.retain(|_, ranks| ranks.values().any(|recent| recent.at(now) > NEGLIGIBLE));
        }
        let recent = (selections.entry(source.to_owned()).or_default().entry(rank)).or_insert(Recent { count: 0.0, at: now });
        *recent = Recent {
            count: recent.at(now) + 1.0,
            at: now,
        };
    }
}

/// Removes a worker from a map by source name and rank.
fn forget<T>(of: &mut HashMap<String, HashMap<i64, T>>, source: &str, rank: i64) {
    if let Some(ranks) = of.get_mut(source) {
        ranks.remove(&rank);
        if ranks.is_empty() {
            of.remove(source);
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
    fn selections_decay_without_readings() {
        let loads = EngineLoads::new(Duration::from_secs(60));
        assert_eq!(loads.recent_selections("a", 0), None);
        for _ in 0..4 {
            loads.count_selection("a", 0);
        }
        let count = loads.recent_selections("a", 0).unwrap();
        assert!((3.9..=4.0).contains(&count), "{count}");
        let recent = Recent {
            count: 4.0,
            at: Instant::now(),
        };
        assert!((recent.at(recent.at + HALF_LIFE) - 2.0).abs() < 1e-9);
        assert_eq!(loads.recent_selections("a", 1), None);
        loads.remove("a", 0);
        assert_eq!(loads.recent_selections("a", 0), None);
        assert!(loads.selections.lock().is_empty());
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
