//! Frames of ZMTP 3: as they arrive over a connection, put together to messages in the buffer that they were read into; and as they
//! leave, with the payloads where they lie.
//!
//! The rule is <https://rfc.zeromq.org/spec/23/>: a byte of flags, a size of one byte or of eight, and the body.

use std::ops::Range;

/// More frames of the same message follow.
const MORE: u8 = 1;
/// The size takes eight bytes.
const LONG: u8 = 2;
const COMMAND: u8 = 4;
const SHORT_HEAD: usize = 2;
const LONG_HEAD: usize = 9;
/// Frames that one message may have. An engine's has three.
pub const MAX_FRAMES: usize = 64;
/// Bytes of the buffer at first, and of one whose connection says little.
const LEAST: usize = 16 << 10;
/// Bytes that are read at once at most; a larger message makes more room for itself as it arrives.
const USUAL: usize = 128 << 10;

/// Why nothing more can be made of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// Flags that the protocol does not have.
    Flags,
    /// A message larger than allowed.
    Large,
    /// A message of more than `MAX_FRAMES` frames.
    Frames,
}

/// What has arrived and was not taken yet. No more than twice the bytes of one message that is allowed are ever kept.
pub struct Arrivals {
    buffer: Vec<u8>,
    /// Where the first message begins, and where what has arrived ends.
    start: usize,
    end: usize,
    most: usize,
    frames: Vec<Range<usize>>,
    is_command: bool,
}

impl Arrivals {
    /// Of a connection on which a message may have `most` bytes, what its frames begin with included.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self {
            buffer: vec![0; LEAST],
            start: 0,
            end: 0,
            most,
            frames: Vec::new(),
            is_command: false,
        }
    }

    /// Where the next bytes are to be put; never empty. Only when `take` has found nothing more.
    pub fn room(&mut self) -> &mut [u8] {
        let waiting = self.end - self.start;
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, waiting);
        }
        if waiting == self.buffer.len() {
            // Never for what a size only claims.
            self.buffer.resize(2 * waiting, 0);
        } else if waiting == 0 && self.buffer.len() > USUAL {
            self.buffer.truncate(USUAL);
            self.buffer.shrink_to_fit();
        }
        let full = self.buffer.len();
        &mut self.buffer[self.end..full]
    }

    /// So many bytes were put there.
    pub fn arrived(&mut self, bytes: usize) {
        let asked = self.buffer.len() - self.end;
        self.end += bytes;
        debug_assert!(bytes <= asked);
        if bytes == asked && self.buffer.len() < USUAL {
            self.buffer.resize(2 * self.buffer.len(), 0);
        }
    }

    /// Takes the next message, whose frames are those of `frame`; false where it is not complete.
    ///
    /// # Errors
    /// What has arrived is no message, or one that is not allowed.
    pub fn take(&mut self) -> Result<bool, Broken> {
        self.frames.clear();
        let mut at = self.start;
        loop {
            let waiting = &self.buffer[at..self.end];
            let Some(&flags) = waiting.first() else { return Ok(false) };
            if flags & !(MORE | LONG | COMMAND) != 0 || (flags & COMMAND != 0 && (flags & MORE != 0 || at > self.start)) {
                return Err(Broken::Flags);
            }
            let head = if flags & LONG == 0 { SHORT_HEAD } else { LONG_HEAD };
            let Some(size) = waiting.get(1..head) else { return Ok(false) };
            let size = size.iter().fold(0, |size, &byte| size << 8 | u64::from(byte));
            let left = self.most.saturating_sub(at - self.start + head);
            let Some(size) = usize::try_from(size).ok().filter(|&size| size <= left) else {
                return Err(Broken::Large);
            };
            if self.frames.len() == MAX_FRAMES {
                return Err(Broken::Frames);
            }
            let body = at + head..at + head + size;
            if body.end > self.end {
                return Ok(false);
            }
            at = body.end;
            self.frames.push(body);
            if flags & MORE == 0 {
                self.is_command = flags & COMMAND != 0;
                self.start = at;
                return Ok(true);
            }
        }
    }

    /// Frames of the message that was taken last.
    pub fn frames(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        self.frames.iter().map(|frame| &self.buffer[frame.clone()])
    }

    /// Whether that was a command.
    #[must_use]
    pub fn is_command(&self) -> bool {
        self.is_command
    }

    /// Its last frame, if it has three, of which the first two are these.
    #[must_use]
    pub fn third(&self, first: &[u8], second: &[u8]) -> Option<&[u8]> {
        match &self.frames[..] {
            [a, b, c] if !self.is_command && self.buffer[b.clone()] == *second && self.buffer[a.clone()] == *first => {
                Some(&self.buffer[c.clone()])
            }
            _ => None,
        }
    }

    /// Bytes that are kept for what arrives.
    #[must_use]
    pub fn kept(&self) -> usize {
        self.buffer.len()
    }
}

