//! Reading a snapshot: into a shared part of its own, which takes the index's place when all of it is there, or into that of an index.
//!
//! Others may read and write an index that absorbs a snapshot. Its shared part is locked for some blocks at a time, and never while bytes
//! are read: those may come from Python, whose lock others may hold while they wait for the shared part.

use std::io::Read;

use crate::contexts::Context;
use crate::core::{Core, MAX_PLANES, Worker};
use crate::gate::{BLOCKS_PER_HOLD, Gate};
use crate::index::{Index, Newcomer, Part};
use crate::keys::Scheme;
use crate::pages;
use crate::planes::{Plane, Rule};
use crate::sets::MAX_STREAMS;
use crate::stream::{Block, Stream};
use crate::waiting::{Content, Waiting};

use super::frames::{Failure, FrameReader, bad};
use super::{CONTEXT, DENSE, DONE, FENCE, LABEL, MAX_CONTEXTS, PLANE, RUN, SEVERAL, STREAM, UNKNOWN, WAITING, WINDOW};

/// Blocks that are read, and then placed while the shared part is locked: about a tenth of a millisecond, in which readers are let in.
pub(super) const BLOCKS_AT_ONCE: usize = 1024;

/// Replaces everything but the overlay, or nothing at all when it fails.
pub fn restore(index: &Index, from: impl Read) -> Result<(), Failure> {
    let (gate, mut part) = (Gate::default(), Part::default());
    gate.write().behind.strangers += 1;
    Restoring::new(from, &gate, None, index.max_waiting(), &mut part)?.all()?;
    gate.write().behind.strangers -= 1;
    index.replace(gate, part);
    Ok(())
}

/// Lets the streams of a snapshot join the shared part of an index, where nobody sees them yet. When it fails, `part` has those that have
/// joined so far, the last one perhaps with some of its blocks.
pub fn absorb(index: &Index, from: impl Read, part: &mut Part) -> Result<(), Failure> {
    Restoring::new(from, &index.gate, Some(index), index.max_waiting(), part)?.all()
}

fn unexpected(item: u8) -> Failure {
    bad(format!("an item of kind {item} is not expected here"))
}

struct Restoring<'a, R> {
    from: FrameReader<R>,
    /// Where the blocks go.
    gate: &'a Gate,
    /// The index that has this shared part; None where it has none yet.
    index: Option<&'a Index>,
    max_waiting: usize,
    part: &'a mut Part,
    /// Planes as they are numbered in the file, each with its number in the shared part once a block is on it.
    planes: Vec<(Plane, Option<u16>)>,
    /// Contexts as the present stream numbers them, each kept.
    contexts: Vec<u32>,
    room: RunRoom,
}

impl<'a, R: Read> Restoring<'a, R> {
    fn new(from: R, gate: &'a Gate, index: Option<&'a Index>, max_waiting: usize, part: &'a mut Part) -> Result<Self, Failure> {
        Ok(Self {
            from: FrameReader::new(from)?,
            gate,
            index,
            max_waiting,
            part,
            planes: Vec::new(),
            contexts: Vec::new(),
            room: RunRoom::default(),
        })
    }

    fn all(mut self) -> Result<(), Failure> {
        while let Some(item) = self.from.next()? {
            match item {
                PLANE => self.plane()?,
                STREAM => self.stream()?,
                FENCE => self.fence()?,
                LABEL => {
                    let label = (self.from.text()?, self.from.text()?);
                    self.part.labels.push(label);
                }
                other => return Err(unexpected(other)),
            }
        }
        Ok(())
    }

    fn plane(&mut self) -> Result<(), Failure> {
        let from = &mut self.from;
        let tier = from.text()?;
        let (locality, ownership) = (from.option(FrameReader::text)?, from.option(FrameReader::text)?);
        let plane = Plane {
            tier,
            locality,
            ownership,
            group: from.signed()?,
        };
        if self.planes.iter().any(|(known, _)| *known == plane) {
            return Err(bad("a plane is there twice"));
        }
        if self.planes.len() == MAX_PLANES {
            return Err(bad(format!("it has more than {MAX_PLANES} planes")));
        }
        self.planes.push((plane, None));
        Ok(())
    }

    /// The number in the shared part of the plane that the file names next.
    fn plane_named(&mut self) -> Result<u16, Failure> {
        let at = self.from.below(self.planes.len() as u64, "plane")?;
        let (plane, number) = &mut self.planes[at as usize];
        if let Some(number) = *number {
            return Ok(number);
        }
        let found = self.gate.write().plane(plane.clone());
        *number = found;
        found.ok_or_else(|| bad(format!("the index would have more than {MAX_PLANES} planes")))
    }

