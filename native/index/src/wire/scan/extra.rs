//! The field `extra_keys`: values besides tokens that the hash of each block covers in vLLM.

use crate::wire::msgpack::Reader;

/// Identifier of a multimodal item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Id<'a> {
    /// An integer from -2^63 to 2^64 - 1.
    Int(i128),
    /// A text, usually the hexadecimal digits of a digest.
    Text(&'a str),
    /// A digest.
    Bytes(&'a [u8]),
}

/// One extra key of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extra<'a> {
    /// A LoRA name or a cache salt.
    Text(&'a str),
    /// A multimodal item and its offset in the block.
    Pair(Id<'a>, i64),
    /// An integer from -2^63 to 2^64 - 1.
    Int(i128),
    /// A digest of prompt embeddings.
    Bytes(&'a [u8]),
}

/// Calls `visit` with each extra key in `raw` and the index of its block. Nil and an empty list have no extra keys.
///
/// Returns None if `raw` is not the range of `Event::extra_keys`.
pub fn extra_keys<'a>(raw: &'a [u8], visit: impl FnMut(usize, Extra<'a>)) -> Option<()> {
    let mut reader = Reader::new(raw, 0);
    walk(&mut reader, usize::MAX, visit)?;
    (reader.left() == 0).then_some(())
}

/// Calls `visit` with each extra key after the position of `reader`, for at most `max_blocks` blocks.
pub(super) fn walk<'a>(reader: &mut Reader<'a>, max_blocks: usize, mut visit: impl FnMut(usize, Extra<'a>)) -> Option<()> {
    let blocks = reader.array()?;
    if blocks > max_blocks {
        return None;
    }
    for block in 0..blocks {
        if reader.nil() {
            continue;
        }
        for _ in 0..reader.array()? {
            visit(block, item(reader)?);
        }
    }
    Some(())
}

fn item<'a>(reader: &mut Reader<'a>) -> Option<Extra<'a>> {
    Some(match reader.peek()? {
        0xA0..=0xBF | 0xD9..=0xDB => Extra::Text(reader.text()?),
        0xC4..=0xC6 => Extra::Bytes(reader.bin()?),
        0x90..=0x9F | 0xDC | 0xDD => {
            if reader.array()? != 2 {
                return None;
            }
            Extra::Pair(id(reader)?, reader.int()?.as_i64()?)
        }
        _ => Extra::Int(reader.int()?.as_i128()),
    })
}

fn id<'a>(reader: &mut Reader<'a>) -> Option<Id<'a>> {
    Some(match reader.peek()? {
        0xA0..=0xBF | 0xD9..=0xDB => Id::Text(reader.text()?),
        0xC4..=0xC6 => Id::Bytes(reader.bin()?),
        _ => Id::Int(reader.int()?.as_i128()),
    })
}