/// Messages of a topic, a number and a payload, on their way out.
pub struct Departures<'a> {
    messages: &'a [(u64, &'a [u8])],
    /// What precedes each payload, one after the other.
    heads: Vec<u8>,
    /// By message, where its head ends.
    ends: Vec<usize>,
}

/// How far messages are out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Left {
    /// Messages that are out.
    pub messages: usize,
    /// Bytes of the next one that are.
    pub sent: usize,
}

impl<'a> Departures<'a> {
    /// Of messages by number.
    #[must_use]
    pub fn new(topic: &[u8], messages: &'a [(u64, &'a [u8])]) -> Self {
        let most = topic.len() + size_of::<u64>() + 3 * LONG_HEAD;
        let mut heads = Vec::with_capacity(messages.len() * most);
        let ends = messages.iter().map(|(number, payload)| {
            begin(MORE, topic.len(), &mut heads);
            heads.extend(topic);
            begin(MORE, size_of::<u64>(), &mut heads);
            heads.extend(number.to_be_bytes());
            begin(0, payload.len(), &mut heads);
            heads.len()
        });
        let ends = ends.collect();
        Self { messages, heads, ends }
    }

    /// Their bytes, but for the first `sent`, which are all of the first message.
    #[must_use]
    pub fn pieces(&self, sent: usize) -> Vec<&[u8]> {
        let mut found = Vec::with_capacity(2 * self.messages.len());
        let mut passed = sent;
        for (at, (_, payload)) in self.messages.iter().enumerate() {
            for piece in [self.head(at), *payload] {
                let skipped = passed.min(piece.len());
                passed -= skipped;
                if skipped < piece.len() {
                    found.push(&piece[skipped..]);
                }
            }
        }
        found
    }

    /// How far they are out when so many bytes are.
    #[must_use]
    pub fn left(&self, sent: usize) -> Left {
        let mut left = Left { messages: 0, sent };
        for (at, (_, payload)) in self.messages.iter().enumerate() {
            let size = self.head(at).len() + payload.len();
            if left.sent < size {
                break;
            }
            left = Left {
                messages: at + 1,
                sent: left.sent - size,
            };
        }
        left
    }

    fn head(&self, at: usize) -> &[u8] {
        let start = at.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.heads[start..self.ends[at]]
    }
}

