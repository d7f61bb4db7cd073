//! Creates the exceptions of calls that cannot be answered; their classes are defined in Python.

use pyo3::prelude::*;

fn exception(py: Python<'_>, name: &str, text: &str) -> PyErr {
    let raised = || py.import("kvevents.errors")?.getattr(name)?.call1((text,));
    raised().map_or_else(|error| error, PyErr::from_value)
}

/// The exception of an index that a panic has damaged.
pub(super) fn damaged(py: Python<'_>) -> PyErr {
    let text = "the index is damaged: an error of kvevents left it half changed, so its answers may be wrong; restore a snapshot, or begin \
                with an empty index";
    exception(py, "DamagedIndexError", text)
}

/// The exception of an object that belongs to the parent of a forked process.
pub(super) fn parent_exception(py: Python<'_>) -> PyErr {
    let text = "this belongs to the process that made it, of which this one is a fork: threads that exist only there may have been \
                changing it; make another one here";
    exception(py, "ForkedError", text)
}
