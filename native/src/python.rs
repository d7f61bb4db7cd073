//! The Python face of the core: arguments in, answers out. What needs no speed is in `kvevents.index` itself.

use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;
use std::sync::Arc;

use pyo3::buffer::{ElementType, PyUntypedBuffer};
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString, PyTuple};

use crate::core::Worker;
use crate::index::{Index, Limits, Outcome, Scope};
use crate::keys::{self, Item, Scheme};
use crate::matching::Hit;
use crate::planes::LEVELS;
use crate::scan::{self, Kind, OwnedExtra, OwnedId, Schema};
use crate::snapshot::{self, Failure};

/// Tokens or bytes of a payload from which on other threads may run meanwhile; below, switching costs more than the work.
const WORTH_RELEASING: usize = 2_048;

// --- arguments

/// Token ids of a caller: its own memory where that holds 32-bit numbers.
enum Tokens {
    Shared(PyUntypedBuffer),
    Owned(Vec<u32>),
}

impl Tokens {
    fn slice(&self) -> &[u32] {
        match self {
            // SAFETY: the buffer is contiguous, aligned and held, and its elements are unsigned and of 4 bytes. A caller that writes
            // to it meanwhile gets the answer for some mix of old and new tokens; any 32 bits are a token.
            Self::Shared(buffer) => unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast(), buffer.item_count()) },
            Self::Owned(tokens) => tokens,
        }
    }
}

fn not_tokens(given: &Bound<'_, PyAny>) -> PyErr {
    let kind = given.get_type().name().map_or_else(|_| "?".into(), |name| name.to_string());
    PyTypeError::new_err(format!(
        "tokens are a list of integers, or a one-dimensional array or buffer of integers of 16 to 64 bits in this machine's byte order; \
         not {kind}"
    ))
}

/// The buffer of an object, and what it holds, if that is one row of integers wider than a byte. Those of another byte order are not
/// looked at: PyO3 takes `>` for the order of this machine.
fn integers_of(given: &Bound<'_, PyAny>) -> Option<(PyUntypedBuffer, ElementType)> {
    let buffer = PyUntypedBuffer::get(given).ok()?;
    let kind = ElementType::from_format(buffer.format());
    let (ElementType::SignedInteger { bytes } | ElementType::UnsignedInteger { bytes }) = kind else {
        return None;
    };
    let foreign = matches!(buffer.format().to_bytes()[0], b'>' | b'!');
    let plain = buffer.dimensions() == 1 && buffer.suboffsets().is_none() && buffer.item_size() == bytes;
    (plain && bytes > 1 && !foreign).then_some((buffer, kind))
}

/// Copies such a buffer; None where a number does not fit.
fn copied<T>(buffer: &PyUntypedBuffer, kind: ElementType) -> Option<Vec<T>>
where
    T: TryFrom<u16> + TryFrom<u32> + TryFrom<u64> + TryFrom<i16> + TryFrom<i32> + TryFrom<i64>,
{
    match kind {
        ElementType::UnsignedInteger { bytes: 2 } => elements::<u16, T>(buffer),
        ElementType::UnsignedInteger { bytes: 4 } => elements::<u32, T>(buffer),
        ElementType::UnsignedInteger { bytes: 8 } => elements::<u64, T>(buffer),
        ElementType::SignedInteger { bytes: 2 } => elements::<i16, T>(buffer),
        ElementType::SignedInteger { bytes: 4 } => elements::<i32, T>(buffer),
        ElementType::SignedInteger { bytes: 8 } => elements::<i64, T>(buffer),
        _ => None,
    }
}

fn elements<From: Copy, To: TryFrom<From>>(buffer: &PyUntypedBuffer) -> Option<Vec<To>> {
    let (start, stride) = (buffer.buf_ptr().cast::<u8>(), buffer.strides()[0]);
    let element = |at: usize| {
        // SAFETY: the buffer is held, has one dimension of `item_count` elements `stride` bytes apart, and each is as large as a `From`,
        // which any bits are.
        let value = unsafe { start.offset(stride * at as isize).cast::<From>().read_unaligned() };
        To::try_from(value).ok()
    };
    (0..buffer.item_count()).map(element).collect()
}

