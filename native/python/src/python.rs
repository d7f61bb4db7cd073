//! The Python face of the core: what crosses it, either way, and the index that stands behind it. What needs no speed is in
//! `kvevents.index` itself.

mod answers;
mod arguments;
mod awake;
mod compactor;
mod index;
mod libzmq;
mod pouring;
#[cfg(feature = "testing")]
mod testing;
mod zmtp;

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::lifting;
use kvevents_index::keys;
use kvevents_index::scan;

use answers::{Match, WorkerMatch};
use arguments::{scheme_of, scope_of, tokens_of};
use compactor::Compactor;
use index::{Listing, NativeIndex};
use libzmq::Libzmq;
use zmtp::Zmtp;

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
    let (slice, mut found) = (given.slice().to_vec(), Vec::new());
    tokens.py().detach(|| {
        let blocks = 0..scheme.blocks(slice.len());
        keys::locals(
            &slice,
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

/// Local hashes, from the root on, as rolling keys.
#[pyfunction]
fn chained(mut hashes: Vec<u64>) -> Vec<u64> {
    keys::chain(None, &mut hashes);
    hashes
}

/// Takes the array of token ids that a JSON object has under `name` out of it: the text with an empty array in its place, and the
/// token ids as 32-bit numbers in this machine's byte order. None for what is to be read with care.
#[pyfunction]
fn lifted<'py>(py: Python<'py>, text: &Bound<'py, PyBytes>, name: &str) -> Option<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)> {
    let bytes = text.as_bytes();
    let found = py.detach(|| lifting::lift(bytes, name.as_bytes()))?;
    let rest = [&bytes[..found.start], b"[]", &bytes[found.end..]].concat();
    Some((PyBytes::new(py, &rest), PyBytes::new(py, keys::bytes_of(&found.tokens))))
}

/// The CRC-32 of zlib of some bytes one after the other, behind what has the CRC `before`.
#[pyfunction]
fn crc32_of(py: Python<'_>, parts: &Bound<'_, PyAny>, before: u32) -> PyResult<u32> {
    let parts: Vec<Bound<'_, PyBytes>> = (parts.try_iter()?)
        .map(|part| Ok(part?.cast_into()?))
        .collect::<PyResult<_>>()?;
    let slices: Vec<&[u8]> = parts.iter().map(|part| part.as_bytes()).collect();
    Ok(py.detach(|| {
        let mut hasher = crc32fast::Hasher::new_with_initial(before);
        slices.iter().for_each(|part| hasher.update(part));
        hasher.finalize()
    }))
}

/// `kvevents._native`.
#[pymodule(gil_used = true)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<NativeIndex>()?;
    module.add_class::<Compactor>()?;
    module.add_class::<Libzmq>()?;
    module.add_class::<Zmtp>()?;
    module.add_class::<Listing>()?;
    module.add_class::<Match>()?;
    module.add_class::<WorkerMatch>()?;
    module.add_function(wrap_pyfunction!(hashes, module)?)?;
    module.add_function(wrap_pyfunction!(chained, module)?)?;
    module.add_function(wrap_pyfunction!(lifted, module)?)?;
    module.add_function(wrap_pyfunction!(crc32_of, module)?)?;
    module.add_function(wrap_pyfunction!(awake::give_way, module)?)?;
    module.add_function(wrap_pyfunction!(awake::look_for, module)?)?;
    module.add_function(wrap_pyfunction!(pouring::pour, module)?)?;
    #[cfg(feature = "testing")]
    {
        module.add_function(wrap_pyfunction!(testing::scanned, module)?)?;
        module.add_function(wrap_pyfunction!(testing::decoded, module)?)?;
    }
    module.add("SCRATCH_BYTES_PER_PAYLOAD_BYTE", scan::SCRATCH_BYTES_PER_PAYLOAD_BYTE)
}
