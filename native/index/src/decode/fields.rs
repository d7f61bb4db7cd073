//! The fields of one event: each is read alone, with its own type and within its own limit.

use crate::scan::{Int, Limits, Reader};

use super::value::{NIL, bin, declared, head_of, integer, is_array, is_map, items, pairs, text, value};
use super::{BlockRemoved, BlockStored, Hashes, Heartbeat, Reason, Token, Value};

/// Bytes of free form that a batch may still have.
pub struct FreeBytes(pub usize);

impl FreeBytes {
    fn take(&mut self, raw: &[u8]) -> Result<(), Reason> {
        self.0 = self.0.checked_sub(raw.len()).ok_or(Reason::Oversized)?;
        Ok(())
    }
}

/// Fields by name, as they came. Each method takes one; `rest`, called last, what nothing took.
pub struct Fields<'a> {
    fields: Vec<(String, &'a [u8])>,
    limits: &'a Limits,
    free: &'a mut FreeBytes,
}

/// A hash, or a digest.
enum Hash<'a> {
    Number(i128),
    Digest(&'a [u8]),
}

impl Hash<'_> {
    fn read(raw: &[u8]) -> Result<Hash<'_>, Reason> {
        let number = integer(raw).map(Hash::Number);
        number.or_else(|| bin(raw).map(Hash::Digest)).ok_or(Reason::BadField)
    }

    /// Modulo 2^64; of a digest the last 8 bytes, as vLLM itself shortens them.
    fn canonical(&self) -> Result<u64, Reason> {
        match self {
            Self::Number(value) => Ok(*value as u64),
            Self::Digest(bytes) => bytes.last_chunk().map(|end| u64::from_be_bytes(*end)).ok_or(Reason::BadField),
        }
    }
}

/// The elements of a list; `BadField` for another type.
fn list(raw: &[u8]) -> Result<impl Iterator<Item = &[u8]>, Reason> {
    if !is_array(head_of(raw)) {
        return Err(Reason::BadField);
    }
    Ok(items(raw))
}

fn integers(raw: &[u8]) -> Result<Vec<i128>, Reason> {
    list(raw)?.map(|item| integer(item).ok_or(Reason::BadField)).collect()
}

impl<'a> Fields<'a> {
    pub fn new(fields: Vec<(String, &'a [u8])>, limits: &'a Limits, free: &'a mut FreeBytes) -> Self {
        Self { fields, limits, free }
    }

    pub fn stored(mut self) -> Result<BlockStored, Reason> {
        let block_hashes = self.hashes()?;
        let (parent_block_hash, parent_block_digest) = self.parent()?;
        let block_size = self.integer("block_size")?.ok_or(Reason::BadField)?;
        Ok(BlockStored {
            block_hashes,
            parent_block_hash,
            parent_block_digest,
            token_ids: self.tokens()?,
            block_size,
            lora_id: self.integer("lora_id")?,
            medium: self.text("medium")?,
            lora_name: self.text("lora_name")?,
            extra_keys: self.extra_keys()?,
            group_idx: self.integer("group_idx")?,
            kv_cache_spec_kind: self.text("kv_cache_spec_kind")?,
            kv_cache_spec_sliding_window: self.integer("kv_cache_spec_sliding_window")?,
            locality: self.text("locality")?,
            ownership: self.text("ownership")?,
            session_id: self.text("session_id")?,
            lookahead_token_ids: self.lookahead()?,
            cache_salt: self.text("cache_salt")?,
            block_keys: self.keys()?,
            unrecognised: self.rest()?,
        })
    }

    pub fn removed(mut self) -> Result<BlockRemoved, Reason> {
        Ok(BlockRemoved {
            block_hashes: self.hashes()?,
            medium: self.text("medium")?,
            group_idx: self.integer("group_idx")?,
            locality: self.text("locality")?,
            ownership: self.text("ownership")?,
            heartbeat: self.heartbeat(),
            unrecognised: self.rest()?,
        })
    }

    pub fn cleared(self) -> Result<Vec<(String, Value)>, Reason> {
        self.rest()
    }

    /// The field unless it is missing or nil.
    fn get(&self, name: &str) -> Option<&'a [u8]> {
        let found = self.fields.iter().find(|(known, _)| known == name);
        found.map(|(_, raw)| *raw).filter(|raw| head_of(raw) != 0xC0)
    }