    fn worker(&mut self) -> Result<Worker, Failure> {
        Ok(Worker {
            source: self.from.text()?,
            rank: self.from.signed()?,
        })
    }

    fn stream(&mut self) -> Result<(), Failure> {
        let worker = self.worker()?;
        if self.part.streams.last().is_some_and(|last| *last.worker >= worker) {
            return Err(bad("its workers are not in order"));
        }
        let incarnation = self.from.signed()?;
        let newcomer = match self.index {
            Some(index) => index.welcome(worker, incarnation)?,
            None => self.join(worker, incarnation)?,
        };
        // From here on whoever has the part takes it out again if anything is wrong.
        self.part.streams.push(newcomer.clone());
        let mut stream = newcomer.stream.lock();
        stream.last = self.from.signed()?;
        for _ in 0..self.from.count()? {
            let rule = self.rule()?;
            stream.rules.0.push(rule);
        }
        let blocks = self.blocks(&mut stream);
        self.release_contexts();
        blocks?;
        let mut core = self.gate.write();
        core.rule(newcomer.number, stream.rules.hybrid());
        if let Some(member) = core.members[newcomer.number as usize].as_mut() {
            member.blocks = stream.blocks;
        }
        drop(core);
        if let Some(index) = self.index {
            index.count(&mut stream);
        }
        Ok(())
    }

    fn join(&self, worker: Worker, incarnation: i64) -> Result<Newcomer, Failure> {
        let mut core = self.gate.write();
        let number = core.members.len();
        if number >= MAX_STREAMS {
            return Err(bad(format!("it has more than {MAX_STREAMS} streams")));
        }
        Ok(Newcomer::join(&mut core, number as u32, worker, incarnation, None))
    }

    fn rule(&mut self) -> Result<(i64, Rule), Failure> {
        let group = self.from.signed()?;
        let rule = match self.from.byte()? {
            DENSE => Rule::Dense,
            WINDOW => Rule::Window(self.from.below(1 << 32, "window of")? as u32),
            UNKNOWN => Rule::Unknown,
            other => return Err(bad(format!("there is no rule {other}"))),
        };
        Ok((group, rule))
    }

    /// What belongs to a stream.
    fn blocks(&mut self, stream: &mut Stream) -> Result<(), Failure> {
        let mut several = Several::default();
        loop {
            match self.from.byte()? {
                CONTEXT => {
                    if self.contexts.len() == MAX_CONTEXTS {
                        self.release_contexts();
                    }
                    let context = self.context()?;
                    self.contexts.push(self.gate.write().contexts.retain(context, 1));
                }
                RUN => self.run(stream)?,
                SEVERAL => {
                    let (hash, key) = (self.from.fixed()?, self.from.fixed()?);
                    let context = self.context_named()?;
                    several.add(self.gate, stream, hash, (key, context))?;
                }
                WAITING => {
                    let waiting = self.waiting()?;
                    stream.counters.dropped += stream.waiting.push(waiting, self.max_waiting);
                }
                DONE => break,
                other => return Err(unexpected(other)),
            }
        }
        several.end(self.gate, stream)?;
        let blocks = self.from.count()?;
        let digest = u128::from(self.from.fixed()?) | u128::from(self.from.fixed()?) << 64;
        if (stream.blocks as u64, stream.digest) != (blocks, digest) {
            return Err(bad("the blocks of a stream are not those that its digest is of"));
        }
        Ok(())
    }

    fn release_contexts(&mut self) {
        let mut core = self.gate.write();
        for number in self.contexts.drain(..) {
            core.contexts.release(number, 1);
            core.pause(1);
        }
    }

    /// The number in the shared part of the context that the file names next.
    fn context_named(&mut self) -> Result<u32, Failure> {
        let at = self.from.below(self.contexts.len() as u64, "context")?;
        Ok(self.contexts[at as usize])
    }

    fn context(&mut self) -> Result<Context, Failure> {
        let scheme = self.scheme()?;
        Ok(Context {
            scheme,
            lora: self.from.fixed()?,
            salt: self.from.fixed()?,
        })
    }

    fn scheme(&mut self) -> Result<Scheme, Failure> {
        let size = self.from.below(1 << 32, "block size of")? as u32;
        let eagle = self.from.option(|_| Ok(()))?.is_some();
        if size == 0 {
            Err(bad("a block has no tokens"))
        } else {
            Ok(Scheme { size, eagle })
        }
    }

