//! What tests compare with Python's decoder: events as the scanner reads them. No wheel has this.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};

use super::arguments::wire_limits_of;
use kvevents_index::scan::{self, Described, Kind, OwnedExtra, OwnedId, Schema};

/// By tag the fields of array events and the names of map events.
type Layouts = Vec<(String, Vec<String>, Vec<String>)>;

/// The events of a payload as the scanner reads them; None if it leaves them to Python.
#[pyfunction]
pub(super) fn scanned<'py>(
    py: Python<'py>,
    layouts: Layouts,
    wire_limits: [usize; 6],
    payload: &[u8],
) -> PyResult<Option<Vec<Bound<'py, PyDict>>>> {
    let schema = Schema::new(&layouts, wire_limits_of(wire_limits).0).map_err(PyValueError::new_err)?;
    let found = scan::describe(payload, &schema);
    found
        .map(|events| events.iter().map(|event| described(py, event)).collect())
        .transpose()
}

fn described<'py>(py: Python<'py>, event: &Described) -> PyResult<Bound<'py, PyDict>> {
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
