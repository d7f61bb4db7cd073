//! Reading a snapshot: into a part of its own, which takes the index's place when all of it is there.

use std::io::Read;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::contexts::Context;
use crate::core::{Core, MAX_PLANES, Member, Worker};
use crate::gate::{BLOCKS_PER_HOLD, Gate, Writer};
use crate::index::{Index, Restored};
use crate::keys::Scheme;
use crate::planes::{Plane, Rule};
use crate::sets::MAX_STREAMS;
use crate::stream::{Block, Stream};
use crate::waiting::{Content, Waiting};

use super::frames::{Failure, FrameReader, bad};
use super::{CONTEXT, DENSE, DONE, FENCE, LABEL, MAX_CONTEXTS, PLANE, RUN, SEVERAL, STREAM, UNKNOWN, WAITING, WINDOW};

/// Replaces everything but the overlay, or nothing at all when it fails.
pub fn restore(index: &Index, from: impl Read) -> Result<(), Failure> {
    let gate = Gate::default();
    let mut restoring = Restoring {
        from: FrameReader::new(from)?,
        streams: Vec::new(),
        labels: Vec::new(),
        fences: Vec::new(),
    };
    let mut core = gate.write();
    while let Some(item) = restoring.from.next()? {
        match item {
            PLANE => restoring.plane(&mut core)?,
            STREAM => restoring.stream(&mut core, index.max_waiting())?,
            FENCE => restoring.fence(&mut core)?,
            LABEL => restoring.label(&mut core)?,
            other => return Err(unexpected(other)),
        }
    }
    drop(core);
    let Restoring {
        streams, labels, fences, ..
    } = restoring;
    index.replace(Restored {
        gate,
        streams,
        labels,
        fences,
    });
    Ok(())
}

fn unexpected(item: u8) -> Failure {
    bad(format!("an item of kind {item} is not expected here"))
}

struct Restoring<R> {
    from: FrameReader<R>,
    /// By their workers.
    streams: Vec<(Worker, Arc<Mutex<Stream>>)>,
    labels: Vec<(String, String)>,
    fences: Vec<(Worker, i64)>,
}

impl<R: Read> Restoring<R> {
    fn plane(&mut self, core: &mut Core) -> Result<(), Failure> {
        let from = &mut self.from;
        let tier = from.text()?;
        let (locality, ownership) = (from.option(FrameReader::text)?, from.option(FrameReader::text)?);
        let plane = Plane {
            tier,
            locality,
            ownership,
            group: from.signed()?,
        };
        let next = core.planes.len();
        match core.plane(plane) {
            Some(number) if number as usize == next => Ok(()),
            Some(_) => Err(bad("a plane is there twice")),
            None => Err(bad(format!("it has more than {MAX_PLANES} planes"))),
        }
    }

    fn worker(&mut self) -> Result<Worker, Failure> {
        Ok(Worker {
            source: self.from.text()?,
            rank: self.from.signed()?,
        })
    }