fn tokens_of(given: &Bound<'_, PyAny>) -> PyResult<Tokens> {
    if let Ok(list) = given.cast::<PyList>() {
        return listed(list.iter());
    }
    if let Ok(tuple) = given.cast::<PyTuple>() {
        return listed(tuple.iter());
    }
    let (buffer, kind) = integers_of(given).ok_or_else(|| not_tokens(given))?;
    if buffer.item_count() == 0 {
        return Ok(Tokens::Owned(Vec::new()));
    }
    let shared = kind == ElementType::UnsignedInteger { bytes: 4 } && buffer.is_c_contiguous();
    if shared && buffer.buf_ptr().cast::<u32>().is_aligned() {
        return Ok(Tokens::Shared(buffer));
    }
    let refused = || PyOverflowError::new_err("a token is outside of 0 to 2**32 - 1");
    copied(&buffer, kind).map(Tokens::Owned).ok_or_else(refused)
}

fn listed<'py>(items: impl ExactSizeIterator<Item = Bound<'py, PyAny>>) -> PyResult<Tokens> {
    let mut tokens = Vec::with_capacity(items.len());
    for (at, item) in items.enumerate() {
        let refused = |_| PyTypeError::new_err(format!("token {at} is no integer from 0 to 2**32 - 1"));
        tokens.push(item.extract().map_err(refused)?);
    }
    Ok(Tokens::Owned(tokens))
}

fn keys_of(given: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    let found = match integers_of(given) {
        Some((buffer, kind)) => copied(&buffer, kind),
        None if PyUntypedBuffer::get(given).is_ok() => None,
        None => given.extract().ok(),
    };
    let refused =
        || PyTypeError::new_err("keys are integers from 0 to 2**64 - 1, in a list or a buffer of this machine's byte order");
    found.ok_or_else(refused)
}

/// A stream or worker: `(source, rank)`, or the source alone for rank 0.
#[derive(FromPyObject)]
enum Named<'py> {
    Both(Bound<'py, PyString>, i64),
    Source(Bound<'py, PyString>),
}

impl Named<'_> {
    fn parts(&self) -> PyResult<(&str, i64)> {
        match self {
            Self::Both(source, rank) => Ok((source.to_str()?, *rank)),
            Self::Source(source) => Ok((source.to_str()?, 0)),
        }
    }
}

fn scope_of(namespace: Option<&Bound<'_, PyAny>>) -> PyResult<Scope> {
    let Some(given) = namespace else { return Ok(Scope::default()) };
    let py = given.py();
    let text = |name| given.getattr(name)?.extract::<Option<String>>();
    let lora = given.getattr(pyo3::intern!(py, "lora"))?;
    let lora = if lora.is_none() {
        0
    } else if let Ok(name) = lora.cast::<PyString>() {
        keys::lora_name(name.to_str()?.as_bytes())
    } else {
        keys::lora_id(lora.extract()?)
    };
    let mut items = Vec::new();
    for item in given.getattr(pyo3::intern!(py, "mm"))?.try_iter()? {
        let item = item?;
        let id = item.getattr(pyo3::intern!(py, "id"))?;
        let (id, placeless) = if let Ok(text) = id.cast::<PyString>() {
            (keys::item_text(text.to_str()?), false)
        } else if let Ok(bytes) = id.cast::<PyBytes>() {
            (keys::item_bytes(bytes.as_bytes()), false)
        } else {
            let number = id.call_method0(pyo3::intern!(py, "__index__"))?;
            (number.bitand(u64::MAX)?.extract()?, true)
        };
        let (start, length) = (
            item.getattr(pyo3::intern!(py, "start"))?.extract()?,
            item.getattr(pyo3::intern!(py, "length"))?.extract()?,
        );
        items.push(Item {
            id,
            placeless,
            start,
            length,
        });
    }
    let salt = text(pyo3::intern!(py, "salt"))?.map_or(0, |salt| keys::salt(salt.as_bytes()));
    Ok(Scope {
        model: text(pyo3::intern!(py, "model"))?,
        lora,
        salt,
        items,
    })
}

