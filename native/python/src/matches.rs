//! Results for Python: matches and counters.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use kvevents_index::holders::placements::{LEVELS, TIERS};
use kvevents_index::lookup::Matches;
use kvevents_index::lookup::matching::Hit;
use kvevents_index::store::members::Worker;
use kvevents_index::stream::Counters;

/// The prefix of a prompt that one worker holds.
#[pyclass(frozen, module = "kvevents.index")]
pub(super) struct WorkerMatch {
    worker: Worker,
    tokens: [u32; LEVELS],
    certain: [u32; LEVELS],
    is_certain: bool,
}

impl WorkerMatch {
    fn new(found: &Matches, hit: &Hit) -> Self {
        Self {
            worker: found.worker(hit).clone(),
            tokens: hit.tokens,
            certain: found.certain(hit),
            is_certain: found.is_certain(hit),
        }
    }
}

#[pymethods]
impl WorkerMatch {
    /// Name of the engine.
    #[getter]
    fn source(&self) -> &str {
        &self.worker.source
    }

    /// Data-parallel rank.
    #[getter]
    fn rank(&self) -> i64 {
        self.worker.rank
    }

    /// Number of tokens of the prefix that the worker holds, over all tiers.
    #[getter]
    fn tokens(&self) -> u32 {
        self.tokens[LEVELS - 1]
    }

    /// Number of tokens of the prefix that the worker certainly holds, over all tiers. It is less than `tokens` if some blocks might be
    /// gone.
    ///
    /// A block might be gone if it was removed, but less often than it was announced: several announcements might mean one copy.
    #[getter]
    fn certain(&self) -> u32 {
        self.certain[LEVELS - 1]
    }

    /// Whether the worker certainly holds all tokens of this match, on each tier.
    ///
    /// If it does not, `tokens` is an upper bound, or 0 if no bound is known. For an engine with an unknown hash scheme, no bound is known
    /// if it has no full attention, or full attention with several block sizes.
    #[getter]
    fn is_certain(&self) -> bool {
        self.is_certain
    }

    /// Maps each tier to the number of tokens of the prefix on this tier and faster tiers: the prefix for `cpu` can begin on the GPU and
    /// continue in host memory.
    #[getter]
    fn tiers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let tiers = PyDict::new(py);
        for (name, tokens) in TIERS.iter().chain(&["other"]).zip(self.tokens) {
            if *name != "other" || tokens > self.tokens[LEVELS - 2] {
                tiers.set_item(name, tokens)?;
            }
        }
        Ok(tiers)
    }

    fn __repr__(&self) -> String {
        let all = self.tokens[LEVELS - 1];
        let mut reached = 0;
        let mut tiers = String::new();
        for (name, tokens) in TIERS.iter().zip(self.tokens) {
            if tokens > reached {
                tiers.push_str(&format!(", {name} {tokens}")); // a tier that adds nothing would look like another copy
                reached = tokens;
            }
        }
        let Worker { source, rank } = &self.worker;
        let certain = self.certain();
        let note = if self.is_certain() {
            String::new()
        } else {
            format!(", {certain} of them certain")
        };
        format!("<WorkerMatch {source} rank {rank}: {all} tokens{tiers}{note}>")
    }
}

/// The workers that hold a prefix of a prompt.
#[pyclass(frozen, module = "kvevents.index")]
pub(super) struct Match {
    pub(super) found: Matches,
}

#[pymethods]
impl Match {
    fn __len__(&self) -> usize {
        self.found.hits.len()
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let hits = self.found.hits.iter();
        let items = hits
            .map(|hit| Py::new(py, WorkerMatch::new(&self.found, hit)))
            .collect::<PyResult<Vec<_>>>()?;
        Ok(PyList::new(py, items)?.try_iter()?.into_any())
    }

    /// The match with the longest prefix. Of equally long matches, it is the one with most tokens on the fastest tiers. None if no worker
    /// matches.
    #[getter]
    fn best(&self) -> Option<WorkerMatch> {
        let rank = |hit: &&Hit| (hit.tokens[3], hit.tokens[0], hit.tokens[1], hit.tokens[2]);
        let best = self.found.hits.iter().max_by_key(rank);
        best.map(|hit| WorkerMatch::new(&self.found, hit))
    }

    /// The match of one worker; None if the worker holds no block of the prompt.
    #[pyo3(signature = (source, rank=0))]
    fn get(&self, source: &str, rank: i64) -> Option<WorkerMatch> {
        let same = |hit: &&Hit| {
            let worker = self.found.worker(hit);
            worker.source == source && worker.rank == rank
        };
        let found = self.found.hits.iter().find(same);
        found.map(|hit| WorkerMatch::new(&self.found, hit))
    }

    /// Returns `(source, rank, gpu, cpu, disk, tokens, certain, is_certain)` for each worker, without creating match objects. The numbers
    /// of the tiers are cumulative.
    fn rows<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let rows = PyList::empty(py);
        for hit in &self.found.hits {
            let ([gpu, cpu, disk, all], worker) = (hit.tokens, self.found.worker(hit));
            let certain = self.found.certain(hit);
            let is_certain = self.found.is_certain(hit);
            rows.append((
                &worker.source,
                worker.rank,
                gpu,
                cpu,
                disk,
                all,
                certain[LEVELS - 1],
                is_certain,
            ))?;
        }
        Ok(rows)
    }

    fn __repr__(&self) -> String {
        let hits = &self.found.hits;
        let shown = |hit: &Hit| {
            let Worker { source, rank } = self.found.worker(hit);
            format!("{source}/{rank}: {}", hit.tokens[3])
        };
        let each: Vec<String> = hits.iter().take(8).map(shown).collect();
        let more = if hits.len() > 8 { ", ..." } else { "" };
        format!("<Match of {} workers: {}{more}>", hits.len(), each.join(", "))
    }
}

pub(super) fn counters<'py>(py: Python<'py>, counters: &Counters) -> PyResult<Bound<'py, PyDict>> {
    let (plain, rejected) = (PyDict::new(py), PyDict::new(py));
    for ((kind, reason), count) in &counters.rejected {
        rejected.set_item((kind, reason), count)?;
    }
    plain.set_item("rejected", rejected)?;
    plain.set_item("unknown_removals", counters.unknown)?;
    plain.set_item("orphans_dropped", counters.dropped)?;
    plain.set_item("evicted", counters.evicted)?;
    plain.set_item("duplicates", counters.duplicates)?;
    plain.set_item("void", counters.void)?;
    plain.set_item("gaps", counters.gaps)?;
    Ok(plain)
}
