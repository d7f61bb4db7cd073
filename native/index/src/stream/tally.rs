//! Sums of the contributions of all copies that a stream holds. The sums do not depend on the order of events. So two parties that hold the
//! same copies have the same sums.

use std::ops::{AddAssign, SubAssign};

use crate::holders::placements::{AttestedGroup, Placement};

/// The two sums of a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// The digest: the sum over the copies on all placements. Publishers announce their own digest in heartbeats.
    pub digest: u128,
    /// The attestation: the sum over the copies on the device. Publishers attest the engine's cache by their own sum in heartbeats.
    pub attestation: u64,
}

impl Tally {
    /// The contribution of `copies` equal copies.
    pub fn times(self, copies: u32) -> Self {
        Self {
            digest: self.digest.wrapping_mul(copies.into()),
            attestation: self.attestation.wrapping_mul(copies.into()),
        }
    }
}

impl AddAssign for Tally {
    #[inline]
    fn add_assign(&mut self, other: Self) {
        self.digest = self.digest.wrapping_add(other.digest);
        self.attestation = self.attestation.wrapping_add(other.attestation);
    }
}

impl SubAssign for Tally {
    #[inline]
    fn sub_assign(&mut self, other: Self) {
        self.digest = self.digest.wrapping_sub(other.digest);
        self.attestation = self.attestation.wrapping_sub(other.attestation);
    }
}

/// The values with which the copies on one placement contribute to the sums.
#[derive(Clone, Copy, Debug)]
pub struct CopyMarks {
    digest: u64,
    pub attested: AttestedGroup,
}

impl CopyMarks {
    pub fn new(placement: &Placement) -> Self {
        Self {
            digest: placement.digest(),
            attested: placement.attestation(),
        }
    }

    /// The contribution of one copy of a block to the sums.
    #[inline]
    pub fn copy(self, hash: u64, key: u64) -> Tally {
        Tally {
            digest: mark(hash, key, self.digest),
            attestation: self.attested.copy(hash),
        }
    }

    /// The contribution of one copy of each of several blocks to the sums.
    #[inline]
    pub fn copies(self, hashes: &[u64], keys: &[u64]) -> Tally {
        let sum = |sum: u128, (&hash, &key): (&u64, &u64)| sum.wrapping_add(mark(hash, key, self.digest));
        Tally {
            digest: hashes.iter().zip(keys).fold(0, sum),
            attestation: self.attested.copies(hashes),
        }
    }
}

/// The contribution of one copy to a digest.
#[inline]
fn mark(hash: u64, key: u64, placement: u64) -> u128 {
    let fold = |a: u64, b: u64| {
        let product = u128::from(a) * u128::from(b);
        (product as u64) ^ ((product >> 64) as u64)
    };
    let low = fold(hash ^ 0xA076_1D64_78BD_642F, key ^ placement ^ 0xE703_7ED1_A0B4_28DB);
    let high = fold(hash ^ placement ^ 0x8EBC_6AF0_9C88_C6E3, key ^ 0x5899_65CC_7537_4CC3);
    u128::from(fold(high ^ 0x1D8E_4E27_C47D_124F, low | 1)) << 64 | u128::from(low)
}
