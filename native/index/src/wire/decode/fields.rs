//! The fields of one event. Each field is read on its own, with its own type and limit.

use std::borrow::Cow;

use crate::step_counter;
use crate::wire::msgpack::{Int, Reader};
use crate::wire::scan::Limits;
use crate::wire::scan::layouts::unused_texts;

use super::refusal::Refusal;
use super::value::{bin, declared_length, head_of, integer, is_array, is_map, items, pairs, text, value};
use super::{BlockRemoved, BlockStored, Hashes, Heartbeat, Reason, Token, Value};

/// Maximum number of lists and maps in all free-form fields of one batch. Extra keys do not count if they have the form in which engines
/// send them.
const MAX_FREE_CONTAINERS: usize = 50_000;

/// The number of bytes that free-form fields of a batch may still take.
pub struct FreeFormBudget {
    limit: usize,
    bytes: usize,
    containers: usize,
}

impl FreeFormBudget {
    pub fn new(bytes: usize) -> Self {
        Self {
            limit: bytes,
            bytes,
            containers: MAX_FREE_CONTAINERS,
        }
    }

    fn take<'a>(&mut self, name: &Cow<'a, str>, raw: &[u8]) -> Result<(), Refusal<'a>> {
        let unit = "bytes; the limit max_free_form_bytes of a batch is";
        let refusal = || Refusal::exceeding(Reason::Oversized, name.clone(), raw.len(), unit, self.limit);
        self.bytes = self.bytes.checked_sub(raw.len()).ok_or_else(refusal)?;
        Ok(())
    }
}

/// The names and values of those fields of an event that are not decoded yet. Each method removes the field that it reads; at the end,
/// `rest` returns the remaining fields.
pub struct Fields<'f, 'a> {
    fields: Vec<(Cow<'a, str>, &'a [u8])>,
    limits: &'f Limits,
    free: &'f mut FreeFormBudget,
}

/// A hash as sent: a number or a digest.
enum Hash<'a> {
    /// The number modulo 2^64.
    Number(u64),
    Digest(&'a [u8]),
}

impl Hash<'_> {
    fn read(raw: &[u8]) -> Result<Hash<'_>, Reason> {
        let number = Reader::new(raw, 0).int().map(|number| Hash::Number(number.bits));
        number.or_else(|| bin(raw).map(Hash::Digest)).ok_or(Reason::BadField)
    }

    /// Returns the hash modulo 2^64. The hash of a digest is its last 8 bytes, as in vLLM.
    fn canonical<'a>(&self, name: &'static str) -> Result<u64, Refusal<'a>> {
        let end = match self {
            Self::Number(value) => return Ok(*value),
            Self::Digest(bytes) => bytes.last_chunk(),
        };
        let refusal = Refusal::for_value(Reason::BadField, name, "holds a digest of less than 8 bytes");
        end.map(|end| u64::from_be_bytes(*end)).ok_or(refusal)
    }
}

/// Returns the elements of a list, or `BadField` if the value has a different type.
fn list(raw: &[u8]) -> Result<impl Iterator<Item = &[u8]>, Reason> {
    if !is_array(head_of(raw)) {
        return Err(Reason::BadField);
    }
    Ok(items(raw))
}

/// Whether extra keys have the form in which engines send them: a list for each block, of texts, numbers, and lists of texts and numbers.
fn has_engine_form(raw: &[u8]) -> bool {
    let is_plain = |raw: &[u8]| integer(raw).is_some() || text(raw).is_ok_and(|text| text.is_some());
    let is_key = |raw: &[u8]| is_plain(raw) || list(raw).is_ok_and(|mut parts| parts.all(is_plain));
    let is_block = |raw: &[u8]| head_of(raw) == 0xC0 || list(raw).is_ok_and(|mut keys| keys.all(is_key));
    list(raw).is_ok_and(|mut blocks| blocks.all(is_block))
}

