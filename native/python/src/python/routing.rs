//! What `kvevents.routing` chooses by; `/v1/select` goes by the same.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString};

use kvevents_server::score::{self, Candidate, LoadWeights, TierWeights};
use kvevents_server::{MAX_TURNS, Tie};

/// The score of workers, by what tiers and loads are worth.
#[pyclass(frozen, module = "kvevents_native._native")]
pub(super) struct Scorer {
    tiers: Vec<Py<PyString>>,
    weights: TierWeights,
    loads: LoadWeights,
}

/// Score, uncached share, load, and whether it is hot.
type Plain = (f64, f64, f64, bool);

#[pymethods]
impl Scorer {
    #[new]
    fn new(tiers: &Bound<'_, PyDict>, wait: f64, mean: f64, guard: f64, guard_requests: f64) -> PyResult<Self> {
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
                guard,
                guard_requests,
            },
        })
    }

    /// Scores of workers for a prompt of `length` tokens, and the places of those that are best and equal.
    ///
    /// Of each worker `tokens` are held on whatever tiers, and `tiers` has how far the prefix reaches on each, with faster ones;
    /// `believed` is from 0 to 1.
    fn weigh(
        &self,
        length: u64,
        tokens: Vec<u64>,
        tiers: &Bound<'_, PyList>,
        believed: Vec<f64>,
        work: Vec<f64>,
        requests: Vec<f64>,
    ) -> PyResult<(Vec<Plain>, Vec<usize>)> {
        let count = tokens.len();
        if [tiers.len(), believed.len(), work.len(), requests.len()] != [count; 4] {
            return Err(PyValueError::new_err("the lists differ in length"));
        }
        let mut candidates = Vec::with_capacity(count);
        for at in 0..count {
            let saved = if tokens[at] == 0 {
                0.0
            } else {
                let reached = self.reached(&tiers.get_item(at)?)?;
                self.weights.saved(tokens[at], length, |tier| reached[tier])
            };
            candidates.push(Candidate {
                credit: believed[at] * saved,
                work: work[at],
                requests: requests[at],
            });
        }
        let scores = score::weigh(&candidates, length, &self.loads);
        let best = score::best_of(&scores);
        let plain = |one: &score::Score| (one.score, one.uncached, one.load, one.is_hot);
        Ok((scores.iter().map(plain).collect(), best))
    }
}

impl Scorer {
    /// How far a prefix reaches on each tier that has a weight.
    fn reached(&self, tiers: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
        let py = tiers.py();
        let reach = |name: &Py<PyString>| match tiers.cast::<PyDict>() {
            Ok(tiers) => tiers.get_item(name)?.map_or(Ok(0), |tokens| tokens.extract()),
            Err(_) => tiers.call_method1(pyo3::intern!(py, "get"), (name, 0))?.extract(),
        };
        self.tiers.iter().map(reach).collect()
    }
}

/// Places of the workers with the least distance.
#[pyfunction]
pub(super) fn nearest(distances: Vec<u8>) -> Vec<usize> {
    score::nearest(&distances)
}

/// Which of several equally good workers comes next. Any thread may ask.
#[pyclass(frozen, module = "kvevents.routing")]
pub(super) struct Ties {
    ties: kvevents_server::Ties,
}

#[pymethods]
impl Ties {
    /// `random` is a `random.Random`: it says where the first turn is, and draws.
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
            ties: kvevents_server::Ties::new(start, max_workers, Box::new(draw)),
        })
    }

    /// The place of the worker to take; `how` is `rotate`, `random` or `first`.
    fn pick(&self, how: &str, equal: &Bound<'_, PyList>) -> PyResult<usize> {
        let how = match how {
            "rotate" => Tie::Rotate,
            "random" => Tie::Random,
            "first" => Tie::First,
            _ => return Err(PyValueError::new_err(format!("unknown tie break {how:?}"))),
        };
        let keys: Vec<u64> = equal.iter().map(|worker| key(&worker)).collect::<PyResult<_>>()?;
        Ok(self.ties.pick(how, &keys))
    }

    /// Notes that a worker was chosen, whatever for: of equal ones it is the last to come next.
    fn took(&self, worker: &Bound<'_, PyAny>) -> PyResult<()> {
        self.ties.took(key(worker)?);
        Ok(())
    }

    /// Workers whose last turn is remembered.
    #[getter]
    fn remembered(&self) -> usize {
        self.ties.remembered()
    }
}

/// A worker is known by its hash: its name is as long as a client likes.
fn key(worker: &Bound<'_, PyAny>) -> PyResult<u64> {
    Ok(worker.hash()? as u64)
}

/// The choice of `/v1/select` among candidates that Python has found; question and answer are msgpack.
#[pyfunction]
pub(super) fn select<'py>(py: Python<'py>, question: &[u8], ties: &Bound<'py, Ties>) -> PyResult<Bound<'py, PyBytes>> {
    let selected = kvevents_server::select_among(question, &ties.get().ties).map_err(PyValueError::new_err)?;
    Ok(PyBytes::new(py, &selected))
}
