//! Hashes of prompts as vLLM computes them, to find blocks that events name by their hash alone.
//!
//! vLLM 0.33.0, `v1/core/kv_cache_utils.py`: `hash[i] = H((hash[i-1], tokens[i], extra keys))`, the root is `H(seed)`, and H is SHA-256 or
//! XXH3-128 of the tuple, as pickle (protocol 5) or canonical CBOR encodes it. Events carry the last 8 bytes of a digest, big-endian. There
//! is one hash for every `unit` tokens (`hash_block_size`). With `lookahead` (`num_hash_lookahead_tokens`) a hash also covers that many
//! tokens after its block.
//!
//! No setting is needed: a scheme counts as known when it reproduces a hash that the engine has announced together with its tokens.

use xxhash_rust::xxh3::xxh3_128;

/// The seeds that are tried: vLLM's seed if `PYTHONHASHSEED` is not set, and the most frequent value of `PYTHONHASHSEED`.
const SEEDS: [&str; 2] = ["vllm-none-hash", "0"];
/// Maximum number of tokens after a block that a hash may cover. In vLLM, the multi-token predictor determines this number.
pub const MAX_LOOKAHEAD: usize = 64;
/// Maximum number of hash units of one block: 256 tokens in units of 4.
const MAX_UNITS: u32 = 64;
/// Maximum number of tokens of a sample: this many tokens fit in one frame of pickle protocol 5.
const MAX_SAMPLE: usize = 4_096;

/// A hash function that vLLM's setting `prefix_caching_hash_algo` can select.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Algorithm {
    is_sha: bool,
    is_cbor: bool,
}

/// The algorithms, in the order in which they are tried.
const ALGORITHMS: [Algorithm; 4] = [
    Algorithm {
        is_sha: true,
        is_cbor: false,
    },
    Algorithm {
        is_sha: true,
        is_cbor: true,
    },
    Algorithm {
        is_sha: false,
        is_cbor: false,
    },
    Algorithm {
        is_sha: false,
        is_cbor: true,
    },
];

/// Position in `ALGORITHMS` of the first algorithm that this build contains.
const FIRST_ALGORITHM: usize = if cfg!(feature = "sha256") { 0 } else { 2 };

#[cfg(feature = "sha256")]
fn sha256(bytes: &[u8]) -> [u8; 32] {
    let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
    digest.as_ref().try_into().expect("SHA-256 has 32 bytes")
}

#[cfg(not(feature = "sha256"))]
fn sha256(_: &[u8]) -> [u8; 32] {
    unreachable!("algorithms before the first available one are not used")
}

/// A digest: 32 bytes of SHA-256, or 16 bytes of XXH3-128.
#[derive(Clone, Copy, Debug)]
struct Digest {
    bytes: [u8; 32],
    length: u8,
}

impl Digest {
    fn compute(algorithm: Algorithm, encoded: &[u8]) -> Self {
        let mut bytes = [0; 32];
        let length = if algorithm.is_sha { 32 } else { 16 };
        if algorithm.is_sha {
            bytes = sha256(encoded);
        } else {
            bytes[..16].copy_from_slice(&xxh3_128(encoded).to_be_bytes());
        }
        Self { bytes, length }
    }

    fn as_slice(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }

    /// The hash as events carry it.
    fn external(&self) -> u64 {
        let last = self.as_slice().last_chunk().copied();
        u64::from_be_bytes(last.unwrap_or_default())
    }
}

/// Encodes values as Python's pickle and a canonical CBOR encoder do.
struct Encoder {
    bytes: Vec<u8>,
    is_cbor: bool,
}

/// Number of bytes before the contents of a frame of pickle protocol 5.
const FRAME_HEAD: usize = 11;

impl Encoder {
    fn begin(&mut self) {
        self.bytes.clear();
        if !self.is_cbor {
            self.bytes.extend([0x80, 5, 0x95]);
            self.bytes.extend([0; 8]);
        }
    }

    fn end(&mut self) -> &[u8] {
        if !self.is_cbor {
            self.bytes.push(b'.');
            let length = (self.bytes.len() - FRAME_HEAD) as u64;
            self.bytes[FRAME_HEAD - 8..FRAME_HEAD].copy_from_slice(&length.to_le_bytes());
        }
        &self.bytes
    }

    fn cbor_head(&mut self, kind: u8, value: u64) {
        match value {
            0..24 => self.bytes.push(kind | value as u8),
            24..0x100 => self.bytes.extend([kind | 24, value as u8]),
            0x100..0x1_0000 => {
                self.bytes.push(kind | 25);
                self.bytes.extend((value as u16).to_be_bytes());
            }
            _ => {
                self.bytes.push(kind | 26);
                self.bytes.extend((value as u32).to_be_bytes());
            }
        }
    }

