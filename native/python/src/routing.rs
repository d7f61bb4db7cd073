//! The scores by which `kvevents.routing` and `/v1/select` choose a worker.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};

use kvevents_routing::score::{self, Candidate, LoadWeights, TierWeights};
use kvevents_routing::{MAX_TURNS, Tie};

/// Computes the scores of workers, with given weights of tiers and loads.
#[pyclass(frozen, module = "kvevents_native._native")]
pub(super) struct Scorer {
    tiers: Vec<Py<PyString>>,
    weights: TierWeights,
    loads: LoadWeights,
    /// Weight of tokens that might be gone.
    uncertain_weight: f64,
}

/// Score, uncached share and load of a worker, and whether the worker is hot.
type ScoreTuple = (f64, f64, f64, bool);

#[pymethods]
impl Scorer {
    #[new]
    fn new(
        tiers: &Bound<'_, PyDict>,
        wait: f64,
        mean: f64,
        guard: f64,
        guard_requests: f64,
        uncertain_weight: f64,
    ) -> PyResult<Self> {
        let named = tiers
            .iter()
            .map(|(name, weight)| Ok((name.cast_into::<PyString>()?.unbind(), weight.extract::<f64>()?)));
        let (tiers, weights): (Vec<_>, Vec<f64>) = named.collect::<PyResult<Vec<_>>>()?.into_iter().unzip();
        Ok(Self {
            tiers,
            weights: TierWeights::new(weights),
            loads: LoadWeights {
                wait,
                mean,
                base: 0.0,
                guard,
                guard_requests,
            },
            uncertain_weight,
        })
    }

    /// Returns the scores of workers for a prompt of `length` tokens, and the positions of the workers with the best score.
    ///
    /// For each worker, `tokens` is the length of its prefix over all tiers, `certain` is the certain part of this length, and `tiers` is
    /// the length on each tier, faster tiers included. `believed` is the weight of each worker's trust, from 0 to 1. `inexact` maps the
    /// position of a worker to the tiers whose tokens might all be gone.
    #[pyo3(signature = (length, tokens, certain, tiers, believed, work, requests, inexact=HashMap::new()))]
    // Each list has a value for each worker: Python creates a few lists faster than one object for each worker.
    #[allow(clippy::too_many_arguments)]
    fn weigh(
        &self,
        length: u64,
        tokens: Vec<u64>,
        certain: Vec<u64>,
        tiers: &Bound<'_, PyList>,
        believed: Vec<f64>,
        work: Vec<f64>,
        requests: Vec<f64>,
        inexact: HashMap<usize, Vec<String>>,
    ) -> PyResult<(Vec<ScoreTuple>, Vec<usize>)> {
        let count = tokens.len();
        if [certain.len(), tiers.len(), believed.len(), work.len(), requests.len()] != [count; 5] {
            return Err(PyValueError::new_err(
                "invalid arguments: the lists must have one value for each worker",
            ));
        }
        let mut candidates = Vec::with_capacity(count);
        for at in 0..count {
            let credit = if tokens[at] == 0 {
                0.0
            } else {
                let reached = self.reached(&tiers.get_item(at)?)?;
                let reach = |tier: usize| reached[tier];
                let believed = score::trust_weight(tokens[at], certain[at], believed[at], self.uncertain_weight);
                match inexact.get(&at) {
                    None => believed * self.weights.saved_share(tokens[at], length, reach),
                    Some(names) => {
                        let weights = self.trusted_weights(tiers.py(), believed, names)?;
                        weights.saved_share(tokens[at], length, reach)
                    }
                }
            };
            candidates.push(Candidate {
                credit,
                work: work[at],
                requests: requests[at],
                chosen: 0.0,
            });
        }
        let scores = score::weigh(&candidates, length, &self.loads);
        let best = score::best_of(&scores);
        let plain = |one: &score::Score| (one.score, one.uncached, one.load, one.is_hot);
        Ok((scores.iter().map(plain).collect(), best))
    }
}

impl Scorer {
    /// Returns the weights of the tiers: multiplied by `uncertain_weight` for the tiers in `names`, and by `believed` for all others.
    fn trusted_weights(&self, py: Python<'_>, believed: f64, names: &[String]) -> PyResult<TierWeights> {
        let known: Vec<String> = self.tiers.iter().map(|name| name.extract(py)).collect::<PyResult<_>>()?;
        let factor = |at: usize| {
            if names.contains(&known[at]) {
                self.uncertain_weight
            } else {
                believed
            }
        };
        let has_other = names.iter().any(|name| !known.contains(name));
        Ok(self
            .weights
            .with_factors(factor, if has_other { self.uncertain_weight } else { believed }))
    }

    /// Returns the length of the prefix on each tier that has a weight.
    fn reached(&self, tiers: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
        let py = tiers.py();
        let reach = |name: &Py<PyString>| match tiers.cast::<PyDict>() {
            Ok(tiers) => tiers.get_item(name)?.map_or(Ok(0), |tokens| tokens.extract()),
            Err(_) => tiers.call_method1(pyo3::intern!(py, "get"), (name, 0))?.extract(),
        };
        self.tiers.iter().map(reach).collect()
    }
}

