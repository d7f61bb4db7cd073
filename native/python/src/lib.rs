//! `kvevents_native._native`, and the parts of it that are plain Rust: token ids out of JSON, frames out of a connection's bytes.

#[cfg(feature = "python")]
mod python;