/// The flags and the size that a frame begins with.
fn begin(flags: u8, size: usize, bytes: &mut Vec<u8>) {
    if let Ok(short) = u8::try_from(size) {
        bytes.extend([flags, short]);
    } else {
        bytes.push(flags | LONG);
        bytes.extend((size as u64).to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const MOST: usize = 1 << 20;

    fn written(frames: &[Vec<u8>], long: bool) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (at, frame) in frames.iter().enumerate() {
            let more = u8::from(at + 1 < frames.len());
            match u8::try_from(frame.len()) {
                Ok(size) if !long => bytes.extend([more, size]),
                _ => {
                    bytes.push(more | LONG);
                    bytes.extend((frame.len() as u64).to_be_bytes());
                }
            }
            bytes.extend(frame);
        }
        bytes
    }

    /// Messages of bytes that come in pieces, and why there were no more.
    fn read(bytes: &[u8], pieces: &[usize], most: usize) -> (Vec<Vec<Vec<u8>>>, Option<Broken>) {
        let (mut arrivals, mut found) = (Arrivals::new(most), Vec::new());
        let (mut rest, mut sizes) = (bytes, pieces.iter().cycle());
        loop {
            loop {
                match arrivals.take() {
                    Ok(true) => found.push(arrivals.frames().map(<[u8]>::to_vec).collect()),
                    Ok(false) => break,
                    Err(broken) => return (found, Some(broken)),
                }
            }
            if rest.is_empty() {
                return (found, None);
            }
            let room = arrivals.room();
            let size = rest.len().min(room.len()).min(*sizes.next().unwrap());
            room[..size].copy_from_slice(&rest[..size]);
            arrivals.arrived(size);
            rest = &rest[size..];
            assert!(arrivals.kept() <= USUAL.max(4 * most));
        }
    }

    proptest! {
        /// However bytes are cut on their way, the same messages come of them.
        #[test]
        fn pieces_make_no_difference(
            messages in vec((vec(vec(any::<u8>(), 0..400), 1..6), any::<bool>()), 0..20),
            pieces in vec(1..300usize, 1..10),
        ) {
            let bytes: Vec<u8> = messages.iter().flat_map(|(frames, long)| written(frames, *long)).collect();
            let sent: Vec<_> = messages.into_iter().map(|(frames, _)| frames).collect();
            prop_assert_eq!(read(&bytes, &pieces, MOST), (sent, None));
        }

        /// Whatever a peer sends, nothing but messages or a refusal comes of it, in bounded memory.
        #[test]
        fn any_bytes_are_messages_or_a_refusal(bytes in vec(any::<u8>(), 0..5_000), pieces in vec(1..300usize, 1..10)) {
            let (found, _) = read(&bytes, &pieces, 1_000);
            let size: usize = found.iter().flatten().map(|frame| frame.len() + SHORT_HEAD).sum();
            prop_assert!(size <= bytes.len());
        }
    }

    proptest! {
        /// However little the system takes at a time, what leaves arrives as it was.
        #[test]
        fn what_leaves_in_pieces_arrives(
            topic in vec(any::<u8>(), 0..300),
            payloads in vec(vec(any::<u8>(), 0..600), 1..8),
            rooms in vec(0..700usize, 1..10),
        ) {
            prop_assume!(rooms.iter().any(|&room| room > 0));
            let messages: Vec<(u64, &[u8])> = (7..).zip(payloads.iter().map(Vec::as_slice)).collect();
            let (mut bytes, mut left, mut waiting) = (Vec::new(), Left { messages: 0, sent: 0 }, &messages[..]);
            for room in rooms.iter().cycle() {
                let departures = Departures::new(&topic, waiting);
                let out: Vec<u8> = departures.pieces(left.sent).concat().into_iter().take(*room).collect();
                left = departures.left(left.sent + out.len());
                bytes.extend(out);
                waiting = &waiting[left.messages..];
                if waiting.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(left.sent, 0);
            let sent: Vec<_> = messages.iter().map(|(number, payload)| {
                vec![topic.clone(), number.to_be_bytes().to_vec(), payload.to_vec()]
            }).collect();
            prop_assert_eq!(read(&bytes, &[300], MOST), (sent, None));
        }
    }

    #[test]
    fn a_message_may_be_larger_than_what_is_read_at_once() {
        let frame = vec![7; 3 * USUAL];
        let bytes = written(&[vec![1], frame.clone()], false);
        assert_eq!(read(&bytes, &[USUAL], MOST).0, [vec![vec![1], frame]]);
    }

    #[test]
    fn room_for_it_is_made_as_it_arrives_and_given_back() {
        let mut arrivals = Arrivals::new(1 << 40);
        let mut claim = vec![LONG];
        claim.extend((1_u64 << 39).to_be_bytes());
        arrivals.room()[..claim.len()].copy_from_slice(&claim);
        arrivals.arrived(claim.len());
        assert_eq!(arrivals.take(), Ok(false));
        assert_eq!(arrivals.kept(), LEAST);

        let mut arrivals = Arrivals::new(1 << 30);
        let bytes = written(&[vec![7; 4 * USUAL]], false);
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            assert_eq!(arrivals.take(), Ok(false));
            let room = arrivals.room();
            let size = rest.len().min(room.len());
            room[..size].copy_from_slice(&rest[..size]);
            arrivals.arrived(size);
            rest = &rest[size..];
        }
        assert_eq!(arrivals.take(), Ok(true));
        assert_eq!(arrivals.take(), Ok(false));
        arrivals.room();
        assert_eq!(arrivals.kept(), USUAL);
    }

    #[test]
    fn what_is_not_allowed_is_refused() {
        let large = written(&[vec![0; 900], vec![0; 200]], false);
        assert_eq!(read(&large, &[5_000], 1_000), (vec![], Some(Broken::Large)));
        let many = written(&vec![vec![]; MAX_FRAMES + 1], false);
        assert_eq!(read(&many, &[5_000], 1_000), (vec![], Some(Broken::Frames)));
        assert_eq!(read(&[8, 0], &[9], 1_000), (vec![], Some(Broken::Flags)));
        // A command of several frames, and one in the midst of a message.
        assert_eq!(read(&[COMMAND | MORE, 0], &[9], 1_000), (vec![], Some(Broken::Flags)));
        assert_eq!(read(&[MORE, 0, COMMAND, 0], &[9], 1_000), (vec![], Some(Broken::Flags)));
    }

    #[test]
    fn a_batch_that_is_due_is_told_from_others() {
        let is = |frames: &[&[u8]]| {
            let frames: Vec<_> = frames.iter().map(|frame| frame.to_vec()).collect();
            let bytes = written(&frames, false);
            let mut arrivals = Arrivals::new(MOST);
            arrivals.room()[..bytes.len()].copy_from_slice(&bytes);
            arrivals.arrived(bytes.len());
            assert_eq!(arrivals.take(), Ok(true));
            arrivals.third(b"topic", b"number").map(<[u8]>::to_vec)
        };
        assert_eq!(is(&[b"topic", b"number", b"payload"]), Some(b"payload".to_vec()));
        for other in [
            &[&b"other"[..], b"number", b"payload"][..],
            &[b"topic", b"other", b"payload"],
            &[b"topic", b"number"],
            &[b"topic", b"number", b"payload", b"more"],
        ] {
            assert_eq!(is(other), None);
        }
    }
}
