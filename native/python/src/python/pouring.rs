//! Batches over a connection of this process's own, many in one call of the system, from where their payloads lie.

use std::os::raw::c_int;

use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::zmtp::{Departures, Left};

/// What the system takes in one call, pieces of memory: `IOV_MAX` of Linux and of others.
const MOST_PIECES: usize = 1024;
/// Each message is its head and its payload.
const MESSAGES: usize = MOST_PIECES / 2;

/// Sends messages of a topic, a number and a payload from `first` on, of which `sent` bytes are out already, without waiting.
///
/// Returns the message that is to be gone on with, how many of its bytes are out, and the error of the system that ended it; 0 for
/// none, also where there is no room.
#[pyfunction]
pub(super) fn pour(
    py: Python<'_>,
    descriptor: c_int,
    topic: &[u8],
    batches: Vec<(u64, Bound<'_, PyBytes>)>,
    first: usize,
    sent: usize,
) -> PyResult<(usize, usize, c_int)> {
    let messages: Vec<(u64, &[u8])> = batches
        .iter()
        .map(|(number, payload)| (*number, payload.as_bytes()))
        .collect();
    let Some(mut waiting) = messages.get(first..) else {
        return Err(PyIndexError::new_err(format!(
            "there is no message {first} of {}",
            messages.len()
        )));
    };
    Ok(py.detach(|| {
        let mut left = Left { messages: 0, sent };
        while !waiting.is_empty() {
            let some = &waiting[..waiting.len().min(MESSAGES)];
            let departures = Departures::new(topic, some);
            match send(descriptor, &departures.pieces(left.sent)) {
                Ok(bytes) => left = departures.left(left.sent + bytes),
                Err(error) => return (messages.len() - waiting.len(), left.sent, error),
            }
            waiting = &waiting[left.messages..];
            if left.messages < some.len() {
                break; // there is no room for more
            }
        }
        (messages.len() - waiting.len(), left.sent, 0)
    }))
}

/// How many bytes the system took; none where it has no room.
fn send(descriptor: c_int, pieces: &[&[u8]]) -> Result<usize, c_int> {
    let mut vectors: Vec<libc::iovec> = pieces
        .iter()
        .map(|piece| libc::iovec {
            iov_base: piece.as_ptr().cast_mut().cast(),
            iov_len: piece.len(),
        })
        .collect();
    // SAFETY: a message of nothing but pieces of memory is valid as zeros; which types its fields have depends on the system.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = vectors.as_mut_ptr();
    message.msg_iovlen = vectors.len() as _;
    // SAFETY: the pieces live until the call ends, and the system only reads them.
    let taken = unsafe { libc::sendmsg(descriptor, &raw const message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
    usize::try_from(taken).or_else(|_| match std::io::Error::last_os_error().raw_os_error() {
        // A signal: whoever called tries again when there is room.
        Some(libc::EAGAIN | libc::EINTR) => Ok(0),
        error => Err(error.unwrap_or(libc::EIO)),
    })
}