    fn none(&mut self) {
        self.bytes.push(if self.is_cbor { 0xF6 } else { b'N' });
    }

    fn binary(&mut self, value: &[u8]) {
        if self.is_cbor {
            self.cbor_head(0x40, value.len() as u64);
            self.bytes.extend(value);
        } else {
            self.bytes.extend([b'C', value.len() as u8]);
            self.bytes.extend(value);
            self.bytes.push(0x94);
        }
    }

    fn text(&mut self, value: &str) {
        if self.is_cbor {
            self.cbor_head(0x60, value.len() as u64);
            self.bytes.extend(value.as_bytes());
        } else {
            match u8::try_from(value.len()) {
                Ok(length) => self.bytes.extend([0x8C, length]),
                Err(_) => {
                    self.bytes.push(b'X');
                    self.bytes.extend((value.len() as u32).to_le_bytes());
                }
            }
            self.bytes.extend(value.as_bytes());
            self.bytes.push(0x94);
        }
    }

    fn integer(&mut self, value: u32) {
        if self.is_cbor {
            return self.cbor_head(0, value.into());
        }
        match value {
            0..0x100 => self.bytes.extend([b'K', value as u8]),
            0x100..0x1_0000 => {
                self.bytes.push(b'M');
                self.bytes.extend((value as u16).to_le_bytes());
            }
            0x1_0000..0x8000_0000 => {
                self.bytes.push(b'J');
                self.bytes.extend(value.to_le_bytes());
            }
            _ => {
                self.bytes.extend([0x8A, 5]);
                self.bytes.extend(value.to_le_bytes());
                self.bytes.push(0);
            }
        }
    }

    /// Writes a tuple of `length` values; `items` writes the values.
    fn tuple(&mut self, length: usize, items: impl FnOnce(&mut Self)) {
        if self.is_cbor {
            self.cbor_head(0x80, length as u64);
            return items(self);
        }
        if length == 0 {
            return self.bytes.push(b')');
        }
        if length > 3 {
            self.bytes.push(b'(');
        }
        items(self);
        self.bytes.push(if length > 3 { b't' } else { 0x84 + length as u8 });
        self.bytes.push(0x94);
    }

    fn salt(&mut self, salt: Option<&str>) {
        match salt {
            None => self.none(),
            Some(salt) => self.tuple(1, |out| {
                out.tuple(2, |out| {
                    out.text("cache_salt");
                    out.text(salt);
                });
            }),
        }
    }

    fn integers(&mut self, values: &[u32]) {
        values.iter().for_each(|&value| self.integer(value));
    }
}

/// The scheme by which an engine hashes prompts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineHash {
    algorithm: usize,
    seed: usize,
    /// Number of tokens per hash: a prompt has one hash for every `unit` tokens.
    pub unit: u32,
    /// Number of tokens after a block that the block's hash also covers.
    pub lookahead: u32,
}

impl EngineHash {
    /// Approximate number of bytes that are hashed for a prompt of this many tokens.
    pub fn cost(&self, tokens: usize) -> usize {
        tokens / self.unit as usize * (64 + 5 * (self.unit + self.lookahead) as usize)
    }

    /// Writes the hashes at every multiple of `unit` tokens of a prompt into `out`.
    pub fn hash(&self, tokens: &[u32], salt: Option<&str>, out: &mut Vec<u64>) {
        out.clear();
        let algorithm = ALGORITHMS[self.algorithm];
        let mut encoder = Encoder {
            bytes: Vec::with_capacity(FRAME_HEAD + 64 + 5 * self.unit as usize),
            is_cbor: algorithm.is_cbor,
        };
        encoder.begin();
        encoder.text(SEEDS[self.seed]);
        let mut before = Digest::compute(algorithm, encoder.end());
        let (unit, ahead) = (self.unit as usize, self.lookahead as usize);
        let count = tokens.len().saturating_sub(ahead) / unit;
        for at in 0..count {
            let (block, rest) = tokens[at * unit..].split_at(unit);
            let salt = salt.filter(|_| at == 0);
            encoder.begin();
            encoder.tuple(3, |out| {
                out.binary(before.as_slice());
                out.tuple(unit, |out| out.integers(block));
                if ahead == 0 {
                    out.salt(salt);
                } else {
                    out.tuple(1 + ahead, |out| {
                        out.salt(salt);
                        out.integers(&rest[..ahead]);
                    });
                }
            });
            before = Digest::compute(algorithm, encoder.end());
            out.push(before.external());
        }
    }

