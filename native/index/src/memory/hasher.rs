//! The keyed hash of all tables. The hash values are uniform and depend on a secret, so that no peer can put many entries into one bucket.

use std::hash::{BuildHasher, Hasher, RandomState};

use xxhash_rust::xxh3::xxh3_64_with_seed;

const MULTIPLIER: u64 = 0x9E37_79B9_7F4A_7C15;

/// Secret random numbers of one index.
#[derive(Clone, Copy, Debug)]
pub struct Secret(pub(crate) u64, pub(crate) u64);

impl Secret {
    /// Creates secret random numbers.
    pub fn new() -> Self {
        Self(RandomState::new().hash_one(1), RandomState::new().hash_one(2) | 1)
    }

    /// The hash of a number, by which tables place it.
    #[inline]
    pub fn place(self, value: u64) -> u64 {
        let product = u128::from(value ^ self.0) * u128::from(self.1);
        let folded = (product as u64) ^ ((product >> 64) as u64);
        folded.wrapping_mul(MULTIPLIER) ^ (folded >> 32)
    }
}

impl Default for Secret {
    fn default() -> Self {
        Self::new()
    }
}

impl BuildHasher for Secret {
    type Hasher = KeyedHasher;

    #[inline]
    fn build_hasher(&self) -> KeyedHasher {
        KeyedHasher {
            secret: *self,
            state: self.0,
        }
    }
}

/// A hasher for keys that consist of several values.
#[derive(Clone, Copy, Debug)]
pub struct KeyedHasher {
    secret: Secret,
    state: u64,
}

impl Hasher for KeyedHasher {
    #[inline]
    fn write(&mut self, bytes: &[u8]) {
        self.state = xxh3_64_with_seed(bytes, self.state);
    }

    #[inline]
    fn write_u8(&mut self, value: u8) {
        self.write_u64(value.into());
    }

    #[inline]
    fn write_u16(&mut self, value: u16) {
        self.write_u64(value.into());
    }

    #[inline]
    fn write_u32(&mut self, value: u32) {
        self.write_u64(value.into());
    }

    #[inline]
    fn write_u64(&mut self, value: u64) {
        self.state = self.secret.place(self.state.rotate_left(23) ^ value);
    }

    #[inline]
    fn write_usize(&mut self, value: usize) {
        self.write_u64(value as u64);
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.secret.place(self.state)
    }
}