fn scheme_of(block_size: i64, eagle: bool) -> PyResult<Scheme> {
    match u32::try_from(block_size) {
        Ok(size) if size > 0 => Ok(Scheme { size, eagle }),
        _ => Err(PyValueError::new_err(format!(
            "block_size is {block_size}; it must be from 1 to 2**32 - 1"
        ))),
    }
}

// --- answers

/// What one worker holds of a prompt.
#[pyclass(frozen, module = "kvevents.index")]
struct WorkerMatch {
    hit: Hit,
}

#[pymethods]
impl WorkerMatch {
    /// Name of the engine.
    #[getter]
    fn source(&self) -> &str {
        &self.hit.worker.source
    }

    /// Data-parallel rank.
    #[getter]
    fn rank(&self) -> i64 {
        self.hit.worker.rank
    }

    /// Tokens of the longest prefix that it holds, on whatever tiers.
    #[getter]
    fn tokens(&self) -> u64 {
        self.hit.tokens[LEVELS - 1]
    }

    /// Tokens by tier, cumulative: `cpu` counts a prefix that begins on the GPU and goes on in host memory.
    #[getter]
    fn tiers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let tiers = PyDict::new(py);
        for (name, tokens) in ["gpu", "cpu", "disk", "other"].iter().zip(self.hit.tokens) {
            if *name != "other" || tokens > self.hit.tokens[LEVELS - 2] {
                tiers.set_item(name, tokens)?;
            }
        }
        Ok(tiers)
    }

    fn __repr__(&self) -> String {
        let [gpu, cpu, disk, all] = self.hit.tokens;
        let worker = &self.hit.worker;
        format!(
            "<WorkerMatch {} rank {}: {all} tokens, gpu {gpu}, cpu {cpu}, disk {disk}>",
            worker.source, worker.rank
        )
    }
}

/// Workers that hold a beginning of a prompt.
#[pyclass(frozen, module = "kvevents.index")]
struct Match {
    hits: Vec<Hit>,
}

#[pymethods]
impl Match {
    fn __len__(&self) -> usize {
        self.hits.len()
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let items = self
            .hits
            .iter()
            .map(|hit| Py::new(py, WorkerMatch { hit: hit.clone() }))
            .collect::<PyResult<Vec<_>>>()?;
        Ok(PyList::new(py, items)?.try_iter()?.into_any())
    }

    /// The worker with the longest prefix; of equal ones one with most on the fastest tiers. None without any hit.
    #[getter]
    fn best(&self) -> Option<WorkerMatch> {
        let rank = |hit: &&Hit| (hit.tokens[3], hit.tokens[0], hit.tokens[1], hit.tokens[2]);
        self.hits.iter().max_by_key(rank).map(|hit| WorkerMatch { hit: hit.clone() })
    }

    /// What one worker holds, or None.
    #[pyo3(signature = (source, rank=0))]
    fn get(&self, source: &str, rank: i64) -> Option<WorkerMatch> {
        let same = |hit: &&Hit| hit.worker.source == source && hit.worker.rank == rank;
        self.hits.iter().find(same).map(|hit| WorkerMatch { hit: hit.clone() })
    }

    fn __repr__(&self) -> String {
        let each: Vec<String> = self
            .hits
            .iter()
            .take(8)
            .map(|hit| format!("{}/{}: {}", hit.worker.source, hit.worker.rank, hit.tokens[3]))
            .collect();
        let more = if self.hits.len() > 8 { ", ..." } else { "" };
        format!("<Match of {} workers: {}{more}>", self.hits.len(), each.join(", "))
    }
}

