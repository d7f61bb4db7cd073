//! Writes and reads numbers and texts, as bytes in frames with checksums.

use std::io::{self, Read, Write};

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

const MAGIC: [u8; 8] = *b"KVEINDEX";
/// The version of the format that is written; no other version can be read.
pub const VERSION: u32 = 8;
/// Maximum number of payload bytes of a frame.
const MAX_FRAME_BYTES: usize = 1 << 20;
const HEADER_BYTES: usize = 12;

/// Why a snapshot could not be read.
#[derive(Debug)]
pub enum Failure {
    /// The bytes could not be read.
    Io(io::Error),
    /// The bytes are not a usable snapshot; the text says why.
    Bad(String),
}

impl std::fmt::Display for Failure {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Io(error) => error.fmt(out),
            Self::Bad(what) => out.write_str(what),
        }
    }
}

impl std::error::Error for Failure {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io(error) => Some(error),
            Self::Bad(_) => None,
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::UnexpectedEof {
            failure("the snapshot is truncated")
        } else {
            Self::Io(error)
        }
    }
}

/// Returns the failure for bytes that are not a usable snapshot; `what` says why.
pub fn failure(what: impl Into<String>) -> Failure {
    Failure::Bad(what.into())
}

fn head() -> [u8; HEADER_BYTES] {
    let mut head = [0; HEADER_BYTES];
    head[..8].copy_from_slice(&MAGIC);
    head[8..].copy_from_slice(&VERSION.to_le_bytes());
    head
}

fn sum_of(payload: &[u8], before: u64) -> u64 {
    xxh3_64_with_seed(payload, before.wrapping_add(payload.len() as u64))
}

/// Collects bytes, and writes them as frames.
pub struct FrameWriter<W> {
    out: W,
    /// Bytes that are not in a frame yet.
    pub buffer: Vec<u8>,
    sum: u64,
}

impl<W: Write> FrameWriter<W> {
    /// Writes the head of the file.
    pub fn new(mut out: W) -> io::Result<Self> {
        out.write_all(&head())?;
        Ok(Self {
            out,
            buffer: Vec::with_capacity(MAX_FRAME_BYTES + MAX_FRAME_BYTES / 4),
            sum: xxh3_64(&head()),
        })
    }

    /// Writes all complete frames to the output.
    pub fn drain(&mut self) -> io::Result<()> {
        let whole = self.buffer.len() - self.buffer.len() % MAX_FRAME_BYTES;
        self.emit(whole)
    }

    fn emit(&mut self, length: usize) -> io::Result<()> {
        for frame in self.buffer[..length].chunks(MAX_FRAME_BYTES) {
            self.sum = sum_of(frame, self.sum);
            self.out.write_all(&header(frame.len(), self.sum))?;
            self.out.write_all(frame)?;
        }
        self.buffer.drain(..length);
        Ok(())
    }

    /// Writes the remaining bytes as a frame, then the end of the file.
    pub fn finish(mut self) -> io::Result<W> {
        self.emit(self.buffer.len())?;
        self.out.write_all(&header(0, sum_of(&[], self.sum)))?;
        self.out.flush()?;
        Ok(self.out)
    }

    pub fn byte(&mut self, value: u8) {
        self.buffer.push(value);
    }

    pub fn fixed(&mut self, value: u64) {
        self.buffer.extend_from_slice(&value.to_le_bytes());
    }

    pub fn signed(&mut self, value: i64) {
        self.fixed(value as u64);
    }

    pub fn count(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.buffer.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.buffer.push(value as u8);
    }

    pub fn text(&mut self, text: &str) {
        self.count(text.len() as u64);
        self.buffer.extend_from_slice(text.as_bytes());
    }

    pub fn option<T>(&mut self, value: Option<T>, write: impl FnOnce(&mut Self, T)) {
        self.byte(u8::from(value.is_some()));
        if let Some(value) = value {
            write(self, value);
        }
    }
}

fn header(length: usize, sum: u64) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..4].copy_from_slice(&(length as u32).to_le_bytes());
    header[4..].copy_from_slice(&sum.to_le_bytes());
    header
}

/// Reads the output of `FrameWriter`. The reader returns bytes of a frame only after it has verified the frame's checksum.
pub struct FrameReader<R> {
    from: R,
    frame: Vec<u8>,
    at: usize,
    sum: u64,
}

