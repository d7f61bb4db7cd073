//! Reads the events of a batch from its bytes.

pub mod decode;
pub mod msgpack;
pub mod scan;
pub mod tokens;
