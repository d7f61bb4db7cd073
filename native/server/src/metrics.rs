//! Counters of the data plane's answers, which the control plane reads for its metrics.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use serde::Serialize;

#[derive(Clone, Debug, Serialize)]
struct Histogram {
    #[serde(skip)]
    bounds: Vec<f64>,
    /// Number of values in each bucket; the last bucket has the values above all bounds.
    counts: Vec<u64>,
    sum: f64,
}

impl Histogram {
    fn new(bounds: &[f64]) -> Self {
        Self {
            bounds: bounds.to_vec(),
            counts: vec![0; bounds.len() + 1],
            sum: 0.0,
        }
    }

    fn add(&mut self, value: f64) {
        let bucket = self.bounds.partition_point(|bound| *bound < value);
        self.counts[bucket] += 1;
        self.sum += value;
    }
}

#[derive(Debug, Serialize)]
struct Counters {
    lookups: u64,
    hits: u64,
    depth: Histogram,
    /// For each path, the number of answers with each status, and the durations of the answers.
    requests: HashMap<String, Requests>,
}

#[derive(Debug, Serialize)]
struct Requests {
    by_status: HashMap<u16, u64>,
    seconds: Histogram,
}

/// All counters of the server.
pub(crate) struct Metrics {
    counters: Mutex<Counters>,
    bounds: Vec<f64>,
}

impl Metrics {
    pub(crate) fn new(depths: &[f64], seconds: &[f64]) -> Self {
        Self {
            counters: Mutex::new(Counters {
                lookups: 0,
                hits: 0,
                depth: Histogram::new(depths),
                requests: HashMap::new(),
            }),
            bounds: seconds.to_vec(),
        }
    }

    /// Counts an answer.
    pub(crate) fn request(&self, path: &str, status: u16, time: Duration) {
        let mut counters = self.counters.lock();
        if !counters.requests.contains_key(path) {
            let of_path = Requests {
                by_status: HashMap::new(),
                seconds: Histogram::new(&self.bounds),
            };
            counters.requests.insert(path.to_owned(), of_path);
        }
        let Some(of_path) = counters.requests.get_mut(path) else {
            return;
        };
        *of_path.by_status.entry(status).or_default() += 1;
        of_path.seconds.add(time.as_secs_f64());
    }

    /// Counts a lookup of a prompt, and the share of the prompt that the best worker holds.
    pub(crate) fn lookup(&self, tokens: usize, longest: u32) {
        let mut counters = self.counters.lock();
        counters.lookups += 1;
        counters.hits += u64::from(longest > 0);
        if tokens > 0 {
            counters.depth.add(f64::from(longest) / tokens as f64);
        }
    }

    /// The counters as JSON.
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::to_value(&*self.counters.lock()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_include_their_bounds() {
        let mut histogram = Histogram::new(&[1.0, 2.0]);
        for value in [0.5, 1.0, 1.5, 2.0, 99.0] {
            histogram.add(value);
        }
        assert_eq!((histogram.counts, histogram.sum), (vec![2, 2, 1], 104.0));
    }
}
