//! The reasons why an event or a batch is rejected. The messages equal those of `kvevents.wire`, except for messages that msgspec writes.

use std::borrow::Cow;

use super::{MAX_RAW_BYTES, Reason, Rejected};

/// Maximum number of characters of a `Rejected::detail`.
const MAX_DETAIL: usize = 256;
/// Maximum number of characters of a name in a detail, since peers choose names.
const MAX_DETAIL_NAME: usize = 64;

/// Why a part of a batch is rejected. A refusal becomes text only when it is recorded, since a peer can cause very many rejections.
#[derive(Debug)]
pub(super) struct Refusal<'a> {
    reason: Reason,
    detail: Detail<'a>,
}

#[derive(Debug)]
enum Detail<'a> {
    Sentence(&'static str),
    Predicate(Cow<'a, str>, &'static str),
    Above(Cow<'a, str>, usize, &'static str, usize),
    Tag(&'a str),
}

impl<'a> Refusal<'a> {
    pub fn new(reason: Reason, sentence: &'static str) -> Self {
        let detail = Detail::Sentence(sentence);
        Self { reason, detail }
    }

    /// Creates a refusal of a value. `expected` is the predicate of the message, if the reason has no predicate of its own.
    pub fn for_value(reason: Reason, subject: impl Into<Cow<'a, str>>, expected: &'static str) -> Self {
        let words = match reason {
            Reason::Malformed => "is truncated, or no MessagePack",
            Reason::TooDeep => "is nested deeper than the limit max_nesting",
            Reason::Oversized => "has more lists and maps than the 50000 that a batch may have",
            _ => expected,
        };
        let detail = Detail::Predicate(subject.into(), words);
        Self { reason, detail }
    }

    /// Creates a refusal of a value above a limit; `unit` names the unit and the limit.
    pub fn exceeding(reason: Reason, subject: impl Into<Cow<'a, str>>, count: usize, unit: &'static str, limit: usize) -> Self {
        let detail = Detail::Above(subject.into(), count, unit, limit);
        Self { reason, detail }
    }

    /// Creates a refusal of an event with an unknown tag.
    pub fn unknown_tag(tag: &'a str) -> Self {
        let (reason, detail) = (Reason::UnknownTag, Detail::Tag(tag));
        Self { reason, detail }
    }

    /// Returns the record of this refusal.
    pub fn rejected(&self, raw: &[u8], index: Option<usize>) -> Rejected {
        let short = |text: &str| text.chars().take(MAX_DETAIL_NAME).collect::<String>();
        let detail = match &self.detail {
            Detail::Sentence(words) => (*words).to_owned(),
            Detail::Predicate(subject, words) => format!("{} {words}", short(subject)),
            Detail::Above(subject, count, unit, limit) => format!("{} has {count} {unit} {limit}", short(subject)),
            Detail::Tag(tag) => format!("event type {:?}", short(tag)).chars().take(MAX_DETAIL).collect(),
        };
        Rejected {
            reason: self.reason,
            detail,
            index,
            raw: raw[..raw.len().min(MAX_RAW_BYTES)].to_vec(),
            count: 1,
        }
    }
}
