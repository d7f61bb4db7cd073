//! Applies events that a Rust program has made, instead of payloads.

use super::deliveries::ROOM;
use super::{Outcome, PrefixIndex};
use crate::store::members::Worker;
use crate::wire::scan::{Event, Kind, Run, Span};

/// One event, as the scanner would read it.
#[derive(Debug)]
pub(crate) struct TypedEvent<'a> {
    pub(crate) fields: Event,
    hashes: &'a [u64],
    tokens: &'a [u32],
    /// The texts, behind one byte: no span begins at 0.
    texts: Vec<u8>,
}

impl<'a> TypedEvent<'a> {
    /// An event without texts. None for more hashes or tokens than can be counted in 32 bits.
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

    /// Sets a field to a text.
    pub(crate) fn add_text(&mut self, text: Option<impl AsRef<[u8]>>, field: fn(&mut Event) -> &mut Option<Span>) {
        let start = self.texts.len();
        if let Some(text) = text {
            self.texts.extend_from_slice(text.as_ref());
            *field(&mut self.fields) = Span::new(start, self.texts.len());
        }
    }
}

impl PrefixIndex {
    /// Applies an event as the next batch of the present incarnation of a worker.
    pub(crate) fn event(&self, worker: &Worker, event: TypedEvent<'_>) -> Outcome {
        let (source, rank) = (worker.source.as_str(), worker.rank);
        let incarnation = self.stream(source, rank).map_or(0, |stream| stream.lock().incarnation);
        ROOM.with_borrow_mut(|room| {
            room.scratch.clear();
            room.scratch.hashes.extend_from_slice(event.hashes);
            room.scratch.tokens.extend_from_slice(event.tokens);
            room.scratch.events.push(event.fields);
            let outcome = self.delivery(source, rank, incarnation, |stream, writer| {
                stream.grant(size_of_val(event.hashes) + size_of_val(event.tokens));
                let next = stream.last.saturating_add(1);
                room.apply(&event.texts, stream, writer, next, |_| true)
            });
            room.shrink();
            outcome
        })
    }
}
