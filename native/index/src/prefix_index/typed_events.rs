//! Applies events that a Rust program creates, without an encoded payload.

use super::deliveries::BUFFERS;
use super::{Outcome, PrefixIndex};
use crate::store::members::Worker;
use crate::wire::scan::{Event, Kind, Run, Span};

/// One event, as the scanner would create it.
#[derive(Debug)]
pub(crate) struct TypedEvent<'a> {
    pub(crate) fields: Event,
    hashes: &'a [u64],
    tokens: &'a [u32],
    /// The texts of the event, to which its spans refer. One unused byte is before the texts, since no span may begin at 0.
    texts: Vec<u8>,
}

impl<'a> TypedEvent<'a> {
    /// Creates an event without texts. Returns None if there are more hashes or tokens than 32 bits can count.
    pub(crate) fn new(kind: Kind, hashes: &'a [u64], tokens: &'a [u32]) -> Option<Self> {
        let run = |length: usize| {
            Some(Run {
                start: 0,
                length: u32::try_from(length).ok()?,
            })
        };
        let mut fields = Event::new(kind);
        (fields.hashes, fields.tokens) = (run(hashes.len())?, run(tokens.len())?);
        fields.keyable = fields.tokens.length;
        Some(Self {
            fields,
            hashes,
            tokens,
            texts: vec![0],
        })
    }

    /// Sets the field that `field` selects to a text, if there is one.
    pub(crate) fn add_text(&mut self, text: Option<impl AsRef<[u8]>>, field: fn(&mut Event) -> &mut Option<Span>) {
        let start = self.texts.len();
        if let Some(text) = text {
            self.texts.extend_from_slice(text.as_ref());
            *field(&mut self.fields) = Span::new(start, self.texts.len());
        }
    }
}

impl PrefixIndex {
    /// Applies an event as the next batch in the present incarnation of a worker.
    pub(crate) fn event(&self, worker: &Worker, event: TypedEvent<'_>) -> Outcome {
        let (source, rank) = (worker.source.as_str(), worker.rank);
        let incarnation = self.stream(source, rank).map_or(0, |stream| stream.lock().incarnation);
        BUFFERS.with_borrow_mut(|buffers| {
            buffers.scratch.clear();
            buffers.scratch.hashes.extend_from_slice(event.hashes);
            buffers.scratch.tokens.extend_from_slice(event.tokens);
            buffers.scratch.events.push(event.fields);
            let outcome = self.delivery(source, rank, incarnation, |stream, writer| {
                stream.grant(size_of_val(event.hashes) + size_of_val(event.tokens));
                let next = stream.last.saturating_add(1);
                buffers.apply(&event.texts, stream, writer, next, |_| true)
            });
            buffers.shrink();
            outcome
        })
    }
}
