//! Converts arguments from Python: tokens, keys, namespaces, names of streams, and files.

use std::io::{self, Read};

use pyo3::buffer::{ElementType, PyUntypedBuffer};
use pyo3::exceptions::{PyAttributeError, PyOverflowError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PySequence, PyString, PyTuple};

use super::turns::Turns;
use kvevents_index::Scope;
use kvevents_index::keys::{self, Item, Scheme};
use kvevents_index::wire::scan;

/// Number of tokens that are copied before other Python threads can run.
const MAX_COPIED_TOKENS: usize = 1 << 20;
/// Number of list elements that are read before this work is counted.
const ITEMS_PER_COUNT: usize = 1 << 10;
/// Number of tokens that can be copied from a buffer in the time of reading one Python integer.
const COPIES_PER_READ: usize = 16;

/// Copies a contiguous buffer of 32-bit numbers in parts, so that other threads can run between them.
fn copy_words(buffer: &PyUntypedBuffer, turns: &mut Turns<'_>) -> PyResult<Vec<u32>> {
    let mut copy = Vec::with_capacity(buffer.item_count());
    while copy.len() < buffer.item_count() {
        // SAFETY: the buffer is contiguous, aligned and held, and its elements are unsigned integers of 4 bytes. A Python thread that
        // writes to the buffer needs the GIL, which this thread holds during the read.
        let all = unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast(), buffer.item_count()) };
        let part = &all[copy.len()..];
        let part = &part[..part.len().min(MAX_COPIED_TOKENS)];
        copy.extend_from_slice(part);
        turns.spend(part.len() / COPIES_PER_READ)?;
    }
    Ok(copy)
}

fn type_name(given: &Bound<'_, PyAny>) -> String {
    given.get_type().name().map_or_else(|_| "?".into(), |name| name.to_string())
}

fn tokens_error(given: &Bound<'_, PyAny>) -> PyErr {
    let kind = type_name(given);
    PyTypeError::new_err(format!(
        "tokens are a list of integers, or a one-dimensional array or buffer of integers of 16 to 64 bits in this machine's byte order; \
         not {kind}"
    ))
}

/// Returns the buffer of an object and its element type, if the buffer has one dimension and its elements are integers wider than a byte.
/// Buffers with the other byte order are rejected, since PyO3 takes `>` for the native order.
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

