//! The sequence numbers of the batches of one call.

use std::collections::HashMap;

use crate::messages::Batch;

/// Numbers the batches of one call from 0. All ranks share these numbers, since they share the call.
#[derive(Default)]
pub struct SequenceNumbers {
    next: u64,
    /// The newest batch of each rank.
    newest: HashMap<Option<i32>, Newest>,
}

/// What the next batch of a rank is compared with.
struct Newest {
    /// The servicer's sequence number.
    number: u64,
    /// Time at which the engine published the batch; None for a part of a snapshot, which the servicer creates.
    time: Option<f64>,
    /// Index of the part of a snapshot that must come next; None if the snapshot is complete.
    next_part: Option<u32>,
}

impl Newest {
    fn new(batch: &Batch) -> Self {
        let snapshot = batch.snapshot.as_ref();
        Self {
            number: batch.sequence_number,
            time: snapshot.is_none().then_some(batch.timestamp),
            next_part: snapshot
                .filter(|part| part.index < part.count.saturating_sub(1))
                .map(|part| part.index + 1),
        }
    }

    /// Whether a batch continues the newest one without a loss.
    fn is_followed_by(&self, batch: &Batch) -> bool {
        let part = batch.snapshot.as_ref().map(|part| part.index);
        batch.sequence_number == self.number + 1 && (self.next_part.is_none() || self.next_part == part)
    }
}

impl SequenceNumbers {
    /// Whether a batch comes from another incarnation of the engine: it has events and a number that was used before, and it is newer than
    /// the newest batch. A repetition is not newer; a record of the load has no events.
    pub fn is_restart(&self, batch: &Batch) -> bool {
        let is_reused =
            |newest: &Newest| batch.sequence_number <= newest.number && newest.time.is_some_and(|time| batch.timestamp > time);
        batch.snapshot.is_none() && !batch.events.is_empty() && self.newest.get(&batch.dp_rank).is_some_and(is_reused)
    }

    /// Whether the last part of each snapshot has arrived, or has been skipped.
    pub fn is_complete(&self) -> bool {
        self.newest.values().all(|newest| newest.next_part.is_none())
    }

    /// Returns the sequence number of a batch. If earlier batches or parts are missing, first skips one number. Returns None if the batch
    /// is a repetition.
    pub fn number(&mut self, batch: &Batch) -> Option<u64> {
        let is_complete = match (&batch.snapshot, self.newest.get(&batch.dp_rank)) {
            // A snapshot represents all earlier batches, even if it begins in the middle of a call.
            (Some(snapshot), _) if snapshot.index == 0 => snapshot.unknown_before == 0,
            (_, None) => batch.sequence_number == 0,
            (_, Some(newest)) if batch.sequence_number <= newest.number => return None,
            (_, Some(newest)) => newest.is_followed_by(batch),
        };
        self.newest.insert(batch.dp_rank, Newest::new(batch));
        let number = self.next + u64::from(!is_complete);
        self.next = number + 1;
        Some(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::{Event, Snapshot};

    fn batch(sequence_number: u64) -> Batch {
        Batch {
            sequence_number,
            ..Batch::default()
        }
    }

    fn part(sequence_number: u64, index: u32, unknown_before: u64) -> Batch {
        Batch {
            snapshot: Some(Snapshot {
                index,
                count: 0,
                unknown_before,
            }),
            ..batch(sequence_number)
        }
    }

    fn numbered(batches: &[Batch]) -> Vec<Option<u64>> {
        let mut numbers = SequenceNumbers::default();
        batches.iter().map(|batch| numbers.number(batch)).collect()
    }

    #[test]
    fn a_skipped_number_shows_a_loss() {
        let numbers = numbered(&[batch(0), batch(1), batch(5), batch(5), batch(3), batch(6)]);
        assert_eq!(numbers, [Some(0), Some(1), Some(3), None, None, Some(4)]);
        assert_eq!(numbered(&[batch(7), batch(8)]), [Some(1), Some(2)]);
    }

    #[test]
    fn a_snapshot_represents_what_came_before_it() {
        assert_eq!(
            numbered(&[part(8, 0, 0), part(9, 1, 0), batch(10)]),
            [Some(0), Some(1), Some(2)]
        );
        assert_eq!(
            numbered(&[part(8, 0, 3), part(9, 1, 3), batch(10)]),
            [Some(1), Some(2), Some(3)]
        );
        assert_eq!(numbered(&[batch(0), part(4, 0, 0)]), [Some(0), Some(1)]);
    }

    #[test]
    fn a_missing_part_of_a_snapshot_shows_a_loss() {
        let part = |sequence_number: u64, index: u32| {
            let mut batch = part(sequence_number, index, 0);
            batch.snapshot.as_mut().unwrap().count = 3;
            batch
        };
        assert_eq!(
            numbered(&[part(8, 0), part(9, 1), part(10, 2), batch(11)]),
            [Some(0), Some(1), Some(2), Some(3)]
        );
        assert_eq!(numbered(&[part(8, 0), part(9, 2), batch(10)]), [Some(0), Some(2), Some(3)]);
        assert_eq!(numbered(&[part(8, 0), batch(9), batch(10)]), [Some(0), Some(2), Some(3)]);

        let of = |rank: i32, batch: Batch| Batch {
            dp_rank: Some(rank),
            ..batch
        };
        let mut numbers = SequenceNumbers::default();
        let are_complete = [
            of(0, part(8, 0)),
            of(1, part(3, 0)),
            of(0, part(9, 1)),
            of(0, part(10, 2)),
            of(1, batch(4)),
        ]
        .map(|batch| {
            numbers.number(&batch);
            numbers.is_complete()
        });
        assert_eq!(are_complete, [false, false, false, false, true]);
    }

    #[test]
    fn a_later_batch_under_a_used_number_is_a_restart() {
        let at = |sequence_number: u64, timestamp: f64| Batch {
            timestamp,
            events: vec![Event::default()],
            ..batch(sequence_number)
        };
        let mut numbers = SequenceNumbers::default();
        assert!(!numbers.is_restart(&at(0, 5.0)));
        for batch in [at(0, 5.0), at(1, 6.0)] {
            numbers.number(&batch);
        }
        assert!(!numbers.is_restart(&at(0, 5.0)) && !numbers.is_restart(&at(1, 6.0)) && !numbers.is_restart(&at(2, 7.0)));
        assert!(numbers.is_restart(&at(0, 7.0)) && numbers.is_restart(&at(1, 7.0)));
        assert!(!numbers.is_restart(&part(0, 0, 0)));
        let load = Batch {
            timestamp: 7.0,
            ..batch(1)
        };
        assert!(!numbers.is_restart(&load));
        // The time of a snapshot is not a time of the engine.
        numbers.number(&part(8, 0, 0));
        assert!(!numbers.is_restart(&at(3, 9.0)));
    }

    #[test]
    fn ranks_are_counted_apart() {
        let of = |rank: i32, number: u64| Batch {
            dp_rank: Some(rank),
            ..batch(number)
        };
        assert_eq!(
            numbered(&[of(0, 0), of(1, 0), of(0, 1), of(1, 2)]),
            [Some(0), Some(1), Some(2), Some(4)]
        );
    }
}
