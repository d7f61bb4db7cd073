//! `kvevents_native._native`, the Python bindings: they convert arguments and results. Code that need not be fast is in the Python modules
//! `kvevents.index`, `kvevents.routing` and `kvevents.service`.
#![cfg(feature = "python")]

mod arguments;
mod compactor;
mod data_plane;
mod index;
mod libzmq;
mod matches;
mod refusals;
mod routing;
mod smg;
#[cfg(feature = "testing")]
mod testing;
mod turns;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use kvevents_index::apply;
use kvevents_index::holders::placements;
use kvevents_index::keys;
use kvevents_index::wire::scan;

use arguments::{keys_of, scheme_of, scope_of, tokens_of};
use compactor::Compactor;
use data_plane::{ControlRequest, DataPlane, ResponseStream};
use index::{Listing, NativeIndex};
use libzmq::Libzmq;
use matches::{Match, WorkerMatch};
use routing::{Loads, Scorer, Ties};
use smg::SmgSubscription;
use turns::Turns;

/// Returns the local hashes of the complete blocks of a prompt; if `chained`, returns the rolling keys of these blocks.
#[pyfunction]
fn hashes<'py>(
    tokens: &Bound<'py, PyAny>,
    block_size: i64,
    namespace: Option<&Bound<'_, PyAny>>,
    eagle: bool,
    chained: bool,
) -> PyResult<Bound<'py, PyList>> {
    let py = tokens.py();
    let (scheme, mut turns) = (scheme_of(block_size, eagle)?, Turns::new(py));
    let prompt = tokens_of(tokens, &mut turns)?;
    let scope = scope_of(namespace)?;
    let mut found = Vec::new();
    py.detach(|| {
        let blocks = 0..scheme.blocks(prompt.len());
        keys::locals(
            &prompt,
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
    hash_list(py, &found)
}

/// Converts the local hashes of all blocks of a prompt to rolling keys.
#[pyfunction]
fn chained<'py>(hashes: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
    let py = hashes.py();
    let mut found = keys_of(hashes, &mut Turns::new(py))?;
    py.detach(|| keys::chain(None, &mut found));
    hash_list(py, &found)
}

fn hash_list<'py>(py: Python<'py>, hashes: &[u64]) -> PyResult<Bound<'py, PyList>> {
    let (list, mut turns) = (PyList::empty(py), Turns::new(py));
    for hash in hashes {
        list.append(hash)?;
        turns.spend(1)?;
    }
    Ok(list)
}

/// Returns three values for a payload with one store: the keys of the store's blocks, the part of the seed that the salt contributes, and
/// the reason for missing keys.
#[pyfunction]
fn stored_keys(
    py: Python<'_>,
    payload: &[u8],
    parent: Option<(u64, u64)>,
) -> PyResult<(Vec<u64>, Option<u64>, Option<&'static str>)> {
    let found = py.detach(|| apply::stored_keys(payload, parent));
    let found = found.ok_or_else(|| PyValueError::new_err("the payload is not one stored event"))?;
    Ok((found.keys, found.salt, found.unkeyed))
}

/// Returns the tier of a medium, ignoring the case of its name.
#[pyfunction]
fn tier_of(medium: &str) -> String {
    placements::tier(medium)
}

/// Extracts the array of token ids with the key `name` from a JSON object. Returns the text with an empty array in its place, and the token
/// ids as 32-bit numbers in native byte order. Returns None if the text must be read by the full JSON decoder.
#[pyfunction]
fn lifted<'py>(py: Python<'py>, text: &Bound<'py, PyBytes>, name: &str) -> Option<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)> {
    let bytes = text.as_bytes();
    let (rest, tokens) = py.detach(|| kvevents_server::extract_array(bytes, name))?;
    Some((PyBytes::new(py, &rest), PyBytes::new(py, keys::bytes_of(&tokens))))
}

/// Raises `ValueError` if a name occurs twice in one object of a body.
#[pyfunction]
fn check_names(py: Python<'_>, body: &[u8], is_msgpack: bool) -> PyResult<()> {
    py.detach(|| kvevents_server::check_names(body, is_msgpack))
        .map_err(PyValueError::new_err)
}

/// `kvevents_native._native`.
#[pymodule(gil_used = true)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<NativeIndex>()?;
    module.add_class::<Compactor>()?;
    module.add_class::<ControlRequest>()?;
    module.add_class::<DataPlane>()?;
    module.add_class::<ResponseStream>()?;
    module.add_class::<Libzmq>()?;
    module.add_class::<Listing>()?;
    module.add_class::<Match>()?;
    module.add_class::<Scorer>()?;
    module.add_class::<SmgSubscription>()?;
    module.add_class::<Ties>()?;
    module.add_class::<Loads>()?;
    module.add_class::<WorkerMatch>()?;
    module.add_function(wrap_pyfunction!(hashes, module)?)?;
    module.add_function(wrap_pyfunction!(chained, module)?)?;
    module.add_function(wrap_pyfunction!(stored_keys, module)?)?;
    module.add_function(wrap_pyfunction!(routing::nearest, module)?)?;
    module.add_function(wrap_pyfunction!(routing::max_requests, module)?)?;
    module.add_function(wrap_pyfunction!(tier_of, module)?)?;
    module.add_function(wrap_pyfunction!(lifted, module)?)?;
    module.add_function(wrap_pyfunction!(check_names, module)?)?;
    #[cfg(feature = "testing")]
    {
        module.add_function(wrap_pyfunction!(testing::scanned, module)?)?;
        module.add_function(wrap_pyfunction!(testing::decoded, module)?)?;
        module.add_function(wrap_pyfunction!(testing::turns, module)?)?;
        module.add_function(wrap_pyfunction!(testing::select, module)?)?;
    }
    module.add("TIERS", placements::TIERS)?;
    module.add("VERSION", env!("CARGO_PKG_VERSION"))?;
    module.add("SCRATCH_BYTES_PER_PAYLOAD_BYTE", scan::SCRATCH_BYTES_PER_PAYLOAD_BYTE)
}