    fn run(&mut self, stream: &mut Stream) -> Result<(), Failure> {
        let mut left = usize::from(u16::from_le_bytes([self.from.byte()?, self.from.byte()?]));
        let context = self.context_named()?;
        self.room.planes.clear();
        for _ in 0..self.from.below(self.planes.len() as u64 + 1, "block on so many planes:")? {
            let plane = self.plane_named()?;
            let copies = self.from.below(1 << 32, "number of copies")? as u32;
            self.room.planes.push((plane, copies));
        }
        while left > 0 {
            let count = left.min(BLOCKS_AT_ONCE);
            self.room.read.clear();
            for _ in 0..count {
                self.room.read.push((self.from.fixed()?, self.from.fixed()?));
            }
            self.place(stream, context)?;
            left -= count;
        }
        Ok(())
    }

    /// Places the blocks that were read.
    fn place(&mut self, stream: &mut Stream, context: u32) -> Result<(), Failure> {
        let room = &mut self.room;
        let mut writer = self.gate.write();
        if pages::are_short() || stream.is_tight(room.read.len()) {
            let secret = writer.secret;
            writer.unlocked(|| {
                pages::prepare();
                stream.make_room(room.read.len(), secret);
            });
        }
        for few in room.read.chunks(BLOCKS_PER_HOLD) {
            let core: &mut Core = &mut writer;
            room.blocks.clear();
            room.blocks
                .extend(few.iter().map(|&(hash, key)| stream.asked(core, hash, key, context)));
            for block in &room.blocks {
                room.guess = stream
                    .put(core, block, &room.planes, room.guess)
                    .ok_or_else(|| bad("a block is there twice, or nowhere"))?
                    .wrapping_add(1);
            }
            writer.pause(few.len());
        }
        Ok(())
    }

    fn waiting(&mut self) -> Result<Waiting, Failure> {
        let hash = self.from.fixed()?;
        let plane = self.plane_named()?;
        let awaited = self.from.fixed()?;
        let content = match self.from.option(|_| Ok(()))? {
            Some(()) => Some(self.content()?),
            None if awaited != hash => return Err(bad("a hash without tokens waits for another")),
            None => None,
        };
        Ok(Waiting {
            hash,
            plane,
            awaited,
            content,
        })
    }

    fn content(&mut self) -> Result<Content, Failure> {
        let scheme = self.scheme()?;
        let (lora, salt) = (self.from.fixed()?, self.from.option(FrameReader::fixed)?);
        let bytes = self.from.bytes(scheme.window() as u64 * 4)?;
        let tokens = bytes
            .chunks_exact(4)
            .map(|token| u32::from_le_bytes([token[0], token[1], token[2], token[3]]))
            .collect();
        let mut extras = Vec::new();
        for _ in 0..self.from.count()? {
            extras.push(self.from.fixed()?);
        }
        Ok(Content {
            tokens,
            extras: extras.into(),
            scheme,
            lora,
            salt,
        })
    }

    /// A fence. A stream that it holds off was removed after it was written.
    fn fence(&mut self) -> Result<(), Failure> {
        let (worker, incarnation) = (self.worker()?, self.from.signed()?);
        let streams = &mut self.part.streams;
        if let Ok(at) = streams.binary_search_by(|other| (*other.worker).cmp(&worker))
            && streams[at].stream.lock().incarnation <= incarnation
        {
            let newcomer = streams.remove(at);
            match self.index {
                Some(index) => index.expel(&newcomer),
                None => newcomer.leave(self.gate),
            }
        }
        self.part.fences.push((worker, incarnation));
        Ok(())
    }
}

#[derive(Default)]
struct RunRoom {
    planes: Vec<(u16, u32)>,
    /// Hashes and keys.
    read: Vec<(u64, u64)>,
    blocks: Vec<Block>,
    /// Where the next record probably is: streams that hold the same chains have them in the same order.
    guess: u32,
}

/// Blocks of one hash, the oldest first.
#[derive(Default)]
struct Several {
    hash: u64,
    blocks: Vec<(u64, u32)>,
}

impl Several {
    fn add(&mut self, gate: &Gate, stream: &mut Stream, hash: u64, block: (u64, u32)) -> Result<(), Failure> {
        if hash != self.hash {
            self.end(gate, stream)?;
            self.hash = hash;
        }
        self.blocks.push(block);
        Ok(())
    }

    fn end(&mut self, gate: &Gate, stream: &mut Stream) -> Result<(), Failure> {
        let known = self.blocks.is_empty() || stream.reorder(gate, self.hash, &self.blocks);
        self.blocks.clear();
        if known {
            Ok(())
        } else {
            Err(bad("blocks of one hash have an order, but are not all there"))
        }
    }
}