fn detached<T: Send>(py: Python<'_>, worth: bool, work: impl FnOnce() -> T + Send) -> T {
    if worth { py.detach(work) } else { work() }
}

// --- the index

/// The native part of `kvevents.index.PrefixIndex`.
#[pyclass(subclass, frozen, module = "kvevents._native")]
struct NativeIndex {
    index: Arc<Index>,
    /// For events that Python has read within its limits, and spelled anew: they may be larger then.
    ours: Schema,
    applied: Py<PyAny>,
    cleared: Py<PyAny>,
    duplicate: Py<PyAny>,
    void: Py<PyAny>,
}

/// Key, hash, tier, group and copies.
type PlainBlock = (u64, u64, String, i64, u32);

/// By tag the fields of array events and the names of map events.
type Layouts = Vec<(String, Vec<String>, Vec<String>)>;

impl NativeIndex {
    fn told(&self, py: Python<'_>, outcome: Outcome) -> PyResult<Py<PyAny>> {
        match outcome {
            Outcome::Applied(false) => Ok(self.applied.clone_ref(py)),
            Outcome::Applied(true) => Ok(self.cleared.clone_ref(py)),
            Outcome::Duplicate => Ok(self.duplicate.clone_ref(py)),
            Outcome::Void => Ok(self.void.clone_ref(py)),
            Outcome::Unread => Ok(py.None()),
            Outcome::Full => Err(PyValueError::new_err(
                "the index has as many streams as it can hold; remove workers that are gone",
            )),
        }
    }

    /// Whether other threads had better run while a payload is applied.
    fn may_wait(&self, payload: &[u8]) -> bool {
        payload.len() >= WORTH_RELEASING || self.index.is_saving()
    }

    fn now(slf: &Bound<'_, Self>) -> PyResult<f64> {
        slf.call_method0(pyo3::intern!(slf.py(), "_now"))?.extract()
    }
}

#[pymethods]
impl NativeIndex {
    #[new]
    #[pyo3(signature = (layouts, wire_limits, memory_limit, max_orphans, max_fences, max_speculated, outcomes))]
    fn new(
        layouts: Layouts,
        wire_limits: [usize; 6],
        memory_limit: Option<usize>,
        max_orphans: usize,
        max_fences: usize,
        max_speculated: usize,
        outcomes: [Py<PyAny>; 4],
    ) -> PyResult<Self> {
        let [
            max_payload_bytes,
            max_events,
            max_hashes,
            max_fields,
            max_free_bytes,
            max_nesting,
        ] = wire_limits;
        let peers = scan::Limits {
            max_payload_bytes,
            max_events,
            max_hashes,
            max_fields,
            max_free_bytes,
            max_nesting,
        };
        let none = usize::MAX;
        let ours = scan::Limits {
            max_payload_bytes: none,
            max_events: none,
            max_hashes: none,
            max_free_bytes: none,
            ..peers
        };
        let schema = |limits| Schema::new(&layouts, limits).map_err(PyValueError::new_err);
        let limits = Limits {
            memory: memory_limit,
            orphans: max_orphans,
            fences: max_fences,
            speculated: max_speculated,
        };
        let [applied, cleared, duplicate, void] = outcomes;
        Ok(Self {
            index: Arc::new(Index::new(schema(peers)?, limits)),
            ours: schema(ours)?,
            applied,
            cleared,
            duplicate,
            void,
        })
    }

    /// Applies the payload of one batch as the engine sent it.
    ///
    /// `stream` is `(source, rank)`, or the source alone for rank 0.
    fn apply_payload(
        slf: &Bound<'_, Self>,
        stream: Bound<'_, PyAny>,
        incarnation: i64,
        seq: i64,
        payload: Bound<'_, PyBytes>,
    ) -> PyResult<Py<PyAny>> {
        let (py, this) = (slf.py(), slf.get());
        let named: Named<'_> = stream.extract()?;
        let (source, rank) = named.parts()?;
        let bytes = payload.as_bytes();
        let outcome = detached(py, this.may_wait(bytes), || {
            this.index.batch(source, rank, incarnation, seq, bytes)
        });
        if outcome == Outcome::Unread {
            let careful = pyo3::intern!(py, "_apply_careful");
            return Ok(slf.call_method1(careful, (source, rank, incarnation, seq, payload))?.unbind());
        }
        this.told(py, outcome)
    }

