//! Helpers of tests (batches, and scanned batches), a search for payloads that take too long, and models of lookups beside a writer.

#[cfg(test)]
mod bounded_time;
#[cfg(test)]
pub(crate) mod cases;
#[cfg(test)]
mod counted_steps;
mod describe;
#[cfg(all(loom, test))]
mod model;

pub use describe::{OwnedEvent, OwnedExtra, OwnedId, describe, describe_decoded};
