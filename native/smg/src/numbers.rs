//! The sequence numbers of the batches of one call.

use std::collections::HashMap;

use crate::messages::Batch;

/// Numbers the batches of one call from 0. All ranks share these numbers, since they share the call.
#[derive(Default)]
pub struct SequenceNumbers {
    next: u64,
    /// Maps each rank to the servicer's newest sequence number for it.
    newest: HashMap<Option<i32>, u64>,
}

impl SequenceNumbers {
    /// Returns the sequence number of a batch. If earlier batches are missing, first skips one number. Returns None if the batch is a
    /// repetition.
    pub fn number(&mut self, batch: &Batch) -> Option<u64> {
        let newest = self.newest.insert(batch.dp_rank, batch.sequence_number);
        let is_complete = match (&batch.snapshot, newest) {
            // A snapshot represents all earlier batches, even if it begins in the middle of a call.
            (Some(snapshot), _) if snapshot.index == 0 => snapshot.unknown_before == 0,
            (_, None) => batch.sequence_number == 0,
            (_, Some(newest)) if batch.sequence_number <= newest => {
                self.newest.insert(batch.dp_rank, newest);
                return None;
            }
            (_, Some(newest)) => batch.sequence_number == newest + 1,
        };
        let number = self.next + u64::from(!is_complete);
        self.next = number + 1;
        Some(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::Snapshot;

    fn batch(sequence_number: u64) -> Batch {
        Batch {
            sequence_number,
            ..Batch::default()
        }
    }

    fn part(sequence_number: u64, index: u32, unknown_before: u64) -> Batch {
        Batch {
            snapshot: Some(Snapshot { index, unknown_before }),
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
