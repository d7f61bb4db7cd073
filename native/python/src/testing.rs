//! Functions for tests; wheels do not contain this module. They return counters, and the events that the scanner or the tolerant decoder
//! reads. Tests compare these events with those that Python's decoder reads.

use std::sync::atomic::Ordering;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};

use super::arguments::wire_limits_of;
use super::index::plain_heartbeat;
use super::routing::{Loads, Ties};
use kvevents_index::testing::{OwnedEvent, OwnedExtra, OwnedId, describe, describe_decoded};
use kvevents_index::wire::decode::{self, BlockRemoved, BlockStored, Event, Hashes, Token, Value};
use kvevents_index::wire::scan::{self, Kind, Schema};

/// Returns how many times calls have released the GIL and then checked for signals, during work with Python objects.
#[pyfunction]
pub(super) fn turns() -> usize {
    super::turns::TURN_COUNT.load(Ordering::Relaxed)
}

/// Returns the events that the scanner reads from a payload; None if the scanner refuses the payload.
#[pyfunction]
pub(super) fn scanned<'py>(
    py: Python<'py>,
    wire_limits: [usize; 6],
    payload: &[u8],
) -> PyResult<Option<Vec<Bound<'py, PyDict>>>> {
    let schema = Schema::new(wire_limits_of(wire_limits)).map_err(PyValueError::new_err)?;
    let found = describe(payload, &schema);
    found
        .map(|events| events.iter().map(|event| described(py, event)).collect())
        .transpose()
}

fn described<'py>(py: Python<'py>, event: &OwnedEvent) -> PyResult<Bound<'py, PyDict>> {
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
    plain.set_item("keyable", event.keyable)?;
    plain.set_item("block_size", event.block_size)?;
    plain.set_item("block_keys", &event.keys)?;
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

/// Reason, detail, position, first bytes and count of a rejection.
type Rejected<'py> = (&'static str, String, Option<usize>, Bound<'py, PyBytes>, usize);
/// Timestamp, rank, events and rejections of a batch, and the events as a payload for an index.
type Decoded<'py> = (
    f64,
    Option<i128>,
    Vec<Bound<'py, PyDict>>,
    Vec<Rejected<'py>>,
    Vec<Bound<'py, PyDict>>,
);

/// Reads a payload with the tolerant decoder.
#[pyfunction]
pub(super) fn decoded<'py>(
    py: Python<'py>,
    wire_limits: [usize; 6],
    max_rejected: usize,
    payload: &[u8],
) -> PyResult<Decoded<'py>> {
    let limits = scan::Limits {
        max_rejected,
        ..wire_limits_of(wire_limits)
    };
    let batch = decode::decode(payload, &limits);
    let rejected = batch.rejected.iter().map(|one| {
        let raw = PyBytes::new(py, &one.raw);
        (one.reason.as_str(), one.detail.clone(), one.index, raw, one.count)
    });
    Ok((
        batch.ts,
        batch.rank,
        batch
            .events
            .iter()
            .map(|event| event_of(py, event))
            .collect::<PyResult<_>>()?,
        rejected.collect(),
        describe_decoded(payload, &limits)
            .iter()
            .map(|event| described(py, event))
            .collect::<PyResult<_>>()?,
    ))
}

fn event_of<'py>(py: Python<'py>, event: &Event) -> PyResult<Bound<'py, PyDict>> {
    let plain = PyDict::new(py);
    match event {
        Event::Stored(stored) => stored_of(&plain, stored)?,
        Event::Removed(removed) => removed_of(&plain, removed)?,
        Event::Cleared(unknown_fields) => {
            plain.set_item("type", "AllBlocksCleared")?;
            rest_of(&plain, unknown_fields)?;
        }
    }
    Ok(plain)
}