    /// As `apply_payload`, and None for what this decoder does not read.
    fn _apply(
        &self,
        py: Python<'_>,
        source: &str,
        rank: i64,
        incarnation: i64,
        seq: i64,
        payload: &[u8],
    ) -> PyResult<Py<PyAny>> {
        let outcome = detached(py, self.may_wait(payload), || {
            self.index.batch_by(&self.ours, source, rank, incarnation, seq, payload)
        });
        self.told(py, outcome)
    }

    /// Applies many raw batches, other threads running meanwhile. Ends before the first one that this decoder does not read.
    fn _apply_many(&self, py: Python<'_>, batches: Vec<Bound<'_, PyAny>>) -> PyResult<Vec<Py<PyAny>>> {
        let mut found = Vec::with_capacity(batches.len());
        for batch in &batches {
            let source = batch.getattr(pyo3::intern!(py, "source"))?.cast_into::<PyString>()?;
            let rank: i64 = batch.getattr(pyo3::intern!(py, "rank"))?.extract()?;
            let incarnation: i64 = batch.getattr(pyo3::intern!(py, "incarnation"))?.extract()?;
            let seq: i64 = batch.getattr(pyo3::intern!(py, "seq"))?.extract()?;
            let payload = batch.getattr(pyo3::intern!(py, "payload"))?.cast_into::<PyBytes>()?;
            found.push((source, rank, incarnation, seq, payload));
        }
        let mut borrowed = Vec::with_capacity(found.len());
        for (source, rank, incarnation, seq, payload) in &found {
            borrowed.push((source.to_str()?, *rank, *incarnation, *seq, payload.as_bytes()));
        }
        let outcomes: Vec<Outcome> = py.detach(|| {
            let batch = |&(source, rank, incarnation, seq, payload): &(&str, i64, i64, i64, &[u8])| {
                self.index.batch(source, rank, incarnation, seq, payload)
            };
            borrowed
                .iter()
                .map(batch)
                .take_while(|outcome| *outcome != Outcome::Unread)
                .collect()
        });
        outcomes.into_iter().map(|outcome| self.told(py, outcome)).collect()
    }

    fn _gap(&self, py: Python<'_>, source: &str, rank: i64, incarnation: i64, last: i64) -> PyResult<Py<PyAny>> {
        let outcome = py.detach(|| self.index.gap(source, rank, incarnation, last));
        self.told(py, outcome)
    }

    fn _reset(&self, py: Python<'_>, source: &str, rank: i64, incarnation: i64) -> PyResult<Py<PyAny>> {
        let outcome = py.detach(|| self.index.reset(source, rank, incarnation));
        self.told(py, outcome)
    }

    /// How long a prefix of `tokens` each worker holds.
    ///
    /// `tokens` are a list or tuple of integers, or a one-dimensional buffer of them (`array`, NumPy, memoryview), of which one of 32-bit
    /// unsigned integers is read where it lies. `namespace` says within what: without one, workers without a model, no LoRA, no salt.
    /// With `overlay` decisions told to `speculate` count as held on the GPU. Raises `TypeError` or `OverflowError` for what are no
    /// token ids.
    ///
    /// vLLM always computes the last token of a prompt anew: `match(tokens[:-1])` is what it will find cached.
    #[pyo3(name = "match", signature = (tokens, namespace=None, *, overlay=false))]
    fn match_(
        slf: &Bound<'_, Self>,
        tokens: &Bound<'_, PyAny>,
        namespace: Option<&Bound<'_, PyAny>>,
        overlay: bool,
    ) -> PyResult<Match> {
        let (py, this) = (slf.py(), slf.get());
        let given = tokens_of(tokens)?;
        let scope = scope_of(namespace)?;
        let slice = given.slice();
        let mut hits = detached(py, slice.len() >= WORTH_RELEASING, || this.index.matched(slice, &scope));
        if overlay {
            let now = Self::now(slf)?;
            py.detach(|| this.index.believed(slice, &scope, now, &mut hits));
        }
        Ok(Match { hits })
    }