/// Copies a buffer of integers of 2 to 8 bytes. Returns None if a number does not fit into `T`.
fn copy_integers<T>(buffer: &PyUntypedBuffer, kind: ElementType, turns: &mut Turns<'_>) -> PyResult<Option<Vec<T>>>
where
    T: TryFrom<u16> + TryFrom<u32> + TryFrom<u64> + TryFrom<i16> + TryFrom<i32> + TryFrom<i64>,
{
    match kind {
        ElementType::UnsignedInteger { bytes: 2 } => elements::<u16, T>(buffer, turns),
        ElementType::UnsignedInteger { bytes: 4 } => elements::<u32, T>(buffer, turns),
        ElementType::UnsignedInteger { bytes: 8 } => elements::<u64, T>(buffer, turns),
        ElementType::SignedInteger { bytes: 2 } => elements::<i16, T>(buffer, turns),
        ElementType::SignedInteger { bytes: 4 } => elements::<i32, T>(buffer, turns),
        ElementType::SignedInteger { bytes: 8 } => elements::<i64, T>(buffer, turns),
        _ => Ok(None),
    }
}

fn elements<From: Copy, To: TryFrom<From>>(buffer: &PyUntypedBuffer, turns: &mut Turns<'_>) -> PyResult<Option<Vec<To>>> {
    let (start, stride) = (buffer.buf_ptr().cast::<u8>(), buffer.strides()[0]);
    let mut found = Vec::with_capacity(buffer.item_count());
    for at in 0..buffer.item_count() {
        // SAFETY: the buffer is held, and has one dimension of `item_count` elements that are `stride` bytes apart. Each element has the
        // size of a `From`, and any bytes are a valid `From`. A Python thread that writes to the buffer needs the GIL, which this thread
        // holds.
        let value = unsafe { start.offset(stride * at as isize).cast::<From>().read_unaligned() };
        let Ok(value) = To::try_from(value) else { return Ok(None) };
        found.push(value);
        if found.len().is_multiple_of(COPIES_PER_READ) {
            turns.spend(1)?;
        }
    }
    Ok(Some(found))
}

/// Copies the token ids of a caller, so that no other thread can change them after the GIL is released.
pub(super) fn tokens_of(given: &Bound<'_, PyAny>, turns: &mut Turns<'_>) -> PyResult<Vec<u32>> {
    if let Ok(list) = given.cast::<PyList>() {
        return read_items(given, || list.len(), ffi::PyList_GetItem, turns);
    }
    if let Ok(tuple) = given.cast::<PyTuple>() {
        return read_items(given, || tuple.len(), ffi::PyTuple_GetItem, turns);
    }
    let (buffer, kind) = integers_of(given).ok_or_else(|| tokens_error(given))?;
    if buffer.item_count() == 0 {
        return Ok(Vec::new());
    }
    let shared = kind == ElementType::UnsignedInteger { bytes: 4 } && buffer.is_c_contiguous();
    if shared && buffer.buf_ptr().cast::<u32>().is_aligned() {
        return copy_words(&buffer, turns);
    }
    let refused = || PyOverflowError::new_err("invalid token id: expected integers from 0 to 2**32 - 1");
    copy_integers(&buffer, kind, turns)?.ok_or_else(refused)
}

/// Reads the numbers of a list or a tuple. Each number is borrowed only while it is read. Other threads can change the list only between
/// turns.
fn read_items(
    given: &Bound<'_, PyAny>,
    length: impl Fn() -> usize,
    item_at: unsafe extern "C" fn(*mut ffi::PyObject, ffi::Py_ssize_t) -> *mut ffi::PyObject,
    turns: &mut Turns<'_>,
) -> PyResult<Vec<u32>> {
    let py = given.py();
    let mut tokens = Vec::with_capacity(length());
    // The length is read again in each turn, since another thread can have changed the list.
    while tokens.len() < length() {
        for _ in 0..ITEMS_PER_COUNT.min(length() - tokens.len()) {
            let at = tokens.len() as ffi::Py_ssize_t;
            // SAFETY: the GIL is held, `given` has the type that `item_at` expects, and `item_at` checks that the item exists. `given` owns
            // the item, and no Python code can run before the item is read, since the item is a plain `int`.
            let number = unsafe {
                let item = item_at(given.as_ptr(), at);
                if item.is_null() || ffi::PyLong_CheckExact(item) == 0 {
                    -1
                } else {
                    ffi::PyLong_AsLongLong(item)
                }
            };
            let token = match u32::try_from(number) {
                Ok(token) => token,
                Err(_) => {
                    // A number that is too large raises an error below, as any other invalid element does.
                    drop(PyErr::take(py));
                    let refused = |_| PyTypeError::new_err(format!("token {at} is not an integer from 0 to 2**32 - 1"));
                    // SAFETY: as for the previous call; from here on this thread owns a reference to the item.
                    let item = unsafe { Bound::from_borrowed_ptr_or_err(py, item_at(given.as_ptr(), at)) };
                    item.and_then(|item| item.extract()).map_err(refused)?
                }
            };
            tokens.push(token);
        }
        turns.spend(ITEMS_PER_COUNT)?;
    }
    Ok(tokens)
}

pub(super) fn keys_of(given: &Bound<'_, PyAny>, turns: &mut Turns<'_>) -> PyResult<Vec<u64>> {
    let found = match integers_of(given) {
        Some((buffer, kind)) => copy_integers(&buffer, kind, turns)?,
        None if PyUntypedBuffer::get(given).is_ok() || given.is_instance_of::<PyString>() => None,
        None => sequence_numbers(given, turns)?,
    };
    let refused = || {
        PyTypeError::new_err(
            "invalid keys: expected integers from 0 to 2**64 - 1, in a list or in a buffer with native byte order",
        )
    };
    found.ok_or_else(refused)
}

fn sequence_numbers(given: &Bound<'_, PyAny>, turns: &mut Turns<'_>) -> PyResult<Option<Vec<u64>>> {
    let Ok(row) = given.cast::<PySequence>() else {
        return Ok(None);
    };
    let (mut keys, items) = (Vec::with_capacity(row.len()?), row.try_iter()?);
    for item in items {
        let Ok(key) = item?.extract() else { return Ok(None) };
        keys.push(key);
        turns.spend(1)?;
    }
    Ok(Some(keys))
}

/// The name of a stream or a worker: `(source, rank)`, or only `source` for rank 0.
#[derive(FromPyObject)]
pub(super) enum StreamName<'py> {
    Both(Bound<'py, PyString>, i64),
    Source(Bound<'py, PyString>),
}

impl<'py> StreamName<'py> {
    pub(super) fn from_object(given: &Bound<'py, PyAny>) -> PyResult<Self> {
        let refused = |_| {
            let shown = given.repr().map_or_else(|_| type_name(given), |text| text.to_string());
            PyTypeError::new_err(format!(
                "a stream is (source, rank), or its source alone for rank 0; not {shown:.80}"
            ))
        };
        given.extract().map_err(refused)
    }

    pub(super) fn parts(&self) -> PyResult<(&str, i64)> {
        match self {
            Self::Both(source, rank) => Ok((source.to_str()?, *rank)),
            Self::Source(source) => Ok((source.to_str()?, 0)),
        }
    }
}

pub(super) fn scope_of(namespace: Option<&Bound<'_, PyAny>>) -> PyResult<Scope> {
    let Some(given) = namespace else { return Ok(Scope::default()) };
    scope_in(given).map_err(|cause| {
        let py = given.py();
        if !(cause.is_instance_of::<PyAttributeError>(py)
            || cause.is_instance_of::<PyTypeError>(py)
            || cause.is_instance_of::<PyOverflowError>(py))
        {
            return cause;
        }
        // The message does not contain the values, since a salt can be a secret of a tenant.
        PyTypeError::new_err(format!(
            "namespace is a Namespace with text for model and salt, a name or a number of 64 bits for lora, MultiModal items for mm; \
             this {} is not: {}",
            type_name(given),
            cause.value(py)
        ))
    })
}

fn scope_in(given: &Bound<'_, PyAny>) -> PyResult<Scope> {
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
        items: items.into(),
    })
}

pub(super) fn scheme_of(block_size: i64, eagle: bool) -> PyResult<Scheme> {
    match u32::try_from(block_size) {
        Ok(size) if size > 0 => Ok(Scheme { size, eagle }),
        _ => Err(PyValueError::new_err(format!(
            "block_size is {block_size}; it must be from 1 to 2**32 - 1"
        ))),
    }
}

/// A reader that gets its bytes from a Python function, at most one MiB per call.
pub(super) struct PythonReader {
    read: Py<PyAny>,
    piece: Vec<u8>,
    at: usize,
}

impl PythonReader {
    pub(super) fn new(read: Py<PyAny>) -> Self {
        Self {
            read,
            piece: Vec::new(),
            at: 0,
        }
    }
}

impl Read for PythonReader {
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

/// Converts limits of a payload from Python.
pub(super) fn wire_limits_of(limits: [usize; 6]) -> scan::Limits {
    let [
        max_payload_bytes,
        max_events,
        max_hashes,
        max_fields,
        max_free_form_bytes,
        max_nesting,
    ] = limits;
    scan::Limits {
        max_payload_bytes,
        max_events,
        max_hashes,
        max_fields,
        max_free_form_bytes,
        max_nesting,
        ..scan::Limits::default()
    }
}