    fn take(&mut self, name: &str) -> Option<&'a [u8]> {
        let found = self.get(name);
        self.fields.retain(|(known, _)| known != name);
        found
    }

    /// Fields with one entry per block have no more entries than an event may have hashes.
    fn check_length(&self, raw: &[u8]) -> Result<(), Reason> {
        (declared(raw) <= self.limits.max_hashes)
            .then_some(())
            .ok_or(Reason::TooManyHashes)
    }

    fn integer(&mut self, name: &str) -> Result<Option<i128>, Reason> {
        let raw = self.take(name);
        raw.map(|raw| integer(raw).ok_or(Reason::BadField)).transpose()
    }

    fn text(&mut self, name: &str) -> Result<Option<String>, Reason> {
        let Some(raw) = self.take(name) else { return Ok(None) };
        text(raw)?.map(|text| Some(text.to_owned())).ok_or(Reason::BadField)
    }

    fn hashes(&mut self) -> Result<Hashes, Reason> {
        let raw = self.take("block_hashes").unwrap_or(NIL);
        self.check_length(raw)?;
        let found = list(raw)?.map(Hash::read).collect::<Result<Vec<_>, _>>()?;
        let digest = |hash: &Hash<'_>| match hash {
            Hash::Digest(bytes) => Some(bytes.to_vec()),
            Hash::Number(_) => None,
        };
        Ok(Hashes {
            values: found.iter().map(Hash::canonical).collect::<Result<_, _>>()?,
            digests: found
                .iter()
                .map(digest)
                .collect::<Option<Vec<_>>>()
                .filter(|all| !all.is_empty()),
        })
    }

    fn parent(&mut self) -> Result<(Option<u64>, Option<Vec<u8>>), Reason> {
        let Some(raw) = self.take("parent_block_hash") else {
            return Ok((None, None));
        };
        let hash = Hash::read(raw)?;
        let digest = match hash {
            Hash::Digest(bytes) => Some(bytes.to_vec()),
            Hash::Number(_) => None,
        };
        Ok((Some(hash.canonical()?), digest))
    }

    /// Token ids: integers, under EAGLE pairs of them (SGLang), or decimal texts (TensorRT-LLM).
    fn tokens(&mut self) -> Result<Vec<Token>, Reason> {
        let raw = self.take("token_ids").unwrap_or(NIL);
        // Texts that are no token ids are found after everything that has no type of a token.
        let mut is_bad = false;
        let mut token = |raw: &[u8]| {
            if let Some(value) = Reader::new(raw, 0).int() {
                return Ok(Token::Single(value));
            }
            if let Some(text) = text(raw)? {
                let is_number = !text.is_empty() && text.len() <= 20 && text.bytes().all(|byte| byte.is_ascii_digit());
                let value = text.parse::<u64>().ok().filter(|_| is_number);
                is_bad |= value.is_none();
                let bits = value.unwrap_or(0);
                return Ok(Token::Single(Int { bits, negative: false }));
            }
            if declared(raw) != 2 {
                return Err(Reason::BadField);
            }
            let mut parts = list(raw)?.map(|part| Reader::new(part, 0).int());
            match (parts.next().flatten(), parts.next().flatten()) {
                (Some(one), Some(next)) => Ok(Token::Pair(Box::new([one, next]))),
                _ => Err(Reason::BadField),
            }
        };
        let found = list(raw)?.map(&mut token).collect::<Result<_, _>>()?;
        if is_bad { Err(Reason::BadField) } else { Ok(found) }
    }

    fn extra_keys(&mut self) -> Result<Option<Vec<Option<Vec<Value>>>>, Reason> {
        let Some(raw) = self.take("extra_keys") else { return Ok(None) };
        self.check_length(raw)?;
        self.free.take(raw)?;
        let Value::List(blocks) = value(raw, self.limits.max_nesting - 1)? else {
            return Err(Reason::BadField);
        };
        let block = |block| match block {
            Value::Nil => Ok(None),
            Value::List(keys) => Ok(Some(keys)),
            _ => Err(Reason::BadField),
        };
        blocks.into_iter().map(block).collect::<Result<_, _>>().map(Some)
    }

    fn lookahead(&mut self) -> Result<Option<Vec<Vec<i128>>>, Reason> {
        let Some(raw) = self.take("lookahead_token_ids") else {
            return Ok(None);
        };
        self.check_length(raw)?;
        list(raw)?.map(integers).collect::<Result<_, _>>().map(Some)
    }

    fn keys(&mut self) -> Result<Option<Vec<u64>>, Reason> {
        let Some(raw) = self.take("block_keys") else { return Ok(None) };
        self.check_length(raw)?;
        Ok(Some(integers(raw)?.into_iter().map(|key| key as u64).collect()))
    }

    /// A heartbeat of ours; what is none stays where it is, as a field that is not known.
    fn heartbeat(&mut self) -> Option<Heartbeat> {
        let found = self.get("heartbeat").map(heartbeat);
        if let None | Some(Some(_)) = found {
            self.take("heartbeat");
        }
        found.flatten()
    }

    /// What no method took, read as far as the limits allow.
    fn rest(mut self) -> Result<Vec<(String, Value)>, Reason> {
        // Names of Python's own events: nil says nothing.
        for name in ["unrecognised", "block_digests", "parent_block_digest"] {
            if self.get(name).is_none() {
                self.take(name);
            }
        }
        for (_, raw) in &self.fields {
            self.free.take(raw)?;
        }
        let depth = self.limits.max_nesting - 1;
        let fields = self.fields.into_iter();
        fields.map(|(name, raw)| Ok((name, value(raw, depth)?))).collect()
    }
}

/// Seconds that heartbeats can be apart.
const MAX_EVERY: f64 = 86_400.0;

fn heartbeat(raw: &[u8]) -> Option<Heartbeat> {
    if !is_map(head_of(raw)) {
        return None;
    }
    let (mut digest, mut every, mut trust, mut reason, mut incarnation) = (None, None, "EXACT", "", 0);
    for (name, raw) in pairs(raw, usize::MAX).ok()? {
        let text = |longest: usize| text(raw).ok()?.filter(|text| text.chars().count() <= longest);
        match name.as_str() {
            "digest" => {
                let is_digest =
                    |text: &&str| text.len() == 32 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
                digest = Some(text(32).filter(is_digest)?);
            }
            "every" => {
                let seconds = match value(raw, 0).ok()? {
                    Value::Int(seconds) => seconds as f64,
                    Value::Float(seconds) => seconds,
                    _ => return None,
                };
                every = Some(seconds).filter(|seconds| *seconds > 0.0 && *seconds <= MAX_EVERY);
                every?;
            }
            "trust" => trust = text(32)?,
            "reason" => reason = text(1_000)?,
            "incarnation" => incarnation = u64::try_from(integer(raw)?).ok()?,
            _ => {}
        }
    }
    Some(Heartbeat {
        digest: digest?.to_owned(),
        every: every?,
        trust: trust.to_owned(),
        reason: reason.to_owned(),
        incarnation,
    })
}