    /// `match` for each of several prompts of one namespace.
    #[pyo3(signature = (prompts, namespace=None))]
    fn match_many(
        &self,
        py: Python<'_>,
        prompts: Vec<Bound<'_, PyAny>>,
        namespace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<Match>> {
        let given = prompts.iter().map(tokens_of).collect::<PyResult<Vec<_>>>()?;
        let scope = scope_of(namespace)?;
        let slices: Vec<&[u32]> = given.iter().map(Tokens::slice).collect();
        let found: Vec<_> = py.detach(|| slices.iter().map(|tokens| self.index.matched(tokens, &scope)).collect());
        Ok(found.into_iter().map(|hits| Match { hits }).collect())
    }

    /// The same for rolling keys that the caller has, as `block_keys` makes them: all of them, from the root on.
    ///
    /// A key stands for its whole prefix, so keys that begin in the middle are matched as if they began a prompt. Of `namespace` only
    /// the model counts, since keys hold the rest. Raises `ValueError` when workers have different block sizes and `block_size` does
    /// not say which one the keys are of, and `TypeError` for what is no list or buffer of unsigned 64-bit numbers.
    #[pyo3(signature = (keys, block_size=None, namespace=None))]
    fn match_keys(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        block_size: Option<i64>,
        namespace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Match> {
        let keys = keys_of(keys)?;
        let size = block_size
            .map(|size| scheme_of(size, false))
            .transpose()?
            .map(|scheme| scheme.size);
        let model = scope_of(namespace)?.model;
        let hits = py.detach(|| self.index.matched_keys(&keys, size, &model));
        let hits = hits.ok_or_else(|| {
            PyValueError::new_err("workers have blocks of different sizes; say block_size, the one that the keys are of")
        })?;
        Ok(Match { hits })
    }

    fn _label(&self, py: Python<'_>, source: &str, model: Option<&str>) {
        py.detach(|| self.index.label(source, model));
    }

    fn _remove(&self, py: Python<'_>, source: &str, rank: Option<i64>) -> usize {
        py.detach(|| self.index.remove(source, rank))
    }

    fn _admit(&self, py: Python<'_>, source: &str, rank: i64) {
        py.detach(|| self.index.admit(source, rank));
    }

    /// Per worker a dictionary of everything.
    fn _workers<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let infos = py.detach(|| self.index.infos());
        let plain = |info: crate::index::Info| {
            let plain = counters(py, &info.counters)?;
            plain.set_item("source", &info.worker.source)?;
            plain.set_item("rank", info.worker.rank)?;
            plain.set_item("model", info.model)?;
            plain.set_item("blocks", info.blocks)?;
            plain.set_item("incarnation", info.incarnation)?;
            plain.set_item("last_seq", info.last)?;
            plain.set_item("orphans", info.orphans)?;
            plain.set_item("copies", info.copies)?;
            Ok(plain)
        };
        infos.into_iter().map(plain).collect()
    }

    /// What belongs to no worker.
    fn _totals<'py>(slf: &Bound<'py, Self>, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (index, now) = (&slf.get().index, Self::now(slf)?);
        let ((bytes, records), ended, (size, confirmed, expired)) = py.detach(|| {
            let mut overlay = index.overlay.lock();
            index.expire(&mut overlay, now);
            (
                index.bytes(),
                index.ended(),
                (overlay.len(), overlay.confirmed, overlay.expired),
            )
        });
        let totals = counters(py, &ended)?;
        totals.set_item("bytes", bytes)?;
        totals.set_item("unique_blocks", records)?;
        totals.set_item("speculated", size)?;
        totals.set_item("confirmed", confirmed)?;
        totals.set_item("expired", expired)?;
        Ok(totals)
    }

