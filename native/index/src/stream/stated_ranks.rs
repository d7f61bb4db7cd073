//! The data-parallel ranks that the payloads of one stream state.

/// The ranks that the payloads of a stream have stated since its incarnation began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StatedRanks {
    /// The payloads have stated no rank.
    #[default]
    None,
    /// The payloads have stated one rank, which can differ from the rank under which the stream is known: an engine of one rank is often
    /// followed as rank 0.
    One(i64),
    /// The payloads have stated several ranks, each of which has a separate stream in the index.
    Several,
}

impl StatedRanks {
    /// Records the rank of a batch, if it states one. Returns whether the batch concerns this one stream.
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
