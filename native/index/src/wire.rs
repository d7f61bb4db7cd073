//! Reads the events of a batch from the bytes of its payload.

pub mod decode;
pub mod msgpack;
pub mod scan;
pub mod tokens;