fn stored_of(plain: &Bound<'_, PyDict>, event: &BlockStored) -> PyResult<()> {
    let py = plain.py();
    plain.set_item("type", "BlockStored")?;
    hashes_of(plain, &event.block_hashes)?;
    plain.set_item("parent_block_hash", event.parent_block_hash)?;
    let digest = event.parent_block_digest.as_deref();
    plain.set_item("parent_block_digest", digest.map(|bytes| PyBytes::new(py, bytes)))?;
    let tokens = PyList::empty(py);
    for token in &event.token_ids {
        match token {
            Token::Single(value) => tokens.append(value.as_i128())?,
            Token::Pair(pair) => tokens.append((pair[0].as_i128(), pair[1].as_i128()))?,
            Token::Item(digest) => tokens.append(digest)?,
        }
    }
    plain.set_item("token_ids", tokens)?;
    plain.set_item("block_size", event.block_size)?;
    plain.set_item("lora_id", event.lora_id)?;
    plain.set_item("medium", &event.medium)?;
    plain.set_item("lora_name", &event.lora_name)?;
    let block = |keys: &Option<Vec<Value>>| -> PyResult<Option<Vec<Bound<'_, PyAny>>>> {
        let keys = keys.as_ref();
        keys.map(|keys| keys.iter().map(|key| value_of(py, key)).collect())
            .transpose()
    };
    let extra_keys = event.extra_keys.as_ref();
    let extra_keys = extra_keys.map(|blocks| blocks.iter().map(block).collect::<PyResult<Vec<_>>>());
    plain.set_item("extra_keys", extra_keys.transpose()?)?;
    plain.set_item("group_idx", event.group_idx)?;
    plain.set_item("kv_cache_spec_kind", &event.kv_cache_spec_kind)?;
    plain.set_item("kv_cache_spec_sliding_window", event.kv_cache_spec_sliding_window)?;
    plain.set_item("locality", &event.locality)?;
    plain.set_item("ownership", &event.ownership)?;
    plain.set_item("lookahead_token_ids", &event.lookahead_token_ids)?;
    plain.set_item("cache_salt", &event.cache_salt)?;
    for (name, text) in &event.unused_texts {
        plain.set_item(name, text)?;
    }
    plain.set_item("block_keys", &event.block_keys)?;
    rest_of(plain, &event.unknown_fields)
}

fn removed_of(plain: &Bound<'_, PyDict>, event: &BlockRemoved) -> PyResult<()> {
    plain.set_item("type", "BlockRemoved")?;
    hashes_of(plain, &event.block_hashes)?;
    plain.set_item("medium", &event.medium)?;
    plain.set_item("group_idx", event.group_idx)?;
    plain.set_item("locality", &event.locality)?;
    plain.set_item("ownership", &event.ownership)?;
    let heartbeat = event.heartbeat.as_ref().map(plain_heartbeat);
    plain.set_item("heartbeat", heartbeat)?;
    rest_of(plain, &event.unknown_fields)
}

fn hashes_of(plain: &Bound<'_, PyDict>, hashes: &Hashes) -> PyResult<()> {
    let py = plain.py();
    plain.set_item("block_hashes", &hashes.values)?;
    let digests = hashes.digests.as_ref();
    let digests = digests.map(|all| all.iter().map(|bytes| PyBytes::new(py, bytes)).collect::<Vec<_>>());
    plain.set_item("block_digests", digests)
}

fn rest_of(plain: &Bound<'_, PyDict>, unknown_fields: &[(String, Value)]) -> PyResult<()> {
    let rest = PyDict::new(plain.py());
    for (name, value) in unknown_fields {
        rest.set_item(name, value_of(plain.py(), value)?)?;
    }
    plain.set_item("unknown_fields", (!rest.is_empty()).then_some(rest))
}

fn value_of<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        Value::Bool(value) => value.into_pyobject(py)?.to_owned().into_any(),
        Value::Int(value) => value.into_pyobject(py)?.into_any(),
        Value::Float(value) => value.into_pyobject(py)?.into_any(),
        Value::Text(text) => text.into_pyobject(py)?.into_any(),
        Value::Bytes(bytes) => PyBytes::new(py, bytes).into_any(),
        Value::List(items) => {
            let items = items.iter().map(|item| value_of(py, item)).collect::<PyResult<Vec<_>>>()?;
            PyList::new(py, items)?.into_any()
        }
        Value::Map(fields) => {
            let plain = PyDict::new(py);
            for (name, value) in fields {
                plain.set_item(name, value_of(py, value)?)?;
            }
            plain.into_any()
        }
        Value::Time(seconds, micros) => ("time", seconds, micros).into_pyobject(py)?.into_any(),
        Value::Extension(code, data) => ("ext", code, PyBytes::new(py, data)).into_pyobject(py)?.into_any(),
        _ => py.None().into_bound(py),
    })
}

/// Returns the choice of `/v1/select` among the candidates in `question`. The question and the answer are msgpack.
#[pyfunction]
pub(super) fn select<'py>(
    py: Python<'py>,
    question: &[u8],
    ties: &Bound<'py, Ties>,
    loads: &Bound<'py, Loads>,
) -> PyResult<Bound<'py, PyBytes>> {
    let selected = kvevents_routing::testing::select_among(question, &ties.get().ties, &loads.get().loads);
    let selected = selected.map_err(PyValueError::new_err)?;
    Ok(PyBytes::new(py, &selected))
}