    /// Per block and plane `(key, hash, tier, group, copies)`, or None when there is no such stream.
    fn _blocks(&self, py: Python<'_>, source: &str, rank: i64) -> Option<Vec<PlainBlock>> {
        let (blocks, planes) = py.detach(|| self.index.stream(source, rank).map(|_| self.index.blocks(source, rank)))?;
        let plain = |held: crate::index::Held| {
            let plane = &planes[held.plane as usize];
            (held.key, held.hash, plane.tier.clone(), plane.group, held.copies)
        };
        Some(blocks.into_iter().map(plain).collect())
    }

    fn _digest(&self, py: Python<'_>, source: &str, rank: i64) -> Option<u128> {
        py.detach(|| self.index.stream(source, rank).map(|stream| stream.lock().digest))
    }

    fn _speculate(
        &self,
        source: &str,
        rank: i64,
        tokens: &Bound<'_, PyAny>,
        namespace: Option<&Bound<'_, PyAny>>,
        now: f64,
        ttl: f64,
    ) -> PyResult<()> {
        let given = tokens_of(tokens)?;
        let scope = scope_of(namespace)?;
        let (worker, slice) = (
            Worker {
                source: source.into(),
                rank,
            },
            given.slice(),
        );
        tokens
            .py()
            .detach(|| self.index.speculate(worker, slice, &scope, now, now + ttl));
        Ok(())
    }

    /// Writes a snapshot to a new file, natively: what waits for a stream may hold Python's lock, so the stream must not wait for that.
    fn _snapshot(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        let write = || {
            self.index
                .save(File::options().write(true).create_new(true).open(path)?)?
                .sync_all()
        };
        Ok(py.detach(write)?)
    }

    /// Restores a snapshot of which `read` returns as many bytes as it is asked for, or fewer, and none at its end.
    fn _restore(&self, py: Python<'_>, read: Py<PyAny>) -> PyResult<()> {
        let outcome = py.detach(|| {
            snapshot::restore(
                &self.index,
                Pieces {
                    read,
                    piece: Vec::new(),
                    at: 0,
                },
            )
        });
        outcome.map_err(|failure| match failure {
            Failure::Io(error) => error.into(),
            Failure::Bad(what) => PyValueError::new_err(what),
        })
    }

    /// Events as the scanner reads them; None where it leaves them to Python.
    fn _scan<'py>(&self, py: Python<'py>, payload: &[u8]) -> PyResult<Option<Vec<Bound<'py, PyDict>>>> {
        let found = scan::describe(payload, self.index.schema());
        found
            .map(|events| events.iter().map(|event| described(py, event)).collect())
            .transpose()
    }
}

fn counters<'py>(py: Python<'py>, counters: &crate::stream::Counters) -> PyResult<Bound<'py, PyDict>> {
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

