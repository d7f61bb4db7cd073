//! From the bytes of a batch to its events.

pub mod decode;
pub mod msgpack;
pub mod scan;
pub mod tokens;
