//! Snapshots: an index as a stream of bytes.
//!
//! A file consists of a head, frames and an end:
//!
//! ```text
//! head   magic, 8 bytes | version, u32
//! frame  length of the payload, u32, from 1 to 2^20 | sum, u64 | payload
//! end    0, u32 | sum, u64
//! ```
//!
//! Numbers are little-endian. A sum is the XXH3-64 of the payload. The seed of a sum is the previous sum plus the length; the XXH3-64 of
//! the head is the sum before the first frame. So a lost frame, a moved frame and a frame of a different file are detected.
//!
//! The payloads together are a sequence of items; the first byte of each item is its kind. Counts are LEB128 numbers; hashes and other
//! numbers have a fixed size.
//!
//! ```text
//! PLACEMENT  tier, locality?, ownership?, group     placements are numbered in the order of the file
//! STREAM     source, rank, incarnation, rank of the stream that carries it?, stated ranks, last number, whether its sender attests,
//!            attestations of groups of unknown kinds, evidence of completeness, replaced LoRAs, whether salts are missing, groups,
//!            hash scheme?, lookahead, whether hashes cover unknown values, salts; then the items of the stream, up to DONE:
//!   CONTEXT  block size, eagle, lora, salt           numbered in the order of the file, again from 0 after 2^16 of them
//!   RUN      number of blocks, u16; kind; context; whether outdated; for each placement the bounds of the number of copies;
//!            then hash and word of each block
//!   ORDER    hash, key, context                      for each hash with several blocks all of them, the oldest first
//!   WAITING  hash, placement, awaited hash, content? in the order in which they were added
//!   DONE     number of blocks, digest
//! FENCE      source, rank, incarnation               the oldest first
//! LABEL      source, model
//! ```
//!
//! The stated ranks are one byte for the variant of `StatedRanks`, followed by the rank if the variant has a rank.
//!
//! In a run of kind KEYS, words are rolling keys. In a run of kind CHAIN each block is the child of the previous one; the first word is a
//! key, and all others are local hashes. In a run of kind CONTINUATION all words are local hashes, and the first block is the child of the
//! last block of the previous run.
//!
//! Streams are sorted by their workers. Blocks are in the order of their records, which is usually the order of their chains. A file can
//! hold only some workers of an index, with the fences of these workers and the labels of their sources.

mod frames;
mod importing;
mod restore;
#[cfg(test)]
mod tests;
mod writer;

pub use frames::{Failure, VERSION};
pub use importing::SnapshotContents;
pub use restore::{absorb, restore};
pub use writer::save;

const PLACEMENT: u8 = 1;
const STREAM: u8 = 2;
const CONTEXT: u8 = 3;
const RUN: u8 = 4;
const ORDER: u8 = 5;
const WAITING: u8 = 6;
const DONE: u8 = 7;
const FENCE: u8 = 8;
const LABEL: u8 = 9;

const KEYS: u8 = 0;
const CHAIN: u8 = 1;
const CONTINUATION: u8 = 2;

/// Maximum number of contexts that the items of a stream can refer to at one moment.
const MAX_CONTEXTS: usize = 1 << 16;

/// Variants of `StatedRanks`.
const NO_RANK: u8 = 0;
const ONE_RANK: u8 = 1;
const SEVERAL_RANKS: u8 = 2;

/// Kinds of groups without full attention. A smaller number is a kind of full attention.
const UNKNOWN_GROUP: u8 = 253;
const WINDOW_GROUP: u8 = 254;
const STATE_GROUP: u8 = 255;
