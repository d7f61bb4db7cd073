//! Snapshots: an index as a stream of bytes.
//!
//! A file is a head, frames, and an end:
//!
//! ```text
//! head   magic, 8 bytes | version, u32
//! frame  length of the payload, u32, from 1 to 2^20 | sum, u64 | payload
//! end    0, u32 | sum, u64
//! ```
//!
//! Numbers are little-endian. A sum is the XXH3-64 of the payload, seeded with the sum before it plus the length (of the first frame:
//! plus the XXH3-64 of the head), so that no frame can be lost, moved, or left over from another file.
//!
//! The payloads together are items, each beginning with one byte for its kind. Counts are LEB128, hashes and other numbers fixed.
//!
//! ```text
//! PLANE    tier, locality?, ownership?, group          placements are numbered as they come
//! STREAM   source, rank, incarnation, the rank of the stream that carries it?, stated ranks, last number, whether it attests, sums of groups of unknown kinds, what it has
//! shown about its completeness, replaced LoRAs, whether there are salts that it misses, groups, hashing?, lookahead, salts; then, up to DONE, what belongs to it:
//!   CONTEXT  block size, eagle, lora, salt             numbered as they come, from 0 again after 2^16
//!   RUN      how many, u16; which kind; context; whether outdated; its placements, each with the least and the most copies; then hash and word of every block
//!   SEVERAL  hash, key, context                        of hashes with several blocks all, the oldest first
//!   WAITING  hash, placement, awaited, content?            in the order in which they came
//!   DONE     how many blocks, digest
//! FENCE    source, rank, incarnation                   the oldest first
//! LABEL    source, model
//! ```
//!
//! The stated ranks are `StatedRanks` as one byte, and the one rank.
//!
//! In a run of kind KEYS, words are rolling keys. In a run of kind CHAIN each block is the child of the previous one; the first word is a
//! key, and the others are local hashes. In a run of kind REST all words are local hashes, and the first block is the child of the last
//! block of the previous run.
//!
//! Streams come in the order of their workers, and blocks in that of their records, which is mostly that of their chains. A file may hold
//! some workers of an index alone, with their fences and the labels of their sources.

mod frames;
mod importing;
mod restore;
#[cfg(test)]
mod tests;
mod writer;

pub use frames::{Failure, VERSION};
pub use importing::Part;
pub use restore::{absorb, restore};
pub use writer::save;

const PLANE: u8 = 1;
const STREAM: u8 = 2;
const CONTEXT: u8 = 3;
const RUN: u8 = 4;
const SEVERAL: u8 = 5;
const WAITING: u8 = 6;
const DONE: u8 = 7;
const FENCE: u8 = 8;
const LABEL: u8 = 9;

const KEYS: u8 = 0;
const CHAIN: u8 = 1;
const REST: u8 = 2;

/// Maximum number of contexts that a stream's part of a file can refer to at one moment.
const MAX_CONTEXTS: usize = 1 << 16;

/// Stated ranks.
const NO_RANK: u8 = 0;
const ONE_RANK: u8 = 1;
const SEVERAL_RANKS: u8 = 2;

/// Kinds of groups; smaller numbers are those of full attention.
const UNKNOWN_GROUP: u8 = 253;
const WINDOW_GROUP: u8 = 254;
const STATE_GROUP: u8 = 255;
