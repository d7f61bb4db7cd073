//! The data-parallel ranks that the payloads of one stream state.

/// The ranks that the payloads of a stream have stated in its present incarnation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StatedRanks {
    /// The payloads have stated no rank.
    #[default]
    None,
    /// The payloads have stated one rank. It can differ from the rank under which the stream is known: an engine with one rank is often
    /// followed as rank 0.
    One(i64),
    /// The payloads have stated several ranks. Each rank has its own stream in the index.
    Several,
}

impl StatedRanks {
    /// Records the rank of a batch, if it states one. Returns whether the batch belongs to this stream, and not to the stream of another
    /// rank.
    #[inline]
    pub fn admit(&mut self, stated: Option<i64>) -> bool {
        match (*self, stated) {
            (Self::Several, _) => false,
            (Self::None, Some(rank)) => {
                *self = Self::One(rank);
                true
            }
            (Self::One(known), Some(rank)) => known == rank,
            (_, None) => true,
        }
    }
}