fn described<'py>(py: Python<'py>, event: &scan::Described) -> PyResult<Bound<'py, PyDict>> {
    let plain = PyDict::new(py);
    let kind = match event.kind {
        Kind::Stored => "BlockStored",
        Kind::Removed => "BlockRemoved",
        Kind::Cleared => "AllBlocksCleared",
    };
    plain.set_item("type", kind)?;
    plain.set_item("block_hashes", &event.hashes)?;
    plain.set_item("parent_block_hash", event.parent)?;
    let tokens = PyList::empty(py);
    if event.pairs {
        for pair in event.tokens.chunks_exact(2) {
            tokens.append((pair[0], pair[1]))?;
        }
    } else {
        for token in &event.tokens {
            tokens.append(token)?;
        }
    }
    plain.set_item("token_ids", tokens)?;
    plain.set_item("unkeyable", event.unkeyable)?;
    plain.set_item("block_size", event.block_size)?;
    plain.set_item("lora_id", event.lora_id)?;
    plain.set_item("medium", &event.medium)?;
    plain.set_item("lora_name", &event.lora_name)?;
    plain.set_item("group_idx", event.group)?;
    plain.set_item("kv_cache_spec_kind", &event.spec_kind)?;
    plain.set_item("kv_cache_spec_sliding_window", event.window)?;
    plain.set_item("locality", &event.locality)?;
    plain.set_item("ownership", &event.ownership)?;
    plain.set_item("cache_salt", &event.cache_salt)?;
    let extras = match &event.extra_keys {
        None => None,
        Some(found) => {
            let extras = PyList::empty(py);
            for (block, extra) in found {
                extras.append((block, extra_of(py, extra)?))?;
            }
            Some(extras)
        }
    };
    plain.set_item("extra_keys", extras)?;
    Ok(plain)
}

fn extra_of<'py>(py: Python<'py>, extra: &OwnedExtra) -> PyResult<Bound<'py, PyAny>> {
    let id = |id: &OwnedId| -> PyResult<Bound<'py, PyAny>> {
        Ok(match id {
            OwnedId::Int(value) => value.into_pyobject(py)?.into_any(),
            OwnedId::Text(text) => text.into_pyobject(py)?.into_any(),
            OwnedId::Bytes(bytes) => PyBytes::new(py, bytes).into_any(),
        })
    };
    Ok(match extra {
        OwnedExtra::Text(text) => text.into_pyobject(py)?.into_any(),
        OwnedExtra::Int(value) => value.into_pyobject(py)?.into_any(),
        OwnedExtra::Bytes(bytes) => PyBytes::new(py, bytes).into_any(),
        OwnedExtra::Pair(name, offset) => PyTuple::new(py, [id(name)?, offset.into_pyobject(py)?.into_any()])?.into_any(),
    })
}

/// What a Python function reads, a mebibyte at a time.
struct Pieces {
    read: Py<PyAny>,
    piece: Vec<u8>,
    at: usize,
}

impl Read for Pieces {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.at == self.piece.len() {
            self.at = 0;
            self.piece.clear();
            let taken = Python::attach(|py| -> PyResult<()> {
                let bytes = self.read.call1(py, (1 << 20,))?;
                self.piece.extend_from_slice(bytes.bind(py).cast::<PyBytes>()?.as_bytes());
                Ok(())
            });
            taken.map_err(io::Error::other)?;
        }
        let count = into.len().min(self.piece.len() - self.at);
        into[..count].copy_from_slice(&self.piece[self.at..][..count]);
        self.at += count;
        Ok(count)
    }
}

/// Local hashes or, chained, keys of the whole blocks of a prompt.
#[pyfunction]
fn hashes(
    tokens: &Bound<'_, PyAny>,
    block_size: i64,
    namespace: Option<&Bound<'_, PyAny>>,
    eagle: bool,
    chained: bool,
) -> PyResult<Vec<u64>> {
    let scheme = scheme_of(block_size, eagle)?;
    let given = tokens_of(tokens)?;
    let scope = scope_of(namespace)?;
    let (slice, mut found) = (given.slice(), Vec::new());
    tokens.py().detach(|| {
        let blocks = 0..scheme.blocks(slice.len());
        keys::locals(
            slice,
            scheme,
            keys::seed(scope.lora, scope.salt),
            &scope.items,
            blocks,
            &mut found,
        );
        if chained {
            keys::chain(None, &mut found);
        }
    });
    Ok(found)
}

/// `kvevents._native`.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<NativeIndex>()?;
    module.add_class::<Match>()?;
    module.add_class::<WorkerMatch>()?;
    module.add_function(wrap_pyfunction!(hashes, module)?)?;
    module.add("SCRATCH_BYTES_PER_PAYLOAD_BYTE", scan::SCRATCH_BYTES_PER_PAYLOAD_BYTE)
}