/// Returns the number of requests above which the cache of a worker does not count. Each worker has a number of requests, and a share of
/// the prompt that its cache saves.
#[pyfunction]
pub(super) fn max_requests(requests: Vec<f64>, shares: Vec<f64>) -> f64 {
    kvevents_routing::max_requests(&requests, &shares)
}

/// Returns the positions of the workers with the smallest distance.
#[pyfunction]
pub(super) fn nearest(distances: Vec<u8>) -> Vec<usize> {
    score::nearest(&distances)
}

/// Chooses one of several equally good workers, in rotation. Any thread can call its methods. No thread waits for the lock, since each
/// thread holds the GIL while it has the lock.
#[pyclass(frozen, module = "kvevents.routing")]
pub(super) struct Ties {
    pub(super) ties: kvevents_routing::Ties,
}

#[pymethods]
impl Ties {
    /// `random` is a `random.Random`, from which the first position and random choices are drawn.
    #[new]
    #[pyo3(signature = (random, max_workers=MAX_TURNS))]
    fn new(random: &Bound<'_, PyAny>, max_workers: usize) -> PyResult<Self> {
        let start = random.call_method0("random")?.extract()?;
        let source = random.getattr("randrange")?.unbind();
        let draw = move |count: usize| -> usize {
            let drawn = Python::attach(|py| source.call1(py, (count,))?.extract(py));
            drawn.unwrap_or(0)
        };
        Ok(Self {
            ties: kvevents_routing::Ties::new(start, max_workers, Box::new(draw)),
        })
    }

    /// Returns the position of the chosen worker. `how` is `rotate`, `random` or `first`.
    fn pick(&self, how: &str, equal: &Bound<'_, PyList>) -> PyResult<usize> {
        let how = match how {
            "rotate" => Tie::Rotate,
            "random" => Tie::Random,
            "first" => Tie::First,
            _ => {
                return Err(PyValueError::new_err(format!(
                    "unknown tie rule {how:?}: expected \"rotate\", \"random\" or \"first\""
                )));
            }
        };
        let keys: Vec<u64> = equal.iter().map(|worker| key(&worker)).collect::<PyResult<_>>()?;
        Ok(self.ties.pick(how, &keys))
    }

    /// Records that a worker was chosen, so that it is the last one in the rotation.
    fn took(&self, worker: &Bound<'_, PyAny>) -> PyResult<()> {
        self.ties.record_choice(key(worker)?);
        Ok(())
    }

    /// Number of workers whose last choice is stored.
    #[getter]
    fn remembered(&self) -> usize {
        self.ties.worker_count()
    }
}

/// The key by which a worker is stored. It is a hash, since clients can choose names of any length.
fn key(worker: &Bound<'_, PyAny>) -> PyResult<u64> {
    Ok(worker.hash()? as u64)
}

/// The work of workers: the requests that their engines report, the reservations and the selections. Any thread can call its methods. Each
/// method releases the GIL, since native threads also take the lock of this object.
#[pyclass(frozen, module = "kvevents_native._native")]
pub(super) struct Loads {
    pub(super) loads: Arc<kvevents_routing::Loads>,
}

#[pymethods]
impl Loads {
    /// A reading older than `max_age` seconds does not count. At most `max_reservations` reservations can be open.
    #[new]
    #[pyo3(signature = (max_age, max_reservations=65_536))]
    fn new(max_age: f64, max_reservations: usize) -> PyResult<Self> {
        let loads = kvevents_routing::Loads::new(seconds(max_age)?, max_reservations);
        Ok(Self { loads: Arc::new(loads) })
    }

    /// Stores the number of requests that the engine of a worker reported `age` seconds ago.
    #[pyo3(signature = (source, rank, requests, age=0.0))]
    fn report(&self, py: Python<'_>, source: &str, rank: i64, requests: f64, age: f64) -> PyResult<()> {
        let age = seconds(age)?;
        py.detach(|| self.loads.report(source, rank, requests, age));
        Ok(())
    }

    /// Adds a worker. Its numbers of requests and choices begin with the means of its `peers`.
    fn join(&self, py: Python<'_>, source: &str, rank: i64, peers: Vec<(String, i64)>) {
        py.detach(|| self.loads.join(source, rank, &peers));
    }

    /// Forgets a worker.
    fn remove(&self, py: Python<'_>, source: &str, rank: i64) {
        py.detach(|| self.loads.remove(source, rank));
    }

    /// The number of requests of a worker: the reported number, corrected by requests that began or ended after the report. None without a
    /// recent report.
    fn requests(&self, py: Python<'_>, source: &str, rank: i64) -> Option<f64> {
        py.detach(|| self.loads.requests(source, rank))
    }
}

fn seconds(number: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(number).map_err(|error| PyValueError::new_err(error.to_string()))
}
