//! Events like one before: what a stream announces differs in hashes, parents and tokens, and in little else.
//!
//! The bytes around those of the last event of each kind are kept, with what was read from them. Where an event has the same bytes in
//! the same places, it says the same, and need not be read but for what differs.

use super::{Event, Kind};

/// Bytes of an event that are kept, those that differ apart. Real ones have 60 to 200.
const MOST: usize = 256;
/// Pieces of them: up to the hashes, up to the parent, up to the tokens, and what is behind.
const PIECES: usize = 4;

/// Where something lies in a payload.
pub type Place = (usize, usize);

/// Where the parts of an event lie that differ from one to the next. Those that an event does not have begin at 0.
#[derive(Clone, Copy, Debug, Default)]
pub struct Places {
    pub hashes: Place,
    pub parent: Place,
    pub tokens: Place,
}

/// One event.
#[derive(Debug)]
pub struct Model {
    bytes: [u8; MOST],
    ends: [usize; PIECES],
    /// Bytes of the payload before what is behind its last part.
    behind: usize,
    event: Event,
    /// Number of the schema that it was read by.
    schema: u64,
}

impl Model {
    fn new(kind: Kind) -> Self {
        Self {
            bytes: [0; MOST],
            ends: [0; PIECES],
            behind: 0,
            event: Event::new(kind),
            schema: 0,
        }
    }

    /// One of the pieces.
    #[inline]
    pub fn piece(&self, at: usize) -> &[u8] {
        let start = if at == 0 { 0 } else { self.ends[at - 1] };
        &self.bytes[start..self.ends[at]]
    }

    /// What an event like it says; the places of its texts are those of the model's.
    #[inline]
    pub fn event(&self) -> Event {
        self.event.clone()
    }

    /// Puts the texts where they are, in a payload that has the last piece at `behind`.
    #[inline]
    pub fn place(&self, event: &mut Event, behind: usize) {
        let texts = [
            &mut event.medium,
            &mut event.lora_name,
            &mut event.locality,
            &mut event.ownership,
            &mut event.spec_kind,
            &mut event.cache_salt,
        ];
        for text in texts {
            *text = text.and_then(|span| span.moved(self.behind, behind));
        }
    }

    /// Keeps an event from `start` to `end`, if it has its parts in their order and nothing else that differs.
    fn keep(&mut self, payload: &[u8], (start, end): Place, event: &Event, places: &Places, schema: u64) {
        let Places { hashes, parent, tokens } = *places;
        let pieces = match event.kind {
            Kind::Stored => [(start, hashes.0), (hashes.1, parent.0), (parent.1, tokens.0), (tokens.1, end)],
            Kind::Removed => [(start, hashes.0), (hashes.1, hashes.1), (hashes.1, hashes.1), (hashes.1, end)],
            Kind::Cleared => return,
        };
        let behind = pieces[PIECES - 1].0;
        let texts = [
            event.medium,
            event.lora_name,
            event.locality,
            event.ownership,
            event.spec_kind,
            event.cache_salt,
        ];
        let ordered = pieces.iter().all(|(start, end)| start <= end);
        if !ordered || event.keyed || event.extra_keys.is_some() || texts.iter().flatten().any(|text| text.start() < behind) {
            return;
        }
        let mut length = 0;
        for (place, piece) in self.ends.iter_mut().zip(pieces) {
            let piece = &payload[piece.0..piece.1];
            let Some(room) = self.bytes.get_mut(length..length + piece.len()) else {
                self.schema = 0;
                return;
            };
            room.copy_from_slice(piece);
            length += piece.len();
            *place = length;
        }
        (self.behind, self.event, self.schema) = (behind, event.clone(), schema);
    }
}

/// One of each kind.
#[derive(Debug)]
pub struct Models([Model; 2]);

impl Default for Models {
    fn default() -> Self {
        Self([Model::new(Kind::Stored), Model::new(Kind::Removed)])
    }
}

impl Models {
    /// The one that begins as `rest` does, for this schema.
    #[inline]
    pub fn find(&self, rest: &[u8], schema: u64) -> Option<&Model> {
        let like = |model: &&Model| model.schema == schema && rest.starts_with(model.piece(0));
        self.0.iter().find(like)
    }

    /// Keeps an event, if it can be a model.
    #[inline]
    pub fn keep(&mut self, payload: &[u8], place: Place, event: &Event, places: &Places, schema: u64) {
        let at = usize::from(event.kind == Kind::Removed);
        self.0[at].keep(payload, place, event, places, schema);
    }
}