    fn stream(&mut self, core: &mut Core, max_waiting: usize) -> Result<(), Failure> {
        let worker = self.worker()?;
        if self.streams.last().is_some_and(|(last, _)| *last >= worker) {
            return Err(bad("its workers are not in order"));
        }
        let number = core.members.len();
        if number >= MAX_STREAMS {
            return Err(bad(format!("it has more than {MAX_STREAMS} streams")));
        }
        let mut stream = Stream::new(number as u32, self.from.signed()?);
        stream.last = self.from.signed()?;
        for _ in 0..self.from.count()? {
            let rule = self.rule()?;
            stream.rules.0.push(rule);
        }
        self.part(core, &mut stream, max_waiting)?;
        let (blocks, hybrid) = (stream.blocks, stream.rules.hybrid());
        let stream = Arc::new(Mutex::new(stream));
        let member = Member {
            worker: Arc::new(worker.clone()),
            model: None,
            hybrid: None,
            stream: Arc::downgrade(&stream),
            blocks,
        };
        core.join(number as u32, member);
        core.rule(number as u32, hybrid);
        self.streams.push((worker, stream));
        Ok(())
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
    fn part(&mut self, core: &mut Core, stream: &mut Stream, max_waiting: usize) -> Result<(), Failure> {
        let mut contexts: Vec<u32> = Vec::new();
        let mut room = RunRoom::default();
        let mut several = Several::default();
        loop {
            match self.from.byte()? {
                CONTEXT => {
                    if contexts.len() == MAX_CONTEXTS {
                        contexts.drain(..).for_each(|number| core.contexts.release(number, 1));
                    }
                    let context = self.context()?;
                    contexts.push(core.contexts.retain(context, 1));
                }
                RUN => self.run(core, stream, &contexts, &mut room)?,
                SEVERAL => {
                    let (hash, key) = (self.from.fixed()?, self.from.fixed()?);
                    let context = contexts[self.from.below(contexts.len() as u64, "context")? as usize];
                    several.add(core, stream, hash, (key, context))?;
                }
                WAITING => {
                    let waiting = self.waiting(core)?;
                    stream.counters.dropped += stream.waiting.push(waiting, max_waiting);
                }
                DONE => break,
                other => return Err(unexpected(other)),
            }
        }
        several.end(core, stream)?;
        contexts.into_iter().for_each(|number| core.contexts.release(number, 1));
        let blocks = self.from.count()?;
        let digest = u128::from(self.from.fixed()?) | u128::from(self.from.fixed()?) << 64;
        if (stream.blocks as u64, stream.digest) != (blocks, digest) {
            return Err(bad("the blocks of a stream are not those that its digest is of"));
        }
        Ok(())
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

    fn run(&mut self, core: &mut Core, stream: &mut Stream, contexts: &[u32], room: &mut RunRoom) -> Result<(), Failure> {
        let mut left = usize::from(u16::from_le_bytes([self.from.byte()?, self.from.byte()?]));
        let context = contexts[self.from.below(contexts.len() as u64, "context")? as usize];
        let planes = core.planes.len() as u64;
        room.planes.clear();
        for _ in 0..self.from.below(planes + 1, "block on so many planes:")? {
            let (plane, copies) = (
                self.from.below(planes, "plane")? as u16,
                self.from.below(1 << 32, "number of copies")? as u32,
            );
            room.planes.push((plane, copies));
        }
        while left > 0 {
            let count = left.min(BLOCKS_PER_HOLD);
            room.blocks.clear();
            for _ in 0..count {
                let (hash, key) = (self.from.fixed()?, self.from.fixed()?);
                let block = stream.asked(core, hash, key, context);
                room.blocks.push(block);
            }
            for block in &room.blocks {
                room.guess = stream
                    .put(core, block, &room.planes, room.guess)
                    .ok_or_else(|| bad("a block is there twice, or nowhere"))?
                    .wrapping_add(1);
            }
            left -= count;
        }
        Ok(())
    }

    fn waiting(&mut self, core: &Core) -> Result<Waiting, Failure> {
        let hash = self.from.fixed()?;
        let plane = self.from.below(core.planes.len() as u64, "plane")? as u16;
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
    fn fence(&mut self, writer: &mut Writer<'_>) -> Result<(), Failure> {
        let (worker, incarnation) = (self.worker()?, self.from.signed()?);
        if let Ok(at) = self.streams.binary_search_by(|(other, _)| other.cmp(&worker))
            && self.streams[at].1.lock().incarnation <= incarnation
        {
            let (_, stream) = self.streams.remove(at);
            let mut stream = stream.lock();
            stream.forget(writer);
            writer.leave(stream.number);
        }
        self.fences.push((worker, incarnation));
        Ok(())
    }

    fn label(&mut self, core: &mut Core) -> Result<(), Failure> {
        let (source, model) = (self.from.text()?, self.from.text()?);
        let first = self.streams.partition_point(|(worker, _)| worker.source < source);
        for (_, stream) in self.streams[first..].iter().take_while(|(worker, _)| worker.source == source) {
            core.label(stream.lock().number, Some(model.clone()));
        }
        self.labels.push((source, model));
        Ok(())
    }
}

#[derive(Default)]
struct RunRoom {
    planes: Vec<(u16, u32)>,
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
    fn add(&mut self, core: &Core, stream: &mut Stream, hash: u64, block: (u64, u32)) -> Result<(), Failure> {
        if hash != self.hash {
            self.end(core, stream)?;
            self.hash = hash;
        }
        self.blocks.push(block);
        Ok(())
    }

    fn end(&mut self, core: &Core, stream: &mut Stream) -> Result<(), Failure> {
        let known = self.blocks.is_empty() || stream.reorder(core, self.hash, &self.blocks);
        self.blocks.clear();
        if known {
            Ok(())
        } else {
            Err(bad("blocks of one hash have an order, but are not all there"))
        }
    }
}
