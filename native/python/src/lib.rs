//! `kvevents_native._native`, and its parts in plain Rust: extraction of token ids from JSON, and splitting of a connection's bytes into frames.

#[cfg(feature = "python")]
mod python;