/// Reads a token id. Any other value becomes -1, which no prompt has. So the block with this value, and all blocks after it, have no key.
fn token(raw: &[u8]) -> Result<Token, Reason> {
    if let Some(value) = Reader::new(raw, 0).int() {
        return Ok(Token::Single(value));
    }
    if let Some(text) = text(raw)? {
        return Ok(token_of_text(text));
    }
    if matches!(head_of(raw), 0xC0 | 0xC2 | 0xC3 | 0xCA | 0xCB) {
        return Ok(Token::INVALID);
    }
    if declared_length(raw) != 2 {
        return Err(Reason::BadField);
    }
    let mut parts = list(raw)?.map(|part| Reader::new(part, 0).int());
    match (parts.next().flatten(), parts.next().flatten()) {
        (Some(one), Some(next)) => Ok(Token::Pair(Box::new([one, next]))),
        _ => Err(Reason::BadField),
    }
}

/// Number of digits of the digest of a multimodal item.
const DIGEST_DIGITS: usize = 64;
/// Number of digits of the largest 64-bit number.
const MAX_DIGITS: usize = 20;

fn token_of_text(text: &str) -> Token {
    if text.len() == DIGEST_DIGITS && text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Token::Item(text.to_ascii_lowercase());
    }
    let is_number = !text.is_empty() && text.len() <= MAX_DIGITS && text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse().ok().filter(|_| is_number) {
        Some(bits) => Token::Single(Int { bits, negative: false }),
        None => Token::INVALID,
    }
}

fn integers(raw: &[u8]) -> Result<Vec<i128>, Reason> {
    list(raw)?.map(|item| integer(item).ok_or(Reason::BadField)).collect()
}

impl<'f, 'a> Fields<'f, 'a> {
    pub fn new(fields: Vec<(Cow<'a, str>, &'a [u8])>, limits: &'f Limits, free: &'f mut FreeFormBudget) -> Self {
        Self { fields, limits, free }
    }