impl<R: Read> FrameReader<R> {
    /// Reads the head of the file.
    pub fn new(mut from: R) -> Result<Self, Failure> {
        let mut found = Vec::with_capacity(HEADER_BYTES);
        (&mut from).take(HEADER_BYTES as u64).read_to_end(&mut found)?;
        if found.len() < HEADER_BYTES || found[..8] != MAGIC {
            return Err(failure("the data is not a snapshot of an index"));
        }
        let version = u32::from_le_bytes(array(&found[8..]));
        match version {
            VERSION => Ok(Self {
                from,
                frame: Vec::new(),
                at: 0,
                sum: xxh3_64(&head()),
            }),
            ..VERSION => Err(failure(format!(
                "snapshot version {version} is too old: this release of kvevents reads only version {VERSION}"
            ))),
            _ => Err(failure(format!(
                "snapshot version {version} is too new: this release of kvevents reads only version {VERSION}"
            ))),
        }
    }

    /// Reads the next frame. Returns false at the end of the file.
    fn advance(&mut self) -> Result<bool, Failure> {
        let mut header = [0; HEADER_BYTES];
        self.from.read_exact(&mut header)?;
        let (length, sum) = (
            u32::from_le_bytes(array(&header[..4])) as usize,
            u64::from_le_bytes(array(&header[4..])),
        );
        if length > MAX_FRAME_BYTES {
            return Err(failure("the snapshot is damaged: a frame is longer than the maximum"));
        }
        self.frame.clear();
        self.at = 0;
        (&mut self.from).take(length as u64).read_to_end(&mut self.frame)?;
        if self.frame.len() < length {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        if sum_of(&self.frame, self.sum) != sum {
            return Err(failure("the snapshot is damaged: a checksum does not match"));
        }
        self.sum = sum;
        if length == 0 && self.from.read(&mut [0])? > 0 {
            return Err(failure("data follows the end of the snapshot"));
        }
        Ok(length > 0)
    }

    /// Reads the byte that begins the next item; None at the end of the snapshot.
    pub fn next(&mut self) -> Result<Option<u8>, Failure> {
        if self.at == self.frame.len() && !self.advance()? {
            return Ok(None);
        }
        self.at += 1;
        Ok(Some(self.frame[self.at - 1]))
    }

    pub fn byte(&mut self) -> Result<u8, Failure> {
        self.next()?
            .ok_or_else(|| failure("the last item of the snapshot is incomplete"))
    }

    #[inline]
    pub fn fixed(&mut self) -> Result<u64, Failure> {
        if let Some(bytes) = self.frame.get(self.at..self.at + 8) {
            self.at += 8;
            return Ok(u64::from_le_bytes(array(bytes)));
        }
        let mut bytes = [0; 8];
        for byte in &mut bytes {
            *byte = self.byte()?;
        }
        Ok(u64::from_le_bytes(bytes))
    }

    pub fn signed(&mut self) -> Result<i64, Failure> {
        Ok(self.fixed()? as i64)
    }

    pub fn count(&mut self) -> Result<u64, Failure> {
        let mut value = 0;
        for shift in (0..u64::BITS).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7F) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(failure("a count has too many bytes"))
    }

    /// Reads a count that must be below `bound`; `what` names the count in the failure.
    pub fn below(&mut self, bound: u64, what: &str) -> Result<u64, Failure> {
        let value = self.count()?;
        if value < bound {
            Ok(value)
        } else {
            Err(failure(format!("invalid {what} {value}: expected less than {bound}")))
        }
    }

    /// Reads `length` bytes. Memory is allocated as the bytes arrive, since a damaged file can state any length.
    pub fn bytes(&mut self, length: u64) -> Result<Vec<u8>, Failure> {
        let mut found = Vec::new();
        while (found.len() as u64) < length {
            found.push(self.byte()?);
            let more = usize::try_from(length - found.len() as u64)
                .unwrap_or(usize::MAX)
                .min(self.frame.len() - self.at);
            found.extend_from_slice(&self.frame[self.at..self.at + more]);
            self.at += more;
        }
        Ok(found)
    }

    pub fn text(&mut self) -> Result<String, Failure> {
        let length = self.count()?;
        String::from_utf8(self.bytes(length)?).map_err(|_| failure("a name is not UTF-8 text"))
    }

    pub fn option<T>(&mut self, read: impl FnOnce(&mut Self) -> Result<T, Failure>) -> Result<Option<T>, Failure> {
        match self.byte()? {
            0 => Ok(None),
            1 => read(self).map(Some),
            other => Err(failure(format!("invalid presence byte {other}: expected 0 or 1"))),
        }
    }
}

/// Copies exactly `N` bytes.
fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut found = [0; N];
    found.copy_from_slice(bytes);
    found
}
