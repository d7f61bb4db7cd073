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
    number: u64,
}

impl Model {
    fn new(kind: Kind) -> Self {
        Self {
            bytes: [0; MOST],
            ends: [0; PIECES],
            behind: 0,
            event: Event::new(kind),
            schema: 0,
            number: 0,
        }
    }

    /// Of no other of this scratch; above 0.
    #[inline]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// One of the pieces.
    #[inline]
    pub fn piece(&self, at: usize) -> &[u8] {
        let start = if at == 0 { 0 } else { self.ends[at - 1] };
        &self.bytes[start..self.ends[at]]
    }

    /// What it announces.
    #[inline]
    pub fn kind(&self) -> Kind {
        self.event.kind
    }

    /// What an event like it says, in a payload that has the last piece at `behind`.
    #[inline]
    pub fn event(&self, behind: usize) -> Event {
        let mut event = self.event.clone();
        if behind != self.behind {
            self.move_texts(&mut event, behind);
        }
        event
    }

    fn move_texts(&self, event: &mut Event, behind: usize) {
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

    /// Keeps an event from `start` to `end`, if it has its parts in their order and nothing else that differs: whether it has.
    fn keep(&mut self, payload: &[u8], (start, end): Place, event: &Event, places: &Places, schema: u64) -> bool {
        let Places { hashes, parent, tokens } = *places;
        let pieces = match event.kind {
            Kind::Stored => [(start, hashes.0), (hashes.1, parent.0), (parent.1, tokens.0), (tokens.1, end)],
            Kind::Removed => [(start, hashes.0), (hashes.1, hashes.1), (hashes.1, hashes.1), (hashes.1, end)],
            Kind::Cleared => return false,
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
            return false;
        }
        let mut length = 0;
        for (place, piece) in self.ends.iter_mut().zip(pieces) {
            let piece = &payload[piece.0..piece.1];
            let Some(room) = self.bytes.get_mut(length..length + piece.len()) else {
                self.schema = 0;
                return false;
            };
            room.copy_from_slice(piece);
            length += piece.len();
            *place = length;
        }
        (self.behind, self.event, self.schema) = (behind, event.clone(), schema);
        true
    }
}

/// Whether `rest` begins with a piece. Pieces are short, so that to call a function for it takes longer than to compare them.
#[inline]
pub fn starts_with(rest: &[u8], piece: &[u8]) -> bool {
    let Some(start) = rest.get(..piece.len()) else {
        return false;
    };
    match (start.last_chunk(), piece.last_chunk()) {
        (Some(end), Some(other)) => {
            let same = |(one, other): (&[u8; 16], &[u8; 16])| u128::from_ne_bytes(*one) == u128::from_ne_bytes(*other);
            start.as_chunks().0.iter().zip(piece.as_chunks().0).all(same) && same((end, other))
        }
        _ => match (
            start.first_chunk(),
            piece.first_chunk(),
            start.last_chunk(),
            piece.last_chunk(),
        ) {
            (Some(start), Some(piece), Some(end), Some(other)) => {
                let bits = |one: &[u8; 8], other: &[u8; 8]| u64::from_ne_bytes(*one) ^ u64::from_ne_bytes(*other);
                bits(start, piece) | bits(end, other) == 0
            }
            _ => start == piece,
        },
    }
}

/// One of each kind.
#[derive(Debug)]
pub struct Models {
    kinds: [Model; 2],
    /// Numbers given so far.
    numbers: u64,
}

impl Default for Models {
    fn default() -> Self {
        Self {
            kinds: [Model::new(Kind::Stored), Model::new(Kind::Removed)],
            numbers: 0,
        }
    }
}

impl Models {
    /// The one that begins as `rest` does, for this schema.
    #[inline]
    pub fn find(&self, rest: &[u8], schema: u64) -> Option<&Model> {
        let like = |model: &&Model| model.schema == schema && starts_with(rest, model.piece(0));
        self.kinds.iter().find(like)
    }

    /// Keeps an event, if it can be a model: its number, or 0.
    #[inline]
    pub fn keep(&mut self, payload: &[u8], place: Place, event: &Event, places: &Places, schema: u64) -> u64 {
        let model = &mut self.kinds[usize::from(event.kind == Kind::Removed)];
        if !model.keep(payload, place, event, places, schema) {
            return 0;
        }
        self.numbers += 1;
        model.number = self.numbers;
        self.numbers
    }
}