    pub fn stored(mut self) -> Result<BlockStored, Refusal<'a>> {
        let block_hashes = self.hashes()?;
        let (parent_block_hash, parent_block_digest) = self.parent()?;
        let block_size = self.integer("block_size")?;
        let block_size = block_size.ok_or(Refusal::for_value(Reason::BadField, "block_size", "is missing"))?;
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
            lacks_group: false,
            unused_texts: self.unused()?,
            lookahead_token_ids: self.lookahead()?,
            cache_salt: self.text("cache_salt")?,
            block_keys: self.keys()?,
            unknown_fields: self.rest()?,
        })
    }

    pub fn removed(mut self) -> Result<BlockRemoved, Refusal<'a>> {
        Ok(BlockRemoved {
            block_hashes: self.hashes()?,
            medium: self.text("medium")?,
            group_idx: self.integer("group_idx")?,
            locality: self.text("locality")?,
            ownership: self.text("ownership")?,
            heartbeat: self.heartbeat(),
            unknown_fields: self.rest()?,
        })
    }

    pub fn cleared(self) -> Result<Vec<(String, Value)>, Refusal<'a>> {
        self.rest()
    }

    /// Returns a field; None if the field is missing or nil.
    fn get(&self, name: &str) -> Option<&'a [u8]> {
        step_counter::count(self.fields.len());
        let found = self.fields.iter().find(|(known, _)| known == name);
        found.map(|(_, raw)| *raw).filter(|raw| head_of(raw) != 0xC0)
    }

    fn take(&mut self, name: &str) -> Option<&'a [u8]> {
        step_counter::count(self.fields.len());
        let at = self.fields.iter().position(|(known, _)| known == name)?;
        Some(self.fields.remove(at).1).filter(|raw| head_of(raw) != 0xC0)
    }

    /// Removes a field and reads it with `read`; None if the field is missing or nil.
    fn read<T>(
        &mut self,
        name: &'static str,
        expected: &'static str,
        read: impl FnOnce(&'a [u8]) -> Result<T, Reason>,
    ) -> Result<Option<T>, Refusal<'a>> {
        let raw = self.take(name);
        raw.map(|raw| read(raw).map_err(|reason| Refusal::for_value(reason, name, expected)))
            .transpose()
    }

    /// Rejects a field with one entry per block if its number of entries exceeds the maximum number of hashes of an event.
    fn check_length(&self, name: &'static str) -> Result<(), Refusal<'a>> {
        let (count, limit) = (self.get(name).map_or(0, declared_length), self.limits.max_hashes);
        if count > limit {
            let unit = "entries; the limit max_hashes is";
            return Err(Refusal::exceeding(Reason::TooManyHashes, name, count, unit, limit));
        }
        Ok(())
    }

    fn integer(&mut self, name: &'static str) -> Result<Option<i128>, Refusal<'a>> {
        self.read(name, "is not an integer", |raw| integer(raw).ok_or(Reason::BadField))
    }

    fn text(&mut self, name: &'static str) -> Result<Option<String>, Refusal<'a>> {
        let read = |raw| Ok(text(raw)?.ok_or(Reason::BadField)?.to_owned());
        self.read(name, "is not a string", read)
    }

    fn hashes(&mut self) -> Result<Hashes, Refusal<'a>> {
        let name = "block_hashes";
        self.check_length(name)?;
        let expected = "is not a list of integers or digests";
        let found = self.read(name, expected, |raw| {
            list(raw)?.map(Hash::read).collect::<Result<Vec<_>, _>>()
        })?;
        let found = found.ok_or(Refusal::for_value(Reason::BadField, name, expected))?;
        let digest = |hash: &Hash<'_>| match hash {
            Hash::Digest(bytes) => Some(bytes.to_vec()),
            Hash::Number(_) => None,
        };
        Ok(Hashes {
            values: found.iter().map(|hash| hash.canonical(name)).collect::<Result<_, _>>()?,
            digests: found
                .iter()
                .map(digest)
                .collect::<Option<Vec<_>>>()
                .filter(|all| !all.is_empty()),
        })
    }

    fn parent(&mut self) -> Result<(Option<u64>, Option<Vec<u8>>), Refusal<'a>> {
        let name = "parent_block_hash";
        let Some(hash) = self.read(name, "is neither an integer nor a digest", Hash::read)? else {
            return Ok((None, None));
        };
        let digest = match hash {
            Hash::Digest(bytes) => Some(bytes.to_vec()),
            Hash::Number(_) => None,
        };
        Ok((Some(hash.canonical(name)?), digest))
    }

    /// Reads token ids; see `Token`. Nil means that they are unknown: vLLM-Ascend's AscendStoreConnector sends it.
    fn tokens(&mut self) -> Result<Vec<Token>, Refusal<'a>> {
        let (name, expected) = ("token_ids", "is not a list of token ids");
        if self.fields.iter().any(|(known, raw)| known == name && head_of(raw) == 0xC0) {
            self.take(name);
            return Ok(Vec::new());
        }
        let found = self.read(name, expected, |raw| list(raw)?.map(token).collect::<Result<_, _>>())?;
        found.ok_or(Refusal::for_value(Reason::BadField, name, expected))
    }

    fn extra_keys(&mut self) -> Result<Option<Vec<Option<Vec<Value>>>>, Refusal<'a>> {
        let name = "extra_keys";
        self.check_length(name)?;
        let Some(raw) = self.take(name) else { return Ok(None) };
        self.free.take(&name.into(), raw)?;
        let mut free = usize::MAX;
        let has_engine_form = has_engine_form(raw);
        let left = if has_engine_form {
            &mut free
        } else {
            &mut self.free.containers
        };
        let block = |block| match block {
            Value::Nil => Ok(None),
            Value::List(keys) => Ok(Some(keys)),
            _ => Err(Reason::BadField),
        };
        let found = match value(raw, self.limits.max_nesting - 1, left) {
            Ok(Value::List(blocks)) => blocks.into_iter().map(block).collect::<Result<_, _>>(),
            Ok(_) => Err(Reason::BadField),
            Err(reason) => Err(reason),
        };
        found
            .map(Some)
            .map_err(|reason| Refusal::for_value(reason, name, "is not a list of lists or nil"))
    }

    fn lookahead(&mut self) -> Result<Option<Vec<Vec<i128>>>, Refusal<'a>> {
        let name = "lookahead_token_ids";
        self.check_length(name)?;
        let read = |raw| list(raw)?.map(integers).collect();
        self.read(name, "is not a list of lists of integers", read)
    }

    /// Reads the texts that the index does not use, since an invalid text must be refused, as in Python.
    fn unused(&mut self) -> Result<Vec<(&'static str, Option<String>)>, Refusal<'a>> {
        unused_texts().map(|name| Ok((name, self.text(name)?))).collect()
    }

    /// Reads a field with `read`; a field that `read` refuses stays in the event as an unknown field.
    fn read_or_leave<T>(&mut self, name: &str, read: impl FnOnce(&'a [u8]) -> Option<T>) -> Option<T> {
        let found = self.get(name).map(read);
        if let None | Some(Some(_)) = found {
            self.take(name);
        }
        found.flatten()
    }

    fn keys(&mut self) -> Result<Option<Vec<u64>>, Refusal<'a>> {
        let name = "block_keys";
        self.check_length(name)?;
        let read = |raw| Ok(integers(raw)?.into_iter().map(|key| key as u64).collect());
        self.read(name, "is not a list of integers", read)
    }

    /// Reads a heartbeat of kvevents. A value of another form stays in the event as an unknown field.
    fn heartbeat(&mut self) -> Option<Heartbeat> {
        self.read_or_leave("heartbeat", heartbeat)
    }

    /// Returns the fields that no method has removed, within the limits.
    fn rest(mut self) -> Result<Vec<(String, Value)>, Refusal<'a>> {
        // Only Python's structs have fields with these names; nil means that the field is missing.
        for name in ["unknown_fields", "block_digests", "parent_block_digest"] {
            if self.get(name).is_none() {
                self.take(name);
            }
        }
        for (name, raw) in &self.fields {
            self.free.take(name, raw)?;
        }
        let depth = self.limits.max_nesting - 1;
        let left = &mut self.free.containers;
        let mut found = Vec::with_capacity(self.fields.len());
        for (name, raw) in self.fields {
            match value(raw, depth, left) {
                Ok(value) => found.push((name.into_owned(), value)),
                Err(reason) => return Err(Refusal::for_value(reason, name, "holds a value that cannot be read")),
            }
        }
        Ok(found)
    }
}