    /// The numbers that represent the scheme in a snapshot.
    pub fn parts(&self) -> [u64; 4] {
        [
            self.algorithm as u64,
            self.seed as u64,
            self.unit.into(),
            self.lookahead.into(),
        ]
    }

    /// Returns the scheme for which `parts` returns these numbers; None if no scheme has them.
    pub fn of_parts([algorithm, seed, unit, lookahead]: [u64; 4]) -> Option<Self> {
        let is_known = (FIRST_ALGORITHM as u64..ALGORITHMS.len() as u64).contains(&algorithm) && seed < SEEDS.len() as u64;
        let is_valid = is_known && (1..=MAX_SAMPLE as u64).contains(&unit) && lookahead <= MAX_LOOKAHEAD as u64;
        is_valid.then_some(Self {
            algorithm: algorithm as usize,
            seed: seed as usize,
            unit: u32::try_from(unit).ok()?,
            lookahead: lookahead as u32,
        })
    }
}

/// The first block of a prompt as an engine announced it, without LoRA, salt and multimodal items.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Tokens of the block, followed by the further tokens that the block's hash covers.
    tokens: Box<[u32]>,
    size: u32,
    hash: u64,
}

impl Sample {
    /// Creates a sample from the first block of a prompt, and from the further tokens that the block's hash covers. Returns None if there
    /// are too many tokens.
    pub fn from_block(block: &[u32], lookahead: &[u32], hash: u64) -> Option<Self> {
        let fits = !block.is_empty() && block.len() <= MAX_SAMPLE && lookahead.len() <= MAX_LOOKAHEAD;
        fits.then(|| Self {
            tokens: [block, lookahead].concat().into(),
            size: block.len() as u32,
            hash,
        })
    }

    /// Heap bytes.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.tokens)
    }

    /// Whether the sample is the first block of a prompt with this salt.
    pub fn has(&self, hashing: &EngineHash, salt: &str) -> bool {
        let mut hashes = Vec::new();
        hashing.hash(&self.tokens, Some(salt), &mut hashes);
        self.size.is_multiple_of(hashing.unit) && hashes.get((self.size / hashing.unit) as usize - 1) == Some(&self.hash)
    }

    /// The scheme that reproduces the hash; None if no known scheme does.
    pub fn scheme(&self) -> Option<EngineHash> {
        let lookahead = self.tokens.len() as u32 - self.size;
        let units = (1..=self.size.min(MAX_UNITS)).filter(|count| self.size.is_multiple_of(*count));
        let mut hashes = Vec::new();
        for unit in units.map(|count| self.size / count) {
            for seed in 0..SEEDS.len() {
                for algorithm in FIRST_ALGORITHM..ALGORITHMS.len() {
                    let scheme = EngineHash {
                        algorithm,
                        seed,
                        unit,
                        lookahead,
                    };
                    scheme.hash(&self.tokens, None, &mut hashes);
                    if hashes.last() == Some(&self.hash) {
                        return Some(scheme);
                    }
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hashes of the tokens 1 to 32 in blocks of 16, as vLLM's own functions compute them.
    #[test]
    fn hashes_are_those_of_vllm() {
        let tokens: Vec<u32> = (1..=32).collect();
        let expected: [(usize, usize, [u64; 2]); 3] = [
            (0, 0, [1_403_909_460_543_360_175, 1_643_945_449_041_937_783]),
            (1, 0, [8_866_452_693_264_111_234, 807_986_237_951_177_663]),
            (0, 1, [7_536_218_907_325_174_565, 9_048_537_298_590_080_561]),
        ];
        for (algorithm, seed, hashes) in expected {
            let scheme = EngineHash {
                algorithm,
                seed,
                unit: 16,
                lookahead: 0,
            };
            let mut found = Vec::new();
            scheme.hash(&tokens, None, &mut found);
            assert_eq!(found, hashes);
            assert_eq!(
                Sample::from_block(&tokens[..16], &[], hashes[0]).unwrap().scheme(),
                Some(scheme.clone())
            );
            let wide = EngineHash { ..scheme };
            assert_eq!(Sample::from_block(&tokens, &[], hashes[1]).unwrap().scheme(), Some(wide));
        }
        let scheme = EngineHash {
            algorithm: 2,
            seed: 0,
            unit: 16,
            lookahead: 0,
        };
        let mut found = Vec::new();
        scheme.hash(&tokens, None, &mut found);
        assert_eq!(found, [13_245_370_832_660_520_926, 7_948_621_584_451_670_255]);
        assert_eq!(Sample::from_block(&tokens[..16], &[], 1).unwrap().scheme(), None);
    }
}
