//! What subscribers deliver: batches, gaps and resets, each to its stream.

use std::cell::RefCell;

use super::Index;
use crate::applying::{Read, Work};
use crate::gate::Writer;
use crate::scan::{Schema, Scratch, scan};
use crate::stream::Stream;

/// What became of a delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was applied, and cleared the whole stream or did not.
    Applied(bool),
    /// It was there before.
    Duplicate,
    /// It is of an ended life.
    Void,
    /// The payload is none that this index reads by itself; nothing was changed.
    Unread,
    /// There are more streams than an index can hold.
    Full,
}

/// Kept from one batch to the next to spare allocations.
#[derive(Default)]
struct Room {
    scratch: Scratch,
    work: Work,
}

thread_local! {
    static ROOM: RefCell<Room> = RefCell::default();
}

impl Index {
    /// Applies a batch.
    pub fn batch(&self, source: &str, rank: i64, incarnation: i64, seq: i64, payload: &[u8]) -> Outcome {
        self.batch_by(&self.schema, source, rank, incarnation, seq, payload)
    }

    /// The same for a payload that is read by another schema.
    pub fn batch_by(&self, schema: &Schema, source: &str, rank: i64, incarnation: i64, seq: i64, payload: &[u8]) -> Outcome {
        ROOM.with_borrow_mut(|room| {
            if scan(payload, schema, &mut room.scratch).is_none() {
                room.scratch.shrink();
                return Outcome::Unread;
            }
            let (scratch, work) = (&room.scratch, &mut room.work);
            let outcome = self.delivery(source, rank, incarnation, |stream, writer| {
                if seq <= stream.last {
                    stream.counters.duplicates += 1;
                    return Outcome::Duplicate;
                }
                let read = Read { payload, scratch };
                let mut cleared = false;
                for event in &scratch.events {
                    cleared |= stream.event(writer, &read, event, work, self.limits.orphans);
                }
                stream.last = seq;
                Outcome::Applied(cleared)
            });
            room.scratch.shrink();
            work.shrink();
            outcome
        })
    }

    /// Notes that batches up to `last` are lost.
    pub fn gap(&self, source: &str, rank: i64, incarnation: i64, last: i64) -> Outcome {
        self.delivery(source, rank, incarnation, |stream, _| {
            if last <= stream.last {
                return Outcome::Duplicate;
            }
            stream.counters.gaps += 1;
            stream.last = last;
            Outcome::Applied(false)
        })
    }

    /// Forgets what a stream has told; `incarnation` begins.
    pub fn reset(&self, source: &str, rank: i64, incarnation: i64) -> Outcome {
        self.delivery(source, rank, incarnation, |stream, writer| {
            stream.begin(writer, incarnation);
            Outcome::Applied(false)
        })
    }

    fn delivery(
        &self,
        source: &str,
        rank: i64,
        incarnation: i64,
        apply: impl FnOnce(&mut Stream, &mut Writer<'_>) -> Outcome,
    ) -> Outcome {
        loop {
            let found = self.registry.read().find(source, rank).cloned();
            let stream = match found {
                Some(stream) => stream,
                None => match self.enlist(source, rank, incarnation) {
                    Ok(stream) => stream,
                    Err(outcome) => return outcome,
                },
            };
            let mut stream = stream.lock();
            if stream.gone {
                continue;
            }
            if incarnation < stream.incarnation {
                stream.counters.void += 1;
                return Outcome::Void;
            }
            let mut writer = self.gate.write();
            if incarnation > stream.incarnation {
                stream.begin(&mut writer, incarnation);
            }
            let outcome = apply(&mut stream, &mut writer);
            if let Some(member) = writer.members[stream.number as usize].as_mut() {
                member.blocks = stream.blocks;
            }
            drop(writer);
            self.settle(&mut stream);
            return outcome;
        }
    }
}