/// Maximum interval between heartbeats, in seconds.
const MAX_HEARTBEAT: f64 = 86_400.0;

fn heartbeat(raw: &[u8]) -> Option<Heartbeat> {
    if !is_map(head_of(raw)) {
        return None;
    }
    let (mut digest, mut every, mut trust, mut reason, mut incarnation) = (None, None, "EXACT", "", 0);
    let mut attestation = None;
    for (name, raw) in pairs(raw).ok()? {
        let text = |longest: usize| text(raw).ok()?.filter(|text| text.chars().count() <= longest);
        match name {
            "digest" => {
                let is_digest =
                    |text: &&str| text.len() == 32 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
                let is_nil = head_of(raw) == 0xC0;
                digest = Some(if is_nil { None } else { Some(text(32).filter(is_digest)?) });
            }
            "every" => {
                let seconds = match value(raw, 0, &mut 0).ok()? {
                    Value::Int(seconds) => seconds as f64,
                    Value::Float(seconds) => seconds,
                    _ => return None,
                };
                every = Some(seconds).filter(|seconds| *seconds > 0.0 && *seconds <= MAX_HEARTBEAT);
                every?;
            }
            "trust" => trust = text(32)?,
            "reason" => reason = text(1_000)?,
            "incarnation" => incarnation = u64::try_from(integer(raw)?).ok()?,
            "attestation" if head_of(raw) != 0xC0 => attestation = Some(u64::try_from(integer(raw)?).ok()?),
            _ => {}
        }
    }
    Some(Heartbeat {
        digest: digest?.map(str::to_owned),
        every: every?,
        trust: trust.to_owned(),
        reason: reason.to_owned(),
        incarnation,
        attestation,
    })
}
